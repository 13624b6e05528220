"""Step AdamW with states of 4, 8, 16 or 32 bits, master weights or stochastic rounding.

`optim/algorithms/adamw.py` builds a `ChunkedOptimizer` for such configs; `muon.py` derives from it.
It steps a rank's part of each parameter in chunks: runs of rows, computed in fp32, so that its
temporaries have a fixed size. In 4 and 8 bits a state is codes: the elements of a block share a
scale. Results do not depend on the number of ranks.
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

# A block of consecutive elements is divided by its largest absolute value, and each becomes the
# index of the nearest of 2^bits levels between -1 (or 0) and 1. The levels are the dynamic ones of
# Dettmers (arXiv:1511.04561, arXiv:2110.02861), whose spacing grows with the number; unsigned 4-bit
# levels are evenly spaced without a zero (Li, Chen and Zhu, arXiv:2309.01507), since a second
# moment of zero would make a step of any size. For the same reason a positive number never becomes
# the zero of the unsigned 8-bit levels, but the level above it. Levels, the longest blocks and all
# other rounding are torchao's. Its functions are not called: importing them takes 2 s of CPU, and
# its levels are tensors, which have no values on the simulated device of `tune plan`.

# Codes, scales and steps are those of torchao's AdamW8bit and AdamW4bit, with which tests compare
# them bit for bit, but for second moments that its 8 bits round to zero: such a number would take
# steps of up to 1 / sqrt(1 - betas[1]). Its classes are not used, because they cut blocks out of
# the flattened part of a rank: which matrices are in 8 bits depends on the number of ranks, and
# states saved by 3 ranks cannot be loaded by 1, 2 or 4 (docs/measurements/torchao.md, torchao
# 0.18). They also need torch.compile.

BLOCKS = {8: 256, 4: 128}  # bits -> the most elements that share a scale
_SMALLEST_SCALE = 1e-12  # of a block, as its elements are divided by the scale: all may be zeros
_EXPONENTS = {8: 7, 4: 3}  # bits -> the number of powers of ten that dynamic levels span
_WORD = 2**32  # the number of values of a 32-bit word


@dataclass(frozen=True)
class Code:
    """The tables, on one device, of a code of 8 or 4 bits for blocks of numbers."""

    bits: int  # 8 or 4
    levels: Tensor  # `[2^bits]` fp32, rising: the number, over its block's scale, of each code
    # `[2^bits - 1]` fp32: a number from border i on becomes level i + 1, one below it level i.
    borders: Tensor

    def encode(self, values: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """Return codes and scales of fp32 values `[.., n]`.

        block: the number of consecutive elements that share a scale. Codes are uint8 `[.., n]`;
        with 4 bits `[.., n / 2]`, the first of two in the upper half. Scales are fp32
        `[.., n / block]`.
        """
        blocks = values.unflatten(-1, (-1, block))
        scales = blocks.abs().amax(-1).clamp_(min=_SMALLEST_SCALE)
        scaled = (blocks / scales.unsqueeze(-1)).flatten(-2)
        codes = torch.bucketize(scaled, self.borders, out_int32=True, right=True)
        del scaled  # before the codes are copied
        codes = codes.to(torch.uint8)
        if self.bits == 4:
            pairs = codes.unflatten(-1, (-1, 2))
            codes = (pairs[..., 0] << 4) | pairs[..., 1]
        return codes, scales

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the values `[.., n]`, fp32, of codes and scales from `encode`."""
        if self.bits == 4:
            codes = torch.stack((codes >> 4, codes & 15), dim=-1).flatten(-2)
        values = self.levels.index_select(0, codes.int().flatten()).view(codes.shape)
        values.unflatten(-1, (scales.shape[-1], -1)).mul_(scales.unsqueeze(-1))
        return values


def make_code(bits: int, *, signed: bool, device: torch.device) -> Code:
    """Return the code of 8 or 4 bits, with its tables on a device, which take at most 2 KiB.

    signed: for values of both signs; False: for values from 0 on.
    """
    levels, borders = _make_tables(bits, signed)
    return Code(
        bits,
        torch.tensor(levels).to(device, copy=True),
        torch.tensor(borders).to(device, copy=True),
    )


@lru_cache
def _make_tables(bits: int, signed: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return levels and borders as Python numbers: simulated tensors have no values."""
    if bits == 4 and not signed:
        levels = np.arange(1, 17, dtype=np.float32) / np.float32(16)
    else:
        levels = _make_dynamic_levels(bits, signed)
    borders = _find_borders(levels)
    if not signed and levels[0] == 0:
        # No number above zero becomes zero: the module's comment on levels says why.
        borders[0] = np.nextafter(np.float32(0), np.float32(1))
    return tuple(levels.tolist()), tuple(borders.tolist())


def _make_dynamic_levels(bits: int, signed: bool) -> np.ndarray:
    """Return the dynamic levels, fp32 `[2^bits]`, rising.

    For each power of ten up to 1, [0.1, 1] is cut into equal parts, twice as many as for the power
    below. The levels are the middles of the parts times the power, and 0 and 1.
    """
    levels: list[np.ndarray] = [np.array([0, 1], dtype=np.float32)]
    exponents = _EXPONENTS[bits]
    for exponent in range(exponents):
        num_parts = 2 ** (exponent + bits - 1 - exponents + (0 if signed else 1))
        step = np.float64((np.float32(1) - np.float32(0.1)) / np.float32(num_parts))
        index = np.arange(num_parts + 1)
        # Rounded once, from the nearer end: torch.linspace differs by CPU in the last bit.
        from_left = np.float64(np.float32(0.1)) + step * index
        from_right = 1 - step * (num_parts - index)
        ends = np.where(index < (num_parts + 1) // 2, from_left, from_right).astype(np.float32)
        power = np.float32(10.0 ** (exponent - exponents + 1))
        middles = power * ((ends[1:] + ends[:-1]) / np.float32(2))
        levels += [middles, -middles] if signed else [middles]
    return np.sort(np.concatenate(levels))


def _find_borders(levels: np.ndarray) -> np.ndarray:
    """Return for each level but the last the least fp32 number half way or more to the next."""
    lower = levels[:-1]
    half = (levels[1:] - lower) * np.float32(0.5)
    # In fp32 the sum is near the middle, on either side: a few steps down or up find the border.
    border = lower + half
    for _ in range(4):
        next_below = np.nextafter(border, np.float32(-np.inf))
        border = np.where(next_below - lower >= half, next_below, border)
        next_above = np.nextafter(border, np.float32(np.inf))
        border = np.where(border - lower >= half, border, next_above)
    return border


def round_stochastically(values: Tensor, indices: Tensor, key: tuple[int, int]) -> Tensor:
    """Return fp32 values rounded up or down to bf16, so that the mean over keys is the value.

    indices: int32 of the same shape, from `compute_element_indices`, overwritten: an element's
    random number follows from its index and the key. key: two 32-bit words, from
    `compute_rounding_key`. Infinities and NaN stay.
    """
    random_words = _mix(indices.bitwise_xor_(_wrap_word(key[0]))).bitwise_xor_(_wrap_word(key[1]))
    # A random number below 2^16 is added to the 16 bits that bf16 lacks, which are then set to 0.
    bits = (
        _mix(random_words).bitwise_and_(0xFFFF).add_(values.view(torch.int32)).bitwise_and_(-65536)
    )
    rounded = bits.view(torch.float32)
    return torch.where(values.isfinite(), rounded, values, out=rounded).to(torch.bfloat16)


def compute_rounding_key(seed: int, step: int, name: str) -> tuple[int, int]:
    """Return two words of 32 bits, a hash of seed, step and the tensor's name."""
    digest = sha256(f"{seed}\0{step}\0{name}".encode()).digest()
    return int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:8], "big")


def compute_element_indices(
    shape: tuple[int, ...],
    start: tuple[int, ...],
    full_shape: tuple[int, ...],
    device: torch.device,
) -> Tensor:
    """Return the row-major indices of a part's elements in the full tensor, int32 modulo 2^32.

    shape: of the part. start: its offset in the tensor of shape `full_shape`. By these indices the
    random number of an element does not depend on how many ranks the tensor is sharded over.
    """
    indices = torch.zeros((), dtype=torch.int32, device=device)
    stride = 1
    for dim in reversed(range(len(shape))):
        # Computed in int64; `words` are the same modulo 2^32, in the range of int32.
        positions = torch.arange(start[dim], start[dim] + shape[dim], device=device)
        words = (positions * stride + _WORD // 2).bitwise_and_(_WORD - 1).sub_(_WORD // 2)
        words = words.to(torch.int32)
        indices = indices + words.view(-1, *(1,) * (len(shape) - 1 - dim))
        stride = stride * full_shape[dim] % _WORD
    return indices


def _wrap_word(word: int) -> int:
    """Return the int32 with the bits of an unsigned word."""
    return word - _WORD if word >= _WORD // 2 else word


def _mix(words: Tensor) -> Tensor:
    """Scramble int32 words in place, each to another one, and return them.

    The last mixing of MurmurHash3 (Appleby, public domain).
    """
    # Shifts of int32 fill with the sign, which is masked away; products wrap.
    words ^= (words >> 16).bitwise_and_(0xFFFF)
    words *= _wrap_word(0x85EBCA6B)
    words ^= (words >> 13).bitwise_and_(0x7FFFF)
    words *= _wrap_word(0xC2B2AE35)
    words ^= (words >> 16).bitwise_and_(0xFFFF)
    return words


# A state is sharded as its parameter is: a DTensor on the same mesh with the same placements. Its
# last dimension is shorter for scales and 4-bit codes. Blocks lie within a row, so that neither
# values nor saved states depend on the number of ranks.

CHUNK_ELEMENTS = 2**22  # elements that a step computes at a time: temporaries of some 20 B for each
MIN_BLOCKWISE_ELEMENTS = 4096  # the least elements of a parameter whose states are coded in blocks
MIN_BLOCK_SIZE = 16  # elements of a block: with fewer, scales take as many bytes as 4-bit codes
MASTER = "master"  # the key of the fp32 master weights in a parameter's state
ADAMW_STATES = ("exp_avg", "exp_avg_sq")
_LAYER_INDEX = re.compile(r"\.\d+\.")  # in the names of parameters in a list of modules
_FLOATS = {16: torch.bfloat16, 32: torch.float32}  # bits -> dtype of a state without codes


@dataclass(frozen=True)
class StateLayout:
    """The dtype and width of one tensor of a parameter's states."""

    dtype: torch.dtype
    per: int = 1  # how many elements of a parameter's row stand for one element of the tensor


def get_state_bits(parameter: Tensor, bits: int | None) -> int | None:
    """Return the bits in which a parameter's states are kept; None: those of its own dtype.

    bits: the config's `optimizer.state_bits`, None as in the result. 8 and 4 are for tensors of two
    dimensions or more, with at least `MIN_BLOCKWISE_ELEMENTS` elements, whose rows are whole blocks
    of at least `MIN_BLOCK_SIZE`. All others, together a small part of a model, have 32.
    """
    if bits not in BLOCKS:
        return bits
    is_blockwise = (
        parameter.dim() >= 2
        and parameter.numel() >= MIN_BLOCKWISE_ELEMENTS
        and get_block_size(parameter, bits) >= MIN_BLOCK_SIZE
    )
    return bits if is_blockwise else 32


def get_block_size(parameter: Tensor, bits: int) -> int:
    """Return the number of elements that share a scale: the longest block that divides a row.

    It is 256 (8 bits) or 128 (4 bits), or a half, quarter, ... of it.
    """
    return math.gcd(parameter.shape[-1], BLOCKS[bits])


def build_state_layouts(
    parameter: Tensor, names: tuple[str, ...], bits: int | None, *, master: bool
) -> dict[str, StateLayout]:
    """Return the layouts of a parameter's state tensors, by key in `optimizer.state[parameter]`.

    names: of the states, such as `exp_avg`; in 4 or 8 bits it becomes two tensors, `exp_avg_codes`
    and `exp_avg_scales`. bits: `optimizer.state_bits`. master: True: with fp32 master weights.
    """
    state_bits = get_state_bits(parameter, bits)
    layouts: dict[str, StateLayout] = {}
    for name in names:
        if state_bits in BLOCKS:
            block = get_block_size(parameter, state_bits)
            layouts[f"{name}_codes"] = StateLayout(torch.uint8, 8 // state_bits)
            layouts[f"{name}_scales"] = StateLayout(torch.float32, block)
        else:
            dtype = parameter.dtype if state_bits is None else _FLOATS[state_bits]
            layouts[name] = StateLayout(dtype)
    if master:
        layouts[MASTER] = StateLayout(torch.float32)
    return layouts


def is_layer_matrix(parameter: Tensor, name: str) -> bool:
    """Return True for a matrix of a layer, or of an adapter in it: those that Muon steps.

    Return False for embedding and output head, for their adapters, for vectors, and for tensors of
    three dimensions such as stacked experts. name: the parameter's in the model.
    """
    # With a dot before the name, which may begin with the index.
    return parameter.dim() == 2 and _LAYER_INDEX.search(f".{name}") is not None


def list_state_sizes(
    parameter: Tensor, names: tuple[str, ...], bits: int | None, *, master: bool
) -> list[int]:
    """Return the bytes of each of a parameter's state tensors on this rank.

    names, bits, master: see `build_state_layouts`.
    """
    num_elements = get_detached_local(parameter).numel()
    layouts = build_state_layouts(parameter, names, bits, master=master)
    return [num_elements // layout.per * layout.dtype.itemsize for layout in layouts.values()]


def make_state_tensor(parameter: Tensor, layout: StateLayout) -> Tensor:
    """Return a state tensor of zeros, sharded as the parameter is and on its device."""
    local = get_detached_local(parameter)
    part = torch.zeros(_compute_state_shape(local, layout), dtype=layout.dtype, device=local.device)
    if not isinstance(parameter, DTensor):
        return part
    # Not DTensor.from_local, which would copy a part on the host to the mesh's device.
    full = torch.empty(_compute_state_shape(parameter, layout), dtype=layout.dtype, device="meta")
    meta = TensorMeta(full.shape, full.stride(), full.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    return DTensor(part, spec, requires_grad=False)


def _compute_state_shape(tensor: Tensor, layout: StateLayout) -> tuple[int, ...]:
    if layout.per == 1:  # the tensor may have no dimensions
        return tuple(tensor.shape)
    return (*tensor.shape[:-1], tensor.shape[-1] // layout.per)


def check_blocks(parameter: Tensor, name: str, bits: int | None) -> None:
    """Raise ConfigError if a matrix is sharded by columns, and a cut lies within a block.

    name: the parameter's, for the message; may be empty. bits: `optimizer.state_bits`.
    """
    state_bits = get_state_bits(parameter, bits)
    if state_bits not in BLOCKS:
        return
    local_columns = get_detached_local(parameter).shape[-1]
    block = get_block_size(parameter, state_bits)
    if local_columns % block:
        parts = parameter.shape[-1] // local_columns
        raise ConfigError(
            f"optimizer.state_bits: found {state_bits} with {name or 'a matrix'} of"
            f" {parameter.shape[-1]} columns cut in {parts}, expected blocks of {block} within each"
            " part; use a smaller parallel.tensor, or state_bits=16"
        )


def iterate_chunks(local: Tensor) -> Iterator[slice]:
    """Yield slices of a tensor's rows, of at most CHUNK_ELEMENTS elements or one longer row each.

    local: this rank's part of a parameter, of at least one dimension.
    """
    if not local.numel():
        return
    rows = max(1, CHUNK_ELEMENTS * len(local) // local.numel())
    for start in range(0, len(local), rows):
        yield slice(start, min(start + rows, len(local)))


@dataclass(frozen=True)
class ChunkValues:
    """A chunk of the weights or of a state: change `values` in place, then `write_back()`."""

    values: Tensor  # in the dtype of the step's arithmetic; of weights the master's, if any
    stored: Tensor  # rows of the weights or the state: `values` itself, rounded ones, or codes
    scales: Tensor | None  # of the codes; None: `stored` has no codes
    code: Code | None  # None: `stored` has no codes
    round_to: Callable[[Tensor, Tensor], None]  # `fn(values, stored)` writes rounded values

    @property
    def is_copy(self) -> bool:
        """Return True if `values` and `stored` are two tensors.

        Those of a state may then be overwritten after `write_back()`, but not master weights.
        """
        return self.values is not self.stored

    def write_back(self) -> None:
        if self.code is not None and self.scales is not None:
            block = self.values.shape[-1] // self.scales.shape[-1]
            codes, scales = self.code.encode(self.values, block)
            self.stored.copy_(codes)
            self.scales.copy_(scales)
        elif self.is_copy:
            self.round_to(self.values, self.stored)


class TrainedParameters(list[nn.Parameter]):
    """The parameters that are trained, with what builders of optimizers need to know of them."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        names: dict[nn.Parameter, str],
        device: torch.device,
        seed: int,
    ):
        super().__init__(parameters)
        self.names = names  # parameter -> its name in the model
        self.device = device  # the one that computes; parameters may be on the host
        self.seed = seed  # of stochastic rounding


@dataclass(frozen=True)
class ParameterShard:
    """A parameter's part on this rank, in a step, with its gradient and states.

    All have at least one dimension, so that they can be cut by rows.
    """

    weights: Tensor  # in the parameter's dtype
    gradient: Tensor  # of the weights' shape
    state: dict[str, Tensor]  # key -> this rank's part of the state tensor
    start: tuple[int, ...]  # the part's offset in the full parameter
    full_shape: tuple[int, ...]  # of the parameter
    # (seed, step, parameter's name) of stochastic rounding; None: bf16 is rounded to the nearest.
    rounding: tuple[int, int, str] | None
    dtype: torch.dtype  # of the step's arithmetic: fp32, for fp64 parameters fp64

    def take(self, rows: slice, name: str = "", code: Code | None = None) -> ChunkValues:
        """Return rows of a state as values to compute with; name "": rows of the weights.

        code: of the state, from `find_code`; None: it has no codes.
        """
        round_to = partial(self._round_to, rows, name)
        if code is not None:
            codes = self.state[f"{name}_codes"][rows]
            scales = self.state[f"{name}_scales"][rows]
            return ChunkValues(
                values=code.decode(codes, scales),
                stored=codes,
                scales=scales,
                code=code,
                round_to=round_to,
            )
        stored = (self.state[name] if name else self.weights)[rows]
        master = None if name else self.state.get(MASTER)
        values = stored.to(self.dtype) if master is None else master[rows]
        return ChunkValues(values=values, stored=stored, scales=None, code=None, round_to=round_to)

    def _round_to(self, rows: slice, name: str, values: Tensor, stored: Tensor) -> None:
        """Write values to `stored`, rounded to the nearest or, in bf16, stochastically.

        rows: where `stored` lies in this rank's part. name: the state's; "": the weights.
        """
        if self.rounding is None or stored.dtype != torch.bfloat16:
            stored.copy_(values)
            return
        start = (self.start[0] + rows.start, *self.start[1:])
        indices = compute_element_indices(
            tuple(stored.shape), start, full_shape=self.full_shape, device=stored.device
        )
        seed, step, parameter = self.rounding
        # No parameter's name has a zero byte, so that weights and states have different keys.
        key = compute_rounding_key(seed, step, f"{parameter}\0{name}" if name else parameter)
        stored.copy_(round_stochastically(values.float(), indices, key))


class ChunkedOptimizer(Optimizer):
    """An optimizer whose step goes through a rank's part of each parameter chunk by chunk.

    `optimizer.state[parameter]` has `step`, a Python number, and the tensors of `make_states`.
    Parameters may be stepped one at a time, with the same results.
    """

    def __init__(self, params: TrainedParameters, cfg: OptimizerConfig, defaults: dict[str, Any]):
        """Make torch's parameter groups; states are made at a parameter's first step.

        defaults: hyperparameters of torch's parameter groups, besides `lr` and `weight_decay`.
        Raises ConfigError as `check_blocks` does.
        """
        self.cfg = cfg
        self.names = params.names
        self.device = params.device
        self.seed = params.seed
        self.state_bits = resolve_state_bits(cfg)
        # (device, `signed`) -> code, made when first asked for.
        self._codes: dict[tuple[torch.device, bool], Code] = {}
        # The last two are saved with the states, to tell their layout; steps read the config.
        defaults = {"lr": cfg.lr, "weight_decay": cfg.weight_decay} | defaults
        defaults |= {"state_bits": self.state_bits, "master_weights": cfg.master_weights}
        # torch refuses an empty list of parameters, but not an empty group.
        super().__init__(list(params) or [{"params": []}], defaults)
        for parameter in params:
            check_blocks(parameter, self.names.get(parameter, ""), self.state_bits)
        # Parameter -> offset of this rank's part, where bf16 is rounded stochastically. Computed
        # once, as torch takes long for it.
        rounded = params if cfg.stochastic_rounding else ()
        self._starts = {parameter: locate_local_part(parameter)[1] for parameter in rounded}

    def states_of(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """Return the names of a parameter's states, without the endings for codes and scales."""
        return ADAMW_STATES

    def add_stand_in(self, parameter: nn.Parameter, owner: nn.Parameter) -> None:
        """Let a parameter on the device be stepped for its owner on the host.

        It takes the owner's name and offset, so that stochastic rounding draws the same numbers.
        """
        self.names[parameter] = self.names.get(owner, "")
        if owner in self._starts:
            self._starts[parameter] = self._starts[owner]

    def make_states(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        layouts = build_state_layouts(
            parameter, self.states_of(parameter), self.state_bits, master=self.cfg.master_weights
        )
        return {key: make_state_tensor(parameter, layout) for key, layout in layouts.items()}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            self._step_group(group, parameters)

    def _step_group(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            self._step_adamw(parameter, group)

    def _step_adamw(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """Step AdamW (Loshchilov and Hutter, arXiv:1711.05101) on this rank's part of a parameter.

        As in torchao, the update uses the moments before they are rounded to their bits.
        """
        shard = self._begin(parameter)
        step = self.state[parameter]["step"]
        beta1, beta2 = group["betas"]
        lr = group["lr"]
        bias_correction1 = 1 - beta1**step
        bias_correction2_sqrt = math.sqrt(1 - beta2**step)
        signed = self.find_code(parameter, shard.weights.device, signed=True)
        unsigned = self.find_code(parameter, shard.weights.device, signed=False)
        for rows in iterate_chunks(shard.weights):
            gradient = shard.gradient[rows].to(shard.dtype)
            exp_avg = shard.take(rows, "exp_avg", signed)
            exp_avg.values.lerp_(gradient, 1 - beta1)
            exp_avg.write_back()
            exp_avg_sq = shard.take(rows, "exp_avg_sq", unsigned)
            exp_avg_sq.values.lerp_(gradient.square(), 1 - beta2)
            del gradient
            exp_avg_sq.write_back()
            values = exp_avg_sq.values
            # In place where it is a copy: the state itself has been written already.
            denominator = values.sqrt_() if exp_avg_sq.is_copy else values.sqrt()
            denominator.div_(bias_correction2_sqrt).add_(group["eps"])
            weights = shard.take(rows)
            weights.values.add_(weights.values, alpha=-lr * group["weight_decay"])
            weights.values.addcdiv_(exp_avg.values, denominator, value=-lr / bias_correction1)
            # Freed before the weights are written, and the next chunk's temporaries are made.
            del exp_avg, exp_avg_sq, values, denominator
            weights.write_back()
            del weights

    def find_code(
        self, parameter: nn.Parameter, device: torch.device, *, signed: bool
    ) -> Code | None:
        """Return the code of a parameter's states, on a device; None: they have no codes.

        signed: True for the first moment and momentum, False for the second moment.
        """
        state_bits = get_state_bits(parameter, self.state_bits)
        if state_bits not in BLOCKS:
            return None
        if (device, signed) not in self._codes:
            self._codes[device, signed] = make_code(state_bits, signed=signed, device=device)
        return self._codes[device, signed]

    def _begin(self, parameter: nn.Parameter) -> ParameterShard:
        """Count the step, make the states before the first one, and return this rank's part."""
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state |= self.make_states(parameter)
            if MASTER in state:
                get_detached_local(state[MASTER]).copy_(get_detached_local(parameter))
        state["step"] += 1
        start = self._starts.get(parameter)
        gradient = parameter.grad
        assert gradient is not None
        return ParameterShard(
            weights=_view_as_rows(get_detached_local(parameter)),
            gradient=_view_as_rows(get_detached_local(gradient)),
            state={
                name: _view_as_rows(get_detached_local(value))
                for name, value in state.items()
                if isinstance(value, Tensor)
            },
            start=start or (0,),
            full_shape=tuple(parameter.shape) or (1,),
            rounding=(
                None if start is None else (self.seed, state["step"], self.names.get(parameter, ""))
            ),
            dtype=torch.promote_types(parameter.dtype, torch.float32),
        )


def _view_as_rows(local: Tensor) -> Tensor:
    """Return a tensor with at least one dimension: a scalar `[]` as `[1]`."""
    return local if local.dim() else local.view(1)
