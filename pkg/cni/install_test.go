// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// The configurations of primary plugins, in the forms that are seen in the wild, and some that nobody should write.
var lists = map[string]string{
	"indented": `{
  "cniVersion": "1.0.0",
  "name": "cbr0",
  "plugins": [
    {
      "type": "flannel",
      "delegate": {"hairpinMode": true, "isDefaultGateway": true},
      "big": 12345678901234567890,
      "float": 1.50
    },
    {
      "type": "portmap",
      "capabilities": {
        "portMappings": true
      }
    }
  ]
}
`,
	"compact":       `{"cniVersion":"0.3.1","name":"k8s","plugins":[{"type":"ptp","html":"<a>&amp;é"}]}`,
	"odd spaces":    "\n\t{ \"name\" : \"x\" ,\r\n\"plugins\" : [ {\"type\":\"bridge\"} ,\n\n {\"type\" : \"bandwidth\" }\t]\n, \"cniVersion\":\"0.4.0\" , \"unknown\":[1, 2,{}] }  \n\n",
	"keys behind":   `{"plugins":[{"type":"bridge","plugins":[{"type":"redirector"}]}],"name":"a","cniVersion":"1.1.0","disableCheck":true}`,
	"keys twice":    `{"plugins":[{"type":"macvlan"}],"name":"a","plugins":[{"type":"bridge"}, {"type":"tuning"}],"cniVersion":"1.0.0"}`,
	"with istio":    `{"cniVersion":"0.3.1","name":"k8s","plugins":[{"type":"ptp"},{"type":"istio-cni"}]}`,
	"many versions": `{"cniVersion":"0.2.0","cniVersions":["0.2.0","1.0.0"],"name":"k8s","plugins":[{"type":"ptp"}]}`,
}

var singles = map[string]string{
	"indented": "{\n  \"cniVersion\": \"0.3.1\",\n  \"name\": \"mynet\",\n  \"type\": \"bridge\",\n  \"bridge\": \"cni0\"\n}\n",
	"compact":  `{"type":"ptp","name":"n","cniVersion":"1.0.0","x":1.0}`,
	"spaces":   "  \n{ \"type\":\"ptp\",\"name\":\"n\",\"cniVersion\":\"1.0.0\" }\n\n",
}

// wantChain checks that a file is a list that libcni reads, with those types of plugins.
func (n *node) wantChain(name string, types ...string) {
	n.t.Helper()
	list, err := libcni.NetworkConfFromFile(filepath.Join(n.netDir, name))
	if err != nil {
		n.t.Fatal(err)
	}
	var got []string
	for _, plugin := range list.Plugins {
		got = append(got, plugin.Network.Type)
	}
	if d := cmp.Diff(types, got); d != "" {
		n.t.Errorf("plugins in %s (-want +got):\n%s", name, d)
	}
}

func (n *node) install(change func(*Options)) []string {
	n.t.Helper()
	changed, err := n.installer(change).Install()
	if err != nil {
		n.t.Fatal(err)
	}
	again, err := n.installer(change).Install()
	if err != nil {
		n.t.Fatal(err)
	}
	if len(again) > 0 {
		n.t.Errorf("installing it again changes %v", again)
	}
	return changed
}

func (n *node) uninstall() {
	n.t.Helper()
	// By an installer that knows the directories only.
	in := n.installer(func(o *Options) { o.Entry = Entry{} })
	if _, err := in.Uninstall(KeepIfCached); err != nil {
		n.t.Fatal(err)
	}
	if done, err := in.Uninstall(KeepIfCached); err != nil || len(done.Changed) > 0 {
		n.t.Errorf("uninstalling it again changes %v, %v", done.Changed, err)
	}
}

func TestAListGetsThePluginAndIsAsItWasAfterwards(t *testing.T) {
	for name, text := range lists {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.write("10-net.conflist", text)
			n.write("99-other.conflist", lists["compact"])
			if err := os.Chmod(filepath.Join(n.netDir, "10-net.conflist"), 0o640); err != nil {
				t.Fatal(err)
			}
			if err := os.Chown(filepath.Join(n.netDir, "10-net.conflist"), 7, 8); err != nil {
				t.Fatal(err)
			}
			before := tree(t, n.netDir, n.binDir)
			bare, err := parseChain([]byte(text))
			if err != nil {
				t.Fatal(err)
			}

			n.install(nil)
			n.wantChain("10-net.conflist", append(bare.types, PluginType)...)
			info, err := os.Stat(filepath.Join(n.netDir, "10-net.conflist"))
			if err != nil {
				t.Fatal(err)
			}
			var st unix.Stat_t
			if err := unix.Stat(filepath.Join(n.netDir, "10-net.conflist"), &st); err != nil {
				t.Fatal(err)
			}
			if info.Mode() != 0o640 || st.Uid != 7 || st.Gid != 8 {
				t.Errorf("mode %s, user %d, group %d, want those of before", info.Mode(), st.Uid, st.Gid)
			}
			if n.read("99-other.conflist") != lists["compact"] {
				t.Error("another list has changed")
			}
			if binary, err := os.ReadFile(filepath.Join(n.binDir, PluginType)); err != nil || string(binary) != "#!plugin" {
				t.Errorf("the binary is %q, %v", binary, err)
			}

			n.uninstall()
			if d := cmp.Diff(before, tree(t, n.netDir, n.binDir)); d != "" {
				t.Errorf("it is not as it was (-was +is):\n%s", d)
			}
		})
	}
}

func TestASinglePluginBecomesAListAndIsPutBack(t *testing.T) {
	for name, text := range singles {
		for _, ext := range []string{".conf", ".json"} {
			t.Run(name+ext, func(t *testing.T) {
				n := newNode(t)
				n.write("10-net"+ext, text)
				before := tree(t, n.netDir, n.binDir)
				conf, err := libcni.NetworkPluginConfFromBytes([]byte(text))
				if err != nil {
					t.Fatal(err)
				}
				n.install(nil)
				n.wantChain("10-net.conflist", conf.Network.Type, PluginType)
				if !strings.Contains(n.read("10-net.conflist"), strings.TrimSpace(text)) {
					t.Error("the plugin's text is not in the list as it was")
				}
				if files, err := libcni.ConfFiles(n.netDir, confExts); err != nil || len(files) != 1 {
					t.Errorf("runtimes see %v, %v", files, err)
				}
				n.uninstall()
				if d := cmp.Diff(before, tree(t, n.netDir, n.binDir)); d != "" {
					t.Errorf("it is not as it was (-was +is):\n%s", d)
				}
			})
		}
	}
}

func TestASinglePluginThatIsWrittenAnew(t *testing.T) {
	n := newNode(t)
	n.write("10-net.conf", singles["compact"])
	n.install(nil)
	n.write("10-net.conf", singles["indented"])
	n.install(nil)
	n.wantChain("10-net.conflist", "bridge", PluginType)
	n.uninstall()
	if got := n.read("10-net.conf"); got != singles["indented"] {
		t.Errorf("what is put back is %q, want the newer", got)
	}
	if files, err := os.ReadDir(n.netDir); err != nil || len(files) != 1 {
		t.Errorf("it leaves %v, %v", files, err)
	}
}

func TestAListThatWasMadeAndThenChanged(t *testing.T) {
	n := newNode(t)
	n.write("10-net.conf", singles["compact"])
	n.install(nil)
	list := n.read("10-net.conflist")
	n.write("10-net.conflist", strings.Replace(list, "]}", `,{"type":"istio-cni"}]}`, 1))
	n.uninstall()
	n.wantChain("10-net.conflist", "ptp", "istio-cni")
	if files, err := os.ReadDir(n.netDir); err != nil || len(files) != 1 {
		t.Errorf("it leaves %v, %v", files, err)
	}
}

func TestAListThatHasTheNameOfTheOneToBeMade(t *testing.T) {
	n := newNode(t)
	n.write("10-net.conf", singles["compact"])
	n.write("10-net.conflist", lists["indented"])
	before := tree(t, n.netDir)
	n.install(nil)
	n.wantChain("10-net.conf.conflist", "ptp", PluginType)
	if got := n.read("10-net.conflist"); got != lists["indented"] {
		t.Errorf("somebody else's list has become %s", got)
	}
	n.uninstall()
	if d := cmp.Diff(before, tree(t, n.netDir)); d != "" {
		t.Errorf("it is not as it was (-was +is):\n%s", d)
	}
}

func TestWhichConfigurationIsTheFirst(t *testing.T) {
	n := newNode(t)
	n.write("00-empty.conflist", "")
	n.write("01-broken.conflist", `{"cniVersion":"1.0.0","name":"x","plugins":[{"type":"ptp"}`)
	n.write("02-list.conf", lists["compact"])
	n.write("03-none.conflist", `{"cniVersion":"1.0.0","name":"x","plugins":[]}`)
	n.write("04-noname.conf", `{"cniVersion":"1.0.0","type":"ptp"}`)
	n.write("05-text.txt", lists["compact"])
	n.write("06-net.conflist.bak", lists["compact"])
	if err := os.Mkdir(filepath.Join(n.netDir, "07-dir.conflist"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(filepath.Join(n.netDir, "08-fifo.conflist"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("nowhere", filepath.Join(n.netDir, "09-link.conflist")); err != nil {
		t.Fatal(err)
	}
	in := n.installer(nil)
	if _, err := in.Install(); !errors.Is(err, ErrNoPrimary) {
		t.Errorf("without a valid one: %v", err)
	}
	n.write("20-late.conflist", lists["compact"])
	n.install(nil)
	n.wantChain("20-late.conflist", "ptp", PluginType)

	// One that comes before it takes its place, and the other is as it was.
	n.write("10-net.conflist", lists["indented"])
	n.install(nil)
	n.wantChain("10-net.conflist", "flannel", "portmap", PluginType)
	if got := n.read("20-late.conflist"); got != lists["compact"] {
		t.Errorf("the one that is not the first any more is %s", got)
	}

	// The one that is named counts, first or not.
	named := func(o *Options) { o.ConfName = "20-late.conflist" }
	n.install(named)
	n.wantChain("20-late.conflist", "ptp", PluginType)
	if got := n.read("10-net.conflist"); got != lists["indented"] {
		t.Errorf("the one that is not named is %s", got)
	}
	if _, err := n.installer(func(o *Options) { o.ConfName = "30-missing.conflist" }).Install(); !errors.Is(err, ErrNoPrimary) {
		t.Errorf("one that is not there: %v", err)
	}
}

func TestAConfigurationThatIsBeingWrittenIsWaitedFor(t *testing.T) {
	n := newNode(t)
	n.write("20-other.conflist", lists["compact"])
	if err := os.WriteFile(filepath.Join(n.netDir, "10-net.conflist"), []byte(lists["indented"][:100]), 0o644); err != nil {
		t.Fatal(err)
	}
	if changed, err := n.installer(nil).installConf(); !errors.Is(err, errSettling) || len(changed) > 0 {
		t.Errorf("changed %v, %v", changed, err)
	}
	n.age("10-net.conflist")
	n.install(nil)
	n.wantChain("20-other.conflist", "ptp", PluginType)
}

func TestAVersionThatThePluginDoesNotKnowIsRefused(t *testing.T) {
	for _, text := range []string{
		`{"cniVersion":"0.2.0","name":"x","plugins":[{"type":"ptp"}]}`,
		`{"name":"x","plugins":[{"type":"ptp"}]}`,
		`{"cniVersion":"1","name":"x","plugins":[{"type":"ptp"}]}`,
		`{"cniVersion":"9.0.0","name":"x","plugins":[{"type":"ptp"}]}`,
	} {
		n := newNode(t)
		n.write("10-net.conflist", text)
		n.write("20-net.conflist", lists["compact"])
		_, err := n.installer(nil).Install()
		if err == nil || !strings.Contains(err.Error(), "10-net.conflist") || !strings.Contains(err.Error(), "0.3.0") {
			t.Errorf("%s: %v", text, err)
		}
	}
}

func TestEntriesAreNeverNestedTwice(t *testing.T) {
	for name, plugins := range map[string]string{
		"old":   `{"type":"ptp"},{"type":"redirector","runDir":"/old"}`,
		"twice": `{"type":"ptp"},{"type":"redirector"},{"type":"redirector"}`,
		"first": `{"type":"redirector"},{"type":"ptp"}`,
		"three": `{"type":"redirector"},{"type":"ptp"},{"type":"redirector"},{"type":"redirector"}`,
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.write("10-net.conflist", `{"cniVersion":"1.0.0","name":"x","plugins":[`+plugins+`]}`)
			n.install(nil)
			n.wantChain("10-net.conflist", "ptp", PluginType)
			if !strings.Contains(n.read("10-net.conflist"), "kube-system") {
				t.Error("the entry is an old one")
			}
			n.uninstall()
			if got, want := n.read("10-net.conflist"), `{"cniVersion":"1.0.0","name":"x","plugins":[{"type":"ptp"}]}`; got != want {
				t.Errorf("it leaves %s, want %s", got, want)
			}
		})
	}
	// What others have put behind it stays there.
	n := newNode(t)
	n.write("10-net.conflist", `{"cniVersion":"1.0.0","name":"x","plugins":[{"type":"ptp"}]}`)
	n.install(func(o *Options) { o.Entry = Entry{RunDir: "/run/old"} })
	text := n.read("10-net.conflist")
	n.write("10-net.conflist", strings.Replace(text, "]}", `,{"type":"tuning"}]}`, 1)) // not in excludeNamespaces: that is followed by }]
	n.install(nil)
	n.wantChain("10-net.conflist", "ptp", PluginType, "tuning")
	n.uninstall()
	n.wantChain("10-net.conflist", "ptp", "tuning")
}

func TestAnOwnedListFollowsThePrimary(t *testing.T) {
	n := newNode(t)
	owned := func(o *Options) { o.Owned = true }
	n.write("10-net.conflist", lists["indented"])
	before := tree(t, n.netDir, n.binDir)
	n.install(owned)
	n.wantChain(DefaultOwnedName, "flannel", "portmap", PluginType)
	if got := n.read("10-net.conflist"); got != lists["indented"] {
		t.Errorf("the primary's list has become %s", got)
	}
	if info, err := os.Stat(filepath.Join(n.netDir, DefaultOwnedName)); err != nil || info.Mode() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	n.write("10-net.conflist", lists["compact"])
	n.install(owned)
	n.wantChain(DefaultOwnedName, "ptp", PluginType)
	// The primary is gone for a while: what is there stays.
	if err := os.Remove(filepath.Join(n.netDir, "10-net.conflist")); err != nil {
		t.Fatal(err)
	}
	if _, err := n.installer(owned).Install(); !errors.Is(err, ErrNoPrimary) {
		t.Errorf("without a primary: %v", err)
	}
	n.wantChain(DefaultOwnedName, "ptp", PluginType)
	n.write("10-net.conflist", lists["indented"])
	n.install(owned)
	n.uninstall()
	if d := cmp.Diff(before, tree(t, n.netDir, n.binDir)); d != "" {
		t.Errorf("it is not as it was (-was +is):\n%s", d)
	}

	n.write("01-net.conflist", lists["compact"])
	if _, err := n.installer(owned).Install(); err == nil || !strings.Contains(err.Error(), "01-net.conflist") {
		t.Errorf("a name that does not sort before the primary's: %v", err)
	}
}

func TestAConfigurationOfItsOwn(t *testing.T) {
	n := newNode(t)
	n.write("10-net.conflist", lists["compact"])
	before := tree(t, n.netDir, n.binDir)
	n.install(func(o *Options) { o.Chained, o.GroupRead = false, true })
	conf, err := libcni.NetworkPluginConfFromBytes([]byte(n.read(DefaultOwnConf)))
	if err != nil || conf.Network.Type != PluginType || conf.Network.Name != PluginType || conf.Network.CNIVersion != "0.3.1" {
		t.Errorf("it is %+v, %v", conf, err)
	}
	if info, err := os.Stat(filepath.Join(n.netDir, DefaultOwnConf)); err != nil || info.Mode() != 0o640 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if got := n.read("10-net.conflist"); got != lists["compact"] {
		t.Errorf("the primary's list has become %s", got)
	}
	// From one way to another, and back.
	n.install(func(o *Options) { o.Chained, o.ConfName = false, "redirector.conf" })
	n.install(nil)
	if files, err := os.ReadDir(n.netDir); err != nil || len(files) != 1 {
		t.Errorf("there is %v, %v", files, err)
	}
	n.install(func(o *Options) { o.Owned = true })
	if got := n.read("10-net.conflist"); got != lists["compact"] {
		t.Errorf("the primary's list has become %s", got)
	}
	n.install(func(o *Options) { o.Chained = false })
	n.uninstall()
	if d := cmp.Diff(before, tree(t, n.netDir, n.binDir)); d != "" {
		t.Errorf("it is not as it was (-was +is):\n%s", d)
	}
}

func TestTheBinaryIsKeptRight(t *testing.T) {
	n := newNode(t)
	n.write("10-net.conflist", lists["compact"])
	binary := filepath.Join(n.binDir, PluginType)
	in := n.installer(nil)
	for name, spoil := range map[string]func() error{
		"missing":         func() error { return os.RemoveAll(binary) },
		"not executable":  func() error { return os.Chmod(binary, 0o644) },
		"another":         func() error { return os.WriteFile(binary, []byte("#!PLUGIN"), 0o755) },
		"longer":          func() error { return os.WriteFile(binary, []byte("#!plugin and more"), 0o755) },
		"empty":           func() error { return os.Truncate(binary, 0) },
		"a symbolic link": func() error { return errors.Join(os.RemoveAll(binary), os.Symlink(n.file, binary)) },
	} {
		if _, err := in.Install(); err != nil {
			t.Fatal(err)
		}
		if err := spoil(); err != nil {
			t.Fatal(err)
		}
		changed, err := in.Install()
		if err != nil || len(changed) != 1 || changed[0] != binary {
			t.Errorf("%s: changed %v, %v", name, changed, err)
		}
		info, err := os.Lstat(binary)
		if err != nil || info.Mode() != 0o755 {
			t.Errorf("%s: %v, %v", name, info, err)
		}
		if text, err := os.ReadFile(binary); err != nil || string(text) != "#!plugin" {
			t.Errorf("%s: %q, %v", name, text, err)
		}
	}
}

func TestOptionsThatContradictThemselves(t *testing.T) {
	for word, opts := range map[string]Options{
		"x/y.conf":      {Chained: true, ConfName: "x/y.conf"},
		"net.txt":       {Chained: true, ConfName: "net.txt"},
		"owned.conf":    {Chained: true, Owned: true, OwnedName: "owned.conf"},
		"to be chained": {Owned: true},
	} {
		if _, err := NewInstaller(opts); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%+v: %v", opts, err)
		}
	}
	n := newNode(t)
	n.write("10-net.conflist", lists["compact"])
	if _, err := n.installer(func(o *Options) { o.Chained, o.ConfName = false, "own.conflist" }).Install(); err == nil {
		t.Error("the plugin's own configuration may be a list")
	}
	n.write("own.conf", singles["compact"])
	if _, err := n.installer(func(o *Options) { o.Chained, o.ConfName = false, "own.conf" }).Install(); err == nil ||
		!strings.Contains(err.Error(), "another plugin's") {
		t.Errorf("the plugin's own configuration takes another's place: %v", err)
	}
}

func TestASymbolicLinkStaysOne(t *testing.T) {
	n := newNode(t)
	elsewhere := filepath.Join(filepath.Dir(n.netDir), "elsewhere")
	for name, text := range map[string]string{"10-net.conflist": lists["indented"], "20-net.conf": singles["compact"]} {
		t.Run(name, func(t *testing.T) {
			if err := os.WriteFile(elsewhere, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			link := filepath.Join(n.netDir, name)
			if err := os.Symlink("../elsewhere", link); err != nil {
				t.Fatal(err)
			}
			before := tree(t, filepath.Dir(n.netDir))
			n.install(nil)
			n.uninstall()
			if d := cmp.Diff(before, tree(t, filepath.Dir(n.netDir))); d != "" {
				t.Errorf("it is not as it was (-was +is):\n%s", d)
			}
			if err := os.Remove(link); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// Somebody else's change between reading and writing is not lost, whatever way it is made.
func TestChangesMeanwhileAreNotLost(t *testing.T) {
	path := filepath.Join(t.TempDir(), "10-net.conflist")
	read := func() *confFile {
		t.Helper()
		if err := os.WriteFile(path, []byte("old"), 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := readConf(path)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	want := func(text string, err error) {
		t.Helper()
		if !errors.Is(err, errChanged) {
			t.Errorf("error %v", err)
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != text {
			t.Errorf("the file has %q, %v, want %q", got, err, text)
		}
		if files, err := os.ReadDir(filepath.Dir(path)); err != nil || len(files) != 1 {
			t.Errorf("there is %v, %v", files, err)
		}
	}
	for name, change := range map[string]func(c *confFile) error{
		"replace": func(c *confFile) error { return c.replace([]byte("ours")) },
		"remove":  func(c *confFile) error { return c.remove(path, "") },
		"aside":   func(c *confFile) error { return c.remove(path, path+asideSuffix) },
	} {
		t.Run(name, func(t *testing.T) {
			c := read()
			if err := os.WriteFile(path, []byte("theirs"), 0o600); err != nil {
				t.Fatal(err)
			}
			want("theirs", change(c))

			c = read()
			other := filepath.Join(t.TempDir(), "other")
			if err := os.WriteFile(other, []byte("renamed"), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(other, path); err != nil {
				t.Fatal(err)
			}
			want("renamed", change(c))

			// It is open for writing, and will be written only when we are through.
			c = read()
			f, err := os.OpenFile(path, os.O_WRONLY, 0)
			if err != nil {
				t.Fatal(err)
			}
			err = change(c)
			if _, err := f.WriteString("late"); err != nil {
				t.Fatal(err)
			}
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
			want("late", err)

			c = read()
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			if err := change(c); !errors.Is(err, errChanged) {
				t.Errorf("with the file gone: %v", err)
			}
			if files, err := os.ReadDir(filepath.Dir(path)); err != nil || len(files) != 0 {
				t.Errorf("there is %v, %v", files, err)
			}
		})
	}
}

func TestABinaryStaysForContainersInTheCache(t *testing.T) {
	n := newNode(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	n.write("10-net.conflist", lists["compact"])
	n.install(func(o *Options) { o.Binary = self })
	results := filepath.Join(n.cacheDir, "results")
	if err := os.MkdirAll(results, 0o700); err != nil {
		t.Fatal(err)
	}
	cached := func(container string, config string) {
		t.Helper()
		data, err := json.Marshal(map[string]any{"kind": libcni.CNICacheV1, "containerId": container, "ifName": "eth0", "config": []byte(config)})
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(results, "k8s-"+container+"-eth0"), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	config := n.read("10-net.conflist")
	cached("one", config)
	cached("two", config)
	cached("plain", lists["compact"])

	in := n.installer(nil)
	done, err := in.Uninstall(KeepIfCached)
	if err != nil || done.CachedBy != 2 {
		t.Fatalf("it stays for %d containers, %v", done.CachedBy, err)
	}
	if got := n.read("10-net.conflist"); got != lists["compact"] {
		t.Errorf("the configuration is %s", got)
	}
	binary := filepath.Join(n.binDir, PluginType)
	// A runtime that has read the configuration before adds a container: there is no agent, and it is not asked for.
	add := call{command: "ADD", stdin: confText(t, pluginConf{Entry: Entry{RunDir: t.TempDir(), Timeout: "1s"}, CNIVersion: "1.0.0"}), pod: "shop/web", binary: binary}
	if r := add.run(t); r.code != 0 {
		t.Errorf("ADD by a retired plugin: %+v", r)
	}
	for _, container := range []string{"plain", "one"} {
		if r := (call{command: "DEL", container: container, binary: binary}).run(t); r.code != 0 || r.stdout != "" {
			t.Errorf("DEL by a retired plugin: %+v", r)
		}
		if _, err := os.Stat(binary); err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(filepath.Join(results, "k8s-"+container+"-eth0")); err != nil {
			t.Fatal(err)
		}
	}
	if r := (call{command: "DEL", container: "two", binary: binary}).run(t); r.code != 0 {
		t.Errorf("the last DEL: %+v", r)
	}
	if left, err := os.ReadDir(n.binDir); err != nil || len(left) > 0 {
		t.Errorf("it leaves %v, %v", left, err)
	}

	// Installed again it is in use again, and it goes at once when told so.
	n.install(func(o *Options) { o.Binary = self })
	if _, err := in.Uninstall(KeepIfCached); err != nil {
		t.Fatal(err)
	}
	n.install(func(o *Options) { o.Binary = self })
	if _, err := os.Stat(binary + retiredSuffix); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("an installed plugin is retired: %v", err)
	}
	if done, err := in.Uninstall(KeepNever); err != nil || done.CachedBy != 0 {
		t.Errorf("it stays for %d containers, %v", done.CachedBy, err)
	}
	if left, err := os.ReadDir(n.binDir); err != nil || len(left) > 0 {
		t.Errorf("it leaves %v, %v", left, err)
	}
}

func eventually(t *testing.T, what string, so func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !so(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not so after %v: %s", patience, what)
		}
	}
}
