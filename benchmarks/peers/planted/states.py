"""Plant faults between two runs: data, batch, ranks or files change before a run is resumed.

`planted_faults.py` plays each of `CHANGES` with each tool (a training program) by `run_change`,
after `SOUND_RESUME`. A run is judged by what the tool says (see `verdict.py`); one that says
nothing is right if its losses are those of a run that nothing stopped.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.planted.ground import Setup, build_rows
from benchmarks.peers.planted.running import Result
from benchmarks.peers.planted.tool import Tool, find_newest
from benchmarks.peers.planted.verdict import HANDLED, NOT_APPLICABLE, SILENT, Outcome, judge
from benchmarks.peers.planted.words import NOTHING, WORDS

BEFORE = 4  # steps of the first run
AFTER = 8  # steps of both together
CLOSE = 1e-3  # largest relative difference of two losses that are the same: tools log four digits
SUM_CLOSE = 2e-2  # the same where the batch is summed in another order after several steps


class Unfit(Exception):  # noqa: N818  (an outcome of the benchmark, not of a tool)
    """The tool cannot do the run that a fault starts from; the text says why."""


@dataclass
class Sound:
    """A tool's runs without faults, which the others are compared with."""

    lines: list[str]  # that they have printed
    losses: list[float]  # of the AFTER steps of a run that nothing stopped


@dataclass
class ChangedRun:
    """Hold the run that is judged: the second, after a change."""

    setup: Setup
    result: Result
    # Its losses are those without the change; None: not measured, or the run failed.
    harmless: bool | None = None
    note: str = ""  # for the report


@dataclass(frozen=True)
class Change:
    """A fault between two runs."""

    name: str  # its key in `WORDS`
    title: str  # as the report names it
    play: Callable[[Tool, Setup, Sound], ChangedRun]  # runs both; may raise Unfit


def run_sound(tool: Tool, setup: Setup) -> Result:
    """Run what has to end well. Raises Unfit if it ends with another exit code than 0."""
    tool.prepare(setup)
    result = tool.start(setup, tool.build_command(setup))
    if result.code != 0:
        last = next((line for _, line in reversed(result.lines)), "no output")
        raise Unfit(f"the run it starts from ends with exit code {result.code}: {last[:200]}")
    return result


def run_changed(tool: Tool, setup: Setup) -> ChangedRun:
    """Run what a change may break: it may fail, and its losses are not compared yet."""
    tool.prepare(setup)
    return ChangedRun(setup, tool.start(setup, tool.build_command(setup)))


def build_first_setup(setup: Setup, **changes: object) -> Setup:
    """Return the setup of the first run: BEFORE steps, saved twice. changes: further fields."""
    return setup.copy_with(steps=BEFORE, save_every=BEFORE // 2, **changes)


def build_second_setup(setup: Setup, **changes: object) -> Setup:
    """Return the setup of the run that resumes, to AFTER steps. changes: further fields."""
    return setup.copy_with(steps=AFTER, save_every=BEFORE // 2, resume=True, **changes)


def compute_difference(losses: list[float], expected: list[float]) -> float:
    """Return the largest relative difference of the losses of the second run's steps.

    These are the last of both lists. It is infinite if there are too few, or if one is not finite.
    """
    count = AFTER - BEFORE
    if min(len(losses), len(expected)) < count:
        return float("inf")
    pairs = zip(losses[-count:], expected[-count:], strict=True)
    differences = [abs(a - b) / max(abs(b), 1e-9) for a, b in pairs]
    return max(differences) if all(map(math.isfinite, differences)) else float("inf")


def _compare_losses(tool: Tool, run: ChangedRun, expected: list[float], close: float) -> None:
    """Set `harmless` of a run, True if its losses are the expected ones to `close`, and `note`.

    A run that failed stays as it is.
    """
    if run.result.code != 0:
        return
    worst = compute_difference(tool.read_losses(run.setup, run.result), expected)
    note = "too few losses to compare" if worst == float("inf") else f"losses differ by {worst:.2g}"
    run.harmless = worst <= close
    run.note = f"{note} (relative) from those of a run that nothing stopped"


def change_nothing(tool: Tool, setup: Setup, sound: Sound) -> ChangedRun:
    """Stop and resume with nothing else changed.

    What both runs print is added to `sound.lines`, and counts as no warning from then on.
    """
    first_result = run_sound(tool, build_first_setup(setup))
    second = run_changed(tool, build_second_setup(setup))
    for result in (first_result, second.result):
        sound.lines += [line for _, line in result.lines]
    _compare_losses(tool, second, expected=sound.losses, close=CLOSE)
    return second


def change_rows(tool: Tool, setup: Setup, sound: Sound) -> ChangedRun:
    """Replace half of the 24 rows (examples) before the run is resumed."""
    run_sound(tool, build_first_setup(setup))
    setup.write(setup.rows[:12] + build_rows(100, 112))
    return run_changed(tool, build_second_setup(setup))


def change_batch(tool: Tool, setup: Setup, sound: Sound) -> ChangedRun:
    """Resume with three rows a step where there were two: a step then means other rows."""
    run_sound(tool, build_first_setup(setup))
    return run_changed(tool, build_second_setup(setup, batch=setup.batch + 1))


def change_world(tool: Tool, setup: Setup, sound: Sound) -> ChangedRun:
    """Go from two ranks to one with the same rows a step.

    The losses are compared with those of two ranks throughout.
    """
    folder = setup.folder / "quiet"
    unstopped = setup.copy_with(folder=folder, steps=AFTER, ranks=2)
    _share(setup, folder)
    unstopped_result = run_sound(tool, unstopped)
    expected = tool.read_losses(unstopped, unstopped_result)
    run_sound(tool, build_first_setup(setup, ranks=2))
    second = run_changed(tool, build_second_setup(setup, batch=2 * setup.batch))
    _compare_losses(tool, second, expected=expected, close=SUM_CLOSE)
    return second


def damage_state(tool: Tool, setup: Setup, sound: Sound) -> ChangedRun:
    """Change a byte in the middle of the newest state's largest file."""
    run_sound(tool, build_first_setup(setup))
    path = _find_largest(find_newest(tool.list_states(setup)))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)
    second = run_changed(tool, build_second_setup(setup))
    _compare_losses(tool, second, expected=sound.losses, close=CLOSE)
    # A single flipped bit may show in no loss, by luck: equal losses do not count as handled.
    second.harmless = None
    second.note = f"{path.name} of {path.parent.name}; {second.note}"
    return second


def kill_in_save(tool: Tool, setup: Setup, sound: Sound) -> ChangedRun:
    """Kill the run as soon as something of a second state is on the disk, then resume.

    Up to three times: the first attempt that fails or gives other losses is judged, else the last.
    Raises Unfit if the run ends before it could be killed.
    """
    judged: ChangedRun | None = None
    for attempt in range(3):
        trial = setup.copy_with(folder=setup.folder / f"kill{attempt}")
        _share(setup, trial.folder)
        first = trial.copy_with(steps=AFTER, save_every=BEFORE // 2)
        seen: list[int] = []

        # Defaults bind this attempt's values: `first` is assigned again in the next.
        def second_save(first: Setup = first, seen: list[int] = seen) -> bool:
            """Return True once there is a second state."""
            seen.append(len(tool.list_states(first)))
            return seen[-1] >= 2

        tool.prepare(first)
        killed = tool.start(first, tool.build_command(first), stop_when=second_save)
        if killed.code is not None:  # None: it was killed
            raise Unfit("the run had ended before there was a second state to kill it in")
        states = ", ".join(path.name for path in tool.list_states(first))
        judged = run_changed(tool, first.copy_with(resume=True))
        _compare_losses(tool, judged, expected=sound.losses, close=CLOSE)
        judged.note = f"attempt {attempt + 1} of 3, on the disk: {states}; {judged.note}"
        if judged.result.code != 0 or not judged.harmless:
            break
    assert judged
    return judged


def check_packing(tool: Tool, setup: Setup, sound: Sound) -> ChangedRun:
    """Pack four rows into one: the first loss has to be that of the rows side by side.

    It is not if documents of a pack see each other in attention, or share positions.
    """
    setup.write(setup.rows[:4])
    setup = setup.copy_with(steps=1, batch=4, max_len=512, shuffle=False)
    beside = setup.copy_with(folder=_share(setup, setup.folder / "beside"))
    expected_loss = _read_first_loss(tool, beside, run_sound(tool, beside))
    packed = run_changed(tool, setup.copy_with(packing=True, batch=1))
    if packed.result.code != 0:
        return packed
    packed_loss = _read_first_loss(tool, packed.setup, packed.result)
    packed.harmless = abs(packed_loss - expected_loss) <= CLOSE * abs(expected_loss)
    packed.note = f"first loss {packed_loss:.4f} packed, {expected_loss:.4f} side by side"
    return packed


def _read_first_loss(tool: Tool, setup: Setup, result: Result) -> float:
    """Return the loss of a run's first step; NaN if the tool has written none."""
    losses = tool.read_losses(setup, result)
    return losses[0] if losses else float("nan")


def _share(setup: Setup, folder: Path) -> Path:
    """Make another folder of the same run, with the same model and rows."""
    folder.mkdir()
    for name in ("model", "rows"):
        (folder / name).symlink_to(setup.folder / name)
    return folder


def _find_largest(state: Path | None) -> Path:
    """Return the largest file of a saved state. Raises Unfit if there is no state."""
    if state is None:
        raise Unfit("the first run has left no state")
    files = [path for path in ([state] if state.is_file() else state.rglob("*")) if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def run_change(change: Change, tool: Tool, setup: Setup, sound: Sound) -> Outcome:
    """Play a change and judge the run; NOT_APPLICABLE if the tool cannot do what it starts from."""
    try:
        changed_run = change.play(tool, setup, sound)
    except Unfit as reason:
        return Outcome(NOT_APPLICABLE, note=str(reason))
    steps = len(tool.read_losses(changed_run.setup, changed_run.result))
    given = tool.prepare(changed_run.setup)
    outcome = judge(
        changed_run.result,
        words=WORDS.get(change.name, NOTHING),
        steps=steps,
        sound_lines=sound.lines,
        metric=tool.metric,
        given=given,
    )
    outcome.note = changed_run.note
    if outcome.outcome == SILENT and changed_run.harmless:  # right without a word
        outcome.outcome = HANDLED
    return outcome


SOUND_RESUME = Change("sound_resume", "nothing: a run stopped and gone on from", change_nothing)
CHANGES: tuple[Change, ...] = (
    Change("other_rows", "half of the rows replaced before the run goes on", change_rows),
    Change("other_batch", "another global batch when the run goes on", change_batch),
    Change("other_world", "from two ranks to one, the rows of a step the same", change_world),
    Change("damaged_state", "a bit of a saved state flipped", damage_state),
    Change("killed_in_save", "SIGKILL inside a save, then going on", kill_in_save),
    Change("packing", "four rows in one pack that must not see each other", check_packing),
)
