from __future__ import annotations

import pytest

from enroot_py.base import linux
from enroot_py.base.errors import ConfigError
from enroot_py.runtime import fstab


def parse(line: str) -> fstab.Mount:
    return fstab.parse(line, {"HOME": "/home/a b"}, "test:1")


def test_all_fields() -> None:
    mount = parse("/a /b none x-create=dir,rbind,ro,nosuid,rslave 0 -1")
    assert (mount.source, mount.target, mount.fstype, mount.passno) == ("/a", "/b", "none", -1)
    assert mount.attributes == linux.MOUNT_ATTR_RDONLY | linux.MOUNT_ATTR_NOSUID
    assert mount.propagation == linux.MS_SLAVE
    assert (
        parse("/a /b none bind,ro,nodev,rw").attributes == linux.MOUNT_ATTR_NODEV
    )  # a later word overrides an earlier word
    assert parse("tmpfs /t tmpfs mode=755,nosuid,size=1m").data == ["mode=755", "size=1m"]
    assert parse("/a /b").words == {"rbind", "x-create=auto"}
    assert (parse("tmpfs /scratch").fstype, parse("tmpfs /scratch").words) == ("tmpfs", {"x-create=dir"})


@pytest.mark.parity("fstab: omitted fields get default values")
@pytest.mark.parametrize(
    ("line", "source", "target", "fstype"),
    [
        ("/a", "/a", "/a", "none"),
        ("/a /b", "/a", "/b", "none"),
        ("/a x-create=dir,bind,rw", "/a", "/a", "none"),
        ("/a rbind", "/a", "/a", "none"),
        ("/a /b bind,ro", "/a", "/b", "none"),
        ("/a /b,c bind", "/a", "/b,c", "none"),
        ("/a none bind,ro", "/a", "/a", "none"),
        ("tmpfs /t tmpfs", "tmpfs", "/t", "tmpfs"),
        ("tmpfs /t mode=700,x-create=dir", "tmpfs", "/t", "tmpfs"),
        ("tmpfs /t none size=1m", "tmpfs", "/t", "tmpfs"),
        ("tmpfs /t tmpfs size=1m,nosuid", "tmpfs", "/t", "tmpfs"),
    ],
)
def test_missing_fields_are_guessed(line: str, source: str, target: str, fstype: str) -> None:
    mount = parse(line)
    assert (mount.source, mount.target, mount.fstype) == (source, target, fstype)


@pytest.mark.parity("blank lines, comments and \\040 may be in fstab")
def test_variables_and_escapes() -> None:
    mount = parse("${HOME}/x /b\\040c\\011d none bind")
    assert (mount.source, mount.target) == ("/home/a b/x", "/b c\td")


@pytest.mark.parity("fstab: \\040 and similar escapes are decoded")
@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("/\\044HOME", "/$HOME"),
        ("/a\\134b", "/a\\b"),
        ("/a\\b", "/a\\b"),
        ("/\\303\\251", "/é"),
        ("/x\\", "/x\\"),
        ("/\\777", "/\\777"),
    ],
)
def test_octal_escapes(text: str, meaning: str) -> None:
    assert parse(f"{text} /b none bind").source == meaning


@pytest.mark.parametrize(("numbers", "passno"), [("", 0), ("-1", -1), ("0 -1", -1), ("-1 0", -1), ("3 2", 2)])
def test_single_number_is_the_pass(numbers: str, passno: int) -> None:
    assert parse(f"/a /b none bind {numbers}").passno == passno


def test_empty_source_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--mount :/opt: SOURCE is missing"):
        fstab.parse_option(":/opt", {}, "--mount :/opt")


@pytest.mark.parametrize(
    "line", ["/a /b none bind,frobnicate", "a b c d e f g", "/a /b none bind 0 x", "$(id) /b", "", "/a\\000b /c"]
)
def test_bad_line_is_named_with_its_origin(line: str) -> None:
    with pytest.raises(ConfigError, match="test:1"):
        parse(line)


@pytest.mark.parity("blank lines, comments and \\040 may be in fstab", "fstab: blank lines and comments are skipped")
def test_file_skips_blank_lines_and_comments() -> None:
    text = "\n# comment\n  /a /b none bind\n\n"
    (mount,) = fstab.parse_file(text, {}, "f")
    assert mount.origin == "f:3"


def test_describe_reads_back() -> None:
    mount = parse("/a\\040b /c none x-create=file,bind,ro 0 -1")
    again = parse(mount.describe())
    assert again.describe() == mount.describe()
    assert again.source == "/a b"


@pytest.mark.parity("default mounts: /proc rw", "default mounts: hosts, hostname")
@pytest.mark.parametrize("text", fstab.SYSTEM.values(), ids=fstab.SYSTEM)
def test_shipped_mounts_parse(text: str) -> None:
    assert list(fstab.parse_file(text, {}, "shipped"))


@pytest.mark.parity("/etc/fstab: volumes of the image are mounted, and created if missing")
def test_fstab_of_an_image_escapes_special_characters() -> None:
    assert fstab.write_image(["/data/"]) == "${ENROOT_ROOTFS}/data /data none x-create=dir,bind,rw,nosuid,nodev\n"
    assert "/a\\040b\\134\\044{HOME} " in fstab.write_image(["/a b\\${HOME}"])
