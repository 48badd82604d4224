#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# generate-check.sh: runs make generate and fails when a generated file changed, appeared or vanished by it. It compares
# files, not commits, so that it also works on a tree with changes.
set -euo pipefail
cd "$(dirname "$0")/.."

sums() {
	git ls-files -z --cached --others --exclude-standard --deduplicate '*.o' '*_bpfel.go' '*_bpfeb.go' '*.pb.go' |
		xargs -0 -r sha256sum 2>&1 | LC_ALL=C sort -k 2
}

before=$(sums)
make --no-print-directory generate
after=$(sums)
if [ "$before" != "$after" ]; then
	echo "generated files are not what their sources make; run make generate and commit:" >&2
	diff <(echo "$before") <(echo "$after") | sed -nE 's/^[<>] [0-9a-f]{64} +/  /p' | sort -u >&2
	git --no-pager diff --stat >&2
	exit 1
fi
echo "generated files are up to date"
