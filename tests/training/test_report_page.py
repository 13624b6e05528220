"""report.html: a page that stands alone, is well formed, and shows the numbers of the run."""

import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from recipe_lib.training.records import MetricsFile, build_step_metrics, write_report, write_summary

PEAK = {"active": 2**30, "allocated": 2**31, "reserved": 3 * 2**30, "kind": "device"}


def write_run(
    folder: Path,
    steps: int,
    kind: str = "device",
    own: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
) -> Path:
    """A run of so many steps. own: numbers of the recipe's, added to each step. facts: of its
    summary.
    """
    metrics = MetricsFile(folder)
    peak = PEAK if kind == "device" else dict.fromkeys(("active", "allocated", "reserved"), 2**30)
    for step in range(1, steps + 1):
        metrics.append(
            build_step_metrics(
                step=step,
                epoch=step / 10,
                loss=5.0 / step if step != 3 else math.nan,
                grad_norm=1.0,
                lr=1e-3,
                seconds=0.5,
                label_tokens=100,
                total_tokens=400,
                devices=2,
                peak=peak | {"kind": kind},
            )  # fmt: skip
            | {name: value * step for name, value in (own or {}).items()}
        )
        if step % 4 == 0:
            metrics.append({"step": step, "validation_loss": 6.0 / step, "validation_tokens": 7})
    (folder / "config.yaml").write_text("model:\n  path: a <b> & c\n")
    write_summary(
        folder, "done", {}, wall_seconds=3700.0, total_steps=steps, world_size=2, facts=facts
    )
    return write_report(folder)


class Page(HTMLParser):
    """Checks that every tag is closed in order, and collects tags, addresses and text."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href")
        ]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_stands_alone_and_is_well_formed(tmp_path: Path) -> None:
    path = write_run(tmp_path, 12)
    text = path.read_text()
    page = Page(text)
    assert page.addresses == [] and "script" not in page.tags and "link" not in page.tags
    assert not re.search(r"https?://|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text
    assert page.tags.count("figure") == 6
    charts = [
        chart for chart in re.findall(r"<svg.*?</svg>", text, re.DOTALL) if 'role="img"' in chart
    ]
    assert len(charts) == 6
    for chart in charts:
        texts = ElementTree.fromstring(chart).iter("text")
        assert "step" in [part.text for part in texts if part.get("class") == "name"]
    assert "a <b> & c" in page.text  # the config, escaped
    assert "$" not in page.text


def test_the_numbers_are_on_the_page(tmp_path: Path) -> None:
    page = Page(write_run(tmp_path, 12).read_text())
    assert "12 of 12 steps, loss 5.0000 → 0.4167, validation loss 0.5000" in page.text
    for expected in (
        "training 0.4167",
        "validation 0.5",
        "reserved 3",
        "1h01m",
        "4.8 K (4,800)",
        "3.00 GiB",
        "done",
    ):
        assert expected in page.text


def test_equal_curves_are_drawn_once(tmp_path: Path) -> None:
    text = write_run(tmp_path, 4, kind="resident set").read_text()
    assert "<figcaption>Peak memory (resident set)</figcaption>" in text
    charts = text.partition("Peak memory (resident set)")[2].partition("</figure>")[0]
    assert "active 1" in charts and "reserved" not in charts


def test_a_run_that_never_stepped_has_a_page_too(tmp_path: Path) -> None:
    write_summary(tmp_path, "stopped", {}, wall_seconds=1.0, total_steps=5, world_size=1)
    page = Page(write_report(tmp_path).read_text())
    assert "svg" not in page.tags and "0 of 5 steps" in page.text


def chart_of(text: str, title: str) -> str:
    """A figure of the page."""
    return text.partition(f"<figcaption>{title}</figcaption>")[2].partition("</figure>")[0]


def test_a_loss_over_a_decade_has_a_log_axis(tmp_path: Path) -> None:
    loss = chart_of(write_run(tmp_path, 12).read_text(), "Loss")
    assert loss.count('role="img"') == 1 and "validation 0.5" in loss
    _, after_nan = re.findall(r'"curve c0" points="([^"]*)"', loss)
    heights = [
        float(pair.split(",")[1]) for pair in after_nan.split()
    ]  # of the steps 4 to 12, the loss is 5 / step
    assert abs((heights[4] - heights[0]) - (heights[8] - heights[2])) < 0.2


def test_numbers_of_the_recipe_s_own_are_charts(tmp_path: Path) -> None:
    """And those of its validations, beside the step's where they have the same name; no other
    values are.
    """
    own = {"weight <norm>": 0.5, "accuracy": 0.01}
    MetricsFile(tmp_path).append({"step": 1, "validation_accuracy": 0.25, "validation_depth": 7.0, "said": "text",
                                  "is_good": True, "broken": None, "many": [1, 2]})  # fmt: skip
    text = write_run(tmp_path, 12, own=own).read_text()
    titles = re.findall(
        "<figcaption>(.*?)</figcaption>", text.partition("Metrics of the recipe")[2]
    )
    assert titles == ["validation_depth", "weight &lt;norm&gt;", "accuracy"]
    assert "weight &lt;norm&gt; 6</li>" in chart_of(text, "weight &lt;norm&gt;")
    both = chart_of(text, "accuracy")
    assert "training 0.12</li>" in both and "validation 0.25</li>" in both
    assert "Metrics of the recipe" not in write_run(new_folder(tmp_path), 3).read_text()


def new_folder(parent: Path) -> Path:
    (parent / "plain").mkdir()
    return parent / "plain"


def test_a_number_that_no_chart_can_show_spoils_none(tmp_path: Path) -> None:
    for step, value in enumerate((1e308, 10**400, 5e-324, 3.0), start=1):
        MetricsFile(tmp_path).append({"step": step, "odd": value})
    assert "odd 3</li>" in chart_of(write_run(tmp_path, 3).read_text(), "odd")


FIGURES = {
    "active": 2 * 2**30, "allocated": 2 * 2**30, "reserved": 3 * 2**30, "first": {"active": 2**30, "reserved": 2**30},
    "verdict": "fits", "estimate": "", "seconds": 0.4, "device": "rtx4090", "ranks": 2, "own_device": True,
}  # fmt: skip


def rows_of(text: str, title: str) -> dict[str, list[str]]:
    """The rows of a section's table, by their first cell."""
    section = text.partition(f"<h2>{title}</h2>")[2].partition("</section>")[0]
    rows = [
        re.findall("<t[dh][^>]*>(.*?)</t[dh]>", row)
        for row in re.findall("<tr>.*?</tr>", section, re.DOTALL)
    ]
    return {row[0]: row[1:] for row in rows}


def test_planned_and_measured_are_beside_each_other(tmp_path: Path) -> None:
    """Of the first rank, whose peaks the run records; a step is the median of those after the
    first.
    """
    text = write_run(tmp_path, 12, facts={"planned": FIGURES}).read_text()
    rows = rows_of(text, "Planned and measured")
    assert rows["peak active memory"] == ["1.00 GiB", "1.00 GiB", "+0.0%"]
    assert rows["peak allocated memory"] == ["2.00 GiB", "2.00 GiB", "+0.0%"]
    assert rows["peak reserved memory"] == ["1.00 GiB", "3.00 GiB", "-66.7%"]
    assert rows["step"] == ["0.4 s", "0.5 s", "-20.0%"]
    assert "Planned for 2 x rtx4090: fits." in text


def test_a_cpu_run_is_not_compared_with_a_gpu_s_plan(tmp_path: Path) -> None:
    figures = FIGURES | {"own_device": False}
    text = write_run(tmp_path, 4, kind="resident set", facts={"planned": figures}).read_text()
    rows = rows_of(text, "Planned and measured")
    assert rows["peak active memory"] == ["2.00 GiB", "1.00 GiB", "–"] and rows["step"][2] == "–"
    assert "resident set of a CPU process" in text and "as there is no GPU here" in text


def test_a_run_without_a_plan_says_so(tmp_path: Path) -> None:
    assert "This run has no plan" in write_run(tmp_path, 4, facts={"planned": None}).read_text()


def test_the_data_and_the_changed_settings_are_on_the_page(tmp_path: Path) -> None:
    counts = {
        "source": "rows.jsonl", "format": "chat", "template": "plain", "max_seq_len": 512, "samples": 1200,
        "sequences": 1190, "pairs": 0, "tokens": 98765, "label_tokens": 12345, "label_token_fraction": 0.125,
        "truncated": 7, "left_out": 10, "bad": 0, "duplicates": 0,
    }  # fmt: skip
    checked = counts | {"samples": 30, "truncated": 0}
    facts = {
        "data": {"training": counts | {"packs": 44, "packed_share": 0.931}, "validation": checked},
        "changed_settings": {"batch_size": ["4", "8"], "data.source": ["rows.jsonl", "null"]},
    }
    text = write_run(tmp_path, 4, facts=facts).read_text()
    rows = rows_of(text, "Data")
    assert rows["samples read"] == ["1,200", "30"] and rows["label tokens"][0] == "12,345"
    assert rows["truncated at max_seq_len"] == ["7", "0"]
    assert rows["tokens in packed sequences"] == ["93.1%, the rest is padding", ""]
    assert "pairs" not in rows and "the same as an earlier one" not in rows  # none
    changed = rows_of(text, "Settings that differ from the defaults")
    assert changed["batch_size"] == ["4", "8"] and changed["data.source"] == ["rows.jsonl", "null"]
