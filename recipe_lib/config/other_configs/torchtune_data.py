"""Datasets of torchtune's configs, which name a function, as source, format and columns."""

from dataclasses import dataclass, field
from typing import Any

from recipe_lib.config.other_configs.conversion import ConfigImport
from recipe_lib.config.other_configs.their_data import LOADERS, carry_split, find_source


@dataclass(frozen=True)
class TorchtuneDataset:
    """What a function of torchtune.datasets reads. columns: theirs by the names that our format knows; renamed: names
    of theirs in `column_map` -> ours. masks: its default of train_on_input is false. why: what is different here."""

    format: str
    source: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    masks: bool = True
    why: str = ""


_ALPACA = "the text is the tokenizer's chat template, without Alpaca's own words around the instruction"
_DOCUMENTS = "a text longer than max_seq_len is cut into several sequences, the last of what is left"
_IN_OUT = {"input": "instruction", "output": "output"}
_PAIRS = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
_SELF = {"instruction": "instruction", "input": "input", "output": "output"}

DATASETS = {
    "alpaca_dataset": TorchtuneDataset("alpaca", "tatsu-lab/alpaca", renamed=_SELF, masks=False, why=_ALPACA),
    "alpaca_cleaned_dataset": TorchtuneDataset(
        "alpaca", "yahma/alpaca-cleaned", renamed=_SELF, masks=False, why=_ALPACA
    ),
    "instruct_dataset": TorchtuneDataset("alpaca", columns={"instruction": "input"}, renamed=_IN_OUT),
    "grammar_dataset": TorchtuneDataset("alpaca", "liweili/c4_200m", {"instruction": "input"}, _IN_OUT),
    "samsum_dataset": TorchtuneDataset(
        "alpaca", "Samsung/samsum", {"instruction": "dialogue", "output": "summary"}, _IN_OUT
    ),
    "chat_dataset": TorchtuneDataset("messages"),
    "slimorca_dataset": TorchtuneDataset(
        "sharegpt", "Open-Orca/SlimOrca-Dedup", renamed={"conversations": "conversations"}
    ),
    "preference_dataset": TorchtuneDataset("preference", renamed=_PAIRS),
    "hh_rlhf_helpful_dataset": TorchtuneDataset("preference", "RLHFlow/HH-RLHF-Helpful-standard", renamed=_PAIRS),
    "stack_exchange_paired_dataset": TorchtuneDataset(
        "preference",
        "lvwerra/stack-exchange-paired",
        {"prompt": "question", "chosen": "response_j", "rejected": "response_k"},
        _PAIRS,
        why="there the files of its folder data/rl, here the dataset's train split",
    ),
    "text_completion_dataset": TorchtuneDataset("text", why=_DOCUMENTS),
    "wikitext_dataset": TorchtuneDataset(
        "text", "EleutherAI/wikitext_document_level", {"text": "page"}, why=_DOCUMENTS
    ),
    "cnn_dailymail_articles_dataset": TorchtuneDataset(
        "text", "ccdv/cnn_dailymail", {"text": "article"}, why=_DOCUMENTS
    ),
}  # fmt: skip
SUBSETS = {"wikitext_dataset": "wikitext-103-v1", "cnn_dailymail_articles_dataset": "3.0.0"}
STYLES = {"sharegpt": ("sharegpt", "conversations"), "openai": ("messages", "messages")}

# Of one dataset: why nothing is missed, or what is missing.
WITHOUT = {
    "add_eos": "an end token follows each text; data.add_eos=false leaves it out",
    "split_across_pack": "a text that does not fit into a pack begins another",
    "data_files": "",
    "name": "",
    "subset": "",
    "conversation_style": "",
    "trust_remote_code": "no code of a dataset is run",
}
REFUSED = {
    "new_system_prompt": "no message is put before a sample's own; write it into the samples",
    "filter_fn": "no config names Python code; filter the file of samples",
    "data_dir": "a dataset is read whole; put its folder here and name it in data.source",
    "use_clean": "there is no such variant of a dataset",
}


def convert_datasets(conversion: ConfigImport) -> None:
    """`dataset`, a section or a list of them, and `dataset_val`."""
    numbers = sorted({int(key[8:].partition("]")[0]) for key in conversion.theirs.values if key.startswith("dataset[")})
    if numbers:
        for number in numbers:
            _convert(conversion, f"dataset[{number}]", f"data.sources[{number}]")
    elif "dataset._component_" in conversion.theirs.values:
        _convert(conversion, "dataset", "data")
    else:
        raise conversion.stop("dataset._component_ is missing, which says what is trained on")
    if "dataset_val._component_" in conversion.theirs.values:
        _convert(conversion, "dataset_val", "validation")


def _convert(conversion: ConfigImport, section: str, ours: str) -> None:
    component = f"{section}._component_"
    name = str(conversion.value(component)).rpartition(".")[2]
    if name not in DATASETS:
        images = "there are no images here" if "multimodal" in str(conversion.value(component)) else "no such dataset"
        conversion.refuse(component, f"{images}; known are {', '.join(DATASETS)}", may_be_left_out=False)
        for key in conversion.theirs.under(section):
            if key != component:
                conversion.drop(key, "of that dataset")
        return
    known = DATASETS[name]
    source = _source(conversion, section, ours, known, SUBSETS.get(name))
    columns = _columns(conversion, section, known)
    style = conversion.value(f"{section}.conversation_style")
    named: dict[str, Any] = {f"{ours}.format": STYLES[style][0] if style in STYLES else known.format}
    _carry_columns(conversion, component, ours, columns)
    if known.source and f"{section}.source" not in conversion.theirs.values:
        named[f"{ours}.source"] = source
    note = conversion.change if known.why else conversion.carry
    note(component, named, known.why)
    _carry_rest(conversion, section, ours, known, source)


def _source(
    conversion: ConfigImport, section: str, ours: str, known: TorchtuneDataset, subset: str | None
) -> str | None:
    key = f"{section}.source"
    if key not in conversion.theirs.values:
        if known.source is None:
            conversion.faults.append(f"{conversion.theirs.shown}: {section}.source is missing")
            return None
        return f"hub:{known.source}:{subset}" if subset else f"hub:{known.source}"
    subset = next((conversion.value(f"{section}.{word}") for word in ("subset", "name")
                   if conversion.is_on(f"{section}.{word}")), subset)  # fmt: skip
    files = conversion.value(f"{section}.data_files")
    source = find_source(conversion, key, subset=subset, files=files)
    if source is not None:
        conversion.carry(key, {f"{ours}.source": source})
    for word in ("subset", "name"):
        conversion.drop_once(f"{section}.{word}", f"is part of {ours}.source")
    if files is not None and conversion.value(key) in LOADERS:
        conversion.carry(f"{section}.data_files", {})
    elif files is not None:
        conversion.refuse(f"{section}.data_files", REFUSED["data_dir"])
    return source


def _columns(conversion: ConfigImport, section: str, known: TorchtuneDataset) -> dict[str, str]:
    """Theirs by our names, as far as they differ."""
    columns = dict(known.columns)
    style = conversion.value(f"{section}.conversation_style")
    for key in conversion.theirs.under(f"{section}.column_map"):
        word, value = key.rpartition(".")[2], conversion.value(key)
        if key.endswith("column_map"):
            conversion.drop(key, "is empty")
        elif word not in known.renamed:
            conversion.refuse(key, f"expected {' or '.join(known.renamed) or 'no column_map'}")
        else:
            columns[known.renamed[word]] = str(value)
            conversion.carry(key, {})
    for word, ours in (("column", "text"), ("conversation_column", STYLES.get(style, ("", ""))[1])):
        if conversion.is_on(f"{section}.{word}") and ours:
            columns[ours] = str(conversion.value(f"{section}.{word}"))
            conversion.carry(f"{section}.{word}", {})
    return {ours: theirs for ours, theirs in columns.items() if ours != theirs}


def _carry_columns(conversion: ConfigImport, component: str, ours: str, columns: dict[str, str]) -> None:
    if ours != "validation":
        if columns:
            conversion.ours[f"{ours}.columns"] = columns
    elif columns != conversion.ours.get("data.columns", {}):
        conversion.refuse(component, "validation has the columns of the training data; rename those in its file")


def _carry_rest(conversion: ConfigImport, section: str, ours: str, known: TorchtuneDataset, source: str | None) -> None:
    style = f"{section}.conversation_style"
    if conversion.is_on(style) and conversion.value(style) not in STYLES:
        conversion.refuse(style, f"expected {' or '.join(STYLES)}")
    for key in conversion.theirs.under(section):
        word, value = key.removeprefix(f"{section}."), conversion.value(key)
        if conversion.noted(key) or key == f"{section}._component_":
            continue
        if word == "split":
            carry_split(conversion, key, ours, source)
        elif word == "packed":
            conversion.carry(key, {"data.packing": bool(value)} if ours != "validation" else {})
        elif word == "train_on_input":
            _train_on(conversion, key, known, bool(value))
        elif word == "conversation_style":
            conversion.carry(key, {})
        elif word in WITHOUT:
            conversion.drop(key, WITHOUT[word] or "is read with the dataset's source")
        elif word in REFUSED and conversion.is_on(key):
            conversion.refuse(key, REFUSED[word])
        elif conversion.is_on(key):
            conversion.refuse(key, "is no key of a dataset that is known here")
        else:
            conversion.drop(key, "is off, as here")
    if not known.masks and f"{section}.train_on_input" not in conversion.theirs.values and ours != "validation":
        conversion.defaults[f"{section}.train_on_input"] = True
        _train_on(conversion, f"{section}.train_on_input", known, True)


def _train_on(conversion: ConfigImport, key: str, known: TorchtuneDataset, inputs: bool) -> None:
    if known.format == "text":
        conversion.drop(key, "every token of a text is trained on")
    elif known.format == "preference" and inputs:
        conversion.refuse(key, "of pairs the answers alone are compared")
    elif known.format == "preference":
        conversion.carry(key, {})
    else:
        conversion.carry(key, {"data.train_on": "all" if inputs else "assistant"})
