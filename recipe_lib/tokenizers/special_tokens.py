"""Read special tokens, added tokens and the chat template from the files next to a tokenizer.

`read_settings` gathers them from the JSON files of a folder, as far as they are there.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipe_lib import reading
from recipe_lib.config.local_files import OTHER_TEMPLATE, describe_template_fault
from recipe_lib.errors import DataError

MAX_VOCABULARY = 2**27  # ids; far above any there is, and what a row of int32 ids can hold
TEMPLATE_LIMIT = 2**24  # bytes; the longest template in use has some 20 KB
ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class AddedToken:
    """A token added to the vocabulary. The fields are named as in tokenizer.json."""

    # Its text.
    content: str
    id: int
    # Text never turns into it unless asked to.
    special: bool = True
    # It swallows the white space before it.
    lstrip: bool = False
    # It swallows the white space after it.
    rstrip: bool = False

    @staticmethod
    def read(entry: Any, where: str, id: int | None = None) -> "AddedToken":
        """Return the token of an object as tokenizer.json and tokenizer_config.json have them.

        where: file, named in errors. id: where the object has none. Raises DataError.
        """
        try:
            number = entry["id"] if id is None else id
            flags = {
                name: bool(entry.get(name, name == "special"))
                for name in ("special", "lstrip", "rstrip")
            }
            # `type`, since JSON's true is an int to isinstance.
            is_id = type(number) is int and 0 <= number < MAX_VOCABULARY
            if not isinstance(entry["content"], str) or not entry["content"] or not is_id:
                raise TypeError
        except (KeyError, TypeError, AttributeError):
            raise DataError(
                f"{where}: found the added token {str(entry)[:80]}, expected an object with"
                " `content` and an id; copy the file again"
            ) from None
        return AddedToken(entry["content"], number, **flags)


@dataclass
class Settings:
    """The settings in a tokenizer's folder, of all its files."""

    # `bos_token` etc. -> its text; None: said to have none.
    roles: dict[str, str | None] = field(default_factory=dict)
    # Text -> token, of added_tokens.json, which knows no more than ids.
    listed: dict[str, AddedToken] = field(default_factory=dict)
    # Text -> token, of the other files.
    added: dict[str, AddedToken] = field(default_factory=dict)
    # Texts begin with BOS; None: not said.
    add_bos: bool | None = None
    # Text after a special token begins like a new text (Llama 2's sentencepiece).
    legacy: bool = True
    # Ids at which generation stops.
    stop_ids: set[int] = field(default_factory=set)
    eos_id: int | None = None
    bos_id: int | None = None
    # Jinja source.
    chat_template: str | None = None
    # File and key that the template came from, for errors.
    chat_template_place: str = ""
    # What to do about a template that is of no use, for errors.
    template_remedy: str = OTHER_TEMPLATE


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raises DataError with line and column."""
    try:
        return reading.read_json(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); copy the file again") from None
    except ValueError as error:
        raise DataError(f"{path}: {error}; copy the file again") from None


def read_settings(folder: Path, template_remedy: str = OTHER_TEMPLATE) -> Settings:
    """Read what the files of a tokenizer's folder say, as far as they are there.

    They are tokenizer_config.json, special_tokens_map.json, added_tokens.json,
    generation_config.json, config.json and chat_template.jinja. Raises DataError.
    """
    settings = Settings(template_remedy=template_remedy)
    config_file = folder / "tokenizer_config.json"
    config = _read_object(config_file)
    list_file = folder / "added_tokens.json"
    settings.listed = {
        content: AddedToken.read({"content": content}, str(list_file), id)
        for content, id in _read_object(list_file).items()
    }
    for key, entry in (config.get("added_tokens_decoder") or {}).items():
        # JSON has the ids as texts; what is none is refused with the entry.
        id = int(key) if str(key).isdigit() else None
        token = AddedToken.read(entry, str(config_file), id)
        settings.added[token.content] = token
    # tokenizer_config.json last: it wins.
    for source in (_read_object(folder / "special_tokens_map.json"), config):
        for role in ROLES:
            if role in source:
                spelled = source[role]
                text = spelled.get("content") if isinstance(spelled, dict) else spelled
                settings.roles[role] = text if isinstance(text, str) and text else None
    settings.add_bos = config.get("add_bos_token")
    settings.legacy = config.get("legacy") is not False
    _read_ids(settings, folder)
    _read_template(settings, folder, config)
    return settings


def _read_object(path: Path) -> dict[str, Any]:
    if not os.path.lexists(path):
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise DataError(
            f"{path}: found {type(content).__name__}, expected a JSON object; copy the file again"
        )
    return content


def _read_ids(settings: Settings, folder: Path) -> None:
    """Read the ids of BOS, EOS and stop tokens from config.json and generation_config.json.

    The latter wins.
    """
    for name in ("config.json", "generation_config.json"):
        content = _read_object(folder / name)
        eos = content.get("eos_token_id")
        values = eos if isinstance(eos, list) else [eos]  # a number or a list
        eos_ids = [value for value in values if isinstance(value, int) and value >= 0]
        settings.stop_ids.update(eos_ids)
        if eos_ids:
            settings.eos_id = eos_ids[0]
        bos_id = content.get("bos_token_id")
        if isinstance(bos_id, int):
            settings.bos_id = bos_id


def _read_template(settings: Settings, folder: Path, config: dict[str, Any]) -> None:
    """Read the chat template: chat_template.jinja wins over tokenizer_config.json.

    config: content of tokenizer_config.json.
    """
    file = folder / "chat_template.jinja"
    if os.path.lexists(file):
        settings.chat_template = read_template(file, settings.template_remedy)
        settings.chat_template_place = str(file)
        return
    template = config.get("chat_template")
    if isinstance(template, list):  # several, each with a name
        named = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict)
        }
        template = named.get("default")
    if isinstance(template, str) and template:
        settings.chat_template = template
        settings.chat_template_place = f"{folder / 'tokenizer_config.json'}: chat_template"


def read_template(path: Path, remedy: str = "set tokenizer.chat_template to a Jinja file") -> str:
    """Return the text of a Jinja file. Raises DataError.

    remedy: what to do if there is none that can be read, for the error.
    """
    try:
        return reading.read_text(path, TEMPLATE_LIMIT)
    except OSError as error:
        raise DataError(describe_template_fault(path, error, remedy)) from None
    except ValueError as error:
        raise DataError(f"{path}: found {error}, expected a Jinja text") from None
