#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# pki.sh: makes the cluster's keys, certificates and kubeconfigs.
set -euo pipefail
# shellcheck source=test/e2e/cluster/env.sh
. "$(dirname "$0")/env.sh"

mkdir -p "$PKI"
cd "$PKI"
key() { openssl ecparam -name prime256v1 -genkey -noout -out "$1.key"; }
# leaf NAME SUBJECT [ALTERNATIVE NAMES]
leaf() {
	key "$1"
	openssl req -new -key "$1.key" -subj "$2" -out "$1.csr"
	{
		echo basicConstraints=CA:FALSE
		echo keyUsage=digitalSignature,keyEncipherment
		echo extendedKeyUsage=serverAuth,clientAuth
		[ -z "${3:-}" ] || echo "subjectAltName=$3"
	} >"$1.ext"
	openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -extfile "$1.ext" -out "$1.crt" 2>/dev/null
}

key ca
openssl req -x509 -new -key ca.key -subj /CN=e2e-ca -days 2 -out ca.crt \
	-addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign,digitalSignature
names=DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc
leaf apiserver /CN=kube-apiserver "IP:127.0.0.1,IP:$API_IP,IP:$SERVICE_IP,$names"
leaf kubelet-client /O=system:masters/CN=kube-apiserver-kubelet-client
leaf admin /O=system:masters/CN=admin
# An administrator, too: the controllers need no accounts of their own then, and start sooner.
leaf controllers /O=system:masters/CN=system:kube-controller-manager
leaf scheduler /CN=system:kube-scheduler
leaf proxy /CN=system:kube-proxy
for n in $NODES; do leaf "$n" "/O=system:nodes/CN=system:node:$n" "IP:$(node_ip "$n"),DNS:$n"; done
key sa
openssl ec -in sa.key -pubout -out sa.pub 2>/dev/null
for user in admin controllers scheduler proxy $NODES; do
	cat >"$user.kubeconfig" <<-EOF
		apiVersion: v1
		kind: Config
		clusters: [{name: c, cluster: {server: "https://$API_IP:6443", certificate-authority: $PKI/ca.crt}}]
		users: [{name: $user, user: {client-certificate: $PKI/$user.crt, client-key: $PKI/$user.key}}]
		contexts: [{name: c, context: {cluster: c, user: $user}}]
		current-context: c
	EOF
done
