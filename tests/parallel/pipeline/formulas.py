"""What a pipeline has under way, by formula."""


def in_flight(schedule: str, ranks: int, rank: int, micro_batches: int, stages_per_rank: int = 1) -> int | None:
    """The most micro-batches between their forward and their backward (B or I) on a rank, by formula; each of its v
    stages counts for itself. None: there is no formula for so many micro-batches.

    With p ranks, m micro-batches, n of them in a round of an interleaved schedule (m // p rounds of one size):
    - gpipe: m. 1f1b: p - rank, m at most.
    - interleaved_1f1b: (v - 1) n + 2 (p - 1 - rank) + 1; interleaved_zero_bubble: (v - 1) n + p - rank; v m at most.
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
