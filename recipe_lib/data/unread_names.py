"""Check columns of a row and keys of its messages that the format does not read.

A SourceEncoder calls `UnreadNames.find` for each row, so that nothing that could matter is dropped
silently. A row is a sample as the file has it. A column or key that is not read is either idle
(known to change nothing) and counted, or it raises a SampleFault. The tables of column_names.py
decide by the name; under any other name a text is idle if it only repeats texts of the row that are
read.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import date, time
from typing import Any

from recipe_lib.data.chat_templates import THOUGHT_KEYS, TemplateFields
from recipe_lib.data.column_names import (
    MESSAGE_READ,
    RENDERED,
    UNWANTED,
    is_blank,
    is_idle,
    is_idle_key,
    is_label,
    is_neutral_label,
    normalize_name,
    why_not_column,
    why_not_key,
)
from recipe_lib.data.samples import (
    Classified,
    Completion,
    Conversation,
    Document,
    RawSample,
    RenamedSample,
    Sample,
    SampleFault,
    describe_kind,
    find_columns,
    format_path,
    get_path,
    is_json_list,
    list_conversations,
    parse_column,
)
from recipe_lib.errors import DataError

_WORD = re.compile(r"[A-Za-z_][\w.-]*\Z", re.ASCII)  # a name that an override has without quotes
_TEXT_KEYS = frozenset(("content", *THOUGHT_KEYS))  # keys of a message whose values are its texts
_LABEL_KEYS = ("role", "from", "type")  # keys of a message whose texts are no part of what it says
# Role -> keys that are read in messages of this role alone
_KEYS_BY_ROLE = {"assistant": THOUGHT_KEYS, "tool": ("tool_call_id",)}


class UnreadNames:
    """A checker of the columns and keys in one source's rows that are not read."""

    def __init__(self, form: str, ignored: Sequence[str], fields: TemplateFields) -> None:
        """Take what is the same for all rows.

        form: name of the format; if it does not say which columns it reads, nothing is checked.
        ignored: data.ignore_columns. fields: tells which keys and variables the chat template
        reads.
        """
        columns = find_columns(form)
        self.known = frozenset(columns.known)  # columns that the format reads; empty: not declared
        self.ignored = tuple(ignored)
        self._ignored_keys = {name for name in ignored if name.startswith("messages.")}
        self._optional = frozenset(columns.optional)
        self._fields = fields
        self._not_read = f", which the format {form} does not read"  # the end of a fault
        self._column_by_alias = dict[str, str]()  # other name of a column -> the format's name
        for column, aliases in columns.same.items():
            if column in self.known:
                self._column_by_alias |= {
                    alias: column for alias in aliases if alias not in self.known
                }

    def leave_out(self, row: RawSample) -> tuple[RawSample, list[str]]:
        """Return (row without what data.ignore_columns names, names of what was left out)."""
        if not self.ignored:
            return row, []
        left_out = {name for name in self.ignored if name in row and not is_blank(row[name])}
        row = {name: value for name, value in row.items() if name not in self.ignored}
        if self._ignored_keys:
            row = {name: self._leave_out_keys(value, left_out) for name, value in row.items()}
        return row, sorted(left_out)

    def _leave_out_keys(self, value: Any, left_out: set[str]) -> Any:
        """Return a column's value without the keys of messages that data.ignore_columns names.

        left_out: the names of these keys are added to it, in place. Only an object with a role is a
        message: a tool's description may have keys of the same names, which stay.
        """
        if is_json_list(value):
            try:
                messages = parse_column(value, "", "")
            except SampleFault:
                # It is a text that begins with a bracket, or the format raises the fault later.
                return value
            remaining = self._leave_out_keys(messages, left_out)
            return value if remaining == messages else json.dumps(remaining, ensure_ascii=False)
        if isinstance(value, list):
            return [self._leave_out_keys(item, left_out) for item in value]
        if not isinstance(value, dict) or not value.keys() & {"role", "from"}:
            return value
        ignored_names = {
            name
            for name in self._ignored_keys
            if not is_blank(value.get(name.removeprefix("messages.")))
        }
        left_out |= ignored_names
        return {
            key: inner for key, inner in value.items() if f"messages.{key}" not in ignored_names
        }

    def tidy_columns(self, row: RenamedSample) -> None:
        """Drop blank optional columns of the row, in place, and rename aliases of columns.

        An alias is renamed to the name that the format reads, if the row has no such column.
        """
        for name in self._optional & row.keys():
            if is_blank(row[name]):
                del row[name]
        for alias in [name for name in self._column_by_alias if name in row]:
            column = self._column_by_alias[alias]
            value = row[alias]
            if is_blank(value) or not is_blank(row.get(column)):
                continue
            if column == "tools" and not (isinstance(value, list) or is_json_list(value)):
                continue  # no descriptions: a column `function` may name the one that was called
            row[column] = row.pop(alias)
            row.columns = {**row.columns, column: alias}

    def find(self, row: RenamedSample, sample: Sample, texts: Sequence[str]) -> list[str]:
        """Return the names of unread columns and keys that are known to change nothing.

        row: with columns under the format's names. sample: what the format has made of it. texts:
        all texts of the sample, from `collect_texts`. The name of a key of messages is
        `messages.KEY`. Raises SampleFault for anything else that is not read.
        """
        if not self.known:
            return []
        idle_names = list[str]()
        faults = dict[str, str]()  # name -> what was found
        unread = [(name, value) for name, value in row.items() if name not in self.known]
        for name, value in (*unread, *row.hidden.items()):
            if is_blank(value):
                continue
            why = self._why_not_idle(
                name=name, value=value, row=row, is_text=isinstance(sample, Document), texts=texts
            )
            if why:
                faults[name] = f"{format_path(name)}: found {why}"
            else:
                idle_names.append(name)
        if faults:
            raise self._build_fault(faults, self._suggest_columns(row, faults))
        if chats := list_conversations(sample):
            idle_names += self._find_keys(chats)
            idle_names += self._find_variables(chats[0].variables, row)
        return idle_names

    def find_beside(self, keys: Mapping[str, str], place: str) -> list[str]:
        """Return the names of the keys beside a file's list of samples, as `file.KEY`.

        keys: key -> kind of its value in words, "" for an idle one. place: the file. Raises
        DataError for a key that may change something: it is no fault of one sample.
        """
        faults = {
            f"file.{key}": f"{format_path(key)}: found {kind}"
            for key, kind in keys.items()
            if kind and f"file.{key}" not in self.ignored
        }
        if faults:
            raise DataError(
                f"{place}: {'; '.join(faults.values())} beside the list of samples, which is not"
                " read; write it into each sample that it is meant for, or"
                f" {self._suggest_ignoring(faults)}"
            )
        return [f"file.{key}" for key in keys]

    def _why_not_idle(
        self, name: str, value: Any, row: RenamedSample, is_text: bool, texts: Sequence[str]
    ) -> str:
        """Return what is found in a column that is not read and may matter; "": it is idle.

        is_text: the row is a document. texts: all texts of the sample.
        """
        column = self._column_by_alias.get(name)
        if column is not None and row.get(column) is not None:
            if row[column] == value:
                return ""
            return f"another {column} than the one in {get_path(row, column)}"
        if why := why_not_column(name, value, is_text):
            return why
        normalized = normalize_name(name)
        if normalized in UNWANTED:
            # A rejected answer may be left out if the chosen one is trained.
            chosen = row.get("chosen")
            is_trained = not is_blank(chosen) and _is_repeated(chosen, texts)
            return "" if is_trained else "an answer that is not wanted"
        if is_idle(name, value) or is_neutral_label(name, value) or isinstance(value, (date, time)):
            return ""
        if isinstance(value, str) and normalized in RENDERED:
            # Idle if it contains all texts of the sample, or all of the row: its template may
            # separate texts that a format joins, such as an instruction and its input.
            column_texts = [row[name] for name in self.known if isinstance(row.get(name), str)]
            if any(
                parts and all(text.strip() in value for text in parts)
                for parts in (texts, column_texts)
            ):
                return ""
        if _has_text(value) and _is_repeated(value, texts):
            return ""
        return describe_kind(value) + self._not_read

    def _suggest_columns(self, row: RenamedSample, faults: Mapping[str, str]) -> str:
        """Return a remedy for columns that the format may know by another name; "": none.

        faults: name -> what was found.
        """
        free_names = [name for name in sorted(self.known) if is_blank(row.get(name))]
        if not free_names or not any(fault.endswith(self._not_read) for fault in faults.values()):
            return ""
        return f", or say with {row.section}.columns which of {', '.join(free_names)} it is"

    def _suggest_ignoring(self, names: Collection[str]) -> str:
        ignored = ",".join(
            name if _WORD.match(name) else json.dumps(name, ensure_ascii=False)
            for name in (*self.ignored, *names)
        )
        return (
            f"set data.ignore_columns=[{ignored}] if"
            f" {'it changes' if len(names) == 1 else 'they change'} nothing"
        )

    def _build_fault(self, faults: Mapping[str, str], other_remedy: str = "") -> SampleFault:
        """Return the fault of a row.

        faults: for each name what was found. other_remedy: the line's end.
        """
        return SampleFault(
            f"{', '.join(faults)} {'is' if len(faults) == 1 else 'are'} not read",
            f"{'; '.join(faults.values())}; {self._suggest_ignoring(faults)}{other_remedy}",
        )

    def _find_keys(self, chats: Sequence[Conversation]) -> list[str]:
        """Return the names of unread keys of messages that change nothing, as `find` does.

        Keys such as `content.KEY`, which a reader of messages has added to have them counted, are
        deleted in place.
        """
        idle_names = list[str]()
        faults = dict[str, str]()  # name -> place and what was found
        for chat in chats:
            for number, message in enumerate(chat.messages):
                if message.keys() <= MESSAGE_READ:  # true of nearly every message
                    continue
                role = message["role"]
                unread = {key: message[key] for key in message if key not in MESSAGE_READ}
                for key, value in unread.items():
                    name = f"messages.{key}"
                    # Added by the reader to be counted: no template may see them.
                    if key.startswith(("content.", "tool_calls.")) and isinstance(message, dict):
                        del message[key]  # of the reader's own copy
                    elif key in _KEYS_BY_ROLE.get(role, ()) or self._fields.reads_key(
                        role, key, value
                    ):
                        continue
                    elif not is_idle_key(key, value):
                        why = (
                            why_not_key(key)
                            or f"{describe_kind(value)}, which the chat template does not read"
                        )
                        faults.setdefault(
                            name, f"{chat.places.locate_message(number, f'.{key}')}: found {why}"
                        )
                    idle_names.append(name)
        if faults:
            raise self._build_fault(faults)
        return idle_names

    def _find_variables(self, variables: Mapping[str, Any], row: RenamedSample) -> Iterator[str]:
        """Yield the names of the chat template's variables that change nothing, as `find` does."""
        for name, value in variables.items():
            if is_blank(value) or name in self._fields.names:
                continue
            # `documents` has a column of its own; any other variable is a key of this one.
            column = "documents" if name == "documents" else "chat_template_kwargs"
            full_name = name if name == column else f"{column}.{name}"
            if full_name not in self.ignored and (name == column or not is_label(value)):
                fault = (
                    f"{get_path(row, column)}: found {name}, which the chat template does not read"
                )
                raise self._build_fault(
                    {full_name: fault}, ", or tokenizer.chat_template to one that does"
                )
            yield full_name


def collect_texts(sample: Sample) -> list[str]:
    """Return all texts that are read of a sample, except descriptions of tools."""
    content = sample.content if isinstance(sample, Classified) else sample
    if isinstance(content, Document):
        return [content.text]
    if isinstance(content, Completion):
        return [content.prompt, content.completion]
    texts = list[str]()
    for chat in list_conversations(sample):
        for message in chat.messages:
            texts += [
                text for key, text in message.items() if key in _TEXT_KEYS and isinstance(text, str)
            ]
    return texts


def _has_text(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_text, value.values()))
    return any(map(_has_text, value)) if isinstance(value, list) else isinstance(value, str)


def _is_repeated(value: Any, texts: Sequence[str]) -> bool:
    """Return True if every text in a value is contained in one of `texts`.

    Roles and types in messages are not compared.
    """
    if isinstance(value, str):
        stripped = value.strip()
        return any(stripped in text for text in texts)
    if isinstance(value, dict):
        return all(
            _is_repeated(inner, texts) for key, inner in value.items() if key not in _LABEL_KEYS
        )
    if isinstance(value, list):
        return all(_is_repeated(item, texts) for item in value)
    return not isinstance(value, bytes)
