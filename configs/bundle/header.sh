#!/bin/sh
# A container in one file, made by penroot: run it, or see --help. It needs a
# kernel with user namespaces, /bin/sh, tar and gzip. Behind this script are a
# tar of small static programs and a squashfs image, which mount or unpack it.
set -eu
fail() {
    printf '[ERROR] %s\n' "$1" >&2
    exit 1
}
for program in tar gzip; do
    command -v "$program" >/dev/null || fail "$program is not installed: bundles need /bin/sh, tar and gzip"
done
case $0 in
/*) self=$0 ;;
*) self=$PWD/$0 ;;
esac
[ -r "$self" ] || fail "cannot read $self: run this file by its path"
temp=${ENROOT_TEMP_PATH:-${TMPDIR:-/tmp}}
[ -w "$temp/." ] || fail "cannot write to $temp: set ENROOT_TEMP_PATH to a directory of yours"
# Whoever else can write there could put his programs in the place of ours; with the sticky bit nobody can.
# shellcheck disable=SC3065,SC3067 # dash and busybox have both
[ -k "$temp/." ] || [ -O "$temp/." ] || fail "others can write to $temp, which is not sticky: set ENROOT_TEMP_PATH to a directory of yours"
IFS= read -r id </proc/sys/kernel/random/uuid || fail "/proc is not mounted"
work=$temp/penroot-bundle.$id
trap 'rm -rf "$work" 2>/dev/null; exit 130' HUP INT TERM # until the guard below does it

# tar makes our directory too, since mkdir need not be there: the header of an
# archive is the sum of its bytes and a few constants.
sum=@SUM@
rest=$id
while [ -n "$rest" ]; do
    case $rest in
    [0-9]*) sum=$((sum + 48 + ${rest%"${rest#?}"})) ;;
    a*) sum=$((sum + 97)) ;;
    b*) sum=$((sum + 98)) ;;
    c*) sum=$((sum + 99)) ;;
    d*) sum=$((sum + 100)) ;;
    e*) sum=$((sum + 101)) ;;
    f*) sum=$((sum + 102)) ;;
    -*) sum=$((sum + 45)) ;;
    esac
    rest=${rest#?}
done
nul() {
    set -- "$1" '\0\0\0\0\0\0\0\0'
    while [ "$1" -ge 8 ]; do
        printf '%b' "$2"
        set -- $(($1 - 8)) "$2"
    done
    while [ "$1" -gt 0 ]; do
        printf '\0'
        set -- $(($1 - 1)) "$2"
    done
}
{
    printf 'penroot-bundle.%s/' "$id"
    nul 48
    printf '0000700\0%s\0%s\0%s\0%s\0%06o\0 5' 0000000 0000000 00000000000 00000000000 "$sum"
    nul 100
    printf 'ustar\00000'
    nul 1271
} | tar -xmf - -C "$temp" || fail "cannot create $work"

exec 3<"$self"
while IFS= read -r line <&3 && [ "$line" != "# The programs and the image:" ]; do :; done
if ! gzip -dc <&3 2>/dev/null | tar -xmf - -C "$work" || ! [ -x "$work/bin/penroot-runfile" ]; then
    command -v rm >/dev/null && rm -rf "$work"
    fail "cannot unpack into $temp: it is full, or mounted noexec (set ENROOT_TEMP_PATH to another), or $self is damaged"
fi
exec 3<&-
exec "$work/bin/penroot-runfile" guard "$work" /bin/sh "$work/driver" "$self" "$work" \
    "@START@" "@LENGTH@" "@OFFSET@" "@SHA256@" "$@"
# The programs and the image:
