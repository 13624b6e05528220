"""A sentencepiece model written as tokenizer.json: transformers finds the same ids without the
model.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from recipe_lib.checkpoint.side_files import copy_tokenizer, make_tokenizer_json
from recipe_lib.logs import get_logger
from recipe_lib.tokenizers import Tokenizer, load_tokenizer
from tests.tokenizers.made import NASTY, write_json, write_tiktoken


def written(tokenizer: Tokenizer, folder: Path) -> transformers.PreTrainedTokenizerBase:
    text = make_tokenizer_json(tokenizer)
    assert text is not None
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama2", "stories260K-hf"])
def test_real_models(name: str, realdata: Path, tmp_path: Path) -> None:
    ours = load_tokenizer(
        realdata / name if name.startswith("stories") else realdata / "tokenizers" / name
    )
    theirs = written(ours, tmp_path)
    specials = set(ours.special_texts) | {"<unk>"}
    for text in NASTY:
        if any(special in text for special in specials):
            continue
        for whole in (f"<s>{text}", f"<s>User:\n{text}\n\nAssistant:\n{text}</s>User:\n{text}"):
            assert theirs(whole, add_special_tokens=False).input_ids == ours.encode(
                whole, allow_special=True
            ), whole
    assert theirs("the cat").input_ids == ours.encode("the cat", add_bos=True)
    assert theirs.decode(ours.encode("Once upon a time, é 漢")) == "Once upon a time, é 漢"


def test_a_model_that_it_cannot_write(realdata: Path, tmp_path: Path) -> None:
    """Symbols that are found before everything else are in no interface of the library; nothing
    wrong is written, and an export says so.
    """
    model = realdata / "tokenizers" / "mistral" / "mistral_instruct_tokenizer_240323.model.v3"
    assert make_tokenizer_json(load_tokenizer(model)) is None
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append
    get_logger().addHandler(handler)
    try:
        copy_tokenizer(tmp_path, [model], None, ())
    finally:
        get_logger().removeHandler(handler)
    (record,) = said
    assert (
        record.levelno == logging.WARNING
        and "cannot be written as tokenizer.json" in record.getMessage()
    )
    assert (tmp_path / model.name).is_file() and not (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize("write", [write_json, write_tiktoken])
def test_only_sentencepiece(write: Callable[[Path], Path], tmp_path: Path) -> None:
    assert make_tokenizer_json(load_tokenizer(write(tmp_path))) is None
