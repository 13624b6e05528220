"""Scores of labels against log_softmax over full logits, chunked and not, with all that a head may
have.
"""

import pytest
import torch

from recipe_lib.ops.head_losses import TokenScores
from tests.ops.test_token_log_probs import full_log_probs, inputs, relative


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunks", [1, 4, 1000])
def test_values_equal_full_logits_in_float64(chunks: int, softcap: float | None) -> None:
    hidden, weight, labels, _ = inputs()
    logits = hidden @ weight.t()
    labels[1] = logits[1].argmax(dim=-1)  # a sequence that greedy decoding gives
    ours = TokenScores(chunks)(hidden, weight, labels, softcap=softcap)
    capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    likeliest = capped.log_softmax(-1).amax(dim=-1).masked_fill(labels == -100, 0)
    assert (
        ours.shape == (*labels.shape, 2) and ours.dtype == torch.float64 and not ours.requires_grad
    )
    assert relative(ours[..., 0], full_log_probs(hidden, weight, labels, softcap)) < 1e-13
    assert relative(ours[..., 1], likeliest) < 1e-13
    wanted = (labels == logits.argmax(dim=-1)) | (labels == -100)
    assert (
        torch.equal(ours[..., 0] == ours[..., 1], wanted) and wanted[1].all() and not wanted.all()
    )


def test_bias_and_what_is_done_to_logits_count() -> None:
    hidden, weight, labels, _ = inputs()
    bias = torch.linspace(-2, 2, len(weight), dtype=torch.float64)
    ours = TokenScores(3)(hidden, weight, labels, bias=bias, finish=lambda logits: logits * 0.5)
    expected = ((hidden @ weight.t() + bias) * 0.5).log_softmax(-1)
    picked = (
        expected.gather(-1, labels.clamp(min=0).unsqueeze(-1))
        .squeeze(-1)
        .masked_fill(labels == -100, 0)
    )
    assert relative(ours[..., 0], picked) < 1e-13
    assert relative(ours[..., 1], expected.amax(-1).masked_fill(labels == -100, 0)) < 1e-13


def test_half_precision_is_scored_in_fp32() -> None:
    hidden, weight, labels, _ = inputs(torch.bfloat16)
    ours = TokenScores(2)(hidden, weight, labels)
    wanted = full_log_probs(hidden.float(), weight.float(), labels)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours[..., 0], wanted, atol=0.05, rtol=0.02)
