"""LLaMA-Factory's datasets: names that its `dataset_info.json` describes, as source, format and columns."""

import json
from pathlib import Path
from typing import Any

from recipe_lib.config.other_configs.conversion import ConfigImport
from recipe_lib.config.paths import expand
from recipe_lib.config.schema_data import HUB
from recipe_lib.config.suggest import quote, show
from recipe_lib.errors import ConfigError
from recipe_lib.reading import describe_fault, read_json

INFO = "dataset_info.json"
_LIMIT = 2**24  # bytes
# Columns of LLaMA-Factory -> ours, by what a dataset holds.
INSTRUCTIONS = {"prompt": "instruction", "query": "input", "response": "output", "system": "system"}
_USUAL_INSTRUCTIONS = {"prompt": "instruction", "query": "input", "response": "output"}
PAIRS = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected", "system": "system"}
CONVERSATIONS = {"messages": "conversations", "system": "system", "tools": "tools"}
_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "system_tag": "system",
    "observation_tag": "observation",
    "function_tag": "function_call",
}
_OPENAI = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
# What a key of a dataset holds, and the words for it; a null says nothing.
_TYPES: dict[str, tuple[type, str]] = {
    **dict.fromkeys(("file_name", "hf_hub_url", "subset", "split", "formatting"), (str, "a text")),
    "num_samples": (int, "an integer"),
    "ranking": (bool, "true or false"),
    **dict.fromkeys(("columns", "tags"), (dict, "an object of texts")),
}
_FORMATTINGS = ("alpaca", "sharegpt", "openai")
_NOT_READ = ("history", "images", "videos", "audios", "script_url", "cloud_file_name", "folder")


def convert_datasets(conversion: ConfigImport, stage: str) -> None:
    """`dataset` and `eval_dataset`: names, commas between them."""
    if conversion.names_samples():
        conversion.drop_once("dataset", "the command line names the samples")
    else:
        _convert(conversion, "dataset", stage)
    if conversion.is_on("eval_dataset"):
        _convert(conversion, "eval_dataset", stage)


def _convert(conversion: ConfigImport, key: str, stage: str) -> None:
    if not conversion.is_on(key):
        raise conversion.stop(f"{key} is missing, which says what is trained on; data.source=FILE names samples")
    value = conversion.value(key)
    words = value if isinstance(value, list) else str(value).split(",")
    names = [str(word).strip() for word in words if str(word).strip()]
    folder, described = _described(conversion, key, names)
    sections = ["data"] if len(names) == 1 else [f"data.sources[{number}]" for number in range(len(names))]
    if key == "eval_dataset":
        if len(names) > 1:
            conversion.refuse(key, "validation has one source; put the samples into one file")
            return
        sections = ["validation"]
    ours: dict[str, Any] = {}
    for name, section in zip(names, sections, strict=True):
        about = described.get(name)
        if not isinstance(about, dict):
            conversion.refuse(key, f"{folder / INFO} has no dataset {show(name)}", may_be_left_out=False)
            return
        about = _without_nulls(about)
        if fault := _why_not_dataset(about):
            conversion.refuse(key, f"{folder / INFO}: {show(name)}.{fault}; correct it", may_be_left_out=False)
            return
        found = _source(conversion, key, name, folder, about, stage)
        if conversion.noted(key):  # refused
            return
        if section == "validation":
            found.pop("columns", None)
        ours |= {f"{section}.{word}": one for word, one in found.items()}
    why = f"as {folder / INFO} describes {'it' if len(names) == 1 else 'them'}"
    conversion.carry(key, ours, why)


def _described(conversion: ConfigImport, key: str, names: list[str]) -> tuple[Path, dict[str, Any]]:
    """The folder with dataset_info.json, and what that holds. Raises ConfigError if it is not here."""
    given = str(conversion.value("dataset_dir"))
    places = [expand(given), *(folder / given for folder in conversion.theirs.path.absolute().parents)]
    folder = next((place for place in places if (place / INFO).is_file()), None)
    if folder is not None and folder.is_relative_to(Path.cwd()):
        folder = folder.relative_to(Path.cwd())
    if folder is None:
        raise ConfigError(
            f"{conversion.theirs.place(key)}: {key}: {', '.join(map(show, names))}: named in {given}/{INFO}, which is "
            "neither here nor above the file; run this in LLaMA-Factory's folder, or set data.source=FILE"
        )
    try:
        found = read_json(folder / INFO, _LIMIT)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / INFO}: cannot be read: {describe_fault(error)}") from error
    return folder, found if isinstance(found, dict) else {}


def _without_nulls(about: dict[str, Any]) -> dict[str, Any]:
    """Return what is said of a dataset, or of its columns and tags."""
    values = {key: _without_nulls(value) if isinstance(value, dict) else value for key, value in about.items()}
    return {key: value for key, value in values.items() if value is not None}


def _why_not_dataset(about: dict[str, Any]) -> str:
    """Return the first key of a dataset with a value that LLaMA-Factory does not take; empty: none has."""
    for key, (kind, words) in _TYPES.items():
        value = about.get(key)
        is_right = value is None or type(value) is kind
        if is_right and isinstance(value, dict):
            is_right = all(isinstance(text, str) for text in value.values())
        if not is_right:
            return f"{key}: found {quote(json.dumps(value))}, expected {words}"
    formatting = about.get("formatting", "alpaca")
    if formatting not in _FORMATTINGS:
        return f"formatting: found {quote(formatting)}, expected one of {', '.join(_FORMATTINGS)}"
    return ""


def _source(
    conversion: ConfigImport, key: str, name: str, folder: Path, about: dict[str, Any], stage: str
) -> dict[str, Any]:
    """One of our sources."""
    if bad := next((word for word in _NOT_READ if about.get(word) or word in about.get("columns", {})), None):
        conversion.refuse(key, f"{name} has {bad}, which is not read here", may_be_left_out=False)
        return {}
    hub, subset = about.get("hf_hub_url"), about.get("subset")
    if hub:
        source = {"source": f"{HUB}{hub}:{subset}" if subset else f"{HUB}{hub}"}
        if about.get("split", "train") != "train":
            source["split"] = about["split"]
    elif about.get("file_name"):
        source = {"source": str(folder / about["file_name"])}
    else:
        conversion.refuse(key, f"{name} has neither hf_hub_url nor file_name in {INFO}", may_be_left_out=False)
        return {}
    if about.get("num_samples"):
        source["max_samples"] = about["num_samples"]
    what, columns = _layout(conversion, key, name, about, stage)
    named = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    return source | {"format": what} | ({"columns": named} if named else {})


def _layout(
    conversion: ConfigImport, key: str, name: str, about: dict[str, Any], stage: str
) -> tuple[str, dict[str, str]]:
    """Format, and columns of theirs by ours."""
    columns, ranked = about.get("columns", {}), bool(about.get("ranking"))
    if ranked != (stage in ("dpo", "rm")):
        found = "pairs of answers" if ranked else "one answer"
        conversion.refuse(key, f"{name} has {found}, stage is {stage}", may_be_left_out=False)
    if stage == "kto":
        return _labeled(conversion, key, name, about)
    if stage == "pt":
        return "text", {"text": columns.get("prompt", "text")}
    shared = about.get("formatting", "alpaca") != "alpaca"
    if not shared:
        known = PAIRS if ranked else INSTRUCTIONS
        usual = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"} if ranked else _USUAL_INSTRUCTIONS
        named = {word: columns.get(word, usual.get(word)) for word in known}
        return ("preference" if ranked else "alpaca"), {known[w]: column for w, column in named.items() if column}
    tags = about.get("tags", {})
    is_openai = bool(tags) and all(tags.get(word, usual) == usual for word, usual in _OPENAI.items())
    if not is_openai and any(tags.get(word, usual) != usual for word, usual in _TAGS.items()):
        conversion.refuse(key, f"{name} has tags {tags}, expected role and content, or from and value",
                          may_be_left_out=False)  # fmt: skip
    column = columns.get("messages", "conversations")
    if ranked:
        both = {word: columns.get(word, word) for word in ("chosen", "rejected")}
        return "preference", {"conversations": column, **both}
    more = {word: columns[word] for word in ("system", "tools") if word in columns}
    return ("messages", {"messages": column, **more}) if is_openai else ("sharegpt", {"conversations": column, **more})


def _labeled(conversion: ConfigImport, key: str, name: str, about: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """Answers with a label."""
    columns = about.get("columns", {})
    if about.get("formatting", "alpaca") != "alpaca" or "kto_tag" not in columns:
        conversion.refuse(key, f"{name} has no columns prompt, response and kto_tag", may_be_left_out=False)
    answer = {"prompt": columns.get("prompt", "instruction"), "completion": columns.get("response", "output")}
    return "kto", {**answer, "label": columns.get("kto_tag", "label")}
