"""Write small students and teachers, and build command lines that distill them.

`make_folder(tmp_path)` writes all models and rows that the command line of `build_arguments` names.
"""

import json
from pathlib import Path
from typing import Any

import torch

from tests.recipes.runs import ROOT, keep_latest

STEPS = 2
SEQUENCES = 4  # of a micro-batch
# Names of the metrics that runs are compared by.
RECORDED = ("loss", "grad_norm", "divergence", "cross_entropy")
SHAPE = {  # keys of config.json of the student
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


def make_folder(folder: Path) -> Path:
    """Write the models and rows to train on into the folder; return it."""
    write_models(folder)
    write_rows(folder)
    return folder


def write_models(folder: Path) -> dict[str, str]:
    """Write a student and teachers with transformers; return their folders by name.

    Each has the demo's tokenizer. The teacher "tied" has the embedding as its head, "padded" has
    more rows of the vocabulary than the student.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    kinds: dict[str, dict[str, Any]] = {  # name -> keys that differ from SHAPE
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
    """Write prompts and answers of different lengths as rows.jsonl; return its path."""
    path = folder / "rows.jsonl"
    rows = []
    for number in range(24):
        prompt = f"Cat {number}: " * (1 + number % 3)
        rows.append({"prompt": prompt, "completion": "it sleeps. " * (1 + number % 4)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def build_arguments(folder: Path, output: Path, *overrides: str) -> list[str]:
    """Return the command line of a run. folder: of `make_folder`. output: the run's folder.

    The override `validation` adds data to validate on, `~distill.teacher` leaves out the teacher,
    and `{tied}` in an override is the folder of that model.
    """
    models = {name: str(folder / name) for name in ("student", "teacher", "tied", "padded")}
    words = [
        override.format(**models)
        for override in overrides
        if override not in ("validation", "~distill.teacher")
    ]
    if "validation" in overrides:
        words.insert(0, f"validation.source={folder / 'rows.jsonl'}")
    if "~distill.teacher" not in overrides:
        words.insert(0, f"distill.teacher={models['teacher']}")
    return keep_latest(
        "--config",
        str(Path(__file__).parent / "plain.yaml"),
        "recipe=distill_distributed",
        f"model.path={models['student']}",
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
        *words,
    )
