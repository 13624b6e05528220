"""Which tensor of a checkpoint file each parameter is, for reading and for writing."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from recipe_lib.foreign.spec import ForeignSpec
from recipe_lib.models.meta_init import build_meta
from recipe_lib.models.spec import DecoderSpec, ModelSpec

if TYPE_CHECKING:
    from recipe_lib.foreign.weight_conversions import Conversion

# Multimodal Gemma 3 files put the decoder under one of these, instead of `model.`; the second kind has no other head.
_GEMMA3_PREFIXES = {"language_model.model.": "language_model.lm_head.", "model.language_model.": "lm_head."}
_BUFFERS = re.compile(r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|(attn|attention)\.bias|masked_bias)$")
OTHER_PARTS = ("vision_tower", "multi_modal_projector")  # of multimodal Gemma 3, beside the decoder
_OTHER_PARTS = re.compile(rf"^(model\.)?({'|'.join(OTHER_PARTS)})\.")


@dataclass(frozen=True)
class WeightEntry:
    """One parameter and its place in a file.

    our_name: the parameter. file_name: the tensor in the file. start, length: its rows (dimension 0) of that tensor,
    when the file fuses several parameters into one; length None: the tensor is the parameter. made: how the parameter
    is made of several tensors, of which file_name is the first, or of one in another form.
    """

    our_name: str
    file_name: str
    start: int = 0
    length: int | None = None
    made: "Conversion | None" = None


def weight_map(spec: ModelSpec, file_names: Collection[str] = ()) -> list[WeightEntry]:
    """One entry per parameter, in the model's order; parts of a fused tensor follow one another in row order.

    file_names: names that a checkpoint has, when reading one (some families have more than one layout); empty: the
    layout that is written. A tied output projection has no entry.
    """
    if isinstance(spec, ForeignSpec):
        return _foreign_map(spec, file_names)
    prefix, head = "model.", "lm_head."
    for other, other_head in _GEMMA3_PREFIXES.items():
        if spec.family == "gemma3" and any(name.startswith(other) for name in file_names):
            prefix, head = other, other_head
    entries = []
    for name in parameter_shapes(spec):
        place = _fused_place(name, spec) if spec.fused_file else None
        file_name, start, length = place or (name, 0, None)
        body, own_prefix = (prefix, "model.") if file_name.startswith("model.") else (head, "lm_head.")
        entries.append(WeightEntry(name, body + file_name.removeprefix(own_prefix), start, length))
    return entries


def ignorable(spec: ModelSpec, file_name: str) -> bool:
    """Whether a checkpoint may hold this tensor without the model having it: old buffers, a tied head, vision parts."""
    if isinstance(spec, ForeignSpec):
        return _BUFFERS.search(file_name) is not None or file_name in _other_names(spec)
    if spec.tied and file_name in ("lm_head.weight", "language_model.lm_head.weight"):
        return True
    return is_other_part(spec, file_name) or _BUFFERS.search(file_name) is not None


def is_other_part(spec: ModelSpec, file_name: str) -> bool:
    """Whether a tensor is of a part that a multimodal checkpoint has and its text model has not."""
    return spec.family == "gemma3" and isinstance(spec, DecoderSpec) and _OTHER_PARTS.match(file_name) is not None


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter, in the model's order; a tied output projection is the embedding.

    Of a foreign model also those of the buffers that belong into a checkpoint.
    """
    if isinstance(spec, ForeignSpec):
        from recipe_lib.foreign.build import layout

        return dict(layout(spec).shapes)
    return {name: tuple(value.shape) for name, value in build_meta(spec, torch.float32).named_parameters()}


def buffer_names(spec: ModelSpec) -> frozenset[str]:
    """Those of `parameter_shapes` that are buffers; our own models have none."""
    if isinstance(spec, ForeignSpec):
        from recipe_lib.foreign.build import layout

        return layout(spec).buffers
    return frozenset()


def _foreign_map(spec: ForeignSpec, file_names: Collection[str]) -> list[WeightEntry]:
    """Of a foreign model: the file has the model's own names, or lacks the prefix of those of its body; or it has those
    of which transformers makes the model's.

    A tied weight is under any of its names. A buffer that a file lacks keeps its first value.
    """
    from recipe_lib.foreign.build import layout
    from recipe_lib.foreign.weight_conversions import reading

    held = layout(spec)
    found, prefix = set(file_names), held.prefix
    bare = bool(found and prefix) and not any(name.startswith(prefix) for name in found)
    read = reading(spec, found) if found else None
    entries = []
    for name in held.shapes:
        names = held.names.get(name, (name,))
        spellings = [other.removeprefix(prefix) for other in names] if bare else list(names)
        written = next((spelling for spelling in spellings if spelling in found), spellings[0])
        made = None
        if read is not None:
            written = next((read.renamed[other] for other in names if other in read.renamed), written)
            if written not in found:
                made = next((read.made[other] for other in names if other in read.made), None)
        if made is not None:
            entries.append(WeightEntry(name, made.names()[0], made=made))
        elif not (found and name in held.buffers and written not in found):
            entries.append(WeightEntry(name, written))
    return entries


def _other_names(spec: ForeignSpec) -> set[str]:
    """Names of tied weights, with and without prefix: one of them is read, the others hold the same."""
    from recipe_lib.foreign.build import layout

    held = layout(spec)
    names = {other for names in held.names.values() if len(names) > 1 for other in names}
    return names | {name.removeprefix(held.prefix) for name in names}


def _fused_place(name: str, spec: DecoderSpec) -> tuple[str, int, int] | None:
    """Phi 3's fused tensors: queries, keys and values in `qkv_proj`, gate and up in `gate_up_proj`."""
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
            return name.replace(part, fused), start, length
    return None
