"""`tune generate --prompts FILE`: many prompts, answered in batches, one JSON object a line.

FILE has a prompt a line (.txt), or a JSON object a line (.jsonl) with `prompt` (a text) or `messages` (a conversation
that ends with the user's turn). With --out the answers go to a file that a second start goes on with; each line there
says by `settings` what it was made with.
"""

import argparse
import hashlib
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe_lib.config.suggest import show
from recipe_lib.errors import ConfigError, DataError
from recipe_lib.files import LineFile, storage_faults
from recipe_lib.logs import get_logger
from recipe_lib.reading import JSON_LIMIT, open_regular, parse_json, read_bytes

if TYPE_CHECKING:
    import torch

    from recipe_lib.generation.batch import Generated
    from recipe_lib.generation.source import GenerationSource
    from recipe_lib.tokenizers import Tokenizer

Prompt = str | list[Mapping[str, Any]]

SUFFIXES = (".txt", ".jsonl")
# Keys of a row that change nothing in its answer.
_UNREAD = ("category", "id", "index", "source")
_EXPECTED = 'expected {"prompt": TEXT} or {"messages": [{"role": ..., "content": ...}, ...]}'
_DRAWN = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "system", "raw", "dtype", "quantize_base")


def read_prompts(path: Path) -> list[Prompt]:
    """Return texts, or conversations. DataError with the line of what is neither."""
    named = show(str(path))
    try:
        content = read_bytes(path, JSON_LIMIT)
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"--prompts: {named}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"--prompts: {named}: is not UTF-8; give it in UTF-8 text") from error
    prompts: list[Prompt] = []
    unread: set[str] = set()
    # Lines end as those of a text file do; str.splitlines would also cut at U+2028, which a JSON text may hold.
    for number, line in enumerate(io.StringIO(text, newline=None), start=1):
        if not line.strip():
            continue
        if path.suffix == ".txt":
            prompts.append(line.removesuffix("\n"))
        else:
            row = _read_row(line, f"{named}:{number}")
            unread |= row.keys() & _UNREAD
            prompts.append(_read_prompt(row, f"{named}:{number}"))
    if not prompts:
        raise DataError(f"--prompts: {named}: found no prompt, expected one a line")
    if unread:
        get_logger().info("prompts: %s: not read: %s", named, ", ".join(sorted(unread)))
    return prompts


def _read_row(line: str, place: str) -> dict[str, Any]:
    """Return the JSON object of a line, all of its text encodable. DataError."""
    from recipe_lib.data.sample_files import parse_sample
    from recipe_lib.data.samples import SampleFault

    row = parse_sample(line.encode())
    if isinstance(row, SampleFault):
        raise DataError(f"{place}: {row}; correct the line")
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise DataError(f"{place}: found half a surrogate pair, expected whole characters; write them out") from None
    return row


def _read_prompt(row: dict[str, Any], place: str) -> Prompt:
    """Return what a row asks. DataError for a row that asks nothing, two things, or has a key that nobody reads."""
    from recipe_lib.data.messages import check_order, read_turns
    from recipe_lib.data.samples import SampleFault, SamplePlaces, kind_of

    asked = [name for name in ("prompt", "messages") if name in row]
    unknown_keys = [name for name in row if name not in ("prompt", "messages", *_UNREAD)]
    if len(asked) != 1:
        found = " and ".join(asked) if asked else ", ".join(map(show, row)) or "no keys"
        raise DataError(f"{place}: found {found}, {_EXPECTED}")
    if unknown_keys:
        raise DataError(
            f"{place}: found {', '.join(map(show, unknown_keys))}, which no prompt is read with; {_EXPECTED}"
        )
    value = row[asked[0]]
    if asked == ["prompt"] and isinstance(value, str):
        if not value:
            raise DataError(f"{place}: prompt is empty; give a text, or remove the line")
        return value
    if not isinstance(value, list):
        raise DataError(f"{place}: {asked[0]}: found {kind_of(value)}, {_EXPECTED}")
    try:
        turns = read_turns(row, asked[0])
        check_order(turns.messages, SamplePlaces(turns.places))
    except SampleFault as fault:
        raise DataError(f"{place}: {fault}") from None
    if not turns.messages:
        raise DataError(f"{place}: {asked[0]} is empty; {_EXPECTED}")
    if turns.messages[-1]["role"] == "assistant":
        raise DataError(f"{place}: the last message is the assistant's, expected one to answer; remove it")
    return turns.messages


def prompts_as_tokens(
    prompts: Sequence[Prompt], source: "GenerationSource", tokenizer: "Tokenizer", **how: Any
) -> list[list[int]]:
    """The ids of each prompt. how: `raw`, `system`. DataError for one that the model cannot take, by its number."""
    from recipe_lib.data import render_prompt
    from recipe_lib.generation.conversation import check_prompt

    before = [] if how["system"] is None else [{"role": "system", "content": how["system"]}]
    found = []
    for number, prompt in enumerate(prompts, start=1):
        if how["raw"]:
            if not isinstance(prompt, str):
                raise DataError(f"--raw: prompt {number} is a conversation; leave --raw out")
            tokens = tokenizer.encode(prompt, add_bos=tokenizer.add_bos_by_default)
        else:
            turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            tokens = render_prompt(tokenizer, [*before, *turns])
        check_prompt(tokens, source.spec, f"prompt {number}")
        found.append(tokens)
    return found


def settings_digest(source: "GenerationSource", arguments: argparse.Namespace, prompts: Sequence[Any]) -> str:
    """Of what answers follow from: the weights' files by name, size and time, the prompts, and how tokens are drawn."""
    folders = [folder for folder in (source.folder, source.adapter) if folder is not None]
    files = [path for folder in folders for path in sorted(folder.iterdir()) if path.is_file()]
    known: list[Any] = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files
                        if path.suffix in (".safetensors", ".json", ".jinja", ".model")]  # fmt: skip
    known += [getattr(arguments, name) for name in _DRAWN] + [list(prompts)]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]


class Answers:
    """Where answers go: a file that a second start goes on with, or standard output."""

    def __init__(self, path: Path | None, settings: str):
        """Nothing is written yet. ConfigError for a file of other settings, or of something else."""
        self.settings = settings
        self.path = path
        self.count, self._size = (0, 0) if path is None else count_answers(path, settings)
        self._file: LineFile | None = None

    def write(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """Adds the next answers, a line each: all of them or none. StorageError."""
        text = ""
        for answer in answers:
            self.count += 1
            text += json.dumps({"number": self.count, "settings": self.settings, **answer}, ensure_ascii=False) + "\n"
        if self.path is None:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        with storage_faults():
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = LineFile(self.path, self._size)
            self._file.append(text.encode())

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


def count_answers(path: Path, settings: str) -> tuple[int, int]:
    """Return how many answers a file of an earlier start holds, and in how many bytes.

    Half a line at its end, as a kill leaves it, counts only as ours if it begins as the next answer would begin.
    ConfigError for a file of other settings, or of something else.
    """
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return 0, 0
    except OSError as error:
        raise ConfigError(f"--out: {show(str(path))}: {error.strerror}; choose another --out") from error
    count = size = 0
    with file:
        while line := file.readline(JSON_LIMIT):
            begin = json.dumps({"number": count + 1, "settings": settings})[:-1].encode()
            if not line.endswith(b"\n") and begin.startswith(line[: len(begin)]):
                break
            _check_answer(line, count + 1, settings, f"--out: {show(str(path))}:{count + 1}")
            count += 1
            size += len(line)
    return count, size


def _check_answer(line: bytes, number: int, settings: str, place: str) -> None:
    """Raise ConfigError for a line that is no answer, or another one."""
    try:
        row = parse_json(line)
        is_same = (row["number"], row["settings"]) == (number, settings)
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{place}: is no answer of --prompts; choose another --out") from None
    if not is_same:
        raise ConfigError(
            f"{place}: was made with another model, other prompts or other options; choose another --out, or remove it"
        )
    if not line.endswith(b"\n"):
        raise ConfigError(f"{place}: ends in the midst of a line; choose another --out")


def answer_all(
    model: Any,
    source: "GenerationSource",
    tokenizer: "Tokenizer",
    prompts: Sequence[Prompt],
    tokens: Sequence[list[int]],
    answers: Answers,
    arguments: argparse.Namespace,
    device: "torch.device",
) -> None:
    """Answers the prompts that have no answer yet, and writes a line for each, batch by batch."""
    from recipe_lib.generation.batch import generate_batch
    from recipe_lib.parallel.seeds import derive_seed

    if answers.count:
        get_logger().info("resume: %d of %d prompts are answered", answers.count, len(prompts))
    options = {name: getattr(arguments, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p")}
    for start in range(answers.count, len(prompts), arguments.batch_size):
        numbers = range(start, min(start + arguments.batch_size, len(prompts)))
        generated = generate_batch(
            model, source.spec, [tokens[number] for number in numbers], stop_ids=tokenizer.stop_ids,
            device=device, seeds=[derive_seed(arguments.seed, f"answer {number}") for number in numbers], **options,
        )  # fmt: skip
        pairs = zip(numbers, generated, strict=True)
        answers.write([_describe(prompts[number], tokens[number], answer, tokenizer) for number, answer in pairs])
        if answers.path is not None:
            get_logger().info("%d of %d prompts answered", answers.count, len(prompts))
    answers.close()


def _describe(prompt: Prompt, read: list[int], answer: "Generated", tokenizer: "Tokenizer") -> dict[str, Any]:
    """Return what a line says of an answer."""
    from recipe_lib.tokenizers import StreamDecoder

    text = StreamDecoder(tokenizer, read)
    said = "".join(map(text.push, answer.tokens)) + text.finish()
    asked = {"prompt" if isinstance(prompt, str) else "messages": prompt}
    return {**asked, "answer": said, "tokens": len(answer.tokens), "ended_by": answer.ended}
