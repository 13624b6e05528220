"""Read and make PEFT's `adapter_config.json`.

`adapter_files.read_adapter` calls `read_adapter_config(folder)`, and `peft_folders.export_adapter`
calls `make_config_fields`. Every key of the file is read (`READ`), has no effect on what an adapter
computes (`IRRELEVANT`), or is refused by name: none is silently ignored. A `FileModule` is a module
under its name in PEFT's files.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from recipe_lib.adapters.peft_names import PREFIX, FileModule, list_spellings
from recipe_lib.checkpoint.safetensors_files import Header, list_extra_names
from recipe_lib.config.local_files import ADAPTER_CONFIG, check_adapter
from recipe_lib.config.schema import LoraConfig
from recipe_lib.errors import CheckpointError, raise_faults
from recipe_lib.models.spec import SCORE
from recipe_lib.reading import describe_fault, read_json
from recipe_lib.tokenizers.chat_template import Stopped, match_apart
from recipe_lib.tokenizers.template_process import MEMORY, match_patterns

TENSOR_FILE = "adapter_model.safetensors"
# Larger values are refused.
_MAX_BYTES = 16 * 1024**2  # size of adapter_config.json
MAX_RANK = 2**20
MAX_ROWS = 2**31  # tokens of a vocabulary
# Keys that select the modules with an adapter.
SELECTING = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
# End of an error line.
_TYPE_REMEDY = "correct the key, or take the file from where the adapter was trained"
_EMPTY: tuple[Any, ...] = (None, False, "", [], {}, "none")  # values that turn a feature off
# Keys without effect on what a trained adapter computes: who made it, how its training started, how
# PEFT runs it.
IRRELEVANT = {
    "auto_mapping",
    "bias",  # which biases were trained: those are in the file
    # The next four belong to initializations that are refused, or that changed only A.
    "corda_config",
    "eva_config",
    "loftq_config",
    "lora_ga_config",
    "ensure_weight_tying",  # both matrices are in the file then
    "fan_in_fan_out",  # the class of the base's module decides
    "inference_mode",
    "lora_dropout",
    "megatron_core",  # without megatron_config
    "peft_version",
    "qalora_group_size",  # without use_qalora
    "revision",
    "runtime_config",
    "task_type",
}
# Keys that are used: they decide what an adapter computes, or name its base.
READ = {
    "alpha_pattern",
    "base_model_name_or_path",
    "exclude_modules",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_bias",
    "modules_to_save",
    "peft_type",
    "r",
    "rank_pattern",
    "target_modules",
    "target_parameters",
    "trainable_token_indices",
    "use_dora",
    "use_rslora",
}
# Remedies, the ends of error lines.
_AGAIN = "train an adapter without it"
_WITH_PEFT = f"{_AGAIN}, or merge this one with PEFT first (merge_and_unload)"
# Key of a feature that is not supported -> remedy. PEFT can merge some of these, but not all.
REFUSED = {
    "alora_invocation_tokens": _AGAIN,
    "arrow_config": _AGAIN,
    "kasa_config": _WITH_PEFT,
    # PEFT merges it into layers that share their weights, which it cannot save
    "layer_replication": _AGAIN,
    "megatron_config": _AGAIN,
    "monteclora_config": _WITH_PEFT,
    "use_bdlora": _WITH_PEFT,
    "use_qalora": _AGAIN,
    "velora_config": _WITH_PEFT,
}
_UNKNOWN = (
    "remove the key if it changes nothing, or merge the adapter with the release of PEFT that"
    " made it"
)
# Values of init_lora_weights, the adapter's initialization, that leave the frozen weights as they
# are. Others change them, so that the adapter belongs to weights of no checkpoint.
_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
# Those that change frozen weights, but that PEFT repeats, bit for bit, when it loads the adapter.
_REPEATED = ("pissa", "olora")


# Patterns come with the adapter, and some would take forever to match. So all but plain names are
# matched in the process that renders chat templates, whose time and memory are limited.

MAX_PATTERN_CHARACTERS = 10_000  # patterns that tools write have some hundreds
PATTERN_SECONDS = 10  # time limit of matching all patterns of a config with all names of a file
# A plain name, or the end of one: matching it takes time linear in its length.
_PLAIN = re.compile(r"\^?(\.\*\\\.)?([\w.]|\\\.)+\$?")


@lru_cache(maxsize=256)  # a command reads an adapter's config several times
def find_first_matches(
    patterns: tuple[str, ...], names: tuple[str, ...], where: str, *, whole: bool = False
) -> tuple[int | None, ...]:
    """Return for each name the index of the first pattern that matches it; None: none does.

    patterns: regular expressions, matched as PEFT does. where: beginning of the error. whole:
    patterns must match the full name, as `target_modules` does; otherwise its end after a dot, as
    `rank_pattern` does. Raises CheckpointError for a pattern that is no regular expression, is too
    long, or takes too long to match.
    """
    too_long = [pattern for pattern in patterns if len(pattern) > MAX_PATTERN_CHARACTERS]
    try:
        if too_long:
            answer: list[int | None] | str = (
                f"has {len(too_long[0])} characters, expected {MAX_PATTERN_CHARACTERS} at most"
            )
        elif all(_PLAIN.fullmatch(pattern) for pattern in patterns):
            answer = match_patterns(patterns, names, whole)
        else:
            answer = match_apart(patterns, names=names, whole=whole, seconds=PATTERN_SECONDS)
    except Stopped:
        answer = f"takes more than {PATTERN_SECONDS} s or {MEMORY >> 20} MiB to match"
    if isinstance(answer, str):
        raise CheckpointError(f"{where} {answer}; write the modules' names in its place")
    return tuple(answer)


@dataclass(frozen=True)
class AdapterConfig:
    """The values of an `adapter_config.json` that decide what the adapter computes."""

    # r, of modules that match no rank_pattern.
    rank: int
    # lora_alpha, of modules that match no alpha_pattern.
    alpha: float
    # True: B A is scaled by alpha / sqrt(rank), not by alpha / rank.
    rslora: bool
    # True: it is a DoRA adapter, with magnitudes.
    dora: bool
    # Name or folder of the model that it was trained on.
    base: str = ""
    # Pattern of a module's or parameter's name -> its own rank.
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    # Pattern of a module's or parameter's name -> its own alpha.
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    # Ends of the names of parameters that are adapted without their module (target_parameters).
    parameters: tuple[str, ...] = ()
    # Ends of the names of modules that are in the file as a whole (modules_to_save).
    modules_to_save: tuple[str, ...] = ()
    # End of a module's name, empty for the embedding -> tokens whose rows of its weight are in the
    # file (trainable_token_indices).
    token_rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # True: B has a bias (lora_bias).
    has_lora_bias: bool = False
    # Key of SELECTING -> its value.
    selection: Mapping[str, Any] = field(default_factory=dict)
    # The file, named in errors.
    path: Path = Path(ADAPTER_CONFIG)
    # Cache: (key of the file, name of a module) -> index of the pattern that matches it.
    _matches: dict[tuple[str, str], int | None] = field(
        default_factory=dict, compare=False, repr=False
    )

    def get_rank(self, module: FileModule) -> int:
        return int(self._find_number("rank_pattern", module, self.rank))

    def compute_scaling(self, module: FileModule) -> float:
        alpha = self._find_number("alpha_pattern", module, self.alpha)
        return compute_scaling(alpha, self.get_rank(module), self.rslora)

    def match_patterns(self, modules: Iterable[FileModule]) -> None:
        """Match the names of all modules at once, for later calls of `get_rank`.

        Patterns are matched in a separate process, which is slow to ask for each module. Raises
        CheckpointError as `find_first_matches` does.
        """
        names = list(chain.from_iterable(map(self._list_spellings, modules)))
        for key in ("rank_pattern", "alpha_pattern"):
            unmatched = [name for name in names if (key, name) not in self._matches]
            patterns = tuple(getattr(self, key))
            pattern_numbers = find_first_matches(patterns, tuple(unmatched), f"{self.path}: {key}:")
            self._matches.update(
                zip([(key, name) for name in unmatched], pattern_numbers, strict=True)
            )

    def _list_spellings(self, module: FileModule) -> list[str]:
        """Return the names under which PEFT matches patterns with a module.

        They are those of its parameter if that is adapted without the module.
        """
        parameter = module.full_name if module.parameter else f"{module.name}.weight"
        is_named = any(f".{parameter}".endswith(f".{end}") for end in self.parameters)
        return list_spellings(parameter if is_named or module.experts else module.name)

    def _find_number(self, key: str, module: FileModule, default: float) -> float:
        """Return the rank or alpha that the first matching pattern of a key gives a module.

        key: `rank_pattern` or `alpha_pattern`. default: of a module that no pattern matches.
        """
        patterns: Mapping[str, float] = getattr(self, key)
        if not patterns:
            return default
        self.match_patterns([module])
        pattern_numbers = [self._matches[key, name] for name in self._list_spellings(module)]
        matched = [number for number in pattern_numbers if number is not None]
        # As in PEFT the first pattern counts, in the order of the file.
        return list(patterns.values())[min(matched)] if matched else default


def compute_scaling(alpha: float, rank: int, rslora: bool) -> float:
    """Return alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read and check an adapter's config.

    Raises CheckpointError, with all faults at once, for values of a wrong type, missing keys, and
    features of PEFT that are not supported.
    """
    path = folder / ADAPTER_CONFIG
    fields = _read_json(path, folder)
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(
            f'{path}: peft_type: found {_show(kind)}, expected "LORA" (LoRA or DoRA); merge it into'
            " its base with the tool that made it, and take the merged model"
        )
    faults = [
        _find_key_fault(path, key, fields[key]) for key in sorted(fields.keys() - IRRELEVANT - READ)
    ]
    faults += [
        _find_start_fault(path, fields.get("init_lora_weights", True)),
        _find_layers_fault(path, fields),
    ]
    for key, is_valid, expected in _TYPES:
        if key in fields and not is_valid(fields[key]):
            faults.append(
                f"{path}: {key}: found {_show(fields[key])}, expected {expected}; {_TYPE_REMEDY}"
            )
        elif key in ("r", "lora_alpha") and key not in fields:
            faults.append(f"{path}: {key}: found no such key, expected {expected}; {_TYPE_REMEDY}")
    raise_faults(CheckpointError, faults)
    token_indices = fields.get("trainable_token_indices") or {}
    # A plain list, without names of modules, is about the embedding.
    token_rows = token_indices if isinstance(token_indices, dict) else {"": token_indices}
    config = AdapterConfig(
        rank=fields["r"],
        alpha=fields["lora_alpha"],
        rslora=fields.get("use_rslora", False),
        dora=fields.get("use_dora", False),
        base=fields.get("base_model_name_or_path") or "",
        rank_pattern=fields.get("rank_pattern") or {},
        alpha_pattern=fields.get("alpha_pattern") or {},
        parameters=tuple(fields.get("target_parameters") or ()),
        modules_to_save=tuple(fields.get("modules_to_save") or ()),
        token_rows={name: tuple(tokens) for name, tokens in token_rows.items()},
        has_lora_bias=fields.get("lora_bias", False),
        selection={key: fields.get(key) for key in SELECTING},
        path=path,
    )
    config.match_patterns([])  # refuses what is no pattern, though no module is asked for yet
    return config


# Return a line if the initialization `start` (init_lora_weights) changes frozen weights; else None.
def _find_start_fault(path: Path, start: Any) -> str | None:
    if start in _STARTS and type(start) is not int:  # 1 == True
        return None
    remedy = (
        "merge it with PEFT first (merge_and_unload), which repeats that start"
        if start in _REPEATED
        else "save it again with path_initial_model_for_weight_conversion where it was trained, or"
        " train with true"
    )
    return (
        f"{path}: init_lora_weights: {_show(start)} changes the frozen weights as well, so the"
        f" adapter does not fit the base; {remedy}"
    )


def _find_layers_fault(path: Path, fields: Mapping[str, Any]) -> str | None:
    """Return a line if PEFT refuses the file for the keys that select layers; else None."""
    keys = [key for key in ("layers_to_transform", "layers_pattern") if fields.get(key) is not None]
    if keys and isinstance(fields.get("target_modules"), str):
        return (
            f"{path}: {keys[0]}: found it beside a pattern of target_modules, which says them;"
            f" remove {keys[0]}"
        )
    pattern = fields.get("layers_pattern")
    # Another type is a fault of its own, told by another line.
    is_well_typed = isinstance(pattern, str) or _is_list_with(pattern, _is_name)
    if pattern and is_well_typed and "layers_to_transform" not in keys:
        return (
            f"{path}: layers_pattern: found no layers_to_transform, whose numbers it is for; remove"
            " layers_pattern"
        )
    return None


def _show(value: Any) -> str:
    return json.dumps(value)[:80]


def list_saved_names(header: Header) -> set[str]:
    """Return our names of the tensors in an adapter's file that are saved whole.

    They are parameters that a recipe added to the model, and the weight of a score head.
    """
    names = list_extra_names(header)
    if f"{PREFIX}{SCORE}" in header.tensors:  # which PEFT writes without a mark
        names.add(SCORE)
    return names


def _read_json(path: Path, folder: Path) -> dict[str, Any]:
    check_adapter(folder)
    try:
        fields: Any = read_json(path, _MAX_BYTES)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: not a readable JSON file ({describe_fault(error)}); fetch or export the"
            " adapter again"
        ) from error
    if not isinstance(fields, dict):
        raise CheckpointError(
            f"{path}: found a JSON {type(fields).__name__}, expected an object with peft_type"
        )
    return fields


def _find_key_fault(path: Path, key: str, value: Any) -> str | None:
    """Return why a key that is not read is refused; None if its value changes nothing."""
    # By type too: 0 == False, and a number may well change something.
    if any(value is empty or (value == empty and type(value) is type(empty)) for empty in _EMPTY):
        return None
    if key in REFUSED:
        return (
            f"{path}: {key}: found {_show(value)}, expected none: this feature of PEFT is not"
            f" supported; {REFUSED[key]}"
        )
    return (
        f"{path}: {key}: found {_show(value)}, expected no such key: what it changes is not known;"
        f" {_UNKNOWN}"
    )


def _is_number(value: Any) -> bool:
    # JSON has integers too large for a float, and infinity.
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 < value <= MAX_RANK


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_ROWS


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[\w.]+", value) is not None


def _is_list_with(value: Any, is_valid: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(is_valid, value))


def _is_module_selection(value: Any) -> bool:
    return _is_text(value) or _is_list_with(value, lambda name: isinstance(name, str))


def _is_token_list(value: Any) -> bool:
    return _is_list_with(value, _is_count) and len(set(value)) == len(value)


def _is_token_rows(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_name, value)) and all(map(_is_token_list, value.values()))
    return value is None or _is_token_list(value)


def _is_pattern_map(value: Any, is_valid: Callable[[Any], bool]) -> bool:
    return value is None or isinstance(value, dict) and all(map(is_valid, value.values()))


# Key of the file, what its value must satisfy, and how a message says that.
_TYPES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("r", _is_rank, "a positive integer"),
    ("lora_alpha", _is_number, "a number above 0"),
    ("base_model_name_or_path", _is_text, "a name"),
    ("use_rslora", _is_flag, "true or false"),
    ("use_dora", _is_flag, "true or false"),
    ("lora_bias", _is_flag, "true or false"),
    ("ensure_weight_tying", _is_flag, "true or false"),
    ("fan_in_fan_out", _is_flag, "true or false"),
    ("bias", lambda value: value in (None, "none", "all", "lora_only"), "none, all or lora_only"),
    (
        "target_parameters",
        lambda value: not isinstance(value, str) and _is_module_selection(value),
        "a list of parameters' names",
    ),
    ("target_modules", _is_module_selection, "a list of modules' names, or a pattern"),
    ("exclude_modules", _is_module_selection, "a list of modules' names, or a pattern"),
    (
        "modules_to_save",
        lambda value: value is None or _is_list_with(value, _is_name),
        "a list of modules' names",
    ),
    (
        "layers_to_transform",
        lambda value: value is None or _is_count(value) or _is_list_with(value, _is_count),
        "numbers of layers",
    ),
    (
        "layers_pattern",
        lambda value: not value or _is_name(value) or _is_list_with(value, _is_name),
        "names of lists of layers",
    ),
    ("trainable_token_indices", _is_token_rows, "numbers of tokens, none twice"),
    (
        "rank_pattern",
        lambda value: _is_pattern_map(value, _is_rank),
        "patterns with positive integers",
    ),
    (
        "alpha_pattern",
        lambda value: _is_pattern_map(value, _is_number),
        "patterns with numbers above 0",
    ),
)


def make_config_fields(
    cfg: LoraConfig,
    base: str,
    *,
    ranks: Mapping[str, int],
    target_modules: list[str] | str,
    parameters: Collection[str] = (),
    modules_to_save: Collection[str] = (),
) -> dict[str, Any]:
    """Return the contents of adapter_config.json for an adapter that is exported.

    base: name of the model that it was trained on. ranks: module -> rank of its adapter; a fused
    module has the sum of its parts' ranks. target_modules: names, or a pattern. parameters: ends of
    names of parameters that have an adapter without their module. modules_to_save: those that are
    saved whole.
    """
    # The largest: servers make room for the file's `r`. The scaling is the same everywhere.
    rank = max(ranks.values())
    rank_pattern = {
        name.rsplit(".", 1)[-1]: lower_rank
        for name, lower_rank in ranks.items()
        if lower_rank != rank
    }
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": _scale_alpha(cfg, rank),
        "use_rslora": cfg.rslora,
        "use_dora": cfg.dora,
        # PEFT refuses to open any other than 0 with target_parameters.
        "lora_dropout": 0.0 if parameters else cfg.dropout,
        "target_modules": target_modules,
        "target_parameters": sorted(set(parameters)) or None,
        "rank_pattern": rank_pattern,
        "alpha_pattern": {
            name: _scale_alpha(cfg, lower_rank) for name, lower_rank in rank_pattern.items()
        },
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": list(modules_to_save) or None,
        "layers_to_transform": None,
        "layers_pattern": None,
    }


def _scale_alpha(cfg: LoraConfig, rank: int) -> float:
    """Return the alpha with which an adapter of this rank is scaled as one of `cfg.rank` is."""
    alpha = cfg.alpha * (math.sqrt(rank / cfg.rank) if cfg.rslora else rank / cfg.rank)
    # As PEFT writes it: 16, not 16.0.
    return int(alpha) if alpha == int(alpha) else alpha
