"""Manual pages about pins."""

from __future__ import annotations

EXAMPLES = {
    "lock": (
        ("penroot lock images.lock ubuntu:24.04", "Record the current digest of the tag in the file."),
        ("penroot lock images.lock", "Refresh every image in the file."),
        ("penroot lock --check images.lock", "Report tags that moved; exit 1 if any did."),
        (
            "penroot start --lock images.lock docker://ubuntu:24.04",
            "Use the digest in the file, as srun --container-lock does.",
        ),
    ),
}
SECTIONS = (
    (
        "penroot-srun.7",
        "DIGESTS OF TAGS",
        """\
sbatch and salloc resolve the tag of an image, and steps and requeues of their job use that digest; If the registry does
not answer, they warn, and each step resolves the tag. --container-pin says otherwise, or names the images of a script
that is on the host. With a lock file, --container-lock, tags are what penroot-lock(1) has written down; a batch job has
that file as it was, too.
""",
        (
            (
                "srun --container-lock=./images.lock --container-image=ubuntu:24.04 ./program",
                "Use the digest that the team has locked.",
            ),
        ),
    ),
)
