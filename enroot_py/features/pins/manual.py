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
sbatch and salloc resolve the tag of an image once. All steps and requeues of the job use this digest. If the registry
does not answer, they print a warning, and each step resolves the tag. --container-pin=no turns this off, and
--container-pin=IMAGE,... adds the images of a script's steps. With --container-lock, the digests come from a file of
penroot-lock(1). A batch job keeps the content that the file had at submission.
""",
        (
            (
                "srun --container-lock=./images.lock --container-image=ubuntu:24.04 ./program",
                "Use the digest that the team has locked.",
            ),
        ),
    ),
)
