"""Groups of all ranks and what they communicate, against a plain loop over ranks and formulas of
the collectives.
"""

import dataclasses
import json

import pytest

from recipe_lib.plan.plan_schema import DimensionPlan, Plan, Volume, list_rank_groups
from recipe_lib.plan.views.report import render
from recipe_lib.plan.views.tables import (
    build_groups_table,
    build_stage_ranks_table,
    build_volume_table,
)
from recipe_lib.units import GIB
from tests.plan.apart import build_settings, call_in_fork
from tests.plan.plans import build_example_pipeline, build_example_plan
from tests.plan.test_pipeline import MLP, ROWS, SHAPE, TOKENS, TYPED, VOCABULARY, WIDTH

LAYERS = 2
COUNT = 3  # of micro-batches
SIZE = 4  # bytes of a number
RANDOM = 16  # bytes of the random state that fp32's attention kernel returns
MATRICES = 4 * WIDTH * WIDTH + 3 * WIDTH * MLP
ACTIVATIONS = ROWS * TOKENS * WIDTH * SIZE  # of the stream, all tokens of a micro-batch
CASES = {
    "sixteen": (16, "parallel.tensor=2", "parallel.pipeline=2", "parallel.pipeline_schedule=1f1b"),
    "copies": (
        8,
        "parallel.tensor=2",
        "parallel.data_replicate=2",
        "parallel.fsdp_wrap_policy=layers",
    ),
    "ddp": (2, "parallel.strategy=ddp"),
    "once": (2, "parallel.reduce_gradients=step", "parallel.fsdp_wrap_policy=layers"),
    "zero-1": (2, "parallel.reduce_gradients=step", "parallel.reshard_after_forward=false"),
}


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plan]:
    folder = tmp_path_factory.mktemp("shape")
    (folder / "shape.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": LAYERS}))
    return call_in_fork(measure, f"model.preset={folder / 'shape.json'}")


def measure(preset: str) -> dict[str, Plan]:
    from recipe_lib.plan.build_plan import make_plan
    from recipe_lib.plan.search.advice import add_alone

    more = (*TYPED, preset, f"gradient_accumulation_steps={COUNT}")
    found = {}
    for name, (ranks, *overrides) in CASES.items():
        recipe_class, cfg, wanted = build_settings("demo/full", ranks, *more, *overrides)
        found[name] = make_plan(recipe_class, cfg, wanted)[0]
        if name in ("sixteen", "ddp"):
            add_alone(found[name], recipe_class, cfg, wanted)
    return found


def dimension(plan: Plan, name: str) -> DimensionPlan:
    return next(one for one in plan.dimensions if one.dim == name)


def ring(num_bytes: int, ranks: int) -> int:
    """What a rank sends in an all-gather or reduce-scatter."""
    return num_bytes * (ranks - 1) // ranks


@pytest.mark.slow
def test_members_of_all_groups(plans: dict[str, Plan]):
    """Rank r is at place (r // 8, r // 2 % 4, r % 2) of pipeline 2, data_shard 4, tensor 2."""
    expected: dict[str, list[list[int]]] = {
        "pipeline": [],
        "data_shard": [],
        "tensor": [],
        "world": [],
    }
    for rank in range(16):
        stage, shard, part = rank // 8, rank // 2 % 4, rank % 2
        if stage == 0:
            expected["pipeline"].append([2 * shard + part, 8 + 2 * shard + part])
        if shard == 0:
            expected["data_shard"].append([8 * stage + 2 * other + part for other in range(4)])
        if part == 0:
            expected["tensor"].append([rank, rank + 1])
        if stage == shard == 0:
            expected["world"].append([other for other in range(16) if other % 2 == part])
    found = {one.dim: one for one in plans["sixteen"].dimensions}
    assert {name: one.groups for name, one in found.items()} == expected
    assert found["world"].along == ["pipeline", "data_shard"]
    assert [place.ranks for place in plans["sixteen"].pipeline.places] == [
        list(range(8)),
        list(range(8, 16)),
    ]
    copies = {one.dim: one.groups for one in plans["copies"].dimensions}
    assert copies["data_replicate"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert copies["data_shard"] == [[0, 2], [1, 3], [4, 6], [5, 7]]


@pytest.mark.slow
def test_groups_are_those_that_ranks_communicate_in(plans: dict[str, Plan]):
    """The traced ranks' own groups, which torch made, are among them."""
    for plan in plans.values():
        for row in plan.communication:
            assert row.ranks in dimension(plan, row.dim).groups or row.operation in ("send", "recv")


@pytest.mark.slow
def test_totals_of_a_pipeline(plans: dict[str, Plan]):
    """Each of 8 pipelines passes a tensor each way for a micro-batch, of half the tokens: a send
    and a receive each.
    """
    message = ACTIVATIONS // 2
    calls, pipelines = 2 * 2 * COUNT, 8
    found = dimension(plans["sixteen"], "pipeline")
    assert found.cluster_step == Volume(
        calls * pipelines, calls * pipelines * message, calls * pipelines * message // 2
    )
    assert found.cluster_micro_batch == Volume(
        4 * pipelines, 4 * pipelines * message, 2 * pipelines * message
    )
    assert found.rank_step == [Volume(2 * COUNT, 2 * COUNT * message, COUNT * message)] * 2
    assert found.layer is None


@pytest.mark.slow
def test_totals_of_tensor_parallel(plans: dict[str, Plan]):
    """In a layer attention and MLP each gather and scatter in forward; in backward they do so the
    other way round, and gather their inputs again. The embedding scatters, the head gathers; both
    go back; the loss adds up maximum (fp32) and two sums (fp32) of every token.
    """
    found = dimension(plans["sixteen"], "tensor")
    layer = 2 * (2 + 3)
    assert found.layer == Volume(layer, layer * ACTIVATIONS, layer * ring(ACTIVATIONS, 2))
    first, last = found.rank_micro_batch
    calls = LAYERS // 2 * layer + 2
    assert first == Volume(calls, calls * ACTIVATIONS, calls * ring(ACTIVATIONS, 2))
    sums = ROWS * TOKENS * SIZE * (1 + 2)
    assert last == Volume(
        calls + 2, calls * ACTIVATIONS + sums, calls * ring(ACTIVATIONS, 2) + sums
    )
    cluster = found.cluster_micro_batch
    assert cluster.operations == 8 * (first.operations + last.operations)
    assert cluster.bytes == 8 * (2 * calls * ACTIVATIONS + sums)
    # Once a step: gradients of the norms that all ranks have (of a data rank's fourth), and the sum
    # for the norm.
    once = [SIZE * WIDTH * LAYERS // 4 + 8, SIZE * WIDTH * (LAYERS + 1) // 4 + 8]
    for step, each, more in zip(found.rank_step, found.rank_micro_batch, once, strict=True):
        assert step.operations == COUNT * each.operations + 2
        assert step.bytes == COUNT * each.bytes + more
    assert found.cluster_step == sum((one.multiply(8) for one in found.rank_step), Volume())


@pytest.mark.slow
def test_totals_of_sharding(plans: dict[str, Plan]):
    """A layer is gathered in forward and in backward, and its gradients are scattered; the
    embedding, which backward does not read, is gathered once. The gathers of head and embedding are
    no layer's, whatever runs meanwhile.
    """
    found = dimension(plans["sixteen"], "data_shard")
    layer, embedding = SIZE * (MATRICES // 2 + 2 * WIDTH), SIZE * VOCABULARY * WIDTH // 2
    assert found.layer == Volume(3, 3 * layer, 3 * ring(layer, 4))
    layers = LAYERS // 2
    head = embedding + SIZE * WIDTH
    assert [one.bytes for one in found.rank_micro_batch] == [
        layers * 3 * layer + 2 * embedding,
        layers * 3 * layer + 3 * head,
    ]
    assert found.cluster_micro_batch.bytes == 8 * (LAYERS * 3 * layer + 2 * embedding + 3 * head)
    assert found.cluster_micro_batch.operations == 8 * (LAYERS * 3 + 2 + 3)
    assert found.cluster_step.operations == COUNT * found.cluster_micro_batch.operations + 16 * 2
    assert found.cluster_step.wire_bytes == pytest.approx(
        found.cluster_step.bytes * 3 / 4, rel=1e-4
    )


@pytest.mark.slow
def test_totals_of_copies(plans: dict[str, Plan]):
    """HSDP sums the scattered gradients of each unit over the copies at every micro-batch, DDP all
    once a step.
    """
    found = dimension(plans["copies"], "data_replicate")
    shard = SIZE * (MATRICES // 2 + 2 * WIDTH) // 2
    assert found.layer == Volume(1, shard, shard)
    ends = SIZE * (2 * VOCABULARY * WIDTH // 2 + WIDTH) // 2
    assert found.cluster_micro_batch.bytes == 8 * (LAYERS * shard + ends)
    model = SIZE * (LAYERS * (MATRICES + 2 * WIDTH) + 2 * VOCABULARY * WIDTH + WIDTH)
    ddp = dimension(plans["ddp"], "data_replicate")
    assert ddp.rank_micro_batch == [Volume()] and ddp.layer is None
    assert ddp.cluster_step.bytes == pytest.approx(2 * model, rel=1e-3)


@pytest.mark.slow
def test_what_is_once_a_step_is_of_no_micro_batch(plans: dict[str, Plan]):
    """Without resharding between micro-batches nothing is, and what is gathered for them is where
    only gradients wait.
    """
    layer, ends = SIZE * (MATRICES + 2 * WIDTH), SIZE * (2 * VOCABULARY * WIDTH + WIDTH)
    numbers = 2 * 8  # the gradient norm and the loss
    once, zero_1 = (dimension(plans[name], "data_shard") for name in ("once", "zero-1"))
    assert zero_1.rank_micro_batch == [Volume()] and zero_1.layer is None
    assert once.rank_micro_batch[0].bytes == 2 * LAYERS * layer + ends
    assert once.layer is not None and once.layer.operations == 2
    assert (
        once.rank_step[0].bytes
        == COUNT * once.rank_micro_batch[0].bytes + LAYERS * layer + ends + numbers
    )
    assert zero_1.rank_step[0].bytes == 2 * (LAYERS * layer + ends) + numbers


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sixteen", "ddp"])
def test_the_full_model_alone(plans: dict[str, Plan], name: str):
    """Parameters, gradients, AdamW's two states and a counter for each tensor; of a layer the
    stream before each norm, queries and keys turned, values, attended tokens, gate and up; fp32: one number for each token of a norm, for each head and token of
    attention.
    """
    plan = plans[name]
    numbers = LAYERS * (MATRICES + 2 * WIDTH) + 2 * VOCABULARY * WIDTH + WIDTH
    most = plan.alone.most
    assert most["parameters"] == most["gradients"] == SIZE * numbers
    assert most["optimizer"] == 2 * SIZE * numbers + 4 * (9 * LAYERS + 3)
    assert "gathered" not in most and "communication" not in most
    tokens, heads = ROWS * TOKENS, SHAPE["num_attention_heads"]
    layer = tokens * (SIZE * (2 * WIDTH + 4 * WIDTH + 2 * MLP) + 4 * (2 + heads)) + RANDOM
    if name == "ddp":
        rows = {row.module: row for row in plan.layers}
        assert [rows[f"model.layers.{number}"].kept for number in range(LAYERS)] == [layer] * LAYERS
    assert most["activations"] >= LAYERS * layer
    part = plan.heaviest.most["parameters"] / most["parameters"]
    assert part == (1 if name == "ddp" else pytest.approx(1 / 16, rel=0.1))
    assert plans["copies"].alone is None


def lines_of(plan: Plan, title: str) -> list[str]:
    """Of a table of the full report."""
    return (
        render(plan, full=True, width=120)
        .partition(f"\n{title}")[2]
        .partition("\n\n")[0]
        .splitlines()[1:]
    )


@pytest.mark.slow
def test_report_and_json(plans: dict[str, Plan]):
    plan = dataclasses.replace(plans["sixteen"], ranks_per_node=8)
    text = render(plan, full=True, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "  pipeline: 8 groups of 2\n    [n0_g0 n1_g0] [n0_g1 n1_g1] [n0_g2 n1_g2]" in text
    assert (
        "  data_shard: 4 groups of 4\n    [n0_g0 n0_g2 n0_g4 n0_g6] [n0_g1 n0_g3 n0_g5 n0_g7]"
        in text
    )
    assert "  world: 2 groups of 8, along pipeline and data_shard\n" in text
    assert [row[1:] for row in build_stage_ranks_table(plan).rows] == [
        ["0", "n0_g0-7", "0-7"],
        ["1", "n1_g0-7", "8-15"],
    ]
    rows = {tuple(row[:2]): row[2:] for row in build_volume_table(plan).rows}
    assert rows["pipeline", "step, all ranks"][0] == str(2 * 2 * COUNT * 8)
    assert (
        rows["all", "step, all ranks"][0]
        == f"{sum(one.cluster_step.operations for one in plan.dimensions):,}"
    )
    assert "groups of ranks" not in render(plan)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == dataclasses.replace(
        plan, seconds=0.0
    )


def test_many_groups_are_folded():
    mesh = {"pipeline": 2, "data_replicate": 1, "data_shard": 64, "tensor": 2}
    dimensions = [
        DimensionPlan(name, [name], list_rank_groups(mesh, [name]), [Volume()], [Volume()])
        for name in ("data_shard", "tensor")
    ]
    plan = build_example_plan(
        ranks=256,
        mesh=mesh,
        ranks_per_node=8,
        dimensions=dimensions,
        pipeline=build_example_pipeline(),
    )
    table = build_groups_table(plan)
    assert [row[0] for row in table.rows] == [
        "data_shard: 4 groups of 64", "  [n0-15_g0,2,4,6] [n0-15_g1,3,5,7] [n16-31_g0,2,4,6] [n16-31_g1,3,5,7]",
        "tensor: 128 groups of 2", "  [n0_g0 n0_g1] [n0_g2 n0_g3] [n0_g4 n0_g5] [n0_g6 n0_g7] ...", "  [n31_g6 n31_g7]",
    ]  # fmt: skip
    assert "--json" in table.notes[0]
    assert max(map(len, render(plan, full=True, width=80).splitlines())) <= 80


def test_without_all_places_there_are_no_totals():
    plan = build_example_plan(
        dimensions=[
            DimensionPlan(
                "data_shard", ["data_shard"], [[0, 1, 2, 3]], [Volume(2, 8, 6)], [Volume()]
            )
        ]
    )
    assert [row[:3] for row in build_volume_table(plan).rows] == [
        ["data_shard", "step, rank 0", "2"]
    ]
    assert (
        build_volume_table(build_example_plan())
        is build_groups_table(build_example_plan())
        is build_stage_ranks_table(build_example_plan())
        is None
    )


def test_what_the_full_model_takes_alone_stands_beside_a_rank():
    plan = build_example_plan()
    alone = dataclasses.replace(plan.heaviest, most={"parameters": 8 * GIB, "activations": 3 * GIB})
    plan.heaviest.most = {"parameters": 2 * GIB, "gathered": GIB}
    assert "on one device" not in render(plan, full=True)
    plan.alone = alone
    for row in plan.layers:
        row.weights = {"weight": [8, 4], "bias": [8]}
    lines = lines_of(plan, "a step of the full model on one device")
    assert [line.split() for line in lines[1:4]] == [
        ["parameters", "8.00", "GiB", "2.00", "GiB", "25.0%"],
        ["gathered", "0", "B", "1.00", "GiB", "-"],
        ["activations", "3.00", "GiB", "0", "B", "0.0%"],
    ]
    layers = "\n".join(lines_of(plan, "layers"))
    assert "[8, 4], bias [8]" in layers
