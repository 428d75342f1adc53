#!/bin/bash
# Runs what a configuration script and the bash hooks of a site define, in the
# order that enroot(1) gives: environ, hooks.d, hooks, mounts, rc. What they say
# goes to files. Arguments: the script or "", the directory of the files, the
# number of hooks, the hooks, then the command of the container.
set -euo pipefail
# Functions are called plainly: as part of a condition or an ||, set -e would not hold inside of them.
trap '[ $? -eq 0 ] || printf "%s\n" "${step}" > "${out}/failed"' EXIT

conf=$1 out=$2 count=$3
step=${conf}
shift 3
hooks=("${@:1:count}")
shift "${count}"

if [ -n "${conf}" ]; then
    "${BASH}" -n "${conf}" || exit 1
    # shellcheck source=/dev/null
    source "${conf}"
fi
defined() { [ -n "${conf}" ] && declare -F "$1" > /dev/null; }

if defined environ; then environ >> "${ENROOT_ENVIRON}"; fi
for hook in "${hooks[@]}"; do
    step=${hook}
    "${hook}" > /dev/null
done
if defined hooks; then
    step="hooks() of ${conf}"
    hooks > /dev/null
fi
step=${conf}
if defined mounts; then mounts > "${out}/mounts"; fi
if defined rc; then declare -f rc | sed '1,2d;$d' > "${out}/rc"; fi
