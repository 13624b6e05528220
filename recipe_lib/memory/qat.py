"""Quantization-aware training: linears compute with weights rounded as an export will round them
(arXiv 1712.05877).

`qat` names the export: what torchao's `quantize_` makes of a linear by the config that
`base_config` gives. Forward rounds the weight by torchao's own fake quantizer for that config;
backward treats rounding as the identity (the straight-through estimator, arXiv 1308.3432), but for
weights that were clipped, which get no gradient.

    int4   weights, symmetric, a scale for each `qat_group_size` of a row
    int8   weights, symmetric, a scale for each row
    fp8    weights and inputs in e4m3, a scale for each row of either

What trains, and is saved, is the weight before rounding. Rounding it again gives the same codes,
which rounding what was rounded does not: torchao's scale is 2/15 of a group's largest magnitude,
and the largest code is 7.

A linear with an adapter rounds `W + scaling * B A` (arXiv 2406.06385), as the merged weight will be
rounded. An adapter next to a rounded base would compute something else than the two merged and
rounded.

Nothing but the weight and the input is kept for backward, which rounds again. Embedding and output
head stay as they are. This is the one module that calls torchao's quantization; it imports it only
when `qat` is set.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipe_lib.adapters.layers import AdaptedLinear, AdaptedMatrix
from recipe_lib.adapters.quantized import QuantizedLinear
from recipe_lib.errors import ConfigError
from recipe_lib.logs import silence_torchao
from recipe_lib.memory.checkpointing import suspend_selective_checkpointing
from recipe_lib.models.language_model import list_layer_names
from recipe_lib.models.mixture import Mixture
from recipe_lib.ops.deferred import linear
from recipe_lib.ops.fused_kernels import make_operator

KINDS = ("int4", "int8", "fp8")


@dataclass
class FakeQuantization:
    """What the linears of a model are rounded to, and whether they are at this step.

    kind: of KINDS. start_step: optimizer steps before rounding begins. linears: how many there are.
    """

    kind: str
    group_size: int
    start_step: int
    linears: int = 0
    is_on: bool = True

    def begin(self, step: int | None) -> None:
        """Before a step; step: optimizer steps done. None: of nobody's run, as a plan's, which
        takes the dearer.
        """
        self.is_on = step is None or step >= self.start_step

    def describe(self) -> str:
        """For the log: `qat: 14 linears computed in int4, a scale for 32 weights, from step 11
        on`.
        """
        scales = f"{self.group_size} weights" if self.kind == "int4" else "each row"
        begins = f", from step {self.start_step + 1} on" if self.start_step else ""
        inputs = ", inputs too" if self.kind == "fp8" else ""
        return (
            f"qat: {self.linears} linears computed in {self.kind}, a scale for"
            f" {scales}{inputs}{begins}"
        )


def describe_export(kind: str, group_size: int, *, is_adapter: bool) -> str:
    """For the log, what is saved, and what makes of it the model that was trained."""
    made_by = {
        "int4": f"IntxWeightOnlyConfig(torch.int4, PerGroup({group_size}))",
        "int8": "IntxWeightOnlyConfig(torch.int8, PerAxis(0))",
        "fp8": "Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())",
    }
    what = (
        "merge the adapter, then quantize the model"
        if is_adapter
        else "weights are those before rounding: quantize"
    )
    return f"qat: {what} by torchao's {made_by[kind]}, all but the output head"


def build_torchao_config(kind: str, group_size: int) -> Any:
    """torchao's config for a kind of KINDS, which `quantize_`, and transformers' TorchAoConfig,
    export by.
    """
    silence_torchao()
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        IntxWeightOnlyConfig,
        PerRow,
    )
    from torchao.quantization.granularity import PerAxis, PerGroup

    if kind == "int4":
        return IntxWeightOnlyConfig(torch.int4, PerGroup(group_size))
    if kind == "int8":
        return IntxWeightOnlyConfig(torch.int8, PerAxis(0))
    return Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())


def fake_quantize_linears(
    model: nn.Module, kind: str | None, group_size: int, start: int
) -> FakeQuantization | None:
    """Lets the layers' linears compute with rounded weights, in place, on a meta model; None: as
    they did.

    Names and types of parameters stay. Called after the adapters and before layers are checkpointed
    and compiled. start: optimizer steps before it begins. Raises ConfigError for weights that are
    quantized already, for mixtures of experts, for rows that are no multiple of the group, and
    where there is no linear to change.
    """
    if kind is None:
        return None
    linears = find_plain_linears(
        model, "qat", kind, "whose weights are stacked and no linears to torchao"
    )
    scheme = FakeQuantization(kind, group_size, start, len(linears))
    _get_quantizer_configs(kind, group_size)  # imports torchao before a step is timed
    forward = _make_rounded_forward(scheme)
    for name, module in linears.items():
        if kind == "int4" and module.in_features % group_size:
            raise ConfigError(
                f"qat_group_size: found {group_size} for {name}, whose rows have"
                f" {module.in_features} weights, expected a divisor of them; choose one, or"
                " qat=int8, which takes rows as they are"
            )
        module.forward = MethodType(forward, module)  # type: ignore[method-assign]
    return scheme


def find_plain_linears(
    model: nn.Module, key: str, value: str, mixtures: str
) -> dict[str, nn.Linear]:
    """Return the layers' linears whose weights are in `dtype`, adapted ones among them, for a lever
    that rounds these.

    key, value: the lever's in the config. mixtures: what keeps it from mixtures of experts. Raises
    ConfigError for one, for weights that are quantized, and where there is no linear.
    """
    if any(isinstance(module, Mixture) for module in model.modules()):
        raise ConfigError(
            f"{key}: found {value} for a mixture of experts, {mixtures}; remove {key}"
        )
    inside = tuple(f"{name}." for name in list_layer_names(model))
    linears = {}
    for name, module in model.named_modules():
        if not name.startswith(inside) or name.endswith((".lora_A", ".lora_B")):
            continue
        if isinstance(module, QuantizedLinear):
            raise ConfigError(
                f"{key}: found {value} for weights that are kept in {module.kind}, expected weights"
                f" in dtype; set lora.quantize_base=none, or remove {key}"
            )
        if type(module) in (nn.Linear, AdaptedLinear):
            linears[name] = cast(nn.Linear, module)
    if not linears and inside:
        raise ConfigError(
            f"{key}: found {value} for a model whose layers have no plain linear; remove {key}"
        )
    return linears


def _make_rounded_forward(scheme: FakeQuantization) -> Callable[[Any, Tensor], Tensor]:
    """Return one function for all linears, so that torch.compile compiles alike layers once."""

    def forward(module: Any, hidden: Tensor) -> Tensor:
        is_adapted = isinstance(module, AdaptedMatrix)
        if is_adapted and (module.is_off or not scheme.is_on):
            return AdaptedMatrix.forward(module, hidden)
        if not scheme.is_on:
            return linear(hidden, module.weight, module.bias)
        parts = (
            (module.weight, module.lora_A.weight, module.lora_B.weight)
            if is_adapted
            else (module.weight,)
        )
        scaling = module.settings.scaling if is_adapted else 1.0
        out = cast(
            Tensor, _RoundedLinear.apply(scheme.kind, scheme.group_size, scaling, hidden, *parts)
        )
        return out if module.bias is None else out + module.bias

    return forward


class _RoundedLinear(torch.autograd.Function):
    """Keeps what a plain linear keeps, and rounds again in backward."""

    @staticmethod
    def forward(
        ctx: Any, kind: str, group_size: int, scaling: float, hidden: Tensor, *parts: Tensor
    ) -> Tensor:
        ctx.settings = scaling, kind, group_size
        ctx.save_for_backward(hidden if any(ctx.needs_input_grad[4:]) else None, *parts)
        return F.linear(round_inputs(hidden, kind), round_weight(parts, *ctx.settings))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        hidden, *parts = ctx.saved_tensors
        scaling, kind, _ = ctx.settings
        (gradient,), wants, hidden_grad = gradients, ctx.needs_input_grad[4:], None
        weight, unclipped = round_weight_with_mask(parts, *ctx.settings)
        if ctx.needs_input_grad[3]:
            hidden_grad = gradient @ weight
        del weight
        if hidden is None:
            return None, None, None, hidden_grad, *(None for _ in parts)
        inputs = round_inputs(hidden, kind)
        weight_grad = gradient.flatten(0, -2).t() @ inputs.flatten(0, -2)
        del inputs
        if kind != "fp8":
            weight_grad = weight_grad.mul_(unclipped)
        del unclipped
        return None, None, None, hidden_grad, *_split_gradient(parts, weight_grad, scaling, wants)


def _split_gradient(
    parts: list[Tensor], whole: Tensor, scaling: float, wants: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of the weight, or of weight, A and B, from that of their sum `[o, i]`."""
    if len(parts) == 1:
        return [whole]
    _, first, second = parts
    wide = whole.to(torch.promote_types(whole.dtype, torch.float32))
    first_grad = (
        (second.to(wide.dtype).t() @ wide).mul_(scaling).to(first.dtype) if wants[1] else None
    )
    second_grad = (
        (wide @ first.to(wide.dtype).t()).mul_(scaling).to(second.dtype) if wants[2] else None
    )
    return [whole if wants[0] else None, first_grad, second_grad]


# What rounds, by torchao. Compiled code calls each as one operator: fused, what is rounded would
# not first be a number of its own type, and the codes of every hundredth weight in bf16 would be
# others than those of the export.


def round_weight(parts: Sequence[Tensor], scaling: float, kind: str, group_size: int) -> Tensor:
    """The weight `[o, i]`, with the adapter if parts have one, on its grid."""
    if torch.compiler.is_compiling():
        return cast(Tensor, _WEIGHT(list(parts), scaling, kind, group_size))
    with suspend_selective_checkpointing():  # which counts the layer's own products
        return _round_weight(parts, scaling, kind, group_size)


def round_weight_with_mask(
    parts: Sequence[Tensor], scaling: float, kind: str, group_size: int
) -> tuple[Tensor, Tensor]:
    """The same, and a mask `[o, i]` of what was not clipped; empty for fp8, which clips nothing."""
    again = _AGAIN if torch.compiler.is_compiling() else _round_weight_with_mask
    return cast(tuple[Tensor, Tensor], again(list(parts), scaling, kind, group_size))


def round_inputs(hidden: Tensor, kind: str) -> Tensor:
    """Hidden `[.., i]`, each row on its grid for fp8; else as it came."""
    rounded = _INPUTS if torch.compiler.is_compiling() else _round_inputs
    return cast(Tensor, rounded(hidden, kind)) if kind == "fp8" else hidden


def _merge_weight(scaling: float, weight: Tensor, *adapter: Tensor) -> Tensor:
    """The weight as `recipe_lib.checkpoint.adapter_merging` merges it: in fp32, then in the weight's
    type.
    """
    if not adapter:
        return weight
    first, second = adapter
    wide = torch.promote_types(weight.dtype, torch.float32)
    return torch.addmm(weight.to(wide), second.to(wide), first.to(wide), alpha=scaling).to(
        weight.dtype
    )


def _round_weight(parts: Sequence[Tensor], scaling: float, kind: str, group_size: int) -> Tensor:
    return _fake_quantize(
        _merge_weight(scaling, *parts), _get_quantizer_configs(kind, group_size)[0]
    )


def _round_inputs(hidden: Tensor, kind: str) -> Tensor:
    return _fake_quantize(hidden.contiguous(), _get_quantizer_configs(kind, 1)[1])


def _fake_quantize(tensor: Tensor, config: Any) -> Tensor:
    from torchao.quantization.qat import FakeQuantizerBase

    with torch.no_grad():
        return cast(
            Tensor, FakeQuantizerBase.from_config(config)(tensor)
        )  # one that is kept would keep its scales


def _round_weight_with_mask(
    parts: Sequence[Tensor], scaling: float, kind: str, group_size: int
) -> tuple[Tensor, Tensor]:
    from torchao.quantization.qat import FakeQuantizerBase
    from torchao.quantization.quant_primitives import _DTYPE_TO_QVALUE_BOUNDS as BOUNDS
    from torchao.quantization.quant_primitives import _fake_quantize_affine

    config, merged = _get_quantizer_configs(kind, group_size)[0], _merge_weight(scaling, *parts)
    if kind == "fp8":
        weight = _fake_quantize(merged, config)
        return weight, weight.new_empty(0, dtype=torch.bool)
    quantizer = cast(Any, FakeQuantizerBase.from_config(config))
    with torch.no_grad():
        weight = quantizer(merged)
        # The largest of a group is at code 7.5 of 7, which rounds to 8: with that code nothing is
        # clipped.
        least, largest = BOUNDS[config.dtype]
        block = (1, group_size if kind == "int4" else merged.shape[1])
        scales = quantizer.scale, quantizer.zero_point
        wider = _fake_quantize_affine(merged, block, *scales, torch.int32, least, largest + 1)
        return weight, wider.eq(weight)


@cache
def _get_quantizer_configs(kind: str, group_size: int) -> tuple[Any, Any]:
    """Configs of what torchao itself puts into a linear for its weight and for its inputs (None: as
    they come).
    """
    silence_torchao()
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    sample = nn.Sequential(nn.Linear(group_size, 1, device="meta"))
    quantize_(sample, QATConfig(build_torchao_config(kind, group_size), step="prepare"))
    prepared = cast(Any, sample[0])
    of_inputs = prepared.activation_fake_quantizer
    return prepared.weight_fake_quantizer.config, None if of_inputs is None else of_inputs.config


_WEIGHT = make_operator(
    "rounded_weight", _round_weight, lambda parts, *_: torch.empty_like(parts[0])
)
_AGAIN = make_operator(
    "rounded_again",
    _round_weight_with_mask,
    lambda parts, scaling, kind, group_size: (
        torch.empty_like(parts[0]),
        parts[0].new_empty(0 if kind == "fp8" else parts[0].shape, dtype=torch.bool),
    ),
)
_INPUTS = make_operator(
    "rounded_inputs",
    _round_inputs,
    lambda hidden, kind: torch.empty_like(hidden, memory_format=torch.contiguous_format),
)
