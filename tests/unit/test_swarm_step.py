"""srun offers a swarm only for images of registries."""

from __future__ import annotations

import pytest

from pyxis_py.request.job import Job
from pyxis_py.submit import submission
from tests.unit.test_submit import DIGEST, job


def shares(job: Job) -> bool:
    """Return whether srun offers to be the tracker of a swarm for the image."""
    wish = submission.check(job)[1]
    return bool(wish and wish.shares)


@pytest.mark.parametrize(
    ("image", "arguments", "shared"),
    [
        ("debian", (), True),
        (f"debian@{DIGEST}", (), True),
        ("debian", ("swarm=no",), False),
        ("debian", ("importer=/bin/true",), False),
        ("./x.sqsh", (), False),
        ("oci:layout", (), False),
    ],
)
def test_only_registry_images_are_shared(image: str, arguments: tuple[str, ...], shared: bool) -> None:
    assert shares(job(image, *(("arg", argument) for argument in arguments))) == shared
