"""Plan which tensors the files of an exported folder hold, and read each when it is written.

`plan_shards` lays out the files from shapes alone, `TensorPieces` yields a tensor of them, made of
the model's parameters or copied from the folder that training began with (`Carried`).
"Collective": all ranks must call the function.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from recipe_lib.checkpoint.model_folders import SINGLE
from recipe_lib.checkpoint.safetensors_files import FileTensor, PlannedTensor
from recipe_lib.checkpoint.side_files import list_processor_files
from recipe_lib.checkpoint.tensor_matching import compute_file_shapes, list_carried, read_headers
from recipe_lib.models.spec import Conversion, DecoderSpec, ModelSpec
from recipe_lib.models.weight_names import build_weight_map, build_written_layout


@dataclass(frozen=True)
class Carried:
    """The parts of the folder that training began with which an export has unchanged."""

    # Name in the files -> a tensor that the model does not read, or not train.
    tensors: Mapping[str, FileTensor] = field(default_factory=dict)
    file_names: Collection[str] = ()  # names of all tensors of that folder
    processor_files: Sequence[Path] = ()  # settings of images, video and audio beside the weights

    def find_layout_names(self, spec: ModelSpec) -> Collection[str]:
        """Return the names by which our decoder's tensors are written as that folder has them.

        Empty: as the text model has them, where nothing of another part is beside them. A class of
        another library has one layout.
        """
        return self.file_names if self.tensors and isinstance(spec, DecoderSpec) else ()


NOTHING_CARRIED = Carried()


def find_carried(spec: ModelSpec, folder: Path | None, *, carries: bool) -> Carried:
    """Find what an export has unchanged from a checked folder.

    folder: that training began with; None: it began with random weights. carries: False: nothing,
    as `checkpoint.carry` says.

    Raises DataError for a processor's file that cannot be copied.
    """
    if folder is None or not carries:
        return NOTHING_CARRIED
    return Carried(
        tensors=list_carried(spec, folder),
        file_names=read_headers(folder).keys(),
        processor_files=list_processor_files(folder),
    )


def plan_shards(
    spec: ModelSpec,
    parameters: Mapping[str, PlannedTensor],
    max_shard_bytes: int,
    extras: Collection[str] = (),
    carried: Carried = NOTHING_CARRIED,
) -> dict[str, list[PlannedTensor]]:
    """Return file name -> the tensors in it, in the model's order.

    Files are named as transformers does.

    parameters: our name -> shape and dtype in the files. max_shard_bytes: bytes of data in a file;
    a larger tensor has a file of its own. extras: names of the parameters that the model's family
    does not have; they come after its own. carried: its tensors that are no parameters come last.
    """
    layout = build_written_layout(spec)
    if layout is None:
        entries = build_weight_map(spec, carried.find_layout_names(spec))
        shapes = compute_file_shapes(
            entries, {name: parameter.shape for name, parameter in parameters.items()}
        )
        dtypes = {entry.file_name: parameters[entry.our_name].dtype for entry in entries}
    else:
        # The family's files have tensors that are converted from several parameters of ours.
        shapes = dict(layout.shapes)
        dtypes = {name: parameters[our_name].dtype for name, our_name in layout.renamed.items()}
        dtypes |= {
            name: parameters[conversion.names()[0]].dtype
            for name, conversion in layout.made.items()
        }
    shapes |= {name: parameters[name].shape for name in extras}
    dtypes |= {name: parameters[name].dtype for name in extras}
    tensors = [
        PlannedTensor(name, dtypes[name], shape, source=carried.tensors.get(name))
        for name, shape in shapes.items()
    ]
    tensors += [
        PlannedTensor(name, torch.uint8, tensor.entry.shape, source=tensor)
        for name, tensor in carried.tensors.items()
        if name not in shapes
    ]
    shards: list[list[PlannedTensor]] = []
    filled_bytes = 0
    for tensor in tensors:
        if not shards or filled_bytes + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            filled_bytes = 0
        shards[-1].append(tensor)
        filled_bytes += tensor.num_bytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {
        f"model-{index:05d}-of-{len(shards):05d}.safetensors": shard
        for index, shard in enumerate(shards, start=1)
    }


class TensorPieces:
    """The data of the tensors in an export's files, with one parameter in memory at a time.

    Where tensors are converted from several parameters (`Conversion`), these are held together.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        read: Callable[[str], Iterator[torch.Tensor]],
        parameters: Mapping[str, PlannedTensor],
        extras: Collection[str],
        carried: Carried,
    ) -> None:
        """Look up which parameters each tensor of the files is made of.

        read: yields a parameter by its name on rank 0, as one tensor or as pieces of its bytes;
        collective. parameters: our name -> shape and dtype. extras, carried: see `plan_shards`.
        """
        self._read = read
        self._parameters = parameters
        self._layout = build_written_layout(spec)
        self._current: Conversion | None = None  # whose results are in `_converted`
        self._converted: dict[str, torch.Tensor] = {}  # its tensors that are not written yet
        # Name in the file -> the parameters that it is made of, in row order.
        self._parts: dict[str, list[str]] = {}
        if self._layout is None:
            entries = build_weight_map(spec, carried.find_layout_names(spec))
            for entry in sorted(entries, key=lambda entry: entry.start):
                self._parts.setdefault(entry.file_name, []).append(entry.our_name)
        else:
            self._parts = {name: [our_name] for name, our_name in self._layout.renamed.items()}
        self._parts |= {name: [name] for name in extras}

    def read_tensor(self, tensor: PlannedTensor) -> Iterator[torch.Tensor]:
        """Yield a tensor's data in consecutive pieces, on rank 0. Collective, but for a copy."""
        name = tensor.name
        if tensor.source is not None:
            yield from tensor.source.stream()
            return
        if name in self._parts:
            for part in self._parts[name]:
                yield from self._read(part)
            return
        assert self._layout is not None
        conversion = self._layout.made[name]
        if conversion is not self._current:
            self._current = conversion
            self._converted = {}  # frees the last conversion's tensors before the next are gathered
            parameters: dict[str, torch.Tensor] = {}
            for input_name in conversion.names():
                parameter = self._assemble(input_name)
                if parameter is not None:
                    parameters[input_name] = parameter
            if parameters:  # on rank 0; the other ranks get none
                self._converted = conversion.convert(parameters.__getitem__)
        if name in self._converted:
            converted = self._converted.pop(name)
            # Experts `[E, o, i]` go one by one: only one of them is made contiguous at a time.
            yield from (converted.split(1) if converted.dim() == 3 else (converted,))

    def _assemble(self, name: str) -> torch.Tensor | None:
        """Return a full parameter on rank 0, None on the other ranks. Collective.

        A parameter of another pipeline stage is put together from pieces of its bytes.
        """
        planned = self._parameters[name]
        parameter = None
        for piece in self._read(name):
            if piece.shape == planned.shape:
                parameter = piece
                continue
            if parameter is None:
                parameter = torch.empty(planned.shape, dtype=planned.dtype)
                unfilled_bytes = parameter.view(-1).view(torch.uint8)
            unfilled_bytes[: len(piece)] = piece
            unfilled_bytes = unfilled_bytes[len(piece) :]
        return parameter
