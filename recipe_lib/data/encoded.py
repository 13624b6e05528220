"""A text as ids, of which some are trained: a rendering, or a text as it stands."""

from collections.abc import Sequence
from dataclasses import dataclass

from recipe_lib.data.escaping import Escape, encode_escaped
from recipe_lib.data.generation_tags import Marked
from recipe_lib.data.samples import SampleFault, TextTokenizer
from recipe_lib.data.spans import Span


@dataclass(frozen=True)
class Encoded:
    """A sequence before it is cut: ids, and whether the loss counts each of them as a target.

    apart: text had to be encoded apart from what stands before it because a token reached over the border. answers:
    [start, end) of each trained message among the ids, its end-of-turn token included. untrained_ends: trained
    messages whose end-of-turn token was cut off, or is none. left_out: messages of the system and the user that are not
    written.
    """

    ids: list[int]
    trained: list[bool]
    apart: bool = False
    answers: tuple[tuple[int, int], ...] = ()
    untrained_ends: int = 0
    left_out: int = 0

    def cut(self, room: int) -> "Encoded":
        """Return the first `room` ids; counts the answers that lose their end."""
        kept = tuple((start, end) for start, end in self.answers if start < room)
        lost = sum(end > room for _, end in kept)
        ends = self.untrained_ends + lost
        return Encoded(self.ids[:room], self.trained[:room], self.apart, kept, ends, self.left_out)


@dataclass(frozen=True)
class EncodedSample:
    """A sample's sequences. whole_tokens: ids of the whole conversation in one, where it became several. marked: how it
    differs from the template's own marks, if the template has any and they were used."""

    sequences: Sequence[Encoded]
    whole_tokens: int = 0
    marked: Marked | None = None


def encode_spans(
    tokenizer: TextTokenizer, whole: str, found: Sequence[Span], escape: Escape, add_bos: bool, inside: bool = True
) -> Encoded:
    """Return ids of the whole text, trained inside of the spans, or outside of them. Raises SampleFault: none is
    trained."""
    cuts = [0, *(at for span in found for at in (span.start, span.end)), len(whole)]
    ids, lengths, apart = _encode_between(tokenizer, whole, cuts, escape)
    trained = list[bool]()
    for number, length in enumerate(lengths):
        trained += [bool(number % 2) is inside] * length
    if add_bos and ids[:1] != [tokenizer.bos_id]:
        ids, lengths[0], trained = put_bos(tokenizer, ids), lengths[0] + 1, [not inside, *trained]
    trained[:1] = [False] * len(trained[:1])  # nothing stands before the first token to predict it from
    if True not in trained:
        raise SampleFault("no trained token", "found no label token, expected an answer")
    end = len(trained) - trained[::-1].index(True)
    ends = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    answers = tuple(zip(ends[1::2], ends[2::2], strict=False)) if inside else ((0, end),)
    return Encoded(ids[:end], trained[:end], apart, answers)


def put_bos(tokenizer: TextTokenizer, ids: list[int]) -> list[int]:
    """Return the ids behind BOS, once."""
    bos = tokenizer.bos_id
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def _encode_between(
    tokenizer: TextTokenizer, whole: str, cuts: Sequence[int], escape: Escape
) -> tuple[list[int], list[int], bool]:
    """Return ids of a text, how many lie between the cuts, and whether a cut had to be forced through a token."""
    parts = [whole[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    pieces = encode_escaped(tokenizer, parts, escape)
    together = encode_escaped(tokenizer, [whole], escape)[0]
    ids, lengths = [i for piece in pieces for i in piece], [len(piece) for piece in pieces]
    if ids == together:
        return ids, lengths, False
    ends = [0]
    for cut in cuts[1:]:  # pieces can differ from the whole although no token reaches over a cut: one that takes space
        before = encode_escaped(tokenizer, [whole[:cut]], escape)[0]
        if together[: len(before)] != before:
            return ids, lengths, True
        ends.append(len(before))
    return together, [b - a for a, b in zip(ends, ends[1:], strict=False)], False
