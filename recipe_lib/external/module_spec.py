"""The spec of a model that transformers, or a user's plugin, implements, read off the module that its class makes."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recipe_lib.adapters.lora import adapter_settings
from recipe_lib.config.schema import LoraConfig, ParallelConfig
from recipe_lib.errors import CheckpointError
from recipe_lib.external import adapters, build, stage_parts, weight_conversions
from recipe_lib.external.build import ModuleSource, make_module
from recipe_lib.external.find_modules import embedding_and_head
from recipe_lib.external.tensor_parallel import shard_module
from recipe_lib.external.tensor_plan.transformers_models import shrink
from recipe_lib.external.transformers_config import (
    TRANSFORMERS,
    looks_ahead,
    one_line,
    spell_config,
    transformers_config,
)
from recipe_lib.models.external_spec import ExternalSpec, StageParts, TensorLayout, WeightEntry, WrittenLayout
from recipe_lib.models.find_layers import layer_names
from recipe_lib.models.quantized_files import refuse_quantized
from recipe_lib.models.sizes import check_sizes
from recipe_lib.parallel.world import World

_MANY_POSITIONS = 2**24  # of a model whose config names no limit
_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx", "seq_length")
_STD_KEYS = ("initializer_range", "init_std", "initializer_std")


@dataclass(frozen=True)
class ModuleSpec(ExternalSpec):
    """See the class that it is derived from; each method is a function of this folder."""

    source: ModuleSource

    @property
    def implementation(self) -> str:
        return self.source.implementation

    def build(self, dtype: torch.dtype) -> nn.Module:
        return build.build_module(self.source, dtype, self)

    def first_vectors(self, seed: int) -> dict[str, Tensor]:
        return build.first_vectors(self.source, seed)

    def layer_kinds(self) -> list[str]:
        return build.layer_kinds(self.source)

    def layout(self) -> TensorLayout:
        return build.layout(self.source)

    def weight_map(self, file_names: Collection[str]) -> list[WeightEntry]:
        return weight_conversions.weight_map(self.source, file_names)

    def tied_names(self, file_names: Collection[str]) -> dict[str, str]:
        return weight_conversions.find_tied_names(self.source, file_names)

    def written_layout(self) -> WrittenLayout | None:
        return weight_conversions.writing(self.source)

    def spell_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        if self.source.implementation != TRANSFORMERS:
            return super().spell_config(config)
        return spell_config(config, self.family)

    def adapted_linears(self, cfg: LoraConfig) -> list[str]:
        held = build.layout(self.source)
        left = adapters.without_adapter(held.linears, held.uncalled, self.family)
        return adapters.adapter_targets(held.linears, cfg.target_modules, left)

    def add_adapters(self, model: Any, cfg: LoraConfig, dtype: torch.dtype) -> None:
        adapters.add_adapters(model, cfg, adapter_settings(cfg, dtype))

    def token_reader(self, model: Any, padding: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        reader: Callable[[Tensor], Tensor] = model.token_reader(padding)
        return reader

    def reads_padding(self, model: Any) -> bool:
        reads: bool = model.reads_padding
        return reads

    def shard_tensors(self, model: Any, parallel: ParallelConfig, world: World) -> dict[str, str]:
        return shard_module(model, parallel, world)

    def stage_parts(self) -> StageParts:
        return stage_parts.find_parts(self)

    def shrunk(self, layers: int = 2, keys: int = 4) -> "ModuleSpec":
        """Of a small model of the same class of transformers, with so many layers at least; keys: as in `shrink`."""
        config = shrink(transformers_config(self.source.config, self.family), layers, keys)
        return read_spec(json.loads(config.to_json_string(use_diff=False)), self.family)


def read_spec(config: Mapping[str, Any], where: str, implementation: str = TRANSFORMERS) -> ModuleSpec:
    """The spec of a model that is not native; its class is made once, without memory for parameters.

    where: the file, folder or preset, named in errors. implementation: `transformers`, or a name that is registered.

    Raises SetupError if transformers is not installed, ConfigError for a name that no plugin registered, and
    CheckpointError for a config.json that its class does not take, or a model without embedding or output projection.
    """
    refuse_quantized(config, where)
    check_sizes(config, where)
    family = str(config.get("model_type", implementation))
    if implementation == TRANSFORMERS:
        transformers_config(config, where)
    source, model = _made(dict(config), where, implementation, family)
    if implementation == TRANSFORMERS and looks_ahead(model.config):
        raise CheckpointError(
            f"{where}: config.json: model_type {family!r} lets each token see later ones, and would learn to copy "
            "them, expected a causal language model; set is_decoder to true in config.json if it was trained so"
        )
    found = embedding_and_head(model)
    if found is None:
        raise CheckpointError(
            f"{where}: {type(model).__name__} has no embedding and output projection that could be found; "
            "expected get_input_embeddings and get_output_embeddings, or nn.Embedding and nn.Linear outside the layers"
        )
    embedding, head = found
    number = _numbers(model, source.config)
    return ModuleSpec(
        family=family,
        vocab_size=embedding.weight.shape[0],
        max_positions=next(filter(None, map(number, _POSITION_KEYS)), _MANY_POSITIONS),
        init_std=float(next(filter(None, map(number, _STD_KEYS)), 0.02)),
        tied=embedding.weight is head.weight,
        num_layers=len(layer_names(model)),
        source=source,
    )


def _made(config: dict[str, Any], where: str, implementation: str, family: str) -> tuple[ModuleSource, Any]:
    """The model's module, with transformers' fused attention if its class has that."""
    first = ""
    for attention in ("sdpa", "eager"):
        source = ModuleSource(implementation, config, attention)
        try:
            return source, make_module(source)
        except (ValueError, ImportError) as error:  # a class without sdpa says so by one of these
            first = first or one_line(error)
        except (TypeError, AttributeError, RuntimeError, KeyError, IndexError, AssertionError) as error:
            raise CheckpointError(f"{where}: {family} cannot be built from config.json ({one_line(error)})") from error
    raise CheckpointError(f"{where}: {family} cannot be built ({first})")


def _numbers(model: nn.Module, config: dict[str, Any]) -> Callable[[str], Any]:
    """A number of the config by its key, with the defaults of the class; None where there is none."""
    made: Any = getattr(model, "config", None)
    made = made.get_text_config() if hasattr(made, "get_text_config") else made

    def read(key: str) -> Any:
        value = getattr(made, key, None) if not isinstance(made, dict) else None
        value = config.get(key) if value is None else value
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 else None

    return read
