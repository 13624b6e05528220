"""Hold a recipe's data in one object: tokenizer, datasets, their order, and the batches of a step.

`run_recipe` calls `prepare_data`, which tokenizes before the ranks form a process group. A recipe's
`setup_data` then builds a `TrainingData` of the result, whose `batches` and `validation_batches`
the loop and the validation read. An item is a sequence, or a pair of two.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipe_lib.config.key_conditions import SCORED_METRICS, list_generated_metrics
from recipe_lib.config.mesh import compute_micro_batches, compute_padded_multiple
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.data import (
    DataPlan,
    PreparedData,
    StepBatches,
    adapt_to_recipe,
    build_datasets,
    check_vocabulary,
    format_report_lines,
    make_training_steps,
    make_validation_steps,
    settle_formats,
    warn_of_overlap,
    warn_of_positions,
)
from recipe_lib.errors import ConfigError, UserError
from recipe_lib.generation.sample import Question, build_questions
from recipe_lib.logs import get_logger, warn_on_first_rank
from recipe_lib.models import settle_packing
from recipe_lib.parallel.world import World, derive_seed
from recipe_lib.tokenizers import Tokenizer, load_tokenizer
from recipe_lib.tokenizers.template_process import DATE
from recipe_lib.training.best_step import BestStep
from recipe_lib.training.output import check_output
from recipe_lib.training.resolve_model import ResolvedModel, resolve_model, validate_parallelism


class TrainingData:
    """The samples of a run on one rank, and the order in which steps take them."""

    def __init__(
        self,
        cfg: FullFinetuneConfig,
        source: ResolvedModel,
        world: World,
        prepared: PreparedData | None = None,
    ) -> None:
        """Take the prepared datasets, or tokenize them now or map them from the cache.

        source: the resolved model, whose tokenizer and shape the data has to fit. prepared: the
        datasets of `prepare_data`; None: nothing is prepared. Raise DataError for samples or a
        tokenizer that cannot be used, and ConfigError for settings that do not fit the data.
        """
        self.cfg = cfg
        self._world = world
        self.tokenizer_path = _find_tokenizer_path(cfg, source)
        # File of a chat template that replaces the tokenizer's own; None: it is not replaced.
        self.chat_template = (
            Path(cfg.tokenizer.chat_template) if cfg.tokenizer.chat_template else None
        )
        self.tokenizer = load_tokenizer_for(cfg, source)
        training, validation = prepared or build_datasets(cfg, self.tokenizer)
        self.dataset = adapt_to_recipe(cfg, training)
        self.validation_dataset = None if validation is None else adapt_to_recipe(cfg, validation)
        check_vocabulary(
            self.tokenizer, source.spec.vocab_size, self.dataset, self.validation_dataset
        )
        warn_of_positions(source.spec.max_positions, self.dataset, self.validation_dataset)
        warn_of_overlap(self.dataset, self.validation_dataset)
        if note := self.dataset.report.describe_plain_template():
            warn_on_first_rank(note)
        # Items of a step on all ranks; with `data.packing` packs of items
        self.global_batch_size = cfg.batch_size * cfg.gradient_accumulation_steps * world.data_ranks
        # Which sequences each step takes: a function of (seed, epoch, step) alone.
        self.plan = DataPlan(
            self.dataset,
            seed=derive_seed(cfg.seed, "data"),
            slots_per_step=self.global_batch_size,
            shuffle=cfg.data.shuffle,
            packing_capacity=cfg.max_seq_len if cfg.data.packing else None,
        )
        self.total_steps = self.plan.count_total_steps(cfg.epochs, cfg.max_steps)
        # Names in `validation.metrics` of metrics that are computed from token scores, and of those
        # that are computed from generated answers
        self.scored_metrics = [name for name in cfg.validation.metrics if name in SCORED_METRICS]
        self.generated_metrics = list_generated_metrics(cfg)
        self.questions = self._build_questions()  # validation prompts to generate answers to
        self.best = BestStep(cfg)  # the best step so far, by the validations

    def _build_questions(self) -> dict[int, Question]:
        """Return the questions that validation generates answers to, by their sequence's index.

        Empty if no metric needs them. Raise ConfigError if one does and no sequence has a question.
        """
        if self.validation_dataset is None or not self.generated_metrics:
            return {}
        questions = build_questions(self.validation_dataset, self.tokenizer.stop_ids)
        if not questions:
            raise ConfigError(
                f"validation.metrics: {self.generated_metrics[0]} is measured of answers, and no"
                f" sequence of {self.cfg.validation.source} has a question before one; remove it,"
                " or choose other samples"
            )
        return questions

    def identity(self) -> dict[str, Any]:
        """Return what decides the sequences of each step, for a saved state.

        A run is resumed only if it is the same as in the run of the state.
        """
        return {
            "data": self.dataset.fingerprint,
            "global_batch_size": self.global_batch_size,
            "seed": self.cfg.seed,
            "order": {
                "data.shuffle": self.cfg.data.shuffle,
                "data.packing": self.cfg.data.packing,
                "weight": [float(weight) for weight in self.dataset.weights],
            },
        }

    def batches(self, first_step: int) -> Iterator[StepBatches]:
        """Return an iterator over the batches of this rank's steps, on the device.

        first_step: the index of the first one, from 0.
        """
        cfg = self.cfg
        world = self._world
        batch_size, count = compute_micro_batches(cfg)
        return make_training_steps(
            self.dataset,
            self.plan,
            first_step=first_step,
            last_step=self.total_steps,
            data_rank=world.data_rank,
            data_ranks=world.data_ranks,
            batch_size=batch_size,
            accumulation=count,
            pad_id=self.tokenizer.pad_id,
            multiple=compute_padded_multiple(cfg),
            mismatched=cfg.max_seq_len if cfg.compares_mismatched else None,
            workers=cfg.data.num_workers,
            device=world.device,
        )

    def validation_batches(self) -> Iterator[StepBatches]:
        """Yield all validation sequences, each once, one micro-batch at a time, on the device.

        Yields nothing without `validation.source`.
        """
        if self.validation_dataset is None:
            return
        cfg = self.cfg
        for batches in make_validation_steps(
            self.validation_dataset,
            self._world.data_rank,
            self._world.data_ranks,
            batch_size=cfg.validation.batch_size or cfg.batch_size,
            pad_id=self.tokenizer.pad_id,
            multiple=compute_padded_multiple(cfg),
            packing_capacity=cfg.max_seq_len if cfg.data.packing else None,
            mismatched=cfg.max_seq_len if cfg.compares_mismatched else None,
        ):
            yield batches.to(self._world.device)

    def report(self) -> list[str]:
        """Return lines for the log: what was read, what was left out, and why."""
        validation = self.validation_dataset
        lines = format_report_lines(
            self.dataset.report, validation.report if validation is not None else None
        )
        if (
            self.dataset.report.template == "chat"
            and self.tokenizer.dated_template != self.tokenizer.chat_template
        ):
            lines.append(
                f"data: the chat template asks for today's date; it is {DATE:%d %b %Y} in training,"
                " and in the template of what is exported, so that a text is the same on each day"
            )
        return lines


def prepare_data(cfg: FullFinetuneConfig) -> PreparedData | UserError:
    """Tokenize in parallel, or map the cache; called before there is a process group.

    Replaces `auto` in `cfg`: `data.packing` by whether the model packs, `data.format` by the
    formats that the samples have. A UserError is raised in a run of one rank, and returned in a run
    of several: `get_prepared` then raises it on all of them.
    """
    try:
        # The quick checks come first: none of them reads a sample.
        check_output(cfg)
        source = resolve_model(cfg.model, scored=cfg.scores_sequences, num_labels=cfg.num_labels)
        validate_parallelism(cfg, source.spec)
        format_lines = settle_packing(cfg, source.spec) + settle_formats(cfg)
        prepared = build_datasets(cfg, load_tokenizer_for(cfg, source))
        for line in format_lines:
            get_logger().info(line)
        return prepared
    except UserError as error:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            raise
        return error


def get_prepared(prepared: PreparedData | UserError) -> PreparedData:
    """Return the datasets of `prepare_data`, or raise the error that it has returned."""
    if isinstance(prepared, UserError):
        raise prepared
    return prepared


def load_tokenizer_for(cfg: FullFinetuneConfig, source: ResolvedModel | None) -> Tokenizer:
    """Return the tokenizer of `tokenizer.path`, else that of the model's checkpoint.

    source: the resolved model; None: only `tokenizer.path` is looked at. Raise DataError if there
    is no tokenizer that can be read.
    """
    return load_tokenizer(_find_tokenizer_path(cfg, source), cfg.tokenizer.chat_template)


def _find_tokenizer_path(cfg: FullFinetuneConfig, source: ResolvedModel | None) -> Path:
    return Path(cfg.tokenizer.path or (source.folder if source else None) or "")


def check_pairs(data: TrainingData, other: str) -> None:
    """Raise ConfigError unless the samples are pairs of answers.

    other: what to do to train on samples with one answer, for the error line.
    """
    for key, dataset in (("data", data.dataset), ("validation", data.validation_dataset)):
        if dataset is not None and dataset.group != 2:
            raise ConfigError(
                f"{key}.format: found {dataset.report.format}, whose samples hold one answer,"
                f" expected pairs of a chosen and a rejected one; set {key}.format=preference, or"
                f" {other}"
            )
