"""Evaluate a model and its base, as each rank of `tune eval` does.

`evaluate` reads config and samples, measures both models on a share of the sequences, and lets
rank 0 print and write the results.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from recipe_lib.checkpoint.huggingface import check_weights, find_checkpoint
from recipe_lib.cli.arguments import check_output_folder
from recipe_lib.cli.export_trained import find_run, load_run_config
from recipe_lib.config import load_config
from recipe_lib.config.local_files import ADAPTER_CONFIG, ADAPTER_FOLDER
from recipe_lib.config.schema import FullFinetuneConfig, LoraFinetuneConfig
from recipe_lib.config.schema_data import DataConfig, resolve_validation_source
from recipe_lib.config.suggest import show
from recipe_lib.data import (
    Dataset,
    build_validation_dataset,
    format_report_lines,
    settle_formats,
    warn_of_positions,
)
from recipe_lib.errors import ConfigError, OutOfMemoryError
from recipe_lib.evaluation.harness import build_harness_model, flatten_metrics, run_tasks
from recipe_lib.evaluation.held_out import (
    BASE,
    EXAMPLES_FILE,
    PAGE_FILE,
    SUMMARY_FILE,
    TUNED,
    EvaluatedModel,
    Evaluation,
    ModelResults,
    load_evaluated_model,
    score_sequences,
)
from recipe_lib.generation.sample import (
    Question,
    build_questions,
    compute_metric,
    generate_answers,
)
from recipe_lib.generation.source import GenerationSource, choose_dtype, find_source
from recipe_lib.logs import get_logger, is_quiet
from recipe_lib.models.spec import ExternalSpec
from recipe_lib.parallel import World, make_world, meet_ranks, start_world
from recipe_lib.report.terminal import Table, format_table_lines, get_terminal_width
from recipe_lib.tokenizers import Tokenizer, load_tokenizer

FOLDER = "eval"
Result = TypeVar("Result")


def evaluate(arguments: argparse.Namespace) -> None:
    """Measure on all ranks; print and write on rank 0. Raises UserError."""
    run = find_run(arguments.what)
    named = Path(arguments.what).expanduser()
    is_adapter = any(
        (folder / ADAPTER_CONFIG).is_file() for folder in (named, named / ADAPTER_FOLDER)
    )
    # A full model's base is no part of it, and read later.
    source = find_source(arguments.what, arguments.base if is_adapter else None)
    if arguments.lm_eval:
        run_harness(arguments, source, run)
        return
    out = run / FOLDER if run is not None else None
    if arguments.out:
        out = Path(arguments.out).expanduser()
    if out is not None:
        check_output_folder("--out", out, (EXAMPLES_FILE, SUMMARY_FILE, PAGE_FILE))
    cfg = build_eval_config(arguments, source, run)
    with meet_ranks(cfg) as ranks:
        with ranks.heartbeat.phase("reading the data"):
            for line in settle_formats(cfg):
                get_logger().info(line)
            tokenizer = load_tokenizer(Path(cfg.tokenizer.path or ""), cfg.tokenizer.chat_template)
            dataset = _read_samples(cfg, tokenizer, source)
            questions = {} if arguments.no_generate else _build_questions(dataset, tokenizer)
        world = make_world(cfg, ranks)
        _check_generates(cfg, questions)
        evaluated = _load_evaluated_model(arguments, cfg=cfg, source=source, world=world)
        with _report_out_of_memory(source, world):
            models = _measure(
                evaluated,
                cfg,
                arguments,
                dataset=dataset,
                questions=questions,
                tokenizer=tokenizer,
                world=world,
            )
        if not world.is_main:
            return
        names = {TUNED: str(source.adapter or source.folder)}
        if BASE in models:
            names[BASE] = str(evaluated.base)
        settings = describe_settings(cfg, arguments, world.size)
        evaluation = Evaluation(models, names, dataset, questions, tokenizer, settings)
        _print_results(evaluation, arguments, out)


def _read_samples(cfg: Any, tokenizer: Tokenizer, source: GenerationSource) -> Dataset:
    """Return the held-out samples, tokenized; log what was read.

    Raises ConfigError and DataError.
    """
    dataset = build_validation_dataset(cfg, tokenizer)
    assert dataset is not None
    for line in format_report_lines(dataset.report):
        get_logger().info(line)
    warn_of_positions(source.spec.max_positions, dataset)
    # A pair has two answers, and no likelihood of its own.
    if dataset.group != 1:
        raise ConfigError(
            f"validation.source: {cfg.validation.source} holds pairs of answers, expected one"
            " answer a sample; give others with --data FILE"
        )
    return dataset


def _load_evaluated_model(
    arguments: argparse.Namespace, *, cfg: Any, source: GenerationSource, world: World
) -> EvaluatedModel:
    storage = source.storage if arguments.quantize_base == "auto" else arguments.quantize_base
    with _report_out_of_memory(source, world), world.heartbeat.phase("loading weights"):
        return load_evaluated_model(
            cfg, source, world, storage, _find_base_folder(arguments, cfg, source)
        )


def run_harness(arguments: argparse.Namespace, source: GenerationSource, run: Path | None) -> None:
    """Run tasks of lm-evaluation-harness, and print their numbers."""
    cfg = build_eval_config(arguments, source, run)
    tokenizer = load_tokenizer(Path(cfg.tokenizer.path or ""), cfg.tokenizer.chat_template)
    tasks = [name.strip() for name in arguments.lm_eval.split(",") if name.strip()]
    options = {name: getattr(arguments, name) for name in ("include_path", "num_fewshot", "limit")}
    with start_world(cfg) as world:
        evaluated = _load_evaluated_model(arguments, cfg=cfg, source=source, world=world)

        def measure_tasks(model: Any, which: str) -> dict[tuple[str, str], float]:
            harness_model = build_harness_model(
                model,
                spec=source.spec,
                tokenizer=tokenizer,
                device=world.device,
                batch_size=cfg.validation.batch_size or cfg.batch_size,
                seed=arguments.seed,
            )
            with _report_out_of_memory(source, world), world.heartbeat.phase(f"tasks ({which})"):
                return flatten_metrics(run_tasks(harness_model, tasks, **options))

        metrics = _measure_both(evaluated, arguments, measure_tasks)
    if arguments.json:
        by_name = {
            which: {f"{task} {name}": value for (task, name), value in values.items()}
            for which, values in metrics.items()
        }
        sys.stdout.write(json.dumps(by_name) + "\n")
        return
    rows = [
        [task, name, *(f"{values[task, name]:.4f}" for values in metrics.values())]
        for task, name in metrics[TUNED]
    ]
    table = Table("Tasks", ["task", "metric", *metrics], rows, left=("task", "metric"))
    print("\n".join(format_table_lines(table, get_terminal_width())))


def _find_base_folder(
    arguments: argparse.Namespace, cfg: Any, source: GenerationSource
) -> Path | None:
    """Return the folder that a full model's training began from: --base, or the run's model.path.

    None with adapters, whose base is in the model, and where none is named.
    """
    if source.adapter is not None or arguments.no_base:
        return None
    name = arguments.base or (cfg.model.path if find_run(arguments.what) is not None else None)
    if name is None:
        return None
    folder = find_checkpoint(name)
    # Its weights take the place of the tuned ones: names and shapes have to be the same.
    check_weights(source.spec, folder)
    return folder


def _build_questions(dataset: Dataset, tokenizer: Tokenizer) -> dict[int, Question]:
    """Return the questions by sequence, and log how many sequences have none."""
    questions = build_questions(dataset, tokenizer.stop_ids)
    if len(questions) < len(dataset):
        get_logger().info(
            "note: %d of %d sequences have no question to answer (plain text, or an answer that"
            " max_seq_len has cut); they count in loss and perplexity alone",
            len(dataset) - len(questions),
            len(dataset),
        )
    return questions


def _check_generates(cfg: Any, questions: dict[int, Question]) -> None:
    for name in ("tensor", "context", "pipeline"):
        if questions and getattr(cfg.parallel, name) > 1:
            raise ConfigError(
                f"parallel.{name}={getattr(cfg.parallel, name)}: answers are generated by whole"
                " layers on each rank; measure likelihoods alone with --no-generate, or leave"
                f" parallel.{name} at 1"
            )


@contextmanager
def _report_out_of_memory(source: GenerationSource, world: World) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"{show(str(source.folder))}: the evaluation does not fit on {world.device}; try a"
            " smaller validation.batch_size, fewer --max-new-tokens, --no-generate, or more ranks"
            " (--nproc_per_node)"
        ) from error


def _measure(
    evaluated: EvaluatedModel,
    cfg: Any,
    arguments: argparse.Namespace,
    *,
    dataset: Dataset,
    questions: dict[int, Question],
    tokenizer: Tokenizer,
    world: World,
) -> dict[str, ModelResults]:
    """Return likelihoods, answers and metrics of the base and the tuned model."""

    def measure_model(model: Any, which: str) -> ModelResults:
        results = ModelResults()
        with world.heartbeat.phase(f"likelihoods ({which})"):
            results.scores = score_sequences(
                model, evaluated.parallel, dataset, cfg, world, tokenizer.pad_id
            )
        if questions:
            options = {
                name: getattr(arguments, name)
                for name in ("max_new_tokens", "temperature", "top_k", "top_p")
            }
            with world.heartbeat.phase(f"answers ({which})"):
                results.answers = generate_answers(
                    model,
                    evaluated.source.spec,
                    questions,
                    world,
                    batch_size=cfg.validation.batch_size,
                    seed=arguments.seed,
                    stop_ids=tokenizer.stop_ids,
                    **options,
                )
        for name in ("exact_match", *arguments.metric) if questions else ():
            results.metrics[name] = compute_metric(name, results.answers, questions, tokenizer)
        return results

    return _measure_both(evaluated, arguments, measure_model)


def _measure_both(
    evaluated: EvaluatedModel, arguments: argparse.Namespace, measure: Callable[[Any, str], Result]
) -> dict[str, Result]:
    """Measure the tuned model and its base; return both in a table's order."""
    # First, as the base's weights may take the place of the tuned ones.
    tuned = measure(evaluated.model, TUNED)
    if arguments.no_base or evaluated.base is None:
        return {TUNED: tuned}
    with evaluated.use_base_weights() as base:
        return {BASE: measure(base, BASE), TUNED: tuned}


def _print_results(evaluation: Evaluation, arguments: argparse.Namespace, out: Path | None) -> None:
    if out is not None:
        evaluation.write(out)
    if arguments.json:
        sys.stdout.write(json.dumps(evaluation.build_summary()) + "\n")
        return
    print("\n".join(format_table_lines(evaluation.build_table(), get_terminal_width())))
    if not is_quiet():
        summary = evaluation.build_summary()
        print(
            f"{summary['sequences']} sequences, {summary['label_tokens']} label tokens,"
            f" {summary['answers']} answers"
        )
        for which, name in evaluation.names.items():
            print(f"{which}: {name}")
        if out is not None:
            print(f"each example: {out / 'examples.jsonl'}\npage: {out / 'report.html'}")


# The config that a model is evaluated with has a run's samples and settings, or the defaults.
_BATCH = 8  # sequences in a batch, unless an override says otherwise
# Keys of a run's section `data` that do not hold for held-out samples, or that others set.
_NOT_CARRIED = (
    "source",
    "sources",
    "format",
    "split",
    "columns",
    "max_samples",
    "packing",
    "shuffle",
)
# Keys of a run, besides its model, by which its weights are computed with.
_OF_RUNS = ("dtype", "seed", "max_seq_len", "device", "qat", "qat_group_size")
_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float64": "fp64"}


def build_eval_config(
    arguments: argparse.Namespace, source: GenerationSource, run: Path | None
) -> FullFinetuneConfig:
    """Return the config of an evaluation, whose validation.source are the held-out samples.

    Raises ConfigError if nothing names samples.
    """
    trained = None if run is None else load_run_config(run, arguments.recipe)
    words = [f"tokenizer.path={json.dumps(str(source.tokenizer))}"]
    words += _list_model_overrides(source, trained)
    words += _list_sample_overrides(arguments, trained)
    schema = FullFinetuneConfig if source.adapter is None else LoraFinetuneConfig
    cfg: FullFinetuneConfig = load_config([], [*words, *arguments.overrides], schema)
    return cfg


def _list_model_overrides(
    source: GenerationSource, trained: FullFinetuneConfig | None
) -> list[str]:
    """Return overrides for model, dtype and length: the run's, or what the model's files say."""
    if trained is not None:
        words = [f"{name}={json.dumps(getattr(trained, name))}" for name in _OF_RUNS]
        model = dataclasses.asdict(trained.model)
        set_values = {name: value for name, value in model.items() if value is not None}
        return words + [f"model.{name}={json.dumps(value)}" for name, value in set_values.items()]
    words = [f"model.path={json.dumps(str(source.folder))}"]
    if isinstance(source.spec, ExternalSpec):
        words.append(f"model.implementation={source.spec.implementation}")
    dtype = source.dtype or str(choose_dtype("auto", source.config)).removeprefix("torch.")
    max_seq_len = min(FullFinetuneConfig().max_seq_len, source.spec.max_positions)
    return [*words, f"dtype={_NAMES.get(dtype, 'fp32')}", f"max_seq_len={max_seq_len}"]


def _list_sample_overrides(
    arguments: argparse.Namespace, trained: FullFinetuneConfig | None
) -> list[str]:
    """Return overrides that name the samples, and say how they become tokens.

    Raises ConfigError if nothing names samples.
    """
    words = [f"validation.batch_size={_BATCH}"]
    validation = None
    if trained is not None:
        defaults = DataConfig()
        for field in dataclasses.fields(DataConfig):
            value = getattr(trained.data, field.name)
            # The samples have to become tokens as those of training did.
            if field.name not in _NOT_CARRIED and value != getattr(defaults, field.name):
                words.append(f"data.{field.name}={json.dumps(value)}")
        if trained.validation.batch_size is not None:
            words.append(f"validation.batch_size={trained.validation.batch_size}")
        validation = resolve_validation_source(trained.data, trained.validation)
    sources = [word for word in arguments.overrides if word.startswith("validation.source=")]
    if arguments.data:
        values = {"source": arguments.data, "format": arguments.format or "auto"}
    elif validation is not None:
        values = {
            "source": validation.source,
            "format": validation.format,
            "split": validation.split,
            "columns": validation.columns,
        }
    elif sources:
        values = {"source": sources[-1].partition("=")[2]}
    elif arguments.lm_eval:
        return [*words, "data.source=none.jsonl"]  # tasks have samples of their own
    else:
        reason = (
            "its config has no validation.source"
            if trained is not None
            else "is no run, which would name them"
        )
        raise ConfigError(
            f"{show(arguments.what)}: {reason}; give held-out samples with --data FILE"
        )
    words += [f"data.{name}={json.dumps(value)}" for name, value in values.items()]
    words.append(f"validation.source={json.dumps(values['source'])}")
    max_samples = arguments.max_samples
    # The run's limit is for its own samples.
    if not max_samples and validation is not None and not arguments.data:
        max_samples = validation.max_samples
    return words if max_samples is None else [*words, f"validation.max_samples={max_samples}"]


def describe_settings(cfg: Any, arguments: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Return what an evaluation was done with, for its page."""
    settings = {
        "validation.source": cfg.validation.source,
        "data.format": cfg.data.format,
        "max_seq_len": cfg.max_seq_len,
        "dtype": cfg.dtype,
        **({} if cfg.qat is None else {"qat": f"{cfg.qat}, the base's weights as they are"}),
        "ranks": ranks,
    }
    if not arguments.no_generate:
        drawn = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
        settings |= {
            name: getattr(arguments, name) for name in drawn if getattr(arguments, name) is not None
        }
    return settings
