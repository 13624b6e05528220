"""Makes ids of a text, of which some are trained: of a rendering, or of a text as it stands."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

from recipe_lib.data.escaping import Escape, encode_escaped
from recipe_lib.data.generation_tags import Marked
from recipe_lib.data.samples import SampleFault, TextTokenizer
from recipe_lib.data.spans import Span


@dataclass(frozen=True)
class Encoded:
    """Holds a sequence before it is cut."""

    ids: list[int]
    trained: list[bool]  # whether the loss counts each id as a target
    apart: bool = False  # a text is encoded apart from what stands before it: a token reached over the border
    answers: tuple[tuple[int, int], ...] = ()  # [start, end) of each trained message, with its end-of-turn token
    untrained_ends: int = 0  # trained messages whose end-of-turn token was cut off, or is none
    left_out: int = 0  # messages of the system and the user that are not written

    def cut(self, room: int) -> "Encoded":
        """Return the first `room` ids; the answers that lose their end are counted."""
        answers = tuple((start, end) for start, end in self.answers if start < room)
        return Encoded(
            ids=self.ids[:room],
            trained=self.trained[:room],
            apart=self.apart,
            answers=answers,
            untrained_ends=self.untrained_ends + sum(end > room for _, end in answers),
            left_out=self.left_out,
        )


@dataclass(frozen=True)
class EncodedSample:
    """Holds a sample's sequences."""

    sequences: Sequence[Encoded]
    whole_tokens: int = 0  # ids of the whole conversation in one, where it became several
    marked: Marked | None = None  # how it differs from the template's own marks, if there are any and they were used


def encode_spans(
    tokenizer: TextTokenizer, text: str, spans: Sequence[Span], escape: Escape, add_bos: bool, inside: bool = True
) -> Encoded:
    """Return ids of the whole text, trained inside of the spans, or outside of them. Raises SampleFault: none is
    trained."""
    cuts = [0]
    for span in spans:
        cuts += (span.start, span.end)
    ids, lengths, apart = _encode_between(tokenizer, text, [*cuts, len(text)], escape)
    if add_bos and ids[:1] != [tokenizer.bos_id]:
        ids = put_bos(tokenizer, ids)
        lengths[0] += 1
    trained = list[bool]()
    for number, length in enumerate(lengths):  # those with odd numbers lie inside of a span
        trained += [bool(number % 2) is inside] * length
    trained[:1] = [False] * len(trained[:1])  # nothing stands before the first token to predict it from
    if True not in trained:
        raise SampleFault("no trained token", "found no label token, expected an answer")
    end = len(trained) - trained[::-1].index(True)
    ends = list(accumulate(lengths, initial=0))
    answers = tuple(zip(ends[1::2], ends[2::2], strict=False)) if inside else ((0, end),)
    return Encoded(ids[:end], trained[:end], apart, answers)


def put_bos(tokenizer: TextTokenizer, ids: list[int]) -> list[int]:
    """Return the ids behind BOS, once."""
    bos = tokenizer.bos_id
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def _encode_between(
    tokenizer: TextTokenizer, text: str, cuts: Sequence[int], escape: Escape
) -> tuple[list[int], list[int], bool]:
    """Return ids of a text, how many lie between the cuts, and whether a cut had to be forced through a token."""
    pieces = encode_escaped(tokenizer, [text[start:end] for start, end in pairwise(cuts)], escape)
    piece_ids = list(chain.from_iterable(pieces))
    lengths = [len(piece) for piece in pieces]
    text_ids = encode_escaped(tokenizer, [text], escape)[0]
    if piece_ids == text_ids:
        return piece_ids, lengths, False
    # Pieces can differ from the whole although no token reaches over a cut: one that takes space does.
    ends = [0]
    for cut in cuts[1:]:
        ids_before = encode_escaped(tokenizer, [text[:cut]], escape)[0]
        if text_ids[: len(ids_before)] != ids_before:
            return piece_ids, lengths, True
        ends.append(len(ids_before))
    return text_ids, [end - start for start, end in pairwise(ends)], False
