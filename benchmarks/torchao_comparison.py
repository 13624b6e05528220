"""What torchao's converters for FP8 and INT8 training and its low-bit optimizers do where ours stand in their place.

    python -m benchmarks.torchao_comparison --output docs/measurements/torchao.md

On the CPU: single products against fp64, a small decoder with each lever that `matmul_dtype` goes together with, plans
of a shipped config, and optimizer states that are saved and loaded on other numbers of ranks. Some four minutes.
"""

import argparse
import importlib.metadata
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.torchao_states import loads, state_bytes
from recipe_lib.adapters import add_adapters, nf4
from recipe_lib.config.schema import LoraConfig
from recipe_lib.memory import apply_activation_checkpointing, compile_layers, use_low_precision
from recipe_lib.memory import apply_levers as lever
from recipe_lib.memory.apply_levers import scaled_linear
from recipe_lib.models import build_meta
from recipe_lib.ops.deferred import defer_weight_gradients, splittable
from recipe_lib.ops.head_losses import CrossEntropy
from recipe_lib.units import GIB, MIB
from tests.distributed.ranks import run_ranks
from tests.memory.live_bytes import LiveBytes
from tests.parallel.small_models import gradients, small_batch, small_spec
from tests.plan.apart import apart, settings
from tests.torchao_oracle import convert, nf4_tensor

KINDS = ("int8", "fp8")
OURS, THEIRS = "ours", "torchao"
TOKENS, WIDTH, MLP_WIDTH = 512, 1024, 2816
PLANNED = ("llama3/8B_full", 4, "h100")

PAGE = """# torchao's converters and optimizers, beside ours

Made by `python -m benchmarks.torchao_comparison --output docs/measurements/torchao.md` on a CPU, torch {torch},
torchao {torchao}. Nothing ran on a GPU; times of the plans are computed. `import torch` takes {torch_seconds:.1f} s of
CPU, `import torchao.optim` {torchao_seconds:.1f} s.

torchao converts by `quantize_` with `Int8MixedPrecisionTrainingConfig(module_swap=True)`, and by
`convert_to_float8_training` with its recipe `rowwise`, scales not rounded to powers of two (as ours are not) except
where `shipped` says so.

## One linear

{tokens} tokens, a weight of {rows} x {columns}, normal numbers. Relative error against fp64 (length of the difference
over length of the result), and bytes that are kept for backward beside the weight, if it is trained or frozen.

| type | products | output | input's gradient | weight's gradient | kept, trained | kept, frozen |
| --- | --- | --- | --- | --- | --- | --- |
{linears}

## A decoder

Two layers, fourteen linears, bf16, as `matmul_dtype` meets them in a run.

| | products | ours | torchao's converters |
| --- | --- | --- | --- |
{levers}

## Plans

`tune plan` of {config} on {ranks} x {device} without `compile=true`. Rounding is one kernel of ours, which is
compiled wherever Triton is; torchao's is a chain of operators that asks for `torch.compile` around it.

| products | step | active | reserved |
| --- | --- | --- | --- |
{plans}

## NF4

Dequantizing a weight of {nf4_rows} x {nf4_columns} to {nf4_whole:.0f} MiB of bf16, as every step does for each frozen
matrix, takes {nf4_ours:.0f} MiB at its peak, the result included, and torchao's {nf4_theirs:.0f} MiB; both give the
same bits.

## States of 8 bits

Bytes of AdamW's two states of Qwen2.5 0.5B on the first of N ranks (FSDP, weights in bf16).

| ranks | ours | torchao's AdamW8bit | of its matrices in 8 bits |
| --- | --- | --- | --- |
{bytes}

States of the matrices of one layer of that model after five steps on some ranks, saved by torch's distributed
checkpoint and loaded on others: how many of the 8-bit codes are those of a run on one rank.

| saved on | loaded on | ours | torchao's AdamW8bit |
| --- | --- | --- | --- |
{loads}
"""


def main(argv: list[str] | None = None) -> int:
    """Writes the page, or prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    lever._check_fp8 = lambda device: None  # a CPU has the product, slowly, and stands for a GPU
    config, ranks, device = PLANNED
    page = PAGE.format(
        torch=torch.__version__,
        torchao=importlib.metadata.version("torchao"),
        torch_seconds=seconds_of("import torch"),
        torchao_seconds=seconds_of("from tests.torchao_oracle import low_bit_adamw; low_bit_adamw()"),
        tokens=TOKENS,
        rows=MLP_WIDTH,
        columns=WIDTH,
        config=config,
        ranks=ranks,
        device=device,
        **dequantizing(),
        linears="\n".join(linears()),
        levers="\n".join(levers()),
        plans="\n".join(plans()),
        bytes="\n".join(state_bytes()),
        loads="\n".join(loads()),
    )
    if arguments.output is None:
        print(page, end="")
    else:
        arguments.output.write_text(page)
    return 0


def seconds_of(code: str) -> float:
    """CPU seconds of a process that runs it, the least of three."""
    found = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found)


def changed(model: nn.Module, kind: str, whose: str) -> nn.Module:
    """The model with products in `kind`."""
    if whose == OURS:
        use_low_precision(model, kind, torch.device("cpu"))
        return model
    return convert(model, kind)


def linears() -> list[str]:
    """Rows of the first table."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for kind in KINDS:
            cases: list[tuple[str, dict[str, Any]]] = [(OURS, {}), (THEIRS, {})]
            if kind == "fp8":
                cases.append((f"{THEIRS}, shipped", {"round_scales_to_power_of_2": True}))
            for name, options in cases:
                off, trained = one_linear(dtype, kind, name, options, frozen=False)
                _, frozen = one_linear(dtype, kind, name, options, frozen=True)
                cells = [f"{100 * share:.2f} %" for share in off] + [
                    f"{kept / 2**20:g} MiB" for kept in (trained, frozen)
                ]
                rows.append(f"| {str(dtype).removeprefix('torch.')} | {kind}, {name} | {' | '.join(cells)} |")
    return rows


def one_linear(
    dtype: torch.dtype, kind: str, name: str, options: dict[str, Any], *, frozen: bool
) -> tuple[list[float], int]:
    """(errors of the output and both gradients, bytes kept beside the weight)."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(MLP_WIDTH, WIDTH, generator=generator) / WIDTH**0.5).to(dtype)
    gradient = torch.randn(TOKENS, MLP_WIDTH, generator=generator).to(dtype)
    linear = nn.Linear(WIDTH, MLP_WIDTH, bias=False, dtype=dtype)
    linear.weight = nn.Parameter(weight, requires_grad=not frozen)
    if name == OURS:
        out = scaled_linear(hidden, linear.weight, None, kind)
    else:
        linear = convert(nn.Sequential(linear), kind, None, **options)[0]  # type: ignore[index]
        out = linear(hidden)
    kept = [tensor for tensor in out.grad_fn.saved_tensors if tensor is not None]
    beside = sum(t.numel() * t.element_size() for t in kept if t.data_ptr() != weight.data_ptr())
    out.backward(gradient)
    wide = [tensor.detach().double() for tensor in (hidden, weight, gradient)]
    exact = [wide[0] @ wide[1].t(), wide[2] @ wide[1], wide[2].t() @ wide[0]]
    found = [out.detach(), hidden.grad, linear.weight.grad]
    return [
        float((f.double() - e).norm() / e.norm()) for f, e in zip(found, exact, strict=True) if f is not None
    ], beside


def levers() -> list[str]:
    """Rows of the second table."""
    rows = []
    for name, case in CASES.items():
        for kind in KINDS:
            cells = []
            for whose in (OURS, THEIRS):
                try:
                    cells.append(case(kind, whose))
                except (RuntimeError, AssertionError, ValueError) as error:
                    cells.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
            rows.append(f"| {name} | {kind} | {' | '.join(cells)} |")
    return rows


def small_model(dtype: torch.dtype = torch.bfloat16, lora: bool = False) -> nn.Module:
    """A decoder on the meta device."""
    model = build_meta(small_spec(layers=2), dtype)
    if lora:
        add_adapters(model, LoraConfig(rank=4, alpha=2.0), dtype)
    return model


def filled(model: nn.Module) -> nn.Module:
    """The model with the same weights every time."""
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + (parameter.dim() == 1))
    return model


def trained(model: nn.Module, rows: int = 8) -> dict[str, Tensor]:
    """Gradients of the small batch."""
    tokens, labels = (tensor[:rows] for tensor in small_batch())
    loss = model(tokens, labels=labels, head_loss=CrossEntropy(3)) / (labels != -100).sum()
    loss.backward()
    return gradients(model)


def same_bits(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
    """Whether all gradients are there and the same."""
    same = sum(name in found and torch.equal(found[name], wanted[name]) for name in wanted)
    return "same bits" if same == len(wanted) else f"{same} of {len(wanted)} gradients have the same bits"


def precision(kind: str, whose: str) -> str:
    """How far gradients are from the bf16 model's."""
    wanted, found = trained(filled(small_model())), trained(filled(changed(small_model(), kind, whose)))
    off = torch.cat([(found[name] - wanted[name]).float().flatten() for name in wanted]).norm()
    return f"{100 * off / torch.cat([grad.float().flatten() for grad in wanted.values()]).norm():.1f} % off"


def odd_lengths(kind: str, whose: str) -> str:
    """36 tokens: FP8 kernels of GPUs refuse sizes that 16 does not divide, a CPU's take any."""
    model, sizes = filled(changed(small_model(), kind, whose)), []

    def noted(left: Tensor, right: Tensor, *args: Any, **options: Any) -> Tensor:
        sizes.append((left.shape[1], *right.shape))
        return product(left, right, *args, **options)

    product = torch._scaled_mm
    with mock.patch.object(torch, "_scaled_mm", noted):
        trained(model, rows=3)
    refused = sum(any(size % 16 for size in found) for found in sizes)
    return f"{refused} of {len(sizes)} products refused by a GPU" if refused else "runs"


def checkpointed(kind: str, whose: str, mode: str) -> str:
    """Against the same without checkpointing."""
    model = changed(small_model(), kind, whose)
    apply_activation_checkpointing(model, mode)
    return same_bits(trained(filled(model)), trained(filled(changed(small_model(), kind, whose))))


def compiled(kind: str, whose: str) -> str:
    """Compiled by torch's eager backend, which computes what the model computes."""
    torch._dynamo.reset()
    model = changed(small_model(), kind, whose)
    compile_layers(model, "eager")
    found, wanted = trained(filled(model)), trained(filled(changed(small_model(), kind, whose)))
    off = max(float((found[n].float() - wanted[n].float()).norm() / wanted[n].float().norm()) for n in wanted)
    return f"{100 * off:.1f} % off at most"


def adapters(kind: str, whose: str) -> str:
    """Linears with LoRA whose frozen product is in `kind`, and whether the adapters still train."""
    model = filled(changed(small_model(lora=True), kind, whose))
    plain = trained(filled(small_model(lora=True)))
    found = trained(model)
    off = sum(not torch.equal(found[name], plain[name]) for name in plain)
    return f"{off} of {len(plain)} gradients differ from bf16's, which is what rounding does" if off else "left in bf16"


def adapters_unasked(kind: str, whose: str) -> str:
    """The same where the converter takes what it likes."""
    model = small_model(lora=True)
    before = sum(parameter.requires_grad for parameter in model.parameters())
    model = filled(changed(model, kind, whose) if whose == OURS else convert(model, kind, None))
    with torch.enable_grad():
        found = {name for name, grad in trained(model).items() if grad is not None}
    return f"{len(found)} of {before} adapter matrices have gradients"


def deferred(kind: str, whose: str) -> str:
    """What a zero-bubble schedule can defer."""
    model = filled(changed(small_model(), kind, whose))
    tokens, labels = small_batch()
    with splittable():
        loss = model(tokens, labels=labels, head_loss=CrossEntropy(3)) / (labels != -100).sum()
        with defer_weight_gradients() as later:
            loss.backward()
    linears = {id(m.weight) for n, m in model.named_modules() if isinstance(m, nn.Linear) and "layers." in n}
    noted = sum(id(weight) in linears for entry in later for weight in entry.weights)
    return f"{noted} of {len(linears)} weight gradients deferred"


def sharded(kind: str, whose: str) -> str:
    """FSDP on two ranks with the same rows, whose mean gradient is that of one."""

    def work() -> list[str]:
        from torch.distributed.fsdp import fully_shard

        model = changed(small_model(), kind, whose)
        for layer in model.model.layers:  # type: ignore[union-attr]
            fully_shard(layer)
        found = trained(filled_shards(fully_shard(model)))
        return [same_bits(found, trained(filled(changed(small_model(), kind, whose))))]

    return str(run_ranks(work, 2)[0][0])


def filled_shards(model: nn.Module) -> nn.Module:
    """`filled`, of a sharded model."""
    whole = filled(small_model()).state_dict()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rows = torch.chunk(whole[name], parameter.device_mesh.size())[parameter.device_mesh.get_local_rank()]  # type: ignore[attr-defined]
            parameter.to_local().copy_(rows)  # type: ignore[attr-defined]
    return model


CASES: dict[str, Callable[[str, str], str]] = {
    "gradients against bf16": precision,
    "36 tokens": odd_lengths,
    "`memory.activation_checkpointing=full`": partial(checkpointed, mode="full"),
    "`memory.activation_checkpointing=selective`": partial(checkpointed, mode="selective"),
    "`compile=true`": compiled,
    "FSDP, 2 ranks": sharded,
    "LoRA, the frozen products": adapters,
    "LoRA, no filter": adapters_unasked,
    "deferred weight gradients": deferred,
}


def dequantizing() -> dict[str, float]:
    """Sizes of the weight, and MiB: of it in bf16, and the most that is alive while it is made."""
    rows, columns = 4096, 14336  # the largest of Llama 3 8B
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    theirs = nf4_tensor().from_tensor(weight, nf4.BLOCK, nf4.SCALES_PER_FACTOR)
    codes, largest = nf4.quantize_blocks(weight.view(-1, nf4.BLOCK))
    scales, factors = nf4.quantize_scales(largest)
    with LiveBytes() as ours_alive:
        ours = nf4.dequantize(codes, scales, factors, torch.bfloat16, 0, len(codes))
    with LiveBytes() as theirs_alive:
        assert torch.equal(theirs.get_original_weight(), ours.view(rows, columns))
    sizes = {"whole": weight.nbytes, "ours": ours_alive.peak, "theirs": theirs_alive.peak}
    return {"nf4_rows": rows, "nf4_columns": columns} | {f"nf4_{key}": size / MIB for key, size in sizes.items()}


def plans() -> list[str]:
    """Rows of the third table."""
    cases = [("", OURS), *((kind, whose) for kind in KINDS for whose in (OURS, THEIRS))]
    return [f"| {f'{kind}, {whose}' if kind else 'bf16'} | {apart(planned, kind, whose)} |" for kind, whose in cases]


def planned(kind: str, whose: str) -> str:
    """Cells of one plan: seconds of a step, and the heaviest rank's bytes."""
    from recipe_lib.memory import apply_levers
    from recipe_lib.plan.build_plan import make_plan

    if kind and whose == THEIRS:
        apply_levers.use_low_precision = _converted
    config, ranks, device = PLANNED
    recipe, cfg, wanted = settings(config, ranks, *([f"matmul_dtype={kind}"] if kind else []), device=device)
    plan, _ = make_plan(recipe, cfg, wanted)
    rank = plan.heaviest
    assert plan.time is not None
    return f"{plan.time.step:.2f} s | {rank.peak.active / GIB:.2f} GiB | {rank.reserved / GIB:.2f} GiB"


def _converted(model: nn.Module, matmul_dtype: str | None, device: torch.device | None = None) -> None:
    assert matmul_dtype is not None
    convert(model, matmul_dtype)


if __name__ == "__main__":
    sys.exit(main())
