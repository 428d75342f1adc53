"""Unpack tars, as programs write them or as attackers do, and check the resulting trees."""

from __future__ import annotations

import gzip
import io
import os
import random
import stat
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from enroot_py.base.errors import ImageError
from enroot_py.store import index, layertree, tar
from tests import images
from tests.images import directory, entry, hardlink, symlink


@pytest.fixture
def layer_dir(tmp_path: Path) -> Path:
    path = tmp_path / "layer"
    path.mkdir()
    return path


def tree(layer_dir: Path, *entries: tuple[tarfile.TarInfo, bytes], **options: Any) -> Path:
    """Unpack a tar of ``entries``, check the tree's checksums, and return the tree."""
    layertree.unpack(io.BytesIO(images.tar(entries, **options)), str(layer_dir))
    assert list(index.differences(str(layer_dir))) == []
    return layer_dir / "fs"


def is_whiteout(path: Path) -> bool:
    state = path.lstat()
    return stat.S_ISCHR(state.st_mode) and state.st_rdev == 0


def is_opaque(path: Path) -> bool:
    try:
        return os.getxattr(path, "user.overlay.opaque") == b"y"
    except OSError:
        return False


def index_of(layer_dir: Path) -> list[str]:
    return (layer_dir / "index").read_text().splitlines()


# -- compression and digests


@pytest.mark.parity("gzip, zstd and plain layers may be in one manifest")
@pytest.mark.parametrize("compression", images.COMPRESSIONS)
def test_compression_is_known_by_its_first_bytes(layer_dir: Path, compression: str) -> None:
    tar = images.tar([directory("a"), entry("a/b", os.urandom(300_000))])
    blob = images.COMPRESSIONS[compression](tar)
    layer = layertree.unpack(io.BytesIO(blob), str(layer_dir))
    assert (layer.diff_id, layer.blob_digest) == (images.digest(tar), images.digest(blob))
    assert (layer.size, layer.tar_size, layer.entries) == (len(blob), len(tar), 2)
    assert len((layer_dir / "fs/a/b").read_bytes()) == 300_000


@pytest.mark.parametrize("compression", ["gzip", "zstd", "bzip2", "xz"])
def test_several_members_are_one_tar(layer_dir: Path, compression: str) -> None:
    tar = images.tar([entry("a", b"x" * 5000), entry("b", b"y")])
    compress = images.COMPRESSIONS[compression]
    blob = compress(tar[:3000]) + compress(tar[3000:3001]) + compress(tar[3001:])
    assert layertree.unpack(io.BytesIO(blob), str(layer_dir)).diff_id == images.digest(tar)


def test_gzip_padding_and_zstd_skippable_frames_are_no_data(layer_dir: Path, tmp_path: Path) -> None:
    tar = images.tar([entry("a", b"x" * 5000)])
    assert layertree.unpack(io.BytesIO(gzip.compress(tar) + bytes(999)), str(layer_dir)).diff_id == images.digest(tar)
    other = tmp_path / "other"
    other.mkdir()
    skippable = b"\x50\x2a\x4d\x18" + struct.pack("<I", 300_000) + bytes(300_000)
    blob = skippable + images.zstd(tar) + skippable + skippable
    assert layertree.unpack(io.BytesIO(blob), str(other)).diff_id == images.digest(tar)


class Trickle:
    """A stream that returns few bytes at a time, as a network connection can."""

    def __init__(self, data: bytes, max_bytes: int = 1) -> None:
        self.data = io.BytesIO(data)
        self.max_bytes = max_bytes

    def read(self, size: int, /) -> bytes:
        return self.data.read(min(size, self.max_bytes))


@pytest.mark.parametrize("compression", images.COMPRESSIONS)
def test_reads_of_any_size_are_accepted(layer_dir: Path, compression: str) -> None:
    tar = images.tar([directory("a"), entry("a/b", b"z" * 700)])
    blob = images.COMPRESSIONS[compression](tar)
    assert layertree.unpack(Trickle(blob), str(layer_dir)).diff_id == images.digest(tar)
    assert (layer_dir / "fs/a/b").read_bytes() == b"z" * 700


@pytest.mark.parametrize("max_bytes", [300, 70_000])
def test_large_files_come_out_whole(layer_dir: Path, max_bytes: int) -> None:
    sizes = [(1 << 20) - 1, 1 << 20, (1 << 20) + 1, (3 << 20) + 12345]
    contents = [random.Random(size).randbytes(size) for size in sizes]
    data = images.tar([entry(str(size), content) for size, content in zip(sizes, contents, strict=True)])
    layertree.unpack(Trickle(data, max_bytes), str(layer_dir))
    for size, content in zip(sizes, contents, strict=True):
        assert (layer_dir / "fs" / str(size)).read_bytes() == content


@pytest.mark.parametrize("compression", ["gzip", "zstd", "bzip2", "xz"])
def test_truncated_blob_is_an_error(layer_dir: Path, compression: str) -> None:
    blob = images.COMPRESSIONS[compression](images.tar([entry("a", os.urandom(50_000))]))
    with pytest.raises(ImageError, match="truncated"):
        layertree.unpack(io.BytesIO(blob[: len(blob) // 2]), str(layer_dir))


@pytest.mark.parametrize("end", [300, 3000, 512 + 4999])
def test_truncated_tar_is_an_error(layer_dir: Path, end: int) -> None:
    with pytest.raises(ImageError, match="truncated"):
        layertree.unpack(io.BytesIO(images.tar([entry("a", b"x" * 5000)])[:end]), str(layer_dir))


@pytest.mark.parametrize("end", [5000, 5001, 5119, 5120, 5632, None])
def test_padding_and_end_mark_may_be_missing_or_longer(layer_dir: Path, end: int | None) -> None:
    """umoci insert writes such tars. Bytes after the end mark are part of the diff_id."""
    tar = images.tar([entry("a", b"x" * 5000)])
    tar = tar[: 512 + end] if end else tar + b"rest" * 1000
    assert layertree.unpack(io.BytesIO(gzip.compress(tar)), str(layer_dir)).diff_id == images.digest(tar)
    assert (layer_dir / "fs/a").read_bytes() == b"x" * 5000


@pytest.mark.parametrize("data", [b"", bytes(1024), bytes(512)])
def test_empty_layer_is_a_layer(layer_dir: Path, data: bytes) -> None:
    assert layertree.unpack(io.BytesIO(data), str(layer_dir)).entries == 0


@pytest.mark.parametrize(
    "data", [b"<html>" * 200, b"\x1f\x8bjunk" * 100, b"\x28\xb5\x2f\xfdjunk" * 100, b"BZhjunkjunk"]
)
def test_invalid_tar_is_an_error(layer_dir: Path, data: bytes) -> None:
    with pytest.raises(ImageError):
        layertree.unpack(io.BytesIO(data), str(layer_dir))


# -- entries


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_kinds_modes_and_times(layer_dir: Path, format: int) -> None:
    fs = tree(
        layer_dir,
        *(directory("d", 0o750, mtime=1000), entry("d/f", b"data", mode=0o640, mtime=2000)),
        *(symlink("d/l", "/abs/../target"), hardlink("h", "d/f"), entry("p", type=tarfile.FIFOTYPE, mode=0o622)),
        format=format,
    )
    assert (fs / "d/f").read_bytes() == b"data"
    assert (mode(fs / "d/f"), mode(fs / "d")) == (0o640, 0o750)
    assert ((fs / "d").stat().st_mtime, (fs / "d/f").stat().st_mtime) == (1000, 2000)
    assert os.readlink(fs / "d/l") == "/abs/../target"
    assert (fs / "h").stat().st_ino == (fs / "d/f").stat().st_ino
    assert stat.S_ISFIFO((fs / "p").lstat().st_mode)
    assert (fs / "d/l").lstat().st_mtime == (fs / "p").lstat().st_mtime == 1_700_000_000


def test_umask_does_not_matter(layer_dir: Path) -> None:
    before = os.umask(0o077)
    try:
        fs = tree(layer_dir, entry("implicit/f", b"", mode=0o666), directory("d", 0o777))
    finally:
        os.umask(before)
    assert [mode(fs / name) for name in ("implicit", "implicit/f", "d")] == [0o755, 0o666, 0o777]


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_targets(layer_dir: Path, format: int) -> None:
    long = "/".join(["x" * 120] * 5)
    fs = tree(layer_dir, entry(long, b"1"), symlink("l", "y" * 1000), hardlink("h", long), format=format)
    assert (fs / long).read_bytes() == b"1"
    assert len(os.readlink(fs / "l")) == 1000
    assert (fs / "h").stat().st_nlink == 2


def test_ustar_prefix(layer_dir: Path) -> None:
    name = "/".join(["p" * 70, "q" * 70])
    fs = tree(layer_dir, entry(name, b"1"), format=tarfile.USTAR_FORMAT)
    assert (fs / name).read_bytes() == b"1"


def test_pax_fraction_of_a_second_and_utf8(layer_dir: Path) -> None:
    fs = tree(layer_dir, entry("ü/名", b"1", pax_headers={"mtime": "1700000000.123456789"}))
    assert (fs / "ü/名").stat().st_mtime_ns == 1_700_000_000_123_456_789


@pytest.mark.parametrize(
    ("member", "gid"),
    [
        (entry("a"), 7),
        (
            entry("a", gid=5, pax_headers={"gid": "", "SCHILY.xattr.user.note": ""}),
            5,
        ),  # an empty value cancels the global record
    ],
)
def test_global_pax_header_holds_for_all(layer_dir: Path, member: tuple[tarfile.TarInfo, bytes], gid: int) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "c", "gid": "7"}) as t:
        t.addfile(member[0], io.BytesIO())
    layertree.unpack(io.BytesIO(out.getvalue()), str(layer_dir))
    assert f"file 644 0 {gid} a" in index_of(layer_dir) and os.listxattr(layer_dir / "fs/a") == []


def test_global_pax_records_are_bounded(layer_dir: Path) -> None:
    header = tarfile.TarInfo.create_pax_global_header({f"k{i}": "v" for i in range(2000)})
    with pytest.raises(ImageError, match="global pax records"):
        layertree.unpack(io.BytesIO(header), str(layer_dir))


def test_base256_numbers(layer_dir: Path) -> None:
    fs = tree(layer_dir, entry("a", b"x", uid=3_000_000, mtime=-5), format=tarfile.GNU_FORMAT)
    assert (fs / "a").stat().st_mtime == -5
    assert "file 644 3000000 0 a" in index_of(layer_dir)


@pytest.mark.parametrize("field", [b"0000644\0", b"   644 \0", b"644\0    ", b"\0000644\0", b"\x80\0\0\0\0\0\1\xa4"])
def test_numbers_as_others_write_them(field: bytes) -> None:
    assert tar._number(field) == 0o644


@pytest.mark.parametrize(
    ("segment", "size", "error"),
    [
        (-512, 1024, "beyond the end"),
        (1 << 63, 1 << 65, f"bad file size: {1 << 65} bytes"),
        (0, -1, "bad file size: -1 bytes"),
        (1024, 1024, "beyond the end"),
    ],
)
def test_a_sparse_map_that_no_file_can_have(layer_dir: Path, segment: int, size: int, error: str) -> None:
    def base256(number: int) -> bytes:
        return number.to_bytes(12, "big", signed=True) if number < 0 else b"\x80" + number.to_bytes(11, "big")

    header = tarfile.TarInfo("a").tobuf(tarfile.GNU_FORMAT)
    fields = {124: b"00000001000\0", 156: b"S", 386: base256(segment) + b"00000001000\0", 483: base256(size)}
    with pytest.raises(ImageError, match=error):
        layertree.unpack(io.BytesIO(changed(header, fields) + bytes(512 * 3)), str(layer_dir))


def changed(header: bytes, fields: dict[int, bytes]) -> bytes:
    """Change the first header of a tar. ``fields`` are offset -> bytes. Return the tar with a correct checksum."""
    data = bytearray(header)
    for at, value in {**fields, 148: b" " * 8}.items():
        data[at : at + len(value)] = value
    data[148:156] = b"%06o\0 " % sum(data[:512])
    return bytes(data)


def test_later_entries_replace_earlier_ones(layer_dir: Path) -> None:
    fs = tree(
        layer_dir,
        entry("file", b"old"), entry("file", b"new"),
        directory("dir"), entry("dir/x"), entry("dir", b"now a file"),
        entry("f2", b"x"), directory("f2"), entry("f2/y", b"y"),
        symlink("l", "dir"), entry("l", b"no link"),
        directory("kept"), entry("kept/a"), directory("kept", 0o700),
    )  # fmt: skip
    assert (fs / "file").read_bytes() == b"new"
    assert (fs / "dir").read_bytes() == b"now a file"
    assert (fs / "f2/y").read_bytes() == b"y"
    assert (fs / "l").read_bytes() == b"no link" and not (fs / "l").is_symlink()
    assert (fs / "kept/a").exists() and stat.S_IMODE((fs / "kept").stat().st_mode) == 0o700


def test_replaced_file_does_not_change_its_other_names(layer_dir: Path) -> None:
    fs = tree(layer_dir, entry("a", b"one"), hardlink("b", "a"), entry("a", b"two"))
    assert ((fs / "a").read_bytes(), (fs / "b").read_bytes()) == (b"two", b"one")


def test_directory_replaces_a_symlink(layer_dir: Path) -> None:
    one = [directory("x"), symlink("l", "x"), entry("l/a", b"1"), directory("l"), entry("l/b", b"2")]
    fs = tree(layer_dir, *one)
    assert os.listdir(fs / "x") == ["a"] and os.listdir(fs / "l") == ["b"] and not (fs / "l").is_symlink()


def test_hard_link_onto_itself_keeps_the_file(layer_dir: Path) -> None:
    fs = tree(layer_dir, entry("a", b"one"), hardlink("a", "a"), hardlink("b", "a"), hardlink("b", "./a"))
    assert (fs / "a").read_bytes() == b"one" and (fs / "b").stat().st_nlink == 2


@pytest.mark.parametrize(
    "version", ["--format=gnu", *(f"--format=pax --sparse-version={v}" for v in ("0.0", "0.1", "1.0"))]
)
def test_sparse_files_of_gnu_tar(layer_dir: Path, tmp_path: Path, version: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with (source / "sparse").open("wb") as f:
        for i in range(60):  # more data segments than fit in one header
            f.seek(i * 100_000)
            f.write(b"%05d" % i)
        f.truncate(9_000_000)
    (source / "tail").write_bytes(b"after")
    command = ["tar", "-C", str(source), "-S", *version.split(), "-cf", "-", "sparse", "tail"]
    tar = subprocess.run(command, capture_output=True, check=True).stdout
    assert len(tar) < 1_000_000
    assert layertree.unpack(io.BytesIO(tar), str(layer_dir)).diff_id == images.digest(tar)
    assert (layer_dir / "fs/sparse").read_bytes() == (source / "sparse").read_bytes()
    assert (layer_dir / "fs/sparse").stat().st_blocks * 512 < 2_000_000
    assert (layer_dir / "fs/tail").read_bytes() == b"after"


@pytest.mark.parity("directories without access or write permission can be unpacked")
def test_unreadable_files_and_closed_directories_stay_usable(layer_dir: Path) -> None:
    fs = tree(layer_dir, directory("d", 0o111), entry("d/f", b"x", mode=0), directory("r", 0o555), entry("r/f"))
    assert (mode(fs / "d"), mode(fs / "d/f")) == (0o711, 0o400)
    assert {"file 111 0 0 d", "file 0 0 0 d/f", "file 555 0 0 r"} <= set(index_of(layer_dir))


def test_special_bits_and_owners_go_to_the_index_only(layer_dir: Path) -> None:
    special = (entry("su", b"x", mode=0o4755), directory("tmp", 0o1777), directory("g", 0o2755), entry("o", uid=5))
    fs = tree(layer_dir, *special)
    assert [mode(fs / name) for name in ("su", "tmp", "g")] == [0o755, 0o777, 0o755]
    assert {"file 4755 0 0 su", "file 1777 0 0 tmp", "file 2755 0 0 g", "file 644 5 0 o"} <= set(index_of(layer_dir))
    assert {p.lstat().st_uid for p in fs.rglob("*")} == {os.geteuid()}


def test_index_has_only_the_last_of_equal_names(layer_dir: Path) -> None:
    tree(layer_dir, entry("a", mode=0o4755), entry("a", mode=0o644), entry("new\nline\\", mode=0o4711))
    assert index_of(layer_dir)[2:] == ["file 4711 0 0 new\\nline\\\\"]


def test_devices_become_whiteouts(layer_dir: Path) -> None:
    fs = tree(
        layer_dir,
        entry("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3, mode=0o666),
        entry("sda", type=tarfile.BLKTYPE, devmajor=8),
        entry("w", type=tarfile.CHRTYPE),
        hardlink("other", "sda"),
    )
    assert sorted(path.name for path in fs.iterdir() if is_whiteout(path)) == ["null", "other", "sda", "w"]
    assert {"device c 1 3 666 null", "device b 8 0 644 sda", "device c 0 0 644 w"} <= set(index_of(layer_dir))


def test_only_user_attributes_are_set(layer_dir: Path) -> None:
    value = {f"SCHILY.xattr.{k}": "v" for k in ("user.x", "user.overlay.opaque", "user.overlay.redirect", "trusted.y",
                                                "security.capability", "system.posix_acl_access")}  # fmt: skip
    fs = tree(layer_dir, directory("d", pax_headers=value), entry("f", b"", pax_headers=value))
    assert os.listxattr(fs / "d") == ["user.x"] and os.listxattr(fs / "f") == ["user.x"]
    assert f"xattr security.capability {b'v'.hex()} f" in index_of(layer_dir)


def test_binary_attribute_value(layer_dir: Path) -> None:
    value = bytes(range(256))
    record = b"SCHILY.xattr.user.b=" + value + b"\n"
    length = len(record) + 4
    pax = b"%d %s" % (length, record)
    header = changed(images.tar([entry("x", b"")])[:512], {156: b"x", 124: b"%011o\0" % len(pax)})
    tar = header + pax + bytes(-len(pax) % 512) + images.tar([entry("f", b"")])
    layertree.unpack(io.BytesIO(tar), str(layer_dir))
    assert os.getxattr(layer_dir / "fs/f", "user.b") == value


# -- whiteouts


def test_whiteout_becomes_one_of_overlayfs(layer_dir: Path) -> None:
    fs = tree(layer_dir, entry("a/.wh.gone"), entry(".wh.top"))
    assert is_whiteout(fs / "a/gone") and is_whiteout(fs / "top")
    assert not (fs / "a/.wh.gone").exists()


@pytest.mark.parity("an opaque directory keeps the new files of its own layer")
@pytest.mark.parametrize("order", [0, 1, 2])
def test_opaque_directory_keeps_files_of_its_layer(layer_dir: Path, order: int) -> None:
    entries = [entry("d/new", b"1"), directory("d")]
    entries.insert(order, entry("d/.wh..wh..opq"))
    fs = tree(layer_dir, *entries)
    assert is_opaque(fs / "d") and (fs / "d/new").read_bytes() == b"1"


@pytest.mark.parametrize("order", ["wdn", "dnw", "wn"])
def test_directory_removed_and_made_again_hides_the_old_one(layer_dir: Path, order: str) -> None:
    """The order of the entries does not matter, and the directory itself need not have an entry."""
    entries = {"w": entry(".wh.d"), "d": directory("d"), "n": entry("d/new", b"1")}
    fs = tree(layer_dir, *(entries[each] for each in order))
    assert is_opaque(fs / "d") and (fs / "d/new").exists()


def test_whiteout_keeps_a_file_of_the_same_layer(layer_dir: Path) -> None:
    fs = tree(layer_dir, entry("f", b"new"), entry(".wh.f"), entry(".wh.g"), entry("g", b"new"))
    assert (fs / "f").read_bytes() == b"new" and (fs / "g").read_bytes() == b"new"


def test_opaque_root_is_recorded(layer_dir: Path) -> None:
    layer = layertree.unpack(io.BytesIO(images.tar([entry(".wh..wh..opq"), entry("a")])), str(layer_dir))
    assert layer.opaque and index.read(str(layer_dir)).opaque


def test_internal_files_of_aufs_are_no_whiteouts(layer_dir: Path) -> None:
    fs = tree(layer_dir, directory(".wh..wh.plnk"), entry(".wh..wh.aufs"), entry("a"))
    assert [p.name for p in fs.iterdir()] == ["a"]


@pytest.mark.parity("an import omits /dev of the image")
def test_only_the_root_dev_is_dropped(layer_dir: Path) -> None:
    fs = tree(
        layer_dir, directory("dev"), entry("dev/x"), entry("./dev/y"), entry("dev/.wh.z"),
        entry("usr/share/dev/x", b"1"), hardlink("h", "dev/x"),
    )  # fmt: skip
    assert list((fs / "dev").iterdir()) == []
    assert (fs / "usr/share/dev/x").read_bytes() == b"1"


# -- hostile tars


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """Return a directory beside the layer, and check after the test that it has not changed."""
    path = tmp_path / "outside"
    path.mkdir()
    (path / "secret").write_text("secret")
    yield path
    assert [p.name for p in path.iterdir()] == ["secret"]
    assert (path / "secret").read_text() == "secret"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["layer", "outside"]


@pytest.mark.parametrize(
    "name", ["../outside/x", "a/../../outside/x", "..", "/../x", "a/.wh...", ".wh..", ".wh...", ".wh."]
)
def test_names_that_lead_out_are_refused(layer_dir: Path, outside: Path, name: str) -> None:
    with pytest.raises(ImageError):
        tree(layer_dir, directory("a"), entry(name, b"x"))


def test_name_in_a_message_is_short_and_in_one_line(layer_dir: Path) -> None:
    with pytest.raises(ImageError) as caught:
        tree(layer_dir, entry("a\n" + "x" * 100_000 + "/../../../end", b"x"))
    assert "/a\\nxx" in str(caught.value) and "/end" in str(caught.value) and len(str(caught.value)) < 500


def test_absolute_names_are_beneath_the_layer(layer_dir: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as outside:  # not in /dev/shm: a layer's files in /dev are dropped
        fs = tree(layer_dir, entry(f"{outside}/f", b"x"), entry("//a//./b", b"1"), entry("c/../d", b"2"))
        assert os.listdir(outside) == []
    assert (fs / outside[1:] / "f").read_bytes() == b"x"
    assert (fs / "a/b").exists() and (fs / "d").exists()


@pytest.mark.parametrize(
    "target", ["{outside}", "../../outside", "/../../../../../{outside}", "../../../../../../../../tmp"]
)
def test_symlinks_among_parents_stay_beneath(layer_dir: Path, outside: Path, target: str) -> None:
    fs = tree(
        layer_dir,
        symlink("l", target.format(outside=outside)),
        entry("l/new", b"x"),
        directory("l/dir", 0o777),
        entry("l/.wh.secret"),
        entry("l/.wh..wh..opq"),
        symlink("l/link", "/etc"),
    )
    assert any(p.name == "new" for p in fs.rglob("*"))
    assert (fs / "l").is_symlink()


def test_hard_links_out_are_refused(layer_dir: Path, outside: Path) -> None:
    for target in ("../../outside/secret", "../outside/secret"):
        with pytest.raises(ImageError):
            tree(layer_dir, hardlink("h", target))
        (layer_dir / "fs").rmdir()
    with pytest.raises(ImageError, match="not in the layer"):
        tree(layer_dir, symlink("l", str(outside)), hardlink("h", "l/secret"))


def test_hard_link_to_a_symlink_does_not_follow_it(layer_dir: Path, outside: Path) -> None:
    fs = tree(layer_dir, symlink("l", str(outside / "secret")), hardlink("h", "l"), entry("h", b"overwritten"))
    assert not (fs / "h").is_symlink() and (fs / "h").read_bytes() == b"overwritten"


def test_writing_through_a_symlink_replaces_it(layer_dir: Path, outside: Path) -> None:
    fs = tree(
        layer_dir,
        symlink("s", str(outside / "secret")),
        entry("s", b"x"),
        symlink("d", str(outside)),
        directory("d", 0),
    )
    assert (fs / "s").read_bytes() == b"x" and not (fs / "d").is_symlink()


GROWING = [symlink(f"l{i}", "/".join([f"l{i + 1}"] * 30)) for i in range(20)]


@pytest.mark.parametrize(
    ("entries", "error"),
    [
        ([symlink("a", "b"), symlink("b", "a"), entry("a/x")], "symlinks"),
        ([entry("a", b"1"), entry("a/b")], "Not a directory"),
        ([entry("d/" * 5000 + "x")], "directories"),
        ([*GROWING, entry("l0/x")], "directories"),
    ],
    ids=["a loop", "a file among parents", "depth", "growing symlinks"],
)
def test_names_without_an_end_are_refused(
    layer_dir: Path, outside: Path, entries: list[tuple[tarfile.TarInfo, bytes]], error: str
) -> None:
    with pytest.raises(ImageError, match=error):
        tree(layer_dir, *entries)


@pytest.mark.parametrize(
    "field",
    [
        (124, b"99999999999\0"),
        (124, b"\xff" * 12),
        (124, b"\x80" + b"\xff" * 11),
        (100, b"zzzzzzz\0"),
        (156, b"?"),
        (156, b"M"),
        (156, b"S"),
        (136, b"\x80" + b"\xff" * 11),
    ],
)
def test_headers_that_lie_are_errors_or_harmless(layer_dir: Path, outside: Path, field: tuple[int, bytes]) -> None:
    try:
        layertree.unpack(io.BytesIO(changed(images.tar([entry("x", b"")]), dict([field]))), str(layer_dir))
    except ImageError:
        return
    # A time beyond all calendars is clamped. A sparse file without a map is empty.
    assert field in ((136, b"\x80" + b"\xff" * 11), (156, b"S"))


@pytest.mark.parametrize("compression", ["gzip", "zstd", "bzip2", "xz"])
def test_layer_of_zeros_takes_little_memory(tmp_path: Path, compression: str) -> None:
    """Each compression can expand data a thousand times, so the size of the buffered output is limited."""
    code = """
import sys
from enroot_py.base import trees
from enroot_py.store import layertree

for directory in sys.argv[1:]:
    layertree.unpack(open(f"{directory}/blob", "rb"), directory)
    print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
    places = [tmp_path / "small", tmp_path / "large"]
    for place, size in zip(places, (600_000, 60_000_000), strict=True):
        place.mkdir()
        blob = images.COMPRESSIONS[compression](images.tar([entry("zeros", bytes(size))]))
        (place / "blob").write_bytes(blob)
    done = subprocess.run([sys.executable, "-c", code, *places], capture_output=True, text=True, check=True)
    assert (tmp_path / "large/fs/zeros").stat().st_size == 60_000_000
    small, large = map(int, done.stdout.split())
    assert large - small < 20_000  # kB
