"""What a plan says of checkpointing under a budget, of MLPs in pieces and of the loss's kernels, to
the byte.

The model is Llama 3 8B with few layers, on one rank, in bf16.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipe_lib.config import FullFinetuneConfig, load_config
from recipe_lib.memory.apply_levers import recompute_cheap_tensors
from recipe_lib.memory.budget import choose_kept_operators, measure_layer_costs
from recipe_lib.models import build_meta, build_spec, read_preset_config
from recipe_lib.parallel import DTYPES
from recipe_lib.plan.tracing.trace import ALLOC, FREE, OP, PHASE, Trace
from recipe_lib.plan.tracing.trace_rank import STEADY, simulate
from recipe_lib.units import GIB
from tests.plan.apart import call_in_fork
from tests.recipes.runs import FULL, LORA, PLAIN, get_recipe_class, import_recipe_module

LAYERS = 3
TOKENS = 2048
WIDTH = 4096
MLP_WIDTH = 14336
VOCABULARY = 128256
BF16 = 2
FP32 = 4
HIDDEN = TOKENS * WIDTH * BF16
BUDGETS = (0.08, 0.3, 0.5)
MODEL = read_preset_config("llama3/8B") | {"num_hidden_layers": LAYERS}
FULLY = "memory.activation_checkpointing=full"


def budget(gib: float) -> tuple[str, ...]:
    return "memory.activation_checkpointing=budget", f"memory.activation_budget_gib={gib}"


CASES: dict[str, tuple[str, ...]] = {str(gib): budget(gib) for gib in BUDGETS}
CASES |= {
    f"{chunks} pieces": (FULLY, f"memory.mlp_tiles={chunks}", "lora.target_modules=[q]")
    for chunks in (2, 8)
}
CASES |= {
    "chunked": (FULLY, "memory.loss_chunks=4"),
    "chunked one by one": (FULLY, "memory.loss_chunks=4", "fused_kernels=false"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Of each case: bytes that layers keep; the most beyond those in an MLP, and in the head."""
    folder = tmp_path_factory.mktemp("recompute")
    (folder / "few.json").write_text(json.dumps(MODEL))
    return call_in_fork(
        lambda: {name: read(trace(folder, *overrides)) for name, overrides in CASES.items()}
    )


def trace(folder: Path, *overrides: str) -> Trace:
    name = LORA if "lora.target_modules=[q]" in overrides else FULL  # the MLPs' weights are frozen
    module = import_recipe_module(name)
    common = [
        f"model.preset={folder / 'few.json'}",
        f"output_dir={folder / 'none'}",
        "tokenizer.path=unread",
    ]
    common += [
        "data.source=unread",
        f"max_seq_len={TOKENS}",
        "batch_size=1",
        "dtype=bf16",
        f"recipe={name}",
    ]
    cfg = load_config(PLAIN, [*common, *overrides], module.Config)
    shape = SimpleNamespace(tokens=TOKENS, documents=1)
    return simulate(get_recipe_class(module), cfg, shape, phases=()).trace


def read(trace: Trace) -> dict[str, int]:
    """kept: when the head begins, of what layers made in forward. head: the most at its
    allocations, above what was there before it. inner: by bytes of a tensor, the most at
    allocations of that size behind the head, above what was there before the first of them.
    """
    steady, phase = trace.phases.index(STEADY), -1
    alive, start = 0, -1
    layers: dict[int, int] = {}
    found = {"kept": 0, "head": 0}
    first: dict[int, int] = {}
    for event, number in trace.events:
        if event == PHASE:
            phase = number
        elif (
            event == OP
            and phase == steady
            and start < 0
            and trace.ops[number].module.startswith("lm_head")
        ):
            found["kept"], start = sum(layers.values()), alive
        elif event in (ALLOC, FREE) and trace.storages[number].device:
            storage = trace.storages[number]
            alive += storage.bytes if event == ALLOC else -storage.bytes
            if storage.part == "forward" and storage.module.startswith(
                ("model.layers.", "model.embed_tokens")
            ):
                layers[number] = storage.bytes if event == ALLOC else 0
            if event == ALLOC and phase == steady and start >= 0:
                if storage.module == "lm_head" and storage.part == "forward":
                    found["head"] = max(found["head"], alive - start)
                size = storage.bytes
                first.setdefault(size, alive - size)
                found[f"inner {size}"] = max(found.get(f"inner {size}", 0), alive - first[size])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("gib", BUDGETS)
def test_layers_keep_what_the_budget_has_room_for(
    found: dict[str, dict[str, int]], gib: float
) -> None:
    model = build_meta(build_spec(MODEL, "few"), DTYPES["bf16"])
    recompute_cheap_tensors(model, FullFinetuneConfig())
    choice = choose_kept_operators(
        measure_layer_costs(model, 1, TOKENS, 1, "cuda", fused=True), gib, [{0: 1}]
    )
    # Beside what the layers keep there is the last one's result, which the norm behind it keeps. Of
    # the random state of attention no more is known than that it is small.
    kept = found[str(gib)]["kept"] - HIDDEN
    assert kept <= choice.bytes <= kept + 128 * LAYERS
    assert 0.9 * gib * GIB < choice.bytes <= gib * GIB


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [2, 8])
def test_an_mlp_in_pieces_holds_one(found: dict[str, dict[str, int]], pieces: int) -> None:
    """With frozen weights, in backward: gate, up, gradients of their product and of both; and a
    piece's result.
    """
    inner = TOKENS * MLP_WIDTH * BF16 // pieces
    assert found[f"{pieces} pieces"][f"inner {inner}"] == 5 * inner + HIDDEN // pieces


@pytest.mark.parametrize(
    ("kernel", "rows", "size"),
    [
        ("chunked", TOKENS // 4, 2 * BF16),
        ("chunked one by one", TOKENS // 4, BF16 + FP32),
    ],
)
def test_kernels_of_the_loss(
    found: dict[str, dict[str, int]], kernel: str, rows: int, size: int
) -> None:
    """The weight's gradient, and logits of so many tokens, of so many bytes each."""
    expected = VOCABULARY * WIDTH * BF16 + rows * VOCABULARY * size
    assert expected <= found[kernel]["head"] < expected + 20_000
