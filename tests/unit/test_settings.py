from __future__ import annotations

import os
import pathlib

import pytest

from enroot_py.base.errors import ConfigError
from enroot_py.config import settings
from enroot_py.config.table import SETTINGS, UNUSED, Setting, all_settings, slips
from enroot_py.config.words import expand


@pytest.fixture
def environ(tmp_path: pathlib.Path) -> dict[str, str]:
    (tmp_path / "etc").mkdir()
    return {"HOME": "/home/x", "ENROOT_SYSCONF_PATH": str(tmp_path / "etc")}


def conf(environ: dict[str, str], text: str, name: str = "enroot.conf") -> None:
    path = pathlib.Path(environ["ENROOT_SYSCONF_PATH"], name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


@pytest.mark.parity("XDG_* and TMPDIR determine the defaults of these paths", "variables take precedence over files")
def test_defaults_follow_xdg(environ: dict[str, str]) -> None:
    """An empty variable counts as unset."""
    assert settings.load(environ).cache_path == "/home/x/.cache/enroot"
    assert settings.load({**environ, "XDG_CACHE_HOME": "/c"}).cache_path == "/c/enroot"
    conf(environ, "ENROOT_DATA_PATH /data\n")
    assert settings.load({**environ, "ENROOT_DATA_PATH": ""}).data_path == "/data"


@pytest.mark.parity("enroot.conf: $(id -u), $(nproc) and ${VAR} are replaced", "variables take precedence over files")
def test_precedence_of_default_conf_and_environment(environ: dict[str, str]) -> None:
    conf(environ, "# comment\n\nENROOT_DATA_PATH /data/$(id -u)/${NAME:-none}\nENROOT_REMAP_ROOT=yes\n")
    loaded = settings.load(environ)
    assert loaded.data_path == f"/data/{os.geteuid()}/none"
    assert loaded.remap_root is True
    assert loaded.origin(SETTINGS["ENROOT_DATA_PATH"]).endswith("enroot.conf:3")
    assert settings.load({**environ, "ENROOT_REMAP_ROOT": "n"}).remap_root is False


@pytest.mark.parity("enroot.conf.d/*.conf")
def test_conf_d_comes_after_conf(environ: dict[str, str]) -> None:
    conf(environ, "ENROOT_MAX_CONNECTIONS 3\n")
    conf(environ, "ENROOT_MAX_CONNECTIONS 4\n", "enroot.conf.d/a.conf")
    conf(environ, "nonsense", "enroot.conf.d/README")
    for hidden in (".#b.conf", ".b.conf"):
        conf(environ, "ENROOT_MAX_CONNECTIONS 5\n", f"enroot.conf.d/{hidden}")
    assert settings.load(environ).max_connections == 4


MISTAKES = (
    "REMAP_ROOT maybe|MAX_CONNECTIONS many|DATA_PATH relative|DATA_PATH $(rm -rf /)|DATA_PATH ${HOME|REMAP_ROOTS yes|"
    "ROOTFS-WRITABLE yes|SYSCONF_PATH /elsewhere"
)


@pytest.mark.parity(
    "ENROOT_LIBRARY_PATH",
    "enroot.conf: $(id -u), $(nproc) and ${VAR} are replaced",
    "a wrong key or value is an error that names the file and line",
)
@pytest.mark.parametrize("line", [*MISTAKES.split("|"), "DATA_PATH " + 600 * "/x", "FOO"])
def test_mistakes_name_file_and_line(environ: dict[str, str], line: str) -> None:
    conf(environ, f"\nENROOT_{line}" if line != "FOO" else "\nFOO bar")
    with pytest.raises(ConfigError, match=r"enroot\.conf:2"):
        settings.load(environ)


def test_replaced_setting_has_its_origin(environ: dict[str, str]) -> None:
    changed = settings.load(environ).replace("--rw", rootfs_writable=True)
    assert changed.rootfs_writable is True
    assert changed.origin(SETTINGS["ENROOT_ROOTFS_WRITABLE"]) == "--rw"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("ENROOT_A " + "${x:-" * 3000 + "}" * 3000, "more than 32"),
        ("ENROOT_A " + "x" * 999 + "".join(f"\nENROOT_A $ENROOT_A$ENROOT_A # {i}" for i in range(40)), "longer than"),
        ("ENROOT_DATA_PATH /a\0b", "NUL"),
    ],
    ids=["nested", "doubling", "nul"],
)
def test_conf_with_a_monstrous_value_is_refused(environ: dict[str, str], lines: str, words: str) -> None:
    conf(environ, lines)
    with pytest.raises(ConfigError, match=words):
        settings.load(environ)


def test_expand_leaves_other_dollars() -> None:
    assert expand("a$b${c}$", {"b": "1", "c": "2"}) == "a12$"
    assert expand("$USER", {}, may_be_unset=lambda _: False) == expand(
        "$(id -un)", {}
    )  # $USER is known even if the variable is unset


@pytest.mark.parity("enroot.conf: MELLANOX_*", "ENROOT_GZIP_PROGRAM")
def test_conf_has_variables_for_hooks(environ: dict[str, str]) -> None:
    """Variables for hooks are passed on. A setting that only enroot uses is accepted, but not passed on."""
    conf(environ, "MELLANOX_VISIBLE_DEVICES all\nNVIDIA_DRIVER_CAPABILITIES=compute,video\n"
                  "ENROOT_GZIP_PROGRAM pigz\nENROOT_ZSTD_OPTIONS -1\n")  # fmt: skip
    loaded = settings.load(environ).replace("option", remap_root=True)
    assert loaded.passed_on == {"MELLANOX_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,video"}
    assert set(UNUSED) == {"ENROOT_GZIP_PROGRAM", "ENROOT_ZSTD_OPTIONS"}


@pytest.mark.parity("enroot.conf: MELLANOX_*")
def test_misspelt_variable_differs_from_a_variable_of_the_site(environ: dict[str, str]) -> None:
    conf(environ, "ENROOT_OUR_SCRATCH /scratch\n")
    assert settings.load(environ).passed_on == {"ENROOT_OUR_SCRATCH": "/scratch"}
    conf(environ, "ENROOT_REMAP_ROTO yes\n")
    with pytest.raises(ConfigError) as caught:
        settings.load(environ)
    assert "ENROOT_REMAP_ROOT" in caught.value.hint


@pytest.mark.parity(
    "enroot.conf: accepts KEY VALUE and KEY=VALUE", "enroot.conf: $(id -u), $(nproc) and ${VAR} are replaced"
)
@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("ENROOT_DATA_PATH=/a", "/a"),
        ("ENROOT_DATA_PATH\t/a", "/a"),
        ("ENROOT_DATA_PATH   = /a", "/a"),
        ("ENROOT_DATA_PATH '/a b'", "/a b"),
        ('ENROOT_DATA_PATH "/a" # comment', "/a"),
        ("ENROOT_DATA_PATH /a # comment", "/a"),
        ("ENROOT_DATA_PATH /a#b", "/a#b"),
        ("ENROOT_DATA_PATH /${UID}/${EUID}", f"/{os.getuid()}/{os.geteuid()}"),
        ("ENROOT_DATA_PATH /$(hostname)", f"/{os.uname().nodename}"),
        ("ENROOT_DATA_PATH /$(nproc)", f"/{len(os.sched_getaffinity(0))}"),
        ("ENROOT_DATA_PATH /${HOSTNAME}", f"/{os.uname().nodename}"),
    ],
)
def test_lines_are_read_as_enroot_reads_them(environ: dict[str, str], line: str, value: str) -> None:
    conf(environ, line + "\n")
    assert settings.load(environ).data_path == value


@pytest.mark.parity("no, n, N, NO, f, F, false, FALSE mean no")
@pytest.mark.parametrize("word", ["no", "n", "N", "NO", "f", "F", "false", "FALSE"])
def test_words_for_no(environ: dict[str, str], word: str) -> None:
    conf(environ, f"ENROOT_NATIVE_OVERLAYFS {word}\n")
    assert settings.load(environ).native_overlayfs is False


def test_error_names_auto_if_the_setting_has_it(environ: dict[str, str]) -> None:
    assert settings.load({**environ, "ENROOT_RESTRICT_DEV": "auto"}).restrict_dev is (os.geteuid() == 0)
    with pytest.raises(ConfigError, match="ENROOT_RESTRICT_DEV='maybe' must be yes, no or auto"):
        settings.load({**environ, "ENROOT_RESTRICT_DEV": "maybe"})


def test_misspelt_variables_are_reported() -> None:
    known = dict.fromkeys((*all_settings(), "PENROOT_DEBUG"), "1")
    of_sites = dict.fromkeys(("ENROOT_JOB", "ENROOT_PID", "ENROOT_ROOTFS", "ENROOT_OPTIONS", "PENROOT_PREFIX"), "1")
    assert slips({**known, **of_sites, "ENROOT_ALLOW_HTTPS": "1", "PENROOT_DEBUGS": "1"}) == [
        "ignoring ENROOT_ALLOW_HTTPS: did you mean ENROOT_ALLOW_HTTP?",
        "ignoring PENROOT_DEBUGS: did you mean PENROOT_DEBUG?",
    ]


def test_variable_that_breaks_a_default_is_named(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        settings.load({**environ, "XDG_DATA_HOME": "here"})
    assert "${XDG_DATA_HOME}/enroot" in caught.value.hint


@pytest.mark.parity("penroot.yaml and penroot.yaml.d/*.yaml")
def test_precedence_of_settings_files(environ: dict[str, str], tmp_path: pathlib.Path) -> None:
    """penroot.yaml takes precedence over enroot.conf. The user's files take precedence over the system's files."""
    conf(environ, "ENROOT_MAX_CONNECTIONS 1\nENROOT_CONNECT_TIMEOUT 1\nENROOT_STALL_TIMEOUT 1\n")
    conf(environ, "connect_timeout: 2\nstall_timeout: 2\n", "penroot.yaml")
    conf(environ, "stall_timeout: 3\n", "penroot.yaml.d/10-site.yaml")
    loaded = settings.load(environ)
    assert (loaded.max_connections, loaded.connect_timeout, loaded.stall_timeout) == (1, 2, 3)
    assert loaded.origin(SETTINGS["ENROOT_STALL_TIMEOUT"]).endswith("penroot.yaml.d/10-site.yaml:1")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/enroot.conf").write_text("ENROOT_STALL_TIMEOUT 4\n")
    environ_of_user = {**environ, "ENROOT_CONFIG_PATH": str(tmp_path / "mine")}
    assert settings.load(environ_of_user).stall_timeout == 4
    assert settings.load({**environ_of_user, "ENROOT_STALL_TIMEOUT": "5"}).stall_timeout == 5


@pytest.mark.parametrize("name", ["enroot.conf.d", "penroot.yaml.d"])
def test_file_in_place_of_a_directory_is_skipped(environ: dict[str, str], name: str) -> None:
    conf(environ, "", name)
    conf(environ, "ENROOT_MAX_CONNECTIONS 3\n")
    assert settings.load(environ).max_connections == 3


@pytest.mark.parametrize("name", ["enroot.conf", "penroot.yaml", "penroot.yaml.d/10-site.yaml"])
def test_dangling_link_to_a_settings_file_is_an_error(environ: dict[str, str], name: str) -> None:
    """The link leads to a file system that is not mounted here. The site's settings must not be ignored."""
    path = pathlib.Path(environ["ENROOT_SYSCONF_PATH"], name)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to("/nowhere/site")
    with pytest.raises(ConfigError, match=f"cannot read .*/{name}: No such file"):
        settings.load(environ)


@pytest.mark.parametrize("home", ["/", "/home/x/"])
def test_a_home_that_ends_in_a_slash_gives_clean_paths(home: str) -> None:
    assert settings.load({"HOME": home, "ENROOT_SYSCONF_PATH": "/no"}).data_path == f"{home}.local/share/enroot"


@pytest.mark.parametrize("setting", [setting for setting in all_settings().values() if "$" not in setting.default])
def test_a_default_is_good(setting: Setting) -> None:
    """load() does not check defaults, so the test does."""
    setting.parse(setting.default)


def test_key_of_conf_refers_to_earlier_ones(environ: dict[str, str]) -> None:
    """A reference to an earlier key once silently became an empty string."""
    conf(environ, "ENROOT_CACHE_PATH /big\nENROOT_DATA_PATH ${ENROOT_CACHE_PATH}/data\n")
    conf(
        environ,
        "ENROOT_RUNTIME_PATH ${ENROOT_DATA_PATH}/run\nNVIDIA_X a\nNVIDIA_Y ${NVIDIA_X}b\n",
        "enroot.conf.d/a.conf",
    )
    loaded = settings.load(environ)
    assert (loaded.data_path, loaded.runtime_path) == ("/big/data", "/big/data/run")
    assert loaded.passed_on["NVIDIA_Y"] == "ab"
    assert settings.load({**environ, "ENROOT_CACHE_PATH": "/mine"}).data_path == "/mine/data"
    conf(environ, "cache_path: /yaml\ndata_path: ${ENROOT_CACHE_PATH}/data\n", "penroot.yaml")
    assert settings.load(environ).data_path == "/yaml/data"


@pytest.mark.parametrize("word", ["${NOT_SET}", "$NOT_SET", "${ENROOT_DATA_PATH}"])
def test_variable_that_is_not_set_is_an_error(environ: dict[str, str], word: str) -> None:
    conf(environ, f"\nENROOT_DATA_PATH {word}/data\n")
    with pytest.raises(ConfigError, match=r"enroot\.conf:2: ENROOT_DATA_PATH: the variable \w+ is not set") as caught:
        settings.load(environ)
    assert ":-}" in str(caught.value)


def test_variable_of_a_job_may_be_unset_at_submit(environ: dict[str, str]) -> None:
    conf(environ, "ENROOT_DATA_PATH /data/${SLURM_JOB_ID}\n")
    assert settings.load({**environ, "SLURM_JOB_ID": "7"}).data_path == "/data/7"
    assert settings.load(environ, in_job=False).data_path == "/data/"
    with pytest.raises(ConfigError, match="SLURM_JOB_ID is not set"):
        settings.load(environ)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${A}", "a"),
        ("${A:-b}", "a"),
        ("${EMPTY:-b}", "b"),
        ("${EMPTY-b}", ""),
        ("${NONE-b}", "b"),
        ("${NONE:-${A}c}d", "acd"),
        ("${NONE:-${OTHER:-$A}}", "a"),
        ("${NONE-}", ""),
        ("$A-${A}", "a-a"),
    ],
)
def test_defaults_of_variables_are_those_of_a_shell(text: str, value: str) -> None:
    assert expand(text, {"A": "a", "EMPTY": ""}, may_be_unset=lambda _: False) == value


@pytest.mark.parametrize("text", ["${A:?err}", "${A%x}", "${A%x-y}", "${#A}", "${A:}", "${A:=b}", "${}"])
def test_other_expansion_of_a_shell_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="are known") as caught:
        expand(text, {"A": "a"})
    assert str(caught.value).startswith(f"{text}: only ${{NAME}}, ")
