"""penroot reads registries.conf and certs.d of podman and skopeo, and finds the same images there as skopeo does."""

from __future__ import annotations

import hashlib
import os
import shutil
import ssl
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import images
from tests.fakeregistry import Faulty, faulty
from tests.images import entry
from tests.kernel.conftest import User, require
from tests.kernel.registry import Server, authority

REFUSED = ""
OWN = ".config/containers"


@pytest.fixture(scope="module")
def registry(registry: Server) -> Server:
    """Run a registry in which each image has another digest."""
    for number, name in enumerate(("team/box", "hub/team/box", "other/team/box", "library/short", "team/box/sub")):
        registry.pusher.image(name, "1", images.busybox(entry("number", b"%d" % number)))
    return registry


@pytest.fixture
def front(registry: Server) -> Iterator[Faulty]:
    """Serve the registry without TLS, at an address that penroot regards as another machine's."""
    with faulty(registry.host, bind="0.0.0.0") as server:
        yield server


@pytest.fixture(scope="module")
def trust() -> Iterator[Path]:
    """Return a directory with ca.pem, and with certificate and key of a server at 127.0.0.1 and of a client."""
    directory = Path(tempfile.mkdtemp(prefix="penroot-ca-", dir="/var/tmp"))
    directory.chmod(0o755)
    authority(directory)
    new = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=client".split()
    use = ["-addext", "basicConstraints=critical,CA:FALSE", "-addext", "extendedKeyUsage=clientAuth"]
    files = ["-keyout", "client.key", "-out", "client.pem", "-CA", "ca.pem", "-CAkey", "ca.key"]
    subprocess.run([*new, *use, *files], cwd=directory, check=True, capture_output=True)
    (directory / "client.key").chmod(0o644)
    yield directory
    shutil.rmtree(directory)


def context(trust: Path, *, wants_client: bool = False) -> ssl.SSLContext:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(trust / "cert.pem", trust / "key.pem")
    if wants_client:
        tls.verify_mode = ssl.CERT_REQUIRED
        tls.load_verify_locations(trust / "ca.pem")
    return tls


def skopeo(user: User, image: str, *, prefix: tuple[str, ...] = (), options: tuple[str, ...] = ()) -> str:
    """Return the digest of the image that skopeo finds, or REFUSED."""
    require(shutil.which("skopeo"), "skopeo is not installed")
    words = ("skopeo", "--insecure-policy", *options, "inspect", "--raw", f"docker://{image}")
    done = user.run(*words, status=None, prefix=prefix)
    return REFUSED if done.returncode else "sha256:" + hashlib.sha256(done.stdout.encode()).hexdigest()


def penroot(user: User, image: str, *, env: dict[str, str] | None = None, prefix: tuple[str, ...] = ()) -> str:
    environ = {"ENROOT_TRANSFER_RETRIES": "0", **(env or {})}
    done = user.penroot("digest", f"docker://{image}", status=None, env=environ, prefix=prefix)
    assert done.returncode == 0 or done.stderr.startswith("[ERROR] ") and "Traceback" not in done.stderr, done.stderr
    return done.stdout.strip()


def digest(registry: Server, name: str) -> str:
    raw = subprocess.run(
        ["curl", "-s", f"http://{registry.host}/v2/{name}/manifests/1", "-H", f"Accept: {images.DOCKER['manifest']}"],
        check=True,
        capture_output=True,
    )
    return "sha256:" + hashlib.sha256(raw.stdout).hexdigest()


def check(user: User, registry: Server, image: str, name: str) -> None:
    """Check that penroot and skopeo find the registry's image ``name``. If ``name`` is "", both must fail."""
    wanted = digest(registry, name) if name else REFUSED
    assert {"penroot": penroot(user, image), "skopeo": skopeo(user, image)} == {"penroot": wanted, "skopeo": wanted}


# Situation -> (the requested image, its name in the registry at HOST, the content of registries.conf). If the name is
# empty, both programs must fail. MISSING is a host that does not answer.
TABLES = {
    "no table": ("HOST/team/box:1", "", ""),
    "insecure": ("HOST/team/box:1", "team/box", "[[registry]]\nlocation = 'HOST'\ninsecure = true\n"),
    "secure": ("HOST/team/box:1", "", "[[registry]]\nlocation = 'HOST'\n"),
    "other insecure": ("HOST/team/box:1", "", "[[registry]]\nlocation = 'other.test'\ninsecure = true\n"),
    "blocked": ("HOST/team/box:1", "", "[[registry]]\nlocation = 'HOST'\ninsecure = true\nblocked = true\n"),
    "blocked part": (
        "HOST/team/box:1",
        "",
        "[[registry]]\nlocation = 'HOST'\ninsecure = true\n"
        "[[registry]]\nprefix = 'HOST/team'\nlocation = 'HOST/team'\ninsecure = true\nblocked = true\n",
    ),
    "rewritten": (
        "reg.test/team/box:1",
        "hub/team/box",
        "[[registry]]\nprefix = 'reg.test'\nlocation = 'HOST/hub'\ninsecure = true\n",
    ),
    "longest prefix": (
        "reg.test/team/box:1",
        "other/team/box",
        "[[registry]]\nprefix = 'reg.test/team'\nlocation = 'HOST/other/team'\ninsecure = true\n"
        "[[registry]]\nprefix = 'reg.test'\nlocation = 'HOST/hub'\ninsecure = true\n",
    ),
    "prefix ends in a word": (
        "reg.test/team/box:1",
        "",
        "[[registry]]\nprefix = 'reg.test/te'\nlocation = 'HOST/hub/te'\ninsecure = true\n",
    ),
    "wildcard": (
        "a.b.reg.test/team/box:1",
        "hub/team/box",
        "[[registry]]\nprefix = '*.reg.test'\nlocation = 'HOST/hub'\ninsecure = true\n",
    ),
    "wildcard mirror": (
        "a.reg.test/team/box:1",
        "hub/team/box",
        "[[registry]]\nprefix = '*.reg.test'\n[[registry.mirror]]\nlocation = 'HOST/hub'\ninsecure = true\n",
    ),
    "wildcard without a subdomain": (
        "reg.test/team/box:1",
        "",
        "[[registry]]\nprefix = '*.reg.test'\nlocation = 'HOST/hub'\ninsecure = true\n",
    ),
    "mirror": (
        "HOST/team/box:1",
        "hub/team/box",
        "[[registry]]\nlocation = 'HOST'\ninsecure = true\n[[registry.mirror]]\nlocation = 'MISSING'\n"
        "[[registry.mirror]]\nlocation = 'HOST/none'\ninsecure = true\n"
        "[[registry.mirror]]\nlocation = 'HOST/hub'\ninsecure = true\n",
    ),
    "secure mirror": (
        "HOST/team/box:1",
        "team/box",
        "[[registry]]\nlocation = 'HOST'\ninsecure = true\n[[registry.mirror]]\nlocation = 'HOST/hub'\n",
    ),
    "mirror by digest": (
        "HOST/team/box:1",
        "team/box",
        "[[registry]]\nlocation = 'HOST'\ninsecure = true\nmirror-by-digest-only = true\n"
        "[[registry.mirror]]\nlocation = 'HOST/hub'\ninsecure = true\n",
    ),
    "mirror for digests": (
        "HOST/team/box:1",
        "team/box",
        "[[registry]]\nlocation = 'HOST'\ninsecure = true\n"
        "[[registry.mirror]]\nlocation = 'HOST/hub'\ninsecure = true\npull-from-mirror = 'digest-only'\n",
    ),
    "mirror for tags": (
        "HOST/team/box:1",
        "hub/team/box",
        "[[registry]]\nlocation = 'HOST'\ninsecure = true\n"
        "[[registry.mirror]]\nlocation = 'HOST/hub'\ninsecure = true\npull-from-mirror = 'tag-only'\n",
    ),
    "host for all its ports": (
        "reg.test:5000/team/box:1",
        "hub/team/box",
        "[[registry]]\nprefix = '*.test'\nblocked = true\n[[registry]]\nprefix = 'reg.test:5000'\n"
        "location = 'HOST/hub'\ninsecure = true\n",
    ),
    "host blocks its ports": (
        "0.0.0.0:PORT/team/box:1",
        "",
        "[[registry]]\nprefix = '0.0.0.0'\nlocation = '0.0.0.0'\nblocked = true\n",
    ),
    "host without its ports": (
        "0.0.0.0:PORT/team/box:1",
        "team/box",
        "[[registry]]\nprefix = '0.0.0.0'\nlocation = '0.0.0.0'\ninsecure = true\n",
    ),
    "Docker Hub": (
        "docker.io/short:1",
        "library/short",
        "[[registry]]\nprefix = 'docker.io'\nlocation = 'HOST'\ninsecure = true\n",
    ),
    "aliases": (
        "short:1",
        "library/short",
        "unqualified-search-registries = ['MISSING']\n"
        "[[registry]]\nprefix = 'docker.io/library'\nlocation = 'HOST/library'\ninsecure = true\n"
        "[aliases]\nshort = 'MISSING/team/box'\n",
    ),
    "version 1": ("HOST/team/box:1", "team/box", "[registries.insecure]\nregistries = ['HOST']\n"),
    "version 1 block": ("HOST/team/box:1", "", "[registries.block]\nregistries = ['HOST']\n"),
    "unknown key": (
        "HOST/team/box:1",
        "team/box",
        "new = 1\n[[registry]]\nlocation = 'HOST'\ninsecure = true\nnew = 1\n",
    ),
    "no location": ("HOST/team/box:1", "", "[[registry]]\nprefix = 'HOST'\ninsecure = true\n"),
    "scheme": ("HOST/team/box:1", "", "[[registry]]\nlocation = 'http://HOST'\ninsecure = true\n"),
    "not TOML": ("HOST/team/box:1", "", "[[registry]]\nlocation = HOST\n"),
    "wrong type": ("HOST/team/box:1", "", "[[registry]]\nlocation = 'HOST'\ninsecure = 'yes'\n"),
    "bad pull": (
        "HOST/team/box:1",
        "",
        "[[registry]]\nlocation = 'HOST'\ninsecure = true\n[[registry.mirror]]\nlocation = 'HOST/hub'\n"
        "pull-from-mirror = 'never'\n",
    ),
    "two answers": (
        "HOST/team/box:1",
        "",
        "[[registry]]\nlocation = 'HOST'\ninsecure = true\n[[registry]]\nprefix = 'a.test'\nlocation = 'HOST'\n",
    ),
}


@pytest.mark.parity("registries.conf of podman and skopeo")
@pytest.mark.parametrize("situation", TABLES)
def test_tables_mean_the_same_to_skopeo(user: User, registry: Server, front: Faulty, situation: str) -> None:
    image, name, text = TABLES[situation]
    user.write(f"{OWN}/registries.conf", text.replace("HOST", front.host).replace("MISSING", "127.0.0.9:1"))
    check(user, registry, image.replace("HOST", front.host).replace("PORT", front.host.rpartition(":")[2]), name)


@pytest.mark.parity("registries.conf of podman and skopeo")
@pytest.mark.parametrize("pull", ["all", "digest-only", "tag-only"])
def test_mirror_of_digests_serves_only_these(user: User, registry: Server, front: Faulty, pull: str) -> None:
    """Only the mirror has the image. A pull of its digest succeeds if pull-from-mirror allows digests."""
    mirrored = digest(registry, "hub/team/box")
    text = f"[[registry]]\nlocation = '{front.host}'\ninsecure = true\n[[registry.mirror]]\n"
    text += f"location = '{front.host}/hub'\ninsecure = true\npull-from-mirror = '{pull}'\n"
    user.write(f"{OWN}/registries.conf", text)
    name = "" if pull == "tag-only" else "hub/team/box"
    expected_digest = digest(registry, name) if name else REFUSED
    image = f"{front.host}/team/box@{mirrored}"
    done = user.penroot("load", f"docker://{image}", status=None)
    assert (done.returncode == 0) == bool(expected_digest) == bool(skopeo(user, image)), done.stderr


@pytest.mark.parity("registries.conf of podman and skopeo")
def test_drop_ins_replace_tables_in_order(user: User, registry: Server, front: Faulty) -> None:
    """Drop-in files are in /etc/containers and at home. The user's registries.conf replaces them, as in skopeo."""
    require(os.geteuid() == 0, "only root can put files in /etc/containers")
    etc = user.home / "containers"

    def table(location: str, prefix: str = "reg.test") -> str:
        return f"[[registry]]\nprefix = '{prefix}'\nlocation = '{front.host}/{location}'\ninsecure = true\n"

    mounts = f'mkdir -p /etc/containers && mount --bind {etc} /etc/containers && exec "$@"'
    prefix = ("unshare", "-m", "sh", "-c", mounts, "sh")
    etc.mkdir()

    def check_both(name: str) -> None:
        wanted, image = digest(registry, name) if name else REFUSED, "reg.test/team/box:1"
        assert [penroot(user, image, prefix=prefix), skopeo(user, image, prefix=prefix)] == [wanted, wanted]

    check_both("")
    user.write("containers/registries.conf", table("none"))
    check_both("")
    user.write("containers/registries.conf.d/20.conf", table("hub"))
    check_both("hub/team/box")
    user.write("containers/registries.conf.d/10.conf", table("none"))
    user.write("containers/registries.conf.d/30.conf.bak", table("none"))
    check_both("hub/team/box")
    user.write("containers/registries.conf.d/30.conf", table("other/team", "reg.test/team"))
    check_both("other/team/box")
    user.write(f"{OWN}/registries.conf.d/00.conf", table("hub/team", "reg.test/team"))
    check_both("hub/team/box")
    user.write(f"{OWN}/registries.conf", table("other"))
    check_both("hub/team/box")
    (user.home / OWN / "registries.conf.d/00.conf").unlink()
    check_both("other/team/box")


@pytest.mark.parity("registries.conf of podman and skopeo")
def test_file_of_the_variable_replaces_the_main_file(user: User, registry: Server, front: Faulty) -> None:
    user.write(f"{OWN}/registries.conf", f"[[registry]]\nlocation = '{front.host}'\ninsecure = true\n")
    named = user.write("mine.conf", f"[[registry]]\nprefix = '{front.host}'\nlocation = '{front.host}/hub'\n")
    environ = {"CONTAINERS_REGISTRIES_CONF": str(named)}
    assert not penroot(user, f"{front.host}/team/box:1", env=environ)
    named.write_text(named.read_text() + "insecure = true\n")
    assert penroot(user, f"{front.host}/team/box:1", env=environ) == digest(registry, "hub/team/box")
    assert skopeo(user, f"{front.host}/team/box:1", options=("--registries-conf", str(named))) == digest(
        registry, "hub/team/box"
    )
    environ["CONTAINERS_REGISTRIES_CONF"] = f"{user.home}/none.conf"
    stderr = user.penroot("digest", f"docker://{front.host}/team/box:1", env=environ, status=1).stderr
    assert f"CONTAINERS_REGISTRIES_CONF={user.home}/none.conf: there is no such file" in stderr


@pytest.mark.parity("certs.d of podman and skopeo")
@pytest.mark.parametrize("parent", [f"{OWN}/certs.d", "/etc/containers/certs.d", "/etc/docker/certs.d"])
def test_authority_of_certs_d(user: User, registry: Server, trust: Path, parent: str) -> None:
    with faulty(registry.host, tls=context(trust)) as server:
        check(user, registry, f"{server.host}/team/box:1", "")
        directory = Path(parent if parent.startswith("/") else user.home / parent) / server.host
        require(os.geteuid() == 0 or parent.startswith("."), "only root can write there")
        created = [path for path in (directory, *directory.parents) if not path.exists()]
        try:
            directory.mkdir(parents=True)
            shutil.copy(trust / "ca.pem", directory / "site.pem")  # its name does not end in .crt
            check(user, registry, f"{server.host}/team/box:1", "")
            shutil.copy(trust / "ca.pem", directory / "site.crt")
            check(user, registry, f"{server.host}/team/box:1", "team/box")
        finally:
            shutil.rmtree(created[-1])


@pytest.mark.parity("certs.d of podman and skopeo")
def test_client_certificate_of_certs_d(user: User, registry: Server, trust: Path) -> None:
    with faulty(registry.host, tls=context(trust, wants_client=True)) as server:
        image, directory = f"{server.host}/team/box:1", f"{OWN}/certs.d/{server.host}"
        user.write(f"{directory}/site.crt", (trust / "ca.pem").read_text())
        check(user, registry, image, "")
        user.write(f"{directory}/me.cert", (trust / "client.pem").read_text())
        check(user, registry, image, "")
        stderr = user.penroot("digest", f"docker://{image}", status=1).stderr
        assert "me.cert: the client's me.key is missing" in stderr
        user.write(f"{directory}/me.key", (trust / "client.key").read_text(), 0o600)
        check(user, registry, image, "team/box")
        user.write(f"{directory}/me.key", "none", 0o600)
        check(user, registry, image, "")


@pytest.mark.parity("registries.conf of podman and skopeo")
def test_insecure_accepts_any_certificate(user: User, registry: Server, trust: Path) -> None:
    with faulty(registry.host, tls=context(trust)) as server:
        check(user, registry, f"{server.host}/team/box:1", "")
        user.write(f"{OWN}/registries.conf", f"[[registry]]\nlocation = '{server.host}'\ninsecure = true\n")
        check(user, registry, f"{server.host}/team/box:1", "team/box")
        done = user.penroot("load", f"docker://{server.host}/team/box:1")
        assert "arning" not in done.stderr


@pytest.mark.parity("penroot's registries.conf takes precedence over podman's")
def test_our_line_replaces_tables_and_info_names_it(user: User, registry: Server, front: Faulty) -> None:
    podman_file = user.write(
        f"{OWN}/registries.conf",
        "[[registry]]\nlocation = 'reg.test'\nblocked = true\n"
        f"[[registry]]\nprefix = 'open.test'\nlocation = '{front.host}/hub'\ninsecure = true\n",
    )
    penroot_file = user.write("etc/registries.conf", "reg.test token=tokens.test\n0.0.0.0 http\n")
    stderr = user.penroot("digest", "docker://reg.test/team/box:1", status=1).stderr
    assert f"reg.test/team/box:1: {podman_file} blocks reg.test" in stderr
    penroot_file.write_text(f"reg.test mirror={front.host}/hub\n0.0.0.0 http\n")
    assert penroot(user, "reg.test/team/box:1") == digest(registry, "hub/team/box")
    shown = user.penroot("info").stdout
    assert f"  reg.test mirror={front.host}/hub  ({penroot_file}:1)\n" in shown
    assert f"  reg.test blocked  ({podman_file}, replaced by {penroot_file}:1)\n" in shown
    assert f"  open.test insecure location={front.host}/hub  ({podman_file})\n" in shown


@pytest.mark.parity("registries.conf of podman and skopeo")
def test_prefix_with_a_tag_is_for_that_tag(user: User, registry: Server, front: Faulty) -> None:
    """penroot follows the man page. skopeo 1.18 compares names without tags, so it ignores the table."""
    table = f"[[registry]]\nprefix = 'reg.test/team/box:1'\nlocation = '{front.host}/hub/team/box:1'\ninsecure = true\n"
    user.write(f"{OWN}/registries.conf", table)
    assert penroot(user, "reg.test/team/box:1") == digest(registry, "hub/team/box")
    assert penroot(user, "reg.test/team/box:2") == REFUSED == skopeo(user, "reg.test/team/box:1")


@pytest.mark.parity("registries.conf of podman and skopeo")
def test_stored_image_is_compared_with_its_new_registry(user: User, registry: Server, front: Faulty) -> None:
    """The store remembers the registry of the last import. A new table makes the start ask another registry."""
    image = f"{front.host}/team/box:1"
    user.write(f"{OWN}/registries.conf", f"[[registry]]\nlocation = '{front.host}'\ninsecure = true\n")
    assert user.start(f"docker://{image}", "cat", "/number") == "0"
    text = f"[[registry]]\nprefix = '{front.host}'\nlocation = '{front.host}/hub'\ninsecure = true\n"
    user.write(f"{OWN}/registries.conf", text)
    assert user.start(f"docker://{image}", "cat", "/number") == "1"
