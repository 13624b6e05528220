"""Packed documents are apart in every class of transformers that carries a state along a sequence:
logits and all gradients are those of the documents one by one.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from recipe_lib.data.batches import compute_document_positions
from recipe_lib.errors import SetupError
from recipe_lib.external.module_spec import read_spec
from recipe_lib.memory import layer_stream
from recipe_lib.models import read_preset_config
from recipe_lib.ops.attention import make_attention_info
from tests.external.hybrids import (
    CANNOT_PACK,
    HYBRIDS,
    WRAPPERS,
    build_hybrid,
    compute_in_double,
    list_stateful_types,
    make_hybrid_spec,
)
from tests.selection import mark_slow_except

LENGTH = 90
# One of one token, two of a length, one longer than a chunk of 64; the second row is padded.
DOCUMENTS = ((70, 1, 19), (19, 40, 5))
# Largest relative difference of a tensor
TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-12}
QUICK = ("qwen3_5_text", "granitemoehybrid", "lfm2")
Result = tuple[Tensor, dict[str, Tensor]]  # logits; gradients by name


def make_tokens(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, model.spec.vocab_size, (len(DOCUMENTS), LENGTH), generator=generator)


def compute(model: Any, dtype: torch.dtype, *, packed: bool) -> Result:
    """Logits of all documents' tokens, and the gradients of a loss that reads all of them."""
    tokens = make_tokens(model)
    info = make_attention_info(DOCUMENTS, LENGTH)
    positions = compute_document_positions(DOCUMENTS, LENGTH)
    spans = [
        (row, sum(lengths[:index]), length)
        for row, lengths in enumerate(DOCUMENTS)
        for index, length in enumerate(lengths)
    ]
    model.zero_grad()
    with compute_in_double() if dtype == torch.float64 else nullcontext():
        if packed:
            rows = model(tokens, positions, info)
            # Another forward before backward: each layer is computed again on its own documents.
            model(tokens, None, make_attention_info(DOCUMENTS[::-1], LENGTH))
            logits = [rows[row, start : start + length] for row, start, length in spans]
        else:
            logits = [
                model(tokens[row : row + 1, start : start + length])[0]
                for row, start, length in spans
            ]
        weights = torch.randn(
            logits[0].shape[-1], generator=torch.Generator().manual_seed(2), dtype=dtype
        )
        sum((part.to(dtype) @ weights).square().sum() for part in logits).backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return torch.cat([part.detach() for part in logits]), gradients


def compute_distance(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def check_equal(found: Result, expected: Result, dtype: torch.dtype) -> None:
    """Logits and gradients differ by rounding alone."""
    assert found[1].keys() == expected[1].keys() and found[1]
    assert compute_distance(found[0], expected[0]) <= TOLERANCES[dtype]
    assert compute_distance(join(found[1]), join(expected[1])) <= TOLERANCES[dtype]
    if dtype == torch.float64:
        # Each tensor's too. In fp32 sums over all tokens whose terms cancel lose more digits.
        largest = max(gradient.norm() for gradient in expected[1].values())
        for name, gradient in expected[1].items():
            if gradient.norm() > 1e-9 * largest:  # not what is zero but for rounding
                assert compute_distance(found[1][name], gradient) <= TOLERANCES[dtype], name


def join(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


def test_every_hybrid_is_listed() -> None:
    assert list_stateful_types() == {*HYBRIDS, *CANNOT_PACK, *WRAPPERS}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", mark_slow_except(HYBRIDS, QUICK))
def test_packed_documents_are_as_separate_ones(kind: str, dtype: torch.dtype) -> None:
    model = build_hybrid(kind, dtype).train()
    expected = compute(model, dtype, packed=False)
    check_equal(compute(model, dtype, packed=True), expected, dtype)


@pytest.mark.parametrize("lever", ("full", "selective", "streamed"))
@pytest.mark.parametrize("kind", mark_slow_except(HYBRIDS, QUICK[:1]))
def test_levers_compute_the_same(kind: str, lever: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_stream, "has_host", lambda device: True)
    streamed = lever == "streamed"
    plain = build_hybrid(kind, adapted=streamed).train()
    mode = "full" if streamed else lever
    model = build_hybrid(kind, mode=mode, adapted=streamed, streamed=streamed).train()
    logits, gradients = compute(model, torch.float32, packed=True)
    expected_logits, expected = compute(plain, torch.float32, packed=True)
    assert torch.equal(logits, expected_logits)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("kind", mark_slow_except(HYBRIDS, QUICK))
def test_the_check_at_the_start_passes(kind: str) -> None:
    make_hybrid_spec(kind).check_packing(1, compiled=False)


# Shipped models of other classes whose small copies have fewer experts than the whole ones.
PRESETS = ("gemma4/26B", "glm4/flash_30B", "nemotron3/nano_30B", "qwen3_6/35B", "lfm2/8B")


@pytest.mark.parametrize("name", mark_slow_except(PRESETS, PRESETS[:1]))
def test_small_copies_of_shipped_mixtures_pack(name: str) -> None:
    read_spec(read_preset_config(name), name).check_packing(1, compiled=False)


@pytest.mark.parametrize("kind", CANNOT_PACK)
@pytest.mark.slow
def test_what_cannot_be_packed_is_refused(kind: str) -> None:
    with pytest.raises(SetupError, match=CANNOT_PACK[kind]):
        make_hybrid_spec(kind).check_packing(1, compiled=False)


@pytest.mark.parametrize("ranks, compiled", [(2, False), (1, True)])
def test_shared_and_compiled_layers_are_refused_in_one_line(ranks: int, compiled: bool) -> None:
    with pytest.raises(SetupError, match="carries a state .*; set parallel.tensor=1 and compile="):
        make_hybrid_spec("lfm2").check_packing(ranks, compiled=compiled)
