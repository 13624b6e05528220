"""Imitate the training programs of others for the planner, where they hold other memory than ours.

`planner_rows.py` plans the class that `make_recipe_class` returns: our full fine-tuning recipe with
the parts replaced that a `Stack` names, written from the others' code at the time of their figures.
What it computes is of no interest, what it allocates and frees is.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from recipe_lib import training
from recipe_lib.adapters import add_adapters
from recipe_lib.cli import plan_request
from recipe_lib.cli.recipes import RecipeFile
from recipe_lib.data import Batch, StepBatches
from recipe_lib.memory import (
    apply_activation_checkpointing,
    checkpointing,
    compile_layers,
    offload_activations,
)
from recipe_lib.memory.budget import ATTENTION, MATMUL
from recipe_lib.models import build_meta
from recipe_lib.models.decoder import DecoderLayer, Norm
from recipe_lib.ops.mlp import ACTIVATIONS
from recipe_lib.parallel import DTYPES, Parallel, materialize
from recipe_lib.parallel.gradient_accumulation import GradientAccumulation

RECIPE = "full_finetune_distributed"
# Values of `Stack.sharding`.
FSDP1 = "FSDP1"
FSDP2 = "FSDP2"
OURS = "ours"
PIECES = "bf16 in eight pieces until backward"  # a value of `Stack.logits`


@dataclass(frozen=True)
class Stack:
    """The parts of a stack that are not ours; with all defaults, none is."""

    # `ours`; or `FSDP1` or `FSDP2` as torch has them: the modules of the root unit are gathered on
    # FSDP's own stream, and the embedding once more for backward.
    sharding: str = OURS
    # Empty: our loss. Else logits of all tokens and torch's cross-entropy:
    # `until backward`: in fp32, given up before backward;
    # `through backward`: in fp32, held by a variable until the next forward;
    # `bf16 until backward`: the fp32 copy belongs to the loss alone;
    # `bf16 in eight pieces until backward`: likewise, the loss compiled if the layers are.
    logits: str = ""
    shifted: bool = False  # labels are shifted by slicing and copying the logits
    norms: bool = False  # RMS norms are written out, in fp32
    expanded_keys: bool = False  # keys and values are copied for each query head
    saved_matmuls: bool = False  # selective checkpointing keeps the first of every two matmuls
    mixed: bool = False  # parameters, states and sums of gradients in fp32, compute in bf16
    last_layer_kept: bool = False  # the last layer is not resharded after forward
    checkpointed_ends: bool = False  # embedding and output projection are checkpointed too


def make_recipe_class(stack: Stack, recipe: str = RECIPE) -> type:
    """Return our recipe's class with the parts of that stack in place of ours.

    recipe: the name of a shipped recipe.
    """
    ours = plan_request.find_recipe_class(RecipeFile.find(recipe))
    return type("Imitation", (_Imitated, ours), {"stack": stack}) if stack != Stack() else ours


class _Imitated:
    """The replaced methods of a recipe, a base before the recipe's own class."""

    stack: Stack
    # The recipe's own attributes, but for `held`.
    cfg: Any
    spec: Any
    world: Any
    device: torch.device
    model: Any
    held: Any  # logits that a local variable of theirs keeps alive through backward; None: none
    trained: dict[str, Tensor]

    def setup_model(self) -> None:
        """Make the model as the recipe does, part by part as the stack says.

        It is left to the recipe where the stack differs in the loss alone.
        """
        cfg = self.cfg
        stack = self.stack
        if stack.sharding == OURS and not (
            stack.norms or stack.expanded_keys or stack.saved_matmuls or stack.mixed
        ):
            super().setup_model()  # type: ignore[misc]
            return
        # In the recipe's order: each step takes the model as the one before has left it.
        self.model = build_meta(self.spec, torch.float32 if stack.mixed else DTYPES[cfg.dtype])
        if hasattr(cfg, "lora"):
            add_adapters(self.model, cfg.lora, DTYPES[cfg.dtype])
        for module in self.model.modules():
            if stack.norms and isinstance(module, Norm):
                module.norm = compute_norm_written_out
            if stack.expanded_keys and isinstance(module, DecoderLayer):
                module.self_attn.attend = partial(
                    attend_with_expanded_keys, module.self_attn.attend
                )
        if stack.saved_matmuls:
            options = {"context_fn": _keep_first_matmuls}
            for layer in self.model.model.layers:
                layer.forward = checkpointing._wrap_in_checkpoint(layer.forward, options)
        else:
            apply_activation_checkpointing(self.model, cfg.memory.activation_checkpointing)
        if cfg.compile:
            compile_layers(self.model)
        offload_activations(self.model, cfg.memory, self.device)
        if stack.checkpointed_ends:
            for module in (self.model.model.embed_tokens, self.model.lm_head):
                module.forward = checkpointing._wrap_in_checkpoint(module.forward, {})
        if self.world.size == 1:
            materialize(self.model, cfg.memory, self.device)
        elif stack.sharding == FSDP1:
            self.model = _shard_with_fsdp1(self.model, cfg.parallel.fsdp_wrap_policy, self.device)
        else:
            _shard_with_fsdp2(
                self.model, wrapping=cfg.parallel.fsdp_wrap_policy, world=self.world, stack=stack
            )
            materialize(self.model, cfg.memory, self.device)
        # The model is sharded already: of what the recipe decides for a parallel run, only how
        # gradients are added up is left.
        self.parallel = Parallel(accumulation=GradientAccumulation(self.model, cfg.parallel))

    def train_step(self, batches: StepBatches) -> Any:
        """Run the recipe's step; with FSDP1 without clipping."""
        clip_grad_norm: Any = training.clip_grad_norm
        if self.stack.sharding == FSDP1:
            # Our clipping takes norms of DTensors, which FSDP1's flat shards are not.
            clip_grad_norm = _skip_clipping
        with mock.patch.object(training, "clip_grad_norm", clip_grad_norm):
            return super().train_step(batches)  # type: ignore[misc]

    def compute_loss(self, batch: Batch) -> Tensor:
        """Return the summed loss of a micro-batch, from logits of all tokens or as ours does.

        batch: tokens and labels `[b, s]`.
        """
        if not self.stack.logits:
            return super().compute_loss(batch)  # type: ignore[misc]
        if self.stack.logits == PIECES:
            return self._compute_loss_in_pieces(batch)
        logits = self.model(batch.tokens, batch.positions, batch.attention)
        labels = batch.labels
        if not self.stack.logits.startswith("bf16"):
            logits = logits.float()
        if self.stack.shifted:
            logits = logits[:, :-1].contiguous()  # a copy: it takes as much again
            labels = labels[:, 1:].contiguous()
        loss = _cross_entropy(logits, labels)
        self.held = logits if self.stack.logits == "through backward" else None
        return loss

    def _compute_loss_in_pieces(self, batch: Batch) -> Tensor:
        """Sum the loss over eighths of each sequence, whose logits are all kept until backward."""
        hidden = self.model.model(batch.tokens, batch.positions, batch.attention, None)
        logits = [self.model.lm_head(piece) for piece in hidden.tensor_split(8, dim=1)]
        labels = batch.labels.tensor_split(8, dim=1)
        sum_losses = _compiled_cross_entropy if self.cfg.compile else _cross_entropy
        return torch.stack([sum_losses(*pair) for pair in zip(logits, labels, strict=True)]).sum()


def _skip_clipping(*_: Any, **__: Any) -> Tensor:
    """Return a norm of zero in place of clipping."""
    return torch.zeros(())


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss summed over tokens, in fp32. logits: `[b, s, vocabulary]`."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


_compiled_cross_entropy = torch.compile(_cross_entropy)


def compute_product_written_out(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return the gated product by single operators; autograd keeps the activated gate, too."""
    return ACTIVATIONS[activation][0](gate) * up


def compute_norm_written_out(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm by single operators.

    Autograd keeps the fp32 input and the normalized one, more than of one kernel.
    """
    hidden_fp32 = hidden.float()
    inverse_rms = torch.rsqrt(hidden_fp32.pow(2).mean(-1, keepdim=True) + eps)
    return (hidden_fp32 * inverse_rms).type_as(hidden) * weight


def attend_with_expanded_keys(
    attend: Any, q: Tensor, k: Tensor, v: Tensor, info: Any, **more: Any
) -> Tensor:
    """Attend with each key and value head copied for the query heads that share it.

    attend: the layer's own attention. q, k, v: `[b, heads, s, e]`. info, more: are passed on.
    """
    num_copies = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(num_copies, dim=1) for tensor in (k, v))
    return attend(q, k, v, info, **more)


def _keep_first_matmuls() -> Any:
    """Make contexts of selective checkpointing that keep attention and every other matmul.

    That is the first of every two: matmuls are counted from 0 in each layer.
    """
    return checkpointing._make_contexts(
        lambda kind, number: kind == ATTENTION or (kind == MATMUL and number % 2 == 0)
    )


def _shard_with_fsdp2(model: Any, wrapping: str, world: Any, stack: Stack) -> None:
    """Shard each layer, embedding and output projection by the wrapping, and the rest as the root.

    wrapping: the value of parallel.fsdp_wrap_policy; embedding and output projection are units of
    their own with `memory_efficient`.
    """
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        if stack.mixed
        else MixedPrecisionPolicy()
    )
    options: dict[str, Any] = {"mesh": world.mesh["data_shard"], "mp_policy": policy}
    layers = list(model.model.layers)
    for layer in layers:
        fully_shard(
            layer,
            reshard_after_forward=not (stack.last_layer_kept and layer is layers[-1]),
            **options,
        )
    if wrapping == "memory_efficient":
        for module in (model.model.embed_tokens, model.lm_head):
            fully_shard(module, reshard_after_forward=True, **options)
    fully_shard(model, **options)
    for module in model.modules():
        # FSDP's modules: gradients are summed, since the recipe divides by the tokens of all ranks.
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _shard_with_fsdp1(model: Any, wrapping: str, device: torch.device) -> nn.Module:
    """Wrap the model with FSDP1, in the units of `_shard_with_fsdp2`, and return it.

    Adapters, some ten MB that their program shards as units of their own, are left whole.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import CustomPolicy

    units = set(model.model.layers)
    if wrapping == "memory_efficient":
        units |= {model.model.embed_tokens, model.lm_head}
    adapters = [
        module for name, module in model.named_modules() if name.endswith(("lora_A", "lora_B"))
    ]
    for module in adapters:
        module.to_empty(device=device)
    return FullyShardedDataParallel(
        model,
        ignored_states=[parameter for module in adapters for parameter in module.parameters()],
        auto_wrap_policy=CustomPolicy(lambda module: module in units),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=device,
        param_init_fn=lambda module: module.to_empty(device=device, recurse=False),  # from meta
    )
