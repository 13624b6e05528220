"""Plans of pipelines against closed forms, against the whole trace of all micro-batches, and
against one rank.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from recipe_lib.config.schema import ParallelConfig
from recipe_lib.parallel.pipeline.schedules import compute_orders
from recipe_lib.parallel.pipeline.simulation import add_transfers
from recipe_lib.plan.plan_schema import Plan
from recipe_lib.plan.tracing.simulated_micro_batches import (
    count_pipeline_micro_batches,
    find_stand_ins,
    get_orders,
    list_peers,
)
from tests.plan.apart import build_settings, call_in_fork
from tests.selection import select_cases

LAYERS = 6
WIDTH = 64
MLP = 96
VOCABULARY = 320
ROWS = 2
TOKENS = 32
COUNT = 7
PLACES = 3
LAYER = 4 * WIDTH * WIDTH + 3 * WIDTH * MLP + 2 * WIDTH  # as many heads as kv heads
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": WIDTH,
    "intermediate_size": MLP, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4,
    "hidden_act": "silu", "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "initializer_range": 0.02,
}  # fmt: skip
TYPED = (
    f"batch_size={ROWS}",
    f"max_seq_len={TOKENS}",
    "device=auto",
    "dtype=fp32",
    "~validation.source",
)
SCHEDULES = ("1f1b", "zbv")


def typed(folder: Path, *more: str) -> tuple[str, ...]:
    """Overrides of the small model."""
    (folder / "shape.json").write_text(json.dumps(SHAPE))
    return (
        *TYPED,
        f"model.preset={folder / 'shape.json'}",
        f"gradient_accumulation_steps={COUNT}",
        *more,
    )


def measure(folder: Path, schedules: list[str]) -> dict[str, Any]:
    """Plans of the schedules, of one rank; and of each place the peaks and operators with all
    micro-batches traced.
    """
    from recipe_lib.plan.build_plan import make_plan, simulate_rank
    from recipe_lib.plan.timing.cost import count_model_flops
    from recipe_lib.plan.tracing.trace import OP
    from recipe_lib.plan.tracing.trace_rank import STEADY

    def counted(trace: Any) -> Counter[tuple[str, str]]:
        ops = [trace.ops[number] for kind, number in trace.iterate_events(STEADY) if kind == OP]
        total: Counter[tuple[str, str]] = Counter()
        for op in ops:
            total[op.name, op.part] += op.repeats
        return total

    recipe_class, cfg, wanted = build_settings("demo/full", 1, *typed(folder))
    found: dict[str, Any] = {
        "flops": count_model_flops(simulate_rank(recipe_class, cfg, wanted, 0).trace, STEADY)
    }
    for schedule in schedules:
        more = (f"parallel.pipeline={PLACES}", f"parallel.pipeline_schedule={schedule}")
        recipe_class, cfg, wanted = build_settings("demo/full", PLACES, *typed(folder, *more))
        short = [simulate_rank(recipe_class, cfg, wanted, rank) for rank in range(PLACES)]
        whole = [
            simulate_rank(recipe_class, cfg, wanted, rank, traced=COUNT) for rank in range(PLACES)
        ]
        found[schedule] = {
            "plan": make_plan(recipe_class, cfg, wanted)[0],
            "flops": sum(count_model_flops(one.trace, STEADY) for one in short),
            "peaks": [[one.trace.find_active_peaks() for one in side] for side in (short, whole)],
            "operators": [[counted(one.trace) for one in side] for side in (short, whole)],
            "lengths": [len(one.trace.events) for one in (short[-1], whole[-1])],
        }
    return found


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    return call_in_fork(
        measure,
        tmp_path_factory.mktemp("shape"),
        list(dict.fromkeys(["zbv", *select_cases(request, "schedule")])),
    )


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_few_micro_batches_have_the_peak_and_the_operators_of_all(
    found: dict[str, Any], schedule: str
):
    few, all_of_them = found[schedule]["peaks"]
    assert few == all_of_them
    few, all_of_them = found[schedule]["operators"]
    assert few == all_of_them
    fewer, whole = found[schedule]["lengths"]
    assert fewer < whole


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_operation_is_on_one_place(found: dict[str, Any], schedule: str):
    """Weight gradients that are deferred are operations of the model too."""
    assert found[schedule]["flops"] == found["flops"]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_parameters_and_states_of_a_stage(found: dict[str, Any], schedule: str):
    plan: Plan = found[schedule]["plan"]
    assert plan.pipeline is not None
    places = plan.pipeline.places
    last = 0 if schedule == "zbv" else PLACES - 1
    assert [place.rank for place in places] == list(range(PLACES))
    for place, rank in zip(places, plan.rank_plans, strict=True):
        layers = sum(end - first + 1 for first, end in place.layers)
        elements = layers * LAYER + (place.place == 0) * VOCABULARY * WIDTH
        elements += (place.place == last) * (VOCABULARY * WIDTH + WIDTH)
        assert place.parameters == place.trained == elements
        kinds: Counter[str] = Counter()
        for alive in rank.alive:
            kinds[alive.kind] += alive.bytes if alive.label else 0
        assert kinds["gradients"] == 4 * elements
        assert kinds["parameters"] == 4 * elements
        tensors = layers * 9 + (place.place == 0) + 2 * (place.place == last)
        assert kinds["optimizer"] == 2 * 4 * elements + 4 * tensors  # a step counter each
    assert (
        sum(place.parameters for place in places) == LAYERS * LAYER + 2 * VOCABULARY * WIDTH + WIDTH
    )
    assert [row.module for row in plan.layers if row.module.count(".") == 2] == [
        f"model.layers.{number}" for number in range(LAYERS)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_inner_edge_has_a_tensor_each_way_for_each_micro_batch(
    found: dict[str, Any], schedule: str
):
    plan: Plan = found[schedule]["plan"]
    assert plan.pipeline is not None
    turns = 2 if schedule == "zbv" else 1
    message = 4 * ROWS * TOKENS * WIDTH
    for place in plan.pipeline.places:
        tensors = COUNT * turns * (1 if place.place in (0, PLACES - 1) else 2)
        assert (place.sends, place.sent) == (tensors, tensors * message)
    heaviest = next(place for place in plan.pipeline.places if place.rank == plan.heaviest.rank)
    exchanged = [row for row in plan.communication if row.operation in ("send", "recv")]
    assert {row.dim for row in exchanged} == {"pipeline"}
    for operation in ("send", "recv"):
        assert sum(row.count for row in exchanged if row.operation == operation) == heaviest.sends
    assert {row.bytes for row in exchanged} == {message}
    assert {tuple(row.ranks) for row in exchanged} == {
        tuple(sorted((heaviest.place, other)))
        for other in (heaviest.place - 1, heaviest.place + 1)
        if 0 <= other < PLACES
    }


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_time_line_has_every_action_once(found: dict[str, Any], schedule: str):
    plan: Plan = found[schedule]["plan"]
    pipeline = plan.pipeline
    assert pipeline is not None and pipeline.seconds is not None and pipeline.bubble is not None
    kinds = ("F", "I", "W") if schedule == "zbv" else ("F", "B")
    stages = range(PLACES * pipeline.stages_per_rank)
    done = Counter((span.stage, span.micro_batch) for span in pipeline.spans if span.kind in kinds)
    assert set(done) == {(stage, number) for stage in stages for number in range(COUNT)}
    busy = sum(span.end - span.start for span in pipeline.spans)
    assert pipeline.bubble == pytest.approx(1 - busy / (PLACES * pipeline.seconds))
    assert [place.compute for place in pipeline.places] == pytest.approx(
        [
            sum(span.end - span.start for span in pipeline.spans if span.place == at)
            for at in range(PLACES)
        ]
    )
    assert plan.time is not None and plan.time.step > pipeline.seconds
    assert plan.time.tokens_per_step == ROWS * TOKENS * COUNT
    for at in range(PLACES):
        spans = sorted((span.start, span.end) for span in pipeline.spans if span.place == at)
        assert all(
            first[1] <= second[0] + 1e-12 for first, second in zip(spans, spans[1:], strict=False)
        )


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_micro_batches_in_flight(found: dict[str, Any], schedule: str):
    counts = [place.in_flight for place in found[schedule]["plan"].pipeline.places]
    assert counts == {"1f1b": [3, 2, 1], "zbv": [6, 6, 6]}[schedule]


@pytest.mark.slow
def test_a_pipeline_of_a_plan_is_read_again(found: dict[str, Any]):
    plan = found["zbv"]["plan"]
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))).pipeline == plan.pipeline


def test_what_stands_for_the_rest_is_counted_once():
    """Each action of a shorter step is used, none of another stage or kind; GPipe, which holds all,
    has no shorter.
    """
    for schedule in ("1f1b", "zbv", "interleaved_1f1b", "interleaved_zero_bubble"):
        parallel = ParallelConfig(pipeline=4, pipeline_schedule=schedule)
        for place in range(4):
            few = count_pipeline_micro_batches(parallel, place, 40)
            assert few <= 12
            stands = find_stand_ins(parallel, place, few, 40)
            assert stands is not None
            assert {one.micro_batch for one in stands.values()} == set(range(few))
            assert all(
                (one.stage, one.kind) == (other.stage, other.kind) for one, other in stands.items()
            )
    assert (
        count_pipeline_micro_batches(ParallelConfig(pipeline=4, pipeline_schedule="gpipe"), 0, 40)
        == 40
    )
    assert find_stand_ins(ParallelConfig(pipeline=4, pipeline_schedule="gpipe"), 0, 39, 40) is None


def test_who_exchanges_with_whom():
    folded = ParallelConfig(pipeline=4, pipeline_schedule="zbv")
    assert [list_peers(folded, place) for place in range(4)] == [{1}, {0, 2}, {1, 3}, {2}]
    round_trip = ParallelConfig(pipeline=4, pipeline_schedule="interleaved_1f1b")
    assert list_peers(round_trip, 0) == {1, 3}
    assert list_peers(ParallelConfig(), 0) == set()


@pytest.mark.slow
def test_a_plan_from_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """All places are planned without being named, and the page shows the schedule."""
    code = call_in_fork(command, typed(tmp_path), str(tmp_path / "plan.html"))
    text = capfd.readouterr().out
    assert code == 0
    assert "stages of the pipeline" in text and f"heaviest of {PLACES} planned" in text
    assert f"zbv, {COUNT} micro-batches of {ROWS} sequences; bubble " in text
    page = (tmp_path / "plan.html").read_text()
    boxes = page.partition('aria-label="what each rank computes over a step"')[2].partition(
        "</svg>"
    )[0]
    assert boxes.count('class="box') == PLACES * 2 * 3 * COUNT


def command(overrides: tuple[str, ...], page: str) -> int:
    from recipe_lib.cli.plan import run

    schedule = (f"parallel.pipeline={PLACES}", "parallel.pipeline_schedule=zbv")
    more = (*schedule, "--sequence", "max", "--full", "--html", page)
    code = run(
        [
            "--nproc_per_node",
            str(PLACES),
            "--config",
            "demo/full",
            "--device",
            "rtx4090",
            *overrides,
            *more,
        ]
    )
    sys.stdout.flush()
    return code


def test_an_order_is_that_of_all_its_settings() -> None:
    """Orders are kept: two settings that differ in anything must not share one."""
    for change in (
        {},
        {"pipeline_max_deferred_weight_grads": 1},
        {"pipeline_max_deferred_weight_grads": 2},
        {"pipeline_schedule": "interleaved_zero_bubble"},
    ):
        parallel = ParallelConfig(**{"pipeline": 4, "pipeline_schedule": "zbv"} | change)
        assert get_orders(parallel, 16) == add_transfers(compute_orders(parallel, 16), parallel)
