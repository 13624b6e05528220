"""What each place of a pipeline has and holds, as a table. No torch in here."""

from recipe_lib.plan.result import Plan, RankPlan, StagePlan
from recipe_lib.plan.tables import layers_text
from recipe_lib.report.terminal import Table
from recipe_lib.units import format_bytes, format_count

_STATES = ("parameters", "gradients", "optimizer")


def stage_table(plan: Plan) -> Table | None:
    """A row for each place that was planned; None without a pipeline."""
    if plan.pipeline is None:
        return None
    ranks = {rank.rank: rank for rank in plan.rank_plans}
    rows = [_row(plan, place, ranks[place.rank]) for place in plan.pipeline.places if place.rank in ranks]
    header = ["rank", "layers", "parameters", "in flight", "active", "states", "activations", "other", "reserved"]
    header += ["computes", "idle", "sends", ""]
    notes = (
        "In flight: micro-batches between forward and backward, each stage counted; + those with deferred weight "
        "gradients. States: parameters, gradients and optimizer states at the peak. Sends: to other ranks of the "
        "pipeline, a step.",
    )
    optional = ("parameters", "sends", "other", "computes", "reserved", "layers", "states", "activations", "idle")
    return Table("stages of the pipeline, at the peak of each", header, rows, ("rank", "layers", ""), optional, notes)


def _row(plan: Plan, place: StagePlan, rank: RankPlan) -> list[str]:
    kinds = {"states": 0, "activations": 0}
    for alive in rank.alive:
        name = "states" if alive.kind in _STATES else alive.kind
        if name in kinds:
            kinds[name] += alive.bytes
    timed = plan.pipeline is not None and plan.pipeline.seconds is not None
    return [
        str(place.rank),
        layers_text(place),
        format_count(place.parameters),
        f"{place.in_flight}+{place.deferred}" if place.deferred else str(place.in_flight),
        format_bytes(rank.peak.active),
        *map(format_bytes, kinds.values()),
        format_bytes(rank.peak.active - sum(kinds.values())),
        format_bytes(rank.reserved),
        f"{place.compute:.3g} s" if timed else "-",
        f"{place.idle:.1%}" if timed else "-",
        f"{place.sends} x {format_bytes(place.sent // place.sends)}" if place.sends else "none",
        "heaviest" if rank is plan.heaviest else "",
    ]
