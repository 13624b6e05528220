"""Build small models whose layers compute again what is cheap, and train them with and without.

`assert_same_training(after=change)` is a whole test.
"""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recipe_lib.adapters import add_adapters, init_adapters
from recipe_lib.config.schema import FullFinetuneConfig, LoraConfig, MemoryConfig
from recipe_lib.memory.apply_levers import recompute_cheap_tensors
from recipe_lib.models import Decoder, build_meta, init_weights
from recipe_lib.ops.head_losses import CrossEntropy
from recipe_lib.ops.kept_tensors import KeptTensors
from tests.memory.live_bytes import LiveBytes
from tests.parallel.small_models import (
    ROWS,
    build_small_spec,
    make_small_batch,
    read_gradients,
)

LAYERS = 3
Change = Callable[[nn.Module], Any]


def do_nothing(_: Any) -> None:
    pass


def use_lever(model: nn.Module, on: bool, **keys: Any) -> None:
    memory = MemoryConfig(recompute_cheap=on, **keys)
    recompute_cheap_tensors(model, FullFinetuneConfig(memory=memory))


def build_model(
    on: bool,
    *,
    before: Change = do_nothing,
    after: Change = do_nothing,
    dtype: torch.dtype = torch.float64,
    layers: int = LAYERS,
    lora: LoraConfig | None = None,
) -> Decoder:
    """Return a small model. before, after: change it before and after the lever is applied."""
    spec = build_small_spec(layers=layers)
    model = build_meta(spec, dtype)
    if lora is not None:
        add_adapters(model, lora, dtype)
    before(model)
    use_lever(model, on)
    after(model)
    model.to_empty(device="cpu")
    init_weights(model, 3, spec)
    if lora is not None:
        fill_adapters(model)
    return model


def fill_adapters(model: nn.Module) -> None:
    init_adapters(model, 4)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros would hide A's gradient
            parameter.data.normal_(generator=torch.Generator().manual_seed(len(name)))


def compute_loss(model: nn.Module, rows: int = ROWS) -> Tensor:
    tokens, labels = make_small_batch(rows)
    return model(tokens, labels=labels, head_loss=CrossEntropy(3))


def compute_square(model: nn.Module) -> Tensor:
    """Return another loss: that of the head goes backward only once."""
    return model(make_small_batch()[0]).square().sum()


def train(model: nn.Module, rows: int = ROWS) -> list[Tensor]:
    """Return the loss of one backward, and the model's gradients."""
    torch.manual_seed(1)
    loss = compute_loss(model, rows)
    loss.backward()
    return [loss.detach(), *read_gradients(model).values()]


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    """Assert equality bit for bit, in fp64 to 1e-12."""
    assert len(actual) == len(expected) > 0
    for left, right in zip(actual, expected, strict=True):
        assert left.dtype == right.dtype
        if left.dtype == torch.float64:
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)
        else:
            assert torch.equal(left, right)


def assert_same_training(**options: Any) -> None:
    assert_equal(train(build_model(True, **options)), train(build_model(False, **options)))


def measure_kept_bytes(model: nn.Module, **options: Any) -> int:
    """Return the bytes that live between forward and backward."""
    with LiveBytes() as live:
        loss = compute_loss(model, **options)
        gc.collect()
        kept = live.count_bytes()
    del loss
    return kept


def record_freed_tensors(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets, by layer that has run, how many saved tensors it freed."""
    freed: list[int] = []
    choose = KeptTensors._choose

    def choose_and_count(self: KeptTensors) -> None:
        saved_tensors = list(self._saved_tensors)
        choose(self)
        freed.append(sum(saved.view is not None for saved in saved_tensors))

    monkeypatch.setattr(KeptTensors, "_choose", choose_and_count)
    return freed
