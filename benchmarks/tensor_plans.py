"""Infer a tensor-parallel plan for every causal language model of transformers, and certify it.

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
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from recipe_lib.errors import UserError
from recipe_lib.external.proven_plan import MAX_RELATIVE_ERROR, measure_rank_errors
from recipe_lib.external.tensor_plan.sharding_plan import ShardingPlan
from recipe_lib.external.tensor_plan.small_models import randomize, shrink
from recipe_lib.external.tensor_plan.transformers_models import (
    build_example_inputs,
    build_transformers_model,
    infer_plan_and_mask,
)

COMMAND = "python -m benchmarks.tensor_plans --output docs/measurements/tensor_plans.md"
SIZE = 2  # ranks


@dataclasses.dataclass
class Row:
    """A row of the table: the outcome for one architecture."""

    name: str  # its model type
    outcome: str  # certified, rejected, refused, not built, not traced, no time
    cut: float = 0.0  # share of the elements of matrices that ranks share
    tokens: float = 0.0  # share of activations of which a rank has its own tokens alone
    axes: int = 0
    boundaries: int = 0
    rewrites: int = 0
    agree: str = ""  # `12/12`: entries of transformers' own plan that ours has, of all
    gradient: str = ""  # the largest relative error
    note: str = ""


def main(argv: list[str]) -> None:
    """Write the page, and print a line on each architecture as it goes."""
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
        row = _examine_in_time(name, arguments.seconds)
        rows.append(row)
        shares = f"{row.cut:5.0%} {row.tokens:5.0%}"
        print(
            f"{row.name:32} {row.outcome:12} {shares} {row.agree:8} {row.gradient:6}"
            f" {row.note[:150]}",
            flush=True,
        )
        arguments.output.write_text(build_page(rows, time.monotonic() - started), encoding="utf-8")


def list_model_types() -> list[str]:
    """Return the model types of transformers that are causal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _examine_in_time(name: str, seconds: float) -> Row:
    """Examine one architecture in a process of its own, so that a crash or a hang is a row, too."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send_row, args=(theirs, name))
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


def _send_row(pipe: Connection, name: str) -> None:
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # standard error, for warnings of C++ as well
    pipe.send(examine(name))


def examine(name: str) -> Row:
    """Build, plan and certify one architecture.

    Without shared tokens if a plan with them is rejected.
    """
    row = _examine_plan(name, tokens=True)
    if row.outcome == "rejected" and row.tokens:
        row_without_tokens = _examine_plan(name, tokens=False)
        if row_without_tokens.outcome != "rejected":
            row_without_tokens.note = f"tokens are not shared: {row.note}"
            return row_without_tokens
    return row


def _examine_plan(name: str, tokens: bool) -> Row:
    """Build, plan and certify one architecture. tokens: may ranks share tokens?"""
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
    row = Row(
        name=name,
        outcome="",
        cut=compute_cut_share(plan),
        tokens=plan.shared_tokens,
        axes=len(plan.axes),
        boundaries=len(plan.boundaries),
        rewrites=len(plan.rewrites),
        agree=compare_plans(model, plan),
    )
    hidden_axes = [axis for axis in plan.axes if not axis.vocabulary]
    if not hidden_axes or SIZE not in plan.legal_sizes:
        row.outcome = "refused"
        row.tokens = 0.0
        if hidden_axes:
            row.note = f"axes of {sorted({axis.size for axis in hidden_axes})} steps"
        else:
            reasons = [
                parameter.reason
                for parameter in plan.parameters
                if parameter.reason and len(parameter.shape) > 1
            ]
            row.note = max(reasons, key=reasons.count, default="no axis")
        return row
    return _certify(row, model=model, plan=plan, inputs=inputs)


def _certify(row: Row, model: torch.nn.Module, plan: ShardingPlan, inputs: dict[str, Any]) -> Row:
    """Run the ranks of a plan, and fill in what comes of it."""
    row.outcome = "certified"
    row.note = plan.refused[0] if plan.refused else ""
    try:
        errors = measure_errors(model, plan, inputs)
    except (RuntimeError, ValueError, TypeError) as error:
        row.outcome = "rejected"
        row.gradient = "failed"
        row.note = _format_line(error)
        return row
    worst = max(errors, key=lambda name: errors[name])
    row.gradient = f"{errors[worst]:.0e}"
    if not errors[worst] <= MAX_RELATIVE_ERROR:  # or it is not a number
        row.outcome = "rejected"
        row.note = f"{worst}, or its gradient, is not the whole model's"
        if math.isnan(errors[worst]):
            row.note = "outputs or gradients are not numbers, of the whole model or of ranks"
    return row


def measure_errors(
    model: torch.nn.Module, plan: ShardingPlan, inputs: dict[str, Any]
) -> dict[str, float]:
    """Return the errors of outputs and gradients, by name.

    In float64, or in float32 where a forward is not written for more.
    """
    try:
        return measure_rank_errors(model.double(), plan=plan, size=SIZE, inputs=inputs)
    except (RuntimeError, ValueError, TypeError):
        return measure_rank_errors(model.float(), plan=plan, size=SIZE, inputs=inputs)


def compute_cut_share(plan: ShardingPlan) -> float:
    """Return the share of the elements of matrices that ranks share."""
    total = 0
    cut = 0
    for parameter in plan.parameters:
        if len(parameter.shape) > 1:
            size = torch.Size(parameter.shape).numel()
            total += size
            if parameter.dim >= 0:
                cut += size
    return cut / max(total, 1)


def compare_plans(model: torch.nn.Module, plan: ShardingPlan) -> str:
    """Return `11/12`: of 12 column and row entries of transformers' own plan ours has 11.

    Empty if it has no such entries.
    """
    their_plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    num_entries = 0
    num_agreed = 0
    for parameter in plan.parameters:
        style = find_style(their_plan, parameter.name)
        is_matrix = len(parameter.shape) > 1
        if is_matrix and style in ("colwise", "packed_colwise", "rowwise", "packed_rowwise"):
            num_entries += 1
            num_agreed += parameter.role in ("column", "row", "vocabulary")
    return f"{num_agreed}/{num_entries}" if num_entries else ""


def find_style(their_plan: dict[str, str], name: str) -> str:
    """Return what transformers' plan says of a parameter; empty for nothing."""
    for pattern, style in their_plan.items():
        expression = re.escape(pattern).replace(r"\\*", r"\\d+").replace(r"\*", r"\d+")
        if re.fullmatch(rf"(.*\.)?{expression}(\.weight)?", name):
            return style
    return ""


def _format_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def build_page(rows: list[Row], seconds: float) -> str:
    """Return the page. seconds: that all rows took."""
    import transformers

    counts = Counter(row.outcome for row in rows)  # in the order of the first of each
    num_sharing_tokens = sum(row.outcome == "certified" and row.tokens > 0 for row in rows)
    agreements = [row.agree.split("/") for row in rows if row.agree]
    num_agreed = sum(int(agreed) for agreed, _ in agreements)
    num_entries = sum(int(entries) for _, entries in agreements)
    lines = [
        "# Tensor parallel plans for transformers' causal language models",
        "",
        f"`{COMMAND}`, torch {torch.__version__}, transformers {transformers.__version__},"
        f" {platform.machine()} CPU, {seconds:.0f} s. {len(rows)} model types; "
        + ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        + ".",
        "",
        (
            f"Every model is a small copy of its own config's class; certified is a plan for {SIZE}"
            " ranks, each of which ran on its own part in a thread. Cut is the share of the"
            " elements of matrices that ranks share. Tokens is the share of the elements of"
            " activations that no axis cuts of which a rank has its own tokens alone: above 0 in"
            f" {num_sharing_tokens} of the certified plans. Agree: of the column and row entries of"
            f" transformers' own plans, {num_agreed} of {num_entries} are ours, too. Gradient is"
            " the largest"
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
            str(row.axes),
            str(row.boundaries),
            str(row.rewrites),
            row.agree,
            row.gradient,
            note,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
