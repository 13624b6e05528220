"""Pairs of random answers as a dataset, and their losses by the formulas, one answer at a time,
from full logits.
"""

import numpy as np
import torch
from torch import Tensor

from recipe_lib.data import Dataset
from recipe_lib.data.dataset_report import DataReport
from recipe_lib.methods.dpo.config import DpoConfig
from recipe_lib.models.decoder import Decoder

# Tokens of the prompt, of the chosen and of the rejected answer.
LENGTHS = [(5, 4, 6), (2, 9, 1), (7, 1, 3), (3, 3, 3), (1, 6, 8), (4, 2, 5), (6, 5, 2), (2, 7, 7)]

LOSSES = {
    "sigmoid": DpoConfig(beta=0.7),
    "sigmoid without reference": DpoConfig(beta=0.3, reference_free=True),
    "cdpo": DpoConfig(beta=0.5, label_smoothing=0.2),
    "ipo": DpoConfig(loss="ipo", beta=0.4),
    "ipo without reference": DpoConfig(loss="ipo", beta=0.4, reference_free=True),
    "simpo": DpoConfig(loss="simpo", beta=2.0, simpo_gamma=0.6),
}


def build_pairs(vocabulary: int) -> Dataset:
    """A dataset of the pairs in LENGTHS: every answer has its prompt in front, and only its own ids
    are trained.
    """
    generator = np.random.Generator(np.random.Philox(3))
    ids: list[np.ndarray] = []
    trained: list[np.ndarray] = []
    for prompt_length, *answers in LENGTHS:
        prompt = generator.integers(0, vocabulary, prompt_length)
        for length in answers:
            ids.append(
                np.concatenate([prompt, generator.integers(0, vocabulary, length)]).astype(np.int32)
            )
            trained.append(np.repeat(np.array([0, 1], dtype=np.uint8), [prompt_length, length]))
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in ids])])
    report = DataReport("made", "preference", 64)
    return Dataset(np.concatenate(ids), offsets, np.concatenate(trained), report, {}, group=2)


def answer(model: Decoder, row: tuple[Tensor, Tensor], mean: bool) -> Tensor:
    """Log-probability of one row's trained targets, from all its logits; their mean instead of
    their sum if asked.
    """
    tokens, labels = row
    log_probs = model(tokens.unsqueeze(0))[0].log_softmax(-1)
    counted = [log_probs[at, label] for at, label in enumerate(labels.tolist()) if label != -100]
    return sum(counted) / (len(counted) if mean else 1)


def compute_plain_loss(
    model: Decoder, reference: Decoder | None, rows: Dataset, cfg: DpoConfig
) -> tuple[Tensor, list[float]]:
    """Mean loss over all pairs; and the means of chosen reward, rejected reward and accuracy."""
    mean = cfg.loss in ("ipo", "simpo")
    total = torch.zeros((), dtype=torch.float64)
    numbers = np.zeros(3)
    for pair in range(rows.items):
        both = [rows[2 * pair], rows[2 * pair + 1]]
        read = [(torch.from_numpy(row.tokens).long(), torch.from_numpy(row.labels)) for row in both]
        chosen, rejected = (answer(model, row, mean) for row in read)
        with torch.no_grad():
            old = [
                answer(reference, row, mean) if reference else torch.zeros(()).double()
                for row in read
            ]
        ratio = (chosen - old[0]) - (rejected - old[1])
        if cfg.loss == "ipo":
            total = total + (ratio - 1 / (2 * cfg.beta)) ** 2
        elif cfg.loss == "simpo":
            total = total - torch.log(1 / (1 + torch.exp(-(cfg.beta * ratio - cfg.simpo_gamma))))
        else:
            right = 1 / (1 + torch.exp(-cfg.beta * ratio))
            total = total - (1 - cfg.label_smoothing) * torch.log(right)
            if cfg.label_smoothing:
                total = total - cfg.label_smoothing * torch.log(1 - right)
        rewards = [
            cfg.beta * float(new.detach() - before)
            for new, before in zip((chosen, rejected), old, strict=True)
        ]
        numbers += np.array([*rewards, rewards[0] > rewards[1]])
    return total / rows.items, (numbers / rows.items).tolist()
