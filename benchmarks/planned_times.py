"""Plan the training speeds that others have published, and write both as one page.

    python -m benchmarks.planned_times --output docs/measurements/planned_times.md
    python -m benchmarks.planned_times --only F1,T4

A row is one published speed with its settings, in `published_speeds.yaml`. It is planned as
`tune plan` does, by the rates of data sheets; no GPU, no weights and no data are needed.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any
from unittest import mock

import torch
import yaml

from benchmarks.planner_stacks import compute_norm_written_out, compute_product_written_out
from recipe_lib.cli.plan_request import find_recipe_class
from recipe_lib.cli.recipes import find_config_recipe
from recipe_lib.config import load_config
from recipe_lib.models import decoder, read_preset_config
from recipe_lib.plan.build_plan import PlanSettings, make_plan
from recipe_lib.plan.hardware import find_hardware
from recipe_lib.plan.plan_schema import DOES_NOT_FIT
from recipe_lib.plan.simulated_world.planned_data import choose_sequence
from recipe_lib.plan.simulated_world.shape_only_model import find_shape, make_plannable
from recipe_lib.plan.timing import kernel_rates
from recipe_lib.plan.tracing.trace import OP, Trace
from recipe_lib.plan.tracing.trace_rank import STEADY

COMMAND = "python -m benchmarks.planned_times --output docs/measurements/planned_times.md"
SPEEDS_PATH = Path(__file__).with_name("published_speeds.yaml")
MAX_ERROR = 0.2  # the goal: planned speed over published, less one, is at most this in size
# A published speed that implies a larger share of the card's dense rate is called doubtful: matmuls
# alone reach less on most cards, and a step does more than them.
MAX_SHARE = 0.85


@dataclass(frozen=True)
class PublishedSpeed:
    """A published speed, and the plan that it is compared with."""

    id: str  # of the row, such as `T4`
    location: str  # in the source, such as a row of its table
    model: str  # as the source names it
    method: str  # `full`, `LoRA` or `QLoRA`
    card: str  # as the source names it
    num_gpus: int
    settings: str  # of this row, in the source's words
    published: int  # tokens a second and GPU
    config: str  # the shipped config that is planned
    device: str  # as `tune plan --device` takes it
    sequence_length: int  # tokens
    overrides: tuple[str, ...]  # of the plan, `key=value`
    shape: dict[str, Any] = field(default_factory=dict)  # config.json's keys that differ; {}: none
    written_out_norms: bool = False  # their RMS norm is single operators, which the plan makes too
    is_headline: bool = False  # among the figures that come first on the page
    off_sheet: str = ""  # why card or links are not what data sheets say; empty: they are
    doubt: str = ""  # why the figure cannot be right; empty: nothing speaks against it

    @property
    def command(self) -> str:
        """Return the command as typed.

        FOLDER stands for a folder with the config.json of a shape that is not shipped.
        """
        # Machines have at most 8 GPUs.
        processes = f"--nproc_per_node {min(self.num_gpus, 8)} " if self.num_gpus > 1 else ""
        nodes = f"--nnodes {self.num_gpus // 8} " if self.num_gpus > 8 else ""
        model_path = " model.path=FOLDER" if self.shape else ""
        return (
            f"tune plan {nodes}{processes}--config {self.config} --device {self.device} "
            f"--sequence {self.sequence_length} {' '.join(self.overrides)}{model_path}"
        )


@dataclass(frozen=True)
class Source:
    """Rows of one publication."""

    name: str
    address: str
    stack: str  # the program that ran, and how
    plan_differences: str  # what the plan does otherwise, or assumes
    rows: tuple[PublishedSpeed, ...]


@dataclass(frozen=True)
class RowComparison:
    """A row and its plan."""

    row: PublishedSpeed
    planned: float  # tokens a second and GPU
    # Part of the card's dense rate that matmuls and attention of the planned step, recomputation
    # counted, would take at the published speed.
    share: float
    verdict: str  # the plan's: does it fit on the card?
    note: str = ""  # what could not be planned as asked; empty: all could

    @property
    def error(self) -> float:
        """Return planned over published, less one."""
        return self.planned / self.row.published - 1

    @property
    def counted(self) -> bool:
        """Return True if the row is in the summary.

        Its card and links are as data sheets say, and its figure can be right.
        """
        return not (self.row.off_sheet or self.doubtful)

    @property
    def doubtful(self) -> bool:
        """Return True if the published figure cannot be right.

        Its source contradicts itself, or the share is too large.
        """
        return bool(self.row.doubt) or self.share > MAX_SHARE


def read_sources(path: Path = SPEEDS_PATH) -> list[Source]:
    """Read the sources and their rows.

    What a source says of all of its rows is handed to each, whose own entries win; overrides are
    appended and shapes merged.
    """
    sources = []
    for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
        # Popped, so that what is left belongs to all rows. The file breaks lines inside a text.
        source_fields = {
            key: " ".join(entry.pop(key).split())
            for key in ("name", "address", "stack", "plan_differences")
        }
        rows = []
        for row in entry.pop("rows"):
            overrides = f"{entry.get('overrides', '')} {row.get('overrides', '')}".split()
            overrides.append("memory.recompute_cheap=false")  # no source does it
            shape = entry.get("shape", {}) | row.get("shape", {})
            rows.append(
                PublishedSpeed(**entry | row | {"overrides": tuple(overrides), "shape": shape})
            )
        sources.append(Source(**source_fields, rows=tuple(rows)))
    return sources


def load_row_config(row: PublishedSpeed, folder: Path) -> Any:
    """Return the row's config, ready to be planned.

    folder: an existing one, where the config.json of a row with `shape` is written.
    """
    schema = find_config_recipe(row.config).load_schema()
    # The shipped path of a checkpoint becomes a preset of its shape; the assumptions are not used.
    cfg, _ = make_plannable(load_config(row.config, row.overrides, schema))
    if row.shape:
        # The checkpoint that the shipped config names gives the keys that the row does not change.
        preset, _ = find_shape(load_config(row.config, (), schema).model.path)
        model_folder = folder / row.id
        model_folder.mkdir(exist_ok=True)
        (model_folder / "config.json").write_text(
            json.dumps(dict(read_preset_config(preset)) | row.shape), encoding="utf-8"
        )
        cfg, _ = make_plannable(
            load_config(row.config, (*row.overrides, f"model.path={model_folder}"), schema)
        )
    return cfg


def compare_row(row: PublishedSpeed, folder: Path) -> RowComparison:
    """Plan a row and compare it with the published speed. folder: for `load_row_config`."""
    cfg = load_row_config(row, folder)
    hardware = find_hardware(row.device)
    settings = PlanSettings(
        hardware=hardware,
        sequence=choose_sequence(cfg, str(row.sequence_length)),
        ranks=row.num_gpus,
        phases=(),  # set-up and steps alone: no loading, validation or saving
    )
    norms = (
        mock.patch.object(decoder, "rms_norm", compute_norm_written_out)
        if row.written_out_norms
        else nullcontext()
    )
    # The sources are of 2023 to 2025: their torch did not prefer cuDNN's attention on any card yet.
    flash = mock.patch.object(kernel_rates, "CUDNN_ARCHITECTURES", ())
    product = mock.patch.object(decoder, "gated_activation", compute_product_written_out)
    with norms, flash, product if "fused_kernels=false" in row.overrides else nullcontext():
        plan, trace = make_plan(find_recipe_class(find_config_recipe(row.config)), cfg, settings)
    assert plan.time is not None, row.id
    tokens = plan.time.tokens_per_step / row.num_gpus
    share = sum_operations(trace) / tokens * row.published / hardware.get_rate(cfg.dtype)
    note = next(
        (line for line in plan.assumptions if line.startswith("compile=true is planned without")),
        "",
    )
    return RowComparison(
        row=row,
        planned=plan.time.tokens_per_second / row.num_gpus,
        share=share,
        verdict=plan.verdict,
        note=note,
    )


def sum_operations(trace: Trace) -> int:
    """Sum the FLOP of matmuls and attention in a steady step of one rank.

    A steady step is any but the first. What checkpointing computes again is counted again.
    """
    ops = (trace.ops[number] for kind, number in trace.iterate_events(STEADY) if kind == OP)
    return sum(op.flops * op.repeats for op in ops)


def compare_all(rows: Iterable[PublishedSpeed]) -> dict[str, RowComparison]:
    """Plan the rows and return them by id, printing each to stderr with the seconds it took."""
    comparisons_by_id = {}
    with tempfile.TemporaryDirectory(prefix="planned-times-") as folder:
        for row in rows:
            started = time.monotonic()
            comparison = compare_row(row, Path(folder))
            comparisons_by_id[row.id] = comparison
            seconds = time.monotonic() - started
            name = (
                f"{row.id:4} {row.model} {row.method}, {row.num_gpus} x {row.card}, {row.settings}"
            )
            figures = (
                f"published {row.published:,}, planned {comparison.planned:,.0f},"
                f" {comparison.error:+.1%}"
            )
            details = f"implied {comparison.share:.0%}, {comparison.verdict}, {seconds:.0f} s"
            print(f"{name}: {figures}; {details} {comparison.note}", file=sys.stderr, flush=True)
    return comparisons_by_id


def compute_statistics(comparisons: list[RowComparison]) -> str:
    """Return the cells of a line of the summary. comparisons: at least one.

    These are the number of rows, the mean of the errors' sizes and their ninth decile, the median
    of planned over published, and the number of rows within MAX_ERROR.
    """
    errors = [abs(comparison.error) for comparison in comparisons]
    ninth_decile = errors[0]  # of one row; `quantiles` needs two
    if len(errors) > 1:
        ninth_decile = quantiles(errors, n=10, method="inclusive")[-1]
    ratio = median(comparison.error + 1 for comparison in comparisons)
    num_close = sum(error <= MAX_ERROR for error in errors)
    return (
        f"{len(comparisons)} | {mean(errors):.1%} | {ninth_decile:.1%} | {ratio:.2f} | {num_close}"
    )


def format_summary(comparisons: list[RowComparison]) -> list[str]:
    """Return the table of the errors' statistics: of all rows, by card, by method."""
    lines = [
        (
            "| rows | number | mean error | 90 % are within | median planned / published | within"
            f" {MAX_ERROR:.0%} |"
        ),
        "|---|---:|---:|---:|---:|---:|",
        f"| all | {compute_statistics(comparisons)} |",
    ]
    keys: list[Callable[[RowComparison], str]] = [
        lambda comparison: comparison.row.card,
        lambda comparison: comparison.row.method,
    ]
    for get_key in keys:
        for name in dict.fromkeys(map(get_key, comparisons)):
            group = [comparison for comparison in comparisons if get_key(comparison) == name]
            lines.append(f"| {name} | {compute_statistics(group)} |")
    return lines


def format_table(
    comparisons: list[RowComparison], format_reason: Callable[[RowComparison], str] | None = None
) -> list[str]:
    """Return a table with a line for each comparison.

    format_reason: makes the cell of a last column, `why`; None: there is none.
    """
    lines = [
        (
            "| row | in the source | model | method | GPUs | settings | published | planned |"
            f" error | implied share |{' why |' if format_reason else ''}"
        ),
        f"|---|---|---|---|---|---|---:|---:|---:|---:|{'---|' if format_reason else ''}",
    ]
    for comparison in comparisons:
        row = comparison.row
        cells = [
            row.id,
            row.location,
            row.model,
            row.method,
            f"{row.num_gpus} x {row.card}",
            row.settings,
        ]
        cells += [
            f"{row.published:,}",
            f"{comparison.planned:,.0f}",
            f"{comparison.error:+.1%}",
            f"{comparison.share:.0%}",
        ]
        if format_reason:
            cells.append(format_reason(comparison))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def format_page(sources: list[Source], comparisons_by_id: dict[str, RowComparison]) -> str:
    """Return the page. comparisons_by_id: of the rows that were planned."""
    comparisons = list(comparisons_by_id.values())
    counted = [comparison for comparison in comparisons if comparison.counted]
    lines = [
        TEXT.format(command=COMMAND, torch=torch.__version__.partition("+")[0], close=MAX_ERROR),
        *format_summary(counted),
    ]
    unfit = [comparison.row.id for comparison in comparisons if comparison.verdict == DOES_NOT_FIT]
    if unfit:
        lines += ["", f"By their plans, these do not fit on their cards: {', '.join(unfit)}."]
    headlines = [comparison for comparison in comparisons if comparison.row.is_headline]
    if headlines:
        lines += ["", "## Five figures first", "", *format_table(headlines)]
    for source in sources:
        source_comparisons = _list_source_comparisons(source, counted)
        if source_comparisons:
            lines += ["", f"## {source.name}", "", f"{source.address}: {source.stack}.", ""]
            lines += [
                f"The plan: {source.plan_differences}.",
                "",
                *format_table(source_comparisons),
            ]
    # A row that is both off the sheet and doubtful stands among the doubtful ones alone.
    off_sheet = [
        comparison
        for comparison in comparisons
        if comparison.row.off_sheet and not comparison.doubtful
    ]
    if off_sheet:
        lines += [
            "",
            "## Cards and links that are not as data sheets say",
            "",
            "Not in the summary.",
        ]
        for source in sources:
            source_comparisons = _list_source_comparisons(source, off_sheet)
            if source_comparisons:
                lines += [
                    "",
                    f"{source.name}, {source.address}: {source.stack}."
                    f" The plan: {source.plan_differences}.",
                    "",
                ]
                lines += format_table(
                    source_comparisons, lambda comparison: comparison.row.off_sheet
                )
    doubtful = [comparison for comparison in comparisons if comparison.doubtful]
    if doubtful:
        doubtful_sources = [
            source for source in sources if _list_source_comparisons(source, doubtful)
        ]
        names = "; ".join(dict.fromkeys(source.name for source in doubtful_sources))
        lines += [
            "",
            f"## Implies more than {MAX_SHARE:.0%} of the card's peak, or another card",
            "",
        ]
        lines += [f"Not in the summary. {names}.", ""]
        lines += format_table(
            doubtful, lambda comparison: comparison.row.doubt or "more than a step's matmuls reach"
        )
    return "\n".join([*lines, "", *format_commands(comparisons)]) + "\n"


def _list_source_comparisons(
    source: Source, comparisons: list[RowComparison]
) -> list[RowComparison]:
    """Return the comparisons of a source's rows."""
    return [comparison for comparison in comparisons if comparison.row in source.rows]


def format_commands(comparisons: list[RowComparison]) -> list[str]:
    """Return the table of the commands, as typed, and of the shapes that no shipped config has."""
    lines = [
        "## The plans",
        "",
        "The command line of each row, but for the norms that are written out:",
        "",
    ]
    lines += [
        "| row | norms written out | command | keys of FOLDER/config.json |",
        "|---|---|---|---|",
    ]
    for row in [comparison.row for comparison in comparisons]:
        shape = f"`{json.dumps(row.shape)}`" if row.shape else ""
        norms = "yes" if row.written_out_norms else ""
        lines.append(f"| {row.id} | {norms} | `{row.command}` | {shape} |")
    return lines


TEXT = """# Planned and published training speeds

For whoever plans how long a run takes: how far planned speeds are from those that others published.

    {command}

torch {torch}, on any machine. Nothing here was measured by us, and no rate was fitted to these
rows. Each row is a training speed that somebody published, with the settings that the source gives.
Next to it is the speed that `tune plan` says for our recipe with the nearest settings. Plans take
data sheets and rates of kernels, without a calibration.

A source's chains of small operators are planned as such (`fused_kernels=false`, norms written out)
where it ran eagerly, compiled where it compiled. Attention is FlashAttention 2's on every card, as
in the torch that they ran. In today's, on Hopper, it is cuDNN's
([measured](gpu-times-nvidia-h200.md)).

| column | meaning |
|---|---|
| published, planned | tokens a second and GPU |
| error | planned over published, less one |
| implied share | FLOP of matmuls and attention at the published speed, over the card's dense rate in \
bf16; what checkpointing repeats is counted |
| mean error, 90 % are within | of errors without their sign |

The goal: a published speed is planned within {close:.0%}.

## Summary
"""


def main() -> int:
    """Plan the rows, print them, and write the page if asked to."""
    parser = argparse.ArgumentParser(
        description="Plan the training speeds that others have published."
    )
    parser.add_argument("--output", type=Path, help="the page; without it nothing is written")
    parser.add_argument("--only", help="ids of rows, with commas between them")
    arguments = parser.parse_args()
    sources = read_sources()
    rows = [row for source in sources for row in source.rows]
    if arguments.only:
        chosen_ids = arguments.only.split(",")
        unknown_ids = set(chosen_ids) - {row.id for row in rows}
        if unknown_ids:
            parser.error(f"--only: found no row {', '.join(sorted(unknown_ids))}")
        rows = [row for row in rows if row.id in chosen_ids]
    comparisons_by_id = compare_all(rows)
    counted = [comparison for comparison in comparisons_by_id.values() if comparison.counted]
    if counted:
        print("\n".join(format_summary(counted)))
    if arguments.output:
        arguments.output.write_text(format_page(sources, comparisons_by_id), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
