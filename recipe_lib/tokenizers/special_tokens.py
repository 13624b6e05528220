"""Special and added tokens, gathered from the JSON files next to a tokenizer."""

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
    """A token added to the vocabulary. special: text never turns into it unless asked to. lstrip,
    rstrip: it swallows the white space before or after it.
    """

    content: str
    id: int
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False

    @staticmethod
    def read(entry: Any, where: str, id: int | None = None) -> "AddedToken":
        """From an object as tokenizer.json and tokenizer_config.json have them."""
        try:
            number = entry["id"] if id is None else id
            flags = {
                name: bool(entry.get(name, name == "special"))
                for name in ("special", "lstrip", "rstrip")
            }
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
    """What the JSON files in a tokenizer's folder say.

    roles: `bos_token` etc. -> its text; None: said to have none. added: token -> itself; listed:
    the same from added_tokens.json, which knows no more than ids. template_remedy: what to do about
    a template that is of no use.
    """

    roles: dict[str, str | None] = field(default_factory=dict)
    listed: dict[str, AddedToken] = field(default_factory=dict)
    added: dict[str, AddedToken] = field(default_factory=dict)
    add_bos: bool | None = None
    legacy: bool = True
    stop_ids: set[int] = field(default_factory=set)
    eos_id: int | None = None
    bos_id: int | None = None
    chat_template: str | None = None
    chat_template_place: str = ""
    template_remedy: str = OTHER_TEMPLATE


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises DataError with line and column."""
    try:
        return reading.read_json(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); copy the file again") from None
    except ValueError as error:
        raise DataError(f"{path}: {error}; copy the file again") from None


def read_settings(folder: Path, template_remedy: str = OTHER_TEMPLATE) -> Settings:
    """Reads tokenizer_config.json, special_tokens_map.json, added_tokens.json,
    generation_config.json, config.json and chat_template.jinja, as far as they are there.
    """
    settings = Settings(template_remedy=template_remedy)
    config = _read_object(folder / "tokenizer_config.json")
    where = str(folder / "tokenizer_config.json")
    for content, number in _read_object(folder / "added_tokens.json").items():
        settings.listed[content] = AddedToken.read(
            {"content": content}, str(folder / "added_tokens.json"), number
        )
    for number, entry in (config.get("added_tokens_decoder") or {}).items():
        token = AddedToken.read(entry, where, int(number) if str(number).isdigit() else None)
        settings.added[token.content] = token
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
    """Ids at which generation stops, from generation_config.json and config.json (a number or a
    list).
    """
    for name in ("config.json", "generation_config.json"):
        content = _read_object(folder / name)
        found = content.get("eos_token_id")
        ids = [
            i
            for i in (found if isinstance(found, list) else [found])
            if isinstance(i, int) and i >= 0
        ]
        settings.stop_ids.update(ids)
        if ids:
            settings.eos_id = ids[0]
        bos = content.get("bos_token_id")
        settings.bos_id = bos if isinstance(bos, int) else settings.bos_id


def _read_template(settings: Settings, folder: Path, config: dict[str, Any]) -> None:
    """A file chat_template.jinja wins over tokenizer_config.json, where several may be listed by
    name.
    """
    file = folder / "chat_template.jinja"
    if os.path.lexists(file):
        settings.chat_template, settings.chat_template_place = (
            read_template(file, settings.template_remedy),
            str(file),
        )
        return
    template = config.get("chat_template")
    if isinstance(template, list):
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
    """The text of a Jinja file. remedy: where there is none that can be read. Raises DataError."""
    try:
        return reading.read_text(path, TEMPLATE_LIMIT)
    except OSError as error:
        raise DataError(describe_template_fault(path, error, remedy)) from None
    except ValueError as error:
        raise DataError(f"{path}: found {error}, expected a Jinja text") from None
