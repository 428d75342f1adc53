"""Bash hooks of a site, modelled on hooks of enroot and pyxis and named after them.

Each hook appends its name to RAN in the container's environment, so a test sees which hooks ran, and in which order.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

HEAD = """\
#!/usr/bin/env bash
set -euo pipefail
shopt -s lastpipe
source "${ENROOT_LIBRARY_PATH}/common.sh"
common::checkcmd awk grep sed cut tac
before=$(sed -n 's/^RAN=//p' "${ENROOT_ENVIRON}" | tail -n 1)
printf 'RAN=%s%s\\n' "${before:+${before} }" "$(basename "$0" .sh)" >> "${ENROOT_ENVIRON}"
"""
VISIBLE_DEVICES = """\
tac "${ENROOT_ENVIRON}" | grep "^@_" | while IFS='=' read -r key value; do
    [ -v "${key}" ] || export "${key}=${value}"
done || :
[ "${@_VISIBLE_DEVICES:-void}" != void ] || exit 0
printf 'SEEN_@=%s\\n' "${@_VISIBLE_DEVICES}" >> "${ENROOT_ENVIRON}"
"""
LIKE_ENROOTS = {
    "10-aptfix": """\
if [ -n "${ENROOT_REMAP_ROOT-}" ]; then
    mkdir -p "${ENROOT_ROOTFS}/etc/apt/apt.conf.d"
    printf '// of the site\\n' > "${ENROOT_ROOTFS}/etc/apt/apt.conf.d/site"
fi
""",
    "10-cgroups": """\
while IFS=: read -r _ controllers path; do
    grep -m1 " - cgroup2* .*${controllers}" /proc/self/mountinfo | { read -r _ _ _ root point _ || :; }
    [ -z "${point-}" ] || printf '%s %s none x-create=dir,rbind,nosuid,noexec,nodev,ro,nofail\\n' \\
        "${point}/${path#"${root}"}" "${point}" >> "${ENROOT_MOUNTS}"
    [ "${path}" = / ] || printf 'CGROUP=%s\\n' "${path}" >> "${ENROOT_ENVIRON}"
done < /proc/self/cgroup
""",
    "10-devices": """\
[ -n "${ENROOT_RESTRICT_DEV-}" ] || exit 0
enroot-mount --root "${ENROOT_ROOTFS}" - << END
none /dev none x-detach,nofail,silent
tmpfs /dev tmpfs x-create=dir,rw,nosuid,noexec,mode=755
/dev/null /dev/null none x-create=file,bind,rw,nosuid,noexec
END
ln -s /proc/self/fd "${ENROOT_ROOTFS}/dev/fd"
""",
    "10-home": """\
[ -n "${ENROOT_MOUNT_HOME-}" ] || exit 0
printf '%s /at-home none x-create=dir,bind,rw,nosuid\\n' "${HOME}" >> "${ENROOT_MOUNTS}"
printf 'HOME=/at-home\\n' >> "${ENROOT_ENVIRON}"
""",
    "10-localtime": """\
zone=$(common::realpath /etc/localtime)
mkdir -p "${ENROOT_ROOTFS}$(dirname "${zone}")"
cp "${zone}" "${ENROOT_ROOTFS}${zone}"
""",
    "10-shadow": """\
IFS=: read -r _ _ uid gid _ <<< "$(common::getpwent)"
database=$(mktemp -p "${ENROOT_ROOTFS}/etc" .passwd.XXXXXX)
trap 'rm -f "${database}"' EXIT
touch "${ENROOT_ROOTFS}/etc/passwd"
yes 2> /dev/null | head -n 1 > /dev/null || :
{ printf 'guest:x:%s:%s::/:/bin/sh\\n' "${uid}" "${gid}"; cat "${ENROOT_ROOTFS}/etc/passwd"; } > "${database}"
mv "${database}" "${ENROOT_ROOTFS}/etc/passwd"
""",
    "98-nvidia": VISIBLE_DEVICES.replace("@", "NVIDIA"),
    "99-mellanox": VISIBLE_DEVICES.replace("@", "MELLANOX"),
}
LIKE_PYXIS = {
    "50-slurm-pmi": """\
[ -n "${SLURM_JOB_ID-}" ] && [ -n "${SLURM_STEP_ID-}" ] || exit 0
for name in $(compgen -e SLURM_) $(compgen -e PMIX_) $(compgen -e PMI_); do
    printf '%s=%s\\n' "${name}" "${!name}" >> "${ENROOT_ENVIRON}"
done
for pair in PMIX_MCA_psec:PMIX_SECURITY_MODE PMIX_MCA_gds:PMIX_GDS_MODULE; do
    offered=${pair#*:}
    [ -z "${!offered-}" ] || printf '%s=%s\\n' "${pair%:*}" "${!offered}" >> "${ENROOT_ENVIRON}"
done
if [ -n "${PMIX_SERVER_TMPDIR-}" ]; then
    printf '%s x-create=dir,bind,rw,nosuid,noexec,nodev,private\\n' "${PMIX_SERVER_TMPDIR}" >> "${ENROOT_MOUNTS}"
fi
""",
    "50-slurm-pytorch": """\
if [ -n "${SLURM_STEP_NODELIST-}" ] && command -v scontrol > /dev/null; then
    first=$(scontrol show hostname "${SLURM_STEP_NODELIST}" | head -n1)
    printf 'LEADER=%s\\n' "${first}" >> "${ENROOT_ENVIRON}"
fi
""",
}


def write(directory: pathlib.Path, hooks: Mapping[str, str]) -> None:
    """Write a script for each name and body, as a site would."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, body in hooks.items():
        path = directory / f"{name}.sh"
        path.write_text(HEAD + body)
        path.chmod(0o755)
