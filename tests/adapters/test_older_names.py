"""Adapters that were made with transformers 4: mapped to the present names, or refused with the
reason.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from recipe_lib.checkpoint.adapter_files import check_fits, read_adapter
from recipe_lib.checkpoint.adapter_merging import merge_adapter
from recipe_lib.checkpoint.peft_folders import load_adapter
from recipe_lib.checkpoint.rank_groups import SingleRank
from recipe_lib.config.schema import LoraConfig
from recipe_lib.errors import CheckpointError
from recipe_lib.external.module_spec import read_spec
from recipe_lib.models import read_config
from tests.adapters.hugging_face import (
    compute_difference,
    load_ours,
    load_plain,
    load_theirs,
    load_with_peft,
    read_folder_spec,
)
from tests.models.reference import SMALL, build_reference_model

# The block of a mixture in transformers 4, whose router was a linear called `gate`, and an expert's
# three linears.
BLOCKS = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3-moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    "olmoe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}
WIDTH = SMALL["hidden_size"]
LAYERS = SMALL["num_hidden_layers"]
RANK = 4


def write_older(folder: Path, base: Path, family: str, ends: list[str]) -> Path:
    """An adapter as PEFT saved it with transformers 4: of linears of the mixture, by their names in
    a layer.
    """
    tensors = {}
    generator = torch.Generator().manual_seed(3)
    spec = read_folder_spec(base)
    block, (gate, up, down) = BLOCKS[family]
    assert spec.mixture is not None
    inner = spec.mixture.mlp_width
    shapes = {
        "gate": (spec.mixture.num_experts, WIDTH),
        gate: (inner, WIDTH),
        up: (inner, WIDTH),
        down: (WIDTH, inner),
    }
    for layer in (number for number in range(LAYERS) if spec.mixture.layers[number]):
        for end in ends:
            middles = (
                [block]
                if end == "gate"
                else [f"{block}.experts.{at}" for at in range(spec.mixture.num_experts)]
            )
            for middle in middles:
                rows, columns = shapes[end]
                name = f"base_model.model.model.layers.{layer}.{middle}.{end}"
                tensors[f"{name}.lora_A.weight"] = (
                    torch.randn(RANK, columns, generator=generator) * 0.1
                )
                tensors[f"{name}.lora_B.weight"] = (
                    torch.randn(rows, RANK, generator=generator) * 0.1
                )
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 8, "target_modules": ends,
              "base_model_name_or_path": str(base), "peft_version": "0.17.1"}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {family: tmp_path_factory.mktemp(family) for family in BLOCKS}
    for family, folder in folders.items():
        build_reference_model(family).save_pretrained(folder)
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("family", BLOCKS)
def test_a_router_of_transformers_4_is_the_one_of_transformers_5(
    family: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    base = bases[family]
    adapter = write_older(tmp_path / "adapter", base, family, ["gate"])
    expected = load_with_peft(base, adapter)
    assert compute_difference(load_plain(base), expected) > 1e-3
    model = load_ours(base, LoraConfig(rank=RANK, alpha=8.0, target_modules=["router"]), moved=0)
    load_adapter(model, model.spec, adapter)
    assert compute_difference(model, expected) < 1e-5
    merge_adapter(
        base, adapter, tmp_path / "merged", quantize="none", dtype=torch.float32, ranks=SingleRank()
    )
    assert compute_difference(load_plain(tmp_path / "merged"), expected) < 1e-5
    assert compute_difference(model, load_theirs(tmp_path / "merged")) < 1e-5


@pytest.mark.parametrize("family", BLOCKS)
@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_what_cannot_be_mapped_is_refused_with_the_reason(
    implementation: str, family: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    base = bases[family]
    spec = (
        read_folder_spec(base)
        if implementation == "native"
        else read_spec(read_config(base), family)
    )
    names = BLOCKS[family][1]
    experts = read_adapter(write_older(tmp_path / "experts", base, family, [*names, "gate"]))
    with pytest.raises(
        CheckpointError, match=r"adapts the linears of each expert .*, as transformers 4 has them"
    ):
        check_fits(experts, spec)
    if implementation == "transformers":
        router = read_adapter(write_older(tmp_path / "router", base, family, ["gate"]))
        check_fits(router, spec)  # the same matrix in both releases
