"""Held-out samples as questions: what a model answers to them, and metrics of the answers.

`build_questions` takes them from a dataset, `generate_answers` asks the model, on all ranks, and
`compute_metric` compares an answer with the sample's by a registered metric.
"""

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
    """The last answer of a sample, and what comes before it."""

    prompt: list[int]  # ids that come before the answer
    reference: list[int]  # ids of the answer, without its stop token


def build_questions(dataset: Dataset, stop_ids: Collection[int]) -> dict[int, Question]:
    """Return the question of each sequence that has one, by the sequence's number.

    Answers are as the label tokens have them. A sequence is left out where nothing comes before the
    label tokens (plain text), or where `max_seq_len` has cut the answer, so that no stop token ends
    it.
    """
    questions = dict[int, Question]()
    for number in range(len(dataset)):
        sequence = dataset[number]
        labeled = np.flatnonzero(sequence.labels != IGNORED)
        if not len(labeled):
            continue
        last = int(labeled[-1])
        before = np.flatnonzero(sequence.labels[:last] == IGNORED)
        if len(before) and int(sequence.labels[last]) in stop_ids:
            # In a conversation of several turns the last answer begins after the last question.
            start = int(before[-1]) + 1
            answer = sequence.labels[start:last].tolist()
            # A label is the token that follows, so the prompt has one token more.
            prompt = sequence.tokens[: start + 1].tolist()
            questions[number] = Question(prompt=prompt, reference=answer)
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
    """Return the answers to all questions, by number, on every rank.

    Collective: the ranks share the questions, and read in step, as each may have a part of the
    weights. seed: root of each question's own. options: as for `generate_batch`.
    """
    numbers = sorted(questions)
    own: list[tuple[int, list[int], str]] = []
    # Every rank goes through all batches, perhaps with an empty one.
    for start in range(0, len(numbers), batch_size * world.size):
        first = start + world.rank * batch_size
        own_numbers = numbers[first : first + batch_size]
        answers = generate_batch(
            model,
            spec,
            [questions[number].prompt for number in own_numbers],
            # By number, so that an answer does not depend on how many ranks there are.
            seeds=[derive_seed(seed, f"answer {number}") for number in own_numbers],
            device=world.device,
            any_over_ranks=world.any if world.size > 1 else None,
            **options,
        )
        for number, answer in zip(own_numbers, answers, strict=True):
            own.append((number, answer.tokens, answer.ended))
    gathered = sorted(row for rows in world.gather_json(own) for row in rows)
    return {number: Generated(tokens, ended) for number, tokens, ended in gathered}


def compute_metric(
    name: str,
    answers: Mapping[int, Generated],
    questions: Mapping[int, Question],
    tokenizer: Tokenizer,
) -> dict[int, float]:
    """Return a registered metric of each answer, by number.

    Raises ConfigError for a metric that raises, or gives no number.
    """
    metric = get_registered("metric", name)
    values: dict[int, float] = {}
    for number, question in questions.items():
        prediction = tokenizer.decode(answers[number].tokens, skip_special=True)
        reference = tokenizer.decode(question.reference, skip_special=True)
        try:
            values[number] = float(metric(prediction, reference))
        except Exception as error:  # whatever a user's function raises is theirs to correct
            raise ConfigError(
                f"metric {name}: raised {type(error).__name__} for the answer of sequence {number}:"
                f" {show(str(error))}"
            ) from error
    return values


# A metric is `fn(prediction, reference) -> number`, averaged over all answers. A plugin registers
# its own by `register("metric", "name")`. prediction: the text that the model gave. reference: that
# of the sample. Both are without the token that ends an answer.


@register("metric", "exact_match")
def exact_match(prediction: str, reference: str) -> float:
    """Return 1 for the same text, letter for letter, else 0."""
    return float(prediction == reference)
