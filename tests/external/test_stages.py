"""Classes of transformers divided among the ranks of a pipeline, against the plain classes in float64; and classes that
cannot be divided."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from recipe_lib.config.schema import FullFinetuneConfig, MemoryConfig, ParallelConfig
from recipe_lib.data import Batch
from recipe_lib.errors import ConfigError
from recipe_lib.external.module_spec import ModuleSpec, read_spec
from recipe_lib.memory import apply_activation_checkpointing
from recipe_lib.models import build_meta
from recipe_lib.ops.dtensor_shards import local_part
from recipe_lib.ops.head_losses import CrossEntropy
from recipe_lib.parallel import Parallel, World, all_reduce_gradients, materialize, shard_model, split_pipeline
from recipe_lib.parallel import start_world as start
from recipe_lib.parallel.gradient_accumulation import GradientAccumulation
from tests.distributed.ranks import run_ranks

COMMON = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "hidden_size": 16,
          "intermediate_size": 24, "num_hidden_layers": 5, "num_attention_heads": 4}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
KINDS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    # A tied embedding, another one of positions, linears that are transposed.
    "gpt2": {"n_embd": 16, "n_head": 4, "n_layer": 5, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
             "attn_pdrop": 0.0, "hidden_size": None},
    "qwen3": GROUPED | {"head_dim": 4},
    # Experts of three dimensions.
    "mixtral": GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    # A norm before the layers, layers that return tuples, tied.
    "bloom": {"n_layer": 5, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    # Layers of two kinds, a scaled tied embedding, a soft cap of the logits.
    "gemma2": GROUPED | {"head_dim": 4, "sliding_window": 4},
}  # fmt: skip
SINGLE = {"mixtral"}  # in float32, since torch groups no matrices of float64
ROWS, LENGTHS = 2, (12, 8, 16, 4)  # of the micro-batches of a data rank


@dataclass(frozen=True)
class Case:
    kind: str
    schedule: str
    checkpointing: str = "none"
    parallel: dict[str, Any] = field(default_factory=dict)


def precision(kind: str) -> tuple[torch.dtype, float]:
    """What a kind is computed in, and how far off it may be."""
    return (torch.float32, 2e-5) if kind in SINGLE else (torch.float64, 1e-10)


def config_of(kind: str) -> dict[str, Any]:
    own = COMMON | {"model_type": kind} | KINDS[kind]
    return {key: value for key, value in own.items() if value is not None}


@cache
def plain(kind: str) -> nn.Module:
    """transformers' own model, with weights that follow from their names."""
    config = config_of(kind)
    made = transformers.AutoConfig.for_model(**config)
    made.use_cache = False
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=precision(kind)[0])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(sum(name.encode()))
            values = 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(values + (parameter.dim() < 2))
    return model


@cache
def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for length in LENGTHS * 2:
        tokens = torch.randint(3, COMMON["vocab_size"], (ROWS, length), generator=generator)
        labels = torch.randint(3, COMMON["vocab_size"], (ROWS, length), generator=generator)
        labels[torch.rand(ROWS, length, generator=generator) < 0.3] = -100
        found.append(Batch(tokens, labels))
    return found


@cache
def expected(kind: str, count: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and gradients of the plain model over the first `count` micro-batches."""
    model, used = plain(kind), batches()[:count]
    model.zero_grad()
    trained = sum(int((batch.labels != -100).sum()) for batch in used)
    losses = []
    for batch in used:
        logits = model(batch.tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum") / trained
        loss.backward()
        losses.append(float(loss.detach()))
    return losses, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def build(case: Case, world: World) -> tuple[nn.Module, Parallel]:
    parallel = {"pipeline": 2, "pipeline_schedule": case.schedule, **case.parallel}
    cfg = FullFinetuneConfig(parallel=ParallelConfig(**parallel), memory=MemoryConfig())
    model: Any = build_meta(read_spec(config_of(case.kind), case.kind), precision(case.kind)[0])
    pipeline = split_pipeline(model, cfg, world)
    apply_activation_checkpointing(model, case.checkpointing)
    shard_model(model, cfg.parallel, cfg.memory, world)
    divided = Parallel(pipeline, accumulation=GradientAccumulation(model, cfg.parallel))
    materialize(model, cfg.memory, world.device)
    values = dict(plain(case.kind).named_parameters())
    for name, parameter in model.named_parameters():
        local_part(parameter)[0].data.copy_(own_part(parameter, values[name].detach()))
    return model, divided


def own_part(parameter: Tensor, of: Tensor) -> Tensor:
    local, offset = local_part(parameter)
    return of[tuple(slice(first, first + size) for first, size in zip(offset, local.shape, strict=True))]


def differences(case: Case, world: World) -> list[str]:
    count = len(LENGTHS) * world.data_ranks
    (losses, gradients), tolerance = expected(case.kind, count), precision(case.kind)[1]
    used = batches()[:count]
    trained = sum(int((batch.labels != -100).sum()) for batch in used)
    model, divided = build(case, world)
    found = torch.zeros(count, dtype=torch.float64)

    def loss_of(number: int, batch: Batch) -> Tensor:
        loss = model(batch.tokens, labels=batch.labels, head_loss=CrossEntropy(3)) / trained
        found[number * world.data_ranks + world.data_rank] = loss.detach()
        return loss

    divided.pipeline.train(used[world.data_rank :: world.data_ranks], loss_of, divided.accumulation)
    divided.accumulation.finish()
    world.all_reduce_sum(found)
    all_reduce_gradients(model, divided, world)
    faults = [f"loss {one} for {other}" for one, other in zip(found.tolist(), losses, strict=True)
              if abs(one - other) > tolerance]  # fmt: skip
    names = [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            faults.append(f"{name} has no gradient")
            continue
        part, right = local_part(parameter.grad)[0], own_part(parameter, gradients[name])
        off = float((part - right).abs().max() / gradients[name].abs().max()) if part.numel() else 0.0
        faults += [f"{name} is off by {off:.1e}"] if part.shape != right.shape or not off < tolerance else []
    everywhere = {name for part in world.gather_json(names) for name in part}
    faults += [f"no rank has {name}" for name in gradients.keys() - everywhere]
    half = len(names) < len(gradients) or case.schedule == "zbv"
    return faults if half else [*faults, "a rank has all parameters"]


def compare(cases: list[Case]) -> list[str]:
    faults = []
    with start(FullFinetuneConfig(device="cpu", parallel=ParallelConfig(pipeline=2))) as world:
        for case in cases:
            faults += [f"{case}: {fault}" for fault in differences(case, world)]
    return faults


def test_two_ranks_give_the_gradients_of_the_plain_class() -> None:
    cases = [Case("llama", "zbv"), Case("gpt2", "1f1b", "full"), Case("bloom", "interleaved_zero_bubble")]
    for faults in run_ranks(compare, 2, cases):
        assert not faults


@pytest.mark.slow
def test_every_kind_gives_the_gradients_of_the_plain_class() -> None:
    cases = [Case(kind, schedule) for kind in KINDS for schedule in ("1f1b", "zbv", "interleaved_1f1b")
             if (kind, schedule) != ("gemma2", "zbv")]  # fmt: skip
    for faults in run_ranks(compare, 2, cases):
        assert not faults


@pytest.mark.slow
def test_stages_that_are_sharded_on_four_ranks() -> None:
    cases = [Case(kind, schedule, "full") for kind in KINDS for schedule in ("1f1b", "zbv")
             if (kind, schedule) != ("gemma2", "zbv")]  # fmt: skip
    step = {"reduce_gradients": "step", "reshard_after_forward": False}
    cases += [Case(kind, "zbv", parallel=step) for kind in ("gpt2", "mixtral")]
    for faults in run_ranks(compare, 4, cases):
        assert not faults
