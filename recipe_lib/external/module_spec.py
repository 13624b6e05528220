"""Describe a model that transformers, or a user's plugin (a file that registers a class), has.

`models.families.read_spec` calls `read_spec` here where `model.implementation` is not native. It
builds the class on meta and reads sizes, layers and tied weights off it. Code that loads, adapts
and shards models calls the methods of the `ModuleSpec`. `checkpoint_layout` maps the tensors of
checkpoint files to parameters, by transformers' own table of conversions.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from recipe_lib.adapters.lora import build_adapter_settings
from recipe_lib.config.scan_packages import describe_scans
from recipe_lib.config.schema import ROUTER, LoraConfig, ParallelConfig
from recipe_lib.data import check_packing_isolation
from recipe_lib.errors import CheckpointError, SetupError
from recipe_lib.external import stage_parts
from recipe_lib.external.build import ExternalModel
from recipe_lib.external.checkpoint_layout import (
    Reading,
    build_layout,
    find_reading,
    find_written_layout,
)
from recipe_lib.external.document_batches import carries_state
from recipe_lib.external.inspection import (
    TRANSFORMERS,
    add_adapters,
    build_transformers_config,
    find_embedding_and_head,
    format_one_line,
    is_encoder,
    list_linear_targets,
    list_without_adapter,
    select_adapter_targets,
    spell_config,
)
from recipe_lib.external.modules import ModuleSource, find_needless_parts, get_module, make_module
from recipe_lib.external.proven_plan import infer_proven_plan
from recipe_lib.external.routers import record_routers, refuse_frozen_routers
from recipe_lib.external.scan_kernels import (
    check_scan_kernels,
    list_scan_packages,
)
from recipe_lib.external.tensor_parallel import shard_module
from recipe_lib.external.tensor_plan.small_models import shrink
from recipe_lib.models import allocate, build_meta, init_weights
from recipe_lib.models.config_fields import check_sizes, refuse_quantized
from recipe_lib.models.language_model import list_layer_names
from recipe_lib.models.meta_init import seed_host_generators
from recipe_lib.models.mixture import Routers
from recipe_lib.models.spec import (
    ExternalSpec,
    StageParts,
    TensorLayout,
    TextModel,
    WeightEntry,
    WrittenLayout,
)
from recipe_lib.models.weight_names import NOT_TEXT
from recipe_lib.parallel.world import World

_MANY_POSITIONS = 2**24  # tokens; the longest sequence of a model whose config names no limit
# Keys under which configs of transformers give the longest sequence, in tokens.
_POSITION_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "n_ctx",
    "seq_length",
)
# Keys under which they give the standard deviation of random weights.
_STD_KEYS = ("initializer_range", "init_std", "initializer_std")


@dataclass(frozen=True)
class ModuleSpec(ExternalSpec):
    """A model of transformers or of a plugin, as the library asks for it."""

    source: ModuleSource  # the implementation's name, the config and the kind of attention
    # (package, version) of the kernels that its scans have; None: it is not here.
    scan_packages: tuple[tuple[str, str | None], ...] = ()

    def build(self, dtype: torch.dtype) -> nn.Module:
        """Build the model on meta, with parameters of `dtype` and our call signature.

        The values of buffers, as the class' constructor computed them, are in the model's
        `computed_buffers`. `parallel.materialize` puts them back, in their own types. Parts of a
        multimodal model that text does not run through (`other_parts`) are frozen.
        """
        model = make_module(self.source, dtype)
        buffers = dict(model.named_buffers())
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = torch.empty_like(buffer, device="meta")
        external_model = ExternalModel.adopt(model, self, self.source.config, buffers)
        for name in external_model.other_parts:
            external_model.get_submodule(name).requires_grad_(False)
        return external_model

    @torch.no_grad()
    def make_first_vectors(self, seed: int) -> dict[str, Tensor]:
        """Return initial values of all parameters of fewer than two dimensions, by name.

        The class' own `_init_weights`, or its modules' `reset_parameters`, computes them. Random
        ones depend on the seed and the module's name alone. Where a class has neither function,
        biases are 0 and other parameters 1.
        """
        model: Any = make_module(self.source)
        vectors: dict[str, Tensor] = {}
        for prefix, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dim() < 2 and parameter.is_floating_point():
                    value = torch.full(parameter.shape, 0.0 if "bias" in name else 1.0)
                    module._parameters[name] = nn.Parameter(value, False)
                    vectors[f"{prefix}.{name}" if prefix else name] = value
        if hasattr(model, "_init_weights") and not hasattr(model.config, "initializer_range"):
            # Some multimodal classes read it there, and only the text model's config has it.
            model.config.initializer_range = self.init_std
        # Children before their parents, as in torch's `Module.apply`.
        for name, module in reversed(list(model.named_modules())):
            with seed_host_generators(f"{seed}/{name}"):
                if hasattr(model, "_init_weights"):
                    model._init_weights(module)
                elif any(True for _ in module.parameters(recurse=False)) and hasattr(
                    module, "reset_parameters"
                ):
                    module.reset_parameters()
        return vectors

    def build_weight_map(self, file_names: Collection[str]) -> list[WeightEntry]:
        """Return an entry for each tensor of the model: where checkpoint files have it.

        file_names: names of all tensors in the files; empty: files that are to be written. The
        names may be the model's own, these without its `base_model_prefix` (`model.`), or those
        that transformers converts when it reads the files. A tied weight is under any of its names.
        A buffer that the files lack has no entry, and keeps the value its constructor computed.
        """
        layout = self.layout()
        in_file = frozenset(file_names)
        prefix = layout.prefix
        lacks_prefix = bool(in_file and prefix) and not any(
            name.startswith(prefix) for name in in_file
        )
        reading = (find_reading(self.source, in_file) if in_file else None) or Reading({}, {})
        entries = []
        for name in layout.shapes:
            names = layout.names.get(name, (name,))
            spellings = [alias.removeprefix(prefix) if lacks_prefix else alias for alias in names]
            file_name = next(
                (spelling for spelling in spellings if spelling in in_file), spellings[0]
            )
            # A name that transformers' table gives replaces the one found above.
            file_name = next(
                (reading.renamed[alias] for alias in names if alias in reading.renamed), file_name
            )
            conversion = next(
                (reading.made[alias] for alias in names if alias in reading.made), None
            )
            if conversion is not None and file_name not in in_file:
                entries.append(WeightEntry(name, conversion.names()[0], made=conversion))
            elif not (in_file and name in layout.buffers and file_name not in in_file):
                entries.append(WeightEntry(name, file_name))
        return entries

    def tied_names(self, file_names: Collection[str]) -> dict[str, str]:
        """Return name in the files -> parameter, for all names that a tied weight may have.

        These are the model's names, and those of files whose tensors transformers renames.
        """
        tied = self.layout().tied_names()
        reading = find_reading(self.source, frozenset(file_names)) or Reading({}, {})
        return tied | {
            reading.renamed[name]: parameter
            for name, parameter in tied.items()
            if name in reading.renamed
        }

    def explain_unread(self, file_names: Collection[str]) -> dict[str, str]:
        """Return name in the files -> why the model does not read it; unknown names are left out.

        The class lists patterns of names that it does not read. Other names are those of parts that
        text does not run through.
        """
        has_parts = bool(find_needless_parts(self.source))
        full_source = replace(self.source, has_all_parts=has_parts)
        patterns = build_layout(full_source).unread  # of the parts, too
        reasons = {
            name: "its class in transformers does not read it"
            for name in file_names
            if any(re.search(pattern, name) for pattern in patterns)
        }
        if not has_parts:
            return reasons
        in_file = frozenset(file_names)
        reading = find_reading(full_source, in_file) or Reading({}, {})
        part_names = set(build_layout(full_source).shapes) | set(reading.renamed.values())
        part_names.update(*(conversion.names() for conversion in reading.made.values()))
        return dict.fromkeys(part_names & in_file, NOT_TEXT) | reasons

    def shard_tensors(self, model: Any, parallel: ParallelConfig, world: World) -> dict[str, str]:
        """Shard a meta model over tensor-parallel ranks, in place, by a plan that is proven first.

        Returns name of a parameter -> "sharded", "full" or "partial": what its gradient on a rank
        is. Raises ConfigError and SetupError, see `infer_proven_plan` and `shard_module`.
        """
        return shard_module(
            model, plan=infer_proven_plan(model, parallel, world), parallel=parallel, world=world
        )

    # `ExternalSpec` documents the methods below.

    def is_multimodal(self) -> bool:
        return bool(find_needless_parts(self.source))

    def find_text_model(self) -> TextModel | None:
        return _find_text_model(self.source) if self.is_multimodal() else None

    def build_shrunk(self, min_layers: int = 2, num_key_heads: int = 4) -> "ModuleSpec":
        config = shrink(
            build_transformers_config(self.source.config, self.family), min_layers, num_key_heads
        )
        # Of some layers by their index; without them a class derives them from the kinds of layers.
        small = json.loads(
            config.to_json_string(use_diff=False),
            object_hook=lambda part: {
                key: value
                for key, value in part.items()
                if key not in ("per_layer_config", "hybrid_layer_ids")
            },
        )
        return read_spec(small, self.family)

    def check_packing(self, tensor_ranks: int, *, compiled: bool) -> None:
        if self.source.implementation != TRANSFORMERS:
            return
        if _check_packing(self) and (tensor_ranks > 1 or compiled):
            raise SetupError(
                f"data.packing: {self.architecture} carries a state along a sequence, which"
                " tensor-parallel ranks and compiled layers do not restart at a document; set"
                " parallel.tensor=1 and compile=false, or data.packing=auto, which packs where the"
                " run can"
            )

    def describe_scans(self, device_type: str) -> str:
        return describe_scans(dict(self.scan_packages), device_type) if self.scan_packages else ""

    def list_layer_kinds(self) -> list[str]:
        model: Any = get_module(self.source)
        types = getattr(getattr(model, "config", None), "layer_types", None)
        kinds = []
        for index, name in enumerate(list_layer_names(model)):
            layer = model.get_submodule(name)
            shapes = [
                (parameter_name, tuple(parameter.shape))
                for parameter_name, parameter in layer.named_parameters()
            ]
            kind = types[index] if types and index < len(types) else ""
            kinds.append(f"{type(layer).__name__} {kind} {shapes}")
        return kinds

    def layout(self) -> TensorLayout:
        return build_layout(self.source)

    def build_written_layout(self) -> WrittenLayout | None:
        return find_written_layout(self.source)

    def spell_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        if self.source.implementation != TRANSFORMERS:
            return dict(config)  # a plugin has one name for a key
        return spell_config(config, self.family)

    def list_adapted_linears(self, cfg: LoraConfig) -> list[str]:
        layout = self.layout()
        return select_adapter_targets(
            layout.linears,
            list_linear_targets(cfg, layout),
            list_without_adapter(layout, layout.uncalled, self.family),
        )

    def add_adapters(self, model: Any, cfg: LoraConfig, dtype: torch.dtype) -> None:
        if ROUTER in cfg.target_modules and self.layout().routers:
            refuse_frozen_routers(self)
        add_adapters(model, cfg, build_adapter_settings(cfg, dtype))

    def find_stage_parts(self) -> StageParts:
        return stage_parts.find_parts(self)

    def record_routers(self, model: Any) -> Routers:
        return record_routers(model)


@lru_cache(maxsize=4)
def _check_packing(spec: ModuleSpec) -> bool:
    """Return True if a model has modules that carry a state; see `ExternalSpec.check_packing`."""
    try:
        small_spec = spec.build_shrunk()
        model = build_meta(small_spec, torch.float32)
        allocate(model, torch.device("cpu"))
        init_weights(model, seed=0, spec=small_spec)
        check_packing_isolation(model, small_spec, "cpu")
    except (SetupError, CheckpointError) as error:
        reason = str(error).removeprefix("data.packing: ").partition(";")[0]
        raise SetupError(
            f"data.packing: {spec.architecture} cannot keep documents of a row apart ({reason});"
            " set data.packing=auto, which packs where the run can, or false"
        ) from error
    return carries_state(model)


@lru_cache(maxsize=4)
def _find_text_model(source: ModuleSource) -> TextModel | None:
    built = build_transformers_config(source.config, TRANSFORMERS)
    config = json.loads(built.get_text_config().to_json_string(use_diff=False))
    try:
        spec = read_spec(config, TRANSFORMERS)
    except CheckpointError:  # no causal language model has this config
        return None
    text_model: Any = make_module(spec.source)
    model: Any = make_module(source)
    paths = {id(module): name for name, module in model.named_modules()}
    text_paths = {id(module): name for name, module in text_model.named_modules()}
    decoder, head = _find_decoder_and_head(model)
    text_decoder, text_head = _find_decoder_and_head(text_model)
    prefixes = {
        text_paths[id(text_decoder)]: paths[id(decoder)],
        text_paths[id(text_head)]: paths[id(head)],
    }
    names = {}
    for name in spec.layout().shapes:
        for start, other in prefixes.items():
            if name.startswith(f"{start}."):
                names[name] = f"{other}{name.removeprefix(start)}"
    shapes = build_layout(source).shapes
    is_same = len(names) == len(spec.layout().shapes) and all(
        shapes.get(names[name]) == shape for name, shape in spec.layout().shapes.items()
    )
    config["architectures"] = [type(text_model).__name__]
    return TextModel(spec, config, names) if is_same else None


def _find_decoder_and_head(model: Any) -> tuple[Any, Any]:
    """Return a model's decoder without output projection, and its output projection."""
    _, head = find_embedding_and_head(model) or (None, None)
    decoder = model.get_decoder()
    # Some classes hold a causal language model, whose projection is theirs.
    while any(module is head for module in decoder.modules()):
        inner = decoder.get_decoder()
        if inner is decoder:  # a class that has no decoder of its own
            break
        decoder = inner
    return decoder, head


def read_spec(
    config: Mapping[str, Any], where: str, implementation: str = TRANSFORMERS
) -> ModuleSpec:
    """Read the spec of a model that is not native off its class, built once on meta.

    config: the content of config.json. where: the file, folder or preset, named in errors.
    implementation: `transformers`, or a name that a plugin registered.

    Raises SetupError if transformers is not installed, ConfigError for a name that no plugin
    registered, and CheckpointError for a config.json that its class does not take, or a model
    without embedding or output projection.
    """
    refuse_quantized(config, where)
    check_sizes(config, where)
    family = str(config.get("model_type", implementation))
    if implementation == TRANSFORMERS:
        build_transformers_config(config, where)
    source, model = _build_source(
        dict(config), where=where, implementation=implementation, family=family
    )
    if implementation == TRANSFORMERS and is_encoder(model.config):
        raise CheckpointError(
            f"{where}: config.json: model_type {family!r} lets each token see later ones, and would"
            " learn to copy them, expected a causal language model; set is_decoder to true in"
            " config.json if it was trained so"
        )
    embedding_and_head = find_embedding_and_head(model)
    if embedding_and_head is None:
        raise CheckpointError(
            f"{where}: {type(model).__name__} has no embedding and output projection that could be"
            " found; expected get_input_embeddings and get_output_embeddings, or nn.Embedding and"
            " nn.Linear outside the layers"
        )
    embedding, head = embedding_and_head
    check_scan_kernels(model)
    return ModuleSpec(
        family=family,
        vocab_size=embedding.weight.shape[0],
        max_positions=_find_number(
            model, config=source.config, keys=_POSITION_KEYS, default=_MANY_POSITIONS
        ),
        init_std=float(_find_number(model, config=source.config, keys=_STD_KEYS, default=0.02)),
        tied=embedding.weight is head.weight,
        num_layers=len(list_layer_names(model)),
        implementation=implementation,
        architecture=type(model).__name__,
        source=source,
        scan_packages=list_scan_packages(model),
    )


def _build_source(
    config: dict[str, Any], where: str, implementation: str, family: str
) -> tuple[ModuleSource, Any]:
    """Build the module, with torch's fused attention (sdpa) if its class has that.

    Returns (its source, the module). where, family: for errors. Raises CheckpointError where the
    class cannot be built from the config.
    """
    first_error = ""
    for attention in ("sdpa", "eager"):
        source = ModuleSource(implementation, config, attention)
        try:
            return source, get_module(source)
        except CheckpointError as error:
            raise CheckpointError(f"{where}: config.json: {error}") from None
        except (ValueError, ImportError) as error:  # a class without sdpa says so by one of these
            first_error = first_error or format_one_line(error)
        except (
            TypeError,
            AttributeError,
            RuntimeError,
            KeyError,
            IndexError,
            AssertionError,
        ) as error:
            raise CheckpointError(
                f"{where}: {family} cannot be built from config.json ({format_one_line(error)})"
            ) from error
    raise CheckpointError(f"{where}: {family} cannot be built ({first_error})")


def _find_number(
    model: nn.Module, config: dict[str, Any], keys: Iterable[str], default: float
) -> Any:
    """Return the first positive number under one of the keys; `default` where there is none.

    config: the content of config.json. Each key is looked up in the config object of the built
    model first, which has the class' defaults for keys that are left out. A 0 there is as good as
    no value.
    """
    built_config: Any = getattr(model, "config", None)
    if hasattr(built_config, "get_text_config"):
        built_config = built_config.get_text_config()
    values: list[Any] = [getattr(built_config, key, None) or config.get(key) for key in keys]
    # True would be an instance of int.
    return next((value for value in values if type(value) in (int, float) and value > 0), default)
