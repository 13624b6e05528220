"""Check that the host memory that a run's offloading will take is there, before the model takes
any.

A recipe calls `check_host_memory` between sharding its model and giving it memory.
"""

import os
from collections.abc import Iterable

from torch import nn
from torch.distributed.fsdp import FSDPModule

from recipe_lib.config.mesh import compute_micro_batches, count_token_ranks
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.memory.activation_offload import OffloadedActivations
from recipe_lib.memory.layer_stream import list_streamed_parameters
from recipe_lib.memory.peaks import check_host_needs, find_free_host_memory, round_up_to_pinned
from recipe_lib.ops.device import holds_values
from recipe_lib.optim.optimizers import (
    count_local_bytes,
    count_optimizer_state_bytes,
    list_optimizer_state_sizes,
)
from recipe_lib.parallel import World
from recipe_lib.parallel.gradient_accumulation import list_param_entries, reduces_once
from recipe_lib.parallel.parallelize import Parallel


def check_host_memory(
    model: nn.Module,
    parallel: Parallel,
    cfg: FullFinetuneConfig,
    world: World,
    other: nn.Module | None = None,
) -> None:
    """Refuse a run whose ranks on this machine keep more on the host than
    `memory.host_memory_limit_gib`, or than is free. Raise SetupError.

    Call it when the model is sharded and has no memory yet. other: another model of the run that
    has its memory already, such as a frozen reference.
    """
    if world.device.type == "cpu" or not holds_values(world.device):
        return
    needs = count_offloaded_bytes(model, cfg, other)
    # Read now: what the first micro-batch is judged by is what was free before the model.
    free = find_free_host_memory()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # Parameters, gradients and states are known already.
    check_host_needs(needs, allowed=cfg.memory.host_memory_limit_gib, ranks=ranks, free=free)
    if parallel.levers.offload is not None:
        calls = count_calls_at_once(parallel, cfg, parallel.levers.offload)
        batch_size, _ = compute_micro_batches(cfg)
        max_tokens = (
            batch_size * cfg.sequences_per_item * cfg.max_seq_len // count_token_ranks(cfg.parallel)
        )

        # Activations are known when the first layer of the first micro-batch has run: by what it
        # kept, for all layers that are sent, the longest sequences and the micro-batches that a
        # pipeline has under way.
        def judge(num_bytes: int, tokens: int) -> None:
            expected_bytes = calls * num_bytes
            if 0 < tokens < max_tokens:
                expected_bytes = expected_bytes * max_tokens // tokens
            check_host_needs(
                needs | {"activation_offload": expected_bytes},
                allowed=cfg.memory.host_memory_limit_gib,
                ranks=ranks,
                free=free,
            )

        parallel.levers.offload.judge = judge


def count_offloaded_bytes(
    model: nn.Module, cfg: FullFinetuneConfig, other: nn.Module | None = None
) -> dict[str, int]:
    """Return what one rank keeps on the host, without activations, by key of the section `memory`.

    Pinned memory, that of sharded parameters, of their gradients and of offloaded optimizer states,
    is counted as torch takes it.
    """
    needs = {}
    parameters = list(model.parameters())
    other_parameters = list(other.parameters()) if other is not None else []
    if cfg.memory.cpu_offload:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        # States of a plugin's optimizer without facts are not known, and not counted.
        states = count_optimizer_state_bytes(cfg.optimizer, model.named_parameters()) or 0
        needs["cpu_offload"] = (
            _count_pinned_bytes([*parameters, *other_parameters])
            + _count_gradient_bytes(model, trained, cfg)
            + states
        )
    elif cfg.memory.optimizer_offload:
        sizes = list_optimizer_state_sizes(cfg.optimizer, model.named_parameters()) or []
        needs["optimizer_offload"] = sum(map(round_up_to_pinned, sizes))
    streamed = [*list_streamed_parameters(model)]
    if other is not None:
        streamed += list_streamed_parameters(other)
    if streamed:
        needs["stream_layers"] = _count_pinned_bytes(streamed)
    return needs


def _count_pinned_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Return what the local parts of the parameters take, each pinned by itself."""
    return sum(round_up_to_pinned(count_local_bytes([parameter])) for parameter in parameters)


def _count_gradient_bytes(
    model: nn.Module, trained: list[nn.Parameter], cfg: FullFinetuneConfig
) -> int:
    """Return the most that offloaded gradients take at a time."""
    # Pinned, as FSDP does not wait for its copy (`foreach_reduce`); torch 2.13 does wait for those
    # that are stepped in backward, and takes no more than is said.
    if cfg.memory.optimizer_in_backward:
        return max((_count_pinned_bytes([parameter]) for parameter in trained), default=0)
    pinned = _count_pinned_bytes(trained)
    if reduces_once(cfg.parallel) or compute_micro_batches(cfg)[1] == 1:
        return pinned
    # Micro-batches are reduced one by one: besides the sums there is what arrives.
    if cfg.parallel.accumulate_grad_in_fp32:
        return pinned + 2 * count_local_bytes(trained)  # sums in fp32, of bf16
    arriving = [
        _count_pinned_bytes(
            entry.sharded_param
            for entry in list_param_entries(unit)
            if entry.sharded_param.requires_grad
        )
        for unit in model.modules()
        if isinstance(unit, FSDPModule)
    ]
    return pinned + sum(sorted(arriving)[-2:])  # those of two units are under way


def count_calls_at_once(
    parallel: Parallel, cfg: FullFinetuneConfig, window: OffloadedActivations
) -> int:
    """Return how many forwards of layers have their tensors on the host at a time, at most."""
    pipeline = parallel.pipeline
    if pipeline is None:
        return max(window.sent, 0)
    # Of each moment of the schedule the forwards by stage whose backward is still to come.
    moments = pipeline.list_in_flight(compute_micro_batches(cfg)[1])
    return max(
        sum(count * len(pipeline.layers[stage]) for stage, count in moment.items())
        for moment in moments
    )
