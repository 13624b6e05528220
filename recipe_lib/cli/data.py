"""`tune data show CONFIG` and `tune data check CONFIG`: a config's samples as they will be trained,
before anything is.
"""

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe_lib.cli.arguments import (
    SWITCH,
    Options,
    Parser,
    add_configs,
    find_low_numbers,
    take_configs,
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

# (trained, special token) -> how it looks on a terminal
COLORS = {
    (True, True): "bold green",
    (True, False): "green",
    (False, True): "yellow",
    (False, False): "dim",
}
ACTIONS = ("show", "check")
# What `check` can find wrong; those of recipe_lib.data.inspect, which is imported only to look.
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
OPTIONS: Options = {
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
    "--plugin": {"metavar": "FILE", "action": "append", "default": [], "help": "as for `tune run`"},
}


def run(words: list[str]) -> int:
    """Prints samples, or the findings over all of them."""
    arguments = read_arguments(words)
    cfg = open_config(take_configs(arguments), arguments)[1].cfg
    check_data(cfg)
    return (
        show_samples(cfg, arguments)
        if arguments.action == "show"
        else check_samples(cfg, arguments)
    )


def parser(words: Sequence[str] = ()) -> Parser:
    """Return the options of the verb."""
    options = Parser("data", DESCRIPTION, OPTIONS)
    add_configs(options, words)
    return options


def read_arguments(words: list[str]) -> argparse.Namespace:
    """The command line."""
    if words and words[0] not in (*ACTIONS, "-h", "--help"):
        known = f"{did_you_mean(words[0], ACTIONS) or '; expected show or check'}"
        raise ConfigError(f"tune data: unknown action {show(words[0])}{known}")
    arguments = parser(words).parse(words)
    for name in arguments.allow:
        if name not in FINDINGS:
            hint = did_you_mean(name, FINDINGS) or f"; expected one of {', '.join(FINDINGS)}"
            raise ConfigError(f"--allow: unknown fault {show(name)}{hint}")
    raise_faults(ConfigError, find_low_numbers(arguments, limit=1, step=0))
    return arguments


def read_datasets(cfg: Any, arguments: argparse.Namespace) -> tuple["Tokenizer", Any, Any, Any]:
    """(tokenizer, training set, validation set or None, source of the model); for `check` bad
    samples are counted.
    """
    from recipe_lib.data import build_datasets, settle_formats
    from recipe_lib.training.resolve_model import resolve_model
    from recipe_lib.training.training_data import load_tokenizer_of

    checks = arguments.action == "check"
    if checks:
        data = dataclasses.replace(cfg.data, on_invalid="skip", check_label_mask=False, cache=False)
        truncation = "truncate" if data.truncation == "error" else data.truncation
        cfg = dataclasses.replace(cfg, data=dataclasses.replace(data, truncation=truncation))
    source = None
    if cfg.tokenizer.path is None and (folder := _find_folder_without_weights(cfg)):
        cfg = dataclasses.replace(
            cfg, tokenizer=dataclasses.replace(cfg.tokenizer, path=str(folder))
        )
    elif cfg.tokenizer.path is None:
        source = resolve_model(cfg.model, scored=cfg.scores_sequences, num_labels=cfg.num_labels)
    found = "".join(f"{escape_invisible(line)}\n" for line in settle_formats(cfg))
    found = "" if arguments.json else found
    sys.stdout.write(found if checks else "")
    tokenizer = load_tokenizer_of(cfg, source)
    dataset, validation = build_datasets(cfg, tokenizer, may_be_empty=checks)
    sys.stderr.write("" if checks or is_quiet() else found)
    return tokenizer, dataset, validation, source


def _find_folder_without_weights(cfg: Any) -> Path | None:
    """The model's folder, where only its tokenizer was downloaded."""
    name = cfg.model.path
    folder = (find_model_folder(name) or find_downloaded_model(name)) if name else None
    return folder if folder is not None and not any(folder.glob("*.safetensors")) else None


def show_samples(cfg: Any, arguments: argparse.Namespace) -> int:
    """Prints the first samples, or packs, of a step's order."""
    from recipe_lib.data.inspect import show_item

    tokenizer, dataset, validation, _ = read_datasets(cfg, arguments)
    if arguments.validation:
        if validation is None:
            raise ConfigError(
                "--validation: the config has no validation.source; set it, or leave"
                " --validation out"
            )
        slots = [[item] for item in range(min(arguments.limit, validation.items))]
    else:
        slots = list(iterate_slots(cfg, dataset, arguments.step, arguments.limit))
    shown = [
        [show_item(validation if arguments.validation else dataset, item, tokenizer) for item in s]
        for s in slots
    ]
    if arguments.json:
        print(
            json.dumps(
                {
                    "sequences": [
                        [dataclasses.asdict(document) for item in slot for document in item]
                        for slot in shown
                    ]
                }
            )
        )
        return DONE
    for number, slot in enumerate(shown, start=1):
        documents = [document for item in slot for document in item]
        print_slot(number, documents, packed=cfg.data.packing and not arguments.validation)
    return DONE


def iterate_slots(cfg: Any, dataset: Any, step: int, count: int) -> Iterable[list[int]]:
    """The items of the first slots that a run of one process takes from a step on."""
    from recipe_lib.data import DataPlan
    from recipe_lib.training import derive_seed

    plan = DataPlan(
        dataset,
        seed=derive_seed(cfg.seed, "data"),
        slots_per_step=1,
        shuffle=cfg.data.shuffle,
        packing_capacity=cfg.max_seq_len if cfg.data.packing else None,
    )
    total = plan.total_steps(cfg.epochs, None)
    first = step * cfg.batch_size * cfg.gradient_accumulation_steps
    if first >= total:
        last = (total - 1) // (cfg.batch_size * cfg.gradient_accumulation_steps)
        raise ConfigError(
            f"--step: found {step}, expected at most {last}: the config's epochs end there"
        )
    for at in range(first, min(first + count, total)):
        yield [int(item) for slot in plan.slots(at) for item in slot]


def print_slot(number: int, documents: list["ShownSequence"], packed: bool) -> None:
    """One sequence of a batch: a document, a pair, or a pack of them."""
    from rich.text import Text

    from recipe_lib.report.terminal import get_terminal_width, open_console, put

    colors = wants_color(sys.stdout)
    console = open_console(get_terminal_width(), colors)
    tokens, trained = (
        sum(document.tokens for document in documents),
        sum(document.trained for document in documents),
    )
    what = "pack" if packed else "sequence"
    held = f" in {len(documents)} documents" if len(documents) > 1 else ""
    shares = f"{tokens} tokens{held}, {trained} trained ({trained / max(1, tokens):.0%})"
    put(console, f"── {what} {number}: {shares}", wrap=False)
    for at, document in enumerate(documents, start=1):
        answer = f", {document.answer}" if document.answer else ""
        if len(documents) > 1:
            place = f"{document.place}, {document.tokens} tokens"
            put(console, f"-- document {at} of {len(documents)}{answer}: {place}", wrap=False)
        else:
            put(console, f"   {document.place}{answer}", wrap=False)
        line = Text()
        for is_trained, pieces in itertools.groupby(
            document.pieces, key=lambda piece: piece.trained
        ):
            line.append("«" if is_trained and not colors else "")
            for piece in pieces:
                style = COLORS[is_trained, piece.special] if colors else ""
                line.append(escape_invisible(piece.text, keep="\n"), style)
            line.append("»" if is_trained and not colors else "")
        console.print(line, soft_wrap=True)
    console.print()
    sys.stdout.write(console.file.getvalue())  # type: ignore[attr-defined]  # spaces at the ends of lines are tokens too


def check_samples(cfg: Any, arguments: argparse.Namespace) -> int:
    """Prints counts and what is wrong; exit code 2 if something is that was not allowed."""
    from recipe_lib.data import format_report_lines
    from recipe_lib.data.inspect import collect_ids, inspect, list_special_tokens

    tokenizer, dataset, validation, source = read_datasets(cfg, arguments)
    untrained = None
    if source is not None and source.folder is not None:
        from recipe_lib.checkpoint.weight_loading import find_untrained_embeddings

        special = list_special_tokens(tokenizer)
        used = sorted(special.keys() & collect_ids(dataset, validation))
        untrained = [
            special[token]
            for token in find_untrained_embeddings(source.spec, source.folder, used, special)
        ]
    found = inspect(dataset, validation, cfg.max_seq_len, untrained)
    faults = [finding for finding in found.findings if finding.name not in arguments.allow]
    if arguments.json:
        findings = [dataclasses.asdict(finding) for finding in found.findings]
        print(json.dumps(found.numbers | {"findings": findings}))
    else:
        held_out = validation.report if validation is not None else None
        print_report(found, format_report_lines(dataset.report, held_out, faults=False))
    if note := dataset.report.describe_plain_template():
        print(note, file=sys.stderr)
    for finding in faults:
        more = [f"  and {finding.more} more"] if finding.more and finding.places else []
        for line in (finding.line, *(f"  {place}" for place in finding.places), *more):
            print(f"error: {finding.name}: {escape_invisible(line)}", file=sys.stderr)
    return USER_ERROR if faults else DONE


def print_report(found: Any, lines: list[str]) -> None:
    """The counts in words."""
    numbers = found.numbers
    for line in lines:
        print_wrapped(escape_invisible(line))
    if numbers["sequences"]:
        print_wrapped(
            f"lengths: {numbers['shortest_sequence']} to {numbers['longest_sequence']} tokens,"
            f" median {numbers['median_sequence']}; packed into"
            f" {pluralize(numbers['packs'], 'sequence')} of {numbers['pack_length']} they fill"
            f" {numbers['packing_efficiency']:.1%} of them"
        )
    if numbers["sequences"] and numbers.get("untrained_tokens") == []:
        print_wrapped("special tokens: every one that the samples use has a trained embedding")
    if "validation" in numbers:
        trained, held_out = numbers["overlapping_sequences"], numbers["validation"]
        count = (
            pluralize(held_out["pairs"], "pair")
            if held_out["pairs"]
            else pluralize(held_out["sequences"], "sequence")
        )
        print_wrapped(f"validation: {count}, {trained} of them also trained on")
    print_wrapped(
        f"faults: {', '.join(dict.fromkeys(finding.name for finding in found.findings)) or 'none'}"
    )
