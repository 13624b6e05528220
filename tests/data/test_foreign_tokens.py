"""Special tokens of another tokenizer's chat template in texts: cut into pieces, and said so."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from recipe_lib.config.schema import DataConfig
from recipe_lib.data import build_dataset
from recipe_lib.data.inspect import inspect_datasets
from recipe_lib.tokenizers import load_tokenizer
from tests.selection import mark_slow_except

transformers = pytest.importorskip("transformers")

REAL = ["gpt2", "smollm2", "llama3_1"]
# How the templates of these models begin and end a turn, as their model cards say.
TURNS = {
    "smollm2": ("<|im_start|>", "<|im_end|>"),
    "llama3_1": ("<|start_header_id|>", "<|eot_id|>"),
    "gemma2": ("<start_of_turn>", "<end_of_turn>"),
    "mistral": ("[INST]", "[/INST]"),
    "none of them": ("<|user|>", "<|end|>"),
}
ROWS: dict[str, Any] = {
    "text": {"text": "{0}user\nHello{1}\nHi."},
    "prompt_completion": {"prompt": "{0}user\nHello{1}\n", "completion": "Hi."},
    "preference": {"prompt": "{0}user\nHello{1}\n", "chosen": "Hi.", "rejected": "What?"},
    "kto": {"prompt": "{0}user\nHello{1}\n", "completion": "Hi.", "label": True},
    "classification": {"text": "{0}user\nHello{1}\nHi.", "label": 1},
}


@cache
def load(folder: Path) -> tuple[Any, Any]:
    return load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(str(folder))


def build(folder: Path, form: str, row: dict[str, Any], path: Path) -> Any:
    path.write_text(json.dumps(row) + "\n")
    return build_dataset(
        DataConfig(source=str(path), format=form, cache=False, num_proc=1), load(folder)[0], 256
    )


@pytest.mark.parametrize("turns", list(TURNS))
@pytest.mark.parametrize("name", mark_slow_except(REAL, ["gpt2", "smollm2"]))
def test_tokens_of_another_template_are_named(
    real_folder, tmp_path: Path, name: str, turns: str
) -> None:
    folder = real_folder(name)
    theirs = load(folder)[1]
    template = theirs.chat_template or ""
    ids = {token: theirs(token, add_special_tokens=False)["input_ids"] for token in TURNS[turns]}
    pieces = [token for token in TURNS[turns] if len(ids[token]) > 1 and token not in template]
    assert bool(pieces) is (turns != name)
    for form, row in ROWS.items():
        written = {
            key: value.format(*TURNS[turns]) if isinstance(value, str) else value
            for key, value in row.items()
        }
        dataset = build(folder, form, written, tmp_path / f"{form}.jsonl")
        special = dataset.report.special
        assert dict(special.foreign) == dict.fromkeys(pieces, 1) and special.samples == bool(
            pieces
        ), form
        findings = {
            finding.name: finding for finding in inspect_datasets(dataset, None, 256, None).findings
        }
        assert ("split-special-tokens" in findings) is bool(pieces), form
        lines = [line for line in dataset.report.format_lines() if "cut into pieces" in line]
        assert len(lines) == bool(pieces) and all(
            repr(token) in line for line in lines for token in pieces
        ), form


def test_messages_may_speak_of_such_tokens(real_folder, tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "Say <|eot_id|>"},
        {"role": "assistant", "content": "Hi."},
    ]
    dataset = build(
        real_folder("smollm2"), "messages", {"messages": messages}, tmp_path / "rows.jsonl"
    )
    assert not dataset.report.special.foreign and dataset.report.special.samples == 0
