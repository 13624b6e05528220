"""Run torchrun inside `tune run`: parse its flags, start the ranks, and choose the exit code.

`tune run` calls `split_words`, `check_launch` and `launch`; `tune plan` takes torchrun's flags by
`take_flags`. torchrun's agent runs in a thread, so that the main thread can forward signals to the
ranks, which save and end by themselves (class `Rank`, used by each rank's worker.py).
"""

import csv
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from recipe_lib.config.suggest import find_nearest, show
from recipe_lib.errors import (
    DIVERGED,
    DONE,
    FOLDER_VARIABLE,
    OUT_OF_MEMORY,
    PEER_FAILED,
    REPORTED_FILE,
    STOPPED_AND_SAVED,
    STORAGE,
    USER_ERROR,
    ConfigError,
    SetupError,
)
from recipe_lib.plan.hardware import HARDWARE, Hardware, find_reported_hardware
from recipe_lib.report.phases import phase
from recipe_lib.units import MIB

# torchrun's flags that take a value, spelled with hyphens. Listed here, so that most command lines
# are parsed without importing torch.
FLAGS_WITH_VALUE = {
    "--nnodes",
    "--nproc-per-node",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
    "--max-restarts",
    "--monitor-interval",
    "--start-method",
    "--event-log-handler",
    "--role",
    "--log-dir",
    "--redirects",
    "--tee",
    "--log-line-prefix-template",
    "--local-ranks-filter",
    "--duplicate-stdout-filters",
    "--duplicate-stderr-filters",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--local-addr",
    "--logs-specs",
    "--numa-binding",
    "--signals-to-handle",
    "--shutdown-timeout",
    "--print-completion",
    "-r",
    "-t",
}
# Those that take none.
FLAGS_WITHOUT_VALUE = {"--standalone", "--virtual-local-rank"}
REFUSED_FLAGS = {"-m", "--module", "--no-python", "--run-path"}  # they change what torchrun runs
# Beginnings of the flags, and of torchrun's environment variables, that say how the nodes meet.
RENDEZVOUS = ("--nnodes", "--rdzv-", "--node-rank", "--master-", "--standalone")
RENDEZVOUS_VARIABLES = ("PET_NNODES", "PET_RDZV", "PET_NODE_RANK", "PET_MASTER", "PET_STANDALONE")


def split_words(words: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Return (torchrun's flags, RECIPE, its arguments).

    RECIPE is the first word that is neither a flag nor a flag's value; empty if --config comes
    first, since the config then names the recipe. Raises ConfigError for an unknown flag, or if no
    config is given.
    """
    position = 0
    values: dict[str, str] = {}
    while position < len(words):
        word = words[position]
        if word.partition("=")[0] in ("--config", "--plugin"):
            return list(words[:position]), "", list(words[position:])
        if not word.startswith("-"):
            if "=" in word or word.startswith("~"):
                raise ConfigError(f"tune run: {show(word)}: overrides come after CONFIG")
            return list(words[:position]), word, list(words[position + 1 :])
        position += _measure_flag(words[position:], values, "run") or _refuse_unknown(word)
    raise ConfigError(
        "tune run: no config; expected: tune run [torchrun flags] CONFIG (see `tune ls`)"
    )


def _measure_flag(words: Sequence[str], values: dict[str, str], verb: str) -> int:
    """Return the number of words of the torchrun flag that `words` begin with: 1 or 2; 0: no flag.

    values: flag -> value of the flags before; this one is added. verb: of `tune`, for errors.
    Raises ConfigError for a flag that was given before, lacks its value, or is in `REFUSED_FLAGS`.
    """
    word = words[0]
    name, equals, value = word.partition("=")
    # torchrun accepts both --nproc_per_node and --nproc-per-node.
    flag = name.replace("_", "-") if name.startswith("-") else ""
    if flag in REFUSED_FLAGS:
        raise ConfigError(
            f"tune {verb}: {name} cannot be used: RECIPE is the name of a recipe or a .py file"
        )
    if flag in FLAGS_WITHOUT_VALUE or (word[:2] in ("-r", "-t") and len(word) > 2):  # `-t3`
        return 1
    if flag not in FLAGS_WITH_VALUE:
        return 0
    value = value if equals else "".join(words[1:2])
    if flag in values:
        raise ConfigError(
            f"command line: {name}: given twice, as {show(values[flag])} and {show(value)}; remove"
            " one of the two"
        )
    values[flag] = value
    if not equals and len(words) < 2:
        raise ConfigError(f"tune {verb}: {show(word)}: expected a value")
    return 1 if equals else 2


def _refuse_unknown(word: str) -> NoReturn:
    name = word.partition("=")[0]
    flag = name.replace("_", "-")
    known_flags = sorted(FLAGS_WITH_VALUE | FLAGS_WITHOUT_VALUE)
    # torchrun's argparse accepts abbreviations; here the error names the full flag.
    completions = [full for full in known_flags if len(flag) > 3 and full.startswith(flag)]
    nearest = completions[0] if completions else find_nearest(flag, known_flags, cutoff=0.75)
    hint = f"did you mean {nearest}?" if nearest else "see `torchrun --help`"
    raise ConfigError(f"tune run: unknown torchrun flag {show(name)}; {hint}")


def get_flag_value(flags: Sequence[str], flag: str) -> str | None:
    """Return the last value of a torchrun flag (spelled with hyphens); None if it is not given."""
    last_value = None
    for position, word in enumerate(flags):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            last_value = value if equals else flags[position + 1]
    return last_value


def check_launch(flags: Sequence[str], verb: str = "run") -> None:
    """Raise ConfigError for numbers of processes or nodes that torchrun would fail on.

    verb: of `tune`, for the error.
    """
    ranks = get_flag_value(flags, "--nproc-per-node")
    if ranks is not None and ranks not in ("auto", "cpu", "gpu", "xpu") and not _is_count(ranks):
        raise ConfigError(
            f"tune {verb}: --nproc_per_node {show(ranks)}: expected a number from 1 to 99999, or"
            " auto, cpu, gpu, xpu"
        )
    nodes = get_flag_value(flags, "--nnodes")
    if nodes is not None:
        low, colon, high = nodes.partition(":")
        if not _is_count(low) or (colon and (not _is_count(high) or int(low) > int(high))):
            raise ConfigError(
                f"tune {verb}: --nnodes {show(nodes)}: expected N or MIN:MAX, numbers from 1 to"
                " 99999"
            )


def _is_count(text: str) -> bool:
    # Up to five digits, and no superscripts, which isdigit alone takes.
    return text.isascii() and text.isdigit() and len(text) < 6 and int(text) >= 1


def add_rendezvous(flags: list[str]) -> list[str]:
    """Return the flags, with --standalone unless a flag or variable says how the nodes meet."""
    is_set_by_flag = any(flag.replace("_", "-").startswith(RENDEZVOUS) for flag in flags)
    is_set_by_variable = any(name.startswith(RENDEZVOUS_VARIABLES) for name in os.environ)
    # torchrun's default is a fixed port: two runs on one machine would collide.
    return flags if is_set_by_flag or is_set_by_variable else ["--standalone", *flags]


def count_requested_ranks(flags: Sequence[str]) -> int | None:
    """Return the number of ranks that torchrun's flags ask for.

    Return None if it depends on the machine (`--nproc-per-node gpu`) or may change during the run
    (`--nnodes MIN:MAX`).
    """
    if not flags:
        # Another launcher may have started this rank, with torchrun's variables.
        text = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
        return int(text) if text.isascii() and text.isdigit() else None
    counts = [
        get_flag_value(flags, "--nproc-per-node") or "1",
        get_flag_value(flags, "--nnodes") or "1",
    ]
    if not all(number.isascii() and number.isdigit() for number in counts):
        return None
    return int(counts[0]) * int(counts[1])


def take_flags(words: Sequence[str], verb: str = "plan") -> tuple[list[str], list[str]]:
    """Return (torchrun's flags, the other words). The flags may stand anywhere.

    verb: of `tune`, for errors. Raises ConfigError for a flag given twice, without its value, or
    one of `REFUSED_FLAGS`.
    """
    flags: list[str] = []
    remaining: list[str] = []
    values: dict[str, str] = {}
    position = 0
    while position < len(words):
        flag_length = _measure_flag(words[position:], values, verb)
        end = position + max(1, flag_length)
        (flags if flag_length else remaining).extend(words[position:end])
        position = end
    return flags, remaining


def count_ranks_and_machines(flags: Sequence[str]) -> tuple[int, int]:
    """Return (number of processes on a machine, number of machines) that torchrun's flags ask for.

    `auto` is a rank for each GPU, else for each core. Raises ConfigError if the flags ask for GPUs
    and this machine has none.
    """
    processes = get_flag_value(flags, "--nproc-per-node") or "1"
    if processes in ("auto", "gpu", "cpu", "xpu"):
        gpus = 0 if processes in ("cpu", "xpu") else len(list_local_gpus())
        if not gpus and processes in ("gpu", "xpu"):
            raise ConfigError(
                f"--nproc_per_node {processes}: this machine has none; give a number, and --device"
            )
        processes = str(gpus or count_cores())
    # Of MIN:MAX machines the fewest: each rank then needs the most memory.
    machines = (get_flag_value(flags, "--nnodes") or "1").partition(":")[0]
    return int(processes), int(machines)


def should_show_plan(flags: Sequence[str]) -> bool:
    """Return True if this process prints the plan: on the first machine, and no other launcher's.

    RANK is set if another launcher has started this process as one of its ranks.
    """
    node_rank = get_flag_value(flags, "--node-rank") or "0"
    return node_rank == "0" and os.environ.get("RANK", "0") == "0"


PARENT_VARIABLE = "TUNE_LAUNCHER_PID"  # environment variable with the launcher's process id
CRASHED = 1  # exit code of a launch with a rank that failed for an unknown cause
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # those that end a run
LEAVING_SECONDS = 4.0  # for this machine's ranks to end after one of them reported why they all do
SAVE_SECONDS = 600  # longest wait for the other ranks of this machine to finish saving


class Rank:
    """A rank's side of the launch: `with Rank() as rank: ...`.

    The launcher finds the rank by a file in the folder that both share.
    """

    STOPPED_EARLY = 128 + signal.SIGTERM  # exit code of a rank stopped before it saved a state

    def __init__(self) -> None:
        self.folder = Path(os.environ[FOLDER_VARIABLE])  # shared with the launcher
        self.pid_file = self.folder / "pids" / str(os.getpid())  # empty; the name is the process id

    def __enter__(self) -> "Rank":
        end_with_parent(int(os.environ[PARENT_VARIABLE]))
        self.pid_file.touch()
        return self

    def __exit__(self, *exception: object) -> None:
        self.pid_file.unlink(missing_ok=True)

    def stop_requested(self) -> bool:
        return (self.folder / "stop").exists()

    def leave_together(self, code: int) -> int:
        """Return `code`; after a save, wait until all ranks of this machine have saved."""
        # torchrun takes the first rank that leaves with a code for a failure and kills the others
        # after 30 seconds, though one of them may still be writing.
        if code == STOPPED_AND_SAVED:
            (self.folder / f"saved_{os.environ['LOCAL_RANK']}").touch()
            deadline = time.monotonic() + SAVE_SECONDS
            ranks = int(os.environ["LOCAL_WORLD_SIZE"])
            while len(list(self.folder.glob("saved_*"))) < ranks and time.monotonic() < deadline:
                time.sleep(0.05)
        return code


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, in whatever way (Linux only).

    parent: process id of the parent.
    """
    # A launcher killed by SIGKILL cannot end its ranks; without this they would go on writing to
    # the run's folder.
    if sys.platform != "linux":
        return
    import ctypes

    pr_set_pdeathsig = 1  # of linux/prctl.h
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    # If the parent died before the call, this process already has another parent.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Launcher:
    """The launcher's side: runs torchrun's agent in a thread and forwards signals to the ranks.

    Files in the shared folder: `pids/PROCESS_ID` of each rank; `stop`, for ranks that start after a
    signal; `saved_LOCAL_RANK` of each rank that has saved; `REPORTED_FILE`, once a rank has
    reported why all ranks end.
    """

    flags: Sequence[str]  # torchrun's
    script: Path  # what each rank runs, and its arguments
    arguments: Sequence[str]
    folder: Path  # shared with the ranks of this launch; empty at first
    received: list[int] = field(default_factory=list)  # signals, in the order received
    outcome: BaseException | None = None  # what torchrun's agent raised; None: all is well
    # Set when the agent has ended
    finished: threading.Event = field(default_factory=threading.Event)

    def run(self) -> int:
        """Launch the ranks, wait for them, and return the exit code of the launch.

        Raises SetupError if torchrun refuses its flags, or the nodes do not meet.
        """
        (self.folder / "pids").mkdir()
        former_handlers = {number: signal.getsignal(number) for number in SIGNALS}
        for number, handler in former_handlers.items():
            # `nohup` ignores SIGHUP so that the run outlives the terminal: leave it ignored.
            if number != signal.SIGHUP or handler != signal.SIG_IGN:
                signal.signal(number, self._handle_signal)
        try:
            with phase("starting the ranks", leaves_line=False):
                # Without a log folder torchrun leaves an empty one in /tmp at every launch.
                has_log_dir = any(
                    flag.startswith(("--log-dir", "--log_dir")) for flag in self.flags
                )
                log_dir = [] if has_log_dir else ["--log-dir", str(self.folder / "logs")]
                parsed = parse_flags([*log_dir, *self.flags, str(self.script), *self.arguments])
                if self.received:  # stopped before there is a rank
                    return 128 + self.received[0]
                # In a thread torchrun installs no signal handlers. Its own kill ranks that take
                # longer than 30 seconds to end, and print a traceback.
                thread = threading.Thread(target=self._launch, args=(parsed,), name="torchrun")
                thread.start()
                # The progress line stays until the first rank has left its process id.
                while not any((self.folder / "pids").iterdir()) and not self.finished.wait(0.05):
                    continue
            self._wait()
            thread.join()
        finally:
            for number, handler in former_handlers.items():
                signal.signal(number, handler)
        return self._choose_exit_code()

    def _launch(self, parsed: Any) -> None:
        from torch.distributed import run

        try:
            run.run(parsed)  # returns when all ranks of this machine have ended
        except BaseException as error:  # noqa: BLE001  (the main thread judges it)
            self.outcome = error
        finally:
            self.finished.set()

    def _wait(self) -> None:
        reported_at = None
        while not self.finished.wait(0.2):
            if reported_at is None and (self.folder / REPORTED_FILE).exists():
                reported_at = time.monotonic()
            # One rank has reported why the run ends. The agent would give the others, which may
            # hang, 30 seconds.
            if reported_at is not None and time.monotonic() - reported_at > LEAVING_SECONDS:
                self._send_signal(signal.SIGKILL)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        # For ranks that have not left their process id yet.
        (self.folder / "stop").touch()
        # SIGHUP is forwarded as SIGTERM.
        forwarded = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        # At the third signal the ranks are killed: they do not react.
        self._send_signal(signal.SIGKILL if len(self.received) > 2 else forwarded)

    def _send_signal(self, number: int) -> None:
        for file in (self.folder / "pids").iterdir():
            try:
                os.kill(int(file.name), number)
            except ProcessLookupError:  # it was killed before it could remove its file
                continue

    def _choose_exit_code(self) -> int:
        from torch.distributed import DistError
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError

        if self.outcome is None:
            return DONE
        if isinstance(self.outcome, ChildFailedError):
            codes = {rank: failure.exitcode for rank, failure in self.outcome.failures.items()}
            stopped_by = self.received[0] if self.received else None
            code, line = choose_exit_code(codes, stopped_by, (self.folder / REPORTED_FILE).exists())
            if line:
                print(line, file=sys.stderr)
            return code
        # torchrun raises these for flags that it cannot use, and for nodes that do not meet.
        if isinstance(self.outcome, RendezvousError | DistError | ValueError | AssertionError):
            reason = (str(self.outcome).splitlines() or [type(self.outcome).__name__])[0]
            raise SetupError(f"torchrun: {reason}; check {' '.join(self.flags)}") from self.outcome
        raise self.outcome


def choose_exit_code(
    codes: dict[int, int], stopped_by: int | None, has_reported: bool = False
) -> tuple[int, str]:
    """Return the exit code of the launch, and a line on the cause, empty if a rank reported it.

    codes: rank -> exit code of the ranks of this machine that did not end with 0; negative: killed
    by that signal. stopped_by: signal that the launcher received; None: none. has_reported: a
    rank has reported why all ranks end.
    """
    # A rank ends with one of these codes after it has reported the cause, which is that of all; the
    # first in this order counts.
    for code in (OUT_OF_MEMORY, STORAGE, DIVERGED, USER_ERROR, STOPPED_AND_SAVED):
        if code in codes.values():
            return code, ""
    # The cause is a rank that hangs or is on another machine: the ranks that were killed here were
    # killed by the launcher.
    if has_reported:
        return PEER_FAILED, ""
    if stopped_by is not None:
        return (
            128 + stopped_by,
            f"stopped by {signal.Signals(stopped_by).name} before a state was saved",
        )
    # Ranks that ended because another failed, or that the agent then ended by SIGTERM, are not the
    # cause: they come after all others.
    order = {PEER_FAILED: 1, -signal.SIGTERM: 2}
    rank, code = min(codes.items(), key=lambda item: (order.get(item[1], 0), item[0]))
    if code == PEER_FAILED:
        return PEER_FAILED, ""  # the rank that noticed it has reported it
    if code >= 0:
        return CRASHED, f"error: rank {rank} failed with exit code {code}; its traceback is above"
    name = signal.Signals(-code).name
    hint = "; often the host's memory ran out: see `dmesg`" if name == "SIGKILL" else ""
    return 128 - code, f"error: rank {rank} was killed by {name}{hint}"


def parse_flags(words: list[str]) -> Any:
    """Return torchrun's parsed command line; set OMP_NUM_THREADS and silence its loggers.

    words: flags, script, and the script's arguments. Raises SetupError if torchrun refuses them.
    """
    from torch.distributed import run

    def refuse(message: str) -> NoReturn:
        raise SetupError(f"torchrun: {message}; see `torchrun --help`")

    parser = run.get_args_parser()
    # argparse's own `error` prints the full usage and exits.
    parser.error = refuse  # type: ignore[method-assign]
    parsed = parser.parse_args(words)
    try:
        ranks = run.determine_local_world_size(parsed.nproc_per_node)
    except ValueError as error:
        raise SetupError(f"torchrun: --nproc_per_node {parsed.nproc_per_node}: {error}") from error
    # Without it torchrun sets 1 thread and prints a warning of five lines.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, count_cores() // ranks)))
    # The launcher reports failed ranks itself. Users ask for torchrun's logs by LOGLEVEL.
    if "LOGLEVEL" not in os.environ:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed"):
                logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    return parsed


def count_cores() -> int:
    """Count the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def set_environment(**values: str) -> Iterator[None]:
    """Set environment variables; put the whole environment back afterwards."""
    former = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(former)


def launch(flags: Sequence[str], recipe: Path, arguments: Sequence[str]) -> int:
    """Run a recipe's file on the ranks that torchrun's flags ask for; return the exit code.

    arguments: the recipe's. Raises SetupError if torchrun refuses its flags, or the nodes do not
    meet.
    """
    with (
        tempfile.TemporaryDirectory(prefix="tune-run-") as folder,
        set_environment(**{FOLDER_VARIABLE: folder, PARENT_VARIABLE: str(os.getpid())}),
    ):
        return Launcher(
            flags,
            script=Path(__file__).with_name("worker.py"),
            arguments=[str(recipe.absolute()), *arguments],
            folder=Path(folder),
        ).run()


# Variables with settings of torch's CUDA allocator: the new name and the old one.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
QUERY_SECONDS = 10  # for nvidia-smi: a driver that hangs must not hold up the command
# CUDA reports this share or a little more of the memory that nvidia-smi shows: the driver keeps
# some.
SHARE_OF_TOTAL = 0.98
# Not torch, which would make a CUDA context: a launcher or a planner must have none.
QUERY = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]


@cache
def list_local_gpus() -> list[tuple[str, int]]:
    """Return (name, bytes of memory) of each GPU that CUDA_VISIBLE_DEVICES leaves visible.

    The list is empty without a driver. It is kept: GPUs hidden afterwards stay in it.
    """
    try:
        output = subprocess.run(
            QUERY, capture_output=True, text=True, timeout=QUERY_SECONDS, check=True
        ).stdout
        rows = [  # (index, uuid, name, bytes)
            (row[0], row[1], row[2], int(row[3]) * MIB)
            for row in csv.reader(output.splitlines(), skipinitialspace=True)
        ]
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return []
    visible = os.environ.get(VISIBLE_VARIABLE)
    if visible is None:
        return [(name, size) for _, _, name, size in rows]
    gpus = []
    # In the order of the variable. An entry is an index, or the beginning of a UUID: `GPU-1a2b`, of
    # which `GPU-` alone names nothing.
    for entry in filter(None, map(str.strip, visible.split(","))):
        gpus += [
            (name, size)
            for index, uuid, name, size in rows
            if entry == index or (len(entry) > 4 and uuid.startswith(entry))
        ]
    return gpus


def find_local_device() -> Hardware | None:
    """Return this machine's first GPU as a device to plan for; None without one.

    A card that is not in the table gets its own memory and the rates of a common card of that size.
    """
    gpus = list_local_gpus()
    if not gpus:
        return None
    name, size = gpus[0]
    reported = find_reported_hardware(name, int(size * SHARE_OF_TOTAL))
    known = HARDWARE.get(reported.name)  # the table's entry of such a card
    # A MIG slice, or a variant of a card with other memory, is planned with its own memory.
    return known if known and 0.9 < known.memory / size <= 1 else reported


def is_expandable() -> bool:
    """Return True if the environment gives torch's allocator expandable segments."""
    settings = "".join(os.environ.get(name, "") for name in ALLOCATOR_VARIABLES)
    return "expandable_segments:true" in settings.lower().replace(" ", "")
