"""Runs on documents: packed and long, the loss is that of transformers' model on each document
alone.
"""

import json
from pathlib import Path

import pytest
import torch

from recipe_lib.config.schema import DataConfig
from recipe_lib.data import build_dataset
from recipe_lib.data.data_plan import pack
from recipe_lib.tokenizers import load_tokenizer
from tests.recipes.labeled_runs import build_arguments, write
from tests.recipes.runs import FULL, ROOT, read_metrics, run_here

LIMIT = 32
WORDS = "alpha beta gamma delta river stone cloud seven".split()
TEXTS = [
    " ".join(WORDS[(7 * at + n) % 8] for n in range(length))
    for at, length in enumerate((40, 3, 2, 11, 5, 23, 1))
]


def measure_documents(folder: Path) -> tuple[float, int]:
    """The summed loss of transformers' model over the documents, each in pieces that see nothing
    else; and targets.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples" / "demo" / "tokenizer")
    total, targets = 0.0, 0
    for text in TEXTS:
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        for start in range(0, len(ids) - 1, LIMIT):
            piece = torch.tensor([ids[start : start + LIMIT + 1]])
            with torch.no_grad():
                logits = model(piece[:, :-1]).logits[0]
            total += float(torch.nn.functional.cross_entropy(logits, piece[0, 1:], reduction="sum"))
            targets += piece.shape[1] - 1
    return total, targets


@pytest.mark.parametrize("packing", [True, False])
def test_documents_in_a_pack_do_not_see_each_other(tmp_path: Path, packing: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = json.loads((ROOT / "tests" / "recipes" / "tiny.json").read_text())
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**shape | {"initializer_range": 0.3})).double().save_pretrained(
        tmp_path / "model"
    )
    expected, targets = measure_documents(tmp_path / "model")
    rows = write(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    cfg = DataConfig(source=str(rows), format="text", cache=False)
    lengths = build_dataset(
        cfg, load_tokenizer(ROOT / "examples" / "demo" / "tokenizer"), LIMIT
    ).lengths
    assert lengths.sum() == targets
    slots = len(pack(lengths, LIMIT)) if packing else len(lengths)
    assert (slots < len(lengths)) is packing
    settings = [
        f"max_seq_len={LIMIT}",
        "max_steps=1",
        f"batch_size={slots}",
        f"data.packing={packing}".lower(),
    ]
    argv = build_arguments(rows, tmp_path / "run", FULL, "data.format=text", *settings)
    argv = [word for word in argv if not word.startswith(("model.preset", "data.template"))]
    run = run_here([*argv, f"model.path={tmp_path / 'model'}"])
    assert run.code == 0, run.said
    assert read_metrics(tmp_path / "run")[0]["loss"] == pytest.approx(expected / targets, rel=1e-7)
