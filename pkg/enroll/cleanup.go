// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/redirector-dataplane/redirector/pkg/hostprobe"
	"github.com/redirector-dataplane/redirector/pkg/loader"
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
	saved, unread, err := readStates(stateDir)
	if err != nil {
		return errors.Join(err, datapath.Close())
	}
	errs, err := leaveAll(datapath, saved)
	if datapath != nil {
		errs = append(errs, leaveHost(datapath))
	}
	if err := errors.Join(err, datapath.Close()); err != nil {
		return err
	}
	errs = append(errs, loader.Unload(bpffs))
	if err := errors.Join(errs...); err != nil {
		return err // with the notes still there, for another try
	}

	files, err := filepath.Glob(filepath.Join(stateDir, "*"+stateSuffix))
	errs = append(errs, err, removeHalfWritten(stateDir))
	for _, file := range files {
		errs = append(errs, os.Remove(file))
	}
	if len(unread) > 0 {
		errs = append(errs, fmt.Errorf("of some pods it was not known what to restore: look at their sysctls tcp_fwmark_accept and fwmark_reflect: %w", errors.Join(unread...)))
	}
	return errors.Join(errs...)
}

// leaveHost takes the addresses that probes come from off the host's lo.
func leaveHost(datapath *loader.Datapath) error {
	config, err := datapath.Maps().Config()
	if err != nil {
		return err
	}
	return hostprobe.Remove(hostprobe.Addrs{V4: config.ProbeV4, V6: config.ProbeV6})
}

// leaveAll takes the dataplane, which may be nil, out of all network namespaces. It returns what went wrong in single ones,
// and what kept it from looking at them at all.
func leaveAll(datapath *loader.Datapath, saved map[string]savedPod) (single []error, err error) {
	was := map[uint64]before{}
	for _, s := range saved {
		was[s.NetNSCookie] = s.Before
	}
	if datapath != nil {
		pods, err := datapath.Maps().Pods()
		if err != nil {
			return nil, err
		}
		for cookie, pod := range pods {
			b := was[cookie]
			b.Restore = pod.Restore
			was[cookie] = b
			// Capture ends before its routes do.
			if err := datapath.Maps().DeletePod(cookie); err != nil {
				return nil, err
			}
		}
	}

	// All namespaces, not only those in the map: an agent may have died between its first step and the map entry, or its pins
	// may be gone. Beside another dataplane, only those that are surely not its own.
	for ns, err := range podns.All() {
		if err != nil {
			return single, err
		}
		then, ours := was[ns.Cookie()]
		if !ours {
			ours, err = noOthers(datapath, ns)
		}
		if ours {
			err = strip(ns, then)
		}
		if err != nil {
			single = append(single, fmt.Errorf("clean up network namespace %s: %w", ns.Path(), err))
		}
	}
	return single, nil
}

// noOthers says whether the namespace is surely not another dataplane's. That is asked for each, since one may begin at any time: its
// programs are there before it enrols its first pod.
func noOthers(datapath *loader.Datapath, ns *podns.NetNS) (bool, error) {
	others, err := datapath.OthersAtWork()
	if err != nil || !others {
		return err == nil, err
	}
	return sealedBy(datapath, ns)
}

// sealedBy says whether an interface in the namespace has a seal of the dataplane.
func sealedBy(datapath *loader.Datapath, ns *podns.NetNS) (bool, error) {
	n, err := openPodNet(ns)
	if err != nil {
		return false, err
	}
	defer n.close()
	for _, l := range n.links {
		if sealed, err := datapath.HasSealed(n.handle, l); err != nil || sealed {
			return sealed, err
		}
	}
	return false, nil
}
