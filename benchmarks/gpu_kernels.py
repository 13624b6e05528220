"""Check the fused kernels at shapes of Llama 3 8B and Gemma 2 2B, and time them on a GPU.

`python benchmarks/gpu_check.py kernels` calls `main`, which writes fused_kernels.md. A fused
operator is a function that torch.compile turns into one or a few kernels; the chain is the same
function run operator by operator. Without a GPU it is compiled for the CPU and not timed. Triton
code is generated for an H100, which takes the package triton but no GPU.
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
from recipe_lib.units import MIB

REPOSITORY = Path(__file__).resolve().parents[1]
TOKENS = 2048
# Llama 3 8B.
WIDTH = 4096
HEADS = 32
HEAD_WIDTH = 128
INNER = 14336  # of the MLP
VOCABULARY = 128256
# Attention scores of Gemma 2 2B, `[b, h, m, n]`: a quarter of the queries of 4096 tokens at a time.
SCORES = (1, 8, 1024, 4096)
CHUNK = TOKENS // 16  # tokens whose logits exist at a time
CALLS = 300  # of which the host's median seconds are taken
WARM_UP_CALLS = 20  # before these
# Relative. More is a fault; as much is the distance of two bf16 numbers, 2^-7 of the smaller one.
LARGEST_DIFFERENCE = 2**-7
HEAD = (
    "operator",
    "of",
    "Triton kernels",
    "MiB besides its results",
    "us of the host",
    "largest difference",
    "fused, us",
    "one by one, us",
    "ratio",
)
TEXT = """# Fused kernels at the shapes of Llama 3 8B and Gemma 2 2B

By `python benchmarks/gpu_check.py kernels`, torch {torch}, on {device}. {note}

{table}

Kernels and memory are those of the Triton code that inductor {triton} generates for an H100 and \
these sizes, without
compiling it; a run leaves sizes open.
Scores are those of Gemma 2 2B, of as many queries as are taken at a time. Their kernels are \
looped reductions: a row is
read twice for the shares and three times for the gradients, with sizes left open three and four \
times, and nothing
between is written. A row of up to 1024 scores of a known number is read once.
Difference: of numbers compiled for this device from those of the same function operator by \
operator, over the largest
of these. Host: median of {calls} calls with tensors of a few numbers, the work on them included.
"""


@dataclass(frozen=True)
class Kernel:
    """Hold a fused operator, and arguments to call it with."""

    name: str  # of `torch.ops.tune_recipes`
    shapes: str  # of its arguments, in words
    function: Any  # calls the operator; `__wrapped__` is the function that is compiled
    # Called with a device and a flag: True for tensors of a few numbers.
    build_arguments: Callable[[torch.device, bool], tuple[Any, ...]]


def _draw(device: torch.device, *shape: int) -> Tensor:
    """Draw random numbers, bf16."""
    return torch.randn(shape, device=device).bfloat16()


def _build_rotation(device: torch.device, small: bool) -> tuple[Any, ...]:
    """Build queries `[1, s, h, d]`, and cosines and sines of the angles, `[1, s, 1, d/2]`."""
    tokens, heads = (1, 1) if small else (TOKENS, HEADS)
    angles = torch.rand(1, tokens, 1, HEAD_WIDTH // 2, device=device)
    # False: not by the negative angle.
    return _draw(device, 1, tokens, heads, HEAD_WIDTH), angles.cos(), angles.sin(), False


def _build_gate(num_tensors: int) -> Callable[[torch.device, bool], tuple[Any, ...]]:
    """Return a builder of gate and up `[s, INNER]`, after their product's gradient if three."""

    def build_arguments(device: torch.device, small: bool) -> tuple[Any, ...]:
        shape = (2, 16) if small else (TOKENS, INNER)
        return *(_draw(device, *shape) for _ in range(num_tensors)), "silu"

    return build_arguments


def _build_logits(with_gradients: bool) -> Callable[[torch.device, bool], tuple[Any, ...]]:
    """Return a builder of logits `[m, v]` and labels `[m]`, or of the gradients' arguments."""

    def build_arguments(device: torch.device, small: bool) -> tuple[Any, ...]:
        rows, columns = (2, 16) if small else (CHUNK, VOCABULARY)
        logits = _draw(device, rows, columns)
        labels = torch.randint(columns, (rows,), device=device)
        if not with_gradients:
            return logits, labels, None  # no softcap
        log_normalizers = logits.float().logsumexp(dim=1)
        gradients = -torch.ones(rows, device=device)  # of the log-probabilities
        return logits, labels, log_normalizers, gradients, None

    return build_arguments


def _build_nf4(device: torch.device, small: bool) -> tuple[Any, ...]:
    """Build a matrix in NF4: codes of its blocks, their scales, and factors of groups of scales."""
    blocks = 2 if small else INNER * WIDTH // nf4.BLOCK
    codes = torch.randint(256, (blocks, nf4.BLOCK // 2), device=device, dtype=torch.uint8)
    scales = torch.randint(-127, 128, (blocks,), device=device, dtype=torch.int8)
    # Scales are divided by them, so they must be far from 0.
    factors = torch.rand(nf4.count_factors(blocks), device=device) + 100
    levels = nf4._make_levels(torch.bfloat16, device)
    group_size = nf4._get_group_size(blocks)
    # All blocks: first of the part, then begin, run and stride of a rank's blocks.
    return codes, scales, factors, levels, [0, 0, blocks, blocks], group_size


def _build_int8(device: torch.device, small: bool) -> tuple[Any, ...]:
    """Build a matrix in int8: its codes, a scale for each row, and the dtype of the result."""
    rows, columns = (2, 16) if small else (INNER, WIDTH)
    codes = torch.randint(-127, 128, (rows, columns), device=device, dtype=torch.int8)
    return codes, torch.rand(rows, device=device), torch.bfloat16


def _build_scores(num_tensors: int) -> Callable[[torch.device, bool], tuple[Any, ...]]:
    """Return a builder of attention scores and their mask, after the shares' gradient if two."""

    def build_arguments(device: torch.device, small: bool) -> tuple[Any, ...]:
        shape = (1, 2, 2, 16) if small else SCORES
        queries, keys = shape[2:]
        reach = special_attention.compute_reach(None, queries, keys, window=keys, device=device)
        scale = 256**-0.5  # heads of 256 channels
        # 50 is Gemma 2's softcap of scores.
        return *(_draw(device, *shape) for _ in range(num_tensors)), reach, 50.0, scale

    return build_arguments


def _build_inner(with_gradients: bool) -> Callable[[torch.device, bool], tuple[Any, ...]]:
    """Return a builder of experts' gate and up `[m, 2f]` and routing scores `[m]`.

    with_gradients: before them their product's gradient, `[m, f]`.
    """

    def build_arguments(device: torch.device, small: bool) -> tuple[Any, ...]:
        # 8 experts a token, each of 768 channels, as Qwen3-30B-A3B has.
        rows, width = (2, 16) if small else (8 * TOKENS, 768)
        gradients = _draw(device, rows, width)
        channels = _draw(device, rows, 2 * width)
        scores = torch.rand(rows, device=device)
        # Gate and up one after the other, without the scale and the limit of gpt_oss.
        arguments = (channels, scores, "silu", False, 1.0, float("inf"))
        return (gradients, *arguments) if with_gradients else arguments

    return build_arguments


# The lines of the table.
KERNELS = (
    Kernel(
        "rotate",
        shapes="queries of 2048 tokens",
        function=rope._rotate,
        build_arguments=_build_rotation,
    ),
    Kernel(
        "gated_product",
        shapes="2048 x 14336",
        function=mlp.compute_gated_product,
        build_arguments=_build_gate(2),
    ),
    Kernel(
        "gated_gradients",
        shapes="2048 x 14336",
        function=mlp.compute_gated_product_gradients,
        build_arguments=_build_gate(3),
    ),
    Kernel(
        "scored_product",
        shapes="16384 x 768 of experts",
        function=mlp.compute_scored_product,
        build_arguments=_build_inner(False),
    ),
    Kernel(
        "scored_product_gradients",
        shapes="16384 x 768 of experts",
        function=mlp.compute_scored_product_gradients,
        build_arguments=_build_inner(True),
    ),
    Kernel(
        "label_log_probs",
        shapes="logits 128 x 128256",
        function=chunked_heads.label_log_probs,
        build_arguments=_build_logits(False),
    ),
    Kernel(
        "label_log_prob_gradients",
        shapes="logits 128 x 128256",
        function=chunked_heads.label_log_prob_gradients,
        build_arguments=_build_logits(True),
    ),
    Kernel(
        "dequantize_nf4",
        shapes="14336 x 4096",
        function=nf4._dequantize,
        build_arguments=_build_nf4,
    ),
    Kernel(
        "dequantize_int8",
        shapes="14336 x 4096",
        function=quantized._dequantize,
        build_arguments=_build_int8,
    ),
    Kernel(
        "capped_shares",
        shapes="scores 8 x 1024 x 4096",
        function=special_attention.capped_shares,
        build_arguments=_build_scores(1),
    ),
    Kernel(
        "capped_score_gradients",
        shapes="scores 8 x 1024 x 4096",
        function=special_attention.capped_score_gradients,
        build_arguments=_build_scores(2),
    ),
)


def main(words: list[str]) -> int:
    """Print and write the table.

    Return 1 if a kernel's results differ from its chain's by more than LARGEST_DIFFERENCE.
    """
    parser = argparse.ArgumentParser(
        prog="gpu_check.py kernels",
        description="Check the fused kernels at shapes of Llama 3 8B and Gemma 2 2B.",
    )
    parser.add_argument("--output", type=Path, default=REPOSITORY / "docs" / "measurements")
    output = parser.parse_args(words).output
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    has_triton = importlib.util.find_spec("triton") is not None
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = [f"| {' | '.join(HEAD)} |", "|---|---|" + "---:|" * (len(HEAD) - 2)]
    all_equal = True
    for kernel in KERNELS:
        difference = find_largest_difference(kernel, device)
        if difference > LARGEST_DIFFERENCE:
            all_equal = False
        cells = [f"`{kernel.name}`", kernel.shapes]
        cells += measure_generated(kernel) if has_triton else ("-", "-")
        cells += [f"{1e6 * measure_host_seconds(kernel, device):.0f}", f"{difference:.1e}"]
        cells += measure_times(kernel, device)
        table.append(f"| {' | '.join(cells)} |")
        print(table[-1], flush=True)
    text = TEXT.format(
        torch=torch.__version__,
        device=torch.cuda.get_device_name() if on_gpu else "a CPU, one thread",
        note="" if on_gpu else "Nothing here was measured on a GPU: times of kernels are missing.",
        table="\n".join(table),
        calls=CALLS,
        triton=_describe_triton(has_triton),
    )
    (output / "fused_kernels.md").write_text(text)
    return 0 if all_equal else 1


def _describe_triton(has_triton: bool) -> str:
    """Return triton's version in words for the page."""
    if not has_triton:
        return "(triton is not installed)"
    import triton

    return f"with triton {triton.__version__}"


def measure_generated(kernel: Kernel) -> tuple[str, str]:
    """Return (number of generated Triton kernels, MiB that they allocate besides the results)."""
    arguments = kernel.build_arguments(torch.device("cpu"), False)
    code = generate_triton_code(kernel.function.__wrapped__, *arguments)
    operator = getattr(torch.ops.tune_recipes, kernel.name)
    # On the meta device the operator computes nothing and returns results of the right shapes.
    meta_arguments = [
        argument.to("meta") if isinstance(argument, Tensor) else argument for argument in arguments
    ]
    result_bytes = sum(result.nbytes for result in _list_results(operator(*meta_arguments)))
    return str(count_kernels(code)), f"{(count_bytes(code) - result_bytes) / MIB:.2f}"


def _list_results(results: Any) -> list[Tensor]:
    """Return the results of an operator as a list, also of one that has a single result."""
    return [results] if isinstance(results, Tensor) else list(results)


def find_largest_difference(kernel: Kernel, device: torch.device) -> float:
    """Compile the function for this device; return its largest difference from the chain.

    It is relative to the largest number of each result.
    """
    arguments = kernel.build_arguments(device, False)
    function = kernel.function.__wrapped__
    fused_results = _list_results(fused_kernels.call_compiled(function, *arguments))
    chain_results = _list_results(function(*arguments))
    differences = []
    for fused, chain in zip(fused_results, chain_results, strict=True):
        largest = (fused.float() - chain.float()).abs().max()
        differences.append(float(largest / chain.float().abs().max()))
    return max(differences)


def measure_host_seconds(kernel: Kernel, device: torch.device) -> float:
    """Return median seconds until a compiled call returns, with tensors of a few numbers.

    A GPU may still be at work then.
    """
    arguments = kernel.build_arguments(device, True)
    seconds = []
    for _ in range(WARM_UP_CALLS + CALLS):
        started = time.perf_counter()
        fused_kernels.call_compiled(kernel.function.__wrapped__, *arguments)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[WARM_UP_CALLS:])


def measure_times(kernel: Kernel, device: torch.device) -> tuple[str, str, str]:
    """Return microseconds on a GPU, fused and as a chain, and their ratio; `-` without a GPU."""
    if device.type != "cuda":
        return "-", "-", "-"
    from triton.testing import do_bench

    arguments = kernel.build_arguments(device, False)
    function = kernel.function.__wrapped__
    fused_ms = do_bench(lambda: fused_kernels.call_compiled(function, *arguments))
    chain_ms = do_bench(lambda: function(*arguments))
    return f"{1e3 * fused_ms:.0f}", f"{1e3 * chain_ms:.0f}", f"{chain_ms / fused_ms:.2f}"
