"""The table of devices: its own consistency, spellings, sizes, and errors that name the nearest
device.
"""

import os

import pytest

from recipe_lib.errors import ConfigError
from recipe_lib.plan.hardware import HARDWARE, SHARE_REPORTED, find_hardware, parse_fit
from recipe_lib.units import GIB

# What CUDA calls the cards (torch.cuda.get_device_name), which a calibration file carries.
REPORTED = {
    "Tesla T4": "t4",
    "NVIDIA GeForce RTX 3090": "rtx3090",
    "NVIDIA GeForce RTX 3090 Ti": "rtx3090ti",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 5090": "rtx5090",
    "NVIDIA RTX A5000": "a5000",
    "NVIDIA RTX A6000": "a6000",
    "NVIDIA RTX 5000 Ada Generation": "rtx5000ada",
    "NVIDIA RTX 6000 Ada Generation": "rtx6000ada",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtxpro6000",
    "NVIDIA A10": "a10",
    "NVIDIA A10G": "a10g",
    "NVIDIA L4": "l4",
    "NVIDIA A40": "a40",
    "NVIDIA L40": "l40",
    "NVIDIA L40S": "l40s",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100-PCIE-40GB": "a100-40gb-pcie",
    "NVIDIA A100 80GB PCIe": "a100-80gb-pcie",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
}
# GiB of chips on the cards without error correction, as they are sold.
SOLD = {
    "rtx3090": 24,
    "rtx3090ti": 24,
    "rtx4090": 24,
    "rtx5090": 32,
    "a5000": 24,
    "a6000": 48,
    "a100-40gb": 40,
    "a100-80gb": 80,
    "h100": 80,
    "rtxpro6000": 96,
}


def test_every_card_is_found_by_the_name_that_cuda_reports() -> None:
    assert {find_hardware(reported).name for reported in REPORTED} == set(HARDWARE)
    assert all(find_hardware(reported).name == name for reported, name in REPORTED.items())


def test_rows_are_sound() -> None:
    spellings = [
        name.replace("-", "") for card in HARDWARE.values() for name in (card.name, *card.aliases)
    ]
    for card in HARDWARE.values():
        assert (
            card.flops["bf16"] == card.flops["fp16"] >= card.flops["tf32"] >= card.flops["fp32"] > 0
        ), card.name
        assert 14 * GIB < card.memory < 200 * GIB and 1e11 < card.bandwidth < 1e13, card.name
        assert card.link.bandwidth > card.inter_node_bandwidth > 0 and card.link.latency > 0, (
            card.name
        )
        assert (
            card.architecture in ("sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm120")
            and not card.rates_of
        )
    assert len(set(HARDWARE)) == len(HARDWARE)
    repeated = {name for name in spellings if spellings.count(name) > 1}
    assert not repeated


@pytest.mark.parametrize(
    "spelling", ["rtx4090", "RTX 4090", "4090", "rtx-4090", "nvidia_geforce_rtx_4090"]
)
def test_spellings(spelling: str) -> None:
    assert find_hardware(spelling) is HARDWARE["rtx4090"]


def test_a_size_is_no_more_than_any_card_sold_with_it_has() -> None:
    for name, size in SOLD.items():
        assert find_hardware(f"{size}GB").memory <= HARDWARE[name].memory + 1, name
    assert any(
        HARDWARE[name].memory < (SHARE_REPORTED + 0.001) * size * GIB for name, size in SOLD.items()
    )


def test_sizes() -> None:
    generic = find_hardware("24GB")
    assert generic.rates_of == "rtx3090" and generic.name == "24GB"
    assert generic.flops == HARDWARE["rtx3090"].flops
    assert find_hardware("24 gib").memory == 24 * GIB
    assert find_hardware("23.5GiB").memory == int(23.5 * GIB)
    assert find_hardware("80g").rates_of == "a100-80gb"
    for wrong in ("0GB", "99999GB"):
        with pytest.raises(ConfigError, match="no size of a device's memory"):
            find_hardware(wrong)


def test_the_cpu_is_this_machine() -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert find_hardware("cpu").memory == memory and find_hardware("CPU").architecture == "cpu"


@pytest.mark.parametrize(
    ("typed", "maker"),
    [
        ("rx7900xtx", "AMD"), ("AMD Radeon RX 9070 XT", "AMD"), ("7900 XTX", "AMD"), ("gfx1100", "AMD"),
        ("Instinct MI300X", "AMD"), ("mi210", "AMD"), ("Arc B580", "Intel"), ("Intel Max 1550", "Intel"),
        ("gaudi3", "Intel"), ("M4 Max", "Apple"), ("Apple M2", "Apple"), ("tpu v5e", "Google"),
        ("Ascend 910B", "Huawei"),
    ],
)  # fmt: skip
def test_another_makers_device_is_refused_with_the_reason(typed: str, maker: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"^device: '{typed}' is {maker}'s, .* NVIDIA's GPUs .*; give a size as 24GB",
    ):
        find_hardware(typed)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("rtx4009", "rtx4090"),
        ("RTX 409", "rtx4090"),
        ("a100", "a100-40gb or a100-80gb or a100-40gb-pcie or a100-80gb-pcie"),
        ("a6000x", "a6000"),
        ("rx4090", "rtx4090"),
    ],
)
def test_an_unknown_name_gets_the_nearest(typed: str, meant: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^device: '{typed}' is not known; .*; did you mean {meant}\?$"
    ):
        find_hardware(typed)


def test_a_name_that_is_like_none_gets_the_list() -> None:
    with pytest.raises(ConfigError) as caught:
        find_hardware("quantum\x1b[2J")
    line = str(caught.value)
    assert (
        "did you mean" not in line and "rtx4090" in line and "24GB" in line and "\x1b" not in line
    )


def test_fit() -> None:
    assert parse_fit("4x24GB") == (4, find_hardware("24GB"))
    assert parse_fit("8 x h100") == (8, HARDWARE["h100"])
    assert parse_fit("4xrtx4090") == (4, HARDWARE["rtx4090"])
    assert parse_fit("h200") == (1, HARDWARE["h200"])
    assert parse_fit("24GB")[0] == 1
    for wrong, told in (
        ("0x24GB", "names 0 devices"),
        ("4x", "is not known"),
        ("", "is not known"),
        ("4xfoo", "'foo'"),
    ):
        with pytest.raises(ConfigError, match=told):
            parse_fit(wrong)
