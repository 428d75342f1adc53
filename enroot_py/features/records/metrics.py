"""``penroot cache metrics``: metrics of the store and of event records for node_exporter's textfile collector.

Source of the format: Prometheus, "Exposition formats", text-based. Other users may be able to write to the file of
records, so a word of a record becomes a label only if this module knows the word.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator

from enroot_py.base import log, making
from enroot_py.base.errors import PenrootError
from enroot_py.config.settings import Settings
from enroot_py.features.records import events
from enroot_py.features.records.settings import RecordSettings
from enroot_py.store import containers, inventory
from enroot_py.store.store import Store

# Name: type, help text.
METRICS = {
    "penroot_store_images": ("gauge", "images in the store"),
    "penroot_store_layers": ("gauge", "layers in the store"),
    "penroot_store_bytes": ("gauge", "unpacked size of the store"),
    "penroot_store_limit_bytes": ("gauge", "the setting cache_limit, 0 for none"),
    "penroot_containers": ("gauge", "containers under the data path"),
    "penroot_events_total": ("counter", "event records, by event and result"),
    "penroot_seconds_total": ("counter", "seconds of the event records, by event"),
    "penroot_phase_seconds_total": ("counter", "seconds of the event records, by event and phase"),
    "penroot_pulls_total": ("counter", "pulls, by cache result: hit, part, miss"),
    "penroot_pulled_bytes_total": ("counter", "bytes of downloaded layers"),
}
_MAX_RECORD_BYTES = 16384  # our records are shorter

Sample = tuple[str, tuple[tuple[str, str], ...]]  # a metric, and its labels


def text(settings: Settings) -> str:
    """Return all metrics with their headers. Raises PenrootError."""
    samples: defaultdict[Sample, float] = defaultdict(float)
    store = Store(settings.cache_path)
    for name, number in zip(("images", "layers", "bytes"), inventory.total(store), strict=True):
        samples[f"penroot_store_{name}", ()] = number
    samples["penroot_store_limit_bytes", ()] = settings.cache_limit
    samples["penroot_containers", ()] = len(containers.names(settings))
    for record in _records(RecordSettings(settings).events):
        _count(record, samples)
    user = (("user", str(events.who()["user"])),)
    out = []
    for name, (kind, meaning) in METRICS.items():
        out += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
        rows = sorted((labels, value) for (metric, labels), value in samples.items() if metric == name)
        out += [f"{name}{{{_labels((*user, *labels))}}} {value:.15g}" for labels, value in rows]
    return "\n".join(out) + "\n"


def write(path: str, content: str) -> None:
    """Replace a file by rename: a collector never reads a partial file. Raises PenrootError."""
    try:
        making.write(path, content.encode(errors="surrogateescape"), 0o644)
    except OSError as e:
        raise PenrootError(
            f"cannot write {path}: {e.strerror}", hint="choose a file in one of your own directories"
        ) from e


def _labels(labels: tuple[tuple[str, str], ...]) -> str:
    return ",".join(f'{key}="{_escaped(value)}"' for key, value in labels)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _records(where: str) -> Iterator[dict[str, object]]:
    """Yield the records in the caller's file, if any. Invalid lines are skipped."""
    if not where.startswith("/"):
        return
    path = events.file_of(where)
    try:
        with open(events.opened(path, os.O_RDONLY), "rb") as f:
            while line := f.readline(_MAX_RECORD_BYTES):
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(record, dict):
                    yield record
    except FileNotFoundError:
        return
    except OSError as e:
        log.warn(f"records are not counted: {path}: {e.strerror}")


def _count(record: dict[str, object], samples: defaultdict[Sample, float]) -> None:
    kind, result, cache = record.get("event"), record.get("result"), record.get("cache")
    if not isinstance(kind, str) or kind not in events.KINDS or result not in ("ok", "error"):
        return
    event = (("event", kind),)
    samples["penroot_events_total", (*event, ("result", str(result)))] += 1
    samples["penroot_seconds_total", event] += _number(record.get("seconds"))
    phases = record.get("phases")
    for phase, seconds in phases.items() if isinstance(phases, dict) else ():
        if phase in events.PHASES:
            samples["penroot_phase_seconds_total", (*event, ("phase", phase))] += _number(seconds)
    if kind == "pull" and cache in ("hit", "part", "miss"):
        samples["penroot_pulls_total", (("cache", str(cache)),)] += 1
        samples["penroot_pulled_bytes_total", ()] += _number(record.get("bytes", 0))


def _number(value: object) -> float:
    """Return a number of a record, or 0 for an impossible value."""
    # Comparisons with NaN are false. math.isfinite() fails for an integer with too many digits.
    return value if isinstance(value, (int, float)) and 0 <= value < 1e15 else 0
