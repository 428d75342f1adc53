"""The container options: what is accepted, what is refused, and what is derived from the table."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from enroot_py.base.errors import ConfigError, PenrootError, UsageError
from enroot_py.config.edf import Environment, FileEntry
from enroot_py.config.table import SETTINGS
from enroot_py.runtime.mountentries import MountEntry
from pyxis_py import options
from pyxis_py.header import c_header
from pyxis_py.options import OPTIONS, ignored, parse

BIND = ("x-create=auto", "rbind")


def of(*given: str, **environ: str) -> options.Request:
    pairs = (option.partition("=") for option in given)
    return parse([(name, text) for name, _, text in pairs], environ)


def test_nothing_given_says_nothing() -> None:
    request = of()
    assert (request.image, request.name, request.mounts, request.env, request.unshare) == (None, None, (), (), ())
    assert (request.mount_home, request.remap_root, request.writable, request.entrypoint) == (None, None, None, None)
    assert request.name_mode == "auto"
    assert not request.wants_container


def test_every_option_sets_its_attribute() -> None:
    request = of(
        "container-image=REG:5000#a/b:1",
        "container-mounts=/a",
        "container-workdir=/w",
        "container-name=n:exec",
        "container-save=./s.sqsh",
        "container-mount-home=",
        "container-remap-root=",
        "no-container-entrypoint=",
        "container-entrypoint-log=",
        "container-readonly=",
        "container-env=A,B,A",
        "container-unshare=net,uts",
    )
    assert (request.image, request.workdir, request.save) == ("REG:5000#a/b:1", "/w", "./s.sqsh")
    assert (request.name, request.name_mode) == ("n", "exec")
    assert (request.mount_home, request.remap_root, request.entrypoint, request.writable) == (True, True, False, False)
    assert (request.entrypoint_log, request.env, request.unshare) == (True, ("A", "B"), ("net", "uts"))
    assert request.mounts == (MountEntry("/a", "/a", BIND),)


def test_a_request_is_read_only() -> None:
    with pytest.raises(AttributeError):
        of().image = "other"


@pytest.mark.parity("targets that are relative or lead out")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/a:/b", [("/a", "/b", BIND)]),
        ("/a:/b:", [("/a", "/b", BIND)]),
        ("/a:/b:ro+rprivate", [("/a", "/b", (*BIND, "ro", "rprivate"))]),
        ("./:/b,/c:/d", [("./", "/b", BIND), ("/c", "/d", BIND)]),
        ("tmpfs:/t:size=1G", [("tmpfs", "/t", ("x-create=dir", "size=1G"))]),
        ("umount:/root", [("umount", "/root", ("x-detach",))]),
        ("data.sqsh:/b:sqsh+noexec,/d:/e:sqsh", [("data.sqsh", "/b", ("sqsh", "noexec")), ("/d", "/e", ("sqsh",))]),
        ("/a b:/my mount", [("/a b", "/my mount", BIND)]),
        ("./a,./b:./c/d,/e:.f", [("./a", "/a", BIND), ("./b", "/c/d", BIND), ("/e", "/.f", BIND)]),
        (r"/a\,b:/c\:d", [("/a,b", "/c:d", BIND)]),
        (r"/a\ b", [("/a b", "/a b", BIND)]),
        (r"/a\b:/c\\d", [(r"/a\b", r"/c\\d", BIND)]),
        ("/a:/b,/a:/b", [("/a", "/b", BIND)]),
    ],
)
def test_mounts(text: str, expected: list[tuple[str, str, tuple[str, ...]]]) -> None:
    assert parse([("container-mounts", text)], {}).mounts == tuple(MountEntry(*fields) for fields in expected)


def test_relative_mount_sources_are_of_the_jobs_directory() -> None:
    text = "../x:/y,/abs:/z,tmpfs:/t,data.sqsh:/d:sqsh"
    mounts = parse([("container-mounts", text)], {}, "/home/alice/").mounts
    assert [mount.source for mount in mounts] == ["/home/alice/../x", "/abs", "tmpfs", "/home/alice/data.sqsh"]


def test_a_mount_of_a_squashfs_file_is_a_line_of_fstab() -> None:
    (mount,) = parse([("container-mounts", "/d.sqsh:/d:sqsh+noexec")], {}).fstab()
    assert mount.describe() == "/d.sqsh /d sqsh noexec 0 0"


def test_a_squashfs_file_is_not_mounted_to_write() -> None:
    with pytest.raises(ConfigError, match="--container-mounts: a squashfs file is mounted read-only"):
        parse([("container-mounts", "/d.sqsh:/d:sqsh+rw")], {}).fstab()


def test_a_squashfs_file_without_its_flag_says_it() -> None:
    with pytest.raises(UsageError) as caught:
        parse([("container-mounts", "d.sqsh:/d")], {})
    assert "d.sqsh:/d:sqsh mounts what a squashfs file holds" in caught.value.hint


@pytest.mark.parity("targets that are relative or lead out")
@pytest.mark.parametrize(
    "given",
    [
        "container-image=",
        "container-image=./",
        "container-image=~/a.sqsh",
        "container-image=/a/..",
        "container-image=two words",
        "container-image=line\nbreak",
        "container-image=" + 5000 * "a",
        "container-image=/" + 5000 * "a",
        "container-mounts=",
        "container-mounts=:",
        "container-mounts=/tmp:",
        "container-mounts=/tmp::",
        "container-mounts=:/tmp",
        "container-mounts=/a,,/b",
        "container-mounts=/a,",
        "container-mounts=/tmp:mnt",
        "container-mounts=/home:../home",
        "container-mounts=./",
        "container-mounts=..",
        "container-mounts=tmpfs",
        "container-mounts=~/a:/b",
        "container-mounts=devpts:/x",
        "container-mounts=tmpfs:/x:sqsh",
        "container-mounts=~/d.sqsh:/x:sqsh",
        "container-mounts=d.sqsh:x:sqsh",
        "container-mounts=/a:/b:ro++rw",
        "container-mounts=/a:/b:ro:rw",
        "container-mounts=/" + 5000 * "a",
        "container-workdir=",
        "container-workdir=~",
        "container-name=",
        "container-name=:exec",
        "container-name=/tmp/foo",
        "container-name=" + 300 * "a",
        "container-name=n:sometimes",
        "container-name=n:exec:exec",
        "container-save=",
        "container-save=/tmp/",
        "container-save=/",
        "container-save=./",
        "container-save=.",
        "container-save=-",
        "container-save=$HOME/a.sqsh",
        "container-env=",
        "container-env=FOO,",
        "container-env==bar",
        "container-env=NCCL_*=1",
        "container-env=1A=B",
        "container-env=A-B=C",
        "container-env=A B",
        "container-unshare=",
        "container-unshare=net,",
        "container-unshare=pid",
    ],
)
def test_bad_values_are_refused_by_name_and_value(given: str) -> None:
    name, _, text = given.partition("=")
    with pytest.raises(UsageError) as caught:
        of(given)
    assert str(caught.value).startswith(f"--{name}={text}")
    assert caught.value.hint
    variable = "PYXIS_" + name.upper().replace("-", "_")
    with pytest.raises(UsageError, match=f"^{variable}="):
        of(**{variable: text})


def test_a_variable_without_a_name_is_none_of_ours() -> None:
    assert of(**{"": "x"}).origins == {}  # execve(2) takes "=x"


def test_the_longest_name_still_is_a_file_name() -> None:
    name = options.NAME_LIMIT * "n"
    assert len(f"pyxis_{2**32 - 1}_{of('container-name=' + name).name}") == 255


@pytest.mark.parity("PYXIS_CONTAINER_*: defaults that the command line overrides")
def test_command_line_beats_variables() -> None:
    environ = {
        "PYXIS_CONTAINER_IMAGE": "other",
        "PYXIS_CONTAINER_NAME": "other",
        "PYXIS_CONTAINER_READONLY": "nonsense that nobody reads",
    }
    request = of("container-image=mine", "container-writable=", **environ)
    assert (request.image, request.name, request.writable) == ("mine", "other", True)
    assert request.origins == {
        "image": "--container-image",
        "name": "PYXIS_CONTAINER_NAME",
        "writable": "--container-writable",
    }


@pytest.mark.parametrize("text", ["1", "Yes", "on", "t", "0", "n", "false", "OFF", "F"])
def test_flags_in_variables(text: str) -> None:
    said = text in ("1", "Yes", "on", "t")
    assert SETTINGS["ENROOT_MOUNT_HOME"].parse(text) is said
    assert of(PYXIS_CONTAINER_MOUNT_HOME=text).mount_home is said
    assert of(PYXIS_CONTAINER_READONLY=text).writable is not said
    assert of(PYXIS_CONTAINER_WRITABLE=text).writable is said


@pytest.mark.parity("the command line wins over variables")
@pytest.mark.parametrize("text", ["", "maybe", "2"])
def test_a_flag_in_a_variable_is_yes_or_no(text: str) -> None:
    with pytest.raises(UsageError, match="^PYXIS_CONTAINER_REMAP_ROOT="):
        of(PYXIS_CONTAINER_REMAP_ROOT=text)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("container-writable=", "container-readonly="),
        ("container-mount-home=", "no-container-mount-home="),
        ("container-remap-root=", "no-container-remap-root="),
        ("no-container-entrypoint=", "container-entrypoint="),
        ("container-image=a", "container-image=b"),
        ("container-mounts=/a", "container-mounts=/b"),
    ],
)
def test_contradictions_are_refused(one: str, other: str) -> None:
    with pytest.raises(UsageError) as caught:
        of(one, other)
    assert one.partition("=")[0] in str(caught.value)
    assert other.partition("=")[0] in str(caught.value)


def test_variables_can_contradict_each_other_too() -> None:
    with pytest.raises(UsageError, match="PYXIS_CONTAINER_WRITABLE and PYXIS_CONTAINER_READONLY"):
        of(PYXIS_CONTAINER_WRITABLE="1", PYXIS_CONTAINER_READONLY="1")


def test_the_same_value_twice_is_no_contradiction() -> None:
    assert of("container-image=a", "container-image=a", "container-writable=", "container-writable=").image == "a"


@pytest.mark.parity("options without image or name are ignored and said so")
def test_options_without_a_container_are_ignored() -> None:
    """Each option is named in a line."""
    lines = ignored(of("container-mounts=/a", "container-writable=", PYXIS_CONTAINER_WORKDIR="/w"))
    assert [line.split(":")[0] for line in lines] == [
        "ignoring --container-mounts",
        "ignoring --container-writable",
        "ignoring PYXIS_CONTAINER_WORKDIR",
    ]
    assert ignored(of("container-mounts=/a", "container-name=n")) == []


def test_examples_in_hints_are_valid() -> None:
    for option in OPTIONS:
        if option.parse:
            of(f"{option.name}={option.example}")


def test_c_header_has_every_option_at_its_index() -> None:
    lines = [line for line in c_header().splitlines() if line.startswith('\t{"')]
    assert len(lines) == len(OPTIONS)
    for index, (line, option) in enumerate(zip(lines, OPTIONS, strict=True)):
        assert line.startswith(f'\t{{"{option.name}", ')
        assert line.endswith(f", {int(bool(option.parse))}, {index}, option_given}},")


def test_importing_costs_no_heavy_module() -> None:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    code = (
        f"import os, sys; sys.path.insert(0, {root!r}); before = set(sys.modules)\n"
        "import pyxis_py.options, pyxis_py.settings\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-IS", "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {
        "__future__",
        "enroot_py",
        "enroot_py.base",
        "enroot_py.base.errors",
        "enroot_py.base.frozen",
        "enroot_py.base.log",
        "enroot_py.config",
        "enroot_py.config.table",
        "enroot_py.config.words",
        "enroot_py.runtime",
        "enroot_py.runtime.mountentries",
        "pyxis_py",
        "pyxis_py.options",
        "pyxis_py.settings",
    }


ENVIRON = {"NCCL_DEBUG": "INFO", "NCCL_IB": "0", "MY_NCCL": "1", "LANG": "C", "DATA": "/data", "ODD": "a:b,c\\"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("LANG,UNSET", {"LANG": "C"}),
        ("NCCL_*", {"NCCL_DEBUG": "INFO", "NCCL_IB": "0"}),
        ("*NCCL*B*", {"NCCL_DEBUG": "INFO", "NCCL_IB": "0"}),
        ("N*_IB", {"NCCL_IB": "0"}),
        ("NCCL_IB*B", {}),
        ("*", ENVIRON),
        ("LANG,LANG=de", {"LANG": "de"}),
        ("LANG=de,LANG", {"LANG": "C"}),
        ("EMPTY=,NEW=a=b", {"EMPTY": "", "NEW": "a=b"}),
        (r"LIST=1\,2,LANG", {"LIST": "1,2", "LANG": "C"}),
    ],
)
def test_env_takes_names_patterns_and_values(text: str, expected: dict[str, str]) -> None:
    assert options.chosen(of(f"container-env={text}").env, ENVIRON) == expected


def mounts(text: str) -> list[tuple[str, str]]:
    return [(mount.source, mount.target) for mount in parse([("container-mounts", text)], ENVIRON, "/work").mounts]


@pytest.mark.parity("--container-mounts: $VAR where no shell expands it")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$DATA", [("/data", "/data")]),
        ("${DATA}set:$DATA/x", [("/dataset", "/data/x")]),
        ("./$LANG:/x:ro", [("/work/./C", "/x")]),
        ("/$ODD:/x", [("/a:b,c\\", "/x")]),
        ("/$ODD$LANG:/x", [("/a:b,c\\C", "/x")]),
        (r"/\$DATA,/a$,/b$-c", [("/$DATA", "/$DATA"), ("/a$", "/a$"), ("/b$-c", "/b$-c")]),
        ("tmpfs:$DATA", [("tmpfs", "/data")]),
    ],
)
def test_variables_in_mounts_have_the_values_of_the_job(text: str, expected: list[tuple[str, str]]) -> None:
    assert mounts(text) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("/a/$UNSET:/x", r"\$UNSET is not set in the job's environment"),
        ("/a/${UNSET}", r"\$UNSET is not set"),
        ("$LANG:/x", "source 'C' is neither a path"),
        ("/a:$LANG", "target 'C' is not an absolute path"),
    ],
)
def test_variables_that_make_no_path_are_refused(text: str, why: str) -> None:
    assert of(f"container-mounts={text}").mounts  # nothing can be said at submit
    with pytest.raises(UsageError, match=f"^--container-mounts: .*{why}"):
        mounts(text)


def of_file(text: str, *given: str, node: bool = False, **environ: str) -> options.Request:
    """What is asked for with an environment file, at submit or on a node, where the job has ``environ``."""
    said = [line.split(" ", 1) for line in text.splitlines()]
    entries = tuple(
        FileEntry(*key.partition(".")[::2], value, f"it.toml:{n}") for n, (key, value) in enumerate(said, 1)
    )
    file = Environment("it", "/home/it.toml", entries, {"USER": "jane"})
    pairs = [("environment", "it"), *((name, value) for name, _, value in (option.partition("=") for option in given))]
    return parse(pairs, environ, "/work" if node else "", lambda name, origin: file)


def test_an_environment_file_says_what_options_do() -> None:
    request = of_file(
        "image a/b:1\nworkdir /home/${USER}\nmounts /a:/b:ro\nmounts ./c:/d\nentrypoint false\nwritable false",
        "container-mounts=/e:/d",
        node=True,
    )
    assert (request.image, request.workdir, request.entrypoint, request.writable) == (
        *("a/b:1", "/home/jane", False, False),
    )
    assert [(mount.source, mount.target) for mount in request.mounts] == [
        ("/a", "/b"),
        ("/work/./c", "/d"),
        ("/e", "/d"),
    ]
    assert [mount.origin for mount in request.fstab()] == [
        "it.toml:3: mounts",
        "it.toml:4: mounts",
        "--container-mounts",
    ]
    assert request.origins["image"] == "it.toml:1: image"
    assert request.wants_container and request.environment == "it" and request.file


def test_what_a_file_leaves_out_is_as_cscs_has_it() -> None:
    request = of_file("image a")
    assert (request.entrypoint, request.writable, request.workdir, request.mount_home) == (False, True, None, None)


@pytest.mark.parity("srun --environment: options go before the file")
def test_options_go_before_a_file_and_a_file_before_variables() -> None:
    said = {"PYXIS_CONTAINER_IMAGE": "of-variable", "PYXIS_CONTAINER_WORKDIR": "/v", "PYXIS_CONTAINER_WRITABLE": "no"}
    request = of_file("image of-file\nentrypoint true", "no-container-entrypoint=", **said)
    assert (request.image, request.entrypoint) == ("of-file", False)
    assert (request.workdir, request.writable) == ("/v", False)
    assert of_file("image of-file", "container-image=of-option", **said).image == "of-option"
    assert request.origins["entrypoint"] == "--no-container-entrypoint"


@pytest.mark.parity("annotations: com.pyxis.entrypoint_log")
def test_an_annotation_of_pyxis_is_an_option() -> None:
    text = "image a\nannotations.com.pyxis.entrypoint_log true"
    assert of_file(text).entrypoint_log is True
    assert of_file("image a").entrypoint_log is None
    assert of_file(text.replace("true", "false")).entrypoint_log is False


def test_a_file_may_be_asked_for_by_a_variable() -> None:
    file = Environment("it", "/it.toml", (FileEntry("image", "", "a", "it.toml:1"),), {})
    asked = []
    request = parse([], {"PYXIS_ENVIRONMENT": "it"}, "", lambda *said: asked.append(said) or file)
    assert request.image == "a" and asked == [("it", "PYXIS_ENVIRONMENT")]
    parse([("environment", "other")], {"PYXIS_ENVIRONMENT": "it"}, "", lambda *said: asked.append(said) or file)
    assert asked[1:] == [("other", "--environment")]


@pytest.mark.security("H11")
@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        (
            "workdir /x",
            "--environment=it: neither the file nor those that it is based on say an image",
            "container-image",
        ),
        ("image ", "it.toml:1: image= needs a value", "for example image="),
        ("image a b", "it.toml:1: image=a b: has characters", "for example image=ubuntu"),
        ("image a\nworkdir ~/x", "it.toml:2: workdir=~/x: no shell has replaced the ~", "write the path out"),
        ("image a\nmounts a:/b", "it.toml:2: mounts: the source 'a' is neither a path", "./a"),
        ("image a\nmounts :/b", "it.toml:2: mounts: the source is empty", "for example mounts = ["),
        ("image a\nmounts /a:b", "it.toml:2: mounts: the target 'b' is not an absolute path", "/a:/PATH"),
        ("image ${NONE}", "it.toml:1: image: the variable NONE is not set", "${NONE:-}"),
        ("image a:${SLURM_JOB_ID}", "it.toml:1: image: only the job knows a:${SLURM_JOB_ID}", "asked before"),
        ("image a\nmounts /${NONE}:/x", "it.toml:2: mounts: the variable NONE is not set", "export it"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_at_submit(text: str, says: str, hint: str) -> None:
    with pytest.raises(PenrootError) as caught:
        of_file(text)
    assert str(caught.value).startswith(says), caught.value
    assert hint in caught.value.hint


def test_a_name_needs_no_image_of_a_file() -> None:
    assert of_file("workdir /x", "container-name=box").wants_container


def test_variables_of_the_job_wait_for_it() -> None:
    text = "image a\nworkdir /w/${SLURM_JOB_ID}\nmounts /m/${SLURM_JOB_ID}:/x"
    assert of_file(text).workdir is None
    request = of_file(text, node=True, SLURM_JOB_ID="7")
    assert (request.workdir, request.mounts[0].source) == ("/w/7", "/m/7")
    with pytest.raises(PenrootError, match="SLURM_JOB_ID is not set"):
        of_file(text, node=True)


def test_two_environment_files_contradict_each_other() -> None:
    with pytest.raises(UsageError, match="--environment is given twice"):
        of_file("image a", "environment=other")


@pytest.mark.parametrize("name", ["", "~/x", "$HOME/x", "a\nb"])
def test_names_that_no_environment_file_has(name: str) -> None:
    with pytest.raises(UsageError, match="--environment="):
        of_file("image a", f"environment={name}")
