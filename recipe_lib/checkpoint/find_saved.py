"""The saved weights in an adapter's file beside a base: of which tensors, of what shape, and what stays tied."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from safetensors import safe_open

from recipe_lib.adapters.peft_names import EMBEDDING, HEAD, extra_name, file_modules
from recipe_lib.checkpoint.converted import hold_same_numbers
from recipe_lib.checkpoint.saved_weights import EMBEDDING_WEIGHT, HEAD_WEIGHT, VOCABULARY, SavedTensor, SavedWeights
from recipe_lib.checkpoint.weight_accounts import file_shapes
from recipe_lib.errors import CheckpointError
from recipe_lib.models.external_spec import ExternalSpec
from recipe_lib.models.mixture_files import router_name
from recipe_lib.models.scored_spec import has_score_head
from recipe_lib.models.spec import SCORE, ModelSpec
from recipe_lib.models.weight_names import WeightEntry, buffer_names, parameter_shapes, weight_map
from recipe_lib.units import name_first

if TYPE_CHECKING:
    from recipe_lib.checkpoint.adapter_files import AdapterFile

_REMEDY = "merge the adapter with PEFT first (merge_and_unload)"
_DOWNLOAD = "export or download the adapter again"


@dataclass(frozen=True)
class _SavedPlace:
    """A tensor of the base under the name that PEFT has for it: our parameters in it, and its shape."""

    entries: tuple[WeightEntry, ...]
    shape: tuple[int, ...]


def find_saved(adapter: "AdapterFile", base: ModelSpec) -> SavedWeights:
    """Return what an adapter's file has of the weights of a base. Raises CheckpointError, all faults at once.

    base: the spec of the base as it is. A name that the base lacks, another shape, and what the config says otherwise
    are refused.
    """
    if not (adapter.saved or adapter.config.saved or adapter.config.token_rows or adapter.config.biases):
        return SavedWeights(adapter.path, base, {}, {}, {})
    places = _find_places(base)
    saved = _resolve_frozen(adapter, places)
    faults = _name_faults(adapter, base, places)
    faults += _shape_faults(adapter, saved, places, isinstance(base, ExternalSpec))
    faults += _missing_faults(adapter, saved, places)
    if faults:
        raise CheckpointError(*faults)
    saved, spec = _settle_vocabulary(adapter, saved, base)
    parts = {entry.our_name: (held, entry.start) for name, held in saved.items() for entry in places[name].entries}
    rows = {name: _token_rows(adapter, name) or () for name, (held, _) in parts.items() if held.rows is not None}
    return SavedWeights(adapter.path, spec, parts, rows, _bias_scalings(adapter, saved, places, base))


def _find_places(base: ModelSpec) -> dict[str, _SavedPlace]:
    """Return what may be saved of a base, by PEFT's names."""
    if isinstance(base, ExternalSpec):
        shapes = parameter_shapes(base)
        return {
            name: _SavedPlace((WeightEntry(name, name),), shapes[name]) for name in shapes.keys() - buffer_names(base)
        }
    spec = base if has_score_head(base) else replace(base, tied=False)
    entries = [entry for entry in weight_map(spec) if entry.view is None and entry.our_name != SCORE]
    shapes = file_shapes(entries, parameter_shapes(spec))
    places: dict[str, _SavedPlace] = {}
    for entry in entries:
        name = entry.file_name
        if ".mlp.router." in entry.our_name:  # PEFT has the name of the module, files may have an older one
            name = entry.our_name.replace(".mlp.router.", f".mlp.{router_name(spec)}.")
        before = places[name].entries if name in places else ()
        places[name] = _SavedPlace((*before, entry), shapes[entry.file_name])
    return places


def _resolve_frozen(adapter: "AdapterFile", places: Mapping[str, _SavedPlace]) -> dict[str, SavedTensor]:
    """Return what changes the base: of the copies that PEFT saves untrained, those with another number of rows."""
    changing = {}
    for name, held in adapter.saved.items():
        frozen = held.frozen if name in places else None
        if frozen is not None and frozen[1].shape != places[name].shape:
            held = replace(held, copy=held.copy or frozen)
        if held.copy or held.rows or held.added:
            changing[name] = held
    return changing


def _name_faults(adapter: "AdapterFile", base: ModelSpec, places: Mapping[str, _SavedPlace]) -> list[str]:
    faults: list[str] = []
    unknown: list[str] = []
    homeless: list[str] = []
    tied = base.layout().tied_names() if isinstance(base, ExternalSpec) else set()
    for name, held in sorted(adapter.saved.items()):
        first = next(part for part in (held.copy, held.rows, held.added, held.frozen, held.again) if part)[0]
        if held.added is not None and name not in places:
            homeless.append(first)
        elif name in tied and not (held.copy is held.rows is None):
            faults.append(f"{adapter.path}: {first} is one of two tied matrices of the base; {_REMEDY}")
        elif name not in places or not _is_where_peft_looks(adapter, name, held):
            unknown.append(first)
    if homeless:
        faults.append(
            f"{adapter.path}: {homeless[0]} is a bias of an adapter (lora_bias), and that linear of the base has none "
            "to take it up, in PEFT's merge either; use it with PEFT as it is, or train one with lora_bias=False"
        )
    if unknown:
        faults.append(
            f"{adapter.path}: {name_first(unknown, 'is', 'are')} no tensor of a LoRA or DoRA adapter, nor a weight of "
            "this base that can be replaced; expected names such as "
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        )
    return faults


def _is_where_peft_looks(adapter: "AdapterFile", name: str, held: SavedTensor) -> bool:
    """Return whether a copy has the name that it has beside an adapter, or the plain one where there is none."""
    if held.copy is None:
        return held.again is None
    return (".base_layer." in held.copy[0]) == (name.rpartition(".")[0] in adapter.tensors)


def _shape_faults(
    adapter: "AdapterFile", saved: Mapping[str, SavedTensor], places: Mapping[str, _SavedPlace], fixed: bool
) -> list[str]:
    """fixed: the vocabulary cannot have another size."""
    faults = []
    for name in sorted(saved.keys() & places.keys()):
        held, shape = saved[name], places[name].shape
        rows = _token_rows(adapter, name)
        count = held.copy[1].shape[0] if held.copy is not None and held.copy[1].shape else shape[0] if shape else 0
        free = name in VOCABULARY and not fixed
        expected = [(held.copy, (count, *shape[1:]) if free else shape), (held.added, shape)]
        expected.append((held.rows, (len(rows or ()), *shape[1:])))
        for part, expected_shape in expected:
            if part is not None and part[1].shape != expected_shape:
                faults.append(
                    f"{adapter.path}: {part[0]} has shape {list(part[1].shape)}, base and adapter_config.json make it "
                    f"{list(expected_shape)}; the adapter was made for another base"
                )
        if held.rows is not None and rows and max(rows) >= count:
            faults.append(
                f"{adapter.config.path}: trainable_token_indices: found {max(rows)}, expected numbers below {count}, "
                f"the rows of {name}; {_DOWNLOAD}"
            )
    return faults[:1]  # the others have the same cause


def _missing_faults(
    adapter: "AdapterFile", saved: Mapping[str, SavedTensor], places: Mapping[str, _SavedPlace]
) -> list[str]:
    """Of tensors that the config promises, and of those that it does not know of."""
    faults, config = [], adapter.config
    for name in sorted(places):
        held = saved.get(name, SavedTensor())
        if held.copy is None and _is_listed(adapter, name):
            faults.append(f"{adapter.path}: has no {name}, which modules_to_save names; {_DOWNLOAD}")
            break
    for end in config.token_rows:
        named = [name for name, held in saved.items() if held.rows is not None and _fits_rows(name, end)]
        if config.token_rows[end] and not named:
            faults.append(f"{adapter.path}: has no trainable_tokens_delta of {end or EMBEDDING}; {_DOWNLOAD}")
    for name, held in sorted(saved.items()):
        if held.rows is not None and not _token_rows(adapter, name):
            faults.append(
                f"{adapter.config.path}: trainable_token_indices: names no tokens of {name}, which {held.rows[0]} has "
                f"rows of; {_DOWNLOAD}"
            )
    biased = {name.removesuffix(".bias") for name, held in saved.items() if held.added is not None}
    unlike_config = adapter.tensors.keys() - biased if config.biases else biased
    if unlike_config:
        has, said = ("has no", "true") if config.biases else ("has", "false")
        first = min(unlike_config)
        faults.append(f"{adapter.path}: {has} {first}.lora_B.bias, lora_bias is {said} in its config; {_DOWNLOAD}")
    return faults


def _is_listed(adapter: "AdapterFile", name: str) -> bool:
    """Return whether modules_to_save names the module of a tensor, or one that it is in, as PEFT compares names."""
    module = name.rpartition(".")[0].split(".")
    around = [".".join(module[:length]) for length in range(1, len(module) + 1)]
    return any(path.endswith(extra_name(end)) for path in around for end in adapter.config.saved)


def _fits_rows(name: str, end: str) -> bool:
    module = name.rpartition(".")[0]
    return module.endswith(extra_name(end)) if end else module in (EMBEDDING, HEAD)


def _token_rows(adapter: "AdapterFile", name: str) -> tuple[int, ...] | None:
    """Return the tokens whose rows are saved; those of a tied head are the embedding's unless it has its own."""
    rows = adapter.config.token_rows
    names = [name, EMBEDDING_WEIGHT] if name == HEAD_WEIGHT else [name]
    return next((rows[end] for one in names for end in rows if _fits_rows(one, end)), None)


def _settle_vocabulary(
    adapter: "AdapterFile", saved: dict[str, SavedTensor], base: ModelSpec
) -> tuple[dict[str, SavedTensor], ModelSpec]:
    """Return what is saved, and the spec of the base with it: of another vocabulary, or no longer tied.

    As in PEFT and transformers, a matrix that is saved for itself is no longer the other's, unless both are the same.
    """
    if isinstance(base, ExternalSpec):
        return saved, base
    embedding, head = (saved.get(name, SavedTensor()) for name in (EMBEDDING_WEIGHT, HEAD_WEIGHT))
    tied = base.tied
    if tied and (head != SavedTensor() or _is_listed(adapter, EMBEDDING_WEIGHT)):
        listed = _is_listed(adapter, EMBEDDING_WEIGHT) or _is_listed(adapter, HEAD_WEIGHT) or head.rows is not None
        same = _are_same(adapter, embedding, head)
        alone = embedding == SavedTensor() or head == SavedTensor()
        if not (listed or same or alone):
            raise CheckpointError(
                f"{adapter.path}: {EMBEDDING_WEIGHT} and {HEAD_WEIGHT} differ, which are one matrix of the base, and "
                f"modules_to_save names neither; name both in {adapter.config.path}, or {_DOWNLOAD}"
            )
        tied = same or not listed
    if tied:
        embedding = head if embedding == SavedTensor() else embedding
        saved = {name: held for name, held in saved.items() if name not in VOCABULARY}
        saved |= {} if embedding == SavedTensor() else {EMBEDDING_WEIGHT: embedding}
    copies = [held.copy for held in (embedding, head) if held.copy is not None]
    vocabulary = copies[0][1].shape[0] if copies else base.vocab_size
    needed = {EMBEDDING_WEIGHT: embedding}
    if not (tied or has_score_head(base)):
        needed[HEAD_WEIGHT] = head
    for name, held in needed.items():
        rows = held.copy[1].shape[0] if held.copy is not None else base.vocab_size
        if rows != vocabulary:
            raise CheckpointError(
                f"{adapter.path}: {copies[0][0]} has {vocabulary} rows, {name} has {rows}: the vocabulary was resized, "
                "and one of its two matrices is not in the file; save the adapter again with save_embedding_layers=True"
            )
    return saved, replace(base, vocab_size=vocabulary, tied=tied)


def _are_same(adapter: "AdapterFile", embedding: SavedTensor, head: SavedTensor) -> bool:
    """Return whether both matrices are saved with the same numbers."""
    with safe_open(str(adapter.path), framework="pt") as file:
        for of_embedding, of_head in ((embedding.copy, head.copy), (embedding.rows, head.rows)):
            if of_embedding is None or of_head is None:
                if of_embedding is not of_head:
                    return False
            elif not hold_same_numbers(file.get_slice(of_embedding[0]), file.get_slice(of_head[0])):
                return False
    return _token_rows(adapter, EMBEDDING_WEIGHT) == _token_rows(adapter, HEAD_WEIGHT)


def _bias_scalings(
    adapter: "AdapterFile", saved: Mapping[str, SavedTensor], places: Mapping[str, _SavedPlace], base: ModelSpec
) -> dict[str, float]:
    modules = file_modules(base)
    scalings: dict[str, float] = {}
    for name, held in saved.items():
        if held.added is not None:
            scaling = adapter.config.scaling_of(modules[name.removesuffix(".bias")])
            scalings |= {entry.our_name: scaling for entry in places[name].entries}
    return scalings
