"""A sharded model against a plain one in float64, and the bytes that each wrapping policy holds, by
formula.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipe_lib.config.schema import FullFinetuneConfig, MemoryConfig, ParallelConfig
from recipe_lib.errors import ConfigError
from recipe_lib.memory import apply_activation_checkpointing, compile_layers
from recipe_lib.models import DecoderSpec, build_meta, init_weights
from recipe_lib.ops.head_losses import CrossEntropy
from recipe_lib.parallel import Unit, World, materialize, shard_model, start_world
from recipe_lib.parallel import fsdp as apply
from tests.distributed.ranks import import_compiler, run_ranks
from tests.memory.live_bytes import LiveBytes
from tests.parallel.gathered import GatheredPeak, count_gathered_bytes
from tests.parallel.small_models import (
    MLP_WIDTH,
    ROWS,
    VOCABULARY,
    WIDTH,
    build_small_spec,
    compute_gradient_difference,
    compute_plain_gradients,
    make_small_batch,
    read_gradients,
)
from tests.selection import mark_slow_except

NESTED = ["model.layers.*.mlp", "model.layers.*"]
POLICIES: list[Any] = ["layers", "memory_efficient", NESTED]

MATRIX = VOCABULARY * WIDTH * 4  # bytes of embedding or output projection in fp32
LAYER = (2 * WIDTH * WIDTH + 2 * 16 * WIDTH + 3 * MLP_WIDTH * WIDTH + 2 * WIDTH) * 4
NORM = WIDTH * 4


def config(parallel: dict[str, Any], memory: dict[str, Any]) -> FullFinetuneConfig:
    return FullFinetuneConfig(
        device="cpu", parallel=ParallelConfig(**parallel), memory=MemoryConfig(**memory)
    )


def sharded(
    spec: DecoderSpec,
    cfg: FullFinetuneConfig,
    world: World,
    dtype: torch.dtype,
    compiler: str | None = None,
) -> tuple[nn.Module, list[Unit]]:
    """The model as a recipe makes it."""
    model = build_meta(spec, dtype)
    apply_activation_checkpointing(model, cfg.memory.activation_checkpointing)
    if compiler:
        compile_layers(model, compiler)
    units = shard_model(model, cfg.parallel, cfg.memory, world)
    materialize(model, cfg.memory, world.device)
    init_weights(model, 3, spec)
    return model, units


def loss_of_part(model: nn.Module, world: World, part: int = 0, parts: int = 1) -> Tensor:
    """This rank's share of the small batch, or one of its parts, over the trained tokens of the
    whole batch.
    """
    tokens, labels = make_small_batch()
    rows = ROWS // (world.size * parts)
    first = (world.rank * parts + part) * rows
    mine = slice(first, first + rows)
    return (
        model(tokens[mine], labels=labels[mine], head_loss=CrossEntropy(3)) / (labels != -100).sum()
    )


def worst_gradients(
    cases: list[tuple[bool, dict[str, Any], dict[str, Any]]], compiler: str | None = None
) -> list[float]:
    """For each (tied, parallel, memory): the largest difference of a gradient, relative to that
    gradient's largest, within this rank's parts.
    """
    worst = []
    for tied, parallel, memory in cases:
        spec = build_small_spec(tied=tied)
        loss, expected = compute_plain_gradients(spec)
        cfg = config(parallel, memory)
        with start_world(cfg) as world:
            model, _ = sharded(spec, cfg, world, torch.float64, compiler)
            for _ in range(2):  # the second time from a clean start, as in a second step
                model.zero_grad(set_to_none=True)
                total = torch.zeros((), dtype=torch.float64)
                for part in range(2):  # gradients accumulate over two micro-batches
                    partial_loss = loss_of_part(model, world, part, 2)
                    partial_loss.backward()
                    total += partial_loss.detach()
                assert abs(float(world.all_reduce_sum(total)) - loss) < 1e-12
                assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())
            worst.append(compute_gradient_difference(model, expected))
    return worst


PARALLEL: list[dict[str, Any]] = [{}, {"reshard_after_forward": False}, {"data_replicate": 2}]
MEMORY: list[dict[str, Any]] = [
    {},
    {"cpu_offload": True},
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "selective"},
]


@pytest.mark.parametrize("wrapping", mark_slow_except(POLICIES, POLICIES[:1]))
def test_gradients_are_sums_and_equal_the_plain_models(wrapping: Any) -> None:
    """With each policy every parallel, and two kinds of memory."""
    cases = [
        (
            (at + number + POLICIES.index(wrapping)) % 2 == 0,
            {"fsdp_wrap_policy": wrapping} | parallel,
            memory,
        )
        for at, parallel in enumerate(PARALLEL)
        for number, memory in enumerate(MEMORY)
        if (POLICIES.index(wrapping) + number) % 2 == 0
    ]
    for errors in run_ranks(worst_gradients, 2, cases):
        assert max(errors) < 1e-12, dict(zip(map(str, cases), errors, strict=True))


@pytest.mark.slow
def test_hybrid_sharding_on_two_by_two_ranks() -> None:
    cases = [
        (
            tied,
            {"fsdp_wrap_policy": "memory_efficient", "data_replicate": 2, "data_shard": 2},
            {"activation_checkpointing": mode},
        )
        for tied, mode in ((False, "none"), (True, "full"))
    ]
    for errors in run_ranks(worst_gradients, 4, cases):
        assert max(errors) < 1e-12


@pytest.mark.slow
def test_compiled_layers_checkpointed_and_sharded() -> None:
    cases = [
        (True, {"fsdp_wrap_policy": "memory_efficient"}, {"activation_checkpointing": "selective"})
    ]
    import_compiler()
    for errors in run_ranks(worst_gradients, 2, cases, "aot_eager"):
        assert max(errors) < 1e-12


def test_one_process_with_offload_is_sharded_over_itself() -> None:
    def work() -> list[float]:
        return worst_gradients([(tied, {}, {"cpu_offload": True}) for tied in (False, True)])

    assert max(run_ranks(work, 1)[0]) < 1e-12


# What is held, in bytes: (gathered after forward, peak of gathered parameters, peak of unreduced
# gradients)
ROOT_OF_LAYERS = 2 * MATRIX + NORM
EVERYTHING = 2 * MATRIX + NORM + 3 * LAYER
HELD = {
    ("layers", True, False): (ROOT_OF_LAYERS, ROOT_OF_LAYERS + LAYER, ROOT_OF_LAYERS),
    ("memory_efficient", True, False): (NORM, NORM + MATRIX, NORM + MATRIX),
    ("layers", False, False): (EVERYTHING, EVERYTHING, ROOT_OF_LAYERS),
    ("memory_efficient", False, False): (EVERYTHING, EVERYTHING, NORM + MATRIX),
    ("layers", True, True): (MATRIX + NORM, MATRIX + NORM + LAYER, MATRIX + NORM),
    ("memory_efficient", True, True): (NORM, NORM + MATRIX, NORM + MATRIX),
}


@pytest.mark.slow
def test_gathered_bytes_of_each_policy() -> None:
    """They are whole tensors' bytes, however many ranks have parts of them."""

    def work() -> list[list[int]]:
        found = []
        for wrapping, reshard, tied in HELD:
            cfg = config(
                {"fsdp_wrap_policy": wrapping, "reshard_after_forward": reshard},
                {"activation_checkpointing": "full"},
            )
            with start_world(cfg) as world:
                model, _ = sharded(build_small_spec(tied=tied), cfg, world, torch.float32)
                with GatheredPeak(model) as peak:
                    loss = loss_of_part(model, world)
                    after_forward = count_gathered_bytes(model)
                    loss.backward()
                assert count_gathered_bytes(model) == 0
                found.append([after_forward, peak.gathered, peak.unreduced])
        return found

    assert MATRIX > LAYER
    for found in run_ranks(work, 2):
        assert {case: tuple(held) for case, held in zip(HELD, found, strict=True)} == HELD


@pytest.mark.slow
def test_peak_of_all_bytes_of_a_step() -> None:
    """Gathered parameters, buffers of collectives and gradients together, with activations too
    small to matter.

    E: the embedding, L: a layer, n: ranks. `memory_efficient` peaks at the end of backward, where
    it holds 1/n of the layers' gradients, 1/n of the output's, the embedding's whole one, the input
    of its reduction and the 1/n that comes out of it. `layers` peaks when the first layer is
    gathered: both matrices and the layer, in place and in the buffers that the gathers left them
    in.
    """
    vocabulary, ranks = 4096, 4

    def work() -> list[int]:
        found = []
        for wrapping in expected:
            cfg = config({"fsdp_wrap_policy": wrapping}, {"activation_checkpointing": "full"})
            with start_world(cfg) as world:
                model, _ = sharded(
                    build_small_spec(vocabulary=vocabulary), cfg, world, torch.float32
                )
                tokens, labels = make_small_batch(1)
                peaks = []
                for _ in range(
                    4
                    # gloo's threads may let go of a tensor late, on a busy machine: the least
                    # counts
                ):
                    model.zero_grad(set_to_none=True)
                    with LiveBytes(also=lambda model=model: count_gathered_bytes(model)) as live:
                        model(tokens, labels=labels, head_loss=CrossEntropy(12)).backward()
                    peaks.append(live.peak)
                    late = live.peak > expected[wrapping] + matrix // 100
                    if len(peaks) > 1 and not world.all_reduce_sum(torch.tensor(int(late))):
                        break
                found.append(min(peaks[1:]))
        return found

    matrix = vocabulary * WIDTH * 4
    expected = {
        "memory_efficient": 2 * matrix + 2 * matrix // ranks + 3 * LAYER // ranks,
        "layers": 4 * matrix + 2 * NORM + 2 * LAYER,
    }
    for found in run_ranks(work, ranks):
        for wrapping, peak in zip(expected, found, strict=True):
            assert 0 <= peak - expected[wrapping] < 0.01 * matrix, (wrapping, peak / matrix)


def test_evaluation_leaves_nothing_gathered_and_all_parameters_sharded() -> None:
    def work() -> list[list[int]]:
        found = []
        for parallel in ({"fsdp_wrap_policy": "layers"}, {"reshard_after_forward": False}):
            for tied in (False, True):
                cfg = config(parallel, {})
                with start_world(cfg) as world:
                    model, _ = sharded(build_small_spec(tied=tied), cfg, world, torch.float64)
                    with torch.no_grad():
                        losses = [float(loss_of_part(model, world)) for _ in range(2)]
                    assert losses[0] == losses[1]
                    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
                    found.append([count_gathered_bytes(model), len(dict(model.named_parameters()))])
        return found

    for found in run_ranks(work, 2):
        assert found == [[0, 30], [0, 29]] * 2


def test_logits_can_be_trained_on_too() -> None:
    """Without labels the head's weight is needed in backward, and gathered for it."""

    def work() -> list[float]:
        worst = []
        for tied in (False, True):
            spec = build_small_spec(tied=tied)
            plain = build_meta(spec, torch.float64).to_empty(device="cpu")
            init_weights(plain, 3, spec)
            tokens, _ = make_small_batch()
            plain(tokens).square().sum().backward()
            expected = read_gradients(plain)
            cfg = config({"fsdp_wrap_policy": "memory_efficient"}, {})
            with start_world(cfg) as world:
                model, _ = sharded(spec, cfg, world, torch.float64)
                loss_of_part(
                    model, world
                ).backward()  # with labels first: the choice is made anew for each forward
                model.zero_grad(set_to_none=True)
                rows = ROWS // world.size
                model(tokens[world.rank * rows : (world.rank + 1) * rows]).square().sum().backward()
                found = read_gradients(model)
            worst += [
                float((found[name] - grad).abs().max() / grad.abs().max())
                for name, grad in expected.items()
            ]
        return worst

    for errors in run_ranks(work, 2):
        assert max(errors) < 1e-12


@pytest.mark.slow
def test_training_keeps_tied_weights_one_parameter() -> None:
    def work() -> list[object]:
        found: list[object] = []
        for wrapping in ("layers", "memory_efficient"):
            cfg = config({"fsdp_wrap_policy": wrapping}, {})
            with start_world(cfg) as world:
                model, _ = sharded(build_small_spec(tied=True), cfg, world, torch.float64)
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
                losses = []
                for _ in range(3):
                    loss = loss_of_part(model, world)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                    losses.append(float(world.all_reduce_sum(loss.detach())))
                assert model.lm_head.weight is model.model.embed_tokens.weight
                state = model.state_dict()
                assert torch.equal(
                    state["lm_head.weight"].to_local(),
                    state["model.embed_tokens.weight"].to_local(),
                )
                found += [losses]
        return found

    layers, efficient = run_ranks(work, 2)[0]
    assert layers[0] > layers[1] > layers[2]
    assert layers == pytest.approx(efficient, rel=1e-12)


class ReducedDtypes(TorchDispatchMode):
    """While entered, notes the dtypes that gradients are reduced in."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if "reduce_scatter" in operator.name():
            self.seen |= {str(leaf.dtype) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("reduce_dtype", "expected"), [(None, "torch.bfloat16"), ("fp32", "torch.float32")]
)
def test_dtype_of_the_reduction(reduce_dtype: str | None, expected: str) -> None:
    def work() -> list[str]:
        cfg = config({"reduce_dtype": reduce_dtype}, {})
        with start_world(cfg) as world:
            model, _ = sharded(build_small_spec(), cfg, world, torch.bfloat16)
            with ReducedDtypes() as reduced:
                loss_of_part(model, world).backward()
            tensors = list(model.parameters())
            tensors += [parameter.grad for parameter in tensors]
        assert {str(tensor.dtype) for tensor in tensors} == {"torch.bfloat16"}
        return sorted(reduced.seen)

    assert run_ranks(work, 2)[0] == [expected]


def test_frozen_parameters_keep_their_dtype_and_get_no_gradient() -> None:
    def work() -> list[str]:
        cfg = config({"fsdp_wrap_policy": "memory_efficient"}, {"activation_checkpointing": "full"})
        with start_world(cfg) as world:
            model = build_meta(build_small_spec(), torch.bfloat16)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("q_proj" in name)
            model.model.layers.to(torch.bfloat16)
            for name, parameter in list(model.named_parameters()):
                if "q_proj" in name:
                    parameter.data = parameter.data.float()
            gathered: list[str] = []
            for layer in model.model.layers:  # compute in the frozen dtype, as adapters do
                layer.self_attn.q_proj.register_forward_pre_hook(
                    lambda module, args: (args[0].float(),)
                )
                layer.self_attn.q_proj.register_forward_hook(
                    lambda module, args, output: output.bfloat16()
                )
                layer.mlp.register_forward_pre_hook(
                    lambda module, args: gathered.append(str(module.up_proj.weight.dtype))
                )
            apply_activation_checkpointing(model, "full")
            shard_model(model, cfg.parallel, cfg.memory, world)
            materialize(model, cfg.memory, world.device)
            init_weights(model, 3, build_small_spec())
            loss_of_part(model, world).backward()
            grads = {name: parameter.grad for name, parameter in model.named_parameters()}
            assert all((grad is not None) == ("q_proj" in name) for name, grad in grads.items())
            return sorted(set(gathered))

    assert run_ranks(work, 2)[0] == ["torch.bfloat16"]


def test_a_world_of_one_is_left_alone_and_stays_tied() -> None:
    cfg = config({"fsdp_wrap_policy": "memory_efficient"}, {})
    with start_world(cfg) as world:
        model, units = sharded(build_small_spec(tied=True), cfg, world, torch.float64)
        assert units == [] and not any(isinstance(module, FSDPModule) for module in model.modules())
        assert model.lm_head.weight is model.model.embed_tokens.weight
        cfg.parallel.fsdp_wrap_policy = ["nothing.*"]
        with pytest.raises(ConfigError, match=r"pattern 'nothing\.\*' matches no unit"):
            shard_model(
                build_meta(build_small_spec(), torch.float32), cfg.parallel, cfg.memory, world
            )


def test_materialize_keeps_ties_of_any_model() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.second.weight = self.first.weight

    with torch.device("meta"):
        model = Pair()
    materialize(model, MemoryConfig(), torch.device("cpu"))
    assert model.second.weight is model.first.weight and model.first.weight.device.type == "cpu"


def test_gradients_handed_over_twice_add_up() -> None:
    gathered = nn.Parameter(torch.zeros(3))
    for step in (1.0, 2.0):
        weight = nn.Parameter(torch.zeros(3))
        weight.grad = torch.full((3,), step)
        apply._hand_over(weight, gathered)
        assert weight.grad is None
    assert gathered.grad is not None and gathered.grad.tolist() == [3.0, 3.0, 3.0]
