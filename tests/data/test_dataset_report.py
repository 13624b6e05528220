"""What a report says of bad samples, long ones, pairs and sources of several kinds."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest

from recipe_lib.config.schema import DataConfig, FullFinetuneConfig, SourceConfig
from recipe_lib.data import (
    build_dataset,
    build_datasets,
    format_report_lines,
    warn_of_overlap,
    warn_of_positions,
)
from recipe_lib.data.dataset_report import DataReport
from recipe_lib.data.inspect import inspect_datasets
from recipe_lib.errors import DataError
from recipe_lib.training.training_data import TrainingData

PAIR = {"prompt": "the", "completion": " cat"}
NO_TEXT = {"prompt": 1, "completion": "x"}


def preference(prompt, chosen, rejected):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def test_the_first_bad_samples_are_kept_and_the_first_of_each_cause_however_they_are_read():
    draw = random.Random(3)
    for _ in range(200):
        causes = draw.choices("abcde", weights=[60, 20, 10, 2, 1], k=draw.randrange(90))
        lines = [(cause, f"line {number}") for number, cause in enumerate(causes)]
        total = DataReport("rows", "text", 8)
        borders = sorted(draw.choices(range(len(lines) + 1), k=3))
        for start, stop in zip([0, *borders], [*borders, len(lines)], strict=True):
            part = DataReport("rows", "text", 8)
            for cause, line in lines[start:stop]:
                part.add_bad(cause, line)
            total.add(part)
        assert total.bad_samples == Counter(causes)
        assert total.bad_lines[:20] == lines[:20]
        for cause in "abcde":
            assert total.list_places(cause) == [line for found, line in lines if found == cause][:5]


def test_bad_samples_of_all_sources_and_of_the_validation_are_told_at_once(chatml, rows_file):
    good, one = rows_file(PAIR, name="good.jsonl"), rows_file(PAIR, NO_TEXT, name="one.jsonl")
    many, empty = (
        rows_file(PAIR, *[NO_TEXT] * 23, {"prompt": "x"}, name="many.jsonl"),
        rows_file([], name="empty.json"),
    )
    held_out = rows_file(NO_TEXT, PAIR, NO_TEXT, name="held_out.jsonl")
    cfg = FullFinetuneConfig(max_seq_len=64)
    sources = [SourceConfig(source) for source in (good, one, many, empty)]
    cfg.data = DataConfig(sources=sources, format="prompt_completion", cache=False)
    cfg.validation.source = held_out
    with pytest.raises(DataError) as caught:
        build_datasets(cfg, chatml)
    told = [fault.partition(": ")[0] for fault in caught.value.faults]
    places = [f"{many}:{line}" for line in range(2, 22)]
    assert told == [f"{one}:2", *places, many, empty, f"{held_out}:1", f"{held_out}:3", held_out]
    assert (
        f"{many}: found 24 samples of 25 that cannot be used, the first 20 of which stand above"
        in str(caught.value)
    )


def test_a_fault_of_both_is_told_once(rows_file, chatml):
    cfg = FullFinetuneConfig(max_seq_len=64)
    cfg.data = DataConfig(source=rows_file(NO_TEXT, PAIR), format="prompt_completion", cache=False)
    cfg.validation.source = cfg.data.source
    with pytest.raises(DataError) as caught:
        build_datasets(cfg, chatml)
    assert len(caught.value.faults) == 1


@pytest.mark.parametrize("policy", ["truncate", "drop"])
def test_long_sequences_are_a_share_of_those_that_exist(chatml, rows_file, policy):
    rows = [
        PAIR,
        {"prompt": "a", "completion": "b " * 9},
        {"prompt": "c " * 9, "completion": "d"},
        PAIR,
        *[NO_TEXT] * 6,
    ]
    cfg = DataConfig(
        source=rows_file(*rows), format="prompt_completion", on_invalid="skip", truncation=policy
    )
    lines = build_dataset(cfg, chatml, 8).report.format_lines()
    assert any(
        line.startswith("warning: data: 2 of 4 sequences (50.0 %) exceed 8 tokens")
        for line in lines
    ), lines


def test_pairs_are_counted_as_pairs(chatml, rows_file, said):
    long = preference("a", "the cat", "the cat sat on the mat and the dog sat on the log")
    short = [preference("a", "yes", "no"), preference("a dog", "sat", "on")]
    cfg = FullFinetuneConfig(max_seq_len=64)
    cfg.data = DataConfig(
        source=rows_file(long, *short, short[0], {"prompt": "a"}), format="preference"
    )
    cfg.data.on_invalid, cfg.validation.source = "skip", rows_file(*short, name="held_out.jsonl")
    whole, held_out = build_datasets(cfg, chatml)
    assert len(whole) == 8 and whole.items == 4
    warn_of_positions(int(whole.lengths[1]) - 1, whole)
    warn_of_overlap(whole, held_out)
    assert (
        f"warning: 1 of 8 sequences (two for each of 4 pairs) of {cfg.data.source} are longer than"
        " the " in said[0]
    )
    assert said[1].startswith(
        f"warning: 2 of 2 validation pairs of {cfg.validation.source} are training pairs as well"
    )
    assert any(
        line.startswith("data: 1 pair is the same as an earlier one")
        for line in whole.report.format_lines()
    )
    limit = int(whole.lengths[1]) - 1
    for policy in ("truncate", "drop"):
        cfg.data.truncation = policy
        cut = build_dataset(cfg.data, chatml, limit)
        lines = cut.report.format_lines()
        assert any(
            line.startswith(f"warning: data: 1 of 4 pairs (25.0 %) exceed {limit} tokens")
            for line in lines
        )
        found = {
            finding.name: finding.line
            for finding in inspect_datasets(cut, held_out, limit, None).findings
        }
        assert found["truncation"].startswith(f"1 pair exceeds {limit} tokens")
        assert (found["duplicates"], found["overlap"]) == (
            "1 pair repeats an earlier one",
            "2 validation pairs are in the training data as well",
        )


def mixed(tokenizer, rows_file, *kinds, **settings):
    """The lines on sources of these formats, one sample each."""
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    rows = {"text": {"text": "the cat sat"}, "messages": chat, "prompt_completion": PAIR}
    sources = [
        SourceConfig(rows_file(rows[kind], name=f"{kind}.jsonl"), format=kind) for kind in kinds
    ]
    return build_dataset(
        DataConfig(sources=sources, **settings), tokenizer, 64
    ).report.format_lines()


def test_a_mix_of_texts_and_chats_is_not_said_to_be_one_of_them(chatml, plain, rows_file):
    both = mixed(plain, rows_file, "messages", "text")
    assert both[0].startswith("data: 2 sequences of 2 samples, 1 of them a text, read from ")
    assert "label tokens: answers incl. end-of-turn, and whole texts, " in both[0]
    assert both[1].startswith("data: 1 sequence of 1 sample from ")
    assert both[2].startswith("data: 1 sequence cut from 1 text from ") and both[2].endswith(
        " 100.0 % trained"
    )
    assert (
        "label tokens: all tokens, 100.0 %"
        in mixed(plain, rows_file, "messages", "text", train_on="all")[0]
    )
    assert "label tokens: all tokens, 100.0 %" in mixed(plain, rows_file, "text")[0]


@pytest.mark.parametrize(
    ("kinds", "of_plain", "of_chat"),
    [
        (("text",), "each sequence begins with BOS", "no BOS is put before a sequence"),
        (
            ("messages",),
            "each sequence begins with BOS",
            "the chat template decides whether a sequence begins with BOS",
        ),
        (
            ("messages", "prompt_completion", "text"),
            "each sequence begins with BOS",
            (
                "the chat template decides whether a sequence begins with BOS; without one no BOS"
                " is put before a sequence"
            ),
        ),
    ],
)
def test_what_is_put_before_each_kind_of_sequence(
    chatml, plain, rows_file, kinds, of_plain, of_chat
):
    assert f"data: {of_plain}" in mixed(plain, rows_file, *kinds)
    assert f"data: {of_chat}" in mixed(chatml, rows_file, *kinds)


def test_a_line_that_is_true_of_both_is_said_once(chatml, rows_file):
    cfg = FullFinetuneConfig(max_seq_len=64)
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    cfg.data = DataConfig(source=rows_file(chat, chat), format="messages", cache=False)
    cfg.validation.source = rows_file(chat, name="held_out.jsonl")
    training, validation = build_datasets(cfg, chatml)
    told = TrainingData.report(
        SimpleNamespace(dataset=training, validation_dataset=validation, tokenizer=chatml)
    )
    assert told == format_report_lines(training.report, validation.report)
    assert [line for line in told if "BOS" in line] == [
        "data: the chat template decides whether a sequence begins with BOS"
    ]
    assert told[-1].startswith("validation: 1 sequence of 1 sample read from ")
    assert (
        told[:-1]
        == training.report.format_lines()
        == TrainingData.report(
            SimpleNamespace(dataset=training, validation_dataset=None, tokenizer=chatml)
        )
    )
    cfg.validation.source, cfg.validation.format = (
        rows_file(PAIR, name="pairs.jsonl"),
        "prompt_completion",
    )
    training, validation = build_datasets(cfg, chatml)
    assert (
        format_report_lines(training.report, validation.report)[-1]
        == "validation: no BOS is put before a sequence"
    )
