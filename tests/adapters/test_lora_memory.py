"""Bytes of a sharded model with adapters: what a rank holds, what is gathered, which gradients
exist; by formula.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from recipe_lib.adapters import add_adapters, get_adapter_parameters, is_adapter
from recipe_lib.config.schema import LoraConfig, MemoryConfig, OptimizerConfig, ParallelConfig
from recipe_lib.models import build_meta
from recipe_lib.optim.optimizers import build_optimizer, count_local_bytes
from recipe_lib.parallel import resolve_wrapping
from tests.adapters.adapted import EVERYWHERE, Setting, build_adapted, compute_mean_loss
from tests.distributed.ranks import run_ranks
from tests.parallel.gathered import GatheredPeak, count_gathered_bytes
from tests.parallel.small_models import MLP_WIDTH, VOCABULARY, WIDTH, build_small_spec

LAYERS = 3
RANK = 4
RANKS = 2
KV = WIDTH // 2
MATRIX = VOCABULARY * WIDTH  # elements of the embedding, and of the head
LAYER = 2 * WIDTH * WIDTH + 2 * KV * WIDTH + 3 * MLP_WIDTH * WIDTH + 2 * WIDTH
FROZEN = 2 * MATRIX + LAYERS * LAYER + WIDTH
# Sums of the two sides of all seven matrices, and of their outputs.
SIDES = 2 * (WIDTH + WIDTH) + 2 * (KV + WIDTH) + 3 * (MLP_WIDTH + WIDTH)
OUTPUTS = 2 * WIDTH + 2 * KV + 2 * MLP_WIDTH + WIDTH
ONE_MATRIX = RANK * (VOCABULARY + WIDTH)  # the adapter of the embedding, and that of the head
# Of all matrices, with DoRA.
TRAINED = LAYERS * (RANK * SIDES + OUTPUTS) + 2 * ONE_MATRIX + WIDTH + VOCABULARY
FP32 = 4
BF16 = 2


@pytest.mark.slow
def test_parameters_gradients_and_states_of_a_rank() -> None:
    """A bf16 base and fp32 adapters: (2 F + 16 A) / ranks bytes for F frozen and A adapter
    elements, to the byte.
    """
    lora = LoraConfig(rank=RANK, target_modules=EVERYWHERE, dtype="fp32", dora=True)

    def work() -> list[int]:
        memory = MemoryConfig(activation_checkpointing="full")
        setting = Setting(
            lora, ParallelConfig(fsdp_wrap_policy="memory_efficient"), memory, torch.bfloat16
        )
        with build_adapted(build_small_spec(), setting) as (model, world):
            optimizer = build_optimizer(OptimizerConfig(), model.parameters(), world.device)
            with GatheredPeak(model) as peak:
                compute_mean_loss(model, world).backward()
            optimizer.step()
            frozen = [
                parameter for name, parameter in model.named_parameters() if not is_adapter(name)
            ]
            adapters = list(get_adapter_parameters(model).values())
            assert all(
                parameter.grad is None and parameter.dtype == torch.bfloat16 for parameter in frozen
            )
            grads = [parameter.grad for parameter in adapters if parameter.grad is not None]
            assert len(grads) == len(adapters) and {grad.dtype for grad in grads} == {torch.float32}
            states = [
                value
                for state in optimizer.state.values()
                for value in state.values()
                if value.dim()
            ]
            assert count_gathered_bytes(model) == 0
            return [count_local_bytes([*frozen, *adapters, *grads, *states]), peak.unreduced]

    for held, unreduced in run_ranks(work, RANKS):
        assert held == (BF16 * FROZEN + 4 * FP32 * TRAINED) // RANKS
        # Whole gradients that are not summed yet: those of one unit's adapters, never one of a
        # frozen weight.
        assert 0 < unreduced <= FP32 * (ONE_MATRIX + VOCABULARY)


@pytest.mark.slow
def test_an_adapted_head_is_not_gathered_for_backward() -> None:
    """Neither is an adapted embedding: their backward passes need tokens, and what forward has
    made.
    """

    def work() -> list[list[str]]:
        lora = LoraConfig(rank=RANK, target_modules=EVERYWHERE, dora=True)
        setting = Setting(lora, ParallelConfig(fsdp_wrap_policy="memory_efficient"))
        with build_adapted(build_small_spec(), setting) as (model, world):
            loss = compute_mean_loss(model, world)
            seen: list[str] = []
            watch_gathers(model, seen)
            loss.backward()
            after_forward = list(seen)
            seen.clear()
            compute_mean_loss(model, world)
            return [after_forward, seen]

    layers = [f"model.layers.{index}" for index in range(LAYERS)]
    for backward, forward in run_ranks(work, RANKS):
        assert set(backward) - {""} == set(layers)
        assert set(forward) - {""} == {"model.embed_tokens", "lm_head", *layers}


def watch_gathers(model: nn.Module, seen: list[str]) -> None:
    """Writes the name of a unit into `seen` whenever its parameters are gathered from the ranks."""
    for name, module in model.named_modules():
        group = (
            module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        )
        if group is not None:
            group.unshard = noted(group.unshard, group, name, seen)


def noted(unshard: Any, group: Any, name: str, seen: list[str]) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        unshard(*args, **kwargs)
        if group._all_gather_result is not None:
            seen.append(name)

    return run


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("wrapping", ["auto", "memory_efficient"])
def test_units_hold_the_adapters_of_their_matrices(wrapping: str, tied: bool) -> None:
    model = build_meta(build_small_spec(tied=tied), torch.bfloat16)
    add_adapters(
        model, LoraConfig(rank=RANK, target_modules=EVERYWHERE, dtype="fp32"), torch.bfloat16
    )
    units = {unit.names: unit.bytes for unit in resolve_wrapping(model, wrapping)}
    matrix, adapter = BF16 * MATRIX, FP32 * ONE_MATRIX
    layers = {
        (f"model.layers.{index}",): BF16 * LAYER + FP32 * RANK * SIDES for index in range(LAYERS)
    }
    outside: dict[tuple[str, ...], int] = {
        ("model.embed_tokens",): matrix + adapter,
        ("lm_head",): matrix + adapter,
    }
    if tied:
        outside = {("model.embed_tokens", "lm_head"): matrix + 2 * adapter}
    assert units == layers | outside


@pytest.mark.slow
def test_a_step_moves_adapters_and_leaves_every_frozen_bit() -> None:
    def work() -> list[float]:
        lora = LoraConfig(rank=RANK, target_modules=EVERYWHERE, dora=True)
        memory = MemoryConfig(activation_checkpointing="full", cpu_offload=True)
        setting = Setting(
            lora, ParallelConfig(fsdp_wrap_policy="memory_efficient"), memory, torch.float32
        )
        with build_adapted(build_small_spec(tied=True), setting) as (model, world):
            before = {
                name: local(parameter).clone() for name, parameter in model.named_parameters()
            }
            optimizer = build_optimizer(OptimizerConfig(lr=0.01), model.parameters(), world.device)
            losses = []
            for _ in range(3):
                loss = compute_mean_loss(model, world)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(world.all_reduce_sum(loss.detach())))
            for name, parameter in model.named_parameters():
                assert torch.equal(local(parameter), before[name]) != is_adapter(name), name
            return losses

    for losses in run_ranks(work, RANKS):
        assert losses[0] > losses[1] > losses[2]


def local(parameter: Any) -> Tensor:
    return parameter.detach().to_local()
