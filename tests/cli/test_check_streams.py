"""`tune plan --check-streams` of a shipped recipe, and of one of the user's own that races and
waits.
"""

from pathlib import Path

import pytest

from recipe_lib.cli.plan_request import read_arguments
from recipe_lib.errors import ConfigError
from tests.cli.commands import ROOT, tune_forked

RECIPE = ROOT / "recipes" / "full_finetune_distributed.py"
STEP = """        all_reduce_gradients(self.model, self.parallel, self.world)
"""
CHANGED = """        all_reduce_gradients(self.model, self.parallel, self.world)
        if loss.item() > 100:
            raise ValueError("too much")
        module = torch.get_device_module(self.device)
        self.side = module.Stream()
        copies = torch.zeros(1000, device=self.device)
        with module.stream(self.side):
            copies.mul_(2)
"""


def check(*words: str) -> tuple[int, str]:
    done = tune_forked("plan", "--check-streams", *words, "device=auto")
    return done.returncode, done.stdout


@pytest.mark.slow
def test_a_shipped_recipe_is_in_order() -> None:
    code, said = check("--nproc_per_node", "2", "demo/full", "memory.activation_offload=true")
    assert code == 0, said
    first, second, third, last = said.splitlines()
    assert first.startswith("rank 0: ") and first.endswith("in order")
    assert second == "rank 0: the host waits for the device 1 time a step"
    assert "recipe_lib/training/loop.py:" in third
    assert last.startswith("collectives: ") and last.endswith("meet, without a circle of waits")


@pytest.mark.slow
def test_the_lines_of_a_recipe_that_races_and_waits_are_reported(tmp_path: Path) -> None:
    text = RECIPE.read_text(encoding="utf-8")
    assert STEP in text
    mine = tmp_path / "mine.py"
    mine.write_text(text.replace(STEP, CHANGED), encoding="utf-8")
    lines = mine.read_text(encoding="utf-8").splitlines()
    reads, writes = (
        1 + next(at for at, line in enumerate(lines) if word in line)
        for word in (".item()", ".mul_(2)")
    )
    code, said = check(str(mine), "--config", "demo/full")
    assert code == 2, said
    assert f"1 x .item() at {mine}:{reads}" in said
    assert "2 times a step, 1 more than the one for the numbers that are logged" in said
    assert f"aten::mul_ on stream 1 ({mine}:{writes}) reads what aten::zeros on stream 0" in said


def test_it_makes_no_plan() -> None:
    for option in (["--json", "x.json"], ["--search"], ["--full"]):
        try:
            read_arguments(["--check-streams", "demo/full", *option])
        except ConfigError as error:
            assert (
                str(error)
                == f"--check-streams: follows streams and makes no plan; leave {option[0]} out"
            )
        else:
            raise AssertionError(option)
