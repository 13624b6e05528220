"""Plans of whole models on every rank, of matmuls in 8 bits, and what `parallel.strategy: auto`
becomes by them.
"""

import math
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipe_lib.cli import run as command
from recipe_lib.cli.recipes import RecipeFile, check_arguments
from recipe_lib.errors import ConfigError
from recipe_lib.parallel.ddp import BUCKET_ELEMENTS
from recipe_lib.plan.build_plan import simulate_rank
from recipe_lib.plan.hardware import find_hardware
from recipe_lib.plan.search.advice import choose_strategy, decide_strategy
from recipe_lib.plan.search.trials import Estimate
from recipe_lib.plan.tracing.trace import ALLOC, FREE, PHASE, Trace
from recipe_lib.plan.tracing.trace_rank import STEADY
from recipe_lib.units import GIB
from tests.distributed.ranks import run_ranks
from tests.plan import test_closed_forms as forms
from tests.plan.apart import build_settings, call_in_fork
from tests.recipes.runs import FULL, LORA

DDP = "parallel.strategy=ddp"
CASES: dict[str, tuple[Any, ...]] = {
    "whole": (2, 0, FULL, DDP, "gradient_accumulation_steps=4"),
    "wide": (2, 1, FULL, DDP, "parallel.reduce_dtype=fp32"),
    "adapters": (8, 0, LORA, DDP),
    "int8": (1, 0, FULL, "matmul_dtype=int8"),
    "frozen": (1, 0, LORA, "matmul_dtype=int8"),
}
SHAPES = forms.model()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("strategy")
    forms.write_models(folder)
    original = forms.read

    def work() -> dict[str, dict[str, Any]]:
        forms.read = lambda trace: SimpleNamespace(**vars(original(trace)), **more(trace))  # type: ignore[assignment]
        return {name: vars(forms.trace(case, folder)) for name, case in CASES.items()}

    return run_ranks(work, 1, process_group=False)[0]


def more(trace: Trace) -> dict[str, Any]:
    """Of the second step. buckets: most bytes that are taken behind backward and not by the
    optimizer; eight_bits: operations of matmuls of int8 operands.
    """
    phase, held, most, collected = -1, 0, 0, set()
    for event, number in trace.events:
        if event == PHASE:
            phase = number
        elif event in (ALLOC, FREE):
            storage = trace.storages[number]
            if event == FREE:
                held -= storage.bytes if number in collected else 0
            elif (
                trace.phases[phase] == STEADY
                and storage.bytes % 2**20 == 0
                and storage.part == "other"
            ):
                collected.add(number)
                held += storage.bytes
                most = max(most, held)
    flops: Counter[str] = Counter()
    for op in trace.ops:
        if trace.phases[op.phase] == STEADY:
            flops[op.dtype if op.name.endswith("mm") else ""] += op.flops * op.repeats
    return {"buckets": most, "eight_bits": flops["int8"]}


def elements(shapes: forms.Shapes) -> int:
    return sum(rows * columns for rows, columns in shapes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "trained"),
    [("whole", 2, SHAPES), ("wide", 4, SHAPES), ("adapters", 2, forms.ADAPTERS * 2)],
)
def test_a_rank_holds_everything_and_sums_what_is_trained_once_a_step(
    found: dict[str, dict[str, Any]], name: str, size: int, trained: forms.Shapes
):
    """size: bytes of an element that is sent. Nothing is gathered; pieces of a matrix fill a bucket
    exactly.
    """
    here, everything = found[name], SHAPES + (forms.ADAPTERS * 2 if name == "adapters" else [])
    assert here["most"]["parameters"] == elements(everything) * forms.BF16
    assert here["most"]["gradients"] == elements(trained) * forms.BF16
    assert here["most"]["optimizer"] == elements(trained) * forms.BF16 * 2 + 4 * len(trained)
    assert "gathered" not in here["most"] and "communication" not in here["most"]
    sent = here["collectives"]
    assert {(operation, dim) for operation, dim, _ in sent} == {("all_reduce", "data_replicate")}
    assert sum(bytes * count for (_, _, bytes), count in sent.items()) == elements(trained) * size
    pieces = sum(rows * columns // BUCKET_ELEMENTS for rows, columns in trained)
    rest = sum(rows * columns % BUCKET_ELEMENTS for rows, columns in trained)
    whole = sent.get(("all_reduce", "data_replicate", BUCKET_ELEMENTS * size), 0)
    assert pieces <= whole <= pieces + rest // BUCKET_ELEMENTS
    assert sum(sent.values()) <= pieces + 2 * math.ceil(rest / BUCKET_ELEMENTS)
    # In their own type only what is small is packed; summed in another, everything goes through two
    # buckets.
    most = 2 * BUCKET_ELEMENTS * size
    assert here["buckets"] == most if name == "wide" else 0 < here["buckets"] <= most


@pytest.mark.slow
def test_matmuls_in_8_bits_are_counted_as_such(found: dict[str, dict[str, Any]]):
    """Tokens times weights: forward, again, two gradients; of a frozen weight one, and none of the
    first layer's inputs, whose embedding is frozen too.
    """
    tokens, linears = 128, elements(forms.LINEARS)
    product = 2 * tokens * linears
    assert found["int8"]["eight_bits"] == 4 * product * forms.LAYERS
    assert found["frozen"]["eight_bits"] == 3 * product * forms.LAYERS - 2 * tokens * elements(
        forms.LINEARS[:3]
    )
    assert found["int8"]["most"]["parameters"] == elements(SHAPES) * forms.BF16
    card = find_hardware("h100")
    assert (
        card.get_rate("int8")
        == card.get_rate("fp8")
        == 2 * card.get_rate("bf16")
        > card.get_rate("int32")
    )


def test_fp8_needs_a_device_that_has_it():
    recipe, cfg, wanted = build_settings(
        "demo/full", 1, "matmul_dtype=fp8", "dtype=bf16", "device=auto", device="rtx3090"
    )
    with pytest.raises(
        ConfigError,
        match="^matmul_dtype: found fp8 for rtx3090 of compute capability 8.6, expected a GPU of",
    ):
        simulate_rank(recipe, cfg, wanted, 0)


def estimate(reserved: float, seconds: float) -> Estimate:
    size = int(reserved * GIB)
    return Estimate(size, size, size - GIB, 0, seconds, 1, 0, 0, 0, "", usable=20 * GIB)


@pytest.mark.parametrize(
    ("shards", "whole", "expandable", "chosen", "reason"),
    [
        (
            (10, 2.0),
            (18, 1.5),
            False,
            "ddp",
            "a step is estimated at 1.50 s, with fsdp at 2.00 s; about 18.00 GiB",
        ),
        (
            (10, 1.5),
            (18, 2.0),
            False,
            "fsdp",
            "a step is estimated at 1.50 s, with ddp at 2.00 s; about 10.00 GiB",
        ),
        ((10, 1.5), (18, 1.5), False, "fsdp", "a step"),
        (
            (10, 2.0),
            (19.5, 1.5),
            False,
            "fsdp",
            "ddp would take about 19.50 GiB of the 20.00 GiB that 2 x 24GB can",
        ),
        ((10, 2.0), (19.5, 1.5), True, "ddp", "a step is estimated"),
        ((25, 2.0), (30, 1.5), False, "fsdp", "it takes least, about 25.00 GiB"),
        ((10, 2.0), None, False, "fsdp", "no estimate could be made of both"),
    ],
)
def test_the_faster_that_fits_is_taken(
    shards: Any, whole: Any, expandable: bool, chosen: str, reason: str
):
    copied = None if whole is None else estimate(*whole)
    wanted: Any = SimpleNamespace(ranks=2, hardware=SimpleNamespace(name="24GB"))
    strategy, why = decide_strategy(estimate(*shards), copied, wanted, expandable=expandable)
    assert strategy == chosen and why.startswith(reason)


def test_what_ddp_does_not_go_with_is_sharded():
    recipe, cfg, wanted = build_settings(
        "demo/full", 2, "parallel.strategy=auto", "parallel.fsdp_wrap_policy=layers"
    )
    line = "parallel.strategy=auto: fsdp; ddp does not go with other settings of the run"
    assert choose_strategy(recipe, cfg, wanted) == ("fsdp", line)


FLAGS = ["--nproc_per_node", "2"]
PLANNING = (
    "parallel.strategy=auto: planning fsdp and ddp for this machine; parallel.strategy=fsdp, or"
    " ddp, saves the time"
)


def asked(*overrides: str) -> list[str]:
    return ["--config", "demo/full", "~validation", *overrides]


@pytest.mark.slow
def test_the_command_plans_both_in_another_process_and_tells_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
):
    """The process's own `main`, in a fork."""

    def run(words: list[str], **options: Any) -> None:
        assert words[1:4] == ["-P", "-m", "recipe_lib.cli.run"]
        assert call_in_fork(command.main, words[4:]) == 0

    monkeypatch.setattr(command, "subprocess", SimpleNamespace(**vars(subprocess) | {"run": run}))
    monkeypatch.setattr(command, "get_logger", lambda: SimpleNamespace(info=said.append))
    said: list[str] = []
    recipe, words = RecipeFile.find(FULL), asked("parallel.strategy=auto", "max_seq_len=64")
    others = [word for word in words if word != "parallel.strategy=auto"]
    assert command.add_chosen_strategy(FLAGS, recipe, words, check_arguments(recipe, words)) == [
        *others,
        "parallel.strategy=ddp",
    ]
    assert said[0] == PLANNING and len(said) == 2
    assert said[1].startswith("parallel.strategy=auto: ddp; a step is estimated at ")


def test_it_plans_nothing_that_is_not_asked_for_and_goes_on_when_it_cannot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    calls: list[Any] = []
    said: list[str] = []
    monkeypatch.setattr(command.subprocess, "run", lambda *words, **options: calls.append(words))
    monkeypatch.setattr(command, "get_logger", lambda: SimpleNamespace(info=said.append))
    recipe = RecipeFile.find(FULL)
    (tmp_path / "mine.py").write_text("def main(argv): ...\n")
    mine = RecipeFile.find(str(tmp_path / "mine.py"))
    copied = RecipeFile.find(str(shutil.copy(recipe.path, tmp_path / "copied.py")))
    for flags, one, words in (
        (FLAGS, recipe, asked()),
        (FLAGS, recipe, asked("parallel.strategy=ddp")),
        ([], recipe, asked("parallel.strategy=auto")),
        (["--nproc_per_node", "1"], recipe, asked("parallel.strategy=auto")),
        (FLAGS, mine, ["anything", "--else"]),
    ):
        assert command.add_chosen_strategy(flags, one, words, check_arguments(one, words)) == words
    assert not calls and not said
    for one in (recipe, copied):
        words = asked("parallel.strategy=auto")
        cfg = check_arguments(one, words)
        assert (
            command.add_chosen_strategy([*FLAGS, "--node-rank=1"], one, words, cfg)[-1]
            == "parallel.strategy=fsdp"
        )
        assert command.add_chosen_strategy(FLAGS, one, words, cfg)[-1] == "parallel.strategy=fsdp"
    line = (
        "parallel.strategy=auto: fsdp; both could not be planned; `tune plan` with the same"
        " arguments says why"
    )
    assert len(calls) == 4 and said == [PLANNING, line, PLANNING, line]
