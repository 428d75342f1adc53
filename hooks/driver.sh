#!/bin/bash
# Runs what a configuration script and the bash hooks of a site define, in the
# order that enroot(1) gives: environ, hooks.d, hooks, mounts, rc. What they say
# goes to files. Arguments: the script or "", the directory of the files, the
# number of hooks, the hooks, then the command of the container.
set -euo pipefail

conf=$1 out=$2 count=$3
shift 3
hooks=("${@:1:count}")
shift "${count}"

if [ -n "${conf}" ]; then
    # shellcheck source=/dev/null
    source "${conf}"
fi
defined() { [ -n "${conf}" ] && declare -F "$1" > /dev/null; }

if defined environ; then environ >> "${ENROOT_ENVIRON}"; fi
for hook in "${hooks[@]}"; do
    "${hook}" > /dev/null || { status=$?; printf '%s\n' "${hook}" > "${out}/failed"; exit "${status}"; }
done
if defined hooks; then
    hooks > /dev/null || { status=$?; printf 'hooks() of %s\n' "${conf}" > "${out}/failed"; exit "${status}"; }
fi
if defined mounts; then mounts > "${out}/mounts"; fi
if defined rc; then declare -f rc | sed '1,2d;$d' > "${out}/rc"; fi
