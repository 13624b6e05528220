"""Adapters that PEFT itself writes for tiny bases, and what PEFT makes of them: the truth for
ours.
"""

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from recipe_lib.cli import main
from tests.adapters.hugging_face import SHAPE, write_tiny_folder

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
# family -> what its tiny base has besides SHAPE
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True},
    "gemma": {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "tie_word_embeddings": True, "head_dim": 8},
    "phi3": {},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "tie_word_embeddings": False,
        "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
    },
}  # fmt: skip


def make_tokens(vocabulary: int | None = None) -> Tensor:
    """A prompt of tokens of the vocabulary, the last among them."""
    count = vocabulary or SHAPE["vocab_size"]
    tokens = torch.randint(0, count, (2, 24), generator=torch.Generator().manual_seed(2))
    tokens[0, :3] = torch.tensor([3, count - 1, count - 3])
    return tokens


def make_base(folder: Path, family: str, **changes: Any) -> Path:
    """A tiny base of a family; the folder has no tokenizer."""
    known = "llama" if family not in ("llama", "phi3") else family
    return write_tiny_folder(folder, known, **(FAMILIES[family] | changes))


def load_base(folder: Path, vocabulary: int | None = None) -> Any:
    """The base in transformers, its vocabulary resized as a user does that before PEFT."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if vocabulary is not None:
        torch.manual_seed(4)
        model.resize_token_embeddings(vocabulary)
    return model.eval()


def train_with_peft(base: Path, out: Path, vocabulary: int | None = None, **settings: Any) -> Path:
    """An adapter with random numbers in all that PEFT would train, saved by PEFT."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(6)
        fields = {
            "task_type": "CAUSAL_LM",
            "r": 4,
            "lora_alpha": 6,
            "target_modules": ["q_proj"],
        } | settings
        model = get_peft_model(load_base(base, vocabulary), LoraConfig(**fields))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)
        model.save_pretrained(str(out))
    return out


@torch.no_grad()
def ask_peft(
    base: Path, adapter: Path, vocabulary: int | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of PEFT's model with the adapter, and the tensors of what it merges."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(load_base(base, vocabulary), str(adapter)).eval()
        logits = model(make_tokens(vocabulary)).logits
        return logits, copy.deepcopy(model).merge_and_unload().state_dict()


@torch.no_grad()
def read_merged(folder: Path) -> tuple[Tensor, dict[str, Tensor], Any]:
    """Logits, tensors and config of a merged folder, as transformers loads it; nothing may be
    missing or left over.
    """
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    return (
        model.eval()(make_tokens(model.config.vocab_size)).logits,
        model.state_dict(),
        model.config,
    )


def merge(base: Path, adapter: Path, out: Path, capsys: Any) -> tuple[int, str]:
    """`tune export --merge`: its exit code and what it says of an error."""
    capsys.readouterr()
    code = main.main(
        [
            "export",
            str(adapter),
            "--merge",
            "--base",
            str(base),
            "--out",
            str(out),
            "--dtype",
            "fp32",
        ]
    )
    return code, capsys.readouterr().err


def change_config(adapter: Path, **changes: Any) -> None:
    """Sets keys of an adapter's config."""
    path = adapter / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(adapter: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Changes the tensors of an adapter's file in place."""
    tensors = load_file(adapter / TENSORS)
    change(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        adapter / TENSORS,
        {"format": "pt"},
    )


def compute_relative_difference(mine: Tensor, expected: Tensor) -> float:
    """Largest difference as a share of the largest number."""
    return float((mine.double() - expected.double()).abs().max() / expected.double().abs().max())
