"""Optimizers: the update rule, the kernels, and the bytes of their states."""

from typing import Any

import pytest
import torch
from torch import nn

from recipe_lib.config.schema import OptimizerConfig
from recipe_lib.errors import ConfigError
from recipe_lib.optim.algorithms.adamw import build_adamw
from recipe_lib.optim.optimizers import (
    build_optimizer,
    count_local_bytes,
    count_optimizer_state_bytes,
    keep_hyperparameters,
    set_learning_rate,
)

CPU = torch.device("cpu")
IMPLEMENTATIONS = ("auto", "fused", "foreach", "single")


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((7, 5), (11,), (33, 3))
    return [
        nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in shapes
    ]


def gradients(step: int, params: list[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in params:
        grad = torch.randn(*parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = grad.to(parameter.dtype)


def trained(
    cfg: OptimizerConfig, dtype: torch.dtype = torch.float64, steps: int = 5
) -> list[torch.Tensor]:
    params = parameters(dtype)
    optimizer = build_optimizer(cfg, params, CPU)
    for step in range(steps):
        gradients(step, params)
        set_learning_rate(optimizer, cfg.lr * (step + 1))
        optimizer.step()
    return [parameter.detach() for parameter in params]


def adamw_by_hand(cfg: OptimizerConfig, steps: int = 5) -> list[torch.Tensor]:
    params = parameters()
    beta1, beta2 = cfg.betas
    values = [parameter.detach().clone() for parameter in params]
    means = [torch.zeros_like(value) for value in values]
    squares = [torch.zeros_like(value) for value in values]
    for step in range(steps):
        gradients(step, params)
        lr = cfg.lr * (step + 1)
        for value, mean, square, parameter in zip(values, means, squares, params, strict=True):
            value -= lr * cfg.weight_decay * value
            mean.copy_(beta1 * mean + (1 - beta1) * parameter.grad)
            square.copy_(beta2 * square + (1 - beta2) * parameter.grad**2)
            corrected = square / (1 - beta2 ** (step + 1))
            value -= lr * mean / (1 - beta1 ** (step + 1)) / (corrected.sqrt() + cfg.eps)
    return values


def sgd_by_hand(cfg: OptimizerConfig, steps: int = 5) -> list[torch.Tensor]:
    params = parameters()
    values = [parameter.detach().clone() for parameter in params]
    momenta = [torch.zeros_like(value) for value in values]
    for step in range(steps):
        gradients(step, params)
        lr = cfg.lr * (step + 1)
        for value, momentum, parameter in zip(values, momenta, params, strict=True):
            value -= lr * cfg.weight_decay * value
            momentum.copy_(cfg.momentum * momentum + parameter.grad)
            value -= lr * momentum
    return values


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_adamw_follows_its_formula(implementation: str) -> None:
    cfg = OptimizerConfig(lr=1e-2, weight_decay=0.3, implementation=implementation)
    for ours, expected in zip(trained(cfg), adamw_by_hand(cfg), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.8])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sgd_decays_apart_from_its_momentum(implementation: str, momentum: float) -> None:
    cfg = OptimizerConfig(
        name="sgd", lr=1e-2, weight_decay=0.3, momentum=momentum, implementation=implementation
    )
    for ours, expected in zip(trained(cfg), sgd_by_hand(cfg), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_group_has_a_decay_of_its_own(name: str) -> None:
    """Also after a state with other decays was loaded."""
    cfg = OptimizerConfig(name=name, lr=1e-2, weight_decay=0.3)
    params = parameters()
    optimizer = build_optimizer(cfg, params[:1], CPU)
    optimizer.add_param_group({"params": params[1:], "weight_decay": 0.0})
    before = [parameter.detach().clone() for parameter in params]
    for parameter in params:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(params[0].detach(), before[0] * (1 - 1e-2 * 0.3))
    assert all(map(torch.equal, params[1:], before[1:]))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    with keep_hyperparameters(optimizer, cfg):
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.5  # a loaded state's
    optimizer.step()
    torch.testing.assert_close(params[0].detach(), before[0] * (1 - 1e-2 * 0.3) ** 2)
    assert all(map(torch.equal, params[1:], before[1:]))


@pytest.mark.parametrize(
    ("key", "value"), [("master_weights", True), ("stochastic_rounding", True), ("state_bits", 8)]
)
def test_a_plain_list_has_no_adamw_of_ours(key: str, value: Any) -> None:
    cfg = OptimizerConfig(**{key: value})
    with pytest.raises(ConfigError, match=rf"^optimizer\.{key}: found {value} for a plain list"):
        build_adamw(cfg, list(parameters()), {})
    assert isinstance(build_adamw(OptimizerConfig(), list(parameters()), {}), torch.optim.AdamW)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_implementations_agree_in_float32(name: str) -> None:
    runs = [
        trained(
            OptimizerConfig(name=name, lr=1e-2, weight_decay=0.1, momentum=0.9, implementation=one),
            torch.float32,
        )
        for one in ("fused", "foreach", "single")
    ]
    for other in runs[1:]:
        for ours, theirs in zip(runs[0], other, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "implementation, kernels",
    [
        ("auto", (True, False)),
        ("fused", (True, False)),
        ("foreach", (False, True)),
        ("single", (False, False)),
    ],
)
def test_the_implementation_reaches_torch(implementation: str, kernels: tuple[bool, bool]) -> None:
    optimizer = build_optimizer(OptimizerConfig(implementation=implementation), parameters(), CPU)
    assert (optimizer.defaults["fused"], optimizer.defaults["foreach"]) == kernels


def test_auto_avoids_fused_on_a_device_without_it() -> None:
    optimizer = build_optimizer(OptimizerConfig(), parameters(), torch.device("meta"))
    assert (optimizer.defaults["fused"], optimizer.defaults["foreach"]) == (False, True)


def test_a_parameter_without_gradient_is_neither_stepped_nor_decayed() -> None:
    for name in ("adamw", "sgd"):
        params = parameters()
        optimizer = build_optimizer(
            OptimizerConfig(name=name, lr=0.1, weight_decay=0.5), params, CPU
        )
        gradients(0, params)
        params[1].grad = None
        before = [parameter.detach().clone() for parameter in params]
        optimizer.step()
        changed = [not torch.equal(now, was) for now, was in zip(params, before, strict=True)]
        assert changed == [True, False, True]


def test_frozen_parameters_are_left_out_and_all_frozen_is_refused() -> None:
    params = parameters()
    params[0].requires_grad_(False)
    (group,) = build_optimizer(OptimizerConfig(), params, CPU).param_groups
    assert [id(parameter) for parameter in group["params"]] == [
        id(parameter) for parameter in params[1:]
    ]
    for parameter in params:
        parameter.requires_grad_(False)
    expected = (
        "^optimizer: found no parameter that requires a gradient; leave at least one unfrozen$"
    )
    with pytest.raises(ConfigError, match=expected):
        build_optimizer(OptimizerConfig(), params, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name, momentum", [("adamw", 0.0), ("sgd", 0.9), ("sgd", 0.0)])
def test_state_bytes_are_known_before_the_first_step(
    name: str, momentum: float, dtype: torch.dtype
) -> None:
    cfg = OptimizerConfig(name=name, momentum=momentum)
    params = parameters(dtype)
    params[2].requires_grad_(False)
    expected = count_optimizer_state_bytes(cfg, params)
    optimizer = build_optimizer(cfg, params, CPU)
    gradients(0, params)
    optimizer.step()
    states = [
        value for state in optimizer.state.values() for value in state.values() if value is not None
    ]
    assert expected == sum(
        value.numel() * value.element_size() for value in states if value.dim() > 0
    )


def test_state_bytes_of_an_unknown_optimizer_are_not_guessed() -> None:
    assert count_optimizer_state_bytes(OptimizerConfig(name="from_a_plugin"), parameters()) is None


def test_local_bytes_counts_a_tied_parameter_once() -> None:
    first, second, _ = parameters(torch.float32)
    assert count_local_bytes([first, second, first]) == 4 * (35 + 11)
