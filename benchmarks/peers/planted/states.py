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


@dataclass(frozen=True)
class Change:
    """A fault between two runs."""

    name: str  # its key in `WORDS`
    title: str  # as the report names it
    # Runs both. Returns the setup and the result of the run that is judged; True if its losses are
    # those without the fault (None: not measured); and a note for the report.
    play: Callable[[Tool, Setup, "Sound"], "tuple[Setup, Result, bool | None, str]"]


@dataclass
class Sound:
    """A tool's runs without faults, which the others are compared with."""

    lines: list[str]  # that they have printed
    losses: list[float]  # of the AFTER steps of a run that nothing stopped


def run_sound(tool: Tool, setup: Setup) -> tuple[Setup, Result]:
    """Run what has to end well. Raises Unfit if it ends with another exit code than 0."""
    tool.prepare(setup)
    result = tool.start(setup, tool.command(setup))
    if result.code != 0:
        last = next((line for _, line in reversed(result.lines)), "no output")
        raise Unfit(f"the run it starts from ends with exit code {result.code}: {last[:200]}")
    return setup, result


def go_on(tool: Tool, setup: Setup) -> tuple[Setup, Result]:
    """Run the second run, which resumes from what the first has saved; it may fail."""
    tool.prepare(setup)
    return setup, tool.start(setup, tool.command(setup))


def run_first_half(setup: Setup, **changes: object) -> Setup:
    """Return the setup of the first run: BEFORE steps, saved twice. changes: further fields."""
    return setup.again(steps=BEFORE, save_every=BEFORE // 2, **changes)


def run_second_half(setup: Setup, **changes: object) -> Setup:
    """Return the setup of the run that resumes, to AFTER steps. changes: further fields."""
    return setup.again(steps=AFTER, save_every=BEFORE // 2, resume=True, **changes)


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


def _judge_equality(
    tool: Tool, setup: Setup, result: Result, expected: list[float], close: float
) -> tuple[bool | None, str]:
    """Return True if the losses are the expected ones to `close`, and a note; None: it failed."""
    if result.code != 0:
        return None, ""
    worst = compute_difference(tool.losses(setup, result), expected)
    note = "too few losses to compare" if worst == float("inf") else f"losses differ by {worst:.2g}"
    return worst <= close, f"{note} (relative) from those of a run that nothing stopped"


def change_nothing(
    tool: Tool, setup: Setup, sound: Sound
) -> tuple[Setup, Result, bool | None, str]:
    """Stop and resume with nothing else changed.

    What both runs print is added to `sound.lines`, and counts as no warning from then on.
    """
    _, first = run_sound(tool, run_first_half(setup))
    setup, result = go_on(tool, run_second_half(setup))
    sound.lines += [line for run in (first, result) for _, line in run.lines]
    return (
        setup,
        result,
        *_judge_equality(tool, setup=setup, result=result, expected=sound.losses, close=CLOSE),
    )


def change_rows(tool: Tool, setup: Setup, sound: Sound) -> tuple[Setup, Result, bool | None, str]:
    """Replace half of the 24 rows (examples) before the run is resumed."""
    run_sound(tool, run_first_half(setup))
    setup.write(setup.rows[:12] + build_rows(100, 112))
    setup, result = go_on(tool, run_second_half(setup))
    return setup, result, None, ""


def change_batch(tool: Tool, setup: Setup, sound: Sound) -> tuple[Setup, Result, bool | None, str]:
    """Resume with three rows a step where there were two: a step then means other rows."""
    run_sound(tool, run_first_half(setup))
    setup, result = go_on(tool, run_second_half(setup, batch=setup.batch + 1))
    return setup, result, None, ""


def change_world(tool: Tool, setup: Setup, sound: Sound) -> tuple[Setup, Result, bool | None, str]:
    """Go from two ranks to one with the same rows a step.

    The losses are compared with those of two ranks throughout.
    """
    folder = setup.folder / "quiet"
    unstopped = setup.again(folder=folder, steps=AFTER, ranks=2)
    _share(setup, folder)
    _, unstopped_result = run_sound(tool, unstopped)
    expected = tool.losses(unstopped, unstopped_result)
    run_sound(tool, run_first_half(setup, ranks=2))
    setup, result = go_on(tool, run_second_half(setup, batch=2 * setup.batch))
    return (
        setup,
        result,
        *_judge_equality(tool, setup=setup, result=result, expected=expected, close=SUM_CLOSE),
    )


def damage_state(tool: Tool, setup: Setup, sound: Sound) -> tuple[Setup, Result, bool | None, str]:
    """Change a byte in the middle of the newest state's largest file."""
    run_sound(tool, run_first_half(setup))
    path = _find_largest(find_newest(tool.states(setup)))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)
    setup, result = go_on(tool, run_second_half(setup))
    # A single flipped bit may show in no loss, by luck: equal losses do not count as handled.
    _, note = _judge_equality(tool, setup=setup, result=result, expected=sound.losses, close=CLOSE)
    return setup, result, None, f"{path.name} of {path.parent.name}; {note}"


def kill_in_save(tool: Tool, setup: Setup, sound: Sound) -> tuple[Setup, Result, bool | None, str]:
    """Kill the run as soon as something of a second state is on the disk, then resume.

    Up to three times: the first attempt that fails or gives other losses is judged, else the last.
    Raises Unfit if the run ends before it could be killed.
    """
    worst: tuple[Setup, Result, bool | None, str] | None = None
    for attempt in range(3):
        trial = setup.again(folder=setup.folder / f"kill{attempt}")
        _share(setup, trial.folder)
        first = trial.again(steps=AFTER, save_every=BEFORE // 2)
        seen: list[int] = []

        # Defaults bind this attempt's values: `first` is assigned again in the next.
        def second_save(first: Setup = first, seen: list[int] = seen) -> bool:
            """Return True once there is a second state."""
            seen.append(len(tool.states(first)))
            return seen[-1] >= 2

        tool.prepare(first)
        killed = tool.start(first, tool.command(first), stop_when=second_save)
        if killed.code is not None:  # None: it was killed
            raise Unfit("the run had ended before there was a second state to kill it in")
        states = ", ".join(path.name for path in tool.states(first))
        trial, result = go_on(tool, first.again(resume=True))
        harmless, note = _judge_equality(
            tool, setup=trial, result=result, expected=sound.losses, close=CLOSE
        )
        note = f"attempt {attempt + 1} of 3, on the disk: {states}; {note}"
        worst = (trial, result, harmless, note)
        if result.code != 0 or not harmless:
            break
    assert worst
    return worst


def check_packing(tool: Tool, setup: Setup, sound: Sound) -> tuple[Setup, Result, bool | None, str]:
    """Pack four rows into one: the first loss has to be that of the rows side by side.

    It is not if documents of a pack see each other in attention, or share positions.
    """
    setup.write(setup.rows[:4])
    setup = setup.again(steps=1, batch=4, max_len=512, shuffle=False)
    beside, result = run_sound(tool, setup.again(folder=_share(setup, setup.folder / "beside")))
    (expected,) = tool.losses(beside, result)[:1] or [float("nan")]
    setup, result = go_on(tool, setup.again(packing=True, batch=1))
    if result.code != 0:
        return setup, result, None, ""
    (packed_loss,) = tool.losses(setup, result)[:1] or [float("nan")]
    note = f"first loss {packed_loss:.4f} packed, {expected:.4f} side by side"
    return setup, result, abs(packed_loss - expected) <= CLOSE * abs(expected), note


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
        setup, result, harmless, note = change.play(tool, setup, sound)
    except Unfit as reason:
        return Outcome(NOT_APPLICABLE, note=str(reason))
    steps = len(tool.losses(setup, result))
    given = tool.prepare(setup)
    outcome = judge(
        result,
        words=WORDS.get(change.name, NOTHING),
        steps=steps,
        sound_lines=sound.lines,
        metric=tool.metric,
        given=given,
    )
    outcome.note = note
    if outcome.outcome == SILENT and harmless:  # right without a word
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
