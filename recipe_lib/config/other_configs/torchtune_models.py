"""torchtune's model builders: families that are here, sizes that have a preset, and what there is none of."""

FAMILIES = (
    "code_llama2", "gemma", "gemma2", "llama2", "llama3", "llama3_1", "llama3_2", "llama3_3", "mistral", "phi3",
    "phi4", "qwen2", "qwen2_5",
)  # fmt: skip

# Words in a component's path -> why there is no such model here.
NO_MODELS = (
    ("vision", "there are no images here, only text"),
    ("multimodal", "there are no images here, only text"),
    ("flux", "there are no images here, only text"),
    ("clip_", "there are no images here, only text"),
    ("classifier", "there is no model with a head for classes or rewards"),
    ("reward", "there is no model with a head for classes or rewards"),
)

# Sizes that can be planned before their weights are here: builder -> model.preset.
PRESETS = {
    "gemma2_2b": "gemma2/2B",
    "gemma2_9b": "gemma2/9B",
    "gemma2_27b": "gemma2/27B",
    "llama2_7b": "llama2/7B",
    "llama2_13b": "llama2/13B",
    "llama2_70b": "llama2/70B",
    "llama3_8b": "llama3/8B",
    "llama3_70b": "llama3/70B",
    "llama3_1_8b": "llama3_1/8B",
    "llama3_1_70b": "llama3_1/70B",
    "llama3_1_405b": "llama3_1/405B",
    "llama3_2_1b": "llama3_2/1B",
    "llama3_2_3b": "llama3_2/3B",
    "llama3_3_70b": "llama3_3/70B",
    "mistral_7b": "mistral/7B_v0.1",
    "phi3_mini": "phi3/mini",
    "phi4_14b": "phi4/14B",
    "qwen2_5_0_5b": "qwen2_5/0.5B",
    "qwen2_5_3b": "qwen2_5/3B",
    **{
        f"qwen2_5_{size.lower().replace('.', '_')}_{kind}": f"qwen2_5/{size}"
        for size in ("1.5B", "7B", "14B", "32B", "72B")
        for kind in ("base", "instruct")
    },
}
