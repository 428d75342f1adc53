#!/bin/bash
# Run a configuration script and its functions, in the order of enroot(1): environ, hooks.d, hooks, mounts.
# Before each function this process stops itself, so that penroot can do its part, such as running hooks.d. The output of
# environ goes to ENROOT_ENVIRON, the output of mounts to a file, and the output of hooks is discarded. If the script
# defines a function rc, its body goes to a file, which penroot uses in place of /etc/rc.
# Arguments: the script, the directory of the output files, the command of the container.
set -euo pipefail
shopt -s lastpipe

readonly _penroot_conf=$1 _penroot_out=$2
shift 2

_penroot_stop() { # pass the exported variables to penroot, and wait until penroot continues this process
    local name IFS=$'\n'
    for name in $(compgen -e); do
        printf '%s=%s\0' "${name}" "${!name}"
    done > "${_penroot_out}/exported"
    kill -STOP $$
}
# Call the functions as plain commands, because set -e has no effect in a function that is part of a condition or a ||.
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
