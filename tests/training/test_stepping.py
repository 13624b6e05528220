"""Parameters stepped in backward, and states that visit the device, end where plain training ends."""

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipe_lib.config.schema import FullFinetuneConfig, MemoryConfig, OptimizerConfig, ParallelConfig
from recipe_lib.models import build_meta, init_weights
from recipe_lib.parallel import materialize, shard_model, start_world
from recipe_lib.training import state_visits, stepping
from recipe_lib.training.clipping import clip_grad_norm
from recipe_lib.training.state_visits import StateVisits
from tests.distributed.ranks import run_ranks
from tests.parallel.small_models import ROWS, small_batch, small_spec

CPU = torch.device("cpu")
IN_BACKWARD, PLAIN = MemoryConfig(optimizer_in_backward=True), MemoryConfig()
CFG = OptimizerConfig(lr=0.05, weight_decay=0.1)
STEPS = 3


def made(spec: Any) -> nn.Module:
    model = build_meta(spec, torch.float64).to_empty(device="cpu")
    init_weights(model, 3, spec)
    return model


def train(model: nn.Module, memory: MemoryConfig, world: Any, rows: slice) -> tuple[list[float], list[int]]:
    """Norms of the steps, and the most bytes of gradients that this rank had when a parameter was stepped."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=CFG.lr, weight_decay=CFG.weight_decay, foreach=True)
    most = []

    def note(*_: Any) -> None:
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        most.append(sum((grad.to_local() if isinstance(grad, DTensor) else grad).nbytes for grad in grads))

    optimizer.register_step_pre_hook(note)
    earlier = stepping.arrange_steps(optimizer, model, memory, CPU)
    tokens, labels = small_batch()
    count, norms = (labels != -100).sum(), []
    for _ in range(STEPS):
        (model(tokens[rows], labels=labels[rows], loss_chunks=3) / count).backward()
        norms.append(float(clip_grad_norm(model.parameters(), None, world, earlier)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return norms, most


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for name, p in model.named_parameters()}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def alone(request: pytest.FixtureRequest) -> tuple[bool, list[float], dict[str, Tensor]]:
    """Whether embedding and head are one, and norms and weights of plain training in one process."""
    model = made(small_spec(tied=request.param))
    norms, _ = train(model, PLAIN, SimpleNamespace(device=CPU, pipeline=None), slice(None))
    return request.param, norms, weights(model)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12)


def test_one_process(alone: Any) -> None:
    tied, norms, expected = alone
    model = made(small_spec(tied=tied))
    found, most = train(model, IN_BACKWARD, SimpleNamespace(device=CPU, pipeline=None), slice(None))
    assert found == pytest.approx(norms, rel=1e-12)
    same(weights(model), expected)
    assert max(most) == max(parameter.nbytes for parameter in model.parameters())  # one at a time


def test_two_ranks(alone: Any) -> None:
    tied, norms, expected = alone

    def work() -> tuple[list[float], dict[str, Tensor], int, int]:
        cfg = ParallelConfig(wrapping="memory_efficient")
        with start_world(FullFinetuneConfig(device="cpu", parallel=cfg)) as world:
            spec = small_spec(tied=tied)
            model = build_meta(spec, torch.float64)
            shard_model(model, cfg, PLAIN, world)
            materialize(model, PLAIN, CPU)
            init_weights(model, 3, spec)
            half = ROWS // 2
            found, most = train(model, IN_BACKWARD, world, slice(world.data_rank * half, (world.data_rank + 1) * half))
            local = [parameter.to_local().nbytes for parameter in model.parameters()]
            return found, weights(model), max(most), sum(local)

    for found, parameters, most, everything in run_ranks(work, 2):
        assert found == pytest.approx(norms, rel=1e-12)
        same(parameters, expected)
        assert most < everything / 2  # a unit's gradients at most, and a tied embedding's


def test_states_visit_the_device_and_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU both places are the same memory, but the copies are made: a visit that is not sent back is lost."""
    monkeypatch.setattr(state_visits, "_pinned_like", torch.empty_like)
    first = made(small_spec())
    second = deepcopy(first)
    plain, visiting = (torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True) for model in (first, second))
    visits = StateVisits(visiting, CPU)
    sent = []
    visiting.register_step_post_hook(lambda *_: sent.append(len(visits._leaving)))
    tokens, labels = small_batch()
    for _ in range(STEPS):
        for model, optimizer in ((first, plain), (second, visiting)):
            model(tokens, labels=labels, loss_chunks=3).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    same(weights(second), weights(first))
    assert max(sent) == 1 and not visits._leaving and not visits._arrived
    hosts = {id(value) for held in visits._hosts.values() for value in held.values()}
    large = [value for state in visiting.state.values() for value in state.values() if value.nbytes >= 1024]
    assert len(large) > 40 and {id(value) for value in large} == hosts


def test_a_recipe_that_never_arranged_its_steps() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    stepping.check_arranged(optimizer, PLAIN)
    with pytest.raises(ValueError, match="arrange_steps"):
        stepping.check_arranged(optimizer, IN_BACKWARD)
