"""`tune plan --calibration FILE` without --device plans for the device of the file."""

import json
from pathlib import Path
from typing import Any

import pytest

from recipe_lib.cli import launch, plan_request
from recipe_lib.cli.main import main
from recipe_lib.errors import ConfigError
from recipe_lib.plan.hardware import HARDWARE, find_hardware
from recipe_lib.plan.measured.rates_file import read_calibration
from recipe_lib.units import GIB
from tests.plan.apart import call_in_fork
from tests.plan.timing.test_calibrate import good

CONFIG = ["demo/full"]
MEASURED = Path(__file__).parents[2] / "docs" / "measurements" / "gpu-doctor-nvidia-h200-rates.json"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "list_local_gpus", list)


def planned(folder: Path, *words: str, **changed: Any) -> tuple[int, Any, list[str]]:
    file = folder / "rates.json"
    file.write_text(json.dumps(good() | changed))
    return plan_request.choose_planned_device(
        plan_request.read_arguments([*CONFIG, "--calibration", str(file), *words])
    )


@pytest.mark.parametrize("name", sorted(HARDWARE))
def test_a_files_card_is_planned_with_the_tables_memory_or_with_its_own(
    name: str, tmp_path: Path
) -> None:
    ranks, device, assumed = planned(tmp_path, "--nproc_per_node", "2", device=name)
    assert (ranks, device.name, device.memory) == (2, name, HARDWARE[name].memory)
    assert (
        f"the device is that of --calibration, {name}; its memory is not in the file" in assumed[-1]
    )
    memory = HARDWARE[name].memory - 12345
    _, device, assumed = planned(tmp_path, device=name, memory=memory)
    assert (device.name, device.memory) == (name, memory) and "not in the file" not in assumed[-1]


def test_a_card_that_no_table_has_is_planned_by_the_memory_in_its_file(tmp_path: Path) -> None:
    _, device, _ = planned(tmp_path, device="NVIDIA Unheard Of", memory=40 * GIB)
    assert (device.name, device.memory) == ("NVIDIA Unheard Of", 40 * GIB)
    with pytest.raises(
        ConfigError,
        match="'NVIDIA Unheard Of', which is not known, and does not have its memory; add",
    ):
        planned(tmp_path, device="NVIDIA Unheard Of")
    assert planned(tmp_path, "--device", "48GB", device="NVIDIA Unheard Of")[1].name == "48GB"


def test_the_file_is_asked_before_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "list_local_gpus", lambda: [("NVIDIA H100 80GB HBM3", 80 * GIB)])
    assert planned(tmp_path)[1].name == "rtx4090"
    assert planned(tmp_path, device="cpu")[1].name == "cpu"
    assert planned(tmp_path, "--device", "h100")[1].name == "h100"
    assert planned(tmp_path, "--fit", "2x24GB")[:2] == (2, find_hardware("24GB"))


def test_the_device_that_is_named_and_the_files_disagree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(good()))
    assert (
        main(["plan", *CONFIG, "--calibration", str(file), "--device", "h100", "--sequence", "16"])
        == 2
    )
    said = capsys.readouterr().err
    assert (
        "was measured on 'NVIDIA GeForce RTX 4090', the plan is for h100" in said
        and "leave --device out" in said
    )


@pytest.mark.parametrize("name", sorted(HARDWARE))
@pytest.mark.parametrize("in_the_file", [False, True])
def test_a_size_is_taken_where_the_files_card_has_it(
    name: str, in_the_file: bool, tmp_path: Path
) -> None:
    """Another size is another card: what it takes for a step would be planned with rates that it
    does not have.
    """
    file = tmp_path / "rates.json"
    memory = HARDWARE[name].memory
    file.write_text(
        json.dumps(good() | {"device": name} | ({"memory": memory} if in_the_file else {}))
    )
    assert read_calibration(file, find_hardware(f"{memory / GIB:.2f}GiB")).device == name
    for factor in (0.5, 0.8, 1.25, 2.0):
        size = f"{memory / GIB * factor:.2f}GiB"
        with pytest.raises(
            ConfigError,
            match=f"was measured on '{name}', the plan is for {size}; leave --device out",
        ):
            read_calibration(file, find_hardware(size))


def test_a_cards_sold_size_is_its_own(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    for name, size in {
        "rtx4090": "24GB",
        "a10": "24GB",
        "l40s": "48GB",
        "h100": "80GB",
        "h200": "141GB",
    }.items():
        file.write_text(json.dumps(good() | {"device": name}))
        assert read_calibration(file, find_hardware(size)).device == name


def test_of_a_cpu_the_memory_is_this_machines(tmp_path: Path) -> None:
    assumed = planned(tmp_path, device="cpu")[2][-1]
    assert (
        assumed
        == "the device is that of --calibration, cpu; its memory is this machine's; --device names"
        " another"
    )


@pytest.mark.slow
def test_the_measured_h200_is_planned_as_one(tmp_path: Path) -> None:
    words = [
        *CONFIG,
        "--calibration",
        str(MEASURED),
        "--sequence",
        "16",
        "--json",
        str(tmp_path / "plan.json"),
    ]
    assert call_in_fork(main, ["plan", *words]) == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["device"]["name"] == "h200" and plan["device"]["memory"] == HARDWARE["h200"].memory
    assert (
        plan["time"]["calibrated"]
        and "rates measured on NVIDIA H200 (2026-11-27)" in plan["time"]["error"]
    )


@pytest.mark.parametrize(
    "change", [{"device": 3}, {"version": 0}, {"memory": -1}, {"memory": "much"}]
)
def test_a_broken_file_is_told_in_one_line(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^calibration: '.*rates.json'") as caught:
        planned(tmp_path, **change)
    assert "\n" not in str(caught.value)
