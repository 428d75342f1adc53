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
does not answer, sbatch or salloc prints a warning, and each step resolves the tag. With --container-pin=no, each step
resolves the tag. --container-pin=IMAGE,... also pins images that only steps in the batch script name. With
--container-lock, the digests come from a lock file: see penroot-lock(1). A batch job keeps the content that the lock
file had at submission.
""",
        (
            (
                "srun --container-lock=./images.lock --container-image=ubuntu:24.04 ./program",
                "Use the digest that the team has locked.",
            ),
        ),
    ),
)
