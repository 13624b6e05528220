"""The tokens of a micro-batch that are no padding: means over tokens leave padding out.

Rows are padded on the right, so that two numbers of the host for each row say it all. A mask on the
device would be one more tensor that lives from forward to backward; `RealTokens.make_mask` makes it
where it is read, and it is gone behind that.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class RealTokens:
    """Spans of `count` tokens, rows one after the other."""

    # No dataclass: torch.compile would look into a frozen one, and compile anew for every length.
    def __init__(self, spans: Sequence[tuple[int, int]], count: int) -> None:
        """spans: of each row the first real token and the one after the last, as numbers among all
        tokens.
        """
        self.spans = tuple(spans)
        self.count = count

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], row_length: int) -> "RealTokens":
        """Return the real tokens of rows of `row_length`, of which the first `lengths` are real."""
        starts = range(0, row_length * len(lengths), row_length)
        spans = [(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        return cls(spans, row_length * len(lengths))

    @property
    def longest(self) -> int:
        """Return how many tokens the longest row has, 1 at the least."""
        return max([1, *(last - first for first, last in self.spans)])

    @property
    def total(self) -> int:
        """Return how many tokens are real."""
        return sum(last - first for first, last in self.spans)

    def take(self, part: slice, every: int) -> "RealTokens":
        """Return the tokens in `part` of each `every` tokens."""
        length = part.stop - part.start
        spans = []
        for block in range(self.count // every):
            begin = block * every + part.start
            for span in self.spans:
                # Within the part; a span that lies outside of it becomes an empty one.
                first, last = (min(max(token - begin, 0), length) for token in span)
                spans.append((block * length + first, block * length + last))
        return RealTokens(spans, length * (self.count // every))

    def shard_rows(self, rank: int, ranks: int) -> "RealTokens":
        """Return this rank's tokens of each row, as many as the other ranks have."""
        row_length = self.count // len(self.spans)
        length = row_length // ranks
        return self.take(slice(rank * length, (rank + 1) * length), row_length)

    def make_mask(self, device: torch.device) -> Tensor:
        """Return bool `[count]`, True for real tokens. Nothing is copied from the host."""
        mask = torch.zeros(self.count, dtype=torch.bool, device=device)
        for first, last in self.spans:
            mask[first:last].fill_(True)  # an assignment would make a tensor of the number
        return mask
