"""Kept activations and shapes of submodules, by closed formulas of `docs/tensor_parallel.md`;
parents stay the sums.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from recipe_lib.plan.plan_schema import LayerRow
from recipe_lib.plan.tracing.activations import give_to_children
from recipe_lib.plan.tracing.trace import ALLOC, OP, Op, Storage, Trace
from tests.plan.apart import build_settings, call_in_fork
from tests.plan.test_pipeline import MLP, ROWS, SHAPE, TOKENS, TYPED, VOCABULARY, WIDTH

LAYERS = 2
SIZE = 2
TENSOR = 2
HEADS = 4
KV_HEADS = 2
RANDOM = 24  # bytes of the random state that the attention kernel returns
QUERIES = WIDTH
KEYS = WIDTH // HEADS * KV_HEADS
CASES = {
    "one": (1, "parallel.tensor=1"),
    "one by one": (1, "parallel.tensor=1", "fused_kernels=false"),
    "sharded": (2, "parallel.tensor=2"),
    "both": (4, "parallel.tensor=2", "parallel.tensor_regather_in_backward=false"),
    "biased": (2, "parallel.tensor=2", "qwen"),
    "checkpointed": (2, "parallel.tensor=2", "memory.activation_checkpointing=full"),
}
# Linears of a layer: (rows, columns), which of the two tensor parallel divides, what is kept of it
# for a token.
LINEARS = {
    "self_attn.q_proj": ((QUERIES, WIDTH), 0, QUERIES),
    "self_attn.k_proj": ((KEYS, WIDTH), 0, KEYS),
    "self_attn.v_proj": ((KEYS, WIDTH), 0, KEYS),
    "self_attn.o_proj": ((WIDTH, QUERIES), 1, QUERIES),
    "mlp.gate_proj": ((MLP, WIDTH), 0, MLP),
    "mlp.up_proj": ((MLP, WIDTH), 0, MLP),
    "mlp.down_proj": ((WIDTH, MLP), 1, 0),
}


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, LayerRow]]:
    folder = tmp_path_factory.mktemp("shapes")

    class Planned(dict[str, dict[str, LayerRow]]):
        """Each case is planned when a test asks for it."""

        def __missing__(self, name: str) -> dict[str, LayerRow]:
            self[name] = call_in_fork(measure, folder, name)
            return self[name]

    return Planned()


def measure(folder: Path, name: str) -> dict[str, LayerRow]:
    from recipe_lib.plan.build_plan import make_plan

    shape = {
        **SHAPE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
    }
    qwen = {**shape, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    ranks, *overrides = CASES[name]
    (folder / f"{name}.json").write_text(json.dumps(qwen if "qwen" in overrides else shape))
    more = [
        *TYPED,
        "dtype=bf16",
        f"model.preset={folder / f'{name}.json'}",
        "gradient_accumulation_steps=1",
    ]
    more += [override for override in overrides if override != "qwen"]
    recipe_class, cfg, wanted = build_settings("demo/full", ranks, *more)
    return {row.module: row for row in make_plan(recipe_class, cfg, wanted)[0].layers}


def kept(rows: dict[str, LayerRow], layer: int, module: str) -> int:
    return rows[f"model.layers.{layer}{f'.{module}' if module else ''}"].kept


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sharded", "both", "biased"])
def test_each_projection_keeps_its_output_or_input(
    layers: dict[str, dict[str, LayerRow]], name: str
):
    """(2 d + 2 q + 2 k + 2 f) N / t: queries, keys and values are the outputs of q, k and v, the
    attended tokens the input of o, gate and up outputs; the stream before either norm is the
    layer's; the last layer's output is the final norm's concern, and the first one's input the
    embedding's. fp32: one number for each head and token of attention, one for each token of a
    norm.
    """
    tokens = ROWS * TOKENS
    for layer in range(LAYERS):
        rows = layers[name]
        for module, (_, _, width) in LINEARS.items():
            assert kept(rows, layer, module) == SIZE * width * tokens // TENSOR, module
        own = kept(rows, layer, "self_attn") - sum(
            kept(rows, layer, one) for one in LINEARS if "self_attn" in one
        )
        gathered = SIZE * WIDTH * tokens  # of no projection alone
        assert own == 4 * HEADS * tokens // TENSOR + RANDOM + (gathered if name == "both" else 0)
        assert kept(rows, layer, "mlp") == 2 * SIZE * MLP * tokens // TENSOR + (
            gathered if name == "both" else 0
        )
        assert kept(rows, layer, "input_layernorm") == 4 * tokens // TENSOR
        everything = SIZE * (2 * WIDTH + 2 * QUERIES + 2 * KEYS + 2 * MLP) * tokens // TENSOR
        everything += (
            RANDOM + 4 * (HEADS + 2) * tokens // TENSOR + (2 * gathered if name == "both" else 0)
        )
        assert kept(rows, layer, "") == everything


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one", "one by one"])
def test_without_tensor_parallel(layers: dict[str, dict[str, LayerRow]], name: str):
    """Outputs of norms and the gated product are made again: a norm keeps its factor alone."""
    tokens, rows = ROWS * TOKENS, layers[name]
    expected = {"q_proj": QUERIES, "k_proj": KEYS, "v_proj": KEYS, "o_proj": QUERIES}
    for module, width in expected.items():
        assert kept(rows, 1, f"self_attn.{module}") == SIZE * width * tokens
    for module, width in {"gate_proj": MLP, "up_proj": MLP, "down_proj": 0}.items():
        assert kept(rows, 1, f"mlp.{module}") == SIZE * width * tokens
    assert kept(rows, 1, "input_layernorm") == 4 * tokens
    assert kept(rows, 1, "mlp") == SIZE * 2 * MLP * tokens


@pytest.mark.slow
def test_a_checkpointed_layer_keeps_its_input_alone(layers: dict[str, dict[str, LayerRow]]):
    rows = layers["checkpointed"]
    assert kept(rows, 0, "") == SIZE * WIDTH * ROWS * TOKENS // TENSOR
    assert not any(kept(rows, 0, module) for module in LINEARS)


def test_shapes_are_those_of_the_shard(layers: dict[str, dict[str, LayerRow]]):
    for name, parts in (("one", 1), ("sharded", TENSOR)):
        for module, (shape, divided, _) in LINEARS.items():
            expected = [size // parts if at == divided else size for at, size in enumerate(shape)]
            assert layers[name][f"model.layers.1.{module}"].weights == {"weight": expected}
        assert layers[name]["lm_head"].weights == {"weight": [VOCABULARY // parts, WIDTH]}
        assert layers[name]["model.norm"].weights == {"weight": [WIDTH]}
        assert layers[name]["model.layers.1.mlp"].weights == {}
    biased = layers["biased"]["model.layers.1.self_attn.k_proj"].weights
    assert biased == {"weight": [KEYS // TENSOR, WIDTH], "bias": [KEYS // TENSOR]}


def traced(
    *ops: tuple[str, int, tuple[int, ...], tuple[int, ...]], storages: list[Storage]
) -> Trace:
    """ops: (module, flops, reads, makes)."""
    trace = Trace(storages=storages)
    trace.ops = [
        Op("op", part="forward", module=one[0], flops=one[1], reads=one[2], makes=one[3])
        for one in ops
    ]
    trace.events = [(ALLOC, at) for at in range(len(storages))] + [
        (OP, at) for at in range(len(ops))
    ]
    return trace


def activation(module: str, size: int = 100) -> Storage:
    return Storage(size, kind="activations", module=module, part="forward")


def weight(label: str) -> Storage:
    return Storage(50, kind="parameters", label=label)


def modules(trace: Trace) -> list[Any]:
    give_to_children(trace)
    return [storage.module for storage in trace.storages if storage.kind == "activations"]


def test_a_sum_with_the_stream_stays_the_layer_s():
    """It is as large as what the norm gave; a product with a small vector is the norm's."""
    storages = [
        activation("layer"),
        activation("layer.norm"),
        weight("layer.norm.weight"),
        activation("layer"),
    ]
    assert modules(traced(("layer", 0, (0, 1), (3,)), storages=storages))[2] == "layer"
    storages = [
        activation("m", 10),
        activation("layer.norm"),
        weight("layer.norm.weight"),
        activation("layer"),
    ]
    assert modules(traced(("layer", 0, (0, 1), (3,)), storages=storages))[2] == "layer.norm"


def test_what_two_children_read_stays_and_nothing_leaves_its_parent():
    q, k, shared = weight("a.q.weight"), weight("a.k.weight"), activation("a")
    ops = [("a", 9, (2, 0), (3,)), ("a", 9, (2, 1), (4,))]
    assert modules(traced(*ops, storages=[q, k, shared, activation("a"), activation("a")])) == [
        "a",
        "a.q",
        "a.k",
    ]
    other = activation("b")  # made elsewhere, read by q alone
    assert modules(traced(("a", 9, (2, 0), ()), storages=[q, k, other])) == ["b"]


def test_an_adapter_reads_for_the_linear_that_it_is_in():
    storages = [weight("a.o.weight"), weight("a.o.lora_A.weight"), activation("a")]
    ops = [("a.o", 9, (2, 0), (3,)), ("a.o.lora_A", 9, (2, 1), (4,))]
    assert modules(traced(*ops, storages=[*storages, activation("b"), activation("b")]))[0] == "a.o"
