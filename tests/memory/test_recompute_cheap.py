"""Layers that compute again what is cheap, beside every other lever, in every family, compiled and
on ranks: losses and gradients are those without it, bit for bit.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from recipe_lib.adapters import add_adapters
from recipe_lib.config.schema import FullFinetuneConfig, LoraConfig, MemoryConfig
from recipe_lib.memory import activation_offload, chunk_mlps, compile_layers
from recipe_lib.memory.activation_offload import offload_activations
from recipe_lib.memory.apply_levers import recompute_cheap_tensors
from recipe_lib.memory.checkpointing import apply_activation_checkpointing
from recipe_lib.memory.qat import fake_quantize_linears
from recipe_lib.models import build_meta, init_weights
from recipe_lib.ops import kept_tensors
from recipe_lib.ops.deferred import defer_weight_gradients, enable_split_backward
from recipe_lib.ops.head_losses import CrossEntropy
from recipe_lib.ops.kept_tensors import minimum_cut
from tests.distributed.ranks import run_in_fork, run_ranks
from tests.models.reference import CASES, build_reference_model, load_ours
from tests.ops.recorded_models import (
    Change,
    assert_equal,
    assert_same_training,
    build_model,
    compute_loss,
    do_nothing,
    fill_adapters,
    record_freed_tensors,
    train,
    use_lever,
)
from tests.parallel.small_models import (
    LENGTH,
    read_gradients,
)
from tests.selection import mark_slow_except


@pytest.fixture
def count_freed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return record_freed_tensors(monkeypatch)


def test_the_cut_is_the_smallest() -> None:
    # stream (10) -> norm (10) -> gate, up (20 each, products: roots) -> product (20)
    sizes = (10, 10, 20, 20, 20)
    roots = (True, False, True, True, False)
    parents: tuple[tuple[int, ...], ...] = ((), (0,), (), (), (2, 3))
    assert minimum_cut(sizes, roots, parents, frozenset({0, 1, 2, 3, 4})) == {0, 2, 3}
    assert minimum_cut(sizes, roots, parents, frozenset({1})) == {1}
    assert minimum_cut(sizes, roots, parents, frozenset({4})) == {4}
    assert minimum_cut(sizes, roots, parents, frozenset()) == frozenset()


def checkpoint_layers(mode: str) -> Change:
    def change(model: nn.Module) -> None:
        memory = MemoryConfig(activation_checkpointing=mode)
        if mode == "budget":
            memory.activation_budget_gib = 40 * 2**10 / 2**30
        cfg = FullFinetuneConfig(memory=memory)
        cfg.data.max_length = LENGTH
        apply_activation_checkpointing(model, mode, cfg=cfg)

    return change


DROPOUT = LoraConfig(target_modules=["q", "v", "gate", "down"], dropout=0.3, dora=True)


@pytest.mark.parametrize("lora", [None, DROPOUT], ids=["full", "dropout"])
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("dtype", mark_slow_except([torch.float32, torch.float64], [torch.float32]))
def test_checkpointed_layers(mode: str, dtype: torch.dtype, lora: LoraConfig | None) -> None:
    assert_same_training(after=checkpoint_layers(mode), dtype=dtype, lora=lora)
    plain = train(build_model(False, dtype=dtype, lora=lora))
    assert_equal(
        train(build_model(True, after=checkpoint_layers(mode), dtype=dtype, lora=lora)), plain
    )


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_users_checkpoint_in_a_layer(reentrant: bool) -> None:
    def change(model: nn.Module) -> None:
        for layer in model.model.layers:
            layer.mlp.forward = Checkpointed(layer.mlp.forward, reentrant)

    assert_same_training(before=change, dtype=torch.float32)


class Checkpointed:
    """A forward inside of torch's checkpoint."""

    def __init__(self, forward: Any, reentrant: bool) -> None:
        self.forward = forward
        self.reentrant = reentrant

    def __call__(self, *args: Any) -> Any:
        return checkpoint(self.forward, *args, use_reentrant=self.reentrant)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_offloaded_layers(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "has_host", lambda device: True)
    sent = []

    def change(model: nn.Module) -> None:
        apply_activation_checkpointing(model, mode)
        memory = MemoryConfig(activation_offload=True, activation_offload_prefetch_layers=1)
        sent.append(offload_activations(model, memory, torch.device("cpu")))

    assert_same_training(after=change, dtype=torch.float32)
    less, more = (sum(window.host_bytes.values()) for window in sent)
    assert less < more if mode == "none" else less == more


@pytest.mark.parametrize("lora", [None, DROPOUT], ids=["full", "dropout"])
def test_mlps_in_pieces(lora: LoraConfig | None) -> None:
    assert_same_training(before=lambda model: chunk_mlps(model, 5), dtype=torch.float32, lora=lora)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_deferred_weight_gradients(mode: str) -> None:
    results = []
    for on in (True, False):
        after = checkpoint_layers(mode) if mode != "none" else do_nothing
        model = build_model(on, after=after, dtype=torch.float32)
        with enable_split_backward():
            loss = compute_loss(model)
            with defer_weight_gradients() as later:
                loss.backward()
        assert (model.model.layers[0].mlp.up_proj.weight.grad is None) == bool(later)
        for entry in later:
            entry.run()
        results.append([loss.detach(), *read_gradients(model).values()])
    assert_equal(*results)


# Every family, and every kind of adapter and base.

LORA = LoraConfig(target_modules=["q", "k", "v", "o", "gate", "up", "down"])
KINDS: dict[str, LoraConfig | None] = {
    "full": None,
    "lora": LORA,
    "dora": LoraConfig(target_modules=LORA.target_modules, dora=True),
    "dropout": LoraConfig(target_modules=LORA.target_modules, dropout=0.2),
    "dora dropout": LoraConfig(target_modules=LORA.target_modules, dropout=0.2, dora=True),
    "nf4": LoraConfig(target_modules=LORA.target_modules, quantize_base="nf4"),
    "int8": LoraConfig(target_modules=LORA.target_modules, quantize_base="int8"),
    "qat": None,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("reference")

    def save(case: str) -> Path:
        if not (root / case).exists():
            build_reference_model(case).save_pretrained(root / case)
        return root / case

    return save


def train_family(folder: Path, kind: str, dtype: torch.dtype, on: bool) -> list[Tensor]:
    """Return loss and gradients of a family's model with a kind of adapter or base."""
    plain = load_ours(folder, dtype)
    spec = plain.spec
    lora = KINDS[kind]
    model = build_meta(spec, dtype)
    if lora is not None:
        if spec.mixture is not None:
            # Adapters of experts have neither.
            has_either = lora.dora or lora.dropout
            targets = ["q", "o"] if has_either else [*MIXTURE_TARGETS, "q", "o"]
            lora = LoraConfig(**vars(lora) | {"target_modules": targets})
        add_adapters(model, lora, dtype)
    if kind == "qat":
        fake_quantize_linears(model, kind="int8", group_size=16, start=0)
    use_lever(model, on)
    model.to_empty(device="cpu")
    init_weights(model, 3, spec)
    if lora is not None:
        fill_adapters(model)
    if lora is None or lora.quantize_base == "none":
        model.load_state_dict(plain.state_dict(), strict=False)
    torch.manual_seed(7)
    tokens = torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(5))
    loss = model(tokens, labels=tokens, head_loss=CrossEntropy(3))
    loss.backward()
    return [loss.detach(), *read_gradients(model).values()]


MIXTURE_TARGETS = ["router", "experts"]
FAST_FAMILIES = [
    ("gemma3", "dora dropout"),
    ("olmoe", "full"),
    ("gpt-oss", "lora"),
    ("qwen3", "nf4"),
    ("llama3", "qat"),
]


# A case of each layer that differs; kinds of rotations and windows make no difference here.
LAYER_CASES = [
    *("llama3.1", "llama-biases", "mistral-window", "qwen2.5", "qwen3", "gemma", "gemma2"),
    *("gemma3", "phi3", "mixtral", "qwen3-moe", "olmoe", "gpt-oss"),
]


@pytest.mark.parametrize(
    ("case", "kind", "dtype"),
    [
        *((case, kind, torch.bfloat16) for case, kind in FAST_FAMILIES),
        *(
            pytest.param(case, kind, torch.float32, marks=pytest.mark.slow)
            for case, kind in FAST_FAMILIES
        ),
        *(
            pytest.param(case, kind, torch.bfloat16, marks=pytest.mark.slow)
            for case in LAYER_CASES
            for kind in KINDS
            if (case, kind) not in FAST_FAMILIES
        ),
    ],
)
def test_every_family_bit_for_bit(
    case: str,
    kind: str,
    dtype: torch.dtype,
    folders: Callable[[str], Path],
    count_freed: list[int],
) -> None:
    is_mixture = CASES[case][0] in (
        "MixtralConfig",
        "Qwen3MoeConfig",
        "OlmoeConfig",
        "GptOssConfig",
    )
    if kind == "qat" and is_mixture:
        pytest.skip("refused: a mixture's experts are no linears")
    results = [train_family(folders(case), kind, dtype, on) for on in (True, False)]
    assert_equal(*results)
    assert all(torch.isfinite(tensor).all() for tensor in results[0])
    assert sum(count_freed) > 0


# Compiled layers.


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, DROPOUT], ids=["full", "dropout"])
@run_in_fork
def test_compiled_layers_keep_less_and_compile_as_often(lora: LoraConfig | None) -> None:
    results = []
    kept = []
    counts = []
    for on in (True, False):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = build_model(
            False, dtype=torch.float64, lora=lora, after=lambda m: compile_layers(m, "aot_eager")
        )
        # As `compile` does; applying the lever to a model sets it.
        memory = MemoryConfig(recompute_cheap=on)
        recompute_cheap_tensors(nn.Module(), FullFinetuneConfig(memory=memory, compile=True))
        train(model)
        model.zero_grad()
        results.append([tensor.clone() for tensor in train(model)])
        train(model, 4)
        train(model, 2)
        counters = torch._dynamo.utils.counters
        counts.append((counters["stats"]["unique_graphs"], dict(counters["recompiles"])))
        kept.append(measure_saved_bytes(model))
    kept_tensors.use_cheap_tags(False)
    if lora is None:
        assert_equal(results[0], results[1])
        assert_equal(results[0], train(build_model(False)))
    assert counts[0] == counts[1], counts
    assert kept[0] < kept[1], kept


def measure_saved_bytes(model: nn.Module) -> int:
    """Return the bytes that nodes save, without parameters; compiled code runs as it is."""
    parameters = {tensor.untyped_storage()._cdata for tensor in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute_loss(model)
    return sum(
        storage.nbytes() for address, storage in storages.items() if address not in parameters
    )


# Ranks.


def train_sharded(reshards: bool) -> None:
    """On each rank: FSDP frees the norms' weights after a layer's forward, and gathers them again."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    expected = train(build_model(False))
    results = []
    for on in (True, False):
        model = build_model(on)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshards)
        fully_shard(model, mesh=mesh)
        results.append([train(model), train(model)])
    for actual, other in zip(*results, strict=True):
        assert_equal(actual, other)
    assert_equal(results[0][0], expected)


@pytest.mark.parametrize("reshards", mark_slow_except([True, False], [True]))
def test_sharded_weights_of_norms(reshards: bool) -> None:
    run_ranks(train_sharded, 2, reshards)
