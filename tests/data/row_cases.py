"""Define a minimal row of every format, and columns and message keys that other tools' rows have.

The names are those of TRL's, LLaMA-Factory's, Axolotl's, torchtune's, ms-swift's and OpenAI's rows,
and of datasets of the hub. `encode(tokenizer, format, row)` reads rows as a run does.
"""

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipe_lib.config.schema_data import DataConfig, SourceConfig
from recipe_lib.data.dataset_report import DataReport
from recipe_lib.data.encoding import SourceEncoder
from recipe_lib.data.label_masks import Encoder
from recipe_lib.tokenizers import Tokenizer

# A question and its answer.
USER = {"role": "user", "content": "Capital of Peru?"}
SAID = {"role": "assistant", "content": "Lima."}
# The same two turns as ShareGPT has them.
TURNS = [{"from": "human", "value": "Capital of Peru?"}, {"from": "gpt", "value": "Lima."}]
# Format, ` of ` and a variant where it has several -> row.
ROWS: dict[str, dict[str, Any]] = {
    "alpaca": {"instruction": "Capital of Peru?", "output": "Lima."},
    "sharegpt": {"conversations": TURNS},
    "messages": {"messages": [USER, SAID]},
    "prompt_completion": {"prompt": "Capital of Peru?", "completion": " Lima."},
    "prompt_completion of messages": {"prompt": [USER], "completion": [SAID]},
    "text": {"text": "Lima is the capital."},
    "preference": {"prompt": "Capital of Peru?", "chosen": "Lima.", "rejected": "Cusco."},
    "kto": {"prompt": "Capital of Peru?", "completion": "Lima.", "label": True},
    "classification of text": {"text": "Lima is the capital.", "label": "fact"},
    "classification of messages": {"messages": [USER, SAID], "label": "fact"},
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Of Rome.", "parameters": {}},
}
# Another conversation, to stand beside a row's own.
OTHER = [{"role": "user", "content": "Moon?"}, {"role": "assistant", "content": "Round."}]

# Column -> a value: content that no format reads. A fault names the column, whatever it holds.
CONTENT: dict[str, Any] = {
    "images": ["a.jpg"], "image": "a.jpg", "videos": ["a.mp4"], "audios": ["a.wav"], "audio": {"bytes": b"RIFF"},
    "input_ids": [1, 2], "labels": [-100, 2], "attention_mask": [1, 1], "completion_mask": [0, 1], "token_ids": [3],
    "weight": 0.5, "sample_weight": 2, "explanation": "As it is.", "context": "Peru is a country.",
    "demonstrations": [{"q": "Moon?"}], "steps": ["Think."], "few_shot": [["Moon?", "Round."]], "think": "Hm.",
    "passages": [{"text": "Peru."}], "persona": "A pirate speaks here.", "code": "print(1)", "passed": False,
    "is_correct": False, "subject": "An article of many words.\nIt has two lines.", "html": "<p>Peru</p>",
    "hidden": True,
}  # fmt: skip
# Column -> a value: some formats read it, others refuse or ignore it.
COLUMNS: dict[str, Any] = {
    "instruction": "Add.", "input": "Be quick.", "query": "In words.", "output": "Quito.", "history": [["2+2?", "4"]],
    "system": "You are a pirate.", "system_prompt": "You are a pirate.", "messages": OTHER, "conversations": OTHER,
    "tools": [TOOL], "functions": [TOOL["function"]], "function": [TOOL["function"]], "available_tools": [TOOL],
    "tool_list": [TOOL], "chat_template_kwargs": {"enable_thinking": False}, "documents": [{"text": "Lima."}],
    "prompt": "Moon?", "completion": "Round.", "chosen": "Round.", "rejected": "Flat.", "text": "The moon.",
    "label": False, "kto_tag": False, "margin": 0.5, "preferred_output": [OTHER[1]],
    "non_preferred_output": [{"role": "assistant", "content": "Flat."}], "segments": [{"label": True, "text": "Moon"}],
    "conversation": OTHER, "response": "Round.", "answer": "Round.", "question": "Moon?", "dialogue": OTHER,
}  # fmt: skip
# Column -> a value: changes nothing in any format.
IDLE: dict[str, Any] = {
    "id": 7, "ids": [1, 2], "idx": 3, "index": 1, "uuid": "a-b", "prompt_id": "p1", "source": "wiki", "dataset": "x",
    "origin": "web", "category": "geo", "task": "qa", "topic": "peru", "topics": ["peru", "lima"], "language": "en",
    "lang": "en", "difficulty": "easy", "score": 0.9, "scores": [1.0, 2.0], "score_chosen": 8.0, "score_rejected": 1.0,
    "quality": 5, "rating": 4, "chosen-rating": 5.0, "chosen-model": "m", "model": "m", "model_name": "m",
    "generator": "m", "license": "cc-by", "url": "https://example.org/peru", "date": "2024-01-01", "created": 1,
    "timestamp": 1, "hash": "ff", "split": "train", "subset": "a", "tags": ["a"], "metadata": {"a": {"b": "c"}},
    "meta": {"k": [1]}, "n_turns": 2, "num_turns": 2, "num_tokens": 12, "length": 3, "avatarUrl": "https://a.b",
    "views": 3, "title": "Peru", "custom_instruction": False, "skip_prompt_formatting": True, "helpfulness": 4,
    "correctness": 0, "redacted": False, "openai_moderation": [{"flagged": False}], "__index_level_0__": 5,
    "Unnamed: 0": 5, "annotation_type": "original-annotations", "user_id": "u", "parallel_tool_calls": True,
}  # fmt: skip
# Values without content: a column that holds one is as good as missing.
NOTHING: tuple[Any, ...] = (None, "", [], {}, " ", {"a": None}, [None])

# Key of a message, of any role -> a value.
KEYS: dict[str, Any] = {
    "name": "Ann", "id": "m1", "tool_call_id": "c1", "timestamp": 3, "model": "m", "refusal": "No.",
    "audio": {"id": "a"}, "annotations": [{"url": "u"}], "images": ["a.jpg"], "train": False, "training": False,
    "loss": False, "weight": 0, "mask": True, "masked": True, "train_detail": [{"begin_offset": 0, "end_offset": 1}],
    "training_detail": [{"begin_offset": 0, "end_offset": 1}], "eot": False, "ipython": True, "prefix": True,
    "thinking": "Hm.", "reasoning": "Hm.", "reasoning_content": "Hm.", "citations": ["c"], "documents": [{"a": "b"}],
    "language": "en", "toxic": False, "turn_identifier": 4, "channel": "final", "recipient": "all", "value": "x",
    "text": "x", "tools": [TOOL], "function_call": {"name": "weather", "arguments": "{}"}, "thought": "Hm.",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {}}}],
}  # fmt: skip


class Rows:
    """Rows in memory, in place of a file of samples."""

    place = "rows.jsonl"  # the file's name in messages
    keys_beside: dict[str, str] = {}  # keys of a JSON file beside its list of rows: none

    def __init__(self, *rows: dict[str, Any]) -> None:
        self.rows = rows

    def read(self, start: int, stop: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (place in messages, row) of the rows from `start` to `stop` (None: to the end)."""
        for number, row in enumerate(self.rows[start:stop], start=start + 1):
            yield f"rows.jsonl:{number}", row


def get_format(name: str) -> str:
    """Return the format of one of ROWS: its key without the variant."""
    return name.partition(" of ")[0]


@functools.cache
def build_encoder(tokenizer: Tokenizer, train_on: str | tuple[str, ...]) -> Encoder:
    """Return an encoder, the same one for the same arguments: building it takes a while."""
    return Encoder(tokenizer, "auto", train_on)


def encode(
    tokenizer: Tokenizer, form: str, *rows: dict[str, Any], **settings: Any
) -> tuple[str, list[str], DataReport]:
    """Encode rows as a run does, leaving out invalid ones.

    Returns (text of all sequences, the text of each one's label tokens, report of what was read).
    form: the format. settings: fields of DataConfig.
    """
    return encode_file(tokenizer, form, Rows(*rows), **settings)


def encode_file(
    tokenizer: Tokenizer, form: str, file: Any, **settings: Any
) -> tuple[str, list[str], DataReport]:
    """Return what `encode` returns, for the rows of a file (or `Rows`).

    Raises the fault that ends the reading, if any.
    """
    cfg = DataConfig(on_invalid="skip", **settings)
    source = SourceConfig("rows.jsonl", format=form, columns=settings.get("columns", {}))
    train_on = cfg.train_on if isinstance(cfg.train_on, str) else tuple(cfg.train_on)
    encoder = build_encoder(tokenizer, train_on)
    source_encoder = SourceEncoder(cfg=cfg, source=source, encoder=encoder, max_seq_len=1024)
    chunk = source_encoder.encode(file, 0, None)
    if chunk.fault is not None:
        raise chunk.fault
    texts = []
    trained_texts = []
    start = 0
    for length in chunk.lengths:
        stop = start + length
        ids = list(chunk.ids[start:stop])
        flags = chunk.trained[start:stop]
        trained_ids = [token for token, flag in zip(ids, flags, strict=True) if flag]
        texts.append(tokenizer.decode(ids))
        trained_texts.append(tokenizer.decode(trained_ids))
        start = stop
    return "\n---\n".join(texts), trained_texts, chunk.report


def write_tokenizer_folder(folder: Path, name: str = "qwen3") -> Path:
    """Write a tokenizer with a real chat template and return its folder.

    name: of a template in tests/data/template_cases, whose import needs trl's wheel for most.
    """
    from tests.data.template_cases import BY_NAME, read_source, write_tokenizer

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return write_tokenizer(folder, BY_NAME[name], read_source(BY_NAME[name]))
