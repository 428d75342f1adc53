"""An ordinary user runs ``penroot start`` with environment files (TOML files for a container), and ``penroot env``."""

from __future__ import annotations

import json
import os
import pathlib
import re

import pytest

from tests.installation import LIBRARY
from tests.kernel.conftest import User, squashed


class Files:
    """A user with environment files in ~/.edf, and with a squashfs file ``image``."""

    def __init__(self, user: User, image: pathlib.Path) -> None:
        self.user = user
        self.image = image
        self.directory = user.home / ".edf"
        self.directory.mkdir()

    def write(self, name: str, text: str) -> None:
        self.user.write(f".edf/{name}.toml", text)

    def start(self, text: str, *words: str, env: dict[str, str] | None = None, status: int = 0) -> str:
        """Start the image with an environment file that contains ``text``. Return stdout."""
        self.write("it", f'image = "{self.image}"\n{text}')
        return self.user.start("--environment", "it", *words, env=env, status=status)

    def refused(self, *words: str, env: dict[str, str] | None = None) -> str:
        """Return stderr of a start that must fail."""
        return self.user.penroot("start", *words, status=1, env=env).stderr


@pytest.fixture
def files(user: User, rootfs: pathlib.Path) -> Files:
    (rootfs / "etc/rc").write_text(
        'mkdir -p "/opt/work" 2> /dev/null\ncd "/opt/work" && unset OLDPWD || exit 1\n\n'
        "if [ -s /etc/rc.local ]; then\n    . /etc/rc.local\nfi\n\n"
        "if [ $# -gt 0 ]; then\n    exec 'env' 'BY=entrypoint' \"$@\"\nelse\n    exec 'env' 'BY=entrypoint' 'pwd'\nfi\n"
    )
    return Files(user, squashed(user, rootfs))


@pytest.mark.parity("start --environment: image")
def test_all_keys_of_a_file(files: Files) -> None:
    (files.user.home / "data").mkdir(exist_ok=True)
    out = files.start(
        'entrypoint = true\nworkdir = "/mnt/${NAME}"\nmounts = ["${HOME}:/mnt/x:ro", "tmpfs:/mnt/y"]\n'
        '[env]\nPATH = "${PATH}:/custom"\nFROM_IMAGE = ""\nWHO = "${NAME}"\nMONEY = "5$$"\n',
        "sh",
        "-c",
        "pwd; ls -d .edf; touch made 2> /dev/null || echo read-only; touch /mnt/y/made /made && echo made; env",
        env={"NAME": "x"},
    )
    assert out.startswith("/mnt/x\n.edf\nread-only\nmade\n")
    assert {"PATH=/opt/bin:/bin:/usr/bin:/custom", "WHO=x", "MONEY=5$", "BY=entrypoint"} <= set(out.splitlines())
    assert "FROM_IMAGE" not in out
    assert not (files.user.data / "box/made").exists()


@pytest.mark.parity("start --environment: image")
def test_without_its_entrypoint_and_writable(files: Files) -> None:
    text = "entrypoint = false\nwritable = false\n"
    out = files.start(text, "sh", "-c", "echo ${BY-none}; pwd; touch /made 2> /dev/null || echo read-only")
    assert out == "none\n/opt/work\nread-only\n"
    assert files.start(text) == "/opt/work\n"  # printed by the image's command; the entrypoint does not run
    assert files.start("", "sh", "-c", "echo ${BY-none}") == "none\n"
    assert files.start("") == "/opt/work\n"


@pytest.mark.parity("start --environment: options of the command line take precedence over the file")
def test_options_override_the_file(files: Files) -> None:
    text = 'writable = false\nmounts = ["/usr:/mnt"]\n[env]\nA = "file"\nB = "file"\n'
    words = ("--rw", "--mount", "/etc:/mnt", "--env", "A=option", "sh", "-c", "touch /x; ls -d /mnt/fstab; echo $A $B")
    assert files.start(text, *words) == "/mnt/fstab\noption file\n"


def test_container_with_a_file_that_names_no_image(files: Files, rootfs: pathlib.Path) -> None:
    files.write("it", 'writable = false\n[env]\nA = "file"\n')
    assert files.user.start("--environment=it", "box", "sh", "-c", "echo $A") == "file\n"
    assert "start needs a container or an image" in files.refused("--environment=it")


def test_ranks_share_a_container_only_with_the_same_file(files: Files) -> None:
    script = "files() { PMI_RANK=$2 penroot start --environment $1 readlink /proc/self/ns/mnt; }; "
    script += "files a 1; files a 2; files b 3"
    files.write("a", f'image = "{files.image}"\nentrypoint = false\n')
    files.write("b", f'image = "{files.image}"\nentrypoint = false\n[env]\nB = "1"\n')
    keep = "PMI_RANK=0 penroot start --environment a sleep 100 & sleep_pid=$!; "
    wait = "until penroot list -f | grep -q sleep; do sleep 0.05; done; "
    out = files.user.run("sh", "-c", f"{keep}{wait}{script}; kill $sleep_pid").stdout.split()
    assert out[0] == out[1] != out[2]


@pytest.mark.parity("start --environment --explain")
def test_explain_names_the_line_of_each_value(files: Files) -> None:
    text = 'workdir = "/mnt"\nmounts = [\n"/usr:/mnt"]\n[env]\nA = "1"\nFROM_IMAGE = ""\ndevices = "x"\n'
    out = files.start(text, "--explain", "true")
    path = f"{files.directory}/it.toml"
    assert re.search(rf"^mount +/usr /mnt .*\({path}:3: mounts\)$", out, re.M)
    assert f"set      A=1  ({path}:6)\n" in out
    assert f"unset    FROM_IMAGE  ({path}:7)\n" in out
    assert f"workdir  /mnt  ({path}:2: workdir)\n" in out
    assert "ENROOT_ROOTFS_WRITABLE=yes  (the default of environment files)\n" in out


@pytest.mark.parity("start --environment: image")
def test_devices_of_a_file_are_added_to_those_of_the_settings(files: Files) -> None:
    text = 'devices = ["/dev/null"]\nwritable = false\n[env]\nX = "1"\n'
    out = files.start(text, "--device", "/dev/zero", "--explain", "true", env={"ENROOT_DEVICES": "/dev/full"})
    assert "setting  ENROOT_DEVICES=/dev/full,/dev/null,/dev/zero  (command line)\n" in out


@pytest.mark.parity("annotations: for hooks of a site")
def test_hooks_see_the_annotations(files: Files) -> None:
    hooks = ".config/enroot/hooks.d"
    say = "def run(context):\n    context.environ['SAID'] = context.value('PENROOT_ANNOTATIONS').replace('\\n', '|')\n"
    files.user.write(f"{hooks}/50-say.py", say)
    say = '#!/bin/bash\necho "BASH_SAID=${PENROOT_ANNOTATIONS%%=*}" >> "$ENROOT_ENVIRON"\n'
    files.user.write(f"{hooks}/60-say.sh", say, 0o755)
    text = '[annotations]\ncom.a.b = "${HOME}"\n[annotations.com.c]\nd = "2"\n'
    out = files.start(text, "sh", "-c", "echo $SAID $BASH_SAID")
    assert out == f"com.a.b={files.user.home}|com.c.d=2 com.a.b\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mounts = ['/nowhere:/x']", "/nowhere"),
        ("workdir = '/nowhere'", "cannot enter the working directory /nowhere"),
        ("workdir = '/nowhere'", "/.edf/it.toml:2: workdir"),
        ("workdir = 'nowhere'", "it.toml:2: workdir=nowhere is not an absolute path"),
        ("mounts = ['a:/b']", "it.toml:2: mounts: the source 'a' is neither"),
        ("mounts = ['/usr:/b:rodent']", "it.toml:2: mounts"),
        ("env.A = '${NOTHING}'", "it.toml:2: A: the variable NOTHING is not set"),
        ("devices = ['nvidia.com/gpu']", "nvidia.com/gpu"),
    ],
)
def test_impossible_values_are_reported(files: Files, text: str, expected: str) -> None:
    files.write("it", f"image = '{files.image}'\n{text}\n")
    stderr = files.refused("--environment", "it", "true")
    assert expected in stderr and stderr.count("[ERROR]") == 1, stderr


def test_wrong_environment_options_are_reported(files: Files) -> None:
    assert "there is no none.toml in" in files.refused("--environment=none", "true")
    assert "option --environment needs a value" in files.refused("--environment=")
    assert "batch takes no --environment" in files.user.penroot("batch", "--environment=x", "y", status=1).stderr
    files.write("it", "image = 'a//b'\n")
    assert "it.toml:1: image=" in files.refused("--environment=it", "true")


@pytest.mark.parity("env render")
def test_rendered_file_means_the_same(files: Files) -> None:
    files.write(
        "base", 'image = "debian"\nworkdir = "/a"\nmounts = ["${HOME}:/h"]\n[annotations]\na.b = "$$x"\nc = "1"\n'
    )
    files.write("it", 'base_environment = "base"\nwritable = false\nmounts = ["/x:/${SLURM_JOB_ID}"]\nworkdir = ""\n'
                      '[env]\nA = "${HOME}/$B"\nC = "\\"\\u007f\\t"\n')  # fmt: skip
    out = files.user.penroot("env", "render", "it").stdout
    assert f'image = "debian"  # {files.directory}/base.toml:1\n' in out
    assert f'unless the image sets it: HOME="{files.user.home}"\n' in out
    document = pytest.importorskip("tomllib").loads(out)
    assert document == {
        "image": "debian",
        "entrypoint": False,
        "writable": False,
        "mounts": [f"{files.user.home}:/h", "/x:/${SLURM_JOB_ID}"],
        "env": {"A": "${HOME}/$B", "C": '"\x7f\t'},
        "annotations": {"a.b": "$$x", "c": "1"},
    }
    files.write("again", out)
    again = json.loads(files.user.penroot("env", "render", "--format=json", "again").stdout)
    first = json.loads(files.user.penroot("env", "render", "--format=json", "it").stdout)
    assert first.pop("origins") != again.pop("origins") and first == again
    assert first["annotations"] == {"a.b": "$x", "c": "1"}


@pytest.mark.parity("env validate")
def test_validate(files: Files) -> None:
    files.write("good", 'image = "debian"\n')
    files.write("part", 'mounts = ["/x/${SLURM_JOB_ID}:/y"]\n[annotations]\na = "${SLURM_JOB_ID}"\n')
    files.write("bad", 'image = "debian"\nvolumes = []\n')
    out = files.user.penroot("env", "validate", "good", "part", f"{files.directory}/good.toml").stdout
    good = f"{files.directory}/good.toml is valid\n"
    assert out == f"{good}{files.directory}/part.toml is valid, but names no image\n{good}"
    done = files.user.penroot("env", "validate", "bad", "good", status=1)
    assert done.stdout == good and "bad.toml:2: unknown key 'volumes'" in done.stderr


@pytest.mark.parity("a file or directory that others can write to is not trusted")
@pytest.mark.security("H5")
def test_file_of_another_user_is_not_trusted(files: Files) -> None:
    directory = files.user.home / "open"
    directory.mkdir()
    (directory / "it.toml").write_text(f'image = "{files.image}"\n')
    files.user.own(directory)
    environ = {"EDF_PATH": str(directory)}
    assert files.user.start("--environment=it", "true", env=environ) == ""
    directory.chmod(0o1777)
    assert "is world-writable" in files.refused("--environment=it", "true", env=environ)
    named = f"--environment={directory}/it.toml"
    assert files.user.start(named, "true") == ""
    if os.geteuid() == 0:
        os.chown(directory / "it.toml", 4711, 4711)
        stderr = files.refused(named, "true")
        assert f"{directory}/it.toml: belongs to uid 4711" in stderr and "not trusted" in stderr
        files.user.own(directory)
    directory.chmod(0o755)
    (directory / "it.toml").chmod(0o666)
    assert "can be written by others" in files.refused("--environment=it", "true", env=environ)
    (directory / "it.toml").unlink()
    os.mkfifo(directory / "it.toml")
    files.user.own(directory)
    assert "is not a regular file" in files.refused("--environment=it", "true", env=environ)


@pytest.mark.parity("start: without an environment file")
def test_start_without_a_file_imports_no_module_for_files(files: Files) -> None:
    code = "from enroot_py.cli.start import main\ntry: main(['--explain', 'box', 'true'])\nfinally: print(*sys.modules)"
    done = files.user.run("python3", "-IS", "-c", f"import sys; sys.path.insert(0, {LIBRARY!r}); {code}")
    modules = set(done.stdout.splitlines()[-1].split())
    assert "enroot_py.cli.start" in modules and not {name for name in modules if "edf" in name or "startfile" in name}
