"""Gradients that are reduced once a step, or summed in fp32, against a plain model in float64, and
what is sent for it.

The plain model sees all rows in one backward; the sharded ones see them in micro-batches.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from recipe_lib.config.schema import FullFinetuneConfig, MemoryConfig, ParallelConfig
from recipe_lib.data import StepBatches
from recipe_lib.data.batches import Batch
from recipe_lib.errors import ConfigError
from recipe_lib.models import build_meta, init_weights
from recipe_lib.ops.head_losses import CrossEntropy
from recipe_lib.parallel import (
    Parallel,
    World,
    all_reduce_gradients,
    describe_units,
    materialize,
    parallelize,
    start_world,
)
from tests.distributed.ranks import run_ranks
from tests.parallel.small_models import (
    ROWS,
    build_small_spec,
    compute_gradient_difference,
    compute_plain_gradients,
    make_small_batch,
)

PARTS = 4  # micro-batches of a data rank, at most
STEP = {"reduce_gradients": "step"}
NESTED = ["model.layers.*.mlp", "model.layers.*"]
ZERO_1 = STEP | {"reshard_after_forward": False}

# Of each two cases the first is of a tied model.
TWO: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (STEP, {}),
    (ZERO_1 | {"fsdp_wrap_policy": NESTED}, {}),
    (ZERO_1 | {"fsdp_wrap_policy": "memory_efficient"}, {"activation_checkpointing": "full"}),
    (STEP | {"fsdp_wrap_policy": "memory_efficient"}, {"activation_checkpointing": "selective"}),
    (
        STEP | {"fsdp_wrap_policy": NESTED},
        {"activation_checkpointing": "full", "activation_offload": True},
    ),
    (ZERO_1, {"cpu_offload": True}),
    ({}, {"cpu_offload": True}),
    (STEP, {"mlp_tiles": 2}),
]
FOUR: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (STEP | {"tensor": 2}, {}),
    (ZERO_1 | {"data_replicate": 2}, {}),
    ({"pipeline": 2, "pipeline_schedule": "zbv"}, {"cpu_offload": True}),
    (STEP | {"pipeline": 2, "pipeline_schedule": "1f1b"}, {"cpu_offload": True}),
]


def made(cfg: FullFinetuneConfig, world: World, *, tied: bool) -> tuple[nn.Module, Parallel]:
    spec = build_small_spec(tied=tied, layers=4 if cfg.parallel.pipeline > 1 else 3)
    model = build_meta(spec, torch.float64)
    divided = parallelize(model, cfg, world)
    materialize(model, cfg.memory, world.device)
    init_weights(model, 3, spec)
    return model, divided


def config(parallel: dict[str, Any], memory: dict[str, Any]) -> FullFinetuneConfig:
    return FullFinetuneConfig(
        device="cpu",
        dtype="fp64",
        gradient_accumulation_steps=PARTS,
        parallel=ParallelConfig(**parallel),
        memory=MemoryConfig(**memory),
    )


def step_batches(world: World) -> StepBatches:
    """This rank's micro-batches of the small batch."""
    tokens, labels = make_small_batch()
    rows = ROWS // world.data_ranks
    mine = slice(world.data_rank * rows, (world.data_rank + 1) * rows)
    parts = zip(
        tokens[mine].chunk(PARTS), labels[mine].chunk(PARTS), strict=True
    )  # fewer, where there are fewer rows
    count = int((labels != -100).sum())
    return StepBatches([Batch(*part) for part in parts], count, tokens.numel(), tokens.numel())


def loss_of(model: nn.Module, batches: StepBatches, batch: Batch) -> Tensor:
    return (
        model(batch.tokens, labels=batch.labels, head_loss=CrossEntropy(3))
        / batches.num_label_tokens
    )


def step(model: nn.Module, divided: Parallel, world: World) -> None:
    """Gradients of a step, as a recipe makes them."""
    batches = step_batches(world)
    model.zero_grad(set_to_none=True)
    for batch in divided.micro_batches(batches):
        divided.backward(loss_of(model, batches, batch))
    all_reduce_gradients(model, divided, world)


def worst_gradients(cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[float]:
    """By case the largest relative difference of this rank's gradients, of two steps."""
    worst = []
    for number, (parallel, memory) in enumerate(cases):
        tied = number % 2 == 0
        cfg = config(parallel, memory)
        with start_world(cfg) as world:
            model, divided = made(cfg, world, tied=tied)
            whole = compute_plain_gradients(
                build_small_spec(tied=tied, layers=4 if cfg.parallel.pipeline > 1 else 3)
            )[1]
            expected = {
                name: whole[name] for name, _ in model.named_parameters()
            }  # of this rank's stages
            errors = []
            for _ in range(2):
                step(model, divided, world)
                errors.append(compute_gradient_difference(model, expected))
            worst.append(max(errors))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_reduced_once_a_step_are_the_plain_models(ranks: int):
    cases = {2: TWO, 4: FOUR}[ranks]
    for errors in run_ranks(worst_gradients, ranks, cases, timeout=300):
        assert max(errors) < 1e-12, dict(zip(map(str, cases), errors, strict=True))


class Collectives(TorchDispatchMode):
    """How often each collective of tensors was called; what ranks tell each other goes by another
    all-gather.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        for kind in ("allgather_base", "reduce_scatter", "allreduce"):
            if name.startswith("c10d::") and kind in name:
                self.found[kind] = self.found.get(kind, 0) + 1
        return func(*args, **(kwargs or {}))


def described() -> list[str]:
    lines = []
    for parallel in ({}, STEP, ZERO_1):
        cfg = config(parallel, {})
        with start_world(cfg) as world:
            lines.append(
                describe_units(*made(cfg, world, tied=False)).rpartition("always gathered: ")[2]
            )
    return lines


def test_the_log_says_what_is_once_a_step():
    plain, once, zero_1 = run_ranks(described, 2)[0]
    assert once == f"{plain}; gradients reduced once a step"
    assert zero_1 == f"{once}, weights gathered once a step"


def counted(cases: list[dict[str, Any]], tied: bool) -> list[tuple[dict[str, int], int]]:
    """By case the collectives of a second step, and the units, the root among them, that have
    parameters.
    """
    found = []
    for parallel in cases:
        cfg = config(parallel, {})
        with start_world(cfg) as world:
            model, divided = made(cfg, world, tied=tied)
            step(model, divided, world)
            with Collectives() as seen:
                step(model, divided, world)
            units = [module for module in model.modules() if isinstance(module, FSDPModule)]
            groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]
            found.append((seen.found, sum(group is not None for group in groups)))
    return found


@pytest.mark.slow
def test_one_reduction_for_each_unit_and_step():
    """And where weights stay gathered one gather. An embedding needs none in backward, nor does a
    head whose gradients are made in forward; the root keeps its weights from forward to backward.
    """
    cases: list[dict[str, Any]] = [{}, STEP, ZERO_1]
    cases = [case | {"data_replicate": 2, "fsdp_wrap_policy": "memory_efficient"} for case in cases]
    parts = ROWS // 4
    for each, once, zero_1 in run_ranks(counted, 4, cases, False):
        units = each[1]
        assert units == 3 + 2 + 1  # layers, embedding and head, the root's norm
        layers, others = 3, 3
        assert each[0]["reduce_scatter"] == parts * units
        assert once[0]["reduce_scatter"] == zero_1[0]["reduce_scatter"] == units
        assert (
            each[0]["allgather_base"] == once[0]["allgather_base"] == parts * (2 * layers + others)
        )
        assert zero_1[0]["allgather_base"] == units
        reductions = [found["allreduce"] for found, _ in (each, once, zero_1)]
        assert reductions == [parts * units, units, units]


@pytest.mark.slow
def test_a_pipeline_reduces_once_for_each_unit_and_step_too():
    """Layers and what is at each end; a unit of the root's own on each stage, which on the first
    one has nothing.
    """
    cases = [
        STEP | {"pipeline": 2, "pipeline_schedule": "1f1b"},
        ZERO_1 | {"pipeline": 2, "pipeline_schedule": "zbv"},
    ]
    for rank, ((straight, straight_units), (folded, folded_units)) in enumerate(
        run_ranks(counted, 4, cases, False)
    ):
        assert straight_units == (3 if rank < 2 else 4) and folded_units == (5 if rank < 2 else 2)
        assert (
            straight["reduce_scatter"] == straight_units
            and folded["reduce_scatter"] == folded_units
        )
        assert straight["allgather_base"] > 2 * straight_units
        assert folded["allgather_base"] == folded_units


def own_backward() -> str:
    cfg = config(STEP, {})
    with start_world(cfg) as world:
        model, divided = made(cfg, world, tied=False)
        batches = step_batches(world)
        for batch in batches.micro_batches:
            loss_of(model, batches, batch).backward()
        with pytest.raises(ConfigError) as error:
            all_reduce_gradients(model, divided, world)
        return str(error.value)


def test_a_recipe_that_goes_backward_by_itself_is_refused():
    assert run_ranks(own_backward, 2)[0].startswith(
        "parallel.reduce_gradients: found step for a recipe that calls backward itself"
    )


SMALL = 2.0**-9  # of which bf16 adds none to 1


def sum_of_small(cases: list[dict[str, Any]], count: int) -> list[float]:
    """By case the gradient, over ranks, of a bf16 weight whose micro-batches' gradients are 1 and
    then SMALL each.
    """
    found = []
    tokens, labels = make_small_batch(1)
    for parallel in cases:
        cfg = FullFinetuneConfig(
            device="cpu",
            dtype="bf16",
            gradient_accumulation_steps=count + 1,
            parallel=ParallelConfig(**parallel),
        )
        with start_world(cfg) as world:
            model = build_meta(build_small_spec(), torch.bfloat16)
            divided = parallelize(model, cfg, world)
            materialize(model, cfg.memory, world.device)
            init_weights(model, 3, build_small_spec())
            batches = StepBatches([Batch(tokens, labels)] * (count + 1), 1, 1, 1)

            factors = iter([1.0] + [SMALL] * count)
            for batch in divided.micro_batches(batches):
                loss = 0.0 * model(batch.tokens, labels=batch.labels, head_loss=CrossEntropy(3))
                # The root has the norm's weight whole now.
                divided.backward(loss + next(factors) * model.model.norm.weight.sum())
            all_reduce_gradients(model, divided, world)
            gradient: Any = model.model.norm.weight.grad
            assert gradient.dtype == torch.bfloat16
            found.append(
                float((gradient.full_tensor() if world.size > 1 and divided.units else gradient)[0])
            )
    return found


@pytest.mark.slow
def test_sums_in_fp32_have_what_bf16_loses():
    exact = {"accumulate_grad_in_fp32": True}
    ddp = {"strategy": "ddp"}
    few = 4
    assert run_ranks(sum_of_small, 1, [{}, exact], few) == [[1.0, 1.0 + few * SMALL]]
    lost = 2.0
    whole = 2.0 + 2 * few * SMALL
    cases = [
        {},
        exact,
        STEP,
        STEP | exact,
        ZERO_1 | exact,
        ddp,
        ddp | exact,
        STEP | {"reduce_dtype": "fp32"},
    ]
    for found in run_ranks(sum_of_small, 2, cases, few):
        assert found == [lost, whole, lost, whole, whole, lost, whole, whole]
