"""The container options of srun: values that are accepted or refused, and texts made from the table of options."""

from __future__ import annotations

import pytest

from enroot_py.base.errors import ConfigError, UsageError
from enroot_py.config.table import SETTINGS
from enroot_py.runtime.container_mounts import MountEntry
from pyxis_py.admin.header import c_header
from pyxis_py.request import options
from pyxis_py.request.options import all_options, ignored, parse

BIND = ("x-create=auto", "rbind")


def parsed(*words: str, **environ: str) -> options.Request:
    pairs = (option.partition("=") for option in words)
    return parse([(name, text) for name, _, text in pairs], environ)


def test_request_without_options_is_empty() -> None:
    request = parsed()
    assert (request.image, request.name, request.mounts, request.env, request.unshare) == (None, None, (), (), ())
    assert (request.mount_home, request.remap_root, request.writable, request.entrypoint) == (None, None, None, None)
    assert request.name_mode == "auto"
    assert not request.wants_container


def test_every_option_sets_its_attribute() -> None:
    request = parsed(
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
        parsed().image = "other"


@pytest.mark.parity("targets of mounts may be relative")
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


def test_relative_mount_sources_start_at_the_jobs_directory() -> None:
    text = "../x:/y,/abs:/z,tmpfs:/t,data.sqsh:/d:sqsh"
    mounts = parse([("container-mounts", text)], {}, "/home/alice/").mounts
    assert [mount.source for mount in mounts] == ["/home/alice/../x", "/abs", "tmpfs", "/home/alice/data.sqsh"]


def test_a_mount_of_a_squashfs_file_is_a_line_of_fstab() -> None:
    (mount,) = parse([("container-mounts", "/d.sqsh:/d:sqsh+noexec")], {}).fstab()
    assert mount.describe() == "/d.sqsh /d sqsh noexec 0 0"


def test_a_squashfs_file_is_not_mounted_to_write() -> None:
    with pytest.raises(ConfigError, match="--container-mounts: a squashfs file is mounted read-only"):
        parse([("container-mounts", "/d.sqsh:/d:sqsh+rw")], {}).fstab()


def test_squashfs_file_without_its_flag_gets_a_hint() -> None:
    with pytest.raises(UsageError) as caught:
        parse([("container-mounts", "d.sqsh:/d")], {})
    assert "d.sqsh:/d:sqsh mounts the content of a squashfs file" in caught.value.hint


BAD = {
    "container-image": ["", "./", "~/a.sqsh", "/a/..", "two words", "line\nbreak", 5000 * "a", "/" + 5000 * "a"],
    "container-mounts": [
        *("", ":", "/tmp:", "/tmp::", ":/tmp", "/a,,/b", "/a,", "/tmp:mnt", "/home:../home", "./", "..", "tmpfs"),
        *("~/a:/b", "devpts:/x", "tmpfs:/x:sqsh", "~/d.sqsh:/x:sqsh", "d.sqsh:x:sqsh", "/a:/b:ro++rw", "/a:/b:ro:rw"),
        "/" + 5000 * "a",
    ],
    "container-workdir": ["", "~"],
    "container-name": ["", ":exec", "/tmp/foo", 300 * "a", "n:sometimes", "n:exec:exec"],
    "container-save": ["", "/tmp/", "/", "./", ".", "-", "$HOME/a.sqsh"],
    "container-env": ["", "FOO,", "=bar", "NCCL_*=1", "1A=B", "A-B=C", "A B"],
    "container-unshare": ["", "net,", "pid"],
}


@pytest.mark.parity("targets of mounts may be relative")
@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BAD.items() for text in texts])
def test_bad_values_are_refused_by_name_and_value(name: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parsed(f"{name}={text}")
    assert str(caught.value).startswith(f"--{name}={text}")
    assert caught.value.hint
    variable = "PYXIS_" + name.upper().replace("-", "_")
    with pytest.raises(UsageError, match=f"^{variable}="):
        parsed(**{variable: text})


def test_variable_without_a_name_is_ignored() -> None:
    assert parsed(**{"": "x"}).origins == {}  # execve(2) allows a variable "=x"


def test_longest_name_is_a_valid_file_name() -> None:
    name = options.MAX_NAME_BYTES * "n"
    assert len(f"pyxis_{2**32 - 1}_{parsed('container-name=' + name).name}") == 255


@pytest.mark.parity("PYXIS_CONTAINER_*: options of the command line take precedence")
def test_command_line_takes_precedence_over_variables() -> None:
    environ = {
        "PYXIS_CONTAINER_IMAGE": "other",
        "PYXIS_CONTAINER_NAME": "other",
        "PYXIS_CONTAINER_READONLY": "nonsense that nobody reads",
    }
    request = parsed("container-image=mine", "container-writable=", **environ)
    assert (request.image, request.name, request.writable) == ("mine", "other", True)
    assert request.origins == {
        "image": "--container-image",
        "name": "PYXIS_CONTAINER_NAME",
        "writable": "--container-writable",
    }


@pytest.mark.parametrize("text", ["1", "Yes", "on", "t", "0", "n", "false", "OFF", "F"])
def test_flags_in_variables(text: str) -> None:
    value = text in ("1", "Yes", "on", "t")
    assert SETTINGS["ENROOT_MOUNT_HOME"].parse(text) is value
    assert parsed(PYXIS_CONTAINER_MOUNT_HOME=text).mount_home is value
    assert parsed(PYXIS_CONTAINER_READONLY=text).writable is not value
    assert parsed(PYXIS_CONTAINER_WRITABLE=text).writable is value


@pytest.mark.parity("the command line takes precedence over variables")
@pytest.mark.parametrize("text", ["", "maybe", "2"])
def test_a_flag_in_a_variable_is_yes_or_no(text: str) -> None:
    with pytest.raises(UsageError, match="^PYXIS_CONTAINER_REMAP_ROOT="):
        parsed(PYXIS_CONTAINER_REMAP_ROOT=text)


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
        parsed(one, other)
    assert one.partition("=")[0] in str(caught.value)
    assert other.partition("=")[0] in str(caught.value)


def test_variables_can_contradict_each_other_too() -> None:
    with pytest.raises(UsageError, match="PYXIS_CONTAINER_WRITABLE and PYXIS_CONTAINER_READONLY"):
        parsed(PYXIS_CONTAINER_WRITABLE="1", PYXIS_CONTAINER_READONLY="1")


def test_the_same_value_twice_is_no_contradiction() -> None:
    assert parsed("container-image=a", "container-image=a", "container-writable=", "container-writable=").image == "a"


@pytest.mark.parity("options for containers are ignored, with a message, if no image or name is given")
def test_options_without_a_container_are_ignored() -> None:
    """One line is printed for each ignored option."""
    lines = ignored(parsed("container-mounts=/a", "container-writable=", PYXIS_CONTAINER_WORKDIR="/w"))
    assert [line.split(":")[0] for line in lines] == [
        "ignoring --container-mounts",
        "ignoring --container-writable",
        "ignoring PYXIS_CONTAINER_WORKDIR",
    ]
    assert ignored(parsed("container-mounts=/a", "container-name=n")) == []


def test_examples_in_hints_are_valid() -> None:
    for option in all_options():
        if option.parse:
            parsed(f"{option.name}={option.example}")


def test_c_header_has_every_option_at_its_index() -> None:
    lines = [line for line in c_header().splitlines() if line.startswith('\t{"')]
    assert len(lines) == len(all_options())
    for index, (line, option) in enumerate(zip(lines, all_options(), strict=True)):
        assert line.startswith(f'\t{{"{option.name}", ')
        assert line.endswith(f", {int(bool(option.parse))}, {index}, option_given}},")


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
    assert options.chosen(parsed(f"container-env={text}").env, ENVIRON) == expected


def mounts(text: str) -> list[tuple[str, str]]:
    return [(mount.source, mount.target) for mount in parse([("container-mounts", text)], ENVIRON, "/work").mounts]


@pytest.mark.parity("--container-mounts: $VAR is replaced by the job's value")
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
    assert parsed(f"container-mounts={text}").mounts  # the value is unknown at submit
    with pytest.raises(UsageError, match=f"^--container-mounts: .*{why}"):
        mounts(text)
