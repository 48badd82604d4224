#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# check-spdx.sh: fails when a source file does not begin with the licence line of its kind. Generated files have none.
set -euo pipefail
cd "$(dirname "$0")/.."

bad=0
while IFS= read -r -d '' f; do
	case $f in
	bpf/*.c | bpf/*.h) want='SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause' ;;
	*) want='SPDX-License-Identifier: Apache-2.0' ;;
	esac
	if [ -f "$f" ] && ! head -n 3 "$f" | grep -qF "$want" && ! head -n 3 "$f" | grep -q 'Code generated .* DO NOT EDIT'; then
		echo "$f: no line '$want' at its beginning" >&2
		bad=1
	fi
done < <(git ls-files -z --cached --others --exclude-standard --deduplicate \
	'*.go' '*.c' '*.h' '*.sh' '*.proto' Makefile .ci/run)
exit $bad
