"""A decoder whose sequences are shared out, against the plain one in float64: losses, gradients,
norms, and what of it is kept and exchanged. Families of tests/models/reference.py: one of each kind
of attention.
"""

import json
import re
import weakref
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import groupby
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from recipe_lib.adapters import add_adapters
from recipe_lib.config import FullFinetuneConfig, LoraFinetuneConfig
from recipe_lib.config.paths import list_presets
from recipe_lib.config.schema import LoraConfig, MemoryConfig, ParallelConfig
from recipe_lib.errors import CheckpointError, ConfigError
from recipe_lib.memory import apply_levers, compile_layers
from recipe_lib.models import DecoderSpec, build_meta, build_spec, init_weights, read_preset_config
from recipe_lib.models.decoder import Attention
from recipe_lib.models.mixture import BalanceLoss
from recipe_lib.ops.attention import compute_document_positions, make_attention_info
from recipe_lib.ops.dtensor_shards import locate_local_part
from recipe_lib.ops.head_losses import CrossEntropy, TokenLogProbs
from recipe_lib.optim.optimizers import clip_grad_norm
from recipe_lib.parallel import (
    Parallel,
    World,
    all_reduce_gradients,
    materialize,
    parallelize,
    start_world,
)
from recipe_lib.parallel.context import check_context
from tests.distributed.ranks import import_compiler, run_ranks
from tests.house.files import ROOT
from tests.models.reference import CASES, SMALL
from tests.parallel.small_models import build_small_spec, start_adapters

LENGTH = 32
# Of documents in rows, where these are packed; some cross the borders between ranks.
DOCUMENTS = ((5, 20, 4), (11, 21))


@dataclass(frozen=True)
class Case:
    """family: a case of tests/models/reference.py; changes: of its config. rows: of a micro-batch
    on each data rank.
    """

    family: str
    rows: int = 1
    packed: bool = False
    parallel: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] | None = None
    per_token: bool = False
    changes: dict[str, Any] = field(default_factory=dict)
    compiled: bool = False
    aux: float = 0.0

    def shape(self) -> DecoderSpec:
        return _spec(self.family, json.dumps(self.changes))

    def config(self) -> FullFinetuneConfig:
        common: dict[str, Any] = {
            "device": "cpu", "dtype": "fp64", "max_seq_len": LENGTH, "compile": self.compiled,
            "parallel": ParallelConfig(**self.parallel), "memory": MemoryConfig(**self.memory),
            "router_aux_loss_coef": self.aux,
        }  # fmt: skip
        if self.lora is None:
            return FullFinetuneConfig(**common)
        return LoraFinetuneConfig(**common, lora=LoraConfig(**{"rank": 4} | self.lora))


@cache
def _spec(family: str, changes: str) -> DecoderSpec:
    class_name, options = CASES[family]
    config = getattr(transformers, class_name)(
        **SMALL | {"vocab_size": 96} | options | json.loads(changes)
    )
    spec = build_spec(config.to_dict() | {"architectures": None}, family)
    return replace(spec, init_std=0.2)


def build(case: Case, world: World | None) -> tuple[nn.Module, Parallel]:
    """The model as a recipe makes it; without a world, plain."""
    cfg, spec = case.config(), case.shape()
    model, divided = build_meta(spec, torch.float64), Parallel()
    if isinstance(cfg, LoraFinetuneConfig):
        add_adapters(model, cfg.lora, torch.float64)
    if world is None:
        model.to_empty(device="cpu")
        if case.aux:
            divided = Parallel(balance=BalanceLoss(case.aux, sum(spec.mixture.layers)))
            for layer in model.model.layers:
                layer.mlp.balance = divided.balance
    else:
        divided = parallelize(model, cfg, world)
        materialize(model, cfg.memory, world.device)
    init_weights(model, 3, spec)
    if case.lora is not None:
        start_adapters(model)
    if divided.balance is not None:
        divided.balance.begin(1)  # else it weighs nothing; rows are one micro-batch
    return model, divided


def batch(case: Case, ranks: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shape = (case.rows * ranks, LENGTH)
    tokens = torch.randint(0, 96, shape, generator=generator)
    labels = torch.randint(0, 96, shape, generator=generator)
    return tokens, labels.masked_fill_(torch.rand(shape, generator=generator) < 0.3, -100)


def backward(
    case: Case, model: nn.Module, tokens: Tensor, labels: Tensor, count: Tensor, first: int = 0
) -> Tensor:
    """The loss of these rows, of which the first is the micro-batch's number `first`, with its
    gradients.
    """
    inputs: tuple[Any, ...] = (tokens,)
    if case.packed:
        lengths = [DOCUMENTS[(first + row) % len(DOCUMENTS)] for row in range(len(tokens))]
        inputs = (
            tokens,
            compute_document_positions(lengths, LENGTH),
            make_attention_info(lengths, LENGTH),
        )
    found = model(
        *inputs, labels=labels, head_loss=(TokenLogProbs if case.per_token else CrossEntropy)(3)
    )
    assert found.shape == (labels.shape if case.per_token else ())
    loss = (found.square().sum() if case.per_token else found) / count
    loss.backward()
    return loss.detach()


PLAIN: dict[str, tuple[Tensor, nn.Module, Tensor]] = {}


def expected(case: Case, data_ranks: int) -> tuple[Tensor, nn.Module, Tensor]:
    """Loss, model with its gradients, and logits, of one process; known to the forks of the process
    that has it.
    """
    plain = replace(case, parallel={}, memory={}, compiled=False)
    key = f"{plain} {data_ranks}"
    if key not in PLAIN:
        tokens, labels = batch(plain, data_ranks)
        model, _ = build(plain, None)
        with torch.no_grad():
            logits = model(tokens)
        PLAIN[key] = backward(plain, model, tokens, labels, (labels != -100).sum()), model, logits
    return PLAIN[key]


def differences(case: Case, world: World) -> list[str]:
    faults = []
    tokens, labels = batch(case, world.data_ranks)
    count = (labels != -100).sum()
    expected_loss, plain, expected_logits = expected(case, world.data_ranks)
    model, divided = build(case, world)
    mine = slice(world.data_rank * case.rows, (world.data_rank + 1) * case.rows)
    loss = world.all_reduce_sum(
        backward(case, model, tokens[mine], labels[mine], count, mine.start)
    )
    all_reduce_gradients(model, divided, world)
    if abs(float(loss - expected_loss)) > 1e-12 * abs(float(expected_loss)):
        faults.append(f"loss {float(loss)} for {float(expected_loss)}")
    wanted, found = dict(plain.named_parameters()), dict(model.named_parameters())
    if wanted.keys() != found.keys():
        faults.append(f"other names {wanted.keys() ^ found.keys()}")
    for name, parameter in wanted.items():
        if parameter.grad is None or found[name].grad is None:
            if parameter.grad is not found[name].grad:
                faults.append(f"{name} has a gradient, or should have one")
            continue
        gradient, offset = locate_local_part(found[name].grad)
        dim, runs = model.runs.get(
            name, (0, ())
        )  # the ranks' parts, one after the other, are in this order
        whole = (
            torch.cat([parameter.grad.narrow(dim, a, b - a) for a, b in runs], dim)
            if runs
            else parameter.grad
        )
        own = whole[
            tuple(slice(at, at + size) for at, size in zip(offset, gradient.shape, strict=True))
        ]
        error = (
            float((gradient - own).abs().max() / parameter.grad.abs().max())
            if gradient.numel()
            else 0.0
        )
        if gradient.shape != own.shape or not error < 1e-12:
            faults.append(f"{name} is off by {error:.1e}")
    norms = [
        float(clip_grad_norm(one.parameters(), None, world, Parallel(), None))
        for one in (model, plain)
    ]
    if not abs(norms[0] / norms[1] - 1) < 1e-12:
        faults.append(f"norms {norms}")
    with torch.no_grad():
        logits = model(tokens[mine])
    if logits.shape != expected_logits[mine].shape or not torch.allclose(
        logits, expected_logits[mine], atol=1e-12
    ):
        faults.append("other logits")
    return faults


def compare(cases: list[Case]) -> list[str]:
    """What differs from the plain model, of each case. One world serves all cases in a row that
    share its mesh.
    """
    faults = []
    for _, alike in groupby(cases, lambda case: repr(case.parallel)):
        first, *others = alike
        with start_world(first.config()) as world:
            for case in (first, *others):
                faults += [f"{case}: {fault}" for fault in differences(case, world)]
    return faults


def run_cases(ranks: int, wanted: list[Case]) -> None:
    wanted = sorted(wanted, key=lambda case: repr(case.parallel))
    for case in wanted:  # here, once for all ranks
        sharing = case.parallel["context"] * case.parallel.get("tensor", 1)
        expected(case, ranks // sharing)
    for faults in run_ranks(compare, ranks, wanted, timeout=300):
        assert not faults, "\n".join(faults)


# One of each kind of attention: bias, q/k norms, windows of several kinds, soft caps, longrope,
# sinks, experts.
FEW = ["llama3.1", "qwen2.5-window", "qwen3", "gemma2", "gemma3", "phi3.5-long", "gpt-oss", "olmoe"]
# Others: a kv head for each head or one for all, all biases, heads of which some channels turn,
# experts.
MORE = ["llama2", "gemma", "llama-biases", "phi4-mini", "qwen3-moe", "smollm3", "granite4"]
FULL, SELECTIVE = ({"activation_checkpointing": mode} for mode in ("full", "selective"))


@pytest.mark.slow
def test_one_family_of_each_kind_of_attention_on_two_ranks() -> None:
    cases = [
        Case(family, 1 + number % 2, packed=number % 2 == 1, parallel={"context": 2})
        for number, family in enumerate(FEW)
    ]
    cases += [
        Case("llama3", 3, True, {"context": 2}, FULL, lora={"target_modules": ["q", "v", "down"]}),
        Case("gemma3", 2, True, {"context": 2}, SELECTIVE, per_token=True),
        Case("llama3", 2, parallel={"context": 2, "strategy": "ddp"}),
        Case("llama3", 2, parallel={"context": 2}, memory={"mlp_tiles": 3}),
        Case("qwen3-moe", 2, True, {"context": 2}, FULL, aux=0.1),
        Case("qwen3", 1, True, {"context": 2}, lora={"dora": True}),
    ]
    run_cases(2, cases)


@pytest.mark.slow
def test_more_families_on_four_ranks_and_with_other_dimensions() -> None:
    """Four ranks are more than the kv heads of most; two of context meet two of each other
    dimension.
    """
    cases = [Case(family, 1, number % 2 == 0, {"context": 4}) for number, family in enumerate(MORE)]
    tensor = {"context": 2, "tensor": 2}
    four_kv_heads = {"num_key_value_heads": 4}
    cases += [
        Case(
            "gemma3", 2, True, {"context": 2, "data_replicate": 2, "reshard_after_forward": False}
        ),
        Case("qwen3", 2, False, {"context": 2, "strategy": "ddp"}),
        Case("gemma2", 2, True, tensor, changes=four_kv_heads),
        Case("gpt-oss", 3, False, tensor, FULL, lora={}, changes=four_kv_heads),
        Case(
            "llama3",
            2,
            True,
            tensor | {"tensor_regather_in_backward": "true"},
            SELECTIVE,
            per_token=True,
        ),
        Case("mixtral", 2, True, tensor, aux=0.1),
        Case(
            "llama3",
            2,
            True,
            {"context": 2, "data_shard": 2, "fsdp_wrap_policy": "memory_efficient"},
            FULL,
        ),
    ]
    run_cases(4, cases)


@pytest.mark.slow
def test_compiled_layers_on_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    import_compiler()
    monkeypatch.setattr(apply_levers, "compile_layers", partial(compile_layers, backend="eager"))
    cases = [
        Case("gemma3", 2, True, {"context": 2}, FULL, compiled=True),
        Case("qwen3", 1, True, {"context": 2}, SELECTIVE, compiled=True, lora={}),
    ]
    run_cases(2, cases)


def test_heads_that_cannot_be_shared_are_refused_with_the_sizes_that_fit() -> None:
    spec = replace(build_small_spec(), num_heads=12, num_kv_heads=2)
    for size in (1, 2, 4, 6, 12):
        check_context(spec, ParallelConfig(context=size))
    with pytest.raises(ConfigError) as refused:
        check_context(spec, ParallelConfig(context=8))
    assert (
        str(refused.value)
        == "parallel.context=8: the model has 12 attention heads and 2 key and value heads, which 8"
        " ranks cannot share evenly; sizes that fit: 1, 2, 4, 6, 12"
    )
    with pytest.raises(
        ConfigError,
        match="6 attention heads and 1 .* each of 2 ranks of parallel.tensor.*: 1, 2, 3, 6$",
    ):
        check_context(spec, ParallelConfig(context=4, tensor=2))


def test_the_page_lists_the_presets_whose_heads_eight_ranks_cannot_share() -> None:
    def fits(spec: DecoderSpec, size: int) -> bool:
        try:
            check_context(spec, ParallelConfig(context=size))
        except ConfigError:
            return False
        return True

    found = {}
    for name in list_presets():
        try:
            spec = build_spec(read_preset_config(name), name)
        except CheckpointError:  # of a family that trains in transformers' class
            continue
        if not name.startswith("demo") and not fits(spec, 8):
            found[name] = [
                size for size in range(1, spec.num_heads + 1) if fits(spec, size) and size < 16
            ]
    page = (ROOT / "docs" / "long_sequences.md").read_text(encoding="utf-8")
    said = re.findall(r"^\| `([\w.]+/[\w.]+)` \| ([\d, ]+) \|$", page, re.MULTILINE)
    assert {name: [int(size) for size in sizes.split(", ")] for name, sizes in said} == found


class Collectives(TorchDispatchMode):
    """Bytes of the all-to-alls that are dispatched, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            self.found.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def exchanged(family: str, context: int, rows: int) -> tuple[list[int], list[int], int]:
    """Bytes of each all-to-all of a forward, and of a backward, on one rank; layers."""
    case = Case(family, rows, parallel={"context": context})
    tokens, labels = batch(case, 1)
    with start_world(case.config()) as world:
        model, _ = build(case, world)
        with Collectives() as forward:
            loss = model(tokens, labels=labels)
        with Collectives() as behind:
            loss.backward()
    return (
        forward.found,
        behind.found,
        sum(isinstance(module, Attention) for module in model.modules()),
    )


@pytest.mark.slow
def test_an_attention_exchanges_twice_in_each_direction_and_as_much_as_its_heads_are() -> None:
    spec = Case("llama3").shape()
    context = 4
    rows = 2
    of_head = (
        rows * LENGTH // context * spec.head_width * 8
    )  # bytes of one head of this rank's tokens, fp64
    kv_heads = max(spec.num_kv_heads, context)
    in_and_out = [(spec.num_heads + 2 * kv_heads) * of_head, spec.num_heads * of_head]
    for forward, behind, layers in run_ranks(exchanged, context, "llama3", context, rows):
        assert forward == in_and_out * layers and behind == in_and_out[::-1] * layers


def kept_by_a_layer(context: int, rows: int) -> int:
    """Bytes of what the second layer keeps for backward, in fp64, without parameters and what all
    layers share.
    """
    case = Case("llama3", rows, parallel={"context": context} if context > 1 else {})
    tokens, labels = batch(case, 1)
    kept: dict[int, int] = {}
    saved: list[weakref.ref[Tensor]] = []

    def pack(tensor: Tensor) -> Tensor:
        stand_in = tensor.detach()
        saved.append(weakref.ref(stand_in))
        return stand_in

    with start_world(case.config()) as world:
        model, _ = build(case, world)
        layer = model.model.layers[1]
        forward = layer.forward

        def watched(hidden: Tensor, turn: Any, info: Any, cache: Any = None) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                found = forward(hidden, turn, info, cache)
            for tensor in (reference() for reference in saved):
                if tensor is not None:  # else the layer computes it again
                    kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            others = [*layer.parameters(), *turn]
            for other in (one.to_local() if isinstance(one, DTensor) else one for one in others):
                kept.pop(other.untyped_storage()._cdata, None)
            return found

        layer.forward = watched
        model(tokens, labels=labels).backward()
    return sum(kept.values())


@pytest.mark.slow
@pytest.mark.parametrize("context", [1, 4])
def test_a_layer_keeps_its_part_of_the_tokens(context: int) -> None:
    """Of each token norms keep their inputs, attention queries, keys, values, what it gives and a
    number a head, the MLP gate and up; and where tokens are exchanged, what the output
    projection is given is another tensor than what attention gave. A kv head that several ranks
    need is kept by each.
    """
    spec, rows = Case("llama3").shape(), 2
    heads, kv_heads = (
        spec.num_heads * spec.head_width,
        max(spec.num_kv_heads, context) * spec.head_width,
    )
    norms = 2 * spec.width
    mlp = 2 * spec.mlp_width
    of_a_token = (
        norms + 2 * heads + 2 * kv_heads + spec.num_heads + mlp + (heads if context > 1 else 0)
    )
    expected = rows * LENGTH // context * of_a_token * 8
    assert run_ranks(kept_by_a_layer, context, context, rows) == [expected] * context
