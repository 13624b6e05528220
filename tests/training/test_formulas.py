"""Every optimizer and every setting of one moves weights as its formula says, in each type,
whatever steps them.

The formulas are written out in `formulas`. Two runs of ours that agree say nothing of a fault that
both have.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from recipe_lib.config.registry import register
from recipe_lib.config.schema import MemoryConfig, OptimizerConfig
from recipe_lib.errors import ConfigError
from recipe_lib.optim import optimizers
from recipe_lib.optim.optimizers import apply_optimizer_levers, build_optimizer, set_learning_rate
from recipe_lib.parallel import Parallel
from tests.distributed.ranks import run_ranks
from tests.selection import mark_slow_except
from tests.training.formulas import Formula

CPU = torch.device("cpu")
STEPS = 5
FP64 = torch.float64
FP32 = torch.float32
BF16 = torch.bfloat16
# Whole vectors of a kernel, less than one, and a rest; matrices of layers and others, some with
# states in blocks.
SHAPES = {
    "a": (768,),
    "b": (7,),
    "c": (1,),
    "d": (33,),
    "e": (1000,),
    "f": (),
    "embed": (24, 192),
    "layers.0.w": (32, 256),
    "layers.1.w": (40, 16),
}
BASE = OptimizerConfig(lr=0.02, weight_decay=0.3)
KERNELS = [{"implementation": one} for one in ("auto", "fused", "foreach", "single")]
SETTINGS: list[dict[str, Any]] = [
    *KERNELS,
    {"weight_decay": 0.0, "betas": [0.8, 0.99], "eps": 1e-3},
    *({"name": "sgd", **kernels} for kernels in KERNELS),
    *({"name": "sgd", "momentum": 0.8, **kernels} for kernels in KERNELS),
    {"name": "sgd", "momentum": 0.8, "weight_decay": 0.0},
    {"name": "muon"},
    {"name": "muon", "momentum": 0.8, "weight_decay": 0.0},
    *({"state_bits": bits} for bits in (4, 8, 16, 32)),
    *({"name": "muon", "state_bits": bits} for bits in (4, 8, 16, 32)),
    {"master_weights": True},
    {"master_weights": True, "state_bits": 32},
    {"master_weights": True, "state_bits": 8},
    {"name": "muon", "master_weights": True},
    {"stochastic_rounding": True},
    {"stochastic_rounding": True, "state_bits": 8},
    {"name": "muon", "stochastic_rounding": True},
]
ARRANGED = {
    "step": MemoryConfig(),
    "in backward": MemoryConfig(optimizer_in_backward=True),
    "offloaded": MemoryConfig(optimizer_offload=True),
    "offloaded, in backward": MemoryConfig(optimizer_in_backward=True, optimizer_offload=True),
}


def is_refused(cfg: OptimizerConfig, dtype: torch.dtype) -> bool:
    """What a config that is read cannot have, or `build_optimizer` refuses."""
    if dtype == BF16:
        return cfg.name == "sgd" and cfg.implementation == "fused"
    return (
        cfg.master_weights
        or cfg.stochastic_rounding
        or (dtype == FP64 and cfg.state_bits is not None)
    )


def tolerance(cfg: OptimizerConfig, dtype: torch.dtype, name: str) -> float:
    """Of `Formula.measure_error`. Muon's iteration is in bf16, whatever the weights; torch's kernels that
    are not fused, and decay that is apart, round to the weights' type several times in a step,
    which a few numbers have no mean of; a state in 4 or 8 bits is the next level now and then.
    """
    formula = Formula(cfg, name, torch.zeros(SHAPES[name]))
    if cfg.name == "muon" and formula.is_matrix_of_a_layer:
        return 0.08 if dtype == BF16 else 0.03
    if dtype == BF16 and (cfg.implementation in ("foreach", "single") or cfg.name == "sgd"):
        return 0.08 if formula.start.numel() > 1 else 0.2
    return {FP64: 1e-12, FP32: 1e-5, BF16: 0.02}[dtype]


class Product(nn.Module):
    """A loss whose gradients are known: those that it is given."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        drawn = torch.Generator().manual_seed(1)
        self.weights = [
            nn.Parameter(torch.randn(shape, generator=drawn).to(dtype)) for shape in SHAPES.values()
        ]
        for name, parameter in zip(SHAPES, self.weights, strict=True):
            self.register_parameter(name.replace(".", "-"), parameter)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return sum((w * g).sum() for w, g in zip(self.weights, gradients, strict=True))  # type: ignore[return-value]


def gradients(step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """All of a size that steps of SGD move bf16 weights by."""
    drawn = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=drawn).to(dtype) for shape in SHAPES.values()]


def errors(
    cfg: OptimizerConfig, dtype: torch.dtype, memory: MemoryConfig = ARRANGED["step"]
) -> dict[str, float]:
    """Of every parameter how far it is from its formula after some steps, and whether it has moved
    at all.
    """
    model = Product(dtype)
    named = list(zip(SHAPES, model.weights, strict=True))
    optimizer = build_optimizer(cfg, named, CPU, seed=3)
    apply_optimizer_levers(optimizer, model, Parallel(), memory, CPU)
    formulas = {name: Formula(cfg, name, parameter) for name, parameter in named}
    for step in range(STEPS):
        rate = cfg.lr * (step + 1)
        set_learning_rate(optimizer, rate)
        found = gradients(step, dtype)
        model(found).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for name, gradient in zip(SHAPES, found, strict=True):
            formulas[name].step(gradient, rate)
    for name, parameter in named:
        assert not torch.equal(parameter.detach().double(), formulas[name].start), (
            f"{name} has not moved"
        )
    return {name: formulas[name].measure_error(parameter.detach()) for name, parameter in named}


CASES = [
    (s, d) for d in (FP64, FP32, BF16) for s in SETTINGS if not is_refused(replace(BASE, **s), d)
]


@pytest.mark.parametrize(("settings", "dtype"), CASES, ids=str)
def test_weights_move_as_the_formula_says(settings: dict[str, Any], dtype: torch.dtype) -> None:
    cfg = replace(BASE, **settings)
    found = errors(cfg, dtype)
    assert {
        name: error for name, error in found.items() if not error <= tolerance(cfg, dtype, name)
    } == {}


@pytest.mark.parametrize(
    "arranged",
    mark_slow_except(["in backward", "offloaded, in backward"], ["offloaded, in backward"]),
)
def test_however_steps_are_arranged(arranged: str) -> None:
    """In a process of its own, in which a CPU is said to have a host."""

    def work() -> dict[str, float]:
        optimizers.has_host = lambda device: True
        bad = {}
        for settings, dtype in CASES:
            cfg = replace(BASE, **settings)
            if dtype != FP64:
                for name, error in errors(cfg, dtype, ARRANGED[arranged]).items():
                    if not error <= tolerance(cfg, dtype, name):
                        bad[f"{settings} {dtype} {name}"] = error
        return bad

    assert run_ranks(work, 1) == [{}]


@pytest.mark.parametrize("momentum", [None, 0.9])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_fused_sgd_of_16_bits_is_refused_on_a_cpu(
    dtype: torch.dtype, momentum: float | None
) -> None:
    cfg = OptimizerConfig(name="sgd", momentum=momentum, implementation="fused")
    kind = "bf16" if dtype == BF16 else "fp16"
    expected = (
        f"^optimizer.implementation: found fused with optimizer.name=sgd and {kind} parameters on a"
        " CPU, of which torch's kernel leaves most elements as they are; use auto or foreach$"
    )
    with pytest.raises(ConfigError, match=expected):
        build_optimizer(
            cfg,
            [nn.Parameter(torch.zeros(3, dtype=FP32)), nn.Parameter(torch.zeros(3, dtype=dtype))],
            CPU,
        )


def test_auto_takes_no_fused_sgd_of_16_bits_for_a_plugin_either() -> None:
    register("optimizer.name", "plugin_for_tests")(
        lambda cfg, params, kernels: torch.optim.SGD(params, lr=cfg.lr, **kernels)
    )
    for dtype, is_fused in ((FP32, True), (BF16, False)):
        parameter = nn.Parameter(torch.ones(64, dtype=dtype))
        optimizer = build_optimizer(
            OptimizerConfig(name="plugin_for_tests", lr=0.5), [parameter], CPU
        )
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert optimizer.param_groups[0]["fused"] == is_fused
        assert parameter.eq(0.5).all()


def kernels_of_torch() -> list[Any]:
    adam = [{}, {"amsgrad": True}, {"weight_decay": 0.1}, {"maximize": True}]
    found = [(kind, options) for kind in ("Adam", "AdamW") for options in adam]
    found += [
        ("Adagrad", options)
        for options in ({}, {"weight_decay": 0.1}, {"lr_decay": 0.1}, {"maximize": True})
    ]
    sgd: list[Any] = [
        {},
        {"weight_decay": 0.1},
        {"maximize": True},
        {"momentum": 0.9, "nesterov": True},
    ]
    return found + [("SGD", options) for options in sgd]


@pytest.mark.parametrize(("kind", "options"), kernels_of_torch(), ids=str)
def test_torchs_fused_kernels_on_a_cpu_are_right_where_auto_takes_them(
    kind: str, options: Any
) -> None:
    """Of every optimizer that a plugin may give the arguments to; the other implementation is the
    measure here.
    """
    for dtype, size in [
        (dtype, size) for dtype in (FP64, FP32, BF16) for size in (1, 15, 16, 33, 1000)
    ]:
        if (kind, dtype) == ("SGD", BF16):
            continue
        found = []
        for fused in (True, False):
            drawn = torch.Generator().manual_seed(size)
            parameter = nn.Parameter(torch.randn(size, generator=drawn).to(dtype))
            start = parameter.detach().clone()
            optimizer = getattr(torch.optim, kind)(
                [parameter], lr=0.1, fused=fused, foreach=False, **options
            )
            for _ in range(3):
                parameter.grad = torch.randn(size, generator=drawn).to(dtype)
                optimizer.step()
            found.append((parameter.detach() - start).double())
        distance = float((found[0] - found[1]).norm() / found[1].norm())
        assert distance <= {FP64: 1e-12, FP32: 1e-5, BF16: 0.1}[dtype], (dtype, size)
