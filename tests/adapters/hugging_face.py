"""Models of transformers and adapters of PEFT, beside ours with the same weights."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipe_lib.adapters import add_adapters, init_adapters
from recipe_lib.checkpoint.huggingface import load_weights
from recipe_lib.config.schema import LoraConfig
from recipe_lib.models import Decoder, DecoderSpec, build_meta, build_spec, read_config
from tests.adapters.adapted import EVERYWHERE, move_adapters

# Kinds of adapters that PEFT and we must agree on: what differs from `build_config`.
VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q", "v"]},
    "rslora": {"rslora": True, "rank": 3, "alpha": 5.0},
    "dora": {"dora": True},
    "embedding": {"target_modules": ["embedding"]},
    "head": {"target_modules": ["head"]},
    "everywhere": {"target_modules": EVERYWHERE, "dora": True},
}


def build_config(**changes: Any) -> LoraConfig:
    return LoraConfig(**({"rank": 4, "alpha": 8.0} | changes))


MOVED = 0.05
TINY: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": False,
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def write_tiny_folder(folder: Path, family: str, **changes: Any) -> Path:
    """A model folder with random weights, written by transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = TINY[family] | SHAPE | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read_folder_spec(folder: Path) -> DecoderSpec:
    """The spec of a model folder."""
    return build_spec(read_config(folder), str(folder))


def load_ours(
    folder: Path, cfg: LoraConfig, dtype: torch.dtype = torch.float32, moved: float = MOVED
) -> Decoder:
    """Our model with the folder's weights and adapters that have been trained a little."""
    spec = read_folder_spec(folder)
    model = build_meta(spec, dtype)
    add_adapters(model, cfg, dtype)
    model.to_empty(device="cpu")
    load_weights(model, spec, folder)
    init_adapters(model, 1)
    if moved:
        move_adapters(model, moved)
    return model.eval()


def load_plain(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """Our model of a folder, without adapters."""
    spec = read_folder_spec(folder)
    model = build_meta(spec, dtype).to_empty(device="cpu")
    load_weights(model, spec, folder)
    return model.eval()


def load_theirs(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of a folder; every weight must be found, and none be left over."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


def load_with_peft(folder: Path, adapter: Path) -> Any:
    """The same with an adapter that PEFT loads; a name that does not fit is an error."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings(
            "error", message="Found (missing|unexpected)"
        )  # PEFT goes on without what it lacks
        return PeftModel.from_pretrained(load_theirs(folder), str(adapter)).eval()


def save_with_peft(folder: Path, adapter: Path, **settings: Any) -> Any:
    """An adapter with random numbers that PEFT makes and saves; returns its model."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(6)
        model = get_peft_model(
            load_theirs(folder), PeftConfig(task_type="CAUSAL_LM", **settings)
        ).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=MOVED)
                assert parameter.requires_grad == ("lora_" in name)
        model.save_pretrained(str(adapter))
    return model


@torch.no_grad()
def compute_difference(mine: Decoder, other: Any) -> float:
    """Largest difference of the logits of a prompt, as a share of the largest logit."""
    tokens = torch.randint(
        0, mine.spec.vocab_size, (2, 24), generator=torch.Generator().manual_seed(2)
    )
    expected = compute_logits(other, tokens).double()
    return float((mine(tokens).double() - expected).abs().max() / expected.abs().max())


def compute_logits(model: Any, tokens: Tensor) -> Tensor:
    """Logits `[b, s, v]` of a model of ours or of transformers."""
    found = model(tokens)
    return found if isinstance(found, Tensor) else found.logits
