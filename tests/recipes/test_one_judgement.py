"""`tune validate`, `tune plan` and `tune run` say the same of a model's folder, broken or whole."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipe_lib.cli.main import main
from tests.external.published_layouts import write_published
from tests.recipes.runs import FULL, LORA, build_arguments, keep_latest

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
Change = Callable[[Path], None]


def change_tensors(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    """Return a change of a folder's tensors. edit: of name -> tensor, in place."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / SINGLE)
        edit(tensors)
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})

    return change


def change_config(section: str | None = None, **values: Any) -> Change:
    """Return a change of config.json. section: of a nested config; values: None removes a key."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        config = json.loads(file.read_text())
        part = config if section is None else config[section]
        part.update(values)
        for key, value in values.items():
            if value is None:
                del part[key]
        file.write_text(json.dumps(config))

    return change


def split(folder: Path) -> dict[str, str]:
    """Divide the weights into two files with an index; return its weight_map."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def lose_shard(folder: Path) -> None:
    split(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def name_too_much(folder: Path) -> None:
    weight_map = split(folder) | {"model.more.weight": "model-00001-of-00002.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def double(folder: Path) -> None:
    split(folder)
    first, second = (folder / f"model-{number:05d}-of-00002.safetensors" for number in (1, 2))
    tensors = load_file(second)
    name, tensor = next(iter(load_file(first).items()))
    save_file(tensors | {name: tensor + 1}, second, {"format": "pt"})


def cut_short(folder: Path) -> None:
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(data[:-8])


def write_pointer(folder: Path) -> None:
    (folder / SINGLE).write_bytes(b"version https://git-lfs.github.com/spec/v1\nsize 4\n")


def pick(tensors: dict[str, torch.Tensor], *parts: str) -> str:
    """Return the first name with all of the parts in it."""
    return next(name for name in sorted(tensors) if all(part in name for part in parts))


def reshape(*parts: str) -> Change:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        name = pick(tensors, *parts)
        tensors[name] = torch.zeros(3, 5)

    return change_tensors(edit)


def cast(dtype: torch.dtype, *parts: str) -> Change:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if all(part in name for part in parts)]:
            tensors[name] = tensors[name].to(dtype)

    return change_tensors(edit)


def drop(*parts: str) -> Change:
    return change_tensors(lambda tensors: tensors.pop(pick(tensors, *parts)))


def add(name: str) -> Change:
    return change_tensors(lambda tensors: tensors.update({name: torch.zeros(4)}))


def keep(folder: Path) -> None:
    """Leave a folder as it is."""


# Kind of the published folder, change of it, overrides, and whether all three accept it.
CASES: dict[str, tuple[str, Change, tuple[str, ...], bool]] = {
    "whole": ("mistral3", keep, (), True),
    "packed": ("mistral3", keep, ("data.packing=true",), True),
    "two files": ("mistral3", lambda folder: split(folder) and None, (), True),
    "shard missing": ("mistral3", lose_shard, (), False),
    "index names too much": ("mistral3", name_too_much, (), False),
    "two tensors of one name": ("mistral3", double, (), False),
    "cut short": ("mistral3", cut_short, (), False),
    "git-lfs pointer": ("mistral3", write_pointer, (), False),
    "vision in another type": ("mistral3", cast(torch.bfloat16, "vision_tower"), (), True),
    "text in codes": ("mistral3", cast(torch.int8, "q_proj"), (), False),
    "text in half": ("mistral3", cast(torch.float16, "proj"), (), True),
    "text of another shape": ("mistral3", reshape("layers.0", "down_proj"), (), False),
    "embedding of another shape": ("mistral3", reshape("embed_tokens"), (), False),
    "a weight missing": ("mistral3", drop("layers.1", "up_proj"), (), False),
    "vision weight missing": ("mistral3", drop("vision_tower"), (), True),
    "unknown tensor": ("mistral3", add("model.language_model.other.weight"), (), False),
    "value head": ("mistral3", add("v_head.weight"), (), False),
    "text config lies on layers": (
        "mistral3", change_config("text_config", num_hidden_layers=3), (), False,
    ),
    "text config lies on width": (
        "mistral3", change_config("text_config", intermediate_size=100), (), False,
    ),
    "text config lies on words": (
        "mistral3", change_config("text_config", vocab_size=500), (), False,
    ),
    "text config of no width": (
        "mistral3", change_config("text_config", hidden_size=0), (), False,
    ),
    "no model type": ("mistral3", change_config(model_type=None), (), False),
    "unknown model type": ("mistral3", change_config(model_type="mistral33"), (), False),
    "an encoder": ("mistral3", change_config(model_type="bert"), (), False),
    "quantized": (
        "mistral3", change_config(quantization_config={"quant_method": "gptq", "bits": 4}), (), False,
    ),
    "other weights file": (
        "mistral3", change_config(transformers_weights="other.safetensors"), (), False,
    ),
    "adapters on no linear": ("mistral3", keep, ("lora.target_modules=[qkv]",), False),
    "adapters on vision": ("mistral3", keep, ("lora.target_modules=[patch_conv]",), False),
    "adapters on some": ("mistral3", keep, ("lora.target_modules=[q_proj,v_proj]",), True),
    "four bits": ("mistral3", keep, ("lora.quantize_base=nf4",), True),
    "heads of several tokens": ("qwen3_5", keep, (), True),
    "heads packed": ("qwen3_5", keep, ("data.packing=true",), True),
    "vision of another shape": ("qwen3_5", reshape("visual", "weight"), (), True),
    "linear attention cut": ("qwen3_5", drop("linear_attn", "conv1d"), (), False),
    "a state-space model": ("nemotron_h", keep, (), True),
    "another extra layer": ("glm4_moe_lite", add("model.layers.9.norm.weight"), (), False),
    "linear attention in four bits": ("qwen3_5", keep, ("lora.quantize_base=nf4",), True),
    "experts with adapters": (
        "glm4_moe_lite", keep, ("lora.target_modules=[gate_up_proj]",), False,
    ),
    "an expert missing": ("glm4_moe_lite", drop("experts.1"), (), False),
    "a mixture in fp32": ("glm4_moe_lite", keep, ("dtype=fp32",), True),
    "a mixture in fp32, packed": (
        "glm4_moe_lite", keep, ("dtype=fp32", "data.packing=true"), True,
    ),
    "heads that do not divide": (
        "mistral3", change_config("text_config", num_key_value_heads=3), (), False,
    ),
    "no class for the text alone": ("qwen3_vl", keep, ("checkpoint.carry=false",), False),
    "text alone": ("mistral3", keep, ("checkpoint.carry=false",), True),
    "thinker": ("qwen2_5_omni", keep, (), True),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A published folder of each kind that the cases begin with."""
    made = {}
    for kind in sorted({kind for kind, *_ in CASES.values()}):
        made[kind] = tmp_path_factory.mktemp(kind)
        write_published(made[kind], kind)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_validate_plan_and_run_agree(
    case: str,
    folders: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kind, change, overrides, is_right = CASES[case]
    folder = tmp_path / "model"
    folder.mkdir()
    for file in folders[kind].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    change(folder)
    is_lora = any(word.startswith("lora.") for word in overrides)
    recipe, config = (LORA, "demo/lora") if is_lora else (FULL, "demo/full")
    words = [
        word for word in build_arguments(tmp_path / "run", config) if "model.preset" not in word
    ]
    words += [f"model.path={folder}", "~model.preset", "model.implementation=transformers",
              "dtype=bf16", "device=cpu", "max_steps=1", "data.packing=false", *overrides]  # fmt: skip
    words = keep_latest(*words)
    codes = {}
    errors = {}
    for verb in ("validate", "plan", "run"):
        codes[verb] = main([verb, recipe, *words])
        errors[verb] = [
            line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")
        ]
    assert codes == dict.fromkeys(codes, 0 if is_right else 2), errors
    if not is_right:
        assert all(len(lines) == 1 for lines in errors.values()), errors
        assert errors["validate"] == errors["run"]
        assert not (tmp_path / "run" / "model").exists()
