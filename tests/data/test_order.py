"""The order of rows is a function of (seed, epoch, step): a permutation each epoch, the same however it is divided."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe_lib.data import global_rows, steps_per_epoch
from recipe_lib.errors import DataError


def epoch(num_rows: int, seed: int, number: int, per_step: int, shuffle: bool = True) -> np.ndarray:
    steps = steps_per_epoch(num_rows, per_step)
    return np.concatenate([global_rows(num_rows, seed, number, step, per_step, shuffle) for step in range(steps)])


@settings(max_examples=60, deadline=None)
@given(num_rows=st.integers(1, 300), seed=st.integers(0, 2**70), number=st.integers(0, 50), per_step=st.integers(1, 40))
def test_every_row_once_an_epoch_but_for_the_last_part(num_rows, seed, number, per_step):
    if num_rows < per_step:
        return
    rows = epoch(num_rows, seed, number, per_step)
    assert len(rows) == num_rows // per_step * per_step == len(set(rows.tolist()))
    assert rows.min() >= 0 and rows.max() < num_rows
    one_by_one = epoch(num_rows, seed, number, 1)
    assert (one_by_one[: len(rows)] == rows).all(), "the order depends on how it is cut into steps"


def test_orders_differ_by_epoch_and_seed_and_repeat_by_both():
    orders = {(seed, number): tuple(epoch(200, seed, number, 8)) for seed in (0, 1, 42) for number in (0, 1, 2)}
    assert len(set(orders.values())) == 9
    assert orders == {key: tuple(epoch(200, *key, 8)) for key in orders}
    assert tuple(epoch(200, 0, 1, 8)) != tuple(epoch(200, 1, 0, 8))


def test_any_step_can_be_asked_for_alone():
    whole = epoch(1000, 7, 3, 16)
    for step in (61, 0, 17, 5):
        assert (global_rows(1000, 7, 3, step, 16, True) == whole[step * 16 : step * 16 + 16]).all()


def test_the_order_is_the_documented_one_for_ever():
    """Philox-4x64-10 with key (seed, epoch); the numbers below come from an implementation of the paper by hand."""
    drawn = [word for counter in range(1, 4) for word in philox(counter, (42, 1))][:10]
    expected = sorted(range(10), key=lambda row: drawn[row])
    assert global_rows(10, 42, 1, 0, 10, True).tolist() == expected
    assert expected == [4, 9, 5, 3, 0, 2, 7, 1, 6, 8]


def philox(counter: int, key: tuple[int, int]) -> list[int]:
    """Four 64-bit words (Salmon et al., 2011)."""
    mask = 2**64 - 1
    x, (k0, k1) = [counter, 0, 0, 0], key
    for _ in range(10):
        left, right = x[0] * 0xD2E7470EE14C6C93, x[2] * 0xCA5A826395121157
        x = [(right >> 64) ^ x[1] ^ k0, right & mask, (left >> 64) ^ x[3] ^ k1, left & mask]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return x


def test_file_order():
    assert epoch(10, 5, 2, 4, shuffle=False).tolist() == list(range(8))


def test_all_orders_are_about_equally_likely():
    counts = np.zeros((6, 6))
    for seed in range(600):
        for place, row in enumerate(global_rows(6, seed, 0, 0, 6, True)):
            counts[place, row] += 1
    assert counts.min() > 60 and counts.max() < 145  # 100 expected, standard deviation 9


def test_fewer_rows_than_a_step_takes():
    line = r"found 7 usable rows, expected at least 8 for one step .* lower batch_size or gradient_accumulation_steps"
    with pytest.raises(DataError, match=line):
        steps_per_epoch(7, 8)
    assert steps_per_epoch(8, 8) == steps_per_epoch(15, 8) == 1


@pytest.mark.parametrize("step", [-1, 2])
def test_a_step_outside_of_the_epoch_is_our_mistake(step):
    with pytest.raises(ValueError, match="is not in an epoch of 2 steps"):
        global_rows(17, 0, 0, step, 8, True)
