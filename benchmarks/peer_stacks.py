"""A plain training loop around transformers, PEFT and bitsandbytes on one GPU, for the planner.

The model is transformers' own class and its loss transformers' own; around it comes what the other
planners' runs had: linears with weights in NF4, LoRA as PEFT adds it, gradient checkpointing as
torch does it, torch's AdamW. NF4 and LoRA are written here from what bitsandbytes and PEFT
allocate, since bitsandbytes has no part in a simulation. What is computed is of no interest here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.streamed_layers import StreamedCodes

DEVICE_MAP = "device_map"
LINEARS_FIRST = "linears first"
# numbers that share a scale; scales that share one of their own
NF4_BLOCK = 64
NESTED_BLOCK = 256


@dataclass(frozen=True)
class PeerRun:
    """A run of that stack."""

    model: str  # its name among the `models` of peer_rows.json
    batch: int  # sequences of a step
    tokens: int  # of a sequence
    rank: int  # of LoRA
    targets: tuple[str, ...]  # of LoRA
    dtype: str = "bfloat16"
    nf4: bool = False  # weights of the decoder's linears in 4 bits
    double_quant: bool = False  # their scales in 8 bits
    prepared: bool = False  # PEFT's `prepare_model_for_kbit_training` made the rest fp32
    # `eager`; `sdpa`, torch's choice on that GPU; `efficient` or `math`, that kernel of torch's,
    # keys and values copied for each query head.
    attention: str = "sdpa"
    # Tokens of a piece of the loss, each checkpointed; 0: transformers' own loss.
    loss_chunk: int = 0
    keeps_logits: bool = False  # a variable holds the model's output to the step's end
    clipped: bool = False  # by `clip_grad_norm_`
    # Weights of layers that lie on the host: `all`, of two layers at a time on the device; or of
    # NF4 the `codes` alone, copied ahead on a stream of their own.
    streamed: str = ""
    shared_ends: bool = False  # embedding and output projection take turns in one buffer
    capability: tuple[int, int] = (8, 0)  # of the GPU
    # `device_map`, transformers' order of names after one block for all of them;
    # `linears first`; else the model's order.
    loader: str = ""
    # Architecture whose workspace of matmuls torch takes, if not that of `capability`.
    workspace: str = ""
    expandable: bool = False  # segments of the allocator
    phase: str = "step"  # a steady one, or `first step`, which makes AdamW's states


class Nf4Linear(nn.Module):
    """A frozen linear of bitsandbytes: two numbers a byte, and a scale for 64 of them.

    Scales are in fp32, or in 8 bits.
    """

    def __init__(self, linear: nn.Linear, double_quant: bool) -> None:
        """Quantize a linear whose weight is on the device, there."""
        super().__init__()
        weight = linear.weight
        device = weight.device
        self.shape = weight.shape
        self.dtype = weight.dtype
        self.bias = linear.bias
        blocks = -(-weight.numel() // NF4_BLOCK)
        scales = torch.empty(blocks, device=device)
        self.codes = torch.empty(-(-weight.numel() // 2), 1, dtype=torch.uint8, device=device)
        self.levels = torch.empty(16, device=device)
        self.scales = scales
        if double_quant:
            self.offset = scales.mean()
            centered = scales - self.offset
            self.scales = torch.empty_like(centered, dtype=torch.uint8)
            self.nested = torch.empty(-(-blocks // NESTED_BLOCK), device=device)
            self.nested_levels = torch.empty(256, device=device)

    def dequantize(self) -> Tensor:
        """Return the weight in its compute type."""
        scales = self.scales
        if scales.dtype == torch.uint8:
            scales = torch.empty_like(scales, dtype=torch.float32)
            scales += self.offset
        return torch.empty(self.shape, dtype=self.dtype, device=scales.device)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute in the compute type, which the bias has from then on; return the input's type."""
        if self.bias is not None:
            self.bias.data = self.bias.data.to(self.dtype)
        return _Nf4Matmul.apply(hidden.to(self.dtype), self).to(hidden.dtype)


class _Nf4Matmul(torch.autograd.Function):
    """A product of which the codes alone are kept: the weight is dequantized again in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, linear: Nf4Linear) -> Tensor:
        ctx.linear = linear
        return F.linear(hidden, linear.dequantize(), linear.bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return torch.matmul(gradient, ctx.linear.dequantize()), None


class LoraLinear(nn.Module):
    """A linear as PEFT wraps it: two fp32 matrices, to whose type the input is cast."""

    def __init__(self, base: nn.Module, outputs: int, inputs: int, rank: int, device: Any) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(inputs, rank, bias=False, device=device)
        self.up = nn.Linear(rank, outputs, bias=False, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the sum of the linear's output and the adapter's."""
        output = self.base(hidden)
        dtype = output.dtype
        if isinstance(self.base, Nf4Linear):
            # PEFT clones a 4-bit linear's output, and casts the adapter's before both are added.
            output = output.clone()
            hidden = hidden.to(torch.float32)
            adapter_output = self.up(self.down(hidden)) * 2.0
            adapter_output = adapter_output.to(dtype)
            return output + adapter_output
        hidden = hidden.to(torch.float32)
        output = output + self.up(self.down(hidden)) * 2.0
        return output.to(dtype)


def build_model(run: PeerRun, sizes: Mapping[str, Any], device: Any) -> Any:
    """Load transformers' model weight by weight, quantized, prepared by PEFT, with adapters.

    sizes: `model_type` and the rest as transformers' config has them.
    """
    sizes = dict(sizes)
    if run.shared_ends:
        sizes["tie_word_embeddings"] = True
    config = AutoConfig.for_model(sizes.pop("model_type"), use_cache=False, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=getattr(torch, run.dtype),
            attn_implementation="eager" if run.attention == "eager" else "sdpa",
        )
    model.requires_grad_(False)
    _load(model, run, device)
    model.tie_weights()
    if run.prepared:
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
    for layer in model.model.layers:
        _add_adapters(layer, run, device)
    if run.streamed == "codes":
        layers = list(model.model.layers)
        quantized_linears = []  # of each layer
        for layer in layers:
            quantized_linears.append(
                [module for module in layer.modules() if isinstance(module, Nf4Linear)]
            )
        StreamedCodes(layers, quantized_linears)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    return model.train()


def _load(model: Any, run: PeerRun, device: Any) -> None:
    """Give weights their memory, one after the other, and quantize a linear's at once."""
    linears = {
        f"{path}.weight"
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and path.startswith("model.layers.")
    }
    names = [name for name, _ in model.named_parameters()]
    if run.loader == LINEARS_FIRST:
        names.sort(key=lambda name: name not in linears)
    elif run.loader == DEVICE_MAP:
        names.sort(key=_split_numbers)
        quantized = linears if run.nf4 else set()
        sizes = [
            weight.nbytes // (4 if name in quantized else 1)
            for name, weight in model.named_parameters()
        ]
        torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    loaded: dict[tuple[int, str], Any] = {}
    for name in names:
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        if name in linears:
            layer_number = int(path.split(".")[2])
            path_in_layer = path.split(".", 3)[3]
            base = _load_linear(
                module,
                run=run,
                device=device,
                two_layers_before=loaded.get((layer_number - 2, path_in_layer)),
            )
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, base)
            loaded[layer_number, path_in_layer] = base
        elif getattr(module, attribute).device.type == "meta":
            values = torch.empty_like(getattr(module, attribute), device=device)
            setattr(module, attribute, nn.Parameter(values, False))
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device))


def _split_numbers(name: str) -> list[tuple[bool, int, str]]:
    """Return the key by which transformers sorts names: numbers between dots as numbers."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def _load_linear(linear: nn.Linear, run: PeerRun, device: Any, two_layers_before: Any) -> Any:
    """Return a linear as the run has it.

    two_layers_before: the same linear of that layer, whose memory this one uses if weights are
    streamed.
    """
    if two_layers_before is not None and run.streamed == "all":
        return two_layers_before
    linear.weight = nn.Parameter(torch.empty_like(linear.weight, device=device), False)
    if not run.nf4:
        return linear
    base = Nf4Linear(linear, run.double_quant)
    if run.streamed == "codes":
        base.codes = base.codes.new_empty(0)
    return base


def _add_adapters(layer: nn.Module, run: PeerRun, device: Any) -> None:
    """Wrap a layer's targets."""
    for name, base in list(layer.named_modules()):
        path, _, child = name.rpartition(".")
        if child in run.targets:
            outputs, inputs = base.shape if isinstance(base, Nf4Linear) else base.weight.shape
            adapted = LoraLinear(base, outputs=outputs, inputs=inputs, rank=run.rank, device=device)
            setattr(layer.get_submodule(path), child, adapted)
