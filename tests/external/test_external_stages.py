"""Classes of transformers divided among the ranks of a pipeline, against the plain classes in
float64; and classes that cannot be divided.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from recipe_lib.config import register
from recipe_lib.config.schema import FullFinetuneConfig, MemoryConfig, ParallelConfig
from recipe_lib.data import Batch, StepBatches
from recipe_lib.errors import ConfigError
from recipe_lib.external.module_spec import read_spec
from recipe_lib.memory import apply_activation_checkpointing
from recipe_lib.models import build_meta
from recipe_lib.models.language_model import list_local_parts
from recipe_lib.models.spec import StageParts
from recipe_lib.ops.attention import compute_document_positions, make_attention_info
from recipe_lib.ops.head_losses import CrossEntropy
from recipe_lib.parallel import (
    Parallel,
    World,
    all_reduce_gradients,
    materialize,
    shard_model,
    split_pipeline,
    start_world,
)
from recipe_lib.parallel.gradient_accumulation import GradientAccumulation
from recipe_lib.parallel.tensor import shard_tensors
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
# of the micro-batches of a data rank
ROWS = 2
LENGTHS = (12, 8, 16, 4)


@dataclass(frozen=True)
class Case:
    kind: str
    schedule: str
    checkpointing: str = "none"
    parallel: dict[str, Any] = field(default_factory=dict)
    packed: bool = False  # two documents in a row


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


def documents(length: int) -> list[tuple[int, int]]:
    """The lengths of the documents of each row."""
    return [(length // 4, length - length // 4), (length // 2, length // 2)]


@cache
def batches(packed: bool = False) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for length in LENGTHS * 2:
        tokens = torch.randint(3, COMMON["vocab_size"], (ROWS, length), generator=generator)
        labels = torch.randint(3, COMMON["vocab_size"], (ROWS, length), generator=generator)
        labels[torch.rand(ROWS, length, generator=generator) < 0.3] = -100
        batch = Batch(tokens, labels)
        if packed:
            parts = documents(length)
            positions, info = (
                compute_document_positions(parts, length),
                make_attention_info(parts, length),
            )
            batch = replace(batch, positions=positions, attention=info)
        found.append(batch)
    return found


@cache
def expected(kind: str, count: int, packed: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and gradients of the plain model over the first `count` micro-batches."""
    model, used = plain(kind), batches()[:count]
    model.zero_grad()
    trained = sum(int((batch.labels != -100).sum()) for batch in used)
    losses = []
    for batch in used:
        logits = torch.cat(by_document(model, batch)) if packed else model(batch.tokens).logits
        loss = (
            F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum") / trained
        )
        loss.backward()
        losses.append(float(loss.detach()))
    return losses, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def by_document(model: nn.Module, batch: Batch) -> list[Tensor]:
    """Logits `[1, s, v]` of each row, its documents each alone in a forward."""
    rows = zip(batch.tokens, documents(batch.tokens.shape[1]), strict=True)
    return [
        torch.cat([model(part[None]).logits for part in row.split(list(of))], dim=1)
        for row, of in rows
    ]


def build(case: Case, world: World) -> tuple[nn.Module, Parallel]:
    tensor = 1 if world.tensor is None else world.tensor.size
    parallel = {
        "pipeline": 2,
        "pipeline_schedule": case.schedule,
        "tensor": tensor,
        **case.parallel,
    }
    cfg = FullFinetuneConfig(parallel=ParallelConfig(**parallel), memory=MemoryConfig())
    model: Any = build_meta(read_spec(config_of(case.kind), case.kind), precision(case.kind)[0])
    pipeline = split_pipeline(model, cfg, world)
    gradients = shard_tensors(model, cfg.parallel, cfg.memory, world)
    apply_activation_checkpointing(model, case.checkpointing)
    shard_model(model, cfg.parallel, cfg.memory, world)
    divided = Parallel(pipeline, gradients, accumulation=GradientAccumulation(model, cfg.parallel))
    materialize(model, cfg.memory, world.device)
    values = dict(plain(case.kind).named_parameters())
    for name, parameter in model.named_parameters():
        for part, there in with_part(model, name, parameter.detach(), values[name].detach()):
            part.copy_(there)
    return model, divided


def with_part(
    model: nn.Module, name: str, parameter: Tensor, of: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """What this rank has of a parameter, or of its gradient, with the same of the whole."""
    for part, offset in list_local_parts(model, name, parameter):
        yield (
            part,
            of[
                tuple(
                    slice(first, first + size)
                    for first, size in zip(offset, part.shape, strict=True)
                )
            ],
        )


def differences(case: Case, world: World) -> list[str]:
    count = len(LENGTHS) * world.data_ranks
    (losses, gradients), tolerance = (
        expected(case.kind, count, case.packed),
        precision(case.kind)[1],
    )
    used = batches(case.packed)[:count]
    trained = sum(int((batch.labels != -100).sum()) for batch in used)
    model, divided = build(case, world)
    found = torch.zeros(count, dtype=torch.float64)

    mine = used[world.data_rank :: world.data_ranks]
    step = StepBatches(mine, num_label_tokens=trained, total_tokens=1, padded_tokens=1)
    for number, batch in enumerate(divided.micro_batches(step)):
        inputs = (batch.tokens, batch.positions, batch.attention)
        loss = model(*inputs, labels=batch.labels, head_loss=CrossEntropy(3)) / trained
        divided.backward(loss)
        found[number * world.data_ranks + world.data_rank] = loss.detach()
    world.all_reduce_sum(found)
    all_reduce_gradients(model, divided, world)
    faults = [f"loss {one} for {other}" for one, other in zip(found.tolist(), losses, strict=True)
              if abs(one - other) > tolerance]  # fmt: skip
    names = [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            faults.append(f"{name} has no gradient")
            continue
        for part, right in with_part(model, name, parameter.grad, gradients[name]):
            off = (
                float((part - right).abs().max() / gradients[name].abs().max())
                if part.numel()
                else 0.0
            )
            faults += (
                [f"{name} is off by {off:.1e}"]
                if part.shape != right.shape or not off < tolerance
                else []
            )
    everywhere = {name for part in world.gather_json(names) for name in part}
    faults += [f"no rank has {name}" for name in gradients.keys() - everywhere]
    half = len(names) < len(gradients) or case.schedule == "zbv"
    return faults if half else [*faults, "a rank has all parameters"]


def compare(cases: list[Case], tensor: int = 1) -> list[str]:
    faults = []
    with start_world(
        FullFinetuneConfig(device="cpu", parallel=ParallelConfig(pipeline=2, tensor=tensor))
    ) as world:
        for case in cases:
            faults += [f"{case}: {fault}" for fault in differences(case, world)]
    return faults


def check(ranks: int, cases: list[Case], tensor: int = 1) -> None:
    for case in cases:  # here, where ranks take over what is imported and computed
        expected(case.kind, len(LENGTHS) * ranks // 2 // tensor, case.packed)
    for faults in run_ranks(compare, ranks, cases, tensor):
        assert not faults


@pytest.mark.slow
def test_every_kind_gives_the_gradients_of_the_plain_class() -> None:
    cases = [
        Case("llama", "zbv"),
        Case("gpt2", "1f1b", "full"),
        Case("qwen3", "1f1b", packed=True),
        Case("mixtral", "zbv"),
        Case("bloom", "interleaved_zero_bubble"),
        Case("gemma2", "interleaved_1f1b"),
    ]
    check(2, cases)


@pytest.mark.slow
def test_stages_that_are_sharded_on_four_ranks() -> None:
    step = {"reduce_gradients": "step", "reshard_after_forward": False}
    check(4, [Case("mixtral", "zbv", "full", parallel=step)])


@pytest.mark.slow
def test_stages_of_shared_matrices_give_the_gradients_of_the_plain_class() -> None:
    check(4, [Case("qwen3", "zbv", packed=True)], tensor=2)


class Layer(nn.Module):
    """Adds to what it reads, also to what the first layer has put down if `recalls`."""

    def __init__(self, number: int, notes: list[Tensor], recalls: bool) -> None:
        super().__init__()
        self.linear, self.number, self.notes, self.recalls = nn.Linear(8, 8), number, notes, recalls

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.number:
            self.notes[:] = [hidden]
        return hidden + torch.tanh(
            self.linear(self.notes[0] if self.recalls and self.number == 2 else hidden)
        )


class Toy(nn.Module):
    """fault: what keeps it from being cut."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = (
            nn.Embedding(32, 8),
            nn.LayerNorm(8),
            nn.Linear(8, 32),
        )
        self.layers = nn.ModuleList(
            Layer(number, notes, fault == "recalls") for notes in [[]] for number in range(4)
        )
        self.fault = fault
        if fault == "bias":
            self.bias = nn.Parameter(torch.zeros(8))
        if fault == "lists":
            self.others = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(self.norm(hidden) if self.fault == "between" else hidden)
        for other in getattr(self, "others", ()):
            hidden = other(hidden)
        if self.fault == "twice":
            hidden = self.layers[0](hidden)
        if self.fault == "behind":
            hidden = hidden + self.layers[0].notes[0]
        return self.head(self.norm(hidden + self.bias if self.fault == "bias" else hidden))


FAULTS = {
    "recalls": "layers.2 takes more from the layers before it than hidden states",
    "behind": "what is behind its layers takes more from them than hidden states",
    "bias": "bias is in no module that one stage could have",
    "lists": "it has 2 lists of layers, not one",
    "between": "norm runs with layers of several stages",
    "twice": "its forward does not call each layer once, in the order of the list",
}


def parts_of_toy(fault: str) -> StageParts:
    register("model", "toy")(lambda config: Toy(config["fault"]))
    return read_spec({"model_type": "toy", "fault": fault}, "toy", "toy").find_stage_parts()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_class_that_cannot_be_cut_is_refused_with_the_reason(fault: str) -> None:
    with pytest.raises(ConfigError) as found:
        parts_of_toy(fault)
    assert found.value.faults == [
        f"parallel.pipeline: toy cannot be cut into stages: {FAULTS[fault]}; set"
        " parallel.pipeline=1"
    ]


def test_a_plugin_without_a_fault_is_cut() -> None:
    parts = parts_of_toy("")
    assert (parts.first, parts.last, parts.width) == (("embedding",), ("norm", "head"), 8)


def test_a_large_model_is_cut_where_a_small_one_of_its_class_is() -> None:
    config = transformers.AutoConfig.for_model(
        "bloom", hidden_size=1024, n_layer=3, n_head=8, vocab_size=4096
    )
    parts = read_spec(config.to_dict() | {"model_type": "bloom"}, "bloom").find_stage_parts()
    assert (len(parts.layers), parts.width, parts.returned) == (3, 1024, 2)


def test_a_tied_embedding_of_another_class_in_a_v_is_refused() -> None:
    model: Any = build_meta(read_spec(config_of("gemma2"), "gemma2"), torch.float32)
    with pytest.raises(ConfigError, match="tied embedding is a Gemma2TextScaledWordEmbedding"):
        model.keep_stages([0, 4], first=True, last=True)
