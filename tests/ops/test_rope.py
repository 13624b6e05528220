"""Rotary embeddings against transformers' frequencies, and against what a rotation is."""

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from recipe_lib.models import build_spec
from recipe_lib.ops.rope import FREQUENCIES, apply_rotation, compute_rotation

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 8.0},
    "llama3.1": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3.2": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_frequencies_at_real_sizes(scaling: str, base: float) -> None:
    config = transformers.LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        intermediate_size=16,
        num_hidden_layers=1,
        rope_theta=base,
        rope_scaling=dict(SCALINGS[scaling]),
        max_position_embeddings=131072,
    )
    expected, factor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config)
    rope = build_spec(config.to_dict(), "here").rope
    actual = FREQUENCIES[rope.kind](rope.width, rope.base, torch.arange(4), **rope.numbers)
    assert rope.attention_factor == pytest.approx(factor)
    assert rope.base == base
    torch.testing.assert_close(actual, expected, rtol=3e-7, atol=0)


def test_longrope_changes_with_the_last_position() -> None:
    options = {"short_factor": (1.0, 2.0), "long_factor": (4.0, 8.0), "original_positions": 10.0}
    frequencies = FREQUENCIES["longrope"]
    short = frequencies(4, 100.0, torch.arange(10)[None], **options)
    long = frequencies(4, 100.0, torch.arange(11)[None], **options)
    torch.testing.assert_close(short, torch.tensor([1.0, 0.05]))
    torch.testing.assert_close(long, torch.tensor([0.25, 0.0125]))


def test_scores_depend_on_the_distance_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    frequencies = FREQUENCIES["default"](16, 100.0, torch.arange(1)).double()

    def at(heads: torch.Tensor, position: int) -> torch.Tensor:
        angles = position * frequencies
        return apply_rotation(heads, angles.cos(), angles.sin())

    near, far = (at(q, p + 5) * at(k, p) for p in (3, 1000))
    torch.testing.assert_close(near.sum(), far.sum(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(at(q, 77).norm(), q.norm(), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(at(q, 8), q)


def test_only_the_rotating_channels_change() -> None:
    heads = torch.randn(2, 3, 4, 10)
    positions = torch.arange(3).expand(2, 3)
    cosines, sines = compute_rotation(
        positions, FREQUENCIES["default"](6, 100.0, positions), factor=1.5
    )
    assert cosines.dtype == torch.float32 and cosines.shape == (2, 3, 1, 3)
    turned = apply_rotation(heads, cosines, sines)
    assert torch.equal(turned[..., 6:], heads[..., 6:])
    torch.testing.assert_close(turned[:, 0, :, :6], 1.5 * heads[:, 0, :, :6])


def test_half_precision_is_rounded_once() -> None:
    heads = torch.randn(1, 50, 2, 8).bfloat16()
    positions = torch.arange(1000, 1050)[None]
    turn = compute_rotation(positions, FREQUENCIES["default"](8, 10000.0, positions))
    turned = apply_rotation(heads, *turn)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, apply_rotation(heads.float(), *turn).bfloat16())
