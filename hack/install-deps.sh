#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# install-deps.sh GROUP...: installs the Debian packages that are missing for a group of make targets. It does nothing,
# and needs neither root nor network, when the tools are there.
set -euo pipefail

# A group is a list of TOOL=PACKAGE; a tool is a command, or an absolute path.
group() {
	case $1 in
	# The plugins of test/cni, and what portmap runs; the resolvers that test/resolvers asks with, and the
	# proxy of test/proxies.
	test)
		echo /usr/lib/cni/bridge=containernetworking-plugins iptables=iptables
		group objects
		group bench
		echo haproxy=haproxy dig=bind9-dnsutils musl-gcc=musl-tools gcc=gcc python3=python3 unshare=util-linux mount=mount
		;;
	race)
		group test
		echo /usr/include/stdlib.h=libc6-dev
		;;
	# The rule sets that test/bench compares with.
	bench) echo iptables-legacy-restore=iptables iptables-nft-restore=iptables nft=nftables ;;
	format) echo clang-format-19=clang-format-19 ;;
	generate)
		echo clang-19=clang-19 llvm-strip-19=llvm-19 protoc=protobuf-compiler
		echo /usr/include/bpf/bpf_helpers.h=libbpf-dev /usr/include/linux/bpf.h=linux-libc-dev
		;;
	# The second compiler of the programs; the headers are those of generate.
	objects)
		echo clang-16=clang-16 /usr/include/bpf/bpf_helpers.h=libbpf-dev /usr/include/linux/bpf.h=linux-libc-dev
		;;
	# A node of test/e2e: its runtime and CNI plugins, and what its scripts and kube-proxy run.
	e2e)
		echo containerd=containerd runc=runc /usr/lib/cni/bridge=containernetworking-plugins
		echo ip=iproute2 nft=nftables iptables=iptables nsenter=util-linux openssl=openssl curl=curl sysctl=procps
		;;
	lint) echo shellcheck=shellcheck ;;
	screenshots) echo /usr/lib/python3/dist-packages/rich=python3-rich curl=curl nsenter=util-linux ;;
	vm) echo qemu-system-x86_64=qemu-system-x86 xz=xz-utils ;;
	*)
		echo "install-deps.sh: unknown group '$1'; there are test, race, bench, e2e, format, generate, objects, screenshots, lint and vm" >&2
		exit 2
		;;
	esac
}

there() {
	case $1 in
	/*) [ -e "$1" ] ;;
	*) command -v "$1" >/dev/null ;;
	esac
}

if ! command -v go >/dev/null; then
	echo "install-deps.sh: Go is not installed, or not in PATH: $PATH" >&2
	exit 1
fi

missing=()
for g; do
	for pair in $(group "$g"); do
		there "${pair%%=*}" || missing+=("${pair#*=}")
	done
done
[ ${#missing[@]} -gt 0 ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
	echo "install-deps.sh: not installed: ${missing[*]}; as root on Debian this script installs them" >&2
	exit 1
fi

install() {
	DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0 -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300 \
		install --no-install-recommends "${missing[@]}"
}

echo "installing ${missing[*]}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# The package lists may be missing or too old. An unrelated source that cannot be reached fails the update, not this.
if ! install >"$log" 2>&1 && { apt-get -qq -o DPkg::Lock::Timeout=300 update >>"$log" 2>&1 || true; } && ! install >>"$log" 2>&1; then
	tail -n 20 "$log" >&2
	echo "install-deps.sh: apt could not install ${missing[*]}" >&2
	exit 1
fi
