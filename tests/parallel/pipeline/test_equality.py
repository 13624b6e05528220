"""A decoder divided among the ranks of a pipeline, against the plain one in float64: losses,
gradients, norms.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recipe_lib.adapters import add_adapters, init_adapters
from recipe_lib.config.mesh import SCHEDULES
from recipe_lib.config.schema import FullFinetuneConfig, LoraConfig, MemoryConfig, ParallelConfig
from recipe_lib.data import Batch, StepBatches
from recipe_lib.errors import ConfigError
from recipe_lib.memory import apply_activation_checkpointing, compile_layers
from recipe_lib.models import DecoderSpec, build_meta, init_weights
from recipe_lib.ops.attention import compute_document_positions, make_attention_info
from recipe_lib.ops.dtensor_shards import locate_local_part
from recipe_lib.ops.head_losses import CrossEntropy, TokenLogProbs
from recipe_lib.optim.optimizers import clip_grad_norm
from recipe_lib.parallel import (
    Parallel,
    World,
    all_reduce_gradients,
    materialize,
    shard_model,
    shard_tensors,
    split_pipeline,
    start_world,
)
from recipe_lib.parallel.gradient_accumulation import GradientAccumulation
from tests.distributed.ranks import import_compiler, run_ranks
from tests.parallel.small_models import VOCABULARY, build_small_spec

ROWS = 2
LENGTHS = (12, 8, 16, 4)  # of the micro-batches, each padded to its own
ALONE = SimpleNamespace(pipeline=None, device=torch.device("cpu"))
GEMMA = {
    "post_norms": True, "norm_offset": True, "head_norms": True, "embedding_scale": 5.5, "logit_softcap": 9.0,
    "attention_softcap": 20.0, "activation": "gelu_tanh",
}  # fmt: skip
# The second and fourth layer's queries and keys do not rotate, as in SmolLM3.
GRANITE = {
    "rotated": (True, False, True, False), "residual_scale": 0.3, "logit_scale": 0.4, "embedding_scale": 5.5,
    "attention_scale": 0.2,
}  # fmt: skip
BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
FROZEN = {
    "early": ("embed_tokens", "layers.0.", "layers.1."),
    "late": ("norm.", "lm_head", "layers.2.", "layers.3."),
}


@dataclass(frozen=True)
class Case:
    """kind: `full`, `lora`, or which half of the layers is frozen. packed: two documents in a
    row.
    """

    schedule: str
    kind: str = "full"
    checkpointing: str = "none"
    parallel: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    packed: bool = False
    per_token: bool = False
    compiled: bool = False
    dtype: torch.dtype = torch.float64
    loose: bool = False  # gradients are summed in fp32
    size: int = 4  # layers, and micro-batches of a data rank

    def keys(self) -> dict[str, Any]:
        return {"pipeline": 2, "pipeline_schedule": self.schedule, **self.parallel}

    def plain(self) -> "Case":
        """What the model without ranks depends on."""
        return Case(
            "",
            self.kind,
            spec=self.spec,
            packed=self.packed,
            per_token=self.per_token,
            dtype=self.dtype,
            size=self.size,
        )


def shape_of(case: Case) -> DecoderSpec:
    return replace(
        build_small_spec(tied=case.spec.get("tied", False), layers=case.size), **case.spec
    )


def build(case: Case, world: World | None) -> tuple[nn.Module, Parallel]:
    """The model as a recipe makes it; without a world, plain."""
    spec = shape_of(case)
    cfg = FullFinetuneConfig(
        parallel=ParallelConfig(**case.keys()) if world else ParallelConfig(),
        memory=MemoryConfig(activation_checkpointing=case.checkpointing),
    )
    model, divided = build_meta(spec, case.dtype), Parallel()
    if case.kind == "lora":
        add_adapters(model, LoraConfig(rank=4), case.dtype)
    for name, parameter in model.named_parameters():
        if case.kind in FROZEN and any(part in name for part in FROZEN[case.kind]):
            parameter.requires_grad_(False)
    if world is None:
        model.to_empty(device="cpu")
    else:
        pipeline = split_pipeline(model, cfg, world)
        gradients = shard_tensors(model, cfg.parallel, cfg.memory, world)
        apply_activation_checkpointing(model, cfg.memory.activation_checkpointing)
        if case.compiled:
            compile_layers(model, "eager")
        shard_model(model, cfg.parallel, cfg.memory, world)
        divided = Parallel(
            pipeline, gradients, accumulation=GradientAccumulation(model, cfg.parallel)
        )
        materialize(model, cfg.memory, world.device)
    init_weights(model, 3, spec)
    if case.kind == "lora":
        init_adapters(model, 4)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zeros would hide A's gradient
                generator = torch.Generator().manual_seed(sum(name.encode()))
                values = torch.randn(parameter.shape, generator=generator, dtype=case.dtype)
                locate_local_part(parameter)[0].data.copy_(own_part(parameter, 0.1 * values))
    return model, divided


def own_part(parameter: Tensor, of: Tensor) -> Tensor:
    """What this rank holds of `of`, if it lies as the parameter does."""
    local, offset = locate_local_part(parameter)
    return of[
        tuple(slice(first, first + size) for first, size in zip(offset, local.shape, strict=True))
    ]


@cache
def batches(packed: bool) -> list[Batch]:
    """Micro-batches of unlike lengths; of one no token is trained."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for number, length in enumerate(LENGTHS * 4):
        tokens = torch.randint(0, VOCABULARY, (ROWS, length), generator=generator)
        labels = torch.randint(0, VOCABULARY, (ROWS, length), generator=generator)
        labels[torch.rand(ROWS, length, generator=generator) < (1.0 if number == 3 else 0.3)] = -100
        batch = Batch(tokens, labels)
        if packed:
            parts = [(length // 4, length - length // 4), (length // 2, length // 2)]
            positions, info = (
                compute_document_positions(parts, length),
                make_attention_info(parts, length),
            )
            batch = replace(batch, positions=positions, attention=info)
        found.append(batch)
    return found


def step_of(micro_batches: list[Batch]) -> StepBatches:
    return StepBatches(micro_batches, num_label_tokens=1, total_tokens=1, padded_tokens=1)


def loss_of(case: Case, model: nn.Module, batch: Batch, count: int) -> Tensor:
    found = model(
        batch.tokens,
        batch.positions,
        batch.attention,
        labels=batch.labels,
        head_loss=(TokenLogProbs if case.per_token else CrossEntropy)(3),
    )
    return (found.square().sum() if case.per_token else found) / count


PLAIN: dict[str, Any] = {}


def expected(case: Case, data_ranks: int) -> tuple[list[float], dict[str, Tensor | None], float]:
    """Losses of the micro-batches of all data ranks, gradients, and their norm, of the plain
    model.
    """
    key = f"{case} {data_ranks}"
    if key in PLAIN:
        return PLAIN[key]
    (model, divided), used = build(case, None), batches(case.packed)[: case.size * data_ranks]
    count = sum(int((batch.labels != -100).sum()) for batch in used)
    losses = []
    for batch in used:
        loss = loss_of(case, model, batch, count)
        loss.backward()
        losses.append(float(loss.detach()))
    norm = float(clip_grad_norm(model.parameters(), None, ALONE, divided, None))
    PLAIN[key] = (
        losses,
        {name: parameter.grad for name, parameter in model.named_parameters()},
        norm,
    )
    return PLAIN[key]


def compared(cases: list[Case], ranks: int) -> list[list[str]]:
    """What each rank has to say of the cases. The plain models run here, once for all ranks."""
    for case in cases:
        keys = case.keys()
        expected(case.plain(), ranks // (keys["pipeline"] * keys.get("tensor", 1)))
    return run_ranks(compare, ranks, cases, timeout=400)


def differences(case: Case, world: World) -> list[str]:
    losses, gradients, norm = expected(case.plain(), world.data_ranks)
    used = batches(case.packed)[: case.size * world.data_ranks]
    count = sum(int((batch.labels != -100).sum()) for batch in used)
    mine = used[world.data_rank :: world.data_ranks]
    model, divided = build(case, world)
    tolerance = 1e-10 if case.dtype == torch.float64 and not case.loose else 1e-5
    found = torch.zeros(len(used), dtype=torch.float64)
    called: list[int] = []

    for batch in divided.micro_batches(step_of(mine)):
        number = next(at for at, one in enumerate(mine) if one is batch)
        loss = loss_of(case, model, batch, count)
        divided.backward(loss)
        found[number * world.data_ranks + world.data_rank] = loss.detach()
        called.append(number)
    world.all_reduce_sum(found)
    all_reduce_gradients(model, divided, world)
    faults = [f"loss {one} for {other}" for one, other in zip(found.tolist(), losses, strict=True)
              if abs(one - other) > tolerance]  # fmt: skip
    if called != (list(range(case.size)) if divided.pipeline.has_last else []):
        faults.append(f"the loss was called for {called}")
    for name, parameter in model.named_parameters():
        gradient, wanted = parameter.grad, gradients[name]
        if gradient is None or wanted is None:
            if gradient is not wanted:
                faults.append(f"{name} has a gradient, or should have one")
            continue
        part, right = locate_local_part(gradient)[0], own_part(parameter, wanted)
        if part.shape != right.shape or not bool(
            ((part - right).abs() <= tolerance * wanted.abs().max()).all()
        ):
            faults.append(
                f"{name} is off by {float((part - right).abs().max() / wanted.abs().max()):.1e}"
            )
    total = float(clip_grad_norm(model.parameters(), None, world, divided, None))
    if not abs(total / norm - 1) < max(1e-9, tolerance):
        faults.append(f"norm {total} for {norm}")
    results = divided.pipeline.evaluate(
        mine, lambda number, batch: float(loss_of(case, model, batch, count))
    )
    for number, result in enumerate(results):
        right_one = losses[number * world.data_ranks + world.data_rank]
        if (result is None) == divided.pipeline.has_last or (
            result and abs(result - right_one) > tolerance
        ):
            faults.append(f"evaluated {result} for {right_one}")
    return faults


def compare(cases: list[Case]) -> list[str]:
    """What differs from the plain model, of each case. One world serves all cases in a row that
    share its mesh.
    """
    faults = []

    def mesh(case: Case) -> tuple[int, ...]:
        return tuple(case.keys().get(key, 1) for key in ("pipeline", "tensor", "data_replicate"))

    for _, alike in groupby(sorted(cases, key=mesh), mesh):
        first, *others = alike
        cfg = FullFinetuneConfig(device="cpu", parallel=ParallelConfig(**first.keys()))
        with start_world(cfg) as world:
            for case in (first, *others):
                faults += [f"{case}: {fault}" for fault in differences(case, world)]
    return faults


KINDS = ("full", "lora", "early", "late")
CHECKPOINTING = ("none", "full", "selective")


@pytest.mark.slow
def test_every_schedule_on_two_ranks() -> None:
    """Each schedule with two kinds of what is trained, each kind, and what a stage may meet."""
    every = [Case(*each) for each in product(SCHEDULES, KINDS, CHECKPOINTING)]
    cases = every[::7] + [
        Case("zbv", spec=GEMMA, packed=True),
        Case("1f1b", spec=GRANITE, packed=True),
        Case("1f1b", spec={"tied": True}, checkpointing="full"),
    ]
    cases += [
        Case("interleaved_zero_bubble", spec=BIASES),
        Case("zbv", per_token=True, packed=True, checkpointing="selective"),
        Case("gpipe", dtype=torch.float32),
        Case("interleaved_1f1b", spec={"tied": True}),
        Case("1f1b", parallel={"pipeline_layers_per_stage": [1, 3]}),
        Case("zbv", checkpointing="full", parallel={"pipeline_max_deferred_weight_grads": 1}),
        Case(
            "zbv", spec={"tied": True}, parallel={"pipeline_layers_per_stage": [1, 3, 1, 3]}, size=8
        ),
    ]
    for faults in compared(cases, 2):
        assert not faults


def four_ranks() -> list[Case]:
    """Pipelines of four; of two with FSDP, which frees what it has gathered or keeps it, HSDP and
    tensor parallel.
    """
    units = {"fsdp_wrap_policy": ["model.embed_tokens", "model.layers.*.mlp", "lm_head"]}
    return [
        Case("gpipe", "early", "selective"),
        Case("interleaved_1f1b", "late", "full", {"reshard_after_forward": False}),
        Case("zbv", "lora", parallel=units),
        Case("1f1b", parallel={"pipeline": 4}),
        Case("zbv", "full", "full", {"tensor": 2}, {"tied": True}),
        Case("1f1b", "full", "selective", {"data_replicate": 2}, packed=True),
    ]


def reduced_once() -> list[Case]:
    """Schedules with gradients that are reduced once a step, half of them with weights kept as
    long.
    """
    step = {"reduce_gradients": "step"}
    zero_1 = step | {"reshard_after_forward": False}
    return [
        Case("interleaved_zero_bubble", "late", "selective", step),
        Case("1f1b", "full", "full", zero_1, {"tied": True}),
        Case("zbv", "full", "full", zero_1),
        Case(
            "zbv",
            parallel=step | {"fsdp_wrap_policy": ["model.layers.*.mlp", "lm_head"]},
            packed=True,
        ),
    ]


@pytest.mark.slow
def test_pipelines_around_sharding_and_tensor_parallel_on_four_ranks() -> None:
    for faults in compared(four_ranks() + reduced_once(), 4):
        assert not faults


@pytest.mark.slow
def test_sharding_around_tensor_parallel_on_eight_ranks() -> None:
    """Tensor parallel's linears gather again, from the stream and the norm's weight, which FSDP
    frees; and gradients that are reduced once a step.
    """
    cases = [
        Case("zbv", parallel={"tensor": 2}),
        Case("zbv", parallel={"tensor": 2, "reduce_gradients": "step"}),
    ]
    for faults in compared(cases, 8):
        assert not faults


def thawed_gradients() -> list[str]:
    """Names with gradients after a step with the first layers frozen, and after one with all
    thawed.
    """
    cfg = FullFinetuneConfig(
        device="cpu", parallel=ParallelConfig(pipeline=2, pipeline_schedule="zbv")
    )
    with start_world(cfg) as world:
        model, divided = build(Case("zbv", "early"), world)
        found = []
        for _ in range(2):
            for batch in divided.micro_batches(step_of(batches(False)[:4])):
                divided.backward(loss_of(Case("zbv"), model, batch, 1))
            found += [
                name for name, parameter in model.named_parameters() if parameter.grad is not None
            ]
            model.zero_grad()
            model.requires_grad_(True)
        return found


def test_a_recipe_may_thaw_layers_between_two_steps() -> None:
    found = [name for names in run_ranks(thawed_gradients, 2) for name in names]
    whole = {
        name for name, _ in build_meta(shape_of(Case("zbv")), torch.float32).named_parameters()
    }
    early = {name for name in whole if any(part in name for part in FROZEN["early"])}
    assert {name: found.count(name) for name in whole} == {
        name: 1 + (name not in early) for name in whole
    }


@pytest.mark.slow
def test_compiled_layers_run_where_backward_is_whole() -> None:
    import_compiler()
    cases = [Case("1f1b", "full", "full", compiled=True, size=2)]
    for faults in compared(cases, 2):
        assert not faults


def test_a_gradient_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: without the weights' half of backward their gradients are
    missing.
    """
    from recipe_lib.ops.deferred import DeferredGradients

    monkeypatch.setattr(DeferredGradients, "run", lambda entry: None)
    for faults in run_ranks(compare, 2, [Case("zbv")]):
        assert any("mlp.up_proj.weight" in fault for fault in faults)


def whole_model() -> str:
    parallel = ParallelConfig(pipeline=2)
    with start_world(FullFinetuneConfig(device="cpu", parallel=parallel)) as world:
        try:
            shard_model(
                build_meta(build_small_spec(), torch.float32), parallel, MemoryConfig(), world
            )
        except ConfigError as error:
            return str(error)
    return ""


def test_a_recipe_that_leaves_its_model_whole_is_refused() -> None:
    for line in run_ranks(whole_model, 2):
        assert line.startswith(
            "parallel.pipeline: found 2 for a recipe that leaves its model whole"
        )
        assert "call parallelize(model, cfg, world)" in line
