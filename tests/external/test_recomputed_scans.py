"""Scans of transformers that keep their arguments alone compute the same bits as before."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.bailing_hybrid import modeling_bailing_hybrid
from transformers.models.granitemoehybrid import modeling_granitemoehybrid
from transformers.models.qwen3_5 import modeling_qwen3_5

from recipe_lib.external import recomputed_scans
from recipe_lib.external.recomputed_scans import recompute_scan
from tests.external.published_layouts import make_config

TOKENS = 150  # no multiple of a chunk
HEADS = 4
WIDTH = 16


def make_delta_arguments(gate_width: int | None) -> dict[str, Any]:
    """Return arguments of a delta rule. gate_width: of a gate for each channel; None: of a head."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(2, TOKENS, HEADS, *shape, generator=generator)

    gate = draw(gate_width) if gate_width else draw()
    tensors = {"query": draw(WIDTH), "key": draw(WIDTH), "value": draw(WIDTH)}
    return tensors | {
        "g": -gate.abs(),
        "beta": draw().sigmoid(),
        "use_qk_l2norm_in_kernel": True,
        "cu_seqlens": None,
    }


def make_mamba_arguments() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "hidden_states": draw(2, TOKENS, HEADS, WIDTH),
        "dt": draw(2, TOKENS, HEADS),
        "A": -draw(HEADS).exp(),
        "B": draw(2, TOKENS, 1, WIDTH),
        "C": draw(2, TOKENS, 1, WIDTH),
        "chunk_size": 64,
        "D": draw(HEADS),
        "dt_bias": draw(HEADS),
        "dt_softplus": True,
        "dt_limit": (0.0, float("inf")),
    }


SCANS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "gated delta": (modeling_qwen3_5, "torch_chunk_gated_delta_rule", make_delta_arguments(None)),
    "kimi delta": (
        modeling_bailing_hybrid,
        "chunk_kimi_delta_attention",
        make_delta_arguments(WIDTH),
    ),
    "mamba 2": (modeling_granitemoehybrid, "mamba2_chunk_scan", make_mamba_arguments()),
}


def make_wrapped(kind: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return (transformers' own function, the one in its place)."""
    module, name, _ = SCANS[kind]
    original = inspect.unwrap(vars(module)[name])
    assert original.__name__ in recomputed_scans.SCANS
    return original, recompute_scan(original)


def run_scan(
    function: Callable[..., Any], arguments: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Return (the output, the arguments' gradients by name, bytes kept for backward)."""
    leaves = {
        name: value.clone().requires_grad_() if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = function(**leaves)
    if isinstance(output, tuple):
        assert output[1] is None
        output = output[0]
    (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    return output.detach(), gradients, sum(kept.values())


@pytest.mark.parametrize("kind", SCANS)
def test_the_same_bits_from_the_arguments_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original, wrapped = make_wrapped(kind)
    assert wrapped is not original
    arguments = SCANS[kind][2]
    output, gradients, kept = run_scan(original, arguments)
    our_output, our_gradients, our_kept = run_scan(wrapped, arguments)
    assert torch.equal(our_output, output)
    for name, gradient in gradients.items():
        assert torch.equal(our_gradients[name], gradient), name
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    assert our_kept == sum(tensor.nbytes for tensor in tensors) < kept / 3


@pytest.mark.parametrize("kind", SCANS)
def test_generation_is_the_classes_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original, wrapped = make_wrapped(kind)
    arguments = SCANS[kind][2]
    names = inspect.signature(original).parameters
    asks = "output_final_state" if "output_final_state" in names else "return_final_states"
    output, state = wrapped(**arguments, **{asks: True})
    expected_output, expected_state = original(**arguments, **{asks: True})
    assert torch.equal(output, expected_output) and torch.equal(state, expected_state)


def test_gradients_of_a_model_are_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    original, wrapped = make_wrapped("gated delta")
    settings = make_config("qwen3_5").get_text_config().to_dict()
    config = CONFIG_MAPPING["qwen3_5_text"](**settings)
    tokens = torch.arange(70)[None]
    found = {}
    for is_wrapped in (False, True):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        function = wrapped if is_wrapped else original
        monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", function)
        model(input_ids=tokens, labels=tokens).loss.backward()
        found[is_wrapped] = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, gradient in found[False].items():
        assert torch.equal(found[True][name], gradient), name


class CountedScan:
    """A scan that counts its calls. It has the signature and the name of the one inside."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.function(*args, **kwargs)


@pytest.mark.parametrize("kind", SCANS)
def test_a_checkpointed_scan_runs_twice(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = SCANS[kind][2]
    original, _ = make_wrapped(kind)
    counted = CountedScan(original)
    wrapped = recompute_scan(counted)

    def run_layer(scan: Callable[..., Any], **values: Any) -> torch.Tensor:
        """Run two scans, as where documents are packed."""
        outputs = []
        for factor in (2, 3):
            scaled = {
                key: value * factor if isinstance(value, torch.Tensor) else value
                for key, value in values.items()
            }
            output = scan(**scaled)
            outputs.append(output[0] if isinstance(output, tuple) else output)
        # It saves what the second scan returns, so that the recomputation does not end before that.
        return outputs[0] * outputs[1]

    expected = run_scan(functools.partial(run_layer, scan=original), arguments)
    found = run_scan(
        functools.partial(checkpoint, run_layer, scan=wrapped, use_reentrant=False), arguments
    )
    assert counted.calls == 4
    assert torch.equal(found[0], expected[0])
    for argument, gradient in expected[1].items():
        assert torch.equal(found[1][argument], gradient), argument
    assert not recomputed_scans.open_graphs.graphs


def test_what_an_error_leaves_is_freed_by_the_next_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    _, wrapped = make_wrapped("mamba 2")
    arguments = SCANS["mamba 2"][2]

    def fail(gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no memory is left")

    def run_layer(**values: Any) -> torch.Tensor:
        output = wrapped(**values)
        if output.requires_grad:
            output.register_hook(fail)
        return output.sin()

    run_layer_again = functools.partial(checkpoint, run_layer, use_reentrant=False)
    with pytest.raises(RuntimeError, match="no memory"):
        run_scan(run_layer_again, arguments)
    graphs = recomputed_scans.open_graphs.graphs
    assert len(graphs) == 1
    run_scan(wrapped, arguments)
    assert not graphs


@pytest.mark.parametrize("kind", SCANS)
def test_a_scan_below_all_that_is_trained_has_no_backward(kind: str) -> None:
    original, _ = make_wrapped(kind)
    arguments = SCANS[kind][2]

    def train_above(scan: Callable[..., Any]) -> torch.Tensor:
        """Return the gradient of a factor of the scan's output, in a checkpointed layer."""
        factor = torch.full((), 0.5, requires_grad=True)

        def run_layer(factor: torch.Tensor) -> torch.Tensor:
            output = scan(**arguments)
            # The product saves the output, so that the recomputation does not end before that.
            return (output[0] if isinstance(output, tuple) else output) * factor

        checkpoint(run_layer, factor, use_reentrant=False).square().sum().backward()
        assert factor.grad is not None
        return factor.grad

    counted = CountedScan(original)
    assert torch.equal(train_above(recompute_scan(counted)), train_above(original))
    assert counted.calls == 2
    assert not recomputed_scans.open_graphs.graphs
