"""AdamW with states in 4, 8, 16 and 32 bits, master weights and rounding by chance: against
torchao's optimizers, against AdamW written out in fp64, and on several ranks against one.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recipe_lib.config.schema import OptimizerConfig
from recipe_lib.errors import ConfigError
from recipe_lib.optim import low_bit_adamw as own_adamw
from recipe_lib.optim.optimizers import (
    build_optimizer,
    count_optimizer_state_bytes,
    set_learning_rate,
)
from tests.distributed.ranks import run_ranks
from tests.torchao_oracle import get_low_bit_adamw_classes
from tests.training.cut import Cut, place_model, shard_like

CPU = torch.device("cpu")
CFG = OptimizerConfig(lr=1e-2, weight_decay=0.1, betas=[0.9, 0.95], eps=1e-8)
# Of them in blocks: the first four, one of which has blocks of 64 numbers.
SHAPES = {
    "a": (32, 256),
    "b": (2, 9, 512),
    "c": (65, 192),
    "g": (34, 512),
    "d": (7, 5),
    "e": (600,),
    "f": (),
}
BLOCKED = {"a", "b", "c", "g"}


def weights(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in SHAPES.items()
    }


def gradient(name: str, step: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + ord(name))
    return torch.randn(SHAPES[name], generator=generator).to(dtype)


def train(
    optimizer: Any, params: dict[str, nn.Parameter], steps: int = 5, rate: float = CFG.lr
) -> None:
    for step in range(steps):
        for name, parameter in params.items():
            parameter.grad = gradient(name, step, parameter.dtype)
        set_learning_rate(optimizer, rate)
        optimizer.step()


def trained(
    cfg: OptimizerConfig, dtype: torch.dtype, steps: int = 5
) -> tuple[Any, dict[str, nn.Parameter]]:
    params = weights(dtype)
    optimizer = build_optimizer(cfg, params.items(), CPU)
    train(optimizer, params, steps, cfg.lr)
    return optimizer, params


def in_fp64(
    cfg: OptimizerConfig, dtype: torch.dtype, rounded: Callable[[Tensor], Tensor], steps: int = 5
) -> Any:
    """Weights and means of AdamW, computed in fp64; what is kept goes through `rounded` each
    step.
    """
    found = {}
    beta1, beta2 = cfg.betas
    for name, value in weights(dtype).items():
        at, mean, square = (
            value.detach().double(),
            torch.zeros(()).double(),
            torch.zeros(()).double(),
        )
        for step in range(1, steps + 1):
            slope = gradient(name, step - 1, dtype).double()
            mean, square = (
                beta1 * mean + (1 - beta1) * slope,
                beta2 * square + (1 - beta2) * slope**2,
            )
            change = mean / (1 - beta1**step) / ((square / (1 - beta2**step)).sqrt() + cfg.eps)
            at = at * (1 - cfg.lr * cfg.weight_decay) - cfg.lr * change
            mean, square = rounded(mean), rounded(square)
        found[name] = (at, mean, square)
    return found


@pytest.fixture(scope="module")
def theirs() -> Any:
    return get_low_bit_adamw_classes()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
def test_steps_are_torchaos(theirs: Any, bits: int, dtype: torch.dtype) -> None:
    """Codes and scales to the bit, where the blocks are the same; weights to the order of two
    products.

    In bf16 torchao keeps small parameters' states in bf16, we in fp32: these are not compared. Nor
    are numbers whose second moment torchao has rounded to zero in 8 bits, which ours never is.
    """
    ours, params = trained(replace(CFG, state_bits=bits), dtype, 10)
    others = weights(dtype)
    optimizer = theirs[bits](
        others.values(), lr=CFG.lr, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8
    )
    same = {name: torch.ones(shape, dtype=torch.bool) for name, shape in SHAPES.items()}
    torch.compiler.set_stance("force_eager")
    try:
        for step in range(10):
            for name, parameter in others.items():
                parameter.grad = gradient(name, step, dtype)
            optimizer.step()
            for name in BLOCKED if bits == 8 else ():
                codes = getattr(optimizer.state[others[name]]["exp_avg_sq"], "codes", None)
                if codes is not None:
                    same[name] &= codes.view(SHAPES[name]) > 0
    finally:
        torch.compiler.set_stance("default")
    for name in ("a", "b", "g") if dtype == torch.bfloat16 else ("a", "b", "g", "d", "e", "f"):
        tolerance = 1e-6 if dtype == torch.float32 else 2**-7
        kept = same[name]
        assert kept.double().mean() > 0.998
        torch.testing.assert_close(
            params[name][kept], others[name][kept], rtol=tolerance, atol=1e-6
        )
        if name in BLOCKED:
            alike = (
                kept if bits == 8 else kept.unflatten(-1, (-1, 2)).all(-1)
            )  # two codes in a byte
            for key in ("exp_avg", "exp_avg_sq"):
                codes, expected = (
                    ours.state[params[name]][f"{key}_codes"],
                    optimizer.state[others[name]][key],
                )
                assert torch.equal(codes[alike], expected.codes.view(codes.shape)[alike])
                assert torch.equal(
                    ours.state[params[name]][f"{key}_scales"].flatten(), expected.scale
                )


@pytest.mark.parametrize(("bits", "dtype"), [(16, torch.float32), (32, torch.bfloat16)])
def test_states_of_another_type_than_the_weights(bits: int, dtype: torch.dtype) -> None:
    kept = torch.bfloat16 if bits == 16 else torch.float32
    optimizer, params = trained(replace(CFG, state_bits=bits), dtype, 1)
    for name, (value, mean, square) in in_fp64(CFG, dtype, lambda numbers: numbers, 1).items():
        torch.testing.assert_close(
            params[name].double(), value, rtol=2**-8 if bits == 32 else 1e-6, atol=1e-8
        )
        state = optimizer.state[params[name]]
        assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype, state["step"]) == (kept, kept, 1)
        for key, expected in (("exp_avg", mean), ("exp_avg_sq", square)):
            torch.testing.assert_close(
                state[key].double(), expected, rtol=2**-8 if bits == 16 else 1e-6, atol=1e-8
            )


def test_bf16_states_are_rounded_once_a_step() -> None:
    """After several steps they are what rounding to bf16 at the end of each leaves, but for rare
    ties.
    """
    _, params = trained(replace(CFG, state_bits=16), torch.float32)
    for name, (value, *_) in in_fp64(
        CFG, torch.float32, lambda numbers: numbers.bfloat16().double()
    ).items():
        torch.testing.assert_close(params[name].double(), value, rtol=1e-4, atol=2e-5)


def test_master_weights_go_where_fp32_weights_go() -> None:
    """Steps far smaller than a bit of bf16 add up, which in bf16 alone they do not; the weights are
    their rounding.
    """
    small = replace(CFG, lr=1e-5, weight_decay=0.0)
    optimizer, params = trained(
        replace(small, master_weights=True, state_bits=32), torch.bfloat16, 20
    )
    _, plain = trained(small, torch.bfloat16, 20)
    expected = in_fp64(small, torch.bfloat16, lambda numbers: numbers, 20)
    start = weights(torch.bfloat16)
    for name, parameter in params.items():
        master = optimizer.state[parameter]["master"]
        assert master.dtype == torch.float32 and torch.equal(master.bfloat16(), parameter)
        torch.testing.assert_close(master.double(), expected[name][0], rtol=1e-6, atol=1e-8)
    moved = (optimizer.state[params["a"]]["master"] - start["a"].float()).abs().mean()
    assert moved > 2e-5  # some 20 steps of 1e-5, not all in one direction
    assert (plain["a"] == start["a"]).double().mean() > 0.9


def test_rounding_by_chance_lets_small_steps_add_up_on_average() -> None:
    """The mean over a parameter's elements goes where fp32 weights go: 50 steps of 1e-4 down from
    1.

    A step of s between numbers that are g = 2^-8 apart has a variance of at most g s; 5 standard
    deviations of the mean over 8192 elements are allowed.
    """
    moved = {}
    for by_chance in (False, True):
        parameter = nn.Parameter(torch.ones(32, 256, dtype=torch.bfloat16))
        cfg = OptimizerConfig(lr=1e-4, stochastic_rounding=by_chance)
        optimizer = build_optimizer(cfg, [("w", parameter)], CPU, seed=3)
        for _ in range(50):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        moved[by_chance] = 1 - float(parameter.detach().double().mean())
    assert moved[False] == 0
    assert abs(moved[True] - 50e-4) < 5 * (50 * 2**-8 * 1e-4 / 8192) ** 0.5


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("options", [{}, {"master_weights": True}, {"name": "muon"}])
def test_state_bytes_are_known_before_the_first_step(bits: int, options: dict[str, Any]) -> None:
    """By the formula: codes of `bits`, a scale for each block, 4 B for what is too small; and by
    the tensors.
    """
    cfg = replace(CFG, state_bits=bits, **options)
    params = {f"layers.0.{name}": parameter for name, parameter in weights(torch.bfloat16).items()}
    expected = 0
    for name, block in (
        ("a", 256),
        ("b", 256),
        ("c", 64),
        ("g", 256),
        ("d", 0),
        ("e", 0),
        ("f", 0),
    ):
        count = params[f"layers.0.{name}"].numel()
        states = 1 if cfg.name == "muon" and name in ("a", "c", "g", "d") else 2
        block = min(block, 128) if bits == 4 else block
        expected += states * (count * bits // 8 + 4 * (count // block) if block else 4 * count)
        expected += 4 * count if cfg.master_weights else 0
    assert count_optimizer_state_bytes(cfg, params.items()) == expected
    optimizer = build_optimizer(cfg, params.items(), CPU)
    for parameter in params.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    assert expected == sum(value.numel() * value.element_size() for value in tensors)


def test_where_nothing_differs_the_step_is_torchs() -> None:
    for bits, dtype in ((None, torch.bfloat16), (16, torch.bfloat16), (32, torch.float32)):
        params = weights(dtype)
        assert (
            type(build_optimizer(replace(CFG, state_bits=bits), params.items(), CPU))
            is torch.optim.AdamW
        )


@pytest.mark.parametrize(
    "options", [{"state_bits": 8}, {"state_bits": 4}, {"stochastic_rounding": True}]
)
def test_pieces_and_single_parameters_make_no_difference(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """A step in pieces of a few rows, for one parameter after the other, backwards, is the step."""
    cfg = replace(CFG, **options)
    _, expected = trained(cfg, torch.bfloat16)
    monkeypatch.setattr(own_adamw, "CHUNK_ELEMENTS", 1100)
    params = weights(torch.bfloat16)
    optimizer = build_optimizer(cfg, params.items(), CPU)
    (group,) = optimizer.param_groups
    every = group["params"]
    for step in range(5):
        for name, parameter in reversed(params.items()):
            group["params"] = [parameter]
            parameter.grad = gradient(name, step, torch.bfloat16)
            optimizer.step()
            parameter.grad = None
        group["params"] = every
    for name, parameter in params.items():
        assert torch.equal(parameter, expected[name]), name


# How parameters are cut among ranks: 3 ranks leave uneven and empty parts, 4 are 2 of FSDP x 2 of
# tensor parallel.
CUTS = {3: ["rows"], 4: ["rows, then rows", "columns, then rows"]}
CONFIGS = {
    "8": {"state_bits": 8},
    "4": {"state_bits": 4},
    "chance": {"stochastic_rounding": True, "state_bits": 8},
    "chance, bf16 states": {"stochastic_rounding": True},
    "master": {"master_weights": True, "state_bits": 16},
    "master, fp32 states": {"master_weights": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", CUTS)
def test_ranks_have_the_numbers_of_one(ranks: int) -> None:
    """Weights and every state, to the bit."""

    def everything(optimizer: Any, params: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        found = {name: parameter.detach() for name, parameter in params.items()}
        for name, parameter in params.items():
            found |= {
                f"{name} {key}": value
                for key, value in optimizer.state[parameter].items()
                if key != "step"
            }
        return found

    alone = {
        name: everything(*trained(replace(CFG, **options), torch.bfloat16, 3))
        for name, options in CONFIGS.items()
    }

    def work() -> list[str]:
        differ = []
        for cut in CUTS[ranks]:
            for case, options in CONFIGS.items():
                names = "g" if ranks == 4 else "abcde"
                params = place_model(
                    {name: weights(torch.bfloat16)[name] for name in names}, Cut(cut, ranks)
                )
                optimizer = build_optimizer(replace(CFG, **options), params.items(), CPU)
                for step in range(3):
                    for name, parameter in params.items():
                        parameter.grad = shard_like(gradient(name, step, torch.bfloat16), parameter)
                    optimizer.step()
                for key, value in everything(optimizer, params).items():
                    if not torch.equal(
                        value.to_local(), shard_like(alone[case][key], value).to_local()
                    ):
                        differ.append(f"{cut} {case} {key}")
                expected = count_optimizer_state_bytes(replace(CFG, **options), params.items())
                states = [value for state in optimizer.state.values() for value in state.values()]
                tensors = [value.to_local() for value in states if isinstance(value, Tensor)]
                if expected != sum(value.numel() * value.element_size() for value in tensors):
                    differ.append(f"{cut} {case} bytes")
        return differ

    assert run_ranks(work, ranks) == [[]] * ranks


def test_a_block_on_two_ranks_is_refused_in_one_line() -> None:
    def work() -> str:
        weight = {"layers.0.w": nn.Parameter(torch.ones(64, 768))}  # 3 blocks of 256
        params = place_model(weight, Cut("columns, then rows", 4))
        with pytest.raises(ConfigError) as raised:
            build_optimizer(replace(CFG, state_bits=8), params.items(), CPU)
        return str(raised.value)

    assert (
        run_ranks(work, 4)[0]
        == "optimizer.state_bits: found 8 with layers.0.w of 768 columns cut in 2, expected blocks"
        " of 256 within each part; use a smaller parallel.tensor, or state_bits=16"
    )
