"""Environment files of steps: their precedence over options and variables, and how nodes get them."""

from __future__ import annotations

from pathlib import Path

import pytest

from enroot_py.base.errors import ConfigError, PenrootError, UsageError
from enroot_py.features.environments.edf import Environment, FileEntry
from enroot_py.features.environments.options import ENVIRONMENT
from pyxis_py.request import options
from pyxis_py.request.job import CARRIED, Job
from pyxis_py.request.options import parse
from pyxis_py.submit import submission


def of_file(text: str, *option_words: str, node: bool = False, **environ: str) -> options.Request:
    """Parse a request with an environment file, options and the job's ``environ``, as at submit or as on a node.

    Each line of ``text``, the environment file, is a key, a space and a value.
    """
    pairs_of_file = [line.split(" ", 1) for line in text.splitlines()]
    entries = tuple(
        FileEntry(*key.partition(".")[::2], value, f"it.toml:{n}") for n, (key, value) in enumerate(pairs_of_file, 1)
    )
    file = Environment("it", "/home/it.toml", entries, {"USER": "jane"})
    pairs = [
        ("environment", "it"),
        *((name, value) for name, _, value in (option.partition("=") for option in option_words)),
    ]
    return parse(pairs, environ, "/work" if node else "", lambda name, origin: file)


def test_environment_file_sets_what_options_set() -> None:
    text = "image a/b:1\nworkdir /home/${USER}\nmounts /a:/b:ro\nmounts ./c:/d\nentrypoint false\nwritable false"
    request = of_file(text, "container-mounts=/e:/d", node=True)
    assert (request.image, request.workdir, request.entrypoint) == ("a/b:1", "/home/jane", False)
    assert request.writable is False
    assert [mount.source for mount in request.mounts] == ["/a", "/work/./c", "/e"]
    assert [mount.target for mount in request.mounts] == ["/b", "/d", "/d"]
    origins = [mount.origin for mount in request.fstab()]
    assert origins == ["it.toml:3: mounts", "it.toml:4: mounts", "--container-mounts"]
    assert request.origins["image"] == "it.toml:1: image"
    assert request.wants_container and request.value(ENVIRONMENT) == "it" and request.file


def test_defaults_of_a_file_equal_those_of_cscs() -> None:
    request = of_file("image a")
    assert (request.entrypoint, request.writable, request.workdir, request.mount_home) == (False, True, None, None)


@pytest.mark.parity("srun --environment: options take precedence over the file")
def test_options_override_a_file_and_a_file_variables() -> None:
    variables = {
        "PYXIS_CONTAINER_IMAGE": "of-variable",
        "PYXIS_CONTAINER_WORKDIR": "/v",
        "PYXIS_CONTAINER_WRITABLE": "no",
    }
    request = of_file("image of-file\nentrypoint true", "no-container-entrypoint=", **variables)
    assert (request.image, request.entrypoint) == ("of-file", False)
    assert (request.workdir, request.writable) == ("/v", False)
    assert of_file("image of-file", "container-image=of-option", **variables).image == "of-option"
    assert request.origins["entrypoint"] == "--no-container-entrypoint"


@pytest.mark.parity("annotations: com.pyxis.entrypoint_log")
def test_an_annotation_of_pyxis_is_an_option() -> None:
    text = "image a\nannotations.com.pyxis.entrypoint_log true"
    assert of_file(text).entrypoint_log is True
    assert of_file("image a").entrypoint_log is None
    assert of_file(text.replace("true", "false")).entrypoint_log is False


def test_variable_can_request_a_file() -> None:
    file = Environment("it", "/it.toml", (FileEntry("image", "", "a", "it.toml:1"),), {})
    calls = []
    request = parse([], {"PYXIS_ENVIRONMENT": "it"}, "", lambda *call: calls.append(call) or file)
    assert request.image == "a" and calls == [("it", "PYXIS_ENVIRONMENT")]
    parse([("environment", "other")], {"PYXIS_ENVIRONMENT": "it"}, "", lambda *call: calls.append(call) or file)
    assert calls[1:] == [("other", "--environment")]


@pytest.mark.security("H11")
@pytest.mark.parametrize(
    ("text", "error", "hint"),
    [
        ("workdir /x", "--environment=it: neither the file nor its bases name", "container-image"),
        ("image ", "it.toml:1: image= needs a value", "for example image="),
        ("image a b", "it.toml:1: image=a b: has characters", "for example image=ubuntu"),
        ("image a\nworkdir ~/x", "it.toml:2: workdir=~/x: no shell has replaced the ~", "write the full path"),
        ("image a\nmounts a:/b", "it.toml:2: mounts: the source 'a' is neither a path", "./a"),
        ("image a\nmounts :/b", "it.toml:2: mounts: the source is empty", "for example mounts = ["),
        ("image a\nmounts /a:b", "it.toml:2: mounts: the target 'b' is not an absolute path", "/a:/PATH"),
        ("image ${NONE}", "it.toml:1: image: the variable NONE is not set", "${NONE:-}"),
        (
            "image a:${SLURM_JOB_ID}",
            "it.toml:1: image: only the job knows a:${SLURM_JOB_ID}",
            "must be known before the job starts",
        ),
        ("image a\nmounts /${NONE}:/x", "it.toml:2: mounts: the variable NONE is not set", "export it"),
    ],
)
def test_error_in_a_file_is_reported_at_submit(text: str, error: str, hint: str) -> None:
    with pytest.raises(PenrootError) as caught:
        of_file(text)
    assert str(caught.value).startswith(error), caught.value
    assert hint in caught.value.hint


def test_a_name_needs_no_image_of_a_file() -> None:
    assert of_file("workdir /x", "container-name=box").wants_container


def test_variables_of_the_job_wait_for_it() -> None:
    """Only nodes know SLURM_JOB_ID. At submit, values that need it are not expanded."""
    text = "image a\nworkdir /w/${SLURM_JOB_ID}\nmounts /m/${SLURM_JOB_ID}:/x"
    assert of_file(text).workdir is None
    request = of_file(text, node=True, SLURM_JOB_ID="7")
    assert (request.workdir, request.mounts[0].source) == ("/w/7", "/m/7")
    with pytest.raises(PenrootError, match="SLURM_JOB_ID is not set"):
        of_file(text, node=True)


def test_two_environment_files_contradict_each_other() -> None:
    with pytest.raises(UsageError, match="--environment is given twice"):
        of_file("image a", "environment=other")


@pytest.mark.parametrize("name", ["", "~/x", "$HOME/x", "a\nb"])
def test_names_that_no_environment_file_has(name: str) -> None:
    with pytest.raises(UsageError, match="--environment="):
        of_file("image a", f"environment={name}")


def with_file(tmp_path: Path, text: str, *pairs: tuple[str, str], context: str = "srun", verb: str = "check") -> Job:
    """Write the environment file ``it``, and return a job that requests it. ``pairs`` are further facts of the job."""
    (tmp_path / ".edf").mkdir(exist_ok=True)
    (tmp_path / ".edf/it.toml").write_text(text)
    facts = [("verb", verb), ("context", context), ("cwd", str(tmp_path)), ("option", "environment=it"), ("node", "n1")]
    return Job([*facts, ("caller", f"HOME={tmp_path}"), ("caller", "USER=jane"), *pairs])


def test_the_file_is_read_with_the_submitters_variables(tmp_path: Path) -> None:
    """The error in an image or a mount names its line."""
    request, wish = submission.check(with_file(tmp_path, 'image = "${USER}/x:1"'))
    assert request.image == "jane/x:1" and wish and str(wish.image) == "registry-1.docker.io/jane/x:1"
    with pytest.raises(UsageError, match=r"\.edf/it\.toml:2: image=a//b"):
        submission.check(with_file(tmp_path, '\nimage = "a//b"'))
    with pytest.raises(ConfigError, match=r"\.edf/it\.toml:2: mounts.*rodent"):
        submission.check(with_file(tmp_path, 'image = "a"\nmounts = ["/a:/b:rodent"]'))


def carried(tmp_path: Path) -> tuple[str, str]:
    """Read the file ``it`` with the image ``first`` at submit. Return the variable that carries the file."""
    file = submission.check(with_file(tmp_path, 'image = "first"'))[0].file
    assert file
    return "environ", f"{CARRIED}={file.dumps()}"


def test_nodes_have_what_was_read_at_submit(tmp_path: Path) -> None:
    node = with_file(tmp_path, 'image = "second"', carried(tmp_path), verb="step")
    assert options.parse(node.options, node.environ, node.cwd, node.describe).image == "first"


def test_step_of_a_batch_job_has_what_sbatch_read(tmp_path: Path) -> None:
    """A new job, in contrast, reads the file again."""
    variable = carried(tmp_path)
    assert submission.check(with_file(tmp_path, 'image = "second"', variable))[0].image == "first"
    for context in ("sbatch", "salloc"):
        assert submission.check(with_file(tmp_path, 'image = "second"', variable, context=context))[0].image == "second"


def test_carried_file_of_another_path_is_not_used(tmp_path: Path) -> None:
    path = ("option", "environment=./it.toml")
    first_job = Job([("verb", "check"), ("context", "srun"), ("cwd", str(tmp_path / ".edf")), path])
    with_file(tmp_path, 'image = "first"')
    file = submission.check(first_job)[0].file
    assert file
    (tmp_path / "it.toml").write_text('image = "second"')
    variable = ("environ", f"{CARRIED}={file.dumps()}")
    second_job = Job([("verb", "check"), ("context", "srun"), ("cwd", str(tmp_path)), path, variable])
    assert submission.check(second_job)[0].image == "second"


def test_carried_file_of_a_name_is_no_local_file(tmp_path: Path) -> None:
    """The carried it.toml is from ~/.edf. If the working directory has an it.toml later, that file is read."""
    name = ("option", "environment=it.toml")
    job = [("verb", "check"), ("context", "srun"), ("cwd", str(tmp_path)), ("caller", f"HOME={tmp_path}"), name]
    with_file(tmp_path, 'image = "first"')
    file = submission.check(Job(job))[0].file
    assert file and file.path == f"{tmp_path}/.edf/it.toml"
    variable = ("environ", f"{CARRIED}={file.dumps()}")
    with_file(tmp_path, 'image = "second"')
    assert submission.check(Job([*job, variable]))[0].image == "first"
    (tmp_path / "it.toml").write_text('image = "third"')
    assert submission.check(Job([*job, variable]))[0].image == "third"


def test_node_without_a_carried_file_reads_it_itself(tmp_path: Path) -> None:
    node = with_file(tmp_path, 'image = "a"', ("environ", f"HOME={tmp_path}"), verb="step")
    assert options.parse(node.options, node.environ, node.cwd, node.describe).image == "a"
    gone = with_file(tmp_path, 'image = "a"', ("environ", "HOME=/nowhere"), verb="step")
    with pytest.raises(UsageError, match=r"there is no it\.toml in /nowhere/\.edf") as caught:
        options.parse(gone.options, gone.environ, gone.cwd, gone.describe)
    assert "the node n1 read the file itself" in caught.value.hint


def test_missing_hooks_are_reported_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = 'image = "a"\n[annotations.com.hooks]\nmps.enabled = "true"\nssh.enabled = "true"'
    submission.check(with_file(tmp_path, text))
    assert capfd.readouterr().err.count("no hook implements these annotations") == 1
