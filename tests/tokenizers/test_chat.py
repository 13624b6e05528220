"""Chat templates render as transformers renders them, and can neither reach out of the sandbox nor
run away.
"""

import re

import jinja2
import pytest

from recipe_lib.errors import DataError
from recipe_lib.tokenizers.chat_template import ChatTemplate
from tests.tokenizers.made import render

USER = {"role": "user", "content": "  What is 2 < 3? 'é'  "}
ANSWER = {"role": "assistant", "content": "It is {{ true }}.\n"}
SYSTEM = {"role": "system", "content": "Be brief."}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": None}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, "chat.jinja", TOKENS)


TEMPLATES = [
    "llama.cpp/google-gemma-2-2b-it", "llama.cpp/Qwen-Qwen2.5-7B-Instruct",
    "llama.cpp/meta-llama-Llama-3.1-8B-Instruct", "llama.cpp/meta-llama-Llama-3.2-3B-Instruct",
    "llama.cpp/meta-llama-Llama-3.3-70B-Instruct",
    "llama.cpp/microsoft-Phi-3.5-mini-instruct", "llama.cpp/mistralai-Mistral-Nemo-Instruct-2407",
    "llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "axolotl/qwen3", "axolotl/gemma3", "axolotl/mistral_v1",
    "axolotl/mistral_v2v3", "axolotl/phi_4", "axolotl/chatml", "axolotl/alpaca", "axolotl/llama3",
]  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(name, realdata, tmp_path):
    transformers = pytest.importorskip("transformers")
    from tests.tokenizers.made import write_json

    write_json(tmp_path, template=None)
    reference = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    source = (realdata / "chat-templates" / f"{name}.jinja").read_text()
    tokens = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    ours = ChatTemplate(source, name, tokens)
    tool = {
        "type": "function",
        "function": {"name": "f<1>", "description": "é", "parameters": {"a": [1, 2]}},
    }
    for messages in ([USER], [USER, ANSWER], [USER, ANSWER, USER], [SYSTEM, USER, ANSWER]):
        for prompt in (True, False):
            for tools in (None, [tool]):
                try:
                    expected = reference.apply_chat_template(
                        messages, chat_template=source, add_generation_prompt=prompt, tokenize=False, tools=tools,
                        date_string="26 Jul 2024",
                    )  # fmt: skip
                except jinja2.TemplateError as error:  # the template's own objection
                    with pytest.raises(DataError, match=re.escape(" ".join(str(error).split()))):
                        render(ours.render_many, messages, prompt, tools)
                    continue
                assert render(ours.render_many, messages, prompt, tools) == expected


def test_the_clock_stands_still():
    assert (
        render(template("{{ strftime_now('%d %b %Y') }}").render_many, [], False) == "26 Jul 2024"
    )


def test_helpers():
    assert (
        render(template("{{ messages | tojson }}").render_many, [{"content": "<é>"}], False)
        == '[{"content": "<é>"}]'
    )
    assert (
        render(template("{{ {'a': 1} | tojson(indent=2) }}").render_many, [], False)
        == '{\n  "a": 1\n}'
    )
    assert (
        render(
            template(
                "{% for m in 'abc' %}{% if m == 'b' %}{% break %}{% endif %}{{ m }}{% endfor %}"
            ).render_many,
            [],
            False,
        )
        == "a"
    )
    assert (
        render(
            template("a{% generation %}b{{ eos_token }}{% endgeneration %}c").render_many, [], False
        )
        == "ab</s>c"
    )
    assert render(template("  {% if true %}\nx\n  {% endif %}\n").render_many, [], False) == "x\n"
    assert (
        render(template("{{ '<b>&lt;</b>' | striptags }}{{ 'a' | urlize }}").render_many, [], False)
        == "<a"
    )
    assert (
        render(template("{{ unk_token is defined }}{{ tools is none }}").render_many, [], False)
        == "FalseTrue"
    )


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (
            "{{ raise_exception('no  system\nrole') }}",
            r"^chat.jinja: the chat template failed \(no system role\)$",
        ),
        ("{{ messages[0].content }}", "the chat template failed"),
        ("{{ 1 / 0 }}", "the chat template failed"),
        ("{{ messages + 1 }}", "the chat template failed"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "the chat template failed"),
        ("{{ messages.append(1) }}", "the chat template failed"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "the chat template failed"),
        ("{% for a in range(10**9) %}x{% endfor %}", "the chat template failed"),
        ("{{ 'x' * 100000000 }}", "is too large here"),
        ("{{ [1] * 100000000 }}", "is too large here"),
        ("{{ 9 ** 9 ** 9 }}", "is too large here"),
        ("{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "renders more than"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
        ("{% include 'other' %}", "the chat template failed"),
        ("{{ '\\ud800' }}", r"failed \(it writes half of a character\)"),
        ("{{ raise_exception('\x1b[2Jno') }}", r"failed \(\\x1b\[2Jno\)"),
        (
            "{{ messages | random }}{{ lipsum() }}{{ [] | first | wordwrap(1) }}{{ 1/0 }}",
            "the chat template failed",
        ),
    ],
)
def test_templates_that_object_or_misbehave(source, line):
    with pytest.raises(DataError, match=line) as caught:
        render(template(source).render_many, [], False)
    assert "\n" not in str(caught.value)


def test_long_conversations_have_room():
    messages = [{"role": "user", "content": "x" * 3_000_000}]
    assert (
        len(
            render(
                template("{{ messages[0].content }}{{ messages[0].content }}").render_many,
                messages,
                False,
            )
        )
        == 6_000_000
    )


@pytest.mark.parametrize("source", ["{% for %}", "{{ a", "{% nothing %}"])
def test_syntax_errors_name_the_line(source):
    with pytest.raises(
        DataError,
        match=r"^chat.jinja: line 2: the chat template is not valid Jinja \(.*\); correct it",
    ):
        template("\n" + source)


def test_several_renderings_in_one_go():
    source = (
        "{% for m in messages %}{{ m.content or raise_exception('empty') }},{% endfor %}{{"
        " add_generation_prompt }}"
    )
    messages = [{"content": "a"}, {"content": "b"}, {"content": ""}]
    wanted = [
        (2, False, ()),
        (1, True, ()),
        (3, False, ()),
        (3, False, ((0, "é"), (2, "\ue000"))),
        (0, True, ()),
    ]
    found = template(source).render_many(messages, wanted)
    assert [str(one) for one in found] == [
        "a,b,False", "a,True", "chat.jinja: the chat template failed (empty)", "é,b,\ue000,False", "True",
    ]  # fmt: skip
    assert [type(one) for one in found] == [str, str, DataError, str, str]
    assert messages[0] == {"content": "a"}


def test_a_template_nested_too_deep():
    with pytest.raises(DataError, match="nested too deep"):
        template("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}")
