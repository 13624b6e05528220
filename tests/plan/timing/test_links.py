"""Collectives by size: what is taken for other sizes, how a calibration holds them, and what
planning makes of them.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipe_lib.errors import ConfigError
from recipe_lib.plan.hardware import HARDWARE, find_hardware
from recipe_lib.plan.measured.measure_rates import measure_copy_rates, measure_matmul_rate
from recipe_lib.plan.measured.rates_file import add_links, read_calibration
from recipe_lib.plan.timing.cost import Links, compute_collective_seconds, count_wire_bytes
from recipe_lib.plan.tracing.trace import Collective
from tests.plan.timing.test_calibrate import good, written

CARD = replace(HARDWARE["rtx4090"], ranks_per_node=4)
POINTS = {"all_gather": ((100.0, 1e-4), (300.0, 5e-4)), "all_reduce": ((200.0, 3e-4),)}


def test_between_sizes_it_is_straight_and_beyond_them_the_ends() -> None:
    links = Links(2, "nccl", POINTS)
    assert links.seconds("all_gather", 1) == links.seconds("all_gather", 100) == 1e-4
    assert links.seconds("all_gather", 200) == pytest.approx(3e-4)
    assert links.seconds("all_gather", 300) == pytest.approx(5e-4)
    assert links.seconds("all_gather", 900) == pytest.approx(15e-4)  # the bandwidth of the largest
    assert links.seconds("all_reduce", 400) == pytest.approx(6e-4)
    assert (
        links.seconds("send", 200)
        == links.seconds("all_to_all", 200)
        == links.seconds("all_gather", 200)
    )


def test_a_plan_takes_measured_links_inside_a_machine() -> None:
    measured = json.loads(json.dumps(good())) | {"links": None}
    rows = [
        {"operation": name, "bytes": 800, "seconds": 1e-3} for name in ("all_reduce", "all_gather")
    ]
    links = {
        "ranks": 2,
        "backend": "nccl",
        "points": [*rows, {**rows[0], "operation": "reduce_scatter"}],
    }
    values = add_links(measured, links, {"int8": 2e14})
    assert (
        values["link_bandwidth"] == 400 / 1e-3
    )  # an all-gather of 800 bytes sends 400 of each of two ranks

    def seconds(ranks: tuple[int, ...], read: Any, operation: str = "all_gather") -> float:
        return compute_collective_seconds(Collective(operation, "world", ranks, 1600), CARD, read)

    read = read_values(values)
    assert read.matmul["int8"] == (((4096, 14336, 4096), 2e14),)
    assert seconds((0, 1), read) == pytest.approx(2e-3)  # twice the largest size, twice its time
    # Three quarters of 1600 bytes are three times what was measured; two steps more than two ranks
    # take.
    assert seconds((0, 1, 2, 3), read) == pytest.approx(3e-3 + 2 * CARD.link.latency)
    # Up and down a tree of two levels in place of one.
    assert seconds((0, 1, 2, 3), read, "all_reduce") == pytest.approx(3e-3 + 2 * CARD.link.latency)
    assert seconds((0, 4), read) == seconds(
        (0, 4), replace(read, links=None)
    )  # between machines: no longer


def read_values(values: dict[str, Any]) -> Any:
    """What is read of a calibration with these values."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return read_calibration(written(Path(folder), values), CARD)


def test_no_message_takes_less_than_a_smaller_one(tmp_path: Path) -> None:
    rows = [
        {"bytes": 4000, "seconds": 2e-4},
        {"bytes": 400, "seconds": 3e-4},
        {"bytes": 40000, "seconds": 4e-4},
    ]
    links = {
        "ranks": 4,
        "backend": "gloo",
        **dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), rows),
    }
    read = read_values(good() | {"links": links}).links
    assert read.ranks == 4 and read.backend == "gloo"
    assert read.points["all_gather"] == ((300, 3e-4), (3000, 3e-4), (30000, 4e-4))
    assert read.points["all_reduce"][0][0] == count_wire_bytes("all_reduce", 400, 4) == 600


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": 1},
        {"ranks": "two"},
        {"all_gather": []},
        {"all_gather": [{"bytes": 4096}]},
        {"all_reduce": [{"bytes": 4096, "seconds": 0}]},
        {"reduce_scatter": 3},
    ],
)
def test_links_that_are_refused(change: dict[str, Any]) -> None:
    rows = [{"bytes": 4096, "seconds": 1e-4}]
    fine = {
        "ranks": 2,
        "backend": "gloo",
        **dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), rows),
    }
    assert read_values(good() | {"links": fine}).links is not None
    with pytest.raises(
        ConfigError, match="links is no list of bytes and seconds by collective; measure again"
    ):
        read_values(good() | {"links": fine | change})


def test_rates_of_copies_are_read_and_may_be_absent() -> None:
    assert read_values(good()).copy_to_device is None
    read = read_values(good() | {"copy_to_device": 2e10, "copy_to_host": 1e10})
    assert (read.copy_to_device, read.copy_to_host) == (2e10, 1e10)
    with pytest.raises(ConfigError, match="copy_to_host is '0'"):
        read_values(good() | {"copy_to_host": 0})


def test_rates_can_be_measured_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe_lib.plan.measured import measure_rates as module

    monkeypatch.setattr(
        module, "_measure_seconds", lambda work, device: (work(), 0.001)[1]
    )  # one call each
    assert (
        measure_matmul_rate("cpu", "bf16")
        == measure_matmul_rate("cpu", "int8")
        == pytest.approx(2 * 96**3 / 0.001)
    )
    assert measure_copy_rates("cpu") == {
        "copy_to_device": 2**20 / 0.001,
        "copy_to_host": 2**20 / 0.001,
    }
    assert find_hardware("cpu").link.kind == "host"
