"""Plant one fault under one tool, run the tool, and judge the outcome.

`planted_faults.py` calls `run_one` for each cell of its table. A fault is a mistake that costs a
run; a `Setup` is a run in no tool's words, a `Tool` writes its config from it. The sound runs of a
tool have no fault: lines that they print are no message on one. An outcome is, for example,
`rejected`, `warned` or `silent`.
"""

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
    """Return (a tool's sound runs, their outcomes by name), from work/sound.json or made anew.

    The file is of an earlier call, and used if the tool's versions are the same. model: folder that
    each run gets a copy of. Raises Unfit if the tool cannot make them.
    """
    sound_file = work / "sound.json"
    versions = tool.read_versions()
    if sound_file.exists():
        content = json.loads(sound_file.read_text(encoding="utf-8"))
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
    sound_file.write_text(json.dumps(content), encoding="utf-8")
    return sound, outcomes


def make_sound_runs(tool: Tool, work: Path, model: Path) -> tuple[Sound, dict[str, Outcome]]:
    """Make a tool's runs without a fault: whole, with validation, with adapters, and resumed.

    Raises Unfit if the first does not log a loss for each step, or if a run fails.
    """
    setup = make_setup(work / "sound", model).copy_with(steps=AFTER)
    result = run_sound(tool, setup)
    losses = tool.read_losses(setup, result)
    sound = Sound([line for _, line in result.lines], losses)
    if len(losses) != AFTER:
        raise Unfit(f"the sound run logged {len(losses)} losses, expected {AFTER}")
    outcomes = {SOUND.name: Outcome(HANDLED, result.seconds, code=result.code, steps=len(losses))}
    # Only for what they print. A tool that has no faults of a kind makes no such run.
    changed_runs: list[dict[str, Any]] = [{"validate": True, "steps": 4}] * (
        "overlap" not in tool.unable
    )
    changed_runs += [{"targets": ["q_proj", "v_proj"], "steps": 2}] * (
        "adapter_target" not in tool.unable
    )
    for number, changes in enumerate(changed_runs):
        changed_setup = make_setup(work / f"sound_{number}", model).copy_with(**changes)
        result = run_sound(tool, changed_setup)
        sound.lines += [line for _, line in result.lines]
    if "sound_resume" in tool.unable:
        outcomes[SOUND_RESUME.name] = Outcome(NOT_APPLICABLE, note=tool.unable["sound_resume"])
        return sound, outcomes
    outcomes[SOUND_RESUME.name] = run_change(
        SOUND_RESUME, tool=tool, setup=make_setup(work / SOUND_RESUME.name, model), sound=sound
    )
    return sound, outcomes


def run_fault(fault: Fault, tool: Tool, setup: Setup, sound: Sound) -> Outcome:
    """Plant a fault into a setup, run the tool, and judge.

    If the run says nothing, look at the trained texts, then ask the tool's own check command.
    Raises Unfit if the tool cannot make the run before this one.
    """
    fault.plant(setup)
    given = tool.prepare(setup)  # texts of the config, of which an echo is no message
    if setup.twist == "small_disk":
        return _run_on_small_disk(fault, tool=tool, setup=setup, sound=sound, given=given)
    if setup.twist == "twice":  # the output folder has an earlier run
        run_sound(tool, setup)
    result = tool.start(setup, tool.build_command(setup))
    outcome = _judge_fault(fault, tool=tool, setup=setup, sound=sound, result=result, given=given)
    if outcome.outcome == SILENT and fault.trained is not None:
        texts = tool.read_label_texts(setup)
        outcome.note = (
            "what is trained could not be asked for" if texts is None else f"trained: {texts[:1]}"
        )
        # No harm is done where the right texts are trained all the same.
        outcome.outcome = HANDLED if texts is not None and fault.trained(texts) else SILENT
    if outcome.outcome == SILENT:
        _ask_check(fault, tool=tool, setup=setup, sound=sound, given=given, outcome=outcome)
    return outcome


def _judge_fault(
    fault: Fault, tool: Tool, setup: Setup, sound: Sound, result: Result, given: Iterable[str]
) -> Outcome:
    """Judge a run by its output. given: texts of the config."""
    return judge(
        result,
        words=WORDS[fault.name],
        steps=len(tool.read_losses(setup, result)),
        sound_lines=sound.lines,
        metric=tool.metric,
        given=list(given),
    )


def _ask_check(
    fault: Fault, tool: Tool, setup: Setup, sound: Sound, given: Iterable[str], outcome: Outcome
) -> None:
    """Run the tool's check command, if it has one; set `outcome` to FOUND if it names the fault."""
    command = tool.build_check_command(setup)
    if command is None:
        return
    result = tool.start(setup, command)
    check_outcome = judge(
        result,
        words=WORDS[fault.name],
        steps=0,
        sound_lines=sound.lines,
        metric=tool.metric,
        given=list(given),
    )
    if check_outcome.line and check_outcome.outcome in ("rejected", WARNED, "traceback, named"):
        outcome.outcome = FOUND
        outcome.line = check_outcome.line
        outcome.seconds = check_outcome.seconds


def _run_on_small_disk(
    fault: Fault, tool: Tool, setup: Setup, sound: Sound, given: Iterable[str]
) -> Outcome:
    """Run with an output folder that is a file system of _SMALL_DISK, and judge.

    Not applicable where this user may not mount one.
    """
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
        result = tool.start(setup, tool.build_command(setup))
        return _judge_fault(fault, tool=tool, setup=setup, sound=sound, result=result, given=given)
    finally:
        # Lazily, since a process of the run may still have a file open.
        subprocess.run(["umount", "-l", str(setup.output)], check=True)


def run_one(fault: Fault | Change, tool: Tool, work: Path, model: Path, sound: Sound) -> Outcome:
    """Run and judge one cell of the table: one fault under one tool.

    work: folder of the tool's runs. model: folder that each run gets a copy of. sound: of
    `load_sound_runs`.
    """
    if fault.name in tool.unable:
        return Outcome(NOT_APPLICABLE, note=tool.unable[fault.name])
    setup = make_setup(work / fault.name, model)
    if isinstance(fault, Change):
        return run_change(fault, tool=tool, setup=setup, sound=sound)
    try:
        return run_fault(fault, tool=tool, setup=setup, sound=sound)
    except Unfit as reason:
        return Outcome(NOT_APPLICABLE, note=str(reason))
