#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# down.sh [NODE...]: stops nodes, all by default, as a power failure does, and removes their cgroups. It fails when one cannot be
# removed.
set -euo pipefail
# shellcheck source=test/e2e/cluster/env.sh
. "$(dirname "$0")/env.sh"

# shellcheck disable=SC2086 # a list of words
[ $# -gt 0 ] || set -- $NODES
left=0
for node; do
	# It may be dead already, or have never lived.
	[ ! -s "$STATE/$node/pid" ] || kill -KILL "$(cat "$STATE/$node/pid")" 2>/dev/null || true
done
for node; do
	dir=$STATE/$node
	if [ -s "$dir/init" ]; then
		init=$(cat "$dir/init")
		for ((i = 0; i < 200; i++)); do
			kill -0 "$init" 2>/dev/null || break
			sleep 0.05
		done
	fi
	[ -e "$dir/cgroups" ] || continue
	while read -r cgroup; do
		for ((i = 0; i < 100; i++)); do
			[ ! -d "$cgroup" ] || find "$cgroup" -depth -type d -exec rmdir {} \; 2>/dev/null || true
			[ -d "$cgroup" ] || break
			sleep 0.05
		done
		if [ -d "$cgroup" ]; then
			echo "left: $cgroup" >&2
			left=1
		fi
	done <"$dir/cgroups"
	rm -f "$dir/pid" "$dir/init" "$dir/ready" "$dir/cgroups"
done
exit $left
