"""A decoder whose matrices and tokens are shared out, against the plain one in float64: losses,
gradients, norms.
"""

from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recipe_lib.adapters import add_adapters
from recipe_lib.config.schema import FullFinetuneConfig, LoraConfig, MemoryConfig, ParallelConfig
from recipe_lib.errors import ConfigError
from recipe_lib.memory import apply_activation_checkpointing, chunk_mlps, compile_layers
from recipe_lib.models import DecoderSpec, build_meta, init_weights
from recipe_lib.ops.dtensor_shards import locate_local_part
from recipe_lib.ops.head_losses import CrossEntropy, TokenLogProbs
from recipe_lib.optim.optimizers import clip_grad_norm
from recipe_lib.parallel import (
    Parallel,
    World,
    all_reduce_gradients,
    check_tensor,
    materialize,
    shard_model,
    shard_tensors,
    start_world,
)
from recipe_lib.parallel.tensor_forwards import restore_rows
from tests.distributed.ranks import import_compiler, run_ranks
from tests.parallel.small_models import LENGTH, VOCABULARY, build_small_spec, start_adapters

BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
GEMMA = {
    "post_norms": True, "norm_offset": True, "head_norms": True, "embedding_scale": 5.5, "logit_softcap": 9.0,
    "attention_softcap": 20.0, "activation": "gelu_tanh",
}  # fmt: skip
# The middle layer's queries and keys do not rotate, as in SmolLM3.
GRANITE = {
    "rotated": (True, False, True), "residual_scale": 0.3, "logit_scale": 0.4, "embedding_scale": 5.5,
    "attention_scale": 0.2,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """spec: changes of the small Llama. rows: of a micro-batch on each data rank."""

    spec: dict[str, Any] = field(default_factory=dict)
    rows: int = 1
    parallel: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] | None = None
    frozen: str | None = None  # parameters whose name has this in it
    per_token: bool = False
    compiled: bool = False

    def shape(self) -> DecoderSpec:
        return replace(
            build_small_spec(tied=self.spec.get("tied", False)), **{"num_kv_heads": 4} | self.spec
        )


def build(case: Case, world: World | None) -> tuple[nn.Module, Parallel]:
    """The model as a recipe makes it; without a world, plain."""
    spec = case.shape()
    model, divided = build_meta(spec, torch.float64), Parallel()
    memory = MemoryConfig(**case.memory)
    if case.lora is not None:
        add_adapters(model, LoraConfig(**{"rank": 4} | case.lora), torch.float64)
    for name, parameter in model.named_parameters():
        if case.frozen and case.frozen in name:
            parameter.requires_grad_(False)
    if world is None:
        model.to_empty(device="cpu")
    else:
        parallel = ParallelConfig(**case.parallel)
        divided = Parallel(tensor_gradients=shard_tensors(model, parallel, memory, world))
        chunk_mlps(model, memory.mlp_tiles)
        apply_activation_checkpointing(model, memory.activation_checkpointing)
        if case.compiled:
            compile_layers(model, "eager")
        shard_model(model, parallel, memory, world)
        materialize(model, memory, world.device)
    init_weights(model, 3, spec)
    if case.lora is not None:
        start_adapters(model)
    return model, divided


def batch(case: Case, ranks: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shape = (case.rows * ranks, LENGTH)
    tokens = torch.randint(0, VOCABULARY, shape, generator=generator)
    labels = torch.randint(0, VOCABULARY, shape, generator=generator)
    return tokens, labels.masked_fill_(torch.rand(shape, generator=generator) < 0.3, -100)


def backward(case: Case, model: nn.Module, tokens: Tensor, labels: Tensor, count: Tensor) -> Tensor:
    found = model(
        tokens, labels=labels, head_loss=(TokenLogProbs if case.per_token else CrossEntropy)(3)
    )
    loss = (found.square().sum() if case.per_token else found) / count
    loss.backward()
    return loss.detach()


def own_part(parameter: Tensor, of: Tensor) -> Tensor:
    """What this rank holds of `of`, if it lies as the parameter does."""
    local, offset = locate_local_part(parameter)
    return of[
        tuple(slice(first, first + size) for first, size in zip(offset, local.shape, strict=True))
    ]


def compare(cases: list[Case]) -> list[str]:
    """What differs from the plain model, of each case. One world serves all cases in a row that
    share its mesh.
    """
    faults = []

    def mesh(case: Case) -> tuple[int, int]:
        return case.parallel["tensor"], case.parallel.get("data_replicate", 1)

    for _, alike in groupby(cases, mesh):
        first, *others = alike
        cfg = FullFinetuneConfig(device="cpu", parallel=ParallelConfig(**first.parallel))
        with start_world(cfg) as world:
            for case in (first, *others):
                faults += [f"{case}: {fault}" for fault in differences(case, world)]
    return faults


PLAIN: dict[str, tuple[Tensor, nn.Module]] = {}


def expected(case: Case, data_ranks: int) -> tuple[Tensor, nn.Module]:
    """Loss and model, with its gradients, of one process; kept, and known to the forks of the
    process that has it.
    """
    plain = replace(case, parallel={}, memory={}, compiled=False)
    key = f"{plain} {data_ranks}"
    if key not in PLAIN:
        tokens, labels = batch(plain, data_ranks)
        model, _ = build(plain, None)
        PLAIN[key] = backward(plain, model, tokens, labels, (labels != -100).sum()), model
    return PLAIN[key]


def differences(case: Case, world: World) -> list[str]:
    faults = []
    if case.compiled and case.memory == SELECTIVE:
        # Else all cases count towards one limit, past which layers are not compiled
        torch._dynamo.reset()
    tokens, labels = batch(case, world.data_ranks)
    count = (labels != -100).sum()
    expected_loss, plain = expected(case, world.data_ranks)
    model, divided = build(case, world)
    mine = slice(world.data_rank * case.rows, (world.data_rank + 1) * case.rows)
    loss = world.all_reduce_sum(backward(case, model, tokens[mine], labels[mine], count))
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
        gradient, own = (
            locate_local_part(found[name].grad)[0],
            own_part(found[name], parameter.grad),
        )
        error = float((gradient - own).abs().sum() / parameter.grad.abs().max())
        if gradient.shape != own.shape or not error < 1e-12 * max(1, gradient.numel()):
            faults.append(f"{name} is off by {error:.1e}")
    norms = [
        float(clip_grad_norm(one.parameters(), None, world, Parallel(), None))
        for one in (model, plain)
    ]
    if not abs(norms[0] / norms[1] - 1) < 1e-9:
        faults.append(f"norms {norms}")
    if case.compiled and case.memory == SELECTIVE:
        faults += interrupted(model, tokens, labels)
    return faults


def interrupted(model: nn.Module, tokens: Tensor, labels: Tensor) -> list[str]:
    """Why layers that were compiled for one length are not compiled whole for others, if so."""
    breaks = torch._dynamo.utils.counters["graph_break"]
    breaks.clear()
    model(tokens[:, : LENGTH - 4], labels=labels[:, : LENGTH - 4]).backward()
    return [f"not compiled: {reason}" for reason in breaks]


KINDS: list[dict[str, Any]] = [
    {"rows": 3},
    {"spec": {"tied": True}, "rows": 3},
    {"spec": BIASES, "rows": 3},
    {"spec": GEMMA},
    {"spec": {"head_norms": True}, "frozen": "q_proj"},
    {"frozen": "mlp"},
    {"lora": {}, "rows": 3},
    {"lora": {"target_modules": ["q", "down"]}, "spec": BIASES},
    {"per_token": True, "spec": GEMMA, "rows": 3},
    {"spec": GRANITE, "rows": 3},
    {"spec": GRANITE | {"tied": True}, "lora": {}},
]
SELECTIVE = {"activation_checkpointing": "selective"}
MEMORY: list[dict[str, Any]] = [{}, {"activation_checkpointing": "full"}, SELECTIVE]


def cases(tensor: int, **parallel: Any) -> list[Case]:
    """Every kind of model, in turn with the gather repeated or not, and with each way of
    checkpointing.
    """
    return [
        Case(
            **kind,
            parallel={
                "tensor": tensor,
                "tensor_regather_in_backward": ("true", "false")[number % 2],
                **parallel,
            },
            memory=MEMORY[number % 3],
        )
        for number, kind in enumerate(KINDS)
    ]


def run_cases(ranks: int, wanted: list[Case]) -> None:
    for case in wanted:  # here, once for all ranks
        expected(case, ranks // case.parallel["tensor"])
    for faults in run_ranks(compare, ranks, wanted, timeout=300):
        assert not faults, "\n".join(faults)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_gradients_and_norms_are_those_of_the_plain_model(ranks: int) -> None:
    if ranks == 2:
        import_compiler()
        few_layers = BIASES | {"num_layers": 1, "windows": (None,)}
        lora = {"target_modules": ["q", "down"]}
        wanted = [*cases(2), Case(few_layers, 1, {"tensor": 2}, SELECTIVE, lora, compiled=True)]
    else:
        few = Case({"num_kv_heads": 2}, 3, {"tensor": 4, "tensor_replicate_kv_heads": True})
        wanted = [
            *cases(4)[::6],
            few,
            replace(few, spec={"num_kv_heads": 1} | BIASES),
            replace(few, lora={}),
        ]
        wanted += cases(2, fsdp_wrap_policy="layers")[3::5]
        wanted += cases(2, fsdp_wrap_policy="memory_efficient")[2::6]
        wanted += cases(2, data_replicate=2)[1::6]
    run_cases(ranks, wanted)


def test_logits_are_told_from_losses_of_rows_of_one_token() -> None:
    tokens = torch.zeros(4, 1, dtype=torch.int64)
    run = restore_rows(
        lambda tokens, labels=None: torch.zeros(4, 1)
    )  # logits of one score, or losses
    assert run(tokens).shape == (4, 1, 1)
    assert run(tokens, labels=tokens).shape == (4, 1)


def test_sizes_that_do_not_fit_are_refused_with_those_that_do() -> None:
    spec = replace(build_small_spec(), num_kv_heads=2)
    with pytest.raises(ConfigError) as refused:
        check_tensor(spec, ParallelConfig(tensor=3))
    assert len(refused.value.faults) == 4
    assert "4 attention heads, which 3 ranks cannot share evenly; sizes that fit: 1, 2" in str(
        refused.value
    )
    with pytest.raises(ConfigError, match="2 key and value heads.*tensor_replicate_kv_heads=true"):
        check_tensor(spec, ParallelConfig(tensor=4))
    check_tensor(spec, ParallelConfig(tensor=4, tensor_replicate_kv_heads=True))
    check_tensor(spec, ParallelConfig(tensor=2))


def test_sizes_that_fit_where_kv_heads_are_copied_are_divisors_and_multiples_of_their_number() -> (
    None
):
    spec = replace(build_small_spec(), num_heads=12, num_kv_heads=4, mlp_width=96, vocab_size=528)
    for size in (
        6,
        8,
    ):  # of more ranks than 4 each has a kv head of its own only if 4 divides their number
        with pytest.raises(ConfigError, match="sizes that fit: 1, 2, 4, 12$"):
            check_tensor(spec, ParallelConfig(tensor=size, tensor_replicate_kv_heads=True))
    with pytest.raises(ConfigError, match="509 tokens of the vocabulary.*sizes that fit: 1$"):
        check_tensor(
            replace(spec, vocab_size=509), ParallelConfig(tensor=12, tensor_replicate_kv_heads=True)
        )
