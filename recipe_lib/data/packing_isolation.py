"""The check that documents in one sequence do not see each other, made with the model, backend and dtype that will
train."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipe_lib.data.batches import Batch
from recipe_lib.errors import SetupError
from recipe_lib.ops.attention import document_positions, has_varlen, make_attention_info
from recipe_lib.ops.device import holds_values

# Two sequences of two documents each, not cut at the same place.
_LENGTHS = ((24, 40), (40, 24))
_WIDTH = 64
# Kernels add up in another order for documents by themselves; what is checked moves logits by far more.
_LARGEST_DIFFERENCE = {torch.bfloat16: 0.1, torch.float16: 0.05}
# A neighbor's tokens take rows of experts, and kernels round another number of rows otherwise, if by little.
_OF_EXPERTS = 1000  # times the precision of the type


class Evaluator(Protocol):
    """What runs a model that is divided into pipeline stages."""

    def evaluate(self, batches: Sequence[Any], result_of: Callable[[int, Any], Any]) -> list[Any]:
        """What `result_of` makes of each micro-batch on the last stage's rank, None on the others."""


@torch.no_grad()
def check_packing_isolation(
    model: nn.Module, spec: Any, device: torch.device | str, pipeline: Evaluator | None = None, multiple: int = 1
) -> None:
    """Packs documents into sequences, changes some of them, and looks whether the logits of the others move.

    model: `model(tokens [b, s], positions [b, s], attention)` gives logits `[b, s, v]`; with its weights, sharded or
    not, compiled or not. spec: its shape. pipeline: what runs its stages, if it has any. multiple: of so many tokens
    its rows are. A collective for a sharded
    model: every rank calls it, and all of them agree. It costs four passes over 128 tokens. The model is left as it
    was. Where tensors have no values, nothing is checked.

    Raises SetupError if a document's logits depend on another one, or differ from those of the document alone.
    """
    device = torch.device(device)
    if not holds_values(device):
        return
    training = model.training
    model.eval()  # dropout would move the logits
    try:
        leak, difference, has_experts, dtype = _measure(model, spec.vocab_size, device, pipeline, multiple)
    finally:
        model.train(training)
        if any(hasattr(module.forward, "_torchdynamo_orig_callable") for module in model.modules()):
            torch.compiler.reset()  # else training is compiled for lengths of any number, because of these here
    where = f"on {device.type} in {str(dtype).removeprefix('torch.')} ({_backend(spec, device, dtype)})"
    remedy = "set data.packing to false, and report it with your versions of torch and driver"
    largest = _LARGEST_DIFFERENCE.get(dtype, 0.01)
    precision = torch.finfo(dtype).eps
    if leak > (min(_OF_EXPERTS * precision, largest) if has_experts else precision / 8):
        limit = f"at most {min(_OF_EXPERTS * precision, largest):.2g}" if has_experts else "0"
        raise SetupError(
            f"data.packing: {where} a document's logits moved by {leak:.2g} of their size when its neighbor in the "
            f"sequence was changed, expected {limit}: packed documents see each other; {remedy}"
        )
    if difference > largest:
        raise SetupError(
            f"data.packing: {where} the logits of packed documents differ by {difference:.2%} from those of each "
            f"document alone, expected at most {largest:.0%}; {remedy}"
        )


def _measure(
    model: nn.Module, vocab_size: int, device: torch.device, pipeline: Evaluator | None, multiple: int = 1
) -> tuple[float, float, bool, torch.dtype]:
    """How far logits move with a neighbor, how far they are from those of documents alone (each relative, the largest
    of all ranks), whether any rank's layers have experts, and the logits' dtype."""
    first = torch.zeros(len(_LENGTHS), _WIDTH, dtype=torch.bool)
    for sequence, (length, _) in enumerate(_LENGTHS):
        first[sequence, :length] = True
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, first.shape, generator=generator)
    other = (tokens + 1) % vocab_size
    documents = [part for sequence, parts in zip(tokens, _LENGTHS, strict=True) for part in sequence.split(parts)]
    sequences = nn.utils.rnn.pad_sequence(list(documents), batch_first=True)
    packed = [tokens, torch.where(first, other, tokens), torch.where(first, tokens, other)]
    logits, *moved = [_logits(model, part, device, pipeline, multiple) for part in packed]
    padded = _logits(model, sequences, device, pipeline, multiple, packed=False)
    measured, dtype = torch.zeros(3, device=device), next(model.parameters()).dtype
    if logits is not None and padded is not None:  # None: another rank has the last stage of a pipeline
        changes = zip(moved, (first, ~first), strict=True)
        leaks = [_distance(found[~changed], logits[~changed]) for found, changed in changes]
        alone = torch.cat([padded[at, : len(document)] for at, document in enumerate(documents)])
        measured[0], measured[1] = torch.stack(leaks).max(), _distance(logits.flatten(0, 1), alone)
        dtype = logits.dtype
    measured[2] = float(any(".experts." in name for name, _ in model.named_parameters()))
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(measured, op=dist.ReduceOp.MAX)
    leak, difference, has_experts = measured.tolist()
    return leak, difference, bool(has_experts), dtype


def _logits(
    model: nn.Module,
    tokens: Tensor,
    device: torch.device,
    pipeline: Evaluator | None,
    multiple: int,
    *,
    packed: bool = True,
) -> Any:
    """Logits `[b, s, v]` of tokens `[b, s]`; not packed: of one document a sequence, padded after it."""
    width = tokens.shape[1]
    tokens = nn.functional.pad(tokens, (0, -width % multiple))
    batch = Batch(tokens, tokens)
    if packed:
        positions = document_positions(_LENGTHS, tokens.shape[1])
        batch = replace(batch, positions=positions, attention=make_attention_info(_LENGTHS, tokens.shape[1]))
    batch = batch.to(device)
    if pipeline is not None:
        logits = pipeline.evaluate([batch], lambda number, part: model(part.tokens))[0]
    else:
        logits = model(batch.tokens, batch.positions, batch.attention) if packed else model(batch.tokens)
    return None if logits is None else logits[:, :width]


def _distance(found: Tensor, expected: Tensor) -> Tensor:
    """The norm of the difference over the norm of what was expected, fp32 `[]`."""
    expected = expected.float()
    return (found.float() - expected).norm() / expected.norm().clamp(min=torch.finfo(torch.float32).tiny)


def _backend(spec: Any, device: torch.device, dtype: torch.dtype) -> str:
    """How documents are kept apart, as `prepare_attention` decides it."""
    capped = getattr(spec, "attention_softcap", None) is not None
    varlen = not capped and has_varlen(device, dtype, getattr(spec, "head_width", 0))
    return "the varlen attention kernel" if varlen else "attention masks"
