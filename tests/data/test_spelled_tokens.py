"""Special tokens that samples spell out, in every format and place: the ids are those of
transformers, the end is there once, and each token that was met is counted and named.
"""

import itertools
import json
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import tokenizers

from recipe_lib.config.schema import DataConfig
from recipe_lib.data import build_dataset
from recipe_lib.data.inspect import inspect_datasets
from recipe_lib.tokenizers import load_tokenizer
from tests.selection import mark_slow_except

transformers = pytest.importorskip("transformers")

OWN = "<call>"  # a token that a user has added to SmolLM2's
PARSE = (None, True, False)
PLACES = {
    "none": "Say a name",
    "beginning": "{0}Say a name",
    "middle": "Say {0} a name",
    "end": "Say a name{0}",
    "alone between spaces": "Say {0} {0}\n a name {0} \n",
}


@dataclass
class Case:
    """A tokenizer, transformers' of the same folder, and the special tokens that are tried."""

    ours: Any
    theirs: Any
    tokens: list[str]

    def read(self, text: str, parses: bool) -> list[int]:
        """transformers' ids of a text, with BOS once where it begins texts with it."""
        ids = self.theirs(text, add_special_tokens=False, split_special_tokens=not parses)[
            "input_ids"
        ]
        bos = self.theirs.bos_token_id
        return [bos, *ids] if self.ours.add_bos_by_default and ids[:1] != [bos] else ids

    def end(self, text: str, parses: bool) -> list[int]:
        """EOS, unless a text ends with a token that generation stops at."""
        ends = [
            token
            for token in self.tokens
            if self.theirs.convert_tokens_to_ids(token) in self.ours.stop_ids
        ]
        return [] if parses and text.rstrip().endswith(tuple(ends)) else [self.theirs.eos_token_id]


@pytest.fixture(scope="module")
def case_of(real_folder, tmp_path_factory):
    known: dict[str, Case] = {}

    def get(name: str) -> Case:
        if name not in known:
            folder = real_folder("smollm2" if name == "own" else name)
            if name in ("own", "mistral"):
                folder = shutil.copytree(folder, tmp_path_factory.mktemp("special") / name)
                for piece in folder.glob("*.model*"):
                    piece.unlink()
            if name == "own":
                with_own = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
                with_own.add_special_tokens([OWN])
                with_own.save(str(folder / "tokenizer.json"))
            # AutoTokenizer puts other spaces behind special tokens than Mistral's tokenizer.json
            # says.
            kind = (
                transformers.PreTrainedTokenizerFast
                if name == "mistral"
                else transformers.AutoTokenizer
            )
            ours, theirs = load_tokenizer(folder), kind.from_pretrained(str(folder))
            turns = [
                token
                for token in ours.special_texts
                if re.search("start|eot|end|inst", token.lower())
            ]
            roles = [
                theirs.bos_token,
                theirs.eos_token,
                *turns[:4],
                *([OWN] if name == "own" else []),
            ]
            known[name] = Case(ours, theirs, list(dict.fromkeys(token for token in roles if token)))
        return known[name]

    return get


def build(case: Case, rows_file, format: str, *rows: Any, **settings: Any) -> Any:
    source = rows_file(*rows)
    cfg = DataConfig(
        source=source, format=format, cache=False, shuffle=False, num_proc=1, **settings
    )
    return build_dataset(cfg, case.ours, 512)


def ids_of(dataset: Any, number: int) -> list[int]:
    sequence = dataset[number]
    return [*sequence.tokens.tolist(), dataset.ids[dataset._offsets[number + 1] - 1].item()]


def labels_of(dataset: Any, number: int) -> list[int]:
    return [label for label in dataset[number].labels.tolist() if label != -100]


def count(case: Case, *texts: str) -> Counter[str]:
    return Counter(
        token for token in case.tokens for text in texts for _ in range(text.count(token))
    )


def check_counts(dataset: Any, parses: bool, *met: Counter[str]) -> None:
    """What each sample holds is in the report by token, in its lines, and a fault where it stays
    text.
    """
    special, total = dataset.report.special, sum(met, Counter())
    assert (special.parsed, special.unparsed) == (
        (total, Counter()) if parses else (Counter(), total)
    )
    lines = "\n".join(dataset.report.format_lines())
    assert all(repr(token) in lines for token, _ in total.most_common(5))
    faulty = [number for number, tokens in enumerate(met, start=1) if tokens and not parses]
    assert ("data.parse_special_tokens=true" in lines) is bool(faulty)
    faults = {one.name: one for one in inspect_datasets(dataset, None, 512, None).findings}
    assert ("split-special-tokens" in faults) is bool(faulty)
    if faulty:
        fault = faults["split-special-tokens"]
        assert fault.count == special.samples == len(faulty)
        named = [
            re.search(r"rows.jsonl:(\d+): found (.*)", place).groups() for place in fault.places
        ]
        assert [int(line) for line, _ in named] == faulty[:5]
        assert all(repr(token) in said for line, said in named for token in met[int(line) - 1])


def write_texts(case: Case) -> list[str]:
    return list(
        dict.fromkeys(text.format(token) for text in PLACES.values() for token in case.tokens)
    )


@pytest.mark.parametrize("name", mark_slow_except(["llama3_1", "qwen2_5", "mistral"], ["llama3_1"]))
def test_a_text_is_what_transformers_reads(case_of, rows_file, name):
    case = case_of(name)
    texts = write_texts(case)
    for parse in PARSE:
        parses, expected = (
            parse is not False,
            [case.read(text, parse is not False) for text in texts],
        )
        met = [count(case, text) for text in texts]
        rows = [{"text": text} for text in texts]
        dataset = build(case, rows_file, "text", *rows, parse_special_tokens=parse)
        for number, text in enumerate(texts):
            assert ids_of(dataset, number) == [*expected[number], *case.end(text, parses)], (
                text,
                parse,
            )
        check_counts(dataset, parses, *met)
        without = build(case, rows_file, "text", *rows, parse_special_tokens=parse, add_eos=False)
        assert [ids_of(without, number) for number in range(len(texts))] == expected
        labeled = [row | {"label": 1} for row in rows]
        classified = build(case, rows_file, "classification", *labeled, parse_special_tokens=parse)
        assert [ids_of(classified, number) for number in range(len(texts))] == expected
        check_counts(classified, parses, *met)


@pytest.mark.parametrize("name", mark_slow_except(["own", "smollm2"], ["own"]))
def test_a_completion_is_what_transformers_reads_from_its_border_on(case_of, rows_file, name):
    case = case_of(name)
    pairs = [(text, " of a cat") for text in write_texts(case)]
    pairs += [
        (begin, text)
        for begin in ("What now?\n", f"{case.tokens[-1]}\n")
        for text in write_texts(case)
    ]
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    for parse in PARSE:
        parses = parse is not False
        dataset = build(case, rows_file, "prompt_completion", *rows, parse_special_tokens=parse)
        unlike = 0
        for number, (prompt, completion) in enumerate(pairs):
            before, ids = case.read(prompt, parses), ids_of(dataset, number)
            assert ids[: len(before)] == before
            assert len(labels_of(dataset, number)) == len(ids) - max(1, len(before)), (
                prompt,
                completion,
                parse,
            )
            unlike += ids != [
                *case.read(prompt + completion, parses),
                *case.end(completion, parses),
            ]
        assert unlike <= dataset.report.apart_samples <= len(pairs) / 4
        check_counts(dataset, parses, *(count(case, *pair) for pair in pairs))


CHATS = ["smollm2", "qwen2_5", "llama3_1"]  # those with a chat template


def render(case: Case, messages: list[dict[str, str]], prompt: bool) -> str:
    return case.theirs.apply_chat_template(
        messages, add_generation_prompt=prompt, tokenize=False, date_string="26 Jul 2024"
    )


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("tail", ["", "\n", "no end"])
def test_rendered_pairs_and_labeled_answers_are_encoded_as_they_stand(
    case_of, rows_file, name, tail
):
    case = case_of(name)
    asked, good, bad = {"role": "user", "content": "Hi"}, "Yo, my friend", "No way"
    prompt = render(case, [asked], prompt=True)
    end = "" if tail == "no end" else case.theirs.eos_token + tail
    for beside, held in itertools.product(({"prompt": prompt}, {"prompt": ""}, {}), (False, True)):
        given = beside.get("prompt") or ""
        before = "" if given and not held else prompt
        row = {"chosen": f"{before}{good}{end}", "rejected": f"{before}{bad}{end}"} | beside
        pair = build(case, rows_file, "preference", row)
        for number, answer in enumerate((good, bad)):
            expected = [*case.read(prompt + answer + end, True), *case.end(answer + end, True)]
            assert ids_of(pair, number) == expected
            assert labels_of(pair, number) == expected[len(case.read(prompt, True)) :]
        assert pair.report.special.rendered == 1 and pair.report.template == "none"
        texts = [prompt, good + end, bad + end] if given else [row["chosen"], row["rejected"]]
        if not (given and held):
            check_counts(pair, True, count(case, *texts))
    labeled = {"prompt": prompt, "completion": good + end, "label": True}
    answer = build(case, rows_file, "kto", labeled)
    assert ids_of(answer, 0) == [*case.read(prompt + good + end, True), *case.end(good + end, True)]
    check_counts(answer, True, count(case, prompt, good + end))
    classified = build(case, rows_file, "classification", {"prompt": prompt, "label": "a"})
    assert ids_of(classified, 0) == case.read(prompt, True)


@pytest.mark.parametrize("name", CHATS)
def test_an_end_behind_a_plain_answer_is_the_templates(case_of, rows_file, name):
    case = case_of(name)
    for tail in ("", " \n"):
        end = case.theirs.eos_token + tail
        rows = {"prompt": "Hi", "chosen": "Yo", "rejected": "No"}
        plain = build(case, rows_file, "preference", rows)
        ended = build(
            case, rows_file, "preference", rows | {"chosen": f"Yo{end}", "rejected": f"No{end}"}
        )
        assert (
            ended.ids.tolist() == plain.ids.tolist()
            and ended.trained_counts.tolist() == plain.trained_counts.tolist()
        )
        check_counts(plain, True, Counter())
        assert ended.report.special.rendered == 0 and ended.report.template == "chat"
        as_text = build(
            case, rows_file, "preference", rows | {"chosen": f"Yo{end}"}, parse_special_tokens=False
        )
        assert len(as_text.ids) > len(plain.ids)
        check_counts(as_text, False, Counter([case.theirs.eos_token]))
        one = {"prompt": "Hi", "label": True}
        kept = [
            build(case, rows_file, "kto", one | {"completion": said}).ids.tolist()
            for said in ("Yo", f"Yo{end}")
        ]
        assert kept[0] == kept[1]


def test_a_token_that_no_template_writes_leaves_the_template_on(case_of, rows_file):
    case = case_of("own")
    row = {"prompt": f"Use {OWN}", "chosen": f"{OWN}a", "rejected": "b"}
    pair = build(case, rows_file, "preference", row)
    messages = [
        {"role": "user", "content": row["prompt"]},
        {"role": "assistant", "content": row["chosen"]},
    ]
    assert ids_of(pair, 0) == case.read(render(case, messages, prompt=False).rstrip("\n"), True)
    check_counts(pair, True, Counter({OWN: 2}))


MESSAGE_ROWS = {
    "messages": lambda a, b: {
        "messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]
    },
    "sharegpt": lambda a, b: {
        "conversations": [{"from": "human", "value": a}, {"from": "gpt", "value": b}]
    },
    "alpaca": lambda a, b: {"instruction": a, "output": b},
    "preference": lambda a, b: {
        "prompt": [{"role": "user", "content": a}],
        "chosen": [{"role": "assistant", "content": b}],
        "rejected": [{"role": "assistant", "content": "No"}],
    },
    "kto": lambda a, b: {
        "prompt": [{"role": "user", "content": a}],
        "completion": [{"role": "assistant", "content": b}],
        "label": False,
    },
    "classification": lambda a, b: {
        "messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}],
        "label": "x",
    },
}


@pytest.mark.parametrize("format", MESSAGE_ROWS)
@pytest.mark.parametrize("name", mark_slow_except(CHATS, ["qwen2_5"]))
def test_in_messages_tokens_are_parsed_when_asked_for_alone(case_of, rows_file, name, format):
    case, make = case_of(name), MESSAGE_ROWS[format]
    said = [pair for text in write_texts(case) for pair in ((text, "Yo"), ("Hi", text))]
    size = 2 if format == "preference" else 1

    def tokens_of(dataset: Any, number: int) -> Counter[str]:
        return Counter(case.theirs.convert_ids_to_tokens(ids_of(dataset, number * size)))

    clean = tokens_of(build(case, rows_file, format, make("Hi", "Yo")), 0)
    for parse in PARSE:
        dataset = build(
            case, rows_file, format, *(make(*pair) for pair in said), parse_special_tokens=parse
        )
        met = [count(case, *pair) for pair in said]
        check_counts(dataset, parse is True, *met)
        for number, (asked, answer) in enumerate(said):
            ids, found = ids_of(dataset, number * size), tokens_of(dataset, number)
            ends = parse is True and not case.end(answer, True) and format != "classification"
            for spelled in case.tokens:
                more = met[number][spelled] if parse is True else 0
                is_end = ends and answer.rstrip().endswith(
                    spelled
                )  # the template's own is there in its place
                assert found[spelled] == clean[spelled] + more - is_end, (
                    asked,
                    answer,
                    parse,
                    spelled,
                )
            if parse is True and not ends:
                messages = [
                    {"role": "user", "content": asked},
                    {"role": "assistant", "content": answer},
                ]
                expected = case.theirs(
                    render(case, messages, prompt=False), add_special_tokens=False
                )["input_ids"]
                assert (
                    ids == expected[: len(ids)]
                    and not case.theirs.decode(expected[len(ids) :]).strip()
                )


def test_tokens_of_tools_calls_and_systems_are_counted_and_thoughts_are_none(case_of, rows_file):
    case, token = case_of("qwen2_5"), "<|im_end|>"
    call = {"type": "function", "function": {"name": "f", "arguments": {token: f"{token} {token}"}}}
    tool = {"type": "function", "function": {"name": "f", "description": token, "parameters": {}}}
    row = {
        "messages": [
            {"role": "system", "content": f"Be brief.{token}"},
            {"role": "user", "content": "Go"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": f"ok{token}"},
            {"role": "assistant", "content": f"<think>\nwell\n</think>\n\n{token} is the end."},
        ],
        "tools": [tool],
    }
    for parse in PARSE:
        dataset = build(case, rows_file, "messages", row, parse_special_tokens=parse)
        check_counts(dataset, parse is True, Counter({token: 7}))


@pytest.mark.parametrize("format", MESSAGE_ROWS)
def test_what_a_row_gives_its_template_is_counted_once(case_of, rows_file, format):
    case, token = case_of("smollm2"), "<|im_end|>"
    row = MESSAGE_ROWS[format]("Hi", "Yo") | {"chat_template_kwargs": {"note": f"{token} ends"}}
    for parse in PARSE:
        dataset = build(case, rows_file, format, row, parse_special_tokens=parse)
        check_counts(dataset, parse is True, Counter({token: 1}))


def test_the_tags_of_a_thought_are_none_where_they_are_special(
    case_of, rows_file, tmp_path, real_folder
):
    folder = shutil.copytree(real_folder("smollm2"), tmp_path / "thinks")
    with_tags = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    with_tags.add_special_tokens(["<think>", "</think>"])
    with_tags.save(str(folder / "tokenizer.json"))
    case = Case(load_tokenizer(folder), None, ["<think>", "</think>"])
    said = "<think>\nwell\n</think>\n\nthe tag <think> begins one"
    dataset = build(case, rows_file, "messages", MESSAGE_ROWS["messages"]("Hi", said))
    check_counts(dataset, False, Counter({"<think>": 1}))
    clean = build(
        case,
        rows_file,
        "messages",
        MESSAGE_ROWS["messages"]("Hi", said.split("\n\nthe")[0] + "\n\nb"),
    )
    check_counts(clean, True, Counter())


def test_rows_rendered_already_among_others_are_told(case_of, rows_file):
    case = case_of("smollm2")
    rendered = {
        "prompt": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        "chosen": "a",
        "rejected": "b",
    }
    mixed = build(
        case, rows_file, "preference", rendered, {"prompt": "Hi", "chosen": "a", "rejected": "b"}
    )
    line = (
        "warning: data: 1 of 2 samples hold a chat template's special tokens: their texts are taken"
        " as rendered"
    )
    assert any(one.startswith(line) for one in mixed.report.format_lines())
    kept = build(
        case,
        rows_file,
        "preference",
        rendered | {"system": "Be brief."},
        rendered,
        on_invalid="skip",
    )
    assert kept.report.bad_samples == Counter({"system beside a rendered text": 1})
    apart = {"chosen": "<|im_start|>user\nHi<|im_end|>", "rejected": "<|im_end|>"}
    plain = {"chosen": "Well, a", "rejected": "Well, b"}
    unusable = build(case, rows_file, "preference", rendered, apart, plain, on_invalid="skip")
    assert unusable.report.bad_samples == Counter({"no prompt": 2})


def test_the_report_comes_back_out_of_the_cache(case_of, rows_file, tmp_path):
    case = case_of("smollm2")
    rows = [MESSAGE_ROWS["messages"]("Hi", f"a <|im_end|> {number}") for number in range(7)]
    source = rows_file(*rows)
    cfg = DataConfig(source=source, format="messages", cache_dir=str(tmp_path / "kept"), num_proc=1)
    made, kept = (build_dataset(cfg, case.ours, 64) for _ in range(2))
    assert made.report == kept.report and made.fingerprint == kept.fingerprint
    assert (
        kept.report.special.unparsed == Counter({"<|im_end|>": 7})
        and len(kept.report.special.places) == 5
    )
    assert json.loads(json.dumps(kept.report.to_json()))["special"]["samples"] == 7
