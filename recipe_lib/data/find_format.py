"""Find the format of samples by the columns of the first of them (`data.format: auto`).

A run calls `settle_formats`, which puts the formats into the config; a DatasetBuilder calls
`fill_in_format` for one source. A format is a function from a row (column -> value) to a sample,
registered by its name, with the columns that it requires. Samples of no format raise DataError,
with the overrides that would name their columns.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from recipe_lib.config.local_files import get_cache_root
from recipe_lib.config.registry import BUILT_IN, get_registered, list_names
from recipe_lib.config.schema import SAMPLES, FullFinetuneConfig, SourceConfig
from recipe_lib.config.schema_data import resolve_sources, resolve_validation_source
from recipe_lib.config.suggest import did_you_mean
from recipe_lib.data.samples import (
    OTHER_NAMES,
    RenamedSample,
    SampleFault,
    find_column,
    find_columns,
    format_overrides,
    get_columns_section,
    is_json_list,
)
from recipe_lib.data.sources import SampleFile, open_sources
from recipe_lib.errors import ConfigError, DataError
from recipe_lib.units import choose_lines

AUTO = "auto"  # the value of data.format for which the format is found here
PAIRS = "preference"  # the format of pairs of answers
LABELED = ("kto", "classification")  # the formats of samples with a label
MAX_VOTES = 100  # samples whose columns are looked at
MAX_SAMPLES_TRIED = 1000  # samples of a file that are read to find MAX_VOTES readable ones
MAX_NAMED_COLUMNS = 12  # columns that an error line names
# If a sample has the columns of several formats, the first of these counts. `text` is last, because
# it is often an extra column that holds the whole sample.
_FORMATS_IN_ORDER = ("preference", "messages", "sharegpt", "alpaca", "prompt_completion", "text")
_LISTS = ("messages", "conversations")  # required columns that hold lists; others hold text


def _order_formats(samples: str) -> tuple[str, ...]:
    """Return the formats to try for a recipe, the likeliest first.

    samples: what the recipe trains on, a key of SAMPLES, whose values are the formats that it can
    use. A format with labels is tried only if the recipe can use it, and then first.
    """
    if set(SAMPLES[samples]) <= set(_FORMATS_IN_ORDER):
        return _FORMATS_IN_ORDER
    return tuple(dict.fromkeys((*SAMPLES[samples], *_FORMATS_IN_ORDER)))


def find_fitting_formats(
    sample: Mapping[str, Any], columns: Mapping[str, str], samples: str = "answers"
) -> list[str]:
    """Return the formats whose required columns a sample has, the likeliest first.

    columns: `data.columns`, from a format's name of a column to the sample's. samples: what the
    recipe trains on, a key of SAMPLES ("answers", "labeled answers", ...). Formats of plugins are
    tried first.
    """
    plugin_formats = [
        name for name in list_names("data.format") if name not in BUILT_IN["data.format"][1]
    ]
    fitting_formats = list[str]()
    other_formats = list[str]()
    for name in (*plugin_formats, *_order_formats(samples)):
        required = find_columns(name).required
        values = [_find_value(name, column, sample=sample, columns=columns) for column in required]
        are_lists = [isinstance(value, list) or is_json_list(value) for value in values]
        if required and None not in values:
            # The columns of these may hold text or messages.
            may_be_either = name in (*plugin_formats, PAIRS, *LABELED, "prompt_completion")
            fits = may_be_either or are_lists == [column in _LISTS for column in required]
            (fitting_formats if fits else other_formats).append(name)
    # Other formats have the columns, but a list where it should be text, or the reverse. If only
    # these are left, reading the sample raises an error about that column.
    return fitting_formats or other_formats


def _find_value(
    form: str, column: str, sample: Mapping[str, Any], columns: Mapping[str, str]
) -> Any:
    """Return a sample's value for a column of a format, under any of the column's names.

    The first value other than None counts; None: there is none. form: name of the format. columns:
    `data.columns`.
    """
    values = (sample.get(name) for name in find_columns(form).list_spellings(column, columns))
    return next((value for value in values if value is not None), None)


def _find_formats_with_nulls(
    sample: Mapping[str, Any], columns: Mapping[str, str], samples: str
) -> list[str]:
    """Return the formats whose required columns a sample has, even if their value is null.

    columns, samples: as for `find_fitting_formats`.
    """
    return [
        name
        for name in _order_formats(samples)
        if all(columns.get(column, column) in sample for column in find_columns(name).required)
    ]


def settle_formats(cfg: FullFinetuneConfig) -> list[str]:
    """Replace `auto` in the config by the format that is found; return a log line for each.

    Raises DataError for samples of no format, ConfigError for a format that the recipe cannot
    train on.
    """
    data = cfg.data
    validation = cfg.validation
    lines = list[str]()
    validation_source = resolve_validation_source(data, validation)
    # Asked before the format of training is set, because validation falls back to that one
    finds_validation = validation_source is not None and validation_source.format == AUTO
    for number, source in enumerate(resolve_sources(data)):
        section = data.sources[number] if data.sources else data
        if source.format == AUTO:
            name = f"data.sources[{number}]" if data.sources else "data"
            section.format = _settle_format(cfg, source, name)
            if section.format != AUTO:
                lines.append(
                    f"data: format {section.format}, found by the columns of {source.source}"
                )
    if validation_source is not None and finds_validation:
        validation.format = _settle_format(cfg, validation_source, "validation")
        # Told only if it is another format than that of training
        if validation.format not in {source.format for source in resolve_sources(data)} | {AUTO}:
            lines.append(
                f"data: format {validation.format}, found by the columns of {validation.source}"
            )
    return lines


def _settle_format(cfg: FullFinetuneConfig, source: SourceConfig, section: str) -> str:
    """Return the format of a source; `auto` if none of its samples can be read.

    section: key of the source in the config, such as `data.sources[0]`. Raises DataError for
    samples of no format, ConfigError for a format that the recipe cannot train on.
    """
    files = open_sources(source, cache=get_cache_root(cfg.data.cache_dir), section=section)
    format_key = f"{section}.format"
    section = get_columns_section(section)
    format_name = find_format(
        files,
        source.columns or {},
        section=section,
        samples=cfg.samples,
        ignored=cfg.data.ignore_columns,
    )
    usable = SAMPLES[cfg.samples]  # formats that the recipe can train on
    known = (*_FORMATS_IN_ORDER, *LABELED)
    faults = choose_lines(
        (
            format_name == PAIRS and PAIRS not in usable,
            (
                f"{source.source}: found {PAIRS}s (chosen, rejected), which this recipe has no use"
                " for; choose other samples, or run dpo_distributed"
            ),
        ),
        (
            cfg.trains_on_pairs and format_name in _FORMATS_IN_ORDER and format_name != PAIRS,
            (
                f"{source.source}: found the columns of the format {format_name}, expected those of"
                f" {PAIRS} (chosen, rejected), as the loss compares two answers; name yours with"
                f" {format_key}={PAIRS} {section}.columns.chosen=NAME"
                f" {section}.columns.rejected=NAME, or train with lora_finetune_distributed"
            ),
        ),
        (
            not cfg.trains_on_pairs and format_name in known and format_name not in usable,
            (
                f"{source.source}: found the columns of the format {format_name}, expected those of"
                f" {usable[0]} ({', '.join(find_columns(usable[0]).required)}), as the loss needs a"
                f" label; name yours with {format_key}={usable[0]} {section}.columns.label=NAME, or"
                " train with lora_finetune_distributed"
            ),
        ),
    )
    if faults:
        raise ConfigError(faults[0])
    return format_name


def fill_in_format(
    source: SourceConfig, files: Sequence[SampleFile], section: str, ignored: Sequence[str]
) -> SourceConfig:
    """Return the source with the format of its files in place of `auto`.

    section: of the config, for errors. ignored: columns that are not looked at. Raises DataError
    for samples of no format.
    """
    if source.format != AUTO:
        return source
    format_name = find_format(files, source.columns or {}, section=section, ignored=ignored)
    # If no sample can be read, any format will do: reading them raises the faults.
    return replace(source, format="messages" if format_name == AUTO else format_name)


def find_format(
    files: Sequence[SampleFile],
    columns: Mapping[str, str],
    section: str = "data",
    samples: str = "answers",
    ignored: Sequence[str] = (),
) -> str:
    """Return the format whose columns most of the first samples have; `auto`: none can be read.

    columns: `data.columns`. section: of the config, for the error. samples: what the recipe trains
    on, a key of SAMPLES. ignored: columns that are not looked at. Raises DataError if the samples
    are of no format, or `columns` names a column that no format has.
    """
    _check_names(columns, section)
    samples_read = [
        (place, {name: row[name] for name in row if name not in ignored})
        for place, row in _read_first_samples(files)
    ]
    # For each sample the formats that fit it, of which the first has its vote
    candidates = [find_fitting_formats(sample, columns, samples) for _, sample in samples_read]
    votes = Counter(formats[0] for formats in candidates if formats)
    # The columns may be right and hold null in these samples: reading raises an error about that.
    if not votes and samples_read and not _suggest_columns(samples_read[0][1], section, samples):
        candidates = [_find_formats_with_nulls(row, columns, samples) for _, row in samples_read]
        votes = Counter(formats[0] for formats in candidates if formats)
    if votes or not samples_read:
        return votes.most_common(1)[0][0] if votes else AUTO
    place, sample = samples_read[0]
    raise DataError(
        f"{place}: {describe_no_format(sample, columns, section=section, samples=samples)}"
    )


def _read_first_samples(files: Sequence[SampleFile]) -> list[tuple[str, dict[str, Any]]]:
    """Return [(file and line, sample)] of the first MAX_VOTES readable samples.

    All are from one file, the first that has any.
    """
    for file in files:
        readable = (
            (place, sample)
            for place, sample in file.read_first(MAX_SAMPLES_TRIED)
            if not isinstance(sample, SampleFault)
        )
        first = list(islice(readable, MAX_VOTES))
        if first:
            return first
    return []


def _check_names(columns: Mapping[str, str], section: str) -> None:
    """Raise DataError if `columns` has a key that is a column of no format."""
    known = {name for form in list_names("data.format") for name in find_columns(form).known}
    for name in columns:
        if name not in known:
            hint = (
                did_you_mean(name, sorted(known)) or f", expected one of {', '.join(sorted(known))}"
            )
            raise DataError(f"{section}.columns.{name}: no format has such a column{hint}")


def describe_no_format(
    sample: Mapping[str, Any], columns: Mapping[str, str], section: str, samples: str = "answers"
) -> str:
    """Return the text of an error for a sample whose columns fit no format, and what to set."""
    names_with_nulls = [
        f"{name} (null)" if value is None else str(name) for name, value in sample.items()
    ]
    found_names = ", ".join(sorted(names_with_nulls)[:MAX_NAMED_COLUMNS]) or "none"
    known = "; ".join(
        f"{name}:"
        f" {', '.join(columns.get(column, column) for column in find_columns(name).required)}"
        for name in _order_formats(samples)
    )
    remedy = ("" if columns else _suggest_columns(sample, section, samples)) or (
        f"say which column is which with {section}.format and {section}.columns, or write the rows"
        " in one of these layouts (docs/your_data.md)"
    )
    return f"found the columns {found_names}, which are those of no format ({known}); {remedy}"


def _suggest_columns(sample: Mapping[str, Any], section: str, samples: str) -> str:
    """Return a remedy, overrides for columns that have another known name; "": there is none.

    section: of the config. samples: what the recipe trains on, a key of SAMPLES.
    """
    for name in _order_formats(samples):
        format_columns = find_columns(name)
        file_names = dict[str, str]()  # column of the format -> the sample's name for it
        for column in format_columns.known:
            free_names = [
                free_name
                for free_name in OTHER_NAMES.get(column, ())
                if free_name not in file_names.values()
            ]
            file_name = find_column(column, sample, free_names)
            if file_name and file_name not in file_names.values():
                file_names[column] = file_name
        renamed = {
            column: file_name for column, file_name in file_names.items() if file_name != column
        }
        if file_names.keys() >= set(format_columns.required) and _can_read(
            name, sample, renamed=renamed, section=section
        ):
            overrides = [f"{section}.format={name}", *format_overrides(section, renamed)]
            return f"set {' '.join(overrides)}, if that is what they are"
    return ""


def _can_read(
    name: str, sample: Mapping[str, Any], renamed: Mapping[str, str], section: str
) -> bool:
    """Return True if a format can read a sample whose columns are named by `renamed`.

    A sample with an empty text counts as read: it is a bad sample of the right format. name: of the
    format. renamed: from the format's names to the sample's.
    """
    try:
        get_registered("data.format", name)(
            RenamedSample(sample, renamed, section=section, required=find_columns(name).required)
        )
    except SampleFault as fault:
        return fault.cause.startswith("empty")
    return True
