"""Attacks by a registry, a token server, a proxy, and by files that claim to be images."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pathlib
import shutil
import socket
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator

import pytest

from tests import images
from tests.attack.conftest import User
from tests.fakeregistry import NAME, Fake, Reply, Request, fake
from tests.images import OCI, Image, Layer, entry
from tests.kernel.conftest import PREFIX, require
from tests.kernel.registry import authority, own_address
from tests.kernel.test_signatures import SIGNER, signed_by
from tests.kernel.test_signatures import write as write_policy

SECRET = "hunter2"
PROMPT_S = 20  # an idle machine needs a few seconds; ENROOT_STALL_TIMEOUT would let one attempt wait longer


def image_of(*layers: bytes, **settings: object) -> Image:
    one = images.tar([entry("bin/true", b"#!", mode=0o755)])
    return Image([Layer(data) for data in layers or (one,)], dict(settings), OCI)


def registry_of(image: Image, wants: str = "", realm: str = "") -> Callable[[Request], Reply]:
    """Return the handler of a registry that has ``image``. With ``realm``, it requires the realm's token ``wants``."""
    blobs = {images.digest(layer.blob): layer.blob for layer in image.layers}
    blobs[images.digest(image.config())] = image.config()

    def answer(request: Request) -> Reply:
        if realm and request.login != wants:
            return Reply(401, {"WWW-Authenticate": f'Bearer realm="{realm}",service="x",scope="repository:other:pull"'})
        if "/manifests/" in request.path:
            return Reply(
                200,
                {"Content-Type": OCI["manifest"], "Docker-Content-Digest": images.digest(image.manifest())},
                image.manifest(),
            )
        blob = blobs.get(request.path.rpartition("/")[2])
        return Reply(200, {}, blob) if blob is not None else Reply(404)

    return answer


def token_server(user: str = "me", token: str = "a-token") -> Callable[[Request], Reply]:
    """Return the handler of a token server for ``user`` with the password SECRET, or for all if ``user`` is empty."""

    def answer(request: Request) -> Reply:
        if user and request.login != f"{user}:{SECRET}":
            return Reply(401)
        return Reply(200, {}, json.dumps({"token": token}).encode())

    return answer


def write_setting(user: User, name: str, text: str, mode: int = 0o600) -> None:
    """Write a file of the user's configuration."""
    path = user.home / ".config/enroot" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    user.own(user.home / ".config")


def credentials(user: User, *hosts: str) -> None:
    write_setting(user, ".credentials", "".join(f"machine {host} login me password {SECRET}\n" for host in hosts))


# -- secrets go only to the registry that they belong to


@pytest.mark.security("G1")
@pytest.mark.parametrize(
    "form",
    [
        r"http://{evil}\@{good}/token",
        r"http://{evil}\\@{good}/token",
        "http://{evil}/@{good}/token",
        "http://x@{good}\t@{evil}/token",
        "http://{good}@{evil}/token",
        "http://{evil}#@{good}/token",
        "http://{evil}?@{good}/token",
        "http://{evil}%5c@{good}/token",
    ],
)
def test_ambiguous_realm_gets_no_password(user: User, form: str) -> None:
    r"""The realm is ``//evil\@good/``, for example: parsers disagree on its host."""
    with fake(bind="127.0.0.2") as evil, fake(bind="127.0.0.3") as good:
        credentials(user, "127.0.0.3", good.host)
        realm = form.format(evil=evil.host, good=good.host)
        quoted = realm.replace("\\", "\\\\")
        evil.answer = lambda request: Reply(401, {"WWW-Authenticate": f'Bearer realm="{quoted}",service="x"'})
        done = user.penroot("digest", evil.uri, status=1, env={"ENROOT_TRANSFER_RETRIES": "0"})
        assert evil.logins == good.logins == set()
        assert "Traceback" not in done.stderr and SECRET not in done.stderr


@pytest.mark.parity("tokens may come from another host")
@pytest.mark.security("G1")
def test_token_for_another_registry_is_not_fetched(user: User) -> None:
    """A registry names the token server of another registry, to get a token for a repository there."""
    with fake(token_server(), bind="127.0.0.3") as good, fake(bind="127.0.0.2") as evil:
        credentials(user, good.host)
        evil.answer = registry_of(image_of(), "a-token", f"http://{good.host}/token")
        done = user.penroot("digest", evil.uri, status=1)
        assert good.logins == evil.logins == set()
        line = f"{evil.host} token={good.host}"
        assert "unknown token server" in done.stderr and line in done.stderr and "registries.conf" in done.stderr


@pytest.mark.security("G1")
def test_password_goes_to_no_token_server_on_another_host(user: User) -> None:
    """A compromised or wrongly configured registry requests tokens of another host, which must not get passwords."""
    with fake(token_server(), bind="127.0.0.3") as evil, fake(bind="127.0.0.2") as victim:
        credentials(user, victim.host)
        victim.answer = registry_of(image_of(), "a-token", f"http://{evil.host}/token")
        user.penroot("digest", victim.uri, status=1)
        assert evil.logins == set()


@pytest.mark.parity("tokens may come from another host")
@pytest.mark.security("G1")
def test_token_server_on_another_host_is_named_by_a_setting(user: User) -> None:
    """Not an attack: with GitLab, tokens come from another host than images."""
    with fake(token_server(), bind="127.0.0.3") as tokens, fake(bind="127.0.0.2") as registry:
        registry.answer = registry_of(image_of(), "a-token", f"http://{tokens.host}/jwt/auth?a=b")
        write_setting(user, "registries.conf", f"{registry.host} token={tokens.host}\n")
        # docker's login files name the registry, and enroot's name the token server.
        for host in (registry.host, tokens.host):
            credentials(user, host)
            user.penroot("digest", registry.uri)
        assert tokens.logins == {f"me:{SECRET}"} and registry.logins == {"a-token"}
        write_setting(user, "registries.conf", f"{registry.host} token=http://{tokens.host}\n")
        assert "token=HOST[:PORT]" in user.penroot("digest", registry.uri, status=1).stderr


def test_public_image_needs_no_setting_for_its_token_server(user: User) -> None:
    with fake(token_server(""), bind="127.0.0.3") as tokens, fake(bind="127.0.0.2") as registry:
        credentials(user, registry.host, tokens.host)
        registry.answer = registry_of(image_of(), "a-token", f"http://{tokens.host}/token")
        user.penroot("digest", registry.uri)
        assert tokens.logins == set()


@pytest.mark.security("G3")
def test_scope_of_a_token_is_the_repository_that_was_asked_for(user: User) -> None:
    """A registry of several tenants requests a token for another repository than the one that the user named."""
    with fake(bind="127.0.0.2") as server:
        credentials(user, server.host)
        has = registry_of(image_of(), "a-token", f"http://{server.host}/token")
        server.answer = lambda request: token_server()(request) if "/token" in request.path else has(request)
        user.penroot("digest", server.uri)
        asked = [request.path for request in server.seen if "/token" in request.path]
        assert asked and all("scope=repository%3Ateam%2Fapp%3Apull" in path and "other" not in path for path in asked)


@pytest.mark.security("G4")
@pytest.mark.parametrize("where", ["Location", "realm"])
@pytest.mark.parametrize(
    "address", [r"http://{other}\x", "http://me:pw@{other}/x", "http://{other}/\x01x", "file:///etc/passwd", "//\\x/"]
)
def test_address_with_what_no_address_has_is_refused(user: User, where: str, address: str) -> None:
    """Refuse a backslash, control character, user or other scheme in an address that a registry sends."""
    with fake(bind="127.0.0.3") as other, fake(bind="127.0.0.2") as registry:
        target = address.format(other=other.host)
        quoted = target.replace("\\", "\\\\")
        headers = {"Location": target} if where == "Location" else {"WWW-Authenticate": f'Bearer realm="{quoted}"'}
        registry.answer = lambda request: Reply(307 if where == "Location" else 401, headers)
        env = {"ENROOT_TRANSFER_RETRIES": "0"}
        done = user.penroot("import", "-o", "x.sqsh", registry.uri, status=1, env=env)
        assert other.seen == [] and "Traceback" not in done.stderr and "pw@" not in done.stderr


@pytest.mark.security("G6")
@pytest.mark.parametrize("token", ["a\r\nX-More: 1", "a\nb", "a\0b", "\u00e9", "x" * 70_000, "a b"])
def test_invalid_token_is_an_error(user: User, token: str) -> None:
    """Before the fix, a token with a line feed raised an exception in http.client, or injected a header."""
    with fake(bind="127.0.0.2") as server:
        has = registry_of(image_of(), token, f"http://{server.host}/token")
        server.answer = lambda request: token_server("", token)(request) if "/token" in request.path else has(request)
        done = user.penroot("digest", server.uri, status=1)
        assert "sent no valid token" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.security("G6")
def test_dollar_in_a_password_is_a_dollar(user: User) -> None:
    r"""A dollar in a password such as ``$2y$10$…`` is sent as it is written, and ``\$`` is sent as a dollar.

    ``$WORD`` is replaced by the variable, and a dollar in its value is sent as it is.
    """
    for written, meant in ((f"$2y${SECRET}", f"$2y${SECRET}"), (rf"\${SECRET}", f"${SECRET}"), ("$WORD", "w$rd")):
        with fake(lambda request: Reply(401, {"WWW-Authenticate": "Basic realm=x"}), bind="127.0.0.2") as server:
            write_setting(user, ".credentials", f"machine {server.host} login me password {written}\n")
            user.penroot("digest", server.uri, status=1, env={"WORD": "w$rd"})
            assert server.logins == {f"me:{meant}"}


@pytest.mark.parity("ENROOT_ALLOW_HTTP")
@pytest.mark.security("G5")
def test_plain_http_is_allowed_by_registry(user: User) -> None:
    """A user who allows plain HTTP for one registry must not expose the passwords of all registries to the network."""
    with fake(registry_of(image_of()), bind="0.0.0.0") as server:  # not a local name: see is_local()
        port = server.host.rpartition(":")[2]
        for allowed in ("0.0.0.0", server.host, f"build.site, {server.host}", "yes"):
            user.penroot("digest", server.uri, env={"ENROOT_ALLOW_HTTP": allowed})
        for other in ("build.site", f"0.0.0.0:1{port}", "no", ""):
            seen = len(server.seen)
            done = user.penroot("digest", server.uri, status=1, env={"ENROOT_ALLOW_HTTP": other})
            assert "ENROOT_ALLOW_HTTP" in done.stderr and len(server.seen) == seen
        done = user.penroot("digest", server.uri, status=1, env={"ENROOT_ALLOW_HTTP": "yes,0.0.0.0"})
        assert "must be yes, no, or" in done.stderr


def test_settings_of_a_registry_hold_for_each_spelling(user: User) -> None:
    """Settings of mirrors, token servers and plain HTTP apply to a registry, however its name is spelled."""
    with fake(registry_of(image_of()), bind="0.0.0.0") as server, fake(bind="127.0.0.2") as gone:
        port = server.host.rpartition(":")[2]
        write_setting(
            user, "registries.conf", f"[::ffff:127.0.0.2]:0{gone.host.rpartition(':')[2]} mirror=127.1:0{port}\n"
        )
        user.penroot("digest", gone.uri)
        assert server.seen and not gone.seen
        user.penroot("digest", f"docker://0.0.0.0.:0{port}#{NAME}:1", env={"ENROOT_ALLOW_HTTP": f"0:{port}"})
        write_setting(user, "registries.conf", "010.0.0.1 http\n")
        assert "registries.conf:1: '010.0.0.1' is not a registry" in user.penroot("digest", gone.uri, status=1).stderr


@pytest.mark.parity("URI: docker://USER:PASSWORD@... is a login for this command only")
@pytest.mark.security("G6")
@pytest.mark.parametrize("basic", [True, False], ids=["basic", "token"])
def test_password_in_a_reference_is_used_and_kept_nowhere(user: User, basic: bool) -> None:
    """As in enroot, this command sends the password to this registry, not to its mirrors. penroot prints a warning."""
    events = user.home / "events.jsonl"
    user.environ |= {"ENROOT_EVENTS": str(events), "PENROOT_DEBUG": "1"}
    with fake(bind="127.0.0.2") as server, fake(bind="127.0.0.3") as mirror:
        write_setting(user, "registries.conf", f"{server.host} mirror={mirror.host}\n")
        challenge = "Basic realm=x" if basic else f'Bearer realm="http://{server.host}/token"'
        mirror.answer = lambda request: Reply(401, {"WWW-Authenticate": "Basic realm=x"})
        has = registry_of(images.busybox())
        wants = f"me:{SECRET}" if basic else "a-token"

        def answer(request: Request) -> Reply:
            if "/token" in request.path:
                return token_server()(request)
            return has(request) if request.login == wants else Reply(401, {"WWW-Authenticate": challenge})

        server.answer = answer
        uri = f"docker://me:{SECRET}@{server.host}#{NAME}:1"
        outputs = []
        for words in (
            ("import", "-o", "x.sqsh", uri),
            ("create", "-n", "box", uri),
            ("load", "-n", "other", uri),
            ("start", uri, "sh", "-c", "env; cat /etc/rc"),
            ("start", "--explain", uri, "true"),
            ("digest", uri),
            ("inspect", uri),
        ):
            done = user.penroot(*words)
            outputs += [done.stdout, done.stderr]
            assert done.stderr.count("[WARN] all users of this node can see a password in a reference") == 1
            assert f"penroot login --username USER {server.host}" in done.stderr
        assert server.logins == {f"me:{SECRET}", wants} and not mirror.logins
        assert SECRET not in "".join(outputs) and events.exists()
        for path in user.home.rglob("*"):
            if path.is_file() and not path.is_symlink():
                assert SECRET.encode() not in path.read_bytes(), path


@pytest.mark.parametrize("image", ["x@sha256:12", "X", "x:a:b", "x:1"])
def test_password_in_a_reference_is_in_no_error(user: User, image: str) -> None:
    for form in (f"docker://me:{SECRET}@127.0.0.1:1#{image}", f"me:{SECRET}@127.0.0.1:1#{image}"):
        for verb in ("digest", "import", "load", "inspect", "create", "start"):
            if form.startswith("docker://") or verb in ("digest", "import", "load"):
                assert SECRET not in user.penroot(verb, form, status=1).stderr


def test_wrong_password_in_a_reference_is_named_by_its_place(user: User) -> None:
    """The error blames the login of the command line, not the stored one, and does not print the password."""
    with fake(lambda request: Reply(401, {"WWW-Authenticate": "Basic realm=x"}), bind="127.0.0.2") as server:
        credentials(user, server.host)
        stderr = user.penroot("digest", f"docker://me:wrong@{server.host}#{NAME}:1", status=1).stderr
        assert "the login of 'me' from the command line is refused" in stderr and "wrong" not in stderr
        assert server.logins == {"me:wrong"}


def test_password_in_a_reference_is_in_no_lock_file(user: User) -> None:
    stderr = user.penroot("lock", "./images.lock", f"me:{SECRET}@127.0.0.1:1#{NAME}:1", status=1).stderr
    assert "passwords are not accepted here" in stderr and SECRET not in stderr
    assert not (user.home / "images.lock").exists()


@pytest.mark.security("G6")
def test_no_secret_is_seen(user: User) -> None:
    """No secret appears in the debug log, errors, --explain, arguments of processes or the variables of hooks."""
    seen = user.home / "seen"
    hook = user.home / "etc/hooks.d/50-see.sh"
    hook.parent.mkdir(parents=True)
    hook.write_text(f"#!/bin/sh\nenv >> {seen}\ncat /proc/*/cmdline 2>/dev/null | tr '\\0' ' ' >> {seen}\n")
    hook.chmod(0o755)
    with fake(bind="127.0.0.2") as server:
        # While the credential command runs, it lists the arguments of all processes.
        command = f"cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' >> {seen}; S={SECRET}; printf %s $S"
        write_setting(user, ".credentials", f"machine {server.host} login me password $({command})\n")
        has = registry_of(
            Image([Layer(images.tar([entry("etc/hostname")]))], {}, OCI), "t0ken", f"http://{server.host}/token"
        )
        server.answer = (
            lambda request: token_server(token="t0ken")(request) if "/token" in request.path else has(request)
        )
        env = {"PENROOT_DEBUG": "1"}
        stderr = user.penroot("create", "-n", "box", server.uri, env=env).stderr
        started = user.penroot("start", "--explain", "box", "true", env=env)
        assert server.logins == {f"me:{SECRET}", "t0ken"}
        everything = stderr + started.stdout + started.stderr + seen.read_text()
        assert "DEBUG" in stderr and SECRET not in everything and "t0ken" not in everything


# -- registries that do not answer


@contextlib.contextmanager
def silent(bind: str = "127.0.0.4") -> Iterator[str]:
    """Yield an address that neither accepts nor refuses connections, like a firewall: the listener's queue is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((bind, 0))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield "{}:{}".format(*listener.getsockname())


def timed(user: User, *arguments: str, **options: object) -> tuple[float, str]:
    """Return the seconds that a command takes, and its stderr."""
    began = time.monotonic()
    done = user.penroot(*arguments, **options)
    return time.monotonic() - began, done.stderr


@pytest.fixture
def stored(user: User) -> Iterator[Fake]:
    """Yield a registry whose image the user has stored."""
    with fake(bind="127.0.0.2") as server:
        server.answer = registry_of(images.busybox())
        user.penroot("create", "-n", "first", server.uri)
        yield server


def hang(server: Fake) -> Callable[[Request], Reply]:
    def answer(request: Request) -> Reply:
        server.over.wait()
        return Reply(503)

    return answer


def trickle(server: Fake) -> Callable[[Request], Reply]:
    """Return a registry whose answer arrives a byte at a time."""

    def answer(request: Request) -> Reply:
        with contextlib.suppress(OSError):
            while not server.over.wait(0.2):
                server.sockets[-1].sendall(b"H")
        return Reply(503)

    return answer


def challenge_and_hang(server: Fake) -> Callable[[Request], Reply]:
    """Return a registry that asks for a token, and issues none."""
    wait = hang(server)
    challenge = Reply(401, {"WWW-Authenticate": f'Bearer realm="http://{server.host}/token"'})
    return lambda request: wait(request) if "/token" in request.path else challenge


def move_and_hang(server: Fake) -> Callable[[Request], Reply]:
    """Return a registry that reports a moved tag without its new digest."""
    wait = hang(server)
    moved = Reply(200, {"Docker-Content-Digest": "sha256:" + "0" * 64})
    return lambda request: moved if request.method == "HEAD" else wait(request)


@pytest.mark.security("G8")
@pytest.mark.parametrize(
    "how",
    [hang, trickle, challenge_and_hang, move_and_hang],
    ids=["hangs", "trickles", "gives no token", "says that the tag has moved"],
)
def test_stored_image_does_not_wait_for_a_registry_that_hangs(
    user: User, stored: Fake, how: Callable[[Fake], Callable[[Request], Reply]]
) -> None:
    """Before the fix, starts of a stored image waited 154 s."""
    stored.answer = how(stored)
    took, stderr = timed(user, "start", stored.uri, "true")
    assert took < PROMPT_S and "using the stored image" in stderr


@pytest.mark.security("G8")
def test_stored_image_does_not_wait_for_silence(user: User, stored: Fake) -> None:
    """A firewall drops packets to the proxy or mirror. Before the fix, starts waited 90 s."""
    with silent() as nobody:
        took, stderr = timed(user, "start", stored.uri, "true", env={"http_proxy": nobody, "https_proxy": nobody})
        assert took < PROMPT_S and "using the stored image" in stderr
        write_setting(user, "registries.conf", f"{stored.host} mirror={nobody}\n")
        assert timed(user, "start", stored.uri, "true")[0] < PROMPT_S


def test_program_that_knows_a_login_may_take_longer(user: User, stored: Fake) -> None:
    """The credential command is slow, not the registry: the stored image is still compared with the registry's."""
    stored.answer = registry_of(images.busybox(), "a-token", f"http://{stored.host}/token")
    write_setting(user, ".credentials", f"machine {stored.host} login me password $(sleep 3; echo {SECRET})\n")
    has, tokens = stored.answer, token_server()
    stored.answer = lambda request: tokens(request) if "/token" in request.path else has(request)
    took, stderr = timed(user, "start", stored.uri, "true")
    assert took > 3 and "using the stored image" not in stderr and stored.logins == {f"me:{SECRET}", "a-token"}


@pytest.mark.security("G8")
def test_stored_image_does_not_wait_for_names(user: User, stored: Fake) -> None:
    """The name server does not answer, and a blocked resolver cannot be interrupted within the process."""
    require(os.geteuid() == 0, "only root can listen on port 53")
    with fake(registry_of(images.busybox()), bind="127.0.0.1") as named, socket.socket(type=socket.SOCK_DGRAM) as dns:
        uri = f"docker://registry.test:{named.host.rpartition(':')[2]}/{NAME}:1"
        dns.bind((own_address(), 53))
        hosts, resolver = user.home / "hosts", user.home / "resolv.conf"
        hosts.write_text("127.0.0.1 registry.test\n")
        resolver.write_text(f"nameserver {own_address()}\n")
        inside = f'mount --bind {hosts} /etc/hosts && mount --bind {resolver} /etc/resolv.conf && exec "$@"'
        prefix = ("unshare", "--mount", "sh", "-c", inside, "-")
        env = {"ENROOT_ALLOW_HTTP": "yes"}
        user.penroot("create", "-n", "named", uri, prefix=prefix, env=env)
        hosts.write_text("")
        took, stderr = timed(user, "start", uri, "true", prefix=prefix, env=env)
        assert took < PROMPT_S and "using the stored image" in stderr


@pytest.mark.parity("all_proxy")
def test_proxy_that_refuses_is_named(user: User) -> None:
    """A proxy refuses CONNECT: the error blames the proxy, not the registry, and hides the proxy's password."""
    with fake(lambda request: Reply(403), bind="127.0.0.3") as proxy:
        env = {"https_proxy": f"http://me:{SECRET}@{proxy.host}"}
        stderr = user.penroot("digest", "docker://registry.test/x:1", status=1, env=env).stderr
        assert f"through the proxy {proxy.host}: Tunnel connection failed: 403" in stderr and SECRET not in stderr
        assert proxy.seen[0].headers["proxy-authorization"]


@pytest.mark.parity("all_proxy")
def test_networks_in_no_proxy(user: User) -> None:
    """no_proxy=10.0.0.0/8, which many sites use, keeps requests to the site's registries off the proxy."""
    with fake(registry_of(image_of()), bind="127.0.0.2") as server, fake(bind="127.0.0.3") as proxy:
        for proxied, through in (("127.0.0.0/29", False), ("10.0.0.0/8, 127.0.0.2", False), ("127.0.0.128/25", True)):
            before = len(proxy.seen)
            env = {"http_proxy": proxy.host, "https_proxy": proxy.host, "no_proxy": proxied}
            user.penroot("digest", server.uri, env=env, status=int(through))
            assert (len(proxy.seen) > before) == through


# -- redirects


@pytest.fixture
def address() -> str:
    """Return a non-loopback address of this machine, for a registry that counts as remote."""
    with socket.socket(type=socket.SOCK_DGRAM) as s, contextlib.suppress(OSError):
        s.connect(("192.0.2.1", 9))  # nothing is sent
        return str(s.getsockname()[0])
    require(False, "this machine has no network")
    raise AssertionError


@pytest.mark.security("G4")
@pytest.mark.parametrize("target", ["127.0.0.1", "localhost", "0x7f000001", "[::ffff:127.0.0.1]", "0"])
def test_registry_cannot_redirect_to_this_machine(user: User, address: str, target: str) -> None:
    """A redirect or a realm points to this machine, whose services may trust local requests. It is refused.

    The same holds for a link-local address, such as that of a cloud's metadata service.
    """
    env = {"ENROOT_ALLOW_HTTP": "yes", "ENROOT_TRANSFER_RETRIES": "0"}
    with fake(lambda request: Reply(200, {}, b"{}")) as here, fake(bind=address) as away:
        there = f"http://{target}:{here.host.rpartition(':')[2]}/x"
        for reply in (
            Reply(307, {"Location": there}),
            Reply(401, {"WWW-Authenticate": f'Bearer realm="{there}"'}),
        ):
            away.answer = lambda request, reply=reply: reply  # type: ignore[misc]
            stderr = user.penroot("digest", away.uri, status=1, env=env).stderr
            assert here.seen == [] and ": this machine or a link-local address" in stderr
        # A registry on this machine may redirect to this machine, as site registries do.
        here.answer = registry_of(image_of())
        with fake(lambda request: Reply(307, {"Location": there + request.path}), bind="127.0.0.2") as near:
            user.penroot("digest", near.uri, env=env)


@pytest.mark.security("G4")
def test_redirects_come_to_an_end_and_stay_secure(user: User) -> None:
    """Redirects in a circle end, redirects to other schemes are refused, and cookies are not kept."""
    with fake(bind="127.0.0.2") as server, fake(bind="127.0.0.3") as other:
        env = {"ENROOT_TRANSFER_RETRIES": "0"}
        for target in ("", "?again", f"http://{server.host}/", f"//{server.host}/x", "./.", "http:"):
            server.answer = lambda request, target=target: Reply(307, {"Location": target, "Set-Cookie": "a=b"})  # type: ignore[misc]
            del server.seen[:]
            user.penroot("digest", server.uri, status=1, env=env)
            assert len(server.seen) <= 20 and not any("cookie" in request.headers for request in server.seen)
        for scheme in ("file", "ftp", "gopher", "data", "javascript"):
            server.answer = lambda request, scheme=scheme: Reply(
                307, {"Location": f"{scheme}://{other.host}/etc/passwd"}
            )  # type: ignore[misc]
            stderr = user.penroot("digest", server.uri, status=1, env=env).stderr
            assert "bad address" in stderr and other.seen == []


@pytest.mark.security("G4")
def test_redirect_from_https_to_http_is_refused(user: User) -> None:
    directory = pathlib.Path(tempfile.mkdtemp(prefix="penroot-ca-", dir="/var/tmp"))
    try:
        directory.chmod(0o755)
        ca, tls = authority(directory)
        with fake(bind="127.0.0.3") as other, fake(tls=tls) as server:
            credentials(user, server.host, other.host)
            env = {"SSL_CERT_FILE": str(ca), "ENROOT_TRANSFER_RETRIES": "0", "ENROOT_ALLOW_HTTP": "yes"}
            for reply in (
                Reply(307, {"Location": f"http://{other.host}/x"}),
                Reply(401, {"WWW-Authenticate": f'Bearer realm="http://{other.host}/x"'}),
                Reply(401, {"WWW-Authenticate": f'Bearer realm="http://{server.host}/x"'}),
            ):
                server.answer = lambda request, reply=reply: reply  # type: ignore[misc]
                stderr = user.penroot("digest", server.uri, status=1, env=env).stderr
                assert "does not use https" in stderr and other.seen == [] and server.logins == set()
    finally:
        shutil.rmtree(directory)


# -- endless and false answers


@pytest.mark.security("G7")
@pytest.mark.parametrize("what", ["100 Continue", "headers", "a status", "chunks", "a token", "tags", "a manifest"])
def test_answer_without_end_is_left(user: User, what: str) -> None:
    """Without limits, an endless answer would block a process for ever, or fill its memory."""

    def answer(request: Request) -> Reply:
        if what == "tags" and "/tags/" in request.path:
            return Reply(200, {}, b'{"tags": 5}' if len(server.seen) < 9 else b"[" * (1 << 20))
        if what == "tags":
            return Reply(404)
        if what == "a token" and "/token" not in request.path:
            return Reply(401, {"WWW-Authenticate": f'Bearer realm="http://{server.host}/token"'})
        start, more = {
            "100 Continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
            "headers": (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
            "a status": (b"HTTP/1.1 200 ", b"x"),
            "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n"),
        }.get(what, (b"HTTP/1.1 200 OK\r\n\r\n", b"{" * 100))
        with contextlib.suppress(OSError):
            server.sockets[-1].sendall(start)
            while not server.over.is_set():
                server.sockets[-1].sendall(more * 5000)
        return Reply(raw=b" ")

    with fake(answer, bind="127.0.0.2") as server:
        env = {"ENROOT_TRANSFER_RETRIES": "0"}
        limits = ("prlimit", "--as=600000000")
        took, stderr = timed(user, "digest", server.uri, status=1, env=env, prefix=limits)
        assert took < 20 and "Traceback" not in stderr and len(stderr) < 2000


@pytest.mark.security("G7")
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "gzip, gzip", "gzip, gzip, gzip, gzip, gzip, gzip, gzip"])
@pytest.mark.parametrize("path", ["/manifests/", "/token"])
def test_compressed_answer_does_not_fill_the_memory(user: User, encoding: str, path: str) -> None:
    """A manifest or a token expands to 2 GB, from 9 MB of gzip, or from some kilobytes of nested gzip."""
    # The data between two flushes can be repeated. A reader never reaches the checksum at the end.
    pack = zlib.compressobj(1, zlib.DEFLATED, 15 if encoding == "deflate" else 31)
    head = pack.compress(b"{") + pack.flush(zlib.Z_FULL_FLUSH)
    bomb = head + (pack.compress(bytes(1 << 24)) + pack.flush(zlib.Z_FULL_FLUSH)) * 120
    for _ in range(encoding.count(",")):
        bomb = gzip.compress(bomb)

    def answer(request: Request) -> Reply:
        if path in request.path:
            return Reply(200, {"Content-Encoding": encoding}, bomb)
        return Reply(401, {"WWW-Authenticate": f'Bearer realm="http://{server.host}/token"'})

    with fake(answer, bind="127.0.0.2") as server:
        env = {"ENROOT_TRANSFER_RETRIES": "0"}
        took, stderr = timed(user, "digest", server.uri, status=1, env=env, prefix=("prlimit", "--as=600000000"))
        assert took < 20 and "Traceback" not in stderr and "MemoryError" not in stderr


# -- web pages of a login portal, a proxy, or a host without a registry

HTML = b"<!doctype html><title>Sign in</title>" + b"<p>sign in</p>" * 100
PAGES = {
    "html": Reply(200, {"Content-Type": "text/html; charset=utf-8"}, HTML),
    "no type": Reply(200, {}, b"\xef\xbb\xbf\n <HTML>" + HTML),
    "short": Reply(200, {"Content-Type": "text/html"}, b"<!-- portal -->"),
    "words": Reply(200, {"Content-Type": "text/html"}, b"Please sign in."),
    "empty": Reply(200, {"Content-Type": "text/html"}),
}


def paged(part: str, page: Reply, image: Image) -> Callable[[Request], Reply]:
    """Return the handler of a registry that sends ``page`` instead of the answers of the kind ``part``."""
    has, config = registry_of(image), images.digest(image.config())
    parts = {
        "manifest": "/manifests/",
        "config": f"/blobs/{config}",
        "blob": f"/blobs/{images.digest(image.layers[0].blob)}",
        "tag list": "/tags/list",
        "token": "/token",
    }

    def answer(request: Request) -> Reply:
        if parts[part] in request.path:
            return page
        if part == "token" and not request.login:
            return Reply(401, {"WWW-Authenticate": f'Bearer realm="http://{request.headers["host"]}/token"'})
        return Reply(404) if part == "tag list" else has(request)

    return answer


@pytest.mark.parametrize("moved", [False, True], ids=["here", "redirected"])
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("part", ["manifest", "config", "blob", "tag list", "token"])
def test_web_page_instead_of_an_answer_is_named(user: User, part: str, page: str, moved: bool) -> None:
    if part == "blob" and page in ("no type", "words", "empty"):
        pytest.skip("a blob may begin with anything")
    with fake(bind="127.0.0.2") as server, fake(lambda request: PAGES[page], bind="127.0.0.3") as portal:
        away = Reply(302, {"Location": f"http://{portal.host}/login?secret={SECRET}"})
        server.answer = paged(part, away if moved else PAGES[page], images.busybox())
        env = {"ENROOT_TRANSFER_RETRIES": "3"}
        took, stderr = timed(user, "import", "-o", "x.sqsh", server.uri, status=1, env=env)
        address = f"http://{portal.host}/login)" if moved else f"(http://{server.host}/"
        assert f"[ERROR] {server.host} answered with a web page (" in stderr and address in stderr, stderr
        assert "[HINT]" in stderr and "proxy" in stderr and SECRET not in stderr and took < PROMPT_S
        assert stderr.count("[ERROR]") == stderr.count("[HINT]") == 1


def test_web_page_does_not_keep_a_stored_image(user: User, stored: Fake) -> None:
    """A login portal counts as a registry that does not answer: the stored image is used."""
    stored.answer = lambda request: PAGES["html"]
    for words in (("start", stored.uri, "true"), ("create", "-n", "second", stored.uri)):
        stderr = user.penroot(*words).stderr
        assert f"{stored.host} answered with a web page" in stderr and "using the stored image" in stderr


def test_after_a_web_page_of_a_mirror_comes_the_registry(user: User) -> None:
    with fake(lambda request: PAGES["html"], bind="127.0.0.3") as mirror, fake(bind="127.0.0.2") as server:
        server.answer = registry_of(images.busybox())
        write_setting(user, "registries.conf", f"{server.host} mirror={mirror.host}\n")
        assert f"{mirror.host} answered with a web page" in user.penroot("import", "-o", "x.sqsh", server.uri).stderr


@pytest.mark.parametrize("part", [".sig", "/referrers/"])
def test_web_page_instead_of_signatures_is_named(user: User, part: str) -> None:
    image = images.busybox()
    has = registry_of(image)
    with fake(bind="127.0.0.2") as server:
        server.answer = lambda request: (
            PAGES["html"] if part in request.path else Reply(404) if ".sig" in request.path else has(request)
        )
        write_policy(user, signed_by(SIGNER.write(user.home / "etc/keys/cosign.pub")))
        stderr = user.penroot("import", "-o", "x.sqsh", server.uri, status=1).stderr
        assert f"{server.host} answered with a web page" in stderr


def test_web_page_does_not_count_as_a_login(user: User) -> None:
    with fake(lambda request: PAGES["html"], bind="127.0.0.2") as server:
        done = user.run("sh", "-c", f"echo {SECRET} | {PREFIX}/bin/penroot login -u me {server.host}", status=1)
        assert f"{server.host} answered with a web page" in done.stderr
        assert not (user.home / ".docker").exists()


@pytest.mark.parametrize("status", [400, 403, 404, 407])
@pytest.mark.parametrize("is_page", [True, False], ids=["page", "words"])
def test_refusal_of_another_server_blames_no_login(user: User, status: int, is_page: bool) -> None:
    """A firewall lets a node reach the registry, but not the server with the registry's blobs."""
    image = images.busybox()
    refusal = Reply(status, {"Content-Type": "text/html"}, HTML) if is_page else Reply(status, {}, b"<Error>no</Error>")
    with fake(bind="127.0.0.2") as server, fake(lambda request: refusal, bind="127.0.0.3") as storage:
        away = Reply(307, {"Location": f"http://{storage.host}/data?secret={SECRET}"})
        has = registry_of(image, "a-token", f"http://{server.host}/token")
        give = token_server()
        layer = images.digest(image.layers[0].blob)
        server.answer = lambda request: (
            give(request) if "/token" in request.path else away if layer in request.path else has(request)
        )
        credentials(user, "127.0.0.2")
        stderr = user.penroot("import", "-o", "x.sqsh", server.uri, status=1).stderr
        assert f"[ERROR] {status} from {storage.host}, to which {server.host} redirects: " in stderr
        assert "expired" not in stderr and "denied" not in stderr and SECRET not in stderr
        assert storage.logins == set()


@pytest.mark.parametrize("status", [400, 403, 404, 500])
def test_web_page_of_a_refusal_is_not_printed(user: User, status: int) -> None:
    with fake(lambda request: Reply(status, {"Content-Type": "text/html"}, HTML), bind="127.0.0.2") as server:
        env = {"ENROOT_TRANSFER_RETRIES": "0"}
        stderr = user.penroot("digest", server.uri, status=1, env=env).stderr
        assert "<" not in stderr and "[ERROR]" in stderr


def test_blob_that_looks_like_a_page_is_a_blob(user: User) -> None:
    """An answer is no web page because of its content type alone: file servers know few types."""
    image = images.busybox()
    has = registry_of(image)

    def answer(request: Request) -> Reply:
        reply = has(request)
        return Reply(reply.status, {**reply.headers, "Content-Type": "text/html"}, reply.body)

    with fake(answer, bind="127.0.0.2") as server:
        user.penroot("import", "-o", "x.sqsh", server.uri)


# -- indexes without platforms, and layers with URLs


def test_platform_of_an_entry_without_one_is_in_its_config(user: User) -> None:
    """An index whose entries name no platform must not yield an image for another architecture."""
    other = Image(image_of().layers, {}, OCI, architecture="riscv64")
    ours = image_of()
    entries = [{"mediaType": OCI["manifest"], "digest": i.digest(), "size": len(i.manifest())} for i in (other, ours)]

    def index_of(*some: object) -> Callable[[Request], Reply]:
        index = json.dumps({"schemaVersion": 2, "mediaType": OCI["index"], "manifests": some}).encode()
        of_other, of_ours = registry_of(other), registry_of(ours)

        def answer(request: Request) -> Reply:
            if request.path.endswith("/1"):
                return Reply(200, {"Content-Type": OCI["index"]}, index)
            if other.digest() in request.path or images.digest(other.config()) in request.path:
                return of_other(request)
            return of_ours(request)

        return answer

    with fake(index_of(*entries), bind="127.0.0.2") as server:
        assert user.penroot("digest", server.uri).stdout.strip() == ours.digest()
        assert user.penroot("digest", "--arch", "riscv64", server.uri).stdout.strip() == other.digest()
        server.answer = index_of(entries[0])
        assert "available platforms: linux/riscv64" in user.penroot("digest", server.uri, status=1).stderr


@pytest.mark.security("G7")
def test_layer_that_is_elsewhere_is_fetched_from_there(user: User) -> None:
    """A layer with ``urls`` is fetched from them, only with TLS and without a login, and checked against its digest."""
    image = images.busybox()
    document = json.loads(image.manifest())
    layer = image.layers[0]
    directory = pathlib.Path(tempfile.mkdtemp(prefix="penroot-ca-", dir="/var/tmp"))
    try:
        directory.chmod(0o755)
        ca, tls = authority(directory)
        with fake(tls=tls) as elsewhere, fake(bind="127.0.0.2") as server:
            credentials(user, elsewhere.host, "127.0.0.1", server.host)
            env = {"SSL_CERT_FILE": str(ca), "ENROOT_TRANSFER_RETRIES": "0"}
            has = registry_of(image)

            def answer(request: Request) -> Reply:
                if request.path.endswith(images.digest(layer.blob)):
                    return Reply(404)
                if "/manifests/" in request.path:
                    return Reply(200, {"Content-Type": OCI["manifest"]}, json.dumps(document).encode())
                return has(request)

            def named(*urls: str) -> None:
                document["layers"][0]["urls"] = urls
                document["layers"][0]["mediaType"] = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"

            server.answer = answer
            elsewhere.answer = lambda request: Reply(200, {}, layer.blob + b"!")
            named(f"https://{elsewhere.host}/layer")
            user.penroot("create", "-n", "box", server.uri, env=env, status=1)
            elsewhere.answer = lambda request: Reply(200, {}, layer.blob)
            for url in (f"http://{elsewhere.host}/x", f"https://me:pw@{elsewhere.host}/x", "file:///etc/passwd"):
                named(url)
                stderr = user.penroot("create", "-n", "box", server.uri, env=env, status=1).stderr
                assert "from the URLs in its manifest" in stderr and "pw@" not in stderr
            named("https://127.0.0.1:1/gone", f"https://{elsewhere.host}/layer")
            user.penroot("create", "-n", "box", server.uri, env=env)
            assert elsewhere.seen and elsewhere.logins == set()
    finally:
        shutil.rmtree(directory)


# -- images in local files


def layout_of(directory: pathlib.Path, image: Image) -> pathlib.Path:
    blobs = [*(layer.blob for layer in image.layers), image.config(), image.manifest()]
    index = {"digest": image.digest(), "size": len(image.manifest()), "mediaType": OCI["manifest"]}
    images.write_layout(directory, blobs, json.dumps({"schemaVersion": 2, "manifests": [index]}).encode())
    return directory


@pytest.mark.security("G7")
@pytest.mark.parametrize("name", ["index.json", "config", "layer", "blobs"])
@pytest.mark.parametrize("absolute", [True, False])
def test_link_in_a_layout_does_not_lead_out_of_it(user: User, name: str, absolute: bool) -> None:
    """In another user's layout, index.json or a blob is a link to a file of the user who reads the layout."""
    image = images.busybox()
    layout = layout_of(user.home / "layout", image)
    path = {
        "config": f"blobs/sha256/{images.digest(image.config())[7:]}",
        "layer": f"blobs/sha256/{images.digest(image.layers[0].blob)[7:]}",
    }.get(name, name)
    outside = user.home / "outside"
    (layout / path).rename(outside)
    inside = "../" * path.count("/")
    (layout / path).symlink_to(outside if absolute else f"{inside}../outside")
    user.own(user.home)
    stderr = user.penroot("create", "-n", "box", f"oci:{layout}", status=1).stderr
    assert "leads out of the layout" in stderr and "cp -rL" in stderr
    outside.rename(layout / "inside")  # a link that stays inside is allowed
    (layout / path).unlink()
    (layout / path).symlink_to(inside + "inside")
    user.penroot("create", "-n", "box", f"oci:{layout}")


@pytest.mark.security("G7")
def test_fifo_in_place_of_an_archive_is_refused_at_once(user: User) -> None:
    """A FIFO as an archive would block its reader, and /dev/zero would never end."""
    os.mkfifo(user.home / "fifo")
    user.own(user.home / "fifo")
    for scheme in ("docker-archive", "oci-archive"):
        assert "not a regular file" in user.penroot("create", f"{scheme}:{user.home}/fifo", status=1).stderr
        assert "not a regular file" in user.penroot("create", f"{scheme}:/dev/zero", status=1).stderr


@pytest.mark.security("G7")
@pytest.mark.parametrize("how", ["back", "a large header", "global headers", "members"])
def test_archive_without_end_is_left(user: User, how: str) -> None:
    """The headers of an archive lead back, take gigabytes, or never end."""
    path = user.home / "hostile.tar"
    with path.open("wb") as f:
        if how == "back":
            member = tarfile.TarInfo("a")
            member.pax_headers = {"size": "-1024"}
            f.write(member.tobuf(tarfile.PAX_FORMAT) * 2)
        elif how == "a large header":
            header = tarfile.TarInfo("a")
            header.type, header.size = tarfile.XHDTYPE, 3 << 30
            f.write(header.tobuf(tarfile.USTAR_FORMAT))
            f.truncate(4 << 30)
        elif how == "global headers":
            for number in range(4):
                records = {f"k{number}.{key}": "v" for key in range(1000)}
                f.write(tarfile.TarInfo.create_pax_global_header(records) + tarfile.TarInfo("a").tobuf())
        else:
            f.write(tarfile.TarInfo("a").tobuf() * 150_000)
        f.write(bytes(1024))
    user.own(path)
    limits = ("prlimit", "--as=1000000000")
    took, stderr = timed(user, "create", f"docker-archive:{path}", status=1, prefix=limits)
    assert took < 30 and "not a tar archive" in stderr and "Traceback" not in stderr


@pytest.mark.security("G7")
def test_names_in_an_archive_mean_what_is_in_it(user: User) -> None:
    """manifest.json names a config or a layer by a path of the host."""
    config = json.dumps({"rootfs": {"diff_ids": ["sha256:" + "0" * 64]}}).encode()
    for target in ("/etc/passwd", "../../../../../../etc/passwd", "link"):
        described = json.dumps([{"Config": "config", "Layers": [target]}]).encode()
        for document in (described, json.dumps([{"Config": target, "Layers": []}]).encode()):
            members = [entry("manifest.json", document), entry("config", config), images.symlink("link", "/etc/passwd")]
            path = user.home / "odd.tar"
            path.write_bytes(images.tar(members))
            stderr = user.penroot("create", f"docker-archive:{path}", status=1).stderr
            assert "in the archive" in stderr and "root:" not in stderr and "Traceback" not in stderr


def test_password_of_a_proxy_is_not_shown(user: User) -> None:
    """Users send the output of ``penroot info`` around: it must not contain the site's proxy password."""
    conf = user.home / "etc/enroot.conf"
    conf.parent.mkdir()
    conf.write_text(f"https_proxy http://me:{SECRET}@proxy.site:3128\n")
    output = user.penroot("info").stdout
    assert "https_proxy=http://…@proxy.site:3128" in output and SECRET not in output
