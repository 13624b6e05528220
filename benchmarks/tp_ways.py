"""Other programs' ways of keeping a tensor-parallel layer's tensors, taken by our full fine-tuning
recipe.

Used by tp_trace.py. Each is our recipe with the parts exchanged that keep other tensors, written
from what the others' code does; embedding, head, loss, pipeline and optimizer are ours in all of
them.
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
REMADE, FUSED, WRITTEN_OUT = "made again", "fused", "written out"


@dataclass(frozen=True)
class Way:
    """name: of the line. regather: the value of `parallel.tensor_regather_in_backward`. product: of
    the MLP: `made again` in backward from gate and up, as ours; `fused`, the activation made again,
    the product kept; `written out`: gate, up, activation and product kept. normed_again: the norm's
    output is made again before it is gathered again. one_buffer: all gathered tokens lie in one
    buffer, which stays. styles: torch's DTensor styles, not our nodes. elements: kept of a token,
    times the ranks of a group, in words.
    """

    name: str
    elements: str
    regather: str = "true"
    product: str = REMADE
    normed_again: bool = True
    one_buffer: bool = False
    styles: bool = False

    def kept_elements(self, h: int, q: int, k: int, f: int, t: int) -> int:
        """Elements that a layer keeps of a token, times t. h, f: widths, q, k: of all query and key
        heads.
        """
        whole = self.styles or self.regather == "false"
        tokens = 2 * h * t if whole else 0 if self.normed_again else 2 * h
        return (
            2 * h + tokens + 2 * q + 2 * k + {REMADE: 2, FUSED: 3, WRITTEN_OUT: 4}[self.product] * f
        )


STYLES = Way("DTensor styles", "2h + 2ht + 2q + 2k + 4F", product=WRITTEN_OUT, styles=True)
NANOTRON = Way(
    "nanotron", "4h + 2q + 2k + 4F", product=WRITTEN_OUT, normed_again=False, one_buffer=True
)
MEGATRON = Way("Megatron", "4h + 2q + 2k + 3F", product=FUSED, normed_again=False, one_buffer=True)
KEPT = Way("ours, gather kept", "2h + 2ht + 2q + 2k + 2F", regather="false")
OURS = Way("ours", "2h + 2q + 2k + 2F")
WAYS = (STYLES, NANOTRON, MEGATRON, KEPT, OURS)


@contextmanager
def use_way(way: Way) -> Iterator[None]:
    """While entered, our tensor-parallel layers are of that way."""
    with ExitStack() as stack:

        def exchange(owner: Any, name: str, by: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, by))

        if way.styles:
            exchange(sys.modules[parallelize.__module__], "shard_tensors", _shard_with_styles)
            exchange(training, "clip_grad_norm", _clip_summed(training.clip_grad_norm))
        elif way.product != REMADE:
            exchange(
                tensor_forwards,
                "gated_linear",
                _multiply_fused if way.product == FUSED else _multiply_written_out,
            )
        if not way.normed_again:
            exchange(tensor_forwards, "gather_linears", _shard_kept)
        if way.one_buffer:
            stack.enter_context(share_one_buffer())
        yield


@contextmanager
def keep_sums_standing() -> Iterator[None]:
    """While entered, sums of gradients in fp32 lie in memory that stays from step to step, as
    nanotron's and Megatron's do. Takes `parallel.accumulate_grad_in_fp32=true`.
    """
    with mock.patch.object(
        sys.modules[parallelize.__module__], "GradientAccumulation", _StandingSums
    ):
        yield


class _StandingSums(GradientAccumulation):
    """As ours, with one fp32 tensor for each trained parameter, which is never given back."""

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
        self._done = True
        for parameter, total in self._standing.items():
            parameter.grad = wrap_local(parameter, total.to(parameter.dtype))
            total.zero_()


@contextmanager
def share_one_buffer() -> Iterator[None]:
    """While entered, all tokens that linears gather are written to the same memory, one after
    another.

    Right where nobody reads them after the next gather has begun; with
    `tensor_regather_in_backward: false` autograd does, and is not told, as in the first version of
    nanotron's change.
    """
    own = _gather_gradient(gathered.start_gather)
    with (
        mock.patch.object(gathered, "start_gather", _Buffer().start_gather),
        mock.patch.object(gathered, "_gather", own),
    ):
        yield


def _shard_kept(*args: Any, normed: Any = None, **kwargs: Any) -> list[Tensor]:
    return gathered.gather_linears(*args, **kwargs)


def _multiply_fused(gate: Tensor, up: Tensor, weight: Tensor, activation: str) -> Tensor:
    return F.linear(gated_activation(gate, up, activation), weight)


def _multiply_written_out(gate: Tensor, up: Tensor, weight: Tensor, activation: str) -> Tensor:
    return F.linear(ACTIVATIONS[activation][0](gate) * up, weight)


class _Buffer:
    """The one that all gathers write to; made when first asked for, and never given back."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def start_gather(self, shard: Tensor, group: gathered.Group) -> Tensor:
        """As `gathered.start_gather`."""
        count = shard.numel() * group.size
        if (
            self._memory is None
            or self._memory.numel() < count
            or self._memory.dtype != shard.dtype
        ):
            self._memory = shard.new_empty(count)
        out = self._memory[:count].view(group.size * shard.shape[0], *shard.shape[1:]).data
        operator = torch.ops._c10d_functional.all_gather_into_tensor_out
        return operator(shard.contiguous(), group.size, group.name, out=out)  # type: ignore[no-any-return]


def _gather_gradient(start_gather: Any) -> Any:
    """Backward of a reduce-scatter, which gathers into memory of its own."""

    def gather(gradient: Tensor, group: gathered.Group) -> Tensor:
        return gathered.wait(start_gather(gradient, group))

    return gather


def _shard_with_styles(model: Decoder, parallel: Any, memory: Any, world: World) -> dict[str, str]:
    """As `shard_tensors`, of a decoder whose layers are under torch's styles; a micro-batch is one
    sequence.
    """
    gradients: dict[str, str] = {}
    assert world.tensor is not None
    for number, layer in model.model.layers.named_children():
        build_stock_layer(layer, world)
        layer.forward = MethodType(_run_layer_on_row, layer)
        gradients |= {
            f"model.layers.{number}.{name}": "sharded" for name, _ in layer.named_parameters()
        }
    outside: dict[str, nn.Module | None] = {"model.embed_tokens": model.model.embed_tokens}
    outside |= {"model.norm": model.model.norm, "lm_head": model.lm_head}
    for path, module in outside.items():
        if module is not None:
            placed = tensor._place_parameters(
                nn.ModuleDict({path.rpartition(".")[2]: module}), world.mesh["tensor"], ()
            )
            gradients |= {
                f"{path}.{name.rpartition('.')[2]}": what for name, what in placed.items()
            }
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


def _clip_summed(clip: Any) -> Any:
    """Clipping that first sums what DTensor left as parts of a sum: the gradients of replicated
    norms.
    """

    def run(parameters: Iterable[nn.Parameter], *args: Any) -> Tensor:
        parameters = list(parameters)
        for parameter in parameters:
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and gradient.placements[0].is_partial():
                parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
        return clip(parameters, *args)  # type: ignore[no-any-return]

    return run


def _run_layer_on_row(layer: DecoderLayer, hidden: Tensor, *others: Any) -> Tensor:
    """A layer of `[b, s, d]` on one sequence's `[n, d]`."""
    return DecoderLayer.forward(layer, hidden.unsqueeze(0), *others).squeeze(0)
