"""What a simulation says of memory against what the same tracer sees in real runs on a CPU, to the
byte.

Simulated and real runs are in processes of their own: a process does not forget a simulated device.
The simulation has a CPU's kernels here. A real CPU has one memory, the simulation two: compared is
the device's. What passes through the host's in the simulation, batches and tables on their way to
the device, is freed before a step is at its peak.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from recipe_lib.config import load_config
from recipe_lib.external import proven_plan
from recipe_lib.parallel import start_world
from recipe_lib.plan.tracing.trace import ALLOC, FREE, Trace
from recipe_lib.plan.tracing.trace_rank import FIRST, STEADY, simulate, trace_real_run
from tests.distributed.collectives import let_collectives_go
from tests.distributed.ranks import run_ranks
from tests.external.hybrids import HYBRIDS, make_hybrid_config
from tests.plan.mixtures import MIXTURES, write_mixture
from tests.recipes.runs import (
    DISTILL,
    DPO,
    FULL,
    LORA,
    PLAIN,
    REWARD,
    ROOT,
    get_recipe_class,
    import_recipe_module,
)
from tests.selection import mark_slow_except, select_cases

TIED = str(ROOT / "tests" / "recipes" / "tiny.json")
PACKED_DOCUMENTS = 3
BASE = (
    "tokenizer.path=unread",
    "data.source=unread",
    "device=cpu",
    "dtype=fp32",
    "max_seq_len=64",
    "batch_size=2",
    "memory.loss_chunks=2",
)
PAIRS = "data.format=preference"
TEACHER = f"distill.teacher_preset={TIED}"
KTO = ("dpo.loss=kto", "data.format=kto")
CLASS = "model.implementation=transformers"
HYBRID = (CLASS, "data.packing=true", "max_seq_len=256")
NF4 = (
    "lora.target_modules=[all-linear]",
    "lora.quantize_base=nf4",
    "dtype=bf16",
    "memory.activation_checkpointing=full",
)
BALANCED = "router_aux_loss_coef=0.01"
ADAPTED = "lora.target_modules=[all-linear,experts,router]"
# Recipe, wrapping, checkpointing and accumulation: each value with each recipe.
GRID: dict[str, tuple[Any, ...]] = {
    f"{recipe.partition('_')[0]} {wrapping} {checkpointing} {accumulation}": (
        2,
        recipe,
        TIED,
        f"parallel.fsdp_wrap_policy={wrapping}",
        f"memory.activation_checkpointing={checkpointing}",
        f"gradient_accumulation_steps={accumulation}",
    )
    for recipe, wrapping, checkpointing, accumulation in (
        (FULL, "memory_efficient", "selective", 1),
        (FULL, "layers", "none", 4),
        (LORA, "layers", "full", 1),
    )
}
UNTIED = "untied"
CONTEXT = "parallel.context=2"
# Families whose layers compute more than, or not all of, what Llama's do: keys beside the tiny ones.
DENSE: dict[str, dict[str, Any]] = {
    "smollm3": {
        "model_type": "smollm3",
        "architectures": ["SmolLM3ForCausalLM"],
        "no_rope_layers": [1, 0],
    },
    "granite4": {
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["attention"] * 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
        "position_embedding_type": "rope",
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.125,
        "residual_multiplier": 0.22,
        "logits_scaling": 10.0,
    },
}
CASES = GRID | {
    "zero-1": (
        2,
        FULL,
        TIED,
        "dtype=bf16",
        "parallel.reduce_gradients=step",
        "parallel.reshard_after_forward=false",
        "parallel.accumulate_grad_in_fp32=true",
        "gradient_accumulation_steps=2",
    ),
    "adapters everywhere": (
        2,
        LORA,
        UNTIED,
        "lora.target_modules=[q,v,embedding,head]",
        "data.packing=true",
    ),
    "foreach, one rank": (1, FULL, TIED, "optimizer.implementation=foreach"),
    "nf4": (2, LORA, TIED, "lora.quantize_base=nf4", "lora.dropout=0.1"),
    "pairs": (2, DPO, TIED, PAIRS),
    "labeled answers": (2, DPO, TIED, *KTO, "gradient_accumulation_steps=2"),
    "rewards": (2, REWARD, TIED, PAIRS),
    "teacher": (
        2,
        DISTILL,
        UNTIED,
        TEACHER,
        "distill.divergence=jensen_shannon",
        "gradient_accumulation_steps=2",
    ),
    "8 bits": (
        2,
        FULL,
        TIED,
        "dtype=bf16",
        "optimizer.state_bits=8",
        "optimizer.stochastic_rounding=true",
    ),
    "transformers": (
        2,
        FULL,
        TIED,
        "model.implementation=transformers",
        "memory.activation_checkpointing=full",
    ),
    "transformers, tensor parallel": (2, FULL, TIED, CLASS, "parallel.tensor=2"),
    "transformers, computed again": (
        2,
        FULL,
        TIED,
        "model.implementation=transformers",
        "dtype=bf16",
    ),
    "transformers, adapters computed again": (
        1,
        LORA,
        TIED,
        "model.implementation=transformers",
        "lora.dropout=0.1",
    ),
    "shared sequences, checkpointed": (
        2,
        FULL,
        UNTIED,
        CONTEXT,
        "dtype=bf16",
        "parallel.reduce_dtype=fp32",
        "memory.activation_checkpointing=full",
    ),
    "shared sequences, rounded adapters": (
        2,
        LORA,
        TIED,
        CONTEXT,
        "qat=int4",
        "qat_group_size=16",
        "dtype=bf16",
        "memory.activation_checkpointing=selective",
    ),
    "rounded weights, muon": (2, FULL, TIED, "qat=int4", "optimizer.name=muon"),
    "packed, gated delta nets": (1, FULL, "qwen3_5_text", *HYBRID),
    "packed, state spaces": (2, LORA, "bamba", *HYBRID, "dtype=bf16"),
    "scans, checkpointed": (
        1,
        FULL,
        "qwen3_5_text",
        *HYBRID,
        "memory.activation_checkpointing=full",
        "gradient_accumulation_steps=2",
    ),
    "scans, selective": (
        1,
        LORA,
        "granitemoehybrid",
        *HYBRID,
        "data.packing=false",
        "dtype=bf16",
        "memory.activation_checkpointing=selective",
    ),
    "packed, convolutions": (
        1,
        FULL,
        "lfm2",
        *HYBRID,
        "memory.activation_checkpointing=full",
        "gradient_accumulation_steps=2",
    ),
    "gated delta nets whole": (2, FULL, "olmo_hybrid", CLASS, "dtype=bf16"),
    "adapters of state spaces and attention": (
        1,
        LORA,
        "falcon_h1",
        CLASS,
        "memory.activation_checkpointing=selective",
    ),
    "gated delta nets in nf4": (2, LORA, "qwen3_5_text", CLASS, *NF4),
    "packed, gated delta nets and experts in nf4": (1, LORA, "qwen3_5_moe_text", *HYBRID, *NF4),
    "state spaces and experts in nf4": (1, LORA, "nemotron_h", CLASS, *NF4),
    "packed, convolutions and experts in nf4": (1, LORA, "lfm2_moe", *HYBRID, *NF4),
    "sinks": (2, FULL, "gpt_oss", "dtype=bf16", "memory.activation_checkpointing=selective"),
    "scaled residuals": (2, FULL, "granite4", "dtype=bf16"),
    "layers that do not rotate, adapters": (2, LORA, "smollm3", "parallel.tensor=2"),
    "experts in nf4, one rank": (
        1,
        LORA,
        "gpt_oss",
        ADAPTED,
        "lora.quantize_base=nf4",
        "dtype=bf16",
        "data.packing=true",
        "memory.activation_checkpointing=full",
    ),
    "a class' experts in nf4": (
        1,
        LORA,
        "qwen3_moe",
        "model.implementation=transformers",
        "lora.target_modules=[all-linear]",
        "lora.quantize_base=nf4",
        "dtype=bf16",
        "memory.activation_checkpointing=full",
    ),
    "a class' experts in 8 bits, sharded": (
        2,
        LORA,
        "gpt_oss",
        "model.implementation=transformers",
        "lora.target_modules=[all-linear]",
        "lora.quantize_base=int8",
    ),
    "a class' experts in nf4, tensor parallel": (
        2,
        LORA,
        "wide",
        CLASS,
        "parallel.tensor=2",
        BALANCED,
        ADAPTED,
        "lora.quantize_base=nf4",
        "dtype=bf16",
        "memory.activation_checkpointing=full",
    ),
    "a class' experts in 8 bits, tensor parallel": (
        2,
        LORA,
        "gpt_oss",
        CLASS,
        "parallel.tensor=2",
        "lora.target_modules=[all-linear]",
        "lora.quantize_base=int8",
    ),
    "a class' routers, balanced": (
        2,
        FULL,
        "qwen3_next",
        "model.implementation=transformers",
        BALANCED,
        "dtype=bf16",
        "gradient_accumulation_steps=2",
        "memory.activation_checkpointing=full",
    ),
    "a class' routers, balanced beside adapters": (
        1,
        LORA,
        "mixtral",
        "model.implementation=transformers",
        BALANCED,
        ADAPTED,
        "lora.quantize_base=int8",
    ),
    "a class' routers of sigmoids, balanced": (
        1,
        FULL,
        "lfm2_moe",
        *HYBRID,
        BALANCED,
        "memory.activation_checkpointing=selective",
    ),
    "routers, balanced": (1, FULL, "mixtral", BALANCED),
}

COMPARED = [name for name in GRID if name.endswith(" 1")]
# Not what is packed or in 4 bits: masks are made on the host, and a loop over blocks is traced for
# two turns of it.
COMPARED += [
    "foreach, one rank",
    "pairs",
    "8 bits",
    "teacher",
    "rewards",
    "sinks",
    "scaled residuals",
    "rounded weights, muon",
]
COMPARED += ["shared sequences, checkpointed"]
QUICK = ["full memory_efficient selective 1", "pairs"]

# As releases of torch name them.
Event = tuple[int, int]  # ALLOC or FREE, bytes


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of every selected case what the simulation traced, and rank 0 of the real run."""
    folder = tmp_path_factory.mktemp("runs")
    # A rank's part of these matrices is more than the piece that a CPU takes a norm of at a time.
    changed = {"tie_word_embeddings": False, "vocab_size": 2048}
    (folder / "untied.json").write_text(json.dumps(json.loads(Path(TIED).read_text()) | changed))

    for name in MIXTURES:
        write_mixture(folder, name)
    # Of which two ranks have whole blocks of NF4.
    wide = {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 128}
    write_mixture(folder, "qwen3_moe", **wide).rename(folder / "wide.json")
    for name in {case[2] for case in CASES.values()} & HYBRIDS.keys():
        (folder / f"{name}.json").write_text(json.dumps(make_hybrid_config(name)))
    for name, changed in DENSE.items():
        (folder / f"{name}.json").write_text(
            json.dumps(json.loads(Path(TIED).read_text()) | changed)
        )
    cases = {name: CASES[name] for name in select_cases(request, "name")}

    def trace(simulated: bool, ranks: int | None = None) -> dict[str, Any]:
        return {
            name: run(case, folder, simulated)
            for name, case in cases.items()
            if ranks in (None, case[0])
        }

    simulated = run_ranks(trace, 1, True, process_group=False)[0]
    real = run_ranks(trace, 1, False, 1)[0] | run_ranks(trace, 2, False, 2)[0]
    return simulated, real


def config_of(case: tuple[Any, ...], folder: Path) -> tuple[type, Any, Any]:
    """The recipe's class, the case's config and the shape of its batches."""
    _, name, model, *overrides = case
    overrides += [
        f"model.preset={model if model.endswith('.json') else folder / f'{model}.json'}",
        f"output_dir={folder / 'none'}",
        f"recipe={name}",
    ]
    module = import_recipe_module(name)
    cfg = load_config(PLAIN, [*BASE, *overrides], module.Config)
    return (
        get_recipe_class(module),
        cfg,
        SimpleNamespace(tokens=cfg.max_seq_len, documents=PACKED_DOCUMENTS),
    )


def run(case: tuple[Any, ...], folder: Path, simulated: bool) -> dict[str, Any]:
    """Peaks by phase, and the allocations and releases in order."""
    recipe, cfg, shape = config_of(case, folder)
    if simulated:
        found = simulate(recipe, cfg, shape, ranks=case[0], phases=(), like_cpu=True)
        if (
            cfg.model.implementation == "transformers"
        ):  # whose buffers come to be on the host, here the run's device
            for storage in found.trace.storages:
                storage.device |= storage.phase == 0
    else:
        # A proof of a tensor plan is on the host, which is the device here.
        no_proof = patch.object(proven_plan, "prove", return_value="")
        with start_world(cfg) as world, let_collectives_go(), no_proof:
            found = trace_real_run(recipe, cfg, world, shape)
    return {
        "peaks": found.trace.find_active_peaks(),
        "events": events(found.trace),
        "repeats": found.repeats,
    }


def events(trace: Trace) -> list[Event]:
    """Allocations and releases with their bytes."""
    return [
        (kind, trace.storages[number].bytes)
        for kind, number in trace.events
        if kind in (ALLOC, FREE)
    ]


@pytest.mark.parametrize("name", mark_slow_except(CASES, QUICK))
def test_peaks_are_those_of_the_real_run(
    runs: tuple[dict[str, Any], dict[str, Any]], name: str
) -> None:
    simulated, real = runs[0][name], runs[1][name]
    assert real["repeats"] and simulated["repeats"]
    found = {phase: simulated["peaks"][phase] for phase in (FIRST, STEADY)}
    assert found == {phase: real["peaks"][phase] for phase in (FIRST, STEADY)}


@pytest.mark.parametrize("name", mark_slow_except(COMPARED, set(COMPARED) & set(QUICK)))
def test_every_allocation_and_release_is_that_of_the_real_run(
    runs: tuple[dict[str, Any], dict[str, Any]], name: str
) -> None:
    simulated, real = (side[name]["events"] for side in runs)
    alike = next(
        (
            count
            for count, pair in enumerate(zip(simulated, real, strict=False))
            if pair[0] != pair[1]
        ),
        0,
    )
    around = slice(max(0, alike - 10), alike + 20)
    assert simulated == real, f"apart from event {alike} on: {simulated[around]}, {real[around]}"
