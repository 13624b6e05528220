"""Loss, clipping and optimizer together: two ranks end where one process ends, whatever the
kernels.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from recipe_lib.config.schema import OptimizerConfig
from recipe_lib.errors import ConfigError
from recipe_lib.ops.chunked_heads import CrossEntropy
from recipe_lib.optim.optimizers import build_optimizer, clip_grad_norm
from recipe_lib.parallel import Parallel
from tests.distributed.ranks import run_ranks

CPU = torch.device("cpu")
WORLD = SimpleNamespace(device=CPU, pipeline=None)


class Head(nn.Module):
    """An output projection that makes its loss inside forward, as a decoder's does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(23, 6, dtype=torch.float64))

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return CrossEntropy(2)(hidden, self.weight, labels)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(23, 6, dtype=torch.float64)
        self.head = Head()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.head(self.embedding(tokens), labels)


def batches() -> tuple[Tensor, Tensor]:
    """Tokens and labels `[2, 8]`: a row for each rank; the second row's labels are all ignored."""
    generator = torch.Generator().manual_seed(9)
    tokens, labels = torch.randint(0, 23, (2, 2, 8), generator=generator)
    labels[1] = -100
    return tokens, labels


def train(model: nn.Module, cfg: OptimizerConfig, rows: list[int]) -> list[float]:
    tokens, labels = batches()
    optimizer = build_optimizer(cfg, model.parameters(), CPU)
    norms = []
    for _ in range(3):
        for row in rows:
            (model(tokens[row], labels[row]) / 8).backward()
        norms.append(float(clip_grad_norm(model.parameters(), 0.5, WORLD, Parallel(), None)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return norms


@pytest.mark.parametrize("implementation", ["auto", "foreach", "single"])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_two_ranks_end_where_one_process_ends(name: str, implementation: str) -> None:
    cfg = OptimizerConfig(
        name=name, lr=0.05, weight_decay=0.1, momentum=0.9, implementation=implementation
    )
    alone = Model()
    norms = train(alone, cfg, [0, 1])

    def work() -> tuple[list[float], dict[str, Tensor]]:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = Model()
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model.head, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for module in (model.head, model):
            module.set_gradient_divide_factor(1.0)
        norms = train(model, cfg, [dist.get_rank()])
        return norms, {key: value.full_tensor() for key, value in model.state_dict().items()}

    assert norms[0] > 0.5  # so that it was clipped
    for their_norms, parameters in run_ranks(work, 2):
        assert their_norms == pytest.approx(norms, rel=1e-12)
        for key, value in alone.state_dict().items():
            torch.testing.assert_close(parameters[key], value, rtol=1e-12, atol=1e-13)


def test_fused_sgd_on_shards_is_refused_in_one_line() -> None:
    def work() -> str:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = Model()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(
            ConfigError,
            match=r"^optimizer\.implementation: found fused with optimizer\.name=sgd .*auto",
        ):
            build_optimizer(
                OptimizerConfig(name="sgd", implementation="fused"), model.parameters(), CPU
            )
        return "refused"

    assert run_ranks(work, 2) == ["refused", "refused"]
