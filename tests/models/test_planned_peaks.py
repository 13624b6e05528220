"""Every config has a plan, and the header says what that plan does; some plans are made anew.

Of each recipe, and of a family whose layers differ from Llama's, one that is quick; a change of all
shows in `python benchmarks/planned_peaks.py`, which writes the headers anew.
"""

import multiprocessing
import re
from dataclasses import replace

import pytest

from benchmarks.fastest_settings import find_fastest
from benchmarks.planned_peaks import (
    DDP,
    DEVICE,
    PEAK,
    find_fewest_ranks,
    find_meant_cards,
    fits,
    format_header,
    list_names,
    read_fastest,
    read_plans,
    read_total_bytes,
)
from recipe_lib.config.paths import get_configs_folder
from recipe_lib.units import GIB, MIB
from tests.house.files import ROOT
from tests.plan.apart import build_settings, call_in_fork
from tests.selection import mark_slow_except, select_cases

PLANS = read_plans()
FASTEST = read_fastest()
DRIFT = 0.005
PLANNED_NOW = [
    "demo/full",
    "demo/lora",
    "demo/distill",
    "gemma3/1B_qlora",
    "llama3_2/1B_dpo",
    "llama3_2/1B_qat",
]


def plan_active(name):
    """Active bytes of a config at its peak; or what went wrong."""
    from recipe_lib.plan.build_plan import make_plan

    text = (get_configs_folder() / f"{name}.yaml").read_text(encoding="utf-8")
    try:
        recipe_class, cfg, wanted = build_settings(name, int(PEAK.search(text)[5]), device=DEVICE)
        return (
            name,
            make_plan(recipe_class, cfg, replace(wanted, timed=False))[0].heaviest.peak.active,
        )
    except Exception as error:  # noqa: BLE001 - told by the test of that config
        return name, f"{type(error).__name__}: {error}"


@pytest.fixture(scope="module")
def planned_now(request):
    """Of all selected ones, made in a process of their own: the simulated device stays in a
    process.
    """
    import recipe_lib.plan.build_plan  # noqa: F401  (its imports last, and the parent keeps them)

    with multiprocessing.get_context("fork").Pool(1) as pool:
        return dict(pool.imap(plan_active, select_cases(request, "config"), chunksize=20))


@pytest.mark.parametrize("name", list_names())
def test_a_header_says_a_peak(name):
    text = (get_configs_folder() / f"{name}.yaml").read_text(encoding="utf-8")
    assert PEAK.search(text), (
        f"configs/{name}.yaml: has no planned peak; python benchmarks/planned_peaks.py {name}"
    )


@pytest.mark.parametrize("config", mark_slow_except(PLANNED_NOW, PLANNED_NOW[:2]))
def test_the_peak_in_the_header_is_the_planned_one(planned_now, config):
    """The plan that is kept is the one of today; that the header is made of it is the next
    tests'.
    """
    text = (get_configs_folder() / f"{config}.yaml").read_text(encoding="utf-8")
    planned = PLANS[config][PEAK.search(text)[5]]["active"]
    found = planned_now[config]
    assert isinstance(found, int), found
    assert abs(found - planned) <= DRIFT * planned, (
        f"{config}: {planned / MIB:.2f} MiB kept, {found / MIB:.2f} MiB now"
    )


# Of these a search has not been made: their plans, of layers without kernels in torch, take minutes
# each, and a search makes dozens.
UNSEARCHED = (
    *("qwen3_5/", "qwen3_6/", "gemma4/", "ministral3/", "smollm3/", "granite4/", "olmo3/", "glm4/"),
    *("qwen3_next/", "nemotron3/", "lfm2/"),
    "phi4/mini_4B",
)


def test_there_are_plans():
    assert set(PLANS) == set(list_names())


def test_every_config_says_the_fastest_settings_that_fit():
    names = {name for name in list_names() if not name.startswith(("demo/", *UNSEARCHED))}
    assert set(FASTEST) == names


@pytest.mark.parametrize("name", sorted(PLANS))
def test_a_header_is_what_the_plans_make_of_it(name):
    """Card and ranks that it is meant for, others that it fits, its peak and its command."""
    text = (get_configs_folder() / f"{name}.yaml").read_text(encoding="utf-8")
    assert format_header(text, PLANS[name], FASTEST.get(name)) == text, (
        f"python benchmarks/planned_peaks.py {name}"
    )


@pytest.mark.parametrize("name", [name for name in PLANS if not name.startswith("demo/")])
def test_no_fewer_cards_would_do(name):
    """Half of the ranks were planned and do not fit, or do not hold even what the header says the
    model takes.
    """
    text = (get_configs_folder() / f"{name}.yaml").read_text(encoding="utf-8")
    total = read_total_bytes(text)
    said = {
        size: ranks
        for size, ranks in find_fewest_ranks(PLANS[name]).items()
        if size <= 80 or size == find_meant_cards(PLANS[name])[0]
    }
    for size, ranks in said.items():
        half = PLANS[name].get(str(ranks // 2))
        assert ranks == 1 or (
            total / (ranks // 2) > size * 10**9
            if half is None
            else not fits(half, ranks // 2, size)
        )


@pytest.mark.slow
def test_the_speeds_in_a_header_are_those_found_now():
    name = "smollm2/135M_full"
    size, ranks = find_meant_cards(PLANS[name])
    found, kept = call_in_fork(find_fastest, name, size, ranks), FASTEST[name]
    assert (found.cards, found.settings) == (kept["cards"], kept["settings"])
    speeds = {key: pytest.approx(kept[key], rel=0.01) for key in ("tokens_per_second", "shipped")}
    assert {"tokens_per_second": found.tokens_per_second, "shipped": found.shipped} == speeds


def test_cards_of_24_gb_come_first():
    """On one machine: a config for larger cards does not fit eight of 24 GB."""
    for name in PLANS:
        size, ranks = find_meant_cards(PLANS[name])
        found = find_fewest_ranks(PLANS[name])
        assert (size, ranks) == (24, found[24]) if 24 in found else size > 24


def test_adapters_have_whole_models_where_they_fit():
    """Configs whose model fits one card of 24 GB, on 8 of them too, have what gathers nothing where
    it is faster.
    """
    auto = set()
    for name in PLANS:
        text = (get_configs_folder() / f"{name}.yaml").read_text(encoding="utf-8")
        if re.search(r"^parallel:\n  strategy: auto$", text, re.MULTILINE):
            auto.add(name)
    shipped = {name for name in PLANS if not name.startswith("demo/")}
    assert auto == {
        name for name in shipped if DDP in PLANS[name] and fits(PLANS[name][DDP], 8, 24)
    }
    assert len(auto) > 60


def test_the_page_of_mixtures_has_the_planned_peaks():
    """docs/moe.md: of each config of a mixture of experts its cards and peaks."""
    text = (ROOT / "docs" / "moe.md").read_text(encoding="utf-8")
    wanted = []
    for name in sorted(
        name for name in PLANS if name.startswith(("qwen3_moe/", "gpt_oss/", "mixtral/", "olmoe/"))
    ):
        size, ranks = find_meant_cards(PLANS[name])
        peaks = [f"{PLANS[name][str(ranks)][key] / GIB:.2f}" for key in ("active", "reserved")]
        wanted.append(f"| `{name}` | {ranks} x {size} GB | {' | '.join(peaks)} |")
    assert "|---|--:|--:|--:|\n" + "\n".join(wanted) + "\n\n" in text, "\n".join(wanted)
