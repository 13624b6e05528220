"""The check that documents in one row do not see each other, made with the model, backend and dtype that will train."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipe_lib.errors import SetupError
from recipe_lib.ops.attention import document_positions, has_varlen, make_attention_info
from recipe_lib.ops.device import holds_values

# Two rows of two documents each, not cut at the same place.
_LENGTHS = ((24, 40), (40, 24))
_WIDTH = 64
# Kernels add up in another order for documents by themselves; what is checked moves logits by far more.
_LARGEST_DIFFERENCE = {torch.bfloat16: 0.1, torch.float16: 0.05}


@torch.no_grad()
def check_documents_apart(model: nn.Module, vocab_size: int, device: torch.device | str) -> None:
    """Packs documents into rows, changes some of them, and looks whether the logits of the others move.

    model: `model(tokens [b, s], positions [b, s], attention)` gives logits `[b, s, v]`; with its weights, sharded or
    not, compiled or not. A collective for a sharded model: every rank calls it, and all of them agree. It costs four
    passes over 128 tokens. The model is left as it was. Where tensors have no values, nothing is checked.

    Raises SetupError if a document's logits depend on another one, or differ from those of the document alone.
    """
    device = torch.device(device)
    if not holds_values(device):
        return
    training = model.training
    model.eval()  # dropout would move the logits
    try:
        leak, difference, dtype = _measure(model, vocab_size, device)
    finally:
        model.train(training)
        if any(hasattr(module.forward, "_torchdynamo_orig_callable") for module in model.modules()):
            torch.compiler.reset()  # else training is compiled for lengths of any number, because of these here
    where = f"on {device.type} in {str(dtype).removeprefix('torch.')} ({_backend(model, device, dtype)})"
    remedy = "set data.packing to false, and report it with your versions of torch and driver"
    if leak > torch.finfo(dtype).eps / 8:
        raise SetupError(
            f"data.packing: {where} a document's logits moved by {leak:.2%} when its neighbour in the row was changed, "
            f"expected 0%: packed documents see each other; {remedy}"
        )
    largest = _LARGEST_DIFFERENCE.get(dtype, 0.01)
    if difference > largest:
        raise SetupError(
            f"data.packing: {where} the logits of packed documents differ by {difference:.2%} from those of each "
            f"document alone, expected at most {largest:.0%}; {remedy}"
        )


def _measure(model: nn.Module, vocab_size: int, device: torch.device) -> tuple[float, float, torch.dtype]:
    """How far logits move with a neighbour, how far they are from those of documents alone (each relative, the largest
    of all ranks), and their dtype."""
    first = torch.zeros(len(_LENGTHS), _WIDTH, dtype=torch.bool)
    for row, (length, _) in enumerate(_LENGTHS):
        first[row, :length] = True
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, first.shape, generator=generator)
    other = (tokens + 1) % vocab_size
    logits = _packed_logits(model, tokens, device)
    leaks = []
    for changed in (first, ~first):
        moved = _packed_logits(model, torch.where(changed, other, tokens), device)
        leaks.append(_distance(moved[~changed], logits[~changed]))
        del moved
    documents = [part for row, parts in zip(tokens, _LENGTHS, strict=True) for part in row.split(parts)]
    alone = _logits_alone(model, documents, device)
    measured = torch.stack([torch.stack(leaks).max(), _distance(logits.flatten(0, 1), alone)])
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(measured, op=dist.ReduceOp.MAX)
    leak, difference = measured.tolist()
    return leak, difference, logits.dtype


def _packed_logits(model: nn.Module, tokens: Tensor, device: torch.device) -> Tensor:
    positions, info = document_positions(_LENGTHS, _WIDTH), make_attention_info(_LENGTHS, _WIDTH)
    return model(tokens.to(device), positions.to(device), info.to(device))


def _logits_alone(model: nn.Module, documents: Sequence[Tensor], device: torch.device) -> Tensor:
    """Logits `[n, v]` of documents that have a row each, padded behind them."""
    rows = nn.utils.rnn.pad_sequence(list(documents), batch_first=True)
    logits = model(rows.to(device))
    return torch.cat([logits[at, : len(document)] for at, document in enumerate(documents)])


def _distance(found: Tensor, expected: Tensor) -> Tensor:
    """The norm of the difference over the norm of what was expected, fp32 `[]`."""
    expected = expected.float()
    return (found.float() - expected).norm() / expected.norm().clamp(min=torch.finfo(torch.float32).tiny)


def _backend(model: nn.Module, device: torch.device, dtype: torch.dtype) -> str:
    """How documents are kept apart, as `prepare_attention` decides it."""
    spec = getattr(model, "spec", None)
    capped = getattr(spec, "attention_softcap", None) is not None
    varlen = not capped and has_varlen(device, dtype, getattr(spec, "head_width", 0))
    return "the varlen attention kernel" if varlen else "attention masks"
