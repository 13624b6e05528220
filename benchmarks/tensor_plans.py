"""Infer a tensor-parallel plan for every causal language model of transformers, and certify it.

    python -m benchmarks.tensor_plans --output docs/measurements/tensor_plans.md

A plan says by which dimension each parameter is sharded; it is inferred from one forward of a tiny
model on the meta device. It is certified if outputs and gradients of its ranks, run in threads on
the CPU with random weights, are the whole model's. Needs no GPU, no weights and no network.
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
from recipe_lib.external.certificate import MAX_RELATIVE_ERROR, measure_rank_errors
from recipe_lib.external.tensor_plan.sharding_plan import ShardingPlan
from recipe_lib.external.tensor_plan.small_models import randomize, shrink
from recipe_lib.external.tensor_plan.transformers_models import (
    build_example_inputs,
    build_transformers_model,
    infer_plan_and_mask,
)

COMMAND = "python -m benchmarks.tensor_plans --output docs/measurements/tensor_plans.md"
SIZE = 2  # tensor-parallel ranks of a certified plan
# Outcome for an architecture -> its meaning.
OUTCOMES = {
    "certified": f"{SIZE} ranks, each with its part in a thread, give the whole model's results",
    "rejected": "the ranks give other results, or fail",
    "refused": f"no axis of the layers that {SIZE} ranks can divide",
    "not built": "the model or its forward fails by itself",
    "not traced": "its forward cannot be followed",
    "no time": "it took too long",
}
# Column of the table -> its meaning.
COLUMNS = {
    "sharded": "share of the elements of matrices that ranks divide",
    "tokens": "share of the elements of activations without a divided axis, of which a rank has its"
    " own tokens alone",
    "axes": "dimensions that ranks divide together, such as heads",
    "boundaries": "places where a rank's forward sums, gathers or slices beyond the model's own",
    "rewrites": "integer attributes of modules, such as a number of heads, made a rank's",
    "agree": "column- and row-parallel entries of transformers' own plan that ours shards, of all",
    "gradient": "largest relative error of a parameter's gradient or of the output, in float64"
    " (float32 where the forward takes no other)",
    "note": "why it is not certified, or what the plan leaves whole",
}


@dataclasses.dataclass
class Row:
    """A row of the table: the outcome for one architecture."""

    name: str  # its model type
    outcome: str  # a key of OUTCOMES
    sharded_share: float = 0.0  # of the elements of matrices
    token_share: float = 0.0  # share of activations of which a rank has its own tokens alone
    num_axes: int = 0  # of tensors, that ranks divide together, such as heads
    num_boundaries: int = 0  # where a rank's forward sums, gathers or slices beyond the model's own
    num_rewrites: int = 0  # integer attributes, such as a number of heads, made a rank's
    # `11/12`: entries of transformers' own plan that ours has, of all; empty: there are none
    agreement: str = ""
    gradient: str = ""  # the largest relative error, or `failed`; empty: no plan ran
    note: str = ""  # why it is not certified, or what a plan leaves whole


def main(argv: list[str]) -> None:
    """Examine all architectures, print a line on each, and write the page after each."""
    parser = argparse.ArgumentParser(
        description="Infer and certify tensor-parallel plans for transformers' language models."
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
        shares = f"{row.sharded_share:5.0%} {row.token_share:5.0%}"
        print(
            f"{row.name:32} {row.outcome:12} {shares} {row.agreement:8} {row.gradient:6}"
            f" {row.note[:150]}",
            flush=True,
        )
        arguments.output.write_text(build_page(rows, time.monotonic() - started), encoding="utf-8")


def list_model_types() -> list[str]:
    """Return the model types of transformers that are causal language models."""
    # Here, as transformers is an optional extra: tests import this module without it.
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _examine_in_time(name: str, seconds: float) -> Row:
    """Examine one architecture in a process of its own, so that a crash or a hang is a row, too.

    seconds: after which it is killed.
    """
    # Forked, as a spawned process would import torch and transformers anew for each row.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_row, args=(sender, name))
    process.start()
    sender.close()  # else a crash of the process would not end the pipe
    try:
        if not receiver.poll(seconds):
            process.kill()
            return Row(name, "no time", note=f"not done in {seconds:g} s")
        row: Row = receiver.recv()
        return row
    except EOFError:
        return Row(name, "not built", note="the process ended")
    finally:
        process.join()


def _send_row(pipe: Connection, name: str) -> None:
    """Examine an architecture in the process that was started for it, and send its row."""
    warnings.simplefilter("ignore")
    # Standard error is closed by its descriptor, so that warnings of C++ are not printed either.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    pipe.send(examine_architecture(name))


def examine_architecture(name: str) -> Row:
    """Build, plan and certify one architecture.

    A plan in which ranks share tokens (sequence parallel) is tried first. If it is rejected, and
    one without passes or is refused, that one's row is returned.
    """
    row = _examine_plan(name, shares_tokens=True)
    if row.outcome == "rejected" and row.token_share:
        row_without_tokens = _examine_plan(name, shares_tokens=False)
        if row_without_tokens.outcome != "rejected":
            row_without_tokens.note = f"tokens are not shared: {row.note}"
            return row_without_tokens
    return row


def _examine_plan(name: str, shares_tokens: bool) -> Row:
    """Build, plan and certify one architecture. shares_tokens: ranks may share tokens."""
    from transformers import AutoConfig  # here: see `list_model_types`

    try:
        config = shrink(AutoConfig.for_model(name))
        model = build_transformers_model(config, "cpu")
    except Exception as error:  # noqa: BLE001  (any config may fail in any way)
        return Row(name, "not built", note=_format_line(error))
    try:
        # mask: the form of attention mask with which the forward could be traced.
        plan, mask = infer_plan_and_mask(config, tokens=shares_tokens)
        randomize(model)  # zero biases and unit scales would hide a wrong cut
        inputs = build_example_inputs(config, device="cpu", mask=mask)
        with torch.no_grad():
            model(**inputs)  # one that fails by itself says nothing about the plan
    except UserError as error:
        return Row(name, "not traced", note=_format_line(error))
    except Exception as error:  # noqa: BLE001  (see above)
        return Row(name, "not built", note=f"forward: {_format_line(error)}")
    row = Row(
        name=name,
        outcome="",
        sharded_share=compute_sharded_share(plan),
        token_share=plan.shared_tokens,
        num_axes=len(plan.axes),
        num_boundaries=len(plan.boundaries),
        num_rewrites=len(plan.rewrites),
        agreement=compare_plans(model, plan),
    )
    # A plan that divides embedding and head alone is called refused.
    hidden_axes = [axis for axis in plan.axes if not axis.vocabulary]
    if not hidden_axes or SIZE not in plan.legal_sizes:
        row.outcome = "refused"
        row.token_share = 0.0
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
    return _certify_plan(row, model=model, plan=plan, inputs=inputs)


def _certify_plan(
    row: Row, model: torch.nn.Module, plan: ShardingPlan, inputs: dict[str, Any]
) -> Row:
    """Run the ranks of a plan, fill outcome, gradient and note into the row, and return it."""
    row.outcome = "certified"
    # The first axis that looks possible and stays whole, with the reason.
    row.note = plan.refused[0] if plan.refused else ""
    try:
        errors = measure_errors(model, plan, inputs)
    except (RuntimeError, ValueError, TypeError) as error:
        row.outcome = "rejected"
        row.gradient = "failed"
        row.note = _format_line(error)
        return row
    worst_name = max(errors, key=lambda name: errors[name])
    row.gradient = f"{errors[worst_name]:.0e}"
    if not errors[worst_name] <= MAX_RELATIVE_ERROR:  # written so, it is true of NaN, too
        row.outcome = "rejected"
        row.note = f"{worst_name}, or its gradient, is not the whole model's"
        if math.isnan(errors[worst_name]):
            row.note = "outputs or gradients are not numbers, of the whole model or of ranks"
    return row


def measure_errors(
    model: torch.nn.Module, plan: ShardingPlan, inputs: dict[str, Any]
) -> dict[str, float]:
    """Return the relative errors of outputs and gradients, by name.

    In float64, or in float32 if that raises: some forwards are written for no other.
    """
    try:
        return measure_rank_errors(model.double(), plan=plan, size=SIZE, inputs=inputs)
    except (RuntimeError, ValueError, TypeError):
        return measure_rank_errors(model.float(), plan=plan, size=SIZE, inputs=inputs)


def compute_sharded_share(plan: ShardingPlan) -> float:
    """Return the share of the elements of matrices that are sharded."""
    total = 0
    sharded = 0
    for parameter in plan.parameters:
        if len(parameter.shape) > 1:
            size = torch.Size(parameter.shape).numel()
            total += size
            if parameter.dim >= 0:  # -1: every rank has all of it
                sharded += size
    return sharded / max(total, 1)


def compare_plans(model: torch.nn.Module, plan: ShardingPlan) -> str:
    """Compare with transformers' own plan for column- and row-parallel matrices.

    Returns `11/12` if ours shards 11 of the 12 that theirs has; empty if theirs has none.
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
    """Return the style, such as `colwise`, of a parameter in transformers' plan; empty: none.

    their_plan: style by a pattern of module names, in which `*` stands for a layer's number.
    """
    for pattern, style in their_plan.items():
        expression = re.escape(pattern).replace(r"\*", r"\d+")
        if re.fullmatch(rf"(.*\.)?{expression}(\.weight)?", name):
            return style
    return ""


def _format_line(error: Exception) -> str:
    """Return an error's type and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def build_page(rows: list[Row], seconds: float) -> str:
    """Return the page of the rows so far. seconds: that they took."""
    import transformers  # here: see `list_model_types`

    counts = Counter(row.outcome for row in rows)  # in the order of the first of each
    num_sharing_tokens = sum(row.outcome == "certified" and row.token_share > 0 for row in rows)
    agreements = [row.agreement.split("/") for row in rows if row.agreement]
    num_agreed = sum(int(agreed) for agreed, _ in agreements)
    num_entries = sum(int(entries) for _, entries in agreements)
    lines = [
        "# Tensor parallel plans for transformers' causal language models",
        "",
        "For whoever trains a model of transformers on several GPUs: which classes ranks can share.",
        "",
        f"`{COMMAND}`, torch {torch.__version__}, transformers {transformers.__version__},"
        f" {platform.machine()} CPU, {seconds:.0f} s. {len(rows)} model types; "
        + ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        + ".",
        "",
        (
            "Every model is a small copy of its own config's class. Ranks share tokens in"
            f" {num_sharing_tokens} of the certified plans. Of the column- and row-parallel entries"
            f" of transformers' own plans, {num_agreed} of {num_entries} are ours, too."
        ),
        "",
        "| outcome | model types | meaning |",
        "|---|---:|---|",
        *(f"| {outcome} | {counts[outcome]} | {text} |" for outcome, text in OUTCOMES.items()),
        "",
        "| column | meaning |",
        "|---|---|",
        *(f"| {column} | {meaning} |" for column, meaning in COLUMNS.items()),
        "",
        f"| model type | outcome | {' | '.join(COLUMNS)} |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        # `|` and backticks would break the table; folders of this machine are cut from paths.
        note = re.sub(r"/\S*/", "", row.note.replace("|", "/").replace("`", ""))
        note = note if len(note) <= 160 else note[:160] + " ..."
        cells = [
            row.name,
            row.outcome,
            f"{row.sharded_share:.0%}",
            f"{row.token_share:.0%}",
            str(row.num_axes),
            str(row.num_boundaries),
            str(row.num_rewrites),
            row.agreement,
            row.gradient,
            note,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
