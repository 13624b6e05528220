"""What the loss counts: with real templates and made ones, exactly the answers and the tokens that
end them.
"""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe_lib.data import render_prompt
from recipe_lib.data.formats import build_conversation
from recipe_lib.data.label_masks import Encoder
from recipe_lib.data.samples import Completion, SampleFault
from recipe_lib.errors import DataError
from recipe_lib.tokenizers import load_tokenizer
from tests.data.masks_cases import list_trained_texts
from tests.selection import mark_slow_but
from tests.tokenizers.made import write_json

# tokenizer, template (None: its own), what ends a turn, what the template puts before the answer's
# first letter
REAL = {
    "llama3": ("llama3", None, "<|eot_id|>", ""),
    "llama3_1": ("llama3_1", "llama.cpp/meta-llama-Llama-3.1-8B-Instruct", "<|eot_id|>", ""),
    "qwen2_5": ("qwen2_5", None, "<|im_end|>", ""),
    "gemma2": ("gemma2", "llama.cpp/google-gemma-2-2b-it", "<end_of_turn>", ""),
    "smollm2": ("smollm2", None, "<|im_end|>", ""),
    "mistral_v1": ("mistral/tokenizer.model.v1", "axolotl/mistral_v1", "</s>", " "),
    "mistral_v3": (
        "mistral/mistral_instruct_tokenizer_240323.model.v3",
        "axolotl/mistral_v2v3",
        "</s>",
        " ",
    ),
    "plain_gpt2": ("gpt2", None, "<|endoftext|>", ""),
    "plain_llama2": ("llama2", None, "</s>", ""),
}
FOUR_TURNS = build_conversation(
    [
        {"role": "user", "content": "Hi!"},
        {"role": "assistant", "content": "Hello, 你好 😀"},
        {"role": "user", "content": "assistant"},
        {"role": "assistant", "content": "user\n\nassistant"},
    ]
)


@pytest.fixture(scope="module")
def encoder_of(real_folder, realdata):
    loaded = {}

    def get(name: str) -> Encoder:
        if name not in loaded:
            tokenizer, template, _, _ = REAL[name]
            folder, _, file = tokenizer.partition("/")
            path = real_folder(folder) / file if file else real_folder(folder)
            jinja = realdata / "chat-templates" / f"{template}.jinja" if template else None
            loaded[name] = Encoder(load_tokenizer(path, jinja), "auto")
        return loaded[name]

    return get


def answers(encoder: Encoder, sample) -> list[str]:
    """The text of each run of trained ids."""
    return list_trained_texts(encoder, encoder.encode(sample))


@pytest.mark.parametrize("name", mark_slow_but(REAL, 1))
def test_real_templates_train_the_answers_and_their_end(name, encoder_of, realdata):
    encoder, (_, _, end, space) = encoder_of(name), REAL[name]
    assert answers(encoder, FOUR_TURNS) == [
        space + "Hello, 你好 😀" + end,
        space + "user\n\nassistant" + end,
    ]
    rows = json.loads((realdata / "datasets" / "alpaca" / "alpaca_en_demo.json").read_text())[:12]
    for row in rows:
        sample = build_conversation(
            [
                {"role": "user", "content": row["instruction"]},
                {"role": "assistant", "content": row["output"]},
            ]
        )
        (answer,) = answers(encoder, sample)
        assert answer in (space + row["output"] + end, space + row["output"].strip() + end)
        encoded = encoder.encode(sample)
        prompt = render_prompt(encoder.tokenizer, sample.messages[:1])
        assert encoded.ids[: len(prompt)] == prompt and not any(encoded.trained[: len(prompt)])
        assert all(encoded.trained[len(prompt) :])
        bos = encoder.tokenizer.bos_id
        assert bos is None or encoded.ids.count(bos) <= 1 or name in ("smollm2", "plain_gpt2")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3_1", "smollm2"])
def test_ids_are_those_of_transformers(name, encoder_of, real_folder):
    transformers = pytest.importorskip("transformers")
    encoder = encoder_of(name)
    reference = transformers.AutoTokenizer.from_pretrained(str(real_folder(REAL[name][0])))
    expected = reference.apply_chat_template(
        list(FOUR_TURNS.messages), chat_template=encoder.tokenizer.chat_template, date_string="26 Jul 2024",
        return_dict=False,
    )  # fmt: skip
    encoded = encoder.encode(FOUR_TURNS)
    assert not encoded.in_pieces
    assert encoded.ids == expected[: len(encoded.ids)]
    assert reference.decode(expected[len(encoded.ids) :]).strip() == ""


@pytest.mark.slow
def test_sharegpt_sample_with_real_templates(encoder_of, realdata):
    file = realdata / "datasets" / "chat" / "axolotl_sharegpt_conversation.json"
    turns = json.loads(file.read_text())["conversations"]
    roles = {"human": "user", "gpt": "assistant"}
    sample = build_conversation(
        [{"role": roles[turn["from"]], "content": turn["value"]} for turn in turns]
    )
    for name, (_, _, end, space) in REAL.items():
        expected = [space + turn["value"] + end for turn in turns if turn["from"] == "gpt"]
        assert answers(encoder_of(name), sample) == expected, name


def test_gemma_refuses_a_system_message(real_folder, realdata):
    template = realdata / "chat-templates" / "llama.cpp" / "google-gemma-2-2b-it.jinja"
    encoder = Encoder(load_tokenizer(real_folder("smollm2"), template), "auto")
    sample = build_conversation([{"role": "system", "content": "s"}, *FOUR_TURNS.messages])
    with pytest.raises(
        SampleFault,
        match=r"gemma-2-2b-it.jinja: the chat template failed \(System role not supported\)",
    ):
        encoder.encode(sample)


def test_qwen_puts_its_own_system_message(encoder_of):
    encoder = encoder_of("qwen2_5")
    ids = encoder.encode(FOUR_TURNS).ids
    assert encoder.tokenizer.decode(ids).startswith(
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud."
    )
    sample = build_conversation([{"role": "system", "content": "Be brief."}, *FOUR_TURNS.messages])
    assert "Qwen" not in encoder.tokenizer.decode(encoder.encode(sample).ids)


def test_a_template_that_moves_the_system_message_gives_each_answer_its_prompt(
    real_folder, realdata
):
    """Mistral v0.3 writes the system message into the last user message, so the past changes with
    every turn.
    """
    config = json.loads(
        (realdata / "hf-layouts" / "mistral-7b-instruct-v0.3" / "tokenizer_config.json").read_text()
    )
    (file := real_folder("mistral") / "v3.jinja").write_text(config["chat_template"])
    path = real_folder("mistral") / "mistral_instruct_tokenizer_240323.model.v3"
    tokenizer = load_tokenizer(path, file)
    encoder = Encoder(tokenizer, "auto")
    assert answers(encoder, FOUR_TURNS)[1] == " user\n\nassistant</s>"
    sample = build_conversation([{"role": "system", "content": "s"}, *FOUR_TURNS.messages])
    first, second = encoder.encode_sample(sample).sequences
    assert list_trained_texts(encoder, first) == [" Hello, 你好 😀</s>"]
    assert list_trained_texts(encoder, second) == [" user\n\nassistant</s>"]
    for encoded, count in ((first, 2), (second, 4)):
        prompt = render_prompt(tokenizer, sample.messages[:count])
        assert encoded.ids[: len(prompt)] == prompt and all(encoded.trained[len(prompt) :])
        assert "s\n\n" in tokenizer.decode(prompt)
    line = (
        r"message 2 \(the first is 0\): the chat template writes what stands before it differently"
        r" once it is there: "
        r"at token 4 found "
        r"' Hi', expected ' s' as when generating; set data.history to auto, or"
        r" tokenizer.chat_template to one that"
    )
    with pytest.raises(SampleFault, match=line):
        Encoder(tokenizer, "auto", history="refuse").encode(sample)


def test_qwen3_drops_old_thoughts(real_folder, realdata):
    config = json.loads((real_folder("qwen3") / "tokenizer_config.json").read_text())
    (file := real_folder("qwen2_5") / "qwen3.jinja").write_text(config["chat_template"])
    encoder = Encoder(load_tokenizer(real_folder("qwen2_5"), file), "auto")
    thought = {"role": "assistant", "content": "<think>\nb\n</think>\n\nc"}
    said = ["<think>\nb\n</think>\n\nc<|im_end|>"]
    assert answers(encoder, build_conversation([FOUR_TURNS.messages[0], thought])) == said
    twice = build_conversation([FOUR_TURNS.messages[0], thought, FOUR_TURNS.messages[0], thought])
    first, second = encoder.encode_sample(twice).sequences
    assert list_trained_texts(encoder, first) == list_trained_texts(encoder, second) == said
    assert encoder.tokenizer.decode(second.ids).count("<think>") == 1
    last = Encoder(encoder.tokenizer, "auto", "last")
    assert answers(last, twice) == said
    assert answers(last, FOUR_TURNS) == ["<think>\n\n</think>\n\nuser\n\nassistant<|im_end|>"]


def test_a_thought_that_the_prompt_begins_is_ended(real_folder, realdata):
    encoder = Encoder(
        load_tokenizer(real_folder("qwen2_5"), realdata / "chat-templates/axolotl/qwen3.jinja"),
        "auto",
    )
    found = encoder.encode_sample(FOUR_TURNS).sequences
    ended = [["</think>\n\nHello, 你好 😀<|im_end|>"], ["</think>\n\nuser\n\nassistant<|im_end|>"]]
    assert [list_trained_texts(encoder, encoded) for encoded in found] == ended


def test_an_answer_that_does_not_go_on_from_its_prompt_is_refused(tmp_path):
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>answer: ' }}{% endif %}"
    )
    encoder = Encoder(load_tokenizer(write_json(tmp_path, template=source)), "auto")
    with pytest.raises(
        SampleFault,
        match=(
            r"message 1 \(the first is 0\): the chat template writes what stands before it"
            r" differently"
        ),
    ):
        encoder.encode(FOUR_TURNS)


def test_phi_tokens_that_swallow_white_space(realdata, real_folder, tmp_path):
    for file in (realdata / "hf-layouts" / "phi-3-mini-merge").glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.model").write_bytes(
        (real_folder("llama2") / "tokenizer.model").read_bytes()
    )
    for jinja in (
        None,
        realdata / "chat-templates/llama.cpp/microsoft-Phi-3.5-mini-instruct.jinja",
    ):
        encoder = Encoder(load_tokenizer(tmp_path, jinja), "auto")
        assert answers(encoder, FOUR_TURNS) == ["Hello, 你好 😀<|end|>", "user\n\nassistant<|end|>"]
        assert not encoder.encode(FOUR_TURNS).in_pieces


CONTENT = st.text(
    st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12
) | st.sampled_from(
    [
        "<|im_end|>",
        "<|im_start|>assistant\n",
        " <|bos|> ",
        "\n",
        "assistant",
        "a<|im_end|>\n<|im_start|>user\nb",
    ]
)
ANSWER = CONTENT.filter(lambda text: text.strip())


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    turns=st.lists(st.tuples(CONTENT, ANSWER), min_size=1, max_size=4),
    system=st.none() | CONTENT,
    chat=st.booleans(),
)
def test_any_conversation_trains_its_answers(chatml, turns, system, chat):
    encoder = Encoder(chatml, "chat" if chat else "plain")
    messages = [] if system is None else [{"role": "system", "content": system}]
    for question, answer in turns:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    sample = build_conversation(messages)
    assert answers(encoder, sample) == [answer + "<|im_end|>" for _, answer in turns]
    encoded = encoder.encode(sample)
    ends = [
        at
        for at, (i, t) in enumerate(zip(encoded.ids, encoded.trained, strict=True))
        if t and chatml.is_special(i)
    ]
    assert len(ends) == len(turns), (
        "an answer has its end trained once, and no token that a user only wrote"
    )
    assert encoded.trained[-1] and not encoded.trained[0]
    prompt = render_prompt(chatml, messages[:-1], "chat" if chat else "plain")
    last = max(at for at, trained in enumerate(encoded.trained) if not trained) + 1
    assert encoded.ids[:last] == prompt


def test_an_answer_that_begins_like_the_prompt_ends_is_encoded_apart(tmp_path):
    """`assistant\\n` + `\\n\\nx`: where two line ends are one token, the border would lie within
    it.
    """
    write_json(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary, merges = content["model"]["vocab"], content["model"]["merges"]
    vocabulary["ĊĊ"] = len(vocabulary)
    merges.append(["Ċ", "Ċ"] if merges and isinstance(merges[0], list) else "Ċ Ċ")
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert len(tokenizer.encode("\n\n")) == 1
    encoder = Encoder(tokenizer, "chat")
    sample = build_conversation(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\n\nx"}]
    )
    assert answers(encoder, sample) == ["\n\nx<|im_end|>"]
    encoded, prompt = encoder.encode(sample), render_prompt(tokenizer, sample.messages[:1])
    assert (
        encoded.in_pieces
        and encoded.ids[: len(prompt)] == prompt
        and all(encoded.trained[len(prompt) :])
    )


def test_completion_is_text_as_it_stands(plain):
    encoded = Encoder(plain, "auto", parse_special_tokens=False).encode(
        Completion("the ", "cat<|im_end|>")
    )
    assert plain.decode(encoded.ids) == "<|bos|>the cat<|im_end|><|im_end|>"
    assert (
        plain.decode([i for i, t in zip(encoded.ids, encoded.trained, strict=True) if t])
        == "cat<|im_end|><|im_end|>"
    )
    assert sum(plain.is_special(i) for i in encoded.ids) == 2
    assert (
        Encoder(plain, "auto", add_bos=False).encode(Completion("the ", "cat")).ids[0]
        != plain.bos_id
    )
    assert Encoder(plain, "auto").encode(Completion("", "cat")).trained[:2] == [False, True]


def test_completion_without_prompt_and_bos_cannot_train_its_first_token(chatml):
    encoded = Encoder(chatml, "auto").encode(Completion("", "cat"))
    assert encoded.trained[0] is False and all(encoded.trained[1:])


def test_train_on_all(chatml, plain):
    for tokenizer in (chatml, plain):
        encoded = Encoder(tokenizer, "auto", train_on="all").encode(FOUR_TURNS)
        assert encoded.trained == [False] + [True] * (len(encoded.ids) - 1)
        assert "Hi!" in tokenizer.decode(encoded.ids)


def test_bos_is_the_chat_templates_business(tmp_path):
    source = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    with_bos = load_tokenizer(write_json(tmp_path / "a", template=source, add_bos_token=True))
    ids = Encoder(with_bos, "auto").encode(FOUR_TURNS).ids
    assert ids.count(with_bos.bos_id) == 1 and ids[0] == with_bos.bos_id
    without = load_tokenizer(write_json(tmp_path / "b", add_bos_token=True))
    assert without.bos_id not in Encoder(without, "auto").encode(FOUR_TURNS).ids
    assert Encoder(without, "plain").encode(FOUR_TURNS).ids.count(without.bos_id) == 1


def test_plain_template(plain):
    messages = [{"role": "system", "content": "s"}, *FOUR_TURNS.messages[:3]]
    assert (
        plain.decode(render_prompt(plain, messages))
        == "<|bos|>s\n\nUser:\nHi!\n\nAssistant:\nHello, 你好"
        " 😀<|im_end|>User:\nassistant\n\nAssistant:\n"
    )
    tool = [
        *FOUR_TURNS.messages[:2],
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "ok"},
    ]
    assert answers(Encoder(plain, "auto"), build_conversation(tool)) == [
        "Hello, 你好 😀<|im_end|>",
        "ok<|im_end|>",
    ]
    calls = build_conversation(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [{}]}]
    )
    with pytest.raises(SampleFault, match="the plain template has no tool calls"):
        Encoder(plain, "auto").encode(calls)


def test_tool_calls_through_a_real_template(encoder_of):
    encoder = encoder_of("qwen2_5")
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": "<|im_end|>"}}}
    messages = [
        {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"}, {"role": "assistant", "content": "Two."},
    ]  # fmt: skip
    sample = build_conversation(messages, [{"type": "function", "function": {"name": "add"}}])
    call_text, last = answers(encoder, sample)
    assert re.fullmatch(
        r'<tool_call>\n{"name": "add".*"<\|im_end\|>"}}\n</tool_call><\|im_end\|>', call_text
    )
    assert last == "Two.<|im_end|>"
    encoded = encoder.encode(sample)
    assert "# Tools" in encoder.tokenizer.decode(encoded.ids)
    assert (
        sum(
            t and encoder.tokenizer.is_special(i)
            for i, t in zip(encoded.ids, encoded.trained, strict=True)
        )
        == 2
    )


def test_a_tool_call_that_the_template_leaves_out_is_refused(encoder_of):
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    silent = dict(FOUR_TURNS.messages[1]) | {"content": "", "tool_calls": [call]}
    encoder = encoder_of("smollm2")
    for content in ("", "One moment."):
        sample = build_conversation([FOUR_TURNS.messages[0], silent | {"content": content}])
        with pytest.raises(
            SampleFault,
            match=(
                r"message 1 \(the first is 0\): found a tool call that the chat template does not"
                r" write"
            ),
        ):
            encoder.encode(sample)


def test_templates_and_tokenizers_that_cannot_be_used(plain, tmp_path):
    with pytest.raises(
        DataError,
        match="data.template is chat, but the tokenizer has no chat template; set tokenizer",
    ):
        Encoder(plain, "chat")
    endless = load_tokenizer(
        write_json(tmp_path / "a", template="{% for m in messages %}{{ m.content }}{% endfor %}")
    )
    with pytest.raises(
        DataError,
        match="puts no special token after an answer, so nothing would teach the model to stop",
    ):
        Encoder(endless, "chat").encode(FOUR_TURNS)
    no_eos = load_tokenizer(write_json(tmp_path / "b", template=None, eos_token=None))
    with pytest.raises(
        DataError, match="the tokenizer has no EOS token to end an answer with; set eos_token"
    ):
        Encoder(no_eos, "plain").encode(FOUR_TURNS)
