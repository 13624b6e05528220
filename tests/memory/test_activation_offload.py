"""Activation offload: the same numbers bit for bit, whatever copies are late; what is sent, once;
nothing is left.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recipe_lib.config.schema import MemoryConfig
from recipe_lib.errors import ConfigError
from recipe_lib.memory import activation_offload, apply_activation_checkpointing, compile_layers
from recipe_lib.memory.activation_offload import (
    OffloadedActivations,
    SavedStorage,
    offload_activations,
)
from recipe_lib.models import build_meta, init_weights
from recipe_lib.ops.head_losses import CrossEntropy
from tests.memory.late_copies import LateCopies
from tests.memory.live_bytes import LiveBytes
from tests.parallel.small_models import (
    LENGTH,
    ROWS,
    WIDTH,
    build_small_spec,
    make_small_batch,
    read_gradients,
)
from tests.selection import mark_slow_but

LAYERS = 5
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "has_host", lambda device: True)


def decoder(
    mode: str = "none",
    ahead: int | None = 1,
    layers: int = LAYERS,
    change: Callable[[nn.Module], Any] = lambda _: None,
    is_stage: bool = False,
) -> tuple[nn.Module, OffloadedActivations]:
    """A small model and its window; ahead None: without the lever."""
    spec = build_small_spec(layers=layers)
    model = build_meta(spec, torch.float32)
    apply_activation_checkpointing(model, mode)
    change(model)
    memory = MemoryConfig(
        activation_offload=ahead is not None, activation_offload_prefetch_layers=ahead or 1
    )
    window = offload_activations(model, memory, CPU, is_stage=is_stage)
    model.to_empty(device="cpu")
    init_weights(model, 3, spec)
    return model, window  # type: ignore[return-value]


def loss_of(model: nn.Module, rows: int = ROWS) -> Tensor:
    tokens, labels = make_small_batch(rows)
    return model(tokens, labels=labels, head_loss=CrossEntropy(4))


def two_micro_batches(model: nn.Module) -> list[Tensor]:
    """Losses of two micro-batches of different sizes, and the sums of their gradients."""
    losses = []
    for rows in (ROWS, ROWS // 2):
        losses.append(loss_of(model, rows))
        losses[-1].backward()
    return [*losses, *read_gradients(model).values()]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) > 10 and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("ahead", [1, 2, LAYERS - 1])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_the_numbers_are_those_without_it_however_late_copies_are(mode: str, ahead: int) -> None:
    expected = two_micro_batches(decoder(mode, None)[0])
    model, window = decoder(mode, ahead)
    window._copies._module = late = LateCopies()
    with late:
        found = two_micro_batches(model)
    assert same(found, expected)
    assert not late.too_early and not late.too_late
    assert window.host_bytes.keys() == set(
        range(LAYERS - ahead)
    )  # backward begins with the last ones
    first, second = (rows * LENGTH * WIDTH * 4 for rows in (ROWS, ROWS // 2))
    if mode == "full":
        assert late.copied == 2 * (first + second) * len(window.host_bytes)


def nothing(*_: Any) -> None:
    pass


def drop_at_once(kept: SavedStorage) -> None:
    kept.on_device = None if kept.on_host is not None else kept.on_device


@pytest.mark.parametrize("broken", ["wait_for_copy", "free_device_memory"])
def test_a_wait_that_is_left_out_is_noticed(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above can see."""
    expected = two_micro_batches(decoder("none", None)[0])
    model, window = decoder("none", 1)
    window._copies._module = late = LateCopies()
    instead = drop_at_once if broken == "free_device_memory" else nothing
    monkeypatch.setattr(SavedStorage, broken, instead)
    with late:
        found = two_micro_batches(model)
    assert not same(found, expected)


def test_all_that_a_layer_keeps_is_sent_once_and_parameters_are_not() -> None:
    def kept_bytes(layers: int) -> int:
        model, _ = decoder("none", None, layers)
        with LiveBytes() as live:
            loss = loss_of(model)
            kept = live.count_bytes()
        loss.backward()
        return kept

    model, window = decoder("none", 1)
    loss_of(model)
    assert set(window.host_bytes.values()) == {kept_bytes(4) - kept_bytes(3)}


def test_memory_is_let_go_layer_by_layer() -> None:
    """Storages that layers keep, on the device between layers: at most those of `ahead` + 1
    layers.
    """
    ahead, kept_now, counts = 2, weakref.WeakSet[SavedStorage](), {"forward": [0], "backward": [0]}
    model, window = decoder("full", ahead, layers=8)
    make = SavedStorage.__init__

    def made(self: SavedStorage, *args: Any) -> None:
        make(self, *args)
        kept_now.add(self)

    def count(*_: Any) -> None:
        where = (
            "forward" if torch._C._current_graph_task_id() == -1 else "backward"
        )  # where it is computed again
        counts[where].append(sum(kept.on_device is not None for kept in kept_now))

    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(count)
    SavedStorage.__init__ = made  # type: ignore[method-assign]
    try:
        loss_of(model).backward()
    finally:
        SavedStorage.__init__ = make  # type: ignore[method-assign]
    assert counts["forward"] == [0, 1, 2, *[ahead + 1] * 6]
    assert counts["backward"] == [0, *[ahead + 1] * 6, 2, 1]
    assert len(counts["forward"]) == len(counts["backward"]) == 9


class _Bang(Exception):  # noqa: N818
    pass


def bang(*_: Any) -> None:
    raise _Bang


@pytest.mark.slow
@pytest.mark.parametrize(
    "ends", mark_slow_but(["no backward", "in forward", "in backward", "no gradients"], 1)
)
def test_nothing_is_held_when_backward_does_not_come(ends: str) -> None:
    layers = 3
    gc.freeze()  # the collection looks through what follows, and not through all that is imported
    model, window = decoder("none", 1, layers)
    window._copies._module = late = LateCopies()
    alive = weakref.WeakSet[SavedStorage]()
    pack = window._pack
    window._pack = lambda call, tensor: _noted(pack(call, tensor), alive)  # type: ignore[method-assign]
    layer = model.model.layers[1]
    with late, LiveBytes() as live:
        if ends == "no backward":
            loss = loss_of(model)
            assert len(alive) > 10
            del loss
        elif ends == "no gradients":
            with torch.no_grad():
                loss_of(model)
            assert late.copied == 0
        else:
            register = (
                layer.mlp.register_forward_hook
                if ends == "in forward"
                else layer.register_full_backward_hook
            )
            handle = register(bang)
            with pytest.raises(_Bang):
                loss_of(model).backward()
            handle.remove()
        gc.collect()
        model.zero_grad()
        gc.unfreeze()
        assert len(alive) == 0
        assert live.count_bytes() == 0
        later = two_micro_batches(model)
    assert same(later, two_micro_batches(decoder("none", None, layers)[0]))


def _noted(packed: Any, alive: "weakref.WeakSet[SavedStorage]") -> Any:
    if isinstance(packed, activation_offload.PackedTensor):
        alive.add(packed.saved)
    return packed


def test_backward_twice_through_one_graph() -> None:
    losses = []
    for ahead in (None, 1):
        model, _ = decoder("none", ahead)
        loss = model(make_small_batch()[0]).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        losses.append([*read_gradients(model).values()])
    assert same(losses[1], losses[0])


def test_micro_batches_that_wait_for_each_other() -> None:
    """As in a pipeline: forwards of all, then backwards in order; no layer stays on the device."""
    found = []
    for ahead in (None, 1):
        model, window = decoder("none", ahead, is_stage=True)
        with LateCopies() as late:
            if window is not None:
                window._copies._module = late
            losses = [loss_of(model, rows) for rows in (8, 4, 2)]
            for loss in losses:
                loss.backward()
        found.append([*losses, *read_gradients(model).values()])
    assert window.host_bytes.keys() == set(range(LAYERS))
    assert same(found[1], found[0])


@pytest.mark.slow
def test_compiled_layers_are_compiled_as_often_and_send_what_they_keep() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = []
    for change in (lambda _: None, lambda model: compile_layers(model, backend="aot_eager")):
        model, window = decoder("none", 1, 3, change=change)
        loss = loss_of(model)
        loss.backward()
        found.append([loss, *read_gradients(model).values()])
    assert len(found[0]) == len(found[1]) > 10
    # On a CPU the norm's backward is another chain of operators where it is compiled.
    for eager, compiled in zip(*found, strict=True):
        assert torch.allclose(eager, compiled, rtol=1e-5, atol=1e-5 * float(eager.abs().max()))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # alike layers share it
    assert min(window.host_bytes.values()) >= ROWS * LENGTH * WIDTH * 4


def test_a_cpu_is_left_alone_and_so_is_a_model_without_the_lever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _ = decoder("none", None)
    forward = model.model.layers[0].forward
    assert model.model.layers[0].forward == forward
    monkeypatch.undo()
    assert offload_activations(model, MemoryConfig(activation_offload=True), CPU) is None
    assert model.model.layers[0].forward == forward


@pytest.mark.parametrize("ahead", [LAYERS, LAYERS + 1])
def test_no_layer_that_could_be_sent_is_refused_in_one_line(ahead: int) -> None:
    key = "memory.activation_offload_prefetch_layers"
    words = rf"^{key}: found {ahead} for a model of {LAYERS} layers, .* fewer than {LAYERS}; "
    with pytest.raises(ConfigError, match=words):
        decoder("none", ahead)
    _, window = decoder("none", ahead, is_stage=True)
    assert (
        window.sent == LAYERS
    )  # other micro-batches come between a layer's forward and its backward
