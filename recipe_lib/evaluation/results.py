"""What is measured of each sequence, gathered from the ranks: as a table, as JSON lines, and as a
page.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from recipe_lib import files
from recipe_lib.config.mesh import compute_padded_multiple
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.data import Dataset, make_validation_steps
from recipe_lib.generation.answer_questions import Question
from recipe_lib.generation.sample import Generated
from recipe_lib.parallel import Parallel, World
from recipe_lib.redaction import redact
from recipe_lib.report.chart import render_page
from recipe_lib.report.view import Section, Table
from recipe_lib.tokenizers import Tokenizer
from recipe_lib.training import result_of_each
from recipe_lib.training.validation import scores_by, sequence_sums

EXAMPLES_FILE, SUMMARY_FILE, PAGE_FILE = "examples.jsonl", "summary.json", "report.html"
BASE, TUNED = "base", "tuned"
_EXAMPLES_ON_PAGE = 50  # examples on the page


@dataclass(frozen=True)
class SequenceScore:
    """log_likelihood: of the label tokens, a sum in nats. tokens: how many there are. right: how
    many of them are the likeliest token after those before.
    """

    log_likelihood: float
    tokens: int
    right: int


@dataclass
class ModelResults:
    """One model. scores, answers: by number of the sequence. metrics: name -> by number."""

    scores: dict[int, SequenceScore] = field(default_factory=dict)
    answers: dict[int, Generated] = field(default_factory=dict)
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)

    def numbers(self) -> dict[str, float]:
        """loss (mean over label tokens), perplexity, token_accuracy, and the means of the
        metrics.
        """
        tokens = sum(score.tokens for score in self.scores.values())
        loss = -math.fsum(score.log_likelihood for score in self.scores.values()) / max(1, tokens)
        found = {
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
            "token_accuracy": sum(score.right for score in self.scores.values()) / max(1, tokens),
        }
        return found | {
            name: math.fsum(each.values()) / len(each)
            for name, each in self.metrics.items()
            if each
        }


def score_sequences(
    model: nn.Module,
    parallel: Parallel,
    dataset: Dataset,
    cfg: FullFinetuneConfig,
    world: World,
    pad_id: int | None,
) -> dict[int, SequenceScore]:
    """The scores of all sequences, on every rank. Collective."""
    batch_size = cfg.validation.batch_size or cfg.batch_size
    steps = make_validation_steps(
        dataset,
        world.data_rank,
        world.data_ranks,
        batch_size,
        pad_id,
        multiple=compute_padded_multiple(cfg),
    )
    own: list[tuple[int, float, int, int]] = []
    for batches in steps:
        micro_batch = batches.to(world.device).micro_batches[0]
        (scores,) = result_of_each(parallel, scores_by(model), [micro_batch])
        if scores is None:  # another stage of the pipeline has them
            continue
        sums = sequence_sums(scores, micro_batch).tolist()
        for row, (likelihood, tokens, right) in zip(micro_batch.sequences, sums, strict=True):
            own += [
                (number, likelihood, int(tokens), int(right)) for number in row
            ]  # none in a row that fills up
    gathered = sorted(row for rows in world.gather_json(own) for row in rows)
    return {number: SequenceScore(*numbers) for number, *numbers in gathered}


@dataclass(frozen=True)
class Evaluation:
    """models: what was measured of each, by `base` and `tuned`. names: of the models. questions: by
    number of the sequence, those that were answered. settings: what it was done with, as text.
    """

    models: Mapping[str, ModelResults]
    names: Mapping[str, str]
    dataset: Dataset
    questions: Mapping[int, Question]
    tokenizer: Tokenizer
    settings: Mapping[str, Any]

    def summary(self) -> dict[str, Any]:
        """The numbers, as JSON has them."""
        scores = next(iter(self.models.values())).scores
        return {
            "models": dict(self.names),
            "sequences": len(scores),
            "label_tokens": sum(score.tokens for score in scores.values()),
            "answers": len(self.questions),
            **{which: measured.numbers() for which, measured in self.models.items()},
            "settings": dict(self.settings),
        }

    def table(self) -> Table:
        """A row for each number, a column for each model."""
        numbers = {which: measured.numbers() for which, measured in self.models.items()}
        both = BASE in numbers and TUNED in numbers
        rows = []
        for name in next(iter(numbers.values())):
            row = [name, *(_format_number(each[name]) for each in numbers.values())]
            rows.append(
                [*row, f"{numbers[TUNED][name] - numbers[BASE][name]:+.4f}"] if both else row
            )
        header = ["metric", *numbers, *(["change"] if both else [])]
        return Table("Evaluation", header, rows, left=("metric",))

    def example(self, number: int) -> dict[str, Any]:
        """What is known of one sequence."""
        question = self.questions.get(number)
        found: dict[str, Any] = {"sequence": number, "place": self.dataset.place(number)}
        if question is not None:
            found["prompt"] = self.tokenizer.decode(question.prompt)
            found["reference"] = self.tokenizer.decode(question.reference, skip_special=True)
        for which, measured in self.models.items():
            score = measured.scores[number]
            own: dict[str, Any] = {
                "log_likelihood": score.log_likelihood,
                "label_tokens": score.tokens,
                "likeliest_tokens": score.right,
            }
            if number in measured.answers:
                answer = measured.answers[number]
                own["prediction"] = self.tokenizer.decode(answer.tokens, skip_special=True)
                own["ended_by"] = answer.ended
                own |= {name: each[number] for name, each in measured.metrics.items()}
            found[which] = own
        return found

    def write(self, folder: Path) -> None:
        """examples.jsonl, summary.json and report.html in `folder`, each whole or not at all.
        StorageError.
        """
        examples = [
            self.example(number) for number in sorted(next(iter(self.models.values())).scores)
        ]
        with files.report_storage_faults():
            folder.mkdir(parents=True, exist_ok=True)
            lines = "".join(json.dumps(example, ensure_ascii=False) + "\n" for example in examples)
            files.replace_text(folder / EXAMPLES_FILE, redact(lines))
            files.replace_text(
                folder / SUMMARY_FILE, redact(json.dumps(self.summary(), indent=1) + "\n")
            )
            files.replace_text(folder / PAGE_FILE, redact(self.page(examples[:_EXAMPLES_ON_PAGE])))

    def page(self, examples: list[dict[str, Any]]) -> str:
        """The page: numbers, the first examples, settings."""
        name = self.names.get(TUNED) or next(iter(self.names.values()))
        summary = self.summary()
        header = ["prompt", "reference", *self.models]
        rows = [
            [
                example["prompt"],
                example["reference"],
                *(example[which].get("prediction", "") for which in self.models),
            ]
            for example in examples
            if "prompt" in example
        ]
        answers = Table("Answers", header, rows, left=tuple(header)) if rows else None
        counts = [
            (key.replace("_", " "), summary[key])
            for key in ("sequences", "label_tokens", "answers")
        ]
        sections = [
            Section("Numbers", table=self.table()),
            Section("Held-out samples", facts=[*counts, ("source", self.dataset.report.source)]),
            Section(f"Answers (the first {_EXAMPLES_ON_PAGE} sequences)", table=answers),
            Section("Settings", facts=[*self.names.items(), *self.settings.items()]),
        ]
        headline = ", ".join(
            f"{key} {_format_number(value)}" for key, value in list(summary.values())[-2].items()
        )
        return render_page("evaluation", f"{name}: evaluation", name, headline, sections)


def _format_number(number: float) -> str:
    return f"{number:.4f}" if abs(number) < 1e6 else f"{number:.3e}"
