#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# up.sh [NODE...]: starts nodes, all of NODES by default, and returns when they are ready. A node that was stopped by down.sh comes up
# with the disk that it had.
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source=test/e2e/cluster/env.sh
. ./env.sh

# shellcheck disable=SC2086 # a list of words
[ $# -gt 0 ] || set -- $NODES
export STATE KUBE CNI NODES
[ -e "$PKI" ] || ./pki.sh

# start NODE: its cgroups, below the one that this shell is in, and its first process.
start() {
	local node=$1 dir=$STATE/$1 controllers='' names path mount cgroup
	mkdir -p "$dir/log" "$dir/conf" "$dir/disk"
	rm -f "$dir/ready" "$dir/init" "$dir/fabric"
	: >"$dir/cgroups"
	while IFS=: read -r _ names path; do
		case $names in
		'') mount=$(awk '$3 == "cgroup2" { print $2; exit }' /proc/mounts) ;;
		*) mount=/sys/fs/cgroup/${names#name=} controllers="$controllers $names" ;;
		esac
		cgroup=$mount${path%/}/e2e-$node
		mkdir -p "$cgroup"
		echo "$cgroup" >>"$dir/cgroups"
		if [ "$names" = cpuset ]; then
			cat "$mount/cpuset.cpus" >"$cgroup/cpuset.cpus"
			cat "$mount/cpuset.mems" >"$cgroup/cpuset.mems"
		fi
	done </proc/self/cgroup
	# unshare itself stays in our cgroup and PID namespace. When it dies, so does the node's first process, and with that all of the node.
	# shellcheck disable=SC2016 # the inner shell has the variables
	NODE=$node CONTROLLERS=$controllers setsid unshare --mount --net --pid --uts --ipc --fork --kill-child --mount-proc bash -c \
		'while read -r d; do echo 0 >"$d/cgroup.procs"; done <"$STATE/$NODE/cgroups"; exec unshare --cgroup ./node.sh' \
		>"$dir/log/node.log" 2>&1 </dev/null &
	echo $! >"$dir/pid"
	until [ -s "$dir/init" ]; do
		alive "$node"
		awk '{ print $1 }' "/proc/$(cat "$dir/pid")/task/$(cat "$dir/pid")/children" >"$dir/init" || true
		[ -s "$dir/init" ] || sleep 0.02
	done
}

# alive NODE: fails with the node's last words if it is dead.
alive() {
	if ! kill -0 "$(cat "$STATE/$1/pid")" 2>/dev/null; then
		echo "$1 has ended:" >&2
		tail -n 20 "$STATE/$1/log/node.log" >&2
		exit 1
	fi
}

# connect NODE: its eth0, to the switch in the namespace "outside" of node1.
connect() {
	local init fabric
	fabric=/proc/$(cat "$STATE/node1/init")/root/run/netns/outside
	init=$(cat "$STATE/$1/init")
	until [ -e "$STATE/node1/fabric" ] && [ "$(readlink "/proc/$init/ns/net")" != "$(readlink /proc/self/ns/net)" ]; do
		alive "$1"
		sleep 0.05
	done
	nsenter --net="$fabric" ip link del "$1" 2>/dev/null || true
	nsenter --net="$fabric" ip link add "$1" type veth peer name eth0 netns "$init"
	nsenter --net="$fabric" ip link set "$1" master sw0 up
}

for node; do
	start "$node"
	[ "$node" = node1 ] || connect "$node"
done
for node; do
	for ((i = 0; ; i++)); do
		[ ! -e "$STATE/$node/ready" ] || break
		alive "$node"
		if [ $i = 1200 ]; then
			echo "$node is not ready after two minutes:" >&2
			tail -n 20 "$STATE/$node/log/"*.log >&2
			exit 1
		fi
		sleep 0.1
	done
done
