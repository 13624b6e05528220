"""Messages of the system anywhere in a conversation, with every real template: written and masked
as transformers renders it, or refused with the template named.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from recipe_lib.config.registry import get_registered
from recipe_lib.data.formats import build_conversation
from recipe_lib.data.label_masks import Encoder
from recipe_lib.data.samples import SampleFault
from recipe_lib.tokenizers import load_tokenizer
from tests.data.masks_cases import list_trained_texts
from tests.data.template_cases import BY_NAME, TEMPLATES, read_source, write_tokenizer
from tests.selection import mark_slow_except


def said(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in turns]


ORDERS = {
    "between two answers": said(
        ("user", "Hot?"), ("assistant", "Yes."), ("system", "Be rude."), ("user", "Dry?"), ("assistant", "No.")
    ),
    "two at the start": said(("system", "Be brief."), ("system", "Be rude."), ("user", "Hot?"), ("assistant", "Yes.")),
    "after the question": said(("user", "Hot?"), ("system", "Be rude."), ("assistant", "Yes.")),
    "at the start and after an answer": said(
        ("system", "Be brief."), ("user", "Hot?"), ("assistant", "Yes."), ("system", "Be rude."), ("user", "Dry?"),
        ("assistant", "No."),
    ),
}  # fmt: skip
# What is known by hand: the templates that write a system message anywhere.
WRITES = ("qwen2_5", "qwen3", "llama3_1", "phi3")
DATE = re.compile(r"\d\d [A-Z][a-z]+ 20\d\d|20\d\d-\d\d-\d\d")  # of today, in the prompts of some


def same(text: str, other: str) -> bool:
    """But for dates, and for white space after the end, which some templates mark with
    `generation`.
    """
    return DATE.sub("", text).rstrip() == DATE.sub("", other).rstrip()


def expected_answer(
    reference: Any, messages: list[dict[str, Any]], number: int, end: str
) -> tuple[str, str | None]:
    """(prompt, what is generated after it) by transformers' renderings; None: they do not go on
    from each other.
    """
    prompt = reference.apply_chat_template(
        messages[:number], tokenize=False, add_generation_prompt=True
    )
    written = reference.apply_chat_template(messages[: number + 1], tokenize=False)
    if not written.startswith(prompt):
        return prompt, None
    body, found, _ = written[len(prompt) :].partition(end)
    return prompt, body + end if found or end == "<|user|>" else None


@pytest.mark.parametrize(
    "name", mark_slow_except(list(BY_NAME), [*WRITES, "gemma3", "gptoss", "R1 Distill Qwen"])
)
def test_as_transformers_renders_it_or_refused(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    template = BY_NAME[name]
    folder = write_tokenizer(tmp_path / "a", template, read_source(template))
    reference = transformers.AutoTokenizer.from_pretrained(str(folder))
    tokenizer = load_tokenizer(folder)
    encoder, outcomes = Encoder(tokenizer, "auto"), []
    for messages in ORDERS.values():
        try:
            whole = reference.apply_chat_template(messages, tokenize=False)
        except TemplateError:
            outcomes.append("refused")
            with pytest.raises(
                SampleFault,
                match=r"tokenizer_config\.json: chat_template: the chat template failed",
            ):
                encoder.encode_sample(build_conversation(messages))
            continue
        if any(message["content"] not in whole for message in messages):
            outcomes.append("left out")
            with pytest.raises(
                SampleFault,
                match="found a system message that the chat template does not write, exp",
            ):
                encoder.encode_sample(build_conversation(messages))
            continue
        outcomes.append("written")
        sequences = encoder.encode_sample(build_conversation(messages)).sequences
        numbers = [
            number for number, message in enumerate(messages) if message["role"] == "assistant"
        ]
        found = [text for sequence in sequences for text in list_trained_texts(encoder, sequence)]
        assert len(found) == len(numbers)
        at = 0
        for sequence in sequences:
            at += len(list_trained_texts(encoder, sequence))
            number = numbers[at - 1]  # of the answer that the sequence ends with
            prompt, answer = expected_answer(reference, messages, number, template.end)
            if answer is not None:
                assert same(tokenizer.decode(sequence.ids), prompt + answer)
        for number, text in zip(numbers, found, strict=True):
            _, answer = expected_answer(reference, messages, number, template.end)
            assert same(text, answer) if answer is not None else messages[number]["content"] in text
            assert not re.search("Hot|Dry|Be ", text)
    assert name not in WRITES or outcomes == ["written"] * 4


def test_the_line_of_one_that_is_left_out(tmp_path: Path) -> None:
    """Of a template that reads no system message but the first."""
    first = "{% if messages[0].role == 'system' %}{{ messages[0].content }}<|im_end|>{% endif %}"
    turns = "{% for m in messages if m.role != 'system' %}{{ m.content }}<|im_end|>{% endfor %}"
    folder = write_tokenizer(tmp_path, TEMPLATES[0], first + turns)
    encoder = Encoder(load_tokenizer(folder), "auto")
    row = {"messages": ORDERS["at the start and after an answer"]}
    line = (
        ".messages[3]: found a system message that the chat template does not write, expected one"
        " at most, as the first message; set tokenizer.chat_template to one that writes others"
    )
    with pytest.raises(SampleFault, match=re.escape(line)):
        encoder.encode_sample(get_registered("data.format", "messages")(row))
    assert encoder.encode_sample(
        get_registered("data.format", "messages")({"messages": row["messages"][:3]})
    ).sequences


def test_a_column_and_a_turn_of_the_system() -> None:
    row = {
        "system": "system",
        "conversations": [{"from": who, "value": who} for who in ("system", "human", "gpt")],
    }
    read = get_registered("data.format", "sharegpt")
    sample = read(row)
    assert [message["role"] for message in sample.messages] == ["system", "user", "assistant"]
    assert [place.path for place in sample.places.messages] == [
        f".conversations[{n}]" for n in range(3)
    ]
    with pytest.raises(
        SampleFault,
        match=r"^.system: found text, and a system message among the messages that diff",
    ):
        read(row | {"system": "A"})
    sample = read({"system": "A", "conversations": row["conversations"][1:]})
    assert [place.content for place in sample.places.messages] == [
        ".system",
        *(f".conversations[{n}].value" for n in (0, 1)),
    ]
