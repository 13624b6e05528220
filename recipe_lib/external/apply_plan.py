"""Apply tensor parallelism to a model in a user's own training loop, or in transformers' Trainer.

    plan = infer_tensor_plan(model, batch)   # batch: what the forward is called with
    plan.certify()
    plan.apply(model, mesh)                  # in place; every rank has loaded the whole model
    with seen_as_one_process():              # for transformers' Trainer; a plain loop needs nothing
        ...                                  # all ranks of the mesh take the same batches
    plan.save_pretrained(model, folder)

The model's class runs as it is. Its parameters become DTensors, and each backward leaves the
gradients of the whole model in them. Only users call these functions; recipes shard a model by
`tensor_parallel.shard_module`. A guide is docs/external_models.md.
"""

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from recipe_lib.errors import ConfigError, SetupError
from recipe_lib.external.certificate import certify, find_plan_difference
from recipe_lib.external.inspection import find_embedding_and_head
from recipe_lib.external.plan_executor import build_rank_forward, build_ranks
from recipe_lib.external.tensor_parallel import (
    compute_loss_or_logits,
    exclude_head_exchanges,
    find_runs,
    place_parameters,
)
from recipe_lib.external.tensor_plan import sharding_plan
from recipe_lib.external.tensor_plan.exchanges import take_parameter_part
from recipe_lib.external.tensor_plan.infer import infer_plan
from recipe_lib.external.tensor_plan.sharding_plan import ParameterPlan
from recipe_lib.external.tensor_plan.small_models import SMALL_MODEL, randomize, shrink
from recipe_lib.models.language_model import restore_file_order
from recipe_lib.ops.dtensor_shards import get_detached_local, get_local
from recipe_lib.ops.gathered import Group, all_reduce

_LENGTH = 16  # tokens in each of the two rows with which a small copy is certified
# Environment variables that torchrun sets, by which a process knows that it is one of several.
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def infer_tensor_plan(
    model: nn.Module, inputs: Mapping[str, Any] | Tensor, size: int = 0, tokens: bool = False
) -> "TensorPlan":
    """Infer how ranks can share a model from one forward of it; the model is not changed.

    inputs: the keyword arguments of the forward in training, token ids `[b, s]` first, such as a
    batch of two short rows; or the ids alone. `labels` are left out. With other arguments the
    forward may make other calls, and the model that `apply` changed raises SetupError then. size:
    number of ranks; only dimensions that they divide are cut; 0: all that can be cut for some
    number. tokens: ranks share tokens as well (sequence parallel); training rows then need a length
    that the ranks divide. Raises SetupError if the forward cannot be traced.
    """
    inputs = {"input_ids": inputs} if isinstance(inputs, Tensor) else inputs
    traced_inputs = {name: value for name, value in inputs.items() if name != "labels"}
    if hasattr(getattr(model, "config", None), "use_cache"):
        traced_inputs.setdefault("use_cache", False)
    return TensorPlan(
        infer_plan(model, inputs=traced_inputs, size=size, tokens=tokens),
        inputs=traced_inputs,
        model=model,
        size=size,
    )


@dataclass(frozen=True)
class TensorPlan:
    """A tensor-parallel plan of one model."""

    sharding: sharding_plan.ShardingPlan  # how each parameter is cut, where ranks exchange tensors
    # The keyword arguments of the forward that was traced.
    inputs: dict[str, Any] = field(repr=False, compare=False)
    model: nn.Module = field(repr=False, compare=False)  # the model that was traced, whole
    size: int = 0  # the number of ranks that the plan was inferred for; 0: for any

    @property
    def legal_sizes(self) -> tuple[int, ...]:
        """Return the numbers of ranks above 1 that can share the model."""
        return self.sharding.legal_sizes

    def certify(self, model: nn.Module | None = None, size: int | None = None) -> int:
        """Prove the plan in this process, on the CPU; return the number of comparisons.

        Each rank is a thread with its own part alone. The outputs, and the gradients of all
        parameters, have to be those of the whole model. A large model is proven on a small copy of
        its class and its kinds of layers, whose plan has to be like this one. Only transformers'
        models have such a copy; certify before adapters are added.

        model: None: the one that was traced, before `apply`. size: number of ranks; None: the one
        of `infer_tensor_plan`, or else the fewest ranks that can share the model. Raises SetupError
        if the plan is wrong, or cannot be proven.
        """
        model = model or self.model
        size = size or self.size or min(self.legal_sizes, default=0)
        if not size:
            raise SetupError(
                f"tensor plan of {type(model).__name__}: no number of ranks can share the model"
            )
        small = copy.deepcopy(model).cpu().float()
        plan = self.sharding
        inputs = self.inputs
        num_ranks = size
        if sum(parameter.numel() for parameter in model.parameters()) > SMALL_MODEL:
            small, inputs = _build_small_copy(model, self.inputs)
            plan, num_ranks = _infer_plan_of_copy(
                small, inputs=inputs, size=size, large=self.sharding
            )
        randomize(small)
        inputs = {
            name: value.cpu() if isinstance(value, Tensor) else value
            for name, value in inputs.items()
        }
        proof = certify(small, plan=plan, size=num_ranks, inputs=inputs)
        if proof.failures:
            raise SetupError(
                f"tensor plan of {type(model).__name__} for {size} ranks: is wrong"
                f" ({proof.failures[0]}); do not use it"
            )
        return proof.checked

    def apply(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Make the model that of one rank of `mesh`, in place; every rank has loaded it whole.

        Parameters become DTensors, so the optimizer is made afterwards. A fused matrix is cut
        within each of its parts: the rows of its DTensor have another order than in the checkpoint,
        which `full_state_dict` restores. Gradients of which ranks have parts of a sum are summed in
        backward. Every rank gets all logits. mesh: of one dimension. Raises ConfigError for a mesh
        that the plan does not allow, and for a model without an output projection.
        """
        size = mesh.size()
        plan = self.sharding
        if mesh.ndim != 1 or size not in plan.legal_sizes:
            raise ConfigError(
                f"tensor plan of {type(model).__name__}: found a mesh of {tuple(mesh.shape)},"
                " expected one dimension of"
                f" {' or '.join(map(str, plan.legal_sizes)) or 'no number of'} ranks"
            )
        group = Group(mesh.get_group().group_name, size, mesh.get_local_rank())
        _, head = find_embedding_and_head(model) or (None, None)
        if head is not None:
            plan, vocab_size = exclude_head_exchanges(plan, model, head)
        if head is None or (not vocab_size and any(axis.output for axis in plan.axes)):
            raise ConfigError(
                f"tensor plan of {type(model).__name__}: its logits come of no output projection;"
                " found none"
            )
        place_parameters(model, plan, mesh)
        head.forward = partial(compute_loss_or_logits, head, group, vocab_size)
        rank_forward = build_rank_forward(model, plan=plan, ranks=build_ranks(group), head=head)
        partial_names = [
            parameter.name for parameter in plan.parameters if parameter.gradient == "partial"
        ]
        # transformers' Trainer looks in the forward's signature for the columns of a data set.
        model.forward = wraps(model.forward)(
            _sum_partial_gradients(
                model, partial_names, forward=rank_forward, mesh=mesh, group=group
            )
        )
        config: Any = getattr(model, "config", None)
        if hasattr(config, "use_cache"):
            # As in the traced forward: a cache for generation would make calls of its own.
            config.use_cache = False

    @torch.no_grad()
    def full_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Gather the whole model's `state_dict()`, in host memory. A collective of the mesh.

        Returns an empty dict on all ranks but the mesh's first.
        """
        mesh = _get_mesh(model)
        plans = self._map_parameter_plans(model)
        state = {}
        for name, value in model.state_dict(keep_vars=True).items():
            if isinstance(value, DTensor):
                value = restore_file_order(
                    value.full_tensor(), find_runs(plans[id(value)], mesh.size())
                )
            if mesh.get_local_rank() == 0:
                state[name] = torch.empty_like(value, device="cpu").copy_(value)
        return state

    @torch.no_grad()
    def load_full_state_dict(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Copy this rank's parts of a whole model's `state_dict()` into the model.

        Raises ConfigError for a missing name; names that the model does not have are ignored.
        """
        mesh = _get_mesh(model)
        plans = self._map_parameter_plans(model)
        for name, value in model.state_dict(keep_vars=True).items():
            if name not in state:
                raise ConfigError(
                    f"load_full_state_dict: found no {name}, expected every tensor of the model's"
                    " state"
                )
            part = state[name]
            if id(value) in plans:
                part = take_parameter_part(
                    part, plans[id(value)], rank=mesh.get_local_rank(), size=mesh.size()
                )
            get_detached_local(value).copy_(part)

    def save_pretrained(self, model: Any, folder: str | Path, **more: Any) -> None:
        """Save the whole model by its class' `save_pretrained`, on the mesh's first rank.

        A collective of the mesh: all ranks wait for the files. more: further arguments of that
        method.
        """
        state = self.full_state_dict(model)
        mesh = _get_mesh(model)
        if mesh.get_local_rank() == 0:
            model.save_pretrained(folder, state_dict=state, **more)
        torch.distributed.barrier(mesh.get_group())

    def _map_parameter_plans(self, model: nn.Module) -> dict[int, ParameterPlan]:
        """Return id of a parameter -> plan; a class' hooks may give it another name in a state."""
        return {
            id(parameter): self.sharding.parameter(name)
            for name, parameter in model.named_parameters()
        }


@contextmanager
def seen_as_one_process() -> Iterator[None]:
    """Hide torchrun's environment variables inside the block; the process group stays as it is.

    transformers' Trainer reads them. Without them it does not wrap the model in
    DistributedDataParallel, gives all ranks the same batches, and counts each batch once.
    """
    hidden_variables = {
        name: os.environ.pop(name) for name in _TORCHRUN_VARIABLES if name in os.environ
    }
    try:
        yield
    finally:
        os.environ.update(hidden_variables)


def _sum_partial_gradients(
    model: nn.Module, names: list[str], forward: Callable[..., Any], mesh: DeviceMesh, group: Group
) -> Callable[..., Any]:
    """Wrap a forward so that backward sums the gradients of the named parameters over ranks.

    Hooks sum them before they are added to `.grad`, which may have those of earlier micro-batches.
    """
    handles: list[Any] = []

    def add(gradient: Tensor) -> Tensor:
        total = all_reduce(get_local(gradient), "sum", group)
        return DTensor.from_local(total, mesh, [Replicate()], run_check=False)

    def run(*args: Any, **kwargs: Any) -> Any:
        # The hooks are put on anew each time: `model.to` takes parameters' hooks away.
        while handles:
            handles.pop().remove()
        handles.extend(
            parameter.register_hook(add)
            for parameter in map(model.get_parameter, names)
            if parameter.requires_grad
        )
        return forward(*args, **kwargs)

    return run


def _get_mesh(model: nn.Module) -> DeviceMesh:
    """Return the mesh of the model's DTensors. Raises SetupError where there are none yet."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            return parameter.device_mesh
    raise SetupError(
        f"{type(model).__name__}: its parameters are not shared by ranks yet; call apply first"
    )


def _build_small_copy(model: Any, inputs: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """Build a small model of the same class with random weights, and inputs of two short rows.

    Raises SetupError for a model that is not a class of transformers.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(type(model), "_from_config"):
        raise SetupError(
            f"{type(model).__name__}: is too large to be certified, expected a model of"
            " transformers, which has a small copy; certify before adapters are added"
        )
    small = type(model)._from_config(
        shrink(config), attn_implementation=config._attn_implementation, dtype=torch.float32
    )
    vocab_size = small.get_input_embeddings().weight.shape[0]
    small_inputs = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            # Ids, positions `[b, s]`; masks of 4 dimensions `[b, 1, s, s]` are cut in both lengths.
            rows = (
                value[:2, ..., :_LENGTH] if value.dim() < 4 else value[:2, ..., :_LENGTH, :_LENGTH]
            )
            value = rows % vocab_size if name == "input_ids" else rows
        small_inputs[name] = value.cpu() if isinstance(value, Tensor) else value
    return small.eval(), small_inputs


def _infer_plan_of_copy(
    small: nn.Module, inputs: dict[str, Any], size: int, large: sharding_plan.ShardingPlan
) -> tuple[sharding_plan.ShardingPlan, int]:
    """Infer the plan of a small copy; return it, and how many ranks, up to `size`, can share it.

    The copy may have fewer heads, and so allow fewer ranks. large: the plan of the large model.
    Raises SetupError if the two plans treat a parameter or a module differently, or no number of
    ranks can share the copy.
    """
    plan = infer_plan(small, inputs, tokens=large.shared_tokens > 0)
    num_ranks = max((legal for legal in plan.legal_sizes if legal <= size), default=0)
    difference = find_plan_difference(large, plan)
    if difference or not num_ranks:
        raise SetupError(
            f"tensor plan of {type(small).__name__}: could not be proven on a small model:"
            f" {difference or 'no legal size'}"
        )
    return plan, num_ranks
