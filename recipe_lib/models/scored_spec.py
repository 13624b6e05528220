"""The spec of a decoder with a score head, and the config.json that says so; no torch here.

The files are those of transformers' ...ForSequenceClassification: the decoder's under `model.`, and `score.weight`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.errors import CheckpointError
from recipe_lib.models.families import FAMILIES, SCORED, read_spec, spec_from_config, text_config
from recipe_lib.models.spec import DecoderSpec, ModelSpec

_CAUSAL = "ForCausalLM"
_UNSCORED = ("olmoe",)  # families of which transformers has no such class


def head_labels(config: Mapping[str, Any]) -> int | None:
    """The rows of the score head of a checkpoint, by its config.json; None: it has none."""
    names = config.get("architectures")
    if not isinstance(names, list) or not any(str(name).endswith(SCORED) for name in names):
        return None
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, Mapping) else config.get("num_labels", 2)  # 2: transformers' default
    return count if isinstance(count, int) and count > 0 else 2


def scored_spec(config: Mapping[str, Any], where: str, num_labels: int | None) -> DecoderSpec:
    """The spec of a `config.json` with a score head of so many rows; None: as many as the checkpoint's head has.

    where: named in errors. Raises CheckpointError as `spec_from_config` does, and where the number is not known, or is
    not that of the checkpoint's head.
    """
    found = head_labels(config)
    if num_labels is None and found is None:
        raise CheckpointError(
            f"{where}: config.json: has no score head that would say how many classes there are; set "
            "reward.num_labels to their number"
        )
    if num_labels is not None and found not in (None, num_labels):
        raise CheckpointError(
            f"{where}: config.json: its score head has {found} rows, the config asks for {num_labels}; set "
            f"reward.num_labels={found}, or start from a model without one"
        )
    if config.get("model_type") in _UNSCORED:
        raise CheckpointError(
            f"{where}: config.json: transformers has no classifier of the family {config['model_type']}, so that no "
            "other program would open what is exported; start from a model of another family"
        )
    causal = dict(config)
    if found is not None:
        causal["architectures"] = [str(name).replace(SCORED, _CAUSAL) for name in config["architectures"]]
        if causal["architectures"] == ["Gemma3TextForCausalLM"]:  # the one class whose two names differ
            causal["architectures"] = ["Gemma3ForCausalLM"]
    spec = spec_from_config(causal, where)
    return replace(spec, tied=False, logit_softcap=None, num_labels=num_labels or found)


def spec_of_run(cfg: FullFinetuneConfig, config: Mapping[str, Any], where: str) -> ModelSpec:
    """The spec of a `config.json` as a run of this config has it. Raises CheckpointError, and what `read_spec` does."""
    if cfg.scores_sequences:
        return scored_spec(config, where, cfg.num_labels)
    return read_spec(config, where, cfg.model.implementation)


def score_architecture(spec: DecoderSpec) -> str:
    """The class of transformers that loads it."""
    if spec.family == "gemma3":
        return f"Gemma3Text{SCORED}"
    return FAMILIES[spec.family].architectures[0].replace(_CAUSAL, SCORED)


def score_config(config: Mapping[str, Any], names: list[str], pad_id: int | None) -> dict[str, Any]:
    """A config.json that also says the classes' names, by their numbers, and the id that padding has."""
    changed = text_config(config) | {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }
    changed.pop("num_labels", None)
    if len(names) > 1:
        changed["problem_type"] = "single_label_classification"
    return changed if pad_id is None else changed | {"pad_token_id": pad_id}


def has_score_head(spec: ModelSpec) -> TypeGuard[DecoderSpec]:
    """Whether the model has one."""
    return isinstance(spec, DecoderSpec) and spec.num_labels is not None
