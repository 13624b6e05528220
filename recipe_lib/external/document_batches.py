"""Keep packed documents apart in modules that carry a state along a sequence.

Gated delta nets, state-space layers and short convolutions read what stands before a token in its
row, whatever document it is of. `split_at_documents` lets such modules of a model run on a batch
with one document a row instead, padded on the right: causal modules never see that padding. Nothing
of a class is known but that it updates such a state in its cache. `ExternalModel` enters
`run_documents_apart` around the class' forward.
"""

import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from recipe_lib.external.layer_values import carry_values, make_variable, set_inside
from recipe_lib.external.scan_kernels import takes_documents
from recipe_lib.models.language_model import mix_in
from recipe_lib.ops.attention import AttentionInfo

# What the source of a class with such a state has: methods of transformers' caches, or in older
# classes attributes of their own.
_STATE = re.compile(
    r"\.(update_conv_state|update_recurrent_state|set_linear_cache|conv1d_state|time_shift)\b"
)
# The arguments of the functions that make a class' masks.
_MASK_ARGUMENTS = re.compile(r"\bmask_kwargs = \{.*?\}", re.DOTALL)
# Documents run together whose lengths, rounded up to a multiple of so many tokens, are equal. Gated
# delta nets pad to it themselves. Batches are few: the sum of their lengths is the rows' at most.
_ROUNDING = 64


class DocumentBatches:
    """The documents of packed rows, in batches of about equal length.

    Not a dataclass: pytree functions and torch.compile must take it as one object.
    """

    def __init__(self, lengths: Sequence[int], rows: int, device: torch.device) -> None:
        """Divide documents into batches.

        lengths: tokens of all documents, row after row; they fill the rows. rows: how many.
        """
        self.rows = rows
        self.lengths = lengths
        self.device = device
        self.row_length = sum(lengths) // rows
        starts = [0, *accumulate(lengths)]
        batches = defaultdict[int, list[int]](list)  # rounded length -> indices of documents
        for document, length in enumerate(lengths):
            batches[-(-length // _ROUNDING)].append(document)
        # (documents, tokens of the longest one) of each batch
        self.shapes: list[tuple[int, int]] = []
        from_rows = list[int]()  # for each token of the batches, the rows' token that it is
        from_batches = [0] * starts[-1]  # and the other way round
        for documents in batches.values():
            longest = max(lengths[document] for document in documents)
            self.shapes.append((len(documents), longest))
            for document in documents:
                start = starts[document]
                length = lengths[document]
                first = len(from_rows)
                from_batches[start : start + length] = range(first, first + length)
                # The padding repeats the document's last token: zeros might give nan in backward.
                from_rows += [start + min(index, length - 1) for index in range(longest)]
        self.from_rows = _make_index(from_rows, device)
        self.from_batches = _make_index(from_batches, device)

    @cached_property
    def bounds(self) -> Tensor:
        """The places in one row of all at which documents begin, and the end of the last one."""
        return torch.tensor([0, *accumulate(self.lengths)], device=self.device)

    @cached_property
    def numbers(self) -> Tensor:
        """The number of each token's document, `[1, b * s]`."""
        counts = torch.tensor(self.lengths, device=self.device)
        documents = torch.arange(len(self.lengths), dtype=torch.int32, device=self.device)
        return documents.repeat_interleave(counts, output_size=self.rows * self.row_length)[None]

    def run_by_kernels(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module's forward on one row of all documents, whose kernels get their bounds."""
        tokens = self.rows * self.row_length

        def join_rows(value: Any) -> Any:
            if not self._is_of_tokens(value):
                return value
            rest = value.shape[2:]
            return value.expand(self.rows, self.row_length, *rest).reshape(1, tokens, *rest)

        def part_rows(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.shape[:2] != (1, tokens):
                return value
            return value.view(self.rows, self.row_length, *value.shape[2:])

        args, kwargs = tree_map(join_rows, (args, kwargs))
        bounds = {"cu_seq_lens_q": self.bounds, "seq_idx": self.numbers}
        return tree_map(part_rows, forward(*args, **kwargs, **bounds))

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module's forward on each batch; return its output for the rows.

        Tensors `[b, s, ...]` and `[1, s, ...]` among the arguments, and such in the output, have
        values for each token; others are passed as they are.
        """
        leaves, structure = tree_flatten((args, kwargs))
        split_leaves = [self._split(leaf) for leaf in leaves]
        outputs = []
        for batch_leaves in zip(*split_leaves, strict=True):
            batch_args, batch_kwargs = tree_unflatten(list(batch_leaves), structure)
            outputs.append(forward(*batch_args, **batch_kwargs))
        return tree_map(self._join, outputs[0], *outputs[1:])

    def _is_of_tokens(self, value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and value.dim() >= 2
            and value.shape[0] in (1, self.rows)
            and value.shape[1] == self.row_length
        )

    def _split(self, value: Any) -> Sequence[Any]:
        """Return a value of the rows for each batch."""
        if not self._is_of_tokens(value):
            return [value] * len(self.shapes)
        rest = value.shape[2:]
        # `[1, s]` is for all rows.
        rows = value.expand(self.rows, self.row_length, *rest).reshape(-1, *rest)
        parts = rows.index_select(0, self.from_rows).split(
            [documents * longest for documents, longest in self.shapes]
        )
        return [part.view(*shape, *rest) for part, shape in zip(parts, self.shapes, strict=True)]

    def _join(self, *values: Any) -> Any:
        """Return the output for the rows from that of each batch.

        A final state, which some forwards return too, is that of the first batch: nothing reads it.
        """
        if not isinstance(values[0], Tensor) or values[0].shape[:2] != self.shapes[0]:
            return values[0]
        rest = values[0].shape[2:]
        tokens = torch.cat([value.reshape(-1, *rest) for value in values])
        return tokens.index_select(0, self.from_batches).view(self.rows, self.row_length, *rest)


def _make_index(numbers: list[int], device: torch.device) -> Tensor:
    # An operator makes it: a plan, and what it is compared with, see no tensor of a list.
    return torch.empty(len(numbers), dtype=torch.long, device=device).copy_(torch.tensor(numbers))


# Of the forward that runs; None: its rows are one document each.
_current: ContextVar[DocumentBatches | None] = make_variable("document_batches")


class _StatefulModule(nn.Module):
    """A mixin for modules with a state along the sequence."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        documents = _current.get()
        if documents is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        run = (
            documents.run_by_kernels
            if takes_documents(self, documents.from_rows)
            else documents.run
        )
        return run(super().forward, args, kwargs)  # type: ignore[misc]


def split_at_documents(model: nn.Module) -> None:
    """Let modules with a state run on each document by itself, in place."""
    stateful = list[str]()
    for name, module in model.named_modules():
        is_inside = name.startswith(tuple(f"{outer}." for outer in stateful))
        if not is_inside and name and _has_state(type(module)):
            stateful.append(name)
            mix_in(_StatefulModule, module)
    carry_values(model, stateful)


def carries_state(model: nn.Module) -> bool:
    """Return True if `split_at_documents` has found stateful modules in the model."""
    return any(isinstance(module, _StatefulModule) for module in model.modules())


def masks_by_positions(model: nn.Module) -> bool:
    """Return True if the classes of a model's modules make their masks of positions."""
    files = {type(module).__module__ for module in model.modules()}
    return all(
        "position_ids" in arguments
        for file in files
        for arguments in _MASK_ARGUMENTS.findall(_read_source(sys.modules[file]))
    )


@contextmanager
def run_documents_apart(attention: AttentionInfo | None, tokens: Tensor) -> Iterator[None]:
    """Let stateful modules run on each document inside the block.

    attention: the documents of each row; None: a row is one document. tokens: `[b, s]`.
    """
    lengths = () if attention is None or attention.real is None else attention.real.documents
    rows, row_length = tokens.shape
    documents = (
        DocumentBatches(lengths, rows, tokens.device)
        if any(length != row_length for length in lengths)
        else None
    )
    with set_inside(_current, documents):
        yield


def _has_state(kind: type) -> bool:
    return _STATE.search(_read_source(kind)) is not None


@cache
def _read_source(part: Any) -> str:
    """Return the source of a module, or of a class of it; "" if it is none of transformers' models.

    Other classes have no caches with these methods, or are not known.
    """
    name = getattr(part, "__module__", getattr(part, "__name__", ""))
    if not name.startswith("transformers.models."):
        return ""
    try:
        return inspect.getsource(part)
    except (OSError, TypeError):
        return ""
