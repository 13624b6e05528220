"""Fused kernels: each is the chain of operators that it stands for, in values, gradients, types and
shapes.
"""

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from recipe_lib.adapters import nf4, quantized
from recipe_lib.adapters.nf4 import dequantize, quantize_blocks, quantize_scales
from recipe_lib.ops import chunked_heads, fused_kernels, mlp, rope, special_attention
from recipe_lib.ops.attention import make_attention_info
from tests.distributed.ranks import run_in_fork
from tests.ops.test_attention import definition
from tests.ops.test_cross_entropy import linear_cross_entropy
from tests.ops.test_projected_cross_entropy import projected_cross_entropy
from tests.ops.test_token_log_probs import token_log_probs

CPU = torch.device("cpu")
OPERATORS = torch.ops.tune_recipes
DOCUMENTS = make_attention_info([[20, 10, 2], [29, 3, 1]], 33).documents


@pytest.fixture
def as_operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On the CPU everything goes through the operators, too, which compute their functions as they
    are.
    """
    monkeypatch.setattr(fused_kernels._fusing, "value", True)
    monkeypatch.setattr(fused_kernels, "get_kernel_type", lambda device: "cuda")
    monkeypatch.setattr(fused_kernels, "has_triton", lambda: True)
    monkeypatch.setattr(chunked_heads, "_WIDEST_FUSED", 8)
    return


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def nf4_matrix(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    codes, largest = quantize_blocks(random(rows, columns, dtype=dtype).view(-1, nf4.BLOCK))
    return (codes, *quantize_scales(largest))


def capped_calls() -> list[tuple[str, Callable[..., Any], Any, tuple[Any, ...]]]:
    """Of the last 5 queries of rows of 33 keys: of one document or several, which all of them or
    some see.
    """
    scores, slopes = (random(2, 6, 5, 33, dtype=torch.bfloat16, seed=seed) * 20 for seed in (4, 5))
    found: list[tuple[str, Callable[..., Any], Any, tuple[Any, ...]]] = []
    for words, documents in (("", None), (", documents", DOCUMENTS)):
        for window in (None, 4):
            reach = special_attention.compute_reach(documents, 33 if words else 5, 33, window, CPU)[
                :, -5:
            ]
            name = words + (", window" if window else "")
            given = (scores, reach, 7.0, 0.3)
            found += [
                ("shares" + name, special_attention.capped_shares, OPERATORS.capped_shares, given),
                ("score gradients" + name, special_attention.capped_score_gradients, OPERATORS.capped_score_gradients,
                 (slopes, *given)),
            ]  # fmt: skip
    return found


EXPERTS = {"silu": ("silu", False, 1.0, float("inf")), "clamped": (mlp.CLAMPED, True, 1.702, 0.7)}


def calls() -> list[tuple[str, Callable[..., Any], Any, tuple[Any, ...]]]:
    """(name, function, operator, arguments in bf16), of odd shapes."""
    half = torch.bfloat16
    whole = random(2, 5, 3, 8, dtype=half)
    heads, (cosines, sines) = (
        random(2, 5, 3, 10, dtype=half),
        rope.compute_rotation(torch.arange(10).view(2, 5), random(4)),
    )
    gate, up, slope = (random(7, 12, dtype=half, seed=seed) for seed in range(3))
    logits, labels = random(6, 33, dtype=half), torch.tensor([3, -100, 0, 32, 7, -100])
    log_sums, slopes, cap = logits.float().logsumexp(1), random(6), torch.tensor(2.5)
    codes, scales, factors = nf4_matrix(24, 128, half)
    levels = nf4._make_levels(half, CPU)
    of_rows = (codes, scales, factors, levels, [0, 0, 48, 48], 16)
    return [
        *capped_calls(),
        ("rotate", rope._rotate, OPERATORS.rotate, (whole, cosines, sines, False)),
        ("rotate some", rope._rotate, OPERATORS.rotate, (heads, cosines, sines, False)),
        ("rotate turned heads", rope._rotate, OPERATORS.rotate, (whole.transpose(1, 2).contiguous().transpose(1, 2),
                                                                 cosines, sines, False)),
        ("turned gradients", mlp.compute_gated_product_gradients, OPERATORS.gated_gradients,
         (slope[:, :1].expand(7, 12), gate.t().contiguous().t(), up, "silu")),
        ("rotate back", rope._rotate, OPERATORS.rotate, (heads.transpose(1, 2).contiguous().transpose(1, 2), cosines,
                                                         sines, True)),
        *((f"{name} product", mlp.compute_gated_product, OPERATORS.gated_product, (gate, up, name))
          for name in mlp.ACTIVATIONS),
        *((f"{name} gradients", mlp.compute_gated_product_gradients, OPERATORS.gated_gradients,
           (slope, gate, up, name))
          for name in mlp.ACTIVATIONS),
        *((f"expert's {name} {kind}", function, operator, (*first, random(7, 12, dtype=half, seed=5), random(7).abs(),
                                                           *settings))
          for name, settings in EXPERTS.items()
          for kind, function, operator, first in (
              ("product", mlp.compute_scored_product, OPERATORS.scored_product, ()),
              ("gradients", mlp.compute_scored_product_gradients, OPERATORS.scored_product_gradients,
               (random(7, 6, dtype=half, seed=6),)),
          )),
        ("log probs", chunked_heads.label_log_probs, OPERATORS.label_log_probs, (logits, labels, None)),
        ("log probs, capped", chunked_heads.label_log_probs, OPERATORS.label_log_probs, (logits, labels, cap)),
        ("gradients", chunked_heads.label_log_prob_gradients, OPERATORS.label_log_prob_gradients,
         (logits, labels, log_sums, slopes, None)),
        ("gradients, capped", chunked_heads.label_log_prob_gradients, OPERATORS.label_log_prob_gradients,
         (logits, labels, log_sums, slopes, cap)),
        ("nf4", nf4._dequantize, OPERATORS.dequantize_nf4, of_rows),
        ("int8", quantized._dequantize, OPERATORS.dequantize_int8,
         (torch.arange(-120, 120, dtype=torch.int8).view(6, 40), random(6).abs(), half)),
    ]  # fmt: skip


CALLS = calls()
# Of heads, of products and of losses one each.
COMPILED_NAMES = ("rotate", "expert's silu gradients", "gradients, capped")
COMPILED = [call for call in CALLS if call[0] in COMPILED_NAMES]
# Code that is made in the least time: without an instruction set's own numbers, and no headers for
# later.
QUICKLY = {
    "force_disable_caches": True,
    "cpp_cache_precompile_headers": False,
    "cpp.vec_isa_ok": False,
}


def results(of: Any) -> list[Tensor]:
    return [of] if isinstance(of, Tensor) else list(of)


@pytest.mark.parametrize("call", CALLS, ids=[call[0] for call in CALLS])
def test_shapes_of_plans_are_those_of_results(call: tuple[Any, ...]) -> None:
    _, function, operator, arguments = call
    torch.library.opcheck(
        operator.default, arguments, test_utils=("test_schema", "test_faketensor")
    )
    for mine, wanted in zip(
        results(operator(*arguments)), results(function(*arguments)), strict=True
    ):
        assert torch.equal(mine, wanted) and mine.dtype == wanted.dtype


@pytest.mark.slow
@run_in_fork
def test_compiled_they_give_the_same_and_make_nothing_but_their_results() -> None:
    """By inductor for a CPU: other code than a GPU's, with memory for what the same rules do not
    fuse.
    """
    made, allocate = [], torch._C._dynamo.guards._empty_strided_cpu

    def noted(*shape: Any) -> Tensor:
        made.append(allocate(*shape))
        return made[-1]

    torch._C._dynamo.guards._empty_strided_cpu = noted  # type: ignore[assignment]
    for name, function, _, arguments in COMPILED:
        made.clear()
        torch._dynamo.reset()
        with torch._inductor.config.patch(QUICKLY):
            found = results(fused_kernels.call_compiled(function.__wrapped__, *arguments))
        assert made and sum(each.nbytes for each in made) <= allowed_bytes(
            name, found, arguments
        ), name
        for mine, wanted in zip(found, results(function(*arguments)), strict=True):
            assert mine.dtype == wanted.dtype and mine.shape == wanted.shape, name
            # Before torch 2.13 code for a CPU does not round in between as the operators do.
            tolerance = 2.0**-8 if torch.__version__ >= "2.13" else 2.0**-6
            tolerance = tolerance if mine.dtype == torch.bfloat16 else 1e-5
            assert torch.allclose(mine.float(), wanted.float(), rtol=tolerance, atol=1e-6), name


def allowed_bytes(name: str, found: list[Tensor], arguments: tuple[Any, ...]) -> int:
    """Of the results, and of a few numbers for each row."""
    few = 6 * 4 * max(each.shape[0] for each in found)
    if name.startswith("expert's"):  # for a CPU what exp gave is made in memory rather than again
        few += arguments[0].numel() * 4
    return sum(each.nbytes for each in found) + few


def gradients(function: Callable[..., Tensor], *leaves: Tensor) -> list[Tensor]:
    own = [leaf.clone().requires_grad_() for leaf in leaves]
    found = function(*own)
    return [
        found.detach(),
        *torch.autograd.grad(found, own, random(*found.shape, seed=9).to(found.dtype)),
    ]


class Operators(TorchDispatchMode):
    """Notes the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def attention_leaves(heads: int, kv_heads: int, tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values of two rows."""
    return [
        random(2, count, tokens, 8, dtype=dtype, seed=seed)
        for seed, count in enumerate((heads, kv_heads, kv_heads))
    ]


def assert_close(found: list[Tensor], wanted: list[Tensor], tolerance: float = 1e-12) -> None:
    for mine, other in zip(found, wanted, strict=True):
        assert mine.dtype == other.dtype and torch.allclose(
            mine, other, rtol=tolerance, atol=tolerance
        )


def test_rotation_against_complex_numbers(as_operators: None) -> None:
    """A pair of channels times e^(i angle), by autograd."""
    angles = random(1, 6, 1, 4, dtype=torch.float64)

    def turned(heads: Tensor) -> Tensor:
        first, second, rest = heads.split((4, 4, 2), dim=-1)
        product = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((product.real, product.imag, rest), dim=-1)

    heads = random(1, 6, 3, 10, dtype=torch.float64)
    ours = gradients(lambda of: rope.apply_rotation(of, angles.cos(), angles.sin()), heads)
    assert_close(ours, gradients(turned, heads))


@pytest.mark.parametrize("activation", list(mlp.ACTIVATIONS))
def test_gated_products_against_autograd(as_operators: None, activation: str) -> None:
    plain = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
    }[activation]
    leaves = [random(5, 8, dtype=torch.float64, seed=seed) for seed in (1, 2)]
    ours = gradients(lambda gate, up: mlp.gated_activation(gate, up, activation), *leaves)
    assert_close(ours, gradients(lambda gate, up: plain(gate) * up, *leaves))


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("with_documents", [False, True])
def test_capped_attention_against_its_definition(
    as_operators: None, monkeypatch: pytest.MonkeyPatch, with_documents: bool, window: int | None
) -> None:
    """Heads that share keys, in 16 pieces of odd lengths."""
    monkeypatch.setattr(special_attention, "MAX_SCORES_AT_ONCE", 2 * 6 * 33 * 3)
    documents, leaves = (
        DOCUMENTS if with_documents else None,
        attention_leaves(6, 2, 33, torch.float64),
    )
    with Operators() as seen:
        ours = gradients(
            lambda *of: special_attention.capped_attention(
                *of, documents=documents, window=window, softcap=0.8, scale=0.3
            ),
            *leaves,
        )
    assert (
        seen.names.count("capped_shares") == 2 * 16
        and seen.names.count("capped_score_gradients") == 16
    )
    assert_close(ours, gradients(lambda *of: definition(*of, documents, window, 0.8), *leaves))


@pytest.mark.parametrize(
    ("dtype", "fuse", "pieces"),
    [
        (torch.bfloat16, True, 4),
        (torch.bfloat16, False, 8),
        (torch.float32, True, 8),
        (torch.float64, True, 8),
    ],
)
def test_fused_scores_of_half_precision_are_taken_in_half_as_many_pieces(
    as_operators: None, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, fuse: bool, pieces: int
) -> None:
    """They are not made in fp32. A piece takes two products forward, and five backward."""
    monkeypatch.setattr(fused_kernels._fusing, "value", fuse)
    monkeypatch.setattr(special_attention, "MAX_SCORES_AT_ONCE", 2 * 6 * 32 * 32 // 8)
    with Operators() as seen:
        gradients(
            lambda *of: special_attention.capped_attention(
                *of, documents=None, window=None, softcap=0.8, scale=0.3
            ),
            *attention_leaves(6, 2, 32, dtype),
        )
    assert seen.names.count("bmm") == (2 + 5) * pieces
    assert seen.names.count("capped_shares") == (2 * pieces if fuse else 0)


def test_gradients_of_keys_and_values_are_summed_in_fp32(
    as_operators: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 512 pieces, of equal scores: query i shares out 1 / (i + 1). In bf16 a sum of 1 does not
    see 0.002 more.
    """
    monkeypatch.setattr(special_attention, "MAX_SCORES_AT_ONCE", 512)
    queries = torch.ones(2, 1, 512, 1).bfloat16()
    keys, values = (
        torch.zeros_like(queries),
        torch.zeros_like(queries).index_fill(2, torch.tensor(0), 1.0),
    )
    leaves = [leaf.requires_grad_() for leaf in (queries, keys, values)]
    special_attention.capped_attention(
        *leaves, documents=None, window=None, softcap=50.0, scale=0.5
    ).sum().backward()
    shares = 1 / torch.arange(1, 513, dtype=torch.float64)
    of_values = shares.flip(0).cumsum(0).flip(0)
    of_keys = -0.5 * shares.square().flip(0).cumsum(0).flip(0)
    of_keys[0] += 0.5 * shares.sum()
    for leaf, wanted in ((values, of_values), (keys, of_keys)):
        assert leaf.grad is not None and leaf.grad.dtype == torch.bfloat16
        for row in leaf.grad.double().flatten(1):
            torch.testing.assert_close(row, wanted, rtol=2**-7, atol=1e-7)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_losses_against_pytorchs(as_operators: None, softcap: float | None) -> None:
    hidden, weight = (random(*shape, dtype=torch.float64, seed=3) for shape in ((9, 6), (17, 6)))
    labels = torch.tensor([1, -100, 16, 0, 5, 5, -100, 2, 11])

    def logits(rows: Tensor, matrix: Tensor) -> Tensor:
        found = rows @ matrix.t()
        return found if softcap is None else softcap * torch.tanh(found / softcap)

    def plain(rows: Tensor, matrix: Tensor) -> Tensor:
        return F.cross_entropy(logits(rows, matrix), labels, reduction="sum")

    def picked(rows: Tensor, matrix: Tensor) -> Tensor:
        return -F.cross_entropy(logits(rows, matrix), labels, reduction="none")

    wanted, options = gradients(plain, hidden, weight), {"chunks": 4, "softcap": softcap}
    ours = gradients(
        lambda rows, matrix: linear_cross_entropy(rows, matrix, labels, **options), hidden, weight
    )
    assert_close(ours, wanted)
    ours = gradients(
        lambda rows, matrix: projected_cross_entropy(F.linear, rows, [matrix], labels, **options),
        hidden,
        weight,
    )
    assert_close(ours, wanted)
    ours = gradients(
        lambda rows, matrix: token_log_probs(rows, matrix, labels, **options), hidden, weight
    )
    assert_close(ours, gradients(picked, hidden, weight))
    with torch.no_grad():
        assert math.isclose(linear_cross_entropy(hidden, weight, labels, **options), wanted[0])


@pytest.mark.parametrize("fuse", [False, True])
def test_rows_that_do_not_count_may_be_infinite(
    as_operators: None, monkeypatch: pytest.MonkeyPatch, fuse: bool
) -> None:
    """Of fp16: such a row's gradient is zero."""
    monkeypatch.setattr(fused_kernels._fusing, "value", fuse)
    labels = torch.tensor([-100, 1, 2])
    for function in (linear_cross_entropy, token_log_probs):
        hidden, weight = (
            torch.tensor([[6e4, 1.0], [0.5, 1.0], [0.25, 1.0]]).half(),
            torch.eye(4, 2).half() * 2,
        )
        hidden.requires_grad_()
        weight.requires_grad_()
        loss = function(hidden, weight, labels, chunks=1).sum()
        loss.backward()
        assert hidden.grad is not None and weight.grad is not None
        assert not (hidden @ weight.t()).isfinite().all() and loss.isfinite()
        assert (
            hidden.grad[0].eq(0).all()
            and hidden.grad[1:].ne(0).any()
            and weight.grad.isfinite().all()
        )


def test_threads_have_the_limit_of_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    """As autograd's have: torch keeps such numbers for each thread."""
    found: list[int] = []

    def read() -> None:
        fused_kernels.call_compiled(len, torch.ones(2))
        found.append(torch._dynamo.config.recompile_limit)

    monkeypatch.setattr(fused_kernels, "get_compiled", lambda function: function)
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert found == [64]


@pytest.mark.slow
@run_in_fork
def test_the_probe_sees_whether_anything_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_kernels, "has_triton", lambda: True)
    torch._dynamo.reset()
    with torch._inductor.config.patch(QUICKLY):
        assert fused_kernels._find_compile_fault.__wrapped__(CPU) == ""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(disable=True):
        assert "torch.compile is switched off" in fused_kernels._find_compile_fault.__wrapped__(CPU)


@pytest.mark.parametrize("dtype", sorted(nf4.DTYPES, key=str), ids=str)
@pytest.mark.parametrize("rows, columns", [(24, 128), (7, 192), (256, 128)])
def test_nf4_gives_the_bits_of_torchao(
    as_operators: None, rows: int, columns: int, dtype: torch.dtype
) -> None:
    """All of a matrix, some of its blocks, and a part of its columns."""
    theirs = nf4._import_nf4_tensor().from_tensor(
        random(rows, columns, dtype=dtype), nf4.BLOCK, 1 if rows == 7 else 16
    )
    codes, scales, factors = nf4_matrix(rows, columns, dtype)
    blocks = len(codes)
    whole = dequantize(codes, scales, factors, dtype, 0, blocks)
    if rows != 7:
        theirs = nf4._import_nf4_tensor().from_tensor(
            random(rows, columns, dtype=dtype), nf4.BLOCK, math.gcd(blocks, 256)
        )
        assert torch.equal(whole.view(rows, columns), theirs.get_original_weight())
    assert torch.equal(dequantize(codes, scales, factors, dtype, 3, 11), whole[3:11])
    across = columns // nf4.BLOCK
    own = (
        torch.arange(blocks).view(rows, across)[:, 1:].flatten()
    )  # all of its columns but the first 64
    part = dequantize(
        codes[own], scales[own], factors, dtype, 0, len(own), (1, across - 1, across, blocks)
    )
    assert torch.equal(part, whole[own])


def test_int8_rows(as_operators: None) -> None:
    codes, factors = torch.arange(-120, 120, dtype=torch.int8).view(6, 40), random(6).abs()
    wanted = (codes.double() * factors.double().unsqueeze(1)).bfloat16()
    assert torch.equal(quantized.dequantize_rows(codes, factors, torch.bfloat16), wanted)


def no_compiler(*arguments: Any) -> None:
    raise RuntimeError("no C compiler\nand more")


def test_nothing_is_fused_on_a_cpu_or_where_nothing_compiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused_kernels._fusing, "value", False)
    assert fused_kernels.use_fused_kernels(True, CPU) == "" and not fused_kernels.should_fuse(CPU)
    monkeypatch.setattr(fused_kernels, "get_kernel_type", lambda device: "cuda")
    monkeypatch.setattr(fused_kernels, "has_triton", lambda: True)
    with monkeypatch.context() as context:
        context.setattr(fused_kernels, "_find_compile_fault", lambda device: "")
        assert "compiled by torch.compile with Triton" in fused_kernels.use_fused_kernels(True, CPU)
    assert fused_kernels.should_fuse(CPU)
    assert (
        fused_kernels.use_fused_kernels(False, CPU) == "fused kernels: none (fused_kernels=false)"
    )
    assert not fused_kernels.should_fuse(CPU)
    for broken, fault in (
        ("call_compiled", "RuntimeError: no C compiler"),
        ("has_triton", "supports this GPU"),
    ):
        fused_kernels._find_compile_fault.cache_clear()
        with monkeypatch.context() as context:
            context.setattr(
                fused_kernels, broken, no_compiler if broken == "call_compiled" else lambda: False
            )
            said = fused_kernels.use_fused_kernels(True, CPU)
        assert said.startswith(
            "fused kernels: none, operators run one by one, with more memory than planned: "
        )
        assert said.endswith(fault) and not fused_kernels.should_fuse(CPU)
    fused_kernels._find_compile_fault.cache_clear()
