"""Drawing the next token: probabilities against the closed formula, draws against the
probabilities.
"""

import math

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from recipe_lib.generation.sample import compute_next_probabilities, sample_next

LOGITS = [2.0, -1.0, 0.5, 1.5, 0.0, -3.0]


def by_hand(temperature: float, top_k: int | None, top_p: float | None) -> list[float]:
    """The probabilities in plain float64 arithmetic."""
    weights = {token: math.exp(logit / temperature) for token, logit in enumerate(LOGITS)}
    likeliest = sorted(weights, key=lambda token: -weights[token])[: top_k or len(LOGITS)]
    total = sum(weights[token] for token in likeliest)
    kept, reached = [], 0.0
    for token in likeliest:
        kept.append(token)
        reached += weights[token] / total
        if top_p is not None and reached >= top_p:
            break
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in weights]


CASES = [
    (1.0, None, None),
    (0.5, None, None),
    (2.0, 3, None),
    (1.0, None, 0.8),
    (0.7, 4, 0.9),
    (1.0, 1, None),
    (1.0, None, 1e-9),
    (1.0, 99, 1.0),
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), CASES)
def test_probabilities_are_the_closed_formula(
    temperature: float, top_k: int | None, top_p: float | None
):
    found = compute_next_probabilities(torch.tensor([LOGITS]), temperature, top_k, top_p)
    torch.testing.assert_close(
        found, torch.tensor([by_hand(temperature, top_k, top_p)]), atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.7, 5, 0.9), (1.3, 50, 0.5), (1.0, 3, 0.99)]
)
def test_probabilities_are_those_of_transformers(temperature: float, top_k: int, top_p: float):
    logits = torch.randn(4, 200, generator=torch.Generator().manual_seed(0))
    warp = LogitsProcessorList(
        [TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k), TopPLogitsWarper(top_p)]
    )
    expected = warp(torch.zeros(4, 1, dtype=torch.long), logits.clone()).softmax(-1)
    torch.testing.assert_close(
        compute_next_probabilities(logits, temperature, top_k, top_p),
        expected,
        atol=1e-6,
        rtol=1e-5,
    )


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), CASES)
def test_draws_follow_the_probabilities(temperature: float, top_k: int | None, top_p: float | None):
    draws = 100_000
    generator = torch.Generator().manual_seed(1)
    ids = sample_next(
        torch.tensor([LOGITS]).expand(draws, -1), temperature, top_k, top_p, generator
    )
    counts = torch.bincount(ids, minlength=len(LOGITS)).tolist()
    for count, probability in zip(counts, by_hand(temperature, top_k, top_p), strict=True):
        deviation = math.sqrt(draws * probability * (1 - probability))
        assert abs(count - draws * probability) <= 5 * deviation
        assert probability > 0 or count == 0


def test_a_seed_repeats_its_draws():
    logits = torch.randn(64, 100, generator=torch.Generator().manual_seed(2))
    first, again, other = (
        sample_next(logits, 1.0, generator=torch.Generator().manual_seed(seed)).tolist()
        for seed in (5, 5, 6)
    )
    assert first == again != other


def test_temperature_zero_takes_the_likeliest():
    logits = torch.randn(64, 100, generator=torch.Generator().manual_seed(3))
    assert sample_next(logits).tolist() == logits.argmax(-1).tolist()


def test_bf16_logits_are_summed_in_fp32():
    logits = torch.zeros(1, 4096, dtype=torch.bfloat16)
    probabilities = compute_next_probabilities(logits, 1.0, top_p=0.5)
    assert int((probabilities > 0).sum()) == 2048


def test_no_temperature_has_no_probabilities():
    with pytest.raises(ValueError, match="temperature 0"):
        compute_next_probabilities(torch.zeros(1, 2), 0)
