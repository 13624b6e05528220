"""Published training speeds: every row says where it is from and what ran, and has a plan of those settings."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.planned_times import Compared, PublishedSpeed, Source, compare, config_of, read_sources, statistics_of
from recipe_lib.cli import plan_request
from recipe_lib.plan.hardware import HARDWARE
from recipe_lib.plan.timing.cost import COMPARED, error_text
from recipe_lib.plan.world.shape_only_model import spec_of
from tests.house.files import ROOT
from tests.plan.apart import apart

pytestmark = pytest.mark.benchmark

SOURCES = read_sources()
ROWS = [row for source in SOURCES for row in source.rows]
CARDS = {
    "RTX 3090": "rtx3090",
    "RTX 4090": "rtx4090",
    "A5000": "a5000",
    "A6000": "a6000",
    "A100 40 GB": "a100-40gb",
    "A100 80 GB": "a100-80gb",
    "H100 80 GB": "h100",
}


def test_there_are_rows_enough_of_different_names() -> None:
    assert len({row.id for row in ROWS}) == len(ROWS) >= 25
    assert sum(row.named for row in ROWS) == 5
    assert set(CARDS.values()) <= set(HARDWARE)


def test_what_a_plan_says_of_its_times_is_what_the_page_says() -> None:
    page = (ROOT / "docs/measurements/planned_times.md").read_text(encoding="utf-8")
    summary = [[cell.strip() for cell in line.split("|")] for line in page.splitlines() if line.count("|") == 7]
    within = {cells[1]: float(cells[4].rstrip("%")) for cells in summary if cells[4].endswith("%")}
    assert {CARDS[card] for card in set(within) & set(CARDS)} == set(COMPARED)
    said = error_text(HARDWARE["rtx4090"], None)
    assert "nine in ten" in said and 0 < within["all"] <= float(said.split()[-2])
    assert "no published speed" in error_text(HARDWARE["rtx3090"], None)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_rows_say_where_they_are_from_and_what_ran(source: Source) -> None:
    assert source.address.startswith("https://") and source.stack and source.differs
    for row in source.rows:
        assert row.where and row.says and row.model and row.published > 0 and row.method in ("full", "LoRA", "QLoRA")
        assert CARDS[row.card] == row.device


def test_plans_have_the_settings_that_their_rows_say(tmp_path: Path) -> None:
    for row in ROWS:
        cfg = config_of(row, tmp_path)
        assert row.says.startswith(f"{cfg.batch_size} x {row.sequence}"), row.id
        lora = getattr(cfg, "lora", None)
        method = "full" if lora is None else "QLoRA" if lora.quantize_base == "nf4" else "LoRA"
        assert method == row.method, row.id
        assert row.gpus == 1 or cfg.parallel.strategy == ("ddp" if "DDP" in row.says else "fsdp"), row.id
        assert cfg.memory.cpu_offload == ("CPU offload" in row.says), row.id
        assert cfg.memory.activation_offload == (", offloaded" in row.says), row.id
        assert cfg.memory.optimizer_in_backward == ("in backward" in row.says), row.id
        assert not row.shape or spec_of(cfg).vocab_size == row.shape["vocab_size"], row.id


def test_commands_are_those_of_tune_plan() -> None:
    for row in ROWS:
        words = row.command.split()[2:]
        assert plan_request.read([word for word in words if word != "model.path=FOLDER"]).config == [row.config]


def test_a_row_is_planned(tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.id == "Q6")
    small: dict[str, Any] = row.shape | {"num_hidden_layers": 2, "vocab_size": 512}
    found = apart(compare, PublishedSpeed(**{**vars(row), "shape": small}), tmp_path)
    assert found.planned > 10 * row.published
    assert 0 < found.share < 0.1 and found.error == pytest.approx(found.planned / row.published - 1)


def test_the_summary_is_of_errors_without_their_sign() -> None:
    rows = [Compared(ROWS[0], ROWS[0].published * ratio, 0.5, "fits") for ratio in (0.9, 1.1, 1.3)]
    assert statistics_of(rows) == "3 | 16.7% | 26.0% | 1.10 | 2"
