from __future__ import annotations

import pytest

from enroot_py.base import digests
from enroot_py.base.errors import ImageError

HEX = "0123456789abcdef" * 4


def test_digest_of_data_is_valid() -> None:
    digest = digests.of(b"")
    assert digest == "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert digests.is_digest(digest) and digests.of_encoded(digests.encoded(digest)) == digest


@pytest.mark.parametrize(
    "text", ["", HEX, "sha256:", f"sha256:{HEX[1:]}", f"sha256:{HEX}0", f"sha512:{HEX * 2}", f"sha256:{HEX.upper()}",
             f"sha256:{'../' * 21}x", f"sha256:{HEX}\n", f"sha256:sha256:{HEX}"]
)  # fmt: skip
def test_invalid_digest_names_no_file(text: str) -> None:
    assert not digests.is_digest(text)
    with pytest.raises(ImageError, match="not a sha256 digest"):
        digests.encoded(text)
