"""How long the sequences are that a plan is made for: from the data itself where it is there, else
from max_seq_len.

What decides on memory is the widest micro-batch of a run: the longest sequence, or with packing the
fullest pack, which all packs of an epoch are padded to.
"""

import time
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recipe_lib.checkpoint.huggingface import find_checkpoint
from recipe_lib.config.local_files import find_files, get_cache_root
from recipe_lib.config.schema_data import is_hub, resolve_sources
from recipe_lib.data import (
    DataPlan,
    adapt_to_recipe,
    build_dataset,
    build_validation_dataset,
    settle_formats,
)
from recipe_lib.data.cache import MANIFEST
from recipe_lib.data.sources import open_sources
from recipe_lib.data.tokenize_dataset import DatasetBuilder
from recipe_lib.errors import ConfigError, UserError
from recipe_lib.plan.simulated_world.sequence_choice import PERCENTILES, check_choice
from recipe_lib.tokenizers import load_tokenizer
from recipe_lib.units import MIB, format_bytes

if TYPE_CHECKING:
    from recipe_lib.data import Dataset
    from recipe_lib.tokenizers import Tokenizer

# Sources up to this size are tokenized for a plan: a minute at most.
MAX_BYTES_READ = 64 * MIB
FEW_BYTES = 4 * MIB  # a second's work; the samples of more are enough for a step of any batch
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class PlannedSequence:
    """The sequences of a plan.

    tokens: of a sequence, before it is padded to data.pad_to_multiple_of; of packed pairs, half of
    a pack. source: where that is from, a phrase for the report. histogram: of the documents'
    lengths, `sequences`, `p50`, `p90`, `p99`, `max`; None where they are not known. steps:
    optimizer steps of the run, where known. group: sequences that stay together, 2 for pairs. pack:
    documents (pairs) in a packed sequence, on average; 1 without packing or where it is not known.
    """

    tokens: int
    source: str
    histogram: dict[str, int] | None = None
    steps: int | None = None
    group: int = 1
    pack: float = 1.0

    @property
    def documents(self) -> int:
        """Documents (pairs) of a packed sequence, as a whole number."""
        return max(1, round(self.pack))


def choose_sequence(
    cfg: Any, choice: str = "auto", *, ranks: int = 1, wait: float | None = None
) -> PlannedSequence:
    """The sequences that a config is planned for.

    choice: `auto`, the longest sequence (fullest pack) of the data if they are there, else `max`;
    `max`, max_seq_len; a number of tokens; `p50`, `p90` or `p99` of the sequences' lengths. ranks:
    with different batches. wait: None, small files that are not in the cache are tokenized now;
    else they are not, and so many seconds another process is given to. Nothing comes over the
    network. Raises ConfigError.
    """
    group = 2 if cfg.trains_on_pairs else 1
    cfg = _settle_formats(cfg)
    tokens = _parse_tokens(choice, cfg.max_seq_len)
    if tokens is not None or choice == "max":
        _check_steps(cfg, _load_few_samples(cfg, wait), ranks)
        source = "max_seq_len" if choice == "max" else f"--sequence {choice}"
        return PlannedSequence(tokens or cfg.max_seq_len, source, steps=cfg.max_steps, group=group)
    dataset, reason = _load_dataset(cfg, wait)
    if dataset is not None:
        return _measure_dataset(cfg, adapt_to_recipe(cfg, dataset), choice, ranks)
    if choice != "auto":
        raise ConfigError(
            f"--sequence {choice}: sequence lengths are not available ({reason}); give a number of"
            " tokens, or max"
        )
    source = f"max_seq_len, as the dataset is not available: {reason}"
    return PlannedSequence(cfg.max_seq_len, source, steps=cfg.max_steps, group=group)


def _settle_formats(cfg: Any) -> Any:
    """The config with the formats that its recipe finds; of samples with labels, which others would
    read too.
    """
    if cfg.samples not in ("labeled answers", "classes"):
        return cfg
    cfg = deepcopy(cfg)
    try:
        settle_formats(cfg)
    except UserError:
        pass  # reading says it
    return cfg


def _parse_tokens(choice: str, longest: int) -> int | None:
    check_choice(choice)
    if not choice.isdigit():
        return None
    if int(choice) > longest:
        raise ConfigError(
            f"--sequence {choice}: sequences have at most max_seq_len tokens ({longest}); raise"
            " max_seq_len"
        )
    return int(choice)


def _measure_dataset(cfg: Any, dataset: "Dataset", choice: str, ranks: int) -> PlannedSequence:
    """From the lengths of tokenized sequences."""
    lengths = dataset.lengths
    found = np.percentile(lengths, [50, 90, 99], method="inverted_cdf").astype(int).tolist()
    histogram = (
        {"sequences": len(lengths)}
        | dict(zip(PERCENTILES, found, strict=True))
        | {"max": int(lengths.max())}
    )
    capacity = cfg.max_seq_len if cfg.data.packing else None
    order = DataPlan(
        dataset,
        seed=cfg.seed,
        slots_per_step=1,
        shuffle=cfg.data.shuffle,
        packing_capacity=capacity,
    )
    slots = order.total_steps(1)
    whole = _check_steps(cfg, dataset, ranks)
    fullest = order.pack_length(0)
    split = (
        f" from {dataset.report.samples_read:,} samples" if dataset.report.split_sequences else ""
    )
    count = f"{len(dataset):,} sequences{split}"
    if fullest is not None:
        tokens, source = -(-fullest // dataset.group), f"fullest of {slots:,} packs of {count}"
    elif choice in PERCENTILES:
        tokens, source = histogram[choice], f"{choice} of {count}"
    else:
        tokens, source = histogram["max"], f"longest of {count}"
    pack = dataset.items / slots if cfg.data.packing else 1.0
    return PlannedSequence(tokens, source, histogram, whole, dataset.group, pack)


def _check_steps(cfg: Any, dataset: "Dataset | None", ranks: int) -> int | None:
    """Optimizer steps of the run; None without dataset. Raises the DataError of a run whose epochs
    have not one step.
    """
    if dataset is None:
        return None
    dataset = adapt_to_recipe(cfg, dataset)
    capacity = cfg.max_seq_len if cfg.data.packing else None
    per_step = cfg.batch_size * cfg.gradient_accumulation_steps * ranks
    order = DataPlan(
        dataset,
        seed=cfg.seed,
        slots_per_step=per_step,
        shuffle=cfg.data.shuffle,
        packing_capacity=capacity,
    )
    return order.total_steps(cfg.epochs, cfg.max_steps)


def _load_few_samples(cfg: Any, wait: float | None) -> "Dataset | None":
    """The dataset if an earlier run has tokenized it; wait None: or if it is so small that it may
    not have a step's sequences.
    """
    try:
        stored = _load_stored(cfg, _load_tokenizer(cfg), 0.0)
    except UserError:
        stored = None
    if stored is not None or wait is not None:
        return stored
    try:
        is_small = sum(map(_count_bytes, resolve_sources(cfg.data))) <= FEW_BYTES
    except UserError:  # the data are not here
        is_small = False
    return _load_dataset(cfg, None)[0] if is_small else None


def _load_dataset(cfg: Any, wait: float | None) -> "tuple[Dataset | None, str]":
    """The tokenized dataset of a config, or None and why it is not there. wait None: raises
    DataErrors of samples, and of those for validation, that are there.
    """
    try:
        tokenizer = _load_tokenizer(cfg)
    except UserError as error:
        return None, error.faults[0].partition(";")[0]
    if wait is None:
        _check_validation(cfg, tokenizer)
    try:
        stored = _load_stored(cfg, tokenizer, wait or 0.0)
    except UserError as error:
        if wait is not None:
            return None, error.faults[0].partition(";")[0]
        # What cannot be read says so below, where files that are not here are a reason and no fault
        stored = None
    try:
        if stored is not None:
            return stored, ""
        if wait is not None:
            return None, "they are not tokenized yet"
        size = sum(map(_count_bytes, resolve_sources(cfg.data)))
        if size > MAX_BYTES_READ:
            return None, f"{format_bytes(size)} that are not tokenized yet"
    except UserError as error:
        return None, error.faults[0].partition(";")[0]
    return build_dataset(cfg.data, tokenizer, cfg.max_seq_len), ""


def _check_validation(cfg: Any, tokenizer: "Tokenizer") -> None:
    """Raises the DataError of a run that finds none of its samples for validation, if these are
    small local files.
    """
    source = cfg.validation.source
    if not source or is_hub(source):
        return
    if (
        sum(path.stat().st_size for path in find_files(source, "validation.source"))
        <= MAX_BYTES_READ
    ):
        build_validation_dataset(cfg, tokenizer)


def _load_tokenizer(cfg: Any) -> "Tokenizer":
    path = cfg.tokenizer.path or (find_checkpoint(cfg.model.path) if cfg.model.path else "")
    return load_tokenizer(Path(path), cfg.tokenizer.chat_template)


def _load_stored(cfg: Any, tokenizer: "Tokenizer", wait: float) -> "Dataset | None":
    """The dataset as a run has left them in the cache, or does within `wait` seconds; nothing is
    tokenized here.
    """
    builder = DatasetBuilder(cfg.data, tokenizer, cfg.max_seq_len)
    key = builder.find_key()
    if key is None:
        return None
    manifest, deadline = (
        get_cache_root(cfg.data.cache_dir) / key / MANIFEST,
        time.monotonic() + wait,
    )
    while not manifest.is_file():
        if time.monotonic() >= deadline:
            return None
        time.sleep(POLL_SECONDS)
    return builder.build()


def _count_bytes(source: Any) -> int:
    """Bytes of a source's files; of a hub dataset, those that are on this machine."""
    if is_hub(source.source):
        return sum(file.identity["size"] for file in open_sources(source))
    return sum(path.stat().st_size for path in find_files(source.source))
