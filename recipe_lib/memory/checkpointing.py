"""Checkpoint activations: keep less for backward, and compute it again (arXiv 1604.06174).

`apply_memory_levers` calls `apply_activation_checkpointing(model, mode, ...)`, which wraps the
forward of each layer. `suspend_selective_checkpointing` is for code that runs inside a layer and is
no part of its computation.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _pop_mode, _push_mode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from recipe_lib.config.mesh import compute_micro_batches, compute_padded_multiple
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.memory.budget import (
    ATTENTION,
    MATMUL,
    SUM,
    BudgetChoice,
    KeptOperators,
    PipelineStages,
    choose_kept_operators,
    get_operator_kind,
    measure_layer_costs,
)
from recipe_lib.memory.mlp_tiles import is_computing_piece
from recipe_lib.models.language_model import list_layer_names
from recipe_lib.ops.device import get_kernel_type
from recipe_lib.ops.fused_kernels import should_fuse
from recipe_lib.ops.kept_tensors import is_keeping_results

# Elements that a layer of a Llama-like decoder keeps for a token, by mode, next to the log-sum-exp
# of attention (d model width, h heads and k key heads of width e, f MLP width):
#
#     none       every intermediate result that some gradient needs
#     selective  2 d + h e + k e + f: its input, and the results of attention and of the key, output
#                and up projections
#     budget     between full and none, what saves most time within `memory.activation_budget_gib`
#     full       d: its input


def apply_activation_checkpointing(
    model: nn.Module,
    mode: str,
    cfg: FullFinetuneConfig | None = None,
    device: torch.device | None = None,
    pipeline: PipelineStages | None = None,
) -> str | None:
    """Let each layer keep less for backward, in place; call it before compiling and sharding.

    mode `full`: a layer keeps its input and runs forward again in backward. `selective`: it also
    keeps the results of attention, of sums over ranks and of every second matmul, so that about
    half is computed again. `budget`: it keeps what `memory.activation_budget_gib` of `cfg` has room
    for, for micro-batches of its longest sequences. `none`: nothing changes.

    Layers are the elements of the model's module lists. cfg, device, pipeline are read for `budget`
    alone. device: where layers will run; None: the CPU. pipeline: the stages of this rank; None: it
    has all layers. Returns a line for the log on what was chosen within a budget; None in the other
    modes. Raises ConfigError if the layers' inputs alone take more than the budget.
    """
    if mode == "none":
        return None
    description = None
    layer_names = list_layer_names(model)
    # Layer name -> keywords for torch's `checkpoint`; layers without an entry are not checkpointed.
    options: dict[str, dict[str, Any]]
    if mode == "budget":
        assert cfg is not None
        choice = _choose_within_budget(
            model, cfg=cfg, device=device or torch.device("cpu"), pipeline=pipeline
        )
        description = choice.describe()
        # Equal options are the same object, so that layers that keep the same operators share one
        # compilation.
        shared_options = {
            kept: {"context_fn": partial(_make_contexts, partial(_is_kept, kept))}
            for kept in choice.kept.values()
            if kept
        }
        options = {
            name: shared_options.get(kept, {})
            for name, kept in choice.kept.items()
            if kept is not None
        }
    else:
        selective = {"context_fn": partial(_make_contexts, _is_selected)}
        options = dict.fromkeys(layer_names, selective if mode == "selective" else {})
    modules = dict(model.named_modules())
    for name, layer_options in options.items():
        # The forward is wrapped, not the module, which would rename parameters.
        modules[name].forward = _wrap_in_checkpoint(modules[name].forward, layer_options)
    return description


@contextmanager
def suspend_selective_checkpointing() -> Iterator[None]:
    """Hide the operators that run inside the block from selective checkpointing.

    Use it for what is no part of the layer's computation, such as copies that are begun ahead.
    torch matches the operators of forward and recomputation by their order: if one of the two runs
    an operator more, later ones get each other's results.
    """
    # By private names: torch has no public way to step out of its modes.
    suspended = []
    while is_keeping_results():
        suspended.append(_pop_mode())
    try:
        yield
    finally:
        for mode in reversed(suspended):
            _push_mode(mode)


def _wrap_in_checkpoint(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=True,  # dropout drops the same elements the second time
            **options,
            **kwargs,
        )

    return run


def _choose_within_budget(
    model: nn.Module, cfg: FullFinetuneConfig, device: torch.device, pipeline: PipelineStages | None
) -> BudgetChoice:
    assert cfg.memory.activation_budget_gib is not None
    batch_size, num_micro_batches = compute_micro_batches(cfg)
    multiple = compute_padded_multiple(cfg)  # sequences are padded to a multiple of so many tokens
    costs = measure_layer_costs(
        model,
        num_sequences=batch_size * cfg.sequences_per_item,
        length=-(-cfg.max_seq_len // multiple) * multiple,
        tensor_ranks=cfg.parallel.tensor,
        context_ranks=cfg.parallel.context,
        kernels=get_kernel_type(device),
        pipeline=pipeline,
        # In a compiled layer there is no fused operator: the compiler fuses the chain itself.
        fused=should_fuse(device) and not cfg.compile,
    )
    in_flight = [{0: 1}] if pipeline is None else pipeline.list_in_flight(num_micro_batches)
    return choose_kept_operators(costs, cfg.memory.activation_budget_gib, in_flight)


def _is_kept(kept: KeptOperators, kind: str, index: int) -> bool:
    return (kind, index) in kept


def _is_selected(kind: str, index: int) -> bool:
    """Return True for an operator that `selective` keeps: attention, sums, every second matmul.

    A layer's matmuls are query, key, value, output, gate, up and down: key, output and up are kept.
    Down is not, which is right: no gradient needs its result.
    """
    return kind in (ATTENTION, SUM) or (kind == MATMUL and index % 2 == 1)


def _make_contexts(
    is_kept: Callable[[str, int], bool],
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a layer's forward and of its recomputation.

    is_kept: `fn(kind, index)` returns True for an operator to keep. index: among the operators of
    its kind in the layer.
    """
    # `is_recompute` -> kind -> operators so far: forward and recomputation both count from 0.
    counts: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}

    def choose_policy(
        context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        kind = get_operator_kind(operator)
        # A piece of a tiled MLP is computed again in any case.
        if kind is None or is_computing_piece():
            return CheckpointPolicy.PREFER_RECOMPUTE
        index = counts[context.is_recompute][kind]
        counts[context.is_recompute][kind] += 1
        if is_kept(kind, index):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose_policy)
