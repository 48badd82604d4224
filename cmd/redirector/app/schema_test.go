// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	reflector "github.com/invopop/jsonschema"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/explain"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/pkg/monitor"
	"github.com/redirector-dataplane/redirector/pkg/preflight"
	"github.com/redirector-dataplane/redirector/test/bed"
)

var updateSchemas = flag.Bool("update", false, "write the schemas of what commands print")

// schemaDir is where the schemas are published.
var schemaDir = filepath.Join("..", "..", "..", "docs", "schema")

// outputs are what the commands print with -o json, by the names of the commands.
var outputs = map[string]any{
	"status": api.Status{}, "pods": []enroll.Pod{}, "pod": api.Inspection{}, "explain": explain.Answer{}, "verify": []api.Verification{},
	"monitor": monitor.Event{}, "check": preflight.Report{}, "version": buildInfo{},
}

// schemaOf makes a schema from a Go type. A field may be missing if its tag says so; one that is not known here may be there, of a
// later version.
func schemaOf(t *testing.T, command string, value any) []byte {
	t.Helper()
	r := reflector.Reflector{AllowAdditionalProperties: true, Mapper: func(kind reflect.Type) *reflector.Schema {
		number := &reflector.Schema{Type: "integer", Minimum: "0"}
		switch kind {
		case reflect.TypeFor[maps.Counters]():
			properties := reflector.NewProperties()
			var names []string
			new(maps.Counters).Each(func(name string, _ uint64) {
				properties.Set(name, number)
				names = append(names, name)
			})
			return &reflector.Schema{Type: "object", Properties: properties, Required: names}
		case reflect.TypeFor[api.Duration](), reflect.TypeFor[enroll.CIDR](), reflect.TypeFor[netip.Addr](), reflect.TypeFor[netip.AddrPort]():
			return &reflector.Schema{Type: "string"}
		case reflect.TypeFor[map[uint16]int]():
			return &reflector.Schema{Type: "object", AdditionalProperties: number}
		default:
			return nil
		}
	}}
	schema := r.Reflect(value)
	schema.ID = ""
	schema.Title = "redirector " + command + " -o json"
	text, err := json.MarshalIndent(schema, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	return append(text, '\n')
}

func TestTheSchemasAreWhatTheCodeMakes(t *testing.T) {
	for command, value := range outputs {
		want, file := schemaOf(t, command, value), filepath.Join(schemaDir, command+".json")
		if *updateSchemas {
			if err := os.WriteFile(file, want, 0o644); err != nil {
				t.Fatal(err)
			}
			continue
		}
		have, err := os.ReadFile(file)
		if errors.Is(err, os.ErrNotExist) && os.Getenv("VMTEST_IN_VM") != "" {
			t.Skip("the schemas are not in the guest")
		}
		if d := cmp.Diff(string(want), string(have)); d != "" || err != nil {
			t.Errorf("%s is not what the code makes, %v: run go test ./cmd/redirector/app -run Schemas -update (-code +file):\n%s", file, err, d)
		}
	}
	for _, cmd := range newRoot(&Env{Getenv: func(string) string { return "" }}).Commands() {
		if cmd.Flags().Lookup("output") != nil && outputs[cmd.Name()] == nil {
			t.Errorf("what %s prints has no schema", cmd.Name())
		}
	}
}

// What the commands print is as their schemas say.
func TestWhatIsPrintedFitsItsSchema(t *testing.T) {
	m := newMachine(t)
	if err := m.JoinCgroup(); err != nil {
		t.Fatal(err)
	}
	pod := m.pod("web")
	app := m.serveOn(m.Outside)
	m.agent()
	m.proxy()
	run(t, nil, m.enrollFlags(pod, "--wait-proxy", "--timeout", "20s")...).wantDone(t)
	watched := make(chan string, 1)
	go func() {
		watched <- run(t, nil, "monitor", "--run-dir", m.RunDir, "--for", "3s", "-o", "json").stdout
	}()
	for stop := time.Now().Add(2 * time.Second); time.Now().Before(stop); time.Sleep(200 * time.Millisecond) {
		c, err := pod.Dial(t.Context(), bed.DialSpec{Remote: netip.AddrPortFrom(m.Outside.V6, app.Port)})
		if err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
	}
	printed := map[string][]string{"monitor": slices.Collect(strings.Lines(<-watched))}
	for command, args := range map[string][]string{
		"status": nil, "pods": nil, "pod": {"web"}, "verify": {"web"}, "explain": {"--pod", "web", "--to", "198.51.100.7:443"},
	} {
		printed[command] = []string{run(t, nil, append([]string{command, "--run-dir", m.RunDir, "-o", "json"}, args...)...).stdout}
	}
	for _, command := range []string{"check", "version"} {
		printed[command] = []string{run(t, nil, command, "-o", "json").stdout}
	}
	for command, value := range outputs {
		document, err := jsonschema.UnmarshalJSON(bytes.NewReader(schemaOf(t, command, value)))
		if err != nil {
			t.Fatal(err)
		}
		compiler := jsonschema.NewCompiler()
		if err := compiler.AddResource(command+".json", document); err != nil {
			t.Fatal(err)
		}
		schema, err := compiler.Compile(command + ".json")
		if err != nil {
			t.Fatal(err)
		}
		if len(printed[command]) == 0 {
			t.Errorf("%s prints nothing", command)
		}
		for _, text := range printed[command] {
			instance, err := jsonschema.UnmarshalJSON(strings.NewReader(text))
			if err == nil {
				err = schema.Validate(instance)
			}
			if err != nil {
				t.Errorf("%s prints %s, which does not fit its schema: %v", command, text, err)
			}
		}
		if schema.Validate("nonsense") == nil {
			t.Errorf("the schema of %s takes anything", command)
		}
	}
}

// Every example in --help is of a command that there is, with flags that it has.
func TestExamplesAreValid(t *testing.T) {
	root := newRoot(&Env{Getenv: func(string) string { return "" }})
	for _, cmd := range append(root.Commands(), root) {
		text := strings.ReplaceAll(cmd.Example, "\\\n", " ")
		for line := range strings.Lines(text) {
			fields := strings.Fields(strings.TrimSuffix(strings.TrimSpace(line), "&"))
			i := slices.Index(fields, "redirector")
			if i < 0 {
				if len(fields) > 0 {
					t.Errorf("%s: %q is no command of ours", cmd.Name(), line)
				}
				continue
			}
			if i > 0 && len(fields) == i+1 && cmd.Name() == "cni" {
				continue // by its environment it is the plugin
			}
			if end := slices.IndexFunc(fields, func(f string) bool { return f == "<" || f == ">" || f == "|" }); end > 0 {
				fields = fields[:end]
			}
			fresh := newRoot(&Env{Getenv: func(string) string { return "" }})
			named, rest, err := fresh.Find(fields[i+1:])
			if err == nil {
				err = named.ParseFlags(rest)
			}
			if err == nil {
				err = named.ValidateArgs(named.Flags().Args())
			}
			if err != nil {
				t.Errorf("%s: the example %q is wrong: %v", cmd.Name(), strings.TrimSpace(line), err)
			}
			if cmd != root && named.Name() != cmd.Name() {
				t.Errorf("%s: the example %q is one of %s", cmd.Name(), strings.TrimSpace(line), named.Name())
			}
		}
	}
}
