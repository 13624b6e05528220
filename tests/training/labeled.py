"""Build random labeled sequences as datasets, and a small Llama in transformers and in our decoder.

Tests train both on the same sequences, transformers' by TRL, and compare their gradients.
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

VOCABULARY = 96
LIMIT = 24  # max_seq_len
PAD = 95  # id of the padding token, in no sequence
# Keys of config.json of the small Llama.
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
    """Return a dataset of random items of `group` sequences each.

    lengths: of each item the prompt's length in tokens, then those of its answers, one for each
    sequence. values: a number for each item, such as its label or margin.
    """
    generator = np.random.Generator(np.random.Philox(7))
    ids: list[np.ndarray] = []
    trained: list[np.ndarray] = []
    for prompt_length, *answers in lengths:
        prompt = generator.integers(2, PAD, prompt_length)
        for length in answers:
            answer = generator.integers(2, PAD, length)
            ids.append(np.concatenate([prompt, answer]).astype(np.int32))
            trained.append(np.repeat(np.array([0, 1], dtype=np.uint8), [prompt_length, length]))
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in ids])])
    report = DataReport("made", "made", LIMIT)
    return Dataset(
        ids=np.concatenate(ids),
        offsets=offsets,
        trained=np.concatenate(trained),
        report=report,
        settings={},
        group=group,
        values=np.array(values, dtype=np.float64),
    )


def split_parts(dataset: Dataset, number: int) -> tuple[list[int], list[int]]:
    """Return the ids of sequence `number`'s prompt and of its answer."""
    start = dataset._offsets[number]
    end = dataset._offsets[number + 1]
    ids = dataset.ids[start:end].tolist()
    answer_start = dataset._trained[start:end].tolist().index(1)
    return ids[:answer_start], ids[answer_start:]


def save_theirs(seed: int, folder: Path, **changed: Any) -> Any:
    """Save transformers' model with random weights in fp32 to a folder; return it.

    changed: keys of its config; with num_labels it is a classifier with a score head.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(seed)
    kind = LlamaForSequenceClassification if "num_labels" in changed else LlamaForCausalLM
    model = kind(LlamaConfig(**SHAPE, tie_word_embeddings=False, **changed)).float()
    model.save_pretrained(folder)
    return model


def load_ours(spec: DecoderSpec, folder: Path) -> Decoder:
    """Return our model with the weights of a folder."""
    model = build_meta(spec, torch.float32)
    allocate(model, torch.device("cpu"))
    load_weights(model, spec, folder)
    return model


def build_tokenizer() -> Any:
    """Return a tokenizer for TRL, which requires one; nothing that is compared goes through it."""
    from transformers import AutoTokenizer

    folder = Path(__file__).parents[2] / "examples" / "demo" / "tokenizer"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def assert_gradients(model: Decoder, reference: Any) -> None:
    """Assert that two models have equal gradients, to 1e-5 of the norm of each."""
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        difference = float((parameter.grad - expected[name]).norm())
        assert difference <= 1e-5 * float(expected[name].norm()) + 1e-9, name
