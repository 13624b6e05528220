"""Codes of 8 and 4 bits against torchao's, and rounding by chance against what chance is."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from recipe_lib.optim.low_bit_adamw import (
    BLOCKS,
    Code,
    compute_element_indices,
    compute_rounding_key,
    make_code,
    round_stochastically,
)
from tests.torchao_oracle import get_low_bit_levels

CPU = torch.device("cpu")
KINDS = [(8, True), (8, False), (4, True), (4, False)]


@pytest.fixture(scope="module")
def theirs() -> Any:
    return get_low_bit_levels()


def code_of(bits: int, signed: bool) -> Code:
    return make_code(bits, signed=signed, device=CPU)


@pytest.mark.parametrize(("bits", "signed"), KINDS)
def test_levels_are_torchaos(theirs: Any, bits: int, signed: bool) -> None:
    assert code_of(bits, signed).levels.tolist() == list(theirs[1][bits, signed])


@pytest.mark.parametrize(("bits", "signed"), KINDS)
def test_codes_are_torchaos_at_every_border(theirs: Any, bits: int, signed: bool) -> None:
    """Numbers at random, and the fp32 numbers on both sides of the middle between any two levels;
    but what is more than zero is never zero of the unsigned levels.
    """
    quantize = getattr(theirs[0], f"quantize_{bits}bit_with_qmap")
    code = code_of(bits, signed)
    middles = (code.levels[1:].double() + code.levels[:-1].double()).div(2).float()
    near = [middles]
    for towards in (-math.inf, math.inf):
        for _ in range(3):
            near.append(near[-1].nextafter(torch.tensor(towards)))
        near.append(middles)
    drawn = torch.rand(2**15, generator=torch.Generator().manual_seed(0)) * (2 if signed else 1) - (
        1 if signed else 0
    )
    numbers = torch.cat(
        [*near, drawn, drawn**5, code.levels, torch.tensor([-1.0, 0.0, 1.0])]
    ).clamp(-1, 1)
    numbers = numbers if signed else numbers.abs()
    ours = torch.bucketize(numbers, code.borders, right=True)
    expected = quantize(numbers, code.levels)
    if not signed:
        vanished = (numbers > 0) & (code.levels[expected.int()] == 0)
        assert vanished.any() == (bits == 8)
        expected = torch.where(vanished, 1, expected)
    assert torch.equal(ours.to(torch.uint8), expected)


@pytest.mark.parametrize(("bits", "signed"), KINDS)
def test_numbers_come_back_as_the_nearest_level_of_their_block(bits: int, signed: bool) -> None:
    numbers = torch.randn(3, 5, 2 * BLOCKS[bits], generator=torch.Generator().manual_seed(1))
    numbers = numbers * torch.tensor([1e-6, 1.0, 1e6]).view(3, 1, 1)
    numbers = numbers if signed else numbers.square()
    code = code_of(bits, signed)
    codes, scales = code.encode(numbers, BLOCKS[bits])
    assert codes.dtype == torch.uint8 and codes.shape == (3, 5, 2 * BLOCKS[bits] * bits // 8)
    blocks = numbers.double().unflatten(-1, (2, -1))
    assert torch.equal(scales, blocks.abs().amax(-1).float())
    scaled = (blocks / scales.double().unsqueeze(-1)).unsqueeze(-1)
    levels = code.levels.double()
    levels = levels if signed else levels[levels > 0]  # none of the numbers is zero
    nearest = (scaled - levels).abs().amin(-1)
    back = code.decode(codes, scales)
    off = (
        back.double().unflatten(-1, (2, -1)) / scales.double().unsqueeze(-1) - scaled.squeeze(-1)
    ).abs()
    assert float((off - nearest).abs().max()) < 1e-6


def test_zeros_come_back_as_zeros_and_what_is_not_finite_does_not_vanish() -> None:
    for bits, signed in KINDS:
        code = code_of(bits, signed)
        fresh = code.decode(torch.zeros(2, 256 * bits // 8, dtype=torch.uint8), torch.zeros(2, 1))
        assert fresh.shape == (2, 256) and not fresh.any()
        numbers = torch.ones(2, 256)
        numbers[0, 7] = math.nan
        back = code.decode(*code.encode(numbers, 128))
        assert (
            not back[0, :128].isfinite().any()
            and back[0, 128:].isfinite().all()
            and back[1].isfinite().all()
        )


@pytest.mark.parametrize("bits", BLOCKS)
def test_what_is_more_than_zero_never_becomes_zero(bits: int) -> None:
    """Down to the smallest number that fp32 has; zero itself stays where there is such a level."""
    tiny = [2.0**-exponent for exponent in range(150)]
    numbers = torch.tensor([1.0, *tiny, *[0.0] * (BLOCKS[bits] * 2 - 1 - len(tiny))]).view(1, -1)
    code = code_of(bits, signed=False)
    back = code.decode(*code.encode(numbers, numbers.shape[-1]))[0]
    assert (back[: len(tiny) + 1] > 0).all()
    assert (back[len(tiny) + 1 :] > 0).all() == (bits == 4)


def places_of(count: int) -> Tensor:
    return compute_element_indices((count,), (0,), (count,), CPU)


def test_rounding_takes_one_of_the_two_neighbors_and_is_right_on_average() -> None:
    """Over 4096 draws a mean is off by sqrt(p (1 - p) / 4096) <= 0.0078 of the gap; 5 of these are
    allowed.
    """
    numbers = torch.tensor([1.0, 1.001, -1.001, 1.00390625, 3.1415927, -2.7182818, 1e-30, 1.0077])
    below = (numbers.view(torch.int32) & -65536).view(torch.float32)
    above = ((numbers.view(torch.int32) & -65536) + 65536).view(torch.float32)
    many = numbers.expand(4096, 8)
    found = round_stochastically(
        many.contiguous(), places_of(8 * 4096).view(4096, 8), compute_rounding_key(3, 1, "x")
    ).float()
    assert ((found == below) | (found == above)).all()
    share = (numbers.double() - below.double()) / (above.double() - below.double())
    assert float((found.eq(above).double().mean(0) - share).abs().max()) < 5 * 0.0078
    assert torch.equal(found[:, 0], torch.ones(4096))  # a bf16 number stays


def test_elements_draw_apart_from_one_another() -> None:
    """Half way between two numbers: each bit of 2^16 elements is fair, and so is agreement of
    neighbors, of steps, of seeds and of names; 5 standard deviations are 0.01.
    """
    numbers = torch.full((2**16,), 1.00390625)

    def ups(seed: int, step: int, name: str) -> Tensor:
        return (
            round_stochastically(
                numbers, places_of(2**16), compute_rounding_key(seed, step, name)
            ).float()
            > 1.0
        )

    first = ups(0, 1, "a")
    assert abs(float(first.double().mean()) - 0.5) < 0.01
    for other in (first.roll(1), first.roll(4096), ups(0, 2, "a"), ups(1, 1, "a"), ups(0, 1, "b")):
        assert abs(float((first == other).double().mean()) - 0.5) < 0.01


def test_what_is_not_finite_is_not_rounded() -> None:
    """A GPU's NaN has all its bits set: one more, and it would be -0."""
    words = torch.tensor([0x7FFFFFFF, 0x7F800000, -0x800000, -1, 0x7FC00000], dtype=torch.int32)
    for step in range(8):
        found = round_stochastically(
            words.view(torch.float32), places_of(5), compute_rounding_key(0, step, "")
        )
        assert found.isnan().tolist() == [True, False, False, True, True]
        assert found[1:3].tolist() == [math.inf, -math.inf]


def test_an_element_has_its_place_whatever_the_cut() -> None:
    whole = compute_element_indices((6, 5, 4), (0, 0, 0), (6, 5, 4), CPU)
    assert whole.flatten().tolist() == list(range(120))
    assert torch.equal(
        compute_element_indices((2, 3, 4), (3, 1, 0), (6, 5, 4), CPU), whole[3:5, 1:4]
    )
    assert compute_element_indices((), (), (), CPU).tolist() == 0
    late = compute_element_indices(
        (2, 3), (600_000, 7), (700_000, 10_000), CPU
    )  # beyond 2^32 they begin again
    expected = [
        [(row * 10_000 + column) % 2**32 for column in (7, 8, 9)] for row in (600_000, 600_001)
    ]
    assert (late.long() % 2**32).tolist() == expected
