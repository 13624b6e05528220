"""Templates that mark answers with `{% generation %}`: the loss counts what transformers' mask
has.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipe_lib.config.schema import DataConfig
from recipe_lib.data import build_dataset
from recipe_lib.data.inspect import inspect_datasets
from recipe_lib.data.label_masks import Encoder
from recipe_lib.data.samples import Conversation, SampleFault
from recipe_lib.tokenizers import load_tokenizer
from recipe_lib.tokenizers.template_process import DATE
from tests.data.masks_cases import list_trained_texts
from tests.data.template_cases import (
    KINDS,
    TEMPLATES,
    TRL,
    fill_in_tokens,
    place_thoughts,
    read_source,
    write_tokenizer,
)
from tests.tokenizers.made import render, write_json

# Of the training versions in trl's wheel: where the mark is not what generation is asked for. It
# begins before the end of the prompt: with the turn (DeepSeek, gpt-oss, muse), a line end
# (Qwen2.5), the thought (Qwen3.5, Nemotron).
DIFFERING = {
    "deepseek_r1_distill", "deepseekv3", "gptoss", "muse_glimmer", "qwen2_5", "qwen3_5_nothink", "qwen3_5_think",
    "qwen3_6", "qwen3_8", "nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra",
}  # fmt: skip
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{%"
    " generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{"
    " m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{"
    " '<|im_start|>assistant\n' }}{% endif %}"
)
TALK = KINDS["two answers"][0]


def training_templates() -> list[Any]:
    found = importlib.util.find_spec("trl")
    folder = (
        Path(found.submodule_search_locations[0])
        if found and found.submodule_search_locations
        else Path("none")
    )
    return [
        t
        for t in TEMPLATES
        if t.place == TRL and (folder / f"chat_templates/{t.file}_training.jinja").is_file()
    ]


@pytest.mark.skipif(
    importlib.util.find_spec("trl") is None,
    reason="trl, whose wheel holds the templates, is missing",
)
@pytest.mark.parametrize("template", training_templates(), ids=lambda template: template.name)
def test_masks_are_those_of_transformers(
    template: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: DATE))
    template = replace(
        template, calls=template.calls and "object"
    )  # DeepSeek's reads objects in this version
    write_tokenizer(tmp_path, template, read_source(template, training=True))
    encoder = Encoder(load_tokenizer(tmp_path), "auto")
    reference = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    kinds = ["two answers", "three answers", "white space", *(["tool"] if template.calls else [])]
    for kind in kinds:
        messages, tools = fill_in_tokens(KINDS[kind][0], template), KINDS[kind][1]
        row = encoder.encode_sample(Conversation(messages, tools))
        ends = [
            number + 1 for number, message in enumerate(messages) if message["role"] == "assistant"
        ]
        ends = ends if len(row.sequences) > 1 else ends[-1:]
        assert len(row.sequences) == len(ends) and (
            len(ends) == 1 or template.name == "gptoss"
        )  # two kinds of ends
        for encoded, end in zip(row.sequences, ends, strict=True):
            expected = reference.apply_chat_template(
                place_thoughts(messages[:end], template),
                tools=tools,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            first, length = encoded.trained.index(True), len(encoded.ids)
            first = 0 if len(ends) == 1 else first
            assert encoded.ids == expected["input_ids"][:length]
            assert [*map(int, encoded.trained[first:])] == expected["assistant_masks"][first:length]
            assert not any(expected["assistant_masks"][length:])
        if kind == "two answers":
            assert bool(row.marked.differing) == (template.name in DIFFERING), row.marked.differing


def encoder_of(folder: Path, source: str, **settings: Any) -> Encoder:
    return Encoder(load_tokenizer(write_json(folder, template=source)), "auto", **settings)


def test_marks_that_are_what_generation_is_asked_for(tmp_path: Path):
    row = encoder_of(tmp_path, MARKED).encode_sample(Conversation(TALK))
    assert row.marked.differing == []
    assert list_trained_texts(encoder_of(tmp_path, MARKED), row.sequences[0]) == [
        "Yes.<|im_end|>",
        "No.<|im_end|>",
    ]


def test_only_the_marks_of_chosen_answers_count(tmp_path: Path):
    for train_on, expected in (
        ("last", ["No.<|im_end|>"]),
        (["assistant"], ["Yes.<|im_end|>", "No.<|im_end|>"]),
    ):
        encoder = encoder_of(tmp_path, MARKED, train_on=train_on)
        assert list_trained_texts(encoder, encoder.encode(Conversation(TALK))) == expected
    encoder = encoder_of(tmp_path, MARKED)
    first = [TALK[0], TALK[1], TALK[2], TALK[3] | {"train": False}]
    assert list_trained_texts(encoder, encoder.encode(Conversation(first))) == ["Yes.<|im_end|>"]


def test_an_answer_that_is_not_marked_is_refused(tmp_path: Path):
    source = MARKED.replace(
        "m.role == 'assistant' %}", "m.role == 'assistant' and loop.index0 < 2 %}"
    )
    with pytest.raises(
        SampleFault,
        match=(
            r"message 3 \(the first is 0\): found nothing that the chat template marks with"
            r" generation"
        ),
    ):
        encoder_of(tmp_path, source).encode(Conversation(TALK))


def test_differences_are_reported_with_their_place(tmp_path: Path, rows_file: Callable[..., str]):
    end = "m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    assert end in MARKED
    behind = MARKED.replace(end, "m.content + '<|im_end|>\n' }}{% endgeneration %}")
    short = MARKED.replace(end, "m.content }}{% endgeneration %}{{ '<|im_end|>\n' }}")
    cfg = DataConfig(
        source=rows_file({"messages": TALK}, {"messages": TALK[:2]}), format="messages", cache=False
    )
    line = "data: of 3 answers the chat template itself says what is trained ({% generation %}); "
    for name, source, differing, ends in (("a", behind, 0, 0), ("b", short, 3, 3)):
        dataset = build_dataset(
            cfg, load_tokenizer(write_json(tmp_path / name, template=source)), 64
        )
        found = inspect_datasets(dataset, None, 64, None)
        assert found.counts["marked_answers"] == 3
        assert (found.counts["marks_differing"], found.counts["untrained_ends"]) == (
            differing,
            ends,
        )
        said = [text for text in dataset.report.format_lines() if text.startswith(line)]
        assert said == [f"{line}{differing} of them are not what generation is asked for"]
        faults = {finding.name: finding for finding in found.findings}
        assert ("generation-marks" in faults, "untrained-ends" in faults) == (
            differing > 0,
            ends > 0,
        )
    (place,) = faults["generation-marks"].places
    assert place.endswith(
        "rows.jsonl:1: .messages[1]: the template marks 'Yes.', and what is generated is"
        " 'Yes.<|im_end|>'"
    )


def test_what_is_set_between_marks_stays_there(tmp_path: Path):
    """As in transformers, whose marks are a scope of their own."""
    source = (
        "{% set x = 'a' %}{% generation %}{% set x = 'b' %}{{ x }}{% endgeneration %}{{ x +"
        " '<|im_end|>' }}"
    )
    assert (
        render(load_tokenizer(write_json(tmp_path, template=source)).render_chats, [], False)
        == "ba<|im_end|>"
    )


def test_of_long_answers_the_ends_are_quoted(tmp_path: Path) -> None:
    """Most marks end before the end of turn: a quotation of the beginning would be the same for
    both.
    """
    short = MARKED.replace(
        "+ '<|im_end|>' }}{% endgeneration %}", "}}{% endgeneration %}{{ '<|im_end|>' }}"
    )
    talk = [TALK[0], TALK[1] | {"content": f"Yes{', yes' * 40}."}]
    (line,) = encoder_of(tmp_path, short).encode_sample(Conversation(talk)).marked.differing
    assert line.endswith(
        "the template marks 'Yes, yes, yes, yes, yes, yes ... es, yes, yes, yes, yes, yes.', and"
        " what is generated is 'Yes, yes, yes, yes, yes, yes ... es, yes, yes, yes.<|im_end|>'"
    )
