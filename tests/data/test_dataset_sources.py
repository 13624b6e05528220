"""Several sources, preference pairs, the share of what is trained, ends of turn, copies, places of
items.
"""

import numpy as np
import pytest

from recipe_lib.config.schema import DataConfig, SourceConfig
from recipe_lib.data import build_dataset
from recipe_lib.data.dataset import Dataset, find_copies
from recipe_lib.data.dataset_report import DataReport
from recipe_lib.errors import DataError


def build(tokenizer, max_seq_len=64, **settings):
    return build_dataset(DataConfig(**settings), tokenizer, max_seq_len)


def refused(line, tokenizer, max_seq_len=64, **settings):
    with pytest.raises(DataError, match=line) as caught:
        build(tokenizer, max_seq_len, **settings)
    assert "\n" not in str(caught.value)


def answers(dataset, tokenizer, row):
    """The trained text of a row, runs of it put together."""
    labels = dataset[row].labels
    return b"".join(tokenizer.get_token_bytes(int(label)) for label in labels[labels >= 0]).decode()


PAIRS = [
    {"prompt": f"the {word}", "completion": f" {word}"} for word in ("cat", "dog", "mat", "log")
]


def chat(question, answer):
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def preference(prompt, chosen, rejected):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def test_several_sources_follow_each_other(chatml, rows_file):
    first = rows_file(*PAIRS, name="a.jsonl")
    second = rows_file(chat("a user asks", "yes"), chat("a user asks", "no"), name="b.jsonl")
    third = rows_file({"question": "sat", "completion": "on", "id": 1}, name="c.jsonl")
    dataset = build(
        chatml,
        format="prompt_completion",
        sources=[
            SourceConfig(first, weight=2.0, max_samples=3),
            SourceConfig(second, weight=0.5, format="messages"),
            SourceConfig(third, columns={"prompt": "question"}),
        ],
    )
    assert dataset.source_of.dtype == np.int16 and dataset.source_of.tolist() == [0, 0, 0, 1, 1, 2]
    assert (
        dataset.weights == (2.0, 0.5, 1.0)
        and dataset.items == len(dataset) == 6
        and dataset.group == 1
    )
    assert dataset.item_lengths.tolist() == dataset.lengths.tolist()
    alone = build(chatml, source=second, format="messages")
    assert dataset[3].tokens.tolist() == alone[0].tokens.tolist()
    assert [dataset.locate_item(item) for item in (2, 3, 5)] == [
        f"{first}:3",
        f"{second}:1",
        f"{third}:1",
    ]
    with pytest.raises(IndexError):
        dataset.locate_item(6)
    lines = dataset.report.format_lines()
    assert (
        f"data: 6 sequences of 6 samples read from {first}, {second}, {third} (format"
        " prompt_completion, messages, temp" in lines[0]
    )
    tokens, trained = dataset.lengths[3:5].sum(), dataset.trained_counts[3:5].sum()
    share = f"{100 * trained / tokens:.1f} %"
    assert (
        lines[2]
        == f"data: 2 sequences of 2 samples from {second} (format messages), {tokens} tokens,"
        f" {share} trained"
    )
    assert (
        dataset.report.samples_read == sum(part.samples_read for part in dataset.report.parts) == 6
    )


def test_weights_and_sources_enter_the_fingerprint(chatml, rows_file):
    first, second = rows_file(*PAIRS[:2], name="a.jsonl"), rows_file(*PAIRS[2:], name="b.jsonl")
    both = rows_file(*PAIRS, name="c.jsonl")

    def printed(*sources):
        return build(chatml, format="prompt_completion", sources=list(sources)).fingerprint

    plain = printed(SourceConfig(first), SourceConfig(second))
    assert plain == printed(SourceConfig(first), SourceConfig(second, weight=1.0))
    others = {
        plain,
        printed(SourceConfig(first), SourceConfig(second, weight=2.0)),
        printed(SourceConfig(both)),
    }
    assert len(others | {printed(SourceConfig(second), SourceConfig(first))}) == 4


def test_a_source_without_usable_rows_is_refused_by_name(chatml, rows_file):
    good, bad = (
        rows_file(*PAIRS, name="a.jsonl"),
        rows_file({"prompt": 1, "completion": "b"}, name="b.jsonl"),
    )
    sources = [SourceConfig(good), SourceConfig(bad)]
    refused(r"b.jsonl: found no sample to train on among 1: 1 bad", chatml, format="prompt_completion", sources=sources,
            on_invalid="skip")  # fmt: skip
    refused(
        r"data.sources\[1\].columns.promt: the format prompt_completion has no such column.*did you"
        r" mean prompt",
        chatml,
        format="prompt_completion",
        sources=[SourceConfig(good), SourceConfig(good, columns={"promt": "x"})],
    )


def test_pairs_are_two_rows_that_stay_together(chatml, rows_file):
    rows = [preference("a user", "yes", "no, a cat"), preference("a dog", "sat on the mat", "sat")]
    source = rows_file(*rows)
    dataset = build(chatml, source=source, format="preference")
    assert dataset.group == 2 and dataset.items == 2 and len(dataset) == 4
    assert dataset.item_lengths.tolist() == [dataset.lengths[:2].sum(), dataset.lengths[2:].sum()]
    for item, row in enumerate(rows):
        assert answers(dataset, chatml, 2 * item) == f"{row['chosen']}<|im_end|>"
        assert answers(dataset, chatml, 2 * item + 1) == f"{row['rejected']}<|im_end|>"
        assert dataset.locate_item(item) == f"{source}:{item + 1}"
    assert dataset.source_of.tolist() == [0, 0]
    assert (
        f"data: 2 pairs of 2 samples read from {source} (format preference, template chat)"
        in dataset.report.format_lines()[0]
    )


def test_a_long_pair_stays_a_pair_or_goes(chatml, rows_file):
    long = preference("a", "the cat", "the cat sat on the mat and the dog sat on the log")
    gone = preference("the dog sat on the log and the cat sat on the mat and the dog", "yes", "no")
    alike = preference(
        "a", "the cat sat on the mat and the dog yes", "the cat sat on the mat and the dog no"
    )
    source = rows_file(long, gone, alike, preference("a", "yes", "no"))
    whole = build(chatml, source=source, format="preference")
    limit = int(whole.lengths[0]) + 1
    assert whole.lengths[1] > limit > whole.lengths[6:].max()
    cut = build(chatml, limit, source=source, format="preference")
    report = cut.report
    assert [cut.locate_item(item)[-2:] for item in range(cut.items)] == [":1", ":4"] and len(
        cut
    ) == 4
    assert cut.lengths[0] == whole.lengths[0] and cut.lengths[1] == limit
    assert cut[1].tokens.tolist() == whole[1].tokens[:limit].tolist()
    assert (report.truncated_sequences, report.emptied_sequences, report.untrained_ends) == (
        3,
        2,
        1,
    )
    kept = cut.trained_counts[:2].sum()
    assert report.long_answer_tokens == whole.trained_counts[:6].sum()
    assert report.lost_answer_tokens == report.long_answer_tokens - kept
    skipped = build(chatml, limit, source=source, format="preference", truncation="drop")
    assert [skipped.locate_item(item)[-2:] for item in range(skipped.items)] == [":4"]
    assert skipped.report.skipped_long_sequences == 3
    refused(rf":1: found {whole.lengths[1]} tokens, exp", chatml, limit, source=source, format="preference",
            truncation="error")  # fmt: skip


def test_pairs_and_rows_do_not_mix(chatml, rows_file):
    first = rows_file(preference("a user", "yes", "no"), name="a.jsonl")
    second = rows_file(*PAIRS, name="b.jsonl")
    sources = [
        SourceConfig(first, format="preference"),
        SourceConfig(second, format="prompt_completion"),
    ]
    refused(
        "found 1 preference pairs among 5 items, expected pairs alone or none",
        chatml,
        sources=sources,
    )


def test_every_token_trained_stops_the_run(chatml, plain, rows_file):
    source = rows_file(*({"prompt": "", "completion": word} for word in ("the cat", "the dog")))
    line = (
        r"rows.jsonl: found that every token is a label token in 2 sequences, expected prompts and"
        r" answers; correct "
        r"data.format, data.columns or data.train_on, or set data.check_label_mask to false if it"
        r" is meant$"
    )
    refused(line, chatml, source=source, format="prompt_completion")
    refused(line, plain, source=source, format="prompt_completion")  # a BOS in front is no prompt
    share = build(
        plain, source=source, format="prompt_completion", check_label_mask=False
    ).report.label_token_fraction
    assert share == 1.0
    assert len(build(chatml, source=source, format="prompt_completion", train_on="all")) == 2
    text = rows_file({"text": "the cat"}, name="text.jsonl")
    assert len(build(chatml, source=text, format="text")) == 1


def test_one_source_of_several_is_enough_to_stop(chatml, rows_file):
    good = rows_file(*PAIRS, name="good.jsonl")
    bare = rows_file({"prompt": "", "completion": "the cat"}, name="bare.jsonl")
    text = rows_file({"text": "the cat sat"}, name="text.jsonl")
    sources = [SourceConfig(good), SourceConfig(text, format="text"), SourceConfig(bare)]
    refused(
        "bare.jsonl: found that every token is a label token in 1 sequence",
        chatml,
        format="prompt_completion",
        sources=sources,
    )
    assert build(chatml, format="prompt_completion", sources=sources[:2]).items == 5


def test_no_token_trained_is_a_fault_too():
    report = DataReport("rows.jsonl", "messages", 8, sequences=3, tokens=12, prompt_tokens=15)
    with pytest.raises(
        DataError, match="rows.jsonl: found no label token in 3 sequences, expected"
    ):
        report.check_share()
    report.trained_tokens = 1
    report.check_share()


def test_a_prompt_of_one_token_is_a_prompt(chatml, rows_file):
    dataset = build(
        chatml,
        source=rows_file({"prompt": "the", "completion": " cat"}),
        format="prompt_completion",
    )
    assert (
        dataset.trained_counts[0] == dataset.lengths[0]
    )  # its one token is the first, which nothing predicts


def test_answers_that_lose_their_end_are_counted(chatml, rows_file):
    source = rows_file(chat("a", "the cat sat on the mat"), chat("a", "yes"))
    whole = build(chatml, source=source, format="messages")
    assert whole.report.untrained_ends == 0
    cut = build(chatml, int(whole.lengths[0]) - 1, source=source, format="messages")
    assert cut.report.untrained_ends == 1 and cut.trained_counts[0] == whole.trained_counts[0] - 1
    line = (
        "warning: data: 1 answers end without their end-of-turn token, so nothing teaches the model"
        " to stop there"
    )
    assert any(said.startswith(line) for said in cut.report.format_lines())


def test_copies_are_counted_and_the_first_is_named(chatml, rows_file):
    first = rows_file(*PAIRS, name="a.jsonl")
    second = rows_file(PAIRS[3], {"prompt": "the", "completion": " the"}, PAIRS[0], name="b.jsonl")
    dataset = build(
        chatml, format="prompt_completion", sources=[SourceConfig(first), SourceConfig(second)]
    )
    assert dataset.report.duplicate_sequences == 2
    line = (
        "data: 2 sequences are the same as an earlier one, and kept all the same "
        f"(first: {second}:1, the same as {first}:4)"
    )
    assert line in dataset.report.format_lines()
    found, earlier = find_copies(dataset.digests)
    assert found.tolist() == [4, 6] and earlier.tolist() == [3, 0]


def test_the_same_tokens_with_another_mask_are_no_copy(chatml, rows_file):
    dataset = build(
        chatml,
        source=rows_file(
            {"prompt": "the cat", "completion": " sat"}, {"prompt": "the", "completion": " cat sat"}
        ),
        format="prompt_completion",
    )
    assert (
        dataset[0].tokens.tolist() == dataset[1].tokens.tolist()
        and dataset.report.duplicate_sequences == 0
    )


def test_a_dataset_of_arrays_alone(chatml, rows_file):
    built = build(chatml, source=rows_file(*PAIRS), format="prompt_completion")
    ids = np.concatenate([np.append(built[n].tokens, 7) for n in range(4)]).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(built.lengths + 1)])
    made = Dataset(
        ids, offsets, np.ones(len(ids), np.uint8), DataReport("made", "text", 64), "x", group=2
    )
    assert (
        made.items == 2
        and len(made) == 4
        and made.weights == (1.0,)
        and made.source_of.tolist() == [0, 0]
    )
    assert made.locate_item(1) == "made (item 2)" and len(set(made.digests.tolist())) == 2


def test_equal_items_have_equal_digests_however_they_are_stored(chatml, rows_file):
    stored = build(chatml, source=rows_file(*PAIRS), format="prompt_completion")
    bare = Dataset(stored.ids, stored._offsets, stored._trained, stored.report, "x")
    assert bare.digests.tolist() == stored.digests.tolist()


def test_a_text_keeps_the_place_of_its_file(plain, tmp_path):
    for name, text in (("a.txt", "the cat sat on the mat.\n" * 20), ("b.txt", "the dog sat")):
        (tmp_path / name).write_text(text)
    dataset = build(plain, 10, source=str(tmp_path), format="text")
    places = [dataset.locate_item(item) for item in range(dataset.items)]
    assert places == [str(tmp_path / "a.txt")] * (len(places) - 1) + [str(tmp_path / "b.txt")]
