// SPDX-License-Identifier: Apache-2.0

package podns

import (
	"testing"
)

func TestPodUID(t *testing.T) {
	const (
		uid    = "0f0c5a6e-2f5c-4c53-9c2b-1f2e3d4c5b6a"
		under  = "0f0c5a6e_2f5c_4c53_9c2b_1f2e3d4c5b6a"
		static = "5a6e0f0c2f5c4c539c2b1f2e3d4c5b6a"
		other  = "7b7d1111-2f5c-4c53-9c2b-1f2e3d4c5b6a"
	)
	for _, c := range []struct{ name, cgroup, want string }{
		{"v2, systemd, containerd", "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + under + ".slice/cri-containerd-aa.scope\n", uid},
		{"v2, systemd, guaranteed, CRI-O", "0::/kubepods.slice/kubepods-pod" + under + ".slice/crio-aa.scope\n", uid},
		{"v2, systemd, a container's own groups", "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod" + under + ".slice/crio-a.scope/container/init.scope", uid},
		{"v2, cgroupfs", "0::/kubepods/burstable/pod" + uid + "/aa\n", uid},
		{"v2, cgroupfs, CRI-O", "0::/kubepods/besteffort/pod" + uid + "/crio-aa", uid},
		{"v2, a nested kubelet", "0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-pod" + under + ".slice/cri-containerd-aa.scope", uid},
		{"v2, from a cgroup namespace, systemd", "0::/../../kubepods-burstable-pod" + under + ".slice/cri-containerd-aa.scope", uid},
		{"v2, from a cgroup namespace, cgroupfs", "0::/../../pod" + uid + "/aa", uid},
		{"a static pod", "0::/kubepods/burstable/pod" + static + "/aa", static},
		{"v1", "12:pids:/kubepods/burstable/pod" + uid + "/aa\n3:cpu,cpuacct:/kubepods/burstable/pod" + uid + "/aa\n1:name=systemd:/kubepods/burstable/pod" + uid + "/aa\n", uid},
		{"v1, systemd", "1:name=systemd:/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + under + ".slice/cri-containerd-aa.scope", uid},
		{"hybrid", "4:memory:/kubepods/burstable/pod" + uid + "/aa\n1:name=systemd:/kubepods/burstable/pod" + uid + "/aa\n0::/\n", uid},
		{"v1, a named hierarchy with colons in the path", "1:name=systemd:/kubepods/burstable/pod" + uid + "/a:b:c", uid},
		{"v1, a runtime with another driver than the kubelet's", "1:cpu:/system.slice/containerd.service/kubepods-burstable-pod" + under + ".slice:cri-containerd:aa", uid},
		{"a pod in a pod", "0::/kubepods/burstable/pod" + uid + "/aa/kubepods/burstable/pod" + other + "/bb", uid},
		{"hierarchies that disagree", "2:cpu:/kubepods/burstable/pod" + uid + "/aa\n1:pids:/kubepods/burstable/pod" + other + "/bb\n", ""},
		{"the root", "0::/\n", ""},
		{"a service", "0::/system.slice/kubelet.service\n", ""},
		{"the pods' own group", "0::/kubepods.slice/kubepods-burstable.slice\n", ""},
		{"a UID with more behind it", "0::/kubepods/burstable/pod" + uid + "0/aa", ""},
		{"no UID", "0::/kubepods/burstable/podcast/aa", ""},
		{"another's slice", "0::/user.slice/user-pod" + under + ".slice", ""},
		{"nothing", "", ""},
		{"nonsense", "pod" + uid, ""},
	} {
		if got := PodUID(c.cgroup); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}
