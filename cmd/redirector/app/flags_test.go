// SPDX-License-Identifier: Apache-2.0

package app

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

func TestEnvironmentTwins(t *testing.T) {
	env := Env{Getenv: func(string) string { return "" }}
	for name, c := range map[string]struct {
		args []string
		env  map[string]string
		flag string
		want string
	}{
		"default":                          {flag: "run-dir", want: "/var/run/redirector"},
		"default socket":                   {flag: "zds-socket", want: "/var/run/ztunnel/ztunnel.sock"},
		"default pins":                     {flag: "bpffs", want: "/sys/fs/bpf/redirector"},
		"default cgroup is looked for":     {flag: "cgroup", want: ""},
		"default level":                    {flag: "log-level", want: "info"},
		"RUN_DIR":                          {env: map[string]string{"RUN_DIR": "/r"}, flag: "run-dir", want: "/r"},
		"ZDS_SOCKET":                       {env: map[string]string{"ZDS_SOCKET": "/z"}, flag: "zds-socket", want: "/z"},
		"istio's name":                     {env: map[string]string{"ZTUNNEL_UDS_ADDRESS": "/i"}, flag: "zds-socket", want: "/i"},
		"ours before istio's":              {env: map[string]string{"ZDS_SOCKET": "/z", "ZTUNNEL_UDS_ADDRESS": "/i"}, flag: "zds-socket", want: "/z"},
		"BPFFS":                            {env: map[string]string{"BPFFS": "/b"}, flag: "bpffs", want: "/b"},
		"CGROUP":                           {env: map[string]string{"CGROUP": "/c"}, flag: "cgroup", want: "/c"},
		"LOG_LEVEL":                        {env: map[string]string{"LOG_LEVEL": "warn"}, flag: "log-level", want: "warn"},
		"LOG_FORMAT":                       {env: map[string]string{"LOG_FORMAT": "json"}, flag: "log-format", want: "json"},
		"STANDALONE":                       {env: map[string]string{"STANDALONE": "true"}, flag: "standalone", want: "true"},
		"METRICS_ADDR":                     {env: map[string]string{"METRICS_ADDR": "127.0.0.1:9"}, flag: "metrics-addr", want: "127.0.0.1:9"},
		"istio's name for metrics":         {env: map[string]string{"MONITORING_PORT": "15014"}, flag: "metrics-addr", want: ":15014"},
		"METRICS_PER_POD":                  {env: map[string]string{"METRICS_PER_POD": "true"}, flag: "metrics-per-pod", want: "true"},
		"PPROF":                            {env: map[string]string{"PPROF": "true"}, flag: "pprof", want: "true"},
		"DNS_CAPTURE":                      {env: map[string]string{"DNS_CAPTURE": "false"}, flag: "dns-capture", want: "false"},
		"istio's name for DNS":             {env: map[string]string{"AMBIENT_DNS_CAPTURE": "false"}, flag: "dns-capture", want: "false"},
		"DNS is captured by default":       {flag: "dns-capture", want: "true"},
		"the flag wins":                    {args: []string{"--run-dir", "/f"}, env: map[string]string{"RUN_DIR": "/r"}, flag: "run-dir", want: "/f"},
		"the flag wins over a bad value":   {args: []string{"--log-level", "warn"}, env: map[string]string{"LOG_LEVEL": "loud"}, flag: "log-level", want: "warn"},
		"set to nothing is not set":        {env: map[string]string{"RUN_DIR": "", "LOG_LEVEL": ""}, flag: "run-dir", want: "/var/run/redirector"},
		"a flag of false wins":             {args: []string{"--standalone=false"}, env: map[string]string{"STANDALONE": "true"}, flag: "standalone", want: "false"},
		"a path is made clean":             {args: []string{"--bpffs", "/sys/fs//bpf/x/"}, flag: "bpffs", want: "/sys/fs/bpf/x"},
		"so is one of the environment":     {env: map[string]string{"BPFFS": "/sys/fs/./bpf/x/"}, flag: "bpffs", want: "/sys/fs/bpf/x"},
		"a variable of no flag is ignored": {env: map[string]string{"HELP": "true"}, flag: "help", want: "false"},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := newAgent(&env)
			cmd.InitDefaultHelpFlag()
			if err := cmd.ParseFlags(c.args); err != nil {
				t.Fatal(err)
			}
			if err := applyEnv(cmd.Flags(), func(name string) string { return c.env[name] }); err != nil {
				t.Fatal(err)
			}
			if got := cmd.Flags().Lookup(c.flag).Value.String(); got != c.want {
				t.Errorf("--%s is %q, want %q", c.flag, got, c.want)
			}
		})
	}
}

func TestEveryFlagOfTheAgentHasATwin(t *testing.T) {
	env := Env{Getenv: func(string) string { return "" }}
	newAgent(&env).Flags().VisitAll(func(f *pflag.Flag) {
		want := strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
		if vars := f.Annotations[envAnnotation]; len(vars) == 0 || vars[0] != want || !strings.Contains(f.Usage, "$"+want) {
			t.Errorf("--%s has the twins %q and is explained as %q, want %s", f.Name, vars, f.Usage, want)
		}
	})
}

func TestFlagsThatNameAPodHaveNoTwin(t *testing.T) {
	// UID and NAME are variables that shells and systems set for ends of their own.
	env := map[string]string{"UID": "1", "NAME": "shop/web", "SERVICE_ACCOUNT": "web", "NETNS": "/x", "IP": "x", "TIMEOUT": "x", "OUTPUT": "x"}
	run(t, env, "enroll").wantFailure(t, exitUsage, "--uid, --name, --service-account, --netns")
	run(t, env, "unenroll").wantFailure(t, exitUsage, "--uid")
}

func TestABadVariableIsNamed(t *testing.T) {
	for name, value := range map[string]string{"LOG_LEVEL": "loud", "LOG_FORMAT": "xml", "STANDALONE": "perhaps"} {
		run(t, map[string]string{name: value}, "agent").wantFailure(t, exitUsage, name, value)
	}
}

func TestCommandsFindTheAgentByTheEnvironment(t *testing.T) {
	dir := t.TempDir()
	for _, args := range [][]string{{"pods"}, {"status"}, {"unenroll", "--uid", "1"}} {
		run(t, map[string]string{"RUN_DIR": dir}, args...).wantFailure(t, exitFailed, filepath.Join(dir, "agent.sock"))
	}
}
