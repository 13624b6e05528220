"""Keep a dataset as compact arrays of tokens and labels, in memory or mapped from files.

A DatasetBuilder builds a `Dataset`, whose `dataset[i]` is the i-th sequence. An item is one
sequence, or two that stay together (a preference pair): a DataPlan chooses the items of each step,
batches.py makes tensors of them. The functions below check a dataset before a run: ids against the
model's vocabulary, overlong sequences, validation samples that are trained on.
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

# Name -> dtype of the arrays that a dataset is stored as, one file each
ARRAYS = {
    "ids": "<i4",  # of all sequences, one after the other
    "trained": "u1",  # for each id, whether the loss counts it as a target
    "offsets": "<i8",  # `[sequences + 1]`, where each sequence begins in `ids`
    "file_of": "<i4",  # for each item the index of the file of samples that it comes from
    "sample_of": "<i8",  # for each item the index of its sample in that file
    "digests": "<u8",  # for each item a hash, equal for items with the same tokens and labels
    "values": "<f8",  # for each item a pair's margin, a class' index, or KTO's 1 or 0
}
_FINGERPRINTED = ("ids", "trained", "offsets")  # arrays that enter the fingerprint


@dataclass(frozen=True)
class TokenSequence:
    """The tokens of one sequence and their targets."""

    tokens: np.ndarray  # int32 `[s]`, at most max_seq_len
    labels: np.ndarray  # int32 `[s]`, the target of each token, -100 if the loss counts none


@dataclass(frozen=True)
class Origin:
    """The file and the sample that each item of a dataset comes from."""

    files: Sequence[SampleFile]  # of all sources, in order
    file_of: np.ndarray  # int32 `[items]`, index into `files`
    sample_of: np.ndarray  # int64 `[items]`, index of the item's sample in that file
    digests: np.ndarray  # uint64 `[items]`, equal for items with the same tokens and labels

    def locate_item(self, item: int) -> str:
        return self.files[int(self.file_of[item])].locate_sample(int(self.sample_of[item]))


class Dataset:
    """Token sequences in flat arrays: all ids, and which of them the loss counts as targets.

    A sequence keeps one id more than it has tokens, because its last id is only a target. An item
    is `group` sequences that stay together when items are shuffled.
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
        """Take arrays as they are; nothing is copied.

        ids: int32 `[n]`, of all sequences. offsets: int64 `[sequences + 1]`, where each begins.
        trained: uint8 `[n]`, 1 for ids that the loss counts. settings: JSON, enters the
        fingerprint. group: sequences of an item. source_of: index of each item's source, int16
        `[items]`; None: all are from one. weights: how often an epoch takes the items of each
        source. origin: files and samples of the items; None: not known. checksums: SHA-256 of the
        arrays by name; None: they are computed. values, labeled: see the attributes.

        scored: for a model with a score head: a sequence's tokens are all its ids, at most `scored`
        of them, and only the last one has a label. None: the labels are the next ids.
        """
        self.ids = ids
        self._offsets = offsets
        self._trained = trained
        self._origin = origin
        self.report = report  # counts of the samples that the dataset was made of
        self.group = group  # sequences of an item; 2 for pairs: sequence 2i chosen, 2i + 1 rejected
        self.weights = tuple(map(float, weights))  # one for each source
        self._settings = settings
        self._checksums = checksums
        self._scored = scored
        self.labeled = labeled  # `values` are labels, and batches have them as `targets`
        if scored is None:
            self.lengths = np.diff(offsets) - 1  # tokens of each sequence, int64 `[sequences]`
            # Label tokens of each sequence, int64 `[sequences]`
            self.trained_counts = np.add.reduceat(trained, offsets[:-1], dtype=np.int64)
        else:
            self.lengths = np.minimum(np.diff(offsets), scored)
            self.trained_counts = np.ones(len(self.lengths), dtype=np.int64)
        # Tokens of all sequences of an item, int64 `[items]`
        self.item_lengths = (
            self.lengths if group == 1 else self.lengths.reshape(-1, group).sum(axis=1)
        )
        self.items = len(self.item_lengths)  # number of items
        # Index of the source that an item came from, int16 `[items]`
        self.source_of = np.zeros(self.items, dtype=np.int16) if source_of is None else source_of
        # fp64 `[items]`: a pair's margin, a class' index, or 1 for a desirable answer, else 0
        self.values = np.zeros(self.items) if values is None else values
        arrays = zip(_FINGERPRINTED, (ids, trained, offsets), strict=True)
        known_checksums = checksums or {name: compute_checksum(array) for name, array in arrays}
        # What decides the training; only then a run may be resumed with the dataset
        identity = [
            settings,
            group,
            self.weights,
            [known_checksums[name] for name in _FINGERPRINTED],
            compute_checksum(self.source_of),
        ]
        if labeled:  # else `values` are not trained on, and may differ when a run is resumed
            identity += [compute_checksum(self.values), report.classes if report else [], scored]
        identity_json = json.dumps(identity, sort_keys=True).encode()
        # SHA-256 in hex, equal for datasets that train the same
        self.fingerprint = hashlib.sha256(identity_json).hexdigest()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> TokenSequence:
        if not 0 <= number < len(self):
            raise IndexError(f"sequence {number} of {len(self)}")
        start = int(self._offsets[number])
        end = int(self._offsets[number + 1])
        ids = self.ids[start:end]
        if self._scored is not None:
            ids = ids[: self._scored]
            labels = np.full(len(ids), IGNORED, dtype=np.int32)
            labels[-1] = ids[-1]  # it marks the token to score; its own value is not read
            return TokenSequence(ids, labels)
        labels = np.where(self._trained[start + 1 : end], ids[1:], np.int32(IGNORED))
        return TokenSequence(ids[:-1], labels)

    def convert_to_labeled_answers(self) -> "Dataset":
        """Return the same sequences with `values` as labels of items, as KTO trains them.

        A pair becomes two items, whose values are 1 (the chosen answer) and 0 (the rejected one).
        """
        if self.group == 1:
            return self.replace(labeled=True)
        origin = self._origin
        if origin is not None:
            # A digest is that of the pair; its last bit is changed for the rejected answer.
            answer_bits = np.tile(np.array([0, 1], dtype=np.uint64), self.items)
            origin = Origin(
                files=origin.files,
                file_of=np.repeat(origin.file_of, 2),
                sample_of=np.repeat(origin.sample_of, 2),
                digests=np.repeat(origin.digests, 2) ^ answer_bits,
            )
        return self.replace(
            labeled=True,
            group=1,
            source_of=np.repeat(self.source_of, 2),
            values=np.tile([1.0, 0.0], self.items),
            origin=origin,
        )

    def convert_to_scored(self, max_length: int) -> "Dataset":
        """Return the same sequences for a score head, which scores them at their last token.

        The tokens are all ids of a sequence, at most `max_length`. Only the last has a label other
        than -100. What its score is compared with is in `values`.
        """
        return self.replace(labeled=True, scored=max_length)

    def replace(self, **changes: Any) -> "Dataset":
        """Return a dataset of the same arrays of tokens; `changes` replace keyword arguments."""
        arguments: dict[str, Any] = {
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
            self.ids,
            self._offsets,
            self._trained,
            report=self.report,
            settings=self._settings,
            **arguments | changes,
        )

    def find_last_ids(self) -> set[int]:
        """Return the ids that sequences end with, those that are only targets included."""
        return set(np.unique(self.ids[self._offsets[1:] - 1]).tolist())

    def locate_item(self, item: int) -> str:
        """Return file and line that an item came from, as text.

        For a text that was cut into sequences it is the place of the text. Raises IndexError for an
        item that is not there.
        """
        if not 0 <= item < self.items:
            raise IndexError(f"item {item} of {self.items}")
        return (
            self._origin.locate_item(item)
            if self._origin
            else f"{self.report.source} (item {item + 1})"
        )

    @cached_property
    def digests(self) -> np.ndarray:
        """Return digests, uint64 `[items]`, equal for items with the same tokens and labels."""
        if self._origin:
            return self._origin.digests
        return np.fromiter(
            map(self._compute_item_digest, range(self.items)), dtype=np.uint64, count=self.items
        )

    def _compute_item_digest(self, item: int) -> int:
        start = int(self._offsets[item * self.group])
        end = int(self._offsets[(item + 1) * self.group])
        return compute_digest(self.ids[start:end].tobytes(), self._trained[start:end].tobytes())

    @cached_property
    def largest_id(self) -> int:
        return int(self.ids.max())


def adapt_to_recipe(cfg: FullFinetuneConfig, dataset: Dataset) -> Dataset:
    """Return the dataset in the form that the config's recipe trains on.

    A score head takes scored sequences, KTO labeled answers, any other recipe the dataset itself.
    """
    if cfg.scores_sequences:
        return dataset.convert_to_scored(cfg.max_seq_len)
    return dataset.convert_to_labeled_answers() if cfg.samples == "labeled answers" else dataset


def compute_checksum(array: np.ndarray) -> str:
    """Return the SHA-256 of an array's bytes, in hex."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def compute_digest(ids: bytes, trained: bytes) -> int:
    """Return 64 bits that are equal for equal ids (int32) and trained flags (uint8)."""
    return int.from_bytes(hashlib.blake2b(ids + trained, digest_size=8).digest(), "little")


def find_copies(digests: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (items that repeat an earlier one, for each the last earlier item that it repeats).

    digests: uint64 `[items]`. Both results are indices, int64 `[copies]`, the first ascending.
    """
    order = np.argsort(digests, kind="stable")  # items with the same digest keep their order
    repeats = np.flatnonzero(digests[order][1:] == digests[order][:-1])
    copies = order[repeats + 1]
    by_item = np.argsort(copies)
    return copies[by_item], order[repeats][by_item]


def find_overlap(training: "Dataset", validation: "Dataset") -> np.ndarray:
    """Return the indices of validation items that are training items too; int64, ascending."""
    return np.flatnonzero(np.isin(validation.digests, training.digests))


def check_vocabulary(
    tokenizer: Tokenizer, model_vocab_size: int, *datasets: Dataset | None
) -> None:
    """Raise DataError for an id of tokenizer or sequences for which the model has no embedding.

    Special tokens beyond the model's vocabulary are allowed while no sequence uses them, because
    published checkpoints list some.
    """
    ids = [tokenizer.ordinary_size - 1, tokenizer.bos_id, tokenizer.eos_id]
    largest_id = max(number for number in ids if number is not None)
    if largest_id >= model_vocab_size:
        raise DataError(
            f"{tokenizer.place}: found {largest_id + 1} tokens, expected at most the model's"
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
    """Warn of sequences of more tokens than the model's `max_position_embeddings`.

    They run, but at positions that the model was never trained at.
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
                "warning: %d of %d %s of %s are longer than the %d tokens that the model was made"
                " for (max_position_embeddings in its config.json); max_seq_len=%d cuts them",
                longer,
                len(dataset),
                noun,
                dataset.report.source,
                max_positions,
                max_positions,
            )


def warn_of_overlap(training: Dataset, validation: Dataset | None) -> None:
    """Warn of validation items that are trained on: their loss says nothing about new text."""
    if validation is None:
        return
    shared = find_overlap(training, validation)
    if len(shared):
        report = validation.report
        warn_on_first_rank(
            "warning: %d of %d validation %ss of %s are training %ss as well (first: %s); take them"
            " out of one",
            len(shared),
            validation.items,
            report.item_noun,
            report.source,
            report.item_noun,
            validation.locate_item(int(shared[0])),
        )
