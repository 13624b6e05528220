"""Plan every shipped config on 1, 2, 4, 8 ranks, and write the header of its YAML file from that.

    python benchmarks/planned_peaks.py llama3/8B_full

A header (the comment that begins a config) says which GPUs the config is meant for, the planned
peak and the fastest settings, which `fastest_settings.py` has found. The plans are kept in
planned_peaks.json; tests/models/test_planned_peaks.py holds the headers to it.
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
sys.path.insert(0, str(REPOSITORY))  # for imports of `benchmarks` and `tests`, run as a file
# Sequences are as long as max_seq_len allows: no dataset is asked for its rows. Set before the
# imports that look at it.
os.environ["HF_HUB_OFFLINE"] = "1"

from recipe_lib.config.paths import get_configs_folder  # noqa: E402
from recipe_lib.plan.allocation.untraced_memory import estimate_outside_torch  # noqa: E402
from recipe_lib.plan.hardware import find_hardware  # noqa: E402
from recipe_lib.units import GIB, format_bytes, format_count  # noqa: E402

DEVICE = "rtx4090"  # whose operators are traced; peaks are then held against every size
PLANS = Path(__file__).with_suffix(".json")
FASTEST = Path(__file__).with_name("fastest_settings.json")  # by the program of that name
SIZES = (16, 24, 48, 80, 141)  # GB, as cards are sold
FIRST = (24, 48, 80, 141)  # a config is meant for the first of these that fits it
ALSO = (16, 24, 48, 80)  # which a header may name as alternatives
RANKS = (1, 2, 4, 8)  # of one machine
MARGIN = 0.03  # of a card; what a plan may be wrong by, as in the verdict of `tune plan`
DDP = "ddp"  # key of the plan with whole models on two ranks
# The header's line of the planned peak: active, its unit, reserved, its unit, ranks.
PEAK = re.compile(
    r"^# Planned peak of a rank: ([0-9.]+) ([GM]iB) active, ([0-9.]+) ([GM]iB) reserved \((\d+)"
    r" ranks?, .*\)\.\n",
    re.MULTILINE,
)
_HEADER = re.compile(r"^# Meant for .*?\n#\n", re.MULTILINE | re.DOTALL)
# The beginning of the header's command, up to the recipe: `tune run`, and flags that are replaced.
_RUN = re.compile(
    r"^#   tune run (?:.*?\\\n#     |--nproc_per_node \d+ )?(?=\w+ --config)", re.MULTILINE
)
_VISION = (
    "The checkpoint also holds a vision part, which is neither loaded nor exported: the text model"
    " is trained."
)

# A config's plans: by the number of ranks, or DDP, the heaviest rank's `active` and `reserved`
# bytes, and the `tokens` of a sequence.
Plans = dict[str, dict[str, int]]


def list_names() -> list[str]:
    """Return the names of the shipped configs."""
    return sorted(
        path.relative_to(get_configs_folder()).with_suffix("").as_posix()
        for path in get_configs_folder().rglob("*.yaml")
    )


def fits(plan: dict[str, int], ranks: int, size: int) -> bool:
    """Return True if a plan leaves the margin on a card of `size` GB.

    plan: a value of `Plans`. ranks: of that plan. What CUDA and NCCL take outside of torch counts.
    """
    hardware = find_hardware(f"{size}GB")
    outside = estimate_outside_torch(hardware, [ranks] if ranks > 1 else [])
    return plan["reserved"] + outside.total <= hardware.memory * (1 - MARGIN)


def find_fewest_ranks(plans: Plans) -> dict[int, int]:
    """Return the fewest planned ranks that fit, by card size in GB.

    A size on which no plan fits is left out.
    """
    fewest_ranks = {}
    for size in SIZES:
        for ranks in RANKS:
            if str(ranks) in plans and fits(plans[str(ranks)], ranks, size):
                fewest_ranks[size] = ranks
                break
    return fewest_ranks


def find_meant_cards(plans: Plans) -> tuple[int, int]:
    """Return (card size in GB, ranks) that a config is meant for: the smallest size of FIRST.

    Raises StopIteration if no plan fits on any.
    """
    fewest_ranks = find_fewest_ranks(plans)
    size = next(size for size in FIRST if size in fewest_ranks)
    return size, fewest_ranks[size]


def plan_ranks(name: str, ranks: int, *words: str) -> dict[str, int]:
    """Plan a config on so many ranks, and return a value of `Plans`. words: overrides."""
    # Imported here: `--headers` needs no torch.
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
    """Plan a config from one rank on, until the smallest card is large enough.

    Returns (name, plans). Several ranks are planned with FSDP, by which several cards hold what one
    does not. Adapters that fit on one card of 24 GB are planned with DDP, too; where that fits,
    their configs let `tune run` choose (`auto`).
    """
    from tests.plan.apart import call_in_fork

    plans: Plans = {}
    total = read_total_bytes(read_text(name))
    for ranks in RANKS:
        if total / ranks > SIZES[-1] * 10**9:
            continue  # a rank's share alone is larger than the largest card
        plan = call_in_fork(plan_ranks, name, ranks, *_choose_strategy(ranks))
        plans[str(ranks)] = plan
        if fits(plan, ranks, SIZES[0]):
            break
    if not name.endswith(("full", "qat")) and find_meant_cards(plans) == (24, 1):
        plans[DDP] = call_in_fork(plan_ranks, name, 2, "parallel.strategy=ddp")
    return name, plans


def _choose_strategy(ranks: int) -> list[str]:
    """Return the override with which so many ranks are planned; [] for one."""
    return ["parallel.strategy=fsdp"] if ranks > 1 else []


def read_total_bytes(text: str) -> float:
    """Return the bytes that the model takes on all ranks, as a config's header says.

    text: the config's. It is the sum of the GiB that stand before the line of the planned peak.
    """
    sizes = re.findall(r"([0-9.]+) GiB", text.partition("# Planned")[0])
    return GIB * sum(map(float, sizes))


def format_header(text: str, plans: Plans, fastest: dict[str, Any] | None = None) -> str:
    """Return the config's text with its header, and the ranks of its command, made of the plans.

    fastest: an entry of `read_fastest`; None: no search was made. What the header says of the
    model's own sizes is taken over from the old one.
    """
    header = _HEADER.search(text)
    if header is None:
        # The demo's configs do not say what they are meant for: their peak alone is made anew.
        return PEAK.sub(lambda _: f"{_format_peak(plans['1'], 1)}\n", text)
    size, ranks = find_meant_cards(plans)
    alternatives = []
    for other_size, other_ranks in find_fewest_ranks(plans).items():
        is_cheaper = other_size < size or other_ranks < ranks
        if other_size != size and other_size in ALSO and is_cheaper:
            alternatives.append(f"{other_ranks} of {other_size} GB")
    also = f", or {', '.join(alternatives)}" if alternatives else ""
    header_text = " ".join(line.strip("# ") for line in header[0].splitlines())
    sentences = [
        f"Meant for {ranks} {'GPUs' if ranks > 1 else 'GPU'} of {size} GB{also}:"
        f" {_format_total(header_text, ranks)}"
    ]
    if "vision part" in header_text:
        sentences.append(_VISION)
    sentences += re.findall(r"The frozen teacher takes \S+ GiB\.", header_text)
    lines = [
        f"# {line}" for line in textwrap.wrap(" ".join(sentences), 117, break_on_hyphens=False)
    ]
    lines.append(_format_peak(plans[str(ranks)], ranks))
    if fastest:
        lines += _format_fastest(fastest, size, ranks)
    lines += ["#", ""]
    text = text[: header.start()] + "\n".join(lines) + text[header.end() :]
    flags = f"--nproc_per_node {ranks} " if ranks > 1 else ""
    return _RUN.sub(lambda _: f"#   tune run {flags}", text, count=1)


def _format_peak(plan: dict[str, int], ranks: int) -> str:
    """Return the header's line of the planned peak. plan: a value of `Plans`."""
    peak = f"{format_bytes(plan['active'])} active, {format_bytes(plan['reserved'])} reserved"
    num_ranks = f"{ranks} ranks" if ranks > 1 else "1 rank"
    return f"# Planned peak of a rank: {peak} ({num_ranks}, sequences of {plan['tokens']} tokens)."


def _format_fastest(fastest: dict[str, Any], size: int, ranks: int) -> list[str]:
    """Return the header's lines of the fastest settings, none of which is broken in two.

    fastest: an entry of `read_fastest`. Raises AssertionError if they were searched for other cards
    than `ranks` of `size` GB: fastest_settings.py has to run again.
    """
    assert fastest["cards"] == f"{ranks}x{size}GB", (
        f"{FASTEST.name}: found for {fastest['cards']}, not {ranks}x{size}GB"
    )
    shipped_speed = f"{format_count(fastest['shipped'])} tokens/s"
    best_speed = f"{format_count(fastest['tokens_per_second'])} tokens/s"
    text = (
        f"Planned speed: {shipped_speed}, and with the fastest settings that fit {best_speed}:"
        f" `{fastest['settings']}`."
    )
    if not fastest["settings"]:
        text = f"Planned speed: {best_speed}; no settings that fit are faster."
    return [
        f"# {line}"
        for line in textwrap.wrap(text, 117, break_on_hyphens=False, break_long_words=False)
    ]


def _format_total(header_text: str, ranks: int) -> str:
    """Return the header's sentence on what the model takes in all, and what comes to that.

    header_text: the old header's, in one line. Raises AttributeError or AssertionError if it does
    not give the sizes in one of the two forms.
    """
    shared = " shared by the ranks;" if ranks > 1 else ""
    full = re.search(
        r"parameters, gradients and AdamW's states are [0-9.]+ GiB in all", header_text
    )
    if full:
        rest = "what is gathered at the moment" if ranks > 1 else "the logits of a loss chunk"
        return (
            f"{full[0]}{',' if shared else ';'}{shared} to that come what layers keep for backward"
            f" and {rest}."
        )
    frozen = re.search(
        r"frozen weights are \S+ GiB; adapters, their gradients and AdamW's states \S+ GiB",
        header_text,
    )
    assert frozen is not None, header_text
    rest = " and what is gathered at the moment" if ranks > 1 else ""
    return (
        f"{frozen[0]}{',' if shared else ';'}{shared} to that comes what layers keep for"
        f" backward{rest}."
    )


def write_header(name: str, plans: Plans) -> None:
    """Write one config's file with the header that its plans make."""
    path = get_configs_folder() / f"{name}.yaml"
    path.write_text(
        format_header(path.read_text(encoding="utf-8"), plans, read_fastest().get(name)),
        encoding="utf-8",
    )


def check_config(name: str, plans: Plans) -> bool:
    """Plan the run of a config's header again, and print it beside what is kept, as a table's row.

    Returns True if both are equal.
    """
    from tests.plan.apart import call_in_fork

    ranks = find_meant_cards(plans)[1] if _HEADER.search(read_text(name)) else 1
    kept_plan = plans[str(ranks)]
    plan = call_in_fork(plan_ranks, name, ranks, *_choose_strategy(ranks))
    is_same = plan == kept_plan
    cells = []
    for key in ("active", "reserved"):
        cells += [f"{kept_plan[key]:,}", f"{plan[key]:,}"]
    print(
        f"| {name} | {ranks} | {' | '.join(cells)} | {'same' if is_same else 'CHANGED'} |",
        flush=True,
    )
    return is_same


def read_text(name: str) -> str:
    """Return a shipped config's text."""
    return (get_configs_folder() / f"{name}.yaml").read_text(encoding="utf-8")


def read_plans() -> dict[str, Plans]:
    """Return the plans that are kept, by config; {} without the file."""
    return json.loads(PLANS.read_text(encoding="utf-8")) if PLANS.exists() else {}


def read_fastest() -> dict[str, dict[str, Any]]:
    """Return the fastest settings that are kept, by config; {} without the file.

    An entry has `cards` (`4x24GB`), `settings` (overrides, empty: none is faster), and tokens a
    second: `tokens_per_second` with them, `shipped` without.
    """
    return json.loads(FASTEST.read_text(encoding="utf-8")) if FASTEST.exists() else {}


def main() -> None:
    """Plan the configs that are named, or all, on all cores, and write the headers.

    With --check nothing is written; the exit code is 1 if a plan is no longer the kept one.
    """
    parser = argparse.ArgumentParser(
        description="Plan the shipped configs, and write their headers from the plans."
    )
    parser.add_argument("names", nargs="*", metavar="CONFIG")
    parser.add_argument(
        "--headers", action="store_true", help="write headers from the plans that are kept"
    )
    parser.add_argument(
        "--check", action="store_true", help="plan again and compare with the plans that are kept"
    )
    arguments = parser.parse_args()
    kept_plans = read_plans()
    chosen_names = arguments.names or [
        name for name in list_names() if name in kept_plans or not arguments.headers
    ]
    if arguments.check:
        print(
            "| config | ranks | active kept | now | reserved kept | now |"
            " |\n|---|---:|---:|---:|---:|---:|---|"
        )
        # Threads: each plan forks a process of its own, see `call_in_fork`.
        with multiprocessing.pool.ThreadPool(os.cpu_count()) as pool:
            same = pool.map(
                lambda name: check_config(name, kept_plans[name]), chosen_names, chunksize=1
            )
        print(f"{sum(same)} of {len(same)} the same")
        sys.exit(not all(same))
    if not arguments.headers:
        import recipe_lib.plan.build_plan  # noqa: F401  (once, before the processes are forked)

        with multiprocessing.pool.ThreadPool(os.cpu_count()) as pool:
            for name, plans in pool.imap_unordered(plan_config, chosen_names):
                # Written after each config, so that a run that is stopped keeps what it has.
                kept_plans[name] = plans
                text = json.dumps(dict(sorted(kept_plans.items())), indent=1) + "\n"
                PLANS.write_text(text, encoding="utf-8")
                print(f"{name}: {find_meant_cards(plans)}", flush=True)
    for name in chosen_names:
        write_header(name, kept_plans[name])


if __name__ == "__main__":
    main()
