"""Step the matrices of layers by Muon, their momentum made orthogonal, and all else by AdamW.

`optim.optimizers.build_optimizer` calls `build_muon`. A step's root mean square is 0.2 times the
learning rate, about that of AdamW, so that both go by one `optimizer.lr`. Ranks among which
matrices are sharded exchange them: of n ranks each gathers one of n full matrices, makes it
orthogonal and sends every rank its part back.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipe_lib.config import OptimizerConfig, register
from recipe_lib.config.optimizer_facts import OptimizerFacts
from recipe_lib.errors import ConfigError
from recipe_lib.optim.low_bit_adamw import (
    ChunkedOptimizer,
    ParameterShard,
    TrainedParameters,
    is_layer_matrix,
    iterate_chunks,
)

# The arithmetic is torch.optim.Muon's with `match_rms_adamw` (Jordan 2024,
# kellerjordan.github.io/posts/muon; Liu et al., arXiv:2502.16982).

# The config keys that Muon reads, and its states: AdamW's, and one for each matrix of a layer.
FACTS = OptimizerFacts(
    keys=("betas", "eps", "momentum", "state_bits", "master_weights", "stochastic_rounding"),
    states=("exp_avg", "exp_avg_sq"),
    layer_matrix_states=("momentum_buffer",),
)

# These are torch.optim.Muon's.
MOMENTUM = 0.95  # where `optimizer.momentum` is None
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # linear, cubic and quintic, of an iteration
_ITERATIONS = 5  # of the Newton-Schulz iteration
_SMALLEST_NORM = 1e-7  # that a matrix is divided by
_RMS = 0.2  # root mean square of a step, over the learning rate


@register("optimizer.name", "muon", FACTS)
def build_muon(
    cfg: OptimizerConfig, params: list[nn.Parameter], kernels: dict[str, bool]
) -> "Muon":
    """Return Muon for the layers' matrices, with AdamW for the rest.

    kernels: not read, as there is one implementation. Raises ConfigError for parameters without
    names.
    """
    if not isinstance(params, TrainedParameters) or len(params.names) < len(params):
        raise ConfigError(
            "optimizer.name: found muon for parameters without names, by which it knows the layers'"
            " matrices; give build_optimizer model.named_parameters(), or use adamw"
        )
    return Muon(params, cfg)


class Muon(ChunkedOptimizer):
    """Muon's rule for matrices of layers, AdamW's for other parameters. A step is a collective."""

    def __init__(self, params: TrainedParameters, cfg: OptimizerConfig):
        momentum = MOMENTUM if cfg.momentum is None else cfg.momentum
        super().__init__(
            params, cfg, {"betas": tuple(cfg.betas), "eps": cfg.eps, "momentum": momentum}
        )
        # Matrix -> its index among those that are sharded over the same ranks.
        self._indices: dict[nn.Parameter, int] = {}
        orthogonalized = [parameter for parameter in params if not self.is_elementwise(parameter)]
        for matrices in self._group_by_sharding(orthogonalized).values():
            self._indices |= {matrix: index for index, matrix in enumerate(matrices)}

    def states_of(self, parameter: nn.Parameter) -> tuple[str, ...]:
        return FACTS.list_states(self.cfg, layer_matrix=not self.is_elementwise(parameter))

    def is_elementwise(self, parameter: nn.Parameter) -> bool:
        return not is_layer_matrix(parameter, self.names.get(parameter, ""))

    def _step_group(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        matrices = []
        for parameter in parameters:
            if parameter in self._indices:
                matrices.append(parameter)
            else:
                self._step_adamw(parameter, group)
        for sharded_over, alike in self._group_by_sharding(matrices).items():
            # As many at a time as ranks exchange them: (mesh, mesh dimension).
            count = 1 if sharded_over is None else sharded_over[0].size(sharded_over[1])
            for first in range(0, len(alike), count):
                self._step_matrices(group, alike[first : first + count], sharded_over)

    def _group_by_sharding(self, matrices: list[nn.Parameter]) -> dict[Any, list[nn.Parameter]]:
        """Return matrices by the (mesh, mesh dimension) of the ranks that exchange them.

        Key None: matrices that every rank has in full.
        """
        groups: dict[Any, list[nn.Parameter]] = {}
        # Sorted by shape, so that matrices that are stepped together mean equal work for each rank.
        for matrix in sorted(matrices, key=lambda matrix: tuple(matrix.shape)):
            sharded_over = None
            sharded_dims = _find_sharded_dims(matrix)
            if isinstance(matrix, DTensor) and sharded_dims:
                sharded_over = (matrix.device_mesh, sharded_dims[0][0])
            groups.setdefault(sharded_over, []).append(matrix)
        return groups

    def _step_matrices(
        self, group: dict[str, Any], matrices: list[nn.Parameter], sharded_over: Any
    ) -> None:
        """Step matrices, at most as many as there are ranks that exchange them.

        sharded_over: a key of `_group_by_sharding`.
        """
        shards = [self._begin(parameter) for parameter in matrices]
        updates = [
            self._update_momentum(shard, group, matrix)
            for shard, matrix in zip(shards, matrices, strict=True)
        ]
        if sharded_over is None:
            updates = [orthogonalize(updates[0])]
        else:
            mesh, mesh_dim = sharded_over
            shardings = [MatrixSharding.from_matrix(matrix) for matrix in matrices]
            first = self._indices[matrices[0]]
            updates = orthogonalize_over_ranks(
                updates, shardings=shardings, mesh=mesh, mesh_dim=mesh_dim, first=first
            )
        for shard, update, matrix in zip(shards, updates, matrices, strict=True):
            rate = group["lr"] * _RMS * math.sqrt(max(matrix.shape))
            for rows in iterate_chunks(shard.weights):
                weights = shard.take(rows)
                weights.values.mul_(1 - group["lr"] * group["weight_decay"])
                weights.values.add_(update[rows].to(weights.values.device), alpha=-rate)
                weights.write_back()
                del weights

    def _update_momentum(
        self, shard: ParameterShard, group: dict[str, Any], matrix: nn.Parameter
    ) -> Tensor:
        """Add this step's gradient to the momentum, and return the update by Nesterov's rule.

        It is this rank's part, bf16 on the computing device.
        """
        update = torch.empty(shard.weights.shape, dtype=torch.bfloat16, device=self.device)
        momentum = group["momentum"]
        code = self.find_code(matrix, shard.weights.device, signed=True)
        for rows in iterate_chunks(shard.weights):
            gradient = shard.gradient[rows].to(shard.dtype)
            buffer = shard.take(rows, "momentum_buffer", code)
            buffer.values.lerp_(gradient, 1 - momentum)
            buffer.write_back()
            update[rows].copy_(gradient.lerp(buffer.values, momentum))
        return update


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return a matrix `[m, n]` with its singular vectors and singular values near 1, in bf16.

    Five steps of a Newton-Schulz iteration of degree 5, after division by the Frobenius norm. Next
    to the argument it takes two matrices of that size and two of the shorter side squared.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    # Transposed if tall: the products then have the size of the shorter side.
    current = matrix.bfloat16().T if is_tall else matrix.bfloat16()
    current = current / current.norm().clamp(min=_SMALLEST_NORM)
    linear, cubic, quintic = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        products = current @ current.T
        products = torch.addmm(products, products, products, beta=cubic, alpha=quintic)
        current = torch.addmm(current, products, current, beta=linear)
    return current.T if is_tall else current


@dataclass(frozen=True)
class MatrixSharding:
    """The sharding of a matrix over the ranks that exchange it, and perhaps over others.

    With FSDP alone the ranks that exchange share the full matrix; with tensor parallelism, whose
    parts FSDP shards, they share such a part.
    """

    matrix: DTensor
    shape: tuple[int, ...]  # of what the exchanging ranks share
    dim: int  # the matrix dimension that the exchanging ranks have sharded
    # (mesh dimension, matrix dimension) of further shardings, into equal parts
    other_dims: tuple[tuple[int, int], ...]

    @classmethod
    def from_matrix(cls, matrix: Any) -> "MatrixSharding":
        """Return the sharding of a matrix, which has to be sharded over at least one dimension."""
        (_, dim), *other_dims = _find_sharded_dims(matrix)
        shape = list(matrix.shape)
        for mesh_dim, other_dim in other_dims:
            shape[other_dim] //= matrix.device_mesh.size(mesh_dim)
        return cls(matrix=matrix, shape=tuple(shape), dim=dim, other_dims=tuple(other_dims))

    def compute_part_shape(self, rank: int, ranks: int) -> tuple[int, ...]:
        # FSDP's parts are equal, but the last ones may be shorter or empty.
        length = -(-self.shape[self.dim] // ranks)
        shape = list(self.shape)
        shape[self.dim] = max(0, min(length, self.shape[self.dim] - rank * length))
        return tuple(shape)

    def split_parts(self, shared: Tensor, ranks: int) -> list[Tensor]:
        sizes = [self.compute_part_shape(rank, ranks)[self.dim] for rank in range(ranks)]
        return list(shared.split(sizes, dim=self.dim))

    def join_parts(self, received: Tensor, sizes: list[int]) -> Tensor:
        """Return what the exchanging ranks share.

        received: their parts, flat, one after the other. sizes: elements of each.
        """
        if self.dim == 0:
            return received.view(self.shape)
        parts = [
            part.view(self.compute_part_shape(rank, len(sizes)))
            for rank, part in enumerate(received.split(sizes))
        ]
        return torch.cat(parts, dim=self.dim)

    def orthogonalize(self, shared: Tensor) -> Tensor:
        """Return the part `shared` of the full matrix, after the full matrix is made orthogonal.

        A collective of the ranks over which it is sharded further.
        """
        mesh = self.matrix.device_mesh
        full = shared
        for mesh_dim, dim in self.other_dims:
            ranks = mesh.size(mesh_dim)
            gathered = full.new_empty((ranks * full.shape[0], *full.shape[1:]))
            dist.all_gather_into_tensor(gathered, full.contiguous(), group=mesh.get_group(mesh_dim))
            # The collective joins parts along dimension 0.
            full = gathered if dim == 0 else torch.cat(gathered.chunk(ranks), dim=dim)
        full = orthogonalize(full)
        for mesh_dim, dim in reversed(self.other_dims):
            full = full.chunk(mesh.size(mesh_dim), dim=dim)[mesh.get_local_rank(mesh_dim)]
        return full


def orthogonalize_over_ranks(
    updates: list[Tensor],
    shardings: list[MatrixSharding],
    mesh: Any,
    mesh_dim: int,
    first: int = 0,
) -> list[Tensor]:
    """Return this rank's parts of matrices, after the full matrices are made orthogonal.

    A collective over a mesh dimension, of no more matrices than it has ranks. updates: this rank's
    parts, freed and taken out of the list. first: its remainder modulo the number of ranks is the
    rank that computes the first matrix; the next rank computes the next matrix. So matrices that
    are stepped alone (in backward) are computed by one rank after the other.
    """
    group = mesh.get_group(mesh_dim)
    ranks = mesh.size(mesh_dim)
    # For each rank the index of the matrix that it computes; none, if it is `len(updates)` or more.
    indices = [(rank - first) % ranks for rank in range(ranks)]
    shapes = [
        updates[index].shape if index < len(updates) else torch.Size([0]) for index in indices
    ]
    send_sizes = [shape.numel() for shape in shapes]
    sent = torch.cat([updates[index].flatten() for index in indices if index < len(updates)])
    updates.clear()  # their memory is free from here on
    own_index = indices[mesh.get_local_rank(mesh_dim)]
    own_sharding = shardings[own_index] if own_index < len(shardings) else None
    receive_sizes = [
        math.prod(own_sharding.compute_part_shape(rank, ranks)) if own_sharding else 0
        for rank in range(ranks)
    ]
    received = sent.new_empty(sum(receive_sizes))
    dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=group)
    if own_sharding:
        shared = own_sharding.join_parts(received, receive_sizes)
        del received
        parts = own_sharding.split_parts(own_sharding.orthogonalize(shared), ranks)
        del shared
        received = torch.cat([part.flatten() for part in parts])
        del parts
    dist.all_to_all_single(sent, received, send_sizes, receive_sizes, group=group)
    del received
    parts_by_index = {
        index: part.view(shape)
        for index, part, shape in zip(indices, sent.split(send_sizes), shapes, strict=True)
    }
    return [parts_by_index[index] for index in range(len(shardings))]


def _find_sharded_dims(matrix: Any) -> list[tuple[int, int]]:
    """Return the (mesh dimension, matrix dimension) of every sharding over several ranks.

    FSDP's is the first, as it shards the parts of tensor parallelism.
    """
    if not isinstance(matrix, DTensor):
        return []
    placements: list[Any] = list(matrix.placements)
    return [
        (mesh_dim, placement.dim)
        for mesh_dim, placement in enumerate(placements)
        if not placement.is_replicate() and matrix.device_mesh.size(mesh_dim) > 1
    ]
