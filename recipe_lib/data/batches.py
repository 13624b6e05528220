"""Make the batches that a step takes, with token counts known before anything is computed.

A run calls `make_training_steps` and `make_validation_steps`, which yield a rank's micro-batches,
and `check_packing_isolation` once before packed training. A micro-batch has b rows of s tokens. A
row holds one sequence, or several when packed. An item is a sequence, or a pair of two (chosen and
rejected), which stays in one micro-batch. A slot is an item, or a pack of items.
"""

import gc
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
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
    RealTokens,
    compute_document_positions,
    has_varlen,
    make_attention_info,
)
from recipe_lib.ops.chunked_heads import IGNORED
from recipe_lib.ops.device import holds_values

# For each slot the int64 indices of its items; or int64 `[slots]`, one item for each slot
Slots = Sequence[np.ndarray] | np.ndarray


@dataclass(frozen=True)
class _Tensors:
    """A dataclass whose tensors move together."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        return _change_tensors(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return a copy in page-locked host memory, which a device can copy from by itself."""
        return _change_tensors(self, Tensor.pin_memory)


def _change_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of a value with its tensors changed, also those in its lists and fields."""
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
    """One micro-batch of a rank: b rows of s tokens, right-padded."""

    tokens: torch.Tensor  # int64 `[b, s]`
    # int64 `[b, s]`; labels[:, i] is the target of tokens[:, i], -100 where the loss counts none
    labels: torch.Tensor
    # int64 `[b, s]`, position of each token in its sequence, for packed rows; None: not packed
    positions: torch.Tensor | None = None
    # Which tokens are no padding and, for packed rows, which tokens may attend to each other
    attention: AttentionInfo | None = None
    # int64 `[b, s]`, for each token the index of its sequence in the micro-batch, -1 for padding.
    # Pair i has its chosen answer at 2i, its rejected one at 2i + 1. None where items are single
    # sequences without a label of their own
    sequence_ids: torch.Tensor | None = None
    num_sequences: int = 0  # number of different ids in `sequence_ids`; 0 if that is None
    # fp64 `[items]`: KTO's 1 or 0, the index of a class, a pair's margin; None: not trained on
    targets: torch.Tensor | None = None
    # For each row the indices of its sequences in the dataset, in their order
    sequences: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class StepBatches(_Tensors):
    """One step's micro-batches of this rank; the counts are over the step on all ranks."""

    micro_batches: list[Batch]  # in the order in which they are computed
    num_label_tokens: int  # targets that the loss counts
    total_tokens: int  # tokens of sequences, without padding
    padded_tokens: int  # tokens of rows, padding included
    num_items: int = 0  # sequences, or pairs
    step: int | None = None  # index of the step in the run, from 0; None: not set, as in validation
    # For each micro-batch one of its prompts with other items' answers, for KTO's KL estimate; not
    # in the counts. Empty if they were not asked for
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
    """Return this rank's part of a step, given the slots of all ranks.

    slots: those of the step, in order, from `DataPlan.list_slots`. Micro-batch m of rank r takes
    `batch_size` slots from (m * data_ranks + r) * batch_size on, so that the items of a step do not
    depend on how they are divided. Ranks do not communicate. Without packs the longest come first:
    rows of a micro-batch are about as long, those of all ranks too, and little is padded.

    data_rank, data_ranks: this rank of data parallelism, and how many there are. batch_size: slots
    of a micro-batch. accumulation: micro-batches of a rank. pad_id: token of the padding; None: 0.
    multiple: pad rows to a multiple of so many tokens. pack_length: make one row of each slot, and
    pad rows to so many tokens at least. None: pad rows to the longest of their micro-batch, and
    make one row of each slot only if any slot of the step holds several items.

    mismatched: also make each prompt with the answer of the item before it in the step (the first
    with that of the last), cut to so many tokens; None: make none. They do not depend on how the
    step is divided either.

    Raises ValueError if the number of slots is not batch_size x accumulation x data_ranks.
    """
    if len(slots) != batch_size * accumulation * data_ranks:
        raise ValueError(
            f"{len(slots)} slots for {data_ranks} ranks x {accumulation} micro-batches x"
            f" {batch_size}"
        )
    ordered_slots = [np.atleast_1d(slot) for slot in slots]
    if pack_length is None:
        ordered_slots.sort(key=lambda items: -dataset.item_lengths[items].sum())
    return _StepBuilder(
        dataset=dataset,
        slots=ordered_slots,
        batch_size=batch_size,
        pad_id=pad_id or 0,
        multiple=multiple,
        pack_length=pack_length,
        max_mismatched=mismatched,
        previous_item={} if mismatched is None else _pair_with_previous(slots),
    ).make_batches(range(data_rank, data_ranks * accumulation, data_ranks))


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
    """Yield all items exactly once, one micro-batch a step.

    They come in file order, or with `packing_capacity` in packs of so many tokens (for pairs, so
    many for each of the two). A rank that runs out of items gets rows of padding, so that all ranks
    run the same number of batches. mismatched: as for `make_step`, but with the item before in the
    file. The other arguments are as for `make_step`.
    """
    slots = [np.array([item]) for item in range(len(dataset.item_lengths))]
    pack_length = None
    if packing_capacity:
        # `group`: sequences of an item, 1 or 2
        packs = pack(dataset.item_lengths, packing_capacity * dataset.group)
        slots = [packs[number] for number in range(len(packs))]
        # Tokens of the fullest pack
        pack_length = max(int(dataset.item_lengths[slot].sum()) for slot in slots)
    batch_size = min(batch_size, max(1, -(-len(slots) // data_ranks)))  # no more than there are
    slots_per_step = batch_size * data_ranks
    empty_slot = np.empty(0, dtype=np.int64)
    # Over the whole file, so that the exchanged answers do not depend on where steps begin
    previous_item = {} if mismatched is None else _pair_with_previous(range(dataset.items))
    for start in range(0, len(slots), slots_per_step):
        step_slots = slots[start : start + slots_per_step]
        # Every rank runs every step: a collective in the forward would wait for a missing one.
        step_slots += [empty_slot] * (slots_per_step - len(step_slots))
        yield _StepBuilder(
            dataset=dataset,
            slots=step_slots,
            batch_size=batch_size,
            pad_id=pad_id or 0,
            multiple=multiple,
            pack_length=pack_length,
            max_mismatched=mismatched,
            previous_item=previous_item,
        ).make_batches([data_rank])


def _pair_with_previous(order: Iterable[Any]) -> dict[int, int]:
    """Map each item to the one before it, the first to the last.

    order: items, or their slots, in order.
    """
    items = np.concatenate([np.atleast_1d(slot) for slot in order]).tolist()
    return dict(zip(items, items[-1:] + items[:-1], strict=True))


@dataclass(frozen=True)
class _StepBuilder:
    """The slots of a step over all ranks, and what is needed to make batches of them.

    Micro-batch n, counted over all ranks, takes `batch_size` slots from n * batch_size on.
    `dataset.group` is the number of sequences of an item: 2 for pairs, else 1.
    """

    dataset: Dataset
    slots: Sequence[np.ndarray]  # for each slot the indices of its items, int64
    batch_size: int  # slots of a micro-batch
    pad_id: int  # token of the padding
    multiple: int  # rows are padded to a multiple of so many tokens
    # Each slot is one row, of so many tokens at least; None: only if a slot has several items
    pack_length: int | None
    # Most tokens of a prompt with another item's answer; None: no such prompts are made
    max_mismatched: int | None
    # For mismatched sequences: the prompt's item -> the answer's item; empty: none are made
    previous_item: Mapping[int, int]

    @property
    def is_packed(self) -> bool:
        """Return True if a row holds all sequences of its slot."""
        return self.pack_length is not None or any(len(slot) > 1 for slot in self.slots)

    def make_batches(self, micro_batches: Sequence[int]) -> StepBatches:
        """Return the micro-batches with these indices, and the counts over all ranks."""
        # The rows of all ranks are known from lengths alone, so counts need no communication.
        rows = [self.list_rows(number) for number in range(len(self.slots) // self.batch_size)]
        rows_of_step = chain.from_iterable(rows)
        sequences = np.fromiter(chain.from_iterable(rows_of_step), dtype=np.int64)
        own_rows = [rows[number] for number in micro_batches]
        return StepBatches(
            micro_batches=[self.make_batch(batch_rows) for batch_rows in own_rows],
            num_label_tokens=int(self.dataset.trained_counts[sequences].sum()),
            total_tokens=int(self.dataset.lengths[sequences].sum()),
            padded_tokens=sum(
                self.compute_width(batch_rows) * len(batch_rows) for batch_rows in rows
            ),
            num_items=len(sequences) // self.dataset.group,
            mismatched=[
                self.make_mismatched(batch_rows) for batch_rows in own_rows if self.previous_item
            ],
        )

    def list_rows(self, number: int) -> list[list[int]]:
        """Return for each row of a micro-batch the indices of its sequences in the dataset.

        number: index of the micro-batch over all ranks. A packed row has all of a slot's sequences,
        any other row one.
        """
        group = self.dataset.group
        slots = self.slots[number * self.batch_size : (number + 1) * self.batch_size]
        is_packed = self.is_packed
        rows = list[list[int]]()
        for slot in slots:
            # Item i is the sequences i * group .. i * group + group - 1.
            sequences = np.add.outer(slot * group, np.arange(group)).ravel().tolist()
            if is_packed:
                rows.append(sequences)
            else:
                # A slot without an item becomes rows of padding: all ranks have equally many rows.
                rows += [[sequence] for sequence in sequences] or [[] for _ in range(group)]
        return rows

    def compute_width(self, rows: list[list[int]]) -> int:
        """Return the number of tokens of each row of a micro-batch, padding included."""
        lengths = [int(self.dataset.lengths[row].sum()) for row in rows if row]
        longest = max([1, self.pack_length or 0, *lengths])  # 1: for rows of padding alone
        return -(-longest // self.multiple) * self.multiple

    def make_batch(self, rows: list[list[int]]) -> Batch:
        """Return the batch with these sequences of the dataset in its rows.

        rows: for each row the indices of its sequences.
        """
        sequences = [[self.dataset[number] for number in row] for row in rows]
        filled_batch = self._fill_batch(sequences, self.compute_width(rows))
        batch = replace(filled_batch, sequences=tuple(map(tuple, rows)))
        if not self.dataset.labeled:
            return batch
        group = self.dataset.group
        # The first of each item's sequences stands for the item.
        items = [number // group for number in chain.from_iterable(rows)][::group]
        return replace(batch, targets=torch.from_numpy(self.dataset.values[items]))

    def make_mismatched(self, rows: list[list[int]]) -> Batch:
        """Return a batch of these sequences' prompts, each with the previous item's answer."""
        sequences = [[self._exchange_answer(number) for number in row] for row in rows]
        width = max([1, *(sum(len(sequence.tokens) for sequence in row) for row in sequences)])
        return self._fill_batch(sequences, -(-width // self.multiple) * self.multiple)

    def _exchange_answer(self, number: int) -> TokenSequence:
        """Return a sequence's prompt with the answer of the item before it.

        number: index of the sequence, which is that of its item, since items are single sequences
        here. The answer begins with the first token that is a label.
        """
        prompt_sequence = self.dataset[number]
        answer_sequence = self.dataset[self.previous_item[number]]
        # The first label stands at the prompt's last token, which predicts it.
        prompt_end = int(np.argmax(prompt_sequence.labels != IGNORED))
        answer_start = int(np.argmax(answer_sequence.labels != IGNORED))
        tokens = np.concatenate(
            [prompt_sequence.tokens[: prompt_end + 1], answer_sequence.tokens[answer_start + 1 :]]
        )
        prompt_labels = np.full(prompt_end, IGNORED, dtype=np.int32)
        labels = np.concatenate([prompt_labels, answer_sequence.labels[answer_start:]])
        return TokenSequence(tokens[: self.max_mismatched], labels[: self.max_mismatched])

    def _fill_batch(self, rows: list[list[TokenSequence]], width: int) -> Batch:
        """Return a batch of these rows, padded on the right to `width` tokens."""
        tokens = np.full((len(rows), width), self.pad_id, dtype=np.int64)
        labels = np.full((len(rows), width), IGNORED, dtype=np.int64)
        sequence_ids = np.full((len(rows), width), -1, dtype=np.int64)
        lengths = [[len(sequence.tokens) for sequence in row] for row in rows]
        num_sequences = 0
        for row_index, row in enumerate(rows):
            start = 0
            for sequence in row:
                end = start + len(sequence.tokens)
                tokens[row_index, start:end] = sequence.tokens
                labels[row_index, start:end] = sequence.labels
                sequence_ids[row_index, start:end] = num_sequences
                start = end
                num_sequences += 1
        # Padding is known by lengths, not by the pad id, which real tokens may have too.
        real = RealTokens.from_lengths([sum(row) for row in lengths], width)
        batch = Batch(
            torch.from_numpy(tokens), torch.from_numpy(labels), attention=AttentionInfo(real=real)
        )
        if self.is_packed:
            batch = replace(
                batch,
                positions=compute_document_positions(lengths, width),
                attention=make_attention_info(lengths, width),
            )
        if self.dataset.group > 1 or self.dataset.labeled:
            batch = replace(
                batch, sequence_ids=torch.from_numpy(sequence_ids), num_sequences=num_sequences
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
    """Yield this rank's part of the steps first_step .. last_step - 1 of the run, on `device`.

    workers: number of processes that make batches ahead, two steps each; 0: make a step when it is
    asked for. A step is the same for any number of workers and wherever the run began. Starting
    at a late step costs no more. The other arguments are as for `make_step`.
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
    # (slots, pack_length) of each step, from the DataLoader's sampler, so that workers need no plan
    planned = (
        (plan.list_slots(step), plan.get_pack_length(step)) for step in range(first_step, last_step)
    )
    step_maker = _StepMaker(make)
    steps: Iterable[StepBatches] = map(step_maker.__getitem__, planned)
    if workers:
        steps = DataLoader(
            step_maker,
            sampler=planned,
            batch_size=None,
            num_workers=workers,
            worker_init_fn=_begin_worker,
            multiprocessing_context="fork",  # forks share the dataset's pages
            # Without it the loader draws a seed from the global generator, and what a model draws
            # later would depend on `workers`.
            generator=torch.Generator(),
        )
    for batches in steps:
        if device.type != "cpu":
            # From page-locked memory the copy runs while the device computes the step before.
            batches = batches.pin_memory().to(device, non_blocking=True)
        yield batches


@dataclass
class _StepMaker(TorchDataset):
    """A map from the (slots, pack_length) of a step to its batches, indexed by a DataLoader."""

    make: Callable[..., StepBatches]  # `make_step`, with all arguments but the step's own bound

    def __getitem__(self, step_plan: tuple[list[np.ndarray], int | None]) -> StepBatches:
        slots, pack_length = step_plan
        return self.make(slots, pack_length=pack_length)


def _begin_worker(_worker: int) -> None:
    """Prepare a loader's process: it ignores the launcher's signals.

    A launcher stops a run by a signal to the whole process group. The rank then saves, and ends its
    workers itself.
    """
    gc.freeze()  # the fork must not finalize objects that belong to the rank
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


# The check of packing: two rows of two documents each, which begin at different positions.
_LENGTHS = ((24, 40), (40, 24))  # tokens
_WIDTH = 64  # tokens of a row
# dtype -> largest relative difference of a packed document's logits from those of the document
# alone, for which kernels add up in another order; 0.01 for other types. Documents that see each
# other differ by far more.
_MAX_DIFFERENCE = {torch.bfloat16: 0.1, torch.float16: 0.05}
# Largest change of a document's logits in a model with experts when its neighbor changes. Then the
# rows of an expert's matmul change in number, and a kernel rounds slightly differently.
_EXPERT_TOLERANCE = 1000  # times the precision of the type


class Evaluator(Protocol):
    """A runner of a model that is divided into pipeline stages."""

    def evaluate(self, batches: Sequence[Any], compute: Callable[[int, Any], Any]) -> list[Any]:
        """Return `compute(index, micro_batch)` of each; None for each without the last stage.

        compute: called while a call of the model runs its last stage.
        """


@torch.no_grad()
def check_packing_isolation(
    model: nn.Module,
    spec: Any,
    device: torch.device | str,
    pipeline: Evaluator | None = None,
    multiple: int = 1,
) -> None:
    """Check that packed documents do not see each other in the model that will be trained.

    Documents are packed into rows and some of them changed: the logits of the others must not move.
    It costs three forwards of 128 tokens and one of the four documents alone, and leaves the model
    as it was. It is collective: all ranks call it, and get the same result. On a device whose
    tensors have no values (as in a memory plan) nothing is checked.

    model: `model(tokens [b, s], positions [b, s], attention)` returns logits `[b, s, v]`; its
    weights are loaded. spec: the model's shape (`vocab_size`, and if it has them `head_width`,
    `attention_softcap`). pipeline: runs a model that is divided into pipeline stages; None: it is
    not. multiple: rows must be a multiple of so many tokens.

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
            model, spec.vocab_size, device=device, pipeline=pipeline, multiple=multiple
        )
    finally:
        model.train(training)
        if any(hasattr(module.forward, "_torchdynamo_orig_callable") for module in model.modules()):
            # Without it torch.compile has seen the lengths of the check, and would compile training
            # for dynamic lengths.
            torch.compiler.reset()
    # The code that keeps documents apart, as `ops.attention.prepare_attention` chooses it
    capped = getattr(spec, "attention_softcap", None) is not None
    varlen = not capped and has_varlen(device, dtype, getattr(spec, "head_width", 0))
    backend = "the varlen attention kernel" if varlen else "attention masks"
    where = f"on {device.type} in {str(dtype).removeprefix('torch.')} ({backend})"
    remedy = "set data.packing to false, and report it with your versions of torch and driver"
    max_difference = _MAX_DIFFERENCE.get(dtype, 0.01)
    precision = torch.finfo(dtype).eps
    expert_limit = min(_EXPERT_TOLERANCE * precision, max_difference)
    # Without experts the logits must not move at all: a distance below `precision / 8` counts as 0.
    if leak > (expert_limit if has_experts else precision / 8):
        limit = f"at most {expert_limit:.2g}" if has_experts else "0"
        raise SetupError(
            f"data.packing: {where} a document's logits moved by {leak:.2g} of their size when its"
            f" neighbor in the sequence was changed, expected {limit}: packed documents see each"
            f" other; {remedy}"
        )
    if difference > max_difference:
        raise SetupError(
            f"data.packing: {where} the logits of packed documents differ by {difference:.2%} from"
            f" those of each document alone, expected at most {max_difference:.0%}; {remedy}"
        )


def _measure_leaks(
    model: nn.Module,
    vocab_size: int,
    device: torch.device,
    pipeline: Evaluator | None,
    multiple: int = 1,
) -> tuple[float, float, bool, torch.dtype]:
    """Return (leak, difference, whether any rank's layers have experts, dtype of the logits).

    leak: how far a document's logits move when its neighbor changes. difference: how far they are
    from those of the document alone. Both are relative, the largest of all ranks. On a rank without
    the last stage of a pipeline the dtype is that of its weights. The arguments are as for
    `check_packing_isolation`.
    """
    is_first = torch.zeros(len(_LENGTHS), _WIDTH, dtype=torch.bool)  # token of a row's 1st document
    for row_index, (length, _) in enumerate(_LENGTHS):
        is_first[row_index, :length] = True
    tokens = torch.randint(vocab_size, is_first.shape, generator=torch.Generator().manual_seed(0))
    changed = (tokens + 1) % vocab_size
    documents = list[Tensor]()
    for row_tokens, document_lengths in zip(tokens, _LENGTHS, strict=True):
        documents += row_tokens.split(document_lengths)
    padded_documents = nn.utils.rnn.pad_sequence(documents, batch_first=True)
    compute = partial(_compute_logits, model, device=device, pipeline=pipeline, multiple=multiple)
    logits = compute(tokens)
    # The first document of each row is kept and the second changed, and the other way round.
    logits_first_kept = compute(torch.where(is_first, tokens, changed))
    logits_second_kept = compute(torch.where(is_first, changed, tokens))
    logits_alone = compute(padded_documents, packed=False)
    measured = torch.zeros(3, device=device)  # (leak, difference, 1 with experts), for one reduce
    dtype = next(model.parameters()).dtype
    if logits is not None:  # None: another rank has the last stage of a pipeline
        leaks = [
            _compute_distance(logits_first_kept[is_first], logits[is_first]),
            _compute_distance(logits_second_kept[~is_first], logits[~is_first]),
        ]
        # The logits of all documents without their padding, in the order of the packed tokens
        logits_unpadded = torch.cat(
            [row[: len(document)] for row, document in zip(logits_alone, documents, strict=True)]
        )
        measured[0] = torch.stack(leaks).max()
        measured[1] = _compute_distance(logits.flatten(0, 1), logits_unpadded)
        dtype = logits.dtype
    measured[2] = float(any(".experts." in name for name, _ in model.named_parameters()))
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(measured, op=dist.ReduceOp.MAX)
    leak, difference, has_experts = measured.tolist()
    return leak, difference, bool(has_experts), dtype


def _compute_logits(
    model: nn.Module,
    tokens: Tensor,
    *,
    device: torch.device,
    pipeline: Evaluator | None,
    multiple: int,
    packed: bool = True,
) -> Any:
    """Return logits `[b, s, v]` of tokens `[b, s]`; None on a rank without the last stage.

    packed: each row has two documents, of `_LENGTHS` tokens; else one, with padding after it. The
    other arguments are as for `check_packing_isolation`.
    """
    width = tokens.shape[1]
    tokens = nn.functional.pad(tokens, (0, -width % multiple))
    batch = Batch(tokens, tokens)
    if packed:
        batch = replace(
            batch,
            positions=compute_document_positions(_LENGTHS, tokens.shape[1]),
            attention=make_attention_info(_LENGTHS, tokens.shape[1]),
        )
    batch = batch.to(device)
    if pipeline is not None:
        logits = pipeline.evaluate([batch], lambda number, part: model(part.tokens))[0]
    else:
        logits = (
            model(batch.tokens, batch.positions, batch.attention) if packed else model(batch.tokens)
        )
    return None if logits is None else logits[:, :width]


def _compute_distance(logits: Tensor, expected: Tensor) -> Tensor:
    """Return the norm of the difference over the norm of the expected logits, fp32 `[]`."""
    expected = expected.float()
    # `tiny`: no division by zero
    return (logits.float() - expected).norm() / expected.norm().clamp(
        min=torch.finfo(torch.float32).tiny
    )
