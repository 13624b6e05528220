"""The order of rows is a function of (seed, epoch, step): a permutation each epoch, the same
however it is divided.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe_lib.data import DataPlan, make_step
from recipe_lib.data.dataset import TokenSequence
from recipe_lib.errors import DataError
from tests.data.plans import OneSource, list_global_rows
from tests.selection import mark_slow_except


def epoch(num_rows: int, seed: int, number: int, per_step: int, shuffle: bool = True) -> np.ndarray:
    plan = DataPlan(OneSource(num_rows), seed=seed, slots_per_step=per_step, shuffle=shuffle)
    first = number * plan.count_steps(0)
    return np.concatenate(
        [slot for step in range(plan.count_steps(0)) for slot in plan.list_slots(first + step)]
    )


@settings(max_examples=30, deadline=None)
@given(
    num_rows=st.integers(1, 300),
    seed=st.integers(0, 2**70),
    number=st.integers(0, 50),
    per_step=st.integers(1, 40),
)
def test_every_row_once_an_epoch_but_for_the_last_part(num_rows, seed, number, per_step):
    if num_rows < per_step:
        return
    rows = epoch(num_rows, seed, number, per_step)
    assert len(rows) == num_rows // per_step * per_step == len(set(rows.tolist()))
    assert rows.min() >= 0 and rows.max() < num_rows
    one_by_one = epoch(num_rows, seed, number, 1)
    assert (one_by_one[: len(rows)] == rows).all(), "the order depends on how it is cut into steps"


def test_orders_differ_by_epoch_and_seed_and_repeat_by_both():
    orders = {
        (seed, number): tuple(epoch(200, seed, number, 8))
        for seed in (0, 1, 42)
        for number in (0, 1, 2)
    }
    assert len(set(orders.values())) == 9
    assert orders == {key: tuple(epoch(200, *key, 8)) for key in orders}
    assert tuple(epoch(200, 0, 1, 8)) != tuple(epoch(200, 1, 0, 8))


def test_any_step_can_be_asked_for_alone():
    whole = epoch(1000, 7, 3, 16)
    for step in (61, 0, 17, 5):
        assert (
            list_global_rows(1000, 7, 3, step, 16, True) == whole[step * 16 : step * 16 + 16]
        ).all()


def test_the_order_is_the_documented_one_for_ever():
    """Philox-4x64-10 with key (seed, epoch); the numbers below come from an implementation of the
    paper by hand.
    """
    drawn = [word for counter in range(1, 4) for word in philox(counter, (42, 1))][:10]
    expected = sorted(range(10), key=lambda row: drawn[row])
    assert list_global_rows(10, 42, 1, 0, 10, True).tolist() == expected
    assert expected == [4, 9, 5, 3, 0, 2, 7, 1, 6, 8]


def philox(counter: int, key: tuple[int, int], stream: int = 0) -> list[int]:
    """Four 64-bit words (Salmon et al., 2011)."""
    mask = 2**64 - 1
    x, (k0, k1) = [counter, 0, 0, stream], key
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
        for place, row in enumerate(list_global_rows(6, seed, 0, 0, 6, True)):
            counts[place, row] += 1
    assert counts.min() > 60 and counts.max() < 145  # 100 expected, standard deviation 9


def test_fewer_rows_than_a_step_takes():
    line = (
        r"found 7 usable sequences, expected at least 8 for one step .* lower batch_size or"
        r" gradient_accumulation_steps"
    )
    with pytest.raises(DataError, match=line):
        list_global_rows(7, 0, 0, 0, 8, True)
    for rows in (8, 15):
        assert DataPlan(OneSource(rows), seed=0, slots_per_step=8, shuffle=True).count_steps(0) == 1


@dataclass
class Items:
    """What a plan and batches need of a dataset; the tokens of a row are its number."""

    item_lengths: np.ndarray
    source_of: np.ndarray
    weights: tuple[float, ...] = (1.0,)
    group: int = 1
    labeled: bool = False

    @property
    def lengths(self) -> np.ndarray:
        return np.repeat(self.item_lengths // self.group, self.group)

    @property
    def trained_counts(self) -> np.ndarray:
        return np.ones_like(self.lengths)

    def __getitem__(self, number: int) -> TokenSequence:
        tokens = np.full(self.lengths[number], number, dtype=np.int32)
        return TokenSequence(tokens, tokens)


def some_items(
    number: int, weights: tuple[float, ...] = (1.0,), longest: int = 12, seed: int = 0
) -> Items:
    draw = np.random.default_rng(seed)
    return Items(
        draw.integers(1, longest + 1, number),
        np.sort(draw.integers(0, len(weights), number)),
        weights,
    )


def plan_of(
    items: Items, slots: int = 12, seed: int = 5, shuffle: bool = True, packing: int | None = None
) -> DataPlan:
    return DataPlan(
        items, seed=seed, slots_per_step=slots, shuffle=shuffle, packing_capacity=packing
    )


def epoch_slots(plan: DataPlan, number: int) -> list[tuple[int, ...]]:
    first = sum(plan.count_steps(earlier) for earlier in range(number))
    steps = range(first, first + plan.count_steps(number))
    return [tuple(slot.tolist()) for step in steps for slot in plan.list_slots(step)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("seed", [0, 9, 2**63 + 5])
def test_a_plan_without_packing_and_weights_is_the_order_of_rows(seed, shuffle):
    plan = plan_of(some_items(103), 10, seed, shuffle)
    assert plan.count_steps(0) == plan.count_steps(7) == 10
    for step in (0, 9, 10, 25, 39, 3):
        words = [word for counter in range(1, 27) for word in philox(counter, (seed, step // 10))]
        order = sorted(range(103), key=lambda row: words[row]) if shuffle else list(range(103))
        assert np.concatenate(plan.list_slots(step)).tolist() == order[step % 10 * 10 :][:10]
        assert (
            all(slot.shape == (1,) for slot in plan.list_slots(step))
            and plan.get_pack_length(step) is None
        )


SIZES = {1: 4, 2: 3, 3: 1, 4: 3}  # batch size by ranks; accumulation makes it 12 rows a step
KINDS = {"rows": {}, "packed weights": {"packing": 15}}


def trained(items: Items, plan: DataPlan, step: int, ranks: int) -> Counter[int]:
    """Rows out of the batches that the ranks train on in a step, told by their tokens."""
    found: Counter[int] = Counter()
    slots = plan.list_slots(step)
    pack_length = plan.get_pack_length(step)
    size = SIZES[ranks]
    for rank in range(ranks):
        made = make_step(
            items, slots, rank, ranks, size, 12 // ranks // size, pack_length=pack_length
        )
        for batch in made.micro_batches:
            for number, count in Counter(batch.labels.flatten().tolist()).items():
                if number != -100:
                    assert count % items.lengths[number] == 0, "a row is cut"
                    found[number] += count // int(items.lengths[number])
    return found


@pytest.mark.parametrize("kind", mark_slow_except(["rows", "packed weights"], ["packed weights"]))
def test_resumes_with_1_to_4_ranks_lose_no_row_and_repeat_none(kind):
    """A run stops before some step, and goes on there with another number of ranks, in another
    process.
    """
    weights = (1.0, 2.0, 0.5) if "weights" in kind else (1.0,)
    draw = np.random.default_rng(len(kind))
    for case in range(6):
        items = some_items(int(draw.integers(80, 110)), weights, seed=case)
        settings = {"seed": case, **KINDS[kind]}
        plan = plan_of(items, 12, **settings)
        last = plan.count_total_steps(2)
        # The plan of each number is a new one: nothing that another step has left in memory can
        # help it.
        by_ranks = {
            ranks: [
                trained(items, plan_of(items, 12, **settings), step, ranks) for step in range(last)
            ]
            for ranks in (1, 2, 3, 4)
        }
        single = plan_of(items, 1, **settings)
        epochs = [
            epoch_slots(single, number) for number in range(2)
        ]  # also the slots that fill no step
        for stop in draw.integers(0, last + 1, 13).tolist():
            for before in by_ranks:
                for after in by_ranks:
                    run = by_ranks[before][:stop] + by_ranks[after][stop:]
                    check_epochs(items, plan, epochs, run)


def check_epochs(
    items: Items, plan: DataPlan, epochs: list[list[tuple[int, ...]]], run: list[Counter[int]]
) -> None:
    """What a run has trained on, with the slots left over in each epoch, is every item as often as
    its weight says.
    """
    start = 0
    for number, slots in enumerate(epochs):
        steps = plan.count_steps(number)
        assert len(slots) // 12 == steps and len(run) == plan.count_total_steps(2)
        left = Counter(item for slot in slots[12 * steps :] for item in slot)
        found = sum(run[start : start + steps], left)
        for item, source in enumerate(items.source_of.tolist()):
            weight = items.weights[source]
            assert int(weight) <= found[item] <= -(-weight // 1)
        assert found == Counter(item for slot in slots for item in slot)
        start += steps


@pytest.mark.parametrize("packing", [None, 40])
def test_slots_do_not_depend_on_how_many_make_a_step(packing):
    items = some_items(400, (1.0, 1.5))
    one = epoch_slots(plan_of(items, 1, packing=packing), 2)
    for slots in (3, 8, 25):
        assert (
            epoch_slots(plan_of(items, slots, packing=packing), 2)
            == one[: len(one) // slots * slots]
        )


def test_packs_hold_what_fits_and_are_shuffled_anew():
    items = some_items(1000, longest=30)
    plan = plan_of(items, 8, packing=32)
    epochs = [epoch_slots(plan, number) for number in (0, 1)]
    assert all(
        sum(items.item_lengths[list(slot)]) <= 32 == plan.get_pack_length(0) for slot in epochs[0]
    )
    assert len(set(epochs[0]) & set(epochs[1])) < len(epochs[0]) / 4
    assert (
        0.95
        < sum(items.item_lengths[list(slot)].sum() for slot in epochs[0]) / (32 * len(epochs[0]))
        <= 1
    )
    # An epoch does not begin with the long items.
    longest = [items.item_lengths[list(slot)].max() for slot in epochs[0]]
    assert abs(np.corrcoef(longest, range(len(longest)))[0, 1]) < 0.15


def test_packs_in_file_order():
    items = some_items(200)
    plan = plan_of(items, 1, shuffle=False, packing=30)
    slots = epoch_slots(plan, 0)
    assert slots == epoch_slots(plan, 1) == sorted(slots, key=min)
    assert all(list(slot) == sorted(slot) for slot in slots)


def test_pairs_have_the_capacity_of_their_rows():
    items = some_items(60)
    items.item_lengths, items.group = items.item_lengths * 2, 2  # pairs of rows of up to 12 tokens
    slots = epoch_slots(plan_of(items, 1, packing=12), 0)
    assert sorted(item for slot in slots for item in slot) == list(range(60))
    assert max(items.item_lengths[list(slot)].sum() for slot in slots) == 24


def test_weights_are_how_often_items_are_taken():
    items = some_items(600, (2.0, 0.25, 1.0, 1.5))
    plan = plan_of(items, 1)
    counts = [
        np.bincount([slot[0] for slot in epoch_slots(plan, number)], minlength=600)
        for number in range(8)
    ]
    first, quarter, plain, half = (items.source_of == source for source in range(4))
    for count in counts:
        assert (count[first] == 2).all() and (count[plain] == 1).all()
        assert set(count[quarter]) == {0, 1} and set(count[half]) == {1, 2}
        assert (
            abs(count[quarter].sum() - quarter.sum() / 4) < 1
            and abs(count[half].sum() - half.sum() * 1.5) < 1
        )
    assert (counts[0][quarter] != counts[1][quarter]).any(), "the share is to be drawn anew"
    assert (
        sum(count[quarter].sum() for count in counts) == quarter.sum() * 2
    )  # 8 epochs of a quarter
    early = items.source_of[[slot[0] for slot in epoch_slots(plan, 0)[:100]]]
    assert set(early) == {0, 1, 2, 3}, "sources are to be mixed"


def test_weights_in_file_order():
    items = Items(np.ones(5, dtype=np.int64), np.array([0, 0, 1, 1, 1]), (2.0, 1.0))
    assert epoch_slots(plan_of(items, 1, shuffle=False), 0) == [
        (0,),
        (1,),
        (0,),
        (1,),
        (2,),
        (3,),
        (4,),
    ]


def test_epochs_of_unequal_length_are_counted_through():
    items = Items(np.ones(7, dtype=np.int64), np.zeros(7, dtype=np.int16), (0.5,))
    plan = plan_of(items, 1)
    assert [plan.count_steps(number) for number in range(4)] == [3, 4, 3, 4]  # 3.5 an epoch
    assert [plan.locate(step) for step in (0, 2, 3, 6, 7, 14)] == [
        (0, 0),
        (0, 2),
        (1, 0),
        (1, 3),
        (2, 0),
        (4, 0),
    ]
    assert (
        plan.count_total_steps(3) == 10
        and plan.count_total_steps(3, 9) == 9
        and plan.count_total_steps(3, 99) == 10
    )
    with pytest.raises(ValueError, match="found step -1"):
        plan.locate(-1)


def test_steps_of_a_run():
    plan = plan_of(some_items(100), 12)
    assert (
        plan.count_steps(0) == 8
        and plan.count_total_steps(3) == 24
        and plan.count_total_steps(3, 10) == 10
    )
    assert plan.locate(23) == (2, 7) and plan.locate(24) == (3, 0)


def test_shares_and_packs_are_drawn_from_the_documented_numbers():
    """The share of a source and the order of packs have streams of their own: 1 and 2 in the
    counter's last word.
    """
    items = Items(np.full(8, 3), np.zeros(8, dtype=np.int16), (0.5,))
    streams = [
        [word for at in (1, 2) for word in philox(at, (6, 0), stream)] for stream in range(3)
    ]
    taken = sorted(sorted(range(8), key=lambda item: streams[1][item])[:4])
    in_order = [taken[place] for place in sorted(range(4), key=lambda place: streams[0][place])]
    assert epoch_slots(plan_of(items, 1, 6), 0) == [(item,) for item in in_order]
    drawn = sorted(range(4), key=lambda place: streams[2][place])
    assert drawn != [0, 1, 2, 3] != in_order
    assert epoch_slots(plan_of(items, 1, 6, packing=3), 0) == [
        (in_order[place],) for place in drawn
    ]


@pytest.mark.parametrize(
    ("weights", "packing", "group", "line"),
    [
        (
            (1.0,),
            None,
            1,
            (
                r"data.source: found 20 usable sequences, expected at least 24 for one step .*;"
                r" lower batch_size"
            ),
        ),
        ((1.0,), None, 2, r"data.source: found 20 usable pairs, expected at least 24 "),
        (
            (0.5,),
            None,
            1,
            (
                r"data.source: found 10 usable sequences an epoch by the weights, expected at"
                r" least 24 "
            ),
        ),
        ((1.0,), 60, 1, r"data.packing: found 2 packs of up to 60 tokens, expected at least 24 "),
    ],
)
def test_not_one_step(weights, packing, group, line):
    items = Items(np.full(20, 6), np.zeros(20, dtype=np.int16), weights, group)
    with pytest.raises(DataError, match=line) as raised:
        plan_of(items, 24, packing=packing)
    assert len(str(raised.value).splitlines()) == 1
