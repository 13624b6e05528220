"""torch.compile on the simulated device: what a plan of compiled layers has, and where there is no
code for a graph.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch._dynamo  # so that no fork pays for the import
import torch._inductor.config

import recipe_lib.adapters.quantized
import recipe_lib.ops.gathered  # noqa: F401
from recipe_lib.plan.build_plan import simulate_rank
from recipe_lib.plan.simulated_world import compiled_code
from recipe_lib.plan.simulated_world.shape_only_model import limit_layers
from recipe_lib.plan.tracing.trace import OP
from recipe_lib.plan.tracing.trace_rank import STEADY
from tests.plan.apart import build_settings, call_in_fork


def few_layers(name: str, layers: int, *overrides: str) -> tuple[type, Any, Any]:
    """As `build_settings`, of a model with so many layers on one rank."""
    torch._inductor.config.cpp.vec_isa_ok = (
        True  # else a process asks the C++ compiler, which takes seconds
    )
    recipe, cfg, wanted = build_settings(name, 1, *overrides)
    return recipe, limit_layers(cfg, layers), wanted


def facts(*, broken: bool) -> dict[str, Any]:
    """A plan of compiled layers; broken: inductor raises."""

    def fail(*_: Any, **__: Any) -> str:
        raise ValueError("no lowering\nfor this")

    if broken:
        compiled_code._generate_code = fail
    recipe, cfg, wanted = few_layers("demo/full", 2)
    found = {}
    for compiles in (False, True):
        run = simulate_rank(recipe, replace(cfg, compile=compiles), wanted, 0)
        names = [
            run.trace.ops[number].name
            for kind, number in run.trace.iterate_events(STEADY)
            if kind == OP
        ]
        fused = sum(name.startswith("inductor::") for name in names)
        found[compiles] = (run.trace.find_active_peaks(), len(names), fused, run.notes)
    return {"eager": found[False], "compiled": found[True]}


@pytest.mark.slow
def test_kernels_are_fused_and_buffers_are_inductors() -> None:
    found = call_in_fork(lambda: facts(broken=False))
    eager, compiled = found["eager"], found["compiled"]
    assert eager[2] == 0 and compiled[2] > 10
    assert compiled[1] < eager[1], "fewer operators"
    assert [note.partition(":")[0] for note in compiled[3]] == ["compiled code"]


@pytest.mark.slow
def test_what_has_no_code_is_planned_uncompiled_and_says_so() -> None:
    found = call_in_fork(lambda: facts(broken=True))
    assert found["compiled"][:3] == found["eager"][:3]
    (note,) = found["compiled"][3]
    assert note.startswith("compile=true is planned without compiling") and "no lowering" in note
    assert "for this" not in note, "one line"


@pytest.mark.parametrize(
    "name", ["quantized_linear", "quantized_linear_backward", "gather_linears"]
)
def test_opaque_operators_of_compiled_code_are_looked_into(name: str) -> None:

    operator = getattr(torch.ops.tune_recipes, name).default
    assert compiled_code.find_opaque_function(operator) is not None
    assert compiled_code.find_opaque_function(torch.ops.aten.mm.default) is None


def forward_operations() -> dict[bool, int]:
    """Of matmuls and attention in a step of QLoRA, by whether its layers are compiled."""
    recipe, cfg, wanted = few_layers("demo/lora", 1, "lora.quantize_base=nf4")
    found = {}
    for compiles in (False, True):
        trace = simulate_rank(recipe, replace(cfg, compile=compiles), wanted, 0).trace
        ops = [trace.ops[number] for kind, number in trace.iterate_events(STEADY) if kind == OP]
        found[compiles] = sum(op.flops * op.repeats for op in ops if op.part == "forward")
    return found


@pytest.mark.slow
def test_matmuls_inside_of_opaque_operators_are_counted() -> None:
    found = call_in_fork(forward_operations)
    assert found[True] == found[False] > 0
