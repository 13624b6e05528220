"""Each trained sequence is what inference is given and what has to follow, by the renderings of
transformers.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipe_lib.data.label_masks import Encoder
from recipe_lib.data.samples import Conversation, SampleFault
from recipe_lib.tokenizers import load_tokenizer
from recipe_lib.tokenizers.template_process import DATE
from tests.data.template_cases import (
    BY_NAME,
    KINDS,
    TEMPLATES,
    THINKING,
    Template,
    fill_in_tokens,
    place_thoughts,
    read_source,
    write_tokenizer,
)
from tests.selection import mark_slow_but

transformers = pytest.importorskip("transformers")
chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")


class Oracle:
    """transformers' own rendering and ids."""

    def __init__(self, folder: Path, template: Template) -> None:
        self.template = template
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))

    def render(self, messages: list[dict[str, Any]], tools: Any, prompt: bool, **more: Any) -> str:
        given = place_thoughts(messages, self.template)
        return self.tokenizer.apply_chat_template(
            given, tools=tools, add_generation_prompt=prompt, tokenize=False, **more
        )

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], tuple[Encoder, Oracle]]]:
    """The encoder and the oracle of a template, by its name; transformers' clock stands still as
    ours does.
    """
    known: dict[str, tuple[Encoder, Oracle]] = {}

    def get(name: str) -> tuple[Encoder, Oracle]:
        if name not in known:
            template = BY_NAME[name]
            folder = tmp_path_factory.mktemp("template")
            write_tokenizer(folder, template, read_source(template))
            known[name] = Encoder(load_tokenizer(folder), "auto"), Oracle(folder, template)
        return known[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: DATE))
        yield get


def runs(encoded: Any) -> list[tuple[int, int]]:
    """[start, end) of each run of trained ids."""
    edges = [at for at in range(len(encoded.ids) + 1)
             if (at < len(encoded.ids) and encoded.trained[at]) != (at > 0 and encoded.trained[at - 1])]  # fmt: skip
    return list(zip(edges[::2], edges[1::2], strict=True))


def refusal(template: Template, kind: str) -> str | None:
    """Why a row of this kind cannot be trained with this template, if it cannot."""
    if kind.startswith("tool") and not template.calls:
        return "tool call left out|refused by the chat template|the past anew"
    if "thought" in kind and "content" not in kind and not (template.thought or template.opens):
        return "part of an answer left out"
    return (
        "refused by the chat template"
        if kind.startswith("system") and not template.system
        else None
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", mark_slow_but([template.name for template in TEMPLATES], 8))
def test_every_sequence_is_the_prompt_of_inference_and_what_has_to_follow(
    name: str, kind: str, made: Callable[[str], tuple[Encoder, Oracle]]
) -> None:
    encoder, oracle = made(name)
    template, (messages, tools) = BY_NAME[name], KINDS[kind]
    messages = fill_in_tokens(messages, template)
    if cause := refusal(template, kind):
        with pytest.raises(SampleFault) as refused:
            encoder.encode_sample(Conversation(messages, tools))
        assert refused.value.cause in cause.split("|")
        return
    row = encoder.encode_sample(Conversation(messages, tools))
    prompts = prompts_of(oracle, messages, tools)
    found = []
    for encoded in row.sequences:
        assert not encoded.untrained_ends
        for start, end in runs(encoded):
            given = encoder.tokenizer.decode(encoded.ids[:start])
            number = next(number for number, own in prompts.items() if given == own)
            assert "special" in kind or encoded.ids[:start] == oracle.ids(given)
            check_answer(encoder, oracle, encoded.ids, start, end, (messages, tools), number)
            found.append(number)
    assert sorted(found) == list(prompts), "each answer is trained once"


def prompts_of(oracle: Oracle, messages: list[dict[str, Any]], tools: Any) -> dict[int, str]:
    """The prompt of inference for each answer; where it ends a thought and the answer has one, that
    with thinking.
    """
    prompts = {}
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            prompts[number] = oracle.render(messages[:number], tools, True)
            thought = message.get(THINKING) or "<think>" in message["content"]
            if thought and prompts[number].endswith("</think>\n\n"):
                prompts[number] = oracle.render(
                    messages[:number], tools, True, enable_thinking=True
                )
    return prompts


def check_answer(
    encoder: Encoder, oracle: Oracle, ids: list[int], start: int, end: int, row: Any, number: int
) -> None:
    """What is trained of one answer, ids [start, end), is what transformers writes there, to the
    end of the turn.
    """
    (messages, tools), template, tokenizer = row, oracle.template, encoder.tokenizer
    given, whole = tokenizer.decode(ids[:start]), tokenizer.decode(ids[:end])
    trained = whole.removeprefix(given)
    is_call = bool(messages[number].get("tool_calls"))
    stop = (template.call_end if is_call else "") or template.end
    special = [i for i in ids[start:end] if tokenizer.is_special(i)]
    assert trained.rstrip().endswith(stop)
    assert tokenizer.get_token_bytes(special[-1]).decode() == oracle.tokenizer.tokenize(stop)[-1]
    finished = oracle.render(messages[: number + 1], tools, False)
    if not finished.startswith(given):
        assert trained == thought_ended(oracle, (messages, tools), number, finished, given)
    elif whole.startswith(finished):  # the same text as transformers writes for the finished answer
        if added := whole.removeprefix(finished):  # the next turn's first token ends this one
            following = messages[0] | {"role": "tool" if is_call else "user", "content": "x"}
            said = finished.rpartition("</think>")[2]
            assert said + added in oracle.render([*messages[: number + 1], following], tools, False)
    else:
        assert finished.startswith(whole)
        behind = finished.removeprefix(whole).strip()
        assert behind in ("", oracle.tokenizer.eos_token) or given.endswith(behind)


def thought_ended(oracle: Oracle, row: Any, number: int, finished: str, prompt: str) -> str:
    """What has to follow a prompt that begins a thought, where the finished answer does not go on
    from that.
    """
    (messages, tools), template = row, oracle.template
    thought, words = messages[number].get(THINKING), messages[number]["content"]
    if "</think>" in words:
        thought, words = words.removeprefix("<think>\n").split("\n</think>\n\n")
    if (
        "<think>" not in prompt
    ):  # a system message that is moved: what follows the question's end is the same
        return finished.rpartition("[/INST]")[2].strip("\n")
    if template.thought:
        message = messages[number] | {THINKING: "A THOUGHT", "content": words}
        shown = oracle.render([*messages[:number], message], tools, False)
        return (thought or "") + shown.partition("A THOUGHT")[2].removesuffix("\n")
    begin = prompt[: prompt.rindex("<think>")]
    assert finished.startswith(begin)
    written = finished.removeprefix(begin) if thought is None else words + template.end
    return (thought or "") + template.opens + written


@pytest.mark.parametrize("name", ["qwen3", "deepseekv3", "nemotron_3_nano"])
def test_tags_that_are_special_tokens_stay_tags_around_a_thought_alone(
    name: str, tmp_path: Path
) -> None:
    template, (messages, _) = BY_NAME[name], KINDS["thoughts in the content"]
    write_tokenizer(tmp_path, template, read_source(template), ("<think>", "</think>"))
    encoder = Encoder(load_tokenizer(tmp_path), "auto")
    plain = Conversation([{"role": "user", "content": "What is <think>?"}, *messages[1:]])
    for row in (Conversation(messages), plain):
        for encoded in encoder.encode_sample(row).sequences:
            texts = [
                encoder.tokenizer.get_token_bytes(i)
                for i in encoded.ids
                if encoder.tokenizer.is_special(i)
            ]
            last = texts[-4:]
            assert (
                last.count(b"</think>") == 1
                and encoder.tokenizer.decode(encoded.ids).count("</think>") <= 2
            )
            assert texts.count(b"<think>") == texts.count(b"</think>")
