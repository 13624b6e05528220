"""The fused kernels at shapes of Llama 3 8B and Gemma 2 2B: what they make, whether they give what
their chains give.

And how long they take.

    python benchmarks/gpu_check.py kernels                    without a GPU: compiled for the CPU
    python benchmarks/gpu_check.py kernels --output FOLDER    where fused_kernels.md goes (default docs/measurements)

Kernels and memory: of the Triton code that inductor generates for an H100, which takes no GPU, but
the package triton. Differences: compiled for the device that is there, against the same function
operator by operator. Host: seconds of a call with tensors of a few numbers. Time: on a GPU, of
both.
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.triton_code import count_bytes, count_kernels, generate_triton_code
from recipe_lib.adapters import nf4, quantized
from recipe_lib.ops import chunked_heads, fused_kernels, mlp, rope, special_attention

REPOSITORY = Path(__file__).resolve().parents[1]
TOKENS, WIDTH, HEADS, HEAD_WIDTH, INNER, VOCABULARY = (
    2048,
    4096,
    32,
    128,
    14336,
    128256,
)  # Llama 3 8B
SCORES = (
    1,
    8,
    1024,
    4096,
)  # Gemma 2 2B: of 8 heads, a quarter of the queries of 4096 tokens and all keys
CHUNK = TOKENS // 16  # tokens whose logits exist at a time
CALLS = 300
HEAD = ("operator", "of", "Triton kernels", "MiB besides its results", "us of the host", "largest difference",
        "fused, us", "one by one, us", "ratio")  # fmt: skip
TEXT = """# Fused kernels at the shapes of Llama 3 8B and Gemma 2 2B

By `python benchmarks/gpu_check.py kernels`, torch {torch}, on {device}. {note}

{table}

Kernels and memory are those of the Triton code that inductor {triton} generates for an H100 and these sizes, without
compiling it; a run leaves sizes open.
Scores are those of Gemma 2 2B, of as many queries as are taken at a time. Their kernels are looped reductions: a row is
read twice for the shares and three times for the gradients, with sizes left open three and four times, and nothing
between is written. A row of up to 1024 scores of a known number is read once.
Difference: of numbers compiled for this device from those of the same function operator by operator, over the largest
of these. Host: median of {calls} calls with tensors of a few numbers, the work on them included.
"""


@dataclass(frozen=True)
class Kernel:
    """name: of the operator. of: its arguments in words. make: `fn(device, small)` to them; small:
    of few numbers.
    """

    name: str
    of: str
    function: Any
    make: Callable[[torch.device, bool], tuple[Any, ...]]


def _make_random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).bfloat16()


def _build_rotation(device: torch.device, small: bool) -> tuple[Any, ...]:
    tokens, heads = (1, 1) if small else (TOKENS, HEADS)
    angles = torch.rand(1, tokens, 1, HEAD_WIDTH // 2, device=device)
    return _make_random(device, 1, tokens, heads, HEAD_WIDTH), angles.cos(), angles.sin(), False


def _build_gate(count: int) -> Callable[[torch.device, bool], tuple[Any, ...]]:
    def make(device: torch.device, small: bool) -> tuple[Any, ...]:
        return (
            *(_make_random(device, *((2, 16) if small else (TOKENS, INNER))) for _ in range(count)),
            "silu",
        )

    return make


def _build_logits(with_gradients: bool) -> Callable[[torch.device, bool], tuple[Any, ...]]:
    def make(device: torch.device, small: bool) -> tuple[Any, ...]:
        rows, columns = (2, 16) if small else (CHUNK, VOCABULARY)
        logits, labels = (
            _make_random(device, rows, columns),
            torch.randint(columns, (rows,), device=device),
        )
        if not with_gradients:
            return logits, labels, None
        return (
            logits,
            labels,
            logits.float().logsumexp(dim=1),
            -torch.ones(rows, device=device),
            None,
        )

    return make


def _build_nf4(device: torch.device, small: bool) -> tuple[Any, ...]:
    blocks = 2 if small else INNER * WIDTH // nf4.BLOCK
    codes = torch.randint(256, (blocks, nf4.BLOCK // 2), device=device, dtype=torch.uint8)
    scales = torch.randint(-127, 128, (blocks,), device=device, dtype=torch.int8)
    factors = torch.rand(nf4.count_factors(blocks), device=device) + 100
    return (
        codes,
        scales,
        factors,
        nf4._make_levels(torch.bfloat16, device),
        [0, 0, blocks, blocks],
        nf4._get_group_size(blocks),
    )


def _build_int8(device: torch.device, small: bool) -> tuple[Any, ...]:
    rows, columns = (2, 16) if small else (INNER, WIDTH)
    codes = torch.randint(-127, 128, (rows, columns), device=device, dtype=torch.int8)
    return codes, torch.rand(rows, device=device), torch.bfloat16


def _build_scores(count: int) -> Callable[[torch.device, bool], tuple[Any, ...]]:
    def make(device: torch.device, small: bool) -> tuple[Any, ...]:
        shape = (1, 2, 2, 16) if small else SCORES
        reach = special_attention.compute_reach(None, *shape[2:], shape[3], device)
        return *(_make_random(device, *shape) for _ in range(count)), reach, 50.0, 256**-0.5

    return make


def _build_inner(count: int) -> Callable[[torch.device, bool], tuple[Any, ...]]:
    """Of an expert: gradients `[m, f]` of the product, if two are asked for, inner channels `[m,
    2f]`, scores.
    """

    def make(device: torch.device, small: bool) -> tuple[Any, ...]:
        rows, width = (2, 16) if small else (8 * TOKENS, 768)
        first = (_make_random(device, rows, width),) * (count - 1)
        settings = ("silu", False, 1.0, float("inf"))
        return (
            *first,
            _make_random(device, rows, 2 * width),
            torch.rand(rows, device=device),
            *settings,
        )

    return make


KERNELS = (
    Kernel("rotate", "queries of 2048 tokens", rope._rotate, _build_rotation),
    Kernel("gated_product", "2048 x 14336", mlp.compute_gated_product, _build_gate(2)),
    Kernel("gated_gradients", "2048 x 14336", mlp.compute_gated_product_gradients, _build_gate(3)),
    Kernel("scored_product", "16384 x 768 of experts", mlp.compute_scored_product, _build_inner(1)),
    Kernel(
        "scored_product_gradients",
        "16384 x 768 of experts",
        mlp.compute_scored_product_gradients,
        _build_inner(2),
    ),
    Kernel(
        "label_log_probs",
        "logits 128 x 128256",
        chunked_heads.label_log_probs,
        _build_logits(False),
    ),
    Kernel(
        "label_log_prob_gradients",
        "logits 128 x 128256",
        chunked_heads.label_log_prob_gradients,
        _build_logits(True),
    ),
    Kernel("dequantize_nf4", "14336 x 4096", nf4._dequantize, _build_nf4),
    Kernel("dequantize_int8", "14336 x 4096", quantized._dequantize, _build_int8),
    Kernel(
        "capped_shares", "scores 8 x 1024 x 4096", special_attention.capped_shares, _build_scores(1)
    ),
    Kernel(
        "capped_score_gradients",
        "scores 8 x 1024 x 4096",
        special_attention.capped_score_gradients,
        _build_scores(2),
    ),
)


def main(words: list[str]) -> int:
    """Prints, and writes the page; exit code 1 where a kernel's numbers are not those of its
    chain.
    """
    parser = argparse.ArgumentParser(prog="gpu_check.py kernels", description=__doc__)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "docs" / "measurements")
    output = parser.parse_args(words).output
    on_gpu = torch.cuda.is_available()
    device, has_triton = (
        torch.device("cuda" if on_gpu else "cpu"),
        importlib.util.find_spec("triton") is not None,
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows, faults = [], 0
    for kernel in KERNELS:
        difference = find_largest_difference(kernel, device)
        faults += difference > 2**-7
        cells = [
            f"`{kernel.name}`",
            kernel.of,
            *(measure_generated(kernel) if has_triton else ("-", "-")),
        ]
        cells += [
            f"{1e6 * measure_host_seconds(kernel, device):.0f}",
            f"{difference:.1e}",
            *measure_times(kernel, device),
        ]
        rows.append("| " + " | ".join(cells) + " |")
        print(rows[-1], flush=True)
    table = ["| " + " | ".join(HEAD) + " |", "|---|---|" + "---:|" * (len(HEAD) - 2), *rows]
    note = "" if on_gpu else "Nothing here was measured on a GPU: times of kernels are missing."
    text = TEXT.format(
        torch=torch.__version__, device=torch.cuda.get_device_name() if on_gpu else "a CPU, one thread", note=note,
        table="\n".join(table), calls=CALLS, triton=_describe_versions(has_triton),
    )  # fmt: skip
    (output / "fused_kernels.md").write_text(text)
    return 1 if faults else 0


def _describe_versions(has_triton: bool) -> str:
    if not has_triton:
        return "(triton is not installed)"
    import triton

    return f"with triton {triton.__version__}"


def measure_generated(kernel: Kernel) -> tuple[str, str]:
    """Triton kernels, and MiB of memory besides the results."""
    arguments = kernel.make(torch.device("cpu"), False)
    code = generate_triton_code(kernel.function.__wrapped__, *arguments)
    shapes = getattr(torch.ops.tune_recipes, kernel.name)
    results = shapes(*(one.to("meta") if isinstance(one, Tensor) else one for one in arguments))
    own = sum(one.nbytes for one in ([results] if isinstance(results, Tensor) else results))
    return str(count_kernels(code)), f"{(count_bytes(code) - own) / 2**20:.2f}"


def find_largest_difference(kernel: Kernel, device: torch.device) -> float:
    """Of all results, over the largest number of each."""
    arguments, function = kernel.make(device, False), kernel.function.__wrapped__
    pairs = [(fused_kernels.call_compiled(function, *arguments), function(*arguments))]
    if not isinstance(pairs[0][0], Tensor):
        pairs = list(zip(*pairs[0], strict=True))
    return max(
        float((one.float() - other.float()).abs().max() / other.float().abs().max())
        for one, other in pairs
    )


def measure_host_seconds(kernel: Kernel, device: torch.device) -> float:
    """Median seconds of a call of the compiled operator with a few numbers, until the host goes
    on.
    """
    arguments, found = kernel.make(device, True), []
    for _ in range(CALLS + 20):
        started = time.perf_counter()
        fused_kernels.call_compiled(kernel.function.__wrapped__, *arguments)
        found.append(time.perf_counter() - started)
    return statistics.median(found[20:])


def measure_times(kernel: Kernel, device: torch.device) -> tuple[str, str, str]:
    """Microseconds on a GPU, fused and one by one, and their ratio."""
    if device.type != "cuda":
        return "-", "-", "-"
    from triton.testing import do_bench

    arguments, function = kernel.make(device, False), kernel.function.__wrapped__
    fused = do_bench(lambda: fused_kernels.call_compiled(function, *arguments))
    chain = do_bench(lambda: function(*arguments))
    return f"{1e3 * fused:.0f}", f"{1e3 * chain:.0f}", f"{chain / fused:.2f}"
