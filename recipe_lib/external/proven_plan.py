"""Infer the tensor-parallel plan of an external model, and prove it before weights are read.

A plan says how ranks cut each parameter, and at which calls of the forward they exchange tensors (a
boundary). `ModuleSpec.shard_tensors` calls `infer_proven_plan` on every rank. The first rank then
builds a small model of the same class, whose plan must be like the large one's, and proves that
plan by a run (`certify`). A proof takes a second or two, a tenth of the inference.
"""

import copy
import dataclasses
import inspect
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from recipe_lib.adapters.layers import AdaptedModule, AdapterSettings
from recipe_lib.config.schema import LoraConfig, MemoryConfig, ParallelConfig
from recipe_lib.errors import ConfigError, SetupError
from recipe_lib.external.inspection import TRANSFORMERS, add_adapters
from recipe_lib.external.plan_executor import build_rank_forward
from recipe_lib.external.tensor_plan.exchanges import Ranks, exchange, take_parameter_part
from recipe_lib.external.tensor_plan.infer import infer_plan
from recipe_lib.external.tensor_plan.sharding_plan import (
    ShardingPlan,
    compute_bounds,
    find_period,
    get_output_values,
    make_pattern,
)
from recipe_lib.external.tensor_plan.small_models import SMALL_MODEL, randomize
from recipe_lib.logs import get_logger
from recipe_lib.models import ExternalSpec, build_meta
from recipe_lib.models.language_model import list_layer_names
from recipe_lib.ops.device import holds_values
from recipe_lib.ops.kept_tensors import list_tensors
from recipe_lib.parallel import World, materialize

# Prove that an inferred plan is right, on a small model with random weights on the CPU.
#
# `certify` runs in one process, with a thread for each rank. A rank has its own parts of parameters
# and nothing of the others', and runs the same forward as in training (`plan_executor`), whose
# exchanges are between threads here. The outputs, and the gradients of all parameters, have to be
# those of the whole model. Outputs alone are not enough: they are right also where a sum of
# gradients over ranks is missing.


def find_plan_difference(large: ShardingPlan, small: ShardingPlan) -> str:
    """Describe the first parameter or module that two plans treat differently; empty: none.

    Names have `*` for numbers of layers, since the models have different numbers of these.
    """
    treatments_of_large = _describe_treatments(large)
    treatments_of_small = _describe_treatments(small)
    for name in sorted(treatments_of_large.keys() | treatments_of_small.keys()):
        large_treatments = sorted(treatments_of_large.get(name, ()))
        small_treatments = sorted(treatments_of_small.get(name, ()))
        if large_treatments != small_treatments:
            return f"{name} has {large_treatments}, there {small_treatments}"
    return ""


def _describe_treatments(plan: ShardingPlan) -> dict[str, set[str]]:
    """Return texts on how a plan cuts each parameter, and what it exchanges in each module.

    Keys are names with `*` for numbers. Sizes are left out: the small model has others.
    """
    treatments: dict[str, set[str]] = {}
    for parameter in plan.parameters:
        # Segments repeat once for each group of heads, of which a small model may have fewer.
        period = find_period(list(parameter.segments))
        segments = f"{len(period)} {len(parameter.segments) > len(period)}"
        treatment = (
            f"{parameter.role} {parameter.dim} {parameter.gradient} {segments} {parameter.whole}"
            f" {parameter.after_reduction}"
        )
        treatments.setdefault(make_pattern(parameter.name), set()).add(treatment)
    for boundary in plan.boundaries:
        treatment = (
            f"{boundary.kind} {boundary.call} {boundary.place} {boundary.function} {boundary.bias}"
            f" {boundary.taken} {boundary.dim} {boundary.tokens_first} {boundary.mean}"
            f" {boundary.whole}"
        )
        treatments.setdefault(make_pattern(boundary.module), set()).add(treatment)
    return treatments


# Relative error above which a result is wrong. Rounding to float32 stays below it: some forwards
# compute in float32 even with float64 weights.
MAX_RELATIVE_ERROR = 1e-3
_PATIENCE = 60.0  # seconds that a rank waits for the others before it counts one as failed
_OUTPUT = "output "  # prefix of an output's name in results; no parameter's name has a space


@dataclasses.dataclass(frozen=True)
class Certificate:
    """The result of a proof."""

    checked: int  # number of comparisons
    failures: tuple[str, ...]  # one line for each that failed; empty: the plan is right


def certify(model: nn.Module, plan: ShardingPlan, size: int, inputs: dict[str, Any]) -> Certificate:
    """Prove a plan by running a small model as each of `size` ranks would, on the CPU.

    model: with values, on the CPU; it is not changed. plan: the one of this very model. inputs:
    keyword arguments of one forward. It runs in float64, or in float32 where that fails. Where both
    fail the certificate has the error. Raises SetupError for a size that does not divide the
    plan's axes; that of the vocabulary may be cut unevenly.
    """
    if not all(axis.vocabulary or axis.size % size == 0 for axis in plan.axes):
        raise SetupError(
            f"certificate: {size} ranks cannot share this plan's axes, expected one of"
            f" {list(plan.legal_sizes)}"
        )
    try:
        errors = measure_rank_errors(
            copy.deepcopy(model).double(), plan=plan, size=size, inputs=inputs
        )
    except (RuntimeError, ValueError, TypeError):
        try:
            errors = measure_rank_errors(
                copy.deepcopy(model).float(), plan=plan, size=size, inputs=inputs
            )
        except (RuntimeError, ValueError, TypeError) as error:
            line = (str(error).splitlines() or [""])[0]
            return Certificate(0, (f"{size} ranks: forward and backward fail: {line}",))
    failures = []
    for name, relative in errors.items():
        if not relative <= MAX_RELATIVE_ERROR:  # in this form nan is wrong, too
            subject = (
                "what the model gives" if name.startswith(_OUTPUT) else f"the gradient of {name}"
            )
            failures.append(f"{size} ranks: {subject} is off by {relative:.0e} of its norm")
    return Certificate(size * len(errors), tuple(failures))


def measure_rank_errors(
    model: nn.Module, plan: ShardingPlan, size: int, inputs: dict[str, Any]
) -> dict[str, float]:
    """Measure the relative errors of the ranks' outputs and gradients, by name.

    An error is the norm of the difference over that of the whole model's result; inf where shapes
    differ. Names are those of the parameters, for their gradients, and "output N" for the Nth
    tensor of the output. The loss is a random linear combination of the outputs. model: small, on
    the CPU. Raises RuntimeError where a rank's forward or backward raises.
    """
    # Copied before any forward, which may leave state in a model. The last is the whole model.
    models = [copy.deepcopy(model).eval() for _ in range(size + 1)]
    expected = _compute_results(
        models[size], models[size], inputs=inputs, gather=lambda tensor: tensor
    )
    group = _RankGroup(size)
    by_rank: list[Any] = [None] * size

    def run_rank(rank: int) -> None:
        try:
            by_rank[rank] = _compute_rank_results(
                models[rank], plan, group=group, rank=rank, inputs=inputs
            )
        except Exception as error:  # noqa: BLE001  (raised below, in the main thread)
            by_rank[rank] = error
            group.barrier.abort()  # the other ranks would wait in a collective

    with ThreadPoolExecutor(size) as pool:
        pool.map(run_rank, range(size))
    errors = [result for result in by_rank if isinstance(result, Exception)]
    if errors:
        # Ranks that wait for one that failed have a BrokenBarrierError, which says nothing.
        first = next(
            (error for error in errors if not isinstance(error, threading.BrokenBarrierError)),
            errors[0],
        )
        raise RuntimeError(f"a rank fails: {first}") from first
    # Some gradients are 0 but for rounding, such as that of a bias of keys: errors of gradients are
    # relative to at least this norm.
    precision = max(torch.finfo(result.dtype).eps for result in expected.values())
    smallest_norm = precision**0.5 * max(
        float(result.norm()) for name, result in expected.items() if not name.startswith(_OUTPUT)
    )
    return {
        name: _measure_error(
            plan, name, expected=expected[name], by_rank=by_rank, smallest_norm=smallest_norm
        )
        for name in expected
    }


class _RankGroup:
    """A process group of threads, one a rank; all make the same collectives in the same order."""

    def __init__(self, size: int):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=_PATIENCE)
        self._slots: list[Any] = [None] * size  # by rank, its tensor in the running collective

    def all_gather(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in their order, without gradients."""
        self._slots[rank] = tensor.detach()
        self.barrier.wait()
        tensors = list(self._slots)
        self.barrier.wait()  # no rank writes its next tensor before all have read these
        return tensors

    def build_ranks(self, rank: int) -> Ranks:
        """Build the collectives of one rank: sum, gather and reduce-scatter along dimension 0."""

        def all_reduce(tensor: Tensor) -> Tensor:
            return torch.stack(self.all_gather(rank, tensor)).sum(0)

        def all_gather(tensor: Tensor) -> Tensor:
            return torch.cat(self.all_gather(rank, tensor))

        def reduce_scatter(tensor: Tensor) -> Tensor:
            return all_reduce(tensor).chunk(self.size)[rank].clone()

        return Ranks(
            rank,
            self.size,
            all_reduce=all_reduce,
            all_gather=all_gather,
            reduce_scatter=reduce_scatter,
        )


def _compute_rank_results(
    model: nn.Module, plan: ShardingPlan, group: _RankGroup, rank: int, inputs: dict[str, Any]
) -> dict[str, Tensor]:
    """Compute outputs and gradients as one rank; see `_compute_results`.

    model: a copy of the whole model, whose parameters are cut in place.
    """
    for name, parameter in model.named_parameters():
        parameter.data = take_parameter_part(
            parameter.data, plan=plan.parameter(name), rank=rank, size=group.size
        )
    # The rank's range of the vocabulary.
    own_tokens = [
        compute_bounds((axis.size,), rank, group.size)[0] for axis in plan.axes if axis.output
    ]

    def gather_logits(logits: Tensor) -> Tensor:
        """Gather logits `[..., v]` of all ranks, for a loss that each rank computes whole."""
        for start, stop in own_tokens:
            if logits.shape[-1] == stop - start:
                take_part = partial(torch.narrow, dim=-1, start=start, length=stop - start)
                return exchange(
                    logits, lambda part: torch.cat(group.all_gather(rank, part), -1), take_part
                )
        return logits

    return _compute_results(
        model,
        build_rank_forward(model, plan, group.build_ranks(rank), head=None, gathers_again=False),
        inputs=inputs,
        gather=gather_logits,
    )


@torch.enable_grad()
def _compute_results(
    model: nn.Module,
    forward: Callable[..., Any],
    inputs: dict[str, Any],
    gather: Callable[[Tensor], Tensor],
) -> dict[str, Tensor]:
    """Compute a model's outputs and the gradients of its parameters, by name.

    forward: the model's own, or that of a rank. gather: makes a whole output of a rank's part.
    """
    parameters = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point()
    }
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    output = forward(
        **{
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in inputs.items()
        }
    )
    generator = torch.Generator().manual_seed(1)
    loss: Any = 0.0
    results: dict[str, Tensor] = {}
    for index, tensor in enumerate(list_tensors(get_output_values(output))):
        if tensor.requires_grad:
            full = gather(tensor)
            results[f"{_OUTPUT}{index}"] = full.detach()
            loss = (
                loss + (full * torch.randn(full.shape, generator=generator, dtype=full.dtype)).sum()
            )
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return results | {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True)
    }


def _measure_error(
    plan: ShardingPlan,
    name: str,
    expected: Tensor,
    by_rank: list[dict[str, Tensor]],
    smallest_norm: float,
) -> float:
    """Return the largest relative error of the ranks' results of one name.

    Partial gradients are summed over ranks first; a cut one is compared with its part of
    `expected`. smallest_norm: the error of a gradient is relative to at least this norm.
    """
    rank_results = [results[name] for results in by_rank]
    if name.startswith(_OUTPUT):
        pairs = [(output, expected) for output in rank_results]
        smallest_norm = 0.0
    elif (treatment := plan.parameter(name)).gradient == "partial":
        pairs = [(torch.stack(rank_results).sum(0), expected)]
    else:
        pairs = [
            (
                gradient,
                take_parameter_part(expected, plan=treatment, rank=rank, size=len(rank_results)),
            )
            for rank, gradient in enumerate(rank_results)
        ]
    if any(result.shape != target.shape for result, target in pairs):
        return float("inf")
    worst = max(float((result - target).norm()) for result, target in pairs)
    # Not 0, which an output of zeros has.
    return worst / max(float(expected.norm()), smallest_norm, 1e-30)


# Infer and prove the plan of a model that is to be trained.


LENGTH = 16  # tokens of each of the two rows with which a forward is traced
_RANK = 4  # rank r of a small model's adapters
# (heads of keys and values of a small model, most ranks to prove its plan for), tried in
# order. The first is for ranks that divide these heads, the second for more ranks than heads.
_SMALL_HEADS = ((4, 2**16), (2, 4))


def infer_proven_plan(model: Any, parallel: ParallelConfig, world: World) -> ShardingPlan:
    """Infer the plan that ranks run, and prove it. A collective of all ranks.

    Ranks share tokens as well (sequence parallel) unless such a plan cannot be proven. Raises
    ConfigError where `parallel.tensor` ranks can share nothing of the model, SetupError where its
    forward cannot be traced or no plan can be proven.
    """
    has_dora = any(
        getattr(module, "lora_magnitude_vector", None) is not None
        for module in list_all_modules(model).values()
    )
    # DoRA computes its factors outside the calls that the plan counts, and expects all tokens.
    plan = infer_model_plan(model, parallel.tensor, tokens=not has_dora)
    if world.pipeline is not None:
        # Stages exchange hidden states of one shape: all layers have to give a rank's tokens, or
        # all whole rows. The last one does not count, its output goes to the head.
        *sending_layers, _ = model.find_stage_parts().layers
        if len({name in plan.local_outputs for name in sending_layers}) > 1:
            plan = infer_model_plan(model, parallel.tensor, tokens=False)
    check_plan(model, plan, parallel)
    if not holds_values(world.device):  # a simulation by the planner, which proves nothing
        return plan
    log = get_logger()
    try:
        summary = prove(model, plan, world)
    except SetupError as error:
        if not plan.shared_tokens:
            raise
        log.info("tensor plan of %s: every rank has all tokens: %s", model.spec.family, error)
        plan = infer_model_plan(model, parallel.tensor, tokens=False)
        summary = prove(model, plan, world)
    log.info("tensor plan of %s: %s", model.spec.family, summary)
    return plan


def check_plan(model: Any, plan: ShardingPlan, parallel: ParallelConfig) -> None:
    """Raise ConfigError if `parallel.tensor` ranks cannot run the plan, or share no layer by it.

    model: named in the message.
    """
    size = parallel.tensor
    name = model.spec.family
    if all(axis.vocabulary for axis in plan.axes):
        reason = f": {plan.refused[0]}" if plan.refused else ""
        raise ConfigError(
            f"parallel.tensor={size}: found nothing in the layers of {name} that {size} ranks can"
            f" share{reason}; set parallel.tensor=1, or see `tune tp-plan`"
        )
    if size not in plan.legal_sizes:
        legal = ", ".join(map(str, (1, *plan.legal_sizes)))
        raise ConfigError(
            f"parallel.tensor={size}: found a forward of {name} that {size} ranks cannot run; set"
            f" it to one of {legal}"
        )


def infer_model_plan(model: Any, size: int, tokens: bool = True) -> ShardingPlan:
    """Infer the plan of an external model, its adapters included, for `size` ranks.

    The model is traced on meta without an attention mask, or with one where that fails. tokens:
    ranks share tokens as well, but not in modules whose calls differ when a row holds several
    documents. Raises SetupError where the forward cannot be traced.
    """
    errors: list[SetupError] = []
    # The planner simulates a run under its own dispatch modes, which must not count the trace.
    with _disable_current_modes():
        traced = _rebuild_on_meta(model)
        for inputs in iterate_example_inputs(model, "meta"):
            try:
                return infer_plan(
                    traced,
                    inputs,
                    size,
                    tokens=tokens,
                    other_inputs=_build_other_inputs(model, inputs),
                )
            except SetupError as error:
                errors.append(error)
    raise errors[0]


def _rebuild_on_meta(model: Any) -> Any:
    """Build the same model anew on meta, buffers too, with its class' own forward."""
    rebuilt = _rebuild(model, model.spec)  # all layers, also if `model` has those of some stages
    for module in rebuilt.modules():
        for name, value in (vars(module) | module._buffers).items():
            if isinstance(value, torch.Tensor):
                setattr(module, name, value.to("meta"))
    rebuilt.forward = rebuilt.class_forward
    return rebuilt


def _build_other_inputs(model: Any, inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Build other arguments of training: rows of several documents, and longer rows.

    Modules whose calls differ for these share no tokens (`infer_plan`).
    """
    accepted = inspect.signature(model.class_forward).parameters
    *_, masked = iterate_example_inputs(model, "meta")
    rows = inputs["input_ids"]
    positions = torch.arange(LENGTH, device=rows.device).expand(rows.shape)
    packed = {
        key: value
        for key, value in (masked | {"position_ids": positions}).items()
        if key in accepted
    }
    return [
        packed,
        *([inputs | {"input_ids": rows.repeat(1, 2)}] if "attention_mask" not in inputs else []),
    ]


def iterate_example_inputs(model: Any, device: str) -> Iterator[dict[str, Any]]:
    """Yield keyword arguments of a forward: tokens `[2, LENGTH]`, then the same with a causal mask.

    The mask is `[b, 1, s, s]`, added to scores. Some classes cannot be traced without one.
    """
    tokens = torch.randint(
        0, model.spec.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(0)
    ).to(device)
    cache_options = {"use_cache": False} if model.spec.source.implementation == TRANSFORMERS else {}
    yield {"input_ids": tokens, **cache_options}
    mask = torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(1).expand(2, 1, -1, -1)
    yield {"input_ids": tokens, **cache_options, "attention_mask": mask.contiguous().to(device)}


def prove(model: Any, plan: ShardingPlan, world: World) -> str:
    """Prove the plan on the first rank; return one line about the proof. A collective of all ranks.

    Raises SetupError on every rank if the plan is wrong, or could not be proven.
    """
    success = ""
    failure = ""
    if world.is_main:
        size = world.mesh["tensor"].size()
        try:
            success = prove_on_small_model(model, plan, size)
        except SetupError as error:
            failure = str(error)
        except Exception as error:  # noqa: BLE001
            # The class' own code may raise anything, and the other ranks wait to hear of it.
            failure = (
                f"parallel.tensor={size}: the plan of {model.spec.family} could not be proven on a"
                f" small model ({type(error).__name__}: {' '.join(str(error).split())[:200]});"
                " set parallel.tensor=1"
            )
    success, failure = world.gather_json([success, failure])[0]
    if failure:
        raise SetupError(failure)
    return str(success)


def prove_on_small_model(model: Any, plan: ShardingPlan, size: int) -> str:
    """Prove the plan for `size` ranks, in this process; return one line about the proof.

    A model that is small already is proven as it is. Raises SetupError if the plan is wrong, or no
    small model has a plan like it.
    """
    family = model.spec.family
    differences: list[str] = []
    for num_key_heads, most_ranks in _SMALL_HEADS:
        small = _build_small_model(model, num_key_heads)
        num_ranks = min(size, most_ranks)
        small_plan = infer_model_plan(small, num_ranks, plan.shared_tokens > 0)
        # The small model may have fewer heads than ranks: prove it for as many ranks as it allows.
        if num_ranks not in small_plan.legal_sizes:
            num_ranks = max(
                (legal for legal in small_plan.legal_sizes if legal <= num_ranks), default=0
            )
            small_plan = infer_model_plan(small, num_ranks, plan.shared_tokens > 0)
        differences.append(find_plan_difference(plan, small_plan))
        if num_ranks and not differences[-1]:
            break
    else:
        reason = next(
            filter(None, reversed(differences)), "no number of ranks can share the small one"
        )
        raise SetupError(
            f"parallel.tensor={size}: the plan of {family} could not be proven on a small model:"
            f" {reason}; set parallel.tensor=1"
        )
    materialize(small, MemoryConfig(), torch.device("cpu"))
    randomize(small)
    small.forward = small.class_forward
    certificate = certify(
        small, plan=small_plan, size=num_ranks, inputs=next(iterate_example_inputs(small, "cpu"))
    )
    if certificate.failures:
        raise SetupError(
            f"parallel.tensor: the plan of {family} for {num_ranks} ranks is wrong"
            f" ({certificate.failures[0]}); set parallel.tensor=1"
        )
    num_elements = sum(parameter.numel() for parameter in small.parameters())
    return f"proven on a model of {num_elements:,} parameters: {certificate.checked} comparisons"


def _build_small_model(model: Any, num_key_heads: int) -> Any:
    """Build a small model of the same class on meta; one that is small already is built as it is.

    A plugin's model, too: only configs of transformers can be shrunk. num_key_heads: of keys and
    values, where the model has fewer of them than of queries.
    """
    of_transformers = model.spec.source.implementation == TRANSFORMERS
    # By id, since modules may share parameters.
    sizes = {
        id(parameter): parameter.numel()
        for module in list_all_modules(model).values()
        for parameter in module.parameters()
    }
    is_large = sum(sizes.values()) > SMALL_MODEL
    return _rebuild(
        model,
        model.spec.build_shrunk(num_key_heads=num_key_heads)
        if of_transformers and is_large
        else model.spec,
    )


def list_all_modules(model: Any) -> dict[str, nn.Module]:
    """List all modules of an external model by name, those of other pipeline ranks included."""
    modules = dict(model.named_modules())
    for path, module in model.elsewhere.items():
        modules |= {
            f"{path}.{name}" if name else path: inner for name, inner in module.named_modules()
        }
    return modules


def _rebuild(model: Any, spec: ExternalSpec) -> Any:
    """Build a model of the spec on meta, with adapters on the linears that have one in `model`.

    It is float32, whatever the model's weights are. In bf16 the forward makes further calls, which
    convert types, and the plan of the small model, in float32, would not be like the large one's.
    """
    rebuilt = build_meta(spec, torch.float32)
    layers = [*list_layer_names(model), *model.elsewhere]  # `elsewhere`: on other pipeline ranks
    adapted = {
        name: module
        for name, module in list_all_modules(model).items()
        if isinstance(module, AdaptedModule)
    }
    if adapted:
        # Names within a layer: the small model has the same ones in fewer layers.
        names_in_layer = {
            name.removeprefix(f"{layer}.")
            for layer in layers
            for name in adapted
            if name.startswith(f"{layer}.")
        }
        rank = next(iter(adapted.values())).settings.rank if spec == model.spec else _RANK
        settings = AdapterSettings(
            rank=rank, scaling=2.0, dropout=0.0, dora=False, dtype=torch.float32
        )
        rebuilt.requires_grad_(False)
        add_adapters(rebuilt, LoraConfig(target_modules=sorted(names_in_layer)), settings)
    return rebuilt
