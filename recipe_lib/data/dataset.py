"""A dataset as compact arrays of tokens and labels, in memory or mapped from files, with a report
of what was read; and which of its items each step takes.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.data.dataset_report import DataReport
from recipe_lib.data.sources import SampleFile
from recipe_lib.errors import DataError
from recipe_lib.logs import warn_on_first_rank
from recipe_lib.ops.chunked_heads import IGNORED
from recipe_lib.tokenizers import Tokenizer

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
            token = tokenizer.token_bytes(dataset.largest_id).decode(errors="replace")
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
