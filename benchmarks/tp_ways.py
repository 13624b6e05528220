"""Make our full fine-tuning recipe keep the tensors of a layer as other programs do.

Used by tp_trace.py. Each `Variant` is our recipe with the parts exchanged that keep other tensors,
written from what the others' code does; embedding, head, loss, pipeline and optimizer are ours in
all of them.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.tp_memory import build_stock_layer
from recipe_lib import training
from recipe_lib.models.decoder import Decoder, DecoderLayer
from recipe_lib.ops import gathered
from recipe_lib.ops.dtensor_shards import get_detached_local, wrap_local
from recipe_lib.ops.mlp import ACTIVATIONS, gated_activation
from recipe_lib.parallel import World, parallelize, tensor, tensor_forwards
from recipe_lib.parallel.gradient_accumulation import GradientAccumulation

# How the MLP makes its product of gate and up.
REMADE = "made again"
FUSED = "fused"
WRITTEN_OUT = "written out"


@dataclass(frozen=True)
class Variant:
    """A program's choice of the tensors that a layer keeps."""

    name: str  # of the line in the picture
    elements: str  # kept of a token, times the ranks of a group, as a formula for the page
    regather: str = "true"  # the value of `parallel.tensor_regather_in_backward`
    # The product of the MLP. REMADE: made again in backward from gate and up, as ours; FUSED: the
    # activation is made again, the product kept; WRITTEN_OUT: gate, up, activation, product kept.
    product: str = REMADE
    normed_again: bool = True  # is the norm's output made again before it is gathered again?
    one_buffer: bool = False  # do all gathered tokens lie in one buffer, which stays?
    styles: bool = False  # torch's DTensor styles, not our nodes?

    def count_kept_elements(self, *, h: int, q: int, k: int, f: int, t: int) -> int:
        """Return the elements that a layer keeps of a token, times t.

        h, f: widths of the model and of the MLP. q, k: of all query and key heads. t: the ranks of
        a tensor-parallel group.
        """
        if self.styles or self.regather == "false":
            gathered_tokens = 2 * h * t
        else:
            gathered_tokens = 0 if self.normed_again else 2 * h
        mlp = {REMADE: 2, FUSED: 3, WRITTEN_OUT: 4}[self.product] * f
        return 2 * h + gathered_tokens + 2 * q + 2 * k + mlp


STYLES = Variant("DTensor styles", "2h + 2ht + 2q + 2k + 4F", product=WRITTEN_OUT, styles=True)
NANOTRON = Variant(
    "nanotron", "4h + 2q + 2k + 4F", product=WRITTEN_OUT, normed_again=False, one_buffer=True
)
MEGATRON = Variant(
    "Megatron", "4h + 2q + 2k + 3F", product=FUSED, normed_again=False, one_buffer=True
)
KEPT = Variant("ours, gather kept", "2h + 2ht + 2q + 2k + 2F", regather="false")
OURS = Variant("ours", "2h + 2q + 2k + 2F")
VARIANTS = (STYLES, NANOTRON, MEGATRON, KEPT, OURS)


@contextmanager
def use_variant(variant: Variant) -> Iterator[None]:
    """Make our tensor-parallel layers keep what a variant keeps, while entered."""
    with ExitStack() as stack:

        def exchange(owner: Any, name: str, by: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, by))

        if variant.styles:
            exchange(sys.modules[parallelize.__module__], "shard_tensors", _shard_with_styles)
            exchange(training, "clip_grad_norm", _make_summing_clip(training.clip_grad_norm))
        elif variant.product == FUSED:
            exchange(tensor_forwards, "gated_linear", _multiply_fused)
        elif variant.product == WRITTEN_OUT:
            exchange(tensor_forwards, "gated_linear", _multiply_written_out)
        if not variant.normed_again:
            exchange(tensor_forwards, "gather_linears", _gather_without_norm)
        if variant.one_buffer:
            stack.enter_context(share_one_buffer())
        yield


@contextmanager
def keep_sums_standing() -> Iterator[None]:
    """Keep the memory of gradients' fp32 sums from step to step, as nanotron and Megatron do.

    While entered; needs `parallel.accumulate_grad_in_fp32=true`.
    """
    with mock.patch.object(
        sys.modules[parallelize.__module__], "GradientAccumulation", _StandingSums
    ):
        yield


class _StandingSums(GradientAccumulation):
    """Our accumulation with one fp32 tensor for each trained parameter, never given back."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._standing: dict[nn.Parameter, Tensor] = {}  # from the first step's first backward on

    @torch.no_grad()
    def _move(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is None:
                continue
            if parameter not in self._standing:
                self._standing[parameter] = torch.zeros_like(
                    get_detached_local(parameter), dtype=torch.float32
                )
            self._standing[parameter].add_(get_detached_local(parameter.grad))
            parameter.grad = None

    @torch.no_grad()
    def finish(self) -> None:
        self._is_finished = True
        for parameter, total in self._standing.items():
            parameter.grad = wrap_local(parameter, total.to(parameter.dtype))
            total.zero_()


@contextmanager
def share_one_buffer() -> Iterator[None]:
    """Make all gathers of linears write to the same memory, one after another, while entered.

    Right where nobody reads them after the next gather has begun; with
    `tensor_regather_in_backward: false` autograd does, and is not told, as in the first version of
    nanotron's change.
    """
    gather_apart = _make_gradient_gather(gathered.start_gather)
    with (
        mock.patch.object(gathered, "start_gather", _Buffer().start_gather),
        mock.patch.object(gathered, "_gather", gather_apart),
    ):
        yield


def _gather_without_norm(*args: Any, normed: Any = None, **kwargs: Any) -> list[Tensor]:
    return gathered.gather_linears(*args, **kwargs)


def _multiply_fused(gate: Tensor, up: Tensor, weight: Tensor, activation: str) -> Tensor:
    return F.linear(gated_activation(gate, up, activation), weight)


def _multiply_written_out(gate: Tensor, up: Tensor, weight: Tensor, activation: str) -> Tensor:
    return F.linear(ACTIVATIONS[activation][0](gate) * up, weight)


class _Buffer:
    """The memory that all gathers write to; made when first asked for, and never given back."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def start_gather(self, shard: Tensor, group: gathered.Group) -> Tensor:
        """Start a gather as `gathered.start_gather` does, into the buffer."""
        count = shard.numel() * group.size
        if (
            self._memory is None
            or self._memory.numel() < count
            or self._memory.dtype != shard.dtype
        ):
            self._memory = shard.new_empty(count)
        # `.data`: autograd is not told that the memory is written again.
        out = self._memory[:count].view(group.size * shard.shape[0], *shard.shape[1:]).data
        operator = torch.ops._c10d_functional.all_gather_into_tensor_out
        return operator(shard.contiguous(), group.size, group.name, out=out)  # type: ignore[no-any-return]


def _make_gradient_gather(start_gather: Any) -> Any:
    """Return backward of a reduce-scatter, which gathers into memory of its own."""

    def gather(gradient: Tensor, group: gathered.Group) -> Tensor:
        return gathered.wait(start_gather(gradient, group))

    return gather


def _shard_with_styles(model: Decoder, parallel: Any, memory: Any, world: World) -> dict[str, str]:
    """Shard a decoder as `shard_tensors` does, with its layers under torch's styles.

    A micro-batch is one sequence. Returned by name: how each parameter's gradient is divided.
    """
    gradients: dict[str, str] = {}
    assert world.tensor is not None
    for number, layer in model.model.layers.named_children():
        build_stock_layer(layer, world)
        layer.forward = MethodType(_run_layer_on_row, layer)
        gradients |= {
            f"model.layers.{number}.{name}": "sharded" for name, _ in layer.named_parameters()
        }
    modules: dict[str, nn.Module | None] = {
        "model.embed_tokens": model.model.embed_tokens,
        "model.norm": model.model.norm,
        "lm_head": model.lm_head,
    }
    for path, module in modules.items():
        if module is None:
            continue  # of another stage of the pipeline
        named = nn.ModuleDict({path.rpartition(".")[2]: module})
        divisions = tensor._place_parameters(named, world.mesh["tensor"], ())
        for name, division in divisions.items():
            gradients[f"{path}.{name.rpartition('.')[2]}"] = division
    for module, forward in (
        (model.model.embed_tokens, tensor_forwards.run_embedding),
        (model.lm_head, tensor_forwards.run_head),
    ):
        if module is not None:
            tensor._replace_forward(module, tensor._bind_settings(forward, world.tensor))
    if model.model.norm is not None:
        tensor._replace_forward(model.model.norm, tensor_forwards.run_norm)
    model.forward = tensor_forwards.restore_rows(model.forward)  # type: ignore[method-assign]
    return gradients


def _make_summing_clip(clip: Any) -> Any:
    """Return clipping that first sums what DTensor left as parts of a sum.

    These are the gradients of replicated norms.
    """

    def clip_after_sum(parameters: Iterable[nn.Parameter], **kwargs: Any) -> Tensor:
        parameters = list(parameters)
        for parameter in parameters:
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and gradient.placements[0].is_partial():
                parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
        return clip(parameters, **kwargs)  # type: ignore[no-any-return]

    return clip_after_sum


def _run_layer_on_row(layer: DecoderLayer, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run a layer, which takes `[b, s, d]`, on one sequence's `[n, d]`."""
    return DecoderLayer.forward(layer, hidden.unsqueeze(0), *args, **kwargs).squeeze(0)
