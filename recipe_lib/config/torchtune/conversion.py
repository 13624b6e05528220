"""Convert a torchtune config (0.6.1, "theirs") to a config of this project ("ours"), key by key.

`import_file.py` calls `read_torchtune_file`, then notes each key of it in a `ConfigImport`: it is
carried to keys of ours, dropped with a reason, or refused, which is a fault. `convert_datasets`
does so for `dataset` and `dataset_val`; `key_tables.py` gives each value of other keys a `Meaning`.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError
from pathlib import Path
from typing import Any

from recipe_lib.config.convert_values import read_untyped
from recipe_lib.config.key_conditions import HUB
from recipe_lib.config.local_files import is_data
from recipe_lib.config.paths import CONFIG_SUFFIXES, expand_home
from recipe_lib.config.read_yaml import MAX_BYTES, YamlNode, read_file
from recipe_lib.config.references import (
    CIRCLE_REMEDY,
    BadReferenceError,
    ReferencedValues,
    list_references,
    order_keys,
)
from recipe_lib.config.schema_data import DataConfig
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
    # Dotted key -> the line where its value stands, counted from 1.
    lines: dict[str, int]
    # Text of each comment line, without `#`. Their `tune download` commands name models on the hub.
    comments: list[str]

    def format_place(self, key: str) -> str:
        """Return the file and line of a key: `theirs.yaml:12`, without a line for an absent key."""
        return f"{self.shown}:{self.lines[key]}" if key in self.lines else self.shown

    def list_keys(self, section: str) -> list[str]:
        """Return the dotted keys inside a section or list, in the file's order.

        A name that holds a plain value is returned itself. Empty: the file has nothing there.
        """
        return [
            key
            for key in self.values
            if key == section or key.startswith((f"{section}.", f"{section}["))
        ]


def read_torchtune_file(path: str) -> TorchtuneFile:
    """Read a file of torchtune's.

    Raises ConfigError, with a line for each fault, if there is no such .yaml or .yml file, if it is
    not YAML with keys, holds a list in a list, or refers to a key that it does not have.
    """
    file = expand_home(path)
    if file.suffix not in CONFIG_SUFFIXES:
        raise ConfigError(
            f"{show(path)}: expected a file that ends in {' or '.join(CONFIG_SUFFIXES)}"
        )
    if not file.exists():
        raise ConfigError(f"{show(path)}: no such file; expected a config of torchtune's")
    shown = quote(path)[1:-1]  # escaped, without the quotes: a line number may follow
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
    _fill_references(theirs)
    for key, value in theirs.values.items():
        if isinstance(value, list) and any(isinstance(item, list) for item in value):
            raise ConfigError(
                f"{theirs.format_place(key)}: {show(key)}: found a list in a list, expected plain"
                " values"
            )
    return theirs


def _list_values(name: str, node: YamlNode) -> Iterator[tuple[str, Any, int]]:
    """Yield (dotted key, value, line) of every value at or below a node.

    A list of plain values is one value. name: dotted key of the node; empty for the whole file.
    """
    if node.kind == "mapping" and node.entries:
        for word, (_, inner) in node.entries.items():
            yield from _list_values(f"{name}.{word}" if name else word, inner)
    elif node.kind == "list" and any(item.kind == "mapping" for item in node.items):
        for number, item in enumerate(node.items):
            yield from _list_values(f"{name}[{number}]", item)
    else:
        yield name, read_untyped(node), node.line


def _fill_references(theirs: TorchtuneFile) -> None:
    """Fill in references such as `${other.key}`, in place.

    Raises ConfigError for a reference to no key, or keys that refer to each other in a circle.
    """
    values = theirs.values
    # Key -> its texts that hold a reference.
    texts = {
        key: [text for text in (value if isinstance(value, list) else [value]) if "${" in str(text)]
        for key, value in values.items()
    }
    references = {
        key: list_references(with_references, key)
        for key, with_references in texts.items()
        if with_references
    }
    if not references:
        return
    try:
        order = order_keys(references)
    except CycleError as error:
        key = error.args[1][0]  # graphlib gives the keys of the circle
        raise ConfigError(
            f"{theirs.format_place(key)}: {show(key)}: found {quote(texts[key][0])}{CIRCLE_REMEDY}"
        ) from None
    remedy = ", expected ${section.key} of this file; write the value itself"
    # Keys with references are added one by one, each before those that refer to it.
    plain_values = {key: value for key, value in values.items() if key not in references}
    referenced_values = ReferencedValues(plain_values, lambda name: remedy)
    for key in order:
        value = values[key]
        try:
            if isinstance(value, list):
                values[key] = [
                    referenced_values.fill(item, key) if item in texts[key] else item
                    for item in value
                ]
            else:
                values[key] = referenced_values.fill(value, key)
        except BadReferenceError as fault:
            raise ConfigError(f"{theirs.format_place(key)}: {show(key)}: {fault}") from fault
        referenced_values.put(key, values[key])


# Values of `KeyFate.kind`, and headings in the table that `tune import` prints.
CARRIED = "carried"
CHANGED = "other effect"
DROPPED = "dropped"
DEFAULT = "their default"

# In `Meaning.ours`, stands for the value that the file has.
VALUE = "the value of theirs"

# Keys whose null has a meaning: no clipping, a random seed, no limit. Others count as absent.
NULL_MEANS = ("clip_grad_norm", "seed", "tokenizer.max_seq_len")


@dataclass(frozen=True)
class KeyFate:
    """The fate of a key of theirs: what became of it here."""

    # CARRIED, CHANGED (carried, with another effect), DROPPED, or DEFAULT: the key is not in the
    # file, and torchtune's default for it is carried.
    kind: str
    # Our dotted keys -> their values. Empty: no key of ours is needed.
    ours: Mapping[str, Any]
    # Reason or difference, for the user.
    why: str = ""


@dataclass(frozen=True)
class Meaning:
    """The meaning of one value of a key of theirs: the settings here that do the same."""

    # Our dotted keys -> their values; VALUE: the value that the file has.
    ours: Mapping[str, Any] = field(default_factory=dict)
    # Reason or difference, for the user.
    why: str = ""
    # True: the settings here have another effect, which `why` names.
    differs: bool = False
    # Other keys of theirs -> the defaults that torchtune takes for them beside this value, such as
    # the weight decay of an optimizer's class.
    defaults: Mapping[str, Any] = field(default_factory=dict)


class ConfigImport:
    """Their file, our keys so far, and what became of each of theirs.

    `carry`, `take`, `drop` and `refuse` note a key. A key noted twice is a mistake in the tables,
    not the user's, and raises AssertionError.
    """

    def __init__(self, theirs: TorchtuneFile, defaults: Mapping[str, Any]) -> None:
        """Begin with no key of ours.

        defaults: key of theirs -> what torchtune takes for it if it is absent or null.
        """
        self.theirs = theirs
        self.defaults = dict(defaults)
        self.recipe = ""  # our recipe's name, set by `import_file.convert`
        self.ours: dict[str, Any] = {}  # our dotted key -> value
        self.fates: dict[str, KeyFate] = {}  # by key of theirs
        self.faults: list[str] = []  # lines of the error
        # Keys that the file lacks, whose torchtune default needs no key of ours.
        self.ignored: set[str] = set()

    def get_value(self, key: str) -> Any:
        """Return the value that torchtune uses for a key of theirs: the file's, or the default.

        None: it is neither set nor has a default.
        """
        value = self.theirs.values.get(key)
        if value is None and not (key in self.theirs.values and key in NULL_MEANS):
            return self.defaults.get(key)
        return value

    def read_component(self, section: str) -> str:
        """Return the class or function of a section's `_component_`, without its module.

        Empty if the section names none.
        """
        return str(self.get_value(f"{section}._component_") or "").rpartition(".")[2]

    def is_on(self, key: str) -> bool:
        """Return True if torchtune's value of a key asks for something (see `is_off`)."""
        return not is_off(self.get_value(key))

    def is_any_on(self, section: str) -> bool:
        """Return True if `is_on` holds for a key, or for any key of a section, of the file."""
        return any(self.is_on(key) for key in self.theirs.list_keys(section))

    def carry(
        self, key: str, ours: Mapping[str, Any], why: str = "", *, differs: bool = False
    ) -> None:
        """Note the settings of ours that stand for a key of theirs.

        ours: our dotted keys -> values; empty: nothing needs to be set. differs: they have another
        effect, which `why` names.
        """
        kind = CHANGED if differs else CARRIED
        self._note(key, KeyFate(kind if key in self.theirs.values else DEFAULT, ours, why))

    def take(self, key: str, meaning: Meaning) -> None:
        self.defaults |= meaning.defaults
        ours = {
            name: self.get_value(key) if value == VALUE else value
            for name, value in meaning.ours.items()
        }
        self.carry(key, ours, meaning.why, differs=meaning.differs)

    def drop(self, key: str, why: str) -> None:
        """Note a key that needs no key of ours. why: the reason that nothing is missed."""
        if key in self.theirs.values:
            self._note(key, KeyFate(DROPPED, {}, why))
        else:
            self.ignored.add(key)

    def refuse(self, key: str, why: str, *, may_be_left_out: bool = True) -> None:
        """Note a fault: without this key the run would not be what was asked.

        why: the fault, with a remedy. may_be_left_out: the error also offers `--without KEY`.
        """
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

        key: the key, or the section, whose line it names; empty: the file alone.
        """
        keys = self.theirs.list_keys(key) if key else []
        return ConfigError(
            f"{self.theirs.format_place(keys[0]) if keys else self.theirs.shown}: {why}"
        )

    def is_noted(self, key: str) -> bool:
        return key in self.fates or (key in self.ignored and key not in self.theirs.values)

    def _note(self, key: str, fate: KeyFate) -> None:
        if key in self.fates:
            raise AssertionError(f"{key} is noted twice")
        if fate.kind == DEFAULT:
            # Several keys of theirs may lead to one of ours: what the file sets has precedence.
            ours = {name: value for name, value in fate.ours.items() if name not in self.ours}
            fate = KeyFate(DEFAULT, ours, fate.why)
        self.fates[key] = fate
        self.ours.update(fate.ours)


def is_off(value: Any) -> bool:
    """Return True if a value asks for nothing: null, false, 0, empty or `none`."""
    return value is None or value is False or value in (0, "", [], {}, "none", "None")


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
_ALPACA = (
    "the text is the tokenizer's chat template, without Alpaca's own words around the instruction"
)
_DOCUMENTS = (
    "a text longer than max_seq_len is cut into several sequences, the last of what is left"
)
_IN_OUT = {"input": "instruction", "output": "output"}
_PAIRS = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
_SELF = {"instruction": "instruction", "input": "input", "output": "output"}

# Function of torchtune.datasets -> what it reads.
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


def _convert_dataset(conversion: ConfigImport, section: str, our_section: str) -> None:
    """Note the keys of one dataset.

    section: `dataset`, `dataset[0]` or `dataset_val`. our_section: the one that it becomes, `data`,
    `data.sources[0]` or `validation`. The functions below take the same two.
    """
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
    conversion.carry(component, our_keys, dataset.why, differs=bool(dataset.why))
    _convert_columns(conversion, section, our_section, dataset=dataset)
    defaults = {f"{section}.packed": False, f"{section}.train_on_input": not dataset.masks} | (
        {f"{section}.add_eos": True} if dataset.format == "text" else {}
    )
    conversion.defaults |= defaults
    # After the keys of the file: a default counts only where the file says nothing.
    for key in [*conversion.theirs.list_keys(section), *defaults]:
        if not conversion.is_noted(key):
            _convert_key(conversion, key, our_section, dataset=dataset, source=source)


def _convert_source(
    conversion: ConfigImport, section: str, our_section: str, *, dataset: TorchtuneDataset
) -> str | None:
    """Note where a dataset is; return the value of our `source`, None after a fault."""
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
    """Return True for a file or folder: it exists, or its name is one of a data file or a path."""
    path = expand_home(name)
    return os.path.exists(path) or is_data(path) or name.startswith(("/", "./", "../", "~"))


def _convert_columns(
    conversion: ConfigImport, section: str, our_section: str, *, dataset: TorchtuneDataset
) -> None:
    """Note the names of columns, and set our `columns` to those that differ from the format's."""
    # Column that our format reads -> what the file calls it.
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
    # Other key that names a column -> the column of our format.
    column_keys = {"column": "text", "conversation_column": STYLES.get(style, ("", ""))[1]}
    for word, name in column_keys.items():
        key = f"{section}.{word}"
        if conversion.is_on(key) and name:
            columns[name] = str(conversion.get_value(key))
            conversion.carry(key, {})
    columns = {name: their_name for name, their_name in columns.items() if name != their_name}
    # Validation takes `data.columns`, which are free beside a list of datasets.
    if our_section == "validation" and "data.format" in conversion.ours:
        if columns != conversion.ours.get("data.columns", {}):
            conversion.refuse(
                f"{section}._component_",
                "validation has the columns of the training data; rename those in its file",
                may_be_left_out=False,
            )
    elif columns:
        # Set here, not by `carry`: it comes of several keys of theirs.
        conversion.ours[f"{our_section.replace('validation', 'data')}.columns"] = columns


def _convert_key(
    conversion: ConfigImport,
    key: str,
    our_section: str,
    *,
    dataset: TorchtuneDataset,
    source: str | None,
) -> None:
    """Note a key of a dataset besides its source and columns. source: of `_convert_source`."""
    value = conversion.get_value(key)
    word = key.rpartition(".")[2]
    if word == "split":
        _convert_split(conversion, key, our_section, source=source)
    elif word in SWITCHES:
        _convert_shared(conversion, key, our_section, name=SWITCHES[word], value=bool(value))
    elif word == "train_on_input":
        _convert_labels(conversion, key, our_section, dataset=dataset)
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
    conversion: ConfigImport, key: str, our_section: str, dataset: TorchtuneDataset
) -> None:
    """Note train_on_input, by which prompts are label tokens too."""
    train_on = "all" if conversion.get_value(key) else "assistant"
    if dataset.format == "text":
        conversion.drop(key, "every token of a text is trained on")
    elif dataset.format != "preference":
        _convert_shared(conversion, key, our_section, name="data.train_on", value=train_on)
    elif train_on == "all":
        conversion.refuse(key, "of pairs the answers alone are compared")
    else:
        conversion.carry(key, {})


def _convert_shared(
    conversion: ConfigImport, key: str, our_section: str, *, name: str, value: Any
) -> None:
    """Note a key of a dataset whose counterpart, `name`, is one for all data, also of validation.

    value: what this dataset asks for. Validation sets nothing, and training data is of one value.
    """
    if our_section == "validation":
        # Where no training data has the key, ours is at its default.
        differs = value != conversion.ours.get(name, getattr(DataConfig, name.rpartition(".")[2]))
        why = f"validation has the {name} of the training data" if differs else ""
        conversion.carry(key, {}, why, differs=differs)
    elif value != conversion.ours.get(name, value):
        conversion.refuse(
            key, f"{name} holds for all datasets; give each the same value", may_be_left_out=False
        )
    else:
        conversion.carry(key, {name: value})
