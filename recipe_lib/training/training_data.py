"""A recipe's data as one object: tokenizer, datasets, which sequences each step takes, and the
batches made of them.
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
from recipe_lib.parallel.world import World, derive_seed
from recipe_lib.tokenizers import Tokenizer, load_tokenizer
from recipe_lib.tokenizers.template_process import DATE
from recipe_lib.training.best_step import BestStep
from recipe_lib.training.output import check_output
from recipe_lib.training.resolve_model import ResolvedModel, resolve_model, validate_parallelism


class TrainingData:
    """What `setup_data` of a recipe keeps.

    tokenizer, tokenizer_path; chat_template: a file in place of the tokenizer's own, or None.
    dataset, validation_dataset (or None): datasets. plan: which sequences each step takes, a
    function of (seed, epoch, step) alone; total_steps: of the run. questions: those of the
    validation that answers are generated to. best: the best step until now, by its validations.
    """

    def __init__(
        self,
        cfg: FullFinetuneConfig,
        source: ResolvedModel,
        world: World,
        prepared: PreparedData | None = None,
    ) -> None:
        """Takes what is prepared; else tokenizes, or maps what is in the cache. Raises
        DataError.
        """
        self._cfg, self._world = cfg, world
        self.tokenizer_path = _find_tokenizer_path(cfg, source)
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
        self.global_batch_size = cfg.batch_size * cfg.gradient_accumulation_steps * world.data_ranks
        self.plan = DataPlan(
            self.dataset,
            seed=derive_seed(cfg.seed, "data"),
            slots_per_step=self.global_batch_size,
            shuffle=cfg.data.shuffle,
            packing_capacity=cfg.max_seq_len if cfg.data.packing else None,
        )
        self.total_steps = self.plan.total_steps(cfg.epochs, cfg.max_steps)
        self.questions = self._questions()
        self.best = BestStep(cfg)

    def _questions(self) -> dict[int, Question]:
        """Return what validation generates answers to. ConfigError where a metric of answers finds
        none to measure.
        """
        if self.validation_dataset is None or not self.generated_metrics:
            return {}
        found = build_questions(self.validation_dataset, self.tokenizer.stop_ids)
        if not found:
            raise ConfigError(
                f"validation.metrics: {self.generated_metrics[0]} is measured of answers, and no"
                f" sequence of {self._cfg.validation.source} has a question before one; remove it,"
                " or choose other samples"
            )
        return found

    @property
    def scored_metrics(self) -> list[str]:
        """Of `validation.metrics` those that likelihoods tell."""
        return [name for name in self._cfg.validation.metrics if name in SCORED_METRICS]

    @property
    def generated_metrics(self) -> list[str]:
        """Of `validation.metrics` those of generated answers."""
        return list_generated_metrics(self._cfg)

    def generation_options(self) -> dict[str, Any]:
        """Return how validation generates answers, for `generate_answers`: the likeliest tokens."""
        validation = self._cfg.validation
        return {
            "batch_size": validation.batch_size or self._cfg.batch_size,
            "seed": self._cfg.seed,
            "max_new_tokens": validation.max_new_tokens,
            "stop_ids": self.tokenizer.stop_ids,
        }

    def identity(self) -> dict[str, Any]:
        """Return what has to be the same for a step to mean the same sequences."""
        order = {"data.shuffle": self._cfg.data.shuffle, "data.packing": self._cfg.data.packing}
        return {
            "data": self.dataset.fingerprint,
            "global_batch_size": self.global_batch_size,
            "seed": self._cfg.seed,
            "order": order | {"weight": [float(weight) for weight in self.dataset.weights]},
        }

    def batches(self, first_step: int) -> Iterator[StepBatches]:
        """This rank's micro-batches of each step from `first_step` (from 0) on, on the device."""
        cfg, world = self._cfg, self._world
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
        """Return all validation sequences, each once, one micro-batch a time, on the device."""
        if self.validation_dataset is None:
            return
        cfg, world = self._cfg, self._world
        for batches in make_validation_steps(
            self.validation_dataset,
            world.data_rank,
            world.data_ranks,
            cfg.validation.batch_size or cfg.batch_size,
            self.tokenizer.pad_id,
            multiple=compute_padded_multiple(cfg),
            packing_capacity=cfg.max_seq_len if cfg.data.packing else None,
            mismatched=cfg.max_seq_len if cfg.compares_mismatched else None,
        ):
            yield batches.to(world.device)

    def report(self) -> list[str]:
        """Return lines on what was read and what was left out."""
        validation = self.validation_dataset
        found = format_report_lines(
            self.dataset.report, validation.report if validation is not None else None
        )
        if (
            self.dataset.report.template == "chat"
            and self.tokenizer.dated_template != self.tokenizer.chat_template
        ):
            found.append(
                f"data: the chat template asks for today's date; it is {DATE:%d %b %Y} in training,"
                " and in the template of what is exported, so that a text is the same on each day"
            )
        return found


def prepare(cfg: FullFinetuneConfig) -> PreparedData | UserError:
    """Tokenize into the cache, in parallel: called before ranks wait for each other in a process
    group.

    With several ranks what is wrong with config, model or data is returned, to be raised on all of
    them; alone it is raised.
    """
    try:
        check_output(cfg)
        source = resolve_model(cfg.model, scored=cfg.scores_sequences, num_labels=cfg.num_labels)
        validate_parallelism(cfg, source.spec)
        found = settle_formats(cfg)
        prepared = build_datasets(cfg, load_tokenizer_for(cfg, source))
        for line in found:
            get_logger().info(line)
        return prepared
    except UserError as error:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            raise
        return error


def prepared_or_raised(prepared: PreparedData | UserError) -> PreparedData:
    """Return what `prepare` has made, or raises what it has returned."""
    if isinstance(prepared, UserError):
        raise prepared
    return prepared


def load_tokenizer_for(cfg: FullFinetuneConfig, source: ResolvedModel | None) -> Tokenizer:
    """Return the tokenizer of a config, or that of its checkpoint. Raise DataError."""
    return load_tokenizer(_find_tokenizer_path(cfg, source), cfg.tokenizer.chat_template)


def _find_tokenizer_path(cfg: FullFinetuneConfig, source: ResolvedModel | None) -> Path:
    return Path(cfg.tokenizer.path or (source.folder if source else None) or "")


def check_pairs(data: TrainingData, other: str) -> None:
    """Raise ConfigError unless the samples are pairs of answers. other: what takes single ones."""
    for key, dataset in (("data", data.dataset), ("validation", data.validation_dataset)):
        if dataset is not None and dataset.group != 2:
            raise ConfigError(
                f"{key}.format: found {dataset.report.format}, whose samples hold one answer,"
                f" expected pairs of a chosen and a rejected one; set {key}.format=preference, or"
                f" {other}"
            )
