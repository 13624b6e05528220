"""Waits of the host are counted with their lines: those of a recipe of the user's own, and the one
of those shipped.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.host_waits import COUNTED, count
from recipe_lib.adapters import nf4
from recipe_lib.errors import ConfigError
from tests.house.files import ROOT
from tests.plan.apart import call_in_fork
from tests.plan.streams.mutations import CASES, Case, follow

# What a line of `reads` does, and what is said of it; "": nothing.
WORDS = [
    ("torch.tensor", "a copy to the device from memory that is not pinned"),
    (".item()", ".item()"),
    ("if torch.isnan", ".item()"),
    ("labels[mask] =", "indexing by a mask"),
    ("masked_fill", ""),
    ("tolist", ".item()"),
    ("synchronize", "synchronize"),
    ("pin_memory", ""),
    ("non_blocking", ""),
]
# Of the table of levers: one that has copies to wait for.
OFFLOADED = next(one for one in COUNTED if str(one).startswith("memory.cpu_offload"))


def reads(recipe: type) -> type:
    class Own(recipe):  # type: ignore[misc, valid-type]
        def train_step(self, batches: Any) -> Any:
            batch = batches.micro_batches[0]
            loss = self.compute_loss(batch).detach()
            torch.tensor([1.0, 2.0], device=self.device)
            torch.tensor(3.0, device=self.device)
            loss.item()
            if torch.isnan(loss):
                raise ValueError
            mask = batch.labels > 0
            batch.labels[mask] = batch.labels[0, 0]
            batch.labels.masked_fill_(mask, 1)
            assert batch.labels.tolist()
            torch.get_device_module(self.device).synchronize()
            torch.ones(3).pin_memory().to(self.device, non_blocking=True)
            loss.to("cpu", non_blocking=True)
            return super().train_step(batches)

    return Own


def waits_of(case: Case) -> list[tuple[str, str, int]]:
    """(what, file, line) of each wait of the steady step."""
    return [(what, *line) for what, line in follow(case).waits]


def test_each_line_that_waits_is_named() -> None:
    found = call_in_fork(waits_of, Case("demo/full", 1, (), reads))
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    own = {line: what for what, file, line in found if file == __file__}
    begin = next(number for number, text in enumerate(lines) if "def train_step" in text)
    expected = {}
    for number, text in enumerate(lines[begin : begin + 16], begin + 1):
        words = [said for part, said in WORDS if part in text]
        if words and words[-1]:
            expected[number] = words[0]
    assert own == expected and len(own) == 7
    assert [file for _, file, _ in found if file != __file__] == [found[-1][1]]
    assert found[-1][1].endswith("training/loop.py")


SIZED_BY_VALUES: dict[str, Callable[[torch.Tensor], Any]] = {
    "nonzero": lambda labels: (labels > 0).nonzero(),
    "a mask": lambda labels: labels[labels > 0],
    "equal": lambda labels: torch.equal(labels, labels),
}


def refusal_of(name: str) -> str:
    def sized_by_values(recipe: type) -> type:
        class Own(recipe):  # type: ignore[misc, valid-type]
            def train_step(self, batches: Any) -> Any:
                SIZED_BY_VALUES[name](batches.micro_batches[0].labels)

        return Own

    with pytest.raises(ConfigError) as error:
        follow(Case("demo/full", 1, (), sized_by_values))
    return str(error.value)


@pytest.mark.parametrize("name", [*SIZED_BY_VALUES])
def test_what_has_a_size_that_values_decide_is_refused_by_its_line(name: str) -> None:
    said = call_in_fork(refusal_of, name)
    assert f"{__file__}:" in said and "train_step: reads the value of a tensor" in said


@pytest.mark.slow
def test_shipped_runs_wait_once_a_step() -> None:
    for name in ("optimizer offload, stepping in backward", "pipeline, zbv"):
        case = CASES[name]
        found = call_in_fork(waits_of, case)
        assert [Path(file).name for _, file, _ in found] == ["loop.py"], name


@pytest.mark.slow
def test_the_host_waits_for_gradients_that_it_steps_and_no_more() -> None:
    found = call_in_fork(waits_of, CASES["FSDP, CPU offload"])
    logged = {"loop.py": 1}
    assert Counter(Path(file).name for _, file, _ in found) == {"host_copies.py": 1} | logged
    found = call_in_fork(waits_of, CASES["FSDP, CPU offload, two micro-batches"])
    # The root and four layers, of which the second micro-batch's last is waited for apart.
    units = 5
    waits = {"host_copies.py": 1 + units - 1 + 1}
    assert Counter(Path(file).name for _, file, _ in found) == waits | logged
    in_fp32 = Case("demo/full", 4, (*CASES["FSDP, CPU offload, two micro-batches"].overrides, "dtype=bf16",
                   "parallel.accumulate_grad_in_fp32=true"))  # fmt: skip
    assert len(call_in_fork(waits_of, in_fp32)) == len(found)


def uncached() -> list[tuple[str, str, int]]:
    """With the table of NF4 made for each dequantizing, operator by operator."""
    made = nf4._make_pair_table
    nf4._make_pair_table = lambda *args: made.__wrapped__(*args)  # type: ignore[assignment]
    nf4._make_pair_table.cache_clear = lambda: None  # type: ignore[attr-defined]
    case = CASES["LoRA on NF4"]
    return waits_of(replace(case, overrides=(*case.overrides, "fused_kernels=false")))


@pytest.mark.slow
def test_a_table_that_is_copied_for_each_matrix_would_wait_for_each() -> None:
    found = call_in_fork(uncached)
    layers, projections = 4, 7
    copies = [place for what, *place in found if Path(place[0]).name == "nf4.py"]
    # Forward and backward dequantize each, but backward needs no gradient of the first layer's
    # first inputs.
    assert layers * projections < len(copies) <= 2 * layers * projections
    assert re.match("a copy to the device", found[0][0])


def test_copies_that_nobody_waits_for_are_not_read() -> None:
    """The host reads a number while it is on its way."""
    assert call_in_fork(races_of_an_early_read) == 1


def races_of_an_early_read() -> int:
    def early(recipe: type) -> type:
        class Own(recipe):  # type: ignore[misc, valid-type]
            def train_step(self, batches: Any) -> Any:
                loss = self.compute_loss(batches.micro_batches[0]).detach()
                loss.to("cpu", non_blocking=True).item()
                return super().train_step(batches)

        return Own

    races = follow(Case("demo/full", 1, (), early)).races.values()
    assert all("on the host" in str(race) for race in races)
    return len(races)


@pytest.mark.slow
def test_the_pages_counts_are_those_of_the_check() -> None:
    page = json.loads((ROOT / "docs" / "host_waits.json").read_text(encoding="utf-8"))
    assert set(page) == {"", *map(str, COUNTED)}
    assert page[str(OFFLOADED)]["full"] == call_in_fork(count, "full", OFFLOADED)
