"""The text of `tune plan --check-streams`."""

from recipe_lib.plan.streams.check_recipe import RankCheck, StreamCheck, unneeded

_MOST_WAITS = 12  # lines of code shown


def render_check(check: StreamCheck) -> str:
    """One part for streams, one for waits of the host, one for collectives."""
    lines = []
    if check.micro_batches < check.of_micro_batches:
        lines.append(f"{check.micro_batches} of a step's {check.of_micro_batches} micro-batches are followed")
    for rank in check.ranks:
        lines += _streams(rank) + _waits(rank)
    return "\n".join([*lines, *_collectives(check)]) + "\n"


def _streams(rank: RankCheck) -> list[str]:
    where = (
        f"rank {rank.rank}: {rank.operators:,} operators of a step on {rank.streams} stream"
        f"{'s' if rank.streams != 1 else ''} with {rank.stream_waits:,} waits between them"
    )
    if not rank.faults:
        return [f"{where}: in order"]
    return [f"{where}: {len(rank.faults)} out of order", *(f"  {fault}" for fault in rank.faults)]


def _waits(rank: RankCheck) -> list[str]:
    """Each line of code that makes the host wait, the most frequent first."""
    count = sum(rank.waits.values())
    more = unneeded(rank.waits)
    verdict = ", for gradients that it adds up and steps" if count > 1 else ""
    if more:
        verdict = f", {more} more than the one for the numbers that are logged"
    lines = [f"rank {rank.rank}: the host waits for the device {count} time{'s' if count != 1 else ''} a step{verdict}"]
    lines += [f"  {times:,} x {words}" for words, times in list(rank.waits.items())[:_MOST_WAITS]]
    if len(rank.waits) > _MOST_WAITS:
        lines.append(f"  and at {len(rank.waits) - _MOST_WAITS} lines more")
    once = {words: times for words, times in rank.first_waits.items() if words not in rank.waits}
    return lines + [f"  in the first step also {times:,} x {words}" for words, times in once.items()]


def _collectives(check: StreamCheck) -> list[str]:
    if not check.compared:
        return []
    what = f"collectives: {check.calls:,} calls of {check.compared} ranks (a model of {check.layers} layers)"
    if not check.faults:
        return [f"{what} meet, without a circle of waits"]
    return [f"{what}: {len(check.faults)} do not meet", *(f"  {fault}" for fault in check.faults)]
