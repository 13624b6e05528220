"""Activation checkpointing: what a layer keeps for backward, against what it computes again (arXiv
1604.06174).

For a layer of a Llama-like decoder it keeps, besides the log-sum-exp of attention, elements a
token:

    none       every intermediate result that some gradient needs
    selective  2 d + h e + k e + f: its input, and what attention, the key, output and up projections gave
    budget     between full and none, layer by layer, what saves most time under `memory.activation_budget_gib`
    full       d: its input
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
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


def apply_activation_checkpointing(
    model: nn.Module,
    mode: str,
    cfg: FullFinetuneConfig | None = None,
    device: torch.device | None = None,
    pipeline: PipelineStages | None = None,
) -> str | None:
    """Makes each layer keep less for backward, in place; call it before layers are compiled and
    sharded.

    mode `full`: a layer keeps its input and runs forward again in backward. `selective`: it also
    keeps the outputs of attention, of its own sums over ranks and of every second matmul, so that
    about half is computed again. `budget`: what `memory.activation_budget_gib` of `cfg` has room
    for, for micro-batches of its longest rows; `device` is the one that layers will run on,
    `pipeline` what runs the model's stages. `none`: nothing changes. Layers are the elements of the
    model's module lists. A layer's forward is wrapped, the module is not: parameter names stay as
    they are. Random numbers (dropout) come out the same the second time.

    Returns what a budget chose, for the log. Raises ConfigError for a budget that inputs alone do
    not fit in.
    """
    if mode == "none":
        return None
    described = None
    names, modules = list_layer_names(model), dict(model.named_modules())
    if mode == "budget":
        assert cfg is not None
        choice = _choose_within_budget(model, cfg, device or torch.device("cpu"), pipeline)
        described = choice.describe()
        alike: dict[
            KeptOperators | None, dict[str, Any]
        ] = {  # layers that keep the same share one compilation
            chosen: {"context_fn": partial(_make_contexts, partial(_is_chosen, chosen))}
            for chosen in choice.kept.values()
            if chosen
        }
        options = {
            name: alike.get(chosen, {})
            for name, chosen in choice.kept.items()
            if chosen is not None
        }
    else:
        kept: dict[str, Any] = (
            {"context_fn": partial(_make_contexts, _is_selected)} if mode == "selective" else {}
        )
        options = dict.fromkeys(names, kept)
    for name in names:
        if name in options:
            modules[name].forward = _wrap_in_checkpoint(modules[name].forward, options[name])
    return described


@contextmanager
def suspend_selective_checkpointing() -> Iterator[None]:
    """Inside, operators are none of those that selective checkpointing counts: their number may be
    another in backward.

    For what is not part of the layer's computation, as copies that are begun ahead.
    """
    taken = []
    while isinstance(
        _get_current_dispatch_mode(), (_CachedTorchDispatchMode, _CachingTorchDispatchMode)
    ):
        taken.append(_pop_mode())
    try:
        yield
    finally:
        for mode in reversed(taken):
            _push_mode(mode)


def _wrap_in_checkpoint(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            forward, *args, use_reentrant=False, preserve_rng_state=True, **options, **kwargs
        )

    return run


def _choose_within_budget(
    model: nn.Module, cfg: FullFinetuneConfig, device: torch.device, pipeline: PipelineStages | None
) -> BudgetChoice:
    """What each layer of this rank keeps under the config's budget."""
    assert cfg.memory.activation_budget_gib is not None
    rows, count = compute_micro_batches(cfg)
    rows *= cfg.sequences_per_item
    multiple = compute_padded_multiple(cfg)
    length = -(-cfg.max_seq_len // multiple) * multiple
    costs = measure_layer_costs(
        model,
        rows,
        length,
        cfg.parallel.tensor,
        get_kernel_type(device),
        pipeline,
        context_ranks=cfg.parallel.context,
        fused=should_fuse(device) and not cfg.compile,
    )
    moments = [{0: 1}] if pipeline is None else pipeline.in_flight(count)
    return choose_kept_operators(costs, cfg.memory.activation_budget_gib, moments)


_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def _is_chosen(chosen: KeptOperators, kind: str, number: int) -> bool:
    return (kind, number) in chosen


def _is_selected(kind: str, number: int) -> bool:
    # The second matmul, the fourth, ...: a layer's last (down) is the seventh, and no gradient
    # needs its output.
    return kind in (ATTENTION, SUM) or (kind == MATMUL and number % 2 == 1)


def _make_contexts(is_kept: Callable[[str, int], bool]) -> _Contexts:
    """The contexts of one layer's forward and of its recomputation, which count operators from the
    start each.

    is_kept: of the kind of an operator, and which of its kind in the layer it is.
    """
    counts: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}

    def choose_policy(
        context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        kind = get_operator_kind(operator)
        if kind is None or is_computing_piece():  # pieces are computed again in any case
            return CheckpointPolicy.PREFER_RECOMPUTE
        number = counts[context.is_recompute][kind]
        counts[context.is_recompute][kind] += 1
        return (
            CheckpointPolicy.MUST_SAVE
            if is_kept(kind, number)
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    return create_selective_checkpoint_contexts(choose_policy)
