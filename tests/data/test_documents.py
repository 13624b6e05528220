"""Documents: every token is a target once, the last of them EOS, whatever the length; nothing of a
text is left out.
"""

import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe_lib.config.schema import DataConfig, FullFinetuneConfig
from recipe_lib.data import build_dataset, build_datasets
from recipe_lib.data.data_plan import pack
from recipe_lib.tokenizers import load_tokenizer
from tests.selection import mark_slow_except
from tests.tokenizers.made import write_json

LIMIT = 8


def build(source, tokenizer, limit=LIMIT, **changed):
    cfg = DataConfig(
        source=source, format="text", cache=False, shuffle=False, num_proc=1, **changed
    )
    return build_dataset(cfg, tokenizer, limit)


def join(dataset, first, count):
    """The ids of a document out of its sequences, each of which begins with the last target of the
    one before.
    """
    ids = [int(dataset[first].tokens[0])]
    for number in range(first, first + count):
        sequence = dataset[number]
        assert sequence.tokens.tolist() == [ids[-1], *sequence.labels.tolist()[:-1]]
        assert (
            -100 not in sequence.labels and 1 <= len(sequence.tokens) <= dataset.report.max_seq_len
        )
        ids += sequence.labels.tolist()
    return ids


def check_documents(dataset, expected, limit):
    """expected: the ids of each document."""
    counts = [-(-(len(ids) - 1) // limit) for ids in expected]
    assert len(dataset) == sum(counts)
    for at, (ids, count) in enumerate(zip(expected, counts, strict=True)):
        first = sum(counts[:at])
        assert join(dataset, first, count) == ids
        assert [len(dataset[number].tokens) for number in range(first, first + count - 1)] == [
            limit
        ] * (count - 1)
    report = dataset.report
    assert (
        report.tokens
        == report.trained_tokens
        == report.text_tokens
        == sum(len(ids) - 1 for ids in expected)
    )
    assert report.texts == len(expected) and report.label_token_fraction == 1


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("add_eos", [True, False])
def test_texts_of_every_length_around_the_limit_are_whole(
    chatml, plain, rows_file, adds_bos, add_eos
):
    tokenizer = plain if adds_bos else chatml
    (letter,) = tokenizer.encode("z")
    lengths = range(2, 4 * LIMIT + 3)
    dataset = build(
        rows_file(*({"text": "z" * length} for length in lengths)), tokenizer, add_eos=add_eos
    )
    bos, eos = [tokenizer.bos_id] * adds_bos, [tokenizer.eos_id] * add_eos
    check_documents(dataset, [[*bos, *[letter] * length, *eos] for length in lengths], LIMIT)


@settings(max_examples=40, deadline=None)
@given(texts=st.lists(st.text(st.sampled_from("the cat\n"), min_size=2, max_size=90), min_size=1, max_size=6),
       limit=st.integers(1, 40))  # fmt: skip
def test_any_texts_come_out_whole(plain, tmp_path_factory, texts, limit):
    folder = tmp_path_factory.mktemp("texts")
    texts = [text + "a" for text in texts]
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_bytes(text.encode())
    dataset = build(str(folder), plain, limit)
    check_documents(
        dataset, [[*plain.encode(text, add_bos=True), plain.eos_id] for text in texts], limit
    )
    packs = pack(dataset.item_lengths, limit)
    assert sorted(packs.items.tolist()) == list(range(len(dataset)))


@pytest.mark.parametrize("name", mark_slow_except(["smollm2", "qwen2_5"], ["smollm2"]))
def test_real_texts_are_transformers_ids_and_eos(real_folder, realdata, name):
    transformers = pytest.importorskip("transformers")
    folder = real_folder(name)
    ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(str(folder))
    text = (realdata / "datasets" / "text" / "tinyshakespeare.txt").read_text()[:4000]
    (file := folder / "part.txt").write_text(text)
    expected = [*theirs(text)["input_ids"], theirs.eos_token_id]
    for limit in (100, len(expected) - 2, len(expected) - 1, len(expected)):
        check_documents(build(str(file), ours, limit), [expected], limit)


def test_a_spelled_end_or_begin_is_not_put_again(plain, chatml, rows_file):
    begin, end, cat = plain.bos_id, plain.eos_id, plain.encode("the cat")
    texts = {
        "the cat<|im_end|>": [begin, *cat, end],
        "<|bos|>the cat": [begin, *cat, end],
        "<|bos|>the cat<|im_end|> \n": [begin, *cat, end, *plain.encode(" \n")],
        "<|bos|><|bos|>the cat": [begin, begin, *cat, end],
        "the cat<|im_end|>the cat": [begin, *cat, end, *cat, end],
    }
    for text, expected in texts.items():
        check_documents(build(rows_file({"text": text}), plain), [expected], LIMIT)
    assert build(rows_file({"text": "the cat<|pad|>"}), plain)[0].labels[-1] == end


def test_a_cut_document_has_its_eos_at_its_real_end_alone(plain, rows_file):
    dataset = build(rows_file({"text": "z" * 50}), plain)
    ends = [plain.eos_id in dataset[number].labels for number in range(len(dataset))]
    assert ends == [False] * (len(dataset) - 1) + [True]


def test_a_tokenizer_without_eos_is_told(rows_file, tmp_path):
    tokenizer = load_tokenizer(write_json(tmp_path / "none", template=None, eos_token=None))
    line = (
        "warning: data: the tokenizer has no EOS token, so that nothing says where a text ends; set"
        " eos_token in "
    )
    dataset = build(rows_file({"text": "z" * 5}), tokenizer)
    check_documents(dataset, [tokenizer.encode("z" * 5)], LIMIT)
    assert any(one.startswith(line) for one in dataset.report.format_lines())
    quiet = build(rows_file({"text": "z" * 5}), tokenizer, add_eos=False)
    assert not any("EOS" in one for one in quiet.report.format_lines() if one.startswith("warning"))
    assert dataset.ids.tolist() == quiet.ids.tolist()


def test_validation_has_the_same_ends(plain, rows_file):
    cfg = FullFinetuneConfig(max_seq_len=LIMIT)
    cfg.data = DataConfig(source=rows_file({"text": "z" * 20}), format="text", cache=False)
    cfg.validation.source = rows_file({"text": "z" * 11}, name="held_out.jsonl")
    for add_eos in (True, False):
        cfg.data.add_eos = add_eos
        (letter,) = plain.encode("z")
        for dataset, length in zip(build_datasets(cfg, plain), (20, 11), strict=True):
            check_documents(
                dataset, [[plain.bos_id, *[letter] * length, *[plain.eos_id] * add_eos]], LIMIT
            )


def test_new_keys_make_another_cache_and_another_fingerprint_and_defaults_do_not(
    chatml, rows_file, tmp_path
):
    rows = [{"text": "a <|im_start|> cat"}]
    kept = tmp_path / "kept"

    def print_of(**changed):
        cfg = DataConfig(source=rows_file(*rows), format="text", cache_dir=str(kept), **changed)
        return build_dataset(cfg, chatml, 64).fingerprint

    changes = [
        {},
        {"add_eos": False},
        {"parse_special_tokens": False},
        {"parse_special_tokens": True},
    ]
    prints = [print_of(**changed) for changed in changes]
    folders = [path for path in kept.iterdir() if path.is_dir()]
    assert len(set(prints)) == len(folders) == len(changes)
    assert [print_of(**changed) for changed in changes] == prints
    assert len([path for path in kept.iterdir() if path.is_dir()]) == len(changes)
    shutil.rmtree(kept)
