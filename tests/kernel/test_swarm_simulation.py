"""Simulate swarms in virtual time. Check their duration and traffic, and that every living node gets the image."""

from __future__ import annotations

import pytest

from benchmarks.swarm.simulation import DETECTION_S, IMAGE, MAX_RATIO, TROUBLE, Run, World, large, last_of


@pytest.mark.parametrize("nodes", [2, 3, 8, 40])
def test_many_nodes_take_little_longer_than_one(nodes: int) -> None:
    single, swarm = large(1), large(nodes)
    assert len(swarm.ready) == nodes
    assert last_of(swarm) <= MAX_RATIO * last_of(single)
    assert swarm.from_registry <= 1.01 * sum(IMAGE)
    assert max(swarm.uploads) <= 1.4 * sum(IMAGE)


@pytest.mark.parametrize(("nodes", "seed"), [(3, 3), (100, 10)])
def test_slow_fetcher_delays_the_others_little(nodes: int, seed: int) -> None:
    """One of two fetchers, which ask the registry, is slow. Of 100 nodes, the other dies, and a third takes over."""
    outcome = large(nodes, seed, **TROUBLE)
    assert outcome.slow
    assert last_of(outcome) <= MAX_RATIO * last_of(large(1)) + 2 * DETECTION_S
    assert outcome.from_registry <= 1.1 * sum(IMAGE)


def test_dead_and_slow_nodes_delay_the_others_little() -> None:
    outcome = large(60, **{name: 3 * part for name, part in TROUBLE.items()})
    assert outcome.dead
    assert outcome.slow
    assert len(outcome.ready) + len(outcome.dead) == 60
    assert last_of(outcome) <= MAX_RATIO * last_of(large(1)) + 2 * DETECTION_S


@pytest.mark.parametrize(("nodes", "late", "seed"), [(4, 1.0, 4), (8, 2, 1), (16, 5, 2), (16, 20, 5), (8, 60, 0)])
def test_late_node_uploads_its_share(nodes: int, late: float, seed: int) -> None:
    """Nodes join within ``late`` seconds. If late nodes did not upload, early nodes would upload several images."""
    blobs, link = [80_000_000, 70_000_000, 60_000_000, 40_000_000], 3.75e6
    outcome = Run(World(nodes, blobs, link, link, unpack=1e9, late=late, seed=seed)).go()
    assert len(outcome.ready) == nodes
    assert last_of(outcome) <= late + MAX_RATIO * sum(blobs) / link
    assert outcome.from_registry <= 1.01 * sum(blobs)
