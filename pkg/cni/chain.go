// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"
)

// span is a part of a text, [start, end) in bytes.
type span struct{ start, end int }

// chain is the text of a configuration list with the places of its plugins. Editing it leaves every other byte as it is, so that
// what was put in can be taken out again without a trace.
type chain struct {
	text    []byte
	plugins []span
	types   []string
}

// parseChain reads a configuration list that libcni can read, too, and that lists its plugins itself.
func parseChain(text []byte) (*chain, error) {
	list, err := libcni.NetworkConfFromBytes(text)
	if err != nil {
		return nil, err
	}
	if len(list.Plugins) == 0 {
		return nil, errors.New("it has no list of plugins")
	}
	c := &chain{text: text}
	if err := c.locate(); err != nil {
		return nil, err
	}
	if len(c.plugins) != len(list.Plugins) {
		return nil, fmt.Errorf("it has %d plugins where libcni sees %d", len(c.plugins), len(list.Plugins))
	}
	for _, plugin := range list.Plugins {
		c.types = append(c.types, plugin.Network.Type)
	}
	return c, nil
}

// locate finds the plugins. Of several lists the last counts, as for libcni.
func (c *chain) locate() error {
	dec := json.NewDecoder(bytes.NewReader(c.text))
	if _, err := dec.Token(); err != nil { // the opening brace
		return err
	}
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return err
		}
		if key != "plugins" {
			if err := dec.Decode(new(json.RawMessage)); err != nil {
				return err
			}
			continue
		}
		if _, err := dec.Token(); err != nil { // the opening bracket
			return err
		}
		c.plugins = nil
		for dec.More() {
			var plugin json.RawMessage
			if err := dec.Decode(&plugin); err != nil {
				return err
			}
			end := int(dec.InputOffset())
			c.plugins = append(c.plugins, span{end - len(plugin), end})
		}
		if _, err := dec.Token(); err != nil { // the closing bracket
			return err
		}
	}
	return nil
}

func (c *chain) plugin(i int) []byte { return c.text[c.plugins[i].start:c.plugins[i].end] }

// ours returns the indexes of our entries.
func (c *chain) ours() []int {
	var all []int
	for i, t := range c.types {
		if t == PluginType {
			all = append(all, i)
		}
	}
	return all
}

// entry returns one of our entries. What others have made of it may not be readable.
func (c *chain) entry(i int) Entry {
	var e Entry
	_ = json.Unmarshal(c.plugin(i), &e)
	return e
}

// has says whether the entry is there once, behind the plugin that makes the pod's interface, and as it should be.
func (c *chain) has(entry []byte) bool {
	ours := c.ours()
	if len(ours) != 1 || ours[0] == 0 {
		return false
	}
	var there, want bytes.Buffer
	if json.Compact(&there, c.plugin(ours[0])) != nil || json.Compact(&want, entry) != nil {
		return false
	}
	return bytes.Equal(there.Bytes(), want.Bytes())
}

// appended returns the text with one more plugin at the end of the list, set off as the last one is.
func (c *chain) appended(entry []byte) []byte {
	last := c.plugins[len(c.plugins)-1]
	indent := last.start
	for indent > 0 && bytes.IndexByte([]byte(" \t\r\n"), c.text[indent-1]) >= 0 {
		indent--
	}
	return slices.Concat(c.text[:last.end], []byte(","), c.text[indent:last.start], entry, c.text[last.end:])
}

// without returns the text without a plugin, of several.
func (c *chain) without(i int) []byte {
	if i == 0 {
		return slices.Concat(c.text[:c.plugins[0].start], c.text[c.plugins[1].start:])
	}
	return slices.Concat(c.text[:c.plugins[i-1].end], c.text[c.plugins[i].end:])
}

// stripped returns the chain without our entries; nil if nothing is left of it.
func (c *chain) stripped() (*chain, error) {
	for {
		ours := c.ours()
		if len(ours) == 0 {
			return c, nil
		}
		if len(c.plugins) == 1 {
			return nil, nil
		}
		next, err := parseChain(c.without(ours[0]))
		if err != nil {
			return nil, fmt.Errorf("take the redirector plugin out: %w", err)
		}
		c = next
	}
}

// withEntry returns the chain with our entry once, and all else as it is. It stays where it is if it can; others may want to be
// last, too.
func (c *chain) withEntry(entry []byte) (*chain, error) {
	var text []byte
	var others int
	if ours := c.ours(); len(ours) == 1 && ours[0] > 0 {
		at := c.plugins[ours[0]]
		text = slices.Concat(c.text[:at.start], entry, c.text[at.end:])
		others = len(c.plugins) - 1
	} else {
		bare, err := c.stripped()
		if err != nil {
			return nil, err
		}
		if bare == nil {
			return nil, errors.New("there is no other plugin in it")
		}
		text = bare.appended(entry)
		others = len(bare.plugins)
	}
	with, err := parseChain(text)
	if err != nil {
		return nil, fmt.Errorf("put the redirector plugin in: %w", err)
	}
	if !with.has(entry) || len(with.plugins) != others+1 {
		return nil, errors.New("putting the redirector plugin in has not worked out")
	}
	return with, nil
}

// wrap makes a list of a single plugin's configuration, whose text stays as it is within it.
func wrap(text []byte) (*chain, error) {
	conf, err := libcni.NetworkPluginConfFromBytes(text)
	if err != nil {
		return nil, err
	}
	if conf.Network.Name == "" {
		return nil, errors.New("it has no name")
	}
	head, err := json.Marshal(struct {
		CNIVersion string `json:"cniVersion"`
		Name       string `json:"name"`
	}{conf.Network.CNIVersion, conf.Network.Name})
	if err != nil {
		return nil, err
	}
	return parseChain(slices.Concat(head[:len(head)-1], []byte(`,"plugins":[`), text, []byte("]}\n")))
}

// checkVersion refuses a chain of a version that the plugin does not know, or in which plugins are not told of the results before
// them.
func (c *chain) checkVersion() error {
	list, err := libcni.NetworkConfFromBytes(c.text)
	if err != nil {
		return err
	}
	if known := versions.SupportedVersions(); !slices.Contains(known, list.CNIVersion) {
		return fmt.Errorf("its cniVersion is %q: the redirector plugin needs one of %s", list.CNIVersion, strings.Join(known, ", "))
	}
	return nil
}
