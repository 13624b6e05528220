"""Which messages the loss counts: by role, by the message's own word, and what a cut leaves of
them.
"""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe_lib.config.registry import get_registered
from recipe_lib.data.formats import build_conversation
from recipe_lib.data.label_masks import Encoded, Encoder
from recipe_lib.data.samples import Conversation, Preference, SampleFault
from recipe_lib.errors import DataError
from recipe_lib.tokenizers import load_tokenizer
from tests.data.masks_cases import list_trained_texts
from tests.tokenizers.made import render, write_json

MESSAGES = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"},
    {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]  # fmt: skip
END = "<|im_end|>"


def trained(
    tokenizer: Any,
    train_on: str | list[str],
    messages: list[dict[str, Any]],
    template: str = "auto",
):
    encoder = Encoder(tokenizer, template, train_on)
    return list_trained_texts(encoder, encoder.encode(Conversation(messages)))


def with_train(**flags: bool) -> list[dict[str, Any]]:
    """The messages, some with `train`: _0=False is the first."""
    return [
        message | ({"train": flags[f"_{n}"]} if f"_{n}" in flags else {})
        for n, message in enumerate(MESSAGES)
    ]


def test_by_role(chatml):
    assert trained(chatml, "assistant", MESSAGES) == ["Hello." + END, "4" + END]
    assert trained(chatml, "last", MESSAGES) == ["4" + END]
    assert trained(chatml, ["user"], MESSAGES) == ["Hi!" + END, "2+2?" + END]
    assert trained(chatml, ["system", "assistant"], MESSAGES) == [
        "Be brief." + END,
        "Hello." + END,
        "4" + END,
    ]
    assert trained(chatml, ["assistant"], MESSAGES) == trained(chatml, "assistant", MESSAGES)
    (everything,) = trained(chatml, "all", MESSAGES)
    assert everything == render(chatml.render_chats, MESSAGES, False).removeprefix("<|im_start|>")


def said(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in turns]


OUT_OF_TURN = {
    "the assistant begins": (
        said(("assistant", "Hello."), ("user", "Hi!"), ("assistant", "4")),
        ["4"],
    ),
    "with a system": (
        said(("system", "s"), ("assistant", "Hello."), ("user", "Hi!"), ("assistant", "4")),
        ["Hello.", "4"],
    ),
    "the user goes on": (said(("user", "Hi!"), ("user", "2+2?"), ("assistant", "4")), ["4"]),
    "the assistant goes on": (
        said(("user", "Hi!"), ("assistant", "Hello."), ("assistant", "4")),
        ["Hello.", "4"],
    ),
}


@pytest.mark.parametrize("name", OUT_OF_TURN)
def test_out_of_turn_where_the_template_writes_it(name, chatml, plain, tmp_path):
    """Every answer that a prompt asks for is a label, whole, and the text is the template's own."""
    messages, answers = OUT_OF_TURN[name]
    assert trained(chatml, "assistant", messages) == [answer + END for answer in answers]
    encoder = Encoder(chatml, "auto")
    text = chatml.decode(encoder.encode(build_conversation(messages)).ids)
    assert text.strip() == render(chatml.render_chats, messages, False).strip()
    assert trained(plain, "assistant", messages) == [answer + END for answer in answers]
    strict = (
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{"
        " raise_exception('turns') }}"
    )
    strict += "{% endif %}{{ m['content'] + '<|im_end|>' }}{% endfor %}"
    with pytest.raises(SampleFault, match="the chat template failed"):
        trained(
            load_tokenizer(write_json(tmp_path / "strict", template=strict)), "assistant", messages
        )


def test_a_message_has_the_last_word(chatml):
    assert trained(chatml, "assistant", with_train(_2=False)) == ["4" + END]
    assert trained(chatml, "assistant", with_train(_1=True, _4=False)) == [
        "Hi!" + END,
        "Hello." + END,
    ]
    assert trained(chatml, "last", with_train(_2=True)) == ["Hello." + END, "4" + END]
    assert trained(chatml, ["user"], with_train(_1=False)) == ["2+2?" + END]
    first, second = trained(chatml, "all", with_train(_3=False))
    assert (
        first.endswith("<|im_start|>user\n") and second == "\n<|im_start|>assistant\n4<|im_end|>\n"
    )
    with pytest.raises(
        SampleFault, match="found none of 5 messages to be trained, expected one that data.train_on"
    ):
        trained(chatml, "last", with_train(_4=False))
    with pytest.raises(
        SampleFault,
        match=r"message 2 \(the first is 0\): .train: found 'no', expected true or false",
    ):
        trained(chatml, "last", with_train(_2="no"))


def test_the_template_never_sees_the_switch(tmp_path):
    source = "{% for m in messages %}{{ m | tojson }}{{ '<|im_end|>' }}{% endfor %}"
    tokenizer = load_tokenizer(write_json(tmp_path, template=source))
    encoded = Encoder(tokenizer, "auto").encode(Conversation(with_train(_2=False)[1:]))
    assert "train" not in tokenizer.decode(encoded.ids)


def test_the_plain_template_trains_other_roles_without_an_end(plain):
    assert trained(plain, ["user"], MESSAGES) == ["Hi!", "2+2?"]
    assert trained(plain, ["system", "assistant"], MESSAGES) == [
        "Be brief.",
        "Hello." + END,
        "4" + END,
    ]


def test_tool_results_that_share_a_turn(real_folder):
    """Qwen2.5 writes two results into one turn: only the second has an end."""
    tokenizer = load_tokenizer(real_folder("qwen2_5"))
    calls = [
        {"function": {"name": "f", "arguments": '{"x": 1}'}},
        {"function": {"name": "f", "arguments": {"x": 2}}},
    ]
    messages = [
        {"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}, {"role": "assistant", "content": "ok"},
    ]  # fmt: skip
    assert trained(tokenizer, ["tool"], messages) == ["one", "two\n</tool_response><|im_end|>"]
    call, answer = trained(tokenizer, "assistant", messages)
    assert (
        '{"name": "f", "arguments": {"x": 1}}' in call
        and '{"name": "f", "arguments": {"x": 2}}' in call
    )
    assert answer == "ok<|im_end|>"


def test_a_bare_call_is_written_as_transformers_writes_it(real_folder):
    """{name, arguments} without `function`, which Qwen2.5 knows as well; arguments as text are no
    text there.
    """
    transformers = pytest.importorskip("transformers")
    folder = real_folder("qwen2_5")
    tokenizer, reference = (
        load_tokenizer(folder),
        transformers.AutoTokenizer.from_pretrained(str(folder)),
    )
    for arguments in ({"x": 1}, '{"x": 1}'):
        call = {"name": "f", "arguments": arguments}
        row = [MESSAGES[1], {"role": "assistant", "content": "", "tool_calls": [call]}]
        sample = get_registered("data.format", "messages")({"messages": row})
        given = [row[0], row[1] | {"tool_calls": [{"name": "f", "arguments": {"x": 1}}]}]
        expected = reference.apply_chat_template(given, tokenize=False)
        assert tokenizer.decode(
            Encoder(tokenizer, "auto").encode(sample).ids
        ) == expected.removesuffix("\n")


def test_arguments_that_are_no_json(chatml):
    call = {"function": {"name": "f", "arguments": "{x: 1}"}}
    messages = [MESSAGES[1], {"role": "assistant", "content": "", "tool_calls": [call]}]
    line = (
        r"message 1 (the first is 0): found the arguments '{x: 1}' of a tool call, expected a JSON"
        r" object$"
    )
    with pytest.raises(SampleFault, match=re.escape(line[:-1])):
        trained(chatml, "assistant", messages)
    nested = {"function": {"name": "f", "arguments": '{"a":' * 5000 + "1" + "}" * 5000}}
    with pytest.raises(SampleFault, match="expected a JSON object"):
        trained(
            chatml,
            "assistant",
            [MESSAGES[1], {"role": "assistant", "content": "", "tool_calls": [nested]}],
        )


def test_tools_nested_too_deep(chatml):
    nested: Any = "x"
    for _ in range(950):
        nested = [nested]
    with pytest.raises(
        SampleFault, match="found lists or objects nested too deep, expected plainer ones"
    ):
        Encoder(chatml, "auto").encode(
            Conversation(MESSAGES, [{"name": "f", "parameters": nested}])
        )


def test_what_a_template_leaves_out_is_refused(chatml, tmp_path):
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    with pytest.raises(
        SampleFault, match=r"\.tools\[0\]: found 'weather', which the chat template does not write"
    ):
        Encoder(chatml, "auto").encode(Conversation(MESSAGES, [tool]))
    source = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}<|im_end|>{% endfor %}"
    tokenizer = load_tokenizer(write_json(tmp_path, template=source))
    thought = [MESSAGES[1], {"role": "assistant", "content": "<think>x</think>4"}]
    line = (
        r"message 1 \(the first is 0\): found a content that the chat template does not write in"
        r" full "
        r"\('<think>x</think>4'\), expected"
    )
    with pytest.raises(SampleFault, match=line):
        trained(tokenizer, "assistant", thought)
    with pytest.raises(
        SampleFault, match="found a reasoning_content that the chat template does not write in full"
    ):
        trained(chatml, "assistant", [MESSAGES[1], MESSAGES[2] | {"reasoning_content": "because"}])
    twice = "{% for m in messages %}{{ m.content }}{{ m.content }}<|im_end|>{% endfor %}"
    tokenizer = load_tokenizer(write_json(tmp_path / "twice", template=twice))
    with pytest.raises(
        SampleFault,
        match=(
            r"message 0 \(the first is 0\): found that the chat template writes it 2 times .*\(user"
            r" in data"
        ),
    ):
        trained(tokenizer, ["user"], MESSAGES[1:3])


@pytest.mark.parametrize(
    ("train_on", "line"),
    [
        (
            "answer",
            (
                "data.train_on: found 'answer', expected assistant, last, all, or a list of the"
                " roles system, user"
            ),
        ),
        ("asistant", "; did you mean assistant?"),
        (["assistant", "usr"], "data.train_on: found 'usr', .*; did you mean user?"),
        (["last"], "data.train_on: found 'last', expected"),
        ([], "data.train_on: found '', expected"),
    ],
)
def test_train_on_that_says_nothing(chatml, train_on, line):
    with pytest.raises(DataError, match=line):
        Encoder(chatml, "auto", train_on)


def test_preference_trains_both_answers_and_nothing_else(chatml):
    pair = Preference(MESSAGES[:2], MESSAGES[2:], [{"role": "assistant", "content": "No."}])
    for train_on in ("assistant", "last", "all", ["user"]):
        encoder = Encoder(chatml, "auto", train_on)
        chosen, rejected = encoder.encode_answers(pair)
        assert list_trained_texts(encoder, chosen) == ["Hello." + END, "4" + END]
        assert list_trained_texts(encoder, rejected) == ["No." + END]
        prompt = encoder.prompt(pair.prompt)
        assert chosen.ids[: len(prompt)] == rejected.ids[: len(prompt)] == prompt
        assert not any(chosen.trained[: len(prompt)]) and chosen.answers[0][0] == len(prompt)
    with pytest.raises(
        SampleFault, match="found the same chosen and rejected answer, expected two that differ"
    ):
        encoder.encode_answers(Preference(MESSAGES[:2], MESSAGES[2:3], MESSAGES[2:3]))


def test_a_cut_counts_the_answers_that_lose_their_end(chatml):
    encoded = Encoder(chatml, "auto").encode(build_conversation(MESSAGES))
    (first, first_end), (second, second_end) = encoded.answers
    assert encoded.untrained_ends == 0 and second_end == len(encoded.ids)
    assert all(
        chatml.is_special(encoded.ids[end - 1]) and encoded.trained[end - 1]
        for _, end in encoded.answers
    )
    ends = {room: encoded.cut(room).untrained_ends for room in range(1, len(encoded.ids) + 1)}
    for room, lost in ends.items():
        assert lost == (first < room < first_end) + (second < room < second_end), room
    assert encoded.cut(first_end) == Encoded(
        encoded.ids[:first_end], encoded.trained[:first_end], False, ((first, first_end),)
    )
    assert (
        Encoder(chatml, "auto", "all").encode(build_conversation(MESSAGES)).cut(9).untrained_ends
        == 1
    )


CONTENT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    str.strip
) | st.sampled_from(
    [
        "<|im_end|>",
        "<|im_start|>user\n",
        "\ue000",
        "\ue001x",
        "assistant",
        "a<|im_end|>\n<|im_start|>tool\nb",
    ]
)
TURN = st.tuples(
    st.sampled_from(["user", "assistant", "tool"]), CONTENT, st.sampled_from([None, True, False])
)


@settings(max_examples=150, deadline=None)
@given(
    turns=st.lists(TURN, min_size=1, max_size=5),
    train_on=st.sampled_from(
        ["assistant", "last", ["user"], ["tool", "assistant"], ["system", "user", "assistant"]]
    ),
)
def test_any_choice_trains_exactly_these_texts(chatml, turns, train_on):
    messages = [{"role": "user", "content": "q"}]
    for role, content, train in turns:
        messages.append(
            {"role": role, "content": content} | ({} if train is None else {"train": train})
        )
    last = max(
        (n for n, message in enumerate(messages) if message["role"] == "assistant"), default=None
    )
    by_role = {"assistant": ["assistant"], "last": []}.get(
        train_on if isinstance(train_on, str) else "", train_on
    )
    expected = [
        message["content"] + END
        for number, message in enumerate(messages)
        if message.get(
            "train", message["role"] in by_role or (train_on == "last" and number == last)
        )
    ]
    if not expected:
        with pytest.raises(SampleFault, match="to be trained, expected one"):
            trained(chatml, train_on, messages)
    else:
        encoder = Encoder(chatml, "auto", train_on)
        encoded = encoder.encode(Conversation(messages))
        assert list_trained_texts(encoder, encoded) == expected
        special = [
            i for i, is_trained in zip(encoded.ids, encoded.trained, strict=True) if is_trained
        ]
        assert sum(map(chatml.is_special, special)) == len(expected), (
            "no token that a message only writes is one"
        )
