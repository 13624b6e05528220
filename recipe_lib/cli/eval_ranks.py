"""What each rank of `tune eval` does."""

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
from recipe_lib.config.recipes.lora_finetune_distributed import LoraFinetuneConfig
from recipe_lib.config.schema import FullFinetuneConfig
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
from recipe_lib.evaluation.evaluated_model import EvaluatedModel, load_evaluated_model
from recipe_lib.evaluation.harness import build_harness_model, flatten_metrics, run_tasks
from recipe_lib.evaluation.results import (
    BASE,
    EXAMPLES_FILE,
    PAGE_FILE,
    SUMMARY_FILE,
    TUNED,
    Evaluation,
    ModelResults,
    score_sequences,
)
from recipe_lib.generation.answer_questions import (
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
    """Measures, prints and writes; rank 0 does both. Raises UserError."""
    run = find_run(arguments.what)
    named = Path(arguments.what).expanduser()
    is_adapter = any(
        (folder / ADAPTER_CONFIG).is_file() for folder in (named, named / ADAPTER_FOLDER)
    )
    source = find_source(
        arguments.what, arguments.base if is_adapter else None
    )  # a full model's is read later
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
        placed = _load_evaluated_model(arguments, cfg, source, world)
        with _report_out_of_memory(source, world):
            models = _measure(placed, cfg, arguments, dataset, questions, tokenizer, world)
        if not world.is_main:
            return
        names = {TUNED: str(source.adapter or source.folder)} | (
            {BASE: str(placed.base)} if BASE in models else {}
        )
        settings = describe_settings(cfg, arguments, world.size)
        _print_results(
            Evaluation(models, names, dataset, questions, tokenizer, settings), arguments, out
        )


def _read_samples(cfg: Any, tokenizer: Tokenizer, source: GenerationSource) -> Dataset:
    """Return the held-out samples, tokenized, after a word on what was read. Raises ConfigError and
    DataError.
    """
    dataset = build_validation_dataset(cfg, tokenizer)
    assert dataset is not None
    for line in format_report_lines(dataset.report):
        get_logger().info(line)
    warn_of_positions(source.spec.max_positions, dataset)
    if dataset.group != 1:
        raise ConfigError(
            f"validation.source: {cfg.validation.source} holds pairs of answers, expected one"
            " answer a sample; give others with --data FILE"
        )
    return dataset


def _load_evaluated_model(
    arguments: argparse.Namespace, cfg: Any, source: GenerationSource, world: World
) -> EvaluatedModel:
    storage = source.storage if arguments.quantize_base == "auto" else arguments.quantize_base
    with _report_out_of_memory(source, world), world.heartbeat.phase("loading weights"):
        return load_evaluated_model(
            cfg, source, world, storage, _find_base_folder(arguments, cfg, source)
        )


def run_harness(arguments: argparse.Namespace, source: GenerationSource, run: Path | None) -> None:
    """Runs tasks of lm-evaluation-harness, and prints their numbers."""
    cfg = build_eval_config(arguments, source, run)
    tokenizer = load_tokenizer(Path(cfg.tokenizer.path or ""), cfg.tokenizer.chat_template)
    tasks = [name.strip() for name in arguments.lm_eval.split(",") if name.strip()]
    options = {name: getattr(arguments, name) for name in ("include_path", "num_fewshot", "limit")}
    with start_world(cfg) as world:
        placed = _load_evaluated_model(arguments, cfg, source, world)
        size = cfg.validation.batch_size or cfg.batch_size

        def measured(model: Any, which: str) -> dict[tuple[str, str], float]:
            ours = build_harness_model(
                model,
                spec=source.spec,
                tokenizer=tokenizer,
                device=world.device,
                batch_size=size,
                seed=arguments.seed,
            )
            with _report_out_of_memory(source, world), world.heartbeat.phase(f"tasks ({which})"):
                return flatten_metrics(run_tasks(ours, tasks, **options))

        found = _measure_both(placed, arguments, measured)
    if arguments.json:
        numbers = {
            which: {f"{task} {name}": value for (task, name), value in rows.items()}
            for which, rows in found.items()
        }
        sys.stdout.write(json.dumps(numbers) + "\n")
        return
    rows = [
        [task, name, *(f"{each[task, name]:.4f}" for each in found.values())]
        for task, name in found[TUNED]
    ]
    table = Table("Tasks", ["task", "metric", *found], rows, left=("task", "metric"))
    print("\n".join(format_table_lines(table, get_terminal_width())))


def _find_base_folder(
    arguments: argparse.Namespace, cfg: Any, source: GenerationSource
) -> Path | None:
    """Of a model without adapters what its training began from: --base, or the run's model.path."""
    if source.adapter is not None or arguments.no_base:
        return None
    named = arguments.base or (cfg.model.path if find_run(arguments.what) is not None else None)
    if named is None:
        return None
    folder = find_checkpoint(named)
    check_weights(source.spec, folder)  # they take the place of the tuned ones
    return folder


def _build_questions(dataset: Dataset, tokenizer: Tokenizer) -> dict[int, Question]:
    """The questions of all sequences that have one, and a line about those that have none."""
    asked = build_questions(dataset, tokenizer.stop_ids)
    if len(asked) < len(dataset):
        get_logger().info(
            "note: %d of %d sequences have no question to answer (plain text, or an answer that \
max_seq_len has cut); "
            "they count in loss and perplexity alone",
            len(dataset) - len(asked),
            len(dataset),
        )
    return asked


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
    placed: EvaluatedModel,
    cfg: Any,
    arguments: argparse.Namespace,
    dataset: Dataset,
    questions: dict[int, Question],
    tokenizer: Tokenizer,
    world: World,
) -> dict[str, ModelResults]:
    """The tuned model, then its base, whose weights may take the place of the tuned ones; in the
    order of the table.
    """

    def measured(model: Any, which: str) -> ModelResults:
        found = ModelResults()
        with world.heartbeat.phase(f"likelihoods ({which})"):
            found.scores = score_sequences(
                model, placed.parallel, dataset, cfg, world, tokenizer.pad_id
            )
        if questions:
            options = {
                name: getattr(arguments, name)
                for name in ("max_new_tokens", "temperature", "top_k", "top_p")
            }
            with world.heartbeat.phase(f"answers ({which})"):
                found.answers = generate_answers(
                    model,
                    placed.source.spec,
                    questions,
                    world,
                    batch_size=cfg.validation.batch_size,
                    seed=arguments.seed,
                    stop_ids=tokenizer.stop_ids,
                    **options,
                )
        for name in ("exact_match", *arguments.metric) if questions else ():
            found.metrics[name] = compute_metric(name, found.answers, questions, tokenizer)
        return found

    return _measure_both(placed, arguments, measured)


def _measure_both(
    placed: EvaluatedModel, arguments: argparse.Namespace, measure: Callable[[Any, str], Result]
) -> dict[str, Result]:
    """Measure the tuned model, then its base, whose weights may take its place; return both in a
    table's order.
    """
    tuned = measure(placed.model, TUNED)
    if arguments.no_base or placed.base is None:
        return {TUNED: tuned}
    with placed.use_base_weights() as base:
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


# The config that a model is evaluated with: of a run its own samples and settings, of any other
# model the defaults.


_BATCH = 8  # sequences, where nothing else is said
# What of a run's section `data` does not hold for held-out samples, or is said in another way.
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
# Of a run, besides its model: how its weights are computed with.
_OF_RUNS = ("dtype", "seed", "max_seq_len", "device", "qat", "qat_group_size")
_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float64": "fp64"}


def build_eval_config(
    arguments: argparse.Namespace, source: GenerationSource, run: Path | None
) -> FullFinetuneConfig:
    """The config; its validation.source is what is looked at. ConfigError if there is none."""
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
    """Model, dtype, seed: of the run, or what the files say."""
    if trained is not None:
        model = dataclasses.asdict(trained.model)
        words = [
            f"model.{name}={json.dumps(value)}"
            for name, value in model.items()
            if value is not None
        ]
        words += [f"{name}={json.dumps(getattr(trained, name))}" for name in _OF_RUNS]
        return words
    words = [f"model.path={json.dumps(str(source.folder))}"]
    if isinstance(source.spec, ExternalSpec):
        words.append(f"model.implementation={source.spec.implementation}")
    found = source.dtype or str(choose_dtype("auto", source.config)).removeprefix("torch.")
    longest = min(FullFinetuneConfig().max_seq_len, source.spec.max_positions)
    return [*words, f"dtype={_NAMES.get(found, 'fp32')}", f"max_seq_len={longest}"]


def _list_sample_overrides(
    arguments: argparse.Namespace, trained: FullFinetuneConfig | None
) -> list[str]:
    """Where the samples are, and how they become tokens."""
    words, held = [f"validation.batch_size={_BATCH}"], None
    if trained is not None:
        usual = DataConfig()
        for field in dataclasses.fields(DataConfig):
            value = getattr(trained.data, field.name)
            if field.name not in _NOT_CARRIED and value != getattr(usual, field.name):
                words.append(f"data.{field.name}={json.dumps(value)}")
        if trained.validation.batch_size is not None:
            words.append(f"validation.batch_size={trained.validation.batch_size}")
        held = resolve_validation_source(trained.data, trained.validation)
    if arguments.data:
        given = {"source": arguments.data, "format": arguments.format or "auto"}
    elif held is not None:
        given = {
            "source": held.source,
            "format": held.format,
            "split": held.split,
            "columns": held.columns,
        }
    elif named := [word for word in arguments.overrides if word.startswith("validation.source=")]:
        given = {"source": named[-1].partition("=")[2]}
    elif arguments.lm_eval:
        return [*words, "data.source=none.jsonl"]  # tasks have samples of their own
    else:
        whose = (
            "its config has no validation.source"
            if trained is not None
            else "is no run, which would name them"
        )
        raise ConfigError(
            f"{show(arguments.what)}: {whose}; give held-out samples with --data FILE"
        )
    words += [f"data.{name}={json.dumps(value)}" for name, value in given.items()]
    words.append(f"validation.source={json.dumps(given['source'])}")
    most = arguments.max_samples or (
        held.max_samples if held is not None and not arguments.data else None
    )
    return words if most is None else [*words, f"validation.max_samples={most}"]


def describe_settings(cfg: Any, arguments: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """What an evaluation was done with, for its page."""
    found = {
        "validation.source": cfg.validation.source,
        "data.format": cfg.data.format,
        "max_seq_len": cfg.max_seq_len,
        "dtype": cfg.dtype,
        **({} if cfg.qat is None else {"qat": f"{cfg.qat}, the base's weights as they are"}),
        "ranks": ranks,
    }
    if not arguments.no_generate:
        drawn = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
        found |= {
            name: getattr(arguments, name) for name in drawn if getattr(arguments, name) is not None
        }
    return found
