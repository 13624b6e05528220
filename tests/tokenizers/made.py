"""Train and write tiny tokenizers of every kind: tokenizer.json, sentencepiece and tiktoken.

Each `write_...` returns the folder, which `recipe_lib.tokenizers.load_tokenizer` reads.
"""

import base64
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from recipe_lib.errors import DataError
from recipe_lib.tokenizers import RenderRequest

# What tokenizers are trained on.
TEXTS = ["the cat sat on the mat and the dog sat on the log"] * 20 + [
    "a user asks, an assistant answers: yes or no."
] * 20

CHATML = (  # a chat template
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Texts that tokenizers get wrong: white space, normalization, bytes, special tokens as text.
NASTY = [
    "", " ", "  ", "   a", "a  b", " leading", "trailing ", "\n", "\n\n\n", " \n \n", "\t tab\tinside ", "a\r\nb",
    "Hello, world! It's 12345.678", "héllo naïve ÅÄÖ ß", "漢字とかな交じり文、中文。", "한국어 텍스트", "العربية עברית",
    "😀 👩‍👩‍👧‍👦 🇫🇮 e\u0301", "\x00\x01\x7f", "\u200b\u2028\ufeff", "𝕬𝖇 𐍈", "def f(x):\n    return x  # ok\n",
    "a" * 300,
    "<s> </s> <|eot_id|> <|im_end|> <bos> [INST] <unk> <pad>", "< | im_end | >", "�", "0 00 000 0000 1234567",
]  # fmt: skip


def write_json(folder: Path, *, template: str | None = CHATML, **config: object) -> Path:
    """Write a byte-level BPE with ChatML tokens as tokenizer.json; return its folder.

    template: chat template; None: none. config: more keys of tokenizer_config.json.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|bos|>", "<|im_start|>", "<|im_end|>", "<|pad|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"} | config
    if template is not None:
        content.setdefault("chat_template", template)
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


def write_sentencepiece(folder: Path, name: str = "tokenizer.model", **options: object) -> Path:
    """Write a sentencepiece BPE with byte fallback, like Llama 2's; return its folder.

    name: of the file. options: of sentencepiece's trainer.
    """
    model = io.BytesIO()
    settings = {
        "vocab_size": 320, "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False, "hard_vocab_limit": False, "minloglevel": 2,
    } | options  # fmt: skip
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, **settings
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(model.getvalue())
    return folder


def write_tiktoken(
    folder: Path, merges: tuple[bytes, ...] = (b"th", b"the", b" a", b"at", b" the")
) -> Path:
    """Write the 256 bytes and a few merges as base64 lines, as Llama 3's; return the folder.

    Special tokens stand in tokenizer_config.json.
    """
    pieces = [bytes([byte]) for byte in range(256)] + list(merges)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [base64.b64encode(piece) + f" {rank}\n".encode() for rank, piece in enumerate(pieces)]
    (folder / "tokenizer.model").write_bytes(b"".join(lines))
    special_tokens = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    added_tokens = {
        str(token_id): {"content": text, "special": True}
        for token_id, text in enumerate(special_tokens, len(pieces))
    }
    config = {
        "added_tokens_decoder": added_tokens,
        "bos_token": special_tokens[0],
        "eos_token": special_tokens[1],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def render(
    render_many: Callable[..., Sequence[str | DataError]],
    messages: Sequence[Any],
    prompt: bool,
    tools: Any = None,
) -> str:
    """Return the rendering of a conversation; raise the template's DataError, if any.

    render_many: of a chat template, renders a conversation for several requests. prompt: with the
    opening of the answer that follows.
    """
    (text,) = render_many(messages, [RenderRequest(len(messages), prompt)], tools)
    if isinstance(text, DataError):
        raise text
    return text
