"""Columns of a row and keys of its messages that nobody reads: known to change nothing and counted, or a fault.

`recipe_lib.data.column_names` knows names. Where a name says nothing, a text that only repeats what is read of the same
row changes nothing either.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, time
from typing import Any

from recipe_lib.data.column_names import (
    MESSAGE_READ,
    RENDERED,
    UNWANTED,
    is_idle,
    is_idle_key,
    is_label,
    plain,
    says_nothing,
    says_wanted,
    why_not_column,
    why_not_key,
)
from recipe_lib.data.sample_columns import RawSample, Renamed, is_json_list, name_path, path_of
from recipe_lib.data.samples import (
    Classified,
    Completion,
    Conversation,
    Document,
    LabeledAnswer,
    Message,
    Preference,
    Sample,
    SampleFault,
    SamplePlaces,
    kind_of,
)
from recipe_lib.data.template_behavior import THOUGHT_KEYS, TemplateFields
from recipe_lib.errors import DataError

_WORD = re.compile(r"[A-Za-z_][\w.-]*\Z", re.ASCII)
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")  # but tab, line feed and carriage return
_TEXTS = frozenset(("content", *THOUGHT_KEYS))  # fields of a message that are texts of it
_NO_TEXT = ("role", "from", "type")  # fields of a message that are no text of it
_BY_ROLE = {"assistant": THOUGHT_KEYS, "tool": ("tool_call_id",)}


class UnreadNames:
    """What one source's rows hold beside what is read."""

    def __init__(
        self,
        required: Sequence[str],
        optional: Sequence[str],
        form: str,
        ignored: Sequence[str],
        fields: TemplateFields,
        same: Mapping[str, Sequence[str]],
    ) -> None:
        """required, optional: columns that the format reads; none: it does not say, and nothing is looked at. ignored:
        as data.ignore_columns has them. same: other names of columns, read where these are absent."""
        self.known, self.ignored = frozenset((*required, *optional)), tuple(ignored)
        self._optional = frozenset(optional)
        self._fields = fields
        self._not_read = f", which the format {form} does not read"
        self._same = {
            other: column
            for column, others in same.items()
            for other in others
            if column in self.known and other not in self.known
        }

    def leave_out(self, row: RawSample) -> tuple[RawSample, list[str]]:
        """Return the row without what data.ignore_columns names, and the names of what was left out."""
        if self.ignored:
            left_out = [name for name in self.ignored if name in row and not says_nothing(row[name])]
            return {name: value for name, value in row.items() if name not in self.ignored}, left_out
        return row, []

    def tidy(self, row: Renamed) -> None:
        """Drop optional columns that say nothing, in place, and put columns of other names under the one that the
        format reads, where the row lacks that."""
        for name in self._optional & row.keys():
            if says_nothing(row[name]):
                del row[name]
        for other in [name for name in self._same if name in row]:
            column = self._same[other]
            value = row[other]
            if says_nothing(value) or not says_nothing(row.get(column)):
                continue
            if column == "tools" and not (isinstance(value, list) or (isinstance(value, str) and is_json_list(value))):
                continue
            row[column] = row.pop(other)
            row.own = {**row.own, column: other}

    def find(self, row: Renamed, sample: Sample, texts: Sequence[str]) -> list[str]:
        """Return the names of what the row holds that is known to change nothing; `messages.KEY` is that of messages'
        keys. texts: of the sample.

        Raises SampleFault for anything else that is not read.
        """
        if not self.known:
            return []
        idle, faults = list[str](), list[tuple[str, str]]()
        unread = [(name, value) for name, value in row.items() if name not in self.known]
        for name, value in (*unread, *row.hidden.items()):
            if says_nothing(value):
                continue
            why = self._why_not_idle(name, value, row, isinstance(sample, Document), texts)
            if why:
                faults.append((name, why))
            else:
                idle.append(name)
        if faults:
            raise self._fault(row, faults)
        content = sample.content if isinstance(sample, Classified) else sample
        if isinstance(content, (Conversation, Preference, LabeledAnswer)):
            idle += self._find_keys(content)
            idle += self._find_variables(content.variables, row)
        return idle

    def find_beside(self, keys: Mapping[str, str], place: str) -> list[str]:
        """Return the names of what stands beside a file's samples, `file.KEY`, if all of it is known to change nothing.

        keys: as SampleFile.keys_beside. Raises DataError for anything else: no sample says it.
        """
        named = {f"file.{key}": (key, held) for key, held in keys.items()}
        faults = {name: f"{name_path(key)}: found {held}" for name, (key, held) in named.items() if held}
        faults = {name: fault for name, fault in faults.items() if name not in self.ignored}
        if faults:
            raise DataError(
                f"{place}: {'; '.join(faults.values())} beside the list of samples, which is not read; write it into "
                f"each sample that it is meant for, or {self._remedy(list(faults))}"
            )
        return list(named)

    def _why_not_idle(self, name: str, value: Any, row: Renamed, is_text: bool, texts: Sequence[str]) -> str:
        """Return what a column holds that is not read; empty: it changes nothing."""
        word = plain(name)
        column = self._same.get(name)
        if column is not None and row.get(column) is not None:
            return "" if row[column] == value else f"another {column} than the one in {path_of(row, column)}"
        if why := why_not_column(name, value, is_text):
            return why
        if word in UNWANTED:
            chosen = row.get("chosen")
            return "" if not says_nothing(chosen) and _repeats(chosen, texts) else "an answer that is not wanted"
        if is_idle(name, value) or says_wanted(name, value) or isinstance(value, (date, time)):
            return ""
        if isinstance(value, str) and word in RENDERED:
            # A template may part what a format joins, as an instruction and its input.
            columns = [text for column in self.known if isinstance(text := row.get(column), str)]
            if any(parts and all(text.strip() in value for text in parts) for parts in (texts, columns)):
                return ""
        if _holds_text(value) and _repeats(value, texts):
            return ""
        return kind_of(value) + self._not_read

    def _fault(self, row: Renamed, faults: Sequence[tuple[str, str]]) -> SampleFault:
        names = [name for name, _ in faults]
        found = "; ".join(f"{name_path(name)}: found {why}" for name, why in faults)
        free = [name for name in sorted(self.known) if says_nothing(row.get(name))]
        may_be_mapped = free and any(why.endswith(self._not_read) for _, why in faults)
        mapped = f", or say with {row.section}.columns which of {', '.join(free)} it is" if may_be_mapped else ""
        return SampleFault(
            _name_all(names),
            f"{found}; {self._remedy(names)}{mapped}",
        )

    def _remedy(self, names: Sequence[str]) -> str:
        every = ",".join(
            name if _WORD.match(name) else json.dumps(name, ensure_ascii=False) for name in (*self.ignored, *names)
        )
        changes = "changes" if len(names) == 1 else "change"
        return f"set data.ignore_columns=[{every}] if {'it' if len(names) == 1 else 'they'} {changes} nothing"

    def _find_keys(self, sample: Conversation | Preference | LabeledAnswer) -> list[str]:
        """As `find`, of the messages' keys; those that data.ignore_columns names are taken out."""
        idle, faults = list[str](), dict[str, str]()
        for places, messages in _lists_of(sample):
            for number, message in enumerate(messages):
                if message.keys() <= MESSAGE_READ:
                    continue
                for key in [key for key in message if key not in MESSAGE_READ]:
                    role, value, name = message["role"], message[key], f"messages.{key}"
                    is_part = key.startswith(("content.", "tool_calls."))  # no key that a template may see
                    if (is_part or name in self.ignored) and isinstance(message, dict):
                        del message[key]  # the reader's own copy
                    elif key in _BY_ROLE.get(role, ()) or self._fields.reads_key(role, key, value):
                        continue
                    elif not is_idle_key(key, value):
                        found = why_not_key(key) or f"{kind_of(value)}, which the chat template does not read"
                        faults.setdefault(name, f"{places.at(number, f'.{key}')}: found {found}")
                    idle.append(name)
        if faults:
            raise SampleFault(_name_all(list(faults)), f"{'; '.join(faults.values())}; {self._remedy(list(faults))}")
        return idle

    def _find_variables(self, variables: Mapping[str, Any], row: Renamed) -> Iterator[str]:
        for name, value in variables.items():
            if says_nothing(value) or name in self._fields.names:
                continue
            column = "documents" if name == "documents" else "chat_template_kwargs"
            full = name if name == column else f"{column}.{name}"
            if full not in self.ignored and (name == column or not is_label(value)):
                raise SampleFault(
                    f"{full} is not read",
                    f"{path_of(row, column)}: found {name}, which the chat template does not read; "
                    f"{self._remedy([full])}, or tokenizer.chat_template to one that does",
                )
            yield full


def _name_all(names: Sequence[str]) -> str:
    """Return the cause by which faults are counted."""
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not read"


def has_control_characters(texts: Sequence[str]) -> bool:
    """Return whether a text that may be trained holds a control character, as `\\b` of JSON for `\\boxed`."""
    return any(map(_CONTROL.search, texts))


def _lists_of(sample: Conversation | Preference | LabeledAnswer) -> Iterator[tuple[SamplePlaces, Sequence[Message]]]:
    """Return the messages of a sample, with their places."""
    if isinstance(sample, Conversation):
        yield sample.places, sample.messages
    elif isinstance(sample, LabeledAnswer):
        yield sample.places, [*sample.prompt, *sample.completion]
    else:
        for places, answer in zip(sample.places, (sample.chosen, sample.rejected), strict=True):
            yield places, [*sample.prompt, *answer]


def texts_of(sample: Sample) -> list[str]:
    """Return every text that is read of a sample, descriptions of tools left out."""
    content = sample.content if isinstance(sample, Classified) else sample
    if isinstance(content, Document):
        return [content.text]
    if isinstance(content, Completion):
        return [content.prompt, content.completion]
    texts = list[str]()
    for _, messages in _lists_of(content):
        for message in messages:
            texts += [text for key, text in message.items() if key in _TEXTS and isinstance(text, str)]
    return texts


def _holds_text(value: Any) -> bool:
    """Return whether there is a text in a value, which numbers alone have none of."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, str) or any(map(_holds_text, inner))


def _repeats(value: Any, texts: Sequence[str]) -> bool:
    """Return whether every text in a value stands in one of these."""
    if isinstance(value, str):
        said = value.strip()
        return any(said in text for text in texts)
    if isinstance(value, dict):
        return all(_repeats(inner, texts) for key, inner in value.items() if key not in _NO_TEXT)
    if isinstance(value, list):
        return all(_repeats(item, texts) for item in value)
    return not isinstance(value, bytes)
