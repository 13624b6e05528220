"""What a run's summary says besides its metrics: the data as they were read, and the settings that were changed."""

from functools import reduce
from typing import TYPE_CHECKING, Any

from recipe_lib.config.describe import value_text
from recipe_lib.config.keys import read_schema

if TYPE_CHECKING:
    from recipe_lib.data.dataset_report import DataReport
    from recipe_lib.training.training_data import TrainingData


def data_facts(data: "TrainingData") -> dict[str, Any]:
    """Counts of the training data and, if there are any, of those for validation, as they were made into sequences.

    packs: packed sequences of the first epoch, packed_share: how much of them is tokens, not padding; without packing
    neither is there.
    """
    found = {"training": _counts(data.dataset.report)}
    if (share := data.plan.packed_share()) is not None:
        found["training"] |= {"packs": data.plan.packs(), "packed_share": share}
    if data.validation_dataset is not None:
        found["validation"] = _counts(data.validation_dataset.report)
    return found


def _counts(report: "DataReport") -> dict[str, Any]:
    return {
        "source": report.source,
        "format": report.format,
        "template": report.template,
        "max_seq_len": report.max_seq_len,
        "samples": report.samples_read,
        "sequences": report.sequences,
        "pairs": report.pairs,
        "tokens": report.tokens,
        "label_tokens": report.trained_tokens,
        "label_token_fraction": report.label_token_fraction,
        "truncated": report.truncated_sequences,
        "left_out": report.skipped_long_sequences + report.emptied_sequences,
        "bad": sum(report.bad_samples.values()),
        "duplicates": report.duplicate_sequences,
    }


def changed_settings(cfg: Any) -> dict[str, list[str]]:
    """Key -> [its value, its default] of what is not at its default, as a config writes them."""
    schema: type = type(cfg)
    found = {}
    for name, key in read_schema(schema).keys.items():
        value = reduce(getattr, name.split("."), cfg)
        if key.required or value != key.default:
            found[name] = [value_text(value), "required" if key.required else value_text(key.default)]
    return found
