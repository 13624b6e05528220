"""report.html: a page that stands alone, is well formed, and shows the numbers of the run."""

import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

from recipe_lib.training.records.metrics import MetricsFile, step_metrics, write_summary
from recipe_lib.training.report_page import write_report

PEAK = {"active": 2**30, "allocated": 2**31, "reserved": 3 * 2**30, "kind": "device"}


def write_run(folder: Path, steps: int, kind: str = "device") -> Path:
    metrics = MetricsFile(folder)
    peak = PEAK if kind == "device" else dict.fromkeys(("active", "allocated", "reserved"), 2**30)
    for step in range(1, steps + 1):
        metrics.append(
            step_metrics(
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
        )
        if step % 4 == 0:
            metrics.append({"step": step, "validation_loss": 6.0 / step, "validation_tokens": 7})
    (folder / "config.yaml").write_text("model:\n  path: a <b> & c\n")
    write_summary(folder, "done", {}, wall_seconds=3700.0, total_steps=steps, world_size=2)
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
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
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
    assert page.tags.count("svg") == 6
    for chart in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(chart)
    assert "a <b> & c" in page.text  # the config, escaped
    assert "$" not in page.text


def test_the_numbers_are_on_the_page(tmp_path: Path) -> None:
    page = Page(write_run(tmp_path, 12).read_text())
    assert "12 of 12 steps, loss 5.0000 → 0.4167, validation loss 0.5000" in page.text
    for expected in ("training 0.4167", "validation 0.5", "reserved 3", "1h01m", "4.8 K (4,800)", "3.00 GiB", "done"):
        assert expected in page.text


def test_equal_curves_are_drawn_once(tmp_path: Path) -> None:
    text = write_run(tmp_path, 4, kind="resident set").read_text()
    assert "Peak memory (resident set), GiB" in text
    assert "active 1" in text and "reserved" not in text.split("</svg>")[-2]


def test_a_run_that_never_stepped_has_a_page_too(tmp_path: Path) -> None:
    write_summary(tmp_path, "stopped", {}, wall_seconds=1.0, total_steps=5, world_size=1)
    page = Page(write_report(tmp_path).read_text())
    assert "svg" not in page.tags and "0 of 5 steps" in page.text
