"""Attention against a definition written out in fp64, in every combination of what it offers."""

import pytest
import torch
from torch import Tensor

from recipe_lib.ops import attention as module
from recipe_lib.ops import special_attention
from recipe_lib.ops.attention import (
    AttentionInfo,
    attention,
    compute_document_positions,
    make_attention_info,
    prepare_attention,
    scaled_dot_product,
)

B = 2
H = 6
K = 2
S = 24
E = 8
LENGTHS = [[5, 12, 4], [24]]


def tensors(dtype: torch.dtype = torch.float64, queries: int = S) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((B, H, queries, E), (B, K, S, E), (B, K, S, E))
    return tuple(
        torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes
    )


def prepared(
    info: AttentionInfo | None, window: int | None, capped: bool, queries: int = S, keys: int = S
) -> AttentionInfo:
    return prepare_attention(
        info,
        rows=B,
        queries=queries,
        keys=keys,
        windows=(window, None),
        head_width=E,
        capped=capped,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )


def definition(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None, cap: float | None
) -> Tensor:
    """One query at a time, from the meaning of the words."""
    out = torch.zeros_like(q)
    offset = k.shape[2] - q.shape[2]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            group = h // (q.shape[1] // k.shape[1])
            for i in range(q.shape[2]):
                own = i + offset
                seen = [
                    j
                    for j in range(own + 1)
                    if (window is None or own - j < window)
                    and (documents is None or documents[b, j] == documents[b, own])
                ]
                scores = k[b, group, seen] @ q[b, h, i] * 0.3
                scores = scores if cap is None else cap * torch.tanh(scores / cap)
                out[b, h, i] = scores.softmax(0) @ v[b, group, seen]
    return out


@pytest.mark.parametrize("cap", [None, 0.8])
@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("scores_at_once", [2**24, 300])
def test_values(
    cap: float | None,
    window: int | None,
    with_documents: bool,
    scores_at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(special_attention, "MAX_SCORES_AT_ONCE", scores_at_once)
    q, k, v = tensors()
    info = make_attention_info(LENGTHS, S) if with_documents else None
    ready = prepared(info, window, cap is not None)
    actual = attention(q, k, v, ready, window=window, softcap=cap, scale=0.3)
    with torch.no_grad():
        expected = definition(q, k, v, info.documents if info else None, window, cap)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("cap", [None, 0.8])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("queries", [1, 6])
def test_queries_behind_a_cache(cap: float | None, window: int | None, queries: int) -> None:
    q, k, v = tensors(queries=queries)
    actual = attention(
        q,
        k,
        v,
        prepared(None, window, cap is not None, queries),
        window=window,
        softcap=cap,
        scale=0.3,
    )
    with torch.no_grad():
        torch.testing.assert_close(
            actual, definition(q, k, v, None, window, cap), atol=1e-12, rtol=1e-12
        )
    unprepared = attention(q, k, v, window=window, softcap=cap, scale=0.3)
    assert torch.equal(unprepared, actual)


@pytest.mark.parametrize("cap", [None, 0.8])
def test_gradients(cap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(special_attention, "MAX_SCORES_AT_ONCE", 300)
    info = make_attention_info(LENGTHS, S)
    inputs = tensors()
    weights = torch.randn(
        B, H, S, E, generator=torch.Generator().manual_seed(8), dtype=torch.float64
    )
    out = attention(*inputs, prepared(info, 7, cap is not None), window=7, softcap=cap, scale=0.3)
    actual = torch.autograd.grad(out, inputs, weights)
    expected = torch.autograd.grad(definition(*inputs, info.documents, 7, cap), inputs, weights)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


def test_soft_capped_scores_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(special_attention, "MAX_SCORES_AT_ONCE", 4096)
    shape = (1, 4, 256, 8)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        attention(q, k, v, softcap=5.0, scale=0.3).sum().backward()
    scores = 4 * 256 * 256 * 4
    assert sum(kept.values()) < scores / 2


def test_grouped_keys_are_not_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, bool]] = []
    real = torch.nn.functional.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        seen.append((k.shape[1], bool(options["enable_gqa"])))
        return real(q, k, v, **options)

    monkeypatch.setattr(module.F, "scaled_dot_product_attention", spy)
    q, k, v = tensors()
    scaled_dot_product(q, k, v, None, 0.3)
    assert seen == [(K, True)]


def test_masks_are_made_once_for_each_window() -> None:
    info = prepared(make_attention_info(LENGTHS, S), 7, False)
    assert set(info.masks) == {None, 7}
    assert info.masks[7].shape == (B, 1, S, S)
    plain = prepared(None, 100, False)
    assert plain.masks == {100: None, None: None}, "a window longer than the rows needs no mask"
    assert set(prepared(None, 7, False).masks[7].unique().tolist()) == {0.0, float("-inf")}


def fake_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    **options,
) -> Tensor:
    """What torch documents of `varlen_attn`, for CPU tensors: `window_size` counts tokens to the
    left, exclusive.
    """
    assert (
        torch.equal(cu_seq_q, cu_seq_k)
        and cu_seq_q.dtype == torch.int32
        and int(cu_seq_q.diff().max()) <= max_q
    )
    assert (
        cu_seq_q[0] == 0 and cu_seq_q[-1] == q.shape[0] and options["enable_gqa"] and max_q == max_k
    )
    left, right = options["window_size"]
    assert right == 0
    pieces = []
    for start, end in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        one = [tensor[start:end].transpose(0, 1)[None] for tensor in (q, k, v)]
        window = None if left == -1 else left + 1
        with torch.no_grad():
            wide = definition(one[0], one[1], one[2], None, window, None)
        pieces.append(wide[0].transpose(0, 1))
    return torch.cat(pieces)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("with_documents", [False, True])
def test_the_varlen_path_hands_on_what_the_kernel_wants(
    window: int | None, with_documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "has_varlen", lambda *_: True)
    monkeypatch.setattr(module, "varlen_attn", fake_varlen)
    monkeypatch.setattr(module, "_VARLEN_OPTIONS", frozenset({"window_size", "enable_gqa"}))
    q, k, v = tensors()
    info = make_attention_info(LENGTHS, S) if with_documents else None
    ready = prepared(info, window, False)
    assert ready.flattened == (with_documents or window is not None)
    assert not (ready.flattened and ready.masks)
    actual = attention(q, k, v, ready, window=window, scale=0.3)
    with torch.no_grad():
        expected = definition(q, k, v, info.documents if info else None, window, None)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


def test_where_the_varlen_kernel_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert not module.has_varlen(cpu, torch.bfloat16, 128)
    monkeypatch.setattr(module, "get_compute_capability", lambda device: (7, 5))
    assert not module.has_varlen(cuda, torch.bfloat16, 128)
    monkeypatch.setattr(module, "get_compute_capability", lambda device: (8, 0))
    if "window_size" in module._VARLEN_OPTIONS:
        assert module.has_varlen(cuda, torch.bfloat16, 128)
    assert not module.has_varlen(cuda, torch.float32, 128)
    assert not module.has_varlen(cuda, torch.bfloat16, 20)
    assert not module.has_varlen(cuda, torch.bfloat16, 512)


def test_info_of_rows_with_documents() -> None:
    info = make_attention_info([[2, 1], [4], []], 4)
    assert info.documents.tolist() == [[0, 0, 1, 2], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert info.boundaries.tolist() == [0, 2, 3, 4, 8, 12]
    assert info.longest == 128
    assert compute_document_positions([[2, 1], [4], []], 4).tolist() == [
        [0, 1, 0, 0],
        [0, 1, 2, 3],
        [0, 0, 0, 0],
    ]
    assert info.to("cpu").documents is info.documents


@pytest.mark.parametrize("lengths", [[[3, 2]], [[2, 0, 1]], [[-1, 2]]])
def test_lengths_that_do_not_fit_a_row(lengths: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="do not fit a row of 4 tokens"):
        make_attention_info(lengths, 4)


def test_documents_of_other_keys_are_refused() -> None:
    with pytest.raises(
        ValueError, match="documents are of every key, found those of 24 and 25 keys"
    ):
        prepared(make_attention_info(LENGTHS, S), None, False, keys=25)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 4])
def test_the_last_queries_see_their_document(window: int | None, cap: float | None) -> None:
    """As with a cache, whose keys are those of all tokens."""
    q, k, v = (tensor.detach() for tensor in tensors())
    info = make_attention_info(LENGTHS, S)
    whole = definition(q, k, v, info.documents, window, cap)
    settled = prepared(info, window, cap is not None, queries=6)
    last = attention(q[:, :, -6:], k, v, settled, window=window, softcap=cap, scale=0.3)
    torch.testing.assert_close(last, whole[:, :, -6:], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_half_precision_stays_half(cap: float | None) -> None:
    q, k, v = (tensor.detach().bfloat16().requires_grad_() for tensor in tensors())
    out = attention(q, k, v, window=7, softcap=cap, scale=0.3)
    out.sum().backward()
    assert out.dtype == q.grad.dtype == torch.bfloat16
    with torch.no_grad():
        expected = definition(q.double(), k.double(), v.double(), None, 7, cap)
    torch.testing.assert_close(out.double(), expected, atol=3e-2, rtol=3e-2)
