"""AdamW whose states are kept in 4, 8, 16 or 32 bits, with master weights or rounding by chance, a
piece at a time.

A step computes in fp32 (fp64 for fp64 parameters) on runs of rows of a bounded number of elements,
in place, so that its temporaries have a fixed size whatever that of the model; each element's
numbers depend on nothing but its own block, so that they are the same on any number of ranks. Made
of torch's own operators, one kernel each; what a GPU's time for them is has not been measured
(docs/measurements/on_a_gpu.md).

Codes, scales and steps are those of torchao's AdamW8bit and AdamW4bit, with which tests compare
them bit for bit, but for second moments that its 8 bits round to zero: such a number would take
steps of up to 1 / sqrt(1 - betas[1]). Its classes are not used, because they cut blocks out of the
flattened part of a rank. So the states of Qwen2.5 0.5B take 270 MiB on each of 5 ranks, where ours
take 194 MiB (121 of its 169 matrices are in 8 bits, ours all, on any number of ranks), and what 3
ranks have saved 1, 2 or 4 cannot load, nor the other way round ("start and end align with block
boundary"); where the parts happen to be whole blocks, as on 1, 2, 4 and 8 ranks, they load the same
codes. Figures by docs/measurements/torchao.md, torchao 0.18. They also need torch.compile.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim import Optimizer

from recipe_lib.config.optimizer_facts import resolve_state_bits
from recipe_lib.config.schema import OptimizerConfig
from recipe_lib.errors import ConfigError
from recipe_lib.ops.dtensor_shards import get_detached_local, locate_local_part

# Numbers in 8 or 4 bits, in blocks with a scale each; and rounding to bf16 by chance that every
# rank agrees on.
#
# A block of consecutive numbers is divided by its largest absolute value, and each becomes the
# index of the nearest of 2^bits levels between -1 (or 0) and 1. The levels are the dynamic ones of
# Dettmers (arXiv:1511.04561, arXiv:2110.02861), whose spacing grows with the number; unsigned 4-bit
# levels are evenly spaced without a zero (Li, Chen and Zhu, arXiv:2309.01507), since a second
# moment of zero would make a step of any size. For the same reason a positive number never becomes
# the zero of the unsigned 8-bit levels, but the level above it. Levels, the longest blocks and all
# other rounding are torchao's, bit for bit, which tests hold. Its functions are not called:
# importing them takes a start 2 s of CPU more, as much again as torch, and its levels are made of
# tensors, which have no numbers on a simulated device.


BLOCKS = {8: 256, 4: 128}  # numbers that share a scale, at most
_SMALLEST_SCALE = 1e-12
_EXPONENTS = {8: 7, 4: 3}  # of signed levels, and of unsigned ones of 8 bits: powers of ten
_WORD = 2**32


@dataclass(frozen=True)
class Code:
    """How numbers become codes on one device. levels: `[2^bits]` fp32, rising; borders: `[2^bits -
    1]` fp32.
    """

    bits: int
    levels: Tensor
    borders: Tensor

    def encode(self, numbers: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """Codes, uint8 `[.., n]` (4 bits: `[.., n / 2]`, the first of two in the upper half), and
        scales `[.., n / block]` fp32, of numbers `[.., n]` fp32, of which each `block` share a
        scale.
        """
        blocks = numbers.unflatten(-1, (-1, block))
        scales = blocks.abs().amax(-1).clamp_(min=_SMALLEST_SCALE)
        scaled = (blocks / scales.unsqueeze(-1)).flatten(-2)
        codes = torch.bucketize(scaled, self.borders, out_int32=True, right=True)
        del scaled
        codes = codes.to(torch.uint8)
        if self.bits == 4:
            pairs = codes.unflatten(-1, (-1, 2))
            codes = (pairs[..., 0] << 4) | pairs[..., 1]
        return codes, scales

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The numbers `[.., n]`, fp32, that codes and scales stand for."""
        if self.bits == 4:
            codes = torch.stack((codes >> 4, codes & 15), dim=-1).flatten(-2)
        numbers = self.levels.index_select(0, codes.int().flatten()).view(codes.shape)
        numbers.unflatten(-1, (scales.shape[-1], -1)).mul_(scales.unsqueeze(-1))
        return numbers


def make_code(bits: int, *, signed: bool, device: torch.device) -> Code:
    """The code of 8 or 4 bits, for numbers of both signs or for those from 0 on; its tables take at
    most 2 KiB.
    """
    levels, borders = _make_tables(bits, signed)
    return Code(
        bits,
        torch.tensor(levels).to(device, copy=True),
        torch.tensor(borders).to(device, copy=True),
    )


@lru_cache
def _make_tables(bits: int, signed: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Levels, and from which fp32 number on each next one is the nearer; numbers, which no
    simulation can take.
    """
    if bits == 4 and not signed:
        levels = np.arange(1, 17, dtype=np.float32) / np.float32(16)
    else:
        levels = _make_dynamic_levels(bits, signed)
    borders = _find_borders(levels)
    if not signed and levels[0] == 0:
        borders[0] = np.nextafter(
            np.float32(0), np.float32(1)
        )  # whatever is more than zero has the next level
    return tuple(levels.tolist()), tuple(borders.tolist())


def _make_dynamic_levels(bits: int, signed: bool) -> np.ndarray:
    """For each power of ten up to 1 the middles of equal parts of [0.1, 1], twice as many as for
    the power below it.
    """
    found: list[np.ndarray] = [np.array([0, 1], dtype=np.float32)]
    exponents = _EXPONENTS[bits]
    for exponent in range(exponents):
        parts = 2 ** (exponent + bits - 1 - exponents + (0 if signed else 1))
        step = np.float64((np.float32(1) - np.float32(0.1)) / np.float32(parts))
        at = np.arange(
            parts + 1
        )  # rounded once, from the nearer end: torch.linspace differs by CPU in the last bit
        ends = np.where(
            at < (parts + 1) // 2, np.float64(np.float32(0.1)) + step * at, 1 - step * (parts - at)
        )
        ends = ends.astype(np.float32)
        middles = np.float32(10.0 ** (exponent - exponents + 1)) * (
            (ends[1:] + ends[:-1]) / np.float32(2)
        )
        found += [middles, -middles] if signed else [middles]
    return np.sort(np.concatenate(found))


def _find_borders(levels: np.ndarray) -> np.ndarray:
    """The first fp32 number between each two levels whose distance to the lower one is half of
    theirs or more.

    In fp32 arithmetic that is next to the middle, on one side or the other.
    """
    lower, half = levels[:-1], (levels[1:] - levels[:-1]) * np.float32(0.5)
    border = lower + half
    down, up = np.float32(-np.inf), np.float32(np.inf)
    for _ in range(4):
        before = np.nextafter(border, down)
        border = np.where(before - lower >= half, before, border)
        border = np.where(border - lower >= half, border, np.nextafter(border, up))
    return border


def round_stochastically(numbers: Tensor, places: Tensor, key: tuple[int, int]) -> Tensor:
    """bf16 of fp32 numbers: up or down, each with a probability by which the mean over keys is the
    number itself.

    places: int32 of the same shape, by which each draws its own, used up; key: two words for all of
    them (`chance_key`). Numbers that are not finite stay what they are.
    """
    drawn = _mix(places.bitwise_xor_(_wrap_word(key[0]))).bitwise_xor_(_wrap_word(key[1]))
    bits = (
        _mix(drawn).bitwise_and_(0xFFFF).add_(numbers.view(torch.int32)).bitwise_and_(-65536)
    )  # what fp32 has beyond bf16 is 0 now
    rounded = bits.view(torch.float32)
    return torch.where(numbers.isfinite(), rounded, numbers, out=rounded).to(torch.bfloat16)


def compute_rounding_key(seed: int, step: int, name: str) -> tuple[int, int]:
    """Two words of 32 bits that no other seed, step or name has."""
    digest = sha256(f"{seed}\0{step}\0{name}".encode()).digest()
    return int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:8], "big")


def compute_element_indices(
    shape: tuple[int, ...], start: tuple[int, ...], whole: tuple[int, ...], device: torch.device
) -> Tensor:
    """Row-major numbers, modulo 2^32 as int32, of a part's elements in the whole tensor.

    shape: of the part; start: where it begins in the tensor of shape `whole`. So a number that is
    drawn for an element does not depend on how many ranks the tensor is cut among.
    """
    places = torch.zeros((), dtype=torch.int32, device=device)
    stride = 1
    for dim in reversed(range(len(shape))):
        along = torch.arange(start[dim], start[dim] + shape[dim], device=device)
        words = (
            (along * stride + _WORD // 2).bitwise_and_(_WORD - 1).sub_(_WORD // 2).to(torch.int32)
        )
        places = places + words.view(-1, *(1,) * (len(shape) - 1 - dim))
        stride = stride * whole[dim] % _WORD
    return places


def _wrap_word(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word


def _mix(words: Tensor) -> Tensor:
    """Scrambles int32 words in place, each to another one: the last mixing of MurmurHash3 (Appleby,
    public domain).

    Shifts of int32 fill with the sign, which is masked away; products wrap.
    """
    words ^= (words >> 16).bitwise_and_(0xFFFF)
    words *= _wrap_word(0x85EBCA6B)
    words ^= (words >> 13).bitwise_and_(0x7FFFF)
    words *= _wrap_word(0xC2B2AE35)
    words ^= (words >> 16).bitwise_and_(0xFFFF)
    return words


# The tensors that an optimizer keeps next to a parameter: their types and bytes, read and written
# in pieces.
#
# Whatever its bits, a state lies on the ranks as its parameter does: a DTensor on the same mesh
# with the same placements, whose last dimension may be shorter. Blocks of numbers that share a
# scale lie within a row, so that neither the numbers nor what is saved depend on how many ranks
# there are.


CHUNK_ELEMENTS = 2**22  # elements that a step computes at a time: temporaries of some 20 B for each
MIN_BLOCKWISE_ELEMENTS = 4096  # elements of a parameter whose states are kept in blocks
MIN_BLOCK_SIZE = 16  # numbers of a block: with fewer the scales would weigh as much as the codes
MASTER = "master"
_LAYER_INDEX = re.compile(r"\.\d+\.")  # one of a list of modules
_FLOATS = {16: torch.bfloat16, 32: torch.float32}


@dataclass(frozen=True)
class StateLayout:
    """One tensor of a state: type, and numbers for each `per` of the parameter's last dimension."""

    dtype: torch.dtype
    per: int = 1


def get_compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a step computes in: fp32, for fp64 parameters fp64."""
    return torch.promote_types(dtype, torch.float32)


def get_state_bits(parameter: Tensor, bits: int | None) -> int | None:
    """The bits in which a parameter's states are kept; None: those of its own dtype.

    8 and 4 are for matrices (two dimensions or more) of at least `MIN_BLOCKWISE_ELEMENTS` elements
    whose rows are whole blocks of at least `MIN_BLOCK_SIZE`; all others, together a small part of a
    model, have 32.
    """
    if bits not in BLOCKS:
        return bits
    fits = (
        parameter.dim() >= 2
        and parameter.numel() >= MIN_BLOCKWISE_ELEMENTS
        and get_block_size(parameter, bits) >= MIN_BLOCK_SIZE
    )
    return bits if fits else 32


def get_block_size(parameter: Tensor, bits: int) -> int:
    """Numbers that share a scale: the longest block that rows are made of, 256 (8 bits) or 128 and
    less by halves.
    """
    return math.gcd(parameter.shape[-1], BLOCKS[bits])


def build_state_layouts(
    parameter: Tensor, names: tuple[str, ...], bits: int | None, *, master: bool
) -> dict[str, StateLayout]:
    """The tensors that keep the states `names` of a parameter, and its master weights, by their
    keys.
    """
    kept = get_state_bits(parameter, bits)
    found: dict[str, StateLayout] = {}
    for name in names:
        if kept in BLOCKS:
            found[f"{name}_codes"] = StateLayout(torch.uint8, 8 // kept)
            found[f"{name}_scales"] = StateLayout(torch.float32, get_block_size(parameter, kept))
        else:
            found[name] = StateLayout(parameter.dtype if kept is None else _FLOATS[kept])
    if master:
        found[MASTER] = StateLayout(torch.float32)
    return found


def is_layer_matrix(parameter: Tensor, name: str) -> bool:
    """Whether a parameter is a matrix of a layer, an adapter's two among them.

    Not embedding and output head, nor their adapters, nor anything that is no matrix.
    """
    return parameter.dim() == 2 and _LAYER_INDEX.search(f".{name}") is not None


def list_state_sizes(
    parameter: Tensor, names: tuple[str, ...], bits: int | None, master: bool
) -> list[int]:
    """Bytes of each of a parameter's state tensors on this rank."""
    elements = get_detached_local(parameter).numel()
    found = build_state_layouts(parameter, names, bits, master=master)
    return [elements // layout.per * layout.dtype.itemsize for layout in found.values()]


def make_state_tensor(parameter: Tensor, layout: StateLayout) -> Tensor:
    """Zeros that lie on the ranks, and on the device, as the parameter does."""
    local = get_detached_local(parameter)
    part = torch.zeros(_compute_state_shape(local, layout), dtype=layout.dtype, device=local.device)
    if not isinstance(parameter, DTensor):
        return part
    # Not DTensor.from_local, which would take what is on the host to the mesh's device.
    whole = torch.empty(_compute_state_shape(parameter, layout), dtype=layout.dtype, device="meta")
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    return DTensor(part, spec, requires_grad=False)


def _compute_state_shape(tensor: Tensor, layout: StateLayout) -> tuple[int, ...]:
    return (
        (*tensor.shape[:-1], tensor.shape[-1] // layout.per)
        if layout.per > 1
        else tuple(tensor.shape)
    )


def check_blocks(parameter: Tensor, name: str, bits: int | None) -> None:
    """ConfigError where ranks share a matrix by its columns and a block would lie on two of
    them.
    """
    kept = get_state_bits(parameter, bits)
    if kept in BLOCKS and get_detached_local(parameter).shape[-1] % get_block_size(parameter, kept):
        columns = parameter.shape[-1] // get_detached_local(parameter).shape[-1]
        raise ConfigError(
            f"optimizer.state_bits: found {kept} with {name or 'a matrix'} of {parameter.shape[-1]}"
            f" columns cut in {columns}, expected blocks of {get_block_size(parameter, kept)} within each"
            " part; use a smaller parallel.tensor, or state_bits=16"
        )


def iterate_chunks(local: Tensor) -> Iterator[slice]:
    """Runs of rows of a rank's part, of at most PIECE elements (one row, if that is longer)."""
    if not local.numel():
        return
    rows = max(1, CHUNK_ELEMENTS * len(local) // local.numel())
    for start in range(0, len(local), rows):
        yield slice(start, min(start + rows, len(local)))


@dataclass(frozen=True)
class ChunkValues:
    """Rows of the weights or of a state, as numbers to compute with: `values` to be changed in
    place, then `keep()`.

    stored: where they are kept, which may be `values` itself; of codes with their scales. round_to:
    rounds numbers to where they are kept.
    """

    values: Tensor
    stored: Tensor
    scales: Tensor | None
    code: Code | None
    round_to: Callable[[Tensor, Tensor], None]

    @property
    def is_copy(self) -> bool:
        """Whether `values` is not what is kept, and may be used up after `keep()`."""
        return self.values is not self.stored

    def keep(self) -> None:
        """Writes the values back."""
        if self.code is not None and self.scales is not None:
            codes, scales = self.code.encode(
                self.values, self.values.shape[-1] // self.scales.shape[-1]
            )
            self.stored.copy_(codes)
            self.scales.copy_(scales)
        elif self.is_copy:
            self.round_to(self.values, self.stored)


ADAMW_STATES = ("exp_avg", "exp_avg_sq")


class TrainedParameters(list[nn.Parameter]):
    """The parameters that are trained, and what a builder may need to know besides.

    names: a parameter's name, where it has one. device: the one that computes. seed: of what is
    drawn by chance.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        names: dict[nn.Parameter, str],
        device: torch.device,
        seed: int,
    ):
        super().__init__(parameters)
        self.names, self.device, self.seed = names, device, seed


@dataclass(frozen=True)
class ParameterShard:
    """A parameter's own part on this rank, in a step: with its gradient and states, their parts
    too.

    start, whole: where the part begins in the parameter, and that one's shape. chance: seed, step
    and parameter's name, which tell apart what is drawn by chance; None: all is rounded to the
    nearest.
    """

    weights: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    start: tuple[int, ...]
    whole: tuple[int, ...]
    chance: tuple[int, int, str] | None
    dtype: torch.dtype  # that is computed in

    def take(self, rows: slice, name: str = "", code: Code | None = None) -> ChunkValues:
        """Return rows of a state, or without a name of the weights, in the type that is computed
        in.
        """
        round_to = partial(self._round_to, rows, name)
        if code is not None:
            codes = self.state[f"{name}_codes"][rows]
            scales = self.state[f"{name}_scales"][rows]
            return ChunkValues(code.decode(codes, scales), codes, scales, code, round_to)
        stored = (self.state[name] if name else self.weights)[rows]
        master = None if name else self.state.get(MASTER)
        values = stored.to(self.dtype) if master is None else master[rows]
        return ChunkValues(values, stored, None, None, round_to)

    def _round_to(self, rows: slice, name: str, values: Tensor, stored: Tensor) -> None:
        """Write values to rows of a state or the weights; bf16 by chance where there is any."""
        if self.chance is None or stored.dtype != torch.bfloat16:
            stored.copy_(values)
            return
        start = (self.start[0] + rows.start, *self.start[1:])
        places = compute_element_indices(tuple(stored.shape), start, self.whole, stored.device)
        seed, step, parameter = self.chance
        # No parameter's name has a zero byte: weights and states draw apart.
        key = compute_rounding_key(seed, step, f"{parameter}\0{name}" if name else parameter)
        stored.copy_(round_stochastically(values.float(), places, key))


class ChunkedOptimizer(Optimizer):
    """An optimizer whose step goes through a rank's part of each parameter piece by piece.

    `optimizer.state[parameter]` has `step`, a number, and the tensors of `new_states`; a step for
    any of the parameters alone is as good as one for all.
    """

    def __init__(self, params: TrainedParameters, cfg: OptimizerConfig, numbers: dict[str, Any]):
        # The last two say of a saved state what it is made of; what counts is the config.
        made_of = {"state_bits": resolve_state_bits(cfg), "master_weights": cfg.master_weights}
        self.cfg, self.names, self.device, self.seed = cfg, params.names, params.device, params.seed
        self.state_bits = resolve_state_bits(cfg)
        self._codes: dict[tuple[torch.device, bool], Code] = {}  # tables, where they are asked for
        super().__init__(
            list(params) or [{"params": []}],
            {"lr": cfg.lr, "weight_decay": cfg.weight_decay} | numbers | made_of,
        )
        for parameter in params:
            check_blocks(parameter, self.names.get(parameter, ""), self.state_bits)
        chosen = params if cfg.stochastic_rounding else ()
        self._starts = {
            parameter: locate_local_part(parameter)[1] for parameter in chosen
        }  # torch takes long to find them

    def states_of(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """The names of the states that the rule keeps of a parameter."""
        return ADAMW_STATES

    def add_stand_in(self, parameter: nn.Parameter, owner: nn.Parameter) -> None:
        """Let a parameter on the device be stepped for one of ours that is on the host, under its
        name.
        """
        self.names[parameter] = self.names.get(owner, "")
        if owner in self._starts:
            self._starts[parameter] = self._starts[owner]

    def make_states(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Zeros for every state tensor of a parameter, by their keys; sharded as it is."""
        found = build_state_layouts(
            parameter, self.states_of(parameter), self.state_bits, master=self.cfg.master_weights
        )
        return {key: make_state_tensor(parameter, layout) for key, layout in found.items()}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of every parameter that has a gradient."""
        for group in self.param_groups:
            self._step_group(
                group, [parameter for parameter in group["params"] if parameter.grad is not None]
            )

    def _step_group(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            self._step_adamw(parameter, group)

    def _step_adamw(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """One step of AdamW (Loshchilov and Hutter, arXiv:1711.05101) on this rank's part.

        The update is made of the means before they are rounded to their bits, as torchao's is.
        """
        part = self._begin(parameter)
        step = self.state[parameter]["step"]
        beta1, beta2 = group["betas"]
        rate, decay, epsilon = group["lr"], group["weight_decay"], group["eps"]
        first, second = 1 - beta1**step, math.sqrt(1 - beta2**step)
        signed = self.find_code(parameter, part.weights.device, signed=True)
        unsigned = self.find_code(parameter, part.weights.device, signed=False)
        for rows in iterate_chunks(part.weights):
            gradient = part.gradient[rows].to(part.dtype)
            mean = part.take(rows, "exp_avg", signed)
            mean.values.lerp_(gradient, 1 - beta1)
            mean.keep()
            square = part.take(rows, "exp_avg_sq", unsigned)
            square.values.lerp_(gradient.square(), 1 - beta2)
            del gradient
            square.keep()
            width = square.values.sqrt_() if square.is_copy else square.values.sqrt()
            width.div_(second).add_(epsilon)
            weights = part.take(rows)
            weights.values.add_(weights.values, alpha=-rate * decay)
            weights.values.addcdiv_(mean.values, width, value=-rate / first)
            del mean, square, width  # so that they are gone when the next piece begins
            weights.keep()
            del weights

    def find_code(
        self, parameter: nn.Parameter, device: torch.device, *, signed: bool
    ) -> Code | None:
        """The code of a parameter's states, for steps on a device; None: they are floating-point
        numbers.
        """
        kept = get_state_bits(parameter, self.state_bits)
        if kept not in BLOCKS:
            return None
        if (device, signed) not in self._codes:
            self._codes[device, signed] = make_code(kept, signed=signed, device=device)
        return self._codes[device, signed]

    def _begin(self, parameter: nn.Parameter) -> ParameterShard:
        """Counts the step, makes the states if it is the first one, and takes this rank's parts."""
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state |= self.make_states(parameter)
            if MASTER in state:
                get_detached_local(state[MASTER]).copy_(get_detached_local(parameter))
        state["step"] += 1
        start = self._starts.get(parameter)
        chance = (
            None if start is None else (self.seed, state["step"], self.names.get(parameter, ""))
        )
        tensors = {
            name: _view_as_rows(get_detached_local(value))
            for name, value in state.items()
            if isinstance(value, Tensor)
        }
        gradient = parameter.grad
        assert gradient is not None
        return ParameterShard(
            weights=_view_as_rows(get_detached_local(parameter)),
            gradient=_view_as_rows(get_detached_local(gradient)),
            state=tensors,
            start=start or (0,),
            whole=tuple(parameter.shape) or (1,),
            chance=chance,
            dtype=get_compute_dtype(parameter.dtype),
        )


def _view_as_rows(local: Tensor) -> Tensor:
    """A number alone as a row."""
    return local if local.dim() else local.view(1)
