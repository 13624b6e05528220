"""Load the model of `tune generate`, and answer a prompt, a file's prompts, or a conversation.

generate.py parses the options and calls `answer(arguments, talk)`. The FILE of --prompts has a
prompt a line (.txt), or a JSON object a line (.jsonl) with `prompt` or `messages`. Answers are one
JSON object a line; with --out a second start appends to the file those that it lacks.
"""

import argparse
import hashlib
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from recipe_lib.config.local_files import MODEL_FOLDER
from recipe_lib.config.suggest import show
from recipe_lib.data import render_prompt, why_no_system_message
from recipe_lib.data.messages import check_order, read_turns
from recipe_lib.data.sample_files import parse_sample
from recipe_lib.data.samples import SampleFault, SamplePlaces, describe_kind
from recipe_lib.errors import CheckpointError, ConfigError, DataError, OutOfMemoryError
from recipe_lib.files import LineFile, report_storage_faults
from recipe_lib.generation.sample import (
    NO_ANSWER,
    Chat,
    Generated,
    check_prompt,
    generate,
    generate_batch,
    show_prompt_phase,
)
from recipe_lib.generation.source import (
    DTYPE_NAMES,
    GenerationSource,
    choose_device,
    choose_dtype,
    find_source,
    load_source,
)
from recipe_lib.logs import get_logger
from recipe_lib.models import Decoder
from recipe_lib.parallel.world import derive_seed
from recipe_lib.reading import JSON_LIMIT, open_regular, parse_json, read_text
from recipe_lib.tokenizers import StreamDecoder, Tokenizer, load_tokenizer

# A text, or the messages of a conversation, dicts of `role` and `content`.
Prompt = str | list[Mapping[str, Any]]

# Keys of a line that are not read: they change nothing in its answer.
_IGNORED_KEYS = ("category", "id", "index", "source")
# The end of errors on a line of .jsonl.
_EXPECTED = 'expected {"prompt": TEXT} or {"messages": [{"role": ..., "content": ...}, ...]}'
# Suffixes of the files that answers depend on: weights, config, template, tokenizer.
_MODEL_SUFFIXES = (".safetensors", ".json", ".jinja", ".model")
# Options of the command line that answers depend on.
_ANSWER_OPTIONS = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "system",
    "raw",
    "dtype",
    "quantize_base",
)


def answer(arguments: argparse.Namespace, talk: Callable[[Chat, str], None]) -> None:
    """Load the model, and print one answer, those of a file, or those of a conversation.

    talk: holds a conversation with the model of that name. Raises CheckpointError for a model,
    ConfigError for options and DataError for prompts that cannot be used, and OutOfMemoryError if
    the model does not fit the device.
    """
    source = find_source(arguments.checkpoint, arguments.base)
    if source.adapter is None and arguments.quantize_base != "auto":
        raise ConfigError(
            "--quantize-base: the base of an adapter can be quantized; this is a model, leave"
            " it out"
        )
    tokenizer = load_tokenizer(source.tokenizer, by_key=False)  # errors name no config key
    if (
        arguments.system is not None
        and (fault := why_no_system_message(tokenizer, arguments.system)) is not None
    ):
        raise ConfigError(f"--system: {fault}; leave it out, and put it into the question")
    if arguments.prompts is not None:
        answer_prompt_file(source, tokenizer, arguments)
    elif arguments.prompt is None:
        with load_model(source, arguments) as (model, device):
            chat = Chat(
                model,
                spec=source.spec,
                tokenizer=tokenizer,
                system=arguments.system,
                options=make_sampling_options(tokenizer, arguments, device),
            )
            talk(chat, str(source.adapter or source.folder))
    else:
        print_answer(source, tokenizer, arguments)


def read_prompts(path: Path) -> list[Prompt]:
    """Return the texts or conversations of a file, .txt or .jsonl; skip empty lines.

    Raises DataError for a file that cannot be read or has no prompt, and with the faulty line.
    """
    shown_path = show(str(path))
    try:
        text = read_text(path, JSON_LIMIT)
    except OSError as error:
        raise DataError(f"--prompts: {shown_path}: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"--prompts: {shown_path}: is not UTF-8; give it in UTF-8 text") from error
    prompts: list[Prompt] = []
    unread_keys: set[str] = set()
    # Lines end as those of a text file do; str.splitlines would also cut at U+2028, which a JSON
    # text may hold.
    for number, line in enumerate(io.StringIO(text, newline=None), start=1):
        if not line.strip():
            continue
        if path.suffix == ".txt":
            prompts.append(line.removesuffix("\n"))
        else:
            row = _read_row(line, f"{shown_path}:{number}")
            unread_keys |= row.keys() & _IGNORED_KEYS
            prompts.append(_read_prompt(row, f"{shown_path}:{number}"))
    if not prompts:
        raise DataError(f"--prompts: {shown_path}: found no prompt, expected one a line")
    if unread_keys:
        get_logger().info("prompts: %s: not read: %s", shown_path, ", ".join(sorted(unread_keys)))
    return prompts


def _read_row(line: str, location: str) -> dict[str, Any]:
    """Return the JSON object of a line. location: FILE:LINE, for the error.

    Raises DataError for anything else, and for text that UTF-8 cannot write.
    """
    row = parse_sample(line.encode())
    if isinstance(row, SampleFault):
        raise DataError(f"{location}: {row}; correct the line")
    # JSON can escape half a surrogate pair, which UTF-8 cannot write.
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{location}: found half a surrogate pair, expected whole characters; write them out"
        ) from None
    return row


def _read_prompt(row: dict[str, Any], location: str) -> Prompt:
    """Return the prompt of a row, the object of a line; its key is `prompt` or `messages`.

    Raises DataError for none of the two, both, an unknown key, or a value that is no prompt.
    """
    prompt_keys = [name for name in ("prompt", "messages") if name in row]
    unknown_keys = [name for name in row if name not in ("prompt", "messages", *_IGNORED_KEYS)]
    if len(prompt_keys) != 1:
        keys = " and ".join(prompt_keys) or ", ".join(map(show, row)) or "no keys"
        raise DataError(f"{location}: found {keys}, {_EXPECTED}")
    if unknown_keys:
        raise DataError(
            f"{location}: found {', '.join(map(show, unknown_keys))}, which no prompt is read with;"
            f" {_EXPECTED}"
        )
    key = prompt_keys[0]
    value = row[key]  # a text, or a list of messages under either key
    if key == "prompt" and isinstance(value, str):
        if not value:
            raise DataError(f"{location}: prompt is empty; give a text, or remove the line")
        return value
    if not isinstance(value, list):
        raise DataError(f"{location}: {key}: found {describe_kind(value)}, {_EXPECTED}")
    try:
        turns = read_turns(row, key)
        check_order(turns.messages, SamplePlaces(turns.places))
    except SampleFault as fault:
        raise DataError(f"{location}: {fault}") from None
    if not turns.messages:
        raise DataError(f"{location}: {key} is empty; {_EXPECTED}")
    if turns.messages[-1]["role"] == "assistant":
        raise DataError(
            f"{location}: the last message is the assistant's, expected one to answer; remove it"
        )
    return turns.messages


def encode_prompt(
    tokenizer: Tokenizer, prompt: Prompt, raw: bool, system: str | None = None
) -> list[int]:
    """Return the token ids that the model reads first.

    raw: without the chat template; then the prompt is a text. system: the text of the system
    message; None: none. Raises ConfigError for an empty raw prompt if there is no BOS token, and
    DataError for messages that the template refuses.
    """
    if raw:
        # An empty prompt is the BOS token alone.
        tokens = tokenizer.encode(str(prompt), add_bos=tokenizer.add_bos_by_default or not prompt)
        if not tokens:
            raise ConfigError(
                "--prompt: is empty and the tokenizer has no BOS token to begin from; give a text"
            )
        return tokens
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    return render_prompt(tokenizer, messages)


def compute_settings_digest(
    source: GenerationSource, arguments: argparse.Namespace, prompts: Sequence[Any]
) -> str:
    """Return a digest of what answers depend on: model, prompts, and how tokens are drawn.

    It is 16 hexadecimal digits, and stands in each line of --out.
    """
    paths = sorted(source.folder.iterdir())
    if source.adapter:
        paths += sorted(source.adapter.iterdir())
    files = [path for path in paths if path.suffix in _MODEL_SUFFIXES and path.is_file()]
    # By size and time: reading all weights would take minutes.
    settings: list[Any] = [
        [path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files
    ]
    settings += [getattr(arguments, name) for name in _ANSWER_OPTIONS]
    settings.append(list(prompts))
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]


class Answers:
    """The output of answers: a file that a second start appends to, or standard output."""

    def __init__(self, path: Path | None, settings: str):
        """Count the answers that are there; write nothing.

        path: None for standard output. settings: digest of `compute_settings_digest`. Raises
        ConfigError for a file that is not one of answers by these settings.
        """
        self.settings = settings
        self.path = path
        # The answers written so far, and their bytes: a half line after them is written over.
        self.count, self._size = (0, 0) if path is None else count_answers(path, settings)
        self._file: LineFile | None = None  # opened with the first answer

    def write(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """Append the next answers, the fields of a line each: all of them or none.

        Raises StorageError if the disk is full or refuses the write.
        """
        text = ""
        for fields in answers:
            self.count += 1
            row = {"number": self.count, "settings": self.settings, **fields}
            text += json.dumps(row, ensure_ascii=False) + "\n"
        if self.path is None:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        with report_storage_faults():
            # With the first answer, so that a start that fails leaves no file.
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = LineFile(self.path, self._size)  # keeps so many bytes of the file
            self._file.append(text.encode())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def count_answers(path: Path, settings: str) -> tuple[int, int]:
    """Return the number and the bytes of the answers in a file of an earlier start.

    (0, 0) without a file. Raises ConfigError for a file of other settings, or of something else.
    """
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return 0, 0
    except OSError as error:
        raise ConfigError(
            f"--out: {show(str(path))}: {error.strerror}; choose another --out"
        ) from error
    count = size = 0
    with file:
        while line := file.readline(JSON_LIMIT):
            # As the line of the next answer begins; `[:-1]` takes the closing brace away.
            beginning = json.dumps({"number": count + 1, "settings": settings})[:-1].encode()
            # Half a line at the end, as a kill leaves it: the next answer is written over it.
            if not line.endswith(b"\n") and beginning.startswith(line[: len(beginning)]):
                break
            _check_answer(
                line,
                number=count + 1,
                settings=settings,
                location=f"--out: {show(str(path))}:{count + 1}",
            )
            count += 1
            size += len(line)
    return count, size


def _check_answer(line: bytes, number: int, settings: str, location: str) -> None:
    """Raise ConfigError for a line that is not the answer of that number and those settings."""
    try:
        row = parse_json(line)
        is_same = (row["number"], row["settings"]) == (number, settings)
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{location}: is no answer of --prompts; choose another --out") from None
    if not is_same:
        raise ConfigError(
            f"{location}: was made with another model, other prompts or other options; choose"
            " another --out, or remove it"
        )
    if not line.endswith(b"\n"):
        raise ConfigError(f"{location}: ends in the midst of a line; choose another --out")


def answer_prompt_file(
    source: GenerationSource, tokenizer: Tokenizer, arguments: argparse.Namespace
) -> None:
    """Answer the prompts of a file that have no answer yet, batch by batch; write a line each.

    Raises DataError or ConfigError for a faulty prompt, before the model is loaded.
    """
    prompts = read_prompts(Path(arguments.prompts).expanduser())
    tokens = []  # ids of each prompt
    # All of them before the model is loaded: the last may be at fault.
    for number, prompt in enumerate(prompts, start=1):
        if arguments.raw and not isinstance(prompt, str):
            raise DataError(f"--raw: prompt {number} is a conversation; leave --raw out")
        tokens.append(
            encode_prompt(tokenizer, prompt=prompt, raw=arguments.raw, system=arguments.system)
        )
        check_prompt(tokens[-1], source.spec, f"prompt {number}")
    out = None if arguments.out is None else Path(arguments.out).expanduser()
    answers = Answers(out, compute_settings_digest(source, arguments, prompts))
    with load_model(source, arguments) as (model, device):
        if answers.count:
            get_logger().info("resume: %d of %d prompts are answered", answers.count, len(prompts))
        for start in range(answers.count, len(prompts), arguments.batch_size):
            batch = range(len(prompts))[start : start + arguments.batch_size]
            generated = generate_batch(
                model,
                source.spec,
                [tokens[number] for number in batch],
                stop_ids=tokenizer.stop_ids,
                device=device,
                max_new_tokens=arguments.max_new_tokens,
                seeds=[derive_seed(arguments.seed, f"answer {number}") for number in batch],
                temperature=arguments.temperature,
                top_k=arguments.top_k,
                top_p=arguments.top_p,
            )
            answers.write(
                [
                    _describe_answer(
                        prompts[number], tokens=tokens[number], answer=answer, tokenizer=tokenizer
                    )
                    for number, answer in zip(batch, generated, strict=True)
                ]
            )
            if answers.path is not None:
                get_logger().info("%d of %d prompts answered", answers.count, len(prompts))
    answers.close()


def _describe_answer(
    prompt: Prompt, tokens: list[int], answer: Generated, tokenizer: Tokenizer
) -> dict[str, Any]:
    # After the prompt's tokens, since a tokenizer may join the first of the answer to them.
    decoder = StreamDecoder(tokenizer, tokens)
    text = "".join(map(decoder.push, answer.tokens)) + decoder.finish()
    key = "prompt" if isinstance(prompt, str) else "messages"
    return {key: prompt, "answer": text, "tokens": len(answer.tokens), "ended_by": answer.ended}


def print_answer(
    source: GenerationSource, tokenizer: Tokenizer, arguments: argparse.Namespace
) -> None:
    """Print the answer to --prompt as it is made.

    Raises ConfigError and CheckpointError as `check_prompt` does, for a prompt that is too long or
    has ids that the model does not know.
    """
    prompt = encode_prompt(
        tokenizer, prompt=arguments.prompt, raw=arguments.raw, system=arguments.system
    )
    try:
        check_prompt(prompt, source.spec, "--prompt")
    except CheckpointError as error:
        raise CheckpointError(f"{show(str(source.tokenizer))}: {error}") from error
    decoder = StreamDecoder(tokenizer, prompt)
    is_empty = True
    with load_model(source, arguments) as (model, device):
        tokens = generate(
            model, source.spec, prompt, **make_sampling_options(tokenizer, arguments, device)
        )
        for token in show_prompt_phase(tokens, len(prompt)):
            piece = decoder.push(token)
            is_empty = is_empty and not piece
            sys.stdout.write(piece)
            sys.stdout.flush()
    last_piece = decoder.finish()  # of a character whose bytes are not complete
    print(last_piece, flush=True)
    if is_empty and not last_piece:
        get_logger().info("note: %s", NO_ANSWER)


def make_sampling_options(
    tokenizer: Tokenizer, arguments: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """Return how tokens are chosen, as keyword arguments of `generate`."""
    return {
        "max_new_tokens": arguments.max_new_tokens,
        "stop_ids": tokenizer.stop_ids,
        "temperature": arguments.temperature,
        "top_k": arguments.top_k,
        "top_p": arguments.top_p,
        "generator": torch.Generator(device).manual_seed(arguments.seed),
    }


@contextmanager
def load_model(
    source: GenerationSource, arguments: argparse.Namespace
) -> Iterator[tuple[Decoder, torch.device]]:
    """Yield the model with its weights, and its device.

    Raises OutOfMemoryError if the model, or what is done with it, does not fit on the device.
    """
    device = choose_device(arguments.device)
    # `auto` is what an adapter's file says of its training, else what config.json says.
    dtype = DTYPE_NAMES.get(source.dtype, "auto") if arguments.dtype == "auto" else arguments.dtype
    storage = source.storage if arguments.quantize_base == "auto" else arguments.quantize_base
    if source.adapter is not None:
        suffix = "" if storage == "none" else f", kept in {storage}"
        get_logger().info("adapter: %s on %s%s", source.adapter, source.folder, suffix)
    elif source.folder == Path(arguments.checkpoint).expanduser() / MODEL_FOLDER:
        # A run was named: the line says that its model was taken.
        get_logger().info("model: %s", source.folder)
    try:
        yield (
            load_source(
                source, dtype=choose_dtype(dtype, source.config), device=device, storage=storage
            ),
            device,
        )
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"{show(str(source.folder))}: the model does not fit on {device}; try --dtype bf16,"
            " fewer --max-new-tokens, or --device cpu"
        ) from error
