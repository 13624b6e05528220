"""What is written of a model that was read from quantized files: whole models, adapters, and their
mark of the base.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipe_lib.checkpoint.adapter_files import check_adapter, check_base, read_adapter
from recipe_lib.checkpoint.adapter_merging import merge_adapter
from recipe_lib.checkpoint.huggingface import (
    check_copies,
    compute_base_fingerprint,
    export_model,
    find_untrained_embeddings,
)
from recipe_lib.checkpoint.peft_folders import export_adapter
from recipe_lib.checkpoint.rank_groups import SingleRank
from recipe_lib.cli import main
from recipe_lib.config.schema import LoraConfig
from recipe_lib.errors import CheckpointError
from recipe_lib.models import read_config
from tests.adapters.hugging_face import (
    compute_difference,
    load_ours,
    load_plain,
    load_theirs,
    load_with_peft,
    read_folder_spec,
)
from tests.checkpoint.quantized_folders import (
    Tensors,
    copy_folder,
    rewrite_folder,
    write_fp8_folder,
    write_mxfp4_folder,
    write_twin,
)
from tests.selection import mark_slow_but

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"block": (24, 40), "left": ("layernorm",)}),
    "phi3": ("phi3", {"block": (24, 32)}),
    "qwen3-moe": ("qwen3-moe", {"block": (16, 16), "moe_intermediate_size": 32}),
    "mixtral, fused": ("mixtral", {"block": (32, 16), "fused": True}),
}
FOLDERS = ["mxfp4", *KINDS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders by name, each made once, with its twin `NAME/twin` in fp32."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("quantized") / "model"
            case, options = KINDS.get(name, ("", {}))
            write_mxfp4_folder(made[name]) if name == "mxfp4" else write_fp8_folder(
                made[name], case, **options
            )
            write_twin(made[name], made[name] / "twin", torch.float32)
        return made[name]

    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_transformers_opens_the_export(
    folders: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    folder, out = folders(name), tmp_path / "out"
    model = load_plain(folder)
    options: dict[str, Any] = {
        "tokenizer_folder": None,
        "max_shard_bytes": 60_000,
        "world": SingleRank(),
    }
    export_model(model, model.spec, read_config(folder), out, **options)
    assert "quantization_config" in read_config(
        folder
    ) and "quantization_config" not in read_config(out)
    assert compute_difference(model, load_theirs(out)) < 1e-5
    assert compute_difference(model, load_theirs(folder / "twin")) < 1e-5
    assert compute_difference(load_plain(out), model) == 0
    stored = {
        value.dtype for file in out.glob("*.safetensors") for value in load_file(file).values()
    }
    assert stored == {torch.float32}


def adapter_of(folder: Path, out: Path, cfg: LoraConfig) -> Any:
    """The model with adapters that have been trained a little, and their folder `out`."""
    model = load_ours(folder, cfg)
    export_adapter(
        model, model.spec, cfg, out, base=str(folder), base_folder=folder, world=SingleRank()
    )
    return model


TARGETS = {"qwen3": ["q", "down", "head"], "phi3": ["v", "gate", "down"]}


@pytest.mark.parametrize("storage", ["none", "nf4", "int8"])
@pytest.mark.parametrize("name", mark_slow_but(FOLDERS, 1))
def test_adapters_are_merged_into_what_codes_stand_for(
    folders: Callable[[str], Path], tmp_path: Path, name: str, storage: str
) -> None:
    folder = folders(name)
    targets = TARGETS.get(name, ["q", "v", "router", "experts"])
    model = adapter_of(
        folder,
        tmp_path / "adapter",
        LoraConfig(4, 8.0, target_modules=targets, quantize_base=storage),
    )
    merge_adapter(
        folder,
        tmp_path / "adapter",
        tmp_path / "model",
        quantize=storage,
        dtype=torch.float32,
        ranks=SingleRank(),
    )
    assert "quantization_config" not in read_config(tmp_path / "model")
    assert compute_difference(model, load_theirs(tmp_path / "model")) < 1e-5
    assert compute_difference(model, load_plain(folder)) > 1e-3


def test_experts_that_lie_in_one_plain_tensor_are_merged(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """As transformers holds them: no view, and yet experts."""
    folder = folders("mixtral, fused") / "twin"
    model = adapter_of(
        folder, tmp_path / "adapter", LoraConfig(4, 8.0, target_modules=["q", "experts"])
    )
    merge_adapter(
        folder,
        tmp_path / "adapter",
        tmp_path / "model",
        quantize="none",
        dtype=torch.float32,
        ranks=SingleRank(),
    )
    assert compute_difference(model, load_theirs(tmp_path / "model")) < 1e-5


@pytest.mark.parametrize("name", FOLDERS)
def test_a_base_and_its_twin_have_one_mark(
    folders: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    """So an adapter is trained on the one and used with the other, in PEFT too."""
    folder = folders(name)
    other, half = folder / "twin", write_twin(folder, tmp_path / "half")
    marks = {
        compute_base_fingerprint(read_folder_spec(path), path) for path in (folder, other, half)
    }
    assert len(marks) == 1
    cfg = LoraConfig(4, 8.0, target_modules=["q", "v"])
    model = adapter_of(folder, tmp_path / "adapter", cfg)
    check_adapter(tmp_path / "adapter", read_folder_spec(other), cfg, other)
    assert compute_difference(model, load_with_peft(other, tmp_path / "adapter")) < 1e-5

    def move(tensors: Tensors) -> Tensors:
        """Another number where the mark looks: the first of the row in the middle."""
        coded = next(
            name for name in sorted(tensors) if name.endswith(("down_proj_blocks", "o_proj.weight"))
        )
        codes = tensors[coded].view(torch.uint8)
        codes[len(codes) // 2].view(-1)[0] ^= 3
        return tensors

    moved = rewrite_folder(
        copy_folder(folder, tmp_path / "moved"), move, read_config(folder)["quantization_config"]
    )
    with pytest.raises(CheckpointError, match="was trained on other weights"):
        check_base(read_adapter(tmp_path / "adapter"), read_folder_spec(moved), moved)


def test_copies_of_frozen_weights_are_compared_with_what_codes_stand_for(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, file = folders("qwen3"), tmp_path / "adapter_model.safetensors"
    head = load_file(folder / "twin" / "model.safetensors")["lm_head.weight"]
    assert load_file(folder / "model.safetensors")["lm_head.weight"].dtype == torch.float8_e4m3fn
    for dtype in (torch.float32, torch.bfloat16):
        save_file({"copy": head.to(dtype)}, file)
        check_copies(file, {"lm_head.weight": "copy"}, read_folder_spec(folder), folder)
    head[40, 3] += 1
    save_file({"copy": head}, file)
    with pytest.raises(CheckpointError, match="copy differs from lm_head.weight of"):
        check_copies(file, {"lm_head.weight": "copy"}, read_folder_spec(folder), folder)


def test_untrained_rows_of_an_embedding_in_fp8(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = write_fp8_folder(tmp_path / "model", "qwen3", (1, 32), left=())

    def empty(tensors: Tensors) -> Tensors:
        tensors["model.embed_tokens.weight"].view(torch.uint8)[[5, 9]] = 0
        return tensors

    rewrite_folder(folder, empty, read_config(folder)["quantization_config"])
    assert find_untrained_embeddings(read_folder_spec(folder), folder, [4, 5, 9, 11], [5]) == [5, 9]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mxfp4"])
def test_tune_export_merges_and_checks(
    folders: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture, name: str
) -> None:
    folder = folders(name)
    targets = TARGETS.get(name, ["q", "experts"])
    cfg = LoraConfig(4, 8.0, target_modules=targets, quantize_base="nf4")
    model = adapter_of(folder, tmp_path / "adapter", cfg)
    for words in (
        ["--adapter"],
        ["--adapter", "--out", tmp_path / "again"],
        ["--merge", "--out", tmp_path / "model"],
    ):
        assert main.main(["export", str(tmp_path / "adapter"), *map(str, words)]) == 0, (
            capsys.readouterr().err
        )
    assert compute_difference(model, load_theirs(tmp_path / "model")) < 1e-5
