"""Build transformers' model with NF4 and LoRA as bitsandbytes and PEFT allocate them.

`peer_traces.py` trains it on the simulated device, where tensors have sizes and no bytes, to plan
runs that other planners' authors published. bitsandbytes cannot run there, so its NF4 and PEFT's
LoRA are written here from what they allocate. Values mean nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.streamed_layers import StreamedCodes

# Orders in which weights are loaded (`PeerRun.loader`).
DEVICE_MAP = "device_map"
LINEARS_FIRST = "linears first"
NF4_BLOCK = 64  # numbers that share a scale
NESTED_BLOCK = 256  # scales that share a scale of their own, with double quantization


@dataclass(frozen=True)
class PeerRun:
    """Hold the settings of a published run.

    Fields that this file does not read are for `peer_traces.trace_run` and `planner_peers.py`.
    """

    model: str  # key of `models` in peer_rows.json, which has the published runs
    batch: int  # sequences of a step
    tokens: int  # of a sequence
    rank: int  # of LoRA
    targets: tuple[str, ...]  # names of the linears with LoRA, such as `q_proj`
    dtype: str = "bfloat16"  # of the weights that are not quantized
    nf4: bool = False  # the decoder's linears have weights in 4 bits
    double_quant: bool = False  # their scales have 8 bits
    prepared: bool = False  # PEFT's `prepare_model_for_kbit_training` made the rest fp32
    # `eager`; `sdpa`, torch's choice on that GPU; `efficient` or `math`, that kernel of torch's.
    attention: str = "sdpa"
    # Tokens of a piece of the loss, each checkpointed; 0: transformers' own loss.
    loss_chunk: int = 0
    keeps_logits: bool = False  # a variable holds the model's output to the step's end
    clipped: bool = False  # gradients, by `clip_grad_norm_`
    # Layers' weights in host memory. `all`: two layers at a time are on the device. `codes`: NF4
    # codes alone, copied ahead on a stream of their own, as Loggetta does. Empty: none.
    streamed: str = ""
    shared_ends: bool = False  # embedding and output projection are in one buffer in turn
    capability: tuple[int, int] = (8, 0)  # of the GPU
    # DEVICE_MAP: sorted by name, after one block that is as large as all. LINEARS_FIRST. Empty: the
    # model's order.
    loader: str = ""
    # Architecture, such as `sm90`, whose workspace of matmuls torch takes; empty: by `capability`.
    workspace: str = ""
    expandable: bool = False  # the allocator has expandable segments
    phase: str = "step"  # whose peak is compared: a later one, or `first step`


class Nf4Linear(nn.Module):
    """Allocate and free as bitsandbytes' frozen 4-bit linear does.

    A byte has two numbers, and 64 numbers share a scale, in fp32 or in 8 bits. `code` and `state2`
    are the names of bitsandbytes.
    """

    def __init__(self, linear: nn.Linear, double_quant: bool) -> None:
        """Quantize a linear whose weight is on the device, there.

        double_quant: scales have 8 bits.
        """
        super().__init__()
        weight = linear.weight
        device = weight.device
        self.shape = weight.shape
        self.dtype = weight.dtype  # that it computes in
        self.bias = linear.bias
        blocks = -(-weight.numel() // NF4_BLOCK)
        scales = torch.empty(blocks, device=device)
        self.codes = torch.empty(-(-weight.numel() // 2), 1, dtype=torch.uint8, device=device)
        self.code = torch.empty(16, device=device)  # values of the 16 codes
        self.scales = scales
        if double_quant:
            self.offset = scales.mean()
            centered = scales - self.offset
            self.scales = torch.empty_like(centered, dtype=torch.uint8)
            self.state2_absmax = torch.empty(-(-blocks // NESTED_BLOCK), device=device)
            self.state2_code = torch.empty(256, device=device)

    def dequantize(self) -> Tensor:
        """Return the weight `[outputs, inputs]` in the compute dtype."""
        scales = self.scales
        if scales.dtype == torch.uint8:  # first to fp32
            scales = torch.empty_like(scales, dtype=torch.float32)
            scales += self.offset
        return torch.empty(self.shape, dtype=self.dtype, device=scales.device)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the product in the input's dtype.

        Casts the bias to the compute dtype for good, as bitsandbytes does.
        """
        if self.bias is not None:
            self.bias.data = self.bias.data.to(self.dtype)
        return _Nf4Matmul.apply(hidden.to(self.dtype), self).to(hidden.dtype)


class _Nf4Matmul(torch.autograd.Function):
    """Compute a product that keeps the codes alone, and dequantizes them again in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, linear: Nf4Linear) -> Tensor:
        ctx.linear = linear
        return F.linear(hidden, linear.dequantize(), linear.bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return torch.matmul(gradient, ctx.linear.dequantize()), None


class LoraLinear(nn.Module):
    """Add LoRA to a linear as PEFT does: two fp32 matrices, to whose dtype the input is cast.

    They have PEFT's names.
    """

    def __init__(self, base: nn.Module, outputs: int, inputs: int, rank: int, device: Any) -> None:
        """Wrap a linear of `outputs` and `inputs` channels; rank: of LoRA."""
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(inputs, rank, bias=False, device=device)
        self.lora_B = nn.Linear(rank, outputs, bias=False, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the sum of the linear's output and the adapter's."""
        output = self.base(hidden)
        dtype = output.dtype
        # 2.0 stands for alpha / rank, on which memory does not depend.
        if isinstance(self.base, Nf4Linear):
            # PEFT clones a 4-bit linear's output, and casts the adapter's before both are added.
            output = output.clone()
            hidden = hidden.to(torch.float32)
            adapter_output = self.lora_B(self.lora_A(hidden)) * 2.0
            adapter_output = adapter_output.to(dtype)
            return output + adapter_output
        hidden = hidden.to(torch.float32)
        output = output + self.lora_B(self.lora_A(hidden)) * 2.0
        return output.to(dtype)


def build_model(run: PeerRun, sizes: Mapping[str, Any], device: Any) -> Any:
    """Build transformers' model with a run's quantization, preparation by PEFT and adapters.

    sizes: entries of transformers' config, `model_type` among them.
    """
    sizes = dict(sizes)
    if run.shared_ends:
        # Both are frozen, so that one buffer in turn takes the memory of a tied weight.
        sizes["tie_word_embeddings"] = True
    config = AutoConfig.for_model(sizes.pop("model_type"), use_cache=False, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=getattr(torch, run.dtype),
            attn_implementation="eager" if run.attention == "eager" else "sdpa",
        )
    model.requires_grad_(False)
    _allocate_weights(model, run, device)
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
        StreamedCodes(layers, quantized_linears)  # lives on in the hooks that it registers
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # As PEFT's runs have it: the embedding's output requires gradients.
    model.enable_input_require_grads()
    return model.train()


def _allocate_weights(model: Any, run: PeerRun, device: Any) -> None:
    """Allocate weights one after the other, in the run's order, and quantize a linear's at once."""
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
        quantized_names = linears if run.nf4 else set()
        # 16 bits to 4.
        weight_bytes = [
            weight.nbytes // (4 if name in quantized_names else 1)
            for name, weight in model.named_parameters()
        ]
        # transformers warms torch's caching allocator by a block of this size, freed at once.
        torch.empty(sum(weight_bytes), dtype=torch.uint8, device=device)
    loaded: dict[tuple[int, str], Any] = {}  # (layer, path in it) -> its linear
    for name in names:
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        if name in linears:
            layer_number = int(path.split(".")[2])
            path_in_layer = path.split(".", 3)[3]
            base = _allocate_linear(
                module,
                run=run,
                device=device,
                two_layers_before=loaded.get((layer_number - 2, path_in_layer)),
            )
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, base)
            loaded[layer_number, path_in_layer] = base
        elif getattr(module, attribute).device.type == "meta":  # not yet by a tied weight
            values = torch.empty_like(getattr(module, attribute), device=device)
            setattr(module, attribute, nn.Parameter(values, False))
    # Such as RoPE's frequencies.
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device))


def _split_numbers(name: str) -> list[tuple[bool, int, str]]:
    """Return the key by which transformers sorts names: numbers between dots as numbers."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def _allocate_linear(linear: nn.Linear, run: PeerRun, device: Any, two_layers_before: Any) -> Any:
    """Allocate a linear's weight and return the linear, quantized if the run says so.

    two_layers_before: the same linear of that layer, or None. With all weights streamed it is
    returned instead, since two layers at a time share their memory with all others.
    """
    if two_layers_before is not None and run.streamed == "all":
        return two_layers_before
    linear.weight = nn.Parameter(torch.empty_like(linear.weight, device=device), False)
    if not run.nf4:
        return linear
    base = Nf4Linear(linear, run.double_quant)
    if run.streamed == "codes":
        base.codes = base.codes.new_empty(0)  # on the host until its layer runs
    return base


def _add_adapters(layer: nn.Module, run: PeerRun, device: Any) -> None:
    """Wrap a layer's targets in `LoraLinear`."""
    for name, base in list(layer.named_modules()):
        path, _, child = name.rpartition(".")
        if child in run.targets:
            outputs, inputs = base.shape if isinstance(base, Nf4Linear) else base.weight.shape
            adapted = LoraLinear(base, outputs=outputs, inputs=inputs, rank=run.rank, device=device)
            setattr(layer.get_submodule(path), child, adapted)
