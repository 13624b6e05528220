"""A tokenizer is found by what is in the folder; what is missing or broken is one line."""

import json
import re
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models

from recipe_lib.errors import DataError
from recipe_lib.tokenizers import load_tokenizer
from recipe_lib.tokenizers.vocabulary import JsonVocabulary
from tests.tokenizers.made import render, write_json, write_sentencepiece, write_tiktoken


def refused(line: str, path, **options):
    with pytest.raises(DataError) as caught:
        load_tokenizer(path, **options)
    assert len(caught.value.faults) == 1 and "\n" not in str(caught.value)
    assert re.search(line, str(caught.value)), str(caught.value)


def test_the_model_file_comes_before_tokenizer_json(tmp_path):
    write_json(tmp_path)
    assert load_tokenizer(tmp_path).place.endswith("tokenizer.json")
    write_sentencepiece(tmp_path)
    both = load_tokenizer(tmp_path)
    assert both.place.endswith("tokenizer.model")
    assert load_tokenizer(tmp_path / "tokenizer.json").place.endswith("tokenizer.json")


def test_added_tokens_of_tokenizer_json_serve_the_model_file(tmp_path):
    write_sentencepiece(tmp_path)
    entry = {"id": 400, "content": "<|im_end|>", "special": True, "lstrip": False, "rstrip": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [entry]}))
    assert load_tokenizer(tmp_path).encode("<|im_end|>", allow_special=True) == [400]


def test_added_tokens_json_is_overruled_by_files_that_say_more(tmp_path):
    write_json(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    number = len(content["model"]["vocab"])
    content["added_tokens"].append(
        {"id": number, "content": "<call>", "special": False, "lstrip": False, "rstrip": False, "single_word": False,
         "normalized": False}
    )  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<call>": number}))
    made = load_tokenizer(tmp_path)
    assert not made.is_special(number) and made.encode("a<call>")[-1] == number
    assert made.decode([number]) == "<call>" and made.vocab_size == number + 1


def test_versions_of_mistral(tmp_path):
    write_sentencepiece(tmp_path, "tokenizer.model.v3")
    assert load_tokenizer(tmp_path).place.endswith("tokenizer.model.v3")
    write_sentencepiece(tmp_path, "tokenizer.model.v1")
    refused(
        r"found several tokenizers \(tokenizer.model.v1, tokenizer.model.v3\); set tokenizer.path"
        r" to one",
        tmp_path,
    )


def test_nothing_there(tmp_path):
    refused(r"no such folder or file; set tokenizer.path", tmp_path / "nowhere")
    # Where there is no config, no key of one is named.
    remedy = "put there a folder with a tokenizer$"
    refused(f"nowhere: no such folder or file; {remedy}", tmp_path / "nowhere", by_key=False)
    refused(r"found no files, expected tokenizer.json or tokenizer.model", tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    refused(r"found vocab.json, expected tokenizer.json or tokenizer.model", tmp_path)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "tokenizer.model: the file is empty; copy it again"),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            "found a git-lfs pointer, expected the file itself",
        ),
        (b"\x00\x01garbage", "found no sentencepiece model"),
        (b"IQ== 0\nIg== one\n", r"tokenizer.model:2: found b'Ig== one', expected `base64 rank`"),
        (b"IQ== 0\nIg== 1\n", "found 2 pieces that are not ranked 0 to 1 or lack single bytes"),
        (b'{"version": 1', "found no tokenizer"),
        (b'{"model": {"type": "BPE"}}', "found no tokenizer"),
    ],
)
def test_broken_vocabulary_files(content, line, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(content)
    refused(line, tmp_path)


def test_cut_short_sentencepiece_model(tmp_path):
    file = write_sentencepiece(tmp_path) / "tokenizer.model"
    file.write_bytes(file.read_bytes()[:-100])
    refused("found no sentencepiece model", tmp_path)


def test_tiktoken_of_an_unknown_kind_needs_its_special_tokens(tmp_path):
    write_tiktoken(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    refused(
        r"found 261 tiktoken pieces and no special tokens, expected Llama 3's 128000 or a"
        r" tokenizer_config",
        tmp_path,
    )


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("tokenizer_config.json", b"{", r"tokenizer_config.json: line 1 column 2: invalid JSON"),
        (
            "tokenizer_config.json",
            b"[]",
            r"tokenizer_config.json: found list, expected a JSON object",
        ),
        (
            "tokenizer_config.json",
            b'{"eos_token": "<none>"}',
            r"found eos_token '<none>', which is no token",
        ),
        ("tokenizer_config.json", b'{"a": "\xff"}', r"a byte that is not UTF-8 at 7"),
        ("tokenizer_config.json", b"[" * 100_000, r"JSON nested too deep"),
        (
            "tokenizer_config.json",
            b'{"added_tokens_decoder": {"x": {"content": "<a>"}}}',
            r"found the added token",
        ),
        ("added_tokens.json", b'{"<a>": "one"}', r"added_tokens.json: found the added token"),
        ("chat_template.jinja", b"\xff", r"chat_template.jinja: found a byte that is not UTF-8"),
        (
            "chat_template.jinja",
            b"{% for %}",
            r"chat_template.jinja: line 1: the chat template is not valid Jinja",
        ),
    ],
)
def test_broken_settings(name, content, line, tmp_path):
    write_sentencepiece(tmp_path)
    (tmp_path / name).write_bytes(content)
    refused(line, tmp_path)


def test_template_file_of_the_user(tmp_path):
    write_json(tmp_path)
    refused(
        r"nowhere.jinja: no such file; set tokenizer.chat_template",
        tmp_path,
        chat_template=tmp_path / "nowhere.jinja",
    )
    (tmp_path / "mine.jinja").write_text("mine")
    assert load_tokenizer(tmp_path, tmp_path / "mine.jinja").chat_template == "mine"


def test_template_of_the_folder(tmp_path):
    write_json(tmp_path, template=None)
    assert load_tokenizer(tmp_path).chat_template is None
    with pytest.raises(
        DataError, match="the tokenizer has no chat template; set tokenizer.chat_template"
    ):
        render(load_tokenizer(tmp_path).render_chats, [], True)
    write_json(
        tmp_path,
        chat_template=[{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}],
    )
    assert load_tokenizer(tmp_path).chat_template == "b"
    (tmp_path / "chat_template.jinja").write_text("c")
    assert load_tokenizer(tmp_path).chat_template == "c"


def test_roles_spelled_as_objects_and_in_the_map(tmp_path):
    write_json(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "special_tokens_map.json").write_text(
        '{"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|bos|>"}'
    )
    made = load_tokenizer(tmp_path)
    assert (
        made.get_token_bytes(made.eos_id) == b"<|im_end|>"
        and made.get_token_bytes(made.bos_id) == b"<|bos|>"
    )
    assert made.pad_id is None


def test_ids_of_config_json_where_no_token_is_named(tmp_path):
    write_json(tmp_path, template=None)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"eos_token_id": [2, 3], "bos_token_id": 0}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1}')
    made = load_tokenizer(tmp_path)
    assert (made.bos_id, made.eos_id, made.stop_ids) == (0, 1, {1, 2, 3})


def test_stop_ids_hold_the_end_of_turn(tmp_path):
    made = load_tokenizer(write_json(tmp_path, eos_token="<|pad|>"))
    assert made.stop_ids == {made.eos_id, made.encode("<|im_end|>", allow_special=True)[0]}
    strange = load_tokenizer(write_json(tmp_path / "b", template="{{ raise_exception('no') }}"))
    assert strange.stop_ids == {strange.eos_id}


@pytest.mark.parametrize(
    ("part", "value", "line"),
    [
        (
            "normalizer",
            {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
            "tokenizers library gave up on it",
        ),
        ("normalizer", {"type": "x"}, "found no tokenizer"),
        ("vocab", 2**31, "found the id 2147483648, expected ids below 134217728"),
        ("vocab", 2**40, "found no tokenizer"),
        ("added_tokens", {"id": 2**31, "content": "<z>", "special": True}, "found the added token"),
        (
            "added_tokens",
            {"id": -1, "content": "<z>", "special": True},
            "found (no tokenizer|the added token)",
        ),
    ],
)
def test_a_hostile_tokenizer_json(part, value, line, tmp_path):
    write_json(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    if part == "vocab":
        content["model"]["vocab"]["zz"] = value
    elif part == "added_tokens":
        full = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        content["added_tokens"].append(full | value)
    else:
        content[part] = value
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    refused(line, tmp_path)


TURNS = "{% for m in messages %}{{ '<|im_start|>' + m.content + END }}{% endfor %}"


def test_bytes_of_pieces_follow_the_steps_of_a_sequence_of_decoders():
    model = models.BPE(
        vocab={"<unk>": 0, "<0x0A>": 1, "▁a": 2}, merges=[], unk_token="<unk>", byte_fallback=True
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    vocabulary = JsonVocabulary(Path("tokenizer.json"), tokenizer.to_str().encode())
    assert vocabulary.get_token_bytes(1) == b"\n"
    assert vocabulary.get_token_bytes(2) == b" a"


def test_how_a_turn_ends(tmp_path):
    """What the template writes behind an answer, up to the last special token that is no part of
    what follows.
    """
    ends = {
        "'<|im_end|>\n'": ("<|im_end|>", "\n", ""),
        "'<|pad|><|im_end|>'": ("<|im_end|>", "", ""),  # Command R7B
        "'<|pad|>\n' + (eos_token if loop.last else '')": ("<|pad|>", "\n<|im_end|>", ""),  # Phi-3
        "('<|im_end|>' if loop.last else '<|pad|>')": ("<|im_end|>", "", ""),  # gpt-oss
        # Llama 3, which always asks for an answer
        "'<|im_end|>' + ('<|im_start|>assistant' if loop.last else '')":
            ("<|im_end|>", "<|im_start|>assistant", ""),
        "''": ("", "", "<|im_start|>"),  # GLM-4.5
    }  # fmt: skip
    for number, (written, expected) in enumerate(ends.items()):
        made = load_tokenizer(
            write_json(tmp_path / str(number), template=TURNS.replace("END", written))
        )
        found = made.turn_end
        assert (found.token, found.closing, found.next_turn) == expected, written
        assert made.encode(found.token or found.next_turn, allow_special=True)[0] in made.stop_ids
    assert (
        load_tokenizer(
            write_json(tmp_path / "none", template="{{ messages[0].content }}")
        ).turn_end.token
        == ""
    )
