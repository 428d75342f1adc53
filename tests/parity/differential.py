"""Run the command lines of lines/*.t with penroot and with enroot, and compare their results with those in the files.

The files have the format of cram. A command begins with ``  $ ``, and its further lines with ``  > ``. Its stdout
follows, and ``  [STATUS]`` if its exit status is not 0. If penroot's result differs, ``  ~ WHY`` follows, with words
of docs/reference/enroot.md, and then penroot's result.

    python3 -m tests.parity.differential --enroot /usr/bin/enroot        # make differential

runs all lines and prints the differences. ``--write`` updates the files.
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
_UID = "27001"  # the files show this number in place of the user's UID
_UIDS = itertools.count(UID + 2)  # each transcript runs as another user
_CONFIG = re.compile(r'^config::init "[^"]*"', re.M)


@dataclass
class Line:
    """A command line with enroot's result, and with penroot's result and the reason ``why`` if it differs.

    A result is stdout, and the line ``[STATUS]`` if the exit status is not 0.
    """

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
    """A file of lines. The command lines run in order, in one directory."""

    path: pathlib.Path
    lines: list[Line] = field(default_factory=list)
    prose: dict[int, list[str]] = field(default_factory=dict)  # text before a command line, by its index

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
    """Read the transcript in a file."""
    transcript = Transcript(path)
    for number, text in enumerate(path.read_text().splitlines(), 1):
        line = transcript.lines[-1] if transcript.lines else Line(0, "")
        if not text.startswith("  "):
            transcript.prose.setdefault(len(transcript.lines), []).append(text)
        elif text.startswith("  $ "):
            transcript.lines.append(Line(number, text[4:]))
        elif text.startswith("  > "):
            line.command += "\n" + text[4:]
        elif text.startswith("  ~ "):
            line.why = text[4:]
        elif line.why:
            line.ours += text[2:] + "\n"
        else:
            line.enroot += text[2:] + "\n"
    return transcript


def transcripts() -> list[Transcript]:
    return [parse(path) for path in sorted(LINES.glob("*.t"))]


def documented(why: str) -> bool:
    """Return whether docs/reference/enroot.md contains the words ``why``."""
    return " ".join(why.split()) in " ".join((ROOT / "docs/reference/enroot.md").read_text().split())


class Place:
    """A home directory with containers, images and a program ``enroot``. Lines run there as an ordinary user."""

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
        """Install penroot's programs under the names that ``make enroot-names`` creates."""
        (self.home / "bin/enroot").symlink_to(f"{PREFIX}/bin/penroot")
        for name in HELPERS:
            ours = "unshare" if name == "nsenter" else name
            (self.home / f"bin/enroot-{name}").symlink_to(f"{LIBRARY}/libexec/penroot-{ours}")

    def install_enroot(self, program: pathlib.Path) -> None:
        """Install a copy of enroot's script that reads this directory's enroot.conf, hooks and mounts."""
        script = program.read_text()
        match = _CONFIG.search(script)
        if not match:
            sys.exit(f"{program} is not enroot's script")
        site = pathlib.Path(match[0].split('"')[1]).parent
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
        """Run a command line, and return its result without blank lines. Local paths, names and UIDs are replaced."""
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


# Wait until the process $1 has executed sleep.
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
    """An image with a history, from which a registry makes the older manifest that enroot requests first."""

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
    """An OCI image with three media types of layers. Tools that append to another tool's image make such images."""

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
    """Yield a new Place with the enroot ``program``, or with penroot if ``program`` is None."""
    home = pathlib.Path(tempfile.mkdtemp(prefix="penroot-lines-", dir="/var/tmp"))
    home.chmod(0o755)
    try:
        created = Place(home, registry)
        if program is None:
            created.install_ours()
        else:
            created.install_enroot(program)
        created.own()
        yield created
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


def outcomes(transcript: Transcript, program: pathlib.Path | None, host: str) -> list[str]:
    """Run the lines of a file in order in a private directory, and return the results."""
    with place(program, host) as created:
        return [created.run(line.command) for line in transcript.lines]


def compare(transcript: Transcript, enroot: list[str], ours: list[str]) -> Iterator[str]:
    """Yield the results that differ from the file, and the lines with different results of enroot and penroot."""
    for line, theirs, mine in zip(transcript.lines, enroot, ours, strict=True):
        where = f"{transcript.path.name}:{line.number}: $ {line.command}"
        if theirs != line.enroot:
            yield f"{where}\nenroot, in the file:\n{line.enroot}enroot, now:\n{theirs}"
        if mine != line.expected:
            yield f"{where}\nours, in the file:\n{line.expected}ours, now:\n{mine}"
        if theirs != mine:
            known = bool(line.why) and documented(line.why)
            yield f"{where}\n{_KNOWN if known else 'UNDOCUMENTED: '}{line.why}\nenroot:\n{theirs}ours:\n{mine}"


def write(transcript: Transcript, enroot: list[str], ours: list[str]) -> None:
    """Write the results to the file."""
    for line, line.enroot, line.ours in zip(transcript.lines, enroot, ours, strict=True):
        line.why = (line.why or "WHY?") if line.ours != line.enroot else ""
    transcript.write()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--enroot", type=pathlib.Path, default=shutil.which("enroot"), help="the program enroot")
    parser.add_argument("--write", action="store_true", help="update the files with the results")
    parser.add_argument("names", nargs="*", help="files of lines/ to run (default: all)")
    options = parser.parse_args(arguments)
    if options.enroot is None or options.enroot.resolve().name == "penroot":
        parser.error("there is no enroot in PATH: name the program with --enroot")
    files = [transcript for transcript in transcripts() if not options.names or transcript.path.stem in options.names]
    texts: list[str] = []
    with registry() as host, ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = [
            [pool.submit(outcomes, transcript, program, host) for program in (options.enroot, None)]
            for transcript in files
        ]
        for transcript, (enroot, ours) in zip(files, runs, strict=True):
            for text in compare(transcript, enroot.result(), ours.result()):
                print(text, flush=True)
                texts.append(text)
            if options.write:
                write(transcript, enroot.result(), ours.result())
    known = sum(f"\n{_KNOWN}" in text for text in texts)
    count = sum(len(transcript.lines) for transcript in files)
    print(f"{count} lines: {known} differ as docs/reference/enroot.md states, {len(texts) - known} are wrong")
    return 1 if len(texts) > known else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
