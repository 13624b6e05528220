"""A dataset holds the right tokens and labels, and says what became of every row."""

import hashlib
import json

import numpy as np
import pytest

from recipe_lib.config import registry
from recipe_lib.config.registry import register
from recipe_lib.config.schema import DataConfig, FullFinetuneConfig
from recipe_lib.data import (
    build_dataset,
    build_validation_dataset,
    check_vocabulary,
    warn_of_positions,
)
from recipe_lib.data.samples import Completion
from recipe_lib.errors import DataError
from recipe_lib.logs import get_logger
from recipe_lib.tokenizers import load_tokenizer
from tests.tokenizers.made import write_json


def build(source, tokenizer, max_seq_len=64, format="prompt_completion", **settings):
    return build_dataset(
        DataConfig(source=str(source), format=format, **settings), tokenizer, max_seq_len
    )


def refused(line, *args, **settings):
    with pytest.raises(DataError, match=line) as caught:
        build(*args, **settings)
    assert all(fault and "\n" not in fault for fault in caught.value.faults)


PAIR = {"prompt": "the", "completion": " cat"}


def test_labels_are_the_next_tokens_of_the_answer(chatml, rows_file):
    dataset = build(rows_file(PAIR), chatml)
    row, ids = dataset[0], chatml.encode("the") + chatml.encode(" cat") + [chatml.eos_id]
    assert row.tokens.tolist() == ids[:-1]
    assert [label for label in row.labels.tolist() if label != -100] == chatml.encode(" cat") + [
        chatml.eos_id
    ]
    for at, label in enumerate(row.labels.tolist()):
        assert label in (-100, ids[at + 1])
    assert row.tokens.dtype == row.labels.dtype == np.int32 and len(row.tokens) == len(row.labels)
    assert (row.labels != -100).sum() == dataset.trained_counts[0]
    assert (
        dataset.lengths.tolist() == [len(ids) - 1]
        and len(dataset) == 1
        and dataset.largest_id == max(ids)
    )
    with pytest.raises(IndexError):
        dataset[1]


def test_report_of_clean_rows(chatml, rows_file):
    source = rows_file(PAIR, PAIR | {"prompt": "a"})
    dataset = build(source, chatml)
    share = 100 * dataset.trained_counts.sum() / dataset.lengths.sum()
    assert dataset.report.format_lines() == [
        (
            f"data: 2 sequences of 2 samples read from {source} (format prompt_completion, template"
            f" none), {dataset.lengths.sum()} tokens; label tokens: answers incl. end-of-turn,"
            f" {share:.1f} %"
        ),
        "data: no BOS is put before a sequence",
    ]


def test_report_says_which_template_and_bos(chatml, plain, rows_file):
    source = rows_file({"instruction": "a", "output": "b"})
    chat = build(source, chatml, format="alpaca").report.format_lines()
    assert (
        "template chat" in chat[0]
        and chat[1] == "data: the chat template decides whether a sequence begins with BOS"
    )
    lines = build(source, plain, format="alpaca", train_on="all").report.format_lines()
    assert "template plain" in lines[0] and "label tokens: all tokens, 100.0 %" in lines[0]
    assert lines[1] == "data: each sequence begins with BOS"
    assert "no BOS" in build(source, plain, format="alpaca", add_bos=False).report.format_lines()[1]


def test_truncated_rows_are_counted_with_what_they_lose(chatml, rows_file):
    long = {"prompt": "a", "completion": "b " * 9}
    source = rows_file(PAIR, long, {"prompt": "c " * 9, "completion": "d"}, PAIR)
    answer = len(chatml.encode("b " * 9)) + 1
    dataset = build(source, chatml, max_seq_len=8)
    report = dataset.report
    assert dataset.lengths.max() == 8 and len(dataset) == 3
    assert (
        report.truncated_sequences,
        report.emptied_sequences,
        report.skipped_long_sequences,
    ) == (2, 1, 0)
    kept = 8 - len(chatml.encode("a")) + 1
    lost = answer - kept + 2  # and the row whose answer is gone
    assert report.lost_answer_tokens == lost and report.long_answer_tokens == answer + 2
    assert (
        report.format_lines()[2]
        == "warning: data: 2 of 4 sequences (50.0 %) exceed 8 tokens and were truncated, 1 of them"
        f" left out because no answer was left; {100 * lost / (answer + 2):.1f} % of their"
        " answer tokens lost"
    )
    assert (dataset[1].labels != -100).sum() == kept == dataset.trained_counts[1]


def test_long_rows_can_be_skipped_or_refused(chatml, rows_file):
    source = rows_file(PAIR, {"prompt": "a", "completion": "b " * 9}, PAIR)
    dataset = build(source, chatml, max_seq_len=8, truncation="drop")
    assert len(dataset) == 2 and dataset.report.skipped_long_sequences == 1
    line = (
        "warning: data: 1 of 3 sequences (33.3 %) exceed 8 tokens and were left out; 100.0 % of"
        " their answer tokens lost"
    )
    assert line in dataset.report.format_lines()
    number = len(build(source, chatml, max_seq_len=99)[1].tokens)
    expected = (
        rf"rows.jsonl:2: found {number} tokens, expected at most max_seq_len=8; raise max_seq_len,"
        r" or set "
    )
    expected += "data.truncation"
    refused(expected, source, chatml, max_seq_len=8, truncation="error")


@pytest.mark.parametrize("length", [0, 1])
def test_a_row_of_exactly_the_limit_is_kept_whole(chatml, rows_file, length):
    source = rows_file({"prompt": "a", "completion": "b " * 9})
    whole = build(source, chatml, max_seq_len=99)
    cut = build(source, chatml, max_seq_len=int(whole.lengths[0]) - length)
    assert cut.report.truncated_sequences == length
    assert cut.lengths[0] == whole.lengths[0] - length


def test_bad_rows_stop_the_run_or_are_counted_by_cause(chatml, rows_file):
    source = rows_file(
        PAIR,
        {"prompt": 1, "completion": "x"},
        {"prompt": 2, "completion": "x"},
        {"prompt": "x"},
        PAIR | {"prompt": "a"},
    )
    with open(source, "ab") as file:
        file.write(b'{"prompt": "\xff"}\n{oops}\n')
    refused(
        r"(?s)rows.jsonl:2: .prompt: found a number, expected text\n.*rows.jsonl:3: .*rows.jsonl:"
        r" found 5 samples of 7 "
        r"that cannot be used; correct them, or set data.on_invalid to skip",
        source,
        chatml,
    )
    dataset = build(source, chatml, on_invalid="skip")
    assert len(dataset) == 2 and dataset.report.samples_read == 7
    assert dataset.report.format_lines()[2:] == [
        (
            "warning: data: 5 of 7 samples are bad and were left out: "
            "prompt is no text 2, no column completion 1, not UTF-8 1, invalid JSON 1"
        ),
        f"data: first with prompt is no text: {source}:2: .prompt: found a number, expected text",
        (
            f"data: first with no column completion: {source}:4: found the columns prompt, expected"
            " completion (format prompt_completion); name yours with data.columns.completion=NAME"
        ),
        f"data: first with not UTF-8: {source}:6: column 13: found the byte 0xff, expected UTF-8",
        (
            f"data: first with invalid JSON: {source}:7: column 2: invalid JSON (Expecting property"
            " name enclosed in double quotes), expected an object a line"
        ),
    ]


def test_columns_are_mapped(chatml, rows_file):
    source = rows_file({"question": "the ", "answer": "cat", "prompt": "not this"})
    mapped = {"prompt": "question", "completion": "answer"}
    dataset = build(source, chatml, columns=mapped, ignore_columns=["prompt"])
    assert chatml.decode(dataset[0].tokens) == "the cat"
    refused(r"rows.jsonl:1: .prompt: found text, which the format", source, chatml, columns=mapped)
    line = (
        r"found the columns answer, prompt, question, expected completion \(format.*name yours with"
        r" data.columns.comple"
    )
    refused(line, source, chatml)
    refused(
        r"expected nowhere \(format",
        source,
        chatml,
        columns={"prompt": "question", "completion": "nowhere"},
    )
    line = (
        r"data.columns.promt: the format prompt_completion has no such column, expected one of"
        r" prompt, completion, s"
    )
    refused(line, source, chatml, columns={"promt": "question"})


def test_max_rows_reads_no_further(chatml, rows_file):
    source = rows_file(PAIR, PAIR, {"prompt": 3})
    assert len(build(source, chatml, max_samples=2)) == 2


def test_nothing_to_train_on(chatml, rows_file, tmp_path):
    (tmp_path / "a.json").write_text("[]")
    refused(r"a.json: found no samples, expected at least one", tmp_path / "a.json", chatml)
    source = rows_file({"prompt": 1}, {"prompt": "c " * 9, "completion": "d"})
    line = (
        r"found no sample to train on among 2: 1 bad \(.*rows.jsonl:1: found the columns"
        r" prompt.*\), 1 with the whole "
        r"answer after max_seq_len=4; raise max_seq_len$"
    )
    refused(line, source, chatml, max_seq_len=4, on_invalid="skip")
    refused(
        r"among 1: 1 bad \(.*\); correct the samples$",
        rows_file({"prompt": 1}),
        chatml,
        on_invalid="skip",
    )
    source = rows_file({"prompt": 1}, {"prompt": "c " * 9, "completion": "d"})
    refused(
        r"1 longer than max_seq_len=4",
        source,
        chatml,
        max_seq_len=4,
        on_invalid="skip",
        truncation="drop",
    )
    with pytest.raises(DataError, match="data.source: is not set; set it to a file or folder"):
        build_dataset(DataConfig(), chatml, 8)


def test_text_is_cut_in_file_order(plain, tmp_path):
    text = "the cat sat on the mat.\r\n" * 5
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.txt").write_text("dog cat")
    dataset = build(tmp_path, plain, max_seq_len=10, format="text")
    ids = [*plain.encode(text, add_bos=True), plain.eos_id]
    assert ids[0] == plain.bos_id
    starts = range(0, len(ids) - 1, 10)
    for at, start in enumerate(starts):
        piece = ids[start : start + 11]
        assert (
            dataset[at].tokens.tolist() == piece[:-1] and dataset[at].labels.tolist() == piece[1:]
        )
    short = [*plain.encode("dog cat", add_bos=True), plain.eos_id]
    assert len(dataset) == len(starts) + 1 and dataset[len(starts)].tokens.tolist() == short[:-1]
    assert (
        f"data: {len(dataset)} sequences cut from 2 texts read from"
        in dataset.report.format_lines()[0]
    )
    assert "label tokens: all tokens, 100.0 %" in dataset.report.format_lines()[0]
    assert dataset.report.trained_tokens == dataset.trained_counts.sum() == dataset.lengths.sum()
    without = build(tmp_path, plain, max_seq_len=10, format="text", add_bos=False)
    assert without[0].tokens.tolist() == ids[1:11]


def test_text_of_json_rows_and_of_one_token(plain, chatml, rows_file):
    dataset = build(
        rows_file({"text": "the cat"}, {"text": "a"}), plain, format="text", add_eos=False
    )
    assert len(dataset) == 2 and dataset[1].tokens.tolist() == [plain.bos_id]
    source = rows_file({"text": "the cat"}, {"text": "a"})
    assert build(source, chatml, format="text")[1].labels.tolist() == [chatml.eos_id]
    line = r"rows.jsonl:2: found a text of 1 tokens, expected at least 2"
    refused(line, source, chatml, format="text", add_eos=False)


def test_a_text_file_for_another_format(chatml, tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    line = (
        r"a.txt: found a text file, expected .json or .jsonl for the format alpaca; set data.format"
        r" to text"
    )
    refused(line, tmp_path, chatml, format="alpaca")


def test_fingerprint_changes_with_rows_and_settings_only(chatml, plain, rows_file):
    source = rows_file(PAIR, PAIR)
    first = build(source, chatml)
    assert first.fingerprint == build(source, chatml).fingerprint
    assert len(bytes.fromhex(first.fingerprint)) == hashlib.sha256().digest_size
    others = [
        build(source, plain), build(source, chatml, max_seq_len=63), build(source, chatml, train_on="all"),
        build(source, chatml, max_samples=1), build(rows_file(PAIR, PAIR | {"prompt": "a "}), chatml),
        build(rows_file({"prompt": "the cat", "completion": " sat"}), chatml),
        build(rows_file({"prompt": "the", "completion": " cat sat"}), chatml),
    ]  # fmt: skip
    assert (
        others[-1][0].tokens.tolist() == others[-2][0].tokens.tolist()
    )  # these two differ in the mask alone
    prints = {dataset.fingerprint for dataset in [first, *others]}
    assert len(prints) == 1 + len(others)


def test_validation_rows(chatml, rows_file, tmp_path):
    cfg = FullFinetuneConfig(max_seq_len=32)
    cfg.data = DataConfig(source="unused", format="alpaca", max_samples=1)
    assert build_validation_dataset(cfg, chatml) is None
    cfg.validation.source = rows_file(PAIR, PAIR, PAIR)
    cfg.validation.format = "prompt_completion"
    assert len(build_validation_dataset(cfg, chatml)) == 3
    cfg.validation.max_samples = 2
    assert len(build_validation_dataset(cfg, chatml)) == 2


@pytest.mark.parametrize(
    ("own", "of_training", "asked"), [("test", "train", "test"), (None, "other", "other")]
)
def test_split_of_validation(own, of_training, asked, chatml, monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = {"test": [PAIR] * 3, "other": [PAIR] * 2}
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda name, subset=None, *, split: datasets.Dataset.from_list(rows[split]),
    )
    cfg = FullFinetuneConfig(max_seq_len=32)
    cfg.data = DataConfig(
        source="hub:owner/name", split=of_training, format="prompt_completion", cache=False
    )
    cfg.validation.source, cfg.validation.split = "hub:owner/name", own
    assert len(build_validation_dataset(cfg, chatml)) == len(rows[asked])


def test_format_of_a_plugin(chatml, rows_file, monkeypatch):
    own = {kind: dict(components) for kind, components in registry._components.items()}
    monkeypatch.setattr(registry, "_components", own)

    @register("data.format", "reversed_pairs")
    def read_reversed(row):
        return Completion(row["b"], row["a"])

    dataset = build(
        rows_file({"a": "cat", "b": "the "}), chatml, format="reversed_pairs", columns={"b": "b"}
    )
    assert chatml.decode(dataset[0].tokens) == "the cat"


def test_rows_longer_than_the_model_are_warned_of(plain, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(get_logger(), "propagate", True)
    (tmp_path / "a.txt").write_text("the cat sat on the mat.\n" * 5)
    dataset = build(tmp_path, plain, max_seq_len=10, format="text")
    warn_of_positions(10, dataset, None)
    assert not caplog.records
    warn_of_positions(9, dataset, None)
    long, count = (dataset.lengths > 9).sum(), len(dataset)
    assert (
        f"warning: {long} of {count} sequences of {tmp_path} are longer than the 9 tokens"
        in caplog.text
    )


def test_vocabulary_and_model(chatml, rows_file, tmp_path):
    dataset = build(rows_file(PAIR), chatml)
    check_vocabulary(chatml, chatml.vocab_size, dataset, None)
    check_vocabulary(chatml, chatml.vocab_size + 64)
    size = chatml.ordinary_size
    with pytest.raises(
        DataError,
        match=rf"found {size} tokens, expected at most the model's vocab_size={size - 1}; set to",
    ):
        check_vocabulary(chatml, size - 1)


def test_a_special_token_beyond_the_model_is_refused_where_a_row_has_it(
    chatml, rows_file, tmp_path
):
    write_json(tmp_path)
    size = chatml.ordinary_size
    flags = {
        "special": True,
        "lstrip": False,
        "rstrip": False,
        "single_word": False,
        "normalized": False,
    }
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"].append(flags | {"id": size, "content": "<image>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    source = rows_file({"instruction": "a", "output": "b"})
    check_vocabulary(tokenizer, size, build(source, tokenizer, format="alpaca"))
    (tmp_path / "chat_template.jinja").write_text(
        "<image>{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    used = build(source, load_tokenizer(tmp_path), format="alpaca")
    with pytest.raises(
        DataError,
        match=rf"found the token '<image>' with the id {size}, expected ids below the model's",
    ):
        check_vocabulary(tokenizer, size, used)


def test_real_sets_end_to_end(realdata):
    tokenizer = load_tokenizer(realdata / "stories260K-hf")
    folder = realdata / "datasets"
    shakespeare = build(
        folder / "text" / "tinyshakespeare.txt", tokenizer, max_seq_len=256, format="text"
    )
    ids = tokenizer.encode(
        (folder / "text" / "tinyshakespeare.txt").read_bytes().decode(), add_bos=True
    )
    assert len(shakespeare) == -(-len(ids) // 256)
    assert shakespeare[3].tokens.tolist() == ids[3 * 256 : 4 * 256]
    assert np.array_equal(shakespeare[3].labels, ids[3 * 256 + 1 : 4 * 256 + 1])
    mapped = {"prompt": "question", "completion": "answer"}
    gsm = build(
        folder / "gsm8k" / "test.jsonl", tokenizer, max_seq_len=2048, columns=mapped, max_samples=50
    )
    rows = [
        json.loads(line) for line in (folder / "gsm8k" / "test.jsonl").read_text().splitlines()[:50]
    ]
    for row, dataset_row in zip(rows, map(gsm.__getitem__, range(50)), strict=True):
        labels = [int(i) for i in dataset_row.labels if i != -100]
        assert labels[-1] == tokenizer.eos_id
        said = tokenizer.decode([*dataset_row.tokens.tolist(), labels[-1]])
        whole = f"<s>{row['question']}{row['answer']}</s>"
        assert said == " ".join(
            part for part in whole.split(" ") if part
        )  # this model writes one space for several
