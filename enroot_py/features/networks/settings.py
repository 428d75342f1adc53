"""The settings for networks of containers."""

from __future__ import annotations

from enroot_py.config.table import Bool, FeatureTable, List, Place, rows


class Ports(List):
    """Ports of the host that are forwarded to ports of the container: [IP:]HOST:CONTAINER[/tcp|/udp]."""

    kind = "ports"

    def parse(self, text: str) -> str:
        for word in filter(None, text.split(",")):
            pasta_option(word)
        return text


class NetworkSettings(FeatureTable):
    net_proxy = Place(
        "",
        "Unix socket of an HTTP proxy, as the only connection of a container; needs private network and PID namespaces",
    )
    net_pasta = Bool(
        "no", "connect a private network with the host's network by pasta(1); needs private network and PID namespaces"
    )
    net_publish = Ports("", "ports of the host that pasta forwards to the container: [IP:]HOST:CONTAINER[/udp],…")


SETTINGS = rows(NetworkSettings)


def pasta_option(port: str) -> tuple[str, str]:
    """Return the option of pasta(1) that publishes a port. Raises ValueError."""
    text, _, protocol = port.partition("/")
    host, _, inside = text.rpartition(":")
    ip, _, outside = host.rpartition(":")
    if protocol not in ("", "tcp", "udp"):
        raise ValueError(f"{port}: the protocol must be tcp or udp")
    first, last = _range(inside, port), _range(outside or inside, port)
    if first[1] - first[0] != last[1] - last[0]:
        raise ValueError(f"{port}: the ranges must have the same length")
    address = f"{_address(ip, port)}/" if ip else ""
    return "-u" if protocol == "udp" else "-t", f"{address}{outside or inside}:{inside}"


def _range(text: str, port: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    numbers = [first, last if dash else first]
    if not all(number.isascii() and number.isdecimal() and 0 < int(number) < 1 << 16 for number in numbers):
        raise ValueError(f"{port}: a port is a number from 1 to 65535, or a range such as 8000-8010")
    return int(numbers[0]), int(numbers[1])


def _address(text: str, port: str) -> str:
    from ipaddress import ip_address

    try:
        return str(ip_address(text.removeprefix("[").removesuffix("]")))
    except ValueError:
        raise ValueError(f"{port}: {text} is not an IP address") from None
