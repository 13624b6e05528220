"""Which answers of a conversation share a sequence.

All of them do where the chat template writes earlier turns as they were when they were generated. Where it rewrites its
history (drops the thoughts of earlier turns, moves the system message) an answer needs a sequence of its own: the model
is trained behind the prompt that it is asked to go on from, and what lies before the answer is not trained again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from recipe_lib.data.answers import Answer, AnswerFinder
from recipe_lib.data.spans import Span


@dataclass(frozen=True)
class Shared:
    """text: of one sequence, to the end of its last answer. answers: those that are trained in it, in order."""

    text: str
    answers: Sequence[Answer]

    @property
    def spans(self) -> list[Span]:
        """What is trained, characters of the text."""
        return [span for answer in self.answers for span in answer.spans]


def shared_out(answers: Sequence[Answer], history: str, finder: AnswerFinder) -> list[Shared]:
    """The sequences of a conversation, in the order of their last answers.

    history: `auto`: as few as can be; `split`: one for each answer; `refuse`: one, or a RowFault.
    """
    if history == "split":
        return [Shared(answer.text, [answer]) for answer in answers]
    if history == "refuse":
        for answer in answers:
            in_whole(answer, finder, "data.history to auto, or tokenizer.chat_template to one that does not")
        return [Shared(answers[-1].text, answers)]
    found: list[Shared] = []
    left = list(answers)
    while left:
        text = left[-1].text
        held = [answer for answer in left if text.startswith(answer.text)]
        left = [answer for answer in left if not text.startswith(answer.text)]
        found.append(Shared(text, held))
    return found[::-1]


def in_whole(answer: Answer, finder: AnswerFinder, remedy: str) -> None:
    """Raises RowFault if the rendering of the whole conversation does not hold the answer as it is generated. remedy:
    what to set."""
    written = answer.text[: len(answer.text) - len(answer.added)]
    if not finder.whole.startswith(answer.prompt):
        raise finder.differs("the past", answer.number, answer.prompt, finder.whole, remedy)
    if not finder.whole.startswith(written):
        raise finder.differs("an answer", answer.number, written, finder.whole, remedy)
