"""`adapter_config.json` as PEFT writes it: what of it changes what an adapter computes, and what we refuse by name."""

import json
import math
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipe_lib.adapters.peft_names import PREFIX, FileModule, spellings
from recipe_lib.checkpoint.tensor_files import Header, read_header
from recipe_lib.checkpoint.weights_in import extra_names
from recipe_lib.config.local_files import check_adapter
from recipe_lib.config.schema import LoraConfig
from recipe_lib.errors import CheckpointError
from recipe_lib.models.spec import SCORE
from recipe_lib.reading import describe_fault, read_json

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
_MAX_BYTES = 16 * 1024**2
MAX_RANK = 2**20
# Keys that change nothing for us: who made it, how A and B began, how the library is to run. What the others stand for
# is either read below, or we do not have it: then any value but these is refused.
_EMPTY: tuple[Any, ...] = (None, False, "", [], {}, "none")
_IRRELEVANT = {
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
}
_READ = {
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "init_lora_weights",
    "target_parameters",
}
# Other starts change the frozen weights, so that the adapter belongs to weights that are in no checkpoint.
_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class AdapterConfig:
    """The numbers of an adapter.

    rank_pattern, alpha_pattern: pattern of a module's or parameter's name -> its own rank or alpha. parameters: ends of
    the names of those that have an adapter by themselves, as experts'.
    """

    rank: int
    alpha: float
    rslora: bool
    dora: bool
    base: str = ""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()

    def rank_of(self, module: FileModule) -> int:
        """The rank of a module's adapter."""
        return int(_matching(self.rank_pattern, self._key(module), self.rank))

    def scaling_of(self, module: FileModule) -> float:
        """What the product of its two matrices is multiplied by."""
        return scaling(_matching(self.alpha_pattern, self._key(module), self.alpha), self.rank_of(module), self.rslora)

    def _key(self, module: FileModule) -> str:
        """The name that PEFT compares patterns with: of the parameter, where that has the adapter."""
        named = any(f".{module.full_name}".endswith(f".{end}") for end in self.parameters)
        return module.full_name if named or module.experts else module.name


def scaling(alpha: float, rank: int, rslora: bool) -> float:
    """alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def _matching(patterns: Mapping[str, float], name: str, default: float) -> float:
    names = spellings(name)
    for pattern, value in patterns.items():
        if any(re.fullmatch(rf"(.*\.)?({pattern})", other) for other in names):
            return value
    return default


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Reads and checks the file. Raises CheckpointError, all faults at once, also for what PEFT has and we have not."""
    path = folder / CONFIG_FILE
    fields = _read_json(path, folder)
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f'{path}: peft_type: found {json.dumps(kind)[:80]}, expected "LORA" (LoRA or DoRA)')
    ignored = _IRRELEVANT | _READ | ({"modules_to_save"} if saved_extras(folder) else set())
    faults = [_unsupported(path, key, value) for key, value in sorted(fields.items()) if key not in ignored]
    start = fields.get("init_lora_weights", True)
    if start not in _STARTS or isinstance(start, int) and not isinstance(start, bool):
        faults.append(
            f"{path}: init_lora_weights: {json.dumps(start)[:80]} changes the frozen weights as well, so the adapter "
            "does not fit the base; convert it with PEFT (path_initial_model_for_weight_conversion)"
        )
    for key, test, expected in _NUMBERS:
        if key in fields and not test(fields[key]) or key in ("r", "lora_alpha") and key not in fields:
            found = json.dumps(fields[key])[:80] if key in fields else "no such key"
            faults.append(f"{path}: {key}: found {found}, expected {expected}; export the adapter again")
    if any(faults):
        raise CheckpointError(*(fault for fault in faults if fault))
    return AdapterConfig(
        rank=fields["r"],
        alpha=fields["lora_alpha"],
        rslora=fields.get("use_rslora", False),
        dora=fields.get("use_dora", False),
        base=str(fields.get("base_model_name_or_path") or ""),
        rank_pattern=fields.get("rank_pattern") or {},
        alpha_pattern=fields.get("alpha_pattern") or {},
        parameters=tuple(fields.get("target_parameters") or ()),
    )


def saved_extras(folder: Path) -> set[str]:
    """The names of the extra parameters in an adapter's file, which a recipe added to the model."""
    path = folder / TENSOR_FILE
    return saved_names(read_header(path)) if path.is_file() else set()


def saved_names(header: Header) -> set[str]:
    """The tensors of an adapter's file that are no adapter's: extra parameters, and the weight of a score head, which
    PEFT writes without a mark."""
    return extra_names(header) | ({SCORE} if f"{PREFIX}{SCORE}" in header.tensors else set())


def _read_json(path: Path, folder: Path) -> dict[str, Any]:
    check_adapter(folder)
    try:
        fields: Any = read_json(path, _MAX_BYTES)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: not a readable JSON file ({describe_fault(error)}); fetch or export the adapter again"
        ) from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path}: found a JSON {type(fields).__name__}, expected an object with peft_type")
    return fields


def _unsupported(path: Path, key: str, value: Any) -> str | None:
    if any(value is empty or (value == empty and type(value) is type(empty)) for empty in _EMPTY):
        return None
    return (
        f"{path}: {key}: found {json.dumps(value)[:80]}, expected none: this feature of PEFT is not supported; train "
        "an adapter without it, or merge this one with PEFT first"
    )


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
    )  # an integer of JSON may be too large for a float


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_RANK


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _are_names(value: Any) -> bool:
    return value is None or isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_pattern_of(value: Any, test: Any) -> bool:
    return (
        value is None or isinstance(value, dict) and all(_compiles(key) and test(item) for key, item in value.items())
    )


def _compiles(pattern: str) -> bool:
    """A plain part of a name, after anything or not: a pattern of a stranger's file may run for hours, so only these
    few signs are taken."""
    return re.fullmatch(r"\^?(\.\*\\\.)?[\w.\\]+\$?", pattern) is not None and _is_regex(pattern)


def _is_regex(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


_NUMBERS = (
    ("r", _is_rank, "a positive integer"),
    ("lora_alpha", _is_number, "a number above 0"),
    ("use_rslora", _is_flag, "true or false"),
    ("use_dora", _is_flag, "true or false"),
    ("target_parameters", _are_names, "a list of parameters' names"),
    ("rank_pattern", lambda value: _is_pattern_of(value, _is_rank), "module names with positive integers"),
    ("alpha_pattern", lambda value: _is_pattern_of(value, _is_number), "module names with numbers above 0"),
)


def write_fields(
    cfg: LoraConfig,
    base: str,
    modules: Mapping[str, int],
    target_modules: list[str] | str,
    saved: Collection[str] = (),
) -> dict[str, Any]:
    """The file's contents. modules: name -> rank of its adapter, where fused ones have their parts' ranks together.

    saved: modules that are in the file as they are.

    The largest rank is the file's `r`, since servers make room for it; scaling is the same everywhere.
    """
    rank = max(modules.values())
    other = {name.rsplit(".", 1)[-1]: own for name, own in modules.items() if own != rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": _alpha(cfg, rank),
        "use_rslora": cfg.rslora,
        "use_dora": cfg.dora,
        "lora_dropout": cfg.dropout,
        "target_modules": target_modules,
        "rank_pattern": other,
        "alpha_pattern": {name: _alpha(cfg, own) for name, own in other.items()},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": list(saved) or None,
        "layers_to_transform": None,
        "layers_pattern": None,
    }


def _alpha(cfg: LoraConfig, rank: int) -> float:
    """The alpha with which an adapter of this rank is scaled as one of `cfg.rank` is."""
    alpha = cfg.alpha * (math.sqrt(rank / cfg.rank) if cfg.rslora else rank / cfg.rank)
    return int(alpha) if alpha == int(alpha) else alpha
