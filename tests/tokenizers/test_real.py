"""Real tokenizers give the ids that the reference libraries give, and texts come back as they
were.
"""

import base64
import json
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
import tokenizers

from recipe_lib.tokenizers import StreamDecoder, load_tokenizer
from tests.selection import mark_slow_except
from tests.tokenizers.made import NASTY

PIECES = [
    "llama2/tokenizer.model",
    "mistral/tokenizer.model.v1",
    "mistral/mistral_instruct_tokenizer_240323.model.v3",
]
JSONS = ["llama3_1", "qwen2_5", "gpt2", "gemma2", "smollm2", "mistral"]
SPECIALS = {
    "llama3_1": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n hi  there<|eot_id|>",
    "qwen2_5": "<|im_start|>user\nhi <tool_call>x</tool_call><|im_end|>\n",
    "gpt2": "one<|endoftext|> two",
    "gemma2": "<bos><start_of_turn>user\n  hi\n\n\nthere<end_of_turn>\n",
    "smollm2": "<|im_start|>user\nhi<|im_end|>\n",
    "mistral": "<s> [INST] hi [/INST] there</s>  [INST]",
}


@pytest.mark.parametrize("name", PIECES)
def test_sentencepiece_ids(name, real_folder):
    path = real_folder(name.split("/")[0]) / name.split("/")[1]
    ours, reference = (
        load_tokenizer(path),
        sentencepiece.SentencePieceProcessor(model_file=str(path)),
    )
    assert ours.vocab_size == len(reference)
    for text in NASTY:
        ids = ours.encode(text)
        assert ids == reference.encode(text), text
        assert ours.decode(ids) == reference.decode(ids) == text


def test_stories_collapse_spaces_as_sentencepiece_does(realdata):
    path = realdata / "stories260K-hf"
    ours = load_tokenizer(path)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(path / "tokenizer.model"))
    for text in [*NASTY, "Once upon a  time,   there"]:
        assert ours.encode(text) == reference.encode(text), text
        assert ours.decode(ours.encode(text)) == reference.decode(reference.encode(text)), text
    assert (ours.bos_id, ours.eos_id, ours.stop_ids) == (1, 2, {1, 2})
    assert ours.encode("Once", add_bos=True)[0] == 1


def test_tiktoken_ids_with_and_without_a_config(real_folder, tmp_path):
    path = real_folder("llama3") / "tokenizer.model"
    lines = [line.split() for line in path.read_bytes().splitlines()]
    ranks = {base64.b64decode(piece): int(rank) for piece, rank in lines}
    pattern = json.loads((real_folder("llama3_1") / "tokenizer.json").read_text())["pre_tokenizer"][
        "pretokenizers"
    ]
    specials = {"<|begin_of_text|>": 128000, "<|eot_id|>": 128009, "<|python_tag|>": 128010}
    reference = tiktoken.Encoding(
        "x", pat_str=pattern[0]["pattern"]["Regex"], mergeable_ranks=ranks, special_tokens=specials
    )
    (tmp_path / "tokenizer.model").write_bytes(path.read_bytes())
    for ours in (load_tokenizer(path.parent), load_tokenizer(tmp_path)):
        assert ours.vocab_size == 128256
        for text in NASTY:
            assert ours.encode(text) == reference.encode_ordinary(text), text
            assert ours.decode(ours.encode(text)) == text
        chat = "<|begin_of_text|>hi  there<|eot_id|>"
        assert ours.encode(chat, allow_special=True) == reference.encode(
            chat, allowed_special="all"
        )
    assert ours.encode("<|python_tag|>", allow_special=True) == [128010]
    assert ours.stop_ids == {128001, 128008, 128009}
    config = json.loads((real_folder("llama3_2") / "tokenizer_config.json").read_text())[
        "added_tokens_decoder"
    ]
    for number, entry in config.items():
        assert ours.encode(entry["content"], allow_special=True) == [int(number)]


def test_tiktoken_reads_more_white_space_than_its_library_can(real):
    ours = real("llama3")
    text = "a" + " " * 1_200_000 + "b"
    assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize("name", mark_slow_except(JSONS, ["gpt2"]))
def test_tokenizer_json_ids(name, real, real_folder):
    path = real_folder(name) / "tokenizer.json"
    ours, reference = real(f"{name}/tokenizer.json"), tokenizers.Tokenizer.from_file(str(path))
    assert ours.vocab_size == reference.get_vocab_size()
    assert (
        ours.encode(SPECIALS[name], allow_special=True)
        == reference.encode(SPECIALS[name], add_special_tokens=False).ids
    )
    reference.encode_special_tokens = True
    for text in [*NASTY, SPECIALS[name]]:
        expected = reference.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == expected, text
        assert ours.decode(expected) == reference.decode(expected, skip_special_tokens=False), text
        if (
            name != "qwen2_5" or text.isascii()
        ):  # Qwen's tokenizer writes composed letters anew (NFC)
            assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize("name", mark_slow_except(["llama3_1", "gpt2", "smollm2"], ["smollm2"]))
def test_ids_agree_with_transformers(name, real, real_folder):
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(str(real_folder(name)))
    ours = real(f"{name}/tokenizer.json")
    assert ours.encode(SPECIALS[name], allow_special=True) == reference.encode(
        SPECIALS[name], add_special_tokens=False
    )
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == tuple(
        getattr(reference, f"{role}_token_id") for role in ("bos", "eos", "pad")
    )
    if name != "gpt2":  # transformers puts no BOS before GPT-2's text either, but has no say on it
        expected = reference.encode("Hello there")
        assert ours.encode("Hello there", add_bos=ours.add_bos_by_default) == expected


@pytest.mark.parametrize(
    "name", mark_slow_except([*PIECES, *JSONS, "llama3"], ["gpt2", "llama3_1"])
)
def test_stream_emits_what_decoding_gives(name, real):
    ours = real(name if name in PIECES or name == "llama3" else f"{name}/tokenizer.json")
    for text in NASTY:
        ids = ours.encode(text, add_bos=True)
        decoder = StreamDecoder(ours)
        parts = [decoder.push(i) for i in ids]
        assert "".join(parts) + decoder.finish() == ours.decode(ids, skip_special=True)
        if "�" not in text:
            assert not any("�" in part for part in parts), "half a character was emitted"
        for cut in range(1, len(ids)):  # going on from a prompt gives the rest, spaces included
            if ours.decode(ids[:cut]).endswith("�"):
                continue
            rest = StreamDecoder(ours, prompt=ids[:cut])
            said = "".join(rest.push(i) for i in ids[cut:]) + rest.finish()
            assert ours.decode(ids[:cut], skip_special=True) + said == ours.decode(
                ids, skip_special=True
            )


def test_special_token_in_ordinary_text_stays_text(real):
    for name, text in SPECIALS.items():
        ours = real(f"{name}/tokenizer.json")
        special = [t for t in ours.special_texts if t in text]
        assert special
        assert not any(ours.is_special(i) for i in ours.encode(text))
        assert any(ours.is_special(i) for i in ours.encode(text, allow_special=True))
    mistral = real("mistral/mistral_instruct_tokenizer_240323.model.v3")
    assert mistral.encode("[INST]", allow_special=True) == [
        3
    ]  # a control piece, though no config lists it
    assert mistral.decode(mistral.encode("[INST]")) == "[INST]" and 3 not in mistral.encode(
        "[INST]"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "stops"),
    [
        ("gemma-2b-it", {1, 107}),  # 107, the end of a turn, is in the chat template alone
        ("llama-3.2-1b-instruct", {128001, 128008, 128009}),
    ],
)
def test_stop_ids_of_real_layouts(layout, stops, realdata, real_folder, tmp_path):
    for file in (realdata / "hf-layouts" / layout).glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    source = real_folder("gemma2" if "gemma" in layout else "llama3_1")
    (tmp_path / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    assert load_tokenizer(tmp_path).stop_ids == stops


def test_phi_tokens_beside_a_sentencepiece_model(realdata, real_folder, tmp_path):
    """Phi-3 puts its chat tokens behind Llama 2's pieces; they swallow the white space that
    follows.
    """
    for file in (realdata / "hf-layouts" / "phi-3-mini-merge").glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.model").write_bytes(
        (real_folder("llama2") / "tokenizer.model").read_bytes()
    )
    ours = load_tokenizer(tmp_path)
    assert ours.encode("<|user|>\nhi<|end|>\n<|assistant|>", allow_special=True)[0] == 32010
    assert ours.encode("<|end|>", allow_special=True) == [32007]
    assert ours.vocab_size == 32011 and ours.eos_id == 32000 and not ours.add_bos_by_default


def test_gemma2_text_tokens_are_found_in_ordinary_text(real):
    """Added tokens that are not special (runs of line ends) belong to the vocabulary."""
    ours = real("gemma2/tokenizer.json")
    assert len(ours.encode("\n" * 5)) == 1 and ours.decode(ours.encode("\n" * 5)) == "\n" * 5


def test_path_objects_and_texts_are_both_paths(real_folder):
    path: Path = real_folder("gpt2")
    assert load_tokenizer(str(path)).vocab_size == load_tokenizer(path).vocab_size == 50257
