"""Separate torchrun's flags from our words, check them, and count the ranks that they ask for.

`tune run` takes the flags before RECIPE (`split_words`), the other verbs anywhere (`take_flags`).
"""

import os
from collections.abc import Sequence
from typing import NoReturn

from recipe_lib.cli.launch import count_cores
from recipe_lib.cli.local_gpus import list_local_gpus
from recipe_lib.config.suggest import find_nearest, show
from recipe_lib.errors import ConfigError

# torchrun's flags, spelled with hyphens, so that most command lines are understood without
# importing torch.
WITH_VALUE = {
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
WITHOUT_VALUE = {"--standalone", "--virtual-local-rank"}
REFUSED = {"-m", "--module", "--no-python", "--run-path"}
RENDEZVOUS = ("--nnodes", "--rdzv-", "--node-rank", "--master-", "--standalone")
RENDEZVOUS_VARIABLES = ("PET_NNODES", "PET_RDZV", "PET_NODE_RANK", "PET_MASTER", "PET_STANDALONE")


def split_words(words: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Return (torchrun's flags, RECIPE, its arguments).

    RECIPE is the first word that is no flag and no flag's value. It is empty where --config comes
    first: that config names the recipe. Raises ConfigError.
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
    """Return the number of words that torchrun's flag at their beginning takes; 0 if it is none.

    values: flag -> its value, of the flags so far; this one is added. verb: of ours, for errors.
    Raises ConfigError for a flag that is given already, has no value, or cannot be used.
    """
    word = words[0]
    name, equals, value = word.partition("=")
    # torchrun takes --nproc_per_node and --nproc-per-node.
    flag = name.replace("_", "-") if name.startswith("-") else ""
    if flag in REFUSED:
        raise ConfigError(
            f"tune {verb}: {name} cannot be used: RECIPE is the name of a recipe or a .py file"
        )
    if flag in WITHOUT_VALUE or (word[:2] in ("-r", "-t") and len(word) > 2):  # `-t3`
        return 1
    if flag not in WITH_VALUE:
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
    known_flags = sorted(WITH_VALUE | WITHOUT_VALUE)
    # argparse would take an abbreviation; here it is told what it stands for.
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
    """Raise ConfigError for counts of processes that torchrun would answer with a traceback.

    verb: of ours, for the error.
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
    return text.isascii() and text.isdigit() and len(text) < 6 and int(text) >= 1


def add_rendezvous(flags: list[str]) -> list[str]:
    """Return the flags, with --standalone unless something says how the nodes meet."""
    is_set_by_flag = any(flag.replace("_", "-").startswith(RENDEZVOUS) for flag in flags)
    is_set_by_variable = any(name.startswith(RENDEZVOUS_VARIABLES) for name in os.environ)
    # torchrun's default is one fixed port: two runs on a machine would collide.
    return flags if is_set_by_flag or is_set_by_variable else ["--standalone", *flags]


def count_requested_ranks(flags: Sequence[str]) -> int | None:
    """Return the number of processes that torchrun's flags ask for.

    None where that depends on the machine (`gpu`), or may change (MIN:MAX).
    """
    if not flags:
        # Another launcher may have started this rank, with torchrun's variables.
        text = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
        return int(text) if text.isascii() and text.isdigit() else None
    numbers = [
        get_flag_value(flags, "--nproc-per-node") or "1",
        get_flag_value(flags, "--nnodes") or "1",
    ]
    if not all(number.isascii() and number.isdigit() for number in numbers):
        return None
    return int(numbers[0]) * int(numbers[1])


def take_flags(words: Sequence[str], verb: str = "plan") -> tuple[list[str], list[str]]:
    """Return (torchrun's flags, the other words); the flags may stand anywhere.

    verb: of ours, for errors.
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
    """Return (processes of a machine, machines) that torchrun's flags ask for.

    Raises ConfigError for GPUs that this machine has not.
    """
    processes = get_flag_value(flags, "--nproc-per-node") or "1"
    if processes in ("auto", "gpu", "cpu", "xpu"):
        gpus = 0 if processes in ("cpu", "xpu") else len(list_local_gpus())
        if not gpus and processes in ("gpu", "xpu"):
            raise ConfigError(
                f"--nproc_per_node {processes}: this machine has none; give a number, and --device"
            )
        processes = str(gpus or count_cores())
    # Of MIN:MAX machines the fewest, each of which has the most to hold.
    machines = (get_flag_value(flags, "--nnodes") or "1").partition(":")[0]
    return int(processes), int(machines)


def should_show_plan(flags: Sequence[str]) -> bool:
    """Return True if this process says what is planned: of several machines or ranks, the first."""
    node_rank = get_flag_value(flags, "--node-rank") or "0"
    return node_rank == "0" and os.environ.get("RANK", "0") == "0"
