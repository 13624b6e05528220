"""torchrun's flags on our command lines: separated from ours, checked, and how many ranks they ask
for.
"""

import os
from collections.abc import Sequence
from typing import NoReturn

from recipe_lib.cli.launch import cores
from recipe_lib.cli.local_gpus import own_gpus
from recipe_lib.config.suggest import find_nearest, show
from recipe_lib.errors import ConfigError

# torchrun's flags, spelled with hyphens, so that most command lines are understood without
# importing torch.
WITH_VALUE = {
    "--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--max-restarts",
    "--monitor-interval", "--start-method", "--event-log-handler", "--role", "--log-dir", "--redirects", "--tee",
    "--log-line-prefix-template", "--local-ranks-filter", "--duplicate-stdout-filters", "--duplicate-stderr-filters",
    "--node-rank", "--master-addr", "--master-port", "--local-addr", "--logs-specs", "--numa-binding",
    "--signals-to-handle", "--shutdown-timeout", "--print-completion", "-r", "-t",
}  # fmt: skip
WITHOUT_VALUE = {"--standalone", "--virtual-local-rank"}
REFUSED = {"-m", "--module", "--no-python", "--run-path"}
RENDEZVOUS = ("--nnodes", "--rdzv-", "--node-rank", "--master-", "--standalone")
RENDEZVOUS_VARIABLES = ("PET_NNODES", "PET_RDZV", "PET_NODE_RANK", "PET_MASTER", "PET_STANDALONE")


def split(words: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Return (torchrun's flags, RECIPE, its arguments).

    RECIPE is the first word that is no flag and no flag's value; empty where --config comes first,
    whose config names it.
    """
    position = 0
    given: dict[str, str] = {}
    while position < len(words):
        word = words[position]
        if word.partition("=")[0] in ("--config", "--plugin"):
            return list(words[:position]), "", list(words[position:])
        if not word.startswith("-"):
            if "=" in word or word.startswith("~"):
                raise ConfigError(f"tune run: {show(word)}: overrides come after CONFIG")
            return list(words[:position]), word, list(words[position + 1 :])
        position += _measure_flag(words[position:], given, "run") or _refuse_unknown(word)
    raise ConfigError(
        "tune run: no config; expected: tune run [torchrun flags] CONFIG (see `tune ls`)"
    )


def _measure_flag(words: Sequence[str], given: dict[str, str], verb: str) -> int:
    """Return the number of words that the flag of torchrun's takes which they begin with; 0 for any
    other word.

    given: flags with their values so far, to which it is added. verb: of ours, for errors. Raises
    ConfigError for one that is given already, has no value, or cannot be used.
    """
    word = words[0]
    name, equals, value = word.partition("=")
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
    if flag in given:
        raise ConfigError(
            f"command line: {name}: given twice, as {show(given[flag])} and {show(value)}; remove"
            " one of the two"
        )
    given[flag] = value
    if not equals and len(words) < 2:
        raise ConfigError(f"tune {verb}: {show(word)}: expected a value")
    return 1 if equals else 2


def _refuse_unknown(word: str) -> NoReturn:
    name = word.partition("=")[0]
    flag = name.replace("_", "-")
    known = sorted(WITH_VALUE | WITHOUT_VALUE)
    begun = [full for full in known if len(flag) > 3 and full.startswith(flag)]
    close = begun[0] if begun else find_nearest(flag, known, cutoff=0.75)
    hint = f"did you mean {close}?" if close else "see `torchrun --help`"
    raise ConfigError(f"tune run: unknown torchrun flag {show(name)}; {hint}")


def value_of(flags: Sequence[str], flag: str) -> str | None:
    """The value of a torchrun flag (spelled with hyphens), the last one given; None if it is not
    there.
    """
    found = None
    for position, word in enumerate(flags):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            found = value if equals else flags[position + 1]
    return found


def check_launch(flags: Sequence[str], verb: str = "run") -> None:
    """Refuses process counts that torchrun would answer with a traceback. verb: of ours, for the
    line.
    """
    ranks = value_of(flags, "--nproc-per-node")
    if ranks is not None and ranks not in ("auto", "cpu", "gpu", "xpu") and not _is_count(ranks):
        raise ConfigError(
            f"tune {verb}: --nproc_per_node {show(ranks)}: expected a number from 1 to 99999, or"
            " auto, cpu, gpu, xpu"
        )
    nodes = value_of(flags, "--nnodes")
    if nodes is not None:
        low, colon, high = nodes.partition(":")
        if not _is_count(low) or (colon and (not _is_count(high) or int(low) > int(high))):
            raise ConfigError(
                f"tune {verb}: --nnodes {show(nodes)}: expected N or MIN:MAX, numbers from 1 to"
                " 99999"
            )


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 6 and int(text) >= 1


def with_rendezvous(flags: list[str]) -> list[str]:
    """The flags, with --standalone unless they or torchrun's environment variables say how the
    nodes meet.
    """
    given = any(flag.replace("_", "-").startswith(RENDEZVOUS) for flag in flags)
    given_by_environment = any(name.startswith(RENDEZVOUS_VARIABLES) for name in os.environ)
    return flags if given or given_by_environment else ["--standalone", *flags]


def ranks_of(flags: Sequence[str]) -> int | None:
    """Processes of a run that torchrun's flags ask for; None where that depends on the machine, or
    may change.
    """
    if not flags:
        text = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
        return int(text) if text.isascii() and text.isdigit() else None
    numbers = [value_of(flags, "--nproc-per-node") or "1", value_of(flags, "--nnodes") or "1"]
    if not all(number.isascii() and number.isdigit() for number in numbers):
        return None
    return int(numbers[0]) * int(numbers[1])


def take_flags(words: Sequence[str], verb: str = "plan") -> tuple[list[str], list[str]]:
    """Return (torchrun's flags, the other words): they may stand anywhere, unlike those of `tune
    run`.

    verb: of ours, for errors.
    """
    flags: list[str] = []
    others: list[str] = []
    given: dict[str, str] = {}
    position = 0
    while position < len(words):
        taken = _measure_flag(words[position:], given, verb)
        end = position + max(1, taken)
        (flags if taken else others).extend(words[position:end])
        position = end
    return flags, others


def rank_count(flags: Sequence[str]) -> tuple[int, int]:
    """(processes of a machine, machines) that torchrun's flags ask for; of MIN:MAX machines the
    fewest, which have the most to hold each.
    """
    here = value_of(flags, "--nproc-per-node") or "1"
    if here in ("auto", "gpu", "cpu", "xpu"):
        gpus = 0 if here in ("cpu", "xpu") else len(own_gpus())
        if not gpus and here in ("gpu", "xpu"):
            raise ConfigError(
                f"--nproc_per_node {here}: this machine has none; give a number, and --device"
            )
        here = str(gpus or cores())
    machines = (value_of(flags, "--nnodes") or "1").partition(":")[0]
    return int(here), int(machines)


def shows_plan(flags: Sequence[str]) -> bool:
    """Whether this machine of several, and this process of another launcher's, says what is
    planned.
    """
    return (value_of(flags, "--node-rank") or "0") == "0" and os.environ.get("RANK", "0") == "0"
