"""The demo's rows and tokenizer: made by the committed scripts, and fair."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from recipe_lib.config import load_config
from recipe_lib.models import read_preset_config
from recipe_lib.tokenizers import load_tokenizer
from tests.house.files import ROOT
from tests.tokenizers.made import render

DEMO = ROOT / "examples" / "demo"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"demo_{name}", DEMO / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(name: str) -> list[dict[str, str]]:
    return [
        json.loads(line)
        for line in (DEMO / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def test_rows_are_those_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    maker = script("make_data")
    monkeypatch.setattr(maker, "FOLDER", tmp_path)
    maker.main()
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (DEMO / name).read_bytes()


def test_heldout_is_held_out():
    train = [row["instruction"] for row in rows("train")]
    heldout = [row["instruction"] for row in rows("heldout")]
    assert len(train) == len(set(train)) == 6000 and len(heldout) == len(set(heldout)) == 300
    assert not set(train) & set(heldout)


def test_answers_are_right():
    """Numbers against a table written out by hand, digits against words by reading them back."""
    maker = script("make_data")
    by_hand = {
        0: "zero",
        13: "thirteen",
        40: "forty",
        99: "ninety-nine",
        100: "one hundred",
        405: "four hundred and five",
        1000: "one thousand",
        2017: "two thousand and seventeen",
        9999: "nine thousand nine hundred and ninety-nine",
    }
    assert {number: maker.in_words(number) for number in by_hand} == by_hand
    assert len({maker.in_words(number) for number in range(10_000)}) == 10_000
    for row in rows("heldout"):
        words = row["instruction"].split()
        if row["instruction"].startswith("How many"):
            factor = {"millimetres": 10, "centimetres": 100, "cents": 100}.get(words[2], 1000)
            assert row["output"] == f"{int(words[4]) * factor} {words[2]}"


def test_tokenizer_fits():
    """Every row round-trips, each digit is a token, BOS and EOS are the preset's, and the chat
    template ends turns.
    """
    tokenizer = load_tokenizer(DEMO / "tokenizer")
    config = read_preset_config("demo/0.5M")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == tuple(
        config[f"{role}_token_id"] for role in ("bos", "eos", "pad")
    )
    assert tokenizer.vocab_size == config["vocab_size"]
    for row in rows("heldout"):
        for text in (row["instruction"], row["output"]):
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text
            digits = [i for i in ids if tokenizer.decode([i]).strip().isdigit()]
            assert len(digits) == sum(letter.isdigit() for letter in text)
    chat = render(
        tokenizer.render_chats,
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        False,
    )
    assert chat == "<|begin|><|user|>a<|end|><|assistant|>b<|end|>"
    longest = max(
        len(tokenizer.encode(row["instruction"] + row["output"])) for row in rows("train")
    )
    assert longest + 5 <= load_config("demo/full").max_seq_len


def test_tokenizer_is_that_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    maker = script("make_tokenizer")
    made = json.loads(
        maker.train_tokenizer(
            [row[key] for row in rows("train") for key in ("instruction", "output")]
        ).to_str()
    )
    shipped = json.loads((DEMO / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8"))
    assert (
        made["model"]["vocab"] == shipped["model"]["vocab"]
        and made["model"]["merges"] == shipped["model"]["merges"]
    )
    config = json.loads((DEMO / "tokenizer" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"] == maker.CHAT_TEMPLATE


def test_score_counts_exact_answers():
    """Right means every letter: not a beginning, not more than was asked."""
    score = script("score")
    assert score.Answer("q", "four", "four").right
    assert not score.Answer("q", "four", "fou").right
    assert not score.Answer("q", "four", "fourteen").right


def test_demo_is_small():
    size = sum(
        path.stat().st_size for path in DEMO.rglob("*") if path.is_file() and path.suffix != ".pyc"
    )
    assert size < 800_000
