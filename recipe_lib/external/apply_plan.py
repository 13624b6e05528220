"""Tensor parallel for a model that somebody else trains: a loop of one's own, or the Trainer of
transformers.

    plan = infer_tensor_plan(model, batch)   # batch: what the forward is called with
    plan.certify()
    plan.apply(model, mesh)                  # in place; every rank has loaded the whole model
    with seen_as_one_process():              # for transformers' Trainer; a plain loop needs nothing
        ...                                  # all ranks of the mesh take the same batches
    plan.save_pretrained(model, folder)

The model's class runs as it is, its parameters are DTensors, and each backward leaves the gradients
of the whole model in them. See docs/external_models.md.
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
from recipe_lib.external.inspection import find_embedding_and_head
from recipe_lib.external.plan_executor import build_ranks, frame_forward
from recipe_lib.external.proven_plan import certify, find_plan_difference
from recipe_lib.external.tensor_parallel import (
    exclude_head_exchanges,
    find_runs,
    place_parameters,
    project,
)
from recipe_lib.external.tensor_plan import sharding_plan
from recipe_lib.external.tensor_plan.exchanges import take_parameter_part
from recipe_lib.external.tensor_plan.infer import infer_plan
from recipe_lib.external.tensor_plan.sharding_plan import ParameterPlan
from recipe_lib.external.tensor_plan.small_models import SMALL_MODEL, randomize, shrink
from recipe_lib.models.language_model import restore_file_order
from recipe_lib.ops.dtensor_shards import get_detached_local, get_local
from recipe_lib.ops.gathered import Group, all_reduce

_LENGTH = 16  # tokens of a row that a small copy is certified with; two rows
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def infer_tensor_plan(
    model: nn.Module, inputs: Mapping[str, Any] | Tensor, size: int = 0, tokens: bool = False
) -> "TensorPlan":
    """Infer how ranks can share a model from one forward of it; the model is not changed.

    inputs: what training calls its forward with, token ids first, such as a batch of two short
    rows, or these ids alone; labels are left out. Another set of arguments may go another way
    through the forward, which `apply`'s model refuses. size: takes what so many ranks can share; 0:
    all that can be shared. tokens: shares out tokens, too (sequence parallel): rows have to be
    padded to a length that the ranks divide. Raises SetupError where the forward cannot be traced.
    """
    inputs = {"input_ids": inputs} if isinstance(inputs, Tensor) else inputs
    called = {name: value for name, value in inputs.items() if name != "labels"}
    if hasattr(getattr(model, "config", None), "use_cache"):
        called.setdefault("use_cache", False)
    return TensorPlan(
        infer_plan(model, inputs=called, size=size, tokens=tokens),
        inputs=called,
        model=model,
        size=size,
    )


@dataclass(frozen=True)
class TensorPlan:
    """A tensor-parallel plan of one model."""

    # Which parameter is cut how, and where ranks exchange what.
    sharding: sharding_plan.ShardingPlan
    # What it was inferred with, as `infer_tensor_plan` got it.
    inputs: dict[str, Any] = field(repr=False, compare=False)
    model: nn.Module = field(repr=False, compare=False)
    size: int = 0

    @property
    def legal_sizes(self) -> tuple[int, ...]:
        """The numbers of ranks that can share the model, above 1."""
        return self.sharding.legal_sizes

    def certify(self, model: nn.Module | None = None, size: int | None = None) -> int:
        """Prove the plan for so many ranks, in this process and on the CPU. Returns the number of
        comparisons.

        model: None: the one that it was inferred of, before `apply`. size: None: what it was
        inferred for, or else the fewest ranks that can share the model.

        A rank has nothing but its own part, and what the model gives and the gradients of all
        parameters have to be the whole model's. A large model of transformers is proven on a small
        copy of its class and its kinds of layers, whose plan has to be this one; adapters are added
        afterwards. Raises SetupError.
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
        ranks = size
        if sum(parameter.numel() for parameter in model.parameters()) > SMALL_MODEL:
            small, inputs = _build_small_copy(model, self.inputs)
            plan, ranks = _infer_plan_of_copy(small, inputs=inputs, size=size, large=self.sharding)
        randomize(small)
        inputs = {
            name: value.cpu() if isinstance(value, Tensor) else value
            for name, value in inputs.items()
        }
        proof = certify(small, plan=plan, size=ranks, inputs=inputs)
        if proof.failures:
            raise SetupError(
                f"tensor plan of {type(model).__name__} for {size} ranks: is wrong"
                f" ({proof.failures[0]}); do not use it"
            )
        return proof.checked

    def apply(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Make the model that of one rank of a mesh of one dimension, in place. Every rank has
        loaded it whole.

        Parameters become DTensors, those of transposed or fused matrices in an order of their own;
        the optimizer is made afterwards. A gradient of which each rank has a part is summed in
        backward. Logits are whole on every rank. Raises ConfigError for a number of ranks that the
        plan does not allow.
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
            plan, columns = exclude_head_exchanges(plan, model, head)
        if head is None or (not columns and any(axis.output for axis in plan.axes)):
            raise ConfigError(
                f"tensor plan of {type(model).__name__}: its logits come of no output projection;"
                " found none"
            )
        place_parameters(model, plan, mesh)
        head.forward = partial(project, head, group, columns)
        framed = frame_forward(model, plan=plan, ranks=build_ranks(group), head=head)
        partial_names = [each.name for each in plan.parameters if each.gradient == "partial"]
        # transformers' Trainer reads the signature of the forward for the columns of a data set.
        model.forward = wraps(model.forward)(
            _sum_partial_gradients(model, partial_names, forward=framed, mesh=mesh, group=group)
        )
        config: Any = getattr(model, "config", None)
        if hasattr(config, "use_cache"):
            # As it was inferred; what a class keeps for generating takes calls of its own
            config.use_cache = False

    @torch.no_grad()
    def full_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Gather the whole model's `state_dict()` on the mesh's first rank's host; others get an
        empty one. A collective.
        """
        mesh = _get_mesh(model)
        plans = self._list_parameter_plans(model)
        state = {}
        for name, value in model.state_dict().items():
            if isinstance(value, DTensor):
                value = restore_file_order(value.full_tensor(), find_runs(plans[name], mesh.size()))
            if mesh.get_local_rank() == 0:
                state[name] = torch.empty_like(value, device="cpu").copy_(value)
        return state

    @torch.no_grad()
    def load_full_state_dict(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Read a whole model's `state_dict()`, which every rank has. Raises ConfigError for a name
        that is missing.
        """
        mesh = _get_mesh(model)
        plans = self._list_parameter_plans(model)
        for name, value in model.state_dict().items():
            if name not in state:
                raise ConfigError(
                    f"load_full_state_dict: found no {name}, expected every tensor of the model's"
                    " state"
                )
            part = state[name]
            if name in plans:
                part = take_parameter_part(
                    part, plans[name], rank=mesh.get_local_rank(), size=mesh.size()
                )
            get_detached_local(value).copy_(part)

    def save_pretrained(self, model: Any, folder: str | Path, **more: Any) -> None:
        """Write what the class' own `save_pretrained(folder, **more)` writes of the whole model. A
        collective.
        """
        state = self.full_state_dict(model)
        mesh = _get_mesh(model)
        if mesh.get_local_rank() == 0:
            model.save_pretrained(folder, state_dict=state, **more)
        torch.distributed.barrier(mesh.get_group())

    def _list_parameter_plans(self, model: nn.Module) -> dict[str, ParameterPlan]:
        """Return the plans of all parameters, by every name that one has."""
        ids = {id(parameter): name for name, parameter in model.named_parameters()}
        return {
            name: self.sharding.parameter(ids[id(parameter)])
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }


@contextmanager
def seen_as_one_process() -> Iterator[None]:
    """Hide the variables of torchrun inside the block, while the process group stays what it is.

    So transformers' Trainer, which asks them, leaves out DistributedDataParallel, gives all ranks
    the same batches, and counts each once.
    """
    hidden = {name: os.environ.pop(name) for name in _OF_TORCHRUN if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _sum_partial_gradients(
    model: nn.Module, names: list[str], forward: Callable[..., Any], mesh: DeviceMesh, group: Group
) -> Callable[..., Any]:
    """Wrap a forward: backward then sums the gradients of these parameters over ranks, before it
    adds them up.
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
            each.register_hook(add)
            for each in map(model.get_parameter, names)
            if each.requires_grad
        )
        return forward(*args, **kwargs)

    return run


def _get_mesh(model: nn.Module) -> DeviceMesh:
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            return parameter.device_mesh
    raise SetupError(
        f"{type(model).__name__}: its parameters are not shared by ranks yet; call apply first"
    )


def _build_small_copy(model: Any, inputs: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """Build a small model of the same class with random weights, and two short rows of such
    inputs.
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
    words = small.get_input_embeddings().weight.shape[0]
    cut = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            rows = (
                value[:2, ..., :_LENGTH] if value.dim() < 4 else value[:2, ..., :_LENGTH, :_LENGTH]
            )
            value = rows % words if name == "input_ids" else rows
        cut[name] = value.cpu() if isinstance(value, Tensor) else value
    return small.eval(), cut


def _infer_plan_of_copy(
    small: nn.Module, inputs: dict[str, Any], size: int, large: sharding_plan.ShardingPlan
) -> tuple[sharding_plan.ShardingPlan, int]:
    """Infer the plan of a small copy, for as many ranks as can share it: it may have fewer
    heads.
    """
    plan = infer_plan(small, inputs, tokens=large.shared_tokens > 0)
    ranks = max((legal for legal in plan.legal_sizes if legal <= size), default=0)
    difference = find_plan_difference(large, plan)
    if difference or not ranks:
        raise SetupError(
            f"tensor plan of {type(small).__name__}: could not be proven on a small model:"
            f" {difference or 'no legal size'}"
        )
    return plan, ranks
