"""What `tune tp-plan` finds, proves and prints."""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from recipe_lib.errors import ConfigError
from recipe_lib.external.plan_proof import certify, plan_differences
from recipe_lib.external.tensor_plan import transformers_models
from recipe_lib.external.tensor_plan.sharding_plan import (
    BYTES,
    ShardingPlan,
    boundary_counts,
    collectives,
    cut_share,
    held_elements,
    parameter_groups,
    pattern_of,
    step_bytes,
    why_not,
)
from recipe_lib.external.tensor_plan.transformers_models import SMALL_MODEL, randomize, shrink
from recipe_lib.report import terminal
from recipe_lib.report.view import Table, show_table
from recipe_lib.units import Bytes, Count, pluralize

_MOST_SIZES = 12  # legal ones that are named
WIDTH = 160  # columns where there is no terminal to ask
FORMULA = (
    "an all-reduce of N tokens x w numbers in bf16: each rank sends 2 (t - 1) / t x 2 N w bytes"
    " (ring); an all-gather or a reduce-scatter: half of that; activation checkpointing repeats the"
    " forward's"
)


def build_plans(
    config: Any, sizes: Sequence[int], tokens: bool = True
) -> tuple[ShardingPlan, dict[int, ShardingPlan], dict[int, str]]:
    """The plan that cuts every axis; size to plan; and size to why there is none.

    A size that cannot share every axis gets a plan of its own, around those that it can share.
    tokens: shares out tokens, too.

    Raises ConfigError if no size has a plan.
    """
    whole = transformers_models.plan_for_config(config, 0, tokens)
    plans: dict[int, ShardingPlan] = {}
    illegal: dict[int, str] = {}
    for size in sizes:
        plan = (
            whole
            if size in whole.legal_sizes
            else transformers_models.plan_for_config(config, size, tokens)
        )
        if size in plan.legal_sizes:
            plans[size] = plan
        else:
            illegal[size] = why_not(whole, size)
    if not plans:
        legal = ", ".join(map(str, whole.legal_sizes)) or "none"
        reasons = dict.fromkeys(illegal.values())
        raise ConfigError(
            *(
                f"--tensor {','.join(map(str, sizes))}: {why}; legal sizes: {legal}"
                for why in reasons
            )
        )
    return whole, plans, illegal


def certify_plans(config: Any, plans: dict[int, ShardingPlan]) -> list[dict[str, Any]]:
    """The proof for each size, of a small copy of the model: size, ranks, plan, checked, failures
    (lines).

    The copy has a plan of its own, which has to hold every parameter as the model's does. ranks:
    fewer than size where it has fewer heads.
    """
    elements = held_elements(next(iter(plans.values())), 1)
    small = config if elements <= SMALL_MODEL else shrink(config)
    model = transformers_models.transformers_model(small, "cpu")
    randomize(model)
    tokens = any(plan.shared_tokens for plan in plans.values())
    whole, mask = transformers_models.plan_and_mask(small, 0, tokens)
    inputs = transformers_models.example_inputs(small, device="cpu", mask=mask)
    found: list[dict[str, Any]] = []
    for size, plan in plans.items():
        unlike = plan_differences(plan, whole)
        copied = transformers_models.plan_and_mask(small, size, tokens)[0] if unlike else whole
        difference = plan_differences(plan, copied)
        failures = [f"the small copy has another plan: {difference}"] if difference else []
        ranks = max((legal for legal in copied.legal_sizes if legal <= size), default=0)
        if not ranks:
            failures.append(f"no {size} ranks or fewer can share the small copy")
        checked = 0
        if not failures:
            certificate = certify(model, copied, ranks, inputs)
            failures, checked = list(certificate.failures), certificate.checked
        found.append(
            {
                "size": size,
                "ranks": ranks,
                "plan": copied.hash(),
                "checked": checked,
                "failures": failures,
            }
        )
    return found


def build_json(
    arguments: argparse.Namespace,
    whole: ShardingPlan,
    plans: dict[int, ShardingPlan],
    illegal: dict[int, str],
    proofs: list[dict[str, Any]],
) -> dict[str, Any]:
    """What --json writes; bytes throughout."""
    unlike = {plan.hash(): plan for plan in plans.values()}
    sizes = {
        str(size): {
            "plan": plan.hash(),
            "parameter_bytes": BYTES * held_elements(plan, size),
            "cut_share": cut_share(plan),
            "sent_bytes": step_bytes(plan, size, arguments.tokens),
        }
        for size, plan in plans.items()
    }
    return {
        "model": arguments.model,
        "tokens": arguments.tokens,
        "legal_sizes": list(whole.legal_sizes),
        "sizes": sizes,
        "not_legal": {str(size): why for size, why in illegal.items()},
        "plans": {name: plan.to_dict() for name, plan in unlike.items()},
        "certificates": proofs,
    }


def print_report(
    model: str,
    tokens: int,
    whole: ShardingPlan,
    plans: dict[int, ShardingPlan],
    illegal: dict[int, str],
    proofs: list[dict[str, Any]],
) -> None:
    """Print plans, numbers, refusals and proofs; sizes with the same plan share its text. whole: of
    every axis.
    """
    console = terminal.open_console(
        terminal.get_terminal_width(WIDTH), terminal.wants_color(sys.stdout)
    )
    unlike = {plan.hash(): plan for plan in plans.values()}
    for name, plan in unlike.items():
        sizes = [size for size, other in plans.items() if other.hash() == name]
        named = (
            ", ".join(map(str, sizes[:-1])) + (" and " if len(sizes) > 1 else "") + str(sizes[-1])
        )
        _print_line(console, f"{model}: plan {name} for {named} ranks", terminal.HEADING)
        tables = [
            *_build_parameter_tables(plan),
            _build_boundary_table(plan),
            _build_collective_table(plan, sizes, tokens),
        ]
        for table in [*tables, _build_size_table(plan, sizes)]:
            if table.rows:
                terminal.put_section(console, show_table(table))
        _print_line(console, "")
        for reason in dict.fromkeys(map(pattern_of, plan.refused)):
            _print_line(console, f"note: {reason}")
        if set(sizes) <= set(whole.legal_sizes):
            shown = ", ".join(map(str, plan.legal_sizes[:_MOST_SIZES]))
            _print_line(
                console,
                f"legal sizes: {shown}{' ...' if len(plan.legal_sizes) > _MOST_SIZES else ''}",
            )
        else:  # made for this size alone, around what its ranks cannot share
            _print_line(
                console,
                f"replicated for {named} ranks: {why_not(whole, sizes[0])}",
                terminal.WARNING,
            )
            _print_line(console, "")
    for size, why in illegal.items():
        _print_line(console, f"not legal: {size}: {why}", terminal.WARNING)
    for proof in proofs:
        _print_proof(console, proof)
    print(terminal.read_console(console), end="")


def _print_line(console: Console, text: str, style: str = "") -> None:
    terminal.put(console, text, style, wrap=False)


def _build_table(
    title: str, header: list[str], rows: list[list[Any]], numbers: int = 0, note: str = ""
) -> Table:
    """Return a table of which the last `numbers` columns are numbers."""
    left = tuple(header[: len(header) - numbers])
    return Table(title, header, rows, left, notes=(note,) if note else (), fold=True)


def _build_parameter_tables(plan: ShardingPlan) -> tuple[Table, Table]:
    """Return what is cut; what every rank has, and why. partial: gradients are summed over ranks
    once a step.
    """
    cut, whole = [], []
    groups = parameter_groups(plan)
    for each, names in groups.items():
        shape = " x ".join(map(str, each.shape))
        if each.dim < 0:
            added = ", added after the sum" if each.after_reduction else ""
            whole.append([each.name, len(names), shape, each.gradient + added, each.reason])
            continue
        lengths = [
            f"({size})" if at in each.whole else str(size) for at, size in enumerate(each.segments)
        ]
        segments = " + ".join(lengths) if len(lengths) > 1 else ""
        cut.append([each.name, len(names), shape, each.role, each.dim, segments, each.unit])
    return (
        _build_table(
            "cut", ["parameters", "count", "shape", "role", "dim", "segments", "unit"], cut
        ),
        _build_table(
            "whole on every rank", ["parameters", "count", "shape", "gradient", "why"], whole
        ),
    )


def _build_boundary_table(plan: ShardingPlan) -> Table:
    rows = []
    for each, count in boundary_counts(plan).items():
        cut = f", dim {each.dim}" if each.kind in ("leave", "cut", "gather", "slice") else ""
        bias = f", {each.bias} added after" if each.bias else ""
        what = f"{each.function} {each.place}{cut}{bias}"
        rows.append([each.kind, each.module or "the model itself", count, what, each.source])
    return _build_table("boundaries", ["kind", "module", "count", "call", "source"], rows)


def _build_collective_table(plan: ShardingPlan, sizes: list[int], tokens: int) -> Table:
    """Return bytes that a rank sends for a step of one micro-batch, by what they are for."""
    rows: list[list[Any]] = []
    counts = Counter((phase, name) for phase, name, _ in collectives(plan))
    totals = {size: step_bytes(plan, size, tokens) for size in sizes}
    for phase, title in _PHASES.items():
        if any(total[phase] for total in totals.values()):
            what = ", ".join(
                pluralize(count, name)
                for (of, name), count in sorted(counts.items())
                if of == phase
            )
            rows.append([title, what, *(Bytes(total[phase]) for total in totals.values())])
    header = ["when", "what", *(f"t={size}" for size in sizes)]
    return _build_table(f"sent by each rank, {tokens} tokens", header, rows, len(sizes), FORMULA)


_PHASES = {
    "forward": "forward",
    "backward": "backward",
    "loss": "loss (fp32 sums of sharded logits)",
    "gradients": "once a step (fp32 partial gradients)",
}


def _build_size_table(plan: ShardingPlan, sizes: list[int]) -> Table:
    held = {size: held_elements(plan, size) for size in (1, *sizes)}
    rows = [[size, Count(elements), Bytes(BYTES * elements)] for size, elements in held.items()]
    title = f"parameters of a rank; {cut_share(plan):.2%} of the elements are cut"
    return _build_table(title, ["t", "parameters", "bf16"], rows, 3)


def _print_proof(console: Console, proof: dict[str, Any]) -> None:
    what = f"certificate, {proof['size']} ranks"
    if proof["failures"]:
        _print_line(console, f"{what}: NOT PASSED", terminal.BAD)
        for failure in proof["failures"]:
            _print_line(console, f"  {failure}")
    else:
        shared = f", by {proof['ranks']} ranks" if proof["ranks"] != proof["size"] else ""
        said = (
            f"passed, {proof['checked']} comparisons of forward and gradients on a small"
            f" model{shared}"
        )
        _print_line(console, f"{what}: {said}", terminal.GOOD)
