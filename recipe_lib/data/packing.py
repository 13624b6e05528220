"""Packs: items put together into sequences of up to `capacity` tokens, by their lengths alone.

Best-fit decreasing: the longest item first, each into the fullest sequence that still has room for it. Sequences with
the same room left are alike, so that items of one length are placed by the hundred and not one by one."""

from dataclasses import dataclass

import numpy as np

_WORD = 1024  # rooms that share one number of the index


@dataclass(frozen=True)
class Packs:
    """Pack p holds the items `items[offsets[p] : offsets[p + 1]]`, in rising order; both int64, of p + 1 and n."""

    offsets: np.ndarray
    items: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> np.ndarray:
        return self.items[self.offsets[number] : self.offsets[number + 1]]


def pack(lengths: np.ndarray, capacity: int) -> Packs:
    """Packs of items 0 .. n-1 with these lengths (tokens, each from 1 to `capacity`); each item is in one of them.

    How many packs there are, and how long the items in them are, follows from the multiset of lengths alone; which of
    the items of one length goes where follows from their order.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= capacity:
        raise ValueError(f"found lengths from {lengths.min()} to {lengths.max()}, expected 1 to {capacity}")
    falling = np.argsort(-lengths, kind="stable")
    sizes, counts = np.unique(lengths, return_counts=True)
    pack_of = np.empty(len(lengths), dtype=np.int64)
    pack_of[falling] = _place(sizes[::-1].tolist(), counts[::-1].tolist(), capacity)
    items = np.argsort(pack_of, kind="stable")
    sizes_of_packs = np.bincount(pack_of)
    return Packs(np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes_of_packs)]), items)


def _place(sizes: list[int], counts: list[int], capacity: int) -> list[int]:
    """The pack of each item, longest item first. sizes: falling; counts: items of each."""
    rooms = _Rooms(capacity)
    placed: list[int] = []
    for size, count in zip(sizes, counts, strict=True):
        while count:
            room = rooms.least(size)
            if room is None:
                break
            count -= _fill(rooms, room, size, count, placed)
        if count:
            _open(rooms, capacity, size, count, placed)
    return placed


def _fill(rooms: "_Rooms", room: int, size: int, count: int, placed: list[int]) -> int:
    """Puts items into the packs with `room` left, as many into each as fit; returns how many items."""
    each = room // size
    packs = rooms.take(room, -(-count // each))
    whole = min(len(packs), count // each)
    _record(packs[:whole], each, placed)
    rooms.add(room - each * size, packs[:whole])
    if whole == len(packs):
        return whole * each
    rest = count - whole * each
    placed.extend(packs[whole:] * rest)
    rooms.add(room - rest * size, packs[whole:])
    return count


def _open(rooms: "_Rooms", capacity: int, size: int, count: int, placed: list[int]) -> None:
    """Begins as many packs as the items need."""
    each = capacity // size
    number = -(-count // each)
    packs = list(range(rooms.packs, rooms.packs + number))
    rooms.packs += number
    whole = count // each
    _record(packs[:whole], each, placed)
    rooms.add(capacity - each * size, packs[:whole])
    if whole < number:
        rest = count - whole * each
        placed.extend(packs[whole:] * rest)
        rooms.add(capacity - rest * size, packs[whole:])


def _record(packs: list[int], each: int, placed: list[int]) -> None:
    placed.extend(packs if each == 1 else [pack for pack in packs for _ in range(each)])


class _Rooms:
    """The packs by how much room they have left, and which rooms there are, as bits of a few large numbers."""

    def __init__(self, capacity: int) -> None:
        self.packs = 0  # begun so far
        self._by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
        self._words = [0] * (capacity // _WORD + 1)

    def least(self, size: int) -> int | None:
        """The least room of at least `size` that a pack has left."""
        number, bit = divmod(size, _WORD)
        word = self._words[number] >> bit
        if word:
            return size + (word & -word).bit_length() - 1
        for later in range(number + 1, len(self._words)):
            word = self._words[later]
            if word:
                return later * _WORD + (word & -word).bit_length() - 1
        return None

    def add(self, room: int, packs: list[int]) -> None:
        """Packs that now have `room` left; full ones are done with."""
        if packs and room:
            self._by_room[room].extend(packs)
            self._words[room // _WORD] |= 1 << room % _WORD

    def take(self, room: int, number: int) -> list[int]:
        """Takes up to `number` packs out of those with `room` left, those first that got there last."""
        packs = self._by_room[room]
        taken = packs[-number:]
        del packs[-number:]
        if not packs:
            self._words[room // _WORD] ^= 1 << room % _WORD
        return taken
