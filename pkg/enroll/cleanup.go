// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/redirector-dataplane/redirector/pkg/loader"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/pkg/podns"
)

// Cleanup takes everything off the node that agents have put there: from the network namespace of each pod that can be
// found, from bpffs, and from stateDir. It goes on after failures. That there is nothing is no error; that an agent uses the
// dataplane is (loader.ErrInUse), and then nothing is changed.
func Cleanup(bpffs, stateDir string) error {
	datapath, err := loader.OpenMaps(bpffs)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	restore := map[uint64]maps.Restore{}
	if datapath != nil {
		pods, err := datapath.Maps().Pods()
		if err != nil {
			return errors.Join(err, datapath.Close())
		}
		for cookie, pod := range pods {
			restore[cookie] = pod.Restore
			// Capture ends before its routes do.
			if err := datapath.Maps().DeletePod(cookie); err != nil {
				return errors.Join(err, datapath.Close())
			}
		}
		if err := datapath.Close(); err != nil {
			return err
		}
	}

	var errs []error
	// All namespaces, not only those in the map: an agent may have died between its first step and the map entry.
	for ns, err := range podns.All() {
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if err := strip(ns, restore[ns.Cookie()]); err != nil {
			errs = append(errs, fmt.Errorf("clean up network namespace %s: %w", ns.Path(), err))
		}
	}
	errs = append(errs, loader.Unload(bpffs))

	files, err := filepath.Glob(filepath.Join(stateDir, "*"+stateSuffix))
	errs = append(errs, err)
	for _, file := range files {
		errs = append(errs, os.Remove(file))
	}
	return errors.Join(errs...)
}
