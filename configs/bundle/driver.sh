#!/bin/sh
# The driver of a bundle, outside of its container: options, checks, then in.
# Only what sh(1) has built in, our own programs, mkdir and sha256sum.
# shellcheck disable=SC2034 # some variables are used by name, where options are written
set -eu
self=$1 work=$2 offset=$3 checksum=$4
shift 4
runfile=$work/bin/penroot-runfile
# What `penroot bundle` wrote down: description, version, compression, target, size, image_*.
description='' version='' compression='' target='' size=0
# shellcheck source=/dev/null
. "$work/config"

fail() {
    printf '[ERROR] %s\n' "$1" >&2
    [ -z "${2-}" ] || printf '[HINT] %s\n' "$2" >&2
    exit 1
}

usage() {
    printf 'Usage: %s [options] [--] [COMMAND] [ARG...]\n' "${self##*/}"
    [ -z "$description" ] || printf '\n%s\n' "$description"
    printf '%s\n' '
 Options:
   -i, --info           Display the information about this bundle
   -k, --keep           Keep the bundle extracted in the target directory
   -q, --quiet          Suppress the progress of the extraction
   -v, --verify         Verify this bundle, and that the host can run it
   -x, --extract        Extract the bundle in the target directory and exit

   -c, --conf CONFIG    Specify a configuration script to run before the container starts
   -e, --env KEY[=VAL]  Export an environment variable inside the container
   -m, --mount FSTAB    Perform a mount from the host inside the container (colon-separated)
       --rc SCRIPT      Override the command script inside the container
   -r, --root           Ask to be remapped to root inside the container
   -w, --rw             Make the container root filesystem writable
       --pid            Run the container in a new PID namespace
       --net            Run the container in a new network namespace (loopback only)
       --ipc            Run the container in a new IPC namespace
       --uts            Run the container in a new UTS namespace'
}

# A mistake in the options is answered as enroot's bundles do: with the usage, and success.
mistake() {
    usage
    printf '[ERROR] %s\n' "$1" >&2
    exit 0
}

info() {
    [ -z "$checksum" ] || printf 'Checksum: %s\n' "$checksum"
    printf '%s: %s\n' Compression "$compression" Description "${description:-none}" 'Runtime version' "$version" \
        'Target directory' "$target" 'Uncompressed size' "$size KB"
}

check_sum() {
    [ -n "$checksum" ] || return 0
    # Of all that is behind the script at the beginning.
    sum=$(
        while IFS= read -r line && [ "$line" != "# The programs and the image:" ]; do :; done
        sha256sum
    ) <"$self"
    [ "${sum%% *}" = "$checksum" ] || fail "Checksum validation failed: $self is damaged, copy it again"
}

report() { # WHAT OTHERWISE COMMAND [ARG...]
    printf '%-45s: ' "$1"
    otherwise=$2
    shift 2
    if "$@" 2>/dev/null; then
        printf 'OK\n'
    else
        printf 'KO (%s)\n' "$otherwise"
        return 1
    fi
}

opens() {
    (: <>"$1")
}

# Upon /sys, which every host has, in a mount namespace of our own.
mounts_overlays() {
    for line in 'tmpfs /sys tmpfs' 'tmpfs /sys/l tmpfs x-create=dir' 'tmpfs /sys/m tmpfs x-create=dir' \
        'overlay /sys/r overlay x-create=dir,lowerdir=/sys/l:/sys/m,userxattr'; do
        printf '%s\n' "$line"
    done | "$runfile" try "$work/bin/penroot-mount" -
}

# A program that serves the image, in $server.
find_server() {
    server=$(command -v squashfuse_ll) || server=$(command -v squashfuse) || server=
    case $server in
    /*) ;;
    *) server= && return 1 ;;
    esac
}

verify() {
    check_sum
    [ -z "$checksum" ] || printf '%-45s: OK\n' Checksum
    "$runfile" size "$self" "$offset" >/dev/null || fail "$self is damaged, copy it again"
    printf '%-45s: OK\n' 'Tables of the image'
    able=0
    report 'User and mount namespaces' 'required: see user_namespaces(7)' "$runfile" try /bin/sh -c : || able=1
    report 'System call filter' 'required: CONFIG_SECCOMP_FILTER' [ -r /proc/sys/kernel/seccomp/actions_avail ] || able=1
    report 'Overlay file system in a user namespace' optional mounts_overlays || :
    report /dev/fuse 'optional: starts without extracting' opens /dev/fuse || :
    report squashfuse 'optional: starts without extracting' find_server || :
    return $able
}

# The word as sh(1) reads it again, in $quoted.
quote() {
    # Split at the quotes: cutting one off after another takes a long value minutes.
    IFS=\'
    set -f
    # shellcheck disable=SC2086 # the dot keeps what ends in a quote from losing it
    set -- $1.
    set +f
    IFS=' 	
'
    quoted=$1
    shift
    for part; do
        quoted="$quoted'\\''$part"
    done
    quoted="'${quoted%.}'"
}

true_word() {
    case $1 in
    '' | 0 | [nN] | [nN][oO] | [fF] | [fF][aA][lL][sS][eE] | [oO][fF][fF]) return 1 ;;
    esac
}

add_env() {
    key=${1%%=*}
    case $1 in
    =* | '') fail "--env $1 has no name; write KEY=VALUE, or KEY" ;;
    *=*) value=${1#*=} ;;
    [!A-Za-z_]* | *[!A-Za-z0-9_]*) fail "--env $key: a shell cannot read this variable; write $key=VALUE" ;;
    *) eval "value=\${$key-}" ;;
    esac
    quote "$key=$value"
    env_words="$env_words --env $quoted"
}

add_mount() {
    case $1 in
    *[[:space:]]*) fail "--mount $1: write a space as \\040" ;;
    esac
    printf '%s\n' "$1" >>"$work/mounts"
}

# Lines "#ENROOT_KEY=VALUE" of a configuration script are settings.
directives() {
    while IFS= read -r line || [ -n "$line" ]; do
        case $line in
        '#'*ENROOT_*=*) ;;
        *) continue ;;
        esac
        line=${line#"${line%%ENROOT_*}"}
        key=${line%%=*}
        case $key in
        *[!A-Z_]*) continue ;;
        esac
        value=$(printf '%s' "${line#*=}" | "$runfile" substitute)
        export "$key=$value"
    done <"$1"
}

absolute() {
    case $1 in
    /*) path=$1 ;;
    *) path=$PWD/$1 ;;
    esac
}

need() {
    [ -n "$2" ] || mistake "option $1 needs a value"
}

keep='' extract='' quiet='' conf='' rc='' root='' rw='' pid='' net='' ipc='' uts='' env_words=''
: >"$work/mounts"
while [ $# -gt 0 ]; do
    case $1 in
    # --x=v is --x v.
    --conf=?* | --env=?* | --mount=?* | --rc=?*)
        word=$1
        shift
        set -- "${word%%=*}" "${word#*=}" "$@"
        continue
        ;;
    -[cem]?*)
        word=$1
        shift
        set -- "${word%"${word#??}"}" "${word#??}" "$@"
        continue
        ;;
    -h | --help)
        usage
        exit
        ;;
    -i | --info)
        info
        exit
        ;;
    -v | --verify)
        verify
        exit
        ;;
    -k | --keep) keep=y ;;
    -x | --extract) extract=y keep=y ;;
    -q | --quiet) quiet=y ;;
    -r | --root) root=y ;;
    -w | --rw) rw=y ;;
    --pid) pid=y ;;
    --net) net=y ;;
    --ipc) ipc=y ;;
    --uts) uts=y ;;
    -c | --conf) need "$1" "${2-}" && conf=$2 && shift ;;
    -e | --env) need "$1" "${2-}" && add_env "$2" && shift ;;
    -m | --mount) need "$1" "${2-}" && add_mount "$2" && shift ;;
    --rc) need "$1" "${2-}" && rc=$2 && shift ;;
    --)
        shift
        break
        ;;
    -?*) mistake "unknown option: $1" ;;
    *) break ;;
    esac
    shift
done
for file in "$conf" "$rc"; do
    [ -z "$file" ] || [ -r "$file" ] || fail "cannot read $file"
done
[ -z "$conf" ] || absolute "$conf" && conf=${conf:+$path}
[ -z "$rc" ] || absolute "$rc" && rc=${rc:+$path}

# Settings that were saved by --all give way to the caller's, those of --conf win over both.
# shellcheck source=/dev/null
[ ! -e "$work/etc/settings" ] || . "$work/etc/settings"
[ -z "$conf" ] || directives "$conf"
[ -n "$root" ] || ! true_word "${ENROOT_REMAP_ROOT-}" || root=y
[ -n "$rw" ] || ! true_word "${ENROOT_ROOTFS_WRITABLE-}" || rw=y
[ -n "$pid" ] || ! true_word "${ENROOT_UNSHARE_PID-}" || pid=y
[ -n "$net" ] || ! true_word "${ENROOT_UNSHARE_NET-}" || net=y
[ -n "$ipc" ] || ! true_word "${ENROOT_UNSHARE_IPC-}" || ipc=y
[ -n "$uts" ] || ! true_word "${ENROOT_UNSHARE_UTS-}" || uts=y
home='' login='' devices=''
[ "${ENROOT_RESTRICT_DEV-}" != auto ] || ENROOT_RESTRICT_DEV=''
! true_word "${ENROOT_MOUNT_HOME-}" || home=y
! true_word "${ENROOT_LOGIN_SHELL-}" || login=--login
! true_word "${ENROOT_RESTRICT_DEV-}" || devices=y
keyring='' close=''
! true_word "${ENROOT_UNSHARE_KEYRING-}" || keyring=y
! true_word "${ENROOT_CLOSE_DESCRIPTORS-}" || close=y

check_sum
if [ -n "$keep" ]; then
    absolute "$(printf '%s' "$target" | "$runfile" substitute)"
    target=$path
    [ ! -e "$target" ] || fail "File already exists: $target" "remove it, or run without --keep and --extract"
    {
        (umask 077 && mkdir -p "${target%/*}/") &&
            "$runfile" extract "$self" "$offset" "$target" ${quiet:+--quiet}
    } || fail "cannot keep this bundle in $target" "go to a directory of yours, or leave out --keep and --extract"
    [ -z "$extract" ] || exit 0
fi

# Who we are, while no user namespace hides it.
while read -r key value _; do
    case $key in
    Uid:) uid=$value ;;
    Gid:) gid=$value ;;
    esac
done </proc/self/status
# Root could write to the disks of the node. ENROOT_RESTRICT_DEV=no asks for that.
[ "$uid" != 0 ] || [ -n "${ENROOT_RESTRICT_DEV-}" ] || devices=y

cgroups=
while IFS= read -r line; do
    cgroups="$cgroups$line
"
done </proc/self/cgroup

# The line of a database with that number, in $entry; files first, then whatever the host asks.
entry() {
    while IFS= read -r entry; do
        number=${entry#*:*:}
        [ "${number%%:*}" != "$2" ] || return 0
    done <"/etc/$1" || :
    entry=
    ! command -v getent >/dev/null || entry=$(getent "$1" "$2" 2>/dev/null) || :
}
[ ! -r /etc/passwd ] || entry passwd "$uid"
account=${entry:-user$uid:x:$uid:$gid::/:/bin/sh}
entry=
[ ! -r /etc/group ] || entry group "$gid"
group=${entry:-group$gid:x:$gid:}

for name in conf rc root rw pid net ipc uts home login devices keyring close uid gid account group cgroups env_words; do
    eval "quote \"\$$name\""
    printf '%s=%s\n' "$name" "$quoted"
done >"$work/options"

# A configuration script may be written for bash.
shell=/bin/sh
[ -z "$conf" ] || shell=$(command -v bash) || shell=/bin/sh
set -- "$shell" "$work/inside" "$work" "$@"
for option in root rw pid net ipc uts quiet; do
    eval "[ -z \"\$$option\" ]" || set -- "--$option" "$@"
done
if [ -n "$keep" ]; then
    set -- --keep "$target" "$@"
elif find_server; then
    set -- --server "$server" "$@"
fi
exec "$runfile" enter --work "$work" --image "$self" --offset "$offset" "$@"
