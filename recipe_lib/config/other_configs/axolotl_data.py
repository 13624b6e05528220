"""Axolotl's datasets: a list of sections with a `type` each, as source, format and columns."""

from collections.abc import Mapping
from typing import Any

from recipe_lib.config.other_configs.conversion import ConfigImport, is_off
from recipe_lib.config.other_configs.their_data import LOADERS, TEMPLATE, carry_split, find_source

_WORDS = "the text is the tokenizer's chat template, without the words that Axolotl puts around an instruction"
_DOCUMENTS = "a text longer than max_seq_len is cut into several sequences, the last of what is left"
_NO_TYPE = "no such type; known are "

# type -> (format, columns: theirs by ours, what is different).
INSTRUCTIONS: dict[str, tuple[str, dict[str, str], str]] = {
    "alpaca": ("alpaca", {}, _WORDS),
    "alpaca_chat": ("alpaca", {}, _WORDS),
    "alpaca_chat.load_qa": ("alpaca", {"instruction": "question", "output": "answer"}, _WORDS),
    "alpaca_w_system.load_open_orca": (
        "alpaca",
        {"instruction": "question", "output": "response", "system": "system_prompt"},
        _WORDS,
    ),
    "completion": ("text", {}, _DOCUMENTS),
    "pretrain": ("text", {}, _DOCUMENTS),
    "chat_template": ("messages", {}, ""),
    "sharegpt": ("sharegpt", {}, "the text is the tokenizer's chat template"),
}
PAIRS: dict[str, dict[str, str]] = {  # after the template's name and a dot
    "default": {},
    "intel": {"prompt": "question"},
    "prompt_pairs": {},
    "ultra": {},
    "argilla_chat": {},
    "argilla": {"prompt": "instruction", "chosen": "chosen_response", "rejected": "rejected_response"},
    "icr": {"prompt": "input"},
}
ANSWERS: dict[str, dict[str, str]] = {  # of `rl: kto`
    "intel": {"prompt": "question"},
    "prompt_pairs": {},
    "ultra": {},
    "argilla": {"prompt": "instruction"},
}
REWARDS = {"chat_template": {"prompt": "input"}}  # after `bradley_terry.`
# Keys of a `type` that is a section, and of a dataset -> the column of ours that they name.
FIELDS = {
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "field_system": "system",
    "field_prompt": "prompt",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "field_completion": "completion",
    "field_label": "label",
    "field": "text",
    "text_column": "text",
    "field_tools": "tools",
}
_ROLES = ({"role": "role", "content": "content"}, {"role": "from", "content": "value"})
_USUAL_ROLES = {"user": {"human", "user"}, "assistant": {"gpt", "assistant", "model"}, "system": {"system"},
                "tool": {"tool"}}  # fmt: skip

WITHOUT = {
    "ds_type": "the file's name says its kind",
    "name": "is part of the source",
    "trust_remote_code": "no code of a dataset is run",
    "preprocess_shards": "samples are read by all cores: data.num_proc",
    "message_field_training": "a message's own `train: false` takes it out",
    "chat_template": "",
    "conversation": "the tokenizer's chat template is used",
}
REFUSED = {
    "data_files": "a dataset of the hub is read whole",
    "shards": "a dataset is read whole; data.max_samples takes its first samples",
    "shards_idx": "a dataset is read whole; data.max_samples takes its first samples",
    "revision": "the newest revision is read; `data.source` takes a folder that you have fetched",
    "skip": "a dataset is read from its first sample",
    "drop_system_message": "messages are trained as they are; take them out of the samples",
    "message_field_training_detail": "a message is trained whole, or not",
    "train_on_eos": "the end of each trained turn is trained",
    "input_transform": "no config names Python code",
    "field_thinking": "thoughts are read from reasoning_content, or within content",
    "field_human": "expected messages or instructions",
    "field_model": "expected messages or instructions",
}


def convert_datasets(conversion: ConfigImport, pairs: str) -> None:
    """`datasets`, `pretraining_dataset` and the first of `test_datasets`. pairs: our format of those that hold two
    answers (`preference`) or one with a label (`kto`), else empty."""
    lists = [name for name in ("datasets", "pretraining_dataset") if _sections(conversion, name)]
    found = [section for name in lists for section in _sections(conversion, name)]
    if not found:
        raise conversion.stop("datasets is missing, which says what is trained on; data.source=FILE names samples")
    for number, section in enumerate(found):
        _convert(conversion, section, "data" if len(found) == 1 else f"data.sources[{number}]", pairs)
    for number, section in enumerate(_sections(conversion, "test_datasets")):
        if number == 0:
            _convert(conversion, section, "validation", pairs)
        else:
            for key in conversion.theirs.under(section):
                conversion.refuse(key, "validation has one source; put the samples into one file")


def _sections(conversion: ConfigImport, name: str) -> list[str]:
    keys = conversion.theirs.values
    if conversion.is_on(name):
        return [name] if isinstance(keys[name], str) else []
    listed = {key.partition("]")[0] + "]" for key in keys if key.startswith(f"{name}[")}
    return sorted(listed, key=lambda section: int(section.rpartition("[")[2][:-1]))


def _convert(conversion: ConfigImport, section: str, ours: str, pairs: str) -> None:
    if section in conversion.theirs.values:  # `pretraining_dataset: NAME`
        source = find_source(conversion, section)
        if source is not None:
            conversion.change(section, {f"{ours}.source": source, f"{ours}.format": "text"}, _DOCUMENTS)
        return
    kind = f"{section}.type"
    what, columns, why = _kind(conversion, section, kind, pairs)
    if what is None:
        return
    path = f"{section}.path"
    source = None
    if path in conversion.theirs.values:
        files, named = conversion.value(f"{section}.data_files"), conversion.value(path) in LOADERS
        source = find_source(conversion, path, subset=conversion.value(f"{section}.name"), files=files)
        if source is not None:
            conversion.carry(path, {f"{ours}.source": source})
        if named and files is not None:
            conversion.drop_once(f"{section}.data_files", "is the source")
    else:
        conversion.faults.append(f"{conversion.theirs.shown}: {section}.path is missing")
    columns |= _fields(conversion, section, what)
    if what in ("messages", "sharegpt"):
        what = _messages(conversion, section, what, columns)
    elif pairs == "preference":
        _pair_messages(conversion, section, columns)
    named_columns = {ours_name: theirs for ours_name, theirs in columns.items() if ours_name != theirs}
    _set_columns(conversion, section, ours, named_columns)
    if kind in conversion.theirs.values:
        (conversion.change if why else conversion.carry)(kind, {f"{ours}.format": what}, why)
    else:
        conversion.ours[f"{ours}.format"] = what
    _rest(conversion, section, ours, source)


def _kind(conversion: ConfigImport, section: str, key: str, pairs: str) -> tuple[str | None, dict[str, str], str]:
    """Format, columns and what is different; None after a fault was noted."""
    if conversion.theirs.under(key) not in ([], [key]):  # a section: fields with names of their own
        return pairs or "alpaca", {}, ""
    named = str(conversion.value(key) or ("pretrain" if section.startswith("pretraining") else ""))
    template, _, rest = named.partition(".")
    if pairs:
        kinds = ANSWERS if pairs == "kto" else REWARDS if template == "bradley_terry" else PAIRS
        if (rest or template) in kinds:
            why = "" if template == "chat_template" else "the text is the tokenizer's chat template"
            return pairs, dict(kinds[rest or template]), why
        known = ", ".join(f"TEMPLATE.{name}" for name in kinds)
    else:
        if named in INSTRUCTIONS or template in ("sharegpt", "alpaca") and ":" not in named and not rest:
            what, columns, why = INSTRUCTIONS[named if named in INSTRUCTIONS else template]
            return what, dict(columns), why
        if named.partition(":")[0] == "alpaca":  # alpaca:chatml
            return "alpaca", {}, _WORDS
        known = ", ".join(INSTRUCTIONS)
    if key in conversion.theirs.values:
        conversion.refuse(key, f"{_NO_TYPE}{known}", may_be_left_out=False)
    else:
        conversion.faults.append(f"{conversion.theirs.shown}: {key} is missing; known are {known}")
    for other in conversion.theirs.under(section):
        conversion.drop_once(other, "of that dataset")
    return None, {}, ""


def _fields(conversion: ConfigImport, section: str, what: str) -> dict[str, str]:
    """Columns that keys of the dataset, or of its `type`, name."""
    columns = {}
    for key in conversion.theirs.under(section):
        word = key.rpartition(".")[2]
        if word in FIELDS and conversion.is_on(key) and not conversion.noted(key):
            columns[FIELDS[word]] = str(conversion.value(key))
            conversion.carry(key, {})
        elif key.startswith(f"{section}.type.") and not conversion.noted(key):
            if conversion.is_on(key) and str(conversion.value(key)).strip() not in ("{instruction}", "{prompt}"):
                conversion.refuse(key, f"text is written by a chat template: {TEMPLATE}")
            else:
                conversion.drop(key, "adds nothing to the text")
    return columns


def _messages(conversion: ConfigImport, section: str, what: str, columns: dict[str, str]) -> str:
    """The format of a conversation whose messages have these names; what is not like it is noted as a fault."""
    names = _message_names(conversion, section)
    if what == "sharegpt":
        names = dict(_ROLES[1]) if names == _ROLES[0] else names
    if names not in _ROLES:
        conversion.faults.append(
            f"{conversion.theirs.shown}: {section}: messages with {names}, expected role and content, or from and value"
        )
    what = "messages" if names == _ROLES[0] else "sharegpt"
    column = "messages" if what == "messages" else "conversations"
    key = f"{section}.field_messages"
    if conversion.is_on(key):
        columns[column] = str(conversion.value(key))
        conversion.carry(key, {})
    elif what == "sharegpt" and conversion.value(f"{section}.type") == "chat_template":
        columns[column] = "messages"
    _roles(conversion, section)
    return what


def _pair_messages(conversion: ConfigImport, section: str, columns: dict[str, str]) -> None:
    _message_names(conversion, section)
    key = f"{section}.field_messages"
    if conversion.is_on(key):
        columns["conversations"] = str(conversion.value(key))
        conversion.carry(key, {})
    elif conversion.value(f"{section}.type") in ("chat_template.default", "chat_template"):
        columns["conversations"] = "messages"
    _roles(conversion, section)


def _message_names(conversion: ConfigImport, section: str) -> dict[str, str]:
    """What role and content are called in a message."""
    names = dict(_ROLES[0])
    for word, ours in (("message_field_role", "role"), ("message_field_content", "content")):
        if conversion.is_on(f"{section}.{word}"):
            names[ours] = str(conversion.value(f"{section}.{word}"))
            conversion.carry(f"{section}.{word}", {})
    mapping = f"{section}.message_property_mappings"
    for key in conversion.theirs.under(mapping):
        word = key.rpartition(".")[2]
        if word in names:
            names[word] = str(conversion.value(key))
            conversion.carry(key, {})
        elif conversion.value(key) == word:
            conversion.carry(key, {})
        else:
            conversion.refuse(key, f"a message's {word} is read under that name")
    return names


def _roles(conversion: ConfigImport, section: str) -> None:
    """`roles`: what the speakers are called; ours knows the usual names."""
    for key in conversion.theirs.under(f"{section}.roles"):
        names = conversion.value(key)
        usual = _USUAL_ROLES.get(key.rpartition(".")[2], set())
        if set(names if isinstance(names, list) else [names]) <= usual:
            conversion.carry(key, {})
        else:
            conversion.refuse(key, f"expected {', '.join(sorted(usual)) or 'user, assistant, system, tool'}")


def _set_columns(conversion: ConfigImport, section: str, ours: str, columns: Mapping[str, str]) -> None:
    if ours != "validation":
        if columns:
            conversion.ours[f"{ours}.columns"] = dict(columns)
    elif columns != conversion.ours.get("data.columns", {}):
        conversion.faults.append(
            f"{conversion.theirs.shown}: {section}: other columns than those of the training data, which are read; "
            "rename them in its file"
        )


def _rest(conversion: ConfigImport, section: str, ours: str, source: str | None) -> None:
    for key in conversion.theirs.under(section):
        word, value = key.removeprefix(f"{section}."), conversion.value(key)
        if conversion.noted(key):
            continue
        if word == "split" and value is not None:
            carry_split(conversion, key, ours, source)
        elif word == "roles_to_train" and value is not None:
            conversion.carry(key, {"data.train_on": _trained_roles(value)})
        elif word == "train_on_eos" and value in ("turn", None):
            conversion.drop(key, "the end of each trained turn is trained, as here")
        elif word.startswith("chat_template"):
            _dataset_template(conversion, key, value)
        elif word in WITHOUT:
            conversion.drop(key, WITHOUT[word])
        elif is_off(value):
            conversion.drop(key, "is off, as here")
        else:
            conversion.refuse(key, REFUSED.get(word, "is no key of a dataset that is known here"))


def _trained_roles(value: Any) -> Any:
    roles = value if isinstance(value, list) else [value]
    if roles == ["all"]:
        return "all"
    roles = [{"gpt": "assistant", "human": "user"}.get(role, role) for role in roles]
    return "assistant" if roles == ["assistant"] else roles


def _dataset_template(conversion: ConfigImport, key: str, value: Any) -> None:
    if value in (None, "tokenizer_default"):
        conversion.drop(key, "the tokenizer's chat template is used, as here")
    else:
        conversion.change(key, {}, TEMPLATE)
