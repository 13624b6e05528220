"""What a tokenizer.json makes of a text has a bound, or is refused before the tokenizers library
reads the file.
"""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from recipe_lib.errors import DataError
from recipe_lib.tokenizers import load_tokenizer, vocabulary
from tests.tokenizers.made import write_json

LIMIT = 2**10  # in place of the real one: nothing here takes memory


def replace(old: str, new: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def sequence(*steps: dict[str, Any], name: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", name: list(steps)}


def charsmap(longest: int) -> dict[str, Any]:
    """Sentencepiece's table with an empty trie: nothing is replaced."""
    table = (4).to_bytes(4, "little") + bytes(4) + b"a" * longest + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


LETTERS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
WITHOUT_BOUND: dict[str, dict[str, Any]] = {
    "a letter becomes two, thirty times": {"normalizer": sequence(*[replace("a", "aa")] * 30)},
    "sequences in sequences": {"normalizer": sequence(*[sequence(*[replace("a", "aa")] * 15)] * 2)},
    "nothing becomes something": {"normalizer": sequence(*[replace("", "ab", "Regex")] * 30)},
    "an empty text becomes something": {"normalizer": sequence(*[replace("", "ab")] * 30)},
    "one long text": {"normalizer": replace("a", "a" * 2**21)},
    "put before": {"normalizer": sequence(*[{"type": "Prepend", "prepend": "a" * 2**11}] * 2)},
    "a table": {"normalizer": sequence(charsmap(2**11), charsmap(2**11))},
    "bytes as letters": {"normalizer": sequence(*[{"type": "ByteLevel"}] * 30)},
    "without their kinds": {"normalizer": {"normalizers": [{"pattern": {"String": "a"}, "content": "aa"}] * 30}},
    "pre-tokenizers": {"pre_tokenizer": sequence(*[LETTERS] * 30, name="pretokenizers")},
    "the text twice": {"post_processor": {"type": "TemplateProcessing", "pair": [], "special_tokens": {},
                                          "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2}},
    "many ids around it": {"post_processor": {"type": "TemplateProcessing", "pair": [],
                                              "special_tokens": {"b": {"id": "b", "ids": [1] * 300, "tokens": ["b"]}},
                                              "single": [{"SpecialToken": {"id": "b", "type_id": 0}}] * 300}},
}  # fmt: skip


def write(folder: Path, parts: dict[str, Any]) -> Path:
    write_json(folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | parts))
    return folder


@pytest.mark.parametrize("name", WITHOUT_BOUND)
def test_growth_without_bound_never_reaches_the_library(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(vocabulary.tokenizers.Tokenizer, "from_str", None)
    with pytest.raises(
        DataError,
        match="that makes? a text longer without bound; expected the tokenizer of a model",
    ):
        load_tokenizer(write(tmp_path, WITHOUT_BOUND[name]))


@pytest.mark.parametrize(
    ("normalizer", "text", "fits"),
    [
        (sequence(*[replace("a", "aa")] * 5), "a" * 31, True),
        (sequence(*[replace("a", "aa")] * 5), "a" * 500, False),
        (sequence(*[replace("a", "aa")] * 5), "b" * 5000, True),  # it is measured, not guessed
        (sequence(replace(" {2,}", " ", "Regex"), replace("b", "c")), "a  b" * 5000, True),
        ({"type": "NFKC"}, "ﷺ" * 500, False),
        ({"type": "NFKC"}, "plain" * 500, True),
        ({"type": "Prepend", "prepend": "▁"}, "plain" * 500, True),
    ],
)
def test_a_text_that_grows_is_refused(
    normalizer: dict[str, Any],
    text: str,
    fits: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    tokenizer = load_tokenizer(write(tmp_path, {"normalizer": normalizer}))
    monkeypatch.setattr(vocabulary, "MOST_CHARACTERS", LIMIT)
    if fits:
        assert tokenizer.encode(text)
    else:
        with pytest.raises(
            DataError, match="normalizers that make a text of 500 characters too long to be read"
        ):
            tokenizer.encode(text)


def test_a_table_grows_as_its_longest_replacement():
    assert vocabulary.read_growth(Path("x"), {"normalizer": charsmap(33)}) == 34


def test_the_bound_holds_what_the_library_does():
    """No step makes more characters of one than is said, over letters of every script that grow."""
    from tokenizers import normalizers

    growing = "aİΐﬀﬃŉ漢한ﷺ㍿ᾂשּׁ½"
    for kind, most in vocabulary._GROWTH.items():
        step = getattr(normalizers, kind)()
        assert max(len(step.normalize_str(letter)) for letter in growing) <= most, kind
    for letter in map(chr, range(0x11000)):
        if not 0xD800 <= ord(letter) < 0xE000:
            assert len(normalizers.NFKD().normalize_str(letter)) <= vocabulary._GROWTH["NFKD"]
            assert (
                len(normalizers.BertNormalizer().normalize_str(letter))
                <= vocabulary._GROWTH["BertNormalizer"]
            )
