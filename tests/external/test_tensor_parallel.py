"""External models by inferred plans, on 2 and 4 ranks in float64, against the same model on one."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipe_lib.config.registry import list_names as names_of
from recipe_lib.config.registry import register
from recipe_lib.config.schema import FullFinetuneConfig, MemoryConfig, ParallelConfig
from recipe_lib.errors import SetupError
from recipe_lib.external import proven_plan
from recipe_lib.external.module_spec import read_spec
from recipe_lib.external.proven_plan import infer_model_plan
from recipe_lib.external.tensor_plan.sharding_plan import ShardingPlan
from recipe_lib.memory import apply_activation_checkpointing
from recipe_lib.models import build_meta
from recipe_lib.models.language_model import list_local_parts
from recipe_lib.ops.attention import make_attention_info
from recipe_lib.ops.head_losses import CrossEntropy
from recipe_lib.optim.optimizers import clip_grad_norm
from recipe_lib.parallel import (
    Parallel,
    World,
    all_reduce_gradients,
    materialize,
    shard_model,
    start_world,
)
from recipe_lib.parallel.tensor import shard_tensors
from tests.distributed.ranks import run_ranks

pytest.importorskip("transformers")
ROWS = 2
LENGTH = 12
VOCABULARY = 100

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2,
         "mamba_chunk_size": 8}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 101, "embd_pdrop": 0.0,
             "attn_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0},
    "qwen3": SMALL | {"num_key_value_heads": 4, "head_dim": 8, "vocab_size": 101, "tie_word_embeddings": True},
    "phi3": SMALL | {"num_key_value_heads": 4, "pad_token_id": 0, "eos_token_id": 0},
    "llama": SMALL | {"num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 0},
    # Norms over all heads, whose mean ranks put together.
    "olmo2": SMALL | {"num_key_value_heads": 4, "pad_token_id": 0, "eos_token_id": 0},
    # Fewer heads of keys than ranks: every rank has all of them, and of each group of heads its
    # part.
    "llama, one key head": SMALL | {"num_attention_heads": 8, "num_key_value_heads": 1, "pad_token_id": 0},
    "mixtral": SMALL | {"num_key_value_heads": 4, "num_local_experts": 4},
    # Mamba-2: a gated norm over all heads, one group that all of them use; a buffer of the
    # projection's segments.
    "falcon_h1": SMALL | MAMBA | {"mamba_d_ssm": 64, "num_key_value_heads": 4, "pad_token_id": 0},
}  # fmt: skip


class OwnLayer(nn.Module):
    """A layer of a user's own: fused queries, keys and values, and names that no plan could
    know.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(32), nn.LayerNorm(32)
        self.mix, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.wide, self.narrow = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, stream: Tensor) -> Tensor:
        rows, length, _ = stream.shape
        parts = self.mix(self.before(stream)).chunk(3, dim=-1)
        q, k, v = (part.view(rows, length, 4, -1).transpose(1, 2) for part in parts)
        seen = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(rows, length, -1)
        )
        stream = stream + self.out(seen)
        return stream + self.narrow(F.gelu(self.wide(self.between(stream))))


class Own(nn.Module):
    """A model of a user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(VOCABULARY, 32), nn.LayerNorm(32)
        self.stack = nn.ModuleList(OwnLayer() for _ in range(2))
        self.guess = nn.Linear(32, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        stream = self.words(input_ids)
        for block in self.stack:
            stream = block(stream)
        return self.guess(self.last(stream))


def config_of(kind: str) -> dict[str, Any]:
    return {"vocab_size": VOCABULARY, "model_type": kind.partition(",")[0]} | CONFIGS.get(kind, {})


def build(
    kind: str, parallel: dict[str, Any], memory: MemoryConfig, world: World | None
) -> tuple[Any, Parallel]:
    if kind == "own" and kind not in names_of("model"):
        register("model", kind)(lambda config: Own())
    spec = read_spec(config_of(kind), kind, "own" if kind == "own" else "transformers")
    model: Any = build_meta(spec, DTYPES.get(kind, torch.float64))
    divided = Parallel()
    if world is not None:
        divided = Parallel(
            tensor_gradients=shard_tensors(model, ParallelConfig(**parallel), memory, world)
        )
        apply_activation_checkpointing(model, memory.activation_checkpointing)
        shard_model(model, ParallelConfig(**parallel), memory, world)
    materialize(model, memory, torch.device("cpu"))
    return model, divided


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Random values that do not depend on who holds what; norms near 1, so that no gradient
    vanishes.
    """
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        values = 0.2 * torch.randn(shapes[name], generator=generator, dtype=torch.float64)
        values = values + 1 if len(shapes[name]) == 1 and name.endswith("weight") else values
        for part, offset in list_local_parts(model, name, parameter):
            part.copy_(
                values[
                    tuple(slice(at, at + size) for at, size in zip(offset, part.shape, strict=True))
                ]
            )


def backward(
    model: nn.Module, tokens: Tensor, labels: Tensor, count: Tensor, packed: bool
) -> Tensor:
    """packed: two documents in each row."""
    info = make_attention_info([[5, LENGTH - 5]] * len(tokens), LENGTH) if packed else None
    positions = (
        torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).expand(tokens.shape)
        if packed
        else None
    )
    loss = model(tokens, positions, info, labels=labels, head_loss=CrossEntropy(3)) / count
    loss.backward()
    return loss.detach()


# Grouped products take no float64.
DTYPES = {"mixtral": torch.float32}
# Those of these compute norms in float32, whatever their weights are.
TOLERANCE = {"olmo2": 1e-6, "falcon_h1": 1e-6, "mixtral": 1e-5}


def differences(
    kind: str, parallel: dict[str, Any], memory: MemoryConfig, world: World, packed: bool = False
) -> list[str]:
    generator = torch.Generator().manual_seed(5)
    shape = (ROWS * world.data_ranks, LENGTH)
    tokens = torch.randint(0, VOCABULARY, shape, generator=generator)
    labels = torch.randint(0, VOCABULARY, shape, generator=generator)
    labels.masked_fill_(torch.rand(shape, generator=generator) < 0.3, -100)
    count = (labels != -100).sum()
    (plain, _), (model, divided) = (
        build(kind, {}, memory, None),
        build(kind, parallel, memory, world),
    )
    for each in (plain, model):
        fill(each)
    expected_loss = backward(plain, tokens, labels, count, packed)
    mine = slice(world.data_rank * ROWS, (world.data_rank + 1) * ROWS)
    loss = world.all_reduce_sum(backward(model, tokens[mine], labels[mine], count, packed))
    all_reduce_gradients(model, divided, world)
    faults = []
    if abs(float(loss - expected_loss)) > TOLERANCE.get(kind, 1e-12) * abs(float(expected_loss)):
        faults.append(f"loss {float(loss)} for {float(expected_loss)}")
    if not any(each == "sharded" for each in divided.tensor_gradients.values()):
        faults.append("nothing is shared")
    largest = max(float(parameter.grad.abs().max()) for parameter in plain.parameters())
    found = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        for part, offset in list_local_parts(model, name, found[name].grad):
            wanted = parameter.grad[
                tuple(slice(at, at + size) for at, size in zip(offset, part.shape, strict=True))
            ]
            if (
                part.numel()
                and not float((part - wanted).abs().max()) < TOLERANCE.get(kind, 1e-12) * largest
            ):
                faults.append(
                    f"{name} is off by {float((part - wanted).abs().max()):.1e} of {largest:.1e}"
                )
    norms = [
        float(clip_grad_norm(one.parameters(), None, world, Parallel(), None))
        for one in (model, plain)
    ]
    if not abs(norms[0] / norms[1] - 1) < TOLERANCE.get(kind, 1e-9):
        faults.append(f"norms {norms}")
    return faults


def compare(cases: list[tuple[str, dict[str, Any], str]]) -> list[str]:
    """What differs, of each case; one world serves all cases in a row that share its mesh."""
    faults = []
    for _, alike in groupby(
        cases, lambda case: (case[1]["tensor"], case[1].get("data_replicate", 1))
    ):
        held = list(alike)
        cfg = FullFinetuneConfig(device="cpu", parallel=ParallelConfig(**held[0][1]))
        with start_world(cfg) as world:
            for kind, parallel, mode in held:
                memory = MemoryConfig(activation_checkpointing=mode.removeprefix("packed "))
                found = differences(kind, parallel, memory, world, mode.startswith("packed"))
                faults += [f"{kind} {parallel} {mode}: {each}" for each in found]
    return faults


def import_classes(kinds: Iterable[str]) -> None:
    """Import transformers' classes of these kinds here, so that no rank has to."""
    for kind in kinds:
        build(kind, {}, MemoryConfig(), None)


def without_modules() -> str:
    """What is said where something computes an MLP without its modules, as a kernel does."""
    cfg = FullFinetuneConfig(device="cpu", parallel=ParallelConfig(tensor=2))
    with start_world(cfg) as world:
        model, _ = build("llama", {"tensor": 2}, MemoryConfig(), world)
        fill(model)
        model.model.layers[1].mlp.forward = lambda hidden: hidden * 2
        with (
            pytest.raises(SetupError) as raised,
            torch.no_grad(),
        ):  # where every rank has all tokens
            model(torch.ones(2, LENGTH, dtype=torch.int64))
    return str(raised.value)


@pytest.mark.slow
def test_modules_that_are_not_run_are_reported() -> None:
    import_classes(["llama"])
    for said in run_ranks(without_modules, 2):
        assert "model.layers.*.mlp.down_proj: its forward went another way" in said
        assert "not run within model.layers.1" in said


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_and_gradients_are_those_of_one_process(ranks: int) -> None:
    if ranks == 2:
        modes = {
            "gpt2": "none", "phi3": "packed full", "olmo2": "none", "falcon_h1": "full", "own": "full",
        }  # fmt: skip  # ranks that divide a state do not restart it at a document
        cases = [(kind, {"tensor": 2}, mode) for kind, mode in modes.items()]
    else:
        cases = [
            ("llama, one key head", {"tensor": 4}, "packed full"),
            ("qwen3", {"tensor": 2, "fsdp_wrap_policy": "memory_efficient"}, "selective"),
        ]
    import_classes(kind for kind, *_ in cases)
    for faults in run_ranks(compare, ranks, cases, timeout=300):
        assert not faults, "\n".join(faults)


def as_full(plan: ShardingPlan) -> ShardingPlan:
    """The mistake that shows in no loss: what ranks have of norms of heads is taken for the whole
    gradient.
    """
    return replace(
        plan,
        parameters=tuple(
            replace(each, gradient="full") if each.dim < 0 else each for each in plan.parameters
        ),
    )


@pytest.mark.slow
def test_a_wrong_plan_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(
        "XDG_CACHE_HOME", str(tmp_path / "file")
    )  # what was proven cannot be kept, and is no hindrance
    model: Any = build_meta(read_spec(config_of("qwen3"), "qwen3"), torch.float32)
    plan = infer_model_plan(model, 2)
    assert proven_plan.prove_on_small_model(model, plan, 2).startswith("proven on a model of")
    with pytest.raises(SetupError, match="could not be proven on a small model: .* there"):
        proven_plan.prove_on_small_model(model, as_full(plan), 2)
    monkeypatch.setattr(
        proven_plan, "infer_model_plan", lambda *asked: as_full(infer_model_plan(*asked))
    )
    with pytest.raises(SetupError, match="gradient of model.layers.0.self_attn.[qk]_norm"):
        proven_plan.prove_on_small_model(model, as_full(plan), 2)


@pytest.mark.parametrize(
    ("differences", "said"),
    [
        (("", "norm has a"), "norm has a"),
        (("norm has a", ""), "norm has a"),
        (("", ""), "no number of ranks can"),
    ],
)
def test_why_a_plan_is_not_proven(
    differences: tuple[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small model that no ranks can share may be planned as the large one is."""
    left = list(differences)
    shared_by_none = SimpleNamespace(legal_sizes=())
    monkeypatch.setattr(proven_plan, "_build_small_model", lambda model, keys: model)
    monkeypatch.setattr(proven_plan, "infer_model_plan", lambda *asked: shared_by_none)
    monkeypatch.setattr(proven_plan, "find_plan_difference", lambda large, small: left.pop(0))
    large: Any = SimpleNamespace(shared_tokens=0)
    model: Any = torch.nn.Module()
    model.spec = SimpleNamespace(family="llama")
    model.elsewhere = {}
    with pytest.raises(SetupError, match=f"could not be proven on a small model: {said}"):
        proven_plan.prove_on_small_model(model, large, 2)


@pytest.mark.slow
def test_fewer_key_heads_than_ranks_are_proven_on_a_model_that_has_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    }
    model: Any = build_meta(
        read_spec(config_of("qwen3") | sizes | {"head_dim": 16}, "qwen3"), torch.float32
    )
    plan = infer_model_plan(model, 8)
    layer = "model.layers.0.self_attn"
    assert [plan.parameter(f"{layer}.{each}_proj.weight").dim for each in "qkvo"] == [0, -1, -1, 1]
    assert proven_plan.prove_on_small_model(model, plan, 8).startswith("proven on a model of")


def test_a_plan_with_shared_tokens_that_is_not_proven_gives_way_to_one_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def prove(model: Any, plan: ShardingPlan, world: Any) -> str:
        asked.append(plan.shared_tokens)
        if plan.shared_tokens:
            raise SetupError("the plan is wrong")
        return "proven"

    monkeypatch.setattr(proven_plan, "prove", prove)
    model: Any = build_meta(read_spec(config_of("llama"), "llama"), torch.float32)
    world: Any = SimpleNamespace(device=torch.device("cpu"), pipeline=None)
    plan = proven_plan.infer_proven_plan(model, ParallelConfig(tensor=2), world)
    assert not plan.shared_tokens and asked[0] > 0.9 and asked[1:] == [0]
    assert not any(each.kind in ("gather", "slice") for each in plan.boundaries)


def test_no_tokens_are_exchanged_where_a_packed_forward_makes_other_calls() -> None:
    model: Any = build_meta(read_spec(config_of("gpt2"), "gpt2"), torch.float32)
    plan = infer_model_plan(model, 2)
    modules = {each.module for each in plan.boundaries if each.kind in ("gather", "slice")}
    assert "transformer" not in modules and "transformer.h.1" in modules


def bits(kinds: list[str]) -> list[str]:
    """Kinds of which some gradient has other bits where what backward needs is made again than
    where it is kept.
    """
    faults = []
    cfg = FullFinetuneConfig(device="cpu", parallel=ParallelConfig(tensor=2))
    with start_world(cfg) as world:
        for kind in kinds:
            found = []
            for regather in ("true", "false"):
                settings = {"tensor": 2, "tensor_regather_in_backward": regather}
                model, _ = build(kind, settings, MemoryConfig(), world)
                fill(model)
                tokens = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % VOCABULARY
                backward(model, tokens, tokens, torch.tensor(1), False)
                found.append(
                    {name: each.grad.to_local() for name, each in model.named_parameters()}
                )
            faults += [
                f"{kind}: {name}"
                for name, each in found[0].items()
                if not torch.equal(each, found[1][name])
            ]
    return faults


@pytest.mark.slow
def test_what_is_made_again_in_backward_gives_the_same_bits() -> None:
    import_classes(["llama"])
    for faults in run_ranks(bits, 2, ["llama"]):
        assert not faults, "\n".join(faults)
