#!/bin/bash
# Runs a configuration script and what it defines, in the order that enroot(1) gives: environ,
# hooks.d, hooks, mounts, rc. Between them it stops, and penroot does the rest. What is said goes
# to files. Arguments: the script, the directory of the files, then the command of the container.
set -euo pipefail
shopt -s lastpipe

readonly _penroot_conf=$1 _penroot_out=$2
shift 2

_penroot_stop() { # until penroot goes on; it is to know what is exported by then
    local name IFS=$'\n'
    for name in $(compgen -e); do
        printf '%s=%s\0' "${name}" "${!name}"
    done > "${_penroot_out}/exported"
    kill -STOP $$
}
# Functions are called plainly: as part of a condition or an ||, set -e would not hold inside of them.
_penroot_defined() { declare -F "$1" > /dev/null; }

"${BASH}" -n "${_penroot_conf}" || exit 1
# shellcheck source=/dev/null
source "${_penroot_conf}"
_penroot_stop
if _penroot_defined environ; then environ >> "${ENROOT_ENVIRON}"; fi
_penroot_stop
if _penroot_defined hooks; then hooks > /dev/null; fi
_penroot_stop
if _penroot_defined mounts; then mounts > "${_penroot_out}/mounts"; fi
if _penroot_defined rc; then declare -f rc | sed '1,2d;$d' > "${_penroot_out}/rc"; fi
