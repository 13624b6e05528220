"""Repeated work is noted once: loops are cut to two turns, and what is repeated from notes counts
as if it had run.
"""

import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from recipe_lib.adapters.quantized import QuantizedLinear
from recipe_lib.config import load_config
from recipe_lib.ops.fused_kernels import SHAPED_WORK
from recipe_lib.plan.allocation.replay import replay
from recipe_lib.plan.hardware import find_hardware
from recipe_lib.plan.summary.rank_memory import build_layer_rows
from recipe_lib.plan.timing.stream_schedule import schedule
from recipe_lib.plan.tracing import trace_rank as module
from recipe_lib.plan.tracing.repeated_calls import Note, shorten
from recipe_lib.plan.tracing.trace import ALLOC, FREE, OP, WAIT, Op, Storage, Trace
from recipe_lib.plan.tracing.trace_rank import FIRST, STEADY, simulate
from tests.distributed.ranks import run_ranks
from tests.external.hybrids import make_hybrid_config
from tests.recipes.runs import LORA, PLAIN, ROOT, get_recipe_class, import_recipe_module


def alloc(number: int, size: int) -> Note:
    return ALLOC, (number, Storage(size))


def free(number: int) -> Note:
    return FREE, number


def op(name: str, repeats: int = 1) -> Note:
    return OP, Op(name, flops=len(name), repeats=repeats)


def turns(count: int, first: int = 0) -> list[Note]:
    """A loop of three operators, which takes two pieces of memory and gives them back."""
    notes = []
    for at in range(first, first + 2 * count, 2):
        notes += [
            alloc(at, 100),
            op("load"),
            alloc(at + 1, 50),
            op("compute"),
            free(at),
            op("store"),
            free(at + 1),
        ]
    return notes


@pytest.mark.parametrize("count", [3, 4, 17])
def test_a_loop_becomes_two_turns_that_count_for_all(count: int) -> None:
    notes, renamed = shorten([alloc(0, 7), *turns(count, 1), free(0)])
    assert len(notes) == 2 + 2 * 7
    assert [entry for kind, entry in notes if kind == FREE] == [1, 2, 3, 4, 0]
    repeats = Counter(dict.fromkeys(("load", "compute", "store"), 0))
    for kind, entry in notes:
        if kind == OP:
            repeats[entry.name] += entry.repeats
    assert set(repeats.values()) == {count}
    # Numbers of the turns that are gone stand for the second's.
    assert renamed == {number: 3 + (number - 1) % 2 for number in range(5, 1 + 2 * count)}


@pytest.mark.parametrize(
    "notes",
    [
        turns(2),
        [op("a"), op("b"), op("a"), op("c"), op("a"), op("d")],
        [
            alloc(0, 1),
            op("a"),
            alloc(1, 1),
            op("a"),
            alloc(2, 1),
            op("a"),
        ],  # memory stays behind each turn
        [
            note
            for at, size in enumerate((1, 2, 3))
            for note in (alloc(at, size), op("a"), free(at))  # of another size in each turn
        ],
    ],
)
def test_what_is_no_loop_stays_as_it_is(notes: list[Note]) -> None:
    assert shorten(notes) == (notes, {})


def test_a_loop_within_what_stays_keeps_the_order_around_it() -> None:
    before = [alloc(0, 10), op("begin")]
    after = [op("end"), alloc(9, 3), free(0), free(9)]
    notes, _ = shorten([*before, *turns(4, 1), *after])
    assert notes[:2] == before
    assert notes[-4:] == after
    assert shorten(notes)[0] == notes  # two turns are no loop any more


def test_operators_that_count_for_several_go_on_counting() -> None:
    notes, _ = shorten([op("a", 2), op("b"), op("a", 2), op("b"), op("a", 2), op("b")])
    assert [(entry.name, entry.repeats) for _, entry in notes] == [
        ("a", 2),
        ("b", 1),
        ("a", 4),
        ("b", 2),
    ]


def test_a_weight_in_host_memory_is_filled_by_work_of_its_own() -> None:
    with torch.device("meta"):
        linears = [QuantizedLinear(nn.Linear(64, 64, bias=False), "nf4") for _ in range(3)]
    linears[2].computes_on = torch.device("cpu")
    decide = SHAPED_WORK[QuantizedLinear._fill_nf4]
    assert decide is not None
    first, same, computed_elsewhere = map(decide, linears)
    assert first == same != computed_elsewhere


# Models of a step of QLoRA, whose weights are made whole in pieces.
DENSE = "dense"
HYBRID = "hybrid"  # 32 layers, each a scan but for every fourth
IRREGULAR = "hybrid in no period"
STREAMED = "hybrid, layers in host memory"  # codes are copied there, for which the host waits


@pytest.fixture(scope="module", params=[DENSE, HYBRID, IRREGULAR, STREAMED])
def traced(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A step with notes, and with every operator run."""
    folder = tmp_path_factory.mktemp("repeats")
    shipped = json.loads(
        (ROOT / "recipe_lib" / "models" / "presets" / "llama3" / "8B.json").read_text()
    )
    config = shipped | {"num_hidden_layers": 2, "vocab_size": 1024}
    overrides = ["memory.activation_checkpointing=full"]
    if request.param != DENSE:
        config = make_hybrid_config("qwen3_5_text") | {
            "num_hidden_layers": 32,
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8,
        }
        overrides += ["model.implementation=transformers", "data.packing=true"]
    if request.param == IRREGULAR:
        words = {"l": "linear_attention", "f": "full_attention"}
        config["layer_types"] = [words[letter] for letter in "llflffllll"]
        config["num_hidden_layers"] = len(config["layer_types"])
    if request.param == STREAMED:
        overrides.append("memory.stream_layers=true")
    (folder / "model.json").write_text(json.dumps(config))

    def with_notes() -> dict[str, Any]:
        return figures(folder, overrides)

    def without_notes() -> dict[str, Any]:
        module.repeat_shaped_work = lambda tracer: nullcontext()
        return figures(folder, overrides)

    return tuple(run_ranks(run, 1, process_group=False)[0] for run in (with_notes, without_notes))


def figures(folder: Path, settings: list[str]) -> dict[str, Any]:
    """Peaks, and sums over the operators of the second step."""
    overrides = [
        f"model.preset={folder / 'model.json'}",
        f"output_dir={folder / 'none'}",
        f"recipe={LORA}",
    ]
    overrides += [
        "tokenizer.path=unread",
        "data.source=unread",
        "max_seq_len=64",
        "lora.target_modules=[all-linear]",
        "lora.quantize_base=nf4",
    ]
    overrides += settings
    module = import_recipe_module(LORA)
    cfg = load_config(PLAIN, overrides, module.Config)
    shape = SimpleNamespace(tokens=cfg.max_seq_len, documents=2 if cfg.data.packing else 1)
    is_hybrid = cfg.model.implementation == "transformers"
    simulated = simulate(
        get_recipe_class(module),
        cfg,
        shape,
        ranks=1 if is_hybrid else 4,
        phases=("load",) if is_hybrid else (),
    )
    trace = simulated.trace
    return {
        "peaks": trace.find_active_peaks(),
        "host": trace.find_active_peaks(device=False),
        "reserved": {name: peaks.reserved for name, peaks in replay(trace).phases.items()},
        "kept": {row.module: row.kept for row in build_layer_rows(simulated)},
        "seconds": schedule(trace, STEADY, find_hardware("rtx4090")).step,
        "waits": Counter(trace.syncs[index].stream for kind, index in trace.events if kind == WAIT),
        "events": len(trace.events),
        "memory": list_memory(trace),
    } | sums(trace)


def sums(trace: Trace) -> dict[str, Any]:
    """Of the second step: operators by name, arithmetic by part of the step, bytes by module."""
    issued: Counter[str] = Counter()
    flops: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for operator in trace.ops:
        if operator.phase == trace.phases.index(STEADY):
            issued[operator.name] += operator.repeats
            flops[operator.part] += operator.flops * operator.repeats
            moved[operator.module] += operator.bytes * operator.repeats
    return {"issued": dict(issued), "flops": dict(flops), "moved": dict(moved)}


def list_memory(trace: Trace) -> set[tuple[Any, ...]]:
    """For each operator of forward: what it reads and makes, as (bytes, operator that made it)."""

    def describe(storages: tuple[int, ...]) -> tuple[tuple[int, str], ...]:
        return tuple((trace.storages[index].bytes, trace.storages[index].op) for index in storages)

    return {
        (operator.module, operator.name, describe(operator.reads), describe(operator.makes))
        for operator in trace.ops
        if operator.part == "forward"
    }


@pytest.mark.slow
def test_notes_give_the_peaks_of_the_whole(traced: tuple[dict[str, Any], dict[str, Any]]) -> None:
    noted, whole = traced
    assert noted["events"] < whole["events"]
    assert set(noted["peaks"]) >= {FIRST, STEADY}
    assert {figure: noted[figure] for figure in ("peaks", "host", "reserved")} == {
        figure: whole[figure] for figure in ("peaks", "host", "reserved")
    }


@pytest.mark.slow
def test_notes_give_the_time_of_the_whole(traced: tuple[dict[str, Any], dict[str, Any]]) -> None:
    noted, whole = traced
    assert noted["seconds"] == pytest.approx(whole["seconds"], rel=1e-9)
    assert noted["waits"] == whole["waits"]


@pytest.mark.slow
@pytest.mark.parametrize("figure", ["issued", "flops", "moved", "kept"])
def test_notes_count_all_of_the_work(
    traced: tuple[dict[str, Any], dict[str, Any]], figure: str
) -> None:
    noted, whole = traced
    assert noted[figure] == whole[figure]


@pytest.mark.slow
def test_repeated_operators_name_the_memory_of_their_own_call(
    traced: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    """But for what is no argument of the call, such as a table of NF4's values: it is left out."""
    noted, whole = traced
    candidates: dict[Any, list[Any]] = {}
    for place, name, *memory in whole["memory"]:
        candidates.setdefault((place, name), []).append(memory)
    assert len(noted["memory"] & whole["memory"]) > 0.5 * len(whole["memory"])
    for place, name, *memory in noted["memory"]:
        assert any(
            all(
                not Counter(found) - Counter(have)
                for found, have in zip(memory, other, strict=True)
            )
            for other in candidates[place, name]
        ), (place, name, memory)
