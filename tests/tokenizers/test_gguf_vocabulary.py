"""Tokenizers in GGUF files: in llama.cpp they give the tokenizer's own ids; without it, what the
file says.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from recipe_lib.checkpoint.gguf.gguf_adapter import make_vocabulary_fields
from recipe_lib.checkpoint.gguf.gguf_file import write_gguf
from recipe_lib.checkpoint.gguf.gguf_vocabulary import GgufVocabulary, PieceKind, read_vocabulary
from recipe_lib.errors import CheckpointError
from recipe_lib.tokenizers import load_tokenizer
from tests.checkpoint.gguf.made_models import import_llama_cpp, tokenize_with_llama
from tests.selection import mark_slow_except
from tests.tokenizers.made import NASTY, write_json, write_sentencepiece, write_tiktoken

PRE = {"gpt2": "gpt-2", "llama3_1": "llama-bpe", "qwen2_5": "qwen2", "smollm2": "smollm"}
TEXTS = [
    *NASTY,
    "I've been told he's there, 'RE you sure? We'Ve a'lL 3.3 33333 =======",
    "我想在apple工作1314151天～ нещо на Български",
    "  two  spaces,\ta tab\n\nand lines \n of 1234567890 digits ",
]


@pytest.mark.parametrize(
    "name", mark_slow_except([*PRE, "llama2", "mistral", "gemma2"], ["gpt2", "llama2"])
)
def test_tokens_are_those_of_the_tokenizer(
    name: str, real_folder: Callable[[str], Path], tmp_path: Path
):
    """By the tokenizers library, or sentencepiece, whichever the folder has."""
    import_llama_cpp()
    folder, file = real_folder(name), tmp_path / "vocabulary.gguf"
    tokenizer = load_tokenizer(folder)
    numbers = {
        "context_length": 64,
        "embedding_length": 64,
        "block_count": 1,
        "feed_forward_length": 64,
    }
    numbers |= {"attention.head_count": 1, "attention.layer_norm_rms_epsilon": 1e-5}
    vocabulary = read_vocabulary(folder, tokenizer.vocab_size)
    write_gguf(
        file,
        "llama",
        {f"llama.{key}": value for key, value in numbers.items()}
        | make_vocabulary_fields(vocabulary),
        [],
    )
    # llama.cpp does not normalize as Qwen's NFC does, and takes Qwen's ordinary piece `</s>` for a
    # special token.
    unlike = ("\u0301", "</s>") if name == "qwen2_5" else ()
    texts = [text for text in TEXTS if not any(part in text for part in unlike)]
    if (folder / "tokenizer.json").is_file():
        import tokenizers

        theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        expected = [theirs.encode(text, add_special_tokens=False).ids for text in texts]
        assert tokenize_with_llama(file, texts, special=True) == expected
    else:
        import sentencepiece

        theirs = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        assert tokenize_with_llama(file, texts, special=False) == [
            theirs.encode(text) for text in texts
        ]


@pytest.mark.parametrize("name", mark_slow_except(["gpt2", "smollm2"], ["gpt2"]))
def test_a_byte_level_tokenizer_keeps_pieces_and_merges(
    name: str, real_folder: Callable[[str], Path]
):
    folder = real_folder(name)
    content = json.loads((folder / "tokenizer.json").read_text())
    size = load_tokenizer(folder).vocab_size + 3
    found = read_vocabulary(folder, size)
    assert (found.model, found.pre, found.scores) == ("gpt2", PRE[name], None)
    for piece, at in content["model"]["vocab"].items():
        if found.kinds[at] == PieceKind.NORMAL:
            assert found.tokens[at].decode() == piece
    for token in content["added_tokens"]:
        assert found.tokens[token["id"]].decode() == token["content"]
        assert found.kinds[token["id"]] == (
            PieceKind.CONTROL if token["special"] else PieceKind.USER_DEFINED
        )
    assert found.kinds[-3:] == [PieceKind.UNUSED] * 3 and len(found.tokens) == size
    joined = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]
    ]
    assert found.merges == joined


def test_scores_are_sentencepieces_own(real_folder: Callable[[str], Path]):
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(
        model_file=str(real_folder("llama2") / "tokenizer.model")
    )
    found = read_vocabulary(real_folder("llama2"), 32000)
    assert (found.model, found.pre, found.merges, found.add_bos, found.add_space) == (
        "llama",
        "default",
        None,
        True,
        True,
    )
    assert found.ids == {"bos": 1, "eos": 2, "unknown": 0}
    assert found.tokens[:6] == [b"<unk>", b"<s>", b"</s>", b"<0x00>", b"<0x01>", b"<0x02>"]
    assert found.kinds[:5] == [2, 3, 3, 6, 6] and found.kinds[300] == 1
    assert found.scores is not None and found.scores[259:] == [
        model.get_score(at) for at in range(259, 32000)
    ]


def test_a_converted_sentencepiece_orders_pieces_as_its_scores_do(
    real_folder: Callable[[str], Path], tmp_path: Path
):
    """Mistral's tokenizer.json by itself: merged pieces rank as in the sentencepiece model it was
    made of.
    """
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(
        model_file=str(real_folder("mistral") / "tokenizer.model.v1")
    )
    shutil.copy(real_folder("mistral") / "tokenizer.json", tmp_path)
    found = read_vocabulary(tmp_path, 32000)
    assert found.model == "llama" and found.scores is not None
    assert [token.decode() for token in found.tokens[3:]] == [
        model.id_to_piece(at) for at in range(3, 32000)
    ]
    merged = [at for at in range(259, 32000) if len(model.id_to_piece(at)) > 1]
    by_merges = sorted(merged, key=lambda at: -found.scores[at])
    assert by_merges == sorted(merged, key=lambda at: -model.get_score(at))


def test_special_tokens_and_the_template(tmp_path: Path):
    found = read_vocabulary(write_json(tmp_path), 330)
    assert found.ids == {"bos": 0, "eos": 2, "padding": 3} and not found.add_bos
    assert found.template is not None and "<|im_start|>" in found.template
    fields = make_vocabulary_fields(found)
    assert (
        fields["tokenizer.ggml.eos_token_id"] == 2
        and fields["tokenizer.chat_template"] == found.template
    )
    other = read_vocabulary(write_json(tmp_path / "other", eos_token="<|pad|>"), 330)
    assert (other.ids["eos"], other.ids["eot"]) == (
        3,
        2,
    )  # the template ends answers with another token than EOS


def test_ids_without_a_row_are_left_out_and_said(tmp_path: Path):
    write_sentencepiece(tmp_path)
    (tmp_path / "added_tokens.json").write_text('{"<new>": 400, "<newer>": 330}')
    size = 360
    found = read_vocabulary(tmp_path, size)
    assert found.notes[-1] == "1 tokens of the tokenizer have no row in the model, and are left out"
    assert found.tokens[330] == b"<newer>" and len(found.tokens) == size


def refusal(folder: Path, pre: str | None = None) -> str:
    with pytest.raises(CheckpointError) as raised:
        read_vocabulary(folder, 320, pre)
    return str(raised.value)


def test_what_the_format_cannot_say_is_refused(tmp_path: Path):
    folder = write_json(tmp_path / "json")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "[a-c]+"}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ]}  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert "its pre_tokenizer is none of those known here (llama-bpe, dbrx, qwen2" in refusal(
        folder
    )
    assert read_vocabulary(folder, 320, "deepseek-llm").pre == "deepseek-llm"
    assert (
        refusal(folder, "deepseek-lm")
        == "--pre: llama.cpp has no pre-tokenizer 'deepseek-lm'; did you mean deepseek-llm?"
    )
    assert "is a sentencepiece model, which cuts no text" in refusal(
        write_sentencepiece(tmp_path / "sp"), "qwen2"
    )
    unigram = write_sentencepiece(tmp_path / "unigram", model_type="unigram")
    assert "of the kind unigram, which llama.cpp does not merge as it does" in refusal(unigram)
    assert "is a tiktoken vocabulary" in refusal(write_tiktoken(tmp_path / "tiktoken"))
    (tmp_path / "none").mkdir()
    assert str(tmp_path / "none") in refusal(tmp_path / "none")


def test_a_name_with_phi_3_in_it_is_for_its_tokenizer_alone():
    """llama.cpp looks for it in the model's name."""
    pieces = [b"<unk>", b"<s>", b"</s>", b"<|endoftext|>"]
    phi = GgufVocabulary("llama", "default", pieces, [1] * 4, strips=True)
    other = GgufVocabulary("gpt2", "gpt-2", pieces, [1] * 4)
    assert phi.choose_name("mine") == "mine (Phi-3)" and phi.choose_name("my-phi-3") == "my-phi-3"
    assert (
        other.choose_name("my-phi3-run") == "my-Phi 3-run" and other.choose_name("mine") == "mine"
    )
