"""Adapters compiled by inductor are the formula; what docs/upstream reports of it is what torch
still does.
"""

import io
import re
import runpy
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from recipe_lib.adapters.layers import AdaptedLinear, AdapterSettings
from tests.distributed.ranks import run_in_fork

PAGE = Path(__file__).parents[2] / "docs" / "upstream" / "add_alpha.md"
SCALING = 3.0


def adapted() -> AdaptedLinear:
    """With a B that is not zero, in float64."""
    torch.manual_seed(0)
    settings = AdapterSettings(
        rank=4, scaling=SCALING, dropout=0.0, dora=False, dtype=torch.float64
    )
    module = AdaptedLinear(nn.Linear(24, 16, dtype=torch.float64), settings)
    for part in (module.lora_A, module.lora_B):
        part.weight = nn.Parameter(torch.randn(part.weight.shape, dtype=torch.float64))
    return module


def by_formula(module: AdaptedLinear, hidden: Tensor) -> Tensor:
    weight = module.weight + SCALING * module.lora_B.weight @ module.lora_A.weight
    return hidden @ weight.t() + module.bias


@pytest.mark.slow
@run_in_fork
def test_inductor_does_what_is_reported_and_compiled_adapters_are_the_formula() -> None:
    printed = io.StringIO()
    with redirect_stdout(printed):
        runpy.run_path(str(PAGE.with_suffix(".py")))
    (reported,) = re.findall(
        r"It printed:\n\n```text\n(.*?)\n```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    version, *lines = printed.getvalue().splitlines()
    assert lines == reported.splitlines()[1:], f"{version} does otherwise: note it in {PAGE}"
    # Of flat tokens, as ranks that share matrices have them: the sum is then one of two matrix
    # products.
    module = adapted()
    hidden = torch.randn(5, 24, dtype=torch.float64)
    with torch.no_grad():
        found = torch.compile(module, fullgraph=True)(hidden)
    assert torch.allclose(found, by_formula(module, hidden), rtol=1e-12)
