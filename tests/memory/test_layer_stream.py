"""Layer streaming: the same numbers bit for bit, whatever copies are late; two units at most;
nothing is left.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from recipe_lib.adapters import add_adapters, init_adapters
from recipe_lib.config.schema import LoraConfig, MemoryConfig
from recipe_lib.errors import ConfigError
from recipe_lib.memory import apply_activation_checkpointing, layer_stream
from recipe_lib.memory.layer_stream import LayerStream, stream_layers
from recipe_lib.models import build_meta, build_spec, init_weights
from recipe_lib.ops.dtensor_shards import get_detached_local
from recipe_lib.ops.head_losses import CrossEntropy, TokenLogProbs
from recipe_lib.parallel import materialize
from recipe_lib.training.loop import TrainingLoop
from tests.memory.late_memory import LateMemory
from tests.parallel.small_models import ROWS, build_small_spec, make_small_batch, read_gradients

LAYERS = 5
CPU = torch.device("cpu")
FROZEN = MemoryConfig(stream_layers=True)
STEPPING = MemoryConfig(stream_layers=True, optimizer_in_backward=True, optimizer_offload=True)
MODES = ("none", "full", "selective")


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_stream, "has_host", lambda device: True)


def bits(tensor: Tensor) -> Tensor:
    """As bytes: NaN is NaN, and 0 is not -0."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def same(found: Any, expected: Any) -> bool:
    """Of two dicts of tensors."""
    return found.keys() == expected.keys() and all(
        torch.equal(bits(found[key]), bits(expected[key])) for key in found
    )


def adapted(
    kind: str, mode: str, memory: MemoryConfig, spec: Any = None
) -> tuple[Any, LayerStream | None]:
    """A model with adapters, and what streams its frozen weights."""
    spec = spec or build_small_spec(layers=LAYERS)
    model = build_meta(spec, torch.float32)
    add_adapters(model, LoraConfig(rank=4, quantize_base=kind), torch.float32)
    apply_activation_checkpointing(model, mode)
    stream = stream_layers(model, memory, CPU)
    materialize(model, memory, CPU)
    init_weights(model, 3, spec)
    init_adapters(model, 4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    return model, stream


def trained(mode: str, memory: MemoryConfig, spec: Any = None) -> tuple[Any, LayerStream | None]:
    """A model of which every parameter is stepped as soon as it has a gradient, by plain
    descent.
    """
    spec = spec or build_small_spec(layers=LAYERS)
    model = build_meta(spec, torch.float32)
    apply_activation_checkpointing(model, mode)
    stream = stream_layers(model, memory, CPU)
    materialize(model, memory, CPU)
    init_weights(model, 3, spec)

    @torch.no_grad()
    def step(owner: Tensor, parameter: Tensor) -> None:
        parameter.sub_(parameter.grad, alpha=1e-3)  # type: ignore[arg-type]
        parameter.grad = None

    if stream is not None:
        stream.set_step(step)
    for parameter in model.parameters():
        if stream is None or stream.get_stepped_parameter(parameter) is parameter:
            parameter.register_post_accumulate_grad_hook(
                lambda parameter: step(parameter, parameter)
            )
    return model, stream


def loss_of(model: nn.Module, rows: int = ROWS, head_loss: Any = None) -> Tensor:
    tokens, labels = make_small_batch(rows)
    return model(tokens, labels=labels, head_loss=head_loss or CrossEntropy(4)).sum()


def two_micro_batches(model: nn.Module, head_loss: Any = None) -> dict[str, Tensor]:
    """Losses of two micro-batches of different sizes, an evaluation between them, and the sums of
    their gradients.
    """
    found = {}
    for rows in (ROWS, ROWS // 2):
        loss = loss_of(model, rows, head_loss)
        found[f"loss {rows}"] = loss.detach()
        loss.backward()
        del loss
        with torch.no_grad():
            found[f"evaluation {rows}"] = loss_of(model, 3)
    return found | {f"{name} gradient": one for name, one in read_gradients(model).items()}


def three_steps(model: nn.Module, head_loss: Any = None) -> dict[str, Tensor]:
    found = {}
    for step in range(3):
        loss = loss_of(model, head_loss=head_loss)
        found[f"loss {step}"] = loss.detach()
        loss.backward()
    return found | dict(model.named_parameters())


def bytes_there(stream: LayerStream) -> int:
    """Of all tensors that stand for parameters on the device."""
    return sum(
        get_detached_local(one).untyped_storage().nbytes()
        for unit in stream.units
        for one in unit.get_device_parameters().values()
    )


@contextmanager
def late(stream: LayerStream) -> Iterator[LateMemory]:
    """Copies come as late as they may. Afterwards nothing is on the device, and the parameters are
    the host's.
    """
    stream._copies._module = device = LateMemory()
    with device, device.follow_resizes():
        yield device
    assert not device.too_early and not device.too_late and not device.num_doubled
    assert bytes_there(stream) == 0 and not any(unit.in_use for unit in stream.units)


def watched(stream: LayerStream) -> list[tuple[int, int]]:
    """Units that have memory on the device, and their bytes, whenever one has been given it."""
    seen: list[tuple[int, int]] = []
    fetch = stream._prefetch._fetch

    def noted(number: Any) -> None:
        fetch(number)
        seen.append((len(stream._prefetch.on_device), bytes_there(stream)))

    stream._prefetch._fetch = noted  # type: ignore[method-assign]
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mode"), [("none", "none"), ("nf4", "full"), ("int8", "selective")]
)
def test_frozen_layers_give_the_same_bits(kind: str, mode: str) -> None:
    expected = two_micro_batches(adapted(kind, mode, MemoryConfig())[0])
    model, stream = adapted(kind, mode, FROZEN)
    assert stream is not None and [unit.name for unit in stream.units][:: LAYERS + 1] == [
        "model.embed_tokens",
        "lm_head",
    ]
    seen = watched(stream)
    with late(stream) as device:
        found = two_micro_batches(model)
    assert same(found, expected)
    sizes = [sum(host.nbytes for host in unit.list_host_parameters()) for unit in stream.units]
    assert max(count for count, _ in seen) == 2
    assert max(size for _, size in seen) == max(map(sum, zip(sizes, sizes[1:], strict=False)))
    # Forward copies every unit, backward the layers but for the last, which is there still; an
    # evaluation all again.
    assert device.copied == 2 * (sum(sizes) + sum(sizes[1:-2]) + sum(sizes))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_head_that_backward_needs_is_there_again(mode: str) -> None:
    """Log-probabilities of single tokens project again in backward."""
    expected = two_micro_batches(adapted("none", mode, MemoryConfig())[0], TokenLogProbs(2))
    model, stream = adapted("none", mode, FROZEN)
    assert stream is not None
    seen = watched(stream)
    with late(stream):
        found = two_micro_batches(model, TokenLogProbs(2))
    assert same(found, expected) and max(count for count, _ in seen) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "head_loss"), [*((mode, None) for mode in MODES), ("none", TokenLogProbs(2))]
)
def test_trained_layers_are_stepped_to_the_same_bits(mode: str, head_loss: Any) -> None:
    """So are embedding and output head, whose gradients are there before backward or, of
    log-probabilities, in it.
    """
    expected = three_steps(trained(mode, MemoryConfig())[0], head_loss)
    model, stream = trained(mode, STEPPING)
    assert stream is not None and [unit.is_layer for unit in stream.units] == [
        False,
        *[True] * LAYERS,
        False,
    ]
    seen = watched(stream)
    with late(stream):
        found = three_steps(model, head_loss)
    assert same(found, expected) and max(count for count, _ in seen) == 2


def test_a_graph_that_is_dropped_and_half_a_backward_leave_the_next_as_it_was() -> None:
    expected = two_micro_batches(adapted("nf4", "none", MemoryConfig())[0])
    model, stream = adapted("nf4", "none", FROZEN)
    assert stream is not None
    with late(stream):
        loss_of(model)
        late_ones = [
            one
            for name, one in model.named_parameters()
            if ".layers.3." in name and one.requires_grad
        ]
        torch.autograd.grad(loss_of(model), late_ones)
        found = two_micro_batches(model)
    assert same(found, expected)


def test_a_tied_matrix_is_used_twice() -> None:
    spec = build_small_spec(tied=True, layers=LAYERS)
    expected = two_micro_batches(adapted("none", "full", MemoryConfig(), spec)[0])
    model, stream = adapted("none", "full", FROZEN, spec)
    assert stream is not None and model.lm_head.weight is model.model.embed_tokens.weight
    with late(stream):
        found = two_micro_batches(model)
    assert same(found, expected) and model.lm_head.weight is model.model.embed_tokens.weight
    assert stream.num_bytes() == sum(host.nbytes for host in {*stream.parameters()})


def test_what_fails_in_forward_leaves_nothing_there() -> None:
    model, stream = adapted("none", "none", FROZEN)
    assert stream is not None
    model.model.layers[2].mlp.forward = lambda hidden: 1 / 0
    with pytest.raises(ZeroDivisionError):
        loss_of(model)
    del model.model.layers[2].mlp.forward
    two_micro_batches(model)
    assert bytes_there(stream) == 0


def test_trained_layers_of_several_data_ranks_are_refused() -> None:
    model = build_meta(build_small_spec(), torch.float32)
    with pytest.raises(
        ConfigError,
        match=r"^memory.stream_layers: found 2 ranks with tokens .* memory.cpu_offload, or start",
    ):
        stream_layers(model, STEPPING, CPU, 2)


# Faults, made on purpose


def stale_in_backward(stream: LayerStream, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's memory is there for backward, its values are those that the memory had."""
    fetch = stream._prefetch._fetch

    def faulty(number: int) -> None:
        fetch(number)
        if torch._C._current_graph_task_id() != -1:
            stream._prefetch.on_device[number]._event = None
            for one in stream.units[number].get_device_parameters().values():
                one.data.view(torch.uint8).fill_(1)

    monkeypatch.setattr(stream._prefetch, "_fetch", faulty)


def of_another_layer(stream: LayerStream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward has the values of the next layer."""
    fetch = stream._prefetch._fetch

    def faulty(number: int) -> None:
        units = stream.units
        if torch._C._current_graph_task_id() != -1 and number + 2 < len(units):
            held = units[number].list_host_parameters
            units[number].list_host_parameters = units[number + 1].list_host_parameters  # type: ignore[method-assign]
            fetch(number)
            units[number].list_host_parameters = held  # type: ignore[method-assign]
        else:
            fetch(number)

    monkeypatch.setattr(stream._prefetch, "_fetch", faulty)


def not_awaited(stream: LayerStream, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit is used before its copies are done."""
    fetch = stream._prefetch._fetch

    def faulty(number: int) -> None:
        fetch(number)
        stream._prefetch.on_device[number]._event = None

    monkeypatch.setattr(stream._prefetch, "_fetch", faulty)


@pytest.mark.parametrize("fault", [stale_in_backward, of_another_layer, not_awaited])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_wrong_values_in_backward_are_noticed(
    fault: Callable[..., None], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = two_micro_batches(adapted("none", mode, MemoryConfig())[0])
    model, stream = adapted("none", mode, FROZEN)
    assert stream is not None
    fault(stream, monkeypatch)
    stream._copies._module = device = LateMemory()
    with device, device.follow_resizes():
        found = two_micro_batches(model)
    assert not same(found, expected)


def test_values_that_autograd_takes_for_changed_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _ = adapted("none", "none", FROZEN)
    monkeypatch.setattr(
        torch.autograd, "_unsafe_preserve_version_counter", lambda tensors: nullcontext()
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        two_micro_batches(model)


def test_steps_that_are_not_sent_back_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = three_steps(trained("none", MemoryConfig())[0])
    monkeypatch.setattr(
        LayerStream, "_step_and_send", lambda stream, step, host, parameter: step(host, parameter)
    )
    assert not same(three_steps(trained("none", STEPPING)[0]), expected)


# Layers above 200 MiB


def wide_spec() -> Any:
    """Two layers and few tokens."""
    return build_spec(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": 3072,
            "intermediate_size": 2048,
            "num_hidden_layers": 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 512,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        },
        "wide",
    )


@pytest.mark.slow
def test_frozen_layers_above_200_mib_give_the_same_bits() -> None:
    spec = wide_spec()
    model, stream = adapted("none", "full", FROZEN, spec)
    assert stream is not None
    sizes = [
        sum(host.nbytes for host in unit.list_host_parameters())
        for unit in stream.units
        if unit.is_layer
    ]
    assert min(sizes) > 200 * 2**20
    found = {"loss": backward_once(model)} | read_gradients(model)
    del model, stream
    model, _ = adapted("none", "full", MemoryConfig(), spec)
    expected = {"loss": backward_once(model)} | read_gradients(model)
    assert same(found, expected)


@pytest.mark.slow
def test_trained_layers_above_200_mib_give_the_same_bits() -> None:
    spec = wide_spec()
    model, stream = trained("full", STEPPING, spec)
    assert stream is not None
    assert (
        min(
            sum(host.nbytes for host in unit.list_host_parameters())
            for unit in stream.units
            if unit.is_layer
        )
        > 200 * 2**20
    )
    loss = backward_once(model)
    found = dict(model.named_parameters())
    del model, stream
    model, _ = trained("full", MemoryConfig(), spec)
    assert backward_once(model) == loss
    assert same(found, dict(model.named_parameters()))


def backward_once(model: nn.Module) -> Tensor:
    loss = loss_of(model, 2)
    loss.backward()
    return loss.detach()


class AnswersOfMeta(TorchDispatchMode):
    """Stands for a device: its numbers are all true, and how often they are read is counted."""

    reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            self.reads += 1
            return True
        return func(*args, **(kwargs or {}))


def test_weights_of_host_and_device_are_checked_with_one_wait() -> None:
    """Trained layers are streamed; the final norm and a tied embedding are on the device."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(3, 2, device="meta"), nn.LayerNorm(2))
    loop: Any = SimpleNamespace(
        _model=model, _world=SimpleNamespace(any=bool), _raise_diverged=pytest.fail
    )
    with AnswersOfMeta() as device:
        TrainingLoop._check_weights(loop)
        assert device.reads == 1
    model[0].weight.data[1, 2] = float("inf")
    with AnswersOfMeta(), pytest.raises(pytest.fail.Exception, match="weights that are not finite"):
        TrainingLoop._check_weights(loop)
