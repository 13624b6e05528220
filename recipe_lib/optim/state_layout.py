"""The tensors that an optimizer keeps next to a parameter: their types and bytes, read and written in pieces.

Whatever its bits, a state lies on the ranks as its parameter does: a DTensor on the same mesh with the same placements,
whose last dimension may be shorter. Blocks of numbers that share a scale lie within a row, so that neither the numbers
nor what is saved depend on how many ranks there are.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from recipe_lib.errors import ConfigError
from recipe_lib.ops.dtensor_shards import local_of
from recipe_lib.ops.low_bit import BLOCKS, Code, make_code

CHUNK_ELEMENTS = 2**22  # elements that a step computes at a time: temporaries of some 20 B for each
MIN_BLOCKWISE_ELEMENTS = 4096  # elements of a parameter whose states are kept in blocks
MIN_BLOCK_SIZE = 16  # numbers of a block: with fewer the scales would weigh as much as the codes
MASTER = "master"
_IN_A_LAYER = re.compile(r"\.\d+\.")  # one of a list of modules
_FLOATS = {16: torch.bfloat16, 32: torch.float32}


@dataclass(frozen=True)
class StateLayout:
    """One tensor of a state: type, and numbers for each `per` of the parameter's last dimension."""

    dtype: torch.dtype
    per: int = 1

    def bytes_of(self, elements: int) -> int:
        """Bytes for so many elements of a parameter."""
        return elements // self.per * self.dtype.itemsize


def wide(dtype: torch.dtype) -> torch.dtype:
    """What a step computes in: fp32, for fp64 parameters fp64."""
    return torch.promote_types(dtype, torch.float32)


def bits_of(parameter: Tensor, bits: int | None) -> int | None:
    """The bits in which a parameter's states are kept; None: those of its own dtype.

    8 and 4 are for matrices (two dimensions or more) of at least `MIN_BLOCKWISE_ELEMENTS` elements whose rows are
    whole blocks of at least `MIN_BLOCK_SIZE`; all others, together a small part of a model, have 32.
    """
    if bits not in BLOCKS:
        return bits
    fits = (
        parameter.dim() >= 2
        and parameter.numel() >= MIN_BLOCKWISE_ELEMENTS
        and block_of(parameter, bits) >= MIN_BLOCK_SIZE
    )
    return bits if fits else 32


def block_of(parameter: Tensor, bits: int) -> int:
    """Numbers that share a scale: the longest block that rows are made of, 256 (8 bits) or 128 and less by halves."""
    return math.gcd(parameter.shape[-1], BLOCKS[bits])


def layouts(parameter: Tensor, names: tuple[str, ...], bits: int | None, *, master: bool) -> dict[str, StateLayout]:
    """The tensors that keep the states `names` of a parameter, and its master weights, by their keys."""
    kept = bits_of(parameter, bits)
    found: dict[str, StateLayout] = {}
    for name in names:
        if kept in BLOCKS:
            found[f"{name}_codes"] = StateLayout(torch.uint8, 8 // kept)
            found[f"{name}_scales"] = StateLayout(torch.float32, block_of(parameter, kept))
        else:
            found[name] = StateLayout(parameter.dtype if kept is None else _FLOATS[kept])
    if master:
        found[MASTER] = StateLayout(torch.float32)
    return found


def is_layer_matrix(parameter: Tensor, name: str) -> bool:
    """Whether a parameter is a matrix of a layer, an adapter's two among them.

    Not embedding and output head, nor their adapters, nor anything that is no matrix.
    """
    return parameter.dim() == 2 and _IN_A_LAYER.search(f".{name}") is not None


def stored_sizes(parameter: Tensor, names: tuple[str, ...], bits: int | None, master: bool) -> list[int]:
    """Bytes of each of a parameter's state tensors on this rank."""
    elements = local_of(parameter).numel()
    found = layouts(parameter, names, bits, master=master)
    return [layout.bytes_of(elements) for layout in found.values()]


def new_tensor(parameter: Tensor, layout: StateLayout) -> Tensor:
    """Zeros that lie on the ranks, and on the device, as the parameter does."""
    local = local_of(parameter)
    if layout.per == 1 and not isinstance(parameter, DTensor):
        return torch.zeros_like(local, dtype=layout.dtype)
    shape = _shape(tuple(local.shape), layout)
    return laid_out(parameter, torch.zeros(shape, dtype=layout.dtype, device=local.device), layout.per)


def laid_out(parameter: Tensor, local: Tensor, per: int) -> Tensor:
    """A rank's part of a state as a tensor that lies on the ranks as the parameter does; of its rows `per` elements
    have one number."""
    if not isinstance(parameter, DTensor):
        return local
    # Not DTensor.from_local, which would take what is on the host to the mesh's device.
    whole = _shape(tuple(parameter.shape), StateLayout(local.dtype, per))
    strides = tuple(math.prod(whole[at + 1 :]) for at in range(len(whole)))
    meta = TensorMeta(torch.Size(whole), strides, local.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def _shape(shape: tuple[int, ...], layout: StateLayout) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] // layout.per) if layout.per > 1 else shape


def check_blocks(parameter: Tensor, name: str, bits: int | None) -> None:
    """ConfigError where ranks share a matrix by its columns and a block would lie on two of them."""
    kept = bits_of(parameter, bits)
    if kept in BLOCKS and local_of(parameter).shape[-1] % block_of(parameter, kept):
        columns = parameter.shape[-1] // local_of(parameter).shape[-1]
        raise ConfigError(
            f"optimizer.state_bits: found {kept} with {name or 'a matrix'} of {parameter.shape[-1]} columns cut in "
            f"{columns}, expected blocks of {block_of(parameter, kept)} within each part; use a smaller "
            "parallel.tensor, or state_bits=16"
        )


def pieces(local: Tensor) -> Iterator[slice]:
    """Runs of rows of a rank's part, of at most PIECE elements (one row, if that is longer)."""
    if not local.numel():
        return
    rows = max(1, CHUNK_ELEMENTS * len(local) // local.numel())
    for start in range(0, len(local), rows):
        yield slice(start, min(start + rows, len(local)))


class Numbers:
    """A piece of one state, as numbers to compute with: `values` to be changed in place, then `keep()`.

    Where the state is in the type that is computed in, `values` is the state itself. store: rounds values to rows of
    the state of that name.
    """

    def __init__(
        self,
        state: dict[str, Tensor],
        name: str,
        rows: slice,
        dtype: torch.dtype,
        code: Code | None,
        store: Callable[[Tensor, Tensor, slice, str], None],
    ):
        self.code = code
        self._name = name
        self._rows = rows
        self._store = store
        if code is not None:
            self._codes, self._scales = state[f"{name}_codes"][rows], state[f"{name}_scales"][rows]
            self.values = code.decode(self._codes, self._scales)
        else:
            self._stored = state[name][rows]
            self.values = self._stored.to(dtype)

    @property
    def is_copy(self) -> bool:
        """Whether `values` is not the state itself, and may be used up after `keep()`."""
        return self.code is not None or self.values is not self._stored

    def keep(self) -> None:
        """Writes the values back to the state."""
        if self.code is not None:
            codes, scales = self.code.encode(self.values, self.values.shape[-1] // self._scales.shape[-1])
            self._codes.copy_(codes)
            self._scales.copy_(scales)
        elif self.is_copy:
            self._store(self._stored, self.values, self._rows, self._name)


class Codes:
    """The tables of codes on the devices that have asked for them."""

    def __init__(self, bits: int | None) -> None:
        self.bits = bits
        self._made: dict[tuple[torch.device, bool], Code] = {}

    def of(self, parameter: nn.Parameter, device: torch.device, *, signed: bool) -> Code | None:
        """The code of a parameter's states, for steps on a device; None: they are floating-point numbers."""
        kept = bits_of(parameter, self.bits)
        if kept not in BLOCKS:
            return None
        if (device, signed) not in self._made:
            self._made[device, signed] = make_code(kept, signed=signed, device=device)
        return self._made[device, signed]
