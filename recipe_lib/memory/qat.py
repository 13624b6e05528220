"""Train quantization-aware: linears compute with the weights of a later export (arXiv 1712.05877).

`apply_memory_levers` calls `fake_quantize_linears`. The export is torchao's `quantize_` with the
config of `build_torchao_config`; forward rounds the weight by torchao's fake quantizer for it.
Backward takes rounding for the identity (the straight-through estimator, arXiv 1308.3432), but for
weights that were clipped, which get no gradient. torchao's quantization is called here alone, and
imported only when `qat` is set.
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

# Values of `qat`, the form of the layers' linears. Embedding and output head stay as they are.
#
#     int4   weights, symmetric, a scale for each `qat_group_size` of a row
#     int8   weights, symmetric, a scale for each row
#     fp8    weights and inputs in e4m3, a scale for each row of either
KINDS = ("int4", "int8", "fp8")


@dataclass
class FakeQuantization:
    """The rounding of a model's linears, which may begin after some steps."""

    kind: str  # of KINDS
    group_size: int  # number of weights that share a scale, for int4
    start_step: int  # number of optimizer steps before rounding begins
    linears: int = 0  # number of linears that are rounded
    is_on: bool = True  # True while forwards round

    def begin(self, step: int | None) -> None:
        """Switch rounding on or off for the next step.

        step: number of optimizer steps done; None: a step of no run, such as a plan's: it rounds,
        which costs more.
        """
        self.is_on = step is None or step >= self.start_step

    def describe(self) -> str:
        scales = f"{self.group_size} weights" if self.kind == "int4" else "each row"
        begins = f", from step {self.start_step + 1} on" if self.start_step else ""
        inputs = ", inputs too" if self.kind == "fp8" else ""
        return (
            f"qat: {self.linears} linears computed in {self.kind}, a scale for"
            f" {scales}{inputs}{begins}"
        )


def describe_export(kind: str, group_size: int, *, is_adapter: bool) -> str:
    """Return a line for the log on how to export the trained model from the saved weights.

    kind: of KINDS. group_size: as of `FakeQuantization`. is_adapter: True if an adapter alone is
    saved.
    """
    configs = {
        "int4": f"IntxWeightOnlyConfig(torch.int4, PerGroup({group_size}))",
        "int8": "IntxWeightOnlyConfig(torch.int8, PerAxis(0))",
        "fp8": "Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())",
    }
    # The weights before rounding are saved, because rounding twice does not give the same codes: in
    # int4 torchao's scale is 2/15 of a group's largest magnitude, and the largest code is 7.
    action = (
        "merge the adapter, then quantize the model"
        if is_adapter
        else "weights are those before rounding: quantize"
    )
    return f"qat: {action} by torchao's {configs[kind]}, all but the output head"


def build_torchao_config(kind: str, group_size: int) -> Any:
    """Return torchao's config for a kind of KINDS, with which the export is quantized.

    torchao's `quantize_` takes it, and transformers' `TorchAoConfig`. group_size: for int4.
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
    """Let the layers' linears compute with rounded weights, in place.

    Names and dtypes of parameters stay. Call it on a meta model, after adapters are added and
    before layers are checkpointed and compiled.

    kind: of KINDS; None: nothing changes, and None is returned. group_size: number of weights that
    share a scale, for int4. start: number of optimizer steps before rounding begins. Raises
    ConfigError for weights that are quantized already, for mixtures of experts, for rows that are
    no multiple of the group, and where there is no linear to change.
    """
    if kind is None:
        return None
    linears = find_plain_linears(
        model, key="qat", value=kind, mixtures="whose weights are stacked and no linears to torchao"
    )
    scheme = FakeQuantization(
        kind=kind, group_size=group_size, start_step=start, linears=len(linears)
    )
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
    """Return the layers' linears with weights in `dtype`, adapted ones too, by name.

    It is for a lever that replaces their forward. key, value: of the lever in the config, for
    messages. mixtures: a clause for the message on why mixtures of experts cannot have it. Raises
    ConfigError for a mixture, for quantized weights, and if layers have no such linear.
    """
    if any(isinstance(module, Mixture) for module in model.modules()):
        raise ConfigError(
            f"{key}: found {value} for a mixture of experts, {mixtures}; remove {key}"
        )
    layer_prefixes = tuple(f"{name}." for name in list_layer_names(model))
    linears = {}
    for name, module in model.named_modules():
        # The adapters themselves stay in `dtype`.
        if not name.startswith(layer_prefixes) or name.endswith((".lora_A", ".lora_B")):
            continue
        if isinstance(module, QuantizedLinear):
            raise ConfigError(
                f"{key}: found {value} for weights that are kept in {module.kind}, expected weights"
                f" in dtype; set lora.quantize_base=none, or remove {key}"
            )
        # Not isinstance: a subclass has a forward of its own.
        if type(module) in (nn.Linear, AdaptedLinear):
            linears[name] = cast(nn.Linear, module)
    if not linears and layer_prefixes:  # a stage of a pipeline may have no layers
        raise ConfigError(
            f"{key}: found {value} for a model whose layers have no plain linear; remove {key}"
        )
    return linears


def _make_rounded_forward(scheme: FakeQuantization) -> Callable[[Any, Tensor], Tensor]:
    """Return one forward for all linears, so that torch.compile compiles layers of a kind once."""

    def forward(module: Any, hidden: Tensor) -> Tensor:
        is_adapted = isinstance(module, AdaptedMatrix)
        if is_adapted and (module.is_off or not scheme.is_on):
            return AdaptedMatrix.forward(module, hidden)
        if not scheme.is_on:
            return linear(hidden, module.weight, module.bias)
        parts: tuple[Tensor, ...] = (module.weight,)
        scaling = 1.0
        if is_adapted:
            # Merged, then rounded, as in the export (arXiv 2406.06385): an adapter next to a
            # rounded weight would compute another function.
            parts = (module.weight, module.lora_A.weight, module.lora_B.weight)
            scaling = module.settings.scaling
        out = cast(
            Tensor, _RoundedLinear.apply(scheme.kind, scheme.group_size, scaling, hidden, *parts)
        )
        return out if module.bias is None else out + module.bias

    return forward


class _RoundedLinear(torch.autograd.Function):
    """The node of a linear with a rounded weight, without its bias.

    parts: its weight `[o, i]`; with an adapter also its A `[r, i]` and B `[o, r]`.
    """

    @staticmethod
    def forward(
        ctx: Any, kind: str, group_size: int, scaling: float, hidden: Tensor, *parts: Tensor
    ) -> Tensor:
        ctx.settings = (scaling, kind, group_size)
        # Only what a plain linear saves: backward rounds the weight again.
        ctx.save_for_backward(hidden if any(ctx.needs_input_grad[4:]) else None, *parts)
        return F.linear(round_inputs(hidden, kind), round_weight(parts, *ctx.settings))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        hidden, *parts = ctx.saved_tensors
        scaling, kind, _ = ctx.settings
        gradient = gradients[0]
        weight, unclipped = round_weight_with_mask(parts, *ctx.settings)
        hidden_grad = gradient @ weight if ctx.needs_input_grad[3] else None
        del weight
        if hidden is None:
            return None, None, None, hidden_grad, *(None for _ in parts)
        inputs = round_inputs(hidden, kind)
        weight_grad = gradient.flatten(0, -2).t() @ inputs.flatten(0, -2)
        del inputs
        if kind != "fp8":
            weight_grad = weight_grad.mul_(unclipped)
        del unclipped
        return (
            None,
            None,
            None,
            hidden_grad,
            *_split_gradient(
                parts, gradient=weight_grad, scaling=scaling, needs_grad=ctx.needs_input_grad[4:]
            ),
        )


def _split_gradient(
    parts: list[Tensor], gradient: Tensor, scaling: float, needs_grad: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of the weight, or of weight, A and B, given that of the merged `[o, i]`.

    scaling: of the adapter. needs_grad: for each part.
    """
    if len(parts) == 1:
        return [gradient]
    _, lora_a, lora_b = parts
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    grads: list[Tensor | None] = [gradient if needs_grad[0] else None, None, None]
    if needs_grad[1]:
        grads[1] = (lora_b.to(wide.dtype).t() @ wide).mul_(scaling).to(lora_a.dtype)
    if needs_grad[2]:
        grads[2] = (wide @ lora_a.to(wide.dtype).t()).mul_(scaling).to(lora_b.dtype)
    return grads


# Compiled code calls each of the next three functions as one operator. If the compiler fused what
# they do, a merged weight would not be cast to its own dtype before it is rounded, and the codes of
# every hundredth weight in bf16 would differ from those of the export.


def round_weight(parts: Sequence[Tensor], scaling: float, kind: str, group_size: int) -> Tensor:
    """Return the weight `[o, i]`, merged with the adapter if parts have one, and rounded.

    parts: see `_RoundedLinear`. scaling: of the adapter.
    """
    if torch.compiler.is_compiling():
        return cast(Tensor, _WEIGHT(list(parts), scaling, kind, group_size))
    # Selective checkpointing counts the layer's matmuls; the one that merges an adapter is not one.
    with suspend_selective_checkpointing():
        return _round_weight(parts, scaling=scaling, kind=kind, group_size=group_size)


def round_weight_with_mask(
    parts: Sequence[Tensor], scaling: float, kind: str, group_size: int
) -> tuple[Tensor, Tensor]:
    """Return the rounded weight `[o, i]`, and a mask, bool `[o, i]`: True where it was not clipped.

    For fp8, which clips nothing, the mask is empty. Arguments: see `round_weight`.
    """
    operator = _WEIGHT_WITH_MASK if torch.compiler.is_compiling() else _round_weight_with_mask
    return cast(tuple[Tensor, Tensor], operator(list(parts), scaling, kind, group_size))


def round_inputs(hidden: Tensor, kind: str) -> Tensor:
    """Return hidden states `[..., i]`, rounded for fp8; for other kinds as they are."""
    operator = _INPUTS if torch.compiler.is_compiling() else _round_inputs
    return cast(Tensor, operator(hidden, kind)) if kind == "fp8" else hidden


def _merge_weight(scaling: float, weight: Tensor, *adapter: Tensor) -> Tensor:
    """Return the weight merged with the adapter, computed in fp32, in the weight's dtype.

    Bit for bit the result of `recipe_lib.checkpoint.adapter_merging`, which exports call.
    """
    if not adapter:
        return weight
    lora_a, lora_b = adapter
    wide = torch.promote_types(weight.dtype, torch.float32)
    merged = torch.addmm(weight.to(wide), lora_b.to(wide), lora_a.to(wide), alpha=scaling)
    return merged.to(weight.dtype)


def _round_weight(parts: Sequence[Tensor], scaling: float, kind: str, group_size: int) -> Tensor:
    return _fake_quantize(
        _merge_weight(scaling, *parts), _get_quantizer_configs(kind, group_size)[0]
    )


def _round_inputs(hidden: Tensor, kind: str) -> Tensor:
    return _fake_quantize(hidden.contiguous(), _get_quantizer_configs(kind, 1)[1])


def _fake_quantize(tensor: Tensor, config: Any) -> Tensor:
    from torchao.quantization.qat import FakeQuantizerBase

    # A new quantizer each time: one that lives on would hold its scales.
    with torch.no_grad():
        return cast(Tensor, FakeQuantizerBase.from_config(config)(tensor))


def _round_weight_with_mask(
    parts: Sequence[Tensor], scaling: float, kind: str, group_size: int
) -> tuple[Tensor, Tensor]:
    from torchao.quantization.qat import FakeQuantizerBase
    from torchao.quantization.quant_primitives import _DTYPE_TO_QVALUE_BOUNDS as BOUNDS
    from torchao.quantization.quant_primitives import _fake_quantize_affine

    config = _get_quantizer_configs(kind, group_size)[0]
    merged = _merge_weight(scaling, *parts)
    if kind == "fp8":
        weight = _fake_quantize(merged, config)
        return weight, weight.new_empty(0, dtype=torch.bool)
    quantizer = cast(Any, FakeQuantizerBase.from_config(config))
    with torch.no_grad():
        weight = quantizer(merged)
        # A group's largest magnitude is at code 7.5, which rounds to 8 and is clipped to 7. With
        # one code more nothing is clipped, so that the weights that differ are the clipped ones.
        least, largest = BOUNDS[config.dtype]
        unclipped = _fake_quantize_affine(
            merged,
            (1, group_size if kind == "int4" else merged.shape[1]),
            quantizer.scale,
            quantizer.zero_point,
            torch.int32,
            least,
            largest + 1,
        )
        return weight, unclipped.eq(weight)


@cache
def _get_quantizer_configs(kind: str, group_size: int) -> tuple[Any, Any]:
    """Return the configs of torchao's fake quantizers for a linear's weight and its inputs.

    The second is None where inputs stay as they are.
    """
    silence_torchao()
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    sample = nn.Sequential(nn.Linear(group_size, 1, device="meta"))
    quantize_(sample, QATConfig(build_torchao_config(kind, group_size), step="prepare"))
    prepared = cast(Any, sample[0])
    inputs = prepared.activation_fake_quantizer
    return prepared.weight_fake_quantizer.config, None if inputs is None else inputs.config


_WEIGHT = make_operator(
    "rounded_weight", _round_weight, lambda parts, *_: torch.empty_like(parts[0])
)
_WEIGHT_WITH_MASK = make_operator(
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
