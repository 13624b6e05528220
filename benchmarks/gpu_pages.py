"""Write the pages of what was measured on an H200 again, from the JSON files beside them.

Run `python -m benchmarks.gpu_pages` after a change of a page's text or table. The parts of
`gpu_check.py` wrote the files; nothing is measured. A test compares `make_pages` with the pages.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import cpu_and_cuda, gpu_plan_report, gpu_times
from benchmarks.peers import report as peers_report
from benchmarks.peers.results import PeersReport

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "measurements"
CARD = "nvidia-h200"
# Name of a report's file, without suffix -> function that formats its page.
PAGES: Mapping[str, Callable[[Any], str]] = {
    f"gpu-plan-{CARD}": gpu_plan_report.format_page,
    f"gpu-times-{CARD}": gpu_times.format_page,
    f"peers-{CARD}": lambda report: peers_report.format_page(PeersReport.from_json(report)),
    f"cpu-and-cuda-{CARD}": cpu_and_cuda.format_page,
}
SUMMARY = "on_a_gpu"
TEXT = """# What has run on a GPU, and what has not

For whoever wants to know which figures are measured. This page is made from the reports below:
`python -m benchmarks.gpu_pages`

One NVIDIA H200, on 27 November 2026, at commit {commit}. All else in README and docs is computed, \
planned, or measured
on CPUs, and says which.

## Measured

| what | result | page |
|---|---|---|
{rows}

## Not measured

- Cards of 24 GB, and any other card than an H200.
- More than one GPU: NCCL, links, real collectives. Ranks of 2 and 4 were played by a fake process \
group.
- Compiled layers: their planned peaks, and their values against a CPU's.{compiled}
- Offloading and streamed layers: their bytes and times against plans. Their values were compared.
- Experts alone on the host.
- Most of DPO, KTO, rewards and distillation; training in FP8.
- Kernels one by one, streams under torch's sanitizer, the ladder of levers: `python \
benchmarks/gpu_check.py` has them.
"""


def make_pages(folder: Path = FOLDER) -> dict[str, str]:
    """Return every page's text by its file's name.

    folder: of the JSON files.
    """
    reports = {}
    pages = {}
    for stem, format_page in PAGES.items():
        report = json.loads((folder / f"{stem}.json").read_text(encoding="utf-8"))
        reports[stem] = report
        pages[f"{stem}.md"] = format_page(report)
    pages[f"{SUMMARY}.md"] = _summarize(
        plan=reports[f"gpu-plan-{CARD}"],
        times=reports[f"gpu-times-{CARD}"],
        peers=reports[f"peers-{CARD}"],
        values=reports[f"cpu-and-cuda-{CARD}"],
    )
    return pages


def _summarize(*, plan: Any, times: Any, peers: Any, values: Any) -> str:
    """Return the page that has a line of each report's results; the arguments are reports."""
    lines = gpu_plan_report.summarize(plan)  # a line for each of four metrics, thresholds, replays
    # (what was measured, result, name of the report's page)
    rows = [
        ("planned and measured peaks", "; ".join(lines[:4]), f"gpu-plan-{CARD}"),
        (
            "fits or not, at 0.98 and 1.02 of the planned smallest cap",
            lines[4].partition(": ")[2],
            f"gpu-plan-{CARD}",
        ),
        ("the allocator's history replayed", lines[5].partition(": ")[2], f"gpu-plan-{CARD}"),
        (
            "the same runs on the CPU and on CUDA",
            cpu_and_cuda.summarize(values),
            f"cpu-and-cuda-{CARD}",
        ),
        ("seconds of a step", gpu_times.summarize(times), f"gpu-times-{CARD}"),
        ("head to head", peers_report.find_fastest(PeersReport.from_json(peers)), f"peers-{CARD}"),
        (
            "rates by `tune doctor --write`",
            gpu_times.describe_rates(times, FOLDER),
            f"gpu-times-{CARD}",
        ),
    ]
    table = "\n".join(
        f"| {subject} | {result} | [{page}]({page}.md) |" for subject, result, page in rows
    )
    return TEXT.format(
        commit=plan["commit"], rows=table, compiled=" Steps of two configs were timed."
    )


def main() -> None:
    """Write the pages."""
    for name, text in make_pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(FOLDER / name)


if __name__ == "__main__":
    main()
