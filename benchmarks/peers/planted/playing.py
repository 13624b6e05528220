"""Plant one fault under one tool and tell what came of it."""

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.peers.planted.faults import SOUND, Fault
from benchmarks.peers.planted.ground import Setup, make_setup
from benchmarks.peers.planted.running import Result
from benchmarks.peers.planted.states import (
    AFTER,
    SOUND_RESUME,
    Change,
    Sound,
    Unfit,
    run_change,
    run_sound,
)
from benchmarks.peers.planted.tool import Tool
from benchmarks.peers.planted.verdict import (
    FOUND,
    HANDLED,
    NOT_APPLICABLE,
    SILENT,
    WARNED,
    Outcome,
    judge,
)
from benchmarks.peers.planted.words import WORDS

_SMALL_DISK = "size=400k"  # room for a config and a log, not for a model of 1 MB


def load_sound_runs(tool: Tool, work: Path, model: Path) -> tuple[Sound, dict[str, Outcome]]:
    """Return the sound runs of a tool, which are made where they are not kept.

    Kept are those of the last time in this folder with these versions. Raises Unfit.
    """
    kept, versions = work / "sound.json", tool.versions()
    if kept.exists():
        content = json.loads(kept.read_text(encoding="utf-8"))
        if content["versions"] == versions:
            outcomes = {name: Outcome(**cell) for name, cell in content["outcomes"].items()}
            return Sound(content["lines"], content["losses"]), outcomes
    sound, outcomes = make_sound_runs(tool, work, model)
    cells = {name: outcome.to_json() for name, outcome in outcomes.items()}
    content = {
        "versions": versions,
        "lines": sound.lines,
        "losses": sound.losses,
        "outcomes": cells,
    }
    kept.write_text(json.dumps(content), encoding="utf-8")
    return sound, outcomes


def make_sound_runs(tool: Tool, work: Path, model: Path) -> tuple[Sound, dict[str, Outcome]]:
    """Make the runs without a fault: whole, with validation, and stopped and gone on from.

    Their lines are what a message on a fault is told from. Raises Unfit if the first fails.
    """
    setup = make_setup(work / "sound", model).again(steps=AFTER)
    _, result = run_sound(tool, setup)
    losses = tool.losses(setup, result)
    sound = Sound([line for _, line in result.lines], losses)
    if len(losses) != AFTER:
        raise Unfit(f"the sound run logged {len(losses)} losses, expected {AFTER}")
    outcomes = {SOUND.name: Outcome(HANDLED, result.seconds, code=result.code, steps=len(losses))}
    others: list[dict[str, Any]] = [{"validate": True, "steps": 4}] * ("overlap" not in tool.unable)
    others += [{"targets": ["q_proj", "v_proj"], "steps": 2}] * (
        "adapter_target" not in tool.unable
    )
    for number, changes in enumerate(others):
        other = make_setup(work / f"sound_{number}", model).again(**changes)
        _, result = run_sound(tool, other)
        sound.lines += [line for _, line in result.lines]
    if "sound_resume" in tool.unable:
        outcomes[SOUND_RESUME.name] = Outcome(NOT_APPLICABLE, note=tool.unable["sound_resume"])
        return sound, outcomes
    outcomes[SOUND_RESUME.name] = run_change(
        SOUND_RESUME, tool=tool, setup=make_setup(work / SOUND_RESUME.name, model), sound=sound
    )
    return sound, outcomes


def run_fault(fault: Fault, tool: Tool, setup: Setup, sound: Sound) -> Outcome:
    """Plant a fault, run, and judge.

    Where the run says nothing, what is trained is asked for, or the check command.
    """
    fault.plant(setup)
    given = tool.prepare(setup)
    if setup.twist == "small_disk":
        return _run_on_small_disk(fault, tool=tool, setup=setup, sound=sound, given=given)
    if setup.twist == "twice":
        run_sound(tool, setup)
    result = tool.start(setup, tool.command(setup))
    outcome = _judge_fault(fault, tool=tool, setup=setup, sound=sound, result=result, given=given)
    if outcome.outcome == SILENT and fault.trained is not None:
        texts = tool.trained_text(setup)
        outcome.note = (
            "what is trained could not be asked for" if texts is None else f"trained: {texts[:1]}"
        )
        outcome.outcome = HANDLED if texts is not None and fault.trained(texts) else SILENT
    if outcome.outcome == SILENT:
        _ask_check(fault, tool=tool, setup=setup, sound=sound, given=given, outcome=outcome)
    return outcome


def _judge_fault(
    fault: Fault, tool: Tool, setup: Setup, sound: Sound, result: Result, given: Iterable[str]
) -> Outcome:
    return judge(
        result,
        words=WORDS[fault.name],
        steps=len(tool.losses(setup, result)),
        sound_lines=sound.lines,
        metric=tool.metric,
        given=list(given),
    )


def _ask_check(
    fault: Fault, tool: Tool, setup: Setup, sound: Sound, given: Iterable[str], outcome: Outcome
) -> None:
    command = tool.check(setup)
    if command is None:
        return
    checked = tool.start(setup, command)
    found = judge(
        checked,
        words=WORDS[fault.name],
        steps=0,
        sound_lines=sound.lines,
        metric=tool.metric,
        given=list(given),
    )
    if found.line and found.outcome in ("rejected", WARNED, "traceback, named"):
        outcome.outcome, outcome.line, outcome.seconds = FOUND, found.line, found.seconds


def _run_on_small_disk(
    fault: Fault, tool: Tool, setup: Setup, sound: Sound, given: Iterable[str]
) -> Outcome:
    setup.output.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", _SMALL_DISK, "tmpfs", str(setup.output)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        return Outcome(
            NOT_APPLICABLE,
            note=f"no small disk could be mounted: {mounted.stderr.decode().strip()}",
        )
    try:
        result = tool.start(setup, tool.command(setup))
        return _judge_fault(fault, tool=tool, setup=setup, sound=sound, result=result, given=given)
    finally:
        subprocess.run(["umount", "-l", str(setup.output)], check=True)


def run_one(fault: Fault | Change, tool: Tool, work: Path, model: Path, sound: Sound) -> Outcome:
    """Run and judge one cell of the table."""
    if fault.name in tool.unable:
        return Outcome(NOT_APPLICABLE, note=tool.unable[fault.name])
    setup = make_setup(work / fault.name, model)
    if isinstance(fault, Change):
        return run_change(fault, tool=tool, setup=setup, sound=sound)
    try:
        return run_fault(fault, tool=tool, setup=setup, sound=sound)
    except Unfit as reason:
        return Outcome(NOT_APPLICABLE, note=str(reason))
