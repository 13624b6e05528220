"""Evaluate held-out samples: load the model on all ranks, score it, and write the results.

cli/eval_ranks.py calls `load_evaluated_model` (inside its `use_base_weights()` it is the base, the
model that training began from), `score_sequences` for one model, and `Evaluation` for the files. A
sequence is one sample as it is trained; a label token is one that the loss counts.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from recipe_lib import files
from recipe_lib.adapters import add_adapters, disable_adapters, init_adapters
from recipe_lib.checkpoint.adapter_files import check_fits, read_adapter
from recipe_lib.checkpoint.huggingface import load_weights
from recipe_lib.checkpoint.open_exports import make_adapter_settings
from recipe_lib.checkpoint.peft_folders import load_adapter
from recipe_lib.config.mesh import compute_padded_multiple
from recipe_lib.config.schema import FullFinetuneConfig, LoraFinetuneConfig
from recipe_lib.data import Dataset, make_validation_steps
from recipe_lib.generation.sample import Generated, Question
from recipe_lib.generation.source import GenerationSource
from recipe_lib.logs import get_logger
from recipe_lib.memory.qat import FakeQuantization, fake_quantize_linears
from recipe_lib.models import Decoder, build_meta, init_weights
from recipe_lib.parallel import DTYPES, Parallel, World, derive_seed, materialize, parallelize
from recipe_lib.redaction import redact
from recipe_lib.report.page import render_page
from recipe_lib.report.view import Section, Table
from recipe_lib.tokenizers import Tokenizer
from recipe_lib.training import evaluate_micro_batches
from recipe_lib.training.losses import make_scorer, sum_over_sequences


@dataclass
class EvaluatedModel:
    """A trained model in the memory of all ranks."""

    model: Decoder  # frozen, this rank's part
    parallel: Parallel  # how it is divided among ranks
    source: GenerationSource  # its folder and spec, and its adapter's
    base: str | None  # folder or preset that it was trained from; None: not known
    fake_quantization: FakeQuantization | None  # of training with `qat`; None: without
    # Overwrites the weights with the base's; None with adapters, or if the base is not known.
    _load_base: Callable[[], None] | None = None

    @contextmanager
    def use_base_weights(self) -> Iterator[nn.Module]:
        """Give the model before training, with its own weights.

        Without adapters they replace the trained ones, for good: measure the trained model first.
        """
        # The base was trained without quantization.
        if self.fake_quantization is not None:
            self.fake_quantization.is_on = False
        if self._load_base is not None:
            self._load_base()
        with disable_adapters(self.model) if self.source.adapter is not None else nullcontext():
            yield self.model


def load_evaluated_model(
    cfg: FullFinetuneConfig, source: GenerationSource, world: World, storage: str, base: Path | None
) -> EvaluatedModel:
    """Read the weights, each rank its part as `cfg.parallel` divides them.

    storage: how an adapter's base is kept, as `lora.quantize_base`. base: of a model without
    adapters, the folder that its training began from. None: random weights of cfg.seed if
    cfg.model.preset is set, else not known.
    """
    dtype = DTYPES[cfg.dtype]
    spec = source.base_spec or source.spec  # `base_spec` is set for an adapter
    model = build_meta(spec, dtype)
    if source.adapter is not None:
        adapter = read_adapter(source.adapter, spec)
        check_fits(adapter, spec)
        # None: the base's dtype. Beside any other base the matrices of adapters are fp32.
        adapter_dtype = None if cfg.dtype == "fp64" else "fp32"
        lora = replace(
            make_adapter_settings(adapter, spec), quantize_base=storage, dtype=adapter_dtype
        )
        assert isinstance(cfg, LoraFinetuneConfig)
        cfg = replace(cfg, lora=lora)
        add_adapters(model, lora, dtype)
    model.requires_grad_(False)
    # start=0: round from the first forward on, as the export will round the weights.
    fake_quantization = fake_quantize_linears(model, cfg.qat, cfg.qat_group_size, start=0)
    if fake_quantization is not None:
        get_logger().info("%s", fake_quantization.describe())
    parallel = parallelize(model, cfg, world, for_training=False)
    materialize(model, cfg.memory, world.device)
    load_weights(model, spec, source.folder)
    if source.adapter is not None:
        # An adapter may be of some layers only: the others keep B = 0, which changes nothing.
        init_adapters(model, 0)
        load_adapter(model, spec, source.adapter, allow_missing=True)
        return EvaluatedModel(
            model=model.eval(),
            parallel=parallel,
            source=source,
            base=str(source.folder),
            fake_quantization=fake_quantization,
        )
    # Read when it is asked for, as it takes the memory of the trained weights.
    load_base: Callable[[], None] | None = None
    if base is not None:
        load_base = partial(load_weights, model, source.spec, base)
    elif cfg.model.preset is not None:
        load_base = partial(init_weights, model, derive_seed(cfg.seed, "model"), source.spec)
    return EvaluatedModel(
        model=model.eval(),
        parallel=parallel,
        source=source,
        base=str(base) if base is not None else cfg.model.preset,
        fake_quantization=fake_quantization,
        _load_base=load_base,
    )


EXAMPLES_FILE = "examples.jsonl"  # a line for each sequence
SUMMARY_FILE = "summary.json"  # means and settings
PAGE_FILE = "report.html"
# The names of the two models in results, tables and files.
BASE = "base"
TUNED = "tuned"
_EXAMPLES_ON_PAGE = 50  # sequences at most


@dataclass(frozen=True)
class SequenceScore:
    """Sums over the label tokens of one sequence."""

    log_likelihood: float  # in nats
    tokens: int  # label tokens
    num_correct: int  # label tokens that are the likeliest after those before


@dataclass
class ModelResults:
    """The measurements of one model, by number of the sequence."""

    scores: dict[int, SequenceScore] = field(default_factory=dict)  # of every sequence
    answers: dict[int, Generated] = field(default_factory=dict)  # generated ids; empty: not asked
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)  # name -> value by sequence

    def compute_means(self) -> dict[str, float]:
        """Return the means by name: loss, perplexity, token_accuracy, and each metric's.

        The first three are means over label tokens, loss in nats.
        """
        scores = self.scores.values()
        tokens = max(1, sum(score.tokens for score in scores))
        loss = -math.fsum(score.log_likelihood for score in scores) / tokens
        means = {
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 700 else math.inf,  # exp(710) overflows
            "token_accuracy": sum(score.num_correct for score in scores) / tokens,
        }
        return means | {
            name: math.fsum(values.values()) / len(values)
            for name, values in self.metrics.items()
            if values
        }


def score_sequences(
    model: nn.Module,
    parallel: Parallel,
    dataset: Dataset,
    cfg: FullFinetuneConfig,
    world: World,
    pad_id: int | None,
) -> dict[int, SequenceScore]:
    """Return the scores of all sequences by number, on every rank. Collective.

    pad_id: id of padding; None: the tokenizer has none.
    """
    steps = make_validation_steps(
        dataset,
        data_rank=world.data_rank,
        data_ranks=world.data_ranks,
        batch_size=cfg.validation.batch_size or cfg.batch_size,
        pad_id=pad_id,
        multiple=compute_padded_multiple(cfg),
    )
    # Number of the sequence, log-likelihood, label tokens, right ones: plain numbers, for JSON.
    own_scores: list[tuple[int, float, int, int]] = []
    for batches in steps:
        micro_batch = batches.to(world.device).micro_batches[0]
        # [b, s, 2]: log-likelihood of the label, and of the likeliest token.
        (scores,) = evaluate_micro_batches(parallel, make_scorer(model), [micro_batch])
        if scores is None:  # another stage of the pipeline has them
            continue
        sums = sum_over_sequences(scores, micro_batch).tolist()
        for row_numbers, (likelihood, tokens, num_correct) in zip(
            micro_batch.sequences, sums, strict=True
        ):
            # Without packing a row is one sequence, and one that only fills up a batch has none.
            own_scores += [
                (number, likelihood, int(tokens), int(num_correct)) for number in row_numbers
            ]
    gathered = sorted(row for rows in world.gather_json(own_scores) for row in rows)
    return {number: SequenceScore(*values) for number, *values in gathered}


@dataclass(frozen=True)
class Evaluation:
    """The results of one or two models on the same samples."""

    models: Mapping[str, ModelResults]  # by `BASE` and `TUNED`, in this order; one may be missing
    names: Mapping[str, str]  # folder, preset or hub id of each, by the same
    dataset: Dataset  # the held-out samples
    questions: Mapping[int, Question]  # prompts that were answered, by number of the sequence
    tokenizer: Tokenizer
    settings: Mapping[str, Any]  # config key or option of the evaluation -> value

    def build_summary(self) -> dict[str, Any]:
        scores = next(iter(self.models.values())).scores
        return {
            "models": dict(self.names),
            "sequences": len(scores),
            "label_tokens": sum(score.tokens for score in scores.values()),
            "answers": len(self.questions),
            **{which: results.compute_means() for which, results in self.models.items()},
            "settings": dict(self.settings),
        }

    def build_table(self) -> Table:
        """Return a table with a row for each number, and a column for each model."""
        means = {which: results.compute_means() for which, results in self.models.items()}
        has_both = BASE in means and TUNED in means
        rows = []
        for name in next(iter(means.values())):
            row = [name, *(_format_number(model_means[name]) for model_means in means.values())]
            if has_both:
                row.append(f"{means[TUNED][name] - means[BASE][name]:+.4f}")
            rows.append(row)
        header = ["metric", *means, *(["change"] if has_both else [])]
        return Table("Evaluation", header, rows, left=("metric",))

    def build_example(self, number: int) -> dict[str, Any]:
        """Return a sequence's line of examples.jsonl: place, question, each model's results."""
        question = self.questions.get(number)
        example: dict[str, Any] = {"sequence": number, "place": self.dataset.locate_item(number)}
        if question is not None:
            example["prompt"] = self.tokenizer.decode(question.prompt)
            example["reference"] = self.tokenizer.decode(question.reference, skip_special=True)
        for which, results in self.models.items():
            score = results.scores[number]
            entry: dict[str, Any] = {
                "log_likelihood": score.log_likelihood,
                "label_tokens": score.tokens,
                "likeliest_tokens": score.num_correct,
            }
            if number in results.answers:
                answer = results.answers[number]
                entry["prediction"] = self.tokenizer.decode(answer.tokens, skip_special=True)
                entry["ended_by"] = answer.ended
                entry |= {name: values[number] for name, values in results.metrics.items()}
            example[which] = entry
        return example

    def write(self, folder: Path) -> None:
        """Write examples.jsonl, summary.json and report.html, each in full or not at all.

        Secrets in the texts are redacted. Raises StorageError if the disk is full or refuses it.
        """
        sequence_numbers = sorted(next(iter(self.models.values())).scores)
        examples = [self.build_example(number) for number in sequence_numbers]
        lines = "".join(json.dumps(example, ensure_ascii=False) + "\n" for example in examples)
        summary = json.dumps(self.build_summary(), indent=1) + "\n"
        with files.report_storage_faults():
            folder.mkdir(parents=True, exist_ok=True)
            files.replace_text(folder / EXAMPLES_FILE, redact(lines))
            files.replace_text(folder / SUMMARY_FILE, redact(summary))
            page = self.build_page(examples[:_EXAMPLES_ON_PAGE])
            files.replace_text(folder / PAGE_FILE, redact(page))

    def build_page(self, examples: list[dict[str, Any]]) -> str:
        """Return the page as HTML. examples: of `build_example`, those to show."""
        name = self.names.get(TUNED) or next(iter(self.names.values()))
        summary = self.build_summary()
        header = ["prompt", "reference", *self.models]
        rows = []
        for example in examples:
            if "prompt" in example:
                predictions = (example[which].get("prediction", "") for which in self.models)
                rows.append([example["prompt"], example["reference"], *predictions])
        answers = Table("Answers", header, rows, left=tuple(header)) if rows else None
        counts = [
            (key.replace("_", " "), summary[key])
            for key in ("sequences", "label_tokens", "answers")
        ]
        sections = [
            Section("Numbers", table=self.build_table()),
            Section("Held-out samples", facts=[*counts, ("source", self.dataset.report.source)]),
            Section(f"Answers (the first {_EXAMPLES_ON_PAGE} sequences)", table=answers),
            Section("Settings", facts=[*self.names.items(), *self.settings.items()]),
        ]
        means = summary[list(self.models)[-1]]  # the tuned model's, if it was measured
        headline = ", ".join(f"{key} {_format_number(value)}" for key, value in means.items())
        return render_page(
            "evaluation",
            title=f"{name}: evaluation",
            name=name,
            headline=headline,
            sections=sections,
        )


def _format_number(number: float) -> str:
    return f"{number:.4f}" if abs(number) < 1e6 else f"{number:.3e}"
