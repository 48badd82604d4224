#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# check-clean.sh: fails when a committed file was changed or a new one left behind, by tests for example.
set -euo pipefail
cd "$(dirname "$0")/.."

changes=$(git status --porcelain)
if [ -n "$changes" ]; then
	echo "the tree is not what was committed:" >&2
	echo "$changes" >&2
	git --no-pager diff --stat >&2
	exit 1
fi
echo "the tree is what was committed"
