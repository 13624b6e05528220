"""A validation is without dropout, and training goes on with it."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from recipe_lib.training.losses import compute_validation_loss, sum_over_validation

BATCHES = SimpleNamespace(micro_batches=[None], num_label_tokens=4, num_items=2)
ONE: Any = SimpleNamespace(pipeline=None)
DATA: Any = SimpleNamespace(
    validation_batches=lambda: iter([BATCHES]), scored_metrics=[], generated_metrics=[]
)
WORLD: Any = SimpleNamespace(device=torch.device("cpu"), all_reduce_sum=lambda tensor: tensor)


def test_the_mean_loss_is_without_dropout_and_training_goes_on_with_it() -> None:
    model, seen = nn.Dropout(0.5).train(), []

    def compute_loss(batch: Any) -> torch.Tensor:
        seen.append(model.training)
        return torch.tensor(6.0)

    found = compute_validation_loss(model, ONE, compute_loss, DATA, WORLD)
    assert found == {"validation_loss": 1.5, "validation_tokens": 4}
    assert seen == [False] and model.training


def test_so_are_the_sums_of_other_methods() -> None:
    model, seen = nn.Dropout(0.5).train(), []

    def compute_sums(batches: Any) -> Any:
        seen.append(model.training)
        return iter([torch.tensor([1.0, 2.0])])

    sums = torch.zeros(2, dtype=torch.float64)
    assert sum_over_validation(model, ONE, DATA, compute_sums, sums) == (4, 2)
    assert sums.tolist() == [1.0, 2.0]
    assert seen == [False] and model.training
