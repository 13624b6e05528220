"""A resumed run's parameter groups have the hyperparameters that this run gave them."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from recipe_lib.checkpoint.resumable_state import save_state
from recipe_lib.config import load_config
from recipe_lib.config.local_files import STATE_FOLDER
from recipe_lib.config.schema import OptimizerConfig
from recipe_lib.optim.optimizers import OptimizerLevers, build_optimizer
from recipe_lib.parallel import start_world
from recipe_lib.training import resume_run
from tests.recipes.runs import PLAIN


def build_groups(cfg: OptimizerConfig, bias_decay: float) -> tuple[nn.Module, Optimizer]:
    """Return a model, and its optimizer with a group for the bias."""
    model = nn.Linear(3, 2)
    optimizer = build_optimizer(cfg, [model.weight], torch.device("cpu"))
    optimizer.add_param_group({"params": [model.bias], "weight_decay": bias_decay})
    return model, optimizer


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_each_group_keeps_what_it_was_built_with(name: str, tmp_path: Path) -> None:
    """Not what was saved, and not the config's decay for a group that has its own."""
    settings = [
        "model.preset=demo/0.5M",
        "tokenizer.path=unread",
        "data.source=unread",
        f"output_dir={tmp_path}",
        f"optimizer.name={name}",
        "optimizer.weight_decay=0.3",
        "resume=latest",
    ]
    cfg = load_config(PLAIN, settings)
    identity = {"global_batch_size": 1, "seed": 0, "order": {}, "data": ""}
    best = SimpleNamespace(restore=lambda *arguments: None, folder=None)
    data: Any = SimpleNamespace(total_steps=2, identity=lambda: identity, best=best)
    with start_world(cfg) as world:
        model, optimizer = build_groups(replace(cfg.optimizer, weight_decay=0.7), bias_decay=0.5)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        save_state(
            tmp_path / STATE_FOLDER,
            1,
            model,
            optimizer=optimizer,
            extra={"step": 1, **identity},
            world=world,
            keep=1,
        )
        model, optimizer = build_groups(cfg.optimizer, bias_decay=0.0)
        done = resume_run(
            cfg,
            model=model,
            optimizer=optimizer,
            levers=OptimizerLevers(),
            data=data,
            world=world,
        )
    assert done == 1
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
