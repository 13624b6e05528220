"""Tell at export which parts of an adapter a server will refuse, or load and ignore.

`training.export_model` calls `find_unserved` with the names of the adapted modules, and logs a line
for each fault. The table is read off the source of vLLM 0.33.0: its loader compares the last part
of a module's name with those that the class has, and never the whole name; what matches no module
of the model stays unused, without a warning. Modules that it wraps and does not call are ignored
likewise. Rules marked "by its source" follow from several files of it and were not tried.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

from recipe_lib.units import pluralize

SERVER = "vLLM 0.33.0"

_DEEPSEEK = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
_QWEN3_5_MOE = ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM")
# Classes without modules for an adapter of the embedding or of the output projection.
_WITHOUT_EMBEDDING = (
    *_DEEPSEEK,
    "Qwen2ForCausalLM",
    "MistralForCausalLM",
    "Ministral3ForCausalLM",
    "Mistral3ForConditionalGeneration",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GptOssForCausalLM",
    "OlmoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
    "Glm4vForConditionalGeneration",
)
# Classes that take PEFT's adapters of all experts' matrices as one tensor; others take a tensor for
# each expert.
_FUSED_EXPERTS = (
    "GptOssForCausalLM",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3OmniMoeThinkerForConditionalGeneration",
)
# Classes of which a server with --enable-lora does not start.
_WITHOUT_LORA = (
    "AriaForConditionalGeneration",
    "BloomForCausalLM",
    "Cohere2VisionForConditionalGeneration",
    "DbrxForCausalLM",
    "FalconForCausalLM",
    "FalconMambaForCausalLM",
    "Gemma3nForCausalLM",
    "Gemma3nForConditionalGeneration",
    "GPT2LMHeadModel",
    "GPTJForCausalLM",
    "Kimi_K25ForConditionalGeneration",
    "MambaForCausalLM",
    "Mamba2ForCausalLM",
    "PaddleOCRVLForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "StableLmForCausalLM",
    "Zamba2ForCausalLM",
)


@dataclass(frozen=True)
class ServerRule:
    """Modules of some classes that are refused, or loaded and ignored."""

    is_refused: bool
    classes: tuple[str, ...]  # names in `architectures` of config.json
    ends: tuple[str, ...]  # of modules' names
    reason: str


_RULES = (
    ServerRule(
        False,
        (*_DEEPSEEK, "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM", "Mistral4ForCausalLM"),
        ("kv_b_proj",),
        "its attention reads the weight without the adapter (vllm issue 48974)",
    ),
    ServerRule(
        False,
        ("Qwen3NextForCausalLM", "Qwen2MoeForCausalLM", *_QWEN3_5_MOE),
        ("shared_expert_gate",),
        "it calls the module under another name, by its source",
    ),
    ServerRule(
        False,
        (
            *_DEEPSEEK,
            *_QWEN3_5_MOE,
            "Qwen3MoeForCausalLM",
            "Qwen3VLMoeForConditionalGeneration",
            "Qwen3NextForCausalLM",
        ),
        ("mlp.gate",),
        "its experts call the router without the adapter, by its source",
    ),
    ServerRule(
        False,
        ("NemotronHForCausalLM",),
        ("mixer.gate", "fc1_latent_proj", "fc2_latent_proj"),
        "its experts call the module without the adapter",
    ),
    ServerRule(
        False,
        ("MixtralForCausalLM",),
        ("mlp.gate", "mlp.experts", "mlp.experts.base_layer"),
        "it has these modules in block_sparse_moe, by its source",
    ),
    ServerRule(
        True,
        ("Glm4ForCausalLM",),
        ("gate_up_proj",),
        "it has gate_proj and up_proj in its place",
    ),
    ServerRule(
        True,
        ("GraniteMoeHybridForCausalLM",),
        ("block_sparse_moe.router", "router.layer"),
        "it has gate in its place",
    ),
    ServerRule(
        True,
        _WITHOUT_EMBEDDING,
        ("embed_tokens", "lm_head"),
        "its class has no adapters there",
    ),
)


@dataclass(frozen=True)
class Unserved:
    """A part of an adapter that a server does not apply."""

    is_refused: bool  # True: the server does not load the adapter; False: it ignores the part
    text: str  # a line for the log


def find_unserved(architecture: str, modules: Collection[str]) -> list[Unserved]:
    """Find the parts of an adapter that a server refuses or ignores.

    architecture: the class' name in config.json. modules: names of the adapted modules in the
    adapter's file. Empty for a class that the table does not have.
    """
    if architecture in _WITHOUT_LORA:
        return [Unserved(True, f"{SERVER} serves no adapters of {architecture}; merge this one")]
    faults: list[Unserved] = []
    for rule in _RULES:
        ends = tuple(f".{end}" for end in rule.ends)
        names = [name for name in modules if f".{name}".endswith(ends)]
        if architecture in rule.classes and names:
            faults.append(_make_fault(rule.is_refused, names, rule.reason))
    experts = [name for name in modules if re.search(r"\.experts(\.base_layer)?$", name)]
    if experts and architecture not in (*_FUSED_EXPERTS, "MixtralForCausalLM"):
        reason = "it takes each expert's matrices apart"
        faults.append(_make_fault(True, experts, reason))
    keys_alone = [
        name
        for name in modules
        if name.endswith(".k_proj") and f"{name.removesuffix('k_proj')}v_proj" not in modules
    ]
    if architecture.startswith("Gemma4") and 0 < len(keys_alone) < sum(
        name.endswith(".k_proj") for name in modules
    ):
        reason = "of layers whose keys are also values, it adapts the keys alone, by its source"
        faults.append(_make_fault(False, keys_alone, reason))
    return faults


def _make_fault(is_refused: bool, names: list[str], reason: str) -> Unserved:
    ends = sorted({name.removesuffix(".base_layer").rpartition(".")[2] for name in names})
    verb = "refuses this adapter for" if is_refused else "loads this adapter and ignores"
    return Unserved(
        is_refused,
        f"{SERVER} {verb} {', '.join(ends)} ({pluralize(len(names), 'module')}): {reason}; merge"
        " the adapter, or leave these out of lora.target_modules",
    )
