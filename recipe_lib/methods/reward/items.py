"""Check and number the samples of reward models and classifiers, and make their exports' config.

The recipe `reward_distributed` calls `prepare_items` when its samples are open. An item is what the
loss counts: a pair of answers, or a sequence with a class. The export's config.json gets the
classes' names, and the id of the padding token, by which transformers finds the last token of a
padded sequence.
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
    """Check the samples and number their classes, in place; return `source` with another config.

    This is the config.json of exports, with the classes' names and the padding id. source: the
    model that is trained. Raises ConfigError if `reward.num_labels` does not fit the classes,
    DataError for samples that the loss cannot take.
    """
    if cfg.loss == "pairwise":
        check_pairs(data, "reward.loss=classification")
        for dataset in (data.dataset, data.validation_dataset):
            # The values of pairs are margins; 0 for a pair without one.
            if dataset is not None and not np.isfinite(dataset.values).all():
                sample_place = dataset.locate_item(
                    int(np.flatnonzero(~np.isfinite(dataset.values))[0])
                )
                raise DataError(
                    f"{sample_place}: .margin: found no finite number, expected one, or no margin;"
                    " correct the sample"
                )
        names = ["LABEL_0"]  # as transformers names a single label
    else:
        names = _name_classes(data.dataset, source)
        data.dataset = _number_classes(data.dataset, names)
        if data.validation_dataset is not None:
            # By the names of the training samples: validation samples may lack some classes.
            data.validation_dataset = _number_classes(data.validation_dataset, names)
        names = _name_exported_classes(names, source)
    padding_id = _find_padding_id(data.tokenizer, data.dataset)
    return replace(source, config=make_score_config(source.config, names, padding_id))


def describe_score_head(model: Decoder, source: ResolvedModel) -> str:
    """Return a line for the log on the score head: its shape, and where its weights come from.

    source: what the model was made from, a checkpoint's folder or an architecture alone.
    """
    spec = model.spec
    is_read = source.folder and count_head_labels(source.config)
    start = "read from the checkpoint" if is_read else "new, with random weights"
    return (
        f"score head: {spec.num_labels} x {spec.width}, {start}; read at the last token of each"
        " sequence"
    )


def _name_classes(dataset: Dataset, source: ResolvedModel) -> list[str]:
    """Return the names of the classes; a class is numbered by its place in the list.

    They are in the order of the checkpoint's head if this has them all. Else classes that are
    numbers keep these, and names are in the order of the alphabet. Raises DataError if there is one
    class, or numbers and names are mixed; ConfigError if `reward.num_labels` does not fit.
    """
    classes = sorted(dataset.report.classes)
    source_name = dataset.report.source
    num_labels = getattr(source.spec, "num_labels", 0)
    if len(classes) < 2:
        raise DataError(
            f"{source_name}: found one class ({', '.join(classes)}) in all samples, expected two or"
            " more; add samples of others"
        )
    # The checkpoint may have a trained score head: each of its rows stays with its class.
    label_ids = source.config.get("label2id") if count_head_labels(source.config) else None
    if isinstance(label_ids, dict) and set(classes) <= set(label_ids):
        return [name for name, _ in sorted(label_ids.items(), key=lambda item: item[1])]
    numbered = [name for name in classes if name.isdecimal()]  # classes whose names are numbers
    if numbered and len(numbered) < len(classes):
        first_name = next(name for name in classes if not name.isdecimal())
        raise DataError(
            f"{source_name}: found classes by number ({numbered[0]}) and by name ({first_name}),"
            " expected one kind; name all of them, or number them from 0 on"
        )
    # Numbers stay as they are, also where the samples lack some below the largest.
    names = [str(number) for number in range(num_labels)] if numbered else classes
    num_classes = max(map(int, numbered)) + 1 if numbered else len(classes)
    if num_classes > num_labels or len(names) != num_labels:
        # By length first, so that numbers are in the order of their size.
        shown = sorted(classes, key=lambda name: (len(name), name) if numbered else (0, name))[:8]
        ellipsis = ", ..." if len(classes) > 8 else ""
        raise ConfigError(
            f"reward.num_labels: found {num_labels}, and {num_classes} classes in {source_name}"
            f" ({', '.join(shown)}{ellipsis}{', counted from 0' if numbered else ''}); set"
            f" reward.num_labels={num_classes}, or correct the labels"
        )
    return names


def _name_exported_classes(names: list[str], source: ResolvedModel) -> list[str]:
    """Return the names of the classes for the export.

    Names stay. A class that is a number in the samples gets the name that the checkpoint's head has
    for it, or transformers' default, such as LABEL_1.
    """
    labels = source.config.get("id2label") if count_head_labels(source.config) else None
    labels = labels if isinstance(labels, dict) else {}
    return [str(labels.get(name, f"LABEL_{name}")) if name.isdecimal() else name for name in names]


def _number_classes(dataset: Dataset, names: list[str]) -> Dataset:
    """Return a dataset whose values are indices of classes in `names`.

    Raises DataError for a class that is not among the names.
    """
    classes = dataset.report.classes
    unknown = [name for name in classes if name not in names]
    if unknown:
        raise DataError(
            f"{dataset.report.source}: found the class {unknown[0]}, which no training sample has;"
            f" expected one of {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
        )
    # Until here the values are indices in `report.classes`.
    class_numbers = np.array([names.index(name) for name in classes], dtype=np.float64)
    return dataset.replace(values=class_numbers[dataset.values.astype(np.int64)])


def _find_padding_id(tokenizer: Tokenizer, dataset: Dataset) -> int | None:
    """Return the id of the token that programs which load the export are to pad with.

    It is the tokenizer's padding token, else a special token that serves no other purpose, else
    BOS. If sequences end with all of these, a warning is logged and the tokenizer's id is returned,
    None if it has none.
    """
    # transformers finds a sequence's last token by where padding begins: no sequence may end with
    # the padding token.
    last_ids = dataset.find_last_ids()
    if tokenizer.pad_id is not None and tokenizer.pad_id not in last_ids:
        return tokenizer.pad_id
    texts = list(tokenizer.special_texts)  # of special tokens
    # Text of a special token -> its id.
    ids = {
        text: pieces[0]
        for text, pieces in zip(texts, tokenizer.encode_pieces(texts), strict=True)
        if len(pieces) == 1
    }
    words = ("pad", "reserved", "unused", "unk")  # in names of tokens; the best one first
    candidates = [ids[text] for word in words for text in ids if word in text.lower()]
    candidates = [token_id for token_id in candidates if token_id not in tokenizer.stop_ids]
    unusable_ids = last_ids | {tokenizer.eos_id, None}
    usable_ids = [
        token_id for token_id in [*candidates, tokenizer.bos_id] if token_id not in unusable_ids
    ]
    if not usable_ids:
        warn_on_first_rank(
            "warning: %s: has no token for padding that no sequence ends with, so that other"
            " programs may read a score before the end of a sequence that they pad; give them one"
            " sequence at a time",
            tokenizer.place,
        )
    return usable_ids[0] if usable_ids else tokenizer.pad_id
