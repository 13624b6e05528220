"""Small students and teachers of transformers, and command lines of runs with them."""

import json
from pathlib import Path
from typing import Any

import torch

from tests.recipes.runs import ROOT, keep_latest

STEPS, SEQUENCES = 2, 4
RECORDED = ("loss", "grad_norm", "divergence", "cross_entropy")
SHAPE = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "bos_token_id": 0,
    "eos_token_id": 1, "initializer_range": 0.2, "tie_word_embeddings": False,
}  # fmt: skip


def make_folder(folder: Path) -> Path:
    """A folder with the models, and rows to train on."""
    write_models(folder)
    write_rows(folder)
    return folder


def write_models(folder: Path) -> dict[str, str]:
    """Folders of a student and of teachers by name, made by transformers, each with the demo's
    tokenizer.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    kinds: dict[str, dict[str, Any]] = {
        "student": {},
        "teacher": {"hidden_size": 64, "num_hidden_layers": 3},
        "tied": {"hidden_size": 64, "tie_word_embeddings": True},
        "padded": {"hidden_size": 64, "vocab_size": 576},
    }
    for seed, (name, changes) in enumerate(kinds.items()):
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**SHAPE | changes)).double().save_pretrained(folder / name)
        for file in (ROOT / "examples" / "demo" / "tokenizer").iterdir():
            (folder / name / file.name).write_bytes(file.read_bytes())
    return {name: str(folder / name) for name in kinds}


def write_rows(folder: Path) -> Path:
    """Prompts and answers of different lengths."""
    path = folder / "rows.jsonl"
    rows = [
        {"prompt": f"Cat {at}: " * (1 + at % 3), "completion": "it sleeps. " * (1 + at % 4)}
        for at in range(24)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def build_arguments(folder: Path, output: Path, *overrides: str) -> list[str]:
    """Command line of a run; the word `validation` adds data for it, `{tied}` is the folder of that
    model.
    """
    models = {name: str(folder / name) for name in ("student", "teacher", "tied", "padded")}
    validation = (
        (f"validation.source={folder / 'rows.jsonl'}",) if "validation" in overrides else ()
    )
    teacher = () if "~distill.teacher" in overrides else (f"distill.teacher={models['teacher']}",)
    overrides = tuple(
        word.format(**models)
        for word in overrides
        if word not in ("validation", "~distill.teacher")
    )
    return keep_latest(
        "--config",
        str(Path(__file__).parent / "plain.yaml"),
        "recipe=distill_distributed",
        f"model.path={models['student']}",
        *teacher,
        f"data.source={folder / 'rows.jsonl'}",
        "data.format=prompt_completion",
        "data.cache=false",
        "max_seq_len=96",
        "dtype=fp64",
        "device=cpu",
        "optimizer.lr=3e-3",
        "lr_scheduler.type=constant",
        "checkpoint.save_model=false",
        "log.every_n_steps=1000",
        f"max_steps={STEPS}",
        f"batch_size={SEQUENCES}",
        f"output_dir={output}",
        *validation,
        *overrides,
    )
