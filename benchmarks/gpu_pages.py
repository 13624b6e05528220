"""Write the pages of what was measured on an H200 again, from the JSON files beside them.

Run `python -m benchmarks.gpu_pages` after a change of a page's text or table. The parts of
`gpu_check.py` wrote the files; nothing is measured. A test compares `make_pages` with the pages.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import cpu_and_cuda, gpu_plan_report, gpu_streams, gpu_times
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
    f"gpu-plan-levers-{CARD}": gpu_plan_report.format_page,
    f"gpu-times-levers-{CARD}": gpu_times.format_page,
    f"cpu-and-cuda-levers-{CARD}": cpu_and_cuda.format_page,
    f"gpu-streams-{CARD}": gpu_streams.format_page,
}
SUMMARY = "on_a_gpu"
TEXT = """# What has run on a GPU, and what has not

For whoever wants to know which figures are measured. This page is made from the reports below:
`python -m benchmarks.gpu_pages`

One NVIDIA H200: whole configs on 27 November 2026, at commit {commit}; levers, methods, mixtures \
and streams on
29 November, at commit {levers_commit}. All else in README and docs is computed, planned, or \
measured on CPUs, and
says which.

## Measured

| what | result | page |
|---|---|---|
{rows}

## Not measured

- Cards of 24 GB, and any other card than an H200.
- More than one GPU: NCCL, links, real collectives. Ranks of 2, 4 and 8 were played by a fake process \
group.
- Values of compiled mixtures and of most compiled families against a CPU's.
- Layers streamed in full fine-tuning: their seconds. Layers streamed, under torch's sanitizer.
- Kernels one by one, the ladder of levers: `python benchmarks/gpu_check.py` has them.
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
    pages[f"{SUMMARY}.md"] = _summarize(reports)
    return pages


def _summarize(reports: Mapping[str, Any]) -> str:
    """Return the page that has a line of each report's results.

    reports: by the name of the file, without suffix.
    """
    plan = reports[f"gpu-plan-{CARD}"]
    levers = reports[f"gpu-plan-levers-{CARD}"]
    times = reports[f"gpu-times-{CARD}"]
    peers = reports[f"peers-{CARD}"]
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
            cpu_and_cuda.summarize(reports[f"cpu-and-cuda-{CARD}"]),
            f"cpu-and-cuda-{CARD}",
        ),
        (
            "planned and measured peaks of levers, methods, mixtures, pipelines, compiled layers",
            "; ".join(gpu_plan_report.summarize(levers)),
            f"gpu-plan-levers-{CARD}",
        ),
        (
            "the same, compiled, streamed, of preferences, rewards, distillation, 8 bits and FP8",
            cpu_and_cuda.summarize(reports[f"cpu-and-cuda-levers-{CARD}"]),
            f"cpu-and-cuda-levers-{CARD}",
        ),
        (
            "memory on two streams without a wait",
            gpu_streams.summarize(reports[f"gpu-streams-{CARD}"]),
            f"gpu-streams-{CARD}",
        ),
        ("seconds of a step", gpu_times.summarize(times), f"gpu-times-{CARD}"),
        (
            "seconds of a step, offloaded, streamed, packed, of a mixture",
            gpu_times.summarize(reports[f"gpu-times-levers-{CARD}"]),
            f"gpu-times-levers-{CARD}",
        ),
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
    return TEXT.format(commit=plan["commit"], levers_commit=levers["commit"], rows=table)


def main() -> None:
    """Write the pages."""
    for name, text in make_pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(FOLDER / name)


if __name__ == "__main__":
    main()
