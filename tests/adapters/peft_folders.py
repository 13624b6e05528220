"""Let PEFT write adapters for tiny bases and compute with them: the reference for `tune export`.

`make_base` and `train_with_peft` write a base model and an adapter. `ask_peft` gives the logits and
merged tensors of PEFT, `merge` and `read_merged` those of our export.
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

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
# Family -> keys of its tiny base's config.json, beside those that `write_tiny_folder` sets.
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
    """Return tokens int64 `[2, 24]`, the last ids of the vocabulary among them.

    vocabulary: its size; None for the bases' own.
    """
    vocab_size = vocabulary or SHAPE["vocab_size"]
    tokens = torch.randint(0, vocab_size, (2, 24), generator=torch.Generator().manual_seed(2))
    tokens[0, :3] = torch.tensor([3, vocab_size - 1, vocab_size - 3])
    return tokens


def make_base(folder: Path, family: str, **changes: Any) -> Path:
    """Write a tiny base of a family, without tokenizer; return its folder."""
    # FAMILIES replaces the keys of "llama" that make a family.
    tiny_family = family if family in ("llama", "phi3") else "llama"
    return write_tiny_folder(folder, tiny_family, **(FAMILIES[family] | changes))


def load_base(folder: Path, vocabulary: int | None = None) -> Any:
    """Return transformers' model of the base.

    vocabulary: size to resize its embeddings to, as users do before PEFT; None leaves them.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if vocabulary is not None:
        torch.manual_seed(4)
        model.resize_token_embeddings(vocabulary)
    return model.eval()


def train_with_peft(base: Path, out: Path, vocabulary: int | None = None, **settings: Any) -> Path:
    """Let PEFT save an adapter with random numbers in all that it would train; return its folder.

    vocabulary: of `load_base`. settings: of PEFT's LoraConfig.
    """
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
    """Return (logits of PEFT's model with the adapter, tensors of the model that PEFT merges)."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(load_base(base, vocabulary), str(adapter)).eval()
        logits = model(make_tokens(vocabulary)).logits
        # Merging changes the model in place.
        return logits, copy.deepcopy(model).merge_and_unload().state_dict()


@torch.no_grad()
def read_merged(folder: Path) -> tuple[Tensor, dict[str, Tensor], Any]:
    """Return (logits, tensors, config) of a merged folder, as transformers loads it.

    A missing or unused weight is an error.
    """
    from transformers import AutoModelForCausalLM

    model, loading_faults = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading_faults.values()), loading_faults
    logits = model.eval()(make_tokens(model.config.vocab_size)).logits
    return logits, model.state_dict(), model.config


def merge(base: Path, adapter: Path, out: Path, capsys: Any) -> tuple[int, str]:
    """Run `tune export --merge` in this process; return its exit code and what it reports."""
    capsys.readouterr()  # drops what was written before
    argv = ["export", str(adapter), "--merge", "--base", str(base), "--out", str(out)]
    code = main.main([*argv, "--dtype", "fp32"])
    return code, capsys.readouterr().err


def change_config(adapter: Path, **changes: Any) -> None:
    """Set keys of an adapter's config."""
    path = adapter / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(adapter: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Rewrite an adapter's file after `change` has changed its tensors, by name, in place."""
    tensors = load_file(adapter / TENSORS)
    change(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        adapter / TENSORS,
        {"format": "pt"},
    )


def compute_relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected value."""
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())
