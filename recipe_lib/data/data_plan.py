"""Choose the items that each step of a run trains on, and pack items into sequences.

A run builds a `DataPlan`, and `make_training_steps` (batches.py) asks its `list_slots` for the
items of a step. An item is a sequence, or a pair of two; a slot is an item, or a pack of items that
share a row. The order depends on (seed, epoch) alone and not on the number of ranks, so a run can
be resumed at any step and on other ranks. `pack` assigns items to packs by their lengths alone.
"""

import math
from bisect import bisect_left, insort
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np

from recipe_lib.data.dataset import Dataset
from recipe_lib.errors import DataError
from recipe_lib.units import pluralize


@dataclass(frozen=True)
class Packs:
    """The items of each pack, in flat arrays; `packs[i]` are the items of pack i."""

    offsets: np.ndarray  # int64 `[packs + 1]`: pack p has items[offsets[p] : offsets[p + 1]]
    items: np.ndarray  # int64 `[items]`, indices of items, ascending within a pack

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> np.ndarray:
        return self.items[self.offsets[number] : self.offsets[number + 1]]


def pack(lengths: np.ndarray, capacity: int) -> Packs:
    """Return packs of items 0 .. n-1 with these lengths; each item is in one of them.

    lengths, capacity: tokens. The algorithm is best-fit decreasing: the longest item first, each
    into the fullest pack that still has room for it. The number of packs and the lengths in them
    depend on the multiset of lengths alone. Which of several items of one length goes where depends
    on their order. Raises ValueError for a length that is not from 1 to `capacity`.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= capacity:
        raise ValueError(
            f"found lengths from {lengths.min()} to {lengths.max()}, expected 1 to {capacity}"
        )
    # Items of one length are assigned together: a million items have a few thousand lengths.
    longest_first = np.argsort(-lengths, kind="stable")
    sizes, counts = np.unique(lengths, return_counts=True)
    pack_of = np.empty(len(lengths), dtype=np.int64)  # for each item the index of its pack
    pack_of[longest_first] = _assign_packs(sizes[::-1].tolist(), counts[::-1].tolist(), capacity)
    items = np.argsort(pack_of, kind="stable")
    sizes_of_packs = np.bincount(pack_of)
    return Packs(np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes_of_packs)]), items)


def _assign_packs(sizes: list[int], counts: list[int], capacity: int) -> list[int]:
    """Return the index of each item's pack, for the longest item first.

    sizes: the different lengths in tokens, descending. counts: number of items of each.
    """
    open_packs = _OpenPacks(capacity)
    pack_of_item = list[int]()
    for size, count in zip(sizes, counts, strict=True):
        while count:
            room, packs = open_packs.take(size, count)
            items_per_pack = room // size
            num_filled = min(len(packs), count // items_per_pack)
            # Packs that get as many items of this length as they have room for
            filled_packs = packs[:num_filled]
            pack_of_item.extend(
                filled_packs
                if items_per_pack == 1
                else [pack for pack in filled_packs for _ in range(items_per_pack)]
            )
            open_packs.add(room - items_per_pack * size, filled_packs)
            count -= num_filled * items_per_pack
            if num_filled < len(packs):  # one more pack takes the rest of the items
                pack_of_item.extend(packs[num_filled:] * count)
                open_packs.add(room - count * size, packs[num_filled:])
                count = 0
    return pack_of_item


class _OpenPacks:
    """The packs that are not full, by the room they have left, in tokens."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._num_packs = 0  # packs begun so far, full ones included
        self._by_room = dict[int, list[int]]()  # room -> indices of packs
        self._rooms = list[int]()  # the keys of _by_room, ascending

    def take(self, size: int, count: int) -> tuple[int, list[int]]:
        """Take out the fullest packs with room for `size`, at most as many as `count` items need.

        Return (tokens of room in each, indices of the packs). All have the same room; of several
        such packs the last ones put back are taken. If none has room, the packs are new.
        """
        index = bisect_left(self._rooms, size)
        if index == len(self._rooms):
            first = self._num_packs
            self._num_packs += -(-count // (self._capacity // size))
            return self._capacity, list(range(first, self._num_packs))
        room = self._rooms[index]
        packs = self._by_room[room]
        num_packs = -(-count // (room // size))
        taken_packs = packs[-num_packs:]
        del packs[-num_packs:]
        if not packs:
            del self._by_room[room]
            del self._rooms[index]
        return room, taken_packs

    def add(self, room: int, packs: list[int]) -> None:
        """Put back packs with `room` tokens left; full ones are dropped."""
        if not packs or not room:
            return
        if room not in self._by_room:
            insort(self._rooms, room)
            self._by_room[room] = []
        self._by_room[room].extend(packs)


# Independent random streams of one (seed, epoch): the highest word of Philox' counter
_ORDER = 0  # order of the items
_SHARES = 1  # which items a fractional weight takes once more
_PACKS = 2  # order of the packs


class DataPlan:
    """The items that each step takes, in slots: a slot is an item, or a pack of items.

    The order of an epoch's slots does not depend on how many of them make a step, nor on ranks or
    workers. Slots that do not fill a step at the end of an epoch are not used in it.

    An item of a source with weight w is taken floor(w) times an epoch. A share w - floor(w) of the
    source's items, drawn anew each epoch, is taken once more.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        seed: int,
        slots_per_step: int,
        shuffle: bool,
        packing_capacity: int | None = None,
    ) -> None:
        """Take what decides the order.

        slots_per_step: batch_size x accumulation x data ranks. shuffle: False keeps the file's
        order in every epoch. packing_capacity: tokens of a row that holds a pack (a pack of pairs
        may have twice as many); None: no packing. Raises DataError if the first epoch has not one
        full step.
        """
        self.slots_per_step = slots_per_step
        self._seed = seed
        self._shuffle = shuffle
        self._group = dataset.group
        self._capacity = packing_capacity * dataset.group if packing_capacity else None
        self._lengths = dataset.item_lengths
        self._weights = [float(weight) for weight in dataset.weights]
        self._source_of = dataset.source_of
        # With whole weights every epoch takes the same items, and has the same number of steps.
        self._has_equal_epochs = all(weight == int(weight) for weight in self._weights)
        # (slots, tokens of the fullest pack) of an epoch, kept for the last two that were asked for
        self._draw_epoch = lru_cache(maxsize=2)(self._draw)
        self._count_full_steps = cache(
            lambda epoch: len(self._draw_epoch(epoch)[0]) // slots_per_step
        )
        self._check_first_step()

    def count_steps(self, epoch: int) -> int:
        """Return the number of optimizer steps of an epoch (from 0).

        Epochs may differ in it if a source's weight is no whole number.
        """
        return self._count_full_steps(0 if self._has_equal_epochs else epoch)

    def count_total_steps(self, epochs: int, max_steps: int | None = None) -> int:
        """Return the steps of a run of so many epochs, at most `max_steps`; None: all."""
        steps = 0
        for epoch in range(epochs):
            if max_steps is not None and steps >= max_steps:
                return max_steps
            steps += self.count_steps(epoch)
        return steps if max_steps is None else min(steps, max_steps)

    def locate(self, step: int) -> tuple[int, int]:
        """Return (epoch, step within it) of a step of the run, all from 0.

        Raises ValueError for a negative step.
        """
        if step < 0:
            raise ValueError(f"found step {step}, expected 0 or more")
        if self._has_equal_epochs:
            return divmod(step, self.count_steps(0))
        epoch = 0
        while step >= self.count_steps(epoch):
            step -= self.count_steps(epoch)
            epoch += 1
        return epoch, step

    def list_slots(self, step: int) -> list[np.ndarray]:
        """Return the items of each slot of a step (from 0): `slots_per_step` int64 arrays."""
        epoch, step = self.locate(step)
        slots, _ = self._draw_epoch(epoch)
        start = step * self.slots_per_step
        return [slots[number] for number in range(start, start + self.slots_per_step)]

    def get_pack_length(self, step: int) -> int | None:
        """Return the tokens of the fullest pack in the step's epoch; None without packing."""
        return self._draw_epoch(self.locate(step)[0])[1] if self._capacity else None

    def count_slots(self) -> int:
        """Return the number of slots of the first epoch."""
        return len(self._draw_epoch(0)[0])

    def compute_packed_share(self) -> float | None:
        """Return the share of tokens in the first epoch's packs; None without packing.

        The rest is padding: all packs are padded to the fullest.
        """
        packs, pack_length = self._draw_epoch(0)
        room = len(packs) * (pack_length or 0)
        return float(self._lengths[packs.items].sum()) / room if room else None

    def _draw(self, number: int) -> tuple[Packs, int | None]:
        """Return (slots of an epoch in the order they are taken, tokens of the fullest pack).

        number: of the epoch, from 0. Without packing a slot is an item, and the second is None.
        """
        items = self._list_taken_items(number)
        if self._shuffle:
            items = items[_draw_order(len(items), self._seed, epoch=number, stream=_ORDER)]
        if self._capacity is None:
            return Packs(np.arange(len(items) + 1), items), None
        packs = pack(self._lengths[items], self._capacity)
        if self._shuffle:
            order = _draw_order(len(packs), self._seed, epoch=number, stream=_PACKS)
        else:
            order = np.argsort(packs.items[packs.offsets[:-1]], kind="stable")  # by first item
        sizes = np.diff(packs.offsets)
        # The items of all packs, with the packs in `order`. `packs` has indices into `items`, and
        # argsort(order) is the new position of each pack.
        ordered_items = items[
            packs.items[np.argsort(np.repeat(np.argsort(order), sizes), kind="stable")]
        ]
        offsets = np.append(0, np.cumsum(sizes[order]))
        pack_lengths = (
            np.add.reduceat(self._lengths[ordered_items], offsets[:-1])
            if len(packs)
            else np.zeros(1)
        )
        return Packs(offsets, ordered_items), int(pack_lengths.max())

    def _list_taken_items(self, epoch: int) -> np.ndarray:
        """Return an epoch's items by source, in file order, as often as its weight says."""
        random_numbers = _draw_numbers(len(self._lengths), self._seed, epoch=epoch, stream=_SHARES)
        items_by_source = []
        for source, weight in enumerate(self._weights):
            items = np.flatnonzero(self._source_of == source)
            # The total over all epochs is rounded, so that in the long run the share is that of the
            # weight. `round` keeps a float such as 2.9999999 from being cut to 2.
            per_epoch = weight % 1 * len(items)
            total_before = math.floor(round(epoch * per_epoch, 6))
            count = math.floor(round((epoch + 1) * per_epoch, 6)) - total_before
            once_more = np.sort(items[np.argsort(random_numbers[items], kind="stable")[:count]])
            items_by_source += [items] * int(weight) + [once_more]
        return np.concatenate(items_by_source)

    def _check_first_step(self) -> None:
        """Raise DataError if the first epoch has not one full step."""
        slots = self.count_slots()
        if slots >= self.slots_per_step:
            return
        if self._capacity:
            shortage = (
                f"data.packing: found {pluralize(slots, 'pack')} of up to {self._capacity} tokens"
            )
        else:
            kind = "sequence" if self._group == 1 else "pair"
            by_weight = " an epoch by the weights" if set(self._weights) != {1} else ""
            shortage = f"data.source: found {pluralize(slots, f'usable {kind}')}{by_weight}"
        raise DataError(
            f"{shortage}, expected at least {self.slots_per_step} for one step (batch_size x"
            " gradient_accumulation_steps x ranks); lower batch_size or"
            " gradient_accumulation_steps"
        )


def _draw_order(number: int, seed: int, epoch: int, stream: int) -> np.ndarray:
    """Return a random permutation of 0 .. number - 1, int64. stream: `_ORDER` or `_PACKS`."""
    # Equal random numbers would keep file order: one chance in 10^7 for a million sequences.
    return np.argsort(_draw_numbers(number, seed, epoch=epoch, stream=stream), kind="stable")


def _draw_numbers(number: int, seed: int, epoch: int, stream: int) -> np.ndarray:
    """Return `number` random uint64 of Philox-4x64 with the key (seed, epoch).

    stream: one of the constants above, for numbers that do not depend on other streams.
    """
    # numpy guarantees this stream for all versions and platforms, unlike `Generator.permutation`,
    # so that a run can be resumed elsewhere.
    key = np.array([seed % 2**64, epoch % 2**64], dtype=np.uint64)
    counter = np.array([0, 0, 0, stream], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(number)
