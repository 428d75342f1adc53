"""An ordinary user runs the commands of the talk that presented enroot, under enroot's names, in two scripts.

The image is a small Debian made of this machine's apt and dpkg. The registry is local. The GPUs and nvidia-smi belong
to a fake host.
"""

from __future__ import annotations

import gzip
import os
import pathlib
import shutil
import subprocess
import tarfile

import pytest

from tests import fakehost, images
from tests.images import Image, Layer
from tests.installation import LIBRARY
from tests.kernel.conftest import PREFIX, User, busybox_rootfs, require
from tests.kernel.registry import serve

PROGRAMS = "apt-get apt-cache dpkg dpkg-deb dpkg-split dpkg-query tar bash find sort sed grep awk diff id".split()
PROGRAMS += ["ldconfig", "start-stop-daemon"]
METHODS = "/usr/lib/apt/methods"
SEARCH = "/usr/sbin:/usr/bin:/sbin:/bin"

POSTINST = """\
#!/bin/sh
set -e
chown -R 101:102 /usr/share/talk
chgrp 43 /usr/bin/talk
chmod 2755 /usr/bin/talk
echo "configured as $(id -u)"
"""

BASIC_USAGE = """\
set -eux
# Convert a Docker image to a squashfs file
enroot import "docker://$REGISTRY#debian:12"
ls debian+12.sqsh
# Extract it to a root filesystem
enroot create --name debian debian+12.sqsh
enroot list
ls -d "$ENROOT_DATA_PATH/debian"
# Start it, optionally as root and writable
enroot start debian bash -c 'echo "$(id -u) read-only"; ! touch /here'
enroot start --mount "$PWD/repository:/repository" --root --rw debian sh -c 'apt-get update && apt-get install -y talk'
enroot start debian talk
enroot start --rw debian sh -c 'echo mine > /changed'
enroot start debian nvidia-smi -L
# Write it back to an image, and to one file that runs by itself
enroot export --output mine.sqsh debian
enroot bundle --output mine.run mine.sqsh
./mine.run sh -c 'talk && cat /changed'
enroot remove --force debian
test -z "$(enroot list)"
enroot start mine.sqsh cat /changed
"""

IMPROVED_UTILS = """\
set -eu
mkdir ubuntu && tar -C ubuntu -xzf ubuntu-base.tar.gz
cat > fstab << EOF
/proc /proc none rbind,nosuid,nodev,noexec
/sys  /sys  none rbind,nosuid,nodev,noexec,ro
/dev  /dev  none rbind,nosuid,noexec
tmpfs /tmp  tmpfs nosuid,nodev
EOF
cat > inside << 'EOF'
cat fstab | enroot-mount --root ubuntu -
exec enroot-switchroot ubuntu bash
EOF
cat > commands << 'EOF'
echo "$(id -u) in $(sed -n 's/^ID=//p' /etc/os-release)"
touch /tmp/x && chown 5:5 /tmp/x && echo chowned
ls /home/* 2>/dev/null || echo alone
exit 3
EOF
exec enroot-unshare bash inside < commands
"""


def debian(path: pathlib.Path) -> None:
    """Create a Debian from this machine's apt and dpkg with their libraries, and busybox for the other programs."""
    busybox_rootfs(path)
    programs = [shutil.which(name, path=SEARCH) for name in PROGRAMS]
    require(all(programs), f"one of {PROGRAMS} is not installed")
    methods = [f"{METHODS}/{name}" for name in ("file", "copy", "store", "gpgv") if os.path.exists(f"{METHODS}/{name}")]
    files = {os.path.realpath(str(p)): p for p in (*programs, *methods)}
    wanted = {str(p) for p in (*programs, *methods)}
    for program in files:
        stdout = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
        wanted |= {word for word in stdout.split() if word.startswith("/")}
    for file in sorted(wanted):
        target = path / file.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        shutil.copy(file, target)
    shutil.copytree("/usr/share/dpkg", path / "usr/share/dpkg")
    for name in ("cp", "mv", "mkdir", "rmdir", "chmod", "chgrp", "head", "tail", "uname", "dirname", "basename", "cmp"):
        link = path / "bin" / name
        if not link.exists():
            link.symlink_to("busybox")
    (path / "usr/bin/talk").unlink(missing_ok=True)
    for directory in (
        *("var/lib/dpkg/info", "var/lib/dpkg/updates", "var/lib/apt/lists/partial", "var/cache/apt/archives/partial"),
        *("etc/apt/apt.conf.d", "etc/apt/preferences.d", "var/log/apt", "usr/share", "repository", "run", "home"),
    ):
        (path / directory).mkdir(parents=True, exist_ok=True)
    for name, text in {
        "var/lib/dpkg/status": "",
        "var/lib/dpkg/available": "",
        "etc/apt/sources.list": "deb [trusted=yes] file:/repository ./\n",
        "etc/debian_version": "12\n",
        "etc/os-release": "ID=debian\n",
        "etc/passwd": "root:x:0:0:root:/root:/bin/bash\n_apt:x:100:65534::/nonexistent:/usr/sbin/nologin\n",
        "etc/group": "root:x:0:\n",
        "etc/environment": "",
    }.items():
        (path / name).write_text(text)


def repository(path: pathlib.Path) -> None:
    """Make a repository with a package. Its script changes owners and modes, as those of daemons and games do."""
    source = path / "talk"
    for name, text, mode in (
        ("DEBIAN/postinst", POSTINST, 0o755),
        ("usr/bin/talk", "#!/bin/sh\necho installed\n", 0o755),
        ("usr/share/talk/data", "x\n", 0o644),
    ):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
        (source / name).chmod(mode)
    control = "Package: talk\nVersion: 1\nArchitecture: all\nMaintainer: nobody <n@example.org>\nDescription: test\n"
    (source / "DEBIAN/control").write_text(control)
    subprocess.run(["dpkg-deb", "--build", "-Znone", source, path / "talk.deb"], check=True, capture_output=True)
    shutil.rmtree(source)
    size = (path / "talk.deb").stat().st_size
    digest = images.digest((path / "talk.deb").read_bytes()).removeprefix("sha256:")
    (path / "Packages").write_text(f"{control}Filename: ./talk.deb\nSize: {size}\nSHA256: {digest}\n\n")


@pytest.fixture
def rootfs_tar(user: User) -> bytes:
    tree = user.home / "debian-tree"
    debian(tree)
    archive = user.home / "ubuntu-base.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(tree, arcname=".")
    shutil.rmtree(tree)
    data = archive.read_bytes()
    archive.unlink()
    return data


@pytest.fixture
def enroot(user: User) -> User:
    """Return a user whose PATH has penroot's programs under enroot's names."""
    libexec = pathlib.Path(LIBRARY) / "libexec"
    require((libexec / "penroot-unshare").exists(), f"the helpers are not installed in {libexec}")
    (user.home / "bin").mkdir()
    (user.home / "bin/enroot").symlink_to(f"{PREFIX}/bin/penroot")
    user.environ["PATH"] = f"{user.home}/bin:{libexec}:/usr/sbin:/usr/bin:/bin"
    return user


@pytest.mark.parity(
    "if penroot is called by a link named enroot, it answers as enroot",
    "apt-get install works as root in the container",
    'the talk, "Basic usage"',
)
def test_basic_usage(enroot: User, rootfs_tar: bytes) -> None:
    require(os.geteuid() == 0, "the nodes of the fake GPUs are made by root")
    require(shutil.which("dpkg-deb"), "dpkg is not installed")
    host = fakehost.dgx_a100(enroot.home / "dgx")
    smi = '#!/bin/sh\n[ "$1" = -L ] && [ -e /dev/nvidia0 ] && echo "GPU 0: stub"\n'
    host.file("/usr/bin/nvidia-smi", smi).chmod(0o755)
    host_environ = fakehost.as_host(host, enroot.home / "etc")
    (enroot.home / "repository").mkdir()
    repository(enroot.home / "repository")
    with serve(enroot.home / "registry") as server:
        settings = {"Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "NVIDIA_VISIBLE_DEVICES=all"], "Cmd": ["bash"]}
        server.pusher.image("debian", "12", Image([Layer(rootfs_tar, "zstd")], settings))
        enroot.own(enroot.home)
        environ = {"REGISTRY": server.host, "ENROOT_ALLOW_HTTP": "y", **host_environ}
        done = enroot.run("bash", "-c", BASIC_USAGE, env=environ)
    lines = done.stdout.splitlines()
    assert lines[:3] == ["debian+12.sqsh", "debian", str(enroot.data / "debian")]
    assert "configured as 0" in lines
    assert lines[-5:] == ["installed", "GPU 0: stub", "installed", "mine", "mine"]


@pytest.mark.parity('the talk, "Improved Linux utils"')
def test_improved_linux_utils(enroot: User, rootfs_tar: bytes) -> None:
    (enroot.home / "ubuntu-base.tar.gz").write_bytes(gzip.compress(rootfs_tar, 1))
    enroot.own(enroot.home)
    done = enroot.run("bash", "-c", IMPROVED_UTILS, status=3)
    assert done.stdout == "0 in debian\nchowned\nalone\n"
