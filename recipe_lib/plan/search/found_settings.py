"""What a search for settings found, and the table of it."""

from dataclasses import dataclass

from recipe_lib.plan.search.trials import Changes, override_text
from recipe_lib.report.terminal import WIDEST, Table, open_console, put, put_table, terminal_width, text_of
from recipe_lib.units import format_bytes, format_count, format_duration


@dataclass(frozen=True)
class PlannedSettings:
    """Settings. changes: of the config. verdict, active, reserved, reserved_expandable, host, margin: of their own
    plan, the bytes of the heaviest rank; margin is negative where they do not fit. seconds: of a step;
    tokens_per_second: of all ranks; both for ranking."""

    changes: Changes
    verdict: str
    active: int
    reserved: int
    reserved_expandable: int
    host: int
    margin: int
    seconds: float
    tokens_per_second: float


@dataclass(frozen=True)
class Search:
    """found: what fits, confirmed, fastest first. closest: where nothing does, what lacks least. device, ranks: to fit.
    global_batch_size: sequences of a step, all ranks. tried: settings that were estimated; planned: in full; skipped:
    settings, each for more of its kind, that no simulation was needed for; took: seconds.

    True if something was found; as text, the table of `render_search`.
    """

    found: list[PlannedSettings]
    closest: PlannedSettings | None
    device: str
    ranks: int
    global_batch_size: int
    tried: int
    planned: int
    took: float
    skipped: int = 0

    def __bool__(self) -> bool:
        return bool(self.found)

    def __str__(self) -> str:
        return render_search(self)


def render_search(result: Search) -> str:
    """The settings as a table: the overrides, planned peak, tokens per second, verdict."""
    where = f"{result.ranks} x {result.device}"
    batch = f"{result.global_batch_size} sequences a step"
    shown = result.found or ([result.closest] if result.closest else [])
    if result.found:
        title = f"FOUND  settings that fit {where}, {batch}, fastest first"
    else:
        lacking = f"; closest, short of {format_bytes(-shown[0].margin)}:" if shown else ""
        title = f"DOES NOT FIT  {where}, {batch}, with none of the settings tried{lacking}"
    header = ["planned active", "reserved", "expandable", "step", "tokens/s", "verdict"]
    console = open_console(terminal_width(WIDEST))
    put(console, title)
    for number, one in enumerate(shown, 1):
        sizes = map(format_bytes, (one.active, one.reserved, one.reserved_expandable))
        cells = [*sizes, format_duration(one.seconds), format_count(one.tokens_per_second), one.verdict]
        console.print()
        put(console, f"{number}. {override_text(one.changes) or 'as the config has it'}", indent=2, wrap=False)
        put_table(console, Table("", header, [cells], ("verdict",), ("expandable", "step")))
    how = f"{result.tried} settings estimated, {result.planned} planned in full, {result.took:.0f} s"
    console.print()
    put(console, f"tokens/s are for ranking; {how}", indent=2)
    if result.skipped:
        put(
            console,
            f"{result.skipped} decided without a simulation: too large, or not the fastest, as their lines say",
            indent=2,
        )
        if len(result.found) > 1:
            put(console, "after the first: the fastest of those that were estimated", indent=2)
    return text_of(console).rstrip("\n")
