"""Compute a pipeline's micro-batches in flight and its bubble by formula, to check schedules with.

Schedules have their usual names: gpipe, 1f1b, interleaved_1f1b, interleaved_zero_bubble, zbv.
"""


def compute_in_flight(
    schedule: str, ranks: int, rank: int, micro_batches: int, stages_per_rank: int = 1
) -> int | None:
    """Return the most micro-batches that are between forward and backward at once on a rank.

    Backward is the whole, or the input gradient where weight gradients come later. A micro-batch
    counts once for each of the rank's v stages. Return None where no formula is known, since rounds
    are of different sizes.

    With p ranks and m micro-batches, n of them in each of the m // p rounds of an interleaved
    schedule:
    - gpipe: m. 1f1b: p - rank, m at most.
    - interleaved_1f1b: (v - 1) n + 2 (p - 1 - rank) + 1, v m at most.
    - interleaved_zero_bubble: (v - 1) n + p - rank, v m at most.
    - zbv: 2 p, as many as p whole micro-batches; m + 1 + rank or 2 m where those are fewer.
    """
    behind = ranks - 1 - rank
    if schedule == "gpipe":
        return micro_batches
    if schedule == "1f1b":
        return min(micro_batches, behind + 1)
    if schedule == "zbv":
        return min(2 * ranks, micro_batches + 1 + rank, 2 * micro_batches)
    rounds = max(1, micro_batches // ranks)
    if micro_batches % rounds:
        return None
    hops = 2 if schedule == "interleaved_1f1b" else 1
    ahead = (stages_per_rank - 1) * (micro_batches // rounds) + hops * behind + 1
    return min(ahead, stages_per_rank * micro_batches)


def compute_theoretical_bubble(
    schedule: str, ranks: int, micro_batches: int, stages_per_rank: int = 1
) -> float | None:
    """Return the bubble for equal stages: the part of all ranks' time in which they idle.

    Return None where no formula is known. Forward, input gradient and weight gradients take one
    unit of time each, transfers none. With p ranks, m micro-batches and v stages on a rank it is
    idle / (3 v m + idle), where idle is:
    - gpipe, 1f1b: 3 (p - 1), for every m; so (p - 1) / (m + p - 1), however long backward takes.
    - interleaved_1f1b: 3 (p - 1) if m >= p is in m // p rounds of one size;
      for m < p 3 (v - 1) (p - m) more.
    - interleaved_zero_bubble: p - 1 if m >= p is in such rounds; more for m < p.
    - zbv: p - 1 if m >= 3 p // 2; 4 p - 2 - 2 m if that is more.
    """
    idle = _compute_idle(schedule, ranks, micro_batches, stages=stages_per_rank)
    return None if idle is None else idle / (3 * stages_per_rank * micro_batches + idle)


def _compute_idle(schedule: str, ranks: int, micro_batches: int, stages: int) -> int | None:
    """Return how long each rank idles in a step, in units of a stage's forward.

    Return None where rounds of an interleaved schedule are of different sizes.
    """
    missing = max(0, ranks - micro_batches)  # micro-batches that a full round would have more
    if schedule in ("gpipe", "1f1b"):
        return 3 * (ranks - 1)
    if schedule == "zbv":
        return max(ranks - 1, 4 * ranks - 2 - 2 * micro_batches)
    if micro_batches % max(1, micro_batches // ranks):
        return None
    if schedule == "interleaved_1f1b":
        return 3 * (ranks - 1) + 3 * (stages - 1) * missing
    few = 2 * stages * ranks - 1 - (3 * stages - 2) * micro_batches if missing else 0
    return max(ranks - 1 + stages * missing, few)
