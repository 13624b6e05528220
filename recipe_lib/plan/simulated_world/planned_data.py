"""Choose the sequence lengths that a plan is made for, and make batches of them without data.

`tune plan` calls `choose_sequence`: lengths are those of the data if they are on this machine, else
max_seq_len. The widest micro-batch of a run decides on memory: the longest sequence, or with
packing the fullest pack, which all packs of an epoch are padded to. `trace_rank.simulate` sets a
`PlannedData` as the `data` of the recipe that it runs on tensors without values.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from recipe_lib.checkpoint.huggingface import find_checkpoint
from recipe_lib.config import FullFinetuneConfig, is_hub, resolve_sources
from recipe_lib.config.local_files import find_files, get_cache_root
from recipe_lib.config.mesh import compute_micro_batches, compute_padded_multiple
from recipe_lib.data import (
    Batch,
    DataPlan,
    Dataset,
    StepBatches,
    adapt_to_recipe,
    build_dataset,
    build_validation_dataset,
    make_step,
    settle_formats,
)
from recipe_lib.data.cache import MANIFEST
from recipe_lib.data.sources import open_sources
from recipe_lib.data.tokenize_dataset import DatasetBuilder
from recipe_lib.errors import ConfigError, UserError
from recipe_lib.ops.attention import AttentionInfo
from recipe_lib.parallel import World
from recipe_lib.plan.simulated_world.sequence_choice import PERCENTILES, check_choice
from recipe_lib.plan.tracing.simulated_micro_batches import MicroBatchMarks
from recipe_lib.tokenizers import Tokenizer, load_tokenizer
from recipe_lib.units import MIB, format_bytes

# Bytes of sources (files of samples) up to which they are tokenized for a plan: a minute at most.
MAX_BYTES_READ = 64 * MIB
# Bytes of sources up to which it is checked that they have samples for a step: a second's work.
# Larger ones are taken to have enough of them for a step of any batch.
FEW_BYTES = 4 * MIB
POLL_SECONDS = 0.5  # between two looks for a dataset that another process tokenizes


@dataclass(frozen=True)
class PlannedSequence:
    """The sequences that a plan is made for."""

    # Tokens of a sequence, before padding to data.pad_to_multiple_of; with packing, of a pack. Of
    # packed pairs, half a pack.
    tokens: int
    # Where `tokens` is from, a phrase for the report. A reason may stand after a colon.
    source: str
    # Number of the dataset's sequences as `sequences`; lengths in tokens as `p50`, `p90`, `p99`
    # (percentiles) and `max`. None where they are not known.
    histogram: dict[str, int] | None = None
    # Optimizer steps of the run; None where not known.
    steps: int | None = None
    # Sequences of one item that stay together: 2 for pairs, else 1.
    group: int = 1
    # Documents (pairs) in a packed sequence, on average; 1 without packing or where not known.
    pack: float = 1.0

    @property
    def documents(self) -> int:
        """Return the documents (pairs) of a packed sequence as a whole number, at least 1."""
        return max(1, round(self.pack))


def choose_sequence(
    cfg: Any, choice: str = "auto", *, ranks: int = 1, wait: float | None = None
) -> PlannedSequence:
    """Return the sequences that a config is planned for.

    choice: the value of `--sequence`. `auto`: the longest sequence (fullest pack) of the data if
    they are on this machine, else max_seq_len. `max`: max_seq_len. A number of tokens. `p50`, `p90`
    or `p99`: that percentile of the sequences' lengths. ranks: size of data parallelism. wait:
    seconds to wait for another process that tokenizes the data; None: small files that are not in
    the cache are tokenized here. Downloads nothing. Raises ConfigError for a choice that does not
    fit the config or the data.
    """
    check_choice(choice)
    tokens = int(choice) if choice.isdigit() else None
    if tokens is not None and tokens > cfg.max_seq_len:
        raise ConfigError(
            f"--sequence {choice}: sequences have at most max_seq_len tokens ({cfg.max_seq_len});"
            " raise max_seq_len"
        )
    group = 2 if cfg.trains_on_pairs else 1
    if cfg.samples in ("labeled answers", "classes"):
        # The recipe sets the format of such samples. A format of other recipes would read them too,
        # but without their labels.
        cfg = deepcopy(cfg)
        with suppress(UserError):  # reading the data raises it again
            settle_formats(cfg)
    if tokens is not None or choice == "max":
        _check_steps(cfg, _load_few_samples(cfg, wait), ranks)
        source = "max_seq_len" if choice == "max" else f"--sequence {choice}"
        return PlannedSequence(tokens or cfg.max_seq_len, source, steps=cfg.max_steps, group=group)
    dataset, reason = _load_dataset(cfg, wait)
    if dataset is not None:
        return _measure_dataset(
            cfg, dataset=adapt_to_recipe(cfg, dataset), choice=choice, ranks=ranks
        )
    if choice != "auto":
        raise ConfigError(
            f"--sequence {choice}: sequence lengths are not available ({reason}); give a number of"
            " tokens, or max"
        )
    source = f"max_seq_len, as the dataset is not available: {reason}"
    return PlannedSequence(cfg.max_seq_len, source, steps=cfg.max_steps, group=group)


def _measure_dataset(cfg: Any, dataset: Dataset, choice: str, ranks: int) -> PlannedSequence:
    """Return the planned sequences from the lengths in a tokenized dataset.

    choice, ranks: as in `choose_sequence`; `auto` is `max` here. Raises DataError if an epoch has
    less than one step.
    """
    lengths = dataset.lengths
    percentiles = np.percentile(lengths, [50, 90, 99], method="inverted_cdf").astype(int).tolist()
    histogram = {
        "sequences": len(lengths),
        **dict(zip(PERCENTILES, percentiles, strict=True)),
        "max": int(lengths.max()),
    }
    # A slot is a pack, or without packing an item (a sequence, or a pair of two). With one slot a
    # step, an epoch has as many steps as slots.
    order = _order_dataset(cfg, dataset, slots_per_step=1)
    num_slots = order.count_total_steps(1)
    steps = _check_steps(cfg, dataset, ranks)
    fullest_pack = order.get_pack_length(0)  # tokens, in the first epoch; None without packing
    dataset_text = f"{len(dataset):,} sequences"
    if dataset.report.split_sequences:
        dataset_text += f" from {dataset.report.samples_read:,} samples"
    choice = choice if choice in PERCENTILES else "max"
    source = f"{'longest' if choice == 'max' else choice} of {dataset_text}"
    if fullest_pack is not None:
        source = f"fullest of {num_slots:,} packs of {dataset_text}"
    return PlannedSequence(
        tokens=histogram[choice] if fullest_pack is None else -(-fullest_pack // dataset.group),
        source=source,
        histogram=histogram,
        steps=steps,
        group=dataset.group,
        pack=dataset.items / num_slots if cfg.data.packing else 1.0,
    )


def _order_dataset(cfg: Any, dataset: Dataset, slots_per_step: int) -> DataPlan:
    # Returns the order of a run's batches. slots_per_step: packs, or without packing items, of all
    # ranks.
    return DataPlan(
        dataset,
        seed=cfg.seed,
        slots_per_step=slots_per_step,
        shuffle=cfg.data.shuffle,
        packing_capacity=cfg.max_seq_len if cfg.data.packing else None,
    )


def _check_steps(cfg: Any, dataset: Dataset | None, ranks: int) -> int | None:
    """Return the optimizer steps of the run; None without a dataset.

    Raises DataError, as a run does, if an epoch has less than one step.
    """
    if dataset is None:
        return None
    slots_per_step = cfg.batch_size * cfg.gradient_accumulation_steps * ranks
    order = _order_dataset(cfg, adapt_to_recipe(cfg, dataset), slots_per_step=slots_per_step)
    return order.count_total_steps(cfg.epochs, cfg.max_steps)


def _load_few_samples(cfg: Any, wait: float | None) -> Dataset | None:
    """Return the dataset if an earlier run has tokenized it, else None.

    wait: None: also tokenize a dataset that is so small that it may lack the samples of one step.
    With a number of seconds nothing is tokenized, and none are waited for.
    """
    try:
        stored_dataset = _load_stored(cfg, _load_tokenizer(cfg), 0.0)
    except UserError:  # the tokenizer or the data are not on this machine
        stored_dataset = None
    if stored_dataset is not None or wait is not None:
        return stored_dataset
    try:
        if sum(map(_count_bytes, resolve_sources(cfg.data))) > FEW_BYTES:
            return None
    except UserError:  # the data are not on this machine
        return None
    return _load_dataset(cfg, None)[0]


def _load_dataset(cfg: Any, wait: float | None) -> tuple[Dataset | None, str]:
    """Return (the tokenized dataset of a config, ""), or (None, why it is not there).

    wait: as in `choose_sequence`. With None, raises DataError for samples on this machine that a
    run could not read, those for validation included.
    """
    try:
        tokenizer = _load_tokenizer(cfg)
        if wait is not None:
            stored_dataset = _load_stored(cfg, tokenizer, wait)
            return (
                stored_dataset,
                "" if stored_dataset is not None else "they are not tokenized yet",
            )
    except UserError as error:
        return None, error.faults[0].partition(";")[0]  # without the remedy after the semicolon
    _check_validation(cfg, tokenizer)
    # Suppressed, as the call below raises again. There, files that are not on this machine are a
    # reason for having no dataset, and no error.
    with suppress(UserError):
        stored_dataset = _load_stored(cfg, tokenizer, 0.0)
        if stored_dataset is not None:
            return stored_dataset, ""
    try:
        num_bytes = sum(map(_count_bytes, resolve_sources(cfg.data)))
    except UserError as error:
        return None, error.faults[0].partition(";")[0]
    if num_bytes > MAX_BYTES_READ:
        return None, f"{format_bytes(num_bytes)} that are not tokenized yet"
    return build_dataset(cfg.data, tokenizer, cfg.max_seq_len), ""


def _check_validation(cfg: Any, tokenizer: Tokenizer) -> None:
    """Raise DataError, as a run does, if no sample for validation can be used.

    Reads only local files up to MAX_BYTES_READ.
    """
    source = cfg.validation.source
    if not source or is_hub(source):
        return
    num_bytes = sum(path.stat().st_size for path in find_files(source, "validation.source"))
    if num_bytes <= MAX_BYTES_READ:
        build_validation_dataset(cfg, tokenizer)


def _load_tokenizer(cfg: Any) -> Tokenizer:
    path = cfg.tokenizer.path or (find_checkpoint(cfg.model.path) if cfg.model.path else "")
    return load_tokenizer(Path(path), cfg.tokenizer.chat_template)


def _load_stored(cfg: Any, tokenizer: Tokenizer, wait: float) -> Dataset | None:
    """Return the dataset that a run has left in the cache, or leaves there in `wait` seconds.

    Return None if there is none after that; this process tokenizes nothing.
    """
    builder = DatasetBuilder(cfg.data, tokenizer, cfg.max_seq_len)
    key = builder.find_key()
    if key is None:
        return None
    manifest = get_cache_root(cfg.data.cache_dir) / key / MANIFEST
    deadline = time.monotonic() + wait
    while not manifest.is_file():
        if time.monotonic() >= deadline:
            return None
        time.sleep(POLL_SECONDS)
    return builder.build()


def _count_bytes(source: Any) -> int:
    """Return the bytes of a source's files; of a hub dataset, those that are on this machine.

    source: an entry of `data.sources`. Raises UserError if no file is there.
    """
    if is_hub(source.source):
        return sum(file.identity["size"] for file in open_sources(source))
    return sum(path.stat().st_size for path in find_files(source.source))


class PlannedData:
    """The `data` of a planned recipe, in place of the object that its `setup_data` makes.

    Its datasets have one item, or with packing the items of one pack. Sequences have the planned
    length, and every token counts in the loss. `batches` yields one step, `validation_batches` one
    micro-batch, both on the device.
    """

    # A plan has none of these, but recipes that users have written may read them in any method that
    # is planned.
    tokenizer = chat_template = tokenizer_path = plan = None
    total_steps = 1  # optimizer steps of the run

    def __init__(
        self,
        cfg: FullFinetuneConfig,
        world: World,
        sequence: PlannedSequence,
        traced_micro_batches: int | None = None,
        marks: MicroBatchMarks | None = None,
        mismatched_marks: MicroBatchMarks | None = None,
    ) -> None:
        """Make data for a plan.

        traced_micro_batches: a loop over a step's micro-batches yields so many, though all are
        there; None: it yields all, from plain lists. marks, mismatched_marks: note where in the
        trace each micro-batch, and each mismatched one (of KTO's KL estimate), begins and ends.
        """
        self._cfg = cfg
        self._world = world
        self._sequence = sequence
        self._traced = traced_micro_batches
        self._marks = marks
        self._mismatched_marks = mismatched_marks
        self.dataset = self.validation_dataset = _build_dataset(cfg, sequence)
        self.global_batch_size = cfg.batch_size * cfg.gradient_accumulation_steps * world.data_ranks

    def batches(self, first_step: int = 0) -> Iterator[StepBatches]:
        """Yield one step of this rank, whatever `first_step` is."""
        yield self._make_step(*compute_micro_batches(self._cfg))

    def validation_batches(self) -> Iterator[StepBatches]:
        """Yield one validation batch of this rank."""
        yield self._make_step(self._cfg.validation.batch_size or self._cfg.batch_size, 1)

    def report(self) -> list[str]:
        return []

    def identity(self) -> dict[str, Any]:
        """Return {}: a plan's data have no identity that a checkpoint could be compared by."""
        return {}

    def _make_step(self, batch_size: int, accumulation: int) -> StepBatches:
        # accumulation: micro-batches of a step. batch_size: packs, or items, of a micro-batch.
        ranks = self._world.data_ranks
        packing = self._cfg.data.packing
        slot = np.arange(self.dataset.items if packing else 1)
        with unset_fake_temporarily():  # make_step reads lengths, so its tensors need values
            # Every slot is the same one. data_rank 0 of 1: the slots are this rank's alone.
            step = make_step(
                self.dataset,
                slots=[slot] * (batch_size * accumulation),
                data_rank=0,
                data_ranks=1,
                batch_size=batch_size,
                accumulation=accumulation,
                pad_id=0,
                multiple=compute_padded_multiple(self._cfg),
                pack_length=self._sequence.tokens * self.dataset.group if packing else None,
                mismatched=self._cfg.max_seq_len if self._cfg.compares_mismatched else None,
            )
        # Totals are of all ranks, each of which has as much as this one.
        step = replace(
            step,
            num_label_tokens=ranks * step.num_label_tokens,
            total_tokens=ranks * step.total_tokens,
            padded_tokens=ranks * step.padded_tokens,
            num_items=ranks * step.num_items,
        )
        on_device = _make_fake(step).to(self._world.device)
        if self._traced is None or self._traced >= len(on_device.micro_batches):
            return on_device
        return replace(
            on_device,
            micro_batches=_FirstMicroBatches(on_device.micro_batches, self._traced, self._marks),
            mismatched=_FirstMicroBatches(
                on_device.mismatched, self._traced, self._mismatched_marks
            ),
        )


class _FirstMicroBatches(list[Batch]):
    """A list of all micro-batches of a step, of which iteration yields only the first `count`.

    `len` returns how many it yields. The others are kept alive, as a run has them on the device.
    """

    def __init__(self, batches: list[Batch], count: int, marks: MicroBatchMarks | None) -> None:
        super().__init__(batches)
        self._count = count
        self._marks = marks

    def __iter__(self) -> Iterator[Batch]:
        batches = islice(super().__iter__(), self._count)
        return batches if self._marks is None else self._marks.follow(batches)

    def __len__(self) -> int:
        return min(super().__len__(), self._count)


def _make_fake(step: StepBatches) -> StepBatches:
    """Return a step with fake tensors; outside of a FakeTensorMode the same step."""
    # Private, as torch has no public way to ask for the mode that is entered.
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if mode is None:
        return step

    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return mode.from_tensor(value)
        if isinstance(value, (AttentionInfo, Batch)):
            return replace(value, **{name: convert(entry) for name, entry in vars(value).items()})
        return value

    return replace(
        step,
        micro_batches=[convert(batch) for batch in step.micro_batches],
        mismatched=[convert(batch) for batch in step.mismatched],
    )


def _build_dataset(cfg: FullFinetuneConfig, sequence: PlannedSequence) -> Dataset:
    """Build a dataset with one item, or with packing those of one pack. All token ids are 0."""
    group = 2 if cfg.trains_on_pairs else 1
    # No document is shorter than two tokens.
    num_documents = max(1, min(sequence.documents, sequence.tokens // 2)) if cfg.data.packing else 1
    bounds = np.linspace(0, sequence.tokens, num_documents + 1).astype(np.int64)
    # About equal, and together sequence.tokens; both sequences of a pair are as long.
    lengths = np.repeat(np.diff(bounds), group)
    # A dataset keeps one id more than a sequence has tokens, its last target; a scored sequence has
    # no targets.
    extra_tokens = 0 if cfg.scores_sequences else 1
    offsets = np.concatenate([[0], np.cumsum(lengths + extra_tokens)]).astype(np.int64)
    report: Any = None  # sums up what was read, for the log; here nothing was
    ids = np.zeros(int(offsets[-1]), dtype=np.int32)
    label_mask = np.ones(len(ids), dtype=np.uint8)  # 1: the loss counts the token
    return adapt_to_recipe(
        cfg,
        Dataset(
            ids, offsets=offsets, trained=label_mask, report=report, settings="planned", group=group
        ),
    )


def list_batch_tensors(batches: StepBatches) -> list[torch.Tensor]:
    """Return the tensors of a step's micro-batches, with those in their `attention`."""
    all_batches = [*batches.micro_batches, *batches.mismatched]
    field_dicts = [vars(batch) for batch in all_batches]
    field_dicts += [vars(batch.attention) for batch in all_batches if batch.attention is not None]
    return [
        value
        for fields in field_dicts
        for value in fields.values()
        if isinstance(value, torch.Tensor)
    ]
