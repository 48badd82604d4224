// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"bytes"
	"slices"
	"testing"

	"github.com/containernetworking/cni/libcni"
)

// FuzzChain puts the plugin into whatever libcni takes for a list, and takes it out again.
func FuzzChain(f *testing.F) {
	for _, text := range lists {
		f.Add([]byte(text))
	}
	for _, text := range []string{
		`{"cniVersion":"1.0.0","name":"a","plugins":[{"type":"redirector"},{"type":"ptp"}]}`,
		`{"cniVersion":"1.0.0","name":"a","plugins":[{"type":"ptp"},{"type":"redirector"},{"type":"redirector","x":1}]}`,
		`{"cniVersion":"1.0.0","name":"a","plugins":[{"type":"redirector"}]}`,
		`{"cniVersion":"1.0.0","name":"a","Plugins":[{"type":"x"}],"plugins":[{"type":"ptp"}],"\u0070lugins":[{"type":"y"}]}`,
		`{"cniVersion":"1.0.0","name":"a","plugins":null,"plugins":[{"type":"ptp","name":"]}"}]}`,
		`{"cniVersion":"1.0.0","name":"a","plugins":[{"type":"ptp"}],"x":{"plugins":[{"type":"redirector"}]}}`,
	} {
		f.Add([]byte(text))
	}
	entry := []byte(`{"type":"redirector","excludeNamespaces":["kube-system"]}`)
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := parseChain(text)
		if err != nil {
			return // left out, as runtimes do
		}
		if len(c.plugins) != len(c.types) {
			t.Fatalf("%d plugins have %d types", len(c.plugins), len(c.types))
		}
		others := slices.DeleteFunc(slices.Clone(c.types), func(kind string) bool { return kind == PluginType })
		with, err := c.withEntry(entry)
		if err != nil {
			if len(others) > 0 {
				t.Fatalf("it cannot be chained into: %v", err)
			}
			return
		}
		list, err := libcni.NetworkConfFromBytes(with.text)
		if err != nil {
			t.Fatalf("what was made of it cannot be read: %v\n%s", err, with.text)
		}
		var kinds []string
		for _, plugin := range list.Plugins {
			kinds = append(kinds, plugin.Network.Type)
		}
		mine := slices.Index(kinds, PluginType)
		if mine < 1 || !slices.Equal(slices.Delete(slices.Clone(kinds), mine, mine+1), others) {
			t.Fatalf("the plugins are %q, and were %q", kinds, c.types)
		}
		again, err := with.withEntry(entry)
		if err != nil || !bytes.Equal(again.text, with.text) {
			t.Fatalf("a second time it is another, %v:\n%s\n%s", err, with.text, again.text)
		}
		bare, err := with.stripped()
		if err != nil || bare == nil {
			t.Fatalf("it cannot be taken out: %v", err)
		}
		if len(c.ours()) == 0 && !bytes.Equal(bare.text, text) {
			t.Fatalf("it is not as it was:\n%s\n%s", text, bare.text)
		}
	})
}

// FuzzSingle makes a list of whatever libcni takes for a single plugin's configuration.
func FuzzSingle(f *testing.F) {
	for _, text := range singles {
		f.Add([]byte(text))
	}
	entry := []byte(`{"type":"redirector"}`)
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := wrap(text)
		if err != nil || c.types[0] == PluginType {
			return
		}
		with, err := c.withEntry(entry)
		if err != nil {
			t.Fatal(err)
		}
		bare, err := with.stripped()
		if err != nil || !bytes.Equal(bytes.TrimSpace(bare.plugin(0)), bytes.TrimSpace(text)) {
			t.Fatalf("the plugin's configuration is not as it was, %v:\n%s\n%s", err, text, bare.plugin(0))
		}
	})
}
