"""Where the tensors of a mixture of experts lie in files, which have them in more than one way.

`apart`: a tensor for each matrix of each expert, as the families' own files on the hub. `fused`: all experts' in one
tensor, gate and up together, as transformers holds them. gpt-oss has fused ones, transposed, or as MXFP4 blocks.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from recipe_lib.models.external_spec import WrittenLayout
from recipe_lib.models.file_views import FileView, Fp8Blocks, Mxfp4Blocks, PlainTensor, Rows, Stack, Swapped
from recipe_lib.models.spec import DecoderSpec

# Of files that have experts apart: the block's name in a layer, and its gate, up and down projection.
_APART = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "olmoe": ("mlp", "gate_proj", "up_proj", "down_proj"),
}
_ROUTERS = {"gpt_oss": "router"}  # else `gate`
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def fp8_view(spec: DecoderSpec, name: str, shape: tuple[int, ...], file_names: Set[str]) -> FileView:
    """A tensor of the file by its name: as it is, or in FP8 if the file has scales for it."""
    scales = f"{name}_scale_inv"
    if spec.codes.fp8_block is not None and scales in file_names and len(shape) > 1:
        return Fp8Blocks(name, scales, shape, spec.codes.fp8_block)
    return PlainTensor(name, shape)


def mixture_place(spec: DecoderSpec, name: str, shape: tuple[int, ...], file_names: Set[str]) -> str | FileView | None:
    """Where a parameter of ours lies: another name, or a view of several tensors; None: it is no mixture's.

    shape: of the parameter. file_names: of the files that are read; empty: as files are written.
    """
    if ".mlp.router." in name:
        return _router_place(spec, name, file_names)
    for part in (GATE_UP, DOWN):
        if f".{part}." in name:
            return _experts(spec, name, part, shape, file_names)
    return None


def router_name(spec: DecoderSpec) -> str:
    """What transformers calls the router of a layer's block."""
    return _ROUTERS.get(spec.family, "gate")


def _router_place(spec: DecoderSpec, name: str, file_names: Set[str]) -> str:
    block = _APART[spec.family][0] if spec.family in _APART else "mlp"
    router = router_name(spec)
    written = name.replace(".mlp.router.", f".{block}.{router}.")
    fused = name.replace(".mlp.router.", f".mlp.{router}.")
    return fused if fused in file_names else written


def _experts(spec: DecoderSpec, name: str, part: str, shape: tuple[int, ...], file_names: Set[str]) -> FileView:
    fused, kind = name.rsplit(".", 1)
    if kind == "bias":
        return PlainTensor(f"{fused}_bias", shape)
    if spec.family not in _APART:
        if spec.codes.mxfp4 and not file_names.isdisjoint((f"{fused}_blocks", f"{fused}_scales")):
            return Mxfp4Blocks(f"{fused}_blocks", f"{fused}_scales", (shape[0], shape[1], shape[2]))
        return Swapped(fp8_view(spec, fused, (shape[0], shape[2], shape[1]), file_names))
    if fused in file_names:
        return fp8_view(spec, fused, shape, file_names)
    experts = []
    for expert in range(shape[0]):
        own: list[FileView] = [
            fp8_view(spec, other, (shape[1] // len(names), shape[2]), file_names)
            for names in [expert_names(spec, name, part, expert)]
            for other in names
        ]
        experts.append(own[0] if len(own) == 1 else Rows(tuple(own)))
    return Stack(tuple(experts))


def expert_names(spec: DecoderSpec, name: str, part: str, expert: int) -> list[str]:
    """The tensors of files with experts apart that make this expert's part of our parameter, in the order of rows."""
    block, gate, up, down = _APART[spec.family]
    before = name[: name.index(f".{part}.")]
    return [f"{before}.{block}.experts.{expert}.{each}.weight" for each in ([gate, up] if part == GATE_UP else [down])]


@dataclass
class WrittenExperts:
    """What of files is made of one parameter of ours, the experts' matrices of a layer; see `Conversion`."""

    parameter: str
    tensors: dict[str, tuple[int | None, int, int]]  # name in the file -> (expert, rows from, to); None: transposed
    written: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.written = {name: name for name in self.tensors}

    def names(self) -> list[str]:
        """The parameter that it takes."""
        return [self.parameter]

    def convert(self, read: Callable[[str], Tensor], names: Mapping[str, list[str]] | None = None) -> dict[str, Tensor]:
        """The file's tensors, views of the parameter."""
        whole = read(self.parameter)
        return {
            name: whole.transpose(1, 2) if expert is None else whole[expert, first:last]
            for name, (expert, first, last) in self.tensors.items()
        }

    def shapes(self, shape_of: Callable[[str], tuple[int, ...]]) -> dict[str, tuple[int, ...]] | None:
        """The shapes of the file's tensors."""
        experts, rows, columns = shape_of(self.parameter)
        return {
            name: (experts, columns, rows) if expert is None else (last - first, columns)
            for name, (expert, first, last) in self.tensors.items()
        }

    def pieces(self) -> Any:
        """Everything at once."""
        yield 0, None, {self.parameter: [self.parameter]}


def written_experts(spec: DecoderSpec, name: str, shape: tuple[int, ...]) -> WrittenExperts | None:
    """What the files that are written have of a parameter of experts' matrices; None for any other."""
    part = next((part for part in (GATE_UP, DOWN) if f".{part}." in name), None)
    if part is None or len(shape) != 3:
        return None
    if spec.family not in _APART:
        return WrittenExperts(name, {name.rsplit(".", 1)[0]: (None, 0, 0)})
    found: dict[str, tuple[int | None, int, int]] = {}
    for expert in range(shape[0]):
        names = expert_names(spec, name, part, expert)
        rows = shape[1] // len(names)
        found |= {other: (expert, at * rows, (at + 1) * rows) for at, other in enumerate(names)}
    return WrittenExperts(name, found)


def written_layout(spec: DecoderSpec, shapes: Mapping[str, tuple[int, ...]], names: Mapping[str, str]) -> WrittenLayout:
    """The files of a model with a mixture. shapes: of our parameters. names: those that only have another name."""
    files: dict[str, tuple[int, ...]] = {}
    renamed: dict[str, str] = {}
    made: dict[str, WrittenExperts] = {}
    for name, shape in shapes.items():
        experts = written_experts(spec, name, shape)
        if experts is None:
            files[names[name]] = shape
            renamed[names[name]] = name
            continue
        files |= experts.shapes(lambda _, shape=shape: shape) or {}  # type: ignore[misc]
        made |= dict.fromkeys(experts.tensors, experts)
    return WrittenLayout(files, renamed, made)
