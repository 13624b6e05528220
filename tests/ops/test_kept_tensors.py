"""What layers compute again in backward: the gradients are those without it, whatever a user does
to the model, and beside every other lever; and what would be wrong is refused as torch refuses it.
"""

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipe_lib.config.schema import LoraConfig
from recipe_lib.memory import chunk_mlps
from recipe_lib.models.decoder import DecoderLayer, Norm
from recipe_lib.ops import kept_tensors
from recipe_lib.ops.kept_tensors import KeptTensors, run_cheap
from tests.memory.live_bytes import LiveBytes
from tests.ops.recorded_models import (
    LAYERS,
    Change,
    assert_equal,
    assert_same_training,
    build_model,
    compute_loss,
    compute_square,
    do_nothing,
    measure_kept_bytes,
    record_freed_tensors,
    train,
)
from tests.parallel.small_models import (
    LENGTH,
    MLP_WIDTH,
    ROWS,
    WIDTH,
    read_gradients,
)

MODIFIED = "modified by an in-?place operation"  # torch's words and ours


@pytest.fixture
def count_freed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return record_freed_tensors(monkeypatch)


def list_norms(model: nn.Module) -> list[Norm]:
    return [
        norm
        for layer in model.model.layers
        for norm in (layer.input_layernorm, layer.post_attention_layernorm)
    ]


def hook_norms(hook: Callable[..., Any]) -> Change:
    def change(model: nn.Module) -> None:
        for norm in list_norms(model):
            norm.register_forward_hook(hook)

    return change


# What users do to a norm: hooks `fn(norm, (input,), output)` that return another output or None.

HOOKS: dict[str, Callable[..., Any]] = {
    "doubled": lambda norm, args, out: out * 2,
    "a view": lambda norm, args, out: out.view(-1, WIDTH).view_as(out),
    "a clone": lambda norm, args, out: out.clone(),
    "another layout": lambda norm, args, out: out.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda norm, args, out: out[:1].expand_as(out),
    "read by a sine": lambda norm, args, out: out.sin() + out,
    "read detached": lambda norm, args, out: out + out.detach().square(),
    "read as data": lambda norm, args, out: out + out.data.square(),
    "written before it is read": lambda norm, args, out: out.add_(1),
    "written through a detached one": lambda norm, args, out: write_through(out),
    "written in part": lambda norm, args, out: write_through(out[0]),
    "called again": lambda norm, args, out: out + norm.forward(args[0]),
    "nested": lambda norm, args, out: run_cheap(torch.mul, out, 2.0),
}


def write_through(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.detach().mul_(3)


@pytest.mark.parametrize("kind", HOOKS)
def test_a_norm_with_a_hook_has_the_gradients_of_one_without_the_lever(kind: str) -> None:
    assert_same_training(after=hook_norms(HOOKS[kind]))


def test_the_lever_frees_and_the_hooks_run(count_freed: list[int]) -> None:
    """What the test above would not see: a lever that frees nothing."""
    train(build_model(True))
    # Of each layer, at least: what q, k, v, gate and up read, and what down reads.
    assert len(count_freed) == LAYERS and min(count_freed) >= 6
    kept = [measure_kept_bytes(build_model(on)) for on in (True, False)]
    # Two normed streams and one product of each layer.
    assert kept[1] - kept[0] == LAYERS * ROWS * LENGTH * (2 * WIDTH + MLP_WIDTH) * 8


def test_a_second_reader_outside_of_the_model() -> None:
    results = []
    for on in (True, False):
        outputs: list[Tensor] = []

        def keep(norm: Norm, args: Any, out: Tensor, outputs: list[Tensor] = outputs) -> None:
            outputs.append(out)

        model = build_model(on, after=hook_norms(keep))
        loss = compute_loss(model)
        loss = loss + sum(out.square().sin().sum() for out in outputs)
        loss.backward()
        results.append([loss.detach(), *outputs, *read_gradients(model).values()])
    assert_equal(*results)


# A hook of a module of the middle layer, by what it writes into.
REFUSED: dict[str, tuple[str, Callable[..., Any]]] = {
    "the norm's output after a linear": (
        "layers.1.mlp.up_proj",
        lambda linear, args, out: write_through(args[0]),
    ),
    "the stream that the norm read": (
        "layers.1.input_layernorm",
        lambda norm, args, out: write_through(args[0]),
    ),
    "a norm's weight": (
        "layers.1.post_attention_layernorm",
        lambda norm, args, out: write_through(norm.weight),
    ),
    "a stream, when its layer has ended": (
        "layers.2",
        lambda layer, args, out: write_through(args[0]),
    ),
}


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_torch_refuses_is_refused(kind: str, on: bool) -> None:
    model = build_model(on)
    name, hook = REFUSED[kind]
    model.model.get_submodule(name).register_forward_hook(hook)
    loss = compute_loss(model)
    with pytest.raises(RuntimeError, match=MODIFIED):
        loss.backward()


def test_a_kept_tensor_that_is_written_into_later_is_not_read() -> None:
    """Without the lever nobody needs it: the layer kept it in place of a larger one."""
    narrow = torch.randn(4, 8, dtype=torch.bfloat16).requires_grad_() * 1
    weight = torch.randn(8, 8, requires_grad=True)
    with KeptTensors().layer():
        out = F.linear(run_cheap(torch.Tensor.to, narrow, torch.float32), weight)
    write_through(narrow)
    with pytest.raises(RuntimeError, match="memory.recompute_cheap=false"):
        out.sum().backward()


def test_one_norm_at_two_places() -> None:
    def tie(model: nn.Module) -> None:
        for layer in model.model.layers:
            layer.post_attention_layernorm = layer.input_layernorm
        model.model.layers[1].input_layernorm = model.model.layers[0].input_layernorm

    assert_same_training(before=tie)


def test_a_layer_that_returns_a_norm() -> None:
    def end_with_norm(model: nn.Module) -> None:
        for layer in model.model.layers:
            layer.forward = EndWithNorm(layer)

    assert_same_training(before=end_with_norm)


class EndWithNorm:
    """The forward of a layer, which returns the norm of the stream, which a linear has read."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, *args: Any) -> Tensor:
        normed = self.layer.input_layernorm(DecoderLayer.forward(self.layer, *args))
        self.layer.mlp.up_proj(normed)  # a reader whose result nobody has
        return normed


# Backward in other ways.


def test_gradients_of_some_inputs_alone() -> None:
    results = []
    for on in (True, False):
        model = build_model(on)
        loss = compute_square(model)
        layer = model.model.layers[1]
        inputs = [layer.self_attn.k_proj.weight, layer.input_layernorm.weight]
        first = torch.autograd.grad(loss, inputs[:1], retain_graph=True)
        second = torch.autograd.grad(loss, inputs, retain_graph=True)
        results.append([*first, *second, *torch.autograd.grad(loss, list(model.parameters()))])
    assert_equal(*results)


def test_backward_twice() -> None:
    results = []
    for on in (True, False):
        model = build_model(on)
        loss = compute_square(model)
        loss.backward(retain_graph=True)
        once = [gradient.clone() for gradient in read_gradients(model).values()]
        loss.backward()
        twice = [*read_gradients(model).values()]
        assert_equal(twice, [2 * gradient for gradient in once])
        results.append([*once, *twice])
    assert_equal(*results)


@pytest.mark.parametrize("reverse", [True, False])
def test_forwards_and_backwards_of_several_micro_batches(reverse: bool) -> None:
    results = []
    for on in (True, False):
        model = build_model(on)
        losses = [compute_loss(model, rows) for rows in (8, 2, 4)]
        for loss in reversed(losses) if reverse else losses:
            loss.backward()
            with torch.no_grad():
                compute_loss(model)
            model.eval()
            compute_loss(model, 2)
            model.train()
        results.append([*losses, *read_gradients(model).values()])
    assert_equal(*results)


def test_what_is_computed_again_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    note = KeptTensors.note

    def note_counted(
        self: KeptTensors, function: Any, args: Any, kwargs: Any, result: Any, cheap: Any = None
    ) -> None:
        def run(*args: Any) -> Any:
            calls.append(getattr(function, "__name__", "?"))
            return function(*args)

        note(self, run, args, kwargs, result, cheap=cheap)

    monkeypatch.setattr(KeptTensors, "note", note_counted)
    model = build_model(True)
    loss = compute_loss(model)
    assert not calls
    loss.backward()
    # q, k and v read one norm, gate and up the other; down reads the product.
    expected = ["compute_gated_product", "rms_norm", "rms_norm"] * LAYERS
    assert sorted(calls) == sorted(expected)


def test_what_is_computed_again_is_freed_when_the_last_reader_has_it() -> None:
    """Though the graph stays, and with it all that the layers have kept."""
    model = build_model(True)
    with LiveBytes() as live:
        loss = compute_square(model)
        before = live.count_bytes()
        loss.backward(retain_graph=True)
        gradients = sum(gradient.nbytes for gradient in read_gradients(model).values())
        # The last is backward's own gradient of the loss.
        assert 0 <= live.count_bytes() - before - gradients <= loss.nbytes


# Memory and failures.


def test_a_graph_that_is_dropped_is_freed() -> None:
    for on in (True, False):
        model = build_model(on)
        with LiveBytes() as live:
            loss = compute_loss(model)
            assert live.count_bytes() > 0
            del loss
            assert live.count_bytes() == 0  # at once, without a collection


@pytest.mark.parametrize("after_saved", [True, False])
def test_a_forward_that_fails_leaves_nothing(after_saved: bool) -> None:
    class FailError(Exception):
        pass

    def fail(*_: Any) -> None:
        raise FailError

    model = build_model(True)
    sigmoid = model.model.layers[1].mlp.register_forward_pre_hook(
        lambda mlp, args: (args[0] * args[0].sigmoid(),)
    )
    owner = model.model.layers[1].mlp.down_proj if after_saved else model.model.layers[1].self_attn
    handle = owner.register_forward_hook(fail)
    with LiveBytes() as live:
        for _ in range(2):
            with pytest.raises(FailError):
                compute_loss(model)
        gc.collect()
        assert live.count_bytes() == 0
    handle.remove()
    sigmoid.remove()
    assert kept_tensors._recorder.get() is None
    assert_equal(train(model), train(build_model(False)))


def test_pieces_of_an_mlp_are_not_held_until_the_layer_ends() -> None:
    """Tiles exist one at a time, also inside of a layer that is recorded."""
    starts: list[int] = []
    peaks: list[int] = []
    for on in (True, False):
        # Dropout is noted also where there is no graph.
        lora = LoraConfig(target_modules=["gate", "down"], dropout=0.3)
        model = build_model(on, before=lambda model: chunk_mlps(model, 8), lora=lora)
        with LiveBytes() as live:
            layer = model.model.layers[1]

            def begin(mlp: nn.Module, args: Any, live: LiveBytes = live) -> None:
                starts.append(live.count_bytes())
                live.peak = 0

            def end(mlp: nn.Module, args: Any, out: Tensor, live: LiveBytes = live) -> None:
                peaks.append(live.peak - starts[-1])

            layer.mlp.register_forward_pre_hook(begin)
            layer.mlp.register_forward_hook(end)
            compute_loss(model)
    assert peaks[0] == peaks[1] > 0


# Hooks of a user.


class HostCopies:
    """Hooks that pack a contiguous copy: neither strides nor the storage around survive."""

    def __init__(self, padding: int = 0) -> None:
        self.padding = padding
        self.num_packed = 0
        self.packed: weakref.WeakSet[Any] = weakref.WeakSet()

    def pack(self, tensor: Tensor) -> Any:
        self.num_packed += 1
        box = _Box(tensor.detach().clone(memory_format=torch.contiguous_format))
        self.packed.add(box)
        return box

    def unpack(self, box: Any) -> Tensor:
        # A part of a larger buffer.
        buffer = torch.cat([box.tensor.new_full((self.padding,), 7.0), box.tensor.flatten()])
        return buffer[self.padding :].view(box.tensor.shape)

    def enter(self) -> AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)


class _Box:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize("padding", [0, 3])
def test_hooks_around_the_model_get_less_and_give_it_back(padding: int) -> None:
    results = []
    held = []
    for on in (True, False):
        hooks = HostCopies(padding)
        model = build_model(on)
        with hooks.enter():
            loss = compute_loss(model)
        assert hooks.num_packed > 10 * LAYERS
        held.append(sum(box.tensor.nbytes for box in hooks.packed))
        loss.backward()
        results.append([loss.detach(), *read_gradients(model).values()])
    assert_equal(*results)
    # What is freed is freed in the hooks' memory too: what q, k, v, gate, up and down read.
    assert held[1] - held[0] >= LAYERS * ROWS * LENGTH * (5 * WIDTH + MLP_WIDTH) * 8


@pytest.mark.parametrize("inside", [True, False])
def test_saving_on_the_cpu(inside: bool) -> None:
    results = []
    for on in (True, False):
        model = build_model(on, after=save_mlps_on_cpu if inside else do_nothing)
        with nullcontext() if inside else torch.autograd.graph.save_on_cpu():
            loss = compute_square(model)
        loss.backward(retain_graph=True)
        loss.backward()
        results.append([loss.detach(), *read_gradients(model).values()])
    assert_equal(*results)


def save_mlps_on_cpu(model: nn.Module) -> None:
    for layer in model.model.layers:
        contexts: list[Any] = []

        def enter(mlp: nn.Module, args: Any, contexts: list[Any] = contexts) -> None:
            contexts.append(torch.autograd.graph.save_on_cpu())
            contexts[-1].__enter__()

        def leave(mlp: nn.Module, args: Any, out: Any, contexts: list[Any] = contexts) -> None:
            contexts.pop().__exit__(None, None, None)

        layer.mlp.register_forward_pre_hook(enter)
        layer.mlp.register_forward_hook(leave)


# Odd tensors, in a layer of their own.


def compare_layers(
    forward: Callable[..., Tensor],
    *inputs: Tensor,
    hooks: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Assert that a forward in a recorded layer has the gradients of one outside of it."""
    results = []
    for context in (KeptTensors().layer, nullcontext):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        with hooks(), context():
            out = forward(*leaves)
        out.abs().sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    assert_equal(*results)


def square(tensor: Tensor) -> Tensor:
    return tensor * tensor


def rotate_pairs(pairs: Tensor) -> Tensor:
    """Return real numbers `[n, m, 2]` times i, as complex ones."""
    return torch.view_as_real(torch.view_as_complex(pairs) * 1j).clone()


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


HOOKS_AROUND = [nullcontext, torch.autograd.graph.save_on_cpu, lambda: HostCopies(5).enter()]


@pytest.mark.parametrize("hooks", HOOKS_AROUND)
def test_parts_of_one_storage(hooks: Any) -> None:
    """Queries and keys are slices of one matrix's result, and saved as slices."""

    def forward(hidden: Tensor, weight: Tensor) -> Tensor:
        fused = hidden @ weight
        query = fused[:, 4:]
        key = fused[:, :4]
        heads = [run_cheap(square, part) for part in (query, key)]
        return (heads[0].sin() @ heads[1].cos().t()) + heads[0].sum() * heads[1].mean()

    compare_layers(forward, draw(6, 5), draw(5, 8), hooks=hooks)


@pytest.mark.parametrize("hooks", HOOKS_AROUND)
def test_transposed_and_strided_tensors(hooks: Any) -> None:
    def forward(hidden: Tensor, weight: Tensor) -> Tensor:
        moved = (hidden * 2).t()
        made = run_cheap(square, moved)
        strided = run_cheap(torch.exp, made[::2, 1:])
        return (moved.sin() * made.cos()).sum() + (strided @ weight).sin()

    compare_layers(forward, draw(5, 6), draw(4, 3), hooks=hooks)


@pytest.mark.parametrize("hooks", HOOKS_AROUND)
def test_expanded_tensors(hooks: Any) -> None:
    def forward(row: Tensor, weight: Tensor) -> Tensor:
        expanded = (row * 2).expand(7, 4)
        made = run_cheap(square, expanded)
        return (made @ weight) + run_cheap(torch.add, made, expanded).sin().sum()

    compare_layers(forward, draw(1, 4), draw(4, 3), hooks=hooks)


def test_tensors_without_elements() -> None:
    def forward(rows: Tensor, weight: Tensor) -> Tensor:
        made = run_cheap(square, rows * 2)
        return (made @ weight).sin().sum() + run_cheap(square, weight).sin().sum()

    compare_layers(forward, draw(0, 4), draw(4, 3))


def test_one_storage_in_two_types() -> None:
    """A view in another type cannot be taken from the storage by strides in this one."""

    def forward(pairs: Tensor, weight: Tensor) -> Tensor:
        made = run_cheap(square, pairs.sin())
        turned = run_cheap(rotate_pairs, made)
        as_complex = torch.view_as_complex(run_cheap(square, turned))
        return (turned.flatten(1) @ weight).sin() + as_complex.abs().sum() + made.sin().sum()

    compare_layers(forward, draw(5, 3, 2), draw(6, 4))


def test_a_call_that_reads_a_view_in_another_type() -> None:
    def multiply(numbers: Tensor) -> Tensor:
        return torch.view_as_real(numbers * 1j).clone()

    def forward(pairs: Tensor, weight: Tensor) -> Tensor:
        made = run_cheap(square, pairs.sin())
        turned = run_cheap(multiply, torch.view_as_complex(made))
        return (turned.flatten(1) @ weight).sin()

    compare_layers(forward, draw(5, 3, 2), draw(6, 4))


def test_conjugated_views() -> None:
    def forward(numbers: Tensor, weight: Tensor) -> Tensor:
        made = run_cheap(square, numbers.sin())
        return (made.conj() @ weight).abs() + (run_cheap(square, made.conj()) @ weight).abs()

    compare_layers(forward, draw(5, 3, dtype=torch.complex128), draw(3, 4, dtype=torch.complex128))


def test_sparse_tensors() -> None:
    def forward(hidden: Tensor) -> Tensor:
        made = run_cheap(square, hidden)
        matrix = made.to_sparse()
        return torch.sparse.mm(matrix, made.sin())

    compare_layers(forward, draw(4, 4))


def test_several_results_of_one_call() -> None:
    def double(tensor: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return tensor.sin(), {"cosine": tensor.cos(), "itself": tensor}

    def forward(hidden: Tensor, weight: Tensor) -> Tensor:
        first, others = run_cheap(double, hidden * 3)
        return (first @ weight).sin() + (others["cosine"] @ weight) * (others["itself"] @ weight)

    compare_layers(forward, draw(4, 4), draw(4, 3))


def test_a_tensor_that_gets_other_memory() -> None:
    """As by `tensor.data = other`, of which torch's counter of versions knows nothing."""

    def forward(hidden: Tensor, weight: Tensor) -> Tensor:
        made = run_cheap(square, hidden * 2)
        made.data = made.data + 1
        return (made @ weight).sin()

    compare_layers(forward, draw(4, 4), draw(4, 3))


def test_autocast() -> None:
    """Backward runs outside of it, where a call would give another type."""

    def multiply(left: Tensor, right: Tensor) -> Tensor:
        return left @ right

    def forward(left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(run_cheap(multiply, left, right), weight).float()

    shapes = [(64, 2), (2, 64), (3, 64)]
    compare_layers(forward, *(draw(*shape, dtype=torch.float32) for shape in shapes))


def test_a_copy_of_the_model_runs_its_own_weights() -> None:
    model = build_model(True)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1.5)
    expected = build_model(False)
    expected.load_state_dict(copied.state_dict())
    assert_equal(train(copied), train(expected))
    assert not read_gradients(model)


def test_layers_in_threads(count_freed: list[int]) -> None:
    """Two threads run a model each, and wait for each other in the middle of each layer."""
    expected = train(build_model(False))
    models = [build_model(True) for _ in range(2)]
    barrier = threading.Barrier(2, timeout=20)

    def wait(*_: Any) -> None:
        barrier.wait()

    for model in models:
        for layer in model.model.layers:
            for module in (layer.input_layernorm, layer.mlp.gate_proj, layer.mlp.down_proj):
                module.register_forward_hook(wait)
    shared = build_model(True)  # one model in both
    for layer in shared.model.layers:
        layer.mlp.gate_proj.register_forward_hook(wait)
    results: dict[int, list[Tensor]] = {}

    def run(index: int) -> None:
        loss = compute_loss(models[index])
        loss.backward()
        results[index] = [loss.detach(), *read_gradients(models[index]).values()]
        loss = compute_loss(shared)
        parameters = list(shared.parameters())
        results[index + 2] = [loss.detach(), *torch.autograd.grad(loss, parameters)]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results.keys() == {0, 1, 2, 3}
    for result in results.values():
        assert_equal(result, expected)
    assert len(count_freed) == 4 * LAYERS and min(count_freed) >= 6


def test_a_layer_by_a_plan_in_a_layer_with_the_lever() -> None:
    """Another library's tensor-parallel layers record themselves, also inside of the lever."""

    def forward(hidden: Tensor, weight: Tensor) -> Tensor:
        stream = hidden * 2
        made = run_cheap(square, stream)
        with KeptTensors().layer():
            inner = run_cheap(torch.sin, made @ weight)
            out = (inner @ weight).sin()
        return (out @ weight).cos() * (made @ weight) + stream.sin().sum()

    compare_layers(forward, draw(4, 4), draw(4, 4))
    compare_layers(forward, draw(4, 4), draw(4, 4), hooks=lambda: HostCopies(5).enter())
