"""Muon: steps of the layers' matrices are their momentum made orthogonal; AdamW for all else, in
one optimizer.

The arithmetic is torch.optim.Muon's with `match_rms_adamw` (Jordan 2024,
kellerjordan.github.io/posts/muon; Liu et al., arXiv:2502.16982): a step's root mean square is 0.2
times the rate, about that of AdamW, so that both go by one `optimizer.lr`. Orthogonal takes the
whole matrix. Ranks that share matrices exchange them: of n ranks each puts one of n matrices
together, computes for it what no other rank does, and sends everyone's part back; so a rank never
holds more than one whole matrix (in bf16), and computes a share of the work.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipe_lib.config.optimizer_facts import OptimizerFacts
from recipe_lib.config.registry import register
from recipe_lib.config.schema import OptimizerConfig
from recipe_lib.errors import ConfigError
from recipe_lib.optim.low_bit_adamw import (
    ChunkedOptimizer,
    ParameterShard,
    TrainedParameters,
    is_layer_matrix,
    iterate_chunks,
)

FACTS = OptimizerFacts(
    keys=("betas", "eps", "momentum", "state_bits", "master_weights", "stochastic_rounding"),
    states=("exp_avg", "exp_avg_sq"),
    layer_matrix_states=("momentum_buffer",),
)

MOMENTUM = 0.95  # where the config has none
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_SMALLEST_NORM = 1e-7
_RMS = 0.2


@register("optimizer.name", "muon", FACTS)
def build_muon(
    cfg: OptimizerConfig, params: list[nn.Parameter], kernels: dict[str, bool]
) -> "Muon":
    """Muon for the layers' matrices, AdamW for the rest."""
    if not isinstance(params, TrainedParameters) or len(params.names) < len(params):
        raise ConfigError(
            "optimizer.name: found muon for parameters without names, by which it knows the layers'"
            " matrices; give build_optimizer model.named_parameters(), or use adamw"
        )
    return Muon(params, cfg)


class Muon(ChunkedOptimizer):
    """Muon's rule for matrices of layers, AdamW's for the others. `momentum` None: 0.95. A step is
    a collective.
    """

    def __init__(self, params: TrainedParameters, cfg: OptimizerConfig):
        momentum = MOMENTUM if cfg.momentum is None else cfg.momentum
        super().__init__(
            params, cfg, {"betas": tuple(cfg.betas), "eps": cfg.eps, "momentum": momentum}
        )
        self._turns: dict[nn.Parameter, int] = {}
        for found in self._group_by_sharding(
            [one for one in params if not self.is_elementwise(one)]
        ).values():
            self._turns |= {matrix: turn for turn, matrix in enumerate(found)}

    def states_of(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """One momentum for a matrix of a layer, AdamW's two for others."""
        return FACTS.list_states(self.cfg, layer_matrix=not self.is_elementwise(parameter))

    def is_elementwise(self, parameter: nn.Parameter) -> bool:
        """Return whether AdamW's rule steps a parameter: not one that is made orthogonal."""
        return not is_layer_matrix(parameter, self.names.get(parameter, ""))

    def _step_group(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter not in self._turns:
                self._step_adamw(parameter, group)
        for over, found in self._group_by_sharding(
            [one for one in parameters if one in self._turns]
        ).items():
            count = 1 if over is None else over[0].size(over[1])
            for first in range(0, len(found), count):
                self._step_matrices(group, found[first : first + count], over)

    def _group_by_sharding(self, matrices: list[nn.Parameter]) -> dict[Any, list[nn.Parameter]]:
        """Matrices by (mesh, mesh dimension) of the ranks that exchange them, None: whole on each
        rank; alike ones together, so that ranks have equal work.
        """
        found: dict[Any, list[nn.Parameter]] = {}
        for matrix in sorted(matrices, key=lambda matrix: tuple(matrix.shape)):
            cuts = _find_sharded_dims(matrix)
            over = (
                (matrix.device_mesh, cuts[0][0]) if isinstance(matrix, DTensor) and cuts else None
            )
            found.setdefault(over, []).append(matrix)
        return found

    def _step_matrices(
        self, group: dict[str, Any], matrices: list[nn.Parameter], over: Any
    ) -> None:
        """One step of at most as many matrices as there are ranks that exchange them."""
        parts = [self._begin(parameter) for parameter in matrices]
        updates = [
            self._update_momentum(part, group, matrix)
            for part, matrix in zip(parts, matrices, strict=True)
        ]
        if over is None:
            updates = [orthogonalize(updates[0])]
        else:
            cuts = [MatrixSharding.of(matrix) for matrix in matrices]
            updates = orthogonalize_over_ranks(
                updates, cuts, over[0], over[1], self._turns[matrices[0]]
            )
        for part, update, matrix in zip(parts, updates, matrices, strict=True):
            rate = group["lr"] * _RMS * math.sqrt(max(matrix.shape))
            for rows in iterate_chunks(part.weights):
                weights = part.take(rows)
                weights.values.mul_(1 - group["lr"] * group["weight_decay"])
                weights.values.add_(update[rows].to(weights.values.device), alpha=-rate)
                weights.keep()
                del weights

    def _update_momentum(
        self, part: ParameterShard, group: dict[str, Any], matrix: nn.Parameter
    ) -> Tensor:
        """The momentum with this step's gradient, and Nesterov's look ahead from it: bf16, on the
        computing device.
        """
        found = torch.empty(part.weights.shape, dtype=torch.bfloat16, device=self.device)
        momentum = group["momentum"]
        code = self.find_code(matrix, part.weights.device, signed=True)
        for rows in iterate_chunks(part.weights):
            gradient = part.gradient[rows].to(part.dtype)
            mean = part.take(rows, "momentum_buffer", code)
            mean.values.lerp_(gradient, 1 - momentum)
            mean.keep()
            found[rows].copy_(gradient.lerp(mean.values, momentum))
        return found


def orthogonalize(matrix: Tensor) -> Tensor:
    """A matrix `[m, n]` with about the same singular vectors and singular values near 1, in bf16.

    Five steps of a Newton-Schulz iteration of degree 5, after division by the Frobenius norm. Next
    to the argument it takes two matrices of that size and two of the shorter side squared.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.bfloat16()
    found = found.T if tall else found
    found = found / found.norm().clamp(min=_SMALLEST_NORM)
    linear, cubic, quintic = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        products = found @ found.T
        products = torch.addmm(products, products, products, beta=cubic, alpha=quintic)
        found = torch.addmm(found, products, found, beta=linear)
    return found.T if tall else found


@dataclass(frozen=True)
class MatrixSharding:
    """How a matrix lies on the ranks. shape: what the exchanging ranks share of it, the whole
    matrix unless others cut it too; dim: along which they do; others: (mesh dimension, matrix
    dimension) of further even cuts.
    """

    matrix: DTensor
    shape: tuple[int, ...]
    dim: int
    others: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, matrix: Any) -> "Cut":
        """Of a matrix that some ranks share."""
        over, *others = _find_sharded_dims(matrix)
        shape = list(matrix.shape)
        for mesh_dim, dim in others:
            shape[dim] //= matrix.device_mesh.size(mesh_dim)
        return cls(matrix, tuple(shape), over[1], tuple(others))

    def part(self, rank: int, ranks: int) -> tuple[int, ...]:
        """The shape of a rank's part: FSDP's parts are equal, the last ones shorter or empty."""
        length = -(-self.shape[self.dim] // ranks)
        own = max(0, min(length, self.shape[self.dim] - rank * length))
        return tuple(own if at == self.dim else size for at, size in enumerate(self.shape))

    def parts(self, whole: Tensor, ranks: int) -> list[Tensor]:
        """Every exchanging rank's part of what they share."""
        return list(
            whole.split([self.part(rank, ranks)[self.dim] for rank in range(ranks)], dim=self.dim)
        )

    def joined(self, received: Tensor, sizes: list[int]) -> Tensor:
        """What the exchanging ranks share, of their parts one after the other, of so many
        elements.
        """
        if self.dim == 0:
            return received.view(self.shape)
        parts = received.split(sizes)
        return torch.cat(
            [part.view(self.part(rank, len(sizes))) for rank, part in enumerate(parts)],
            dim=self.dim,
        )

    def orthogonal(self, shared: Tensor) -> Tensor:
        """What is shared, of the whole matrix made orthogonal. A collective of the ranks that cut
        it further.
        """
        mesh = self.matrix.device_mesh
        whole = shared
        for mesh_dim, dim in self.others:
            ranks = mesh.size(mesh_dim)
            found = whole.new_empty((ranks * whole.shape[0], *whole.shape[1:]))
            dist.all_gather_into_tensor(found, whole.contiguous(), group=mesh.get_group(mesh_dim))
            whole = found if dim == 0 else torch.cat(found.chunk(ranks), dim=dim)
        whole = orthogonalize(whole)
        for mesh_dim, dim in reversed(self.others):
            whole = whole.chunk(mesh.size(mesh_dim), dim=dim)[mesh.get_local_rank(mesh_dim)]
        return whole


def orthogonalize_over_ranks(
    updates: list[Tensor], cuts: list[MatrixSharding], mesh: Any, mesh_dim: int, first: int = 0
) -> list[Tensor]:
    """This rank's parts of matrices made orthogonal, from its parts of these.

    A collective over a mesh dimension, of no more matrices than it has ranks. Rank `first`, modulo
    their number, computes the first one, the rank behind it the next: so matrices that are stepped
    alone go round.
    """
    group, ranks, own = mesh.get_group(mesh_dim), mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim)
    numbers = [
        (rank - first) % ranks for rank in range(ranks)
    ]  # of the matrix that a rank computes, if there is one
    shapes = [
        updates[number].shape if number < len(updates) else torch.Size([0]) for number in numbers
    ]
    sizes = [shape.numel() for shape in shapes]
    sent = torch.cat([updates[number].flatten() for number in numbers if number < len(updates)])
    updates.clear()
    mine = cuts[numbers[own]] if numbers[own] < len(cuts) else None
    held = [math.prod(mine.part(rank, ranks)) if mine else 0 for rank in range(ranks)]
    received = sent.new_empty(sum(held))
    dist.all_to_all_single(received, sent, held, sizes, group=group)
    if mine:
        shared = mine.joined(received, held)
        del received
        parts = mine.parts(mine.orthogonal(shared), ranks)
        del shared
        received = torch.cat([part.flatten() for part in parts])
        del parts
    dist.all_to_all_single(sent, received, sizes, held, group=group)
    del received
    found = {
        number: part.view(shape)
        for number, part, shape in zip(numbers, sent.split(sizes), shapes, strict=True)
    }
    return [found[number] for number in range(len(cuts))]


def _find_sharded_dims(matrix: Any) -> list[tuple[int, int]]:
    """(mesh dimension, matrix dimension) of every cut, that of FSDP first: it cuts within what
    tensor parallel has.
    """
    if not isinstance(matrix, DTensor):
        return []
    placed: list[Any] = list(matrix.placements)
    mesh = matrix.device_mesh
    return [
        (at, placement.dim)
        for at, placement in enumerate(placed)
        if not placement.is_replicate() and mesh.size(at) > 1
    ]
