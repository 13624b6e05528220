"""Quantization-aware training: linears compute with weights rounded as an export will round them (arXiv 1712.05877).

`qat` names the export: what torchao's `quantize_` makes of a linear by the config that `base_config` gives. Forward
rounds the weight by torchao's own fake quantizer for that config; backward treats rounding as the identity (the
straight-through estimator, arXiv 1308.3432), but for weights that were clipped, which get no gradient.

    int4   weights, symmetric, a scale for each `qat_group_size` of a row
    int8   weights, symmetric, a scale for each row
    fp8    weights and inputs in e4m3, a scale for each row of either

What trains, and is saved, is the weight before rounding. Rounding it again gives the same codes, which rounding what
was rounded does not: torchao's scale is 2/15 of a group's largest magnitude, and the largest code is 7.

A linear with an adapter rounds `W + scaling * B A` (arXiv 2406.06385), as the merged weight will be rounded. An adapter
next to a rounded base would compute something else than the two merged and rounded.

Nothing but the weight and the input is kept for backward, which rounds again. Embedding and output head stay as they
are. This is the one module that calls torchao's quantization; it imports it only when `qat` is set.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipe_lib.adapters.layers import AdaptedLinear, AdaptedMatrix
from recipe_lib.adapters.quantized import QuantizedLinear
from recipe_lib.errors import ConfigError
from recipe_lib.logs import silence_torchao
from recipe_lib.memory.checkpointing import outside_selection
from recipe_lib.models.find_layers import layer_names
from recipe_lib.models.mixture import Mixture
from recipe_lib.ops.deferred import linear

KINDS = ("int4", "int8", "fp8")

Rounding = Callable[[Tensor], Tensor]


@dataclass
class FakeQuantization:
    """What the linears of a model are rounded to, and whether they are at this step.

    kind: of KINDS. weights, inputs: round a matrix `[o, i]` and hidden states `[.., i]`; None: as they come.
    start_step: optimizer steps before rounding begins. linears: how many there are.
    """

    kind: str
    group_size: int
    start_step: int
    weights: Rounding
    inputs: Rounding | None
    linears: int = 0
    is_on: bool = True

    def begin(self, step: int | None) -> None:
        """Before a step; step: optimizer steps done. None: of nobody's run, as a plan's, which takes the dearer."""
        self.is_on = step is None or step >= self.start_step

    def describe(self) -> str:
        """For the log: `qat: 14 linears computed in int4, a scale for 32 weights, from step 11 on`."""
        scales = f"{self.group_size} weights" if self.kind == "int4" else "each row"
        begins = f", from step {self.start_step + 1} on" if self.start_step else ""
        inputs = "" if self.inputs is None else ", inputs too"
        return f"qat: {self.linears} linears computed in {self.kind}, a scale for {scales}{inputs}{begins}"


def base_config(kind: str, group_size: int) -> Any:
    """torchao's config for a kind of KINDS, which `quantize_`, and transformers' TorchAoConfig, export by."""
    silence_torchao()
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, IntxWeightOnlyConfig, PerRow
    from torchao.quantization.granularity import PerAxis, PerGroup

    if kind == "int4":
        return IntxWeightOnlyConfig(torch.int4, PerGroup(group_size))
    if kind == "int8":
        return IntxWeightOnlyConfig(torch.int8, PerAxis(0))
    return Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())


def fake_quantize_linears(model: nn.Module, kind: str | None, group_size: int, start: int) -> FakeQuantization | None:
    """Lets the layers' linears compute with rounded weights, in place, on a meta model; None: as they did.

    Names and types of parameters stay. Called after the adapters and before layers are checkpointed and compiled.
    start: optimizer steps before it begins. Raises ConfigError for weights that are quantized already, for mixtures of
    experts, for rows that are no multiple of the group, and where there is no linear to change.
    """
    if kind is None:
        return None
    if any(isinstance(module, Mixture) for module in model.modules()):
        raise ConfigError(
            f"qat: found {kind} for a mixture of experts, whose weights are stacked and no linears to torchao; remove "
            "qat"
        )
    inside = tuple(f"{name}." for name in layer_names(model))
    scheme = FakeQuantization(kind, group_size, start, *_rounding(kind, group_size))
    forwards = {nn.Linear: _given(_plain_forward, scheme), AdaptedLinear: _given(_adapted_forward, scheme)}
    for name, module in model.named_modules():
        if not name.startswith(inside) or name.endswith((".lora_A", ".lora_B")):
            continue
        if isinstance(module, QuantizedLinear):
            raise ConfigError(
                f"qat: found {kind} for weights that are kept in {module.kind}, expected weights in dtype; set "
                "lora.quantize_base=none, or remove qat"
            )
        if type(module) not in forwards:
            continue
        linear_ = cast(nn.Linear, module)
        if kind == "int4" and linear_.in_features % group_size:
            raise ConfigError(
                f"qat_group_size: found {group_size} for {name}, whose rows have {linear_.in_features} weights, "
                "expected a divisor of them; choose one, or qat=int8, which takes rows as they are"
            )
        linear_.forward = MethodType(forwards[type(module)], module)  # type: ignore[method-assign]
        scheme.linears += 1
    if not scheme.linears and inside:
        raise ConfigError(f"qat: found {kind} for a model whose layers have no plain linear; remove qat")
    return scheme


def _rounding(kind: str, group_size: int) -> tuple[Rounding, Rounding | None]:
    """How weights and inputs are rounded: what torchao itself would put into a linear."""
    silence_torchao()
    from torchao.quantization import quantize_
    from torchao.quantization.qat import FakeQuantizerBase, QATConfig

    sample = nn.Sequential(nn.Linear(group_size, 1, device="meta"))
    quantize_(sample, QATConfig(base_config(kind, group_size), step="prepare"))
    prepared = cast(Any, sample[0])
    of_weights, of_inputs = prepared.weight_fake_quantizer.config, None
    if prepared.activation_fake_quantizer is not None:
        of_inputs = prepared.activation_fake_quantizer.config

    # A quantizer keeps the scales of what it has rounded last: each is used once.
    def weights(matrix: Tensor) -> Tensor:
        return cast(Tensor, FakeQuantizerBase.from_config(of_weights)(matrix))

    def inputs(hidden: Tensor) -> Tensor:
        return cast(Tensor, FakeQuantizerBase.from_config(of_inputs)(hidden.contiguous()))

    if of_inputs is None:
        return weights, None
    return partial(_straight_through, weights), partial(_straight_through, inputs)


def _straight_through(rounding: Rounding, matrix: Tensor) -> Tensor:
    """Rounds to FP8, where nothing is clipped, and hands the gradient on.

    torchao 0.18 takes it through `to(float8).to(float32)`, whose backward casts it to FP8 without a scale: what is
    below 2^-10 is lost, which is nearly all of it (docs/upstream/float8_fake_quantizer.md).
    """
    return cast(Tensor, _StraightThrough.apply(matrix, rounding))


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor, rounding: Rounding) -> Tensor:
        return rounding(matrix)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _given(forward: Callable[..., Tensor], scheme: FakeQuantization) -> Callable[..., Tensor]:
    """One function for all linears of a kind, so that torch.compile compiles alike layers once."""

    def run(module: Any, hidden: Tensor) -> Tensor:
        return forward(module, scheme, hidden)

    return run


def _plain_forward(module: Any, scheme: FakeQuantization, hidden: Tensor) -> Tensor:
    if not scheme.is_on:
        return linear(hidden, module.weight, module.bias)
    return _rounded_linear(scheme, hidden, module.bias, 1.0, module.weight)


def _adapted_forward(module: Any, scheme: FakeQuantization, hidden: Tensor) -> Tensor:
    if not scheme.is_on or module.is_off:
        return AdaptedMatrix.forward(module, hidden)
    parts = (module.weight, module.lora_A.weight, module.lora_B.weight)
    return _rounded_linear(scheme, hidden, module.bias, module.settings.scaling, *parts)


def _rounded_linear(
    scheme: FakeQuantization, hidden: Tensor, bias: Tensor | None, scaling: float, *parts: Tensor
) -> Tensor:
    """Hidden `[.., i]` to `[.., o]`. parts: the weight, or weight, A and B."""
    if torch.compiler.is_compiling():  # which finds by itself what to compute again
        inputs = hidden if scheme.inputs is None else scheme.inputs(hidden)
        return F.linear(inputs, scheme.weights(_merged(scaling, *parts)), bias)
    out = cast(Tensor, _RoundedLinear.apply(scheme, scaling, hidden, *parts))
    return out if bias is None else out + bias


def _merged(scaling: float, weight: Tensor, *adapter: Tensor) -> Tensor:
    """The weight as `recipe_lib.adapters.merging` merges it: in fp32, then in the weight's type."""
    if not adapter:
        return weight
    first, second = adapter
    wide = torch.promote_types(weight.dtype, torch.float32)
    return torch.addmm(weight.to(wide), second.to(wide), first.to(wide), alpha=scaling).to(weight.dtype)


class _RoundedLinear(torch.autograd.Function):
    """Keeps what a plain linear keeps. Selective checkpointing counts its products, not what rounding takes."""

    @staticmethod
    def forward(ctx: Any, scheme: FakeQuantization, scaling: float, hidden: Tensor, *parts: Tensor) -> Tensor:
        ctx.scheme, ctx.scaling = scheme, scaling
        reads_hidden = scheme.inputs is not None or any(ctx.needs_input_grad[3:])
        ctx.save_for_backward(hidden if reads_hidden else None, *parts)
        with outside_selection():
            inputs = hidden if scheme.inputs is None else scheme.inputs(hidden)
            weight = scheme.weights(_merged(scaling, *parts))
        return F.linear(inputs, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        hidden, *parts = ctx.saved_tensors
        scheme, wants_hidden, wants = ctx.scheme, ctx.needs_input_grad[2], ctx.needs_input_grad[3:]
        leaves = [part.detach().requires_grad_(wanted) for part, wanted in zip(parts, wants, strict=True)]
        with torch.enable_grad():
            weight = scheme.weights(_merged(ctx.scaling, *leaves))
        gradient = gradients[0]
        inputs, hidden_grad = hidden, None
        if scheme.inputs is not None:
            with torch.enable_grad():
                hidden = hidden.detach().requires_grad_(wants_hidden)
                inputs = scheme.inputs(hidden)
        if wants_hidden:
            hidden_grad = gradient @ weight.detach()
            if scheme.inputs is not None:
                (hidden_grad,) = torch.autograd.grad(inputs, hidden, hidden_grad)
        if not any(wants):
            return None, None, hidden_grad, *(None for _ in parts)
        weight_grad = gradient.flatten(0, -2).t() @ inputs.detach().flatten(0, -2)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(weight, wanted, weight_grad))
        return None, None, hidden_grad, *(next(found) if each else None for each in wants)
