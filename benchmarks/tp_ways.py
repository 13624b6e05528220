"""Make our full fine-tuning recipe keep the tensors of a tensor-parallel layer as others' do.

`tp_trace.py` plans our recipe under `use_variant` for each of `VARIANTS`; `tp_curve.py` trains
under `share_one_buffer`. Written from what the other programs' code does. Only the layers differ:
embedding, head, loss, pipeline and optimizer are ours in all variants.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.tp_memory import multiply_written_out, parallelize_stock_layer
from recipe_lib import training
from recipe_lib.models import decoder
from recipe_lib.models.decoder import Decoder, DecoderLayer
from recipe_lib.ops import gathered
from recipe_lib.ops.dtensor_shards import get_detached_local, wrap_local
from recipe_lib.parallel import World, parallelize, tensor, tensor_forwards
from recipe_lib.parallel.gradient_accumulation import GradientAccumulation

# What the MLP keeps for the backward of its product act(gate) * up: values of `Variant.product`.
REMADE = "made again"  # gate and up; the product is made again
FUSED = "fused"  # gate, up and product; the activation is made again
WRITTEN_OUT = "written out"  # gate, up, activation and product


@dataclass(frozen=True)
class Variant:
    """A program's choice of the tensors that a layer keeps."""

    name: str  # of the line in the picture
    # What `count_kept_elements` returns, as a formula for the page; F stands for its f.
    elements: str
    regather: str = "true"  # the value of `parallel.tensor_regather_in_backward`
    # The value of `memory.recompute_cheap`. Without it the norm's output is kept, and `product` is
    # not `REMADE`.
    recompute_cheap: bool = True
    product: str = REMADE
    one_buffer: bool = False  # all gathers write to one buffer, which stays
    styles: bool = False  # torch's DTensor styles in place of our layers

    def count_kept_elements(self, *, h: int, q: int, k: int, f: int, t: int) -> int:
        """Compute the elements that a layer keeps of a token on one rank, times t.

        h, f: widths of the model and of the MLP. q, k: of all query and key heads. t: ranks of a
        tensor-parallel group.
        """
        if self.styles or self.regather == "false":
            gathered_tokens = 2 * h * t  # of attention and MLP, whole on every rank
        else:
            gathered_tokens = 0 if self.recompute_cheap else 2 * h
        mlp = {REMADE: 2, FUSED: 3, WRITTEN_OUT: 4}[self.product] * f
        return 2 * h + gathered_tokens + 2 * q + 2 * k + mlp


STYLES = Variant(
    "DTensor styles",
    "2h + 2ht + 2q + 2k + 4F",
    recompute_cheap=False,
    product=WRITTEN_OUT,
    styles=True,
)
NANOTRON = Variant(
    "nanotron", "4h + 2q + 2k + 4F", recompute_cheap=False, product=WRITTEN_OUT, one_buffer=True
)
MEGATRON = Variant(
    "Megatron", "4h + 2q + 2k + 3F", recompute_cheap=False, product=FUSED, one_buffer=True
)
KEPT = Variant("ours, gather kept", "2h + 2ht + 2q + 2k + 2F", regather="false")
OURS = Variant("ours", "2h + 2q + 2k + 2F")
VARIANTS = (STYLES, NANOTRON, MEGATRON, KEPT, OURS)


@contextmanager
def use_variant(variant: Variant) -> Iterator[None]:
    """Make our tensor-parallel layers keep what a variant keeps, while entered.

    For configs with the variant's values of `parallel.tensor_regather_in_backward` and
    `memory.recompute_cheap`.
    """
    with ExitStack() as stack:

        def exchange(owner: Any, name: str, by: Any) -> None:
            """Replace an attribute until the context ends."""
            stack.enter_context(mock.patch.object(owner, name, by))

        # In the modules that call them, which import these functions by name.
        if variant.styles:
            exchange(sys.modules[parallelize.__module__], "shard_tensors", _shard_with_styles)
            exchange(training, "clip_grad_norm", _make_summing_clip(training.clip_grad_norm))
        # Without `memory.recompute_cheap` our own activation keeps what a fused one keeps.
        if variant.product == WRITTEN_OUT:
            exchange(tensor_forwards, "gated_activation", multiply_written_out)
            exchange(decoder, "gated_activation", multiply_written_out)  # of layers under styles
        if variant.one_buffer:
            stack.enter_context(share_one_buffer())
        yield


@contextmanager
def keep_sums_standing() -> Iterator[None]:
    """Keep the fp32 sums of gradients allocated from step to step, as nanotron and Megatron do.

    While entered, and for configs with `parallel.accumulate_grad_in_fp32=true`.
    """
    with mock.patch.object(
        sys.modules[parallelize.__module__], "GradientAccumulation", _StandingSums
    ):
        yield


class _StandingSums(GradientAccumulation):
    """Our accumulation with one fp32 tensor for each trained parameter, never given back."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # By parameter, its local fp32 sum; made in the first step's first backward.
        self._standing: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def _move(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add the gradients to their sums, and free them."""
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
        """Round the sums into the parameters' gradients, and set the sums to zero."""
        self._is_finished = True
        for parameter, total in self._standing.items():
            parameter.grad = wrap_local(parameter, total.to(parameter.dtype))
            total.zero_()


@contextmanager
def share_one_buffer() -> Iterator[None]:
    """Make all gathers in front of linears write to the same memory, while entered.

    Right only if nobody reads a gather's result after the next has begun. With
    `tensor_regather_in_backward: false` autograd does, in backward, and finds wrong values without
    an error: the fault of the first version of nanotron's change.
    """
    # The gather of gradients behind a reduce-scatter keeps memory of its own: bound before the
    # patch.
    gather_apart = _make_gradient_gather(gathered.start_gather)
    with (
        mock.patch.object(gathered, "start_gather", _Buffer().start_gather),
        mock.patch.object(gathered, "_gather", gather_apart),
    ):
        yield


class _Buffer:
    """The memory that all gathers write to; allocated at the first, never freed."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def start_gather(self, shard: Tensor, group: gathered.Group) -> Tensor:
        """Start a gather as `gathered.start_gather` does, into the buffer.

        shard: this rank's tokens, `[n / ranks, ...]`.
        """
        count = shard.numel() * group.size
        if (
            self._memory is None
            or self._memory.numel() < count
            or self._memory.dtype != shard.dtype
        ):
            self._memory = shard.new_empty(count)
        # `.data`: without it autograd's version counter would notice that saved tensors are
        # overwritten, and raise.
        out = self._memory[:count].view(group.size * shard.shape[0], *shard.shape[1:]).data
        operator = torch.ops._c10d_functional.all_gather_into_tensor_out
        return operator(shard.contiguous(), group.size, group.name, out=out)  # type: ignore[no-any-return]


def _make_gradient_gather(start_gather: Any) -> Any:
    """Return the backward of a reduce-scatter, which gathers with `start_gather`."""

    def gather(gradient: Tensor, group: gathered.Group) -> Tensor:
        """Gather the gradient of this rank's tokens from all ranks."""
        return gathered.wait(start_gather(gradient, group))

    return gather


def _shard_with_styles(model: Decoder, parallel: Any, memory: Any, world: World) -> dict[str, str]:
    """Shard a decoder as `shard_tensors` does, with its layers under torch's styles.

    A micro-batch has to be one sequence. Returns, by parameter, how its gradient is divided over
    tensor ranks, such as `sharded`.
    """
    gradients: dict[str, str] = {}
    assert world.tensor is not None
    for number, layer in model.model.layers.named_children():
        parallelize_stock_layer(layer, world)
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
        # `_place_parameters` goes by the names of modules in a parent, which this one stands for.
        parent = nn.ModuleDict({path.rpartition(".")[2]: module})
        divisions = tensor._place_parameters(parent, world.mesh["tensor"], ())
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
    """Return a clip that first sums the gradients that DTensor leaves as partial sums.

    These are the norms': their weights are replicated, and each rank runs them on its own tokens.
    """

    def clip_after_sum(parameters: Iterable[nn.Parameter], **kwargs: Any) -> Tensor:
        """Sum the partial gradients, in place, and clip."""
        parameters = list(parameters)  # it may be an iterator, and is read twice
        for parameter in parameters:
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and gradient.placements[0].is_partial():
                parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
        return clip(parameters, **kwargs)  # type: ignore[no-any-return]

    return clip_after_sum


def _run_layer_on_row(layer: DecoderLayer, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run a layer, which takes `[b, s, d]`, on one sequence's `[n, d]`."""
    return DecoderLayer.forward(layer, hidden.unsqueeze(0), *args, **kwargs).squeeze(0)
