"""States of few bits, master weights and momenta: saved and resumed on any number of ranks, bit for
bit.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe_lib.checkpoint.resumable_state import find_state, load_state, save_state
from recipe_lib.config.schema import OptimizerConfig
from recipe_lib.errors import CheckpointError
from recipe_lib.optim.optimizers import build_optimizer
from tests.checkpoint.tiny import (
    build_tiny_model,
    build_tiny_spec,
    build_tiny_world,
    compute_fingerprint,
    train,
)
from tests.distributed.ranks import run_ranks
from tests.selection import mark_slow_except

CFG = OptimizerConfig(lr=0.01, weight_decay=0.1)
# Rows of 128 and 64 numbers; 31 rows of the embedding leave its parts uneven.
SPEC = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "head_dim": 32,
    "vocab_size": 33,
}
CASES: dict[str, tuple[OptimizerConfig, torch.dtype]] = {
    "8 bits": (replace(CFG, state_bits=8), torch.float32),
    "4 bits": (replace(CFG, state_bits=4), torch.bfloat16),
    "master weights": (replace(CFG, master_weights=True, state_bits=8), torch.bfloat16),
    "by chance": (replace(CFG, stochastic_rounding=True, state_bits=32), torch.bfloat16),
    "bf16 by chance": (replace(CFG, stochastic_rounding=True), torch.bfloat16),
    "master weights in fp32": (replace(CFG, master_weights=True), torch.bfloat16),
    "master weights, 16 bits": (replace(CFG, master_weights=True, state_bits=16), torch.bfloat16),
    "muon": (replace(CFG, name="muon", state_bits=4, stochastic_rounding=True), torch.bfloat16),
}
OF_OTHER_KINDS = ["bf16 by chance", "master weights, 16 bits", "muon"]


def model_and_optimizer(world: Any, case: str, seed: int | None) -> tuple[Any, Any]:
    cfg, dtype = CASES[case]
    model = build_tiny_model(world, seed, dtype, build_tiny_spec(**SPEC))
    return model, build_optimizer(cfg, model.named_parameters(), world.device, seed=7)


def step_at_random(model: Any, optimizer: Any, step: int) -> None:
    """A step with gradients that are the same on any number of ranks, to the bit."""
    from recipe_lib.ops.dtensor_shards import locate_local_part

    for number, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(1000 * step + number)
        whole = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        local, start = locate_local_part(parameter.detach())
        parameter.grad = torch.zeros_like(parameter)
        places = tuple(slice(at, at + size) for at, size in zip(start, local.shape, strict=True))
        locate_local_part(parameter.grad)[0].copy_(whole[places])
    optimizer.step()
    optimizer.zero_grad()


def begin(roots: dict[str, Path], steps: int = 2) -> dict[str, str]:
    """Trains each case and saves it; what everything is then, by case. Collective."""
    found = {}
    for case, root in roots.items():
        with build_tiny_world() as world:
            model, optimizer = model_and_optimizer(world, case, 0)
            train(model, optimizer, 1)
            for step in range(1, steps):
                step_at_random(model, optimizer, step)
            save_state(root, steps, model, optimizer, {"step": steps}, world, keep=9)
            found[case] = compute_fingerprint(model, optimizer)
    return found


def go_on(roots: dict[str, Path]) -> dict[str, tuple[str, str]]:
    """Loads each case into a model of NaNs; what everything is then, and after a step that is saved
    too. Collective.
    """
    found = {}
    for case, root in roots.items():
        with build_tiny_world() as world:
            model, optimizer = model_and_optimizer(world, case, None)
            path = find_state(root, "latest", world)
            assert path is not None
            step = load_state(path, model, optimizer, world)["step"]
            loaded = compute_fingerprint(model, optimizer)
            step_at_random(model, optimizer, step)
            save_state(root, step + 1, model, optimizer, {"step": step + 1}, world, keep=9)
            found[case] = (loaded, compute_fingerprint(model, optimizer))
    return found


@pytest.mark.parametrize(
    "cases", mark_slow_except([["8 bits"], OF_OTHER_KINDS], [["8 bits"]]), ids=["8 bits", "others"]
)
def test_two_ranks_one_rank_two_ranks_bit_for_bit(tmp_path: Path, cases: list[str]) -> None:
    """What is loaded is what was saved; and a step further the number of ranks still shows
    nowhere.
    """
    roots = {case: tmp_path / case.replace(" ", "-") for case in cases}
    saved = run_ranks(begin, 2, roots)
    assert saved[0] == saved[1]
    one = go_on(roots)
    assert {case: loaded for case, (loaded, _) in one.items()} == saved[0]
    two = run_ranks(go_on, 2, roots)
    assert {case: tuple(found)[0] for case, found in two[0].items()} == {
        case: after for case, (_, after) in one.items()
    }
    again = run_ranks(go_on_from, 2, roots, 2)
    assert again[0] == {
        case: after for case, (_, after) in one.items()
    }  # the step that one rank did, on two


def go_on_from(roots: dict[str, Path], step: int) -> dict[str, str]:
    """What everything is after a step from the state of that step. Collective."""
    found = {}
    for case, root in roots.items():
        with build_tiny_world() as world:
            model, optimizer = model_and_optimizer(world, case, None)
            path = find_state(root, str(root / f"step_{step}"), world)
            assert path is not None
            load_state(path, model, optimizer, world)
            step_at_random(model, optimizer, step)
            found[case] = compute_fingerprint(model, optimizer)
    return found


OTHERS = {
    "fewer bits": (
        "8 bits",
        replace(CFG, state_bits=4),
        "is uint8 [33, 128], this run's is uint8 [33, 64]",
    ),
    "no bits": ("8 bits", CFG, "is uint8 [33, 128], its parameter float32 [33, 128]"),
    "no master weights": (
        "master weights",
        replace(CFG, state_bits=8),
        "master of model.embed_tokens.weight, which",
    ),
    "torch's": ("by chance", CFG, "is float32 [33, 128], its parameter bfloat16 [33, 128]"),
    "fp32 states for bf16": (
        "master weights, 16 bits",
        replace(CFG, master_weights=True),
        (
            "is bfloat16 [33, 128], this run's is float32 [33, 128]; resume with"
            " optimizer.state_bits=16"
        ),
    ),
    "adamw for muon": (
        "muon",
        replace(CFG, state_bits=4),
        "holds optimizer state momentum_buffer_codes of",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_optimizers_state_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    case, cfg, words = OTHERS[name]
    begin({case: tmp_path}, 1)
    with build_tiny_world() as world:
        model = build_tiny_model(world, None, CASES[case][1], build_tiny_spec(**SPEC))
        optimizer = build_optimizer(cfg, model.named_parameters(), world.device)
        with pytest.raises(CheckpointError) as raised:
            load_state(tmp_path / "step_1", model, optimizer, world)
    line = str(raised.value)
    assert words in line and "\n" not in line and "optimizer.state_bits" in line


def test_what_such_a_line_says_resumes(tmp_path: Path) -> None:
    """A run saved without state_bits, when its states were of its dtype, goes on with those 16
    bits.
    """
    case = "master weights, 16 bits"
    with build_tiny_world() as world:
        model, optimizer = model_and_optimizer(world, case, 0)
        train(model, optimizer, 1)
        optimizer.param_groups[0]["state_bits"] = None
        save_state(tmp_path, 1, model, optimizer, {}, world, keep=1)
        expected = compute_fingerprint(model, optimizer)
        model, optimizer = model_and_optimizer(world, case, None)
        load_state(tmp_path / "step_1", model, optimizer, world)
        assert compute_fingerprint(model, optimizer) == expected


def test_torchs_state_is_refused_by_ours(tmp_path: Path) -> None:
    with build_tiny_world() as world:
        model = build_tiny_model(world, 0, spec=build_tiny_spec(**SPEC))
        optimizer = build_optimizer(CFG, model.named_parameters(), world.device)
        train(model, optimizer, 1)
        save_state(tmp_path, 1, model, optimizer, {}, world, keep=1)
        model, optimizer = model_and_optimizer(world, "8 bits", None)
        with pytest.raises(
            CheckpointError,
            match=r"which this run's optimizer does not keep; resume with .*state_bits",
        ):
            load_state(tmp_path / "step_1", model, optimizer, world)


def test_states_without_a_step_yet_are_told_apart_too(tmp_path: Path) -> None:
    with build_tiny_world() as world:
        model, optimizer = model_and_optimizer(world, "8 bits", 0)
        save_state(tmp_path, 0, model, optimizer, {}, world, keep=1)
        plain = build_optimizer(CFG, model.named_parameters(), world.device)
        with pytest.raises(
            CheckpointError,
            match=r"by another optimizer \(it has state_bits\); .*state_bits, master_",
        ):
            load_state(tmp_path / "step_0", model, plain, world)
