"""Make, prove and print the tensor-parallel plans of `tune tp-plan`.

tp_plan.py calls `build_plans`, `build_json` and `print_report`. A plan says for each parameter
whether ranks share it; `size` is their number. An axis is what is cut through the whole model, such
as heads; a size is legal if it can share all axes of a plan. A boundary is where ranks exchange.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from recipe_lib.errors import ConfigError
from recipe_lib.external.certificate import certify, find_plan_difference
from recipe_lib.external.tensor_plan import transformers_models
from recipe_lib.external.tensor_plan.sharding_plan import (
    BYTES,
    ShardingPlan,
    compute_cut_share,
    count_boundaries,
    count_held_elements,
    count_step_bytes,
    group_parameters,
    list_collectives,
    make_pattern,
    why_not,
)
from recipe_lib.external.tensor_plan.small_models import SMALL_MODEL, randomize, shrink
from recipe_lib.report import terminal
from recipe_lib.report.view import Table, show_table
from recipe_lib.units import Bytes, Count, pluralize

_MOST_SIZES = 12  # the legal sizes that a line names
FORMULA = (
    "an all-reduce of N tokens x w numbers in bf16: each rank sends 2 (t - 1) / t x 2 N w bytes"
    " (ring); an all-gather or a reduce-scatter: half of that; activation checkpointing repeats the"
    " forward's"
)


@dataclass(frozen=True)
class PlannedSizes:
    """The plans of a model for the sizes that were asked for."""

    full_plan: ShardingPlan  # cuts every axis
    plans: dict[int, ShardingPlan]  # size -> its plan; not empty
    illegal: dict[int, str]  # size without a plan -> why
    proofs: list[dict[str, Any]]  # of `certify_plans`; empty without --certify

    def has_failures(self) -> bool:
        return any(proof["failures"] for proof in self.proofs)


def build_plans(
    config: Any, sizes: Sequence[int], *, tokens: bool = True, certifies: bool = False
) -> PlannedSizes:
    """Make the plan of each size, and prove it if `certifies`.

    config: a transformers config. tokens: tokens are shared out too (sequence parallel). Raises
    ConfigError if no size has a plan.
    """
    full_plan = transformers_models.infer_config_plan(config, 0, tokens)  # 0: cut every axis
    plans: dict[int, ShardingPlan] = {}
    illegal: dict[int, str] = {}
    for size in sizes:
        # A size that cannot share every axis gets a plan of its own, which cuts the others.
        is_full = size in full_plan.legal_sizes
        plan = full_plan if is_full else transformers_models.infer_config_plan(config, size, tokens)
        if size in plan.legal_sizes:
            plans[size] = plan
        else:
            illegal[size] = why_not(full_plan, size)
    if not plans:
        legal = ", ".join(map(str, full_plan.legal_sizes)) or "none"
        raise ConfigError(
            *(
                f"--tensor {','.join(map(str, sizes))}: {reason}; legal sizes: {legal}"
                for reason in dict.fromkeys(illegal.values())
            )
        )
    return PlannedSizes(
        full_plan=full_plan,
        plans=plans,
        illegal=illegal,
        proofs=certify_plans(config, plans) if certifies else [],
    )


def certify_plans(config: Any, plans: dict[int, ShardingPlan]) -> list[dict[str, Any]]:
    """Prove each plan on a small copy of the model with random weights; return a dict a size.

    Keys: `size`; `ranks` that share the copy, fewer than size where it has fewer heads; `plan`, the
    hash of the copy's; `checked`, the number of comparisons; `failures`, lines, empty if proved.
    """
    elements = count_held_elements(next(iter(plans.values())), 1)  # one rank holds the whole model
    small = config if elements <= SMALL_MODEL else shrink(config)
    model = transformers_models.build_transformers_model(small, "cpu")
    randomize(model)
    tokens = any(plan.shared_tokens for plan in plans.values())
    # mask: the form of attention mask with which the class' forward can be traced.
    full_copy_plan, mask = transformers_models.infer_plan_and_mask(small, 0, tokens)
    inputs = transformers_models.build_example_inputs(small, device="cpu", mask=mask)
    proofs: list[dict[str, Any]] = []
    for size, plan in plans.items():
        copy_plan = full_copy_plan
        # They differ where the size cannot share every axis of the model.
        if find_plan_difference(plan, full_copy_plan):
            copy_plan = transformers_models.infer_plan_and_mask(small, size, tokens)[0]
        # The copy's plan has to hold every parameter as the model's does, or it proves another one.
        difference = find_plan_difference(plan, copy_plan)
        failures = [f"the small copy has another plan: {difference}"] if difference else []
        ranks = max((legal for legal in copy_plan.legal_sizes if legal <= size), default=0)
        if not ranks:
            failures.append(f"no {size} ranks or fewer can share the small copy")
        checked = 0
        if not failures:
            certificate = certify(model, plan=copy_plan, size=ranks, inputs=inputs)
            failures = list(certificate.failures)
            checked = certificate.checked
        proofs.append(
            {
                "size": size,
                "ranks": ranks,
                "plan": copy_plan.hash(),
                "checked": checked,
                "failures": failures,
            }
        )
    return proofs


def build_json(arguments: argparse.Namespace, planned: PlannedSizes) -> dict[str, Any]:
    """Return what --json writes: figures by size, refusals, plans by hash, and proofs."""
    return {
        "model": arguments.model,
        "tokens": arguments.tokens,
        "legal_sizes": list(planned.full_plan.legal_sizes),
        "sizes": {
            str(size): {
                "plan": plan.hash(),
                "parameter_bytes": BYTES * count_held_elements(plan, size),
                "cut_share": compute_cut_share(plan),
                "sent_bytes": count_step_bytes(plan, size, arguments.tokens),
            }
            for size, plan in planned.plans.items()
        },
        "not_legal": {str(size): reason for size, reason in planned.illegal.items()},
        "plans": {plan.hash(): plan.to_dict() for plan in planned.plans.values()},
        "certificates": planned.proofs,
    }


def print_report(model: str, tokens: int, planned: PlannedSizes) -> None:
    """Print plans, numbers, refusals and proofs.

    model: as typed. tokens: of a micro-batch, b x s.
    """
    console = terminal.open_console(
        terminal.get_terminal_width(terminal.WIDE_REPORT), terminal.wants_color(sys.stdout)
    )
    # Sizes with the same plan share its tables.
    distinct_plans = {plan.hash(): plan for plan in planned.plans.values()}
    for name, plan in distinct_plans.items():
        sizes = [size for size, size_plan in planned.plans.items() if size_plan.hash() == name]
        sizes_text = (
            ", ".join(map(str, sizes[:-1])) + (" and " if len(sizes) > 1 else "") + str(sizes[-1])
        )
        _print_line(console, f"{model}: plan {name} for {sizes_text} ranks", terminal.HEADING)
        for table in (
            *_build_parameter_tables(plan),
            _build_boundary_table(plan),
            _build_collective_table(plan, sizes, tokens),
            _build_size_table(plan, sizes),
        ):
            if table.rows:
                terminal.put_section(console, show_table(table))
        _print_line(console, "")
        # `refused`: sentences on what could be cut and is not; layers differ in numbers only.
        for reason in dict.fromkeys(map(make_pattern, plan.refused)):
            _print_line(console, f"note: {reason}")
        if set(sizes) <= set(planned.full_plan.legal_sizes):
            legal = ", ".join(map(str, plan.legal_sizes[:_MOST_SIZES]))
            _print_line(
                console,
                f"legal sizes: {legal}{' ...' if len(plan.legal_sizes) > _MOST_SIZES else ''}",
            )
        else:  # a plan of its own, around the axes that its ranks cannot share
            _print_line(
                console,
                f"replicated for {sizes_text} ranks: {why_not(planned.full_plan, sizes[0])}",
                terminal.WARNING,
            )
            _print_line(console, "")
    for size, reason in planned.illegal.items():
        _print_line(console, f"not legal: {size}: {reason}", terminal.WARNING)
    for proof in planned.proofs:
        _print_proof(console, proof)
    print(terminal.read_console(console), end="")


def _print_line(console: Console, text: str, style: str = "") -> None:
    terminal.put(console, text, style, wrap=False)


def _build_table(
    title: str,
    header: list[str],
    rows: list[list[Any]],
    num_numeric: int = 0,
    note: str = "",
) -> Table:
    """Return a table whose last `num_numeric` columns hold numbers; long texts are folded."""
    text_columns = tuple(header[: len(header) - num_numeric])
    return Table(
        title,
        header=header,
        rows=rows,
        left=text_columns,
        notes=(note,) if note else (),
        wraps_cells=True,
    )


def _build_parameter_tables(plan: ShardingPlan) -> tuple[Table, Table]:
    cut_rows = []
    replicated_rows = []
    # Parameters of all layers with the same plan are one row.
    for group, names in group_parameters(plan).items():
        shape = " x ".join(map(str, group.shape))
        if group.dim < 0:  # no dimension is cut
            added = ", added after the sum" if group.after_reduction else ""
            replicated_rows.append(
                [group.name, len(names), shape, group.gradient + added, group.reason]
            )
            continue
        # Segments: lengths along the dimension that are cut evenly each, such as those of q, k and
        # v. In parentheses: a rank holds its part but computes with the whole.
        lengths = [
            f"({size})" if index in group.whole else str(size)
            for index, size in enumerate(group.segments)
        ]
        segments = " + ".join(lengths) if len(lengths) > 1 else ""
        cut_rows.append(
            [group.name, len(names), shape, group.role, group.dim, segments, group.unit]
        )
    return (
        _build_table(
            "cut", ["parameters", "count", "shape", "role", "dim", "segments", "unit"], cut_rows
        ),
        _build_table(
            "whole on every rank",
            ["parameters", "count", "shape", "gradient", "why"],
            replicated_rows,
        ),
    )


def _build_boundary_table(plan: ShardingPlan) -> Table:
    rows = []
    for boundary, count in count_boundaries(plan).items():
        has_dim = boundary.kind in ("leave", "cut", "gather", "slice")
        dim = f", dim {boundary.dim}" if has_dim else ""
        bias = f", {boundary.bias} added after" if boundary.bias else ""
        call = f"{boundary.function} {boundary.place}{dim}{bias}"
        rows.append(
            [boundary.kind, boundary.module or "the model itself", count, call, boundary.source]
        )
    return _build_table("boundaries", ["kind", "module", "count", "call", "source"], rows)


def _build_collective_table(plan: ShardingPlan, sizes: list[int], tokens: int) -> Table:
    """Return a table of the bytes that a rank sends for a step of one micro-batch, by phase."""
    rows: list[list[Any]] = []
    counts = Counter((phase, name) for phase, name, _ in list_collectives(plan))
    totals = {size: count_step_bytes(plan, size, tokens) for size in sizes}
    for phase, title in _PHASES.items():
        if any(total[phase] for total in totals.values()):
            calls = ", ".join(
                pluralize(count, name)
                for (call_phase, name), count in sorted(counts.items())
                if call_phase == phase
            )
            rows.append([title, calls, *(Bytes(total[phase]) for total in totals.values())])
    header = ["when", "what", *(f"t={size}" for size in sizes)]
    return _build_table(
        f"sent by each rank, {tokens} tokens",
        header=header,
        rows=rows,
        num_numeric=len(sizes),
        note=FORMULA,
    )


# Phase, as a key of `count_step_bytes` -> how the table calls it.
_PHASES = {
    "forward": "forward",
    "backward": "backward",
    "loss": "loss (fp32 sums of sharded logits)",
    "gradients": "once a step (fp32 partial gradients)",
}


def _build_size_table(plan: ShardingPlan, sizes: list[int]) -> Table:
    elements = {size: count_held_elements(plan, size) for size in (1, *sizes)}
    rows = [[size, Count(count), Bytes(BYTES * count)] for size, count in elements.items()]
    title = f"parameters of a rank; {compute_cut_share(plan):.2%} of the elements are cut"
    return _build_table(title, header=["t", "parameters", "bf16"], rows=rows, num_numeric=3)


def _print_proof(console: Console, proof: dict[str, Any]) -> None:
    title = f"certificate, {proof['size']} ranks"
    if proof["failures"]:
        _print_line(console, f"{title}: NOT PASSED", terminal.BAD)
        for failure in proof["failures"]:
            _print_line(console, f"  {failure}")
    else:
        shared = f", by {proof['ranks']} ranks" if proof["ranks"] != proof["size"] else ""
        _print_line(
            console,
            f"{title}: passed, {proof['checked']} comparisons of forward and gradients on a small"
            f" model{shared}",
            terminal.GOOD,
        )
