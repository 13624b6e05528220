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
_BUFFERS = re.compile(r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|(attn|attention)\.bias|masked_bias)$")
OTHER_PARTS = ("vision_tower", "multi_modal_projector")  # of multimodal Gemma 3, next to the decoder
_OTHER_PARTS = re.compile(rf"^(model\.)?({'|'.join(OTHER_PARTS)})\.")


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
    for name, shape in parameter_shapes(spec).items():
        place = _fused_place(name, spec) if spec.fused_file else None
        file_name, start, length, rows = place or (name, 0, None, shape[0])
        own = file_name == SCORE  # a name by itself
        body, own_prefix = (
            ("", "") if own else (prefix, "model.") if file_name.startswith("model.") else (head, "lm_head.")
        )
        file_name = body + file_name.removeprefix(own_prefix)
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


def ignorable(spec: ModelSpec, file_name: str) -> bool:
    """Whether a checkpoint may hold this tensor without the model having it: old buffers, a tied head, vision parts."""
    if isinstance(spec, ExternalSpec):
        return _BUFFERS.search(file_name) is not None or file_name in spec.layout().tied_names()
    if (spec.tied or has_score_head(spec)) and file_name in ("lm_head.weight", "language_model.lm_head.weight"):
        return True
    return is_other_part(spec, file_name) or _BUFFERS.search(file_name) is not None


def is_other_part(spec: ModelSpec, file_name: str) -> bool:
    """Whether a tensor is of a part that a multimodal checkpoint has and its text model has not."""
    return spec.family == "gemma3" and isinstance(spec, DecoderSpec) and _OTHER_PARTS.match(file_name) is not None


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
