"""Look at the samples of a config as they will be trained, for `tune data`.

main.py calls `run(words)`. `show` prints sequences with their label tokens (those that the loss
counts), `check` reads every sample and reports faults. An item is what a step takes: a sequence, or
a pair of two. A slot is one item, or with packing the items that share a sequence.
"""

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe_lib.cli.arguments import (
    SWITCH,
    ConfigParser,
    find_low_numbers,
)
from recipe_lib.cli.recipes import open_config
from recipe_lib.cli.start_checks import check_data
from recipe_lib.config.local_files import find_downloaded_model, find_model_folder
from recipe_lib.config.suggest import did_you_mean, show
from recipe_lib.errors import DONE, USER_ERROR, ConfigError, escape_invisible, raise_faults
from recipe_lib.logs import is_quiet, print_wrapped, wants_color
from recipe_lib.units import pluralize

if TYPE_CHECKING:
    from recipe_lib.data.inspect import ShownSequence
    from recipe_lib.tokenizers import Tokenizer

# (is a label token, is a special token) -> style of its text on a terminal
COLORS = {
    (True, True): "bold green",
    (True, False): "green",
    (False, True): "yellow",
    (False, False): "dim",
}
ACTIONS = ("show", "check")
# Names of the faults that `check` reports. A copy of those in recipe_lib.data.inspect, which is
# imported only to look at samples.
FINDINGS = (
    "bad-samples",
    "truncation",
    "no-answer-left",
    "untrained-ends",
    "generation-marks",
    "unseen-messages",
    "split-special-tokens",
    "control-characters",
    "label-tokens",
    "duplicates",
    "overlap",
    "untrained-tokens",
)
DESCRIPTION = """Looks at the samples of a config, with the tokenizer and the template that \
training would use.

  show   prints sequences as they will be trained: label tokens in green (off a terminal between « \
and »), special
         tokens in another color, the border of each document of a pack
  check  reads every sample once and reports what is wrong with them; exit code 2 if anything is"""
PARSER = ConfigParser(
    "data",
    DESCRIPTION,
    {
        "action": {"metavar": "show|check", "choices": ACTIONS, "help": "what to do"},
        "--limit": {
            "type": int,
            "default": 5,
            "metavar": "N",
            "help": "show: how many sequences (packs); default: 5",
        },
        "--step": {
            "type": int,
            "default": 0,
            "metavar": "N",
            "help": "show: those of this step on, from 0",
        },
        "--validation": SWITCH | {"help": "show: sequences of validation.source"},
        "--allow": {
            "metavar": "FAULT",
            "action": "append",
            "default": [],
            "help": "check: a finding to ignore, by its name",
        },
        "--json": SWITCH | {"help": "the result as one JSON object"},
        "--recipe": {"help": "check the config against this recipe (name or path)"},
        "--plugin": {
            "metavar": "FILE",
            "action": "append",
            "default": [],
            "help": "as for `tune run`",
        },
    },
)


def run(words: list[str]) -> int:
    """Print samples, or the findings over all of them; return the exit code."""
    arguments = read_arguments(words)
    cfg = open_config(arguments.configs, arguments)[1].cfg
    check_data(cfg)
    return (
        show_samples(cfg, arguments)
        if arguments.action == "show"
        else check_samples(cfg, arguments)
    )


def read_arguments(words: list[str]) -> argparse.Namespace:
    """Return the command line.

    Raises ConfigError for an unknown action, option or name of a fault, and a number that is too
    low.
    """
    # Before argparse, whose message would name no nearest word.
    if words and words[0] not in (*ACTIONS, "-h", "--help"):
        known = did_you_mean(words[0], ACTIONS) or "; expected show or check"
        raise ConfigError(f"tune data: unknown action {show(words[0])}{known}")
    arguments = PARSER.parse(words)
    for name in arguments.allow:
        if name not in FINDINGS:
            hint = did_you_mean(name, FINDINGS) or f"; expected one of {', '.join(FINDINGS)}"
            raise ConfigError(f"--allow: unknown fault {show(name)}{hint}")
    raise_faults(ConfigError, find_low_numbers(arguments, limit=1, step=0))
    return arguments


def read_datasets(cfg: Any, arguments: argparse.Namespace) -> tuple["Tokenizer", Any, Any, Any]:
    """Return (tokenizer, training set, validation set or None, the resolved model or None).

    The model is None where only its tokenizer is needed or here. Prints a line for each format that
    was found by the samples' columns. Raises DataError for faulty samples, which `check` counts
    instead, and ConfigError for what the samples cannot be read with.
    """
    from recipe_lib.data import build_datasets, settle_formats
    from recipe_lib.training.resolve_model import resolve_model
    from recipe_lib.training.training_data import load_tokenizer_for

    checks = arguments.action == "check"
    if checks:
        # What would end a run at the first bad sample is counted over all of them.
        data = dataclasses.replace(
            cfg.data,
            on_invalid="skip",
            check_label_mask=False,
            cache=False,
            truncation="truncate" if cfg.data.truncation == "error" else cfg.data.truncation,
        )
        cfg = dataclasses.replace(cfg, data=data)
    source = None
    # A model's tokenizer may be here without its weights, by `tune download --include`.
    if cfg.tokenizer.path is None and (folder := _find_folder_without_weights(cfg)):
        cfg = dataclasses.replace(
            cfg, tokenizer=dataclasses.replace(cfg.tokenizer, path=str(folder))
        )
    elif cfg.tokenizer.path is None:
        source = resolve_model(cfg.model, scored=cfg.scores_sequences, num_labels=cfg.num_labels)
    format_lines = "".join(f"{escape_invisible(line)}\n" for line in settle_formats(cfg))
    if checks and not arguments.json:
        sys.stdout.write(format_lines)
    tokenizer = load_tokenizer_for(cfg, source)
    dataset, validation = build_datasets(cfg, tokenizer, may_be_empty=checks)
    # Of `show` standard output has the sequences alone.
    if not (checks or arguments.json or is_quiet()):
        sys.stderr.write(format_lines)
    return tokenizer, dataset, validation, source


def _find_folder_without_weights(cfg: Any) -> Path | None:
    """Return the model's folder where only its tokenizer was downloaded, else None."""
    name = cfg.model.path
    folder = (find_model_folder(name) or find_downloaded_model(name)) if name else None
    return folder if folder is not None and not any(folder.glob("*.safetensors")) else None


def show_samples(cfg: Any, arguments: argparse.Namespace) -> int:
    """Print the first sequences, or packs, in the order that training takes them from a step on.

    Of the validation set they come in the file's order. Raises ConfigError if there is none.
    """
    from recipe_lib.data.inspect import show_item

    tokenizer, dataset, validation, _ = read_datasets(cfg, arguments)
    if cfg.data.packing == "auto":  # no model is built here, which would decide
        sys.stderr.write("data.packing=auto: shown as for a model that packs\n")
    if arguments.validation:
        if validation is None:
            raise ConfigError(
                "--validation: the config has no validation.source; set it, or leave"
                " --validation out"
            )
        dataset = validation
        slots = [[item] for item in range(min(arguments.limit, validation.items))]
    else:
        slots = list(
            iterate_slots(cfg, dataset=dataset, step=arguments.step, count=arguments.limit)
        )
    # The documents of each slot: an item of pairs has two, and a pack has several items.
    sequences = [
        [document for item in slot for document in show_item(dataset, item, tokenizer)]
        for slot in slots
    ]
    if arguments.json:
        as_dicts = [list(map(dataclasses.asdict, documents)) for documents in sequences]
        print(json.dumps({"sequences": as_dicts}))
        return DONE
    for number, documents in enumerate(sequences, start=1):
        print_slot(number, documents, packed=cfg.data.packing and not arguments.validation)
    return DONE


def iterate_slots(cfg: Any, dataset: Any, step: int, count: int) -> Iterable[list[int]]:
    """Yield the items of each of the `count` slots that one process takes from a step on.

    step: from 0. Raises ConfigError for a step after the last epoch.
    """
    from recipe_lib.data import DataPlan
    from recipe_lib.training import derive_seed

    plan = DataPlan(
        dataset,
        seed=derive_seed(cfg.seed, "data"),
        slots_per_step=1,
        shuffle=cfg.data.shuffle,
        packing_capacity=cfg.max_seq_len if cfg.data.packing else None,
    )
    # The plan has one slot a step, so that slots count; a step of the run takes several.
    total_slots = plan.count_total_steps(cfg.epochs, None)
    slots_per_step = cfg.batch_size * cfg.gradient_accumulation_steps
    first = step * slots_per_step
    if first >= total_slots:
        raise ConfigError(
            f"--step: found {step}, expected at most {(total_slots - 1) // slots_per_step}: the"
            " config's epochs end there"
        )
    for index in range(first, min(first + count, total_slots)):
        yield [int(item) for slot in plan.list_slots(index) for item in slot]


def print_slot(number: int, documents: list["ShownSequence"], packed: bool) -> None:
    """Print one sequence of a batch: a document, a pair, or a pack of documents.

    number: of the sequence in the output, from 1. packed: call it a pack.
    """
    from rich.text import Text

    from recipe_lib.report.terminal import get_terminal_width, open_console, put

    colors = wants_color(sys.stdout)
    console = open_console(get_terminal_width(), colors)
    num_tokens = sum(document.tokens for document in documents)
    num_labels = sum(document.trained for document in documents)
    kind = "pack" if packed else "sequence"
    parts = f" in {len(documents)} documents" if len(documents) > 1 else ""
    counts = (
        f"{num_tokens} tokens{parts}, {num_labels} trained ({num_labels / max(1, num_tokens):.0%})"
    )
    put(console, f"── {kind} {number}: {counts}", wrap=False)
    for index, document in enumerate(documents, start=1):
        answer = f", {document.answer}" if document.answer else ""
        heading = (
            f"-- document {index} of {len(documents)}{answer}: {document.place},"
            f" {document.tokens} tokens"
            if len(documents) > 1
            else f"   {document.place}{answer}"
        )
        put(console, heading, wrap=False)
        line = Text()
        for is_trained, pieces in itertools.groupby(
            document.pieces, key=lambda piece: piece.trained
        ):
            # Without colors, marks stand around the label tokens.
            line.append("«" if is_trained and not colors else "")
            for piece in pieces:
                style = COLORS[is_trained, piece.special] if colors else ""
                line.append(escape_invisible(piece.text, keep="\n"), style)
            line.append("»" if is_trained and not colors else "")
        console.print(line, soft_wrap=True)
    console.print()
    # Not by `read_console`, which would strip the spaces at the ends of lines: they are tokens.
    sys.stdout.write(console.file.getvalue())  # type: ignore[attr-defined]


def check_samples(cfg: Any, arguments: argparse.Namespace) -> int:
    """Print counts and faults; return exit code 2 if --allow does not name all of the faults."""
    from recipe_lib.data import format_report_lines
    from recipe_lib.data.inspect import collect_ids, inspect_datasets, list_special_tokens

    tokenizer, dataset, validation, source = read_datasets(cfg, arguments)
    untrained_tokens = None  # texts; None: the weights are not here
    if source is not None and source.folder is not None:
        from recipe_lib.checkpoint.huggingface import find_untrained_embeddings

        # Only those that the samples use.
        special_tokens = list_special_tokens(tokenizer)  # id -> text
        used_ids = sorted(special_tokens.keys() & collect_ids(dataset, validation))
        untrained_tokens = [
            special_tokens[token]
            for token in find_untrained_embeddings(
                source.spec, folder=source.folder, tokens=used_ids, special=special_tokens
            )
        ]
    inspection = inspect_datasets(
        dataset,
        validation=validation,
        max_seq_len=cfg.max_seq_len,
        untrained_tokens=untrained_tokens,
    )
    faults = [finding for finding in inspection.findings if finding.name not in arguments.allow]
    if arguments.json:
        report = {
            **inspection.counts,
            "findings": [dataclasses.asdict(finding) for finding in inspection.findings],
        }
        print(json.dumps(report))
    else:
        held_out = validation.report if validation is not None else None
        print_report(inspection, format_report_lines(dataset.report, held_out, faults=False))
    if note := dataset.report.describe_plain_template():
        print(note, file=sys.stderr)
    for finding in faults:
        # Places are files and lines of the first samples that have the fault.
        last_line = [f"  and {finding.more} more"] if finding.more and finding.places else []
        for line in (finding.line, *(f"  {place}" for place in finding.places), *last_line):
            print(f"error: {finding.name}: {escape_invisible(line)}", file=sys.stderr)
    return USER_ERROR if faults else DONE


def print_report(inspection: Any, lines: list[str]) -> None:
    """Print the counts of an inspection in words. lines: on what was read, printed first."""
    counts = inspection.counts
    for line in lines:
        print_wrapped(escape_invisible(line))
    if counts["sequences"]:
        print_wrapped(
            f"lengths: {counts['shortest_sequence']} to {counts['longest_sequence']} tokens,"
            f" median {counts['median_sequence']}; packed into"
            f" {pluralize(counts['packs'], 'sequence')} of {counts['pack_length']} they fill"
            f" {counts['packing_efficiency']:.1%} of them"
        )
    if counts["sequences"] and counts.get("untrained_tokens") == []:
        print_wrapped("special tokens: every one that the samples use has a trained embedding")
    if "validation" in counts:
        held_out = counts["validation"]
        count = (
            pluralize(held_out["pairs"], "pair")
            if held_out["pairs"]
            else pluralize(held_out["sequences"], "sequence")
        )
        print_wrapped(
            f"validation: {count}, {counts['overlapping_sequences']} of them also trained on"
        )
    faults = dict.fromkeys(finding.name for finding in inspection.findings)
    print_wrapped(f"faults: {', '.join(faults) or 'none'}")
