"""Command lines with enroot's answers as data: lines/*.t. This program runs the commands with penroot and with enroot.

The format is cram's: a command behind ``  $ ``, continued behind ``  > ``; its stdout; ``  [STATUS]`` if not 0. If
penroot differs, ``  ~ WHY`` follows with words of docs/reference/enroot.md, and then penroot's answer.

    python3 -m tests.parity.differential --enroot /usr/bin/enroot        # make differential

runs both and prints the differences. ``--write`` updates the files.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tests.docs import ROOT
from tests.images import DOCKER, OCI, Image, Layer, busybox, directory, entry, index, tar
from tests.installation import LIBRARY
from tests.kernel.conftest import PREFIX, UID, busybox_rootfs
from tests.kernel.registry import serve

LINES = pathlib.Path(__file__).parent / "lines"
HELPERS = ("mount", "switchroot", "nsenter", "aufs2ovlfs", "mksquashovlfs")
_KNOWN = "documented: "
_UID = "27001"  # the name in the lines
_UIDS = itertools.count(UID + 2)  # each transcript has its own user
_CONFIG = re.compile(r'^config::init "[^"]*"', re.M)


@dataclass
class Line:
    """A command line, enroot's answer, and our answer with the reason if it differs: stdout, then ``[STATUS]``."""

    number: int
    command: str
    enroot: str = ""
    why: str = ""
    ours: str = ""

    @property
    def expected(self) -> str:
        return self.ours if self.why else self.enroot


@dataclass
class Transcript:
    """A file of lines. All run in order in one directory."""

    path: pathlib.Path
    lines: list[Line] = field(default_factory=list)
    prose: dict[int, list[str]] = field(default_factory=dict)  # set by the next line of the file

    def write(self) -> None:
        out: list[str] = []
        for at, line in enumerate(self.lines):
            out += self.prose.get(at, [])
            first, *more = line.command.split("\n")
            out += [f"  $ {first}", *(f"  > {part}" for part in more)]
            out += [f"  {part}" for part in line.enroot.splitlines()]
            if line.why:
                out += [f"  ~ {line.why}", *(f"  {part}" for part in line.ours.splitlines())]
        out += self.prose.get(len(self.lines), [])
        self.path.write_text("".join(f"{line.rstrip()}\n" for line in out))


def parse(path: pathlib.Path) -> Transcript:
    """Return the transcript in a file."""
    found = Transcript(path)
    for number, text in enumerate(path.read_text().splitlines(), 1):
        line = found.lines[-1] if found.lines else Line(0, "")
        if not text.startswith("  "):
            found.prose.setdefault(len(found.lines), []).append(text)
        elif text.startswith("  $ "):
            found.lines.append(Line(number, text[4:]))
        elif text.startswith("  > "):
            line.command += "\n" + text[4:]
        elif text.startswith("  ~ "):
            line.why = text[4:]
        elif line.why:
            line.ours += text[2:] + "\n"
        else:
            line.enroot += text[2:] + "\n"
    return found


def transcripts() -> list[Transcript]:
    return [parse(path) for path in sorted(LINES.glob("*.t"))]


def documented(why: str) -> bool:
    """Return whether docs/reference/enroot.md has these words."""
    return " ".join(why.split()) in " ".join((ROOT / "docs/reference/enroot.md").read_text().split())


class Place:
    """A home directory with containers, an image and a program ``enroot``, in which lines run as an ordinary user."""

    def __init__(self, home: pathlib.Path, registry: str) -> None:
        self.home = home
        self.uid = next(_UIDS)
        self.environ = {
            "HOME": str(home),
            "PATH": f"{home}/bin:/usr/local/bin:/usr/bin:/bin",
            "TERM": "xterm",
            "ENROOT_SYSCONF_PATH": str(home / "etc"),
            "ENROOT_DATA_PATH": str(home / "data"),
            "ENROOT_CACHE_PATH": str(home / "cache"),
            "ENROOT_RUNTIME_PATH": str(home / "run"),
            "ENROOT_TEMP_PATH": str(home / "tmp"),
            "ENROOT_ALLOW_HTTP": "yes",
            "REGISTRY": registry,
            "IMAGE": IMAGE.digest(),
        }
        for name in ("bin", "etc/environ.d", "etc/mounts.d", "etc/hooks.d", "data", "tmp", "work", "run"):
            (home / name).mkdir(parents=True)
        busybox_rootfs(home / "data/box")
        for name in (
            "awk",
            "basename",
            "expr",
            "hostname",
            "printf",
            "sort",
            "tail",
            "tr",
            "tty",
            "wc",
            "whoami",
            "df",
        ):
            (home / "data/box/bin" / name).symlink_to("busybox")
        for name in ("root", "mnt"):
            (home / "data/box" / name).mkdir()
        for name, text in ACCOUNTS.items():
            (home / "data/box/etc" / name).write_text(text)
        shutil.copytree(home / "data/box", home / "data/app", symlinks=True)
        (home / "data/app/etc/rc").write_text(RC)
        (home / "data/app/etc/rc.local").write_text("")
        (home / "data/app/etc/fstab").write_text("${ENROOT_ROOTFS}/data /data none x-create=dir,bind,rw,nosuid,nodev\n")
        for name, tree in (("box", "data/box"), ("app", "data/app")):
            command = ["mksquashfs", str(home / tree), str(home / f"work/{name}.sqsh"), "-all-root", "-quiet"]
            subprocess.run([*command, "-no-progress", "-Xcompression-level", "1"], check=True)
        (home / "bin/ready").write_text(READY)
        (home / "bin/ready").chmod(0o755)
        (home / "passwd").write_text(
            pathlib.Path("/etc/passwd").read_text() + f"tester:x:{self.uid}:{self.uid}:A tester:{home}:/bin/sh\n"
        )
        (home / "group").write_text(pathlib.Path("/etc/group").read_text() + f"tester:x:{self.uid}:\n")

    def install_ours(self) -> None:
        """Install our program under the names that ``make enroot-names`` creates."""
        (self.home / "bin/enroot").symlink_to(f"{PREFIX}/bin/penroot")
        for name in HELPERS:
            ours = "unshare" if name == "nsenter" else name
            (self.home / f"bin/enroot-{name}").symlink_to(f"{LIBRARY}/libexec/penroot-{ours}")

    def install_enroot(self, program: pathlib.Path) -> None:
        """Install a copy of enroot's script that reads this directory's enroot.conf, hooks and mounts."""
        script = program.read_text()
        found = _CONFIG.search(script)
        if not found:
            sys.exit(f"{program} is not enroot's script")
        site = pathlib.Path(found[0].split('"')[1]).parent
        script = _CONFIG.sub(f'config::init "{self.home}/etc/enroot.conf"', script)
        (self.home / "bin/enroot").write_text(script)
        (self.home / "bin/enroot").chmod(0o755)
        for path in program.parent.glob("enroot-*"):
            (self.home / "bin" / path.name).symlink_to(path)
        for name in ("environ.d", "mounts.d", "hooks.d"):
            for path in (site / name).iterdir():
                # These hooks depend on the machine: its devices and cgroup version.
                if path.name not in ("10-cgroups.sh", "98-nvidia.sh", "99-mellanox.sh"):
                    shutil.copy(path, self.home / "etc" / name)

    def own(self) -> None:
        if os.geteuid() == 0:
            subprocess.run(["chown", "-hR", f"{self.uid}:{self.uid}", str(self.home)], check=True)

    def run(self, command: str) -> str:
        """Run a command line. Return stdout, without blank lines and local paths, and the status."""
        as_user: tuple[str, ...] = ()
        if os.geteuid() == 0:
            # Create an account that is visible only to these processes.
            setup = f"mount --bind {self.home}/passwd /etc/passwd && mount --bind {self.home}/group /etc/group"
            setup += f' && exec setpriv --reuid={self.uid} --regid={self.uid} --clear-groups -- "$@"'
            as_user = ("unshare", "--mount", "sh", "-c", setup, "sh")
        done = subprocess.run(
            [*as_user, "bash", "-c", command],
            env=self.environ,
            cwd=self.home / "work",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=120,
            check=False,
        )
        if os.environ.get("DIFFERENTIAL_STDERR"):
            sys.stderr.write(done.stderr)
        user = "tester" if as_user else pwd.getpwuid(os.geteuid()).pw_name
        out = done.stdout.replace(str(self.home), "HOME").replace(self.environ["REGISTRY"], "REGISTRY")
        out = re.sub(rf"\b{self.uid if as_user else os.geteuid()}\b", _UID, out)
        lines = [line.rstrip() for line in re.sub(rf"\b{user}\b", "USER", out).splitlines()]
        lines += [f"[{done.returncode}]"] if done.returncode else []
        return "".join(f"{line}\n" for line in lines if line)


# Wait until a start has executed sleep.
READY = """\
#!/bin/sh
for _ in $(seq 600); do
    [ "$(cat "/proc/$1/comm")" != sleep ] || exit 0
    sleep .1
done
exit 1
"""
ACCOUNTS = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "shadow": "root:*:19000:0:99999:7:::\nnobody:*:19000:0:99999:7:::\n",
    "gshadow": "root:*::\nnogroup:*::\n",
}
RC = """\
mkdir -p "/opt/work" 2> /dev/null
cd "/opt/work" && unset OLDPWD || exit 1

if [ -s /etc/rc.local ]; then
    . /etc/rc.local
fi

if [ $# -gt 0 ]; then
    exec '/bin/echo' 'entry point' "$@"
else
    exec '/bin/echo' 'entry point' 'command'
fi
"""


class Dated(Image):
    """An image with a history, which lets a registry offer the older manifest that enroot requests first."""

    def config(self) -> bytes:
        config = json.loads(super().config())
        config["history"] = [{"created": config["created"], "created_by": "a test"} for _ in self.layers]
        return json.dumps(config).encode()


IMAGE = Dated(busybox(directory("srv"), entry("srv/file", b"content\n")).layers)
IMAGE.settings = {
    "Env": ["PATH=/bin", "FROM_IMAGE=a b", "REFERRED=${TERM}"],
    "Entrypoint": ["/bin/echo", "it's"],
    "Cmd": ["one", "two words"],
    "WorkingDir": "/srv/work",
    "Labels": {"maintainer": "nobody"},
    "Volumes": {"/data": {}},
}
BARE = Dated([busybox().layers[0]])


class Mixed(Image):
    """An OCI image with layers of three media types, as left by a tool that appends to another tool's image."""

    def manifest(self) -> bytes:
        manifest = json.loads(super().manifest())
        for layer, compression in zip(manifest["layers"], ("+gzip", "+zstd", ""), strict=True):
            layer["mediaType"] = f"application/vnd.oci.image.layer.v1.tar{compression}"
        return json.dumps(manifest).encode()


MIXED = Mixed(
    [
        busybox().layers[0],
        Layer(tar([directory("srv"), entry("srv/second", b"zstd\n")]), "zstd"),
        Layer(tar([entry("srv/third", b"plain\n")]), "none"),
    ],
    kinds=OCI,
)


@contextlib.contextmanager
def place(program: pathlib.Path | None, registry: str) -> Iterator[Place]:
    """Yield a new place, with our program or with the enroot ``program``."""
    home = pathlib.Path(tempfile.mkdtemp(prefix="penroot-lines-", dir="/var/tmp"))
    home.chmod(0o755)
    try:
        made = Place(home, registry)
        if program is None:
            made.install_ours()
        else:
            made.install_enroot(program)
        made.own()
        yield made
    finally:
        subprocess.run(["rm", "-rf", str(home)], check=True)


@contextlib.contextmanager
def registry() -> Iterator[str]:
    """Yield the HOST:PORT of a registry with the lines' images."""
    with tempfile.TemporaryDirectory() as directory_, serve(pathlib.Path(directory_) / "registry") as server:
        for name, image in (("org/app", IMAGE), ("library/bare", BARE)):
            server.pusher.image(name, "1", image)
            server.pusher.image(name, "latest", image)
        server.pusher.image("org/mixed", "", MIXED)
        server.pusher.manifest("org/mixed", "1", index([(MIXED, {"os": "linux", "architecture": "amd64"})], DOCKER))
        yield server.host


def outcomes(found: Transcript, program: pathlib.Path | None, host: str) -> list[str]:
    """Run the lines of a file in order in a private directory, and return the results."""
    with place(program, host) as here:
        return [here.run(line.command) for line in found.lines]


def compare(found: Transcript, enroot: list[str], ours: list[str]) -> Iterator[str]:
    """Yield the results that differ from the file, and the lines whose results differ between both programs."""
    for line, theirs, mine in zip(found.lines, enroot, ours, strict=True):
        where = f"{found.path.name}:{line.number}: $ {line.command}"
        if theirs != line.enroot:
            yield f"{where}\nenroot, as written:\n{line.enroot}enroot, as it is:\n{theirs}"
        if mine != line.expected:
            yield f"{where}\nours, as written:\n{line.expected}ours, as it is:\n{mine}"
        if theirs != mine:
            known = bool(line.why) and documented(line.why)
            yield f"{where}\n{_KNOWN if known else 'UNDOCUMENTED: '}{line.why}\nenroot:\n{theirs}ours:\n{mine}"


def write(found: Transcript, enroot: list[str], ours: list[str]) -> None:
    """Write the results to the files."""
    for line, line.enroot, line.ours in zip(found.lines, enroot, ours, strict=True):
        line.why = (line.why or "WHY?") if line.ours != line.enroot else ""
    found.write()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--enroot", type=pathlib.Path, default=shutil.which("enroot"), help="the program enroot")
    parser.add_argument("--write", action="store_true", help="write down what they gave")
    parser.add_argument("names", nargs="*", help="files of lines/, if not all")
    options = parser.parse_args(arguments)
    if options.enroot is None or options.enroot.resolve().name == "penroot":
        parser.error("there is no enroot in PATH: --enroot names it")
    files = [found for found in transcripts() if not options.names or found.path.stem in options.names]
    texts: list[str] = []
    with registry() as host, ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = [[pool.submit(outcomes, found, program, host) for program in (options.enroot, None)] for found in files]
        for found, (enroot, ours) in zip(files, runs, strict=True):
            for text in compare(found, enroot.result(), ours.result()):
                print(text, flush=True)
                texts.append(text)
            if options.write:
                write(found, enroot.result(), ours.result())
    known = sum(f"\n{_KNOWN}" in text for text in texts)
    count = sum(len(found.lines) for found in files)
    print(f"{count} lines: {known} differ as docs/reference/enroot.md states, {len(texts) - known} are wrong")
    return 1 if len(texts) > known else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
