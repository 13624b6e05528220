"""Every family, and every recipe, has a plan, and the peak in the config's header is that plan's.

Of the configs of a family, or recipe, the one whose plan is quickest, that of the lowest peak; a change of all shows in
`python benchmarks/planned_peaks.py`, which writes the headers anew.
"""

import multiprocessing
import re
from dataclasses import replace

import pytest

from benchmarks.planned_peaks import DEVICE, PEAK, names, ranks_of
from recipe_lib.config.places import configs_folder
from recipe_lib.plan.hardware import find_hardware
from recipe_lib.plan.hidden import outside_torch
from recipe_lib.units import GIB, MIB
from tests.plan.apart import settings

DRIFT = 0.005
ROUNDING = 0.005  # of the figure in the header


def estimate(name):
    """Active bytes of a config at its peak, estimated from two simulations with few layers; or what went wrong.

    Of a steady step, but for the smallest models, where the workspaces matter that a first step leaves.
    """
    from recipe_lib.plan.quick import quick

    text = (configs_folder() / f"{name}.yaml").read_text(encoding="utf-8")
    try:
        recipe_class, cfg, wanted = settings(name, ranks_of(text), device=DEVICE)
        return name, quick(recipe_class, cfg, replace(wanted, timed=name.startswith("demo/"))).active
    except Exception as error:  # noqa: BLE001 - told by the test of that config
        return name, f"{type(error).__name__}: {error}"


def smallest() -> list[str]:
    """The config of the lowest peak of each family, and of each recipe."""
    found: dict[str, tuple[float, str]] = {}
    for name in names():
        family, _, rest = name.partition("/")
        peak = PEAK.search((configs_folder() / f"{name}.yaml").read_text(encoding="utf-8"))
        size = float(peak[1]) * {"GiB": GIB, "MiB": MIB}[peak[2]] if peak else 0.0
        for kind in (family, rest.rpartition("_")[2]):
            found[kind] = min(found.get(kind, (size, name)), (size, name))
    return sorted({name for _, name in found.values()})


@pytest.fixture(scope="module")
def estimates():
    """All of them, made in a process of their own: the simulated device stays in a process."""
    import recipe_lib.plan.quick  # noqa: F401  (its imports last, and the parent keeps them)

    with multiprocessing.get_context("fork").Pool(1) as pool:
        return dict(pool.imap(estimate, smallest(), chunksize=20))


@pytest.mark.parametrize("name", names())
def test_a_header_says_a_peak(name):
    text = (configs_folder() / f"{name}.yaml").read_text(encoding="utf-8")
    assert PEAK.search(text), f"configs/{name}.yaml: has no planned peak; python benchmarks/planned_peaks.py {name}"


@pytest.mark.parametrize("name", smallest())
def test_the_peak_in_the_header_is_the_planned_one(estimates, name):
    found = PEAK.search((configs_folder() / f"{name}.yaml").read_text(encoding="utf-8"))
    assert isinstance(estimates[name], int), estimates[name]
    unit = {"GiB": GIB, "MiB": MIB}[found[2]]
    written = float(found[1]) * unit
    drift = f"{name}: {found[1]} {found[2]} in the header, {estimates[name] / unit:.3f} {found[2]} now"
    assert abs(estimates[name] - written) <= DRIFT * written + ROUNDING * unit, drift


_SIZE = re.compile(r"^# Meant for (\d+) GPUs? of (\d+) GB", re.MULTILINE)
SIZED = [name for name in names() if _SIZE.search((configs_folder() / f"{name}.yaml").read_text(encoding="utf-8"))]


def test_most_configs_say_what_they_are_meant_for():
    assert len(SIZED) > 100


@pytest.mark.parametrize("name", SIZED)
def test_what_a_config_is_meant_for_has_room_for_its_peak(name):
    """By the header's own figures, with the default allocator, and what lies outside of torch."""
    text = (configs_folder() / f"{name}.yaml").read_text(encoding="utf-8")
    size, peak = _SIZE.search(text), PEAK.search(text)
    ranks = int(size[1])
    assert ranks == ranks_of(text)
    hardware = find_hardware(f"{size[2]}GB")
    outside = outside_torch(hardware, [ranks] if ranks > 1 else [])
    reserved = float(peak[3]) * {"GiB": GIB, "MiB": MIB}[peak[4]]
    assert reserved + outside.total <= hardware.memory
