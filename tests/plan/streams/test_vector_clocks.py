"""Happens-before of streams and host, against every path that orders two works."""

import random
from collections import defaultdict

import pytest

from recipe_lib.plan.streams.vector_clocks import Clock, VectorClocks
from recipe_lib.plan.tracing.trace import HOST

STREAMS = (0, 1, 2, 3)


@pytest.mark.parametrize("seed", range(30))
def test_one_work_is_before_another_where_a_path_of_waits_leads(seed: int) -> None:
    """The reference: a graph of all works, records and waits, searched."""
    chance, clocks = random.Random(seed), VectorClocks()
    edges: dict[str, set[str]] = defaultdict(set)  # node -> what it comes after
    last = {stream: f"begin {stream}" for stream in (*STREAMS, HOST)}
    recorded: dict[int, str] = {}
    events: dict[int, Clock] = {}
    works: list[tuple[int, int, str]] = []

    def after(stream: int, name: str, *others: str) -> None:
        edges[name] |= {last[stream], *others}
        if stream != HOST:
            edges[name].add(last[HOST])
        last[stream] = name

    def leads(name: str, target: str) -> bool:
        seen, waiting = set(), [name]
        while waiting:
            node = waiting.pop()
            if node == target:
                return True
            if node not in seen:
                seen.add(node)
                waiting += edges[node]
        return False

    for step in range(60):
        kind, stream = (
            chance.choice(["work", "work", "record", "wait", "host", "stream"]),
            chance.choice(STREAMS),
        )
        if kind == "work":
            number = clocks.issue(stream)
            after(stream, f"work {number}")
            works.append((stream, number, f"work {number}"))
        elif kind == "record":
            events[step] = clocks.take_snapshot(stream)
            after(stream, f"record {step}")
            recorded[step] = f"record {step}"
        elif kind == "wait" and recorded:
            event = chance.choice(list(recorded))
            clocks.wait(stream, events[event])
            after(stream, f"wait {step}", recorded[event])
        elif kind == "stream":
            other = chance.choice(STREAMS)
            clocks.wait(stream, clocks.take_snapshot(other))
            after(stream, f"wait {step}", last[other])
        elif kind == "host" and recorded and chance.random() < 0.5:
            event = chance.choice(list(recorded))
            clocks.wait(HOST, events[event])
            after(HOST, f"wait {step}", recorded[event])
        for one, number, name in works:
            for other in STREAMS:
                after_now = f"now {step} {other}"
                edges[after_now] = {last[other], last[HOST]}
                assert clocks.is_before(one, number, other) == leads(after_now, name)
            assert clocks.is_before(one, number, HOST) == leads(last[HOST], name)
