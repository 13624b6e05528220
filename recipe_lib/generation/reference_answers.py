"""The question and the answer of a tokenized sample: what a model is given, and what it is compared with."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from recipe_lib.data import TokenSequence
from recipe_lib.ops.fused_loss import IGNORED


@dataclass(frozen=True)
class Question:
    """prompt: ids that come before the last answer. reference: ids of the answer, without its stop token."""

    prompt: list[int]
    reference: list[int]


def question_of(sequence: TokenSequence, stop_ids: Collection[int]) -> Question | None:
    """The last answer of a sequence, as its label tokens have it, and what comes before it.

    None where there is none to generate: nothing comes before the label tokens (plain text), or `max_seq_len` has cut
    the answer, so that no stop token ends it.
    """
    trained = np.flatnonzero(sequence.labels != IGNORED)
    if not len(trained):
        return None
    last = int(trained[-1])
    before = np.flatnonzero(sequence.labels[:last] == IGNORED)
    if not len(before) or int(sequence.labels[last]) not in stop_ids:
        return None
    start = int(before[-1]) + 1
    return Question(sequence.tokens[: start + 1].tolist(), sequence.labels[start:last].tolist())
