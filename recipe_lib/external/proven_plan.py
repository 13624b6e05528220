"""The plan that an external model is trained by: inferred, and proven before its weights are read.

Every rank traces one forward of the model without memory (`tensor_plan.infer`). The first rank then
makes a small model of the same class with the same adapters and infers its plan, which has to treat
every parameter, and exchange at every call, as that of the large model does; `certify` proves that
plan. A model that is small already is proven as it is. It takes a second or two, a tenth of what
inferring the plan does.
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
from recipe_lib.external.plan_executor import frame_forward
from recipe_lib.external.tensor_plan.exchanges import Ranks, exchange, take_parameter_part
from recipe_lib.external.tensor_plan.infer import infer_plan
from recipe_lib.external.tensor_plan.sharding_plan import (
    ShardingPlan,
    compute_bounds,
    find_period,
    get_output_values,
    list_tensors,
    make_pattern,
)
from recipe_lib.external.tensor_plan.small_models import SMALL_MODEL, randomize
from recipe_lib.logs import get_logger
from recipe_lib.models import ExternalSpec, build_meta
from recipe_lib.models.language_model import list_layer_names
from recipe_lib.ops.device import holds_values
from recipe_lib.parallel import World, materialize

# The proof that an inferred plan is right, on a small model with random weights on the host.
#
# `certify` runs in one process, with a thread for each rank. A rank has its own, smaller parameters
# and nothing of the others', takes the attributes that the plan rewrites, and runs the forward that
# trains (`plan_executor`), whose exchanges are between threads. What the model gives has to be what
# the whole model gives, and so has the gradient of every parameter: a forward that is right says
# nothing of a boundary that is missing there, or of a whole parameter whose gradient is taken for
# full.


def find_plan_difference(large: ShardingPlan, small: ShardingPlan) -> str:
    """Find what one of the plans does with a kind of parameter, or at a call, and the other does
    not; empty: nothing.
    """
    of_large = _describe_treatments(large)
    of_small = _describe_treatments(small)
    for name in sorted(of_large.keys() | of_small.keys()):
        large_treatments = sorted(of_large.get(name, ()))
        small_treatments = sorted(of_small.get(name, ()))
        if large_treatments != small_treatments:
            return f"{name} has {large_treatments}, there {small_treatments}"
    return ""


def _describe_treatments(plan: ShardingPlan) -> dict[str, set[str]]:
    """Describe how a plan holds each kind of parameter, and what it exchanges in each kind of
    module.
    """
    treatments: dict[str, set[str]] = {}
    for each in plan.parameters:
        # As often as there are groups of heads, which may be fewer.
        once = find_period(list(each.segments))
        segments = f"{len(once)} {len(each.segments) > len(once)}"
        said = (
            f"{each.role} {each.dim} {each.gradient} {segments} {each.whole} {each.after_reduction}"
        )
        treatments.setdefault(make_pattern(each.name), set()).add(said)
    for boundary in plan.boundaries:
        said = (
            f"{boundary.kind} {boundary.call} {boundary.place} {boundary.function} {boundary.bias}"
            f" {boundary.taken} {boundary.dim} {boundary.tokens_first} {boundary.mean}"
            f" {boundary.whole}"
        )
        treatments.setdefault(make_pattern(boundary.module), set()).add(said)
    return treatments


# Relative error above which it is not rounding; some forwards compute in float32 whatever they are
# given.
WRONG = 1e-3
_PATIENCE = 60.0  # seconds for another rank, which has failed if it is not there by then
_OUTPUT = "output "  # and its number: a name that no parameter has


@dataclasses.dataclass(frozen=True)
class Certificate:
    """The result of a proof."""

    checked: int  # comparisons
    failures: tuple[str, ...]  # a line each


def certify(model: nn.Module, plan: ShardingPlan, size: int, inputs: dict[str, Any]) -> Certificate:
    """Run a small model on the CPU as each of `size` ranks would, in float64, or in float32 if it
    takes no other.

    model: with real weights, on the CPU, which are not changed. plan: of this very model. inputs:
    of one forward. Raises SetupError for a size that the plan does not allow.
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
        if not relative <= WRONG:
            what = "what the model gives" if name.startswith(_OUTPUT) else f"the gradient of {name}"
            failures.append(f"{size} ranks: {what} is off by {relative:.0e} of its norm")
    return Certificate(size * len(errors), tuple(failures))


def measure_rank_errors(
    model: nn.Module, plan: ShardingPlan, size: int, inputs: dict[str, Any]
) -> dict[str, float]:
    """Measure how far what ranks come to is from what the whole model does, relative to its norm.

    By name for the gradient of each parameter, and for each of the model's outputs, of which the
    loss is a random combination. model: small, on the CPU; float64 tells rounding from mistakes.
    Raises RuntimeError where a rank fails.
    """
    # Copied before a forward, which some models keep the state of.
    models = [copy.deepcopy(model).eval() for _ in range(size + 1)]
    expected = _compute_results(
        models[size], models[size], inputs=inputs, gather=lambda tensor: tensor
    )
    group = _RankGroup(size)
    by_rank: list[Any] = [None] * size

    def work(rank: int) -> None:
        try:
            by_rank[rank] = _compute_rank_results(
                models[rank], plan, group=group, rank=rank, inputs=inputs
            )
        except Exception as error:  # noqa: BLE001  (a thread hands on what it raises)
            by_rank[rank] = error
            group.barrier.abort()

    with ThreadPoolExecutor(size) as pool:
        pool.map(work, range(size))
    failed = [each for each in by_rank if isinstance(each, Exception)]
    if failed:
        first = next(
            (each for each in failed if not isinstance(each, threading.BrokenBarrierError)),
            failed[0],
        )
        raise RuntimeError(f"a rank fails: {first}") from first
    # Some gradients are nothing but rounding, as that of a bias of keys is: no error is measured
    # against less.
    precision = max(torch.finfo(each.dtype).eps for each in expected.values())
    least = precision**0.5 * max(
        float(each.norm()) for name, each in expected.items() if not name.startswith(_OUTPUT)
    )
    return {
        name: _measure_error(plan, name, expected=expected[name], by_rank=by_rank, least=least)
        for name in expected
    }


class _RankGroup:
    """Ranks that hand each other tensors, in the same order."""

    def __init__(self, size: int):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=_PATIENCE)
        self._slots: list[Any] = [None] * size

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self._slots[rank] = tensor.detach()
        self.barrier.wait()
        tensors = list(self._slots)
        self.barrier.wait()
        return tensors

    def ranks(self, rank: int) -> Ranks:
        """Return one of them."""

        def total(tensor: Tensor) -> Tensor:
            return torch.stack(self.exchange(rank, tensor)).sum(0)

        def gather(tensor: Tensor) -> Tensor:
            return torch.cat(self.exchange(rank, tensor))

        def scatter(tensor: Tensor) -> Tensor:
            return total(tensor).chunk(self.size)[rank].clone()

        return Ranks(rank, self.size, total=total, gather=gather, scatter=scatter)


def _compute_rank_results(
    model: nn.Module, plan: ShardingPlan, group: _RankGroup, rank: int, inputs: dict[str, Any]
) -> dict[str, Tensor]:
    for name, parameter in model.named_parameters():
        parameter.data = take_parameter_part(
            parameter.data, plan=plan.parameter(name), rank=rank, size=group.size
        )
    own_tokens = [
        compute_bounds((axis.size,), rank, group.size)[0] for axis in plan.axes if axis.output
    ]

    def gather_tokens(logits: Tensor) -> Tensor:
        """Gather the logits of all ranks, for a loss that each rank has whole."""
        for start, stop in own_tokens:
            if logits.shape[-1] == stop - start:
                take_part = partial(torch.narrow, dim=-1, start=start, length=stop - start)
                return exchange(
                    logits, lambda part: torch.cat(group.exchange(rank, part), -1), take_part
                )
        return logits

    return _compute_results(
        model,
        frame_forward(model, plan, group.ranks(rank), head=None, gathers_again=False),
        inputs=inputs,
        gather=gather_tokens,
    )


@torch.enable_grad()
def _compute_results(
    model: nn.Module,
    forward: Callable[..., Any],
    inputs: dict[str, Any],
    gather: Callable[[Tensor], Tensor],
) -> dict[str, Tensor]:
    """Compute what a model gives, and the gradients of its parameters, by name. gather: makes a
    whole output of a rank's.
    """
    parameters = {name: each for name, each in model.named_parameters() if each.is_floating_point()}
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
    for number, tensor in enumerate(list_tensors(get_output_values(output))):
        if tensor.requires_grad:
            full = gather(tensor)
            results[f"{_OUTPUT}{number}"] = full.detach()
            loss = (
                loss + (full * torch.randn(full.shape, generator=generator, dtype=full.dtype)).sum()
            )
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return results | {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True)
    }


def _measure_error(
    plan: ShardingPlan, name: str, expected: Tensor, by_rank: list[dict[str, Tensor]], least: float
) -> float:
    ours = [results[name] for results in by_rank]
    if name.startswith(_OUTPUT):
        pairs = [(output, expected) for output in ours]
        least = 0.0
    elif (treatment := plan.parameter(name)).gradient == "partial":
        pairs = [(torch.stack(ours).sum(0), expected)]
    else:
        pairs = [
            (gradient, take_parameter_part(expected, plan=treatment, rank=rank, size=len(ours)))
            for rank, gradient in enumerate(ours)
        ]
    if any(left.shape != right.shape for left, right in pairs):
        return float("inf")
    worst = max(float((left - right).norm()) for left, right in pairs)
    return worst / max(float(expected.norm()), least, 1e-30)


# The plan of a model that is to be trained, proven so.


LENGTH = 16  # tokens of a row that a forward is traced with; two rows
_RANK = 4  # of a small model's adapters
# Heads of keys of a small model, and the most ranks: either these divide them, or they are fewer.
_SMALL_HEADS = ((4, 2**16), (2, 4))


def infer_proven_plan(model: Any, parallel: ParallelConfig, world: World) -> ShardingPlan:
    """Infer the plan that ranks run: with tokens shared out, or without where that cannot be
    proven. A collective.

    Raises ConfigError where the ranks can share nothing of it, SetupError where its forward cannot
    be traced.
    """
    has_dora = any(
        getattr(each, "lora_magnitude_vector", None) is not None
        for each in list_all_modules(model).values()
    )
    # What DoRA adds is computed beside the calls that the plan counts, of all tokens.
    plan = infer_model_plan(model, parallel.tensor, tokens=not has_dora)
    if world.pipeline is not None:
        # What layers give has to be a rank's tokens after each of them, or after none; the last
        # gives to the head.
        *before, _ = model.find_stage_parts().layers
        if len({name in plan.local_outputs for name in before}) > 1:
            plan = infer_model_plan(model, parallel.tensor, tokens=False)
    check_plan(model, plan, parallel)
    if not holds_values(world.device):
        return plan
    log = get_logger()
    try:
        said = prove(model, plan, world)
    except SetupError as error:
        if not plan.shared_tokens:
            raise
        log.info("tensor plan of %s: every rank has all tokens: %s", model.spec.family, error)
        plan = infer_model_plan(model, parallel.tensor, tokens=False)
        said = prove(model, plan, world)
    log.info("tensor plan of %s: %s", model.spec.family, said)
    return plan


def check_plan(model: Any, plan: ShardingPlan, parallel: ParallelConfig) -> None:
    """Raise ConfigError if `parallel.tensor` ranks cannot run the plan, or would share nothing by
    it.
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
    """Infer the plan of an external model as `build_meta` made it, adapters included, for `size`
    ranks.

    It is traced without memory, and as training calls it: without a mask where the class does
    without one. tokens: shares out tokens, too, but where the calls of a forward depend on whether
    documents share its rows. Raises SetupError.
    """
    errors: list[SetupError] = []
    with _disable_current_modes():  # a simulation's: the trace is none of it
        traced = _rebuild_on_meta(model)
        for inputs in build_example_inputs(model, "meta"):
            try:
                return infer_plan(
                    traced, inputs, size, tokens=tokens, others=_build_other_inputs(model, inputs)
                )
            except SetupError as error:
                errors.append(error)
    raise errors[0]


def _rebuild_on_meta(model: Any) -> Any:
    """Build the same model anew, with all that it holds on the meta device, and its class' own
    forward.
    """
    rebuilt = _rebuild(model, model.spec)  # whole, whatever stages of it the model has
    for module in rebuilt.modules():
        for name, value in (vars(module) | module._buffers).items():
            if isinstance(value, torch.Tensor):
                setattr(module, name, value.to("meta"))
    rebuilt.forward = rebuilt.class_forward
    return rebuilt


def _build_other_inputs(model: Any, inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Build what else a forward gets: rows that hold several documents, and longer ones."""
    accepted = inspect.signature(model.class_forward).parameters
    *_, masked = build_example_inputs(model, "meta")
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


def build_example_inputs(model: Any, device: str) -> Iterator[dict[str, Any]]:
    """Yield what a forward may be called with: tokens alone, or with a mask `[b, 1, s, s]`."""
    tokens = torch.randint(
        0, model.spec.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(0)
    ).to(device)
    cached = {"use_cache": False} if model.spec.source.implementation == TRANSFORMERS else {}
    yield {"input_ids": tokens, **cached}
    mask = torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(1).expand(2, 1, -1, -1)
    yield {"input_ids": tokens, **cached, "attention_mask": mask.contiguous().to(device)}


def prove(model: Any, plan: ShardingPlan, world: World) -> str:
    """Prove the plan on the first rank; return one line on how. A collective.

    Raises SetupError on every rank if it is not right.
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
            # Of the class' own code: the other ranks wait to hear of it.
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
    """Prove the plan for `size` ranks, in this process; return how. Raises SetupError if it is not
    right.
    """
    family = model.spec.family
    differences: list[str] = []
    for keys, most in _SMALL_HEADS:
        small = _build_small_model(model, keys)
        ranks = min(size, most)
        small_plan = infer_model_plan(small, ranks, plan.shared_tokens > 0)
        if ranks not in small_plan.legal_sizes:  # it may have fewer heads
            ranks = max((legal for legal in small_plan.legal_sizes if legal <= ranks), default=0)
            small_plan = infer_model_plan(small, ranks, plan.shared_tokens > 0)
        differences.append(find_plan_difference(plan, small_plan))
        if ranks and not differences[-1]:
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
        small, plan=small_plan, size=ranks, inputs=next(build_example_inputs(small, "cpu"))
    )
    if certificate.failures:
        raise SetupError(
            f"parallel.tensor: the plan of {family} for {ranks} ranks is wrong"
            f" ({certificate.failures[0]}); set parallel.tensor=1"
        )
    elements = sum(parameter.numel() for parameter in small.parameters())
    return f"proven on a model of {elements:,} parameters: {certificate.checked} comparisons"


def _build_small_model(model: Any, keys: int) -> Any:
    """Build a model of the same class, without memory yet; of the same shape if that is small.
    keys: as in `shrink`.
    """
    of_transformers = model.spec.source.implementation == TRANSFORMERS
    sizes = {
        id(parameter): parameter.numel()
        for module in list_all_modules(model).values()
        for parameter in module.parameters()
    }
    large = sum(sizes.values()) > SMALL_MODEL
    return _rebuild(
        model, model.spec.build_shrunk(keys=keys) if of_transformers and large else model.spec
    )


def list_all_modules(model: Any) -> dict[str, nn.Module]:
    """List the modules of an external model by name, with those that other ranks of a pipeline
    have.
    """
    modules = dict(model.named_modules())
    for path, module in model.elsewhere.items():
        modules |= {
            f"{path}.{name}" if name else path: each for name, each in module.named_modules()
        }
    return modules


def _rebuild(model: Any, spec: ExternalSpec) -> Any:
    """Build a model of the spec with adapters on the linears that have one in `model`, parameters
    on meta.

    In float32, whatever the model's weights are: the small one is, and some of what converts types
    does nothing then.
    """
    rebuilt = build_meta(spec, torch.float32)
    layers = [*list_layer_names(model), *model.elsewhere]
    adapted = {
        name: module
        for name, module in list_all_modules(model).items()
        if isinstance(module, AdaptedModule)
    }
    if adapted:
        ends = {
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
        add_adapters(rebuilt, LoraConfig(target_modules=sorted(ends)), settings)
    return rebuilt
