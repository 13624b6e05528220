"""Conversations that become several sequences: how many, from where, in what order, at what cost,
and what is said.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipe_lib.cli.main import main
from recipe_lib.config.schema import DataConfig, FullFinetuneConfig
from recipe_lib.data import DataPlan, build_dataset, build_validation_dataset
from recipe_lib.data.dataset import Dataset, find_overlap
from recipe_lib.data.inspect import show_item
from recipe_lib.data.label_masks import Encoder
from recipe_lib.data.samples import Conversation, Preference, SampleFault
from recipe_lib.errors import DataError
from recipe_lib.plan.simulated_world.planned_data import choose_sequence
from recipe_lib.tokenizers import Tokenizer, load_tokenizer
from tests.data.masks_cases import list_trained_texts
from tests.tokenizers.made import render, write_json

# As Qwen3's: thoughts are written for the answers behind the last question alone.
FORGETS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last"
    " = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role +"
    " '\n' }}{% if m.role == 'assistant' and loop.index0 > ns.last %}{{ '<think>\n' +"
    " (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n'"
    " }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
END = "<|im_end|>"


def talk(answers: int, number: int = 0) -> list[dict[str, str]]:
    return [
        message
        for n in range(answers)
        for message in (
            {"role": "user", "content": f"ask {number} {n}"},
            {"role": "assistant", "content": f"say {number} {n}", "reasoning_content": "hm"},
        )
    ]


@pytest.fixture(scope="module")
def forgets(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_json(tmp_path_factory.mktemp("forgets"), template=FORGETS))


Build = Callable[..., Dataset]


@pytest.fixture
def build(forgets: Tokenizer, rows_file: Callable[..., str]) -> Build:
    """A dataset of conversations with so many answers."""

    def make(
        *answers: int, max_seq_len: int = 256, name: str = "rows.jsonl", **settings: Any
    ) -> Dataset:
        source = rows_file(
            *({"messages": talk(count, n)} for n, count in enumerate(answers)), name=name
        )
        cfg = DataConfig(source=source, format="messages", cache=False, **settings)
        return build_dataset(cfg, forgets, max_seq_len)

    return make


def test_each_answer_is_trained_once_behind_its_prompt(build: Build, forgets: Tokenizer):
    dataset = build(1, 2, 3)
    assert dataset.items == len(dataset) == 6
    assert [dataset.locate_item(item).rpartition(":")[2] for item in range(6)] == [
        "1",
        "2",
        "2",
        "3",
        "3",
        "3",
    ]
    turns = [(number, n) for number, count in enumerate((1, 2, 3)) for n in range(count)]
    for item, (number, n) in enumerate(turns):
        row, messages = dataset[item], talk(3, number)
        prompt = render(forgets.render_chats, messages[: 2 * n + 1], True)
        trained = f"<think>\nhm\n</think>\n\nsay {number} {n}{END}"
        assert forgets.decode([*row.tokens.tolist(), row.labels[-1]]) == prompt + trained
        assert forgets.decode(row.labels[row.labels >= 0].tolist()) == trained


def test_what_it_costs_is_said(build: Build, forgets: Tokenizer):
    dataset = build(1, 2, 3)
    whole = sum(len(forgets.encode(render(forgets.render_chats, talk(n, at), False), allow_special=True)) - 1
                for at, n in ((1, 2), (2, 3)))  # fmt: skip
    tokens = int(dataset.lengths[1:].sum())
    lines = dataset.report.format_lines()
    assert lines[0].startswith("data: 6 sequences from the 3 samples read from ")
    assert (
        "data: 2 conversations became 5 sequences, because the chat template writes earlier turns"
        f" anew: each answer follows the prompt that generation is given; {tokens} tokens in place"
        f" of {whole} ({tokens / whole:.2f} times as many)" in lines
    )
    assert "conversations became" not in " ".join(build(1, 1).report.format_lines())


def test_refuse_names_the_first_difference_and_the_way_out(build: Build):
    line = (
        r"rows.jsonl:2: \.messages\[1\]: the chat template writes it otherwise later on: "
        r"at token \d+ found 's.*', expected "
        r"'<.*' as when the answer comes last; set data.history to auto, or tokenizer.chat_template"
    )
    with pytest.raises(DataError, match=line):
        build(1, 2, history="refuse")
    assert len(build(1, 2, 3, history="refuse", on_invalid="skip")) == 1
    assert len(build(1, 2, history="refuse", train_on="last")) == 2


def test_split_gives_every_answer_its_own_where_it_need_not(
    chatml: Tokenizer, rows_file: Callable[..., str]
):
    rows = {"messages": [{k: v for k, v in m.items() if k != "reasoning_content"} for m in talk(3)]}
    source = rows_file(rows)
    found = {}
    for history in ("auto", "split", "refuse"):
        cfg = DataConfig(source=source, format="messages", cache=False, history=history)
        found[history] = build_dataset(cfg, chatml, 256)
    assert [len(found[history]) for history in found] == [1, 3, 1]
    assert found["auto"].fingerprint == found["refuse"].fingerprint != found["split"].fingerprint
    assert sum(found["split"].trained_counts) == sum(found["auto"].trained_counts)
    assert "became 3 sequences, as data.history says: " in " ".join(
        found["split"].report.format_lines()
    )


def test_answers_of_one_turn_share_a_sequence(tmp_path: Path):
    """A call of a tool and the answer that follows it stand behind the same question."""
    tokenizer = load_tokenizer(write_json(tmp_path, template=FORGETS))
    messages = [*talk(2), {"role": "tool", "content": "1"}, {"role": "assistant", "content": "so"}]
    row = Encoder(tokenizer, "auto").encode_sample(Conversation(messages))
    thoughts = ["<think>\nhm\n</think>\n\n"] * 2 + ["<think>\n\n</think>\n\n"]
    said = [
        thought + text + END
        for thought, text in zip(thoughts, ("say 0 0", "say 0 1", "so"), strict=True)
    ]
    assert [list_trained_texts(Encoder(tokenizer, "auto"), one) for one in row.sequences] == [
        said[:1],
        said[1:],
    ]


def test_the_order_and_packs_are_those_of_sequences(build: Build):
    dataset = build(3, 3, 2)
    plan = DataPlan(dataset, seed=1, slots_per_step=2, shuffle=True)
    taken = [
        int(item)
        for step in range(plan.count_steps(0))
        for slot in plan.list_slots(step)
        for item in slot
    ]
    assert plan.count_steps(0) == 4 and sorted(taken) == list(range(8))
    capacity = int(dataset.lengths.sum())
    packed = DataPlan(dataset, seed=1, slots_per_step=1, shuffle=True, packing_capacity=capacity)
    assert packed.count_steps(0) == 1 and packed.get_pack_length(0) == capacity
    assert sorted(packed.list_slots(0)[0].tolist()) == list(range(8))


def test_long_sequences_are_counted_one_by_one(build: Build):
    whole = build(3)
    limit = int(whole.lengths[1])
    cut = build(3, max_seq_len=limit)
    assert len(cut) in (2, 3) and cut.report.truncated_sequences == 1 and cut.report.items_made == 3
    line = f"warning: data: 1 of 3 sequences (33.3 %) exceed {limit} tokens and were truncated"
    assert any(text.startswith(line) for text in cut.report.format_lines())
    assert build(3, max_seq_len=limit, truncation="drop").report.skipped_long_sequences == 1
    with pytest.raises(
        DataError,
        match=rf"found {int(whole.lengths[2])} tokens, expected at most max_seq_len={limit}",
    ):
        build(3, max_seq_len=limit, truncation="error")


def test_copies_and_overlap_are_of_sequences(
    build: Build, forgets: Tokenizer, rows_file: Callable[..., str]
):
    """Two conversations that begin alike have their first answer in common."""
    other = talk(2)[:2] + [
        {"role": "user", "content": "else"},
        {"role": "assistant", "content": "no"},
    ]
    source = rows_file({"messages": talk(2)}, {"messages": other}, name="twice.jsonl")
    dataset = build_dataset(DataConfig(source=source, format="messages", cache=False), forgets, 256)
    assert dataset.report.duplicate_sequences == 1 and dataset.report.duplicates[0][1].endswith(
        "jsonl:1"
    )
    assert "data: 1 sequence is the same as an earlier one" in " ".join(
        dataset.report.format_lines()
    )
    held = build(1, name="held.jsonl")
    assert find_overlap(dataset, held).tolist() == [0]


def test_validation_rows_are_split_alike(forgets: Tokenizer, rows_file: Callable[..., str]):
    cfg = FullFinetuneConfig()
    cfg.data = DataConfig(format="messages", cache=False)
    cfg.max_seq_len, cfg.validation.source = (
        256,
        rows_file({"messages": talk(3)}, name="held.jsonl"),
    )
    assert len(build_validation_dataset(cfg, forgets)) == 3


def test_the_cache_knows_the_choice(
    forgets: Tokenizer, rows_file: Callable[..., str], tmp_path: Path
):
    source = rows_file({"messages": talk(2)}, {"messages": talk(1)})
    cfg = DataConfig(
        source=source, format="messages", cache_dir=str(tmp_path / "cache"), on_invalid="skip"
    )
    first = build_dataset(cfg, forgets, 256)
    again = build_dataset(cfg, forgets, 256)
    assert len(first) == len(again) == 3 and first.fingerprint == again.fingerprint
    assert again.report.split_sequences == 2
    cfg.history = "refuse"
    assert len(build_dataset(cfg, forgets, 256)) == 1


def test_the_prompt_of_a_pair_may_be_rewritten(forgets: Tokenizer):
    encoder = Encoder(forgets, "auto")
    prompt = talk(2)[:3]
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in ("yes", "no"))
    pair = encoder.encode_answers(Preference(prompt, chosen, rejected))
    given = forgets.encode(render(forgets.render_chats, prompt, True), allow_special=True)
    for encoded, text in zip(pair, ("yes", "no"), strict=True):
        assert encoded.ids[: len(given)] == given and not any(encoded.trained[: len(given)])
        assert list_trained_texts(encoder, encoded) == [f"<think>\n\n</think>\n\n{text}{END}"]
    with pytest.raises(
        SampleFault, match="found 2 answers that the chat template writes in as many ways"
    ):
        encoder.encode_answers(Preference(prompt[:1], talk(2)[1:], rejected))


def test_roles_beside_the_assistant_need_one_rendering(forgets: Tokenizer):
    encoder = Encoder(forgets, "auto", ["user", "assistant"])
    with pytest.raises(SampleFault, match="set data.train_on to assistant or last, or tokenizer"):
        encoder.encode_sample(Conversation(talk(2)))
    everything = Encoder(forgets, "auto", "all").encode(Conversation(talk(2)))
    assert all(everything.trained[1:])


def test_show_and_check_say_which_sample(
    forgets: Tokenizer,
    build: Build,
    capsys: pytest.CaptureFixture[str],
    rows_file: Callable[..., str],
):
    dataset = build(2)
    assert show_item(dataset, 1, forgets)[0].place.endswith("rows.jsonl:1")
    words = [
        "tests/recipes/plain.yaml", "model.preset=demo/0.5M", f"tokenizer.path={Path(forgets.place).parent}",
        f"data.source={rows_file({'messages': talk(2)}, {'messages': talk(3, 1)})}", "data.format=messages",
        "device=cpu", "dtype=fp32", "max_seq_len=256",
    ]  # fmt: skip
    assert main(["data", "check", *words]) == 0
    out = capsys.readouterr().out
    assert (
        "data: 2 conversations became 5 sequences, because the chat template writes earlier turns"
        " anew" in out
    )
    assert main(["data", "check", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["samples_read"],
        found["sequences"],
        found["split_samples"],
        found["split_sequences"],
    ) == (2, 5, 2, 5)
    assert found["split_tokens"] == found["tokens"] > found["unsplit_tokens"]


def test_a_plan_counts_sequences(forgets: Tokenizer, rows_file: Callable[..., str]):
    cfg = FullFinetuneConfig()
    cfg.tokenizer.path, cfg.max_seq_len, cfg.epochs = str(Path(forgets.place).parent), 256, 1
    cfg.data = DataConfig(source=rows_file({"messages": talk(3)}), format="messages", cache=False)
    cfg.batch_size = cfg.gradient_accumulation_steps = 1
    found = choose_sequence(cfg)
    assert found.source == "longest of 3 sequences from 1 samples" and found.steps == 3
    assert found.histogram is not None and found.histogram["sequences"] == 3


def test_a_call_that_ends_in_no_stop_token_is_reported(
    tmp_path: Path, rows_file: Callable[..., str]
):
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for call in"
        " m.tool_calls or [] %}{{ call.function.name + call.function.arguments | tojson }}{% endfor"
        " %}{{ '<|pad|>' if m.tool_calls else '<|im_end|>\n' }}{% endfor %}{% if"
        " add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        {"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"}, {"role": "assistant", "content": "Two."},
    ]  # fmt: skip
    cfg = DataConfig(source=rows_file({"messages": messages}), format="messages", cache=False)
    for stops, untrained in (({}, 1), ({"eos_token_id": [2, 3]}, 0)):
        folder = write_json(tmp_path / str(untrained), template=source)
        (folder / "generation_config.json").write_text(json.dumps(stops))
        dataset = build_dataset(cfg, load_tokenizer(folder), 64)
        assert dataset.report.untrained_ends == untrained
        assert np.count_nonzero(dataset[0].labels == 3) == 1, (
            "its last token is trained all the same"
        )
