"""Losses of a score head, which is read at the last token of each sequence: of pairs of answers,
and over classes.

pairwise         -log sigmoid(r_w - r_l - m)    Bradley-Terry: r the scores of a chosen and a rejected answer, m the
                                                pair's margin; plus c (r_w + r_l)^2 (arXiv
                                                2312.09244)
classification   -log softmax(scores)[class]
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from recipe_lib.adapters.lora import build_adapter_settings
from recipe_lib.config.recipes.reward_distributed import RewardConfig
from recipe_lib.config.schema import LoraConfig
from recipe_lib.data import Batch, Dataset
from recipe_lib.errors import ConfigError, DataError
from recipe_lib.logs import warn_on_first_rank
from recipe_lib.models.decoder import Decoder
from recipe_lib.models.families import count_head_labels, make_score_config
from recipe_lib.ops.chunked_heads import IGNORED
from recipe_lib.parallel.parallelize import Parallel
from recipe_lib.parallel.world import World
from recipe_lib.tokenizers import Tokenizer
from recipe_lib.training.micro_batches import result_of_each
from recipe_lib.training.resolve_model import ResolvedModel
from recipe_lib.training.training_data import TrainingData
from recipe_lib.training.validation import name_validation, sum_over_validation

_OF_PAIRS = ("loss", "reward_chosen", "reward_rejected", "accuracy")
_OF_CLASSES = ("loss", "accuracy")


def numbers_of(cfg: RewardConfig) -> tuple[str, ...]:
    """The names of what `score_loss` sums up."""
    return _OF_PAIRS if cfg.loss == "pairwise" else _OF_CLASSES


def train_score_head(model: Decoder, cfg: LoraConfig, dtype: torch.dtype) -> None:
    """Next to adapters the head is trained whole, in their type; call it on the meta model, after
    `add_adapters`.
    """
    assert model.score is not None
    model.score.to(build_adapter_settings(cfg, dtype).dtype).requires_grad_(True)


def sequence_scores(scores: Tensor, batch: Batch) -> Tensor:
    """The scores `[q, n]` in fp64 of a micro-batch's q sequences, out of those of its tokens `[b,
    s, n]`: each at the token that has its label, the last one.
    """
    if batch.sequence_ids is None:
        raise ValueError("this batch holds no sequences to score")
    count = batch.num_sequences
    places = torch.where(
        batch.labels == IGNORED, count, batch.sequence_ids
    ).flatten()  # other tokens have one of their own
    found = scores.flatten(0, 1).double()
    return found.new_zeros(count + 1, found.shape[1]).index_add(0, places, found)[:count]


def score_loss(scores: Tensor, values: Tensor, cfg: RewardConfig) -> tuple[Tensor, Tensor]:
    """The loss summed over items, a scalar with a graph, and the sums of `numbers_of` without one.

    scores: `[2 p, 1]`, chosen and rejected by turns, and values `[p]`, the margins; or `[q, n]`,
    and classes `[q]`. To be divided by the items of the whole step.
    """
    if cfg.loss == "classification":
        classes = values.long()
        loss = F.cross_entropy(scores, classes, reduction="sum")
        return loss, torch.stack([loss.detach(), (scores.argmax(dim=1) == classes).double().sum()])
    chosen, rejected = scores[0::2, 0], scores[1::2, 0]
    loss = -F.logsigmoid(chosen - rejected - values).sum()
    if cfg.center_rewards_coefficient is not None:
        loss = loss + cfg.center_rewards_coefficient * (chosen + rejected).square().sum()
    right = (chosen > rejected).double().sum()
    return loss, torch.stack([loss.detach(), chosen.detach().sum(), rejected.detach().sum(), right])


def score_metrics(means: Tensor, cfg: RewardConfig) -> dict[str, Tensor]:
    """What a step records besides its loss. means: of `numbers_of`, over all items."""
    named = dict(zip(numbers_of(cfg)[1:], means[1:], strict=True))
    if cfg.loss == "pairwise":
        named["reward_margin"] = named["reward_chosen"] - named["reward_rejected"]
    return named


def validation_scores(
    model: Decoder,
    parallel: Parallel,
    compare: Callable[[Batch], tuple[Tensor, Tensor]],
    cfg: RewardConfig,
    data: TrainingData,
    world: World,
) -> dict[str, float]:
    """Means over all validation items, each counted once; without dropout. Collective.

    compare: a micro-batch to what `score_loss` returns.
    """
    sums = torch.zeros(len(numbers_of(cfg)), device=world.device, dtype=torch.float64)
    results_of = partial(result_of_each, parallel, lambda batch: compare(batch)[1])
    _, items = sum_over_validation(model, parallel, data, results_of, sums)
    means = world.all_reduce_sum(sums) / max(1, items)
    counted = "validation_pairs" if cfg.loss == "pairwise" else "validation_sequences"
    return name_validation({"loss": means[0]} | score_metrics(means, cfg)) | {counted: items}


def describe_score_head(model: Decoder, source: ResolvedModel) -> str:
    """One line for the log."""
    spec = model.spec
    start = (
        "read from the checkpoint"
        if count_head_labels(source.config) and source.folder
        else "new, with random weights"
    )
    return (
        f"score head: {spec.num_labels} x {spec.width}, {start}; read at the last token of each"
        " sequence"
    )


def settle_items(data: TrainingData, source: ResolvedModel, cfg: RewardConfig) -> ResolvedModel:
    """Checks the samples, numbers their classes, in place, and returns the source with the
    config.json of what will be exported: the classes' names, and the id that padding has. Raises
    ConfigError or DataError.
    """
    if cfg.loss == "pairwise":
        check_pairs(data, "reward.loss=classification")
        for found in (data.dataset, data.validation_dataset):
            if found is not None and not np.isfinite(found.values).all():
                place = found.place(int(np.flatnonzero(~np.isfinite(found.values))[0]))
                raise DataError(
                    f"{place}: .margin: found no finite number, expected one, or no margin; correct"
                    " the sample"
                )
        names = ["LABEL_0"]
    else:
        names = _class_names(data.dataset, source)
        data.dataset = _numbered(data.dataset, names)
        if data.validation_dataset is not None:
            data.validation_dataset = _numbered(data.validation_dataset, names)
        names = _exported_names(names, source)
    return replace(
        source,
        config=make_score_config(source.config, names, _padding_id(data.tokenizer, data.dataset)),
    )


def check_pairs(data: TrainingData, other: str) -> None:
    """Raise ConfigError unless the samples are pairs of answers. other: what takes single ones."""
    for key, found in (("data", data.dataset), ("validation", data.validation_dataset)):
        if found is not None and found.group != 2:
            raise ConfigError(
                f"{key}.format: found {found.report.format}, whose samples hold one answer,"
                f" expected pairs of a chosen and a rejected one; set {key}.format=preference, or"
                f" {other}"
            )


def _class_names(dataset: Dataset, source: ResolvedModel) -> list[str]:
    """The names of the classes by their numbers: those of the checkpoint's head, if it knows them;
    numbers are their own, and other names are in the order of the alphabet.
    """
    found, where, wanted = (
        sorted(dataset.report.classes),
        dataset.report.source,
        getattr(source.spec, "num_labels", 0),
    )
    if len(found) < 2:
        raise DataError(
            f"{where}: found one class ({', '.join(found)}) in all samples, expected two or more;"
            " add samples of others"
        )
    numbers = [name for name in found if name.isdecimal()]
    known = source.config.get("label2id") if count_head_labels(source.config) else None
    if isinstance(known, dict) and set(found) <= set(known):
        return [name for name, _ in sorted(known.items(), key=lambda item: item[1])]
    if numbers and len(numbers) < len(found):
        other = next(name for name in found if not name.isdecimal())
        raise DataError(
            f"{where}: found classes by number ({numbers[0]}) and by name ({other}), expected one"
            " kind; name all of them, or number them from 0 on"
        )
    names = [str(number) for number in range(wanted)] if numbers else found
    if (numbers and max(map(int, numbers)) >= wanted) or len(names) != wanted:
        count = max(map(int, numbers)) + 1 if numbers else len(found)
        shown = ", ".join(
            sorted(found, key=lambda name: (len(name), name) if numbers else (0, name))[:8]
        )
        more = ", ..." if len(found) > 8 else ""
        raise ConfigError(
            f"reward.num_labels: found {wanted}, and {count} classes in {where}"
            f" ({shown}{more}{', counted from 0' if numbers else ''}); set"
            f" reward.num_labels={count}, or correct the labels"
        )
    return names


def _exported_names(names: list[str], source: ResolvedModel) -> list[str]:
    """Classes that are numbers in the samples have the checkpoint's names, or those that
    transformers gives.
    """
    known = source.config.get("id2label") if count_head_labels(source.config) else None
    known = known if isinstance(known, dict) else {}
    return [str(known.get(name, f"LABEL_{name}")) if name.isdecimal() else name for name in names]


def _numbered(dataset: Dataset, names: list[str]) -> Dataset:
    """The same with the final numbers of its classes. Raises DataError for a class that is not
    among the names.
    """
    own = dataset.report.classes
    unknown = [name for name in own if name not in names]
    if unknown:
        raise DataError(
            f"{dataset.report.source}: found the class {unknown[0]}, which no training sample has;"
            f" expected one of {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
        )
    numbers = np.array([names.index(name) for name in own], dtype=np.float64)
    return dataset.replace_values(numbers[dataset.values.astype(np.int64)])


def _padding_id(tokenizer: Tokenizer, dataset: Dataset) -> int | None:
    """The id that others are to pad with: they find a sequence's end by where padding begins, so
    that none may end with it. That of the tokenizer's padding; else a token that is for nothing
    else, or BOS.
    """
    ends = dataset.find_last_ids()
    if tokenizer.pad_id is not None and tokenizer.pad_id not in ends:
        return tokenizer.pad_id
    texts = list(tokenizer.special_texts)
    ids = {
        text: found[0]
        for text, found in zip(texts, tokenizer.encode_pieces(texts), strict=True)
        if len(found) == 1
    }
    named = [
        ids[text]
        for word in ("pad", "reserved", "unused", "unk")
        for text in ids
        if word in text.lower()
    ]
    usable = [number for number in named if number not in tokenizer.stop_ids] + [tokenizer.bos_id]
    found = [
        number
        for number in usable
        if number is not None and number not in ends | {tokenizer.eos_id}
    ]
    if not found:
        warn_on_first_rank(
            "warning: %s: has no token for padding that no sequence ends with, so that other"
            " programs may read a score before the end of a sequence that they pad; give them one"
            " sequence at a time",
            tokenizer.place,
        )
    return found[0] if found else tokenizer.pad_id


def scored_with(model: Decoder) -> Callable[[Batch], Tensor]:
    """What runs the model on a micro-batch and gives its sequences' scores `[q, n]`."""

    def run(batch: Batch) -> Tensor:
        return sequence_scores(
            model(batch.tokens, batch.positions, batch.attention, labels=batch.labels), batch
        )

    return run


def values_of(batch: Batch) -> Any:
    """The margins, classes or labels (1: wanted) of a micro-batch's items. Raises ValueError for
    one without.
    """
    if batch.targets is None:
        raise ValueError("this batch holds no labels")
    return batch.targets
