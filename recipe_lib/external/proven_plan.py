"""Infer the tensor-parallel plan of an external model, and prove it before weights are read.

A plan says how ranks cut each parameter, and at which calls of the forward they exchange tensors (a
boundary). `ModuleSpec.shard_tensors` calls `infer_proven_plan` on every rank. The first rank then
builds a small model of the same class, whose plan must be like the large one's, and proves that
plan by a run (`certify`). A proof takes a second or two, a tenth of the inference.
"""

import inspect
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from recipe_lib.adapters.layers import AdaptedExpertModule, AdaptedModule, AdapterSettings
from recipe_lib.adapters.quantized import QuantizedLinear
from recipe_lib.config.schema import EXPERTS, ROUTER, LoraConfig, MemoryConfig, ParallelConfig
from recipe_lib.errors import ConfigError, SetupError
from recipe_lib.external.certificate import certify, find_plan_difference
from recipe_lib.external.experts import replace_experts
from recipe_lib.external.inspection import TRANSFORMERS, AdaptedClassRouter, add_adapters
from recipe_lib.external.routers import list_routers
from recipe_lib.external.tensor_plan.infer import infer_plan
from recipe_lib.external.tensor_plan.sharding_plan import (
    ParameterPlan,
    ShardingPlan,
    make_pattern,
)
from recipe_lib.external.tensor_plan.small_models import SMALL_MODEL, randomize
from recipe_lib.logs import get_logger
from recipe_lib.models import ExternalSpec, build_meta
from recipe_lib.models.language_model import list_layer_names
from recipe_lib.ops.device import holds_values
from recipe_lib.parallel import World, materialize

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
    whole = {
        make_pattern(weight.name)
        for _, weight in _list_quantized(model, plan)
        if "as it is stored" in weight.reason
    }
    if whole:
        log.info(
            "tensor plan of %s: quantized, whole on all ranks: %s",
            model.spec.family,
            ", ".join(sorted(whole)),
        )
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


def infer_model_plan(
    model: Any, size: int, tokens: bool = True, uncut: Collection[str] = ()
) -> ShardingPlan:
    """Infer the plan of an external model, its adapters included, for `size` ranks.

    A quantized matrix stays whole where a rank's part of its rows would not be that of equal runs,
    as of queries, keys and values in one. uncut: parameters that do, see `infer_plan`.

    The model is traced on meta without an attention mask, or with one where that fails. tokens:
    ranks share tokens as well, but not in modules whose calls differ when a row holds several
    documents. Raises SetupError where the forward cannot be traced.
    """
    errors: list[SetupError] = []
    # The planner simulates a run under its own dispatch modes, which must not count the trace.
    with _disable_current_modes():
        traced = _rebuild_on_meta(model)
        # Every rank counts the choices of all tokens.
        routers = tuple(f"{name}." for name in list_routers(traced))
        unsteady = [name for name, _ in traced.named_modules() if f"{name}.".startswith(routers)]
        for inputs in iterate_example_inputs(model, "meta"):
            try:
                plan = infer_plan(
                    traced,
                    inputs,
                    size,
                    tokens=tokens,
                    other_inputs=_build_other_inputs(model, inputs),
                    unsteady=unsteady,
                    uncut=uncut,
                )
                irregular = _list_irregular(model, plan)
                if not irregular:
                    return plan
                return infer_model_plan(model, size, tokens, {*uncut, *irregular})
            except SetupError as error:
                errors.append(error)
    raise errors[0]


def _list_quantized(model: Any, plan: ShardingPlan) -> list[tuple[QuantizedLinear, ParameterPlan]]:
    return [
        (module, plan.parameter(f"{name}.weight"))
        for name, module in list_all_modules(model).items()
        if isinstance(module, QuantizedLinear)
    ]


def _list_irregular(model: Any, plan: ShardingPlan) -> set[str]:
    """Return the quantized weights, with `*` for numbers, of which no rank could store its part."""
    return {
        make_pattern(weight.name)
        for module, weight in _list_quantized(model, plan)
        if weight.whole
        or len(set(weight.segments)) > 1
        or (len(weight.segments) > 1 and weight.dim != module.output_dim)
    }


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
    # The small model is in 16 bits.
    uncut = {
        make_pattern(weight.name) for _, weight in _list_quantized(model, plan) if weight.dim < 0
    }
    for num_key_heads, most_ranks in _SMALL_HEADS:
        small = _build_small_model(model, num_key_heads)
        num_ranks = min(size, most_ranks)
        small_plan = infer_model_plan(small, num_ranks, plan.shared_tokens > 0, uncut)
        # The small model may have fewer heads than ranks: prove it for as many ranks as it allows.
        if num_ranks not in small_plan.legal_sizes:
            num_ranks = max(
                (legal for legal in small_plan.legal_sizes if legal <= num_ranks), default=0
            )
            small_plan = infer_model_plan(small, num_ranks, plan.shared_tokens > 0, uncut)
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
    """Build a model of the spec on meta, with adapters on the parts that have one in `model`.

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
        # The words for experts and routers; else names within a layer: the small model has the same
        # ones in fewer layers.
        words = {AdaptedExpertModule: EXPERTS, AdaptedClassRouter: ROUTER}
        targets = {
            next((word for kind, word in words.items() if isinstance(module, kind)), "")
            or name.removeprefix(f"{layer}.")
            for layer in layers
            for name, module in adapted.items()
            if name.startswith(f"{layer}.")
        }
        rank = next(iter(adapted.values())).settings.rank if spec == model.spec else _RANK
        settings = AdapterSettings(
            rank=rank, scaling=2.0, dropout=0.0, dora=False, dtype=torch.float32
        )
        rebuilt.requires_grad_(False)
        add_adapters(rebuilt, LoraConfig(target_modules=sorted(targets)), settings)
    if model.tensor_names and not rebuilt.tensor_names:  # quantized experts without adapters
        replace_experts(rebuilt, None, "none", always=True)
    return rebuilt
