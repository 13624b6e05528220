"""Adapters of experts and routers, and experts in 4 and 8 bits: against PEFT and transformers, and
against a loop.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe_lib.adapters import add_adapters, describe_adapters, disable_adapters
from recipe_lib.adapters.layers import QuantizedExperts
from recipe_lib.adapters.quantized import fake_quantize_weight
from recipe_lib.checkpoint.adapter_files import check_adapter
from recipe_lib.checkpoint.adapter_merging import merge_adapter
from recipe_lib.checkpoint.huggingface import export_model
from recipe_lib.checkpoint.peft_folders import export_adapter, load_adapter
from recipe_lib.checkpoint.rank_groups import SingleRank
from recipe_lib.config.schema import LoraConfig
from recipe_lib.errors import ConfigError
from recipe_lib.models import build_meta, build_spec, read_config, read_preset_config
from recipe_lib.models.mixture import ExpertLinear
from recipe_lib.ops.mlp import group_tokens
from recipe_lib.units import GIB
from tests.adapters.hugging_face import (
    compute_difference,
    load_ours,
    load_plain,
    load_theirs,
    load_with_peft,
    read_folder_spec,
    save_with_peft,
)
from tests.models.reference import build_reference_model
from tests.selection import mark_slow_but

FAMILIES = ["mixtral", "qwen3-moe", "olmoe", "gpt-oss"]
PARAMETERS = {"gpt-oss": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.router.weight"]}
ROOT = Path(__file__).parents[2]
TARGETS = ["q", "v", "router", "experts"]


def config(**changes: Any) -> LoraConfig:
    return LoraConfig(**({"rank": 4, "alpha": 8.0, "target_modules": TARGETS} | changes))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, folder in found.items():
        build_reference_model(family).save_pretrained(folder)
    return found


def write(model: Any, folder: Path, cfg: LoraConfig, out: Path) -> Path:
    export_adapter(
        model, model.spec, cfg, out, base=str(folder), base_folder=folder, world=SingleRank()
    )
    return out


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_ours_loads_in_peft_and_in_ours(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder, cfg = folders[family], config()
    model = load_ours(folder, cfg)
    out = write(model, folder, cfg, tmp_path / "adapter")
    assert compute_difference(model, load_with_peft(folder, out)) < 1e-5
    check_adapter(out, model.spec, cfg, folder)
    again = load_ours(folder, cfg, moved=0)
    assert compute_difference(model, again) > 1e-3
    load_adapter(again, model.spec, out)
    assert compute_difference(model, again) == 0
    with disable_adapters(model):
        assert compute_difference(model, load_theirs(folder)) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_pefts_loads_in_ours(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders[family]
    others = PARAMETERS.get(
        family, ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
    )
    settings = {
        "r": 3,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "v_proj"],
        "target_parameters": others,
    }
    model = save_with_peft(folder, tmp_path / "adapter", **settings)
    mine = load_ours(folder, config(rank=5, alpha=10.0), moved=0)
    load_adapter(mine, mine.spec, tmp_path / "adapter")
    assert compute_difference(mine, model) < 1e-5


@pytest.mark.parametrize(
    "changed",
    [
        {"alpha_pattern": {"experts.gate_up_proj": 24}, "rank_pattern": {"down_proj": 2}},
        {"alpha_pattern": {".*\\.gate_up_proj": 24}, "rank_pattern": {".*\\.gate_up_proj": 2}},
        {"alpha_pattern": {"mlp.gate.weight": 24, "down_proj": 3}},
        {"target_parameters": ["mlp.experts.gate_up_proj"], "alpha_pattern": {"gate_up_proj": 24}},
        {"target_parameters": ["mlp.experts.down_proj"]},
    ],
    ids=str,
)
def test_ranks_and_alphas_of_parameters_are_pefts(
    changed: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    """Patterns are of the parameters' names; one of the experts' two matrices has the name that
    both share.
    """
    folder = folders["qwen3-moe"]
    every = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "target_parameters": every}
    model = save_with_peft(folder, tmp_path / "adapter", **settings | changed)
    merge_adapter(
        folder,
        tmp_path / "adapter",
        tmp_path / "merged",
        quantize="none",
        dtype=torch.float32,
        ranks=SingleRank(),
    )
    assert compute_difference(load_plain(tmp_path / "merged"), model) < 1e-5


MERGED = [("mixtral", "nf4"), ("qwen3-moe", "none"), ("gpt-oss", "nf4"), ("olmoe", "int8")]


@pytest.mark.parametrize(("family", "storage"), mark_slow_but(MERGED, 2))
def test_merged_models_load_in_transformers(
    family: str, storage: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = folders[family]
    cfg = config(quantize_base=storage)
    model = load_ours(folder, cfg)
    out = write(model, folder, cfg, tmp_path / "adapter")
    merge_adapter(
        folder, out, tmp_path / "model", quantize=storage, dtype=torch.float32, ranks=SingleRank()
    )
    assert compute_difference(model, load_theirs(tmp_path / "model")) < 1e-5
    assert compute_difference(model, load_theirs(folder)) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_files_in_both_directions(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Read by slices, written as the hub has them, and read again from the layout that transformers
    holds.
    """
    folder = folders[family]
    model = load_plain(folder)
    assert compute_difference(model, load_theirs(folder)) < 1e-5
    config_of = read_config(folder)
    options: dict[str, Any] = {
        "tokenizer_folder": None,
        "max_shard_bytes": 40_000,
        "world": SingleRank(),
    }
    export_model(model, model.spec, config_of, tmp_path / "out", **options)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    again = load_plain(tmp_path / "out")
    assert compute_difference(again, model) == 0
    assert compute_difference(again, load_theirs(tmp_path / "out")) < 1e-5
    build_reference_model(family).save_pretrained(tmp_path / "fused", save_original_format=False)
    assert compute_difference(load_plain(tmp_path / "fused"), model) == 0


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_quantized_experts_compute_with_what_their_codes_stand_for(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(5, 24, 32, generator=generator)
    with torch.device("meta"):
        base = ExpertLinear(5, 32, 24, bias=False)
    experts = QuantizedExperts(base, kind).to_empty(device="cpu")
    experts.fill_weight(lambda start, stop, columns: weight.flatten(0, 1)[start:stop, columns])
    stands_for = fake_quantize_weight(weight.flatten(0, 1), kind).view_as(weight)
    assert 1e-4 < (stands_for - weight).abs().max() < 0.6
    tokens = torch.randn(11, 32, generator=generator, requires_grad=True)
    chosen = torch.tensor([[0, 3], [3, 4], [0, 1], *[[4, 3]] * 8])
    groups = group_tokens(chosen, 5)
    found = experts(tokens, groups, of_tokens=True)
    slopes = torch.randn(found.shape, generator=generator)
    (grad,) = torch.autograd.grad((found * slopes).sum(), tokens)
    expected = torch.zeros_like(found)
    expected_grad = torch.zeros_like(tokens)
    for token in range(11):
        for choice in range(2):
            row = int(groups.places[2 * token + choice])
            matrix = stands_for[chosen[token, choice]]
            expected[row] = matrix @ tokens[token]
            expected_grad[token] += slopes[row] @ matrix
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(grad, expected_grad, atol=1e-5, rtol=0)


def test_the_line_says_what_was_adapted_and_quantized(folders: dict[str, Path]) -> None:
    folder = folders["qwen3-moe"]
    line = describe_adapters(
        load_ours(folder, config(quantize_base="nf4")), config(quantize_base="nf4")
    )
    assert "on q, v, router (in 2 of 3 layers), experts (in 2 of 3 layers): " in line
    assert "; 19 linears of the layers in nf4, but not mlp.router (" in line
    line = describe_adapters(
        load_ours(folder, config(target_modules=["all-linear"])),
        config(target_modules=["all-linear"]),
    )
    assert "none on experts.gate_up_proj, experts.down_proj, mlp.router (" in line


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (["experts"], "lora.target_modules: experts: no layer of the model has experts"),
        (["q", "router"], "lora.target_modules: router: no layer of the model has experts"),
    ],
)
def test_a_model_without_experts(targets: list[str], words: str, realdata: Path) -> None:
    model = build_meta(read_folder_spec(realdata / "stories260K-hf"), torch.float32)
    with pytest.raises(ConfigError, match=words):
        add_adapters(model, config(target_modules=targets), torch.float32)


def test_a_linear_that_only_other_models_have(folders: dict[str, Path]) -> None:
    model = build_meta(read_folder_spec(folders["mixtral"]), torch.float32)
    with pytest.raises(
        ConfigError,
        match="gate: no layer .* has a linear mlp.gate_proj.*experts are named by experts",
    ):
        add_adapters(model, config(target_modules=["q", "gate"]), torch.float32)
    add_adapters(model, config(target_modules=["all-linear"]), torch.float32)


def test_peft_finds_parameters_by_the_names_of_the_config(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    cfg = config(target_modules=["experts"])
    out = write(load_ours(folders["mixtral"], cfg), folders["mixtral"], cfg, tmp_path / "adapter")
    fields = json.loads((out / "adapter_config.json").read_text())
    assert fields["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert (
        compute_difference(
            load_ours(folders["mixtral"], cfg), load_with_peft(folders["mixtral"], out)
        )
        < 1e-5
    )


def test_what_the_page_says_of_the_numbers_of_all_experts() -> None:
    """docs/moe.md, of rank 16 on Qwen3-30B-A3B: counted on the model; bytes of weights, gradients,
    AdamW's states.
    """
    text = (ROOT / "docs" / "moe.md").read_text(encoding="utf-8")
    spec = build_spec(read_preset_config("qwen3_moe/30B"), "qwen3_moe/30B")
    counts = {}
    for targets in ("experts", "all-linear"):
        model = build_meta(spec, torch.bfloat16)
        add_adapters(model, LoraConfig(rank=16, target_modules=[targets]), torch.bfloat16)
        counts[targets] = sum(
            parameter.numel() for parameter in model.parameters() if parameter.requires_grad
        )
    mixture = spec.mixture
    apart = 16 * sum(mixture.layers) * mixture.num_experts * 3 * (spec.width + mixture.mlp_width)
    numbers = f"{counts['experts'] / 1e6:.0f} million", f"{apart / 1e6:.0f} million"
    assert all(
        f" {number}" in text for number in (*numbers, f"{counts['all-linear'] / 1e6:.0f} million")
    )
    assert f"in bf16 {8 * counts['experts'] / GIB:.1f} GiB" in text
