// SPDX-License-Identifier: Apache-2.0

// Command image makes the container image of Redirector from its static programs, without a registry and without a container
// runtime: one layer with one file. The same programs make the same image, byte for byte, wherever and whenever that is done.
//
//	image -tag redirector:1.2.3 -version 1.2.3 -o DIR amd64=FILE arm64=FILE
//
// It writes to DIR
//
//	oci/                 the image of all architectures, as an OCI layout
//	NAME-ARCH.tar        that of one, as docker save has it: for docker load and ctr images import
//	NAME-ARCH.cdx.json   what the program is made of, in CycloneDX
//
// NAME is redirector, or what -name says, and that of the program in the image, too.
package main

import (
	"archive/tar"
	"bytes"
	"debug/buildinfo"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

const (
	source = "https://github.com/redirector-dataplane/redirector"
	// maxSize is how large a program may be: nodes load it, and the disk has it once per version.
	maxSize = 40 << 20
)

// epoch is when everything in the image was made.
var epoch = time.Unix(0, 0).UTC()

// options say what image is made.
type options struct{ out, name, tag, version, commit string }

func main() {
	var o options
	flag.StringVar(&o.name, "name", "redirector", "`NAME` of the program in the image")
	flag.StringVar(&o.tag, "tag", "", "`NAME:TAG` of the image")
	flag.StringVar(&o.version, "version", "", "version of the program")
	flag.StringVar(&o.commit, "commit", "", "commit that it was built from")
	flag.StringVar(&o.out, "o", "", "`DIR` to write to")
	flag.Parse()
	if err := write(o, flag.Args()); err != nil {
		fmt.Fprintf(os.Stderr, "image: %v\n", err)
		os.Exit(1)
	}
}

// write makes everything; programs are ARCH=FILE.
func write(o options, programs []string) error {
	if o.out == "" || o.name == "" || o.version == "" || len(programs) == 0 {
		return errors.New("flags or programs are missing: image -tag NAME:TAG -version VERSION -o DIR ARCH=FILE")
	}
	ref, err := name.NewTag(o.tag)
	if err != nil {
		return fmt.Errorf("bad -tag %q: %w", o.tag, err)
	}
	if err := os.MkdirAll(o.out, 0o755); err != nil {
		return err
	}
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, program := range programs {
		arch, file, ok := strings.Cut(program, "=")
		if !ok {
			return fmt.Errorf("%q is not ARCH=FILE", program)
		}
		built, err := check(file, arch)
		if err != nil {
			return err
		}
		image, err := imageOf(o, file, arch)
		if err != nil {
			return fmt.Errorf("make the image of %s: %w", file, err)
		}
		if err := tarball.WriteToFile(filepath.Join(o.out, o.name+"-"+arch+".tar"), ref, image); err != nil {
			return fmt.Errorf("write the image of %s: %w", file, err)
		}
		if err := writeBill(filepath.Join(o.out, o.name+"-"+arch+".cdx.json"), built, o); err != nil {
			return fmt.Errorf("write what %s is made of: %w", file, err)
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add:        image,
			Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}},
		})
	}
	dir := filepath.Join(o.out, "oci")
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	path, err := layout.Write(dir, empty.Index)
	if err != nil {
		return fmt.Errorf("write the OCI layout: %w", err)
	}
	// The name by which tools that read a layout know the image.
	named := layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": ref.TagStr()})
	if err := path.AppendIndex(index, named); err != nil {
		return fmt.Errorf("write the OCI layout: %w", err)
	}
	return nil
}

// check reads what a program was built from, and refuses one that would not run in an empty image of the architecture.
func check(file, arch string) (*debug.BuildInfo, error) {
	if stat, err := os.Stat(file); err == nil && stat.Size() > maxSize {
		return nil, fmt.Errorf("%s has %d bytes: an image must not be larger than %d", file, stat.Size(), maxSize)
	}
	info, err := buildinfo.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("%s is no Go program: %w", file, err)
	}
	for _, want := range []debug.BuildSetting{{Key: "GOOS", Value: "linux"}, {Key: "GOARCH", Value: arch}, {Key: "CGO_ENABLED", Value: "0"}} {
		for _, is := range info.Settings {
			if is.Key == want.Key && is.Value != want.Value {
				return nil, fmt.Errorf("%s was built with %s=%s: build it with %s", file, is.Key, is.Value, want.Value)
			}
		}
	}
	return info, nil
}

// imageOf makes the image of one architecture.
func imageOf(o options, file, arch string) (v1.Image, error) {
	text, err := layerOf(file, o.name)
	if err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(text)), nil },
		tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, err
	}
	image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	image, err = mutate.Append(image, mutate.Addendum{
		Layer:   layer,
		History: v1.History{Created: v1.Time{Time: epoch}, CreatedBy: "deploy/image"},
	})
	if err != nil {
		return nil, err
	}
	return mutate.ConfigFile(image, &v1.ConfigFile{
		OS:           "linux",
		Architecture: arch,
		Created:      v1.Time{Time: epoch},
		RootFS:       v1.RootFS{Type: "layers", DiffIDs: diffIDs(layer)},
		History:      []v1.History{{Created: v1.Time{Time: epoch}, CreatedBy: "deploy/image"}},
		Config: v1.Config{
			Entrypoint: []string{"/" + o.name},
			User:       "0:0",
			WorkingDir: "/",
			Labels: map[string]string{
				"org.opencontainers.image.title":    o.name,
				"org.opencontainers.image.version":  o.version,
				"org.opencontainers.image.revision": o.commit,
				"org.opencontainers.image.source":   source,
				"org.opencontainers.image.licenses": "Apache-2.0",
			},
		},
	})
}

func diffIDs(layer v1.Layer) []v1.Hash {
	id, err := layer.DiffID()
	if err != nil {
		panic(err) // the layer is in memory
	}
	return []v1.Hash{id}
}

// layerOf is a layer with the program in it, as a tar archive.
func layerOf(file, name string) ([]byte, error) {
	program, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var text bytes.Buffer
	w := tar.NewWriter(&text)
	if err := w.WriteHeader(&tar.Header{
		Typeflag: tar.TypeReg, Name: name, Mode: 0o755, Size: int64(len(program)), ModTime: epoch,
	}); err != nil {
		return nil, err
	}
	if _, err := w.Write(program); err != nil {
		return nil, err
	}
	return text.Bytes(), w.Close()
}

// writeBill writes the modules that a program consists of, as the Go linker has noted them in it.
func writeBill(path string, built *debug.BuildInfo, o options) error {
	bill := cdx.NewBOM()
	bill.Metadata = &cdx.Metadata{Component: &cdx.Component{
		BOMRef: o.name, Type: cdx.ComponentTypeApplication, Name: o.name, Version: o.version,
		PackageURL: purl(built.Main.Path, o.version),
		Licenses:   &cdx.Licenses{{License: &cdx.License{ID: "Apache-2.0"}}},
	}}
	components := []cdx.Component{{
		BOMRef: "go", Type: cdx.ComponentTypeLibrary, Name: "std", Version: strings.TrimPrefix(built.GoVersion, "go"),
		PackageURL: purl("std", strings.TrimPrefix(built.GoVersion, "go")),
	}}
	for _, module := range built.Deps {
		if module.Replace != nil {
			module = module.Replace
		}
		component := cdx.Component{
			BOMRef: purl(module.Path, module.Version), Type: cdx.ComponentTypeLibrary,
			Name: module.Path, Version: module.Version, PackageURL: purl(module.Path, module.Version),
		}
		if sum, ok := strings.CutPrefix(module.Sum, "h1:"); ok {
			raw, err := base64.StdEncoding.DecodeString(sum)
			if err != nil {
				return fmt.Errorf("module %s has the sum %q: %w", module.Path, module.Sum, err)
			}
			component.Hashes = &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(raw)}}
		}
		components = append(components, component)
	}
	bill.Components = &components
	var text bytes.Buffer
	if err := cdx.NewBOMEncoder(&text, cdx.BOMFileFormatJSON).SetPretty(true).Encode(bill); err != nil {
		return err
	}
	return os.WriteFile(path, text.Bytes(), 0o644)
}

// purl is a module's package URL.
func purl(path, version string) string { return "pkg:golang/" + path + "@" + version }
