"""Adapters compiled by inductor are the formula; what docs/upstream reports of it is what torch still does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from recipe_lib.adapters.layers import AdaptedLinear, AdapterSettings
from tests.distributed.ranks import in_a_fork

PAGE = Path(__file__).parents[2] / "docs" / "upstream" / "add_alpha.md"
SCALING = 3.0


def adapted() -> AdaptedLinear:
    """With a B that is not zero, in float64."""
    torch.manual_seed(0)
    settings = AdapterSettings(rank=4, scaling=SCALING, dropout=0.0, dora=False, dtype=torch.float64)
    module = AdaptedLinear(nn.Linear(24, 16, dtype=torch.float64), settings)
    for part in (module.lora_A, module.lora_B):
        part.weight = nn.Parameter(torch.randn(part.weight.shape, dtype=torch.float64))
    return module


def by_formula(module: AdaptedLinear, hidden: Tensor) -> Tensor:
    weight = module.weight + SCALING * module.lora_B.weight @ module.lora_A.weight
    return hidden @ weight.t() + module.bias


@pytest.mark.slow
@in_a_fork
def test_compiled_adapters_are_the_formula() -> None:
    """Of flat tokens, as ranks that share matrices have them: the sum is then one of two matrix products."""
    module = adapted()
    hidden = torch.randn(5, 24, dtype=torch.float64)
    trained = [parameter for parameter in module.parameters() if parameter is not module.weight]
    found, wanted = torch.compile(module, fullgraph=True)(hidden), by_formula(module, hidden)
    assert torch.allclose(found, wanted, rtol=1e-12)
    weights = torch.randn(5, 16, dtype=torch.float64)
    pairs = zip(*(torch.autograd.grad((each * weights).sum(), trained) for each in (found, wanted)), strict=True)
    assert all(torch.allclose(ours, theirs, rtol=1e-10) for ours, theirs in pairs)


@pytest.mark.slow
def test_inductor_does_what_is_reported() -> None:
    done = subprocess.run(
        [sys.executable, str(PAGE.with_suffix(".py"))], capture_output=True, text=True, timeout=180, check=True
    )
    (printed,) = re.findall(r"It printed:\n\n```text\n(.*?)\n```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    version, *found = done.stdout.splitlines()
    assert found == printed.splitlines()[1:], f"{version} does otherwise: note it in {PAGE}"
