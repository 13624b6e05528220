"""Checkpointing: the same gradients, names and random numbers; and the bytes it keeps, by
formula.
"""

import pytest
import torch
from torch import Tensor, nn

from recipe_lib.memory import apply_activation_checkpointing
from recipe_lib.models import DecoderSpec, build_meta, init_weights
from recipe_lib.ops.head_losses import CrossEntropy
from tests.memory.live_bytes import LiveBytes
from tests.parallel.small_models import (
    LENGTH,
    MLP_WIDTH,
    ROWS,
    WIDTH,
    build_small_spec,
    make_small_batch,
    read_gradients,
)

HEADS = 4
KV_WIDTH = 16


def decoder(spec: DecoderSpec, mode: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = build_meta(spec, dtype)
    names = [name for name, _ in model.named_parameters()]
    apply_activation_checkpointing(model, mode)
    assert [name for name, _ in model.named_parameters()] == names
    model.to_empty(device="cpu")
    init_weights(model, 3, spec)
    return model


def loss_of(model: nn.Module) -> Tensor:
    tokens, labels = make_small_batch()
    return model(tokens, labels=labels, head_loss=CrossEntropy(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_gradients_are_those_without_checkpointing(mode: str, dtype: torch.dtype) -> None:
    spec = build_small_spec()
    plain, checkpointed = decoder(spec, "none", dtype), decoder(spec, mode, dtype)
    losses = [loss_of(model) for model in (plain, checkpointed)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    expected, found = read_gradients(plain), read_gradients(checkpointed)
    assert expected.keys() == found.keys() and len(expected) == 3 * 9 + 3
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def bytes_kept(spec: DecoderSpec, mode: str) -> int:
    """Bytes alive between forward and backward that were not there before forward."""
    model = decoder(spec, mode)
    with LiveBytes() as live:
        loss = loss_of(model)
        kept = live.count_bytes()
    loss.backward()
    return kept


def bytes_of_a_layer(mode: str) -> int:
    """What one layer more keeps."""
    return bytes_kept(build_small_spec(layers=4), mode) - bytes_kept(
        build_small_spec(layers=3), mode
    )


def test_a_layer_keeps_its_input_alone() -> None:
    tokens = ROWS * LENGTH
    assert bytes_of_a_layer("full") == tokens * WIDTH * 4


def test_a_layer_keeps_its_input_attention_and_every_second_matmul() -> None:
    tokens = ROWS * LENGTH
    attention = WIDTH + HEADS  # output and log-sum-exp
    matmuls = KV_WIDTH + WIDTH + MLP_WIDTH  # k, o and up, of q, k, v, o, gate, up, down
    assert bytes_of_a_layer("selective") == tokens * (WIDTH + attention + matmuls) * 4


def test_less_is_kept_from_none_over_selective_to_full() -> None:
    none, selective, full = (bytes_of_a_layer(mode) for mode in ("none", "selective", "full"))
    assert none > 1.5 * selective > 1.5 * 3 * full


def test_backward_holds_one_layer_at_a_time() -> None:
    def peak(mode: str, layers: int) -> int:
        model = decoder(build_small_spec(layers=layers), mode)
        for parameter in model.parameters():
            parameter.requires_grad_(
                parameter is model.model.embed_tokens.weight
            )  # parameter gradients stay out
        with LiveBytes() as live:
            loss_of(model).backward()
        return live.peak

    layer_input = ROWS * LENGTH * WIDTH * 4
    assert peak("full", 6) - peak("full", 3) == 3 * layer_input
    assert peak("none", 6) - peak("none", 3) > 3 * 5 * layer_input


class Block(nn.Module):
    """A layer with dropout that takes keywords, None and a nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(
        self, hidden: Tensor, extra: Tensor | None = None, *, options: dict[str, Tensor]
    ) -> Tensor:
        hidden = self.dropout(self.linear(hidden)) * options["scale"]
        return hidden if extra is None else hidden + extra


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            hidden = block(
                hidden, extra=hidden if index else None, options={"scale": hidden.detach().abs()}
            )
        return hidden.sum()


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_dropout_keywords_none_and_nested_inputs(mode: str) -> None:
    found = []
    for used in ("none", mode):
        torch.manual_seed(0)
        model = Stack()
        apply_activation_checkpointing(model, used)
        hidden = torch.randn(4, 8, requires_grad=True)
        model(hidden).backward()
        assert hidden.grad is not None
        found.append({"input": hidden.grad, **read_gradients(model)})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_without_gradients_nothing_is_kept() -> None:
    model = decoder(build_small_spec(), "selective")
    with LiveBytes() as live, torch.no_grad():
        loss = loss_of(model)
        assert live.count_bytes() <= 16 < live.peak
    assert loss.grad_fn is None
    assert not loss_of(model.requires_grad_(False)).requires_grad


def test_two_backward_passes_in_a_row_accumulate() -> None:
    spec = build_small_spec()
    plain, checkpointed = (
        decoder(spec, "none", torch.float64),
        decoder(spec, "selective", torch.float64),
    )
    for model in (plain, checkpointed):
        loss_of(model).backward()
        loss_of(model).backward()
    expected, found = read_gradients(plain), read_gradients(checkpointed)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
