"""Parameters stepped in backward, and offloaded optimizer states, end where plain training ends."""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipe_lib.config.schema import (
    FullFinetuneConfig,
    MemoryConfig,
    OptimizerConfig,
    ParallelConfig,
)
from recipe_lib.models import build_meta, init_weights
from recipe_lib.ops.dtensor_shards import get_detached_local
from recipe_lib.ops.head_losses import CrossEntropy, TokenLogProbs
from recipe_lib.optim import optimizers
from recipe_lib.optim.offloaded_states import OffloadedStates, step_parameter
from recipe_lib.optim.optimizers import build_optimizer, clip_grad_norm
from recipe_lib.parallel import Parallel, materialize, shard_model, start_world
from tests.distributed.ranks import run_ranks
from tests.parallel.small_models import ROWS, build_small_spec, make_small_batch
from tests.training.cut import Cut, place_model, shard_like

CPU = torch.device("cpu")
ALONE = SimpleNamespace(device=CPU, pipeline=None)
IN_BACKWARD = MemoryConfig(optimizer_in_backward=True)
PLAIN = MemoryConfig()
CFG = OptimizerConfig(lr=0.05, weight_decay=0.1)
STEPS = 3


def made(spec: Any) -> nn.Module:
    model = build_meta(spec, torch.float64).to_empty(device="cpu")
    init_weights(model, 3, spec)
    return model


def train(
    model: nn.Module, memory: MemoryConfig, world: Any, rows: slice
) -> tuple[list[float], list[int]]:
    """Norms of the steps, and the most bytes of gradients that this rank had when a parameter was
    stepped.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=CFG.lr, weight_decay=CFG.weight_decay, foreach=True
    )
    most = []

    def note(*_: Any) -> None:
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        most.append(
            sum((grad.to_local() if isinstance(grad, DTensor) else grad).nbytes for grad in grads)
        )

    optimizer.register_step_pre_hook(note)
    levers = optimizers.apply_optimizer_levers(optimizer, model, Parallel(), memory, CPU)
    tokens, labels = make_small_batch()
    count, norms = (labels != -100).sum(), []
    for _ in range(STEPS):
        (model(tokens[rows], labels=labels[rows], head_loss=CrossEntropy(3)) / count).backward()
        norms.append(
            float(clip_grad_norm(model.parameters(), None, world, Parallel(), levers.norms))
        )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return norms, most


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for name, p in model.named_parameters()
    }


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def alone(request: pytest.FixtureRequest) -> tuple[bool, list[float], dict[str, Tensor]]:
    """Whether embedding and head are one, and norms and weights of plain training in one
    process.
    """
    model = made(build_small_spec(tied=request.param))
    norms, _ = train(model, PLAIN, ALONE, slice(None))
    return request.param, norms, weights(model)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12)


def test_one_process(alone: Any) -> None:
    tied, norms, expected = alone
    model = made(build_small_spec(tied=tied))
    found, most = train(model, IN_BACKWARD, ALONE, slice(None))
    assert found == pytest.approx(norms, rel=1e-12)
    same(weights(model), expected)
    assert max(most) == max(parameter.nbytes for parameter in model.parameters())  # one at a time


@pytest.mark.slow
def test_two_ranks(alone: Any) -> None:
    tied, norms, expected = alone

    def work() -> tuple[list[float], dict[str, Tensor], int, int]:
        cfg = ParallelConfig(fsdp_wrap_policy="memory_efficient")
        with start_world(FullFinetuneConfig(device="cpu", parallel=cfg)) as world:
            spec = build_small_spec(tied=tied)
            model = build_meta(spec, torch.float64)
            shard_model(model, cfg, PLAIN, world)
            materialize(model, PLAIN, CPU)
            init_weights(model, 3, spec)
            half = ROWS // 2
            found, most = train(
                model,
                IN_BACKWARD,
                world,
                slice(world.data_rank * half, (world.data_rank + 1) * half),
            )
            local = [parameter.to_local().nbytes for parameter in model.parameters()]
            return found, weights(model), max(most), sum(local)

    for found, parameters, most, everything in run_ranks(work, 2):
        assert found == pytest.approx(norms, rel=1e-12)
        same(parameters, expected)
        assert most < everything / 2  # a unit's gradients at most, and a tied embedding's


def test_offloaded_states_come_to_the_device_and_return() -> None:
    """On a CPU both places are the same memory, but the copies are made: one that is not sent back
    is lost.
    """
    first = made(build_small_spec())
    second = deepcopy(first)
    plain, moving = (
        torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True) for model in (first, second)
    )
    offloaded = OffloadedStates(moving, CPU)
    sent, places = [], []
    moving.register_step_post_hook(lambda *_: sent.append(len(offloaded._copies._sent)))
    tokens, labels = make_small_batch()
    for _ in range(STEPS):
        for model, optimizer in ((first, plain), (second, moving)):
            model(tokens, labels=labels, head_loss=CrossEntropy(3)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        states = [value for state in moving.state.values() for value in state.values()]
        places.append({value.data_ptr() for value in states if value.nbytes >= 1024})
    same(weights(second), weights(first))
    assert max(sent) == 1 and not offloaded._copies._sent and not offloaded._on_device
    assert len(places[0]) > 40 and places[0] == places[1] == places[2]


PARAMETERS = {
    "model.embed_tokens.weight": (70, 64),
    "model.layers.0.w": (48, 96),
    "model.norm.weight": (600,),
}
OPTIMIZERS = {
    "adamw": {},
    "adamw, one kernel": {"implementation": "fused"},
    "sgd": {"name": "sgd"},
    "momentum": {"name": "sgd", "momentum": 0.9},
    "8 bits by chance": {"state_bits": 8, "stochastic_rounding": True},
    "bf16 by chance": {"stochastic_rounding": True},
    "4 bits and master": {"state_bits": 4, "master_weights": True},
    "muon": {"name": "muon"},
    "muon by chance": {"name": "muon", "stochastic_rounding": True},
}


def drawn(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(shape, generator=generator).bfloat16()
        for name, shape in PARAMETERS.items()
    }


def stepped(
    cfg: OptimizerConfig, params: dict[str, nn.Parameter], arrange: Any, resumed: Any = None
) -> Any:
    """The optimizer after some steps. arrange: of the optimizer, gives what steps one parameter.
    resumed: an optimizer whose states it begins with, after its steps.
    """
    optimizer = build_optimizer(cfg, params.items(), CPU)
    for mine, theirs in zip(
        params.values(), resumed.param_groups[0]["params"] if resumed else (), strict=False
    ):
        mine.data.copy_(theirs.data)
        optimizer.state[mine] = {
            key: deepcopy(value) for key, value in resumed.state[theirs].items()
        }
    step_one = arrange(optimizer)
    for step in range(STEPS):
        for name, parameter in params.items():
            gradient = drawn(step)[name].to(parameter.dtype)
            parameter.grad = (
                shard_like(gradient, parameter) if isinstance(parameter, DTensor) else gradient
            )
        for parameter in params.values():
            step_one(parameter)
    return optimizer


def alike(found: Any, expected: Any) -> list[str]:
    """Which weights and states differ in a bit."""
    differ = []
    pairs = zip(found.param_groups[0]["params"], expected.param_groups[0]["params"], strict=True)
    for number, (mine, theirs) in enumerate(pairs):
        values, wanted = (
            {"weights": one} | optimizer.state.get(one, {})
            for one, optimizer in ((mine, found), (theirs, expected))
        )
        assert values.keys() == wanted.keys()
        for key, value in wanted.items():
            if isinstance(values[key], DTensor):
                value = (
                    shard_like(value, values[key]) if value.shape == values[key].shape else value
                )
            if not torch.equal(
                *(
                    torch.as_tensor(get_detached_local(one) if isinstance(one, Tensor) else one)
                    for one in (values[key], value)
                )
            ):
                differ.append(f"{number} {key}")
    assert len(found.state) == len(expected.state)
    return differ


@pytest.mark.parametrize(
    ("case", "stands_in"),
    [(case, False) for case in OPTIMIZERS]
    + [(case, True) for case in OPTIMIZERS if "muon" not in case],
)
def test_a_step_with_states_from_the_host_is_a_step(case: str, stands_in: bool) -> None:
    """To the bit, weights, states and their count. From the first step on, and with states that
    were there before; and for another tensor that is stepped in the parameter's place.
    """
    cfg = replace(CFG, **{"name": "adamw", **OPTIMIZERS[case]})
    dtype = torch.bfloat16 if "bits" in case or "chance" in case else torch.float32
    copies = [
        {name: nn.Parameter(value.to(dtype)) for name, value in drawn(9).items()} for _ in range(4)
    ]

    def offload(optimizer: Any) -> Any:
        return (step_elsewhere if stands_in else lambda one: OffloadedStates(one, CPU).step_one)(
            optimizer
        )

    expected = stepped(cfg, copies[0], lambda optimizer: partial(step_parameter, optimizer))
    found = stepped(cfg, copies[1], offload)
    assert not alike(found, expected)
    expected = stepped(
        cfg, copies[2], lambda optimizer: partial(step_parameter, optimizer), expected
    )
    assert not alike(stepped(cfg, copies[3], offload, found), expected)


def step_elsewhere(optimizer: Any) -> Any:
    """Step copies in the parameters' places, and bring back their values."""
    copies: dict[nn.Parameter, nn.Parameter] = {}
    offloaded = OffloadedStates(optimizer, CPU, lambda parameter: copies.get(parameter, parameter))

    def step_one(parameter: nn.Parameter) -> None:
        copies.setdefault(parameter, nn.Parameter(parameter.detach().clone()))
        copies[parameter].grad, parameter.grad = parameter.grad, None
        offloaded.step_one(parameter)
        parameter.data.copy_(copies[parameter])

    return step_one


@pytest.mark.parametrize("cut", [Cut("rows", 3), Cut("columns, then rows", 2)], ids=str)
def test_sharded_states_come_from_the_host(cut: Cut) -> None:
    cases = ("adamw", "8 bits by chance") if cut.ranks == 3 else ("adamw",)
    cfgs = [replace(CFG, **{"name": "adamw", **OPTIMIZERS[case]}) for case in cases]
    names = [name for name, shape in PARAMETERS.items() if len(shape) == 2]

    def copy() -> dict[str, nn.Parameter]:
        return {name: nn.Parameter(drawn(9)[name].bfloat16()) for name in names}

    plain = [
        stepped(cfg, copy(), lambda optimizer: partial(step_parameter, optimizer)) for cfg in cfgs
    ]

    def work() -> list[list[str]]:
        offload = lambda optimizer: OffloadedStates(optimizer, CPU).step_one  # noqa: E731
        found = [stepped(cfg, place_model(copy(), cut), offload) for cfg in cfgs]
        return [alike(one, expected) for one, expected in zip(found, plain, strict=True)]

    assert run_ranks(work, cut.ranks) == [[[]] * len(cfgs)] * cut.ranks


def test_states_of_what_is_not_stepped_are_not_left_on_the_device() -> None:
    parameters = [nn.Parameter(torch.randn(64, 64)) for _ in range(4)]
    optimizer = torch.optim.AdamW(parameters)
    offloaded = OffloadedStates(optimizer, CPU)
    for missing in (None, None, 2, None):
        for number, parameter in enumerate(parameters):
            parameter.grad = None if number == missing else torch.ones_like(parameter)
        optimizer.step()
        assert not offloaded._on_device and not offloaded._copies._sent


USES: dict[str, Any] = {
    "two": lambda loss, model: loss(0) + loss(1),
    "logits": lambda loss, model: (
        loss(0) + model(make_small_batch()[0][:1]).logsumexp(-1).square().sum() / 100
    ),
    "per token": lambda loss, model: loss(0) - loss(1, TokenLogProbs(2)).sum(),
    "weights": lambda loss, model: loss(0) + model.lm_head.weight.square().sum(),
}


@pytest.mark.parametrize("case", USES)
def test_a_head_that_is_used_beside_its_loss_is_stepped_once(case: str) -> None:
    """As by plain training."""
    tokens, labels = make_small_batch()

    def trained(memory: MemoryConfig) -> tuple[list[float], nn.Module]:
        model, norms = made(build_small_spec()), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
        levers = optimizers.apply_optimizer_levers(optimizer, model, Parallel(), memory, CPU)

        def loss(row: int, head_loss: Any = None) -> Tensor:
            rows = slice(row, row + 1)
            return model(tokens[rows], labels=labels[rows], head_loss=head_loss or CrossEntropy(2))

        for _ in range(STEPS):
            USES[case](loss, model).backward()
            norms.append(
                float(clip_grad_norm(model.parameters(), None, ALONE, Parallel(), levers.norms))
            )
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return norms, model

    (norms, plain), (found, model) = trained(PLAIN), trained(IN_BACKWARD)
    assert found == pytest.approx(norms, rel=1e-12)
    same(weights(model), weights(plain))
