"""Which tensor of a checkpoint file each parameter is, for reading and for writing."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from recipe_lib.models.families import has_score_head
from recipe_lib.models.meta_init import build_meta
from recipe_lib.models.spec import (
    SCORE,
    DecoderSpec,
    ExternalSpec,
    ModelSpec,
    WeightEntry,
    WrittenLayout,
)

# Tensors of a checkpoint's files as a model has them, without their being made whole.
#
# A view says which tensors of the files it takes, and opened gives slices of what they make, as
# safetensors' own slices do: an expert's matrices that lie apart as one tensor of all experts,
# transposed ones, MXFP4 blocks, FP8 with scales of blocks. So each rank reads the part that it
# keeps.


_FLOATS = ("F64", "F32", "BF16", "F16")
_SCALES = (*_FLOATS, "F8_E8M0", "U8")  # of FP8
MXFP4_BLOCK = 32  # numbers that share an exponent (OCP Microscaling Formats 1.0)
_MX_BIAS = 127  # of exponents that stand for scales
# Of the 16 codes; the highest bit is the sign.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Bounds = list[tuple[int, int]]


@dataclass(frozen=True)
class FileForm:
    """What a tensor of a file has to be: its shape, and safetensors' names of the types that it may
    have.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = _FLOATS


class FileView(Protocol):
    """A tensor that is made of tensors of files."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is made."""

    def tensors(self) -> dict[str, FileForm]:
        """Those that it takes, by name."""

    def read(self, slice_of: Callable[[str], Any], bounds: Bounds, dtype: torch.dtype) -> Tensor:
        """The part within (first, after the last) of each dimension. slice_of: safetensors' slice
        of a name.

        dtype: of what is made of codes; other numbers keep their type.
        """


@dataclass(frozen=True)
class OpenView:
    """A view with its files open, read by slices as a tensor of a file is."""

    view: FileView
    slice_of: Callable[[str], Any]
    dtype: torch.dtype

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        given: Sequence[slice] = index if isinstance(index, tuple) else (index,)
        every = [*given, *[slice(None)] * (len(self.view.shape) - len(given))]
        bounds = [part.indices(size)[:2] for part, size in zip(every, self.view.shape, strict=True)]
        return self.view.read(self.slice_of, bounds, self.dtype)

    def rows(self, start: int, stop: int, columns: slice) -> Tensor:
        """Rows of the matrices `[e, o, i]` as if they were one below the other, `[e o, i]`."""
        if len(self.view.shape) == 2:
            return self[start:stop, columns]
        height = self.view.shape[1]
        pieces = []
        for expert in range(start // height, -(-stop // height)):
            first, last = max(start - expert * height, 0), min(stop - expert * height, height)
            pieces.append(self[expert : expert + 1, first:last, columns].flatten(0, 1))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _slices(bounds: Bounds) -> tuple[slice, ...]:
    return tuple(slice(first, last) for first, last in bounds)


@dataclass(frozen=True)
class PlainTensor:
    """A tensor as the file has it."""

    name: str
    shape: tuple[int, ...]

    def tensors(self) -> dict[str, FileForm]:
        return {self.name: FileForm(self.shape)}

    def read(self, slice_of: Callable[[str], Any], bounds: Bounds, dtype: torch.dtype) -> Tensor:
        found: Tensor = slice_of(self.name)[_slices(bounds)]
        return found


@dataclass(frozen=True)
class TransposedView:
    """The last two dimensions the other way round."""

    part: FileView

    @property
    def shape(self) -> tuple[int, ...]:
        *before, rows, columns = self.part.shape
        return (*before, columns, rows)

    def tensors(self) -> dict[str, FileForm]:
        return self.part.tensors()

    def read(self, slice_of: Callable[[str], Any], bounds: Bounds, dtype: torch.dtype) -> Tensor:
        *before, rows, columns = bounds
        return self.part.read(slice_of, [*before, columns, rows], dtype).transpose(-1, -2)


@dataclass(frozen=True)
class _CombinedView:
    """Made of others, which lie in the same files."""

    parts: tuple[FileView, ...]

    def tensors(self) -> dict[str, FileForm]:
        return {name: form for part in self.parts for name, form in part.tensors().items()}


class ConcatenatedRows(_CombinedView):
    """One below the other: tensors that differ in their first dimension alone."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    def read(self, slice_of: Callable[[str], Any], bounds: Bounds, dtype: torch.dtype) -> Tensor:
        (start, stop), *others = bounds
        found, at = [], 0
        for part in self.parts:
            first, last = max(start - at, 0), min(stop - at, part.shape[0])
            if first < last:
                found.append(part.read(slice_of, [(first, last), *others], dtype))
            at += part.shape[0]
        return found[0] if len(found) == 1 else torch.cat(found)


class StackedView(_CombinedView):
    """One after the other in a new first dimension: the same of each expert."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts), *self.parts[0].shape)

    def read(self, slice_of: Callable[[str], Any], bounds: Bounds, dtype: torch.dtype) -> Tensor:
        (start, stop), *others = bounds
        return torch.stack([part.read(slice_of, others, dtype) for part in self.parts[start:stop]])


@dataclass(frozen=True)
class RowSlice:
    """Some of the rows: of a tensor that holds several parameters one below the other."""

    part: FileView
    start: int
    length: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.length, *self.part.shape[1:])

    def tensors(self) -> dict[str, FileForm]:
        return self.part.tensors()

    def read(self, slice_of: Callable[[str], Any], bounds: Bounds, dtype: torch.dtype) -> Tensor:
        (first, last), *others = bounds
        return self.part.read(slice_of, [(first + self.start, last + self.start), *others], dtype)


@dataclass(frozen=True)
class Fp8Blocks:
    """A matrix `[o, i]`, or those of all experts `[E, o, i]`, in 8-bit floating point, with a scale
    for each block of `block` rows and columns; the last of a row or column of blocks may be
    smaller.

    What it stands for is computed in fp32. Scales are of any type of floating point, or the
    exponents of 2 alone: as float8, or uint8 with 127 added.
    """

    name: str
    scales: str
    shape: tuple[int, ...]
    block: tuple[int, int]

    def _sizes(self) -> tuple[int, ...]:
        """Of a block in each dimension, none larger than the tensor itself."""
        every = (*[1] * (len(self.shape) - 2), *self.block)
        return tuple(max(1, min(size, each)) for size, each in zip(self.shape, every, strict=True))

    def tensors(self) -> dict[str, FileForm]:
        blocks = tuple(
            -(-size // each) for size, each in zip(self.shape, self._sizes(), strict=True)
        )
        return {
            self.name: FileForm(self.shape, ("F8_E4M3",)),
            self.scales: FileForm(blocks, _SCALES),
        }

    def read(self, slice_of: Callable[[str], Any], bounds: Bounds, dtype: torch.dtype) -> Tensor:
        sizes = self._sizes()
        values = slice_of(self.name)[_slices(bounds)].float()
        blocks = [
            (first // each, -(-last // each))
            for (first, last), each in zip(bounds, sizes, strict=True)
        ]
        scales = slice_of(self.scales)[_slices(blocks)]
        scales = (
            (scales.float() - _MX_BIAS).exp2() if scales.dtype == torch.uint8 else scales.float()
        )
        for dim, ((first, last), each) in enumerate(zip(bounds, sizes, strict=True)):
            scales = scales.index_select(dim, torch.arange(first, last) // each - first // each)
        return values.mul_(scales).to(dtype)


@dataclass(frozen=True)
class Mxfp4Blocks:
    """Matrices `[E, o, i]` in 4-bit floating point, 32 numbers of a row sharing an exponent.

    In the file blocks are uint8 `[E, o, i / 32, 16]`, the first of two numbers in the low bits, and
    scales uint8 `[E, o, i / 32]`, the exponents of 2 with 127 added.
    """

    blocks: str
    scales: str
    shape: tuple[int, int, int]

    def tensors(self) -> dict[str, FileForm]:
        *rows, columns = self.shape
        count = (*rows, columns // MXFP4_BLOCK)
        return {
            self.blocks: FileForm((*count, MXFP4_BLOCK // 2), ("U8",)),
            self.scales: FileForm(count, ("U8",)),
        }

    def read(self, slice_of: Callable[[str], Any], bounds: Bounds, dtype: torch.dtype) -> Tensor:
        *rows, (first, last) = bounds
        begin, end = first // MXFP4_BLOCK, -(-last // MXFP4_BLOCK)
        place = (*_slices(rows), slice(begin, end))
        codes, exponents = (
            slice_of(self.blocks)[place],
            slice_of(self.scales)[place].int() - _MX_BIAS,
        )
        levels = torch.tensor([*_FP4, *(-level for level in _FP4)], dtype=dtype)
        pairs = torch.stack(
            (levels.repeat(16), levels.repeat_interleave(16)), dim=1
        )  # of each byte
        values = pairs.index_select(0, codes.flatten().int()).view(*codes.shape[:-1], MXFP4_BLOCK)
        values = torch.ldexp(values, exponents.unsqueeze(-1)).to(dtype).flatten(-2)
        return values[..., first - begin * MXFP4_BLOCK : last - begin * MXFP4_BLOCK]


# Multimodal Gemma 3 files put the decoder under one of these, instead of `model.`; the second kind
# has no other head.
_GEMMA3_PREFIXES = {
    "language_model.model.": "language_model.lm_head.",
    "model.language_model.": "lm_head.",
}
# Buffers of older files, and how many dimensions they have: a bias of a module `attn` has one, a
# mask has four.
_BUFFERS = {
    r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$": range(5),
    r"(^|\.)(attn|attention)\.bias$": (4,),
    r"(^|\.)masked_bias$": (0, 1),
}
_OTHER_PARTS = re.compile(
    r"^(model\.)?(vision_tower|multi_modal_projector)\."
)  # of multimodal Gemma 3
_EMBEDDING = "model.embed_tokens.weight"
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")


def build_weight_map(spec: ModelSpec, file_names: Collection[str] = ()) -> list[WeightEntry]:
    """One entry per parameter, in the model's order; parts of a fused tensor follow one another in
    row order.

    file_names: names that a checkpoint has, when reading one (some families have more than one
    layout); empty: the layout that is written. A tied output projection has no entry.
    """
    if isinstance(spec, ExternalSpec):
        return spec.build_weight_map(file_names)
    prefix, head = "model.", "lm_head."
    for other, other_head in _GEMMA3_PREFIXES.items():
        if spec.family == "gemma3" and any(name.startswith(other) for name in file_names):
            prefix, head = other, other_head
    entries, file_names = [], frozenset(file_names)
    if _EMBEDDING not in file_names and _EMBEDDING.removeprefix("model.") in file_names:
        prefix = ""  # the decoder was saved without its head
    for name, shape in compute_parameter_shapes(spec).items():
        place = _find_fused_rows(name, spec) if spec.fused_file else None
        file_name, start, length, rows = place or (name, 0, None, shape[0])
        own = file_name == SCORE  # a name by itself
        body, own_prefix = (
            ("", "")
            if own
            else (prefix, "model.")
            if file_name.startswith("model.")
            else (head, "lm_head.")
        )
        file_name = body + file_name.removeprefix(own_prefix)
        if name == _EMBEDDING and spec.tied and file_name not in file_names:
            file_name = next((other for other in _HEADS if other in file_names), file_name)
        whole = (rows, *shape[1:])
        view = make_mixture_view(spec, file_name, whole, file_names) or make_fp8_view(
            spec, file_name, whole, file_names
        )
        if isinstance(view, PlainTensor):
            entries.append(WeightEntry(name, view.name, start, length))
            continue
        view = view if length is None else RowSlice(view, start, length)
        entries.append(WeightEntry(name, next(iter(view.tensors())), view=view))
    return entries


def build_written_layout(spec: ModelSpec) -> WrittenLayout | None:
    """The files that are written, where their tensors are not the parameters under other names;
    None: `weight_map`.
    """
    if isinstance(spec, ExternalSpec):
        return spec.build_written_layout()
    if spec.mixture is None:
        return None
    names = {entry.our_name: entry.file_name for entry in build_weight_map(spec)}
    files: dict[str, tuple[int, ...]] = {}
    renamed: dict[str, str] = {}
    made: dict[str, WrittenExperts] = {}
    for name, shape in compute_parameter_shapes(spec).items():
        experts = find_written_experts(spec, name, shape)
        if experts is None:
            files[names[name]] = shape
            renamed[names[name]] = name
            continue
        parts = experts.convert({name: torch.empty(shape, device="meta")}.__getitem__)
        files |= {file_name: tuple(part.shape) for file_name, part in parts.items()}
        made |= dict.fromkeys(experts.tensors, experts)
    return WrittenLayout(files, renamed, made)


def why_left_out(spec: ModelSpec, file_name: str, dims: int) -> str | None:
    """Return why a checkpoint may hold this tensor without the model having it; None: it may not.

    Buffers that are computed, the head under a score head, vision parts, and what transformers'
    class says that it does not read. Another name of a tied weight is not among them: see
    `find_tied_copies`. dims: the tensor's dimensions.
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
    """Return tensors of a checkpoint that are a tied weight under another name than the one that is
    read.

    entries: of `weight_map` for the same names. Returns name -> the entry that it has to have the
    numbers of.
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


def compute_parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter, in the model's order; a tied output projection is the
    embedding.

    Of an external model also those of the buffers that belong into a checkpoint.
    """
    if isinstance(spec, ExternalSpec):
        return dict(spec.layout().shapes)
    return {
        name: tuple(value.shape)
        for name, value in build_meta(spec, torch.float32).named_parameters()
    }


def get_buffer_names(spec: ModelSpec) -> frozenset[str]:
    """Those of `parameter_shapes` that are buffers; our own models have none."""
    return spec.layout().buffers if isinstance(spec, ExternalSpec) else frozenset()


def _find_fused_rows(name: str, spec: DecoderSpec) -> tuple[str, int, int, int] | None:
    """Phi 3's fused tensors: queries, keys and values in `qkv_proj`, gate and up in `gate_up_proj`;
    first row, rows, and rows of the whole.
    """
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


# Where the tensors of a mixture of experts lie in files, which have them in more than one way.
#
# `apart`: a tensor for each matrix of each expert, as the families' own files on the hub. `fused`:
# all experts' in one tensor, gate and up together, as transformers holds them. gpt-oss has fused
# ones, transposed, or as MXFP4 blocks.


# Of files that have experts apart: the block's name in a layer, and its gate, up and down
# projection.
_APART = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "olmoe": ("mlp", "gate_proj", "up_proj", "down_proj"),
}
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def make_fp8_view(
    spec: DecoderSpec, name: str, shape: tuple[int, ...], file_names: Set[str]
) -> FileView:
    """A tensor of the file by its name: as it is, or in FP8 if the file has scales for it."""
    scales = f"{name}_scale_inv"
    if spec.codes.fp8_block is not None and scales in file_names and len(shape) > 1:
        return Fp8Blocks(name, scales, shape, spec.codes.fp8_block)
    return PlainTensor(name, shape)


def make_mixture_view(
    spec: DecoderSpec, name: str, shape: tuple[int, ...], file_names: Set[str]
) -> FileView | None:
    """How a parameter of a mixture is read, which has another name or is made of several tensors;
    None: no mixture's.

    shape: of the parameter. file_names: of the files that are read; empty: as files are written.
    """
    if ".mlp.router." in name:
        block = _APART[spec.family][0] if spec.family in _APART else "mlp"
        fused, written = (
            name.replace(".mlp.router.", f".{owner}.{get_router_name(spec)}.")
            for owner in ("mlp", block)
        )
        return make_fp8_view(spec, fused if fused in file_names else written, shape, file_names)
    for part in (GATE_UP, DOWN):
        if f".{part}." in name:
            return _make_experts_view(spec, name, part, shape, file_names)
    return None


def get_router_name(spec: DecoderSpec) -> str:
    """What transformers calls the router of a layer's block."""
    return "router" if spec.family == "gpt_oss" else "gate"


def _make_experts_view(
    spec: DecoderSpec, name: str, part: str, shape: tuple[int, ...], file_names: Set[str]
) -> FileView:
    fused, kind = name.rsplit(".", 1)
    if kind == "bias":
        return PlainTensor(f"{fused}_bias", shape)
    if spec.family not in _APART:
        if spec.codes.mxfp4 and not file_names.isdisjoint((f"{fused}_blocks", f"{fused}_scales")):
            return Mxfp4Blocks(f"{fused}_blocks", f"{fused}_scales", (shape[0], shape[1], shape[2]))
        return TransposedView(
            make_fp8_view(spec, fused, (shape[0], shape[2], shape[1]), file_names)
        )
    if fused in file_names:
        return make_fp8_view(spec, fused, shape, file_names)
    experts = []
    for expert in range(shape[0]):
        names = list_expert_names(spec, name, part, expert)
        own = [
            make_fp8_view(spec, other, (shape[1] // len(names), shape[2]), file_names)
            for other in names
        ]
        experts.append(own[0] if len(own) == 1 else ConcatenatedRows(tuple(own)))
    return StackedView(tuple(experts))


def list_expert_names(spec: DecoderSpec, name: str, part: str, expert: int) -> list[str]:
    """The tensors of files with experts apart that make this expert's part of our parameter, in the
    order of rows.
    """
    block, gate, up, down = _APART[spec.family]
    before = name[: name.index(f".{part}.")]
    return [
        f"{before}.{block}.experts.{expert}.{each}.weight"
        for each in ([gate, up] if part == GATE_UP else [down])
    ]


@dataclass(frozen=True)
class WrittenExperts:
    """What of files is made of one parameter of ours, the experts' matrices of a layer; see
    `Conversion`.
    """

    parameter: str
    tensors: dict[
        str, tuple[int | None, int, int]
    ]  # name in the file -> (expert, rows from, to); None: transposed

    def names(self) -> list[str]:
        return [self.parameter]

    def convert(
        self, read: Callable[[str], Tensor], names: Mapping[str, list[str]] | None = None
    ) -> dict[str, Tensor]:
        """The file's tensors, views of the parameter."""
        whole = read(self.parameter)
        return {
            name: whole.transpose(1, 2) if expert is None else whole[expert, first:last]
            for name, (expert, first, last) in self.tensors.items()
        }


def find_written_experts(
    spec: DecoderSpec, name: str, shape: tuple[int, ...]
) -> WrittenExperts | None:
    """What the files that are written have of a parameter of experts' matrices; None for any
    other.
    """
    part = next((part for part in (GATE_UP, DOWN) if f".{part}." in name), None)
    if part is None or len(shape) != 3:
        return None
    if spec.family not in _APART:
        return WrittenExperts(name, {name.rsplit(".", 1)[0]: (None, 0, 0)})
    found: dict[str, tuple[int | None, int, int]] = {}
    for expert in range(shape[0]):
        names = list_expert_names(spec, name, part, expert)
        rows = shape[1] // len(names)
        found |= {other: (expert, at * rows, (at + 1) * rows) for at, other in enumerate(names)}
    return WrittenExperts(name, found)
