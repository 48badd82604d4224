// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/google/renameio/v2"
)

// Defaults of Options.
const (
	DefaultNetDir = "/etc/cni/net.d"
	DefaultBinDir = "/opt/cni/bin"
	// DefaultOwnedName sorts before what primary plugins' agents write.
	DefaultOwnedName = "02-redirector.conflist"
	// DefaultOwnConf is where Multus looks for the plugin when it is not chained. It sorts behind what runtimes take.
	DefaultOwnConf = "YYY-redirector.conf"
)

// binaryMode is the mode of the plugin.
const binaryMode fs.FileMode = 0o755

// listExt ends the names of configuration lists, confExts those of all configurations that runtimes look at.
const listExt = ".conflist"

var confExts = []string{".conf", listExt, ".json"}

// asideSuffix ends the name of a single plugin's configuration while a list has its place. Runtimes do not look at it.
const asideSuffix = ".redirector"

// settleTime is how old a configuration that cannot be read has to be before it counts as broken, and not as being written. The next
// by name may be somebody else's.
const settleTime = 2 * time.Second

// ErrNoPrimary says that there is no configuration that the plugin could be chained into yet.
var ErrNoPrimary = errors.New("no valid CNI configuration is there yet: install the cluster's network plugin")

// errSettling says that a configuration is being written.
var errSettling = errors.New("a CNI configuration is being written")

// Options say where and how the plugin is installed.
type Options struct {
	// NetDir is the directory of CNI configurations, BinDir that of plugins, as this process sees them.
	NetDir, BinDir string
	// CacheDir is libcni's cache, with the same path here and on the host; "": DefaultCacheDir.
	CacheDir string
	// Binary is the file to install as the plugin; "": the running program.
	Binary string
	// ConfName is the configuration to be chained into; "": the first valid one by name, which is the one that runtimes take. If
	// not Chained, it is the name of the plugin's own configuration; "": DefaultOwnConf.
	ConfName string
	// Chained puts the plugin at the end of the primary plugin's list. Otherwise it gets a configuration of its own, for Multus.
	Chained bool
	// Owned leaves the primary plugin's list alone, and chains into a copy of it that sorts before it and follows its changes.
	Owned bool
	// OwnedName is the name of that copy; "": DefaultOwnedName.
	OwnedName string
	// GroupRead lets the group read files that the installer makes.
	GroupRead bool
	// Entry is what the configuration says of the plugin. Type, Replaces and Owned are filled in.
	Entry Entry
	Log   *slog.Logger
}

// Installer puts the plugin on a node, keeps it there, and takes it away. All that it needs to know for that is in the files that it
// makes, so any installer can take away what another has put there. Its methods may be called from several goroutines.
type Installer struct {
	opts Options

	mu     sync.Mutex  // one change at a time
	binary fs.FileInfo // of the plugin that was last seen to be right
	said   complaints
}

// NewInstaller returns an installer that has done nothing yet. It fails when the options contradict each other.
func NewInstaller(opts Options) (*Installer, error) {
	opts.NetDir, opts.BinDir = cmp.Or(opts.NetDir, DefaultNetDir), cmp.Or(opts.BinDir, DefaultBinDir)
	opts.CacheDir = cmp.Or(opts.CacheDir, DefaultCacheDir)
	opts.OwnedName = cmp.Or(opts.OwnedName, DefaultOwnedName)
	opts.Entry.Type, opts.Entry.Replaces, opts.Entry.Owned = PluginType, "", false
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	for _, name := range []string{opts.ConfName, opts.OwnedName} {
		if name != "" && (name != filepath.Base(name) || !isConf(name)) {
			return nil, fmt.Errorf("bad name of a CNI configuration %q: use a file name that ends in %s", name, strings.Join(confExts, " or "))
		}
	}
	if opts.Owned && !opts.Chained {
		return nil, errors.New("a configuration list of its own needs the plugin to be chained: turn one of them off")
	}
	if opts.Owned && filepath.Ext(opts.OwnedName) != listExt {
		return nil, fmt.Errorf("bad name of a configuration list %q: it must end in %s", opts.OwnedName, listExt)
	}
	return &Installer{opts: opts, said: complaints{log: opts.Log}}, nil
}

func isConf(name string) bool { return slices.Contains(confExts, filepath.Ext(name)) }

// Install puts the plugin on the node, or puts right what is not as it should be, and says what it has changed: nothing if all is
// as it should be. The error wraps ErrNoPrimary if there is nothing to be chained into.
func (in *Installer) Install() (changed []string, err error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	// The binary first: no configuration must name what is not there.
	binary, err := in.installBinary()
	if err != nil {
		return nil, err
	}
	if binary != "" {
		changed = append(changed, binary)
	}
	confs, err := in.installConf()
	return append(changed, confs...), err
}

func (in *Installer) installBinary() (changed string, err error) {
	to := filepath.Join(in.opts.BinDir, PluginType)
	if err := os.Remove(to + retiredSuffix); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("put the plugin in %s back into use: %w: name the directory where the runtime looks for CNI plugins", in.opts.BinDir, err)
	}
	// It is large, and compared byte by byte only when something is new about it.
	info, err := os.Lstat(to)
	if err == nil && in.binary != nil && os.SameFile(info, in.binary) && info.ModTime().Equal(in.binary.ModTime()) && info.Mode() == in.binary.Mode() {
		return "", nil
	}
	from, err := os.Open(cmp.Or(in.opts.Binary, "/proc/self/exe"))
	if err != nil {
		return "", fmt.Errorf("read the plugin's binary: %w", err)
	}
	defer from.Close()
	if info == nil || info.Mode() != binaryMode || !sameContent(from, to) {
		if err := copyBinary(from, to); err != nil {
			return "", fmt.Errorf("install the plugin's binary into %s: %w: name the directory where the runtime looks for CNI plugins", in.opts.BinDir, err)
		}
		changed = to
	}
	in.binary, err = os.Lstat(to)
	if err != nil {
		return changed, fmt.Errorf("look at the plugin's binary: %w", err)
	}
	if time.Since(in.binary.ModTime()).Abs() < settleTime {
		in.binary = nil // within a tick of the clock another change would look like this one
	}
	return changed, nil
}

// copyBinary puts a copy in its place in one step: somebody may be running the old one.
func copyBinary(from io.ReadSeeker, to string) error {
	if _, err := from.Seek(0, io.SeekStart); err != nil {
		return err
	}
	file, err := renameio.NewPendingFile(to, renameio.WithStaticPermissions(binaryMode), renameio.WithTempDir(filepath.Dir(to)))
	if err != nil {
		return err
	}
	defer func() { _ = file.Cleanup() }()
	if _, err := io.Copy(file, from); err != nil {
		return err
	}
	return file.CloseAtomicallyReplace()
}

// sameContent says whether a file has what is read from the beginning of another.
func sameContent(a io.Reader, path string) bool {
	b, err := os.Open(path)
	if err != nil {
		return false
	}
	defer b.Close()
	const part = 64 << 10
	forA, forB := make([]byte, part), make([]byte, part)
	for {
		n, errA := io.ReadFull(a, forA)
		m, errB := io.ReadFull(b, forB)
		if !bytes.Equal(forA[:n], forB[:m]) {
			return false
		}
		if errA != nil || errB != nil {
			isEnd := func(err error) bool { return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) }
			return isEnd(errA) && isEnd(errB)
		}
	}
}

// conf is one configuration in the directory.
type conf struct {
	*confFile
	name  string // in the directory
	chain *chain // of a single plugin's configuration, what would be made of it
}

// single says whether it is a single plugin's.
func (c *conf) single() bool { return filepath.Ext(c.name) != listExt }

// mine says whether the whole file is the installer's.
func (c *conf) mine() bool {
	if c.single() {
		return c.chain.types[0] == PluginType
	}
	ours := c.chain.ours()
	return len(ours) == len(c.chain.plugins) || len(ours) > 0 && c.chain.entry(ours[0]).Owned
}

// read returns the configurations that can be read, in the order in which runtimes look at them. settling is the first that cannot,
// and may be in the middle of being written.
func (in *Installer) read() (confs []*conf, settling string, err error) {
	paths, err := libcni.ConfFiles(in.opts.NetDir, confExts)
	if err != nil {
		return nil, "", fmt.Errorf("list CNI configurations: %w", err)
	}
	slices.Sort(paths)
	for _, path := range paths {
		c := &conf{name: filepath.Base(path)}
		if c.confFile, err = readConf(path); err == nil {
			if c.single() {
				c.chain, err = wrap(c.text)
			} else {
				c.chain, err = parseChain(c.text)
			}
		}
		if err == nil {
			in.said.well(path)
			confs = append(confs, c)
			continue
		}
		if c.confFile != nil && c.info != nil && time.Since(c.info.ModTime()).Abs() < settleTime {
			if settling == "" {
				settling = c.name
			}
			continue
		}
		in.said.once(path, "a CNI configuration is left out, as runtimes do: it cannot be read", "path", path, "error", err)
	}
	return confs, settling, nil
}

// installConf brings the directory into the state that is wanted.
func (in *Installer) installConf() (changed []string, err error) {
	if _, err := os.Stat(in.opts.NetDir); err != nil {
		return nil, fmt.Errorf("look for CNI configurations: %w: name the directory where the runtime looks for them", err)
	}
	confs, settling, err := in.read()
	if err != nil {
		return nil, err
	}
	var keep string // the one file that has us
	if in.opts.Chained {
		var primary *conf
		if primary, err = in.primary(confs, settling); err != nil {
			return nil, err
		}
		in.warnOfOthers(primary)
		if in.opts.Owned {
			keep, changed, err = in.installOwned(confs, primary)
		} else {
			keep, changed, err = in.chainInto(primary)
		}
	} else {
		keep, changed, err = in.installOwnConf(confs)
	}
	if err != nil {
		return changed, err
	}
	// What was installed in another way, or into what was the first then.
	for _, c := range confs {
		if c.name == keep || slices.Contains(changed, filepath.Join(in.opts.NetDir, c.name)) {
			continue
		}
		gone, err := in.takeOut(c)
		if changed = append(changed, gone...); err != nil {
			return changed, err
		}
	}
	return changed, nil
}

// primary finds the configuration to be chained into.
func (in *Installer) primary(confs []*conf, settling string) (*conf, error) {
	i := slices.IndexFunc(confs, func(c *conf) bool { return !c.mine() })
	if name := in.opts.ConfName; name != "" {
		asList := strings.TrimSuffix(name, filepath.Ext(name)) + listExt
		i = slices.IndexFunc(confs, func(c *conf) bool { return (c.name == name || c.name == asList) && !c.mine() })
		if i < 0 {
			return nil, fmt.Errorf("%w: %s is not there, or not valid", ErrNoPrimary, filepath.Join(in.opts.NetDir, name))
		}
	}
	switch {
	case settling != "" && in.opts.ConfName == "" && (i < 0 || settling < confs[i].name):
		return nil, fmt.Errorf("%w: %s", errSettling, filepath.Join(in.opts.NetDir, settling))
	case i < 0:
		return nil, fmt.Errorf("%w: none is in %s", ErrNoPrimary, in.opts.NetDir)
	}
	if err := confs[i].chain.checkVersion(); err != nil {
		return nil, fmt.Errorf("%s cannot be chained into: %w", confs[i].path, err)
	}
	return confs[i], nil
}

// warnOfOthers tells of another mesh's plugin. It is left alone: it may be on its way out, and both can work in one chain.
func (in *Installer) warnOfOthers(primary *conf) {
	if slices.Contains(primary.chain.types, "istio-cni") {
		in.said.once("istio-cni", "istio-cni is in the chain, too: pods of its ambient mode would be captured twice; uninstall it, or turn its ambient mode off",
			"path", primary.path)
	} else {
		in.said.well("istio-cni")
	}
}

func (in *Installer) entry(change func(*Entry)) ([]byte, error) {
	e := in.opts.Entry
	change(&e)
	data, err := json.Marshal(e)
	if err != nil {
		return nil, fmt.Errorf("write the plugin's configuration: %w", err)
	}
	return data, nil
}

// chainInto puts the plugin into a configuration, and returns the name of the file that has it.
func (in *Installer) chainInto(c *conf) (name string, changed []string, err error) {
	if c.single() {
		return in.makeList(c)
	}
	replaces := ""
	if ours := c.chain.ours(); len(ours) > 0 {
		replaces = c.chain.entry(ours[0]).Replaces
	}
	entry, err := in.entry(func(e *Entry) { e.Replaces = replaces })
	if err != nil || c.chain.has(entry) {
		return c.name, nil, err
	}
	with, err := c.chain.withEntry(entry)
	if err != nil {
		return c.name, nil, fmt.Errorf("%s: %w", c.path, err)
	}
	if err := c.replace(with.text); err != nil {
		return c.name, nil, err
	}
	return c.name, []string{filepath.Join(in.opts.NetDir, c.name)}, nil
}

// makeList makes a list of a single plugin's configuration, which is put aside.
func (in *Installer) makeList(c *conf) (name string, changed []string, err error) {
	entry, err := in.entry(func(e *Entry) { e.Replaces = c.name })
	if err != nil {
		return "", nil, err
	}
	with, err := c.chain.withEntry(entry)
	if err != nil {
		return "", nil, fmt.Errorf("%s: %w", c.path, err)
	}
	path := filepath.Join(in.opts.NetDir, c.name)
	name = strings.TrimSuffix(c.name, filepath.Ext(c.name)) + listExt
	there, err := readConf(filepath.Join(in.opts.NetDir, name))
	if err == nil && !isListFor(there.text, c.name) {
		// Somebody else's list has the name: this one sorts before it, as the single configuration did.
		name = c.name + listExt
		there, err = readConf(filepath.Join(in.opts.NetDir, name))
	}
	list := filepath.Join(in.opts.NetDir, name)
	switch {
	case err == nil && isListFor(there.text, c.name):
		err = there.replace(with.text)
	case errors.Is(err, fs.ErrNotExist):
		err = createFile(list, with.text, c.info.Mode().Perm(), int(c.stat.Uid), int(c.stat.Gid))
	case err == nil:
		err = fmt.Errorf("%s is in the way: remove it", list)
	}
	if err != nil {
		return "", nil, err
	}
	// In this order runtimes always find one of them.
	if err := c.remove(path, path+asideSuffix); err != nil {
		return name, []string{list}, err
	}
	return name, []string{list, path}, nil
}

// isListFor says whether a text is the list that was made of a single configuration.
func isListFor(text []byte, single string) bool {
	c, err := parseChain(text)
	if err != nil {
		return false
	}
	ours := c.ours()
	return len(ours) > 0 && c.entry(ours[0]).Replaces == single
}

// installOwned keeps the copy of the primary plugin's list.
func (in *Installer) installOwned(confs []*conf, primary *conf) (name string, changed []string, err error) {
	name = in.opts.OwnedName
	if primary.name < name {
		return "", nil, fmt.Errorf("%s must come before %s in the order of names, or runtimes do not take it: choose another name for it", name, primary.name)
	}
	entry, err := in.entry(func(e *Entry) { e.Owned = true })
	if err != nil {
		return "", nil, err
	}
	with, err := primary.chain.withEntry(entry)
	if err != nil {
		return "", nil, fmt.Errorf("%s: %w", primary.path, err)
	}
	changed, err = in.writeMine(confs, name, with.text)
	return name, changed, err
}

// installOwnConf keeps the plugin's own configuration, not chained.
func (in *Installer) installOwnConf(confs []*conf) (name string, changed []string, err error) {
	name = cmp.Or(in.opts.ConfName, DefaultOwnConf)
	if filepath.Ext(name) == listExt {
		return "", nil, fmt.Errorf("bad name of the plugin's own configuration %q: it must end in .conf", name)
	}
	text, err := json.MarshalIndent(struct {
		// The oldest that has all, for all versions of Multus.
		CNIVersion string `json:"cniVersion"`
		Name       string `json:"name"`
		Entry
	}{"0.3.1", PluginType, in.opts.Entry}, "", "  ")
	if err != nil {
		return "", nil, fmt.Errorf("write the plugin's configuration: %w", err)
	}
	changed, err = in.writeMine(confs, name, append(text, '\n'))
	return name, changed, err
}

// writeMine writes a file that is the installer's from beginning to end.
func (in *Installer) writeMine(confs []*conf, name string, text []byte) (changed []string, err error) {
	path := filepath.Join(in.opts.NetDir, name)
	i := slices.IndexFunc(confs, func(c *conf) bool { return c.name == name })
	switch {
	case i >= 0 && bytes.Equal(confs[i].text, text):
		return nil, nil
	case i >= 0 && !confs[i].mine():
		return nil, fmt.Errorf("%s is another plugin's: choose another name", path)
	case i >= 0:
		err = confs[i].replace(text)
	default:
		// A file of this name that is no valid configuration can only be what is left of ours.
		var mode fs.FileMode = 0o600
		if in.opts.GroupRead {
			mode = 0o640
		}
		err = renameio.WriteFile(path, text, mode, renameio.IgnoreUmask())
	}
	if err != nil {
		return nil, fmt.Errorf("write %s: %w", path, err)
	}
	return []string{path}, nil
}

// takeOut takes the plugin out of a configuration, and the configuration away if it is ours.
func (in *Installer) takeOut(c *conf) (changed []string, err error) {
	path := filepath.Join(in.opts.NetDir, c.name)
	ours := c.chain.ours()
	switch {
	case len(ours) == 0:
		return nil, nil
	case c.mine():
		if err := c.remove(path, ""); err != nil {
			return nil, err
		}
		return []string{path}, nil
	case c.single(): // its plugin is another's
		return nil, nil
	}
	replaces := c.chain.entry(ours[0]).Replaces
	bare, err := c.chain.stripped()
	if err != nil {
		return nil, err
	}
	if replaces != "" && isConf(replaces) && replaces == filepath.Base(replaces) {
		if restored, err := in.putBack(c, bare, replaces); restored || err != nil {
			return []string{path, filepath.Join(in.opts.NetDir, replaces)}, err
		}
	}
	if err := c.replace(bare.text); err != nil {
		return nil, err
	}
	return []string{path}, nil
}

// putBack gives a single plugin's configuration its place again. If others have changed the list that was made of it, or it is not
// aside any more, the list stays, without our plugin.
func (in *Installer) putBack(c *conf, bare *chain, single string) (restored bool, err error) {
	path := filepath.Join(in.opts.NetDir, single)
	aside := path + asideSuffix
	_, err = os.Lstat(path)
	anew := err == nil // by whoever has made it the first time
	was, err := readConf(aside)
	if unchanged := err == nil && len(bare.plugins) == 1 && bytes.Equal(bytes.TrimSpace(was.text), bare.plugin(0)); unchanged && !anew {
		if err := os.Rename(aside, path); err != nil {
			return false, fmt.Errorf("put %s back: %w", path, err)
		}
		restored = true
	}
	if err := os.Remove(aside); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return restored, fmt.Errorf("remove %s: %w", aside, err)
	}
	if !restored && (!anew || len(bare.plugins) > 1) {
		return false, nil
	}
	return true, c.remove(filepath.Join(in.opts.NetDir, c.name), "")
}
