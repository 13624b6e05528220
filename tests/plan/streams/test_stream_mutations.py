"""Waits between streams: each one that is taken out is noticed, and what is shipped has all of
them.
"""

import sys
from pathlib import Path

import pytest

from benchmarks import gpu_streams
from recipe_lib.plan.streams.code_lines import format_line
from tests.plan.apart import call_in_fork
from tests.plan.streams.mutations import CASES, check
from tests.selection import mark_slow_but

# By file and text of the line: torch's own that another wait of torch's makes needless, and of ours
# one for torch 2.11.
NEEDLESS = {
    ("_fsdp_state.py", "self._comm_ctx.all_gather_stream.wait_stream(current_stream)"),
    ("_fsdp_state.py", "self._comm_ctx.all_gather_stream.wait_event(all_gather_state.event)"),
    ("_fsdp_state.py", "self._device_handle.current_stream().wait_event(rs_state.event)"),
    ("_fsdp_param_group.py", "self.comm_ctx.all_gather_stream.wait_event(event)"),
    (
        "_fsdp_param_group.py",
        "self.device_handle.current_stream().wait_event(self._post_reduce_event)",
    ),
    ("optimizers.py", "torch.get_device_module(device).current_stream().synchronize()"),
}
# Which have the waits of ours, with the least number of them that each group has.
OURS = [
    (("DDP",), 1),
    (("activation offload, a graph without a backward", "DDP"), 6),
    (("optimizer offload, some without gradients", "layers streamed, stepping in backward"), 10),
]
THOROUGH = (  # which have the other waits of ours, and all of torch's
    "activation offload, half a backward",
    "FSDP, embedding and output of their own",
    "FSDP, CPU offload, two micro-batches",
    "FSDP, CPU offload, stepping in backward",
    "HSDP",
    "pipeline, CPU offload",
)


def missed(names: list[str], only_ours: bool) -> tuple[list[str], dict[str, bool]]:
    """(faults of the cases as they are, by line that waits whether one of them notices when it is
    gone).

    only_ours: lines of the library; otherwise all but the needless ones.
    """
    faults: list[str] = []
    noticed: dict[tuple[str, int], bool] = {}
    for name in names:
        checker, waits = check(name)
        faults += checker.list_faults()
        for line in waits:
            left_out = (
                not format_line(line).startswith("recipe_lib/")
                if only_ours
                else is_needless(format_line(line))
            )
            if noticed.get(line) or left_out:
                continue
            noticed[line] = bool(check(name, line)[0].list_faults())
    return faults, {format_line(line): found for line, found in noticed.items()}


def is_needless(place: str) -> bool:
    file, _, number = place.rpartition(":")
    path = next(path for root in (Path(), *map(Path, sys.path)) if (path := root / file).is_file())
    return (
        path.name,
        path.read_text(encoding="utf-8").splitlines()[int(number) - 1].strip(),
    ) in NEEDLESS


@pytest.mark.parametrize(("names", "least"), mark_slow_but(OURS, 1))
def test_every_wait_of_ours_is_needed_and_noticed(names: tuple[str, ...], least: int) -> None:
    faults, noticed = call_in_fork(missed, list(names), True)
    assert not faults
    assert len(noticed) >= least
    assert all(noticed.values()), noticed


@pytest.mark.slow
def test_so_is_every_other_wait() -> None:
    faults, noticed = call_in_fork(missed, list(THOROUGH), False)
    assert not faults
    assert len(noticed) > 20
    assert all(noticed.values()), noticed


def steps_for_real(name: str) -> bool:
    gpu_streams.run(CASES[name])
    return True


@pytest.mark.benchmark
def test_the_gpu_part_goes_through_its_steps() -> None:
    """On a CPU, where nothing is counted: what the check of a GPU runs, as rank 0 of a fake
    group.
    """
    assert call_in_fork(steps_for_real, "pipeline, zbv")
