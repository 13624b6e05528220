"""Converts the datasets of torchtune's configs, which name a function: source, format, columns.

DATASETS has what each function of torchtune.datasets reads; `convert_datasets` notes every key of
the sections `dataset` and `dataset_val`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from recipe_lib.config.local_files import is_data
from recipe_lib.config.paths import expand_home
from recipe_lib.config.schema_data import HUB
from recipe_lib.config.torchtune.conversion import ConfigImport


@dataclass(frozen=True)
class TorchtuneDataset:
    """The samples that a function of torchtune.datasets reads, in our words."""

    # The value of `data.format`.
    format: str
    # Its dataset on the hub, where it is of one.
    source: str | None = None
    # Theirs by the names that our format knows.
    columns: Mapping[str, str] = field(default_factory=dict)
    # Names of theirs in `column_map` -> ours.
    renamed: Mapping[str, str] = field(default_factory=dict)
    # Its default of train_on_input is false.
    masks: bool = True
    # What is different here.
    why: str = ""
    # The subset of `source`.
    subset: str | None = None


_ALPACA = (
    "the text is the tokenizer's chat template, without Alpaca's own words around the instruction"
)
_DOCUMENTS = (
    "a text longer than max_seq_len is cut into several sequences, the last of what is left"
)
_IN_OUT = {"input": "instruction", "output": "output"}
_PAIRS = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
_SELF = {"instruction": "instruction", "input": "input", "output": "output"}

DATASETS = {
    "alpaca_dataset": TorchtuneDataset(
        "alpaca", "tatsu-lab/alpaca", renamed=_SELF, masks=False, why=_ALPACA
    ),
    "alpaca_cleaned_dataset": TorchtuneDataset(
        "alpaca", "yahma/alpaca-cleaned", renamed=_SELF, masks=False, why=_ALPACA
    ),
    "instruct_dataset": TorchtuneDataset(
        "alpaca", columns={"instruction": "input"}, renamed=_IN_OUT
    ),
    "grammar_dataset": TorchtuneDataset(
        "alpaca", "liweili/c4_200m", {"instruction": "input"}, _IN_OUT
    ),
    "samsum_dataset": TorchtuneDataset(
        "alpaca", "Samsung/samsum", {"instruction": "dialogue", "output": "summary"}, _IN_OUT
    ),
    "chat_dataset": TorchtuneDataset("messages"),
    "slimorca_dataset": TorchtuneDataset(
        "sharegpt", "Open-Orca/SlimOrca-Dedup", renamed={"conversations": "conversations"}
    ),
    "preference_dataset": TorchtuneDataset("preference", renamed=_PAIRS),
    "hh_rlhf_helpful_dataset": TorchtuneDataset(
        "preference", "RLHFlow/HH-RLHF-Helpful-standard", renamed=_PAIRS
    ),
    "stack_exchange_paired_dataset": TorchtuneDataset(
        "preference",
        "lvwerra/stack-exchange-paired",
        {"prompt": "question", "chosen": "response_j", "rejected": "response_k"},
        _PAIRS,
        why="there the files of its folder data/rl, here the dataset's train split",
    ),
    "text_completion_dataset": TorchtuneDataset("text", why=_DOCUMENTS),
    "wikitext_dataset": TorchtuneDataset(
        "text",
        "EleutherAI/wikitext_document_level",
        {"text": "page"},
        why=_DOCUMENTS,
        subset="wikitext-103-v1",
    ),
    "cnn_dailymail_articles_dataset": TorchtuneDataset(
        "text", "ccdv/cnn_dailymail", {"text": "article"}, why=_DOCUMENTS, subset="3.0.0"
    ),
}
# conversation_style -> our format, and the name of its column of messages.
STYLES = {"sharegpt": ("sharegpt", "conversations"), "openai": ("messages", "messages")}

# What `load_dataset` takes in place of a name, with the files in data_files.
LOADERS = ("json", "csv", "parquet", "text")

# Keys of a dataset that are ours for all data.
SWITCHES = {"packed": "data.packing", "add_eos": "data.add_eos"}

# Of one dataset: why nothing is missed, or what is missing.
WITHOUT = {
    "split_across_pack": "a text that does not fit into a pack begins another",
    "data_files": "is read with the dataset's source",
    "name": "is read with the dataset's source",
    "subset": "is read with the dataset's source",
    "trust_remote_code": "no code of a dataset is run",
}
_NO_PART = "a dataset is read whole; put its folder here and name it in data.source"
REFUSED = {
    "new_system_prompt": "no message is put before a sample's own; write it into the samples",
    "filter_fn": "no config names Python code; filter the file of samples",
    "data_dir": _NO_PART,
    "use_clean": "there is no such variant of a dataset",
}


def convert_datasets(conversion: ConfigImport) -> None:
    """Note the keys of `dataset`, a section or a list of them, and of `dataset_val`."""
    values = conversion.theirs.values
    listed = [key.removeprefix("dataset[") for key in values if key.startswith("dataset[")]
    numbers = sorted({int(key.partition("]")[0]) for key in listed})
    if not numbers and "dataset._component_" not in values:
        raise conversion.build_error(
            "dataset._component_ is missing, which says what is trained on"
        )
    for number in numbers:
        _convert_dataset(conversion, f"dataset[{number}]", f"data.sources[{number}]")
    if not numbers:
        _convert_dataset(conversion, "dataset", "data")
    if "dataset_val._component_" in values:
        _convert_dataset(conversion, "dataset_val", "validation")


def _convert_dataset(conversion: ConfigImport, section: str, our_section: str) -> None:
    """Note the keys of one dataset. our_section: the one that it becomes."""
    component = f"{section}._component_"
    dataset = DATASETS.get(conversion.read_component(section))
    if dataset is None:
        conversion.refuse(
            component, f"no such dataset; known are {', '.join(DATASETS)}", may_be_left_out=False
        )
        for key in conversion.theirs.list_keys(section):
            if key != component:
                conversion.drop(key, "of that dataset")
        return
    style = conversion.get_value(f"{section}.conversation_style")
    our_keys = {f"{our_section}.format": STYLES[style][0] if style in STYLES else dataset.format}
    source = _convert_source(conversion, section, our_section, dataset=dataset)
    if source is not None and f"{section}.source" not in conversion.theirs.values:
        our_keys[f"{our_section}.source"] = source
    _convert_columns(conversion, section, our_section, dataset=dataset)
    conversion.carry(component, our_keys, dataset.why, differs=bool(dataset.why))
    for key in conversion.theirs.list_keys(section):
        if not conversion.is_noted(key):
            _convert_key(conversion, key, our_section, dataset=dataset, source=source)
    # After the keys of the file: a default counts only where the file says nothing.
    train_on_input = f"{section}.train_on_input"
    is_default = train_on_input not in conversion.theirs.values
    if is_default and not dataset.masks and our_section != "validation":
        conversion.defaults[train_on_input] = True
        _convert_key(conversion, train_on_input, our_section, dataset=dataset, source=source)


def _convert_source(
    conversion: ConfigImport, section: str, our_section: str, *, dataset: TorchtuneDataset
) -> str | None:
    """Note where a dataset is; return what `data.source` is, None after a fault."""
    key = f"{section}.source"
    if key not in conversion.theirs.values:
        if dataset.source is None:
            conversion.faults.append(f"{conversion.theirs.shown}: {key} is missing")
            return None
        return _format_hub_name(dataset.source, dataset.subset)
    name = str(conversion.get_value(key))
    files = conversion.get_value(f"{section}.data_files")
    if "://" in name:
        conversion.refuse(
            key, "storage by URL is not read; copy the files here", may_be_left_out=False
        )
        return None
    if name in LOADERS:
        paths = files if isinstance(files, list) else [files]
        if len(paths) != 1 or paths[0] is None:
            count = 0 if files is None else len(paths)
            conversion.refuse(
                key, f"{count} data_files, expected one file or folder", may_be_left_out=False
            )
            return None
        source = str(paths[0])
        conversion.carry(f"{section}.data_files", {})
    else:
        # `load_dataset` takes the subset as `name`.
        subset = conversion.get_value(f"{section}.subset") or conversion.get_value(
            f"{section}.name"
        )
        source = name if is_local(name) else _format_hub_name(name, subset or dataset.subset)
        if files is not None:
            conversion.refuse(f"{section}.data_files", _NO_PART)
    conversion.carry(key, {f"{our_section}.source": source})
    return source


def _format_hub_name(name: str, subset: str | None) -> str:
    return f"{HUB}{name}:{subset}" if subset else f"{HUB}{name}"


def is_local(name: str) -> bool:
    """Return True for a file or folder: one that is there, or what no hub dataset is called."""
    path = expand_home(name)
    return os.path.exists(path) or is_data(path) or name.startswith(("/", "./", "../", "~"))


def _convert_columns(
    conversion: ConfigImport, section: str, our_section: str, *, dataset: TorchtuneDataset
) -> None:
    """Note the names of columns: theirs by our names, as far as they differ."""
    columns = dict(dataset.columns)
    for key in conversion.theirs.list_keys(f"{section}.column_map"):
        word = key.rpartition(".")[2]
        if key.endswith("column_map"):
            conversion.drop(key, "is empty")
        elif word not in dataset.renamed:
            conversion.refuse(key, f"expected {' or '.join(dataset.renamed) or 'no column_map'}")
        else:
            columns[dataset.renamed[word]] = str(conversion.get_value(key))
            conversion.carry(key, {})
    style = conversion.get_value(f"{section}.conversation_style")
    column_keys = {"column": "text", "conversation_column": STYLES.get(style, ("", ""))[1]}
    for word, name in column_keys.items():
        key = f"{section}.{word}"
        if conversion.is_on(key) and name:
            columns[name] = str(conversion.get_value(key))
            conversion.carry(key, {})
    columns = {name: theirs for name, theirs in columns.items() if name != theirs}
    # Validation takes the columns of the section `data`.
    if our_section == "validation":
        if columns != conversion.ours.get("data.columns", {}):
            conversion.refuse(
                f"{section}._component_",
                "validation has the columns of the training data; rename those in its file",
            )
    elif columns:
        conversion.ours[f"{our_section}.columns"] = columns


def _convert_key(
    conversion: ConfigImport,
    key: str,
    our_section: str,
    *,
    dataset: TorchtuneDataset,
    source: str | None,
) -> None:
    """Note a key of a dataset besides its source and columns."""
    value = conversion.get_value(key)
    word = key.rpartition(".")[2]
    if word == "split":
        _convert_split(conversion, key, our_section, source=source)
    elif word in SWITCHES:
        conversion.carry(key, {SWITCHES[word]: bool(value)} if our_section != "validation" else {})
    elif word == "train_on_input":
        _convert_labels(conversion, key, dataset, trains_on_all=bool(value))
    elif word == "conversation_style":
        if value is None or value in STYLES:
            conversion.carry(key, {})
        else:
            conversion.refuse(key, f"expected {' or '.join(STYLES)}")
    elif word in WITHOUT:
        conversion.drop(key, WITHOUT[word])
    elif conversion.is_on(key):
        conversion.refuse(key, REFUSED.get(word, "is no key of a dataset that is known here"))
    else:
        conversion.drop(key, "is off, as here")


def _convert_split(
    conversion: ConfigImport, key: str, our_section: str, *, source: str | None
) -> None:
    """Note the split of a dataset of the hub; files have none."""
    split = str(conversion.get_value(key))
    if source is None or source.startswith(HUB):
        conversion.carry(key, {f"{our_section}.split": split})
    elif split == "train":
        conversion.drop(key, "files are read whole")
    else:
        conversion.refuse(
            key, "files are read whole, without splits; write the part into a file of its own"
        )


def _convert_labels(
    conversion: ConfigImport, key: str, dataset: TorchtuneDataset, *, trains_on_all: bool
) -> None:
    if dataset.format == "text":
        conversion.drop(key, "every token of a text is trained on")
    elif dataset.format == "preference" and trains_on_all:
        conversion.refuse(key, "of pairs the answers alone are compared")
    else:
        labels = {"data.train_on": "all" if trains_on_all else "assistant"}
        conversion.carry(key, labels if dataset.format != "preference" else {})
