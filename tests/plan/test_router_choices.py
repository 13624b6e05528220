"""What a router chooses changes no byte: real runs whose tokens spread over all experts, or all go
to the same two.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from recipe_lib.models import mixture
from recipe_lib.parallel import start_world
from recipe_lib.plan.tracing.trace_rank import FIRST, STEADY, simulate, trace_real_run
from tests.distributed.collectives import let_collectives_go
from tests.distributed.ranks import run_ranks
from tests.plan.mixtures import CHOICES, EXPERTS, MIXTURES, write_mixture
from tests.plan.test_real_runs import config_of
from tests.recipes.runs import FULL, LORA
from tests.selection import mark_slow_but

# Ranks, recipe, model, overrides; by torch's grouped matmul and by the loop for other types.
CASES: dict[str, tuple[Any, ...]] = {
    "full, two ranks": (2, FULL, "qwen3_moe", "memory.activation_checkpointing=selective"),
    "nf4, one rank": (
        1,
        LORA,
        "mixtral",
        "dtype=bf16",
        "lora.quantize_base=nf4",
        "memory.activation_checkpointing=full",
    ),
}


def local_parts(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's parts of the parameters."""
    for name, parameter in model.named_parameters():
        yield name, parameter.to_local() if isinstance(parameter, DTensor) else parameter


def routed(recipe: type, spread: bool) -> tuple[type, list[int]]:
    """The recipe with weights that are numbers, and how many experts had a row in each call.
    spread: over all experts; else the router's weights are 0, and of equal logits the same two are
    chosen for every token.
    """
    loads: list[int] = []
    original = mixture.group_tokens

    def counting(chosen: torch.Tensor, num_experts: int) -> Any:
        groups = original(chosen, num_experts)
        loads.append(int((groups.ends.diff(prepend=groups.ends.new_zeros(1)) > 0).sum()))
        return groups

    class Routed(recipe):  # type: ignore[misc, valid-type]
        def setup_model(self) -> None:
            super().setup_model()
            mixture.group_tokens = counting
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for _, part in local_parts(self.model):
                    if part.is_floating_point():
                        part.copy_(torch.randn(part.shape, generator=generator))

        def train_step(self, batches: Any) -> Any:
            for batch in batches.micro_batches:
                batch.tokens.random_(0, self.model.spec.vocab_size)  # planned ones are all alike
            with torch.no_grad():
                for name, part in local_parts(self.model):
                    if "router" in name and not spread:
                        part.zero_()
            return super().train_step(batches)

    return Routed, loads


def peaks(case: tuple[Any, ...], folder: Path, router: str) -> tuple[dict[str, int], set[int]]:
    """The peaks of both steps, and the numbers of experts that had rows. router: `spread`, `same`,
    or `planned`.
    """
    recipe, cfg, shape = config_of(case, folder)
    if router == "planned":
        found = simulate(recipe, cfg, shape, ranks=case[0], phases=(), like_cpu=True)
        return pick(found.trace.find_active_peaks()), set()
    changed, loads = routed(recipe, router == "spread")
    with start_world(cfg) as world, let_collectives_go():
        found = trace_real_run(changed, cfg, world, shape)
    return pick(found.trace.find_active_peaks()), set(loads)


def pick(found: dict[str, int]) -> dict[str, int]:
    return {phase: found[phase] for phase in (FIRST, STEADY)}


@pytest.mark.slow
@pytest.mark.parametrize("name", mark_slow_but(CASES, 1))
def test_peaks_are_the_same_whatever_the_router_chooses(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    for model in MIXTURES:
        write_mixture(tmp_path, model)
    planned = run_ranks(peaks, 1, case, tmp_path, "planned", process_group=False)[0]
    spread, same = (
        run_ranks(peaks, case[0], case, tmp_path, router)[0] for router in ("spread", "same")
    )
    assert same[1] == {CHOICES} and spread[1] and min(spread[1]) == EXPERTS
    assert planned[0] == spread[0] == same[0]
