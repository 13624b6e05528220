"""Map a model's parameters to the tensors of checkpoint files, for reading and for writing.

Loading calls `build_weight_map`. It has for each parameter the tensor of a file, or a view: an
object that makes the parameter of several tensors or of quantized ones. Saving calls
`build_written_layout`. A spec is the model's shape as plain numbers.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from recipe_lib.models.meta_init import build_meta
from recipe_lib.models.spec import (
    SCORE,
    DecoderSpec,
    ExternalSpec,
    ModelSpec,
    WeightEntry,
    WrittenLayout,
    has_score_head,
)

# Views of a checkpoint's tensors in the form that the model has.
#
# A view says which tensors of the files it takes. An `OpenView` of it is sliced as a tensor of a
# safetensors file is, so that each rank reads and decodes only the part that it keeps. There are
# views of one matrix, of all experts' matrices as one tensor, of transposed tensors, of MXFP4
# blocks, and of FP8 with a scale for each block.


# safetensors' names of the dtypes that a tensor which is not quantized may have.
_FLOATS = ("F64", "F32", "BF16", "F16")
_SCALES = (*_FLOATS, "F8_E8M0", "U8")  # safetensors' dtypes of the scales of FP8
MXFP4_BLOCK = 32  # numbers that share an exponent (OCP Microscaling Formats 1.0)
_MX_BIAS = 127  # scales are stored as exponents of 2 with this added
# The numbers of codes 0 to 7; codes 8 to 15 are their negatives.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# (first index, the one after the last) of a part, for each dimension of a tensor.
Bounds = list[tuple[int, int]]


@dataclass(frozen=True)
class FileForm:
    """The shape that a tensor of a file must have, and the dtypes that it may have."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = _FLOATS  # safetensors' names of them


class FileView(Protocol):
    """A tensor that is made of one or several tensors of files."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of what is made."""

    def tensors(self) -> dict[str, FileForm]:
        """Return name in the files -> form, of the tensors that it takes."""

    def read(self, slice_of: Callable[[str], Any], bounds: Bounds, dtype: torch.dtype) -> Tensor:
        """Return the part of the tensor within bounds.

        slice_of: returns safetensors' slice of the tensor of a name, which reads on indexing.
        dtype: that of decoded numbers; those that are not quantized keep the file's.
        """


@dataclass(frozen=True)
class OpenView:
    """A view with its files open, sliced as safetensors' slice of a tensor is."""

    view: FileView
    slice_of: Callable[[str], Any]  # as of `FileView.read`, dtype too
    dtype: torch.dtype

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        leading: Sequence[slice] = index if isinstance(index, tuple) else (index,)
        slices = [*leading, *[slice(None)] * (len(self.view.shape) - len(leading))]
        bounds = [
            part.indices(size)[:2] for part, size in zip(slices, self.view.shape, strict=True)
        ]
        return self.view.read(self.slice_of, bounds, self.dtype)

    def rows(self, start: int, stop: int, columns: slice) -> Tensor:
        """Return rows start to stop of a matrix `[o, i]`, of some of its columns.

        Of experts' matrices `[e, o, i]` the rows are those of the matrices one below the other,
        `[e o, i]`.
        """
        if len(self.view.shape) == 2:
            return self[start:stop, columns]
        height = self.view.shape[1]
        pieces = []
        for expert in range(start // height, -(-stop // height)):
            first = max(start - expert * height, 0)
            last = min(stop - expert * height, height)
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
        return cast(Tensor, slice_of(self.name)[_slices(bounds)])


@dataclass(frozen=True)
class TransposedView:
    """Another view with its last two dimensions exchanged."""

    part: FileView

    @property
    def shape(self) -> tuple[int, ...]:
        *leading, rows, columns = self.part.shape
        return (*leading, columns, rows)

    def tensors(self) -> dict[str, FileForm]:
        return self.part.tensors()

    def read(self, slice_of: Callable[[str], Any], bounds: Bounds, dtype: torch.dtype) -> Tensor:
        *leading, rows, columns = bounds
        return self.part.read(slice_of, [*leading, columns, rows], dtype).transpose(-1, -2)


@dataclass(frozen=True)
class _CombinedView:
    """A view that is made of others, which lie in the same files."""

    parts: tuple[FileView, ...]

    def tensors(self) -> dict[str, FileForm]:
        return dict(chain.from_iterable(part.tensors().items() for part in self.parts))


class ConcatenatedRows(_CombinedView):
    """Views whose shapes differ in the first dimension alone, one below the other."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    def read(self, slice_of: Callable[[str], Any], bounds: Bounds, dtype: torch.dtype) -> Tensor:
        (start, stop), *inner_bounds = bounds
        pieces = []
        begin = 0
        for part in self.parts:
            first = max(start - begin, 0)
            last = min(stop - begin, part.shape[0])
            if first < last:
                pieces.append(part.read(slice_of, [(first, last), *inner_bounds], dtype))
            begin += part.shape[0]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class StackedView(_CombinedView):
    """Views of the same shape, one for each expert, along a new first dimension."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts), *self.parts[0].shape)

    def read(self, slice_of: Callable[[str], Any], bounds: Bounds, dtype: torch.dtype) -> Tensor:
        (start, stop), *inner_bounds = bounds
        return torch.stack(
            [part.read(slice_of, inner_bounds, dtype) for part in self.parts[start:stop]]
        )


@dataclass(frozen=True)
class RowSlice:
    """Some rows of a tensor that holds several parameters one below the other."""

    part: FileView  # the tensor
    start: int  # its first row that is this parameter's
    length: int  # number of rows

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.length, *self.part.shape[1:])

    def tensors(self) -> dict[str, FileForm]:
        return self.part.tensors()

    def read(self, slice_of: Callable[[str], Any], bounds: Bounds, dtype: torch.dtype) -> Tensor:
        (first, last), *inner_bounds = bounds
        return self.part.read(
            slice_of, [(first + self.start, last + self.start), *inner_bounds], dtype
        )


@dataclass(frozen=True)
class Fp8Blocks:
    """A matrix `[o, i]`, or those of all experts `[E, o, i]`, in 8-bit floating point.

    Each block has a scale; blocks at the right and lower edge may be smaller. Scales are floating
    point numbers of any dtype, or powers of 2: float8_e8m0, or uint8 exponents with 127 added.
    """

    name: str  # of the tensor in the file
    scales: str  # name of the tensor of the blocks' scales
    shape: tuple[int, ...]
    block: tuple[int, int]  # rows and columns of a block

    def _get_block_sizes(self) -> tuple[int, ...]:
        """Return the size of a block in each dimension, none larger than the tensor itself."""
        sizes = (*[1] * (len(self.shape) - 2), *self.block)
        return tuple(
            max(1, min(size, limit)) for size, limit in zip(sizes, self.shape, strict=True)
        )

    def tensors(self) -> dict[str, FileForm]:
        blocks = tuple(
            -(-size // block_size)
            for size, block_size in zip(self.shape, self._get_block_sizes(), strict=True)
        )
        return {
            self.name: FileForm(self.shape, ("F8_E4M3",)),
            self.scales: FileForm(blocks, _SCALES),
        }

    def read(self, slice_of: Callable[[str], Any], bounds: Bounds, dtype: torch.dtype) -> Tensor:
        block_sizes = self._get_block_sizes()
        # Values are computed in fp32, and rounded to dtype at the end.
        values = slice_of(self.name)[_slices(bounds)].float()
        block_bounds = [
            (first // size, -(-last // size))
            for (first, last), size in zip(bounds, block_sizes, strict=True)
        ]
        scales = slice_of(self.scales)[_slices(block_bounds)]
        scales = (
            (scales.float() - _MX_BIAS).exp2() if scales.dtype == torch.uint8 else scales.float()
        )
        for dim, ((first, last), size) in enumerate(zip(bounds, block_sizes, strict=True)):
            scales = scales.index_select(dim, torch.arange(first, last) // size - first // size)
        return values.mul_(scales).to(dtype)


@dataclass(frozen=True)
class Mxfp4Blocks:
    """Matrices `[E, o, i]` in 4-bit floating point; 32 numbers of a row share an exponent.

    In the file blocks are uint8 `[E, o, i / 32, 16]`, two numbers a byte, the first in the low
    bits. Scales are uint8 `[E, o, i / 32]`, exponents of 2 with 127 added.
    """

    blocks: str  # name of the tensor of the numbers' codes
    scales: str  # name of the tensor of the exponents
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
        begin = first // MXFP4_BLOCK
        end = -(-last // MXFP4_BLOCK)
        block_index = (*_slices(rows), slice(begin, end))
        codes = slice_of(self.blocks)[block_index]
        exponents = slice_of(self.scales)[block_index].int() - _MX_BIAS
        levels = torch.tensor([*_FP4, *(-level for level in _FP4)], dtype=dtype)
        # [256, 2]: the two numbers of each byte, that of the low bits first.
        pairs = torch.stack((levels.repeat(16), levels.repeat_interleave(16)), dim=1)
        values = pairs.index_select(0, codes.flatten().int()).view(*codes.shape[:-1], MXFP4_BLOCK)
        values = torch.ldexp(values, exponents.unsqueeze(-1)).to(dtype).flatten(-2)
        return values[..., first - begin * MXFP4_BLOCK : last - begin * MXFP4_BLOCK]


# Prefix of the decoder's tensors in multimodal Gemma 3 files, in place of `model.` -> prefix of the
# head's in the same files.
_GEMMA3_PREFIXES = {
    "language_model.model.": "language_model.lm_head.",
    "model.language_model.": "lm_head.",
}
# Pattern of names of buffers in older files -> numbers of dimensions that such a buffer has. They
# tell a mask `attn.bias`, which has four, from the bias of a module `attn`, which has one.
_BUFFERS = {
    r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$": range(5),
    r"(^|\.)(attn|attention)\.bias$": (4,),
    r"(^|\.)masked_bias$": (0, 1),
}
# Names of the tensors of multimodal Gemma 3 that are not the text model's.
_OTHER_PARTS = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector)\.")
# Why tensors of a checkpoint are not read. Those that another program reads are carried into the
# export: all but the first two.
COMPUTED = "computed, not read"
SCORED = "the score head takes its place"
NOT_TEXT = "text does not run through it"
FROZEN = f"frozen, {NOT_TEXT}"  # of parts that are read since their class does not run without
_EMBEDDING = "model.embed_tokens.weight"
# Names of an output projection in files.
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")


def build_weight_map(spec: ModelSpec, file_names: Collection[str] = ()) -> list[WeightEntry]:
    """Return one entry per parameter, in the model's order.

    Parts of a fused tensor follow one another in row order. A tied output projection has no entry.
    file_names: the names of a checkpoint's tensors, by which the layout is chosen if the family has
    several. Empty: the layout that is written.
    """
    if isinstance(spec, ExternalSpec):
        return spec.build_weight_map(file_names)
    multimodal = [
        prefix for prefix in _GEMMA3_PREFIXES if any(name.startswith(prefix) for name in file_names)
    ]
    prefix = multimodal[-1] if spec.family == "gemma3" and multimodal else "model."
    head = _GEMMA3_PREFIXES.get(prefix, "lm_head.")
    entries = []
    file_names = frozenset(file_names)
    if _EMBEDDING not in file_names and _EMBEDDING.removeprefix("model.") in file_names:
        prefix = ""  # the decoder was saved without its head
    for name, shape in compute_parameter_shapes(spec).items():
        # rows: those of the tensor in the file. length: the parameter's among them; None: all.
        fused_rows = _find_fused_rows(name, spec) if spec.fused_file else None
        file_name, start, length, rows = fused_rows or (name, 0, None, shape[0])
        if file_name.startswith("model."):
            file_name = prefix + file_name.removeprefix("model.")
        elif file_name != SCORE:
            file_name = head + file_name.removeprefix("lm_head.")
        if name == _EMBEDDING and spec.tied and file_name not in file_names:
            # Some files have the tied weight under the head's name alone.
            file_name = next(
                (head_name for head_name in _HEADS if head_name in file_names), file_name
            )
        file_shape = (rows, *shape[1:])
        arguments = (spec, file_name, file_shape, file_names)
        view = make_mixture_view(*arguments) or make_fp8_view(*arguments)
        if isinstance(view, PlainTensor):
            entries.append(WeightEntry(name, file_name=view.name, start=start, length=length))
        else:
            view = view if length is None else RowSlice(view, start, length)
            entries.append(WeightEntry(name, next(iter(view.tensors())), view=view))
    return entries


def build_written_layout(spec: ModelSpec) -> WrittenLayout | None:
    """Return the tensors of written files, of a model with some that are not renamed parameters.

    None for any other model: the entries of `build_weight_map` say it all.
    """
    if isinstance(spec, ExternalSpec):
        return spec.build_written_layout()
    if spec.mixture is None:
        return None
    names = {entry.our_name: entry.file_name for entry in build_weight_map(spec)}
    files: dict[str, tuple[int, ...]] = {}
    renamed: dict[str, str] = {}
    conversions: dict[str, WrittenExperts] = {}
    for name, shape in compute_parameter_shapes(spec).items():
        experts = find_written_experts(spec, name, shape)
        if experts is None:
            files[names[name]] = shape
            renamed[names[name]] = name
        else:
            parts = experts.convert({name: torch.empty(shape, device="meta")}.__getitem__)
            files |= {file_name: tuple(part.shape) for file_name, part in parts.items()}
            conversions |= dict.fromkeys(experts.tensors, experts)
    return WrittenLayout(files, renamed, conversions)


def why_left_out(spec: ModelSpec, file_name: str, dims: int) -> str | None:
    """Return why a tensor of a checkpoint need not be a parameter of the model.

    Such are buffers that are computed, the output projection where the model has a score head, and
    vision parts. None: the tensor is unexpected, another name of a tied weight (see
    `find_tied_copies`), or for an external model to explain (`ExternalSpec.explain_unread`).

    dims: number of its dimensions.
    """
    if any(re.search(pattern, file_name) and dims in sizes for pattern, sizes in _BUFFERS.items()):
        return COMPUTED
    if isinstance(spec, ExternalSpec):
        return None
    if has_score_head(spec) and file_name in _HEADS:
        return SCORED
    if spec.family == "gemma3" and _OTHER_PARTS.match(file_name):
        return NOT_TEXT
    return None


def find_tied_copies(
    spec: ModelSpec, entries: Collection[WeightEntry], file_names: Collection[str]
) -> dict[str, WeightEntry]:
    """Return the tensors of a checkpoint that are a tied weight under a name that is not read.

    entries: of `build_weight_map` for the same file_names. Returns name in the file -> the entry of
    the parameter, whose values the tensor must have.
    """
    by_parameter = {entry.our_name: entry for entry in entries if entry.made is None}
    read_names = {entry.file_name for entry in by_parameter.values()}
    if isinstance(spec, ExternalSpec):
        tied = spec.tied_names(file_names)
    else:
        tied = dict.fromkeys(_HEADS if spec.tied and spec.num_labels is None else (), _EMBEDDING)
    return {
        name: by_parameter[parameter]
        for name, parameter in tied.items()
        if name in file_names and name not in read_names and parameter in by_parameter
    }


def compute_parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every parameter, in the model's order.

    A tied output projection is left out: it is the embedding. Of an external model the persistent
    buffers are there as well.
    """
    if isinstance(spec, ExternalSpec):
        return dict(spec.layout().shapes)
    return {
        name: tuple(value.shape)
        for name, value in build_meta(spec, torch.float32).named_parameters()
    }


def get_buffer_names(spec: ModelSpec) -> frozenset[str]:
    """Return the names in `compute_parameter_shapes` that are buffers; our decoder has none."""
    return spec.layout().buffers if isinstance(spec, ExternalSpec) else frozenset()


def _find_fused_rows(name: str, spec: DecoderSpec) -> tuple[str, int, int, int] | None:
    """Return where a parameter lies in Phi 3's or Granite 4's files; None: in one of its own.

    Gate and up are in one tensor, with Phi 3 queries, keys and values too. Returns (name of the
    fused tensor, the parameter's first row in it, its number of rows, rows of the fused tensor).
    """
    query = spec.num_heads * spec.head_width
    key = spec.num_kv_heads * spec.head_width
    is_phi = spec.family == "phi3"
    gate_up = "mlp.gate_up_proj" if is_phi else "shared_mlp.input_linear"
    # Linear -> (fused linear, first row, number of rows, rows of the fused one).
    parts = {
        "mlp.gate_proj": (gate_up, 0, spec.mlp_width, 2 * spec.mlp_width),
        "mlp.up_proj": (gate_up, spec.mlp_width, spec.mlp_width, 2 * spec.mlp_width),
    }
    if is_phi:
        parts |= {
            "self_attn.q_proj": ("self_attn.qkv_proj", 0, query, query + 2 * key),
            "self_attn.k_proj": ("self_attn.qkv_proj", query, key, query + 2 * key),
            "self_attn.v_proj": ("self_attn.qkv_proj", query + key, key, query + 2 * key),
        }
    else:
        # Not fused, but under another name.
        parts["mlp.down_proj"] = ("shared_mlp.output_linear", 0, spec.width, spec.width)
    for part, (fused, start, length, rows) in parts.items():
        if f".{part}." in name:
            return name.replace(part, fused), start, length, rows
    return None


# The tensors of a mixture of experts, which files have in one of two ways.
#
# `apart`: a tensor for each matrix of each expert, as in the families' own files on the hub.
# `fused`: the matrices of all experts as one tensor, gate and up together, as transformers and this
# decoder have them. gpt-oss files have fused ones, transposed, or as MXFP4 blocks.


# Family of files with experts apart -> (the mixture's name in a layer, then the names of an
# expert's gate, up and down projection).
_APART = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "olmoe": ("mlp", "gate_proj", "up_proj", "down_proj"),
}
# Names in a layer of our two modules that have all experts' matrices.
GATE_UP = "mlp.experts.gate_up_proj"
DOWN = "mlp.experts.down_proj"


def make_fp8_view(
    spec: DecoderSpec, name: str, shape: tuple[int, ...], file_names: Set[str]
) -> FileView:
    """Return the view of a tensor of a file: decoded from FP8 if the file has scales for it."""
    # By the scales: files keep some linears unquantized, and vectors always.
    scales = f"{name}_scale_inv"
    if spec.codes.fp8_block is not None and scales in file_names and len(shape) > 1:
        return Fp8Blocks(name, scales=scales, shape=shape, block=spec.codes.fp8_block)
    return PlainTensor(name, shape)


def make_mixture_view(
    spec: DecoderSpec, name: str, shape: tuple[int, ...], file_names: Set[str]
) -> FileView | None:
    """Return the view that a parameter of a mixture is read by; None for any other parameter.

    shape: of the parameter. file_names: the names of a checkpoint's tensors; empty: the layout that
    is written.
    """
    if ".mlp.router." in name:
        block = _APART[spec.family][0] if spec.family in _APART else "mlp"
        router = get_router_name(spec)
        fused_name = name.replace(".mlp.router.", f".mlp.{router}.")
        apart_name = name.replace(".mlp.router.", f".{block}.{router}.")
        return make_fp8_view(
            spec,
            name=fused_name if fused_name in file_names else apart_name,
            shape=shape,
            file_names=file_names,
        )
    part = next((part for part in (GATE_UP, DOWN) if f".{part}." in name), None)
    if part is None:
        return None
    return _make_experts_view(spec, name=name, part=part, shape=shape, file_names=file_names)


def get_router_name(spec: DecoderSpec) -> str:
    """Return what transformers calls the router of a layer's block."""
    return "router" if spec.family == "gpt_oss" else "gate"


def _make_experts_view(
    spec: DecoderSpec, *, name: str, part: str, shape: tuple[int, ...], file_names: Set[str]
) -> FileView:
    """Return the view of all experts' matrices, or biases, of a layer.

    name: of our parameter. part: GATE_UP or DOWN. shape, file_names: see `make_mixture_view`.
    """
    fused, suffix = name.rsplit(".", 1)  # name of the fused tensor in files, `weight` or `bias`
    if suffix == "bias":
        return PlainTensor(f"{fused}_bias", shape)
    if spec.family not in _APART:
        if spec.codes.mxfp4 and not file_names.isdisjoint((f"{fused}_blocks", f"{fused}_scales")):
            return Mxfp4Blocks(f"{fused}_blocks", f"{fused}_scales", (shape[0], shape[1], shape[2]))
        return TransposedView(
            make_fp8_view(
                spec, name=fused, shape=(shape[0], shape[2], shape[1]), file_names=file_names
            )
        )
    if fused in file_names:
        return make_fp8_view(spec, name=fused, shape=shape, file_names=file_names)
    experts = []
    for expert in range(shape[0]):
        names = list_expert_names(spec, name=name, part=part, expert=expert)
        matrix_shape = (shape[1] // len(names), shape[2])
        views = [
            make_fp8_view(spec, name=file_name, shape=matrix_shape, file_names=file_names)
            for file_name in names
        ]
        experts.append(views[0] if len(views) == 1 else ConcatenatedRows(tuple(views)))
    return StackedView(tuple(experts))


def list_expert_names(spec: DecoderSpec, name: str, part: str, expert: int) -> list[str]:
    """Return the names of an expert's tensors, of files with experts apart, in the order of rows.

    name: of our parameter. part: GATE_UP (two tensors) or DOWN (one).
    """
    block, gate, up, down = _APART[spec.family]
    layer = name[: name.index(f".{part}.")]
    projections = [gate, up] if part == GATE_UP else [down]
    return [f"{layer}.{block}.experts.{expert}.{projection}.weight" for projection in projections]


@dataclass(frozen=True)
class WrittenExperts:
    """The tensors of files that are made of one parameter, the experts' matrices of a layer.

    A `Conversion`, which is the interface that saving calls.
    """

    parameter: str  # its name
    # Name in the file -> (expert, its first row, the row after its last). Expert None: the matrices
    # of all experts, transposed; the rows are not read then.
    tensors: dict[str, tuple[int | None, int, int]]

    def names(self) -> list[str]:
        return [self.parameter]

    def convert(
        self, read: Callable[[str], Tensor], names: Mapping[str, list[str]] | None = None
    ) -> dict[str, Tensor]:
        """Return the file's tensors, views of the parameter."""
        parameter = read(self.parameter)
        return {
            name: parameter.transpose(1, 2) if expert is None else parameter[expert, first:last]
            for name, (expert, first, last) in self.tensors.items()
        }


def find_written_experts(
    spec: DecoderSpec, name: str, shape: tuple[int, ...]
) -> WrittenExperts | None:
    """Return the tensors that are written of a parameter with experts' matrices.

    None for any other parameter, experts' biases too: they are written as they are.
    """
    part = next((part for part in (GATE_UP, DOWN) if f".{part}." in name), None)
    if part is None or len(shape) != 3:
        return None
    if spec.family not in _APART:
        return WrittenExperts(name, {name.rsplit(".", 1)[0]: (None, 0, 0)})
    tensors: dict[str, tuple[int | None, int, int]] = {}
    for expert in range(shape[0]):
        names = list_expert_names(spec, name=name, part=part, expert=expert)
        rows = shape[1] // len(names)
        tensors |= {
            file_name: (expert, index * rows, (index + 1) * rows)
            for index, file_name in enumerate(names)
        }
    return WrittenExperts(name, tensors)
