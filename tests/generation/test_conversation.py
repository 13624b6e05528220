"""A conversation: what the model reads at each turn is what the template writes of the history."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from recipe_lib.errors import ConfigError
from recipe_lib.generation import sample as module
from recipe_lib.generation.sample import Chat
from recipe_lib.tokenizers import Tokenizer, load_tokenizer
from tests.generation.test_generate import load
from tests.tokenizers.made import CHATML, write_json


class Read:
    """The prompts that were read."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    found, inner = Read(), module.generate

    def generate(model: Any, spec: Any, tokens: list[int], **options: Any) -> Any:
        found.prompts.append(list(tokens))
        return inner(model, spec, tokens, **options)

    monkeypatch.setattr(module, "generate", generate)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights with a ChatML tokenizer."""
    folder = write_json(tmp_path_factory.mktemp("models") / "chat")
    config = transformers.LlamaConfig(
        vocab_size=len(transformers.AutoTokenizer.from_pretrained(folder)), hidden_size=16, intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=160, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def begin(
    folder: Path, tokenizer: Tokenizer, system: str | None = None, tokens: int = 6, **options: Any
) -> Chat:
    model, spec = load(folder)
    options = {"max_new_tokens": tokens, "stop_ids": (), "temperature": 0.0, **options}
    return Chat(model, spec, tokenizer, system, options)


@pytest.mark.parametrize("system", [None, "Be kind."])
def test_each_prompt_is_the_history_as_transformers_writes_it(
    system: str | None, folder: Path, tokenizer: Tokenizer, read: Read
) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs.chat_template == CHATML
    chat = begin(folder, tokenizer, system)
    messages = [] if system is None else [{"role": "system", "content": system}]
    for question in ("the cat sat", "  on the\tmat ", "and?"):
        answer = "".join(chat.answer(question))
        messages.append({"role": "user", "content": question})
        expected = theirs.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert read.prompts[-1] == expected
        messages.append({"role": "assistant", "content": answer})
        assert chat.messages == messages
    chat.reset()
    list(chat.answer("the dog"))
    assert len(chat.messages) == 2 + (system is not None)
    begin_again = messages[: int(system is not None)] + [{"role": "user", "content": "the dog"}]
    assert read.prompts[-1] == theirs.apply_chat_template(
        begin_again, add_generation_prompt=True, return_dict=False
    )


def test_an_answer_that_is_broken_off_stays_as_far_as_it_has_come(
    folder: Path, tokenizer: Tokenizer
) -> None:
    chat = begin(folder, tokenizer, tokens=20)
    pieces = chat.answer("the cat")
    said = ""
    while not said.strip():
        said += next(pieces)
    pieces.close()
    assert chat.messages == [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": said},
    ]
    assert chat.why_ended == ""


def test_why_an_answer_ended(folder: Path, tokenizer: Tokenizer, read: Read) -> None:
    chat = begin(folder, tokenizer, tokens=3)
    list(chat.answer("the"))
    assert chat.why_ended == "stopped after 3 tokens (--max-new-tokens)"
    chat = begin(folder, tokenizer, tokens=1000)
    list(chat.answer("the"))
    assert chat.why_ended == "all 160 positions of the model are taken"
    everything = range(len(transformers.AutoTokenizer.from_pretrained(folder)))
    chat = begin(folder, tokenizer, stop_ids=set(everything))
    assert "".join(chat.answer("the")) == "" and chat.why_ended == module.NO_ANSWER


def test_a_question_that_is_too_long_was_not_asked(
    folder: Path, tokenizer: Tokenizer, read: Read
) -> None:
    chat = begin(folder, tokenizer)
    list(chat.answer("the"))
    before = list(chat.messages)
    with pytest.raises(ConfigError, match="the conversation: .* tokens; the model takes 160"):
        list(chat.answer("the cat " * 200))
    assert chat.messages == before and len(read.prompts) == 1
    list(chat.answer("the"))
    assert len(chat.messages) == 4


def test_what_a_terminal_shows_is_gone_before_the_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So text on standard output is not drawn over."""
    happened: list[str] = []

    @contextmanager
    def phase(what: str, **_: Any) -> Iterator[None]:
        happened.append(what)
        yield
        happened.append("gone")

    def tokens() -> Iterator[int]:
        happened.append("read")
        yield 5
        happened.append("further")
        yield 6

    monkeypatch.setattr(module, "phase", phase)
    found = module.show_prompt_phase(tokens(), 1234)
    assert next(found) == 5 and happened == ["reading the prompt of 1,234 tokens", "read", "gone"]
    assert list(found) == [6]
    assert list(module.show_prompt_phase(iter(()), 1)) == []
