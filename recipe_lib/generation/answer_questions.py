"""Held-out samples as questions: what a model answers to them, and metrics of the answers."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from recipe_lib.config.registry import get_registered, register
from recipe_lib.config.suggest import show
from recipe_lib.data import Dataset
from recipe_lib.errors import ConfigError
from recipe_lib.generation.sample import Generated, generate_batch
from recipe_lib.models.spec import ModelSpec
from recipe_lib.ops.chunked_heads import IGNORED
from recipe_lib.parallel import World
from recipe_lib.parallel.world import derive_seed
from recipe_lib.tokenizers import Tokenizer


@dataclass(frozen=True)
class Question:
    """prompt: ids that come before the last answer. reference: ids of the answer, without its stop
    token.
    """

    prompt: list[int]
    reference: list[int]


def build_questions(dataset: Dataset, stop_ids: Collection[int]) -> dict[int, Question]:
    """The last answer of each sequence, as its label tokens have it, and what comes before it, by
    their numbers.

    A sequence where there is none to generate is left out: nothing comes before the label tokens
    (plain text), or `max_seq_len` has cut the answer, so that no stop token ends it.
    """
    questions = dict[int, Question]()
    for number in range(len(dataset)):
        sequence = dataset[number]
        trained = np.flatnonzero(sequence.labels != IGNORED)
        if not len(trained):
            continue
        last = int(trained[-1])
        before = np.flatnonzero(sequence.labels[:last] == IGNORED)
        if len(before) and int(sequence.labels[last]) in stop_ids:
            start = int(before[-1]) + 1
            answer = sequence.labels[start:last].tolist()
            questions[number] = Question(sequence.tokens[: start + 1].tolist(), answer)
    return questions


def generate_answers(
    model: Any,
    spec: ModelSpec,
    questions: Mapping[int, Question],
    world: World,
    *,
    batch_size: int,
    seed: int,
    **options: Any,
) -> dict[int, Generated]:
    """The answers to all questions, which the ranks share, on every rank. Collective: they read in
    step, as each may have a part of the weights. seed: root of each question's own. options: as for
    `generate_batch`.
    """
    numbers = sorted(questions)
    own: list[tuple[int, list[int], str]] = []
    for start in range(0, len(numbers), batch_size * world.size):
        mine = numbers[start + world.rank * batch_size : start + (world.rank + 1) * batch_size]
        found = generate_batch(
            model,
            spec,
            [questions[number].prompt for number in mine],
            seeds=[derive_seed(seed, f"answer {number}") for number in mine],
            device=world.device,
            any_over_ranks=world.any if world.size > 1 else None,
            **options,
        )
        own += [
            (number, answer.tokens, answer.ended)
            for number, answer in zip(mine, found, strict=True)
        ]
    gathered = sorted(row for rows in world.gather_json(own) for row in rows)
    return {number: Generated(tokens, ended) for number, tokens, ended in gathered}


def compute_metric(
    name: str,
    answers: Mapping[int, Generated],
    questions: Mapping[int, Question],
    tokenizer: Tokenizer,
) -> dict[int, float]:
    """A registered metric's number of each answer. ConfigError for one that raises, or gives no
    number.
    """
    metric, numbers = get_registered("metric", name), {}
    for at, question in questions.items():
        texts = [
            tokenizer.decode(ids, skip_special=True)
            for ids in (answers[at].tokens, question.reference)
        ]
        try:
            numbers[at] = float(metric(*texts))
        except Exception as error:  # whatever a user's function raises is his to correct
            raise ConfigError(
                f"metric {name}: raised {type(error).__name__} for the answer of sequence {at}:"
                f" {show(str(error))}"
            ) from error
    return numbers


# What is measured of an answer: `fn(prediction, reference) -> number`, averaged over all answers.
#
# `exact_match` ships; a plugin registers its own by `register("metric", "name")`. prediction: the
# text that the model gave; reference: that of the sample; both without the token that ends an
# answer.


@register("metric", "exact_match")
def exact_match(prediction: str, reference: str) -> float:
    """1 for the same text, letter for letter, else 0."""
    return float(prediction == reference)
