"""Attacks by an image on the user who starts it: it reads or changes the user's files, or makes the start hang."""

from __future__ import annotations

import os
import pathlib
import pwd
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from tests.images import Image, busybox, directory, entry, index, symlink, write_layout
from tests.installation import LIBRARY
from tests.kernel.conftest import User, require, squashed

VOLUME = "${ENROOT_ROOTFS}%s %s none x-create=dir,bind,rw,nosuid,nodev\n"
HEAD = (
    "mkdir -p %s 2> /dev/null\ncd %s && unset OLDPWD || exit 1\n\nif [ -s /etc/rc.local ]; then\n    . /etc/rc.local\n"
)
RC = HEAD + 'fi\n\nif [ $# -gt 0 ]; then\n    exec  "$@"\nelse\n    exec  /bin/sh\nfi\n'


@pytest.fixture
def secret(user: User) -> pathlib.Path:
    """Return a directory of the victim's on the host."""
    path = user.home / "secret"
    path.mkdir()
    (path / "key").write_text("private\n")
    user.own(path)
    return path


@pytest.fixture
def shared(user: User) -> Iterator[pathlib.Path]:
    """Return a directory of the victim's in /dev/shm, which the container shares with the host."""
    path = pathlib.Path(f"/dev/shm/{user.home.name}")
    path.mkdir()
    user.own(path)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def account(user: User) -> User:
    """Give the victim the user ID of a system account of the host, whose home directory no image has."""
    found = next((a for a in pwd.getpwall() if 0 < a.pw_uid < 1000 and a.pw_dir.startswith("/var/spool/")), None)
    require(found and os.geteuid() == 0, "no account with a home in /var/spool")
    assert found is not None
    user.uid = found.pw_uid
    user.own(user.home)
    return user


def layout(user: User, image: Image) -> str:
    blobs = [image.config(), image.manifest(), *(layer.blob for layer in image.layers)]
    path = user.home / "layout"
    write_layout(path, blobs, index([(image, {"os": "linux", "architecture": "amd64"})]))
    (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    user.own(path)
    return f"oci:{path}"


def fstab(rootfs: pathlib.Path, text: str) -> None:
    (rootfs / "etc/fstab").write_text(text)


def unharmed(user: User, secret: pathlib.Path) -> None:
    assert sorted(os.listdir(secret)) == ["key"]
    assert (secret / "key").read_text() == "private\n"


# Volumes and the image's fstab


@pytest.mark.security("I1")
def test_volume_behind_a_link_shows_nothing_of_the_host(user: User, secret: pathlib.Path) -> None:
    """A layer links /vol to the victim's directory, and the image has a volume /vol."""
    image = busybox(symlink("vol", str(secret)))
    image.settings["Volumes"] = {"/vol": {}}
    done = user.start(layout(user, image), "sh", "-c", "cat /vol/key || touch /vol/planted && echo empty")
    assert done == "empty\n"
    unharmed(user, secret)


@pytest.mark.security("I1")
def test_volume_with_dots_shows_nothing_of_the_host(user: User, secret: pathlib.Path) -> None:
    image = busybox()
    image.settings["Volumes"] = {f"/../../../../../../..{secret}": {}}
    done = user.start(layout(user, image), "sh", "-c", f"cat {secret}/key || touch {secret}/planted && echo empty")
    assert done == "empty\n"
    unharmed(user, secret)


@pytest.mark.security("I1")
def test_volume_through_a_link_to_run_is_not_the_run_of_the_host(user: User) -> None:
    """Not an attack: Debian's /var/run is a link to /run. In the container, it must lead to the image's own /run."""
    image = busybox(directory("var"), directory("run"), symlink("var/run", "/run"), entry("run/mine", b"mine\n"))
    image.settings["Volumes"] = {"/var/run": {}, "/run": {}}
    done = user.start(layout(user, image), "sh", "-c", "ls /run /var/run; touch /run/written && echo written")
    assert done.replace("mine\n", "") == "/run:\n\n/var/run:\nwritten\n"


@pytest.mark.parity("/etc/fstab of an image")
@pytest.mark.security("I1")
@pytest.mark.parametrize(
    "line",
    [
        "{secret} /vol none x-create=dir,rbind,rw\n",
        "${{HOME}}/secret /vol none x-create=dir,rbind,rw\n",
        "$HOME/secret /vol none x-create=dir,rbind,rw\n",
        "${{ENROOT_ROOTFS}}x/../../../../../..{secret} /vol none x-create=dir,rbind,rw\n",
        "/proc/self/cwd/secret /vol none x-create=dir,rbind,rw\n",
        "secret /vol none x-create=dir,rbind,rw\n",
        "{secret} /vol none x-create=dir,x-move\n",
        "overlay /vol overlay x-create=dir,lowerdir={secret}:/usr\n",
        "proc /vol proc x-create=dir\n",
        "none /proc none x-detach\n",
        "/proc/sys /proc/sys none remount,rw\n",
    ],
)
def test_fstab_of_an_image_mounts_nothing_of_the_host(
    user: User, rootfs: pathlib.Path, secret: pathlib.Path, line: str
) -> None:
    """An image's fstab names a directory of the host, mounts another file system, or changes an existing mount."""
    fstab(rootfs, line.format(secret=secret))
    done = user.penroot("start", "box", "sh", "-c", "cat /vol/key; touch /vol/planted", status=1)
    assert "private" not in done.stdout
    assert "/etc/fstab of the image:1: an image may mount a tmpfs and its own directories" in done.stderr
    assert "ENROOT_IMAGE_FSTAB=host" in done.stderr
    unharmed(user, secret)


@pytest.mark.security("I1")
def test_a_line_is_not_ended_by_what_unicode_calls_a_separator(user: User, secret: pathlib.Path) -> None:
    """A volume's name holds U+2028, U+0085, U+000B or a newline, followed by another line of fstab."""
    image = busybox()
    image.settings["Volumes"] = {f"/v{mark}{secret} /stolen none x-create=dir,rbind": {} for mark in "\u2028\x85\x0b\n"}
    done = user.start(layout(user, image), "sh", "-c", "cat /stolen/key || echo safe")
    assert done == "safe\n"


@pytest.mark.parity("/etc/fstab of an image")
@pytest.mark.security("I2")
def test_setting_lets_fstab_of_the_image_mount_host_paths(
    user: User, rootfs: pathlib.Path, secret: pathlib.Path
) -> None:
    """With ENROOT_IMAGE_FSTAB=host, the image's fstab can mount host paths, as in enroot. No image can set this."""
    fstab(rootfs, "${HOME}/secret /vol none x-create=dir,rbind,ro\n")
    (rootfs / "etc/environment").write_text("ENROOT_IMAGE_FSTAB=host\nPATH=/bin\n")
    user.penroot("start", "box", "cat", "/vol/key", status=1)
    assert user.start("box", "cat", "/vol/key", env={"ENROOT_IMAGE_FSTAB": "host"}) == "private\n"


@pytest.mark.security("I1")
@pytest.mark.parametrize(
    "place", ["/", "/..", "/proc", "/sys", "/dev", "/proc/sys", "/dev/shm", "/to-proc", "/etc/hosts"]
)
def test_volume_on_what_the_host_lends_is_left_out(user: User, rootfs: pathlib.Path, place: str) -> None:
    """A volume is not mounted on /, /.., a mount of the system such as /proc or /etc/hosts, or a link to /proc.

    The volume of the image is left out, and the container starts with the host's directory or file.
    """
    (rootfs / "to-proc").symlink_to("/proc")
    (rootfs / "etc/hosts").write_text("127.0.0.1 image\n")
    fstab(rootfs, VOLUME % (place, place))
    script = "test -d /proc/self && test -c /dev/null && test -d /sys/class && ! grep image /etc/hosts && echo real"
    done = user.penroot("start", "box", "sh", "-c", script)
    assert done.stdout == "real\n"
    assert f"/etc/fstab of the image:1: {place} is left out" in done.stderr


def test_volume_in_what_a_site_mounts_is_left_out(user: User, rootfs: pathlib.Path, secret: pathlib.Path) -> None:
    """Not an attack: an image has a volume /data/cache, but a site mounts /data. Nothing is created in /data."""
    fstab(rootfs, VOLUME % ("/data/cache", "/data/cache"))
    done = user.penroot("start", "-m", f"{secret}:/data:none:x-create=dir,rbind:0:-1", "box", "ls", "/data")
    assert done.stdout == "key\n"
    assert "/data/cache is left out" in done.stderr
    unharmed(user, secret)


@pytest.mark.security("I1")
@pytest.mark.parametrize("form", ["directory", "writable", "squashfs"])
def test_volumes_of_all_kinds_are_of_the_image(user: User, rootfs: pathlib.Path, form: str) -> None:
    """Nested volumes, a file, odd names (space, newline, dollar, hash) and 200 others are mounted and writable."""
    (rootfs / "a/b/c").mkdir(parents=True)
    (rootfs / "file").write_text("of image\n")
    names = ["/a/b/c", "/a", "/a/b", "/missing/deep", "/sp ace", "/new\nline", "/do$HOME", "/#hash", "/file"]
    octal = {ord(c): f"\\{ord(c):03o}" for c in " \n$"}
    fstab(
        rootfs, "".join(VOLUME % ((name.translate(octal),) * 2) for name in [*names, *(f"/n/{i}" for i in range(200))])
    )
    user.own(rootfs)
    target = str(squashed(user, rootfs)) if form == "squashfs" else "box"
    options = ("--rw",) if form == "writable" else ()
    script = (
        "for v in /a /a/b /a/b/c /missing/deep '/sp ace' '/new\nline' '/do$HOME' '/#hash' /n/0 /n/199; do\n"
        'touch "$v/w" || exit 1; done; echo changed > /file; test -e /a/b/c/w && cat /file; grep -c " /n/" /proc/mounts'
    )
    assert user.start(*options, target, "sh", "-c", script) == "changed\n200\n"


@pytest.mark.security("I4")
def test_an_image_takes_a_thousand_mounts_at_most(user: User, rootfs: pathlib.Path) -> None:
    """Each tmpfs takes kernel memory, and an fstab of 16 MB has room for about 1.6 million mounts."""
    fstab(rootfs, "tmpfs /t tmpfs x-create=dir\n" * 400_000)
    done = user.penroot("start", "box", "true", status=1, prefix=("timeout", "20"))
    assert "/etc/fstab of the image:1001: an image may mount 1000 directories, no more" in done.stderr


# Files created in the container do not appear on the host


@pytest.mark.security("I3")
@pytest.mark.parametrize("name", ["etc", "var", "var/spool", "var/mail", "var/log"])
def test_nothing_is_written_in_dev_shm_through_a_link(
    account: User, rootfs: pathlib.Path, shared: pathlib.Path, name: str
) -> None:
    """/etc, /var (with the user's home) or a directory in /var is a link to the /dev/shm of container and host."""
    (rootfs / "etc/default").mkdir()
    (rootfs / "etc/default/useradd").write_text("CREATE_MAIL_SPOOL=yes\n")
    (rootfs / "etc/login.defs").write_text("LASTLOG_ENAB yes\n")
    if name == "etc":
        (rootfs / name).rename(rootfs / "usr/etc")
    (rootfs / name).parent.mkdir(exist_ok=True)
    (rootfs / name).symlink_to(shared)
    account.own(rootfs)
    done = account.run("sh", "-c", "penroot start box true; true", env={"ENROOT_LOGIN_SHELL": "yes"})
    assert os.listdir(shared) == [], done.stderr
    assert f"it leads into a mount of {os.uname().nodename}" in done.stderr or name == "var/log"
    assert "Traceback" not in done.stderr


@pytest.mark.security("I3")
@pytest.mark.parametrize("how", ["mount", "workdir", "literal", "rc", "home"])
def test_no_directory_is_made_in_dev_shm(user: User, rootfs: pathlib.Path, shared: pathlib.Path, how: str) -> None:
    """A mount target, a home, the working directory or /etc/rc leads to /dev/shm."""
    (rootfs / "srv").symlink_to(shared)
    options, environ = [], {}
    if how == "mount":
        options = ["--mount", "/usr/share:/srv/made"]
    elif how in ("workdir", "literal"):
        workdir = "/srv/made" if how == "workdir" else f"{shared}/made"
        (rootfs / "etc/rc").write_text(RC % (workdir, workdir))
    elif how == "rc":
        (rootfs / "etc/rc").symlink_to("/srv/rc")
        (user.home / "script").write_text("true\n")
        options = ["--rc", str(user.home / "script")]
    else:
        environ = {"ENROOT_MOUNT_HOME": "yes", "HOME": "/srv/home"}
    # With --rc, the mount of the file covers the link, and does not follow it.
    done = user.penroot("start", *options, "box", "true", status=int(how != "rc"), env=environ)
    assert os.listdir(shared) == []
    assert "Traceback" not in done.stderr
    assert how in ("home", "rc") or f"it leads into a mount of {os.uname().nodename}" in done.stderr


@pytest.mark.security("I3")
def test_mount_point_below_a_users_mount_is_made_there(user: User, secret: pathlib.Path, rootfs: pathlib.Path) -> None:
    """Not an attack: the user mounts /data, and /data/inner within it. The image's working directory is /data/work."""
    (rootfs / "etc/rc").write_text(RC % ("/data/work", "/data/work"))
    out = user.start(
        "-m", f"{secret}:/data", "-m", "/usr/share:/data/inner", "box", "sh", "-c", "pwd; ls -d /data/inner/doc"
    )
    assert out == "/data/work\n/data/inner/doc\n"
    assert (secret / "inner").stat().st_mode & 0o777 == 0o755


@pytest.mark.security("I4")
@pytest.mark.parametrize("path", ["etc/environment", "etc/rc", "etc/skel/stolen", "etc/passwd"])
def test_callers_environment_is_not_read_by_a_link(account: User, rootfs: pathlib.Path, path: str) -> None:
    """A file of the image is a link to /proc/self/environ. During the start, that is penroot's environment."""
    (rootfs / path).parent.mkdir(exist_ok=True)
    (rootfs / path).unlink(missing_ok=True)
    (rootfs / path).symlink_to("/proc/self/environ")
    account.own(rootfs)
    environ = {"SECRET_TOKEN": "hunter2"}
    status = 1 if path in ("etc/environment", "etc/rc") else 0
    script = "env; cat /etc/passwd; cd; ls -la; cat $HOME/stolen 2>/dev/null | grep hunter2"
    done = account.penroot("start", "box", "sh", "-c", script + "; true", env=environ, status=status)
    assert "hunter2" not in done.stdout
    assert "Traceback" not in done.stderr
    if status:
        assert f"cannot read /{path} of the image: it leads into a mount of" in done.stderr


# The record of a container: the file .penroot in its directory


@pytest.mark.security("I9")
@pytest.mark.parametrize("mark", ["format 1\nsquashfs {image}\n", ""])
def test_record_in_an_image_is_ignored(user: User, rootfs: pathlib.Path, secret: pathlib.Path, mark: str) -> None:
    """The root of a squashfs looks like penroot's directory of a container.

    The image has a .penroot, a directory work, and a link upper to the victim's directory.
    """
    (rootfs / "upper").symlink_to(secret)
    (rootfs / "work").mkdir()
    plain = squashed(user, rootfs).rename(user.home / "plain.sqsh")
    (rootfs / ".penroot").write_text(mark.format(image=plain))
    user.own(rootfs)
    image = squashed(user, rootfs)
    subprocess.run(["unsquashfs", "-quiet", "-no-progress", "-d", str(user.data / "unpacked"), str(image)], check=True)
    user.own(user.data)
    user.run("sh", "-c", f"penroot create -n evil {image}; true")
    for name in ("box", "unpacked", "evil"):  # containers made by hand, by unsquashfs as in enroot, and by penroot
        stderr = user.run("sh", "-c", f"penroot start --rw {name} sh -c 'touch /planted; rm /key'; true").stderr
        assert "Traceback" not in stderr
        user.run("sh", "-c", f"penroot list -f; penroot export -o {name}.x.sqsh {name}; penroot cache prune; true")
        unharmed(user, secret)


@pytest.mark.security("I9")
def test_a_program_cannot_make_a_record(
    user: User, rootfs: pathlib.Path, image: pathlib.Path, secret: pathlib.Path
) -> None:
    """A program in a writable container without a .penroot writes one, which names an image of the user."""
    mark = f"printf 'format 1\\nsquashfs {image}\\n' > /.penroot; ln -s {secret} /upper; mkdir /work"
    user.start("--rw", "box", "sh", "-c", mark)
    user.run("sh", "-c", "penroot start --rw box sh -c 'touch /planted'; true")
    unharmed(user, secret)


# Files of an image that are not regular files


def spoil(path: pathlib.Path, kind: str) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o666)
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "directory":
        path.mkdir()
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 5 << 30)


@pytest.mark.security("I4")
@pytest.mark.parametrize("kind", ["fifo", "socket", "sparse", "loop", "directory"])
@pytest.mark.parametrize("name", ["rc", "rc.local", "fstab", "environment"])
def test_special_file_of_an_image_is_a_clear_error(user: User, rootfs: pathlib.Path, name: str, kind: str) -> None:
    """/etc/rc, for example, is a FIFO, socket, directory, 5 GB large, or a link to itself. The start fails at once."""
    spoil(rootfs / "etc" / name, kind)
    user.own(rootfs)
    began = time.monotonic()
    done = user.penroot("start", "box", "true", status=1, prefix=("prlimit", "--as=1500000000", "timeout", "20"))
    assert time.monotonic() - began < 10
    assert done.stderr.count("[ERROR]") == 1
    assert f"cannot read /etc/{name} of the image: " in done.stderr


@pytest.mark.security("I4")
@pytest.mark.parametrize("name", ["rc", "rc.local"])
def test_a_script_of_an_image_is_read_in_no_time(user: User, rootfs: pathlib.Path, name: str) -> None:
    """The script opens a quote, and fifteen million lines follow. The start ends within ten seconds."""
    (rootfs / "etc/rc").write_text(RC % ("/", "/"))
    (rootfs / "etc" / name).write_text("echo '" + "\n" * (15 << 20))
    (rootfs / "bin/sh").unlink()  # the start reads the script, but cannot run it
    user.run("sh", "-c", "penroot start box true; exit 0", prefix=("timeout", "10"))


@pytest.mark.security("I4")
@pytest.mark.parametrize("kind", ["fifo", "zero", "sparse", "loop"])
@pytest.mark.parametrize(
    "name", ["etc/passwd", "etc/group", "etc/login.defs", "etc/default/useradd", "etc/nologin", "etc/ld.so.cache"]
)
def test_hooks_ignore_special_files_of_an_image(user: User, rootfs: pathlib.Path, name: str, kind: str) -> None:
    """/etc/passwd, for example, is a FIFO, 5 GB of zeros, or a link to /dev/zero or itself. The container starts."""
    spoil(rootfs / name, kind)
    user.own(rootfs)
    environ = {"ENROOT_LOGIN_SHELL": "yes", "HOME": "/home/victim"}
    limits = ("prlimit", "--as=1500000000", "timeout", "20")
    done = user.penroot("start", "box", "sh", "-c", "id -u", env=environ, prefix=limits)
    assert done.stdout == f"{user.uid}\n"


@pytest.mark.security("I4")
@pytest.mark.parametrize("kind", ["link", "fifo", "deep", "many", "sparse", "proc"])
def test_a_skeleton_of_homes_ends(account: User, rootfs: pathlib.Path, kind: str) -> None:
    """The copy of /etc/skel ends even if it has links to itself, a FIFO, 300 levels, 5000 files, 5 GB, or is /proc."""
    skel = rootfs / "etc/skel"
    skel.mkdir()
    if kind == "link":
        for name in ("a", "b", "c"):
            (skel / name).symlink_to(".")
    elif kind == "fifo":
        os.mkfifo(skel / "fifo")
    elif kind == "deep":
        deep = skel
        for _ in range(300):
            deep = deep / "d"
        deep.mkdir(parents=True)
    elif kind == "many":
        for i in range(5000):
            (skel / str(i)).touch()
    elif kind == "sparse":
        (skel / "large").touch()
        os.truncate(skel / "large", 5 << 30)
    else:
        (rootfs / "etc/login.defs").write_text("SKEL /proc\n")
    account.own(rootfs)
    limits = ("prlimit", "--as=1500000000", "timeout", "20")
    done = account.penroot("start", "box", "sh", "-c", "echo started", prefix=limits)
    assert done.stdout == "started\n"


# Bundles: attacks by the image in a bundle that the user executes


Bundled = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def bundled(user: User, rootfs: pathlib.Path) -> Bundled:
    """Return a function that bundles the root file system and runs the bundle."""

    def run(*arguments: str, status: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
        user.own(rootfs)
        user.penroot("bundle", "--force", "-o", "box.run", str(squashed(user, rootfs)))
        return user.run("./box.run", *arguments, status=status, env=environ, prefix=("timeout", "30"))

    return run


@pytest.mark.security("I10")
def test_bundle_volumes_are_of_the_image(rootfs: pathlib.Path, secret: pathlib.Path, bundled: Bundled) -> None:
    """One volume is a link to the victim's directory, one has dots in its path, one is /proc, and one is missing."""
    (rootfs / "vol").symlink_to(secret)
    volumes = ["/vol", f"/../../..{secret}", "/proc", "/missing/deep"]
    fstab(rootfs, "".join(VOLUME % (volume, volume) for volume in volumes))
    script = f"test -e /proc/self && ! cat {secret}/key && touch /vol/planted /missing/deep/w && echo safe"
    done = bundled("sh", "-c", script)
    assert done.stdout == "safe\n"
    assert "/proc is left out" in done.stderr
    assert os.listdir(secret) == ["key"]


@pytest.mark.security("I10")
def test_bundle_mounts_nothing_of_the_host(rootfs: pathlib.Path, secret: pathlib.Path, bundled: Bundled) -> None:
    """The image's fstab names a directory of the host. It is mounted only if the user sets ENROOT_IMAGE_FSTAB=host."""
    fstab(rootfs, "${HOME}/secret /vol none x-create=dir,rbind\n")
    assert "an image may mount a tmpfs" in bundled("cat", "/vol/key", status=1).stderr
    assert bundled("cat", "/vol/key", ENROOT_IMAGE_FSTAB="host", ENROOT_FORCE_OVERRIDE="y").stdout == "private\n"


@pytest.mark.security("I10")
@pytest.mark.parametrize("name", ["home", "srv", "var"])
def test_bundle_makes_nothing_in_dev_shm(
    rootfs: pathlib.Path, shared: pathlib.Path, bundled: Bundled, name: str
) -> None:
    """A home, the working directory or a mount point lies in a directory that leads to /dev/shm."""
    if name == "srv":
        (rootfs / "etc/rc").write_text(RC % ("/srv/made", "/srv/made"))
    (rootfs / name).symlink_to(shared)
    done = bundled("true", status=1, HOME="/home/victim", ENROOT_MOUNT_HOME="y" if name == "home" else "")
    assert os.listdir(shared) == []
    why = "cannot mount /home/victim" if name == "home" else "it leads into a mount of"
    assert why in done.stderr


@pytest.mark.security("I10")
@pytest.mark.parametrize("name", ["fstab", "environment", "passwd", "group", "login.defs", "skel/.bashrc"])
def test_bundle_waits_for_nothing(rootfs: pathlib.Path, bundled: Bundled, name: str) -> None:
    """Files of the image are pipes: the bundle runs without them, or fails with an error."""
    spoil(rootfs / "etc" / name, "fifo")
    fails = name in ("fstab", "environment")
    done = bundled("true", status=1 if fails else 0, ENROOT_LOGIN_SHELL="" if fails else "y")
    assert not fails or f"cannot read /etc/{name} of the image" in done.stderr


@pytest.mark.security("I4")
@pytest.mark.parametrize("form", ["directory", "squashfs"])
@pytest.mark.parametrize("kind", ["fifo", "sparse", "host"])
def test_inspect_reads_files_of_the_image(
    user: User, rootfs: pathlib.Path, secret: pathlib.Path, form: str, kind: str
) -> None:
    """The image's environment file is a pipe, 5 GB large, or a link to the victim's file."""
    spoil(rootfs / "etc/environment", kind)
    if kind == "sparse" and form == "squashfs":
        os.truncate(rootfs / "etc/environment", 100 << 20)  # mksquashfs would read 5 GB
    if kind == "host":
        (rootfs / "etc/environment").symlink_to(secret / "key")
        (secret / "key").write_text("STOLEN=private\n")
    user.own(rootfs)
    target = str(squashed(user, rootfs)) if form == "squashfs" else "box"
    limits = ("prlimit", "--as=1500000000", "timeout", "20")
    done = user.run("sh", "-c", f"penroot inspect {target}; true", prefix=limits)
    assert "private" not in done.stdout
    assert "Traceback" not in done.stderr
    assert "etc/environment" in done.stderr or kind == "host"


@pytest.mark.security("I12")
def test_link_of_an_image_detaches_no_mount_of_the_user(user: User, rootfs: pathlib.Path) -> None:
    """/away is a link of the image to /opt.

    A start that detaches /away fails if the user mounted on /opt, and works if the user mounted on /away.
    """
    (rootfs / "away").symlink_to("/opt")
    (user.home / "cover").mkdir()
    options = ("--mount", f"{user.home}/cover:/opt:none:x-create=dir,bind", "--mount", "none:/away:none:x-detach")
    stderr = user.penroot("start", *options, "box", "true", status=1).stderr
    assert "cannot unmount /away: a symlink of the image leads to another mount" in stderr
    own = ("--mount", "tmpfs:/away:tmpfs:x-create=dir", "--mount", "none:/away:none:x-detach")
    assert user.start(*own, "box", "grep", "-c", " /opt ", "/proc/mounts", status=1) == "0\n"


@pytest.mark.security("C11")
def test_no_module_of_an_image_is_imported(user: User, rootfs: pathlib.Path) -> None:
    """The image has modules at the path of penroot's modules, some of which penroot imports only when a start fails.

    In the container, the image's copies would then run with the caller's descriptors and capabilities.
    """
    library = rootfs / os.path.realpath(LIBRARY).lstrip("/")
    for module in ("base/filesystems.py", "runtime/pods.py"):
        (library / "enroot_py" / module).parent.mkdir(parents=True)
        (library / "enroot_py" / module).write_text("import os\nos.write(2, b'imported')\n")
    user.own(rootfs)
    # The user may create one user namespace. The start needs a second one, and fails.
    script = "echo 1 > /proc/sys/user/max_user_namespaces && exec penroot start --root box true"
    stderr = user.run("unshare", "-Urm", "sh", "-c", script, status=1).stderr
    assert "cannot create a user namespace: No space left on device" in stderr
    assert "imported" not in stderr
