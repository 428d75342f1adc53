#!/bin/sh
# A container in one file, made by penroot: run it, or see --help. It needs a
# kernel with user namespaces, /bin/sh, tar, gzip and mkdir, and sha256sum if
# it has a checksum. After this script come a tar.gz and a squashfs image. The
# tar.gz has the Python, loader and libraries that start the container.
set -eu
fail() {
    printf '[ERROR] %s\n' "$1" >&2
    [ -z "${2-}" ] || printf '[HINT] %s\n' "$2" >&2
    exit 1
}
checksum=@SHA256@ machine=@MACHINE@
for program in tar gzip mkdir ${checksum:+sha256sum}; do
    command -v "$program" >/dev/null ||
        fail "$program is not installed: this bundle needs /bin/sh, tar, gzip, mkdir${checksum:+ and sha256sum}"
done
host_machine=$(uname -m 2>/dev/null) || IFS= read -r host_machine 2>/dev/null </proc/sys/kernel/arch || host_machine=$machine
[ "$host_machine" = "$machine" ] || fail "this bundle is for $machine, but this host is $host_machine" "create a bundle on such a host: penroot bundle IMAGE"
case $0 in
/*) self=$0 ;;
*) self=$PWD/$0 ;;
esac
[ -r "$self" ] || fail "cannot read $self: run this file by its path"
IFS= read -r id </proc/sys/kernel/random/uuid || fail "/proc is not mounted"
[ ! -d /proc/self/fd/0 ] || exec </dev/null # Python does not start if stdin is a directory
hint='set ENROOT_TEMP_PATH to a directory that you own'

# The bundle is unpacked into $work. This run or a later run removes this directory. The file "live" in the directory is
# open for writing while the directory is in use.
work='' live=''
clean() {
    [ -z "$work" ] || ! command -v rm >/dev/null || rm -rf "$work" 2>/dev/null || :
}
trap 'clean; exit 129' HUP
trap 'clean; exit 130' INT
trap 'clean; exit 143' TERM

# Unpack into $work, a new directory in $1. On failure, $why is the reason.
unpack() {
    why='' work=
    [ -d "$1/." ] || why='is not a directory'
    [ -n "$why" ] || [ -w "$1/." ] || why='cannot be written'
    # Another user who can write to $1 could replace our programs, unless the sticky bit is set.
    # shellcheck disable=SC3065,SC3067 # dash and busybox have both
    [ -n "$why" ] || [ -k "$1/." ] || [ -O "$1/." ] || why='can be written by others, and is not sticky'
    [ -z "$why" ] || return 1
    work=${1%/}/penroot-bundle.$id
    if ! mkdir -m 700 "$work" 2>/dev/null || ! (: >"$work/live") 2>/dev/null; then
        why='cannot be written'
        return 1
    fi
    for live in 9 8 7 6 5 4 3 ''; do # a descriptor that the caller does not use
        [ -e "/proc/self/fd/$live" ] || break
    done
    [ -z "$live" ] || eval "exec $live>\"\$work/live\""
    if ! {
        while IFS= read -r line && [ "$line" != "# The programs and the image:" ]; do :; done
        exec gzip -dc
    } <"$self" 2>/dev/null | tar -xmf - -C "$work" 2>/dev/null || ! [ -e "$work/about" ]; then
        why="does not have enough space"
        ! (printf '%65536s' '' >"$work/space") 2>/dev/null || fail "$self is damaged, copy it again"
        return 1
    fi
    run --list "$work/programs/python3" >/dev/null 2>&1 || {
        [ $? = 126 ] && why='is mounted noexec' || why='cannot run the programs of the bundle'
        return 1
    }
}

run() {
    "$work/loaders/python3" --library-path "$work/libraries" "$@"
}

# LD_PRELOAD and LD_AUDIT are for the host's programs: hide them here. --env can still pass them to the container.
for name in LD_PRELOAD LD_AUDIT; do
    eval "[ -z \"\${$name-}\" ] || { export PENROOT_$name=\"\$$name\"; unset $name; }"
done
tried=
for temp in "${ENROOT_TEMP_PATH:-${TMPDIR:-/tmp}}" /tmp /var/tmp "${XDG_RUNTIME_DIR-}" /dev/shm "${HOME-}" "${self%/*}"; do
    case "|$temp|$tried" in "||"* | *"|$temp "*) continue ;; esac
    unpack "$temp" && break
    [ -z "$live" ] || eval "exec $live>&-"
    clean
    tried="$tried|$temp $why"
    [ "$temp" != "${ENROOT_TEMP_PATH:-${TMPDIR-}}" ] || case ${ENROOT_TEMP_PATH:+named}$why in
    named* | *space | *sticky) fail "cannot unpack into $temp, which $why" "$hint" ;;
    esac
    work=
done
[ -n "$work" ] || fail "cannot unpack into any directory: ${tried#|}" "$hint"
[ -z "$tried" ] || printf '[WARN] %s\n' "using $temp: ${tried#|}" >&2
exec "$work/loaders/python3" --library-path "$work/libraries" "$work/programs/python3" -ISB -X utf8 -c \
    'import sys, gc; gc.disable(); sys.path[:0] = sys.argv[1] + "/penroot",; sys.path += sys.argv[1] + "/rest.zip",
from enroot_py.main import main; from enroot_py.features.bundle.bundled import run; main(run)' \
    "$work" "$self" "@OFFSET@" "$live" "$checksum" "$@"
# The programs and the image:
