"""Muon against torch's, AdamW beside it against torch's, and several ranks against one."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipe_lib.config.schema import OptimizerConfig
from recipe_lib.errors import ConfigError
from recipe_lib.optim.algorithms import muon
from recipe_lib.optim.algorithms.muon import orthogonalize
from recipe_lib.optim.low_bit_adamw import is_layer_matrix
from recipe_lib.optim.offloaded_states import step_parameter
from recipe_lib.optim.optimizers import (
    build_optimizer,
    count_optimizer_state_bytes,
    keep_hyperparameters,
)
from tests.distributed.ranks import run_ranks
from tests.training.cut import Cut, place_model, shard_like

CPU = torch.device("cpu")
CFG = OptimizerConfig(name="muon", lr=1e-2, weight_decay=0.1)
MATRICES = {
    "model.layers.0.self_attn.q_proj.weight": (16, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 22),
    "model.layers.1.self_attn.q_proj.weight": (16, 8),
    "model.layers.1.mlp.down_proj.weight": (8, 22),
    "model.layers.1.mlp.gate_proj.lora_A.weight": (2, 8),
}
OTHERS = {
    "model.embed_tokens.weight": (31, 8),
    "model.embed_tokens.lora_embedding_A": (2, 31),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.mlp.experts.weight": (3, 8, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (31, 8),
}
SHAPES = MATRICES | OTHERS


def weights(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in SHAPES.items()
    }


def gradient(name: str, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator)


def trained(cfg: OptimizerConfig, params: dict[str, nn.Parameter], steps: int = 4) -> Any:
    optimizer = build_optimizer(cfg, params.items(), CPU)
    for step in range(steps):
        for name, parameter in params.items():
            found: Any = gradient(name, step).to(parameter.dtype)
            parameter.grad = (
                shard_like(found, parameter) if isinstance(parameter, DTensor) else found
            )
        optimizer.step()
    return optimizer


def test_matrices_of_layers_are_orthogonalized_and_nothing_else() -> None:
    chosen = {name for name, parameter in weights().items() if is_layer_matrix(parameter, name)}
    assert chosen == set(MATRICES)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("momentum", [None, 0.8])
def test_steps_are_torchs(momentum: float | None) -> None:
    ours, theirs = weights(), weights()
    trained(replace(CFG, momentum=momentum), ours)
    muon = torch.optim.Muon(
        [theirs[name] for name in MATRICES],
        lr=CFG.lr,
        weight_decay=0.1,
        momentum=0.95 if momentum is None else momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(
        [theirs[name] for name in OTHERS], lr=CFG.lr, weight_decay=0.1, betas=(0.9, 0.95)
    )
    for step in range(4):
        for name, parameter in theirs.items():
            parameter.grad = gradient(name, step)
        muon.step()
        adamw.step()
    for name in MATRICES:
        assert torch.equal(ours[name], theirs[name]), name
    for name in OTHERS:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-7)


def test_a_step_has_singular_values_near_one_and_the_size_of_adamws() -> None:
    matrix = torch.randn(96, 40, generator=torch.Generator().manual_seed(2))
    found = orthogonalize(matrix).double()
    values = torch.linalg.svdvals(found)
    assert 0.6 < float(values.min()) and float(values.max()) < 1.3
    left, _, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    assert float(((left @ right) * found).sum() / (left @ right).norm() / found.norm()) > 0.97
    parameter = nn.Parameter(torch.zeros(96, 40))
    optimizer = build_optimizer(replace(CFG, weight_decay=0.0), [("layers.0.w", parameter)], CPU)
    parameter.grad = matrix
    optimizer.step()
    assert 0.8 < float(parameter.detach().square().mean().sqrt()) / (0.2 * CFG.lr) < 1.2


def test_a_matrix_alone_is_stepped_as_in_company() -> None:
    together, alone = weights(), weights()
    trained(CFG, together, 1)
    optimizer = build_optimizer(CFG, alone.items(), CPU)
    (group,) = optimizer.param_groups
    for name, parameter in alone.items():
        group["params"] = [parameter]
        parameter.grad = gradient(name, 0)
        optimizer.step()
    assert all(torch.equal(alone[name], parameter) for name, parameter in together.items())


def test_one_momentum_of_a_matrix_two_states_of_the_rest() -> None:
    params = weights(torch.bfloat16)
    count = {name: parameter.numel() for name, parameter in params.items()}
    expected = 2 * sum(count[name] for name in MATRICES) + 4 * sum(count[name] for name in OTHERS)
    assert count_optimizer_state_bytes(CFG, params.items()) == expected
    optimizer = trained(CFG, params, 1)
    tensors = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    assert sum(value.numel() * value.element_size() for value in tensors) == expected


def test_the_configs_numbers_count_after_a_state_was_loaded() -> None:
    cfg = replace(CFG, momentum=0.5, eps=1e-5, weight_decay=0.3)
    optimizer = build_optimizer(cfg, weights().items(), CPU)
    (group,) = optimizer.param_groups
    with keep_hyperparameters(optimizer, cfg):
        group.update(momentum=0.9, eps=1e-3, weight_decay=0.0)  # a loaded state's
    assert (group["momentum"], group["eps"], group["weight_decay"]) == (0.5, 1e-5, 0.3)


def test_parameters_without_names_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^optimizer\.name: found muon for parameters without names, .* use adamw$",
    ):
        build_optimizer(CFG, weights().values(), CPU)


def test_matrices_that_are_stepped_alone_go_round_the_ranks() -> None:
    """As when all are stepped together: no rank computes more than one of two of them, and numbers
    are the same.
    """
    together = weights()
    trained(CFG, together, 2)

    def work() -> tuple[list[int], list[str]]:
        whole = muon.orthogonalize
        params = place_model(weights(), Cut("rows", 2))
        optimizer = build_optimizer(CFG, params.items(), CPU)
        computed, differ = [], []
        for step in range(2):
            computed.append(0)
            muon.orthogonalize = lambda matrix: (
                computed.__setitem__(-1, computed[-1] + 1) or whole(matrix)
            )
            for name, parameter in params.items():
                parameter.grad = shard_like(gradient(name, step), parameter)
                step_parameter(optimizer, parameter)
                parameter.grad = None
        for name, parameter in params.items():
            if not torch.equal(
                parameter.to_local(), shard_like(together[name].detach(), parameter).to_local()
            ):
                differ.append(name)
        return computed, differ

    assert run_ranks(work, 2) == [([3, 3], []), ([2, 2], [])]


CASES = {
    "fp32": {},
    "8 bits": {"state_bits": 8},
    "master": {"master_weights": True, "state_bits": 32},
}
CUTS = {3: ["rows"], 4: ["rows, then rows", "columns, then rows"]}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", CUTS)
def test_ranks_have_the_numbers_of_one(ranks: int) -> None:
    """To the bit: one rank puts a matrix together and computes it whole, whatever the cut; empty
    parts too.
    """

    def dtype_of(case: str) -> torch.dtype:
        return torch.bfloat16 if case == "master" else torch.float32

    names = [
        name
        for name, shape in SHAPES.items()
        if ranks == 3 or all(size % 2 == 0 for size in shape[:2])
    ]
    names = [name for name in names if ranks == 3 or len(SHAPES[name]) == 2]
    alone = {}
    for case, options in CASES.items():
        alone[case] = {
            name: parameter for name, parameter in weights(dtype_of(case)).items() if name in names
        }
        trained(replace(CFG, **options), alone[case])

    def work() -> list[str]:
        differ = []
        for cut in CUTS[ranks]:
            for case, options in CASES.items():
                params = {name: weights(dtype_of(case))[name] for name in names}
                params = place_model(params, Cut(cut, ranks))
                optimizer = trained(replace(CFG, **options), params)
                for name, parameter in params.items():
                    if not torch.equal(
                        parameter.to_local(),
                        shard_like(alone[case][name].detach(), parameter).to_local(),
                    ):
                        differ.append(f"{cut} {case} {name}")
                assert len(optimizer.state) == len(names)
        return differ

    assert len(names) >= 5
    assert run_ranks(work, ranks) == [[]] * ranks
