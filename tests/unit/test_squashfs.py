from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from enroot_py.base.errors import ImageError
from enroot_py.store import mksquashfs, squashfs, unsquashfs


@pytest.fixture
def image(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    (tmp_path / "root/file").write_bytes(os.urandom(100_000))
    path = tmp_path / "x.sqsh"
    subprocess.run(["mksquashfs", tmp_path / "root", path, "-quiet", "-no-progress"], check=True, capture_output=True)
    return path


@pytest.mark.parametrize("size", [90, 96, 1000])
def test_truncated_image_is_reported(image: Path, size: int) -> None:
    squashfs.check(str(image))  # the complete file is accepted
    image.write_bytes(image.read_bytes()[:size])
    with pytest.raises(ImageError, match="truncated"):
        squashfs.check(str(image))
    with pytest.raises(ImageError, match="truncated"):
        unsquashfs.unpack(str(image), str(image.parent / "out"))
    assert not (image.parent / "out").exists()


@pytest.mark.parametrize("content", [b"", b"hsq", b"#!/bin/sh\n", b"\0" * 200, None])
def test_other_files_are_no_images(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "x"
    if content is None:
        os.mkfifo(path)  # a read would block
    else:
        path.write_bytes(content)
    with pytest.raises(ImageError, match="is not a squashfs file"):
        squashfs.check(str(path))


def test_missing_file_and_other_versions(tmp_path: Path, image: Path) -> None:
    with pytest.raises(ImageError, match="No such file"):
        squashfs.check(str(tmp_path / "none"))
    data = bytearray(image.read_bytes())
    data[28] = 3
    image.write_bytes(data)
    with pytest.raises(ImageError, match="squashfs 3"):
        squashfs.check(str(image))


@pytest.mark.parametrize(
    "lines",
    [
        ("FATAL ERROR: Failed to write to output filesystem",),  # squashfs-tools 4.5, 4.6
        ("Failed to write to output filesystem", "FATAL ERROR: Probably out of space on output filesystem"),  # 4.7
    ],
)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_recognized_among_other_messages(tmp_path: Path, lines: tuple[str, ...], number: int) -> None:
    tool = tmp_path / "mksquashfs"
    text = "\n".join((f"Write failed because {os.strerror(number)}", *lines))
    tool.write_text(f"#!/bin/sh\ncat >&2 <<'E'\n{text}\nE\nexit 1\n")
    tool.chmod(0o755)
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        unsquashfs.run_tool([str(tool)])
    assert caught.value.errno == number


def test_destination_is_the_file_that_the_kernel_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a/real").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/dir").symlink_to("../a/real")
    (tmp_path / "a/real/out").symlink_to("../x.sqsh")
    monkeypatch.chdir(tmp_path / "b")
    for output in ("dir/out", "dir/../x.sqsh", "dir/../real/out", str(tmp_path / "b/dir/out")):
        assert mksquashfs.destination(output) == str(tmp_path / "a/x.sqsh")
        Path(output).write_text(output)
        assert (tmp_path / "a/x.sqsh").read_text() == output
        (tmp_path / "a/x.sqsh").unlink()
    assert mksquashfs.destination("y.sqsh") == str(tmp_path / "b/y.sqsh")
    for output in ("dir/", "..", "/"):
        with pytest.raises(ImageError, match="is a directory"):
            mksquashfs.destination(output)
