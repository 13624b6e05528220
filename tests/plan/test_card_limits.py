"""What a card cannot compute is refused before it raises, or replaced: each row of docs/doctor.md,
by architecture.
"""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from recipe_lib.config.precision import CAPABILITY_REQUIREMENTS
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.errors import ConfigError
from recipe_lib.parallel import World
from recipe_lib.plan.build_plan import simulate_rank
from recipe_lib.training.run import check_capability
from tests.house.files import ROOT
from tests.plan.apart import build_settings, call_in_fork

ARCHITECTURES = ("sm70", "sm75", "sm80", "sm86", "sm89", "sm90", "sm120")
PAGE = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")


def operators(architecture: str, *overrides: str) -> list[str] | str:
    """Names of a step's operators, or the line that refuses it."""
    recipe, cfg, wanted = build_settings(
        "demo/full", 1, "device=auto", "batch_size=2", "max_seq_len=64", *overrides
    )
    wanted = replace(wanted, hardware=replace(wanted.hardware, architecture=architecture))
    try:
        return [op.name for op in simulate_rank(recipe, cfg, wanted, 0).trace.ops]
    except ConfigError as error:
        return str(error)


def each(limit: tuple[int, int], *overrides: str) -> dict[str, list[str] | str]:
    """For the newest architecture below the limit, the oldest from it on, and the newest of all."""
    numbers = [int(architecture.removeprefix("sm")) for architecture in ARCHITECTURES]
    least = 10 * limit[0] + limit[1]
    wanted = {
        max(one for one in numbers if one < least),
        min(one for one in numbers if one >= least),
        numbers[-1],
    }
    return {f"sm{one}": operators(f"sm{one}", *overrides) for one in sorted(wanted)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "limit", CAPABILITY_REQUIREMENTS, ids=lambda limit: f"{limit.key}={limit.value}"
)
def test_each_limit_is_refused_below_it_and_planned_from_it_on(limit: Any) -> None:
    override = f"{limit.key}={limit.value}"
    more = ("dtype=bf16",) if limit.value == "fp8" else ()
    found = call_in_fork(each, limit.capability, override, *more)
    least = f"{limit.capability[0]}.{limit.capability[1]}"
    assert f"| `{override}` | {least} |" in PAGE
    for architecture, result in found.items():
        number = int(architecture.removeprefix("sm"))
        refused = number < 10 * limit.capability[0] + limit.capability[1]
        named = (
            isinstance(result, str)
            and f"expected a GPU of compute capability {least} or more" in result
        )
        assert named == refused, (architecture, result if refused else "")
        assert isinstance(result, str) == (refused or (bool(more) and number < 80))


@pytest.mark.slow
def test_packed_rows_take_a_mask_where_the_flash_kernel_is_missing() -> None:
    assert "packing and sliding windows through the varlen flash kernel | 8.0, in bf16 |" in PAGE
    flash = call_in_fork(operators, "sm80", "dtype=bf16", "data.packing=true")
    mask = call_in_fork(operators, "sm75", "data.packing=true")
    assert "torch_attn::_varlen_attn" in flash
    assert "torch_attn::_varlen_attn" not in mask
    assert "aten::_scaled_dot_product_efficient_attention" in mask
    assert not any(name.startswith("aten::_scaled_dot_product_flash") for name in mask)


def test_the_table_has_no_row_more() -> None:
    table = PAGE.partition("## What a card cannot compute")[2].partition("\n## ")[0]
    assert (
        len(re.findall(r"^\| [^|]+ \| \d", table, re.MULTILINE)) == len(CAPABILITY_REQUIREMENTS) + 1
    )


def test_a_run_is_refused_on_such_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    class Turing:
        kernels = "cuda"

        def get_device_capability(self, device: Any) -> tuple[int, int]:
            return 7, 5

        def get_device_name(self, device: Any) -> str:
            return "Tesla T4"

    device = torch.device("cuda", 0)
    world = World(0, 1, 0, device, None, 0, 1)  # type: ignore[arg-type]
    monkeypatch.setattr(torch, "get_device_module", lambda device: Turing())
    with pytest.raises(
        ConfigError, match=r"dtype: found bf16 for Tesla T4 of compute capability 7\.5"
    ):
        check_capability(FullFinetuneConfig(dtype="bf16"), world)
    check_capability(FullFinetuneConfig(dtype="fp32"), world)
