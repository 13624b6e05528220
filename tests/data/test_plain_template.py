"""The plain template's Jinja is its Python: the same text, and an objection where training refuses
a sample.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Environment, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from recipe_lib.config.schema import DataConfig, FullFinetuneConfig, SourceConfig, TokenizerConfig
from recipe_lib.data import find_trained_template
from recipe_lib.data.chat_templates import (
    build_plain_jinja,
    get_bos_text,
    get_eos_text,
    render_plain,
)
from recipe_lib.data.label_masks import Encoder
from recipe_lib.data.samples import Conversation
from recipe_lib.tokenizers import Tokenizer
from recipe_lib.tokenizers.chat_template import ChatTemplate
from tests.data.masks_cases import list_trained_texts


def write(messages: list[dict[str, Any]], eos: str = "</s>", bos: str = "", **more: Any) -> str:
    """As transformers renders a template."""
    environment: Environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(build_plain_jinja(eos, bos)).render(messages=messages, **more)


MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.text()}
)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    st.lists(MESSAGE, max_size=5),
    st.sampled_from(["</s>", "'\"\\", "<|im_end|>", "▁🦙"]),
    st.sampled_from(["", "<s>", "<EOS>"]),
)
def test_the_same_text(messages: list[dict[str, Any]], eos: str, bos: str) -> None:
    assert write(messages, eos, bos) == render_plain(messages, eos, bos)
    asked = write(messages, eos, bos, add_generation_prompt=True)
    assert asked == render_plain(messages, eos, bos, prompt=True)
    assert asked.endswith("Assistant:\n")


def test_contents_and_roles_as_the_reader_takes_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert write(
        [{"role": "developer", "content": "s"}, {"role": "user", "content": parts}]
    ) == write([{"role": "system", "content": "s"}, {"role": "user", "content": "ab"}])


TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {}}}


@pytest.mark.parametrize(
    ("messages", "tools", "said"),
    [
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}],
            None,
            "no tool calls",
        ),
        ([{"role": "critic", "content": "a"}], None, "unknown role"),
        ([{"role": "user", "content": None}], None, "content of text"),
        ([{"role": "user"}], None, "content of text"),
        ([{"role": "user", "content": [{"type": "image"}]}], None, "text alone"),
        ([{"role": "user", "content": "a"}], [TOOL], "does not show tools"),
    ],
)
def test_what_it_refuses(messages: list[dict[str, Any]], tools: Any, said: str) -> None:
    with pytest.raises(TemplateError, match=said):
        write(messages, tools=tools)


def test_a_tool_that_is_written_may_be_there() -> None:
    messages = [{"role": "system", "content": "Call look_up."}, {"role": "user", "content": "a"}]
    assert write(messages, tools=[TOOL]) == write(messages)


TURNS = {
    "in turn": ["system the cat", "user sat", "assistant on the mat", "user and", "assistant log"],
    "the assistant begins": ["assistant the cat", "user sat", "assistant on the mat"],
    "the user goes on": ["user the cat", "user sat", "assistant on the mat"],
    "the assistant goes on": ["user the cat", "assistant sat", "assistant on the mat"],
    "the system between": [
        "user the cat",
        "assistant sat",
        "system on",
        "user the mat",
        "system and",
        "assistant log",
    ],
    "two of the system": [
        "system the cat",
        "system sat",
        "assistant on the mat",
        "tool and",
        "user log",
        "assistant a",
    ],
}


@pytest.mark.parametrize("name", TURNS)
def test_training_goes_on_with_its_jinja(
    name: str, made: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer with the exported template encodes and masks as the plain template does; each
    answer is trained, from the prompt that it is generated from, but for one that begins.
    """
    messages = [
        dict(zip(("role", "content"), turn.split(" ", 1), strict=True)) for turn in TURNS[name]
    ]
    plain = Encoder(made, "plain")
    whole = plain.encode(Conversation(messages))
    answers = [n for n, message in enumerate(messages) if message["role"] == "assistant" and n]
    assert [text.strip() for text in list_trained_texts(plain, whole)] == [
        messages[n]["content"] + get_eos_text(plain.tokenizer) for n in answers
    ]
    for number, (start, _) in zip(answers, whole.answers, strict=True):
        assert plain.encode_prompt(messages[:number]) == whole.ids[:start]
    assert len(plain.encode_sample(Conversation(messages)).sequences) == 1
    template = build_plain_jinja(get_eos_text(plain.tokenizer), get_bos_text(plain.tokenizer, True))
    monkeypatch.setattr(made, "chat_template", template)
    monkeypatch.setattr(made, "_template", ChatTemplate(template, "own", {}))
    chat = Encoder(made, "auto")
    assert chat.template == "chat"
    expected, found = plain.encode(Conversation(messages)), chat.encode(Conversation(messages))
    assert (found.ids, found.trained) == (expected.ids, expected.trained)
    assert chat.encode_prompt(messages[:-1]) == plain.encode_prompt(messages[:-1])


def config(
    template: str, form: str = "messages", file: str | None = None, *others: str
) -> FullFinetuneConfig:
    sources = [SourceConfig("rows.jsonl", format=name) for name in (form, *others)]
    return FullFinetuneConfig(
        data=DataConfig(sources=sources, template=template),
        tokenizer=TokenizerConfig(chat_template=file),
    )


def test_which_template_was_trained(made: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    own, plain = made.chat_template, Encoder(made, "plain")
    jinja = build_plain_jinja(get_eos_text(plain.tokenizer), get_bos_text(plain.tokenizer, True))
    assert find_trained_template(config("plain"), made) == jinja
    assert find_trained_template(config("auto"), made) == (None if own else jinja)
    assert find_trained_template(config("auto", "messages", "own.jinja"), made) == (own or jinja)
    assert find_trained_template(config("plain", "text"), made) is None
    assert find_trained_template(config("plain", "text", None, "prompt_completion"), made) is None
    assert (
        find_trained_template(config("plain", "text", None, "prompt_completion"), made, chats=1)
        == jinja
    )
    assert find_trained_template(config("plain", "text", None, "preference"), made) == jinja
