"""A config of torchtune's on its way to one of ours.

`read_torchtune_file` reads the file. `ConfigImport` has our keys so far, and what became of each of
theirs (`KeyFate`); a table gives a `Meaning` to the values of a key. A dataset names a function of
torchtune.datasets: DATASETS has what each reads, and `convert_datasets` notes every key of the
sections `dataset` and `dataset_val`.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError
from pathlib import Path
from typing import Any

from recipe_lib.config.convert_values import (
    IN_A_CIRCLE,
    InterpolationError,
    NamedValues,
    list_names,
    order_keys,
    read_untyped,
)
from recipe_lib.config.local_files import is_data
from recipe_lib.config.paths import CONFIG_SUFFIXES, expand_home
from recipe_lib.config.read_yaml import MAX_BYTES, YamlNode, read_file
from recipe_lib.config.schema_data import HUB
from recipe_lib.config.suggest import quote, show
from recipe_lib.errors import ConfigError, raise_faults
from recipe_lib.reading import read_text


@dataclass
class TorchtuneFile:
    """A YAML file of torchtune's as values by dotted key: `optimizer.lr`, `dataset[0].source`.

    Read by the same parser as ours: no tag, alias or second document. Values have the types that
    YAML 1.1 gives them, and numbers such as `1e-5` are numbers. `${other.key}` is filled in;
    resolvers are refused.
    """

    path: Path
    # Its name in errors.
    shown: str
    # By dotted key, in the file's order.
    values: dict[str, Any]
    # Key -> the line where its value stands.
    lines: dict[str, int]
    # A line each, without `#`. The commands in them name models on the hub.
    comments: list[str]

    def format_place(self, key: str) -> str:
        """Return `theirs.yaml:12`, of a key."""
        return f"{self.shown}:{self.lines[key]}" if key in self.lines else self.shown

    def list_keys(self, section: str) -> list[str]:
        """Return the keys of a section, in the file's order; its name if it is one value."""
        return [
            key
            for key in self.values
            if key == section or key.startswith((f"{section}.", f"{section}["))
        ]


def read_torchtune_file(path: str) -> TorchtuneFile:
    """Read a file of torchtune's.

    Raises ConfigError, a line a fault, for what is no YAML file with keys.
    """
    file = expand_home(path)
    if file.suffix not in CONFIG_SUFFIXES:
        raise ConfigError(
            f"{show(path)}: expected a file that ends in {' or '.join(CONFIG_SUFFIXES)}"
        )
    if not file.exists():
        raise ConfigError(f"{show(path)}: no such file; expected a config of torchtune's")
    shown = quote(path)[1:-1]
    document = read_file(file, shown)
    raise_faults(ConfigError, (f"{shown}:{line}: {fault}" for line, fault in document.faults))
    if document.top.kind != "mapping":
        raise ConfigError(f"{shown}: expected keys with values")
    lines = [line.lstrip(" \t") for line in read_text(file, MAX_BYTES).splitlines()]
    rows = list(_list_values("", document.top))
    theirs = TorchtuneFile(
        path=file,
        shown=shown,
        values={key: value for key, value, _ in rows},
        lines={key: line for key, _, line in rows},
        comments=[line[1:].strip() for line in lines if line.startswith("#")],
    )
    _fill_names(theirs)
    for key, value in theirs.values.items():
        if isinstance(value, list) and any(isinstance(item, list) for item in value):
            raise ConfigError(
                f"{theirs.format_place(key)}: {show(key)}: found a list in a list, expected plain"
                " values"
            )
    return theirs


def _list_values(name: str, node: YamlNode) -> Iterator[tuple[str, Any, int]]:
    """Yield (dotted key, value, line) of every value; a list of plain values is one."""
    if node.kind == "mapping" and node.entries:
        for word, (_, inner) in node.entries.items():
            yield from _list_values(f"{name}.{word}" if name else word, inner)
    elif node.kind == "list" and any(item.kind == "mapping" for item in node.items):
        for number, item in enumerate(node.items):
            yield from _list_values(f"{name}[{number}]", item)
    else:
        yield name, read_untyped(node), node.line


def _fill_names(theirs: TorchtuneFile) -> None:
    """Put the values of other keys into those that name them."""
    values = theirs.values
    texts = {
        key: [text for text in (value if isinstance(value, list) else [value]) if "${" in str(text)]
        for key, value in values.items()
    }
    names = {key: list_names(inside, key) for key, inside in texts.items() if inside}
    if not names:
        return
    try:
        order = order_keys(names)
    except CycleError as error:
        key = error.args[1][0]
        raise ConfigError(
            f"{theirs.format_place(key)}: {show(key)}: found {quote(texts[key][0])}{IN_A_CIRCLE}"
        ) from None
    remedy = ", expected ${section.key} of this file; write the value itself"
    plain_values = {key: value for key, value in values.items() if key not in names}
    named_values = NamedValues(plain_values, lambda name: remedy)
    for key in order:
        value = values[key]
        try:
            if isinstance(value, list):
                values[key] = [
                    named_values.fill(item, key) if item in texts[key] else item for item in value
                ]
            else:
                values[key] = named_values.fill(value, key)
        except InterpolationError as fault:
            raise ConfigError(f"{theirs.format_place(key)}: {show(key)}: {fault}") from fault
        named_values.put(key, values[key])


# Kinds of `KeyFate`, as the table of `tune import` has them.
CARRIED = "carried"
CHANGED = "other effect"
DROPPED = "dropped"
DEFAULT = "their default"

# In a `Meaning`: the value that the file has.
VALUE = "the value of theirs"

# Keys whose null says something of its own.
NULL_MEANS = ("clip_grad_norm", "seed", "tokenizer.max_seq_len")


@dataclass(frozen=True)
class KeyFate:
    """The fate of a key of theirs: what became of it here."""

    # CARRIED, CHANGED (carried, with another effect), DROPPED, or DEFAULT: what torchtune takes for
    # a key that is not in the file.
    kind: str
    # Our keys, with the values that come of it.
    ours: Mapping[str, Any]
    # For the reader.
    why: str = ""


@dataclass(frozen=True)
class Meaning:
    """The meaning of a value of a key of theirs: what it says here."""

    # Our keys with their values; VALUE: theirs.
    ours: Mapping[str, Any] = field(default_factory=dict)
    # For the reader.
    why: str = ""
    # The effect here is another one.
    differs: bool = False
    # What torchtune takes with it for other keys that are left out.
    defaults: Mapping[str, Any] = field(default_factory=dict)


class ConfigImport:
    """Their file, our keys so far, and what became of each of theirs.

    Each key of the file is noted once: a second time is a fault of a table, not of a user.
    """

    def __init__(self, theirs: TorchtuneFile, defaults: Mapping[str, Any]) -> None:
        """Begin with no key of ours.

        defaults: what torchtune takes for keys that are absent or null.
        """
        self.theirs = theirs
        self.defaults = dict(defaults)
        self.recipe = ""  # ours, once it is known
        self.ours: dict[str, Any] = {}
        self.fates: dict[str, KeyFate] = {}
        self.faults: list[str] = []
        # Keys with a default of theirs of which nothing comes.
        self.ignored: set[str] = set()

    def get_value(self, key: str) -> Any:
        """Return what torchtune uses; None for what is neither set nor has a default."""
        value = self.theirs.values.get(key)
        if value is None and not (key in self.theirs.values and key in NULL_MEANS):
            return self.defaults.get(key)
        return value

    def read_component(self, section: str) -> str:
        """Return the class or function that a section names, without its module; empty if it names
        none.
        """
        return str(self.get_value(f"{section}._component_") or "").rpartition(".")[2]

    def is_on(self, key: str) -> bool:
        """Return True if a key is set to something."""
        return not is_off(self.get_value(key))

    def is_any_on(self, section: str) -> bool:
        """Return True if a key, or one of a section, is set to something."""
        return any(self.is_on(key) for key in self.theirs.list_keys(section))

    def carry(
        self, key: str, ours: Mapping[str, Any], why: str = "", *, differs: bool = False
    ) -> None:
        """Note that these keys of ours do what theirs does.

        differs: they do something else, which `why` says.
        """
        kind = CHANGED if differs else CARRIED
        self._note(key, KeyFate(kind if key in self.theirs.values else DEFAULT, ours, why))

    def take(self, key: str, meaning: Meaning) -> None:
        """Note what a value says here, and the defaults that it brings."""
        self.defaults |= meaning.defaults
        ours = {
            name: self.get_value(key) if value == VALUE else value
            for name, value in meaning.ours.items()
        }
        self.carry(key, ours, meaning.why, differs=meaning.differs)

    def drop(self, key: str, why: str) -> None:
        """Note that nothing comes of it, and why nothing is missed."""
        if key in self.theirs.values:
            self._note(key, KeyFate(DROPPED, {}, why))
        else:
            self.ignored.add(key)

    def refuse(self, key: str, why: str, *, may_be_left_out: bool = True) -> None:
        """Note a fault: without this key the run would not be what was asked."""
        setting = f"{show(key)}: {quote(str(self.get_value(key)))}"
        remedy = ""
        if may_be_left_out:
            # A `?` ends a hint: `did you mean X?`.
            end = "" if why.endswith("?") else ";"
            remedy = f"{end} --without {show(key)} imports the rest"
        self.faults.append(f"{self.theirs.format_place(key)}: {setting}: {why}{remedy}")
        if key not in self.fates:
            self.drop(key, why)

    def build_error(self, why: str, key: str = "") -> ConfigError:
        """Return the error of a file that cannot become a config of ours, in one line.

        key: whose line it names, or the section whose first line.
        """
        keys = self.theirs.list_keys(key) if key else []
        return ConfigError(
            f"{self.theirs.format_place(keys[0]) if keys else self.theirs.shown}: {why}"
        )

    def is_noted(self, key: str) -> bool:
        """Return True if it is known what became of a key."""
        return key in self.fates or (key in self.ignored and key not in self.theirs.values)

    def _note(self, key: str, fate: KeyFate) -> None:
        if key in self.fates:
            raise AssertionError(f"{key} is noted twice")
        if fate.kind == DEFAULT:
            # What the file says under another name stands.
            ours = {name: value for name, value in fate.ours.items() if name not in self.ours}
            fate = KeyFate(DEFAULT, ours, fate.why)
        self.fates[key] = fate
        self.ours.update(fate.ours)


def is_off(value: Any) -> bool:
    """Return True if a value asks for nothing."""
    return value is None or value is False or value in (0, "", [], {}, "none", "None")


def omit_keys(keys: Iterable[str], theirs: TorchtuneFile) -> dict[str, KeyFate]:
    """Take keys and sections out of the file, as the user has asked; return what became of them.

    Raises ConfigError for one that the file does not have.
    """
    fates = {}
    for key in keys:
        names = theirs.list_keys(key)
        if not names:
            raise ConfigError(f"--without: {theirs.shown} has no key {quote(key)}")
        for name in names:
            del theirs.values[name]
            fates[name] = KeyFate(DROPPED, {}, "left out by --without")
    return fates


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
        "alpaca", source="liweili/c4_200m", columns={"instruction": "input"}, renamed=_IN_OUT
    ),
    "samsum_dataset": TorchtuneDataset(
        "alpaca",
        source="Samsung/samsum",
        columns={"instruction": "dialogue", "output": "summary"},
        renamed=_IN_OUT,
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
        source="lvwerra/stack-exchange-paired",
        columns={"prompt": "question", "chosen": "response_j", "rejected": "response_k"},
        renamed=_PAIRS,
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
_NOT_NEEDED = {
    "split_across_pack": "a text that does not fit into a pack begins another",
    "data_files": "is read with the dataset's source",
    "name": "is read with the dataset's source",
    "subset": "is read with the dataset's source",
    "trust_remote_code": "no code of a dataset is run",
}
_NO_PART = "a dataset is read whole; put its folder here and name it in data.source"
_MISSING = {
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
    elif word in _NOT_NEEDED:
        conversion.drop(key, _NOT_NEEDED[word])
    elif conversion.is_on(key):
        conversion.refuse(key, _MISSING.get(word, "is no key of a dataset that is known here"))
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
