"""Which format samples have, by the columns of the first of them: what `data.format: auto` means."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from recipe_lib.config.local_files import cache_root
from recipe_lib.config.recipe_facts import SAMPLES
from recipe_lib.config.registry import BUILT_IN, names, registered
from recipe_lib.config.schema import FullFinetuneConfig, SourceConfig
from recipe_lib.config.schema_data import resolved_sources, validation_source
from recipe_lib.config.suggest import did_you_mean
from recipe_lib.data.sample_columns import (
    OTHER_NAMES,
    Renamed,
    called,
    columns_section,
    is_json_list,
    overrides,
    spellings,
)
from recipe_lib.data.samples import SampleFault
from recipe_lib.data.sources import SampleFile, open_sources
from recipe_lib.errors import ConfigError, DataError

AUTO, PAIRS, LABELED = "auto", "preference", ("kto", "classification")
LOOKED_AT, AMONG = 100, 1000  # samples that can be read, among the first of each file
MOST_NAMED = 12  # columns that a line names
# Of several formats whose columns are all there, the first: `text` is often one more column, the whole sample in a row.
_ORDER = ("preference", "messages", "sharegpt", "alpaca", "prompt_completion", "text")
_LISTS = ("messages", "conversations")


def _order(samples: str) -> tuple[str, ...]:
    """For a recipe that trains on such samples: those with labels are looked for where a recipe has a use for these."""
    return _ORDER if set(SAMPLES[samples]) <= set(_ORDER) else tuple(dict.fromkeys((*SAMPLES[samples], *_ORDER)))


def fitting(sample: Mapping[str, Any], columns: Mapping[str, str], samples: str = "answers") -> list[str]:
    """The formats whose columns a sample has, the likeliest first. columns: as `data.columns`. samples: see
    RecipeFacts."""
    own = [name for name in names("data.format") if name not in BUILT_IN["data.format"][1]]  # of plugins
    found, others = list[str](), list[str]()
    for name in (*own, *_order(samples)):
        required = _required(name)
        there = [_value(name, column, sample, columns) for column in required]
        is_list = [isinstance(value, list) or (isinstance(value, str) and is_json_list(value)) for value in there]
        lists = [column in _LISTS for column in required]
        if required and None not in there:
            fits = name in (*own, PAIRS, *LABELED, "prompt_completion") or is_list == lists
            (found if fits else others).append(name)
    return found or others  # reading says what is wrong with a column that is no list, or is one


def _value(form: str, column: str, sample: Mapping[str, Any], columns: Mapping[str, str]) -> Any:
    """Return what a sample has for a column of a format, under the first of its names that holds something; None:
    nothing."""
    values = (sample.get(name) for name in spellings(registered("data.format", form), column, columns))
    return next((value for value in values if value is not None), None)


def _with_nulls(sample: Mapping[str, Any], columns: Mapping[str, str], samples: str) -> list[str]:
    """The formats whose columns a sample has the names of, whatever they hold."""
    found = [(name, _required(name)) for name in _order(samples)]
    return [name for name, own in found if all(columns.get(column, column) in sample for column in own)]


def settle_formats(cfg: FullFinetuneConfig) -> list[str]:
    """Puts the format that is found into the config where it says `auto`, and gives a line for each.

    Raises DataError where samples are of no format, ConfigError where the recipe has no use for what they are.
    """
    data, validation, lines = cfg.data, cfg.validation, []
    held_out = validation_source(data, validation)
    finds_validation = held_out is not None and held_out.format == AUTO  # before those of training are found
    for number, source in enumerate(resolved_sources(data)):
        section = data.sources[number] if data.sources else data
        if source.format == AUTO:
            section.format = _settled(cfg, source, f"data.sources[{number}]" if data.sources else "data")
            if section.format == AUTO:
                continue
            lines.append(f"data: format {section.format}, found by the columns of {source.source}")
    if held_out is not None and finds_validation:
        validation.format = _settled(cfg, held_out, "validation")
        if validation.format not in {AUTO, *(one.format for one in resolved_sources(data))}:
            lines.append(f"data: format {validation.format}, found by the columns of {validation.source}")
    return lines


def _settled(cfg: FullFinetuneConfig, source: SourceConfig, section: str) -> str:
    """The format of a source; `auto` where none of its samples can be read."""
    files = open_sources(source, cache=cache_root(cfg.data.cache_dir), section=section)
    format_key, section = f"{section}.format", columns_section(section)
    found, usable = _find(cfg, files, source, section), SAMPLES[cfg.samples]
    if found == PAIRS and PAIRS not in usable:
        raise ConfigError(
            f"{source.source}: found {PAIRS}s (chosen, rejected), which this recipe has no use for; choose other "
            "samples, or run dpo_distributed"
        )
    if cfg.trains_on_pairs and found in _ORDER and found != PAIRS:
        raise ConfigError(
            f"{source.source}: found the columns of the format {found}, expected those of {PAIRS} (chosen, rejected), "
            f"as the loss compares two answers; name yours with {format_key}={PAIRS} {section}.columns.chosen=NAME "
            f"{section}.columns.rejected=NAME, or train with lora_finetune_distributed"
        )
    if not cfg.trains_on_pairs and found in (*_ORDER, *LABELED) and found not in usable:
        raise ConfigError(
            f"{source.source}: found the columns of the format {found}, expected those of {usable[0]} "
            f"({', '.join(_required(usable[0]))}), as the loss needs a label; name yours with "
            f"{format_key}={usable[0]} {section}.columns.label=NAME, or train with lora_finetune_distributed"
        )
    return found


def _find(cfg: FullFinetuneConfig, files: Sequence[SampleFile], source: SourceConfig, section: str) -> str:
    return find_format(files, source.columns or {}, section, cfg.samples, cfg.data.ignore_columns)


def with_format(
    source: SourceConfig, files: Sequence[SampleFile], section: str, ignored: Sequence[str]
) -> SourceConfig:
    """Return the source with the format of its files in the place of `auto`. Raises DataError if there is none."""
    if source.format != AUTO:
        return source
    found = find_format(files, source.columns or {}, section, ignored=ignored)
    return replace(source, format="messages" if found == AUTO else found)  # any will do: reading says what is wrong


def _required(name: str) -> tuple[str, ...]:
    """The columns that a format cannot do without."""
    return tuple(getattr(registered("data.format", name), "required", ()))


def _optional(name: str) -> tuple[str, ...]:
    """The columns that a format reads where they are there."""
    return tuple(getattr(registered("data.format", name), "optional", ()))


def find_format(
    files: Sequence[SampleFile],
    columns: Mapping[str, str],
    section: str = "data",
    samples: str = "answers",
    ignored: Sequence[str] = (),
) -> str:
    """The format that the most of the first samples of the files have the columns of.

    section: of the config, for the error. samples: what the recipe trains on, see RecipeFacts. ignored: columns that
    are not looked at. `auto` where no sample
    can be read. Raises DataError if the samples are of no format.
    """
    _check_names(columns, section)
    first = [(place, {name: row[name] for name in row if name not in ignored}) for place, row in _first(files)]
    votes = Counter(name for _, sample in first for name in fitting(sample, columns, samples)[:1])
    if not votes and first and not _remedy(first[0][1], section, samples):
        votes = Counter(name for _, sample in first for name in _with_nulls(sample, columns, samples)[:1])
    if votes or not first:  # of columns that hold null, reading says so
        return votes.most_common(1)[0][0] if votes else AUTO
    place, sample = first[0]
    raise DataError(f"{place}: {no_format(sample, columns, section, samples)}")


def _first(files: Sequence[SampleFile]) -> list[tuple[str, dict[str, Any]]]:
    """The first samples that can be read, with their places, of the first file that has any."""
    for file in files:
        readable = ((place, sample) for place, sample in file.first(AMONG) if not isinstance(sample, SampleFault))
        first = list(islice(readable, LOOKED_AT))
        if first:
            return first
    return []


def _check_names(columns: Mapping[str, str], section: str) -> None:
    """Raises DataError for a column that no format has."""
    known = {name for form in names("data.format") for name in (*_required(form), *_optional(form))}
    for name in columns:
        if name not in known:
            hint = did_you_mean(name, sorted(known))
            raise DataError(f"{section}.columns.{name}: no format has such a column{hint or _one_of(known)}")


def _one_of(known: set[str]) -> str:
    return f", expected one of {', '.join(sorted(known))}"


def no_format(sample: Mapping[str, Any], columns: Mapping[str, str], section: str, samples: str = "answers") -> str:
    """What is wrong with a sample that no format has the columns of, and what to set."""
    named = [f"{name} (null)" if value is None else str(name) for name, value in sample.items()]
    found = ", ".join(sorted(named)[:MOST_NAMED]) or "none"
    own = {name: [columns.get(column, column) for column in _required(name)] for name in _order(samples)}
    known = "; ".join(f"{name}: {', '.join(names)}" for name, names in own.items())
    remedy = "" if columns else _remedy(sample, section, samples)
    remedy = remedy or (
        f"say which column is which with {section}.format and {section}.columns, or write the rows in one of these "
        "layouts (docs/your_data.md)"
    )
    return f"found the columns {found}, which are those of no format ({known}); {remedy}"


def _remedy(sample: Mapping[str, Any], section: str, samples: str) -> str:
    """The overrides that name the sample's columns, where they are known by other names."""
    for name in _order(samples):
        own = {column: called(column, sample, OTHER_NAMES.get(column, ())) for column in _required(name)}
        if not all(own.values()) or len(set(own.values())) < len(own):
            continue
        for column in _optional(name):
            others = [other for other in OTHER_NAMES.get(column, ()) if other not in own.values()]
            found = None if column in own.values() else called(column, sample, others)
            own |= {column: found} if found and found not in own.values() else {}
        renamed = {column: str(other) for column, other in own.items() if other != column}
        if not _reads(name, sample, renamed, section):
            continue
        words = [f"{section}.format={name}", *overrides(section, renamed)]
        return f"set {' '.join(words)}, if that is what they are"
    return ""


def _reads(form: str, sample: Mapping[str, Any], renamed: Mapping[str, str], section: str) -> bool:
    """Return whether a format reads a sample under these names; one with an empty text is of the right kind."""
    try:
        registered("data.format", form)(Renamed(sample, renamed, section, _required(form)))
    except SampleFault as fault:
        return fault.cause.startswith("empty")
    return True
