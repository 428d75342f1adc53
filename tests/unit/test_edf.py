"""Environment files: the keys and values that are allowed, and the errors for all other keys and values."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from enroot_py.base.errors import ConfigError, PenrootError, UsageError
from enroot_py.features.environments import edf, edf_parser
from enroot_py.features.environments import shown as environments
from enroot_py.features.environments.edf import Environment

SHELL = {"USER": "jane", "SCRATCH": "/scratch/jane", "ODD": "/a b:c,d$e"}


class Home:
    """A home directory with environment files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.environ = {**SHELL, "HOME": str(path)}
        (path / ".edf").mkdir()

    def write(self, name: str, text: str | bytes) -> Path:
        file = self.path / ".edf" / f"{name}.toml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    def read(self, name: str, **more: str) -> Environment:
        return edf_parser.read(name, f"--environment={name}", str(self.path), {**self.environ, **more})

    def parse(self, text: str | bytes) -> Environment:
        self.write("it", text)
        return self.read("it")

    def refused(self, text: str | bytes) -> tuple[str, str]:
        """Return the error for a text, without the directory of the file, and the hint."""
        self.write("it", text)
        with pytest.raises(PenrootError) as caught:
            edf_parser.check(self.read("it"))
        return str(caught.value).replace(f"{self.path}/.edf/", ""), caught.value.hint


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def values(file: Environment) -> dict[str, list[str]]:
    keys = dict.fromkeys(entry.key for entry in file.entries)
    return {key: [file.value(entry) for entry in file.all(key)] for key in keys}


# Each form of an environment file in the documentation of CSCS, with other names
FORMS = {
    "the first one": 'image = "library/debian:13"\nmounts = ["${SCRATCH}:${SCRATCH}"]\nworkdir = "${SCRATCH}"\n',
    "other registries": 'image = "quay.io#some/bench:6.2-mpich4.1-arm64"\n',
    "a file": 'image = "/project/${USER}/some+cuda+11.8.0.sqsh"\n',
    "hooks in a table": 'image = "a"\n[annotations]\ncom.hooks.cxi.enabled = "false"\n',
    "a table of one hook": (
        'image = "a"\n[annotations.com.hooks.ssh]\nauthorize_ssh_key = "/project/${USER}/keys"\nenabled = "true"\n'
    ),
    "two tables": 'image = "a"\n[annotations]\ncom.hooks.cxi.enabled = "false"\n[env]\nENROOT_SLURM_HOOK = "0"\n',
    "one base": 'base_environment = "common"\n',
    "bases": 'base_environment = ["common", "./.edf/common.toml"]\nmounts = ["/data:/data:ro+private"]\n',
    "all keys": 'image = "a"\nentrypoint = false\nwritable = true\ndevices = ["nvidia.com/gpu=all", "/dev/gdrdrv"]\n',
    "defaults written out": 'base_environment = ""\nimage = "a"\nmounts = []\nworkdir = ""\n',
    "a netstack": (
        'image = "nvcr.io/some/torch:25.11-py3"\n[annotations]\ncom.hooks.aws_ofi_nccl.enabled = "true"\n'
        'com.hooks.aws_ofi_nccl.variant = "cuda-dl"\ncom.hooks.netstack.source = "host"\n'
    ),
    "commas that are no TOML": 'image = "a"\n[env]\nRUN = "yes",\nPATH = "${PATH}:/custom/bin", # ours\nDEBUG = "no"\n',
}


@pytest.mark.parity("forms of CSCS's documentation")
@pytest.mark.parametrize("text", FORMS.values(), ids=list(FORMS))
def test_forms_of_the_documentation(home: Home, text: str) -> None:
    home.write("common", 'image = "common"\n')
    file = home.parse(text)
    edf_parser.check(file)
    assert file.last("image")
    assert edf.loads(file.dumps()) == file


def test_each_value_has_its_line(home: Home) -> None:
    file = home.parse(
        "\n# [env]\nimage = 'a'\n\nmounts = [ # [\n  \"/a:/b\",\n\n  '/c:/d',\n]\nenv.A = '''\n[x]\nB = 1\n'''\n"
        "writable = true\n[annotations.com.hooks]\nx.enabled = 'true'\n\n[annotations.\"a b\"]\n c = '1'\n"
    )
    lines = [(entry.name or entry.key, entry.origin.rpartition(":")[2]) for entry in file.entries]
    assert lines == [
        *(("image", "3"), ("mounts", "5"), ("mounts", "5"), ("A", "10"), ("writable", "14")),
        *(("com.hooks.x.enabled", "16"), ("a b.c", "19")),
    ]
    assert file.by_name("env")["A"].text == "[x]\nB = 1\n"


@pytest.mark.parity("base_environment")
def test_file_overrides_its_bases(home: Home) -> None:
    """A file takes precedence over its bases. Among the bases, a later base takes precedence over an earlier one."""
    home.write("a", 'image = "a"\nwritable = false\nmounts = ["/a:/a"]\n[env]\nONE = "a"\nTWO = "a"\nTHREE = "a"\n')
    home.write("b", 'image = "b"\nmounts = ["/b:/b"]\n[env]\nTWO = "b"\nTHREE = "b"\n')
    file = home.parse('mounts = ["/c:/c"]\nbase_environment = ["a", "b"]\n[env]\nTHREE = "c"\n')
    image, writable = file.last("image"), file.last("writable")
    assert image and image.text == "b" and image.origin.endswith("b.toml:1")
    assert writable and writable.text == "false" and not file.last("workdir")
    assert values(file)["mounts"] == ["/a:/a", "/b:/b", "/c:/c"]
    assert {name: entry.text for name, entry in file.by_name("env").items()} == {"ONE": "a", "TWO": "b", "THREE": "c"}


@pytest.mark.parity("unknown keys, wrong types")
@pytest.mark.parametrize(
    ("text", "line", "error", "hint"),
    [
        ('imgae = "a"', 1, "unknown key 'imgae'", "did you mean image?"),
        ('image = "a"\n\nvolumes = []', 3, "unknown key 'volumes'", "keys are base_environment, image"),
        (
            'com.hooks.ssh.enabled = "true"',
            1,
            "unknown key 'com'",
            "put annotations such as com.… below a line [annotations]",
        ),
        ("image = 3", 1, "image is not a string", 'image = "ubuntu:24.04"'),
        ('mounts = "/a:/b"', 1, "mounts is not an array of strings", 'mounts = ["/data:/data:ro"]'),
        ("devices = [1]", 1, "devices is not an array of strings", "devices = ["),
        ('writable = "no"', 1, "writable is not true or false", "writable = false"),
        ('env = "A=B"', 1, "env is not a table of strings", "[env]"),
        ("[[mounts]]\nsource = '/a'", 1, "mounts is not an array of strings", 'mounts = ["'),
        ("[env]\nDEBUG = false", 2, "DEBUG in env is not a string", 'write DEBUG = "false"'),
        (
            '[env]\nmounts = ["/a:/b"]',
            2,
            "mounts in env is not a string",
            "put top-level keys such as mounts before the first [table]",
        ),
        ('[env]\n"A-B" = "x"', 2, "A-B: 'A-B' is not the name of a variable", 'NAME = "VALUE"'),
        ("[annotations]\ncom.hooks.cxi.enabled = true", 2, "com.hooks.cxi.enabled in annotations", '"true"'),
        ('image = "a"\nimage = "b"', 2, "Cannot overwrite a value", "TOML: define each key and each table once"),
        ("[env]\nA = '1'\n[env]\nB = '2'", 3, "Cannot declare", "TOML: define each key and each table once"),
        ('[annotations]\ncom.hooks.cxi.enabled = "1"', 2, "com.hooks.cxi.enabled=1: neither true", '"true"'),
        ("env = {A = '1', A = '2'}", 1, "Duplicate inline table key", "TOML: define each key and each table once"),
        ('image = "a\0b"', 1, "Illegal character", "TOML"),
        ('workdir = "work"', 1, "workdir=work is not an absolute path", 'workdir = "/work"'),
        ('devices = ["/etc/passwd"]', 1, "devices=/etc/passwd is not a path in /dev", "nvidia.com/gpu=all"),
        ('[annotations]\ncom.pyxis.slurm = "yes"', 2, "com.pyxis.slurm=yes: neither true nor false", '"true"'),
        ("image = 'a'\nmounts = [\n'/a'", 3, "", "TOML"),
        ("image = ubuntu", 1, "Invalid value", "in double quotes"),
        ('image = "a" "b"', 1, "Expected newline", "only a comment after a value"),
        ("[env\nA = '1'", 1, "Expected ']'", "TOML"),
        ('workdir = "$NONE"', 1, "workdir: the variable NONE is not set", "write ${NONE:-} for an empty value"),
        ('workdir = "${SCRATCH"', 1, "workdir: ${SCRATCH is no variable", "write ${NAME}"),
        ('[env]\nA = "${A!B}"', 2, "A: ${A!B} is no variable", "write ${NAME}"),
        ('[env]\nA = "${!A}"', 2, "A: ${!A} is no variable", "write ${NAME}"),
        ('[annotations]\na = "${NONE:?set it}"', 2, "a: NONE: set it", "export NONE"),
        ('[annotations]\na = "${USER:x}"', 2, "a: ${USER:x}: offset and length are not numbers", "write ${NAME:2:3}"),
        ('devices = ["${NONE}"]', 1, "devices: the variable NONE is not set", "write ${NONE:-} for an empty value"),
        ('[annotations]\nx = "${NONE}"', 2, "x: the variable NONE is not set", "export it"),
        ('[env]\nA = "a\\u0000b"', 2, "A: it contains a NUL", "remove \\u0000"),
        (b'image = "a"\n# \xff\n', 2, "this is not UTF-8", "save it as UTF-8"),
    ],
)
def test_errors_name_their_line(home: Home, text: str | bytes, line: int, error: str, hint: str) -> None:
    actual_error, actual_hint = home.refused(text)
    assert actual_error.startswith(f"it.toml:{line}: ") and error in actual_error, actual_error
    assert hint in actual_hint
    assert "\n" not in actual_error + actual_hint


@pytest.mark.parity("forms of CSCS's documentation")
def test_comma_that_toml_forbids_is_reported(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    """``workdir`` below [env] is reported, too: a key below a [table] belongs to the table, so it is a variable."""
    assert home.parse(FORMS["commas that are no TOML"]).by_name("env")["DEBUG"].text == "no"
    assert capfd.readouterr().err.count("ignoring the comma at the end") == 2
    assert home.parse('image = "a"\n[env]\nworkdir = "/x"\n').by_name("env")["workdir"].text == "/x"
    assert "it.toml:3: workdir is a variable here" in capfd.readouterr().err


@pytest.mark.parity("EDF_PATH")
def test_paths_where_files_are_found(home: Home) -> None:
    home.write("it", 'image = "a"')
    other = home.path / "other"
    other.mkdir()
    (other / "it.toml").write_text('image = "b"')
    (other / "sub.toml").write_text('base_environment = "it"')
    paths = {
        home.read("it").path: home.path / ".edf/it.toml",
        home.read("it.toml").path: home.path / ".edf/it.toml",
        home.read("./other/it.toml").path: home.path / "./other/it.toml",
        home.read(f"{other}/it.toml").path: other / "it.toml",
        home.read("it", EDF_PATH=f":/nowhere:{other}:{home.path}/.edf").path: other / "it.toml",
    }
    assert paths == {str(path): path for path in paths.values()}
    base = home.read("sub", EDF_PATH=str(other)).last("image")
    assert base and base.text == "b"


@pytest.mark.parity("EDF_PATH")
@pytest.mark.parametrize(
    ("name", "environ", "error", "hint"),
    [
        ("ubunto", {}, "there is no ubunto.toml in HOME/.edf", "did you mean ubuntu?"),
        ("here", {}, "there is no here.toml in HOME/.edf", "it may be ./here.toml"),
        ("there", {}, "there is no there.toml in HOME/.edf", "set EDF_PATH to the directory of the file"),
        ("./here", {}, "there is no file HOME/here", "it may be ./here.toml"),
        ("/none.toml", {}, "there is no file /none.toml", "to search EDF_PATH, use a name without a /"),
        ("loop", {}, "cannot read HOME/.edf/loop.toml: Too many levels of symbolic links", "make the file readable"),
        ("./loop", {}, "cannot read HOME/loop: No such file", "make the file readable"),
        (f"./{'long' * 100}", {}, "File name too long", "make the file readable"),
        ("./mem", {}, "cannot read HOME/mem: Input/output error", "make the file readable"),
        ("~/x.toml", {}, "no shell has replaced the ~", "write the full path"),
        ("x", {"EDF_PATH": "edf"}, "EDF_PATH: edf is not an absolute path", "EDF_PATH=$PWD/edf"),
        ("x", {"EDF_PATH": "/no:/where"}, "in /no, /where", ""),
        (".", {}, "Is a directory", ""),
    ],
)
def test_files_that_are_not_there(home: Home, name: str, environ: dict[str, str], error: str, hint: str) -> None:
    home.write("ubuntu", 'image = "a"')
    (home.path / "here.toml").write_text('image = "a"')
    (home.path / ".edf/loop.toml").symlink_to("loop.toml")
    (home.path / "loop").symlink_to("nowhere")
    (home.path / "mem").symlink_to("/proc/self/mem")
    with pytest.raises(PenrootError) as caught:
        home.read(name, **environ)
    assert error in str(caught.value).replace(str(home.path), "HOME")
    assert hint in caught.value.hint


def test_name_with_toml_is_searched_in_the_cwd_first(home: Home) -> None:
    home.write("it", 'image = "a"')
    (home.path / "it.toml").write_text('image = "b"')
    assert values(home.read("it.toml"))["image"] == ["b"] and values(home.read("it"))["image"] == ["a"]
    home.write("it", 'image = "a"\nbase_environment = ["none"]')
    with pytest.raises(UsageError, match=r"it\.toml:2: base_environment: there is no none\.toml"):
        home.read("it")


@pytest.mark.parity("base_environment")
def test_endless_bases_are_refused(home: Home) -> None:
    home.write("it", 'base_environment = "other"')
    home.write("other", 'base_environment = "it"')
    with pytest.raises(ConfigError, match="is its own base"):
        home.read("it")
    for level in range(12):
        home.write(f"deep{level}", f'image = "a"\nbase_environment = "deep{level + 1}"')
    with pytest.raises(ConfigError, match="more than 10 levels"):
        home.read("deep0")
    home.write("deep10", 'image = "last"')
    assert values(home.read("deep0"))["image"][0] == "last"
    for level in range(9):
        home.write(f"wide{level}", f"base_environment = {[f'wide{level + 1}'] * 9}")
    home.write("wide9", 'image = "a"')
    with pytest.raises(ConfigError, match="more than 100 files"):
        home.read("wide0")


@pytest.mark.security("H5")
@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda file: file.chmod(0o666), "can be written by others"),
        (lambda file: file.chmod(0o606), "can be written by others"),
        (lambda file: file.parent.chmod(0o1777), "is world-writable"),
        (lambda file: (file.unlink(), os.mkfifo(file)), "is not a regular file"),  # a read would block
        (lambda file: file.write_text("# " + 70_000 * "x"), "larger than 64 KiB"),
    ],
    ids=["mode 666", "mode 606", "directory", "pipe", "large"],
)
def test_file_that_others_can_write_is_not_trusted(home: Home, spoil: Callable[[Path], object], error: str) -> None:
    spoil(home.write("it", 'image = "a"'))
    with pytest.raises(ConfigError, match=error) as caught:
        home.read("it")
    if error == "is world-writable":
        assert caught.value.hint == f"chmod o-w {home.path}/.edf"


def test_lines_that_could_end_an_array_take_little_time(home: Home) -> None:
    file = home.parse('image = "a"\nmounts = [\n' + 3000 * '"/a:/b", # ]\n' + "]\nwritable = true\n")
    assert len(values(file)["mounts"]) == 3000
    image, writable = file.last("image"), file.last("writable")
    assert image and writable and (image.origin, writable.origin) == (f"{file.path}:1", file.path)


@pytest.mark.parametrize("text", ["annotations." + "a." * 3000 + 'x="1"', "x=" + 3000 * "[" + 3000 * "]"])
def test_deep_nesting_is_reported(home: Home, text: str) -> None:
    message, hint = home.refused(text)
    assert message == "it.toml: tables or arrays are nested too deeply" and hint


@pytest.mark.parity("${NAME}")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("${USER}", "jane"),
        ("/x/${USER}/y${USER}", "/x/jane/yjane"),
        ("${NONE:-}", ""),
        ("${NONE:-/tmp}/x", "/tmp/x"),
        ("${USER:-nobody}", "jane"),
        ("$${USER}", "${USER}"),
        ("a$$b$$$$", "a$b$$"),
        ("costs 5$", "costs 5$"),
        ("$$$${USER}", "$${USER}"),
        ("${SLURM_JOB_ID}", "${SLURM_JOB_ID}"),
        ("${NONE:-${SLURM_JOB_ID#1}}", "${NONE:-${SLURM_JOB_ID#1}}"),
    ],
)
def test_variables_of_the_submitter(home: Home, text: str, expected: str) -> None:
    assert values(home.parse(f'[annotations]\nx = "{text}"'))["annotations"] == [expected]


@pytest.mark.parity("${NAME}")
def test_nodes_get_variables_of_the_submitter(home: Home) -> None:
    """The nodes themselves look up variables that the submitter does not send, such as SLURM_JOB_ID."""
    file = edf.loads(home.parse('workdir = "${SCRATCH}/${SLURM_JOB_ID}"').dumps())
    entry = file.last("workdir")
    assert entry and file.host == {"SCRATCH": "/scratch/jane"}
    assert file.value(entry, {"SCRATCH": "/elsewhere", "SLURM_JOB_ID": "7"}) == "/scratch/jane/7"
    with pytest.raises(ConfigError, match=r"it\.toml:1: workdir: the variable SLURM_JOB_ID is not set"):
        file.value(entry, {})


def test_only_named_variables_are_sent(home: Home) -> None:
    file = home.parse('image = "a"\n[env]\nA = "${USER}"\nB = "$SCRATCH"')
    assert file.host == {"USER": "jane"} and "/scratch" not in file.dumps()
    home.write("it", 'image = "a"\n[annotations]\njob = "${SLURM_JOB_ID}"')
    assert not home.read("it", SLURM_JOB_ID="1").host  # SLURM_JOB_ID of a surrounding job is not sent


@pytest.mark.parity("${NAME}")
def test_image_variables_take_precedence_over_the_submitters(home: Home) -> None:
    home.write("it", '[env]\nPATH = "${PATH}:/mine"\nWHO = "${USER}"\nEMPTY = ""\nGONE = "${NONE:-}"')
    file = home.read("it", PATH="/host/bin")
    variables = file.variables({"PATH": "/image/bin"}, {"USER": "john"})
    expected = {"PATH": "/image/bin:/mine", "WHO": "jane", "EMPTY": None, "GONE": None}
    assert {name: value for name, (value, _) in variables.items()} == expected
    assert variables["WHO"][1].endswith("it.toml:3")


def test_separators_in_a_variable_are_escaped(home: Home) -> None:
    file = home.parse('mounts = ["${ODD}:/x$$y:ro"]')
    (entry,) = file.all("mounts")
    assert file.mount(entry) == r"/a\ b\:c\,d\$e:/x\$y:ro"


def test_missing_hooks_are_reported_together(home: Home) -> None:
    file = home.parse(
        'image = "a"\n[annotations.com.hooks]\nmps.enabled = "true"\nnone.enabled = "false"\nssh.enabled = "true"\n'
        'ssh.port = "1"\n[annotations.com.other]\nthing.enabled = "true"'
    )
    line = edf_parser.annotation_warning(file)
    assert line.count("com.hooks.") == 2 and "com.hooks.mps (" in line and "it.toml:5" in line
    assert not edf_parser.annotation_warning(home.parse('image = "a"'))


def test_netstack_that_is_not_the_hosts_is_reported(home: Home) -> None:
    text = 'image = "a"\n[annotations]\ncom.hooks.netstack.source = "{}"\ncom.hooks.netstack.version = "latest"\n'
    assert "com.hooks.netstack (" in edf_parser.annotation_warning(home.parse(text.format("artifact")))
    assert edf_parser.annotation_warning(home.parse(text.format("host"))) == ""
    assert "it.toml:1)" in edf_parser.annotation_warning(
        home.parse('annotations.com.hooks.netstack.name = "default"\n')
    )


def test_misspelt_annotations_of_ours_are_reported(home: Home) -> None:
    text = 'image = "a"\n[annotations]\ncom.pyxis.slrum = "true"\ncom.hooks.cxi.enable = "true"\norg.site.x = "1"\n'
    line = edf_parser.annotation_warning(home.parse(text))
    assert "com.pyxis.slrum" in line and "did you mean com.pyxis.slurm?" in line and "it.toml:3" in line
    assert "com.hooks.cxi.enable " in line and "did you mean com.hooks.cxi.enabled?" in line and "org.site" not in line


@pytest.mark.parametrize(("text", "value"), [("True", True), ("${ON}", True), ("FALSE", False), ("", None)])
def test_truth_values_of_annotations(home: Home, text: str, value: bool | None) -> None:
    home.write("it", f'image = "a"\n[annotations]\ncom.pyxis.slurm = "{text}"\n')
    annotation = home.read("it", ON="true").annotation("com.pyxis.slurm")
    assert (annotation and annotation[0]) == value


def test_shown_file_has_no_control_characters(home: Home) -> None:
    """The names of directories and files can contain any characters."""
    directory = home.path / "x\nimage = 'evil' #"
    directory.mkdir()
    expected = {"image": "a", "env": {"A": "x\x9by\u202e\U000e0041\x7f\t"}, "annotations": {"a\nb": "\x1b[31m"}}
    text = 'image = "a"\n[env]\nA = "x\\u009by\\u202e\\U000e0041\\u007f\\t"\n[annotations]\n"a\\nb" = "\\u001b[31m"\n'
    (directory / "it.toml").write_text(text)
    file = home.read(f"{directory}/it.toml")
    shown = {form: environments.shown(file, form).decode() for form in ("toml", "json")}
    assert all(line.isprintable() for text in shown.values() for line in text.split("\n"))
    for document in (edf_parser.tomllib.loads(shown["toml"]), json.loads(shown["json"])):
        assert {key: document[key] for key in expected} == expected


def test_hooks_learn_the_annotations(home: Home) -> None:
    file = home.parse('[annotations]\na.b = "${USER}"\nc = "1\\n2"\nd = "${SLURM_JOB_ID}"')
    assert file.for_hooks({"SLURM_JOB_ID": "7"}) == {"PENROOT_ANNOTATIONS": "a.b=jane\nd=7"}
    assert home.parse('image = "a"').for_hooks({}) == {}


def test_file_too_large_for_a_job_is_refused(home: Home) -> None:
    home.write("one", f'image = "a"\n[env]\nA = "{40_000 * "x"}"')
    message, hint = home.refused(f'base_environment = "one"\n[env]\nB = "{40_000 * "x"}"')
    assert "is longer than the 64 KiB" in message and hint


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "nonsense", '{"name":1,"path":1,"entries":[1],"host":{}}', "[" * 5000, '{"name":"a"}']
)
def test_forged_environment_does_not_parse(text: str) -> None:
    with pytest.raises(ConfigError, match="does not parse"):
        edf.loads(text)


@pytest.mark.parity("the examples of docs/reference/environments.md")
def test_the_examples_of_the_documentation(home: Home) -> None:
    text = (Path(__file__).parents[2] / "docs/reference/environments.md").read_text()
    examples = re.findall(r"```toml\n# ~/\.edf/(\w+)\.toml\n(.*?)```", text, re.S)
    assert [name for name, _ in examples] == ["pytorch", "common"]
    for name, example in examples:
        home.write(name, example)
    file = home.read("pytorch")
    edf_parser.check(file)
    assert [file.value(entry) for entry in file.all("mounts")] == ["/scratch/jane:/scratch/jane", "/data/sets:/data:ro"]
    assert set(re.findall(r"^\| (`.*?`) \|", text, re.M)) == {
        *("`base_environment`", "`image`", "`mounts`", "`workdir`", "`entrypoint`, `writable`", "`devices`"),
        *("`[env]`", "`[annotations]`"),
    }
    assert {re.sub(r"[\[\]]", "", word) for word in re.findall(r"`(\[?\w+\]?)`", text)} >= set(edf_parser.KEYS)
