"""Checkpointing under a budget: what is chosen, that so many bytes are kept, and that the gradients
stay the same.
"""

import gc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from recipe_lib.adapters import add_adapters
from recipe_lib.config.mesh import count_stages, list_rank_stages
from recipe_lib.config.schema import FullFinetuneConfig, LoraConfig, MemoryConfig, ParallelConfig
from recipe_lib.errors import ConfigError
from recipe_lib.memory import apply_activation_checkpointing, chunk_mlps
from recipe_lib.memory.apply_levers import recompute_cheap_tensors
from recipe_lib.memory.budget import (
    FLOPS,
    BudgetChoice,
    LayerCost,
    Operator,
    choose_kept_operators,
    measure_layer_costs,
)
from recipe_lib.models import build_meta, build_spec, read_preset_config
from recipe_lib.models.spec import MixtureSpec
from recipe_lib.parallel import materialize, shard_tensors, start_world
from recipe_lib.parallel.pipeline.driver import Pipeline
from recipe_lib.units import GIB
from tests.distributed.collectives import let_collectives_go
from tests.distributed.ranks import run_ranks
from tests.memory.live_bytes import LiveBytes
from tests.memory.test_mlp_tiles import LORA, assert_close, backward, filled
from tests.parallel.pipeline.formulas import compute_in_flight
from tests.parallel.small_models import (
    LENGTH,
    ROWS,
    build_small_spec,
    make_small_batch,
    read_gradients,
)
from tests.parallel.test_tensor import BIASES, GEMMA
from tests.selection import mark_slow_except

CHOSEN: list[str | None] = []  # what each call of `decoder` said that layers keep
LAYERS = 4
TOKENS = ROWS * LENGTH
WIDTH = 32
MLP_WIDTH = 64
KV_WIDTH = 16


def config(budget: float | None, **memory: Any) -> FullFinetuneConfig:
    mode = {
        "activation_checkpointing": "none" if budget is None else "budget",
        "activation_budget_gib": budget,
    }
    return FullFinetuneConfig(
        batch_size=ROWS, max_seq_len=LENGTH, memory=MemoryConfig(**mode | memory)
    )


def decoder(cfg: FullFinetuneConfig, lora: LoraConfig | None = None, **changes: Any) -> nn.Module:
    spec = replace(build_small_spec(layers=LAYERS), **{"windows": (None,) * LAYERS} | changes)
    model = build_meta(spec, torch.float64)
    if lora is not None:
        add_adapters(model, lora, torch.float64)
    chunk_mlps(model, cfg.memory.mlp_tiles)
    CHOSEN.append(apply_activation_checkpointing(model, cfg.memory.activation_checkpointing, cfg))
    return filled(model, spec, lora)


def kept(model: nn.Module) -> int:
    """Bytes alive between forward and backward that were not there before forward."""
    tokens, labels = make_small_batch()
    # The collection looks through what forward makes, and not through all that is imported
    gc.freeze()
    with LiveBytes() as live:
        loss = model(tokens, labels=labels)
        gc.collect()  # what only circles of objects hold is alive until then, more or less long
        found = live.count_bytes()
    gc.unfreeze()
    loss.backward()
    return found


def costs(lora: LoraConfig | None = None, chunks: int = 1, **changes: Any) -> list[LayerCost]:
    model = build_meta(
        replace(build_small_spec(layers=LAYERS), **{"windows": (None,) * LAYERS} | changes),
        torch.float64,
    )
    if lora is not None:
        add_adapters(model, lora, torch.float64)
    chunk_mlps(model, chunks)
    return measure_layer_costs(model, ROWS, LENGTH, 1, "cpu")


def test_operators_of_a_layer_and_their_bytes() -> None:
    """As many elements a token as the results have; the last matmul is not among them: nothing
    needs it again.
    """
    found = costs()
    assert [one.name for one in found] == [f"model.layers.{number}" for number in range(LAYERS)]
    elements = [(one.kind, one.number, one.bytes // (8 * TOKENS)) for one in found[1].operators]
    attention = ("attention", 0, WIDTH + 4)  # output, and a number a head
    q, k, v = (
        ("matmul", number, width) for number, width in enumerate((WIDTH, KV_WIDTH, KV_WIDTH))
    )
    o, gate, up = (
        ("matmul", number, width) for number, width in ((3, WIDTH), (4, MLP_WIDTH), (5, MLP_WIDTH))
    )
    assert elements == [q, k, v, attention, o, gate, up]
    assert found[0].input_bytes == 8 * TOKENS * WIDTH


EXPERTS = 5
CHOICES = 2
INNER = 24
MIXTURE = MixtureSpec(
    EXPERTS,
    CHOICES,
    INNER,
    (True, False, True, True),
    True,
    False,
    False,
    "silu",
    False,
    1.0,
    float("inf"),
)
OSS = replace(
    MIXTURE,
    router_bias=True,
    expert_bias=True,
    activation="clamped_swiglu",
    interleaved=True,
    limit=7.0,
)
KINDS = [
    BIASES | LORA,
    GEMMA | {"chunks": 3},
    {"mixture": MIXTURE},
    {"mixture": OSS, "windows": (7, None) * 2},
]


@pytest.mark.parametrize(
    "kind",
    mark_slow_except(KINDS, [KINDS[2]]),
    ids=["biases, lora", "gemma, chunks", "experts", "gpt-oss"],
)
def test_as_many_bytes_are_kept_as_planned_and_gradients_are_the_same(kind: dict[str, Any]) -> None:
    chunks, kind = (
        kind.get("chunks", 1),
        {name: value for name, value in kind.items() if name != "chunks"},
    )
    layers = costs(chunks=chunks, **kind)
    inputs, everything = (
        sum(one.input_bytes for one in layers),
        sum(one.unchecked_bytes for one in layers),
    )
    wanted = backward(decoder(config(None, mlp_tiles=chunks), **kind))
    base = (
        kept(decoder(config(inputs / GIB, mlp_tiles=chunks), **kind)) - inputs
    )  # what is not the layers'
    for share in (0.25, 0.6, 1.0):
        budget = (inputs + share * (everything - inputs)) / GIB
        choice = choose_kept_operators(layers, budget, [{0: 1}])
        found = decoder(config(budget, mlp_tiles=chunks), **kind)
        assert CHOSEN[-1] == choice.describe()
        assert kept(found) - base == choice.bytes
        assert choice.bytes <= budget * GIB < choice.bytes + left(layers, choice)
        found.zero_grad()
        assert_close(backward(found), wanted)


def test_experts_that_are_computed_again_take_the_time_of_each_tokens_choices() -> None:
    """Mixtral: of its experts the wider product at least is needed again, 2 x 2 x 4096 x 14336
    weights a token.
    """
    spec = build_spec(read_preset_config("mixtral/8x7B"), "mixtral/8x7B")
    assert spec.mixture is not None
    one = replace(
        spec, num_layers=1, windows=(None,), mixture=replace(spec.mixture, layers=(True,))
    )
    tokens = 4096
    (layer,) = measure_layer_costs(build_meta(one, torch.bfloat16), 1, tokens, 1, "cuda")
    assert [found.kind for found in layer.operators] == ["matmul"] * 3 + ["attention"] + [
        "matmul"
    ] * 2  # o, the router
    product = 2 * tokens * 2 * 4096 * 2 * 14336 / FLOPS
    assert product < layer.other_seconds < 2 * product


def left(layers: list[LayerCost], choice: BudgetChoice) -> float:
    """Bytes of the smallest thing more that could have been kept; infinite if everything is."""
    sizes = []
    for layer in layers:
        chosen = choice.kept[layer.name]
        if chosen is None:
            continue
        taken = sum(one.bytes for one in layer.operators if (one.kind, one.number) in chosen)
        sizes.append(layer.unchecked_bytes - layer.input_bytes - taken)
        sizes += [one.bytes for one in layer.operators if (one.kind, one.number) not in chosen]
    return min(sizes, default=float("inf"))


def made(seconds: dict[str, float], count: int = 3) -> list[LayerCost]:
    """Layers with operators of 1000 bytes; an input of 100, everything 5000."""
    operators = tuple(Operator(kind, 0, 1000, one) for kind, one in seconds.items())
    return [
        LayerCost(f"l{number}", number % 2, 100, operators, 5000, 0.5) for number in range(count)
    ]


def test_what_saves_most_a_byte_comes_first_and_the_first_layers() -> None:
    layers = made({"attention": 1.0, "matmul": 2.0})
    one = [{0: 1, 1: 1}]

    def taken(num_bytes: int, moments: list[dict[int, int]] = one) -> list[Any]:
        choice = choose_kept_operators(layers, num_bytes / GIB, moments)
        assert choice.bytes <= num_bytes
        return [
            None if chosen is None else sorted(kind for kind, _ in chosen)
            for chosen in choice.kept.values()
        ]

    assert taken(300) == [[], [], []]
    assert taken(2500) == [["matmul"], ["matmul"], []]
    assert taken(5300) == [["attention", "matmul"], ["attention", "matmul"], ["matmul"]]
    assert taken(9199) == [["attention", "matmul"]] * 3
    assert taken(9200) == [None, ["attention", "matmul"], ["attention", "matmul"]]
    assert taken(15000) == [None] * 3
    assert choose_kept_operators(layers, 15000 / GIB, one).seconds == pytest.approx(0)
    # Of stage 0 (two layers) three micro-batches, of stage 1 (one layer) one, or one and two.
    pipeline = [{0: 3, 1: 1}, {0: 1, 1: 2}]
    assert taken(5699, pipeline) == [["matmul"], ["matmul"], []]
    assert taken(6800, pipeline) == [["matmul"], ["attention", "matmul"], []]


def test_a_budget_below_the_inputs_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        choose_kept_operators(made({}), 299 / GIB, [{0: 1, 1: 1}])
    assert "memory.activation_budget_gib: found 2.78465e-07 GiB, expected at least 2.79e-07" in str(
        caught.value
    )
    with pytest.raises(
        ConfigError, match="expected at least 9.16e-05, which the layers' inputs take"
    ):
        decoder(config(0.00001))
    padded = config(0.0001)
    padded.data.pad_to_multiple_of = 16  # rows of 12 tokens
    with pytest.raises(ConfigError, match="expected at least 0.000122, "):
        decoder(padded)


@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"]
)
def test_what_a_pipeline_may_keep_at_once(schedule: str) -> None:
    """The most of it is what the schedule's formula says."""
    ranks, count = 4, 8
    parallel = ParallelConfig(pipeline=ranks, pipeline_schedule=schedule)
    if schedule.startswith("interleaved"):
        parallel.pipeline_stages_per_rank = 2
    per_rank = count_stages(parallel) // ranks
    for rank in range(ranks):
        layers = {stage: range(1) for stage in list_rank_stages(parallel, rank)}
        moments = Pipeline.list_in_flight(
            SimpleNamespace(layers=layers, _parallel=parallel, _place=rank), count
        )  # type: ignore[arg-type]
        assert max(sum(one.values()) for one in moments) == compute_in_flight(
            schedule, ranks, rank, count, per_rank
        )
        assert all(set(one) == set(layers) for one in moments) and {} not in moments


def test_worth_follows_the_length_of_rows() -> None:
    """A matmul's worth a byte is the width that it sums over, attention's the tokens that a query
    sees.
    """
    model = build_meta(build_spec(read_preset_config("llama3/8B"), "x"), torch.bfloat16)

    def first(length: int) -> str:
        layers = measure_layer_costs(model, 1, length, 1, "cuda")
        return max(layers[1].operators, key=lambda one: one.seconds / one.bytes).kind

    assert first(1024) == "matmul" and first(16384) == "attention"
    layer = measure_layer_costs(model, 1, 4096, 1, "cuda")[1]
    d, queries, keys, f = 4096, 4096, 1024, 14336
    # Log-sum-exp and two norms in fp32, and a random state.
    elements = 4 * d + 2 * queries + 2 * keys + 3 * f
    assert layer.unchecked_bytes == 4096 * (2 * elements + 4 * (32 + 2)) + 128
    recompute_cheap_tensors(model, FullFinetuneConfig())
    layer = measure_layer_costs(model, 1, 4096, 1, "cuda")[1]
    elements = 2 * d + 2 * queries + 2 * keys + 2 * f
    assert layer.unchecked_bytes == 4096 * (2 * elements + 4 * (32 + 2)) + 128


def ranks() -> list[Any]:
    """Of each rank of a tensor-parallel group: bytes planned, kept, and the gradients' largest
    error.
    """
    cfg = config(1.0)
    cfg.device, cfg.parallel = "cpu", ParallelConfig(tensor=2)
    spec, found = replace(build_small_spec(layers=LAYERS), num_kv_heads=4), []
    with start_world(cfg) as world, let_collectives_go():

        def shared(budget: float | None) -> nn.Module:
            cfg.memory = config(budget).memory
            model = build_meta(spec, torch.float64)
            shard_tensors(model, cfg.parallel, cfg.memory, world)
            apply_activation_checkpointing(model, cfg.memory.activation_checkpointing, cfg)
            materialize(model, cfg.memory, world.device)
            return filled_in_place(model, spec)

        model = build_meta(spec, torch.float64)
        shard_tensors(model, cfg.parallel, cfg.memory, world)
        layers = measure_layer_costs(model, ROWS, LENGTH, 2, "cpu")
        inputs = sum(one.input_bytes for one in layers)
        base = kept(shared(inputs / GIB)) - inputs
        backward(plain := shared(None))
        for budget in (2 * inputs / GIB, 5 * inputs / GIB):
            choice = choose_kept_operators(layers, budget, [{0: 1}])
            one = shared(budget)
            found.append(
                (
                    choice.bytes,
                    kept(one) - base,
                    sum(len(chosen or ()) for chosen in choice.kept.values()),
                )
            )
            pairs = zip(read_gradients(one).values(), read_gradients(plain).values(), strict=True)
            found.append(max(float((a - b).abs().max()) for a, b in pairs))
    return found


def filled_in_place(model: nn.Module, spec: Any) -> nn.Module:
    from recipe_lib.models import init_weights

    init_weights(model, 3, spec)
    return model


@pytest.mark.slow
def test_tensor_parallel_layers() -> None:
    for planned, error, more, other in run_ranks(ranks, 2):
        assert planned[0] == planned[1] and more[0] == more[1] and more[2] > planned[2] > 0
        assert max(error, other) < 1e-9
