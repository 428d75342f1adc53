"""What the manual says of pins."""

from __future__ import annotations

EXAMPLES = {
    "lock": (
        ("penroot lock images.lock ubuntu:24.04", "Which digest the tag has now, kept in the file."),
        ("penroot lock images.lock", "All that are in the file, as they are now."),
        ("penroot lock --check images.lock", "Which of them have moved; the status is 1 if any has."),
        ("penroot start --lock images.lock docker://ubuntu:24.04", "By the file; so does srun --container-lock."),
    ),
}
SECTIONS = (
    (
        "penroot-srun.7",
        "DIGESTS OF TAGS",
        """\
sbatch and salloc resolve the tag of an image, and steps and requeues of their job use that digest; where the registry
cannot be asked they warn, and each step resolves the tag. --container-pin says otherwise, or names the images of a
script that is on the host. With a lock file, --container-lock, tags are what penroot-lock(1) has written down; a batch
job has that file as it was, too.
""",
        (
            (
                "srun --container-lock=./images.lock --container-image=ubuntu:24.04 ./program",
                "The image that a team has locked the tag to.",
            ),
        ),
    ),
)
