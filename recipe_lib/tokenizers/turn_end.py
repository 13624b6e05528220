"""How a chat template ends an answer, found by rendering one that comes last and one that a question follows."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from recipe_lib.errors import DataError
from recipe_lib.tokenizers.special_tokens import AddedToken

_ANSWER = "\ue123"  # a letter that no template writes


@dataclass(frozen=True)
class TurnEnd:
    """token: the special token that ends an answer, the last one where there are several (Command R7B); empty: the
    template writes none there. closing: what it writes after that where an answer comes last (a line end, Phi-3's
    EOS); no model is asked for it. next_turn: the special token that begins the user's next turn, if that alone says
    that the answer is over (GLM-4.5)."""

    token: str = ""
    closing: str = ""
    next_turn: str = ""


def find_turn_end(
    render_many: Callable[..., Sequence[str | DataError]],
    split: Callable[[str], Iterable[tuple[str, AddedToken | None]]],
    stops: Collection[str],
    bos: str | None,
) -> TurnEnd:
    """render_many: `ChatTemplate.render_many`. split: a text as (what is before a special token, the token). stops:
    special tokens that are known to end answers."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}]
    last, followed = render_many([*messages, messages[0]], [(2, False, ()), (3, False, ())])
    if isinstance(last, DataError) or _ANSWER not in last:
        return TurnEnd()  # a template for other conversations than this one
    alone = _pieces(split, last)
    later = [] if isinstance(followed, DataError) or _ANSWER not in followed else _pieces(split, followed)
    shared = [piece for piece, _ in takewhile(lambda pair: pair[0] == pair[1], zip(alone, later, strict=False))]
    first = next((at for at, (_, is_special) in enumerate(shared) if is_special), None)
    if first is not None:
        run = [text for text, _ in takewhile(lambda piece: piece[1], shared[first:])]
        after = "".join(text for text, _ in alone[first + len(run) :])
        if after.strip():  # some begin the next turn without being asked: what the model stops at is no part of that
            run = run[: max((at for at, text in enumerate(run) if text in stops), default=0) + 1]
        return TurnEnd(run[-1], "".join(text for text, _ in alone[first + len(run) :]))
    special = [text for text, is_special in alone if is_special]
    if special:
        return TurnEnd(special[-1] if later else special[0])
    begins, is_special = (later[len(alone) :] or [("", False)])[0]
    return TurnEnd(next_turn=begins if is_special and begins != bos else "")


def _pieces(split: Callable[[str], Iterable[tuple[str, Any]]], rendered: str) -> list[tuple[str, bool]]:
    """What follows the answer, as (text, whether it is a special token)."""
    found: list[tuple[str, bool]] = []
    for text, token in split(rendered[rendered.rindex(_ANSWER) + 1 :]):
        found += [(text, False)] if text else []
        found += [(token.content, token.special)] if token is not None else []
    return found
