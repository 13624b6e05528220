"""`tune generate --prompts FILE`: many prompts, answered in batches, one JSON object a line.

FILE has a prompt a line (.txt), or a JSON object a line (.jsonl) with `prompt` (a text) or `messages` (a conversation
that ends with the user's turn). With --out the answers go to a file that a second start goes on with; each line there
says by `settings` what it was made with.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from recipe_lib.config.suggest import show
from recipe_lib.errors import ConfigError, DataError
from recipe_lib.logs import get_logger

if TYPE_CHECKING:
    import torch

    from recipe_lib.generation.batch import Generated
    from recipe_lib.generation.source import GenerationSource
    from recipe_lib.tokenizers import Tokenizer

SUFFIXES = (".txt", ".jsonl")
_DRAWN = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "system", "raw", "dtype", "quantize_base")


def read_prompts(path: Path) -> list[str | list[dict[str, Any]]]:
    """Texts, or conversations. DataError with the line of what is neither."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"--prompts: {show(str(path))}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"--prompts: {show(str(path))}: is not UTF-8; give it in UTF-8 text") from error
    found: list[str | list[dict[str, Any]]] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            found.append(line if path.suffix == ".txt" else _prompt_of(line, f"{show(str(path))}:{number}"))
    if not found:
        raise DataError(f"--prompts: {show(str(path))}: found no prompt, expected one a line")
    return found


def _prompt_of(line: str, place: str) -> str | list[dict[str, Any]]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place}: is no JSON object: {error}") from error
    wanted = 'expected {"prompt": TEXT} or {"messages": [{"role": ..., "content": ...}, ...]}'
    if not isinstance(row, dict):
        raise DataError(f"{place}: found {type(row).__name__}, {wanted}")
    if isinstance(row.get("prompt"), str) and row["prompt"]:
        return str(row["prompt"])
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages or not all(map(_is_turn, messages)):
        raise DataError(f"{place}: found {', '.join(map(show, row)) or 'no keys'}, {wanted}")
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{place}: the last message is the assistant's, expected one to answer; remove it")
    return messages


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)


def prompts_as_tokens(
    prompts: Sequence[str | list[dict[str, Any]]], source: "GenerationSource", tokenizer: "Tokenizer", **how: Any
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


def answered(path: Path, settings: str) -> int:
    """How many answers a file of an earlier start holds; half a line at its end is taken away.

    ConfigError for a file of other settings, or of something else.
    """
    if not path.exists():
        return 0
    whole = 0
    with open(path, "rb+") as file:
        for number, line in enumerate(file):
            if not line.endswith(b"\n"):
                file.truncate(whole)
                return number
            try:
                row = json.loads(line)
                same = (row["number"], row["settings"]) == (number + 1, settings)
            except (ValueError, KeyError, TypeError):
                raise ConfigError(
                    f"--out: {show(str(path))}:{number + 1}: is no answer of --prompts; choose another --out"
                ) from None
            if not same:
                raise ConfigError(
                    f"--out: {show(str(path))}:{number + 1}: was made with another model, other prompts or other "
                    "options; choose another --out, or remove it"
                )
            whole += len(line)
    return number + 1 if whole else 0


@contextmanager
def _opened(path: Path | None) -> Iterator[TextIO]:
    from recipe_lib.files import storage_faults

    if path is None:
        yield sys.stdout
        return
    with storage_faults():
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            yield file


def answer_all(
    model: Any,
    source: "GenerationSource",
    tokenizer: "Tokenizer",
    prompts: Sequence[str | list[dict[str, Any]]],
    tokens: Sequence[list[int]],
    arguments: argparse.Namespace,
    device: "torch.device",
) -> None:
    """Answers the prompts that --out does not have yet, and writes a line for each, batch by batch."""
    from recipe_lib.generation.batch import generate_batch
    from recipe_lib.parallel.seeds import derive_seed

    out = None if arguments.out is None else Path(arguments.out).expanduser()
    settings = settings_digest(source, arguments, prompts)
    first = 0 if out is None else answered(out, settings)
    if first:
        get_logger().info("resume: %d of %d prompts are answered", first, len(prompts))
    options = {name: getattr(arguments, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p")}
    with _opened(out) as file:
        for start in range(first, len(prompts), arguments.batch_size):
            numbers = range(start, min(start + arguments.batch_size, len(prompts)))
            found = generate_batch(
                model, source.spec, [tokens[number] for number in numbers], stop_ids=tokenizer.stop_ids,
                device=device, seeds=[derive_seed(arguments.seed, f"answer {number}") for number in numbers], **options,
            )  # fmt: skip
            for number, answer in zip(numbers, found, strict=True):
                line = _line(number, prompts[number], tokens[number], answer, tokenizer) | {"settings": settings}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            if out is not None:
                get_logger().info("%d of %d prompts answered", numbers[-1] + 1, len(prompts))


def _line(
    number: int, prompt: str | list[dict[str, Any]], read: list[int], answer: "Generated", tokenizer: "Tokenizer"
) -> dict[str, Any]:
    from recipe_lib.tokenizers import StreamDecoder

    text = StreamDecoder(tokenizer, read)
    said = "".join(map(text.push, answer.tokens)) + text.finish()
    asked = {"prompt" if isinstance(prompt, str) else "messages": prompt}
    return {"number": number + 1, **asked, "answer": said, "tokens": len(answer.tokens), "ended_by": answer.ended}
