"""Experts of transformers' classes on tensor-parallel ranks: in few bits, with adapters, balanced;
as one process trains them.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe_lib.adapters.lora import add_adapters
from recipe_lib.adapters.quantized import QuantizedLinear
from recipe_lib.config.schema import FullFinetuneConfig, LoraConfig
from recipe_lib.errors import ConfigError
from recipe_lib.external.proven_plan import infer_model_plan, prove_on_small_model
from recipe_lib.memory import apply_levers
from recipe_lib.models import build_meta, read_config, read_spec
from recipe_lib.training.resolve_model import validate_parallelism
from tests.distributed.ranks import import_compiler, run_ranks
from tests.external.published_layouts import read_tensors, write_published
from tests.recipes.runs import FULL, LORA, keep_latest, read_metrics, run_here
from tests.recipes.test_published_models import build_words
from tests.selection import mark_slow_except

# Sizes with which two ranks have whole blocks of 64 numbers of each matrix.
WIDE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
EXPERTS = {"moe_intermediate_size": 128, "intermediate_size": 128}
LATENT = EXPERTS | {"num_attention_heads": 4, "num_key_value_heads": 4, "v_head_dim": 32}
SHARED = WIDE | EXPERTS | {"shared_expert_intermediate_size": 128}
SIZES: dict[str, dict[str, int]] = {
    "qwen3_moe": WIDE | EXPERTS,
    "mixtral": WIDE | {"intermediate_size": 128},
    "gpt_oss": WIDE | {"intermediate_size": 128},
    "qwen3_next": SHARED,
    "qwen3_5_moe": SHARED,
    "glm4_moe_lite": LATENT,
    "deepseek_v3": LATENT,
    "lfm2_moe": WIDE | EXPERTS | {"hidden_size": 128},
    "nemotron_h": WIDE | EXPERTS | {"moe_shared_expert_intermediate_size": 128},
    "granitemoehybrid": WIDE | {"intermediate_size": 128, "shared_intermediate_size": 128},
    "gemma4_text": {},
    "ernie4_5_moe": {},
    "dots1": {},
    "afmoe": {},
}
TARGETS = ["all-linear", "experts", "router"]


def build_adapted(folder: Path, kind: str, targets: list[str]) -> Any:
    write_published(folder, kind, sizes=SIZES[kind])
    model = build_meta(read_spec(read_config(folder), str(folder), "transformers"), torch.float32)
    quantize = "nf4" if SIZES[kind] else "int8"
    cfg = LoraConfig(rank=4, target_modules=targets, quantize_base=quantize)
    add_adapters(model, cfg, torch.float32)
    return model


@pytest.mark.parametrize("kind", mark_slow_except(SIZES, ("qwen3_moe",)))
@pytest.mark.parametrize("adapted", mark_slow_except((True, False), (True,)))
def test_ranks_share_each_experts_channels(kind: str, adapted: bool, tmp_path: Path) -> None:
    """By a plan whose results and gradients are those of the whole model, in fp64."""
    targets = TARGETS if adapted else ["all-linear"]
    # Its router is a linear within the module that chooses.
    targets = [name for name in targets if (kind, name) != ("afmoe", "router")]
    model = build_adapted(tmp_path, kind, targets)
    plan = infer_model_plan(model, 2)
    layouts = {
        name: layout
        for name, layout in model.spec.layout().experts.items()
        if f"{name}.{layout.inner}.weight" in model.tensor_names
    }
    assert layouts
    for name, layout in layouts.items():
        inner, outer = (
            plan.parameter(f"{name}.{matrix}.weight") for matrix in (layout.inner, layout.outer)
        )
        assert (inner.role, inner.dim) == ("column", 2 if layout.transposed else 1)
        assert (outer.role, outer.dim) == ("row", 1 if layout.transposed else 2)
        # What the ranks exchange is a sum for each token, once it is one.
        left = [
            boundary
            for boundary in plan.boundaries
            if boundary.module == name and boundary.kind == "leave"
        ]
        assert len(left) == 1 and left[0].width == outer.shape[1 if outer.dim == 2 else 2]
    assert prove_on_small_model(model, plan, 2).startswith("proven on a model of ")


def test_a_matrix_of_unequal_runs_stays_whole(tmp_path: Path) -> None:
    """That of a state space in 4 bits; in 16 bits it is shared."""
    model = build_adapted(tmp_path, "nemotron_h", TARGETS)
    name = "model.layers.0.mixer.in_proj.weight"
    weight = infer_model_plan(model, 2).parameter(name)
    assert weight.dim == -1 and f"could not share {name} as it is stored" in weight.reason
    plain = build_meta(model.spec, torch.float32)
    assert infer_model_plan(plain, 2).parameter(name).dim == 0


ALL = f"lora.target_modules=[{','.join(TARGETS)}]"
BALANCED = "router_aux_loss_coef=0.5"
COMPUTED_AGAIN = "memory.activation_checkpointing=full"
NF4 = "lora.quantize_base=nf4"
LEVERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "adapters": (LORA, (ALL, BALANCED)),
    "nf4": (LORA, (ALL, BALANCED, NF4)),
    "int8": (LORA, (ALL, BALANCED, "lora.quantize_base=int8", COMPUTED_AGAIN)),
    "linears": (LORA, ("lora.target_modules=[all-linear]", NF4)),
    "full": (FULL, (BALANCED,)),
    "compiled": (LORA, (ALL, NF4, "compile=true")),
    "merged": (LORA, (ALL, BALANCED, NF4, "lora.merge_on_save=true")),
    "streamed": (LORA, (ALL, BALANCED, NF4, "memory.stream_layers=experts")),
}
KEYS = ("loss", "grad_norm", "expert_load_max_over_mean", "dropped_tokens", "router_aux_loss")


def train(folder: Path, kind: str, lever: str, ranks: int, *more: str) -> None:
    recipe, overrides = LEVERS[lever]
    apply_levers.compile_layers = functools.partial(apply_levers.compile_layers, backend="eager")
    words = build_words(
        folder / kind,
        folder / str(ranks),
        recipe,
        "max_steps=3",
        "batch_size=2",
        "data.pad_to_multiple_of=4",
        "optimizer.lr=1e-2" if recipe == LORA else "optimizer.lr=1e-3",
        "optimizer.eps=1e-4",  # Adam divides by roots of squares, some of which are rounding errors
        *overrides,
        *more,
    )
    run = run_here(keep_latest(*words), recipe=recipe)
    assert run.code == 0, run.said
    if "parallel.tensor=2" in more:
        stored = [
            module for module in run.recipe.model.modules() if isinstance(module, QuantizedLinear)
        ]
        experts = [module for module in stored if module.num_experts > 1]
        assert all(
            module.count_local_rows() < module.out_features
            or module.columns != (0, module.in_features)
            for module in experts
        )


def read(output: Path) -> list[list[float]]:
    lines = [line for line in read_metrics(output) if "loss" in line]
    return [[line.get(key, 0.0) for line in lines] for key in KEYS]


CASES = (
    "qwen3_moe: nf4",
    "qwen3_moe: int8",
    "qwen3_moe: full",
    "qwen3_moe: compiled",
    "qwen3_moe: streamed",
    "mixtral: adapters",
    "mixtral: nf4",
    "mixtral: linears",
    "gpt_oss: adapters",
    "gpt_oss: nf4",
    "gpt_oss: int8",
    "gpt_oss: merged",
    "qwen3_next: nf4",
    "qwen3_5_moe: int8",
    "glm4_moe_lite: nf4",
    "deepseek_v3: full",
    "lfm2_moe: nf4",
    "nemotron_h: int8",
    "granitemoehybrid: nf4",
    "gemma4_text: full",
)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*((case, 2) for case in CASES), ("gpt_oss: nf4", 4)], ids=str)
def test_runs_are_those_of_one_process(case: tuple[str, int], tmp_path: Path) -> None:
    """On four ranks two groups share sequences, and parameters by FSDP."""
    kind, _, lever = case[0].partition(": ")
    write_published(tmp_path / kind, kind, sizes=SIZES[kind])
    if lever == "compiled":
        import_compiler()
    plain = ["compile=false"]
    tensor = ["parallel.tensor=2"]
    if case[1] == 4:
        # The balance loss is one of each micro-batch, of which each group has one.
        plain += ["batch_size=1", "gradient_accumulation_steps=2"]
        tensor += ["batch_size=1"]
    run_ranks(train, 1, tmp_path, kind, lever, 1, *plain, timeout=200)
    run_ranks(train, case[1], tmp_path, kind, lever, case[1], *tensor, timeout=300)
    outputs = [tmp_path / name for name in ("1", str(case[1]))]
    columns = slice(2 if lever == "compiled" else None)  # compiled layers do not count
    expected, found = (read(path)[columns] for path in outputs)
    for key, expected_values, found_values in zip(KEYS, expected, found, strict=False):
        limit = 1e-4 if key == "grad_norm" else 1e-5
        assert found_values == pytest.approx(expected_values, rel=limit, abs=1e-9), key
    has_adapter = LEVERS[lever][0] == LORA and lever != "merged"
    one, several = (
        read_tensors(path / ("adapter" if has_adapter else "model")) for path in outputs
    )
    assert one.keys() == several.keys()
    for name, tensor in one.items():
        assert (several[name] - tensor).norm() <= 1e-4 * tensor.norm() + 1e-7, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("gpt_oss", "qwen3_moe"))
def test_ranks_open_an_adapter_of_one_process(kind: str, tmp_path: Path) -> None:
    write_published(tmp_path / kind, kind, sizes=SIZES[kind])
    run_ranks(train, 1, tmp_path, kind, "adapters", 1, timeout=200)
    first = (tmp_path / "1").rename(tmp_path / "first")
    words = (f"lora.adapter_path={first / 'adapter'}", "max_steps=1", "optimizer.lr=1e-12")
    run_ranks(train, 1, tmp_path, kind, "adapters", 1, *words, timeout=200)
    run_ranks(train, 2, tmp_path, kind, "adapters", 2, "parallel.tensor=2", *words, timeout=300)
    expected, found = (read(tmp_path / name)[:2] for name in ("1", "2"))
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[1] == pytest.approx(expected[1], rel=1e-4)


def start_refused(folder: Path) -> list[str]:
    words = build_words(
        folder / "base",
        folder / "out",
        LORA,
        "lora.target_modules=[experts]",
        "lora.quantize_base=nf4",
        "data.pad_to_multiple_of=4",
        "parallel.tensor=2",
    )
    return run_here(keep_latest(*words), recipe=LORA).said


@pytest.mark.slow
def test_blocks_that_ranks_would_cut_are_refused(tmp_path: Path) -> None:
    write_published(tmp_path / "base", "qwen3_moe", sizes=WIDE)  # 48 channels of an expert
    said = sum(run_ranks(start_refused, 2, tmp_path), [])
    (told,) = [line for line in said if line.startswith("error: ")]
    assert told.endswith(
        "keeps model.layers.0.mlp.experts.down_proj in blocks, and it has no whole blocks of 64"
        " numbers for each rank; set lora.quantize_base=none, int8, or parallel.tensor=1"
    )


def test_experts_in_fp64_are_refused_in_one_line(tmp_path: Path) -> None:
    """Those that keep their class' forward; adapted ones run the modules of our own mixtures."""
    write_published(tmp_path / "base", "qwen3_moe")
    cfg = FullFinetuneConfig()
    cfg.dtype = "fp64"
    cfg.parallel.tensor = 2
    spec = read_spec(read_config(tmp_path / "base"), "base", "transformers")
    with pytest.raises(ConfigError, match="^dtype=fp64: .* experts of qwen3_moe in it; set dtype="):
        validate_parallelism(cfg, spec)
    cfg.dtype = "fp32"
    validate_parallelism(cfg, spec)
