// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// build builds this command itself, as a program to be put into an image.
func build(t *testing.T, arch, cgo string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "program-"+arch)
	cmd := exec.CommandContext(t.Context(), "go", "build", "-buildvcs=false", "-trimpath", "-ldflags=-s -w", "-o", file, ".")
	cmd.Env = append(os.Environ(), "GOOS=linux", "GOARCH="+arch, "CGO_ENABLED="+cgo)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return file
}

// contents are the files in a directory, by path.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		all[strings.TrimPrefix(path, dir)] = string(text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestImage(t *testing.T) {
	programs := []string{"amd64=" + build(t, "amd64", "0"), "arm64=" + build(t, "arm64", "0")}
	out, again := t.TempDir(), t.TempDir()
	for _, dir := range []string{out, again} {
		if err := write(options{dir, "redirector", "redirector:1.2.3", "1.2.3", "abc"}, programs); err != nil {
			t.Fatal(err)
		}
	}

	t.Run("is the same each time", func(t *testing.T) {
		first, second := contents(t, out), contents(t, again)
		if len(first) != len(second) || len(first) < 10 {
			t.Errorf("there are %d files, and then %d", len(first), len(second))
		}
		for path, text := range first {
			if second[path] != text {
				t.Errorf("%s is not the same", path)
			}
		}
	})

	t.Run("has one file and starts it", func(t *testing.T) {
		for _, program := range programs {
			arch, file, _ := strings.Cut(program, "=")
			image, err := tarball.ImageFromPath(filepath.Join(out, "redirector-"+arch+".tar"), nil)
			if err != nil {
				t.Fatal(err)
			}
			config, err := image.ConfigFile()
			if err != nil {
				t.Fatal(err)
			}
			if config.Architecture != arch || config.OS != "linux" || strings.Join(config.Config.Entrypoint, " ") != "/redirector" {
				t.Errorf("the configuration is %+v", config)
			}
			if got := config.Config.Labels["org.opencontainers.image.version"]; got != "1.2.3" {
				t.Errorf("the version is %q", got)
			}
			files := mutate.Extract(image)
			r := tar.NewReader(files)
			header, err := r.Next()
			if err != nil || header.Name != "redirector" || header.Mode != 0o755 || header.Uid != 0 {
				t.Fatalf("the image has %+v, %v", header, err)
			}
			text, err := io.ReadAll(r)
			if err != nil {
				t.Fatal(err)
			}
			if want, err := os.ReadFile(file); err != nil || !bytes.Equal(want, text) {
				t.Errorf("the program is not the one that was given (%v)", err)
			}
			if header, err := r.Next(); err != io.EOF {
				t.Errorf("the image also has %+v, %v", header, err)
			}
			if err := files.Close(); err != nil {
				t.Error(err)
			}
		}
	})

	t.Run("is an OCI layout of both architectures", func(t *testing.T) {
		index, err := layout.ImageIndexFromPath(filepath.Join(out, "oci"))
		if err != nil {
			t.Fatal(err)
		}
		top, err := index.IndexManifest()
		if err != nil || len(top.Manifests) != 1 {
			t.Fatalf("the layout has %+v, %v", top, err)
		}
		if got := top.Manifests[0].Annotations["org.opencontainers.image.ref.name"]; got != "1.2.3" {
			t.Errorf("it is called %q", got)
		}
		images, err := index.ImageIndex(top.Manifests[0].Digest)
		if err != nil {
			t.Fatal(err)
		}
		list, err := images.IndexManifest()
		if err != nil || len(list.Manifests) != 2 {
			t.Fatalf("the index has %+v, %v", list, err)
		}
		for i, arch := range []string{"amd64", "arm64"} {
			if p := list.Manifests[i].Platform; p == nil || p.Architecture != arch || p.OS != "linux" {
				t.Errorf("image %d is for %v", i, p)
			}
		}
	})

	t.Run("has a bill of materials", func(t *testing.T) {
		text, err := os.ReadFile(filepath.Join(out, "redirector-amd64.cdx.json"))
		if err != nil {
			t.Fatal(err)
		}
		var bill struct {
			BOMFormat  string `json:"bomFormat"`
			Components []struct {
				Name   string
				PURL   string
				Hashes []struct{ Content string }
			}
		}
		if err := json.Unmarshal(text, &bill); err != nil || bill.BOMFormat != "CycloneDX" {
			t.Fatalf("it is %q, %v", bill.BOMFormat, err)
		}
		found := false
		for _, c := range bill.Components {
			if c.Name == "github.com/google/go-containerregistry" {
				found = strings.HasPrefix(c.PURL, "pkg:golang/"+c.Name+"@v") && len(c.Hashes) == 1 && len(c.Hashes[0].Content) == 64
			}
		}
		if !found {
			t.Errorf("a module that the program uses is not in it:\n%s", text)
		}
	})
}

func TestWhatWouldNotRunIsRefused(t *testing.T) {
	huge := build(t, "amd64", "0")
	if err := os.Truncate(huge, maxSize+1); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ program, tag, want string }{
		{"amd64=" + huge, "redirector:1", "an image must not be larger than 41943040"},
		{"arm64=" + build(t, "amd64", "0"), "redirector:1", "was built with GOARCH=amd64: build it with arm64"},
		{"amd64=" + build(t, "amd64", "1"), "redirector:1", "was built with CGO_ENABLED=1: build it with 0"},
		{"amd64=image_test.go", "redirector:1", "image_test.go is no Go program"},
		{"amd64", "redirector:1", `"amd64" is not ARCH=FILE`},
		{"amd64=x", "Redirector:1", `bad -tag "Redirector:1"`},
	} {
		if err := write(options{t.TempDir(), "redirector", tt.tag, "1", ""}, []string{tt.program}); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s %s: %v, want %q", tt.program, tt.tag, err, tt.want)
		}
	}
}
