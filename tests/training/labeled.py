"""Random sequences with labels as datasets, a small Llama of transformers, and ours with the same
weights.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipe_lib.checkpoint.huggingface import load_weights
from recipe_lib.data import Dataset
from recipe_lib.data.dataset_report import DataReport
from recipe_lib.models import build_meta
from recipe_lib.models.decoder import Decoder
from recipe_lib.models.meta_init import allocate
from recipe_lib.models.spec import DecoderSpec

VOCABULARY, LIMIT, PAD = 96, 24, 95
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": PAD,
}


def build_sequences(lengths: list[tuple[int, ...]], values: list[float], group: int = 1) -> Dataset:
    """lengths: of each item the prompt's, then those of its answers, one for each of its `group`
    sequences.
    """
    generator = np.random.Generator(np.random.Philox(7))
    ids, trained = list[np.ndarray](), list[np.ndarray]()
    for prompt_length, *answers in lengths:
        prompt = generator.integers(2, PAD, prompt_length)
        for length in answers:
            ids.append(
                np.concatenate([prompt, generator.integers(2, PAD, length)]).astype(np.int32)
            )
            trained.append(np.repeat(np.array([0, 1], dtype=np.uint8), [prompt_length, length]))
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in ids])])
    report = DataReport("made", "made", LIMIT)
    arrays = np.concatenate(ids), offsets, np.concatenate(trained)
    return Dataset(*arrays, report, {}, group=group, values=np.array(values, dtype=np.float64))


def split_parts(dataset: Dataset, number: int) -> tuple[list[int], list[int]]:
    """The ids of a sequence's prompt and of its answer."""
    start, end = dataset._offsets[number], dataset._offsets[number + 1]
    ids, trained = dataset.ids[start:end].tolist(), dataset._trained[start:end].tolist()
    first = trained.index(1)
    return ids[:first], ids[first:]


def save_theirs(seed: int, folder: Path, **changed: Any) -> Any:
    """A model of transformers with random weights in fp32, saved to a folder; with num_labels it
    has a score head.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(seed)
    kind = LlamaForSequenceClassification if "num_labels" in changed else LlamaForCausalLM
    model = kind(LlamaConfig(**SHAPE, tie_word_embeddings=False, **changed)).float()
    model.save_pretrained(folder)
    return model


def load_ours(spec: DecoderSpec, folder: Path) -> Decoder:
    """The model in a folder."""
    model = build_meta(spec, torch.float32)
    allocate(model, torch.device("cpu"))
    load_weights(model, spec, folder)
    return model


def build_tokenizer() -> Any:
    """For TRL, which wants one; nothing of what is compared goes through it."""
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(
        Path(__file__).parents[2] / "examples" / "demo" / "tokenizer"
    )
    made.pad_token = made.eos_token
    return made


def assert_gradients(found: Decoder, expected: Any) -> None:
    """Of all parameters, by transformers' names, to 1e-5 of each one's norm."""
    wanted = {name: parameter.grad for name, parameter in expected.named_parameters()}
    for name, parameter in found.named_parameters():
        assert parameter.grad is not None
        assert (
            float((parameter.grad - wanted[name]).norm())
            <= 1e-5 * float(wanted[name].norm()) + 1e-9
        ), name
