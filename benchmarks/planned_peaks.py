"""Plans every shipped config on 1, 2, 4, ... ranks, and writes from that what its header says it is
meant for.

    python benchmarks/planned_peaks.py                       all configs, some three plans each
    python benchmarks/planned_peaks.py llama3/8B_full        one of them
    python benchmarks/planned_peaks.py --headers             the headers alone, from the plans that are kept
    python benchmarks/planned_peaks.py --check               what each header says, planned anew beside the kept bytes

The plans are kept in benchmarks/planned_peaks.json: bytes of the heaviest rank, sequences as long
as max_seq_len allows. A header says the fastest settings, too, as fastest_settings.py has found
them. A config is meant for the fewest GPUs of 24 GB, at most 8, that its plan fits with a margin
(see `fits`); else of 48 GB, of 80 GB or of 141 GB. A test holds the headers to the file, and plans
some anew.
"""

import argparse
import json
import multiprocessing.pool
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))
os.environ["HF_HUB_OFFLINE"] = (
    "1"  # sequences are as long as they may be: no dataset is asked for its rows
)

from recipe_lib.config.paths import get_configs_folder  # noqa: E402
from recipe_lib.plan.allocation.untraced_memory import estimate_outside_torch  # noqa: E402
from recipe_lib.plan.hardware import find_hardware  # noqa: E402
from recipe_lib.units import GIB, format_bytes, format_count  # noqa: E402

DEVICE = "rtx4090"
PLANS = Path(__file__).with_suffix(".json")
FASTEST = Path(__file__).with_name("fastest_settings.json")  # by the program of that name
SIZES = (16, 24, 48, 80, 141)  # GB, as cards are sold
FIRST = (24, 48, 80, 141)  # in which order a config is meant for them
ALSO = (16, 24, 48, 80)  # which a header names beside them
RANKS = (1, 2, 4, 8)  # of one machine
MARGIN = 0.03  # of a card; what a plan may be wrong by, as in the verdict of `tune plan`
DDP = "ddp"
PEAK = re.compile(
    r"^# Planned peak of a rank: ([0-9.]+) ([GM]iB) active, ([0-9.]+) ([GM]iB) reserved \((\d+)"
    r" ranks?, .*\)\.\n",
    re.MULTILINE,
)
_HEADER = re.compile(r"^# Meant for .*?\n#\n", re.MULTILINE | re.DOTALL)
_RUN = re.compile(
    r"^#   tune run (?:.*?\\\n#     |--nproc_per_node \d+ )?(?=\w+ --config)", re.MULTILINE
)
_VISION = (
    "The checkpoint also holds a vision part, which is neither loaded nor exported: the text model"
    " is trained."
)

Plans = dict[str, dict[str, int]]


def list_names() -> list[str]:
    """The shipped configs."""
    return sorted(
        path.relative_to(get_configs_folder()).with_suffix("").as_posix()
        for path in get_configs_folder().rglob("*.yaml")
    )


def fits(plan: dict[str, int], ranks: int, size: int) -> bool:
    """Whether a plan of so many ranks leaves the margin on a card of `size` GB, with what is
    outside of torch.
    """
    hardware = find_hardware(f"{size}GB")
    outside = estimate_outside_torch(hardware, [ranks] if ranks > 1 else [])
    return plan["reserved"] + outside.total <= hardware.memory * (1 - MARGIN)


def find_fewest_ranks(plans: Plans) -> dict[int, int]:
    """Card size in GB -> the fewest planned ranks that fit cards of it; sizes that none fits are
    missing.
    """
    found = {}
    for size in SIZES:
        fitting = [
            ranks for ranks in RANKS if str(ranks) in plans and fits(plans[str(ranks)], ranks, size)
        ]
        found.update({size: fitting[0]} if fitting else {})
    return found


def find_meant_cards(plans: Plans) -> tuple[int, int]:
    """(card size in GB, ranks) that a config is meant for."""
    found = find_fewest_ranks(plans)
    size = next(size for size in FIRST if size in found)
    return size, found[size]


def plan_ranks(name: str, ranks: int, *words: str) -> dict[str, int]:
    """Bytes of the heaviest rank: active, reserved; and tokens of a sequence."""
    from recipe_lib.plan.build_plan import make_plan
    from tests.plan.apart import build_settings

    plan, _ = make_plan(*build_settings(name, ranks, *words, device=DEVICE))
    rank = plan.heaviest
    return {
        "active": rank.peak.active,
        "reserved": rank.reserved,
        "tokens": plan.sequence["tokens"],
    }


def plan_config(name: str) -> tuple[str, Plans]:
    """The plans that say what a config is meant for, from one rank on until the smallest card is
    large enough.

    Of shards (FSDP), which is what makes several cards hold what one does not; adapters that fit
    one card of 24 GB are planned with whole models (DDP) too; where that fits, their configs let
    `tune run` choose (`auto`). Left out are numbers of ranks where the share of each, by what the
    header says the model takes, is larger than the largest card.
    """
    from tests.plan.apart import call_in_fork

    plans: Plans = {}
    total = read_total_bytes(read_text(name))
    for ranks in RANKS:
        if total / ranks > SIZES[-1] * 10**9:
            continue
        plan = call_in_fork(
            plan_ranks, name, ranks, *(["parallel.strategy=fsdp"] if ranks > 1 else [])
        )
        plans[str(ranks)] = plan
        if fits(plan, ranks, SIZES[0]):
            break
    if not name.endswith(("full", "qat")) and find_meant_cards(plans) == (24, 1):
        plans[DDP] = call_in_fork(plan_ranks, name, 2, "parallel.strategy=ddp")
    return name, plans


def read_total_bytes(text: str) -> float:
    """Bytes that a config's header says the model takes, on all ranks."""
    return GIB * sum(
        float(size) for size in re.findall(r"([0-9.]+) GiB", text.partition("# Planned")[0])
    )


def format_header(text: str, plans: Plans, fastest: dict[str, Any] | None = None) -> str:
    """The config's text with its header made of the plans, and its command of the ranks that it is
    meant for.

    fastest: the settings that were found for these ranks, and speeds; None: no search was made.

    A header that does not say what the config is meant for, the demo's, has its peak alone made
    anew.
    """
    old = _HEADER.search(text)
    if old is None:
        return PEAK.sub(lambda _: f"{_get_peak(plans['1'], 1)}\n", text)
    size, ranks = find_meant_cards(plans)
    found = {
        other: count
        for other, count in find_fewest_ranks(plans).items()
        if other != size and other in ALSO
    }
    others = {other: count for other, count in found.items() if other < size or count < ranks}
    also = ", ".join(f"{count} of {other} GB" for other, count in others.items())
    also = f", or {also}" if also else ""
    joined = " ".join(line.strip("# ") for line in old[0].splitlines())
    sentences = [
        f"Meant for {ranks} {'GPUs' if ranks > 1 else 'GPU'} of {size} GB{also}:"
        f" {_format_total(joined, ranks)}"
    ]
    sentences += [_VISION] if "vision part" in joined else []
    sentences += re.findall(r"The frozen teacher takes \S+ GiB\.", joined)
    lines = [
        f"# {line}" for line in textwrap.wrap(" ".join(sentences), 117, break_on_hyphens=False)
    ]
    lines += [
        _get_peak(plans[str(ranks)], ranks),
        *(_format_fastest(fastest, size, ranks) if fastest else []),
        "#",
        "",
    ]
    text = text[: old.start()] + "\n".join(lines) + text[old.end() :]
    flags = f"--nproc_per_node {ranks} " if ranks > 1 else ""
    return _RUN.sub(lambda _: f"#   tune run {flags}", text, count=1)


def _get_peak(plan: dict[str, int], ranks: int) -> str:
    peak = f"{format_bytes(plan['active'])} active, {format_bytes(plan['reserved'])} reserved"
    many = f"{ranks} ranks" if ranks > 1 else "1 rank"
    return f"# Planned peak of a rank: {peak} ({many}, sequences of {plan['tokens']} tokens)."


def _format_fastest(found: dict[str, Any], size: int, ranks: int) -> list[str]:
    """The settings, wrapped between them alone; an error where they were searched for other
    cards.
    """
    assert found["cards"] == f"{ranks}x{size}GB", (
        f"{FASTEST.name}: found for {found['cards']}, not {ranks}x{size}GB"
    )
    shipped, best = (
        f"{format_count(found[key])} tokens/s" for key in ("shipped", "tokens_per_second")
    )
    text = (
        f"Planned speed: {shipped}, and with the fastest settings that fit {best}:"
        f" `{found['settings']}`."
    )
    if not found["settings"]:
        text = f"Planned speed: {best}; no settings that fit are faster."
    return [
        f"# {line}"
        for line in textwrap.wrap(text, 117, break_on_hyphens=False, break_long_words=False)
    ]


def _format_total(joined: str, ranks: int) -> str:
    """What the model takes in all, as the header says it, and what comes to that."""
    shared = " shared by the ranks;" if ranks > 1 else ""
    full = re.search(r"parameters, gradients and AdamW's states are [0-9.]+ GiB in all", joined)
    if full:
        rest = "what is gathered at the moment" if ranks > 1 else "the logits of a loss chunk"
        return (
            f"{full[0]}{',' if shared else ';'}{shared} to that come what layers keep for backward"
            f" and {rest}."
        )
    frozen = re.search(
        r"frozen weights are \S+ GiB; adapters, their gradients and AdamW's states \S+ GiB", joined
    )
    assert frozen is not None, joined
    rest = " and what is gathered at the moment" if ranks > 1 else ""
    return (
        f"{frozen[0]}{',' if shared else ';'}{shared} to that comes what layers keep for"
        f" backward{rest}."
    )


def write_header(name: str, plans: Plans) -> None:
    """Writes one config's file anew."""
    path = get_configs_folder() / f"{name}.yaml"
    path.write_text(
        format_header(path.read_text(encoding="utf-8"), plans, read_fastest().get(name)),
        encoding="utf-8",
    )


def check_config(name: str, plans: Plans) -> bool:
    """Plans what a config's header says, and prints it as a row of a table beside what is kept.
    Whether it is equal.
    """
    from tests.plan.apart import call_in_fork

    ranks = find_meant_cards(plans)[1] if _HEADER.search(read_text(name)) else 1
    kept = plans[str(ranks)]
    found = call_in_fork(
        plan_ranks, name, ranks, *(["parallel.strategy=fsdp"] if ranks > 1 else [])
    )
    numbers = [f"{one[key]:,}" for key in ("active", "reserved") for one in (kept, found)]
    print(
        f"| {name} | {ranks} | {' | '.join(numbers)} | {'same' if found == kept else 'CHANGED'} |",
        flush=True,
    )
    return found == kept


def read_text(name: str) -> str:
    """A shipped config's text."""
    return (get_configs_folder() / f"{name}.yaml").read_text(encoding="utf-8")


def read_plans() -> dict[str, Plans]:
    """The plans that are kept, by config."""
    return json.loads(PLANS.read_text(encoding="utf-8")) if PLANS.exists() else {}


def read_fastest() -> dict[str, dict[str, Any]]:
    """The fastest settings that are kept, by config."""
    return json.loads(FASTEST.read_text(encoding="utf-8")) if FASTEST.exists() else {}


def main() -> None:
    """Plans the configs that are named, or all, on all cores, and writes the headers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="CONFIG")
    parser.add_argument(
        "--headers", action="store_true", help="write headers from the plans that are kept"
    )
    parser.add_argument(
        "--check", action="store_true", help="plan again and compare with the plans that are kept"
    )
    arguments = parser.parse_args()
    kept = read_plans()
    chosen = arguments.names or [
        name for name in list_names() if name in kept or not arguments.headers
    ]
    if arguments.check:
        print(
            "| config | ranks | active kept | now | reserved kept | now |"
            " |\n|---|---:|---:|---:|---:|---:|---|"
        )
        with multiprocessing.pool.ThreadPool(os.cpu_count()) as pool:
            same = pool.map(lambda name: check_config(name, kept[name]), chosen, chunksize=1)
        print(f"{sum(same)} of {len(same)} the same")
        sys.exit(not all(same))
    if not arguments.headers:
        import recipe_lib.plan.build_plan  # noqa: F401  (once, for all processes)

        with multiprocessing.pool.ThreadPool(os.cpu_count()) as pool:
            for name, plans in pool.imap_unordered(plan_config, chosen):
                kept[name] = plans
                PLANS.write_text(
                    json.dumps(dict(sorted(kept.items())), indent=1) + "\n", encoding="utf-8"
                )
                print(f"{name}: {find_meant_cards(plans)}", flush=True)
    for name in chosen:
        write_header(name, kept[name])


if __name__ == "__main__":
    main()
