"""Makes the bad adapters under tests/bad_inputs/adapters, each with its base and its command.

    python tests/bad_inputs/make_adapters.py        run from the repository root

The expected lines beside them are written by hand.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from make_models import tensors
from make_models import write as write_model
from safetensors.torch import save

ROOT = Path(__file__).parent / "adapters"
EXPORT = "tune export {case}/adapter --merge --base {case}/model --out {tmp}/out\n"
TRAIN = (
    "tune run lora_finetune_distributed --config demo/lora model.path={case}/model "
    "tokenizer.path=examples/demo/tokenizer validation.source=null data.max_samples=8 data.cache=false "
    "lora.adapter_path={case}/adapter output_dir={tmp}/out lora.rank=2 lora.alpha=4 lora.target_modules=[q,v]\n"
)
SETTINGS: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "somebody/base",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["q_proj", "v_proj"],
    "bias": "none",
}
NAME = "base_model.model.model.layers.{}.self_attn.{}_proj.lora_{}.weight"
Tensors = dict[str, torch.Tensor]


def adapter(rank: int = 2, width: int = 8, parts: str = "qv", layers: int = 1) -> Tensors:
    """The tensors of an adapter for the models of make_models.py."""
    found = {}
    for layer in range(layers):
        for part in parts:
            found[NAME.format(layer, part, "A")] = torch.full((rank, width), 0.5)
            found[NAME.format(layer, part, "B")] = torch.full((8, rank), 0.25)
    return found


def write(folder: Path, held: Tensors | bytes | None = None, **changes: Any) -> None:
    """An adapter's folder; `held` None: whole tensors; a change to None: the key is left out."""
    settings = {key: value for key, value in (SETTINGS | changes).items() if value is not None}
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    data = held if isinstance(held, bytes) else save(adapter() if held is None else held, {"format": "pt"})
    (folder / "adapter_model.safetensors").write_bytes(data)


def only_pickled(folder: Path) -> None:
    write(folder)
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04.")


def config_cut_short(folder: Path) -> None:
    write(folder)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": ')


def without_one_layer(folder: Path) -> None:
    write(folder, adapter(layers=1))


def two_layers(folder: Path) -> None:
    weights = tensors()
    weights |= {name.replace("layers.0", "layers.1"): value for name, value in tensors().items() if "layers.0" in name}
    write_model(folder, weights, num_hidden_layers=2)


def other_copy(folder: Path) -> None:
    held = {
        "base_model.model.lm_head.base_layer.weight": torch.zeros(12, 8),
        "base_model.model.lm_head.lora_A.weight": torch.zeros(2, 8),
        "base_model.model.lm_head.lora_B.weight": torch.zeros(12, 2),
    }
    write(folder, held, target_modules=["lm_head"])


CASES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "another_kind_of_adapter": (EXPORT, lambda folder: write(folder, peft_type="LOHA")),
    "config_cut_short": (EXPORT, config_cut_short),
    "features_that_we_lack": (
        EXPORT,
        lambda folder: write(folder, layer_replication=[[0, 1]], kasa_config={"beta": 0.1}, use_new_feature=True),
    ),
    "saved_module_missing": (EXPORT, lambda folder: write(folder, modules_to_save=["lm_head"])),
    "layers_left_out": (EXPORT, lambda folder: write(folder, layers_to_transform=[1])),
    "pattern_that_is_none": (EXPORT, lambda folder: write(folder, rank_pattern={"*q_proj": 2})),
    "numbers_that_are_none": (
        EXPORT,
        lambda folder: write(folder, {name: value * float("nan") for name, value in adapter().items()}),
    ),
    "frozen_copy_of_another_base": (EXPORT, other_copy),
    "made_for_a_wider_base": (EXPORT, lambda folder: write(folder, adapter(width=16))),
    "module_that_the_base_lacks": (EXPORT, lambda folder: write(folder, adapter(layers=3))),
    "no_such_tensor_of_lora": (
        EXPORT,
        lambda folder: write(folder, adapter() | {"base_model.model.prompt_embeddings": torch.zeros(4, 8)}),
    ),
    "only_pickled_weights": (EXPORT, only_pickled),
    "other_rank_than_its_config": (EXPORT, lambda folder: write(folder, r=4)),
    "rank_not_a_number": (EXPORT, lambda folder: write(folder, r="16", lora_alpha=-1)),
    "start_that_moves_the_base": (EXPORT, lambda folder: write(folder, init_lora_weights="pissa")),
    "tensor_missing": (
        EXPORT,
        lambda folder: write(folder, {name: value for name, value in adapter().items() if "q_proj.lora_B" not in name}),
    ),
    "weights_cut_short": (EXPORT, lambda folder: write(folder, save(adapter(), {"format": "pt"})[:-40])),
    "train_on_a_model_folder": (TRAIN.replace("{case}/adapter", "{case}/model"), write),
    "train_on_one_layer_of_two": (TRAIN, without_one_layer),
    "train_on_other_targets": (TRAIN.replace("[q,v]", "[q,up]"), write),
    "train_on_another_kind": (TRAIN, lambda folder: write(folder, use_rslora=True)),
    "train_on_another_rank": (TRAIN.replace("rank=2", "rank=8"), write),
}


def main() -> None:
    """Writes every case; what is expected stays as it is."""
    for name, (command, make) in CASES.items():
        case = ROOT / name
        for part in ("model", "adapter"):
            shutil.rmtree(case / part, ignore_errors=True)
            (case / part).mkdir(parents=True)
        (case / "command").write_text(command)
        if name == "train_on_one_layer_of_two":
            two_layers(case / "model")
        else:
            write_model(case / "model", tensors())
        make(case / "adapter")


if __name__ == "__main__":
    main()
