"""Tensor parallel plans for every causal language model of transformers, each proven on a small
copy of it.

    python -m benchmarks.tensor_plans --output docs/measurements/tensor_plans.md

Needs no GPU, no weights and no network. Every architecture is built tiny from its own config class,
planned from one forward on the meta device, and certified on the CPU with random weights; one that
hangs is given up after --seconds.
"""

import argparse
import dataclasses
import math
import multiprocessing
import os
import platform
import re
import sys
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from recipe_lib.errors import UserError
from recipe_lib.external.proven_plan import WRONG, measure_rank_errors
from recipe_lib.external.tensor_plan.sharding_plan import ShardingPlan
from recipe_lib.external.tensor_plan.small_models import randomize, shrink
from recipe_lib.external.tensor_plan.transformers_models import (
    build_example_inputs,
    build_transformers_model,
    infer_plan_and_mask,
)

COMMAND = "python -m benchmarks.tensor_plans --output docs/measurements/tensor_plans.md"
SIZE = 2


@dataclasses.dataclass
class Row:
    """What became of one architecture. outcome: certified, rejected, refused, not built, not
    traced, no time.
    """

    name: str
    outcome: str
    cut: float = 0.0
    tokens: float = 0.0
    axes: int = 0
    boundaries: int = 0
    rewrites: int = 0
    agree: str = ""
    gradient: str = ""
    note: str = ""


def main(argv: list[str]) -> None:
    """Writes the page, and a line on each architecture as it goes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="the page to write")
    parser.add_argument("--only", default="", help="model types that match this regular expression")
    parser.add_argument("--seconds", type=float, default=120, help="for one architecture")
    arguments = parser.parse_args(argv)
    names = [name for name in list_model_types() if re.search(arguments.only, name)]
    rows = []
    started = time.monotonic()
    for name in names:
        rows.append(_examine_in_time(name, arguments.seconds))
        row = rows[-1]
        shares = f"{row.cut:5.0%} {row.tokens:5.0%}"
        print(
            f"{row.name:32} {row.outcome:12} {shares} {row.agree:8} {row.gradient:6}"
            f" {row.note[:150]}",
            flush=True,
        )
        arguments.output.write_text(build_page(rows, time.monotonic() - started), encoding="utf-8")


def list_model_types() -> list[str]:
    """The model types of transformers that are causal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _examine_in_time(name: str, seconds: float) -> Row:
    """One architecture in a process of its own, so that a crash or a hang is a row, too."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send, args=(theirs, name))
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            process.kill()
            return Row(name, "no time", note=f"not done in {seconds:g} s")
        row: Row = ours.recv()
        return row
    except EOFError:
        return Row(name, "not built", note="the process ended")
    finally:
        process.join()


def _send(pipe: Connection, name: str) -> None:
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    pipe.send(examine(name))


def examine(name: str) -> Row:
    """Builds, plans and certifies one architecture; without shared tokens if a plan with them is
    rejected.
    """
    row = _examine(name, tokens=True)
    if row.outcome == "rejected" and row.tokens:
        without = _examine(name, tokens=False)
        if without.outcome != "rejected":
            without.note = f"tokens are not shared: {row.note}"
            return without
    return row


def _examine(name: str, tokens: bool) -> Row:
    from transformers import AutoConfig

    try:
        config = shrink(AutoConfig.for_model(name))
        model = build_transformers_model(config, "cpu")
    except Exception as error:  # noqa: BLE001  (any config may fail in any way)
        return Row(name, "not built", note=_format_line(error))
    try:
        plan, mask = infer_plan_and_mask(config, tokens=tokens)
        randomize(model)
        inputs = build_example_inputs(config, device="cpu", mask=mask)
        with torch.no_grad():
            model(**inputs)
    except UserError as error:
        return Row(name, "not traced", note=_format_line(error))
    except Exception as error:  # noqa: BLE001  (see above)
        return Row(name, "not built", note=f"forward: {_format_line(error)}")
    sizes = (len(plan.axes), len(plan.boundaries), len(plan.rewrites))
    row = Row(name, "", cut_share(plan), plan.shared_tokens, *sizes)
    row.agree = compare_plans(model, plan)
    hidden = [axis for axis in plan.axes if not axis.vocabulary]
    if not hidden or SIZE not in plan.legal_sizes:
        steps = sorted({axis.size for axis in hidden})
        reasons = [each.reason for each in plan.parameters if each.reason and len(each.shape) > 1]
        common = max(reasons, key=reasons.count, default="no axis")
        row.outcome, row.tokens = "refused", 0.0
        row.note = f"axes of {steps} steps" if hidden else common
        return row
    return _certify(row, model, plan, inputs)


def _certify(row: Row, model: torch.nn.Module, plan: ShardingPlan, inputs: dict[str, Any]) -> Row:
    row.outcome, row.note = "certified", (plan.refused or ("",))[0]
    try:
        errors = measure_errors(model, plan, inputs)
    except (RuntimeError, ValueError, TypeError) as error:
        row.outcome, row.gradient = "rejected", "failed"
        row.note = _format_line(error)
        return row
    worst = max(errors, key=lambda name: errors[name])
    row.gradient = f"{errors[worst]:.0e}"
    if not errors[worst] <= WRONG:
        row.outcome = "rejected"
        row.note = f"{worst}, or its gradient, is not the whole model's"
        if math.isnan(errors[worst]):
            row.note = "outputs or gradients are not numbers, of the whole model or of ranks"
    return row


def measure_errors(
    model: torch.nn.Module, plan: ShardingPlan, inputs: dict[str, Any]
) -> dict[str, float]:
    """Errors of outputs and gradients in float64, or in float32 where a forward is not written for
    more.
    """
    try:
        return measure_rank_errors(model.double(), plan, SIZE, inputs)
    except (RuntimeError, ValueError, TypeError):
        return measure_rank_errors(model.float(), plan, SIZE, inputs)


def cut_share(plan: ShardingPlan) -> float:
    """Share of the elements of matrices that are cut."""
    sizes = [
        (torch.Size(each.shape).numel(), each.dim >= 0)
        for each in plan.parameters
        if len(each.shape) > 1
    ]
    return sum(size for size, cut in sizes if cut) / max(sum(size for size, _ in sizes), 1)


def compare_plans(model: torch.nn.Module, plan: ShardingPlan) -> str:
    """`12/12`: of the column and row entries of transformers' own plan, those that ours has as
    well.
    """
    theirs: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    agreed = found = 0
    for each in plan.parameters:
        style = find_style(theirs, each.name)
        if (
            style in ("colwise", "packed_colwise", "rowwise", "packed_rowwise")
            and len(each.shape) > 1
        ):
            found += 1
            agreed += each.role in ("column", "row", "vocabulary")
    return f"{agreed}/{found}" if found else ""


def find_style(theirs: dict[str, str], name: str) -> str:
    """What transformers' plan says of a parameter; empty for nothing."""
    for pattern, style in theirs.items():
        expression = re.escape(pattern).replace(r"\\*", r"\\d+").replace(r"\*", r"\d+")
        if re.fullmatch(rf"(.*\.)?{expression}(\.weight)?", name):
            return style
    return ""


def _format_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def build_page(rows: list[Row], seconds: float) -> str:
    """The table as Markdown."""
    import transformers

    counts = {
        outcome: sum(row.outcome == outcome for row in rows)
        for outcome in dict.fromkeys(r.outcome for r in rows)
    }
    shared = sum(row.outcome == "certified" and row.tokens > 0 for row in rows)
    agreed, found = (
        sum(int(row.agree.split("/")[place]) for row in rows if row.agree) for place in (0, 1)
    )
    lines = [
        "# Tensor parallel plans for transformers' causal language models",
        "",
        f"`{COMMAND}`, torch {torch.__version__}, transformers {transformers.__version__},"
        f" {platform.machine()} CPU, {seconds:.0f} s. {len(rows)} model types; "
        + ", ".join(f"{n} {o}" for o, n in counts.items())
        + ".",
        "",
        (
            f"Every model is a small copy of its own config's class; certified is a plan for {SIZE}"
            " ranks, each of which ran on its own part in a thread. Cut is the share of the"
            " elements of matrices that ranks share. Tokens is the share of the elements of"
            " activations that no axis cuts of which a rank has its own tokens alone: above 0 in"
            f" {shared} of the certified plans. Agree: of the column and row entries of"
            f" transformers' own plans, {agreed} of {found} are ours, too. Gradient is the largest"
            " relative error of any parameter's gradient, or of the output, in float64 (float32"
            " where the forward takes no other)."
        ),
        "",
        (
            "| model type | outcome | cut | tokens | axes | boundaries | rewrites | agree |"
            " gradient | note |"
        ),
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        note = re.sub(r"/\S*/", "", row.note.replace("|", "/").replace("`", ""))
        note = note if len(note) <= 160 else note[:160] + " ..."
        cells = [
            row.name,
            row.outcome,
            f"{row.cut:.0%}",
            f"{row.tokens:.0%}",
            *map(str, (row.axes, row.boundaries, row.rewrites)),
            row.agree,
            row.gradient,
        ]
        lines.append(f"| {' | '.join(cells)} | {note} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
