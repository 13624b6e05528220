"""Write tiny base models of every family and adapters for them, and open the adapters with PEFT.

`make_base` and `write_adapter` write; `open_with_peft` asserts that PEFT finds every tensor.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor

from recipe_lib.adapters import get_adapter_parameters
from recipe_lib.checkpoint.adapter_merging import merge_adapter
from recipe_lib.checkpoint.open_exports import load_model
from recipe_lib.checkpoint.peft_folders import export_adapter
from recipe_lib.checkpoint.rank_groups import SingleRank
from recipe_lib.config.schema import LoraConfig
from recipe_lib.models import read_config, read_trained_spec
from tests.adapters.hugging_face import load_theirs
from tests.checkpoint.test_every_tensor import EXTERNAL as TENSOR_TEST_CONFIGS
from tests.models.reference import build_reference_model
from tests.recipes.external_kinds import KINDS as RUN_KINDS
from tests.recipes.external_kinds import build_settings

# Base -> (case of tests/models/reference.py, keys that differ in its config); our decoder loads
# these. The case llama3.1 ties its embedding and head. Of qwen3-moe the second layer is dense
# unless `mlp_only_layers` is empty, and qwen3-moe-unnormalized has experts in every second layer.
NATIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama3", {}),
    "llama, tied": ("llama3.1", {}),
    "llama, biases": ("llama-biases", {}),
    "mistral": ("mistral-window", {}),
    "qwen2": ("qwen2.5", {}),
    "qwen3": ("qwen3", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {}),
    "phi3": ("phi3", {}),
    "smollm3": ("smollm3", {}),
    "granite": ("granite", {}),
    "granitemoehybrid": ("granite4", {}),
    "mixtral": ("mixtral", {}),
    "olmoe": ("olmoe", {}),
    "gpt_oss": ("gpt-oss", {}),
    "qwen3_moe": ("qwen3-moe", {"mlp_only_layers": []}),
    "qwen3_moe, one dense layer": ("qwen3-moe", {}),
    "qwen3_moe, every second layer dense": ("qwen3-moe-unnormalized", {}),
}
# Arguments that both of MIXED share.
_MIXTURE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
    "head_dim": 8,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
    "num_experts_per_tok": 2,
}  # fmt: skip
# model_type -> arguments of its config: mixtures of experts with dense layers or shared experts,
# which run by transformers' own code.
MIXED: dict[str, dict[str, Any]] = {
    "llama4_text": _MIXTURE
    | {"num_local_experts": 4, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2,
       "layer_types": ["chunked_attention", "full_attention"]},
    "granitemoeshared": _MIXTURE | {"num_local_experts": 4, "shared_intermediate_size": 16},
}  # fmt: skip
# A base with a vision model: AutoModelForCausalLM makes Gemma3ForConditionalGeneration of it, and
# our decoder loads its language model.
MULTIMODAL = "gemma3, multimodal"
# Base -> arguments of its config: models that run by transformers' own code. Its name is the
# model_type and " of transformers".
TRANSFORMERS = {f"{kind} of transformers": config for kind, config in MIXED.items()}
TRANSFORMERS |= {f"{kind} of transformers": config for kind, config in TENSOR_TEST_CONFIGS.items()}
TRANSFORMERS |= {
    f"{kind} of transformers": build_settings(kind)
    for kind in RUN_KINDS
    if f"{kind} of transformers" not in TRANSFORMERS
}
TRAINED_SIZE = 0.05  # standard deviation of the noise that stands for an adapter's training


def make_base(base: str, folder: Path) -> Path:
    """Save a tiny random model in a folder; return the folder.

    base: of NATIVE or TRANSFORMERS, or MULTIMODAL.
    """
    if base in NATIVE:
        case, changes = NATIVE[base]
        build_reference_model(case, **changes).save_pretrained(folder)
        return folder
    torch.manual_seed(5)
    model_type = "gemma3" if base == MULTIMODAL else base.removesuffix(" of transformers")
    config = transformers.AutoConfig.for_model(
        model_type, **TRANSFORMERS[f"{model_type} of transformers"]
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # New norms are one and new biases zero; moved, every tensor differs from a new model's.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    return folder


def read_base_spec(base: str, folder: Path) -> Any:
    """Return the spec (the architecture's sizes) by which our library reads a base's folder."""
    implementation = "transformers" if base in TRANSFORMERS else "native"
    return read_trained_spec(read_config(folder), str(folder), implementation)


def write_adapter(base: str, folder: Path, cfg: LoraConfig, out: Path) -> Path:
    """Write an adapter `out`/adapter as a run does, and the merged model `out`/model; return `out`.

    folder: of the base. Random numbers stand for the adapter's training.
    """
    spec = read_base_spec(base, folder)
    model = load_model(spec, folder, dtype=torch.float32, device=torch.device("cpu"), lora=cfg)
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in get_adapter_parameters(model).values():
            parameter.add_(torch.randn_like(parameter), alpha=TRAINED_SIZE)
    export_adapter(
        model,
        spec=spec,
        cfg=cfg,
        out=out / "adapter",
        base=str(folder),
        base_folder=folder,
        source_config=read_config(folder),
        world=SingleRank(),
    )
    merge_adapter(
        folder,
        adapter_folder=out / "adapter",
        out=out / "model",
        quantize="none",
        implementation="transformers" if base in TRANSFORMERS else "native",
        dtype=torch.float32,
        ranks=SingleRank(),
    )
    return out


def open_with_peft(folder: Path, adapter: Path) -> Any:
    """Open the adapter with PEFT on transformers' base; return PEFT's model.

    Raises AssertionError unless PEFT has exactly the file's tensors.
    """
    from peft import PeftModel, get_peft_model_state_dict

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = PeftModel.from_pretrained(load_theirs(folder), str(adapter)).eval()
    # PEFT only warns of tensors that are missing or left over.
    for warning in caught:
        text = str(warning.message)
        assert not any(word in text for word in ("keys", "matched", "ignored")), text
    with safe_open(str(adapter / "adapter_model.safetensors"), framework="pt") as file:
        names = set(file.keys())
    # Without the base's embeddings, which PEFT would save with the adapter.
    opened = set(get_peft_model_state_dict(model, save_embedding_layers=False))
    assert opened == names, (sorted(opened - names)[:3], sorted(names - opened)[:3])
    return model


@torch.no_grad()
def compute_logits(model: Any) -> Tensor:
    """Return the logits of fixed tokens, fp64 `[2, 24, vocabulary]`."""
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.randint(0, vocabulary, (2, 24), generator=torch.Generator().manual_seed(2))
    return model(input_ids=tokens, use_cache=False).logits.double()


def compute_relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected value."""
    return float((actual - expected).abs().max() / expected.abs().max())
