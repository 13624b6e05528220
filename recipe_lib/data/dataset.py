"""A dataset as compact arrays of tokens and labels, in memory or mapped from files, with a report
of what was read; and which of its items each step takes.
"""

import hashlib
import json
import math
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

import numpy as np

from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.data.dataset_report import DataReport
from recipe_lib.data.sources import SampleFile
from recipe_lib.errors import DataError
from recipe_lib.logs import warn_on_first_rank
from recipe_lib.ops.chunked_heads import IGNORED
from recipe_lib.tokenizers import Tokenizer
from recipe_lib.units import pluralize

# The arrays that a dataset is stored as, one file each, and the type of their numbers.
ARRAYS = {
    "ids": "<i4",
    "trained": "u1",
    "offsets": "<i8",
    "file_of": "<i4",
    "sample_of": "<i8",
    "digests": "<u8",
    "values": "<f8",
}
_PRINTED = ("ids", "trained", "offsets")  # what the fingerprint looks at


@dataclass(frozen=True)
class TokenSequence:
    """tokens, labels: int32, equally long, at most max_seq_len; labels[i] is the target of
    tokens[i] or -100.
    """

    tokens: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Origin:
    """Where items come from. files: of all sources, in order. file_of: int32, sample_of: int64
    `[items]`, which file, and which of its samples. digests: uint64 `[items]`, equal for items with
    the same tokens and labels.
    """

    files: Sequence[SampleFile]
    file_of: np.ndarray
    sample_of: np.ndarray
    digests: np.ndarray

    def place(self, item: int) -> str:
        """File and line of an item."""
        return self.files[int(self.file_of[item])].place_of(int(self.sample_of[item]))


class Dataset:
    """Token sequences in flat arrays: all ids, where each begins, and which ids the loss counts as
    targets.

    A sequence keeps one id more than it has tokens, because its last id is only a target. ids:
    int32 `[n]`. lengths, trained_counts: int64 `[sequences]`, tokens and trained targets of each
    sequence. fingerprint: SHA-256 of sequences, settings and weights, in hex.

    An item is what an order is made of: `group` sequences that stay together. group: 1, or 2 for
    preference pairs (sequence 2i is chosen, sequence 2i + 1 rejected). items: how many.
    item_lengths: int64 `[items]`, tokens of all sequences of an item. source_of: int16 `[items]`,
    number of the source an item came from. weights: one for each source. values: fp64 `[items]`, a
    pair's margin, a class' number, 1 or 0 of an answer that is wanted or not; labeled: whether
    batches have them.
    """

    def __init__(
        self,
        ids: np.ndarray,
        offsets: np.ndarray,
        trained: np.ndarray,
        report: DataReport,
        settings: Any,
        *,
        group: int = 1,
        source_of: np.ndarray | None = None,
        weights: Sequence[float] = (1.0,),
        origin: Origin | None = None,
        checksums: Mapping[str, str] | None = None,
        values: np.ndarray | None = None,
        labeled: bool = False,
        scored: int | None = None,
    ) -> None:
        """ids: int32 `[n]`; offsets: int64 `[sequences + 1]`; trained: uint8 `[n]`. settings: enter
        the fingerprint.

        source_of: None, if all items are from one source. checksums: SHA-256 of arrays by name,
        where they are known. scored: a sequence's tokens are all its ids, so many at most, and its
        one label is at the last of them.
        """
        self.ids, self._offsets, self._trained, self._origin = ids, offsets, trained, origin
        self.report, self.group, self.weights = report, group, tuple(map(float, weights))
        self._settings, self._checksums, self._scored, self.labeled = (
            settings,
            checksums,
            scored,
            labeled,
        )
        if scored is None:
            self.lengths = np.diff(offsets) - 1
            self.trained_counts = np.add.reduceat(trained, offsets[:-1], dtype=np.int64)
        else:
            self.lengths = np.minimum(np.diff(offsets), scored)
            self.trained_counts = np.ones(len(self.lengths), dtype=np.int64)
        self.item_lengths = (
            self.lengths if group == 1 else self.lengths.reshape(-1, group).sum(axis=1)
        )
        self.items = len(self.item_lengths)
        self.source_of = np.zeros(self.items, dtype=np.int16) if source_of is None else source_of
        self.values = np.zeros(self.items) if values is None else values
        known = checksums or {
            name: compute_checksum(part)
            for name, part in zip(_PRINTED, (ids, trained, offsets), strict=True)
        }
        printed = [
            settings,
            group,
            self.weights,
            [known[name] for name in _PRINTED],
            compute_checksum(self.source_of),
        ]
        if labeled:
            printed += [compute_checksum(self.values), report.classes if report else [], scored]
        self.fingerprint = hashlib.sha256(json.dumps(printed, sort_keys=True).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> TokenSequence:
        if not 0 <= number < len(self):
            raise IndexError(f"sequence {number} of {len(self)}")
        start, end = int(self._offsets[number]), int(self._offsets[number + 1])
        ids = self.ids[start:end]
        if self._scored is not None:
            ids = ids[: self._scored]
            labels = np.full(len(ids), IGNORED, dtype=np.int32)
            labels[-1] = ids[-1]
            return TokenSequence(ids, labels)
        labels = np.where(self._trained[start + 1 : end], ids[1:], np.int32(IGNORED))
        return TokenSequence(ids[:-1], labels)

    def convert_to_labeled_answers(self) -> "Dataset":
        """The same with their values in batches; of pairs an item for each answer, whose value is 1
        for a chosen one and 0 for a rejected one.
        """
        if self.group == 1:
            return self._seen(labeled=True)
        once = self._origin
        split = {
            "group": 1,
            "source_of": np.repeat(self.source_of, 2),
            "values": np.tile([1.0, 0.0], self.items),
            "origin": once and Origin(
                once.files,
                np.repeat(once.file_of, 2),
                np.repeat(once.sample_of, 2),
                np.repeat(once.digests, 2) ^ np.tile(np.array([0, 1], dtype=np.uint64), self.items),
            ),
        }  # fmt: skip
        return self._seen(**split | {"labeled": True})

    def convert_to_scored(self, most: int) -> "Dataset":
        """The same with their values in batches, and all ids of a sequence, `most` or fewer, as its
        tokens: a score is read at the last one, whose label alone is none of -100.
        """
        return self._seen(labeled=True, scored=most)

    def replace_values(self, values: np.ndarray) -> "Dataset":
        """The same with other values, fp64 `[items]`."""
        return self._seen(values=values)

    def _seen(self, **changes: Any) -> "Dataset":
        made: dict[str, Any] = {
            "group": self.group,
            "source_of": self.source_of,
            "weights": self.weights,
            "origin": self._origin,
            "checksums": self._checksums,
            "values": self.values,
            "labeled": self.labeled,
            "scored": self._scored,
        }
        return Dataset(
            self.ids, self._offsets, self._trained, self.report, self._settings, **made | changes
        )

    def find_last_ids(self) -> set[int]:
        """The ids that sequences end with, those that are only targets included."""
        return set(np.unique(self.ids[self._offsets[1:] - 1]).tolist())

    def place(self, item: int) -> str:
        """File and line that an item came from; for a text cut into sequences, the text's."""
        if not 0 <= item < self.items:
            raise IndexError(f"item {item} of {self.items}")
        return (
            self._origin.place(item) if self._origin else f"{self.report.source} (item {item + 1})"
        )

    @cached_property
    def digests(self) -> np.ndarray:
        """uint64 `[items]`: equal for items with the same tokens and labels."""
        if self._origin:
            return self._origin.digests
        return np.fromiter(
            map(self._compute_item_digest, range(self.items)), dtype=np.uint64, count=self.items
        )

    def _compute_item_digest(self, item: int) -> int:
        start, end = (int(self._offsets[at * self.group]) for at in (item, item + 1))
        return compute_digest(self.ids[start:end].tobytes(), self._trained[start:end].tobytes())

    @cached_property
    def largest_id(self) -> int:
        """The largest id in any sequence."""
        return int(self.ids.max())


def adapt_to_recipe(cfg: FullFinetuneConfig, dataset: Dataset) -> Dataset:
    """The dataset as the recipe of a config trains on it."""
    if cfg.scores_sequences:
        return dataset.convert_to_scored(cfg.max_seq_len)
    return dataset.convert_to_labeled_answers() if cfg.samples == "labeled answers" else dataset


def compute_checksum(array: np.ndarray) -> str:
    """SHA-256 of an array's bytes, in hex."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def compute_digest(ids: bytes, trained: bytes) -> int:
    """64 bits that are equal for equal ids (int32) and trained flags (uint8)."""
    return int.from_bytes(hashlib.blake2b(ids + trained, digest_size=8).digest(), "little")


def find_copies(digests: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Items that repeat an earlier one, int64 `[c]`, ascending; and for each the last one that it
    is the same as.
    """
    order = np.argsort(digests, kind="stable")
    again = np.flatnonzero(digests[order][1:] == digests[order][:-1])
    found, earlier = order[again + 1], order[again]
    by_item = np.argsort(found)
    return found[by_item], earlier[by_item]


def find_overlap(training: "Dataset", validation: "Dataset") -> np.ndarray:
    """Validation items that are training items as well, token by token; int64, ascending."""
    return np.flatnonzero(np.isin(validation.digests, training.digests))


def check_vocabulary(
    tokenizer: Tokenizer, model_vocab_size: int, *datasets: Dataset | None
) -> None:
    """Raises DataError if the tokenizer, or a sequence of the datasets, has an id that the model
    has no embedding for.

    A special token beyond the model's vocabulary is let pass while no sequence uses it: real
    checkpoints list some.
    """
    place = tokenizer.place
    needed = max(
        [
            tokenizer.ordinary_size - 1,
            *(i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None),
        ]
    )
    if needed >= model_vocab_size:
        raise DataError(
            f"{place}: found {needed + 1} tokens, expected at most the model's"
            f" vocab_size={model_vocab_size}; set tokenizer.path to the tokenizer of this model"
        )
    for dataset in datasets:
        if dataset is not None and dataset.largest_id >= model_vocab_size:
            token = tokenizer.get_token_bytes(dataset.largest_id).decode(errors="replace")
            raise DataError(
                f"{dataset.report.source}: found the token {token!r} with the id"
                f" {dataset.largest_id}, expected ids below the model's"
                f" vocab_size={model_vocab_size}; use a chat template whose tokens the model has"
            )


def warn_of_positions(max_positions: int, *datasets: Dataset | None) -> None:
    """Warns of sequences that are longer than what the model was made for: they run, at positions
    that it never saw.
    """
    for dataset in datasets:
        longer = int((dataset.lengths > max_positions).sum()) if dataset is not None else 0
        if dataset is not None and longer:
            noun = (
                "sequences"
                if dataset.group == 1
                else f"sequences (two for each of {dataset.items} pairs)"
            )
            warn_on_first_rank(
                "warning: %d of %d %s of %s are longer than the %d tokens that the model was made for "
                "(max_position_embeddings in its config.json); max_seq_len=%d cuts them",
                longer, len(dataset), noun, dataset.report.source, max_positions, max_positions,
            )  # fmt: skip


def warn_of_overlap(training: Dataset, validation: Dataset | None) -> None:
    """Warns of validation sequences that are trained on, token by token the same: their loss says
    nothing of new text.
    """
    if validation is None:
        return
    shared = find_overlap(training, validation)
    if len(shared):
        warn_on_first_rank(
            "warning: %d of %d validation %ss of %s are training %ss as well (first: %s); take them out of one",
            len(shared), validation.items, validation.report.noun, validation.report.source, validation.report.noun,
            validation.place(int(shared[0])),
        )  # fmt: skip


# Which items a step trains on: a function of (seed, epoch, step) alone, whatever the number of
# ranks.
#
# The order of an epoch sorts the items by 64-bit numbers drawn from Philox-4x64 with the key (seed,
# epoch). numpy guarantees that stream for all versions and platforms (unlike
# `Generator.permutation`), so a run can be resumed elsewhere. Two equal numbers, one chance in 10^7
# for a million sequences, keep file order.

# Packs items into sequences of up to `capacity` tokens, by their lengths alone.
#
# Best-fit decreasing: the longest item first, each into the fullest sequence that still has room
# for it. Sequences with the same room left are alike, so that items of one length are placed by the
# hundred and not one by one.


@dataclass(frozen=True)
class Packs:
    """Holds which items each pack has: pack p those in `items[offsets[p] : offsets[p + 1]]`, in
    rising order.
    """

    offsets: np.ndarray  # int64 [packs + 1]
    items: np.ndarray  # int64 [items]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> np.ndarray:
        return self.items[self.offsets[number] : self.offsets[number + 1]]


def pack(lengths: np.ndarray, capacity: int) -> Packs:
    """Return packs of items 0 .. n-1 with these lengths; each item is in one of them.

    lengths: tokens, each from 1 to `capacity`.

    How many packs there are, and how long the items in them are, follows from the multiset of
    lengths alone; which of the items of one length goes where follows from their order.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= capacity:
        raise ValueError(
            f"found lengths from {lengths.min()} to {lengths.max()}, expected 1 to {capacity}"
        )
    falling = np.argsort(-lengths, kind="stable")
    sizes, counts = np.unique(lengths, return_counts=True)
    pack_of = np.empty(len(lengths), dtype=np.int64)
    pack_of[falling] = _place(sizes[::-1].tolist(), counts[::-1].tolist(), capacity)
    items = np.argsort(pack_of, kind="stable")
    sizes_of_packs = np.bincount(pack_of)
    return Packs(np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes_of_packs)]), items)


def _place(sizes: list[int], counts: list[int], capacity: int) -> list[int]:
    """Return the pack of each item, longest item first. sizes: falling; counts: items of each."""
    open_packs = _OpenPacks(capacity)
    placed = list[int]()
    for size, count in zip(sizes, counts, strict=True):
        while count:
            room, packs = open_packs.take(size, count)
            each = room // size
            num_filled = min(len(packs), count // each)
            filled = packs[:num_filled]
            placed.extend(filled if each == 1 else [pack for pack in filled for _ in range(each)])
            open_packs.add(room - each * size, filled)
            count -= num_filled * each
            if num_filled < len(packs):  # one more takes the rest
                placed.extend(packs[num_filled:] * count)
                open_packs.add(room - count * size, packs[num_filled:])
                count = 0
    return placed


class _OpenPacks:
    """The packs by how much room they have left."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._num_packs = 0  # begun so far
        self._by_room = dict[int, list[int]]()
        self._rooms = list[int]()  # its keys, rising

    def take(self, size: int, count: int) -> tuple[int, list[int]]:
        """Take out the fullest packs that have room for items of this size, as many as `count` of
        them need.

        Return their room and the packs, those first that got there last; new ones where no pack has
        room.
        """
        at = bisect_left(self._rooms, size)
        if at == len(self._rooms):
            first = self._num_packs
            self._num_packs += -(-count // (self._capacity // size))
            return self._capacity, list(range(first, self._num_packs))
        room = self._rooms[at]
        packs = self._by_room[room]
        number = -(-count // (room // size))
        taken = packs[-number:]
        del packs[-number:]
        if not packs:
            del self._by_room[room]
            del self._rooms[at]
        return room, taken

    def add(self, room: int, packs: list[int]) -> None:
        """Put packs where they belong with `room` left; full ones are done with."""
        if not packs or not room:
            return
        if room not in self._by_room:
            insort(self._rooms, room)
            self._by_room[room] = []
        self._by_room[room].extend(packs)


# Numbers of one key that are independent of each other: the highest word of Philox' counter.
_ORDER, _SHARES, _PACKS = 0, 1, 2


class DataPlan:
    """Which items each step takes, in so many slots: a slot is a sequence of a batch, and holds an
    item or a pack of them.

    The order of an epoch's slots does not depend on how many of them make a step, nor on ranks or
    workers. Slots left over at the end of an epoch are not used in it.

    Weights: of a source with weight w each item is taken floor(w) times an epoch, and a share w -
    floor(w) of them, drawn anew each epoch, once more. Packing: the lengths of an epoch's items
    decide which go together.
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
        """slots_per_step: batch_size x accumulation x ranks. shuffle false: file order in every
        epoch.

        packing_capacity: tokens of a sequence that several items may share; for pairs, a pair's
        sequences have that much each. Raises DataError if an epoch has not one step.
        """
        self.slots_per_step = slots_per_step
        self._seed, self._shuffle, self._group = seed, shuffle, dataset.group
        self._capacity = packing_capacity * dataset.group if packing_capacity else None
        self._lengths, self._weights = (
            dataset.item_lengths,
            [float(weight) for weight in dataset.weights],
        )
        self._source_of = dataset.source_of
        self._whole = all(
            weight == int(weight) for weight in self._weights
        )  # every epoch takes the same items
        self._epoch = lru_cache(maxsize=2)(self._draw)
        self._count_steps = cache(lambda epoch: len(self._epoch(epoch)[0]) // slots_per_step)
        self._check_first_step()

    def steps(self, epoch: int) -> int:
        """Optimizer steps of an epoch (from 0); with weights that are no whole numbers epochs may
        differ.
        """
        return self._count_steps(0 if self._whole else epoch)

    def total_steps(self, epochs: int, max_steps: int | None = None) -> int:
        """Steps of a run of so many epochs, at most `max_steps`."""
        steps = 0
        for epoch in range(epochs):
            if max_steps is not None and steps >= max_steps:
                return max_steps
            steps += self.steps(epoch)
        return steps if max_steps is None else min(steps, max_steps)

    def locate(self, step: int) -> tuple[int, int]:
        """(epoch, step within it) of a step of the run, all from 0."""
        if step < 0:
            raise ValueError(f"found step {step}, expected 0 or more")
        if self._whole:
            return divmod(step, self.steps(0))
        epoch = 0
        while step >= self.steps(epoch):
            step -= self.steps(epoch)
            epoch += 1
        return epoch, step

    def slots(self, step: int) -> list[np.ndarray]:
        """The items of each slot of a step of the run (from 0): int64 arrays, `slots_per_step` of
        them.
        """
        epoch, step = self.locate(step)
        slots, _ = self._epoch(epoch)
        start = step * self.slots_per_step
        return [slots[number] for number in range(start, start + self.slots_per_step)]

    def pack_length(self, step: int) -> int | None:
        """Tokens of the fullest pack of the epoch that a step is in; None without packing."""
        return self._epoch(self.locate(step)[0])[1] if self._capacity else None

    def packs(self) -> int:
        """Slots of the first epoch."""
        return len(self._epoch(0)[0])

    def compute_packed_share(self) -> float | None:
        """How much of the first epoch's packs is tokens, where all are as long as the fullest; None
        without packing.
        """
        packs, pack_length = self._epoch(0)
        room = len(packs) * (pack_length or 0)
        return float(self._lengths[packs.items].sum()) / room if room else None

    def _draw(self, number: int) -> tuple[Packs, int | None]:
        """Return the slots of an epoch in the order they are taken, and the tokens of the fullest
        pack; None: there is no packing, and a slot is an item.
        """
        items = self._list_taken_items(number)
        if self._shuffle:
            items = items[_drawn_order(len(items), self._seed, number, _ORDER)]
        if self._capacity is None:
            return Packs(np.arange(len(items) + 1), items), None
        packs = pack(self._lengths[items], self._capacity)
        if self._shuffle:
            order = _drawn_order(len(packs), self._seed, number, _PACKS)
        else:
            order = np.argsort(
                packs.items[packs.offsets[:-1]], kind="stable"
            )  # by the first item in each
        sizes = np.diff(packs.offsets)
        taken = items[packs.items[np.argsort(np.repeat(np.argsort(order), sizes), kind="stable")]]
        offsets = np.append(0, np.cumsum(sizes[order]))
        pack_lengths = (
            np.add.reduceat(self._lengths[taken], offsets[:-1]) if len(packs) else np.zeros(1)
        )
        return Packs(offsets, taken), int(pack_lengths.max())

    def _list_taken_items(self, epoch: int) -> np.ndarray:
        """The items of an epoch in file order, as often as their source's weight says."""
        numbers = _numbers(len(self._lengths), self._seed, epoch, _SHARES)
        parts = []
        for source, weight in enumerate(self._weights):
            own = np.flatnonzero(self._source_of == source)
            count = _share(weight % 1, len(own), epoch)
            once_more = np.sort(own[np.argsort(numbers[own], kind="stable")[:count]])
            parts += [own] * int(weight) + [once_more]
        return np.concatenate(parts)

    def _check_first_step(self) -> None:
        """Raise DataError if the first epoch has not one step."""
        slots = self.packs()
        if slots >= self.slots_per_step:
            return
        if self._capacity:
            found = (
                f"data.packing: found {pluralize(slots, 'pack')} of up to {self._capacity} tokens"
            )
        else:
            kind = "sequence" if self._group == 1 else "pair"
            by_weight = " an epoch by the weights" if set(self._weights) != {1} else ""
            found = f"data.source: found {pluralize(slots, f'usable {kind}')}{by_weight}"
        raise DataError(
            f"{found}, expected at least {self.slots_per_step} for one step (batch_size x"
            " gradient_accumulation_steps x ranks); lower batch_size or"
            " gradient_accumulation_steps"
        )


def _share(share: float, number: int, epoch: int) -> int:
    """Items that a share of `number` comes to in an epoch, so that epochs together have what they
    should.
    """
    per_epoch = share * number
    return math.floor(round((epoch + 1) * per_epoch, 6)) - math.floor(round(epoch * per_epoch, 6))


def _drawn_order(number: int, seed: int, epoch: int, stream: int) -> np.ndarray:
    return np.argsort(_numbers(number, seed, epoch, stream), kind="stable")


def _numbers(number: int, seed: int, epoch: int, stream: int) -> np.ndarray:
    key = np.array([seed % 2**64, epoch % 2**64], dtype=np.uint64)
    counter = np.array([0, 0, 0, stream], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(number)
