#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# fetch.sh [--refresh] LINE...
#
# Puts the newest Debian cloud kernel of each line (5.10, 6.1, 6.12, newest) into the cache, unpacked:
#
#   $REDIRECTOR_CACHE/kernels/6.1.0-57-cloud-amd64/   boot/ and lib/modules/ as in the packages
#   $REDIRECTOR_CACHE/lines/6.1                        a link to the kernel of that line
#
# A line that is in the cache is used as it is, without network; --refresh looks for a newer one. apt verifies what it
# downloads (signed indexes, SHA256 of each package). It runs with sources, indexes and cache of its own: the system's
# apt is not touched, and its lists are only downloaded when a line is missing.
#
# Exit status: 0 all lines are there, 3 some are not (each named on stderr), 1 anything else.
set -euo pipefail

cache=${REDIRECTOR_CACHE:-/var/cache/redirector}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
apt=$cache/apt

die() {
	echo "fetch.sh: $*" >&2
	exit 1
}

refresh=
if [ "${1:-}" = --refresh ]; then
	refresh=1
	shift
fi
[ $# -gt 0 ] || die "no kernel line named; usage: fetch.sh [--refresh] LINE..."

mkdir -p "$cache/kernels" "$cache/lines" || die "cannot write to the cache $cache; set REDIRECTOR_CACHE to another folder"

# cached LINE: true when the line has a kernel. Trees are renamed into place complete.
cached() { [ -d "$cache/lines/$1/" ]; }

# mirrors: the main and the security archive this machine already uses, one a line.
mirrors() {
	{
		cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null |
			sed -nE 's/^deb +(\[[^]]*\] +)?([^ ]+) .*/\2/p'
		cat /etc/apt/sources.list.d/*.sources 2>/dev/null | sed -nE 's/^URIs: *([^ ]+).*/\1/p'
	} | sed 's,/*$,,' | grep -E '/debian(-security)?$' | awk '!seen[$0]++' || true
}

# update: the indexes of every suite that carries one of the lines.
update() {
	command -v apt-get >/dev/null || { echo "fetch.sh: no apt on this machine" >&2; return 1; }
	[ -r $keyring ] || { echo "fetch.sh: $keyring is missing: install debian-archive-keyring" >&2; return 1; }
	local main security suite
	main=$(mirrors | grep -v security | head -n 1)
	security=$(mirrors | grep security | head -n 1)
	[ -n "$main" ] || { echo "fetch.sh: no Debian mirror in /etc/apt" >&2; return 1; }
	[ -n "$security" ] || security=$main-security

	mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/debs"
	{
		for suite in bullseye bookworm trixie trixie-backports; do
			echo "deb [arch=amd64 signed-by=$keyring] $main $suite main"
		done
		for suite in bullseye bookworm trixie; do
			echo "deb [arch=amd64 signed-by=$keyring] $security $suite-security main"
		done
	} >"$apt/sources.list"
	cat >"$apt/apt.conf" <<-CONF
		Dir::Etc::sourcelist "$apt/sources.list";
		Dir::Etc::sourceparts "-";
		Dir::State::lists "$apt/lists";
		Dir::Cache "$apt/cache";
		Acquire::Languages "none";
		Acquire::Retries "3";
		APT::Sandbox::User "root";
		APT::Update::Post-Invoke "";
		APT::Update::Post-Invoke-Success "";
	CONF
	# A suite that has left the mirror is an error for apt; the lines of the other suites can still be had.
	apt-get -qq -c "$apt/apt.conf" update || echo "fetch.sh: some indexes cannot be had; going on with the others" >&2
}

# versions LINE: the cloud kernels of a line in the indexes, newest first.
versions() {
	local prefix=$1.
	[ "$1" = newest ] && prefix=
	apt-cache -c "$apt/apt.conf" pkgnames "linux-image-$prefix" |
		sed -nE 's/^linux-image-([0-9].*-cloud-amd64)$/\1/p' | sort -rV
}

# packages VERSION: the packages that make up one kernel. From 6.19 on an image package only pulls in others.
packages() {
	local image=linux-image-$1 depends part
	depends=$(apt-cache -c "$apt/apt.conf" show --no-all-versions "$image" | sed -n 's/^Depends: //p')
	case $depends in
	*linux-modules-"$1"*)
		for part in base binary modules; do
			case $depends in *linux-$part-"$1"*) echo "linux-$part-$1" ;; esac
		done
		;;
	*) echo "$image" ;;
	esac
}

# available PACKAGE...: true when each can be downloaded; Debian drops the modules of an old ABI before its image.
available() {
	local p
	for p; do
		[ -n "$(apt-cache -c "$apt/apt.conf" madison "$p")" ] || return 1
	done
}

# get VERSION PACKAGE...: downloads and unpacks, and renames into place only what is complete.
get() {
	local version=$1 new=$cache/kernels/.new.$$ p
	shift
	rm -rf "$new"
	mkdir -p "$new"
	(cd "$apt/debs" && apt-get -qq -c "$apt/apt.conf" download "$@") || return 1
	for p; do
		dpkg-deb -x "$apt/debs/${p}"_*.deb "$new" || return 1
		rm -f "$apt/debs/${p}"_*.deb
	done
	rm -rf "$cache/kernels/$version"
	mv "$new" "$cache/kernels/$version"
}

# fetch LINE
fetch() {
	local line=$1 version
	local -a parts
	for version in $(versions "$line"); do
		mapfile -t parts < <(packages "$version")
		available "${parts[@]}" || continue
		if [ ! -d "$cache/kernels/$version" ]; then
			get "$version" "${parts[@]}" || return 1
		fi
		ln -sfn "../kernels/$version" "$cache/lines/$line"
		return 0
	done
	echo "fetch.sh: the archive has no cloud kernel of line $line" >&2
	return 1
}

# Two runs at once would unpack into each other's folders.
exec 9>"$cache/.fetch.lock"
flock 9

updated=
missing=()
for line; do
	if [ -z "$refresh" ] && cached "$line"; then
		continue
	fi
	if [ -z "$updated" ]; then
		update && updated=yes || updated=no
	fi
	if [ $updated = yes ] && fetch "$line"; then
		continue
	fi
	cached "$line" || missing+=("$line")
done
for line; do
	! cached "$line" || printf '%-8s %s\n' "$line" "$(basename "$(readlink "$cache/lines/$line")")"
done
if [ ${#missing[@]} -gt 0 ]; then
	echo "fetch.sh: no kernel for: ${missing[*]} (not in $cache and not to be had from the Debian archive)" >&2
	exit 3
fi
