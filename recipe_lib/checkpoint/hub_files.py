"""Which files of a model on the hub we take: what `tune download` fetches is what the cache is then searched for."""

# Patterns of names in the repository's top folder.
MODEL_FILES = [
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
]

# Not even where a pattern above fits: subfolders, code, formats that run code when loaded, second copies of weights.
NEVER = ["*/*", "*.py", "*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt", "*.gguf", "consolidated*"]
