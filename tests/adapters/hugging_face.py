"""Load the same weights and adapters into our model, transformers' and PEFT's, and compare logits.

`write_tiny_folder` writes a model, `load_ours` / `load_theirs` / `load_with_peft` read it.
"""

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

# Kind of adapter, on which PEFT and we must agree -> arguments of `build_config`.
VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q", "v"]},
    "rslora": {"rslora": True, "rank": 3, "alpha": 5.0},
    "dora": {"dora": True},
    "embedding": {"target_modules": ["embedding"]},
    "head": {"target_modules": ["head"]},
    "everywhere": {"target_modules": EVERYWHERE, "dora": True},
}


def build_config(**changes: Any) -> LoraConfig:
    """Return an adapter's config of rank 4 with changes."""
    return LoraConfig(**({"rank": 4, "alpha": 8.0} | changes))


MOVED = 0.05  # standard deviation of the random numbers that stand for an adapter's training
# Family -> keys of config.json beside SHAPE.
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
# Keys of config.json that the families share.
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
    """Write a model folder with random weights by transformers; return it.

    changes: keys of its config.json.
    """
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
            parameter.add_(torch.randn_like(parameter), alpha=0.05)  # norms and biases too
    model.save_pretrained(folder)
    # transformers has written every default of the family into it.
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read_folder_spec(folder: Path) -> DecoderSpec:
    """Return the spec (the architecture's sizes) of a model folder."""
    return build_spec(read_config(folder), str(folder))


def load_ours(
    folder: Path, cfg: LoraConfig, dtype: torch.dtype = torch.float32, moved: float = MOVED
) -> Decoder:
    """Return our model with the folder's weights, and adapters as if trained a little.

    moved: standard deviation of what is added to the adapters; 0 leaves them as initialized.
    """
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
    """Return our model of a folder, without adapters."""
    spec = read_folder_spec(folder)
    model = build_meta(spec, dtype).to_empty(device="cpu")
    load_weights(model, spec, folder)
    return model.eval()


def load_theirs(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return transformers' model of a folder; a missing or unused weight is an error."""
    from transformers import AutoModelForCausalLM

    model, loading_faults = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True
    )
    assert not any(loading_faults.values()), loading_faults
    return model.eval()


def load_with_peft(folder: Path, adapter: Path) -> Any:
    """Return transformers' model with an adapter that PEFT loads.

    A missing or unused tensor of the adapter is an error.
    """
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # PEFT only warns of tensors that it does not find.
        warnings.filterwarnings("error", message="Found (missing|unexpected)")
        return PeftModel.from_pretrained(load_theirs(folder), str(adapter)).eval()


def save_with_peft(folder: Path, adapter: Path, **settings: Any) -> Any:
    """Let PEFT build an adapter with random weights and save it to `adapter`; return PEFT's model.

    folder: of the base. settings: of PEFT's LoraConfig.
    """
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(6)
        config = PeftConfig(task_type="CAUSAL_LM", **settings)
        model = get_peft_model(load_theirs(folder), config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=MOVED)
                assert parameter.requires_grad == ("lora_" in name)
        model.save_pretrained(str(adapter))
    return model


@torch.no_grad()
def compute_difference(model: Decoder, reference: Any) -> float:
    """Return the largest difference of two models' logits, relative to the largest logit.

    reference: a model of ours or of transformers.
    """
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, model.spec.vocab_size, (2, 24), generator=generator)
    expected = compute_logits(reference, tokens).double()
    return float((model(tokens).double() - expected).abs().max() / expected.abs().max())


def compute_logits(model: Any, tokens: Tensor) -> Tensor:
    """Return the logits `[b, s, v]` of a model of ours or of transformers."""
    output = model(tokens)
    return output if isinstance(output, Tensor) else output.logits
