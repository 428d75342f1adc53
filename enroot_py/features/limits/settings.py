"""The settings for limits of containers."""

from __future__ import annotations

from enroot_py.config.table import FeatureTable, Float, Int, Size, rows


class Cpus(Float):
    """A number of processors, such as 0.5 or 2. An empty value means no limit."""

    kind = "cpus"

    def parse(self, text: str) -> float:
        if not text:
            return 0.0
        whole, _, fraction = text.partition(".")
        if not (whole + fraction).isdecimal() or not (whole + fraction).isascii() or not 0.01 <= float(text) <= 1e6:
            raise ValueError("must be a number of processors, such as 0.5 or 2")
        return float(text)


class LimitSettings(FeatureTable):
    limit_memory = Size(
        "0", "memory limit for penroot start, such as 500M; a limited container gets no swap space; 0: no limit"
    )
    limit_cpus = Cpus("", "number of processors for penroot start, such as 1.5; empty: no limit")
    limit_pids = Int("0", "maximum number of processes and threads for penroot start; 0: no limit")


SETTINGS = rows(LimitSettings)
