"""Deep models planned from two shallow ones, against the whole model simulated, event by event."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from recipe_lib.models import read_preset_config
from recipe_lib.plan import build_plan
from recipe_lib.plan.simulated_world.shape_only_model import limit_layers
from recipe_lib.plan.tracing import trace_deep_model as module
from recipe_lib.plan.tracing.trace import ALLOC, FREE, OP, PHASE, RECORD, USE, WAIT, Trace
from recipe_lib.plan.tracing.trace_rank import FIRST, STEADY, Simulated
from tests.plan.apart import build_settings, call_in_fork

RANKS = 4
FULL = "llama3/8B_full"
QLORA = "llama3/8B_qlora"
UNREAD = ("~model.path", "tokenizer.path=unread")
# Shipped widths, whose matrices are large enough for every limit of sizes.
DEEPER = [
    (
        FULL,
        "parallel.tensor=2",
        "memory.activation_checkpointing=selective",
        "memory.optimizer_offload=true",
        "optimizer.state_bits=8",
    ),
    (FULL, "memory.activation_offload=true", "parallel.reduce_gradients=step"),
]
# Shapes that no preset has: layers that are not repeated, and more of them until they are.
PATTERNS = {
    "dense layers first": (
        "qwen3_moe/30B",
        {"mlp_only_layers": [0, 1]},
        (QLORA, "lora.target_modules=[q,experts]"),
    ),
    "a period of four": ("gemma3/1B", {"sliding_window_pattern": 4}, (FULL,)),
}
CASES = {" ".join(case): case for case in DEEPER}


def events(trace: Trace) -> list[tuple[Any, ...]]:
    """All that a trace says, an event of the device by the order in which events were first
    recorded.
    """
    found: list[tuple[Any, ...]] = []
    marks: dict[int, int] = {}
    for kind, number in trace.events:
        if kind == ALLOC:
            found.append((kind, number, trace.storages[number]))
        elif kind == OP:
            found.append((kind, number, replace(trace.ops[number], reads=(), makes=())))
        elif kind in (RECORD, WAIT):
            sync = trace.syncs[number]
            if kind == RECORD:
                marks.setdefault(sync.event, len(marks))
            found.append((kind, marks.get(sync.event), sync.stream))
        elif kind == USE:
            found.append((kind, *trace.uses[number]))
        else:
            assert kind in (FREE, PHASE)
            found.append((kind, number))
    return found


def compared(
    config: str, *overrides: str, more: int | None = 2, steps: tuple[str, ...] = (FIRST, STEADY)
) -> tuple[str, str, list[Any]]:
    """(how it was planned, the first events that differ, facts that differ).

    more: periods of layers that the whole model has beyond the longer shallow one; None: all of its
    own.
    """
    recipe, cfg, wanted = build_settings(config, RANKS, *overrides)
    wanted = replace(wanted, phases=build_plan.PHASES)
    if more is not None:
        module._WORTHWHILE = 0.0
        short, long = module.choose_depths(recipe, cfg) or (0, 0)
        cfg = limit_layers(cfg, long + more * (long - short))
    deeper: list[Simulated | None] = []
    original = module._extend_simulation

    def note_deeper(*args: Any, **named: Any) -> Simulated | None:
        deeper.append(original(*args, **named))
        return deeper[-1]

    module._extend_simulation = note_deeper
    found = build_plan.simulate_rank(recipe, cfg, wanted, 0, steps)
    module._extend_simulation = original
    if not deeper or deeper[-1] is None:
        return "whole", "", []
    build_plan.simulate_deep = lambda recipe, cfg, run: run(cfg)  # type: ignore[assignment]
    whole = build_plan.simulate_rank(recipe, cfg, wanted, 0, steps)
    pairs = zip(events(found.trace), events(whole.trace), strict=True)
    first = next((f"{mine} for {theirs}" for mine, theirs in pairs if mine != theirs), "")
    facts = (
        "coordinates",
        "mesh",
        "tokens",
        "repeats",
        "notes",
        "step_growth",
        "traced",
        "modules",
        "estimate",
        "untraced_bytes",
    )
    return "deeper", first, [name for name in facts if getattr(found, name) != getattr(whole, name)]


SAME = ("deeper", "", [])


@pytest.mark.slow
def test_every_event_is_that_of_the_whole_model() -> None:
    assert call_in_fork(lambda: compared(FULL, more=None)) == SAME


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_so_it_is_whatever_the_layers_do(name: str) -> None:
    assert call_in_fork(lambda: compared(*CASES[name])) == SAME


@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS)
def test_layers_are_repeated_by_their_own_pattern_in_a_step_alone(
    name: str, tmp_path: Path
) -> None:
    preset, changes, (config, *overrides) = PATTERNS[name]
    file = tmp_path / "shape.json"
    file.write_text(json.dumps(read_preset_config(preset) | changes), encoding="utf-8")
    overrides += [*UNREAD, f"model.preset={file}"]
    assert call_in_fork(lambda: compared(config, *overrides, more=1, steps=(STEADY,))) == SAME


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.fsdp_wrap_policy=[model.layers.1?]",),
        ("memory.activation_checkpointing=budget", "memory.activation_budget_gib=4"),
        ("parallel.pipeline=2", "gradient_accumulation_steps=8"),
        ("optimizer.name=muon",),
        ("parallel.strategy=ddp",),
    ],
)
def test_settings_that_speak_of_single_layers_are_simulated_whole(
    overrides: tuple[str, ...],
) -> None:
    recipe, cfg, _ = build_settings(FULL, RANKS, *overrides)
    assert module.choose_depths(recipe, cfg) is None


def test_recipes_that_do_not_say_it_are_simulated_whole() -> None:
    """A recipe of the user's own may do something at its twentieth layer."""
    recipe, cfg, _ = build_settings(FULL, RANKS)
    own = type("Own", (recipe,), {})
    alike = type("Own", (recipe,), {"treats_all_alike": True})
    assert module.choose_depths(recipe, cfg) == module.choose_depths(alike, cfg) == (5, 6)
    assert module.choose_depths(own, cfg) is None


def freeze_the_tenth(model: Any) -> None:
    model.model.layers[9].requires_grad_(False)


def freeze_the_lower_half(model: nn.Module) -> None:
    """By the names of weights, which nothing watches."""
    numbers = {name: int(re.findall(r"layers\.(\d+)", name)[0]) for name, _ in named_weights(model)}
    for name, weight in named_weights(model):
        weight.requires_grad_(2 * numbers[name] > max(numbers.values()))


def named_weights(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, weight) for name, weight in model.named_parameters() if "layers." in name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("freeze", "note"),
    [
        (freeze_the_tenth, "goes by single layers"),
        (freeze_the_lower_half, "do not compute the same"),
    ],
)
def test_recipes_that_say_it_and_do_not_are_simulated_whole(
    freeze: Callable[[Any], None], note: str, tmp_path: Path
) -> None:
    file = tmp_path / "shape.json"
    file.write_text(
        json.dumps(read_preset_config("demo/0.5M") | {"num_hidden_layers": 16}), encoding="utf-8"
    )

    def planned() -> tuple[list[str], bool]:
        recipe, cfg, wanted = build_settings("demo/full", 1, f"model.preset={file}")

        def setup_model(self: Any) -> None:
            recipe.setup_model(self)  # type: ignore[attr-defined]
            freeze(self.model)

        own = type("Own", (recipe,), {"treats_all_alike": True, "setup_model": setup_model})
        assert module.choose_depths(own, cfg) is not None
        found = build_plan.simulate_rank(own, cfg, wanted, 0)
        build_plan.simulate_deep = lambda recipe, cfg, run: run(cfg)  # type: ignore[assignment]
        whole = build_plan.simulate_rank(own, cfg, wanted, 0)
        return found.notes, events(found.trace) == events(whole.trace)

    notes, is_whole = call_in_fork(planned)
    assert len(notes) == 1 and notes[0].endswith(f"{note}: the whole model is simulated")
    assert is_whole
