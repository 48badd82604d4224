#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# in.sh COMMAND...: runs a command in the namespaces of node NODE. "kubectl" is the cluster's, as its administrator.
set -euo pipefail
# shellcheck source=test/e2e/cluster/env.sh
. "$(dirname "$0")/env.sh"

if [ "$1" = kubectl ]; then
	shift
	set -- "$KUBE" kubectl --cache-dir=/run/kubectl-cache --kubeconfig "$PKI/admin.kubeconfig" "$@"
fi
exec nsenter -t "$(cat "$STATE/${NODE:-node1}/init")" -m -n -u -i -p -C -- "$@"
