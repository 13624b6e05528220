"""Which tensor of a checkpoint file each parameter is, for reading and for writing."""

import re
from collections.abc import Collection, Set

import torch

from recipe_lib.models.external_spec import ExternalSpec, WeightEntry, WrittenLayout
from recipe_lib.models.file_views import FileView, PlainTensor, SomeRows
from recipe_lib.models.meta_init import build_meta
from recipe_lib.models.mixture_files import fp8_view, mixture_place
from recipe_lib.models.mixture_files import written_layout as mixture_layout
from recipe_lib.models.scored_spec import has_score_head
from recipe_lib.models.spec import SCORE, DecoderSpec, ModelSpec

# Multimodal Gemma 3 files put the decoder under one of these, instead of `model.`; the second kind has no other head.
_GEMMA3_PREFIXES = {"language_model.model.": "language_model.lm_head.", "model.language_model.": "lm_head."}
# Buffers of older files, and how many dimensions they have: a bias of a module `attn` has one, a mask has four.
_BUFFERS = {
    r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$": range(5),
    r"(^|\.)(attn|attention)\.bias$": (4,),
    r"(^|\.)masked_bias$": (0, 1),
}
_OTHER_PARTS = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector)\.")  # of multimodal Gemma 3
_EMBEDDING = "model.embed_tokens.weight"
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")


def weight_map(spec: ModelSpec, file_names: Collection[str] = ()) -> list[WeightEntry]:
    """One entry per parameter, in the model's order; parts of a fused tensor follow one another in row order.

    file_names: names that a checkpoint has, when reading one (some families have more than one layout); empty: the
    layout that is written. A tied output projection has no entry.
    """
    if isinstance(spec, ExternalSpec):
        return spec.weight_map(file_names)
    prefix, head = "model.", "lm_head."
    for other, other_head in _GEMMA3_PREFIXES.items():
        if spec.family == "gemma3" and any(name.startswith(other) for name in file_names):
            prefix, head = other, other_head
    entries, file_names = [], frozenset(file_names)
    if _EMBEDDING not in file_names and _EMBEDDING.removeprefix("model.") in file_names:
        prefix = ""  # the decoder was saved without its head
    for name, shape in parameter_shapes(spec).items():
        place = _fused_place(name, spec) if spec.fused_file else None
        file_name, start, length, rows = place or (name, 0, None, shape[0])
        own = file_name == SCORE  # a name by itself
        body, own_prefix = (
            ("", "") if own else (prefix, "model.") if file_name.startswith("model.") else (head, "lm_head.")
        )
        file_name = body + file_name.removeprefix(own_prefix)
        if name == _EMBEDDING and spec.tied and file_name not in file_names:
            file_name = next((other for other in _HEADS if other in file_names), file_name)
        view = _view(spec, file_name, (rows, *shape[1:]), file_names)
        if isinstance(view, PlainTensor):
            entries.append(WeightEntry(name, view.name, start, length))
            continue
        view = view if length is None else SomeRows(view, start, length)
        entries.append(WeightEntry(name, next(iter(view.tensors())), view=view))
    return entries


def _view(spec: DecoderSpec, name: str, shape: tuple[int, ...], file_names: Set[str]) -> FileView:
    """How a tensor is read, whose name in files of the same names as ours would be this."""
    place = mixture_place(spec, name, shape, file_names) if spec.mixture is not None else None
    if place is None or isinstance(place, str):
        return fp8_view(spec, place or name, shape, file_names)
    return place


def written_layout(spec: ModelSpec) -> WrittenLayout | None:
    """The files that are written, where their tensors are not the parameters under other names; None: `weight_map`."""
    if isinstance(spec, ExternalSpec):
        return spec.written_layout()
    if spec.mixture is None:
        return None
    return mixture_layout(spec, parameter_shapes(spec), {entry.our_name: entry.file_name for entry in weight_map(spec)})


def why_left_out(spec: ModelSpec, file_name: str, dims: int) -> str | None:
    """Return why a checkpoint may hold this tensor without the model having it; None: it may not.

    Buffers that are computed, the head under a score head, vision parts, and what transformers' class says that it
    does not read. Another name of a tied weight is not among them: see `find_tied_copies`. dims: the tensor's
    dimensions.
    """
    if any(re.search(pattern, file_name) and dims in sizes for pattern, sizes in _BUFFERS.items()):
        return "computed, not read"
    if isinstance(spec, ExternalSpec):
        unread = any(re.search(pattern, file_name) for pattern in spec.layout().unread)
        return "its class in transformers does not read it" if unread else None
    if has_score_head(spec) and file_name in _HEADS:
        return "the score head takes its place"
    if spec.family == "gemma3" and _OTHER_PARTS.match(file_name):
        return "the text model alone is trained and exported"
    return None


def find_tied_copies(
    spec: ModelSpec, entries: Collection[WeightEntry], file_names: Collection[str]
) -> dict[str, WeightEntry]:
    """Return tensors of a checkpoint that are a tied weight under another name than the one that is read.

    entries: of `weight_map` for the same names. Returns name -> the entry that it has to have the numbers of.
    """
    places = {entry.our_name: entry for entry in entries if entry.made is None}
    read = {entry.file_name for entry in places.values()}
    if isinstance(spec, ExternalSpec):
        tied = spec.tied_names(file_names)
    else:
        tied = dict.fromkeys(_HEADS if spec.tied and not has_score_head(spec) else (), _EMBEDDING)
    return {
        name: places[parameter]
        for name, parameter in tied.items()
        if name in file_names and name not in read and parameter in places
    }


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter, in the model's order; a tied output projection is the embedding.

    Of an external model also those of the buffers that belong into a checkpoint.
    """
    if isinstance(spec, ExternalSpec):
        return dict(spec.layout().shapes)
    return {name: tuple(value.shape) for name, value in build_meta(spec, torch.float32).named_parameters()}


def buffer_names(spec: ModelSpec) -> frozenset[str]:
    """Those of `parameter_shapes` that are buffers; our own models have none."""
    return spec.layout().buffers if isinstance(spec, ExternalSpec) else frozenset()


def _fused_place(name: str, spec: DecoderSpec) -> tuple[str, int, int, int] | None:
    """Phi 3's fused tensors: queries, keys and values in `qkv_proj`, gate and up in `gate_up_proj`; first row, rows,
    and rows of the whole."""
    query, key = spec.num_heads * spec.head_width, spec.num_kv_heads * spec.head_width
    parts = {
        "self_attn.q_proj": ("self_attn.qkv_proj", 0, query),
        "self_attn.k_proj": ("self_attn.qkv_proj", query, key),
        "self_attn.v_proj": ("self_attn.qkv_proj", query + key, key),
        "mlp.gate_proj": ("mlp.gate_up_proj", 0, spec.mlp_width),
        "mlp.up_proj": ("mlp.gate_up_proj", spec.mlp_width, spec.mlp_width),
    }
    for part, (fused, start, length) in parts.items():
        if f".{part}." in name:
            rows = query + 2 * key if fused.endswith("qkv_proj") else 2 * spec.mlp_width
            return name.replace(part, fused), start, length, rows
    return None
