"""`tune doctor`: every finding from a machine that has the fault, the report, and a whole run over
gloo.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from recipe_lib.cli import doctor, doctor_report
from recipe_lib.cli.doctor_report import find_faults, format_report
from recipe_lib.cli.main import main
from recipe_lib.plan.hardware import find_hardware
from recipe_lib.plan.measured import measure_rates as calibrate
from recipe_lib.plan.measured import rates_file as calibration
from recipe_lib.units import GIB, MIB
from tests.cli.commands import ROOT
from tests.cli.machines import build_checked_copies, build_healthy, set_fact
from tests.cli.machines import build_links as collectives
from tests.plan.apart import call_in_fork

ZEROS = ["4100 bytes: 1025 of 1025 words are others"]
HANGS = collectives(failed=["rank 0: all_reduce of 1.00 MiB: not done after 60 s"])
WRONG = collectives(failed=["all_gather of 4.00 KiB: 12 wrong numbers"])
# Where, what is there, the finding, and what its line has to say.
PLANTED: list[tuple[str, Any, str, str]] = [
    (
        "machine/packages/torchao",
        None,
        "package-version",
        "torchao: found none, expected torchao>=0.15,<0.19",
    ),
    (
        "machine/packages/torch",
        "2.9.1",
        "package-version",
        "found 2.9.1, expected torch>=2.11,<2.16; install",
    ),
    ("machine/packages/torch", "2.16.0.dev20261101", "package-version", "found 2.16.0"),
    (
        "failed/torchao",
        "ImportError: no such symbol",
        "torchao",
        "torchao: ImportError: no such symbol; install",
    ),
    (
        "failed/torch",
        "not done after 60 s",
        "torch-broken",
        "torch: not done after 60 s; install it anew",
    ),
    ("steps/torch/gpus/1/free", 20 * GIB, "gpu-in-use", "GPU 1: 3.50 GiB of 23.50 GiB are in use"),
    (
        "steps/rates of GPU 1/bf16",
        1.0e14,
        "gpu-slow",
        "GPU 1: bf16 matmuls at 100 TFLOP/s, another one at 140",
    ),
    (
        "failed/rates of GPU 1",
        "ended with exit code -11",
        "gpu-broken",
        "rates of GPU 1: ended with exit code -11; of `no",
    ),
    (
        "steps/copies from GPU 0 to GPU 1/wrong",
        ZEROS,
        "peer-copies-wrong",
        "1 of 2 ways are wrong; set NCCL_P2P_DIS",
    ),
    ("machine/packages/triton", None, "not-fused", "there is no Triton"),
    ("machine/compiler", None, "not-fused", "there is no a C compiler: kernels are not fused"),
    (
        "failed/copies from GPU 0 to GPU 1",
        "not done after 60 s",
        "peer-copies-hang",
        "NCCL_P2P_DISABLE=1",
    ),
    (
        "links",
        HANGS,
        "collectives-fail",
        "all_reduce of 1.00 MiB: not done after 60 s; of gloo see",
    ),
    (
        "links",
        collectives(failed=["rank 1: meet: ended with exit code -6"]),
        "collectives-fail",
        "rank 1: meet: ended",
    ),
    ("links", WRONG, "collectives-fail", "all_gather of 4.00 KiB: 12 wrong numbers"),
    ("steps/host memory/free", GIB, "host-memory", "1.00 GiB free on this machine"),
    ("machine/shared_memory/free", 64 * MIB, "shared-memory", "/dev/shm: 64.00 MiB is free"),
    (
        "machine/folders/0/fault",
        "Read-only file system",
        "folder-unwritable",
        "output_dir (/runs): Read-only file",
    ),
    ("machine/folders/1/free", GIB, "disk-full", "models (/runs): 1.00 GiB are free"),
    (
        "failed/fp8 matmuls",
        "RuntimeError: unsupported",
        "not-measured",
        "fp8 matmuls: RuntimeError: uns",
    ),
]


def test_of_a_healthy_machine_nothing_is_found() -> None:
    facts = build_healthy()
    assert find_faults(facts) == []
    text = format_report(facts, [])
    assert text.endswith("findings\n  none: all is well\n")
    assert "NVIDIA GeForce RTX 4090, sm_89, 23.50 GiB, 23.00 GiB free" in text
    flat = " ".join(text.split())
    assert "bf16 matmuls 140.0 TFLOP/s, to it 24.00 GB/s, from it 25.00 GB/s" in flat
    assert "int8 matmuls 280.0 TFLOP/s" in flat and "fp8 matmuls 270.0 TFLOP/s" in flat
    assert "2 of 2 arrive whole; 20.00 GB/s to 20.00 GB/s" in text
    # 4096 bytes in 10.4 us: each of two ranks sends all of them in an all-reduce, half of them in
    # an all-gather
    assert re.search(r"4 KiB +10\.4 us +0\.39 GB/s +10\.4 us +0\.20 GB/s", text)


def test_what_computes_the_scans_of_hybrids() -> None:
    facts = build_healthy()
    packages = facts["machine"]["scan_kernels"]

    def find_line() -> str:
        line = next(line for line in format_report(facts, []).splitlines() if "scans of" in line)
        return line.split("hybrids")[1].strip()

    assert find_line().startswith("torch's loops, without the kernels of flash-linear-attention ")
    packages["flash-linear-attention"] = "0.6.0"
    assert find_line().endswith(
        "kernels of flash-linear-attention 0.6.0, and torch's loops without causal-conv1d and"
        " mamba-ssm"
    )
    facts["steps"]["torch"]["gpus"] = []
    assert find_line().endswith("as the kernels of flash-linear-attention 0.6.0 run on a GPU alone")


@pytest.mark.parametrize("share", [None, 0.9])
def test_the_two_rates_of_a_card_are_of_one_product_cold_and_loaded(share: float | None) -> None:
    """The first compares cards, the second is what a plan takes; neither is called the best of
    anything.
    """
    facts = build_healthy()
    facts["steps"]["rates of GPU 0"]["bf16"] = 1.6e14
    del facts["steps"]["int8 matmuls"], facts["steps"]["fp8 matmuls"]
    facts["steps"]["calibration"]["matmul"]["bf16"].insert(
        0, {"shape": [512, 4096, 4096], "rate": 1.9e14}
    )
    facts["steps"]["calibration"]["step_share"] = share
    lines = [line for line in format_report(facts, []).splitlines() if "TFLOP/s" in line]
    assert [re.findall(r"bf16 matmuls (\S+) TFLOP/s", line) for line in lines] == [
        ["160.0"],
        ["141.0"],
        ["140.0"],
    ]
    assert [line.split("  ")[1] for line in lines] == ["GPU 0", "GPU 1", "GPU 0 loaded"]
    assert "for plans" in lines[2] and ("126.0 in steps" in lines[2]) == bool(share)


@pytest.mark.parametrize(
    ("place", "value", "name", "told"), PLANTED, ids=[row[2] for row in PLANTED]
)
def test_a_fault_is_found_and_told_with_its_remedy(
    place: str, value: Any, name: str, told: str
) -> None:
    facts = set_fact(build_healthy(), place, value)
    (found,) = find_faults(facts)
    assert found["name"] == name and told in f"{found['line']}; {found['remedy']}"
    assert found["remedy"] and "\n" not in found["line"] + found["remedy"]
    assert format_report(facts, [found]).endswith(
        f"  {name}: {found['line']}\n    -> {found['remedy']}\n"
    )


def test_every_finding_is_explained() -> None:
    """Each name that the code gives stands in the document's table, and has a machine above."""
    table = (ROOT / "docs" / "doctor.md").read_text().split("## Findings")[1].split("## ")[0]
    faults = set(
        re.findall(
            r"`([\w-]+)`",
            "".join(line.split("|")[1] for line in table.splitlines() if "| `" in line),
        )
    )
    assert faults == {row[2] for row in PLANTED} | {"gpu-unseen", "gpus-unlike"}
    assert set(doctor_report.REMEDIES) == faults


@pytest.mark.parametrize(
    ("cuda", "error", "told"),
    [
        (None, None, "it is built without CUDA; install a"),
        ("13.0", "driver too old", "says: driver too old; inst"),
    ],
)
def test_gpus_that_torch_does_not_see(cuda: str | None, error: str | None, told: str) -> None:
    facts = build_healthy() | {"links": None}
    facts["steps"] = {"torch": facts["steps"]["torch"] | {"gpus": [], "cuda": cuda, "error": error}}
    (found,) = find_faults(facts)
    assert found["name"] == "gpu-unseen" and "the driver lists 2 GPUs" in found["line"]
    assert told in f"{found['line']}; {found['remedy']}"


def faked(found: dict[str, Any]) -> Any:
    """Steps that give what is said, in place of a GPU's."""
    return lambda rank, folder: [(name, lambda value=value: value) for name, value in found.items()]


def test_what_two_cards_give_is_told_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    """Two cards whose copies deliver zeros: NCCL stands still, so that no links are written."""
    facts, tried = build_healthy(), []
    steps = facts["steps"] | build_checked_copies(wrong=ZEROS)
    outcomes = [HANGS, collectives()]

    def measured(ranks: int, on_gpu: bool) -> dict[str, Any]:
        tried.append((ranks, on_gpu))
        return outcomes[len(tried) - 1]

    monkeypatch.setattr(doctor, "describe_machine", lambda folders: facts["machine"])
    monkeypatch.setattr(doctor, "list_device_steps", faked(steps))
    monkeypatch.setattr(doctor, "measure_links", measured)
    path = tmp_path / "rates.json"
    assert main(["doctor", "--json", "--write", str(path)]) == doctor.HAS_FINDINGS
    assert tried == [(2, True)]
    told = json.loads(capsys.readouterr().out)
    assert not told["healthy"] and told["steps"] == steps
    assert [each["name"] for each in told["findings"]] == ["peer-copies-wrong", "collectives-fail"]
    assert calibration.read_calibration(path, find_hardware("rtx4090")).links is None
    assert main(["doctor", "--json", "--write", str(path)]) == doctor.HAS_FINDINGS
    capsys.readouterr()
    read = calibration.read_calibration(path, find_hardware("rtx4090"))
    assert read.links and read.links.points["all_gather"][-1] == (2**19, 1e-5 + 2**20 / 1e10)
    assert read.matmul["fp8"][0][1] == 2.7e14 and read.copy_to_host == 2.5e10
    assert main(["doctor", "--nproc_per_node", "3"]) == 2
    assert "found 3, expected at most 2, the GPUs that torch sees" in capsys.readouterr().err


def test_advice_changes_no_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Of cards that are not alike, and of a machine without a compiler."""
    facts = set_fact(build_healthy(), "machine/compiler", None)
    steps = facts["steps"]
    steps["torch"]["gpus"][1]["name"] = "NVIDIA GeForce RTX 3090"
    steps["rates of GPU 1"]["bf16"] = 1.0e14
    monkeypatch.setattr(doctor, "describe_machine", lambda folders: facts["machine"])
    monkeypatch.setattr(doctor, "list_device_steps", faked(steps))
    monkeypatch.setattr(doctor, "measure_links", lambda ranks, on_gpu: collectives())
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["healthy"] and [finding["name"] for finding in told["findings"]] == [
        "not-fused",
        "gpus-unlike",
    ]


def test_more_ranks_than_cores_can_bear_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    facts = build_healthy()
    seen = facts["steps"]["torch"] | {"gpus": []}
    monkeypatch.setattr(doctor, "describe_machine", lambda folders: facts["machine"])
    monkeypatch.setattr(doctor, "list_device_steps", faked({"torch": seen}))
    tried = []
    monkeypatch.setattr(
        doctor, "measure_links", lambda ranks, on_gpu: tried.append(ranks) or collectives()
    )
    most = 4 * len(os.sched_getaffinity(0))
    main(["doctor", "--nproc_per_node", str(most)])
    assert tried == [most]
    capsys.readouterr()
    assert main(["doctor", "--nproc_per_node", str(most + 1)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        f"--nproc_per_node: found {most + 1}, expected at most {most}, 4 for each core, as there is"
        " no GPU" in line
    )
    assert tried == [most]


def test_a_torch_that_does_not_start_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "describe_machine", lambda folders: build_healthy()["machine"])
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["doctor", "--write", str(tmp_path / "rates.json")]) == doctor.HAS_FINDINGS
    told = capsys.readouterr()
    assert "torch-broken: torch: ModuleNotFoundError" in told.out
    assert "not written, as the device's rates could not be measured" in told.err and not list(
        tmp_path.iterdir()
    )


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little is written, sent and computed, torchao (seconds) is not imported, and no disk is too
    full.
    """
    import torch

    if torch.cuda.is_available():
        pytest.skip("on a GPU this would be the real thing")
    monkeypatch.setattr(calibrate, "CPU_SIZES", (4096, 65536))
    monkeypatch.setattr(calibrate, "ROUNDS", 2)
    monkeypatch.setattr(doctor, "import_torchao", lambda: "0.18.0")
    monkeypatch.setattr(
        doctor,
        "find_version",
        lambda name: {"torch": "2.13.0", "torchao": "0.18.0"}.get(name),
    )
    for name in ("MIN_DISK", "MIN_HOST_MEMORY"):
        monkeypatch.setattr(doctor_report, name, 0)


@pytest.mark.slow
def test_what_doctor_measures_over_gloo_a_plan_uses(
    quick: None, tmp_path: Path, capsys: Any
) -> None:
    """From the measurement to the planned time of a step, all of it real."""
    path, folder = tmp_path / "machine.json", tmp_path / "out"
    code = main(
        ["doctor", "--nproc_per_node", "2", "--output_dir", str(folder), "--write", str(path)]
    )
    told = capsys.readouterr()
    assert code == 0, told.out
    assert (
        "2 ranks on the CPU, over gloo (which says nothing of GPUs)" in told.out
        and f"{folder}, " in told.out
    )
    assert f"`tune plan --calibration {path}` uses the file" in told.err
    assert list(tmp_path.iterdir()) == [path]  # what the folder was tried with is gone
    values = json.loads(path.read_text())
    assert [point["bytes"] for point in values["links"]["all_gather"]] == [4096, 65536]

    def planned(file: Path) -> float:
        words = [
            "--nproc_per_node",
            "2",
            "--device",
            "cpu",
            "--sequence",
            "max",
            "--json",
            str(tmp_path / "plan.json"),
        ]
        assert (
            call_in_fork(
                main, ["plan", "--config", "demo/full", *words, "--calibration", str(file)]
            )
            == 0
        )
        return json.loads((tmp_path / "plan.json").read_text())["time"]["communication"]

    for operation in calibrate.OPERATIONS:
        for point in values["links"][operation]:
            point["seconds"] *= 1000
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps(values))
    assert planned(slow) == pytest.approx(1000 * planned(path), rel=1e-6)


@pytest.mark.slow
def test_wrong_numbers_and_ranks_that_stand_still(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of a backend that scatters zeros, and of one in which rank 1 never comes."""
    import time

    import torch.distributed as dist

    monkeypatch.setattr(calibrate, "CPU_SIZES", (4096,))
    monkeypatch.setattr(dist, "reduce_scatter_tensor", lambda result, whole: result.zero_())
    found = doctor.measure_links(2, on_gpu=False)
    assert [row["operation"] for row in found["points"]] == [
        "all_reduce",
        "all_gather",
        "reduce_scatter",
    ]
    # each rank's 512 numbers, before and after; no sum is zero
    assert found["failed"] == [f"reduce_scatter of 4.00 KiB: {2 * 2 * 512} wrong numbers"]

    original = calibrate.measure_collective

    def late(operation: str, size: int, rank: int, **settings: Any) -> dict[str, Any]:
        if rank == 1 and operation == "all_gather":
            time.sleep(60)
        return original(operation, size, rank, **settings)

    monkeypatch.setattr(calibrate, "measure_collective", late)
    monkeypatch.setattr(doctor, "STEP_SECONDS", 4.0)
    found = doctor.measure_links(2, on_gpu=False)
    assert found["failed"][0] == "rank 0: all_gather of 4.00 KiB: not done after 4 s"
    assert [row["operation"] for row in found["points"]] == ["all_reduce"]
    (line,) = find_faults(build_healthy() | {"links": found})
    assert line["name"] == "collectives-fail" and "/etc/hosts" in line["remedy"]


def test_the_benchmark_keeps_what_was_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from benchmarks import gpu_check, gpu_doctor

    facts = build_healthy()
    monkeypatch.setattr(gpu_doctor.doctor, "gather_facts", lambda arguments: facts)
    monkeypatch.setattr(gpu_doctor, "list_local_gpus", lambda: [])
    assert gpu_check.main(["doctor", "--output", str(tmp_path)]) == 0
    facts["steps"]["torch"]["gpus"] = []
    facts["links"]["failed"] = ["rank 0: meet: RuntimeError"]
    facts["machine"]["listed_gpus"] = []
    assert gpu_check.main(["doctor", "--output", str(tmp_path)]) == doctor.HAS_FINDINGS
    names = ["gpu-doctor-2x-nvidia-geforce-rtx-4090", "gpu-doctor-dry-run-cpu"]
    endings = ["-rates.json", ".json", ".md"]
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(
        a + b for a in names for b in endings
    )
    assert "Nothing was measured on a GPU" in (tmp_path / f"{names[1]}.md").read_text()
    assert "Nothing was measured" not in (tmp_path / f"{names[0]}.md").read_text()
