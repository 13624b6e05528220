"""Samples of reward models and classifiers: their checks, the numbers of the classes, and the names
and the padding that an export says.

A recipe calls `prepare_items` when its data are open.
"""

from dataclasses import replace

import numpy as np

from recipe_lib.data import Dataset
from recipe_lib.errors import ConfigError, DataError
from recipe_lib.logs import warn_on_first_rank
from recipe_lib.methods.reward.config import RewardConfig
from recipe_lib.models import Decoder, count_head_labels, make_score_config
from recipe_lib.tokenizers import Tokenizer
from recipe_lib.training.resolve_model import ResolvedModel
from recipe_lib.training.training_data import TrainingData, check_pairs


def prepare_items(data: TrainingData, source: ResolvedModel, cfg: RewardConfig) -> ResolvedModel:
    """Check the samples and number their classes, in place; return the source with the config.json
    of what will be exported: the classes' names, and the id that padding has.

    Raise ConfigError or DataError.
    """
    if cfg.loss == "pairwise":
        check_pairs(data, "reward.loss=classification")
        for dataset in (data.dataset, data.validation_dataset):
            if dataset is not None and not np.isfinite(dataset.values).all():
                place = dataset.place(int(np.flatnonzero(~np.isfinite(dataset.values))[0]))
                raise DataError(
                    f"{place}: .margin: found no finite number, expected one, or no margin; correct"
                    " the sample"
                )
        names = ["LABEL_0"]  # as transformers names a single label
    else:
        names = _name_classes(data.dataset, source)
        data.dataset = _number_classes(data.dataset, names)
        if data.validation_dataset is not None:
            # By the numbers of the training samples, of which it may have some alone.
            data.validation_dataset = _number_classes(data.validation_dataset, names)
        names = _name_exported_classes(names, source)
    padding_id = _find_padding_id(data.tokenizer, data.dataset)
    return replace(source, config=make_score_config(source.config, names, padding_id))


def describe_score_head(model: Decoder, source: ResolvedModel) -> str:
    """Return a line for the log."""
    spec = model.spec
    start = "new, with random weights"
    if count_head_labels(source.config) and source.folder:
        start = "read from the checkpoint"
    return (
        f"score head: {spec.num_labels} x {spec.width}, {start}; read at the last token of each"
        " sequence"
    )


def _name_classes(dataset: Dataset, source: ResolvedModel) -> list[str]:
    """Return the names of the classes by their numbers: those of the checkpoint's head, if it knows
    them; numbers are their own, and other names are in the order of the alphabet.
    """
    classes = sorted(dataset.report.classes)
    source_name = dataset.report.source
    num_labels = getattr(source.spec, "num_labels", 0)
    if len(classes) < 2:
        raise DataError(
            f"{source_name}: found one class ({', '.join(classes)}) in all samples, expected two or"
            " more; add samples of others"
        )
    # A head that is trained on keeps the rows that it has.
    label_ids = source.config.get("label2id") if count_head_labels(source.config) else None
    if isinstance(label_ids, dict) and set(classes) <= set(label_ids):
        return [name for name, _ in sorted(label_ids.items(), key=lambda item: item[1])]
    numbered = [name for name in classes if name.isdecimal()]
    if numbered and len(numbered) < len(classes):
        named = next(name for name in classes if not name.isdecimal())
        raise DataError(
            f"{source_name}: found classes by number ({numbered[0]}) and by name ({named}),"
            " expected one kind; name all of them, or number them from 0 on"
        )
    # Numbers are their own, also where the samples do not have all of them.
    names = [str(number) for number in range(num_labels)] if numbered else classes
    count = max(map(int, numbered)) + 1 if numbered else len(classes)
    if count > num_labels or len(names) != num_labels:
        shown = sorted(classes, key=lambda name: (len(name), name) if numbered else (0, name))[:8]
        more = ", ..." if len(classes) > 8 else ""
        raise ConfigError(
            f"reward.num_labels: found {num_labels}, and {count} classes in {source_name}"
            f" ({', '.join(shown)}{more}{', counted from 0' if numbered else ''}); set"
            f" reward.num_labels={count}, or correct the labels"
        )
    return names


def _name_exported_classes(names: list[str], source: ResolvedModel) -> list[str]:
    """Return the names of the classes as they are exported: those that are numbers in the samples
    have the checkpoint's names, or those that transformers gives.
    """
    labels = source.config.get("id2label") if count_head_labels(source.config) else None
    labels = labels if isinstance(labels, dict) else {}
    return [str(labels.get(name, f"LABEL_{name}")) if name.isdecimal() else name for name in names]


def _number_classes(dataset: Dataset, names: list[str]) -> Dataset:
    """Return the dataset with the final numbers of its classes.

    Raise DataError for a class that is not among the names.
    """
    classes = dataset.report.classes
    unknown = [name for name in classes if name not in names]
    if unknown:
        raise DataError(
            f"{dataset.report.source}: found the class {unknown[0]}, which no training sample has;"
            f" expected one of {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
        )
    # Until here the values are places in `report.classes`.
    numbers = np.array([names.index(name) for name in classes], dtype=np.float64)
    return dataset.replace_values(numbers[dataset.values.astype(np.int64)])


def _find_padding_id(tokenizer: Tokenizer, dataset: Dataset) -> int | None:
    """Return the id that others are to pad with: that of the tokenizer's padding; else of a token
    that is for nothing else, or BOS.
    """
    # Other programs find a sequence's end by where padding begins, so that none may end with it.
    ends = dataset.find_last_ids()
    if tokenizer.pad_id is not None and tokenizer.pad_id not in ends:
        return tokenizer.pad_id
    texts = list(tokenizer.special_texts)
    ids = {
        text: pieces[0]
        for text, pieces in zip(texts, tokenizer.encode_pieces(texts), strict=True)
        if len(pieces) == 1
    }
    candidates: list[int | None] = []
    for word in ("pad", "reserved", "unused", "unk"):
        candidates += [ids[text] for text in ids if word in text.lower()]
    candidates = [number for number in candidates if number not in tokenizer.stop_ids]
    taken = ends | {tokenizer.eos_id, None}
    usable = [number for number in [*candidates, tokenizer.bos_id] if number not in taken]
    if not usable:
        warn_on_first_rank(
            "warning: %s: has no token for padding that no sequence ends with, so that other"
            " programs may read a score before the end of a sequence that they pad; give them one"
            " sequence at a time",
            tokenizer.place,
        )
    return usable[0] if usable else tokenizer.pad_id
