"""Steps of a large parameter in chunks, runs of its rows, each as if it was a parameter of its own.

Optimizers whose rule is for each element by itself, or for blocks within a row, have the same numbers afterwards as by
one step of the whole, to the bit. So of offloaded states, and of gradients that are used up at once, no more than
a chunk has to be on the device, however large the parameter.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recipe_lib.config.optimizer_facts import every_facts
from recipe_lib.ops.dtensor_shards import local_of
from recipe_lib.optim.low_bit_adamw import ChunkedOptimizer
from recipe_lib.optim.state_layout import laid_out

CHUNK_BYTES = 64 * 2**20  # of a piece's states, or of its gradient where that is more


def step_only(
    optimizer: Optimizer,
    parameter: nn.Parameter,
    step: Callable[[], Any] | None = None,
    instead: nn.Parameter | None = None,
) -> None:
    """A step of one of the optimizer's parameters. step: the optimizer's own, where `optimizer.step` is another.
    instead: what is stepped in the parameter's place, by the numbers of its group."""
    groups = optimizer.param_groups
    held = [group["params"] for group in groups]
    stepped = parameter if instead is None else instead
    try:
        for group, parameters in zip(groups, held, strict=True):
            group["params"] = [stepped] if any(one is parameter for one in parameters) else []
        (step or optimizer.step)()
    finally:
        for group, parameters in zip(groups, held, strict=True):
            group["params"] = parameters


class RowSteps:
    """Steps parameters of an optimizer by pieces; what is kept of the states in between stays where `hold` puts it.

    A state of n rows, as the parameter's part on this rank has, is cut as that is; all else (a count of steps) each
    piece has a copy of, and the last one's is kept.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        hold: Callable[[Tensor, tuple[int, ...]], Tensor] | None = None,
        instead: Callable[[nn.Parameter], nn.Parameter] | None = None,
    ) -> None:
        """hold: memory of a shape for a whole state of which one piece is given; None: next to the piece. instead: what
        is stepped in a parameter's place, itself or one on another device, which is stepped by pieces in any case."""
        self.optimizer, self._step = optimizer, optimizer.step
        self._instead = instead or (lambda parameter: parameter)
        self._hold = hold or (lambda piece, shape: torch.empty(shape, dtype=piece.dtype, device=piece.device))
        self._pieces: dict[nn.Parameter, list[slice]] = {}
        self._wholes: dict[nn.Parameter, dict[str, Tensor]] = {}  # of a first step that is not over
        self._counts: dict[str, Any] = {}  # and the like, after the last piece

    def pieces(self, parameter: nn.Parameter) -> list[slice]:
        """Runs of rows of this rank's part, of at most CHUNK_BYTES of states (a row, if that has more) and nearly
        equal; none where the parameter can only be stepped whole, or is no larger than a piece."""
        if parameter not in self._pieces:
            local = local_of(parameter)
            count = min(-(-_bytes(self.optimizer, parameter) // CHUNK_BYTES), len(local) if local.dim() > 1 else 1)
            if self._instead(parameter) is not parameter:
                count = max(count, 1)
            elif count == 1:
                count = 0
            ends = [len(local) * end // count for end in range(count + 1)] if count else []
            self._pieces[parameter] = [slice(start, end) for start, end in zip(ends, ends[1:], strict=False)]
        return self._pieces[parameter]

    def step_rows(self, parameter: nn.Parameter, number: int, gradient: Tensor) -> None:
        """A step of one piece, where states are next to their parameters. Pieces come in order, all in each step."""
        rows = self.pieces(parameter)[number]
        states = self.optimizer.state.get(parameter, {})
        here = {key: local_of(value)[rows] for key, value in states.items() if is_cut(value)}
        found = self.step_with(parameter, number, gradient, here)
        if not here:
            for key, value in found.items():
                local_of(self.whole(parameter, key, value))[rows].copy_(value)
        self.finish(parameter, number)

    def step_with(
        self, parameter: nn.Parameter, number: int, gradient: Tensor, here: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """A step of one piece with its part of the states, which is changed in place; returns it, also where there was
        none before the first step. gradient: the piece's."""
        rows, states = self.pieces(parameter)[number], self.optimizer.state
        self._counts = {}
        piece = nn.Parameter(local_of(self._instead(parameter))[rows])
        piece.grad = gradient
        counts = {key: _own(value) for key, value in states.get(parameter, {}).items() if not is_cut(value)}
        if self.optimizer.defaults.get("fused"):  # whose count of steps a state that was read has on the host
            counts = {key: value.to(piece.device) for key, value in counts.items()}
        if counts or here:
            states[piece] = counts | here
        chunked = isinstance(self.optimizer, ChunkedOptimizer)
        with self.optimizer.stepping_rows(piece, parameter, rows.start) if chunked else nullcontext():
            try:
                step_only(self.optimizer, parameter, self._step, piece)
            finally:
                found = states.pop(piece, {})
        self._counts = {key: value for key, value in found.items() if not is_cut(value)}
        return {key: value for key, value in found.items() if is_cut(value)}

    def whole(self, parameter: nn.Parameter, key: str, piece: Tensor) -> Tensor:
        """A state of which a piece is given: as it is, or, in the first step, memory for it."""
        known = self.optimizer.state.get(parameter, {}).get(key)
        if known is not None:
            return known
        made = self._wholes.setdefault(parameter, {})
        if key not in made:
            local = self._hold(piece, (len(local_of(parameter)), *piece.shape[1:]))
            made[key] = laid_out(parameter, local, local_of(parameter).shape[-1] // piece.shape[-1])
        return made[key]

    def finish(self, parameter: nn.Parameter, number: int) -> None:
        """Call it after each piece: with the last one the parameter has its states, and has counted the step."""
        if number + 1 == len(self.pieces(parameter)):
            found = self._counts | self._wholes.pop(parameter, {})
            if found:
                self.optimizer.state[parameter] |= found


def is_cut(value: Any) -> bool:
    """Whether a state is cut into rows as its parameter is, and no number alone."""
    return isinstance(value, Tensor) and value.dim() > 0


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _bytes(optimizer: Optimizer, parameter: nn.Parameter) -> int:
    """Bytes of a parameter's states, and at least its own, on this rank; 0 if it can only be stepped whole."""
    own = local_of(parameter).numel() * parameter.element_size()
    if isinstance(optimizer, ChunkedOptimizer):
        return max(own, optimizer.bytes_of(parameter)) if optimizer.is_elementwise(parameter) else 0
    known = {getattr(torch.optim, facts.torch_class): facts for facts in every_facts() if facts.torch_class}
    return own * len(known[type(optimizer)].states) if type(optimizer) in known else 0
