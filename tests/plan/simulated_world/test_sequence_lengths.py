"""The rows that a plan is made for are those that a run would meet."""

from pathlib import Path

import numpy as np
import pytest

from recipe_lib.data import DataPlan, build_dataset, make_step
from recipe_lib.data.cache import MANIFEST
from recipe_lib.errors import ConfigError
from recipe_lib.plan.simulated_world import planned_data
from recipe_lib.plan.simulated_world.planned_data import choose_sequence
from recipe_lib.tokenizers import load_tokenizer
from tests.plan.configs import SMALL, load

ROWS = "data.max_samples=300"


def pairs_file(folder: Path) -> Path:
    """Pairs with answers of different sequence_lengths."""
    lines = [
        f'{{"prompt": "Write {n} in words.", "chosen": "{"one " * (1 + n % 5)}", "rejected":'
        f' "{"two " * (1 + n % 7)}"}}'
        for n in range(40)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder / "pairs.jsonl"


def pairs_config(folder: Path, *overrides: str):
    """A run on them."""
    return load(
        "llama3/8B_dpo", "~model.path", "model.preset=demo/0.5M", "tokenizer.path=examples/demo/tokenizer",
        f"data.source={pairs_file(folder)}", "max_seq_len=64", "gradient_accumulation_steps=1",
        f"data.cache_dir={folder / 'cache'}", *overrides,
    )  # fmt: skip


def widest(cfg, ranks: int) -> tuple[int, int, int]:
    """(steps, width of the widest micro-batch, rows of a micro-batch), by making every batch of
    every rank.
    """
    rows = build_dataset(cfg.data, load_tokenizer(cfg.tokenizer.path), cfg.max_seq_len)
    plan = DataPlan(
        rows, seed=1, slots_per_step=cfg.batch_size * cfg.gradient_accumulation_steps * ranks, shuffle=True,
        packing_capacity=cfg.max_seq_len if cfg.data.packing else None,
    )  # fmt: skip
    shapes = [
        batch.tokens.shape
        for step in range(plan.count_steps(0))
        for rank in range(ranks)
        for batch in make_step(
            rows, plan.list_slots(step), rank, ranks, cfg.batch_size, cfg.gradient_accumulation_steps, multiple=1,
            pack_length=plan.get_pack_length(step),
        ).micro_batches
    ]  # fmt: skip
    return (
        plan.count_total_steps(cfg.epochs, cfg.max_steps),
        max(width for _, width in shapes),
        shapes[0][0],
    )


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["false", "true"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_longest_row_is_the_width_of_the_widest_batch(tmp_path: Path, packing: str, ranks: int):
    cfg = load(
        SMALL,
        ROWS,
        "batch_size=3",
        "epochs=2",
        f"data.packing={packing}",
        f"data.cache_dir={tmp_path}",
    )
    found = choose_sequence(cfg, "auto", ranks=ranks)
    steps, width, _ = widest(cfg, ranks)
    assert (found.tokens, found.group) == (width, 1)
    if (
        packing == "true"
    ):  # without, the rows that an epoch leaves over may be the longest, and steps be the fewer
        assert found.documents > 1
    assert found.steps == steps


@pytest.mark.parametrize("packing", ["false", "true"])
def test_pairs_are_two_rows(tmp_path: Path, packing: str):
    cfg = pairs_config(tmp_path, f"data.packing={packing}")
    found = choose_sequence(cfg, "auto")
    _, width, rows = widest(cfg, 1)
    assert found.group == 2
    assert rows == cfg.batch_size * (1 if packing == "true" else 2)
    assert found.tokens == -(-width // (2 if packing == "true" else 1))
    assert choose_sequence(cfg, "max").group == 2


def test_percentiles_are_of_the_rows(tmp_path: Path):
    cfg = load(SMALL, ROWS, f"data.cache_dir={tmp_path}")
    rows = build_dataset(cfg.data, load_tokenizer(cfg.tokenizer.path), cfg.max_seq_len)
    for name, share in (("p50", 50), ("p90", 90), ("p99", 99)):
        found = choose_sequence(cfg, name)
        assert (rows.lengths <= found.tokens).mean() >= share / 100
        assert (rows.lengths < found.tokens).mean() < share / 100
        assert found.histogram is not None
        assert found.histogram[name] == found.tokens
    assert found.histogram["sequences"] == 300
    assert found.histogram["max"] == int(np.max(rows.lengths)) == choose_sequence(cfg).tokens


def test_a_choice_that_needs_no_rows():
    cfg = load(SMALL, "data.source=absent.jsonl", "max_steps=7")
    assert choose_sequence(cfg, "max").tokens == cfg.max_seq_len == 128
    assert choose_sequence(cfg, "64").tokens == 64
    assert choose_sequence(cfg, "64").steps == 7
    found = choose_sequence(cfg, "auto")
    assert found.tokens == 128
    assert "absent.jsonl: no such file" in found.source
    with pytest.raises(
        ConfigError, match=r"^--sequence p99: .*not available \(absent.jsonl: no such file"
    ):
        choose_sequence(cfg, "p99")


def test_a_large_file_is_not_tokenized_for_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cfg = load(SMALL, ROWS, f"data.cache_dir={tmp_path}")
    monkeypatch.setattr(planned_data, "MAX_BYTES_READ", 1000)
    assert "not tokenized yet" in choose_sequence(cfg).source
    assert not list(tmp_path.rglob(MANIFEST))
    build_dataset(cfg.data, load_tokenizer(cfg.tokenizer.path), cfg.max_seq_len)  # as a run does
    assert "longest of 300 sequences" in choose_sequence(cfg).source


def test_beside_a_run_nothing_is_tokenized(tmp_path: Path):
    cfg = load(SMALL, ROWS, f"data.cache_dir={tmp_path}")
    assert choose_sequence(cfg, wait=0.0).tokens == cfg.max_seq_len
    assert not list(tmp_path.rglob(MANIFEST))
    assert (
        choose_sequence(load(SMALL, ROWS, "data.cache=false"), wait=60.0).tokens == cfg.max_seq_len
    )


def test_without_a_tokenizer_rows_have_no_lengths():
    found = choose_sequence(load("llama3/8B_full"))
    assert found.tokens == load("llama3/8B_full").max_seq_len
    assert found.source.startswith(
        "max_seq_len, as the dataset is not available: meta-llama/Meta-Llama-3-8B: no such folder"
    )


@pytest.mark.parametrize("choice", ["0", "-1", "1.5", "p98", "", "longest", "²"])
def test_no_choice(choice: str):
    with pytest.raises(
        ConfigError,
        match=r"^--sequence: found .*expected auto, max, p50, p90, p99 or a number of tok",
    ):
        choose_sequence(load(SMALL), choice)


def test_more_than_a_row_can_have():
    with pytest.raises(
        ConfigError, match=r"^--sequence 129: sequences have at most max_seq_len tokens \(128\)"
    ):
        choose_sequence(load(SMALL), "129")
