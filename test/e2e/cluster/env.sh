#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# env.sh: what the other scripts have in common; they source it. Their settings are environment variables:
#
#   STATE    an empty directory, for everything that is written
#   KUBE     the program that is etcd and all of Kubernetes
#   NODES    "node1", or "node1 node2" and so on; node1 has the control plane
#   CNI      bridge or ptp
# shellcheck disable=SC2034 # those who source it use the names
: "${STATE:?names a directory for the state}" "${KUBE:?names the program of test/kube}"
NODES=${NODES:-node1}
CNI=${CNI:-bridge}
PKI=$STATE/pki
API_IP=172.18.0.2
OUTSIDE_IP=172.18.0.1
CLUSTER_CIDR=10.244.0.0/16
SERVICE_CIDR=10.96.0.0/16
SERVICE_IP=10.96.0.1
node_ip() { echo "172.18.0.$((1 + ${1#node}))"; }
pod_cidr() { echo "10.244.$((${1#node} - 1)).0/24"; }
