"""Build pairs of random answers as a dataset, and compute losses of DPO's kind by their formulas.

`compute_plain_loss` is the reference of the library's loss: it computes one answer at a time, from
full logits.
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

LOSSES = {  # name of a case -> the settings of its loss
    "sigmoid": DpoConfig(beta=0.7),
    "sigmoid without reference": DpoConfig(beta=0.3, reference_free=True),
    "cdpo": DpoConfig(beta=0.5, label_smoothing=0.2),
    "ipo": DpoConfig(loss="ipo", beta=0.4),
    "ipo without reference": DpoConfig(loss="ipo", beta=0.4, reference_free=True),
    "simpo": DpoConfig(loss="simpo", beta=2.0, simpo_gamma=0.6),
}


def build_pairs(vocabulary: int) -> Dataset:
    """Return a dataset of the pairs in LENGTHS: each item is two sequences.

    Every answer's sequence begins with the prompt; only the answer's ids are labels.
    """
    generator = np.random.Generator(np.random.Philox(3))
    ids: list[np.ndarray] = []
    trained: list[np.ndarray] = []
    for prompt_length, *answers in LENGTHS:
        prompt = generator.integers(0, vocabulary, prompt_length)
        for length in answers:
            answer_ids = generator.integers(0, vocabulary, length)
            ids.append(np.concatenate([prompt, answer_ids]).astype(np.int32))
            trained.append(np.repeat(np.array([0, 1], dtype=np.uint8), [prompt_length, length]))
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in ids])])
    report = DataReport("made", "preference", 64)
    return Dataset(
        ids=np.concatenate(ids),
        offsets=offsets,
        trained=np.concatenate(trained),
        report=report,
        settings={},
        group=2,
    )


def score_answer(model: Decoder, row: tuple[Tensor, Tensor], mean: bool) -> Tensor:
    """Return the sum, or the mean, of the log-probabilities of one row's labels.

    row: (tokens, labels), int64 `[s]`; labels are -100 where there is none.
    """
    tokens, labels = row
    log_probs = model(tokens.unsqueeze(0))[0].log_softmax(-1)
    label_log_probs = [
        log_probs[position, label]
        for position, label in enumerate(labels.tolist())
        if label != -100
    ]
    return sum(label_log_probs) / (len(label_log_probs) if mean else 1)


def compute_plain_loss(
    model: Decoder, reference: Decoder | None, rows: Dataset, cfg: DpoConfig
) -> tuple[Tensor, list[float]]:
    """Return the mean loss over all pairs, and the means of the metrics.

    The metrics are chosen reward, rejected reward and accuracy. reference: the model whose
    log-probabilities are subtracted; None for a loss without one.
    """
    mean = cfg.loss in ("ipo", "simpo")
    total = torch.zeros((), dtype=torch.float64)
    metrics = np.zeros(3)
    for pair in range(rows.items):
        answers = [
            (torch.from_numpy(row.tokens).long(), torch.from_numpy(row.labels))
            for row in (rows[2 * pair], rows[2 * pair + 1])
        ]
        chosen, rejected = (score_answer(model, row, mean) for row in answers)
        reference_chosen = torch.zeros((), dtype=torch.float64)
        reference_rejected = torch.zeros((), dtype=torch.float64)
        if reference:
            with torch.no_grad():
                reference_chosen, reference_rejected = (
                    score_answer(reference, row, mean) for row in answers
                )
        ratio = (chosen - reference_chosen) - (rejected - reference_rejected)
        if cfg.loss == "ipo":
            total = total + (ratio - 1 / (2 * cfg.beta)) ** 2
        elif cfg.loss == "simpo":
            total = total - torch.log(1 / (1 + torch.exp(-(cfg.beta * ratio - cfg.simpo_gamma))))
        else:
            preference = 1 / (1 + torch.exp(-cfg.beta * ratio))
            total = total - (1 - cfg.label_smoothing) * torch.log(preference)
            if cfg.label_smoothing:
                total = total - cfg.label_smoothing * torch.log(1 - preference)
        chosen_reward = cfg.beta * float(chosen.detach() - reference_chosen)
        rejected_reward = cfg.beta * float(rejected.detach() - reference_rejected)
        accuracy = float(chosen_reward > rejected_reward)
        metrics += np.array([chosen_reward, rejected_reward, accuracy])
    return total / rows.items, (metrics / rows.items).tolist()
