"""Folders whose weights are not a Hugging Face model's: what they have, and what to do about it. No torch here."""

from pathlib import Path

from recipe_lib.units import name_first

# Patterns of file names, the most telling first, and what to do with a folder that has such files alone.
_FORMATS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("*.gguf",), "GGUF files cannot be trained: take the safetensors checkpoint that this one was made from"),
    (
        ("consolidated*.safetensors",),
        "consolidated files are Mistral's own format: download the model's Hugging Face files (config.json and "
        "model*.safetensors), or convert it with transformers' convert_mistral_weights_to_hf",
    ),
    (
        ("consolidated*.pth",),
        "consolidated files are Meta's own format, pickled, and are not read: download the model's Hugging Face files "
        "(config.json and model*.safetensors), or convert it with transformers' convert_llama_weights_to_hf",
    ),
    (
        ("*.bin", "*.pt", "*.pth"),
        "pickled weights can run code and are not read: download the safetensors files, or convert them",
    ),
    (
        ("model-*-of-*.safetensors",),
        "parts of a model are read by its model.safetensors.index.json: download the folder again",
    ),
    (
        ("*.safetensors",),
        "weights are read from model.safetensors, or from the files that model.safetensors.index.json names: rename "
        "it if it is the whole model, or download the folder again",
    ),
)
_STATES = ("*.bin", "*.pt", "*.pth")  # beside a model these are optimizer.pt, training_args.bin and such


def list_weight_files(folder: Path) -> list[str]:
    """Return the names of a folder's files with weights of any format; not those of a trainer's state."""
    patterns = [pattern for kinds, _ in _FORMATS for pattern in kinds if pattern not in _STATES]
    return sorted({path.name for pattern in (*patterns, "pytorch_model*.bin") for path in folder.glob(pattern)})


def other_weights(folder: Path, missing: str) -> str | None:
    """One line for a folder without the file `missing` that has weights of another kind; None: it has none at all."""
    for patterns, remedy in _FORMATS:
        found = sorted(path.name for pattern in patterns for path in folder.glob(pattern) if path.is_file())
        if found:
            return f"{folder}: has {name_first(found)} but no {missing}; {remedy}"
    return None
