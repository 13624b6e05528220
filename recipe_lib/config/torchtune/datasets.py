"""Convert the datasets of a torchtune config, `dataset` and `dataset_val`, to sections of ours.

`import_file.convert` calls `convert_datasets`, which notes each key of theirs in a `ConfigImport`.
DATASETS has the functions of torchtune.datasets, and the samples that each of them reads.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from recipe_lib.config.key_conditions import HUB
from recipe_lib.config.local_files import is_data
from recipe_lib.config.paths import expand_home
from recipe_lib.config.schema_data import DataConfig
from recipe_lib.config.torchtune.conversion import ConfigImport


@dataclass(frozen=True)
class TorchtuneDataset:
    """The samples that a function of torchtune.datasets reads, as settings of ours."""

    # The value of `data.format`.
    format: str
    # Name of its dataset on the hub; None: the config has to name one.
    source: str | None = None
    # Column that our format reads -> what the dataset calls it by default, where that differs.
    columns: Mapping[str, str] = field(default_factory=dict)
    # Key that `column_map` may have -> the column of our format that it names.
    renamed: Mapping[str, str] = field(default_factory=dict)
    # True: its default of train_on_input is false, so that prompts are no labels.
    masks: bool = True
    # What is different here; empty: nothing.
    why: str = ""
    # The subset of `source` on the hub; None: it has none, or the default one is read.
    subset: str | None = None


# Values of `why`, then of `renamed`, for several datasets.
_ALPACA_TEMPLATE = (
    "the text is the tokenizer's chat template, without Alpaca's own words around the instruction"
)
_CUT_DOCUMENTS = (
    "a text longer than max_seq_len is cut into several sequences, the last of what is left"
)
_INPUT_OUTPUT_COLUMNS = {"input": "instruction", "output": "output"}
_PREFERENCE_COLUMNS = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
_ALPACA_COLUMNS = {"instruction": "instruction", "input": "input", "output": "output"}

# Function of torchtune.datasets -> what it reads.
DATASETS = {
    "alpaca_dataset": TorchtuneDataset(
        format="alpaca",
        source="tatsu-lab/alpaca",
        renamed=_ALPACA_COLUMNS,
        masks=False,
        why=_ALPACA_TEMPLATE,
    ),
    "alpaca_cleaned_dataset": TorchtuneDataset(
        format="alpaca",
        source="yahma/alpaca-cleaned",
        renamed=_ALPACA_COLUMNS,
        masks=False,
        why=_ALPACA_TEMPLATE,
    ),
    "instruct_dataset": TorchtuneDataset(
        format="alpaca", columns={"instruction": "input"}, renamed=_INPUT_OUTPUT_COLUMNS
    ),
    "grammar_dataset": TorchtuneDataset(
        format="alpaca",
        source="liweili/c4_200m",
        columns={"instruction": "input"},
        renamed=_INPUT_OUTPUT_COLUMNS,
    ),
    "samsum_dataset": TorchtuneDataset(
        format="alpaca",
        source="Samsung/samsum",
        columns={"instruction": "dialogue", "output": "summary"},
        renamed=_INPUT_OUTPUT_COLUMNS,
    ),
    "chat_dataset": TorchtuneDataset(format="messages"),
    "slimorca_dataset": TorchtuneDataset(
        format="sharegpt",
        source="Open-Orca/SlimOrca-Dedup",
        renamed={"conversations": "conversations"},
    ),
    "preference_dataset": TorchtuneDataset(format="preference", renamed=_PREFERENCE_COLUMNS),
    "hh_rlhf_helpful_dataset": TorchtuneDataset(
        format="preference", source="RLHFlow/HH-RLHF-Helpful-standard", renamed=_PREFERENCE_COLUMNS
    ),
    "stack_exchange_paired_dataset": TorchtuneDataset(
        format="preference",
        source="lvwerra/stack-exchange-paired",
        columns={"prompt": "question", "chosen": "response_j", "rejected": "response_k"},
        renamed=_PREFERENCE_COLUMNS,
        why="there the files of its folder data/rl, here the dataset's train split",
    ),
    "text_completion_dataset": TorchtuneDataset(format="text", why=_CUT_DOCUMENTS),
    "wikitext_dataset": TorchtuneDataset(
        format="text",
        source="EleutherAI/wikitext_document_level",
        columns={"text": "page"},
        why=_CUT_DOCUMENTS,
        subset="wikitext-103-v1",
    ),
    "cnn_dailymail_articles_dataset": TorchtuneDataset(
        format="text",
        source="ccdv/cnn_dailymail",
        columns={"text": "article"},
        why=_CUT_DOCUMENTS,
        subset="3.0.0",
    ),
}
# Value of conversation_style -> (our format, the column of that format that holds the messages).
STYLES = {"sharegpt": ("sharegpt", "conversations"), "openai": ("messages", "messages")}

# Values of `source` that name a kind of file, as `load_dataset` takes them; data_files has a path.
LOADERS = ("json", "csv", "parquet", "text")

# Key of a dataset -> our key, which holds for all datasets at once.
SWITCHES = {"packed": "data.packing", "add_eos": "data.add_eos"}

# Key of a dataset -> why nothing is missed without it.
_NOT_NEEDED = {
    "split_across_pack": "a text that does not fit into a pack begins another",
    "data_files": "is read with the dataset's source",
    "name": "is read with the dataset's source",
    "subset": "is read with the dataset's source",
    "trust_remote_code": "no code of a dataset is run",
}
_NO_PART = "a dataset is read whole; put its folder here and name it in data.source"
# Key of a dataset -> what is missing here, told only if the key is on.
_MISSING = {
    "new_system_prompt": "no message is put before a sample's own; write it into the samples",
    "filter_fn": "no config names Python code; filter the file of samples",
    "data_dir": _NO_PART,
    "use_clean": "there is no such variant of a dataset",
}


@dataclass(frozen=True)
class DatasetSection:
    """A section of the file that names a dataset, and what it becomes."""

    # The file, and our keys so far.
    conversion: ConfigImport
    # Its name: `dataset`, `dataset[0]` or `dataset_val`.
    name: str
    # Our section: `data`, `data.sources[0]` or `validation`.
    our_name: str
    # The dataset that its `_component_` reads.
    dataset: TorchtuneDataset


def convert_datasets(conversion: ConfigImport) -> None:
    """Note the keys of `dataset`, a section or a list of them, and of `dataset_val`.

    Raises ConfigError if the file names no training data.
    """
    values = conversion.theirs.values
    # Keys of a list are `dataset[0].source` and so on.
    suffixes = [key.removeprefix("dataset[") for key in values if key.startswith("dataset[")]
    indices = sorted({int(suffix.partition("]")[0]) for suffix in suffixes})
    if not indices and "dataset._component_" not in values:
        raise conversion.build_error(
            "dataset._component_ is missing, which says what is trained on"
        )
    for index in indices:
        _convert_dataset(conversion, f"dataset[{index}]", f"data.sources[{index}]")
    if not indices:
        _convert_dataset(conversion, "dataset", "data")
    if "dataset_val._component_" in values:
        _convert_dataset(conversion, "dataset_val", "validation")


def _convert_dataset(conversion: ConfigImport, name: str, our_name: str) -> None:
    """Note the keys of one dataset.

    name, our_name: see `DatasetSection`.
    """
    component = f"{name}._component_"
    dataset = DATASETS.get(conversion.read_component(name))
    if dataset is None:
        conversion.refuse(
            component, f"no such dataset; known are {', '.join(DATASETS)}", may_be_left_out=False
        )
        for key in conversion.theirs.list_keys(name):
            if key != component:
                conversion.drop(key, "of that dataset")
        return
    style = conversion.get_value(f"{name}.conversation_style")
    our_keys = {f"{our_name}.format": STYLES[style][0] if style in STYLES else dataset.format}
    section = DatasetSection(conversion, name=name, our_name=our_name, dataset=dataset)
    source = _convert_source(section)
    if source is not None and f"{name}.source" not in conversion.theirs.values:
        our_keys[f"{our_name}.source"] = source
    conversion.carry(component, our_keys, dataset.why, differs=bool(dataset.why))
    _convert_columns(section)
    defaults = {f"{name}.packed": False, f"{name}.train_on_input": not dataset.masks} | (
        {f"{name}.add_eos": True} if dataset.format == "text" else {}
    )
    conversion.defaults |= defaults
    # After the keys of the file: a default counts only where the file says nothing.
    for key in [*conversion.theirs.list_keys(name), *defaults]:
        if not conversion.is_noted(key):
            _convert_key(section, key, source)


def _convert_source(section: DatasetSection) -> str | None:
    """Note where a dataset is; return the value of our `source`, None after a fault."""
    key = f"{section.name}.source"
    if key not in section.conversion.theirs.values:
        if section.dataset.source is None:
            section.conversion.faults.append(f"{section.conversion.theirs.shown}: {key} is missing")
            return None
        return _format_hub_name(section.dataset.source, section.dataset.subset)
    name = str(section.conversion.get_value(key))
    files = section.conversion.get_value(f"{section.name}.data_files")
    if "://" in name:
        section.conversion.refuse(
            key, "storage by URL is not read; copy the files here", may_be_left_out=False
        )
        return None
    if name in LOADERS:
        paths = files if isinstance(files, list) else [files]
        if len(paths) != 1 or paths[0] is None:
            count = 0 if files is None else len(paths)
            section.conversion.refuse(
                key, f"{count} data_files, expected one file or folder", may_be_left_out=False
            )
            return None
        source = str(paths[0])
        section.conversion.carry(f"{section.name}.data_files", {})
    else:
        # `load_dataset` takes the subset as `name`.
        subset = section.conversion.get_value(
            f"{section.name}.subset"
        ) or section.conversion.get_value(f"{section.name}.name")
        source = (
            name if is_local(name) else _format_hub_name(name, subset or section.dataset.subset)
        )
        if files is not None:
            section.conversion.refuse(f"{section.name}.data_files", _NO_PART)
    section.conversion.carry(key, {f"{section.our_name}.source": source})
    return source


def _format_hub_name(name: str, subset: str | None) -> str:
    return f"{HUB}{name}:{subset}" if subset else f"{HUB}{name}"


def is_local(name: str) -> bool:
    """Return True for a file or folder: it exists, or its name is one of a data file or a path."""
    path = expand_home(name)
    return os.path.exists(path) or is_data(path) or name.startswith(("/", "./", "../", "~"))


def _convert_columns(section: DatasetSection) -> None:
    """Note the names of columns, and set our `columns` to those that differ from the format's."""
    # Column that our format reads -> what the file calls it.
    columns = dict(section.dataset.columns)
    for key in section.conversion.theirs.list_keys(f"{section.name}.column_map"):
        word = key.rpartition(".")[2]
        if key.endswith("column_map"):
            section.conversion.drop(key, "is empty")
        elif word not in section.dataset.renamed:
            section.conversion.refuse(
                key, f"expected {' or '.join(section.dataset.renamed) or 'no column_map'}"
            )
        else:
            columns[section.dataset.renamed[word]] = str(section.conversion.get_value(key))
            section.conversion.carry(key, {})
    style = section.conversion.get_value(f"{section.name}.conversation_style")
    # Other key that names a column -> the column of our format.
    column_keys = {"column": "text", "conversation_column": STYLES.get(style, ("", ""))[1]}
    for word, name in column_keys.items():
        key = f"{section.name}.{word}"
        if section.conversion.is_on(key) and name:
            columns[name] = str(section.conversion.get_value(key))
            section.conversion.carry(key, {})
    columns = {name: their_name for name, their_name in columns.items() if name != their_name}
    # Validation takes `data.columns`, which are free beside a list of datasets.
    if section.our_name == "validation" and "data.format" in section.conversion.ours:
        if columns != section.conversion.ours.get("data.columns", {}):
            section.conversion.refuse(
                f"{section.name}._component_",
                "validation has the columns of the training data; rename those in its file",
                may_be_left_out=False,
            )
    elif columns:
        # Set here, not by `carry`: it comes of several keys of theirs.
        section.conversion.ours[f"{section.our_name.replace('validation', 'data')}.columns"] = (
            columns
        )


def _convert_key(section: DatasetSection, key: str, source: str | None) -> None:
    """Note a key of a dataset besides its source and columns. source: of `_convert_source`."""
    value = section.conversion.get_value(key)
    word = key.rpartition(".")[2]
    if word == "split":
        _convert_split(section, key, source)
    elif word in SWITCHES:
        _convert_shared(section, key, name=SWITCHES[word], value=bool(value))
    elif word == "train_on_input":
        _convert_labels(section, key)
    elif word == "conversation_style":
        if value is None or value in STYLES:
            section.conversion.carry(key, {})
        else:
            section.conversion.refuse(key, f"expected {' or '.join(STYLES)}")
    elif word in _NOT_NEEDED:
        section.conversion.drop(key, _NOT_NEEDED[word])
    elif section.conversion.is_on(key):
        section.conversion.refuse(
            key, _MISSING.get(word, "is no key of a dataset that is known here")
        )
    else:
        section.conversion.drop(key, "is off, as here")


def _convert_split(section: DatasetSection, key: str, source: str | None) -> None:
    split = str(section.conversion.get_value(key))
    if source is None or source.startswith(HUB):
        section.conversion.carry(key, {f"{section.our_name}.split": split})
    elif split == "train":
        section.conversion.drop(key, "files are read whole")
    else:
        section.conversion.refuse(
            key, "files are read whole, without splits; write the part into a file of its own"
        )


def _convert_labels(section: DatasetSection, key: str) -> None:
    train_on = "all" if section.conversion.get_value(key) else "assistant"
    if section.dataset.format == "text":
        section.conversion.drop(key, "every token of a text is trained on")
    elif section.dataset.format != "preference":
        _convert_shared(section, key, name="data.train_on", value=train_on)
    elif train_on == "all":
        section.conversion.refuse(key, "of pairs the answers alone are compared")
    else:
        section.conversion.carry(key, {})


def _convert_shared(section: DatasetSection, key: str, *, name: str, value: Any) -> None:
    """Note a key of a dataset whose counterpart, `name`, is one for all data, also of validation.

    value: what this dataset asks for. Validation sets nothing, and training data is of one value,
    unless the user sets it or names other data.
    """
    if section.our_name == "validation":
        # Where no training data has the key, ours is at its default.
        differs = value != section.conversion.ours.get(
            name, getattr(DataConfig, name.rpartition(".")[2])
        )
        why = f"validation has the {name} of the training data" if differs else ""
        section.conversion.carry(key, {}, why, differs=differs)
    elif value == section.conversion.ours.get(name, value):
        section.conversion.carry(key, {name: value})
    elif given := section.conversion.given & {name, "data.source", "data.sources"}:
        section.conversion.drop(key, f"{min(given)} is set on the command line")
    else:
        section.conversion.refuse(
            key, f"{name} holds for all datasets; give each the same value", may_be_left_out=False
        )
