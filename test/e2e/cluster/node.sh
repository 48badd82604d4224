#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# node.sh: the first process of a node's namespaces: mount, net, pid, uts, ipc, cgroup. up.sh starts it, with the node's name in NODE.
# What it starts and mounts dies with it. The disk is $STATE/NODE/disk; like the state, it is on a file system that can be the upper
# one of an overlay.
set -euo pipefail
# shellcheck source=test/e2e/cluster/env.sh
. "$(dirname "$0")/env.sh"

: "${NODE:?names the node}"
dir=$STATE/$NODE log=$STATE/$NODE/log conf=$STATE/$NODE/conf disk=$STATE/$NODE/disk
ip=$(node_ip "$NODE") pods=$(pod_cidr "$NODE")

# Its own /etc, /opt and /var: the machine's, with what the node writes on its disk. /run goes with a reboot.
mount --make-rprivate /
for d in var etc opt; do
	mkdir -p "$disk/$d" "$disk/.work/$d"
	mount -t overlay -o "lowerdir=/$d,upperdir=$disk/$d,workdir=$disk/.work/$d" overlay "/$d"
done
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/lock /run/netns /var/lib/{kubelet,containerd,cni,etcd} /var/log/pods /etc/cni/net.d /opt/cni/bin
[ -e /var/run ] || ln -s /run /var/run
# They make overlays themselves, or want no overlay below.
for d in kubelet containerd etcd; do
	mkdir -p "$disk/.$d"
	mount --bind "$disk/.$d" "/var/lib/$d"
done
mount -t sysfs sysfs /sys
if [ -n "$CONTROLLERS" ]; then
	mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
	for c in $CONTROLLERS; do
		mkdir -p "/sys/fs/cgroup/${c#name=}"
		mount -t cgroup -o "$c" cgroup "/sys/fs/cgroup/${c#name=}"
	done
	mkdir -p /sys/fs/cgroup/unified
	mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified
else
	mount -t cgroup2 cgroup2 /sys/fs/cgroup
fi
mount -t bpf bpf /sys/fs/bpf
# The kubelet wants these sysctls so, and would set them for the whole machine: it sees files that say so already.
mkdir -p /run/sysctl
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
	kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
	file=/proc/sys/${setting%=*} value=${setting#*=} own=/run/sysctl/${setting//\//_}
	[ "$(cat "$file")" != "$value" ] || continue
	echo "$value" >"$own"
	mount --bind "$own" "$file"
done
mount --make-rshared /
hostname "$NODE"

# The network: eth0 of each node is on a switch in node1's namespace "outside", which is also a host that is not in the cluster.
ip link set lo up
if [ "$NODE" = node1 ]; then
	ip netns add outside
	ip -n outside link set lo up
	ip -n outside link add sw0 type bridge
	ip -n outside addr add "$OUTSIDE_IP/24" dev sw0
	ip -n outside link set sw0 up
	ip link add eth0 type veth peer name node1 netns outside
	ip -n outside link set node1 master sw0 up
	for n in $NODES; do ip -n outside route add "$(pod_cidr "$n")" via "$(node_ip "$n")"; done
	ip -n outside route add "$SERVICE_CIDR" via "$ip"
	touch "$dir/fabric"
else
	until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done
fi
ip addr add "$ip/24" dev eth0
ip link set eth0 up
ip route add default via "$OUTSIDE_IP"
for n in $NODES; do
	[ "$n" = "$NODE" ] || ip route add "$(pod_cidr "$n")" via "$(node_ip "$n")"
done
echo 1 >/proc/sys/net/ipv4/ip_forward
[ ! -e /proc/sys/net/bridge ] || echo 1 >/proc/sys/net/bridge/bridge-nf-call-iptables

# The oom_score_adj of root may not be lowered everywhere.
cat >"$conf/containerd.toml" <<EOF
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/app:1"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/opt/cni/bin"
    conf_dir = "/etc/cni/net.d"
EOF
if [ ! -e /etc/cni/net.d/10-net.conflist ]; then
	cp /usr/lib/cni/* /opt/cni/bin/
	cat >/etc/cni/net.d/10-net.conflist <<EOF
{"cniVersion":"0.4.0","name":"podnet","plugins":[
 {"type":"$CNI","bridge":"cni0","isGateway":true,"hairpinMode":true,"ipMasq":false,
  "ipam":{"type":"host-local","ranges":[[{"subnet":"$pods"}]],"routes":[{"dst":"0.0.0.0/0"}]}},
 {"type":"portmap","capabilities":{"portMappings":true}}]}
EOF
fi
cat >"$conf/kubelet.yaml" <<EOF
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
failCgroupV1: false
cgroupDriver: cgroupfs
failSwapOn: false
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $PKI/ca.crt}}
authorization: {mode: Webhook}
tlsCertFile: $PKI/$NODE.crt
tlsPrivateKeyFile: $PKI/$NODE.key
volumePluginDir: /var/lib/kubelet/volumeplugins
resolvConf: ""
clusterDNS: ["10.96.0.10"]
clusterDomain: cluster.local
makeIPTablesUtilChains: false
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
evictionHard: {memory.available: "50Mi", nodefs.available: "0%", nodefs.inodesFree: "0%", imagefs.available: "0%", imagefs.inodesFree: "0%"}
EOF
cat >"$conf/proxy.yaml" <<EOF
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
clusterCIDR: $CLUSTER_CIDR
clientConnection: {kubeconfig: $PKI/proxy.kubeconfig}
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
EOF

# run NAME COMMAND...: in the background, with a log.
run() {
	local name=$1
	shift
	"$@" >"$log/$name.log" 2>&1 &
}
# wait_for COMMAND...: up to a minute.
wait_for() {
	local i
	for ((i = 0; i < 600; i++)); do
		"$@" >/dev/null 2>&1 && return
		sleep 0.1
	done
	echo "did not happen within a minute: $*" >&2
	return 1
}
kubectl() { "$KUBE" kubectl --cache-dir=/run/kubectl-cache --kubeconfig "$PKI/admin.kubeconfig" "$@"; }
ctr() { command ctr -a /run/containerd/containerd.sock "$@"; }
node_is_ready() { kubectl get node "$NODE" -o 'jsonpath={.status.conditions[?(@.type=="Ready")].status}' | grep -q True; }

run containerd containerd --config "$conf/containerd.toml"
if [ "$NODE" = node1 ]; then
	run etcd "$KUBE" etcd --name e --data-dir /var/lib/etcd/d --listen-client-urls http://127.0.0.1:2379 \
		--advertise-client-urls http://127.0.0.1:2379 --listen-peer-urls http://127.0.0.1:2380 \
		--initial-advertise-peer-urls http://127.0.0.1:2380 --initial-cluster e=http://127.0.0.1:2380 --unsafe-no-fsync --log-level warn
	run kube-apiserver "$KUBE" kube-apiserver --etcd-servers=http://127.0.0.1:2379 --advertise-address="$ip" --bind-address=0.0.0.0 \
		--secure-port=6443 --service-cluster-ip-range="$SERVICE_CIDR" \
		--tls-cert-file="$PKI/apiserver.crt" --tls-private-key-file="$PKI/apiserver.key" --client-ca-file="$PKI/ca.crt" \
		--kubelet-client-certificate="$PKI/kubelet-client.crt" --kubelet-client-key="$PKI/kubelet-client.key" \
		--kubelet-certificate-authority="$PKI/ca.crt" --kubelet-preferred-address-types=InternalIP \
		--service-account-issuer=https://kubernetes.default.svc --service-account-key-file="$PKI/sa.pub" \
		--service-account-signing-key-file="$PKI/sa.key" --authorization-mode=Node,RBAC \
		--enable-admission-plugins=NodeRestriction --allow-privileged=true \
		--requestheader-client-ca-file="$PKI/ca.crt" --requestheader-allowed-names=front-proxy \
		--requestheader-username-headers=X-Remote-User --requestheader-group-headers=X-Remote-Group \
		--requestheader-extra-headers-prefix=X-Remote-Extra- --endpoint-reconciler-type=lease --cert-dir=/run/apiserver
fi
wait_for ctr version
for image in "$STATE"/images/*.tar; do ctr -n k8s.io images import "$image"; done
wait_for curl -sf --cacert "$PKI/ca.crt" --cert "$PKI/admin.crt" --key "$PKI/admin.key" "https://$API_IP:6443/readyz"
if [ "$NODE" = node1 ]; then
	run kube-controller-manager "$KUBE" kube-controller-manager --kubeconfig="$PKI/controllers.kubeconfig" \
		--authentication-kubeconfig="$PKI/controllers.kubeconfig" --authorization-kubeconfig="$PKI/controllers.kubeconfig" \
		--service-account-private-key-file="$PKI/sa.key" --root-ca-file="$PKI/ca.crt" --cluster-cidr="$CLUSTER_CIDR" \
		--allocate-node-cidrs=false --kube-api-qps=200 --kube-api-burst=400 --cluster-signing-cert-file="$PKI/ca.crt" \
		--cluster-signing-key-file="$PKI/ca.key" --leader-elect=false --bind-address=127.0.0.1 --cert-dir=/run/controllers \
		--flex-volume-plugin-dir=/var/lib/kubelet/volumeplugins
	run kube-scheduler "$KUBE" kube-scheduler --kubeconfig="$PKI/scheduler.kubeconfig" \
		--authentication-kubeconfig="$PKI/scheduler.kubeconfig" --authorization-kubeconfig="$PKI/scheduler.kubeconfig" \
		--leader-elect=false --bind-address=127.0.0.1 --cert-dir=/run/scheduler
fi
run kubelet "$KUBE" kubelet --config="$conf/kubelet.yaml" --kubeconfig="$PKI/$NODE.kubeconfig" --hostname-override="$NODE" --node-ip="$ip"
run kube-proxy "$KUBE" kube-proxy --config="$conf/proxy.yaml" --hostname-override="$NODE"
wait_for node_is_ready
kubectl patch node "$NODE" -p "{\"spec\":{\"podCIDR\":\"$pods\",\"podCIDRs\":[\"$pods\"]}}" >/dev/null
wait_for kubectl -n default get serviceaccount default
touch "$dir/ready"

# Reap what is handed to the first process: shims, containers.
set +e
trap 'exit 0' TERM
while :; do
	sleep 3600 &
	wait $!
done
