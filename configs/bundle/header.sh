#!/bin/sh
# A container in one file, made by penroot: run it, or see --help. It needs a
# kernel with user namespaces, /bin/sh, tar, gzip and mkdir, and sha256sum for
# its checksum if it has one. Behind this script are a tar of small static
# programs and a squashfs image, which they mount or unpack.
set -eu
fail() {
    printf '[ERROR] %s\n' "$1" >&2
    exit 1
}
checksum=@SHA256@
for program in tar gzip mkdir ${checksum:+sha256sum}; do
    command -v "$program" >/dev/null ||
        fail "$program is not installed: this bundle needs /bin/sh, tar, gzip, mkdir${checksum:+ and sha256sum}"
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

mkdir -m 700 "$work" || fail "cannot create $work"
exec 3<"$self"
while IFS= read -r line <&3 && [ "$line" != "# The programs and the image:" ]; do :; done
if ! gzip -dc <&3 2>/dev/null | tar -xmf - -C "$work" || ! [ -x "$work/bin/penroot-runfile" ]; then
    command -v rm >/dev/null && rm -rf "$work"
    fail "cannot unpack into $temp: it is full, or mounted noexec (set ENROOT_TEMP_PATH to another), or $self is damaged"
fi
exec 3<&-
exec "$work/bin/penroot-runfile" guard "$work" /bin/sh "$work/driver" "$self" "$work" \
    "@OFFSET@" "$checksum" "$@"
# The programs and the image:
