"""Whether the host memory that a run's offloading will take is there, before the model takes
any.
"""

import os

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
    """SetupError where all ranks of this machine keep more on the host than
    `memory.host_memory_limit_gib`, or is free.

    Call it when the model is sharded and has no memory yet. Parameters, gradients and states are
    judged at once; activations when the first layer of the first micro-batch has run, by what it
    kept, for all layers that are sent, the longest sequences and the micro-batches that a pipeline
    has under way. other: another model of the run that has its memory already, such as a frozen
    reference.
    """
    if world.device.type == "cpu" or not holds_values(world.device):
        return
    needs, free = count_offloaded_bytes(model, cfg, other), find_free_host_memory()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    check_host_needs(needs, cfg.memory.host_memory_limit_gib, ranks, free)
    if parallel.levers.offload is not None:
        calls = count_calls_at_once(parallel, cfg, parallel.levers.offload)
        longest = (
            compute_micro_batches(cfg)[0]
            * cfg.sequences_per_item
            * cfg.max_seq_len
            // count_token_ranks(cfg.parallel)
        )

        def judge(num_bytes: int, tokens: int) -> None:
            kept = calls * num_bytes
            if 0 < tokens < longest:
                kept = kept * longest // tokens
            check_host_needs(
                needs | {"activation_offload": kept}, cfg.memory.host_memory_limit_gib, ranks, free
            )

        parallel.levers.offload.judge = judge


def count_offloaded_bytes(
    model: nn.Module, cfg: FullFinetuneConfig, other: nn.Module | None = None
) -> dict[str, int]:
    """By key of the section `memory` what one rank keeps on the host, without activations. Pinned
    memory, that of sharded parameters, of their gradients and of offloaded optimizer states, is
    counted as torch takes it; states of a plugin's optimizer without facts are not known, and not
    counted. A gradient's is pinned as FSDP does not wait for its copy (`foreach_reduce`); torch
    2.13 does wait for those that are stepped in backward, and takes no more than is said.
    """
    found = {}
    every = list(model.parameters())
    trained = [parameter for parameter in every if parameter.requires_grad]
    states = count_optimizer_state_bytes(cfg.optimizer, model.named_parameters()) or 0
    if cfg.memory.cpu_offload:
        frozen = list(other.parameters()) if other is not None else []
        pinned = sum(
            round_up_to_pinned(count_local_bytes([parameter])) for parameter in [*every, *frozen]
        )
        found["cpu_offload"] = pinned + _count_gradient_bytes(model, trained, cfg) + states
    elif cfg.memory.optimizer_offload:
        sizes = list_optimizer_state_sizes(cfg.optimizer, model.named_parameters()) or []
        found["optimizer_offload"] = sum(map(round_up_to_pinned, sizes))
    streamed = [
        *list_streamed_parameters(model),
        *(list_streamed_parameters(other) if other is not None else []),
    ]
    if streamed:
        found["stream_layers"] = sum(
            round_up_to_pinned(count_local_bytes([parameter])) for parameter in streamed
        )
    return found


def _count_gradient_bytes(
    model: nn.Module, trained: list[nn.Parameter], cfg: FullFinetuneConfig
) -> int:
    """Of offloaded gradients: the largest if each is stepped in backward, else all; and where
    micro-batches are reduced one by one, those of two units that arrive, or sums in fp32.
    """
    pinned = [round_up_to_pinned(count_local_bytes([parameter])) for parameter in trained]
    if cfg.memory.optimizer_in_backward:
        return max(pinned, default=0)
    if reduces_once(cfg.parallel) or compute_micro_batches(cfg)[1] == 1:
        return sum(pinned)
    if cfg.parallel.accumulate_grad_in_fp32:
        return sum(pinned) + 2 * count_local_bytes(trained)  # of bf16
    units = [
        [entry.sharded_param for entry in list_param_entries(unit)]
        for unit in model.modules()
        if isinstance(unit, FSDPModule)
    ]
    arriving = [
        sum(round_up_to_pinned(count_local_bytes([one])) for one in unit if one.requires_grad)
        for unit in units
    ]
    return sum(pinned) + sum(sorted(arriving)[-2:])


def count_calls_at_once(
    parallel: Parallel, cfg: FullFinetuneConfig, window: OffloadedActivations
) -> int:
    """Return how many forwards of layers have their tensors on the host at a time, at most."""
    pipeline = parallel.pipeline
    if pipeline is None:
        return max(window.sent, 0)
    moments = pipeline.list_in_flight(compute_micro_batches(cfg)[1])
    return max(
        sum(count * len(pipeline.layers[stage]) for stage, count in moment.items())
        for moment in moments
    )
