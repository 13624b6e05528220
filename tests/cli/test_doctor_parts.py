"""The parts of `tune doctor`: processes that may hang, copies that arrive wrong, limits of groups,
folders.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipe_lib.cli import doctor
from recipe_lib.cli.doctor import (
    Step,
    describe_torch,
    list_device_steps,
    measure_host_memory,
    probe_folder,
    run_isolated,
    verify_copies,
)
from recipe_lib.cli.doctor_report import is_in_range
from recipe_lib.plan.measured import measure_rates as calibrate
from recipe_lib.units import GIB

SIZES = (4, 4100)


def no_child_is_left() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG) == (0, 0)  # others of the test process
    except ChildProcessError:
        return True


def test_a_process_goes_on_after_a_step_that_failed() -> None:
    def work(rank: int, folder: Path) -> Iterator[Step]:
        yield "one", lambda: 1
        yield "two", lambda: 1 // 0
        yield "three", lambda: print("nobody reads it") or [3]

    (found,) = run_isolated(work)
    assert found.values == {"one": 1, "three": [3]} and found.failed == {
        "two": "ZeroDivisionError: " + str_of_zero()
    }


def str_of_zero() -> str:
    try:
        return str(1 // 0)
    except ZeroDivisionError as error:
        return str(error)


@pytest.mark.slow
def test_what_hangs_is_ended_and_what_was_found_is_kept() -> None:
    def work(rank: int, folder: Path) -> Iterator[Step]:
        for number in range(3):  # together longer than the limit, which is for each
            yield f"quick {number}", lambda: time.sleep(0.8)
        yield "slow", lambda: signal.pause()
        yield "never", lambda: 1

    (found,) = run_isolated(work, seconds=2)  # without a limit this would never end
    assert list(found.values) == ["quick 0", "quick 1", "quick 2"]
    assert found.failed == {"slow": "not done after 2 s"}
    assert no_child_is_left()


def test_a_process_that_breaks_off_is_told_by_its_signal_or_code() -> None:
    def crash(rank: int, folder: Path) -> Iterator[Step]:
        yield "fine", lambda: 1
        yield "crash", lambda: os.kill(os.getpid(), signal.SIGTERM)

    (found,) = run_isolated(crash)
    assert found.values == {"fine": 1} and found.failed == {"crash": "ended with exit code -15"}
    (found,) = run_isolated(lambda rank, folder: [("leave", lambda: os._exit(9))])
    assert found.failed == {"leave": "ended with exit code 9"}

    def unwritten(rank: int, folder: Path) -> Iterator[Step]:
        raise ValueError("before the first step")
        yield

    (found,) = run_isolated(unwritten)
    assert found.failed == {"start": "ended with exit code 1"}


def test_of_several_all_end_when_one_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipe_lib.cli.doctor.GRACE_SECONDS", 0.2)

    for failing in (0, 1):

        def work(rank: int, folder: Path, failing: int = failing) -> Iterator[Step]:
            yield "meet", lambda: rank
            yield "exchange", lambda: 1 // 0 if rank == failing else signal.pause()
            yield "more", lambda: rank

        outcomes = run_isolated(work, ranks=2, seconds=1)
        assert [outcome.values for outcome in outcomes] == [{"meet": 0}, {"meet": 1}]
        assert outcomes[failing].failed["exchange"].startswith("ZeroDivisionError")
        # what waits for it is not waited for as long as the first
        assert outcomes[1 - failing].failed == {"exchange": f"not done after {failing} s"}
    assert no_child_is_left()


def test_copies_that_arrive_are_right() -> None:
    found = verify_copies("cpu", "cpu", sizes=SIZES)
    assert found["wrong"] == [] and found["rate"] > 0


def ragged(target: torch.Tensor, source: torch.Tensor) -> None:
    target[:1024].copy_(source[:1024])


def shifted(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source.roll(1))


@pytest.mark.parametrize(
    ("copy", "faults"),
    [
        (lambda target, source: target.zero_(), 2),
        (lambda target, source: None, 2),
        (lambda target, source: source.copy_(target), 2),  # the other way round
        (ragged, 1),  # the last word of the second size
        (shifted, 1),  # one word is the same
    ],
    ids=["zeros", "never", "backwards", "ragged", "shifted"],
)
def test_copies_that_arrive_otherwise_are_seen(copy: Any, faults: int) -> None:
    wrong = verify_copies("cpu", "cpu", copy, SIZES)["wrong"]
    assert len(wrong) == faults
    if copy is ragged:
        assert wrong == ["4100 bytes: 1 of 1025 words are others"]


def test_torch_is_described_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    told = describe_torch()
    assert (
        told["version"] == torch.__version__
        and told["gpus"] == []
        and told["cuda"] == torch.version.cuda
    )


class Cards:
    """Stands in for torch.cuda: two cards."""

    nccl = SimpleNamespace(version=lambda: (2, 28, 9))

    def init(self) -> None: ...

    def device_count(self) -> int:
        return 2

    def get_device_capability(self, number: int) -> tuple[int, int]:
        return (8, 9) if number == 0 else (9, 0)

    def get_device_name(self, number: int) -> str:
        return f"card {number}"

    def mem_get_info(self, number: int) -> tuple[int, int]:
        return 3 * GIB, 4 * GIB


def test_cards_are_described_and_every_way_between_them_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: Cards())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    told = describe_torch()
    common = {"memory": 4 * GIB, "free": 3 * GIB}
    assert told["nccl"] == "2.28.9" and told["gpus"] == [
        common | {"name": "card 0", "capability": [8, 9]},
        common | {"name": "card 1", "capability": [9, 0]},
    ]
    monkeypatch.setattr(
        doctor,
        "verify_copies",
        lambda source, target: {"wrong": [f"{source} {target}"], "rate": 1.0},
    )
    found = [
        step() for name, step in list_device_steps(0, Path()) if name.startswith("copies from")
    ]
    assert [way["wrong"] for way in found] == [["cuda:0 cuda:1"], ["cuda:1 cuda:0"]]


def test_each_card_is_measured_and_what_it_cannot_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = {"name": "card", "memory": GIB, "free": GIB, "capability": [8, 6]}
    monkeypatch.setattr(doctor, "describe_torch", lambda: {"gpus": [card, card]})
    monkeypatch.setattr(doctor, "measure_gpu", lambda device: device)
    monkeypatch.setattr(calibrate, "measure_matmul_rate", lambda device, dtype: (device, dtype))
    done = dict(list_device_steps(0, Path()))
    assert done.pop("torch")()["gpus"] == [card, card]
    assert done.pop("torchao") is doctor.import_torchao
    assert done.pop("host memory") is measure_host_memory
    copies = ["copies from GPU 0 to GPU 1", "copies from GPU 1 to GPU 0"]
    assert [
        name for name in list(done) if "GPU 1" in name and "of" not in name and done.pop(name)
    ] == copies
    assert done.pop("calibration").args == ("cuda",)
    assert {name: step() for name, step in done.items()} == {
        "rates of GPU 0": "cuda:0",
        "rates of GPU 1": "cuda:1",
        "int8 matmuls": ("cuda:0", "int8"),
    }


@pytest.mark.parametrize(
    ("package", "version", "expected"),
    [
        ("torch", "2.11.0+cu130", True),
        ("torch", "2.13.1", True),
        ("torch", "2.9.1", False),
        ("torch", "2.15.0", True),
        ("torch", "2.16.0", False),
        ("torchao", "0.15.0", True),
        ("torchao", "0.9.0", False),
        ("torchao", "0.19.0", False),
    ],
)
def test_ranges(package: str, version: str, expected: bool) -> None:
    assert is_in_range(package, version) is expected


def test_ranges_are_those_of_the_package() -> None:
    from recipe_lib.cli.doctor_report import RANGES
    from tests.house.test_imports import PROJECT

    lines = PROJECT["project"]["dependencies"]
    for name, ((major, minor), (above, behind)) in RANGES.items():
        assert f"{name}>={major}.{minor},<{above}.{behind}" in lines


def test_a_folder_is_measured_where_it_would_be(tmp_path: Path) -> None:
    found = probe_folder(tmp_path / "a" / "b")
    assert (
        found["path"] == str(tmp_path / "a" / "b")
        and found["fault"] is None
        and 0 < found["free"] < found["total"]
    )
    assert not list(tmp_path.iterdir())
    assert probe_folder(Path("/proc"))["fault"]


def test_free_memory_is_what_offloading_counts_with(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe_lib.memory import peaks as host

    monkeypatch.setattr(
        host, "find_free_host_memory", lambda: (3 * GIB, "left in this process's control group")
    )
    found = measure_host_memory()
    assert (found["free"], found["what"]) == (3 * GIB, "left in this process's control group")
    assert found["total"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
