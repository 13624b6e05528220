"""Batches as a step takes them: right-padded by length, with token counts known before anything is
computed.

b sequences, s tokens. One holds one document, or several when packed; padding is known by length
and never by id: a pad id may be a real token. Items of two sequences (pairs) stay in one
micro-batch, each a separate document.
"""

import gc
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from recipe_lib.data.data_plan import DataPlan, pack
from recipe_lib.data.dataset import Dataset, TokenSequence
from recipe_lib.errors import SetupError
from recipe_lib.ops.attention import (
    AttentionInfo,
    compute_document_positions,
    has_varlen,
    make_attention_info,
)
from recipe_lib.ops.chunked_heads import IGNORED
from recipe_lib.ops.device import holds_values
from recipe_lib.ops.real_tokens import RealTokens

Slots = Sequence[np.ndarray] | np.ndarray


@dataclass(frozen=True)
class _Tensors:
    """What holds tensors, as one thing that can be moved."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return the same on another device."""
        return _change_tensors(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return the same in host memory that a device can copy from by itself."""
        return _change_tensors(self, Tensor.pin_memory)


def _change_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a value with its tensors changed, also those that its lists and parts hold."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list):
        return [_change_tensors(item, change) for item in value]
    if isinstance(value, _Tensors | AttentionInfo):
        return replace(
            value, **{name: _change_tensors(inner, change) for name, inner in vars(value).items()}
        )
    return value


@dataclass(frozen=True)
class Batch(_Tensors):
    """tokens, labels: int64 `[b, s]`; labels[., i] is the target of tokens[., i], -100 where there
    is none.

    positions int64 `[b, s]`: of packed sequences; None for right-padded ones of one document each.
    attention: which tokens are no padding, and of packed sequences the documents; for others
    causality is enough. segments int64 `[b, s]`: for items of several sequences, which of the
    micro-batch's `num_segments` a token is of (of pair i the chosen is 2 i, the rejected 2 i + 1),
    -1 for padding; else None. values: of labeled items, fp64 `[items of the micro-batch]`; they
    have segments too. sequences: for each row the numbers of the dataset's sequences in it, in
    their order.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor | None = None
    attention: AttentionInfo | None = None
    sequence_ids: torch.Tensor | None = None
    num_sequences: int = 0
    targets: torch.Tensor | None = None
    sequences: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class StepBatches(_Tensors):
    """One step's micro-batches of this rank; the counts are those of all ranks together.

    trained_tokens: targets that the loss counts. total_tokens: tokens of sequences. padded_tokens:
    also padding. items: sequences, or pairs. step: optimizer steps of the run before this one;
    None: of no run. mismatched: for each micro-batch its prompts with other samples' answers, where
    those were asked for; the counts leave them out.
    """

    micro_batches: list[Batch]
    num_label_tokens: int
    total_tokens: int
    padded_tokens: int
    num_items: int = 0
    step: int | None = None
    mismatched: list[Batch] = field(default_factory=list)


def make_step(
    dataset: Dataset,
    slots: Slots,
    data_rank: int,
    data_ranks: int,
    batch_size: int,
    accumulation: int,
    pad_id: int | None = None,
    multiple: int = 1,
    pack_length: int | None = None,
    mismatched: int | None = None,
) -> StepBatches:
    """This rank's part of a step whose slots, over all ranks, are `slots` (`DataPlan.slots`, or one
    item number each).

    Micro-batch m of rank r takes `batch_size` slots from (m * data_ranks + r) * batch_size on, so
    that the items of a step do not depend on how they are divided. Needs no communication.

    multiple: sequences are padded to a multiple of so many tokens. pack_length: they are packs,
    padded to so many tokens before that; None: to the longest slot of their micro-batch, packs if
    any slot of the step holds several items. mismatched: also each prompt with the answer of the
    item before it in the step (of the first, the last one's), at most so many tokens of the two;
    whatever the division of the step, these are the same.
    """
    if len(slots) != batch_size * accumulation * data_ranks:
        raise ValueError(
            f"{len(slots)} slots for {data_ranks} ranks x {accumulation} micro-batches x"
            f" {batch_size}"
        )
    answer_of = None if mismatched is None else _pair_with_previous(slots)
    step = _StepSlots(
        dataset, slots, batch_size, pad_id, multiple, pack_length, mismatched, answer_of
    )
    return step.batches(range(data_rank, data_ranks * accumulation, data_ranks))


def make_validation_steps(
    dataset: Dataset,
    data_rank: int,
    data_ranks: int,
    batch_size: int,
    pad_id: int | None = None,
    multiple: int = 1,
    packing_capacity: int | None = None,
    mismatched: int | None = None,
) -> Iterator[StepBatches]:
    """All items exactly once, one micro-batch a step: in file order, or with `packing_capacity` in
    packs of it.

    A rank that runs out of items gets sequences without labels, so that all ranks run the same
    number of batches. mismatched: as for `make_step`, with the item before in the file.
    """
    slots = [np.array([item]) for item in range(len(dataset.item_lengths))]
    pack_length = None
    if packing_capacity:
        packs = pack(dataset.item_lengths, packing_capacity * dataset.group)
        slots = [packs[number] for number in range(len(packs))]
        pack_length = max(int(dataset.item_lengths[slot].sum()) for slot in slots)
    batch_size = min(batch_size, max(1, -(-len(slots) // data_ranks)))  # no more than there are
    together = batch_size * data_ranks
    nothing = np.empty(0, dtype=np.int64)
    answer_of = None if mismatched is None else _pair_with_previous(range(dataset.items))
    for start in range(0, len(slots), together):
        part = slots[start : start + together]
        part += [nothing] * (together - len(part))
        step = _StepSlots(
            dataset, part, batch_size, pad_id, multiple, pack_length, mismatched, answer_of
        )
        yield step.batches([data_rank])


def _pair_with_previous(order: Iterable[Any]) -> dict[int, int]:
    """Of items, or slots of them, each one's and the one before it, of the first the last."""
    circle = np.concatenate([np.atleast_1d(slot) for slot in order]).tolist()
    return dict(zip(circle, circle[-1:] + circle[:-1], strict=True))


class _StepSlots:
    """The slots of a step, of all ranks; micro-batch n takes `batch_size` of them from n *
    batch_size on.
    """

    def __init__(
        self,
        dataset: Dataset,
        slots: Slots,
        batch_size: int,
        pad_id: int | None,
        multiple: int,
        pack_length: int | None,
        most: int | None,
        answer_of: Mapping[int, int] | None,
    ) -> None:
        """answer_of: of mismatched sequences the prompt's item -> the answer's. most: tokens of
        one.
        """
        self.dataset, self.batch_size = dataset, batch_size
        self.slots = [np.atleast_1d(slot) for slot in slots]
        self.pad_id, self.multiple, self.pack_length = pad_id or 0, multiple, pack_length
        self.packed = pack_length is not None or any(len(slot) > 1 for slot in self.slots)
        self.answer_of = answer_of or {}
        self.most = most or 0  # tokens of a mismatched sequence

    def batches(self, own: Sequence[int]) -> StepBatches:
        """own: numbers of this rank's micro-batches."""
        rows = [self.sequences_of(number) for number in range(len(self.slots) // self.batch_size)]
        numbers = np.array(
            [number for micro_batch in rows for row in micro_batch for number in row],
            dtype=np.int64,
        )
        return StepBatches(
            micro_batches=[self.batch(rows[number]) for number in own],
            num_label_tokens=int(self.dataset.trained_counts[numbers].sum()),
            total_tokens=int(self.dataset.lengths[numbers].sum()),
            padded_tokens=sum(self.width(micro_batch) * len(micro_batch) for micro_batch in rows),
            num_items=len(numbers) // self.dataset.group,
            mismatched=[self.mismatched(rows[number]) for number in own] if self.answer_of else [],
        )

    def sequences_of(self, number: int) -> list[list[int]]:
        """For each row of a micro-batch the dataset's sequences in it: all of a slot's, or one of
        them each.
        """
        group = self.dataset.group
        slots = self.slots[number * self.batch_size : (number + 1) * self.batch_size]
        held = [[int(item) * group + at for item in slot for at in range(group)] for slot in slots]
        if self.packed:
            return held
        return [[row] for rows in held for row in rows] + [
            [] for rows in held for _ in range(group - len(rows))
        ]

    def width(self, rows: list[list[int]]) -> int:
        """Tokens of a micro-batch's rows, padding included."""
        longest = max(
            [
                1,
                self.pack_length or 0,
                *(int(self.dataset.lengths[row].sum()) for row in rows if row),
            ]
        )
        return -(-longest // self.multiple) * self.multiple

    def batch(self, rows: list[list[int]]) -> Batch:
        """The dataset's sequences, one after the other in each row of the batch."""
        batch = self._filled(
            [[self.dataset[number] for number in row] for row in rows], self.width(rows)
        )
        batch = replace(batch, sequences=tuple(map(tuple, rows)))
        if not self.dataset.labeled:
            return batch
        items = [number // self.dataset.group for row in rows for number in row][
            :: self.dataset.group
        ]
        return replace(batch, targets=torch.from_numpy(self.dataset.values[items]))

    def mismatched(self, rows: list[list[int]]) -> Batch:
        """The prompts of the same sequences, each with the answer of another one."""
        changed = [[self._mismatched(number) for number in row] for row in rows]
        width = max([1, *(sum(len(sequence.tokens) for sequence in row) for row in changed)])
        return self._filled(changed, -(-width // self.multiple) * self.multiple)

    def _mismatched(self, number: int) -> TokenSequence:
        """A prompt is what stands before the first label, an answer what comes from there on."""
        own, other = self.dataset[number], self.dataset[self.answer_of[number]]
        start, begin = (int(np.argmax(sequence.labels != IGNORED)) for sequence in (own, other))
        tokens = np.concatenate([own.tokens[: start + 1], other.tokens[begin + 1 :]])
        labels = np.concatenate([np.full(start, IGNORED, dtype=np.int32), other.labels[begin:]])
        return TokenSequence(tokens[: self.most], labels[: self.most])

    def _filled(self, rows: list[list[TokenSequence]], width: int) -> Batch:
        tokens = np.full((len(rows), width), self.pad_id, dtype=np.int64)
        labels = np.full((len(rows), width), IGNORED, dtype=np.int64)
        segments = np.full((len(rows), width), -1, dtype=np.int64)
        lengths = [[len(sequence.tokens) for sequence in row] for row in rows]
        num_segments = 0
        for at, row in enumerate(rows):
            start = 0
            for sequence in row:
                place = at, slice(start, start + len(sequence.tokens))
                tokens[place] = sequence.tokens
                labels[place] = sequence.labels
                segments[place] = num_segments
                start += len(sequence.tokens)
                num_segments += 1
        info = AttentionInfo(real=RealTokens.from_lengths(list(map(sum, lengths)), width))
        batch = Batch(torch.from_numpy(tokens), torch.from_numpy(labels), attention=info)
        if self.packed:
            positions, info = (
                compute_document_positions(lengths, width),
                make_attention_info(lengths, width),
            )
            batch = replace(batch, positions=positions, attention=info)
        if self.dataset.group > 1 or self.dataset.labeled:
            batch = replace(
                batch, sequence_ids=torch.from_numpy(segments), num_sequences=num_segments
            )
        return batch


def make_training_steps(
    dataset: Dataset,
    plan: DataPlan,
    *,
    first_step: int,
    last_step: int,
    data_rank: int,
    data_ranks: int,
    batch_size: int,
    accumulation: int,
    pad_id: int | None = None,
    multiple: int = 1,
    mismatched: int | None = None,
    workers: int = 0,
    device: torch.device | str = "cpu",
) -> Iterator[StepBatches]:
    """This rank's part of the steps first_step .. last_step - 1 of the run, on `device`.

    Starting at any step costs the same, and a step is the same wherever the start was and for any
    number of `workers`: processes that make batches ahead, two steps each; 0: each is made when it
    is asked for. See `make_step` for the rest. To an accelerator, batches are copied out of pinned
    memory without waiting.
    """
    device = torch.device(device)
    make = partial(
        make_step,
        dataset,
        data_rank=data_rank,
        data_ranks=data_ranks,
        batch_size=batch_size,
        accumulation=accumulation,
        pad_id=pad_id,
        multiple=multiple,
        mismatched=mismatched,
    )
    # Workers are sent the slots of a step, and need no plan.
    planned = ((plan.slots(step), plan.pack_length(step)) for step in range(first_step, last_step))
    maker = _StepMaker(make)
    made: Iterable[StepBatches] = map(maker.__getitem__, planned)
    if workers:
        made = DataLoader(
            maker,
            sampler=planned,
            batch_size=None,
            num_workers=workers,
            worker_init_fn=_begin_worker,
            multiprocessing_context="fork",  # forks share the dataset's pages
            # The loader would draw a seed from the global generator, and what a model draws would
            # depend on `workers`.
            generator=torch.Generator(),
        )
    for batches in made:
        if device.type != "cpu":
            batches = batches.pin_memory().to(device, non_blocking=True)
        yield batches


class _StepMaker(TorchDataset):
    """Makes the batches of a step, as a DataLoader asks for them."""

    def __init__(self, make: Callable[..., StepBatches]) -> None:
        self._make = make

    def __getitem__(self, planned: tuple[list[np.ndarray], int | None]) -> StepBatches:
        slots, pack_length = planned
        return self._make(slots, pack_length=pack_length)


def _begin_worker(_worker: int) -> None:
    """Leave signals to the rank, and what it has left for its garbage collector.

    A launcher stops a run by a signal to the whole process group; the rank then saves, and ends its
    workers.
    """
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


# The check that documents in one sequence do not see each other, made with the model, backend and
# dtype that will train.

# Two sequences of two documents each, not cut at the same place.
_LENGTHS = ((24, 40), (40, 24))
_WIDTH = 64
# Kernels add up in another order for documents by themselves; what is checked moves logits by far
# more.
_LARGEST_DIFFERENCE = {torch.bfloat16: 0.1, torch.float16: 0.05}
# A neighbor's tokens take rows of experts, and kernels round another number of rows otherwise, if
# by little.
_OF_EXPERTS = 1000  # times the precision of the type


class Evaluator(Protocol):
    """What runs a model that is divided into pipeline stages."""

    def evaluate(self, batches: Sequence[Any], result_of: Callable[[int, Any], Any]) -> list[Any]:
        """What `result_of` makes of each micro-batch on the last stage's rank, None on the
        others.
        """


@torch.no_grad()
def check_packing_isolation(
    model: nn.Module,
    spec: Any,
    device: torch.device | str,
    pipeline: Evaluator | None = None,
    multiple: int = 1,
) -> None:
    """Packs documents into sequences, changes some of them, and looks whether the logits of the
    others move.

    model: `model(tokens [b, s], positions [b, s], attention)` gives logits `[b, s, v]`; with its
    weights, sharded or not, compiled or not. spec: its shape. pipeline: what runs its stages, if it
    has any. multiple: of so many tokens its rows are. A collective for a sharded model: every rank
    calls it, and all of them agree. It costs four passes over 128 tokens. The model is left as it
    was. Where tensors have no values, nothing is checked.

    Raises SetupError if a document's logits depend on another one, or differ from those of the
    document alone.
    """
    device = torch.device(device)
    if not holds_values(device):
        return
    training = model.training
    model.eval()  # dropout would move the logits
    try:
        leak, difference, has_experts, dtype = _measure_leaks(
            model, spec.vocab_size, device, pipeline, multiple
        )
    finally:
        model.train(training)
        if any(hasattr(module.forward, "_torchdynamo_orig_callable") for module in model.modules()):
            # Else training is compiled for lengths of any number, because of these here
            torch.compiler.reset()
    # How documents are kept apart, as `prepare_attention` decides it.
    capped = getattr(spec, "attention_softcap", None) is not None
    varlen = not capped and has_varlen(device, dtype, getattr(spec, "head_width", 0))
    backend = "the varlen attention kernel" if varlen else "attention masks"
    where = f"on {device.type} in {str(dtype).removeprefix('torch.')} ({backend})"
    remedy = "set data.packing to false, and report it with your versions of torch and driver"
    largest = _LARGEST_DIFFERENCE.get(dtype, 0.01)
    precision = torch.finfo(dtype).eps
    if leak > (min(_OF_EXPERTS * precision, largest) if has_experts else precision / 8):
        limit = f"at most {min(_OF_EXPERTS * precision, largest):.2g}" if has_experts else "0"
        raise SetupError(
            f"data.packing: {where} a document's logits moved by {leak:.2g} of their size when its"
            f" neighbor in the sequence was changed, expected {limit}: packed documents see each"
            f" other; {remedy}"
        )
    if difference > largest:
        raise SetupError(
            f"data.packing: {where} the logits of packed documents differ by {difference:.2%} from"
            f" those of each document alone, expected at most {largest:.0%}; {remedy}"
        )


def _measure_leaks(
    model: nn.Module,
    vocab_size: int,
    device: torch.device,
    pipeline: Evaluator | None,
    multiple: int = 1,
) -> tuple[float, float, bool, torch.dtype]:
    """How far logits move with a neighbor, how far they are from those of documents alone (each
    relative, the largest of all ranks), whether any rank's layers have experts, and the logits'
    dtype.
    """
    first = torch.zeros(len(_LENGTHS), _WIDTH, dtype=torch.bool)
    for sequence, (length, _) in enumerate(_LENGTHS):
        first[sequence, :length] = True
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, first.shape, generator=generator)
    other = (tokens + 1) % vocab_size
    documents = [
        part
        for sequence, parts in zip(tokens, _LENGTHS, strict=True)
        for part in sequence.split(parts)
    ]
    sequences = nn.utils.rnn.pad_sequence(list(documents), batch_first=True)
    packed = [tokens, torch.where(first, other, tokens), torch.where(first, tokens, other)]
    logits, *moved = [_compute_logits(model, part, device, pipeline, multiple) for part in packed]
    padded = _compute_logits(model, sequences, device, pipeline, multiple, packed=False)
    measured, dtype = torch.zeros(3, device=device), next(model.parameters()).dtype
    if (
        logits is not None and padded is not None
    ):  # None: another rank has the last stage of a pipeline
        changes = zip(moved, (first, ~first), strict=True)
        leaks = [_compute_distance(found[~changed], logits[~changed]) for found, changed in changes]
        alone = torch.cat([padded[at, : len(document)] for at, document in enumerate(documents)])
        measured[0], measured[1] = (
            torch.stack(leaks).max(),
            _compute_distance(logits.flatten(0, 1), alone),
        )
        dtype = logits.dtype
    measured[2] = float(any(".experts." in name for name, _ in model.named_parameters()))
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(measured, op=dist.ReduceOp.MAX)
    leak, difference, has_experts = measured.tolist()
    return leak, difference, bool(has_experts), dtype


def _compute_logits(
    model: nn.Module,
    tokens: Tensor,
    device: torch.device,
    pipeline: Evaluator | None,
    multiple: int,
    *,
    packed: bool = True,
) -> Any:
    """Logits `[b, s, v]` of tokens `[b, s]`; not packed: of one document a sequence, padded after
    it.
    """
    width = tokens.shape[1]
    tokens = nn.functional.pad(tokens, (0, -width % multiple))
    batch = Batch(tokens, tokens)
    if packed:
        positions = compute_document_positions(_LENGTHS, tokens.shape[1])
        batch = replace(
            batch, positions=positions, attention=make_attention_info(_LENGTHS, tokens.shape[1])
        )
    batch = batch.to(device)
    if pipeline is not None:
        logits = pipeline.evaluate([batch], lambda number, part: model(part.tokens))[0]
    else:
        logits = (
            model(batch.tokens, batch.positions, batch.attention) if packed else model(batch.tokens)
        )
    return None if logits is None else logits[:, :width]


def _compute_distance(found: Tensor, expected: Tensor) -> Tensor:
    """The norm of the difference over the norm of what was expected, fp32 `[]`."""
    expected = expected.float()
    return (found.float() - expected).norm() / expected.norm().clamp(
        min=torch.finfo(torch.float32).tiny
    )
