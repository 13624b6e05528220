"""The plan that training runs an external model by: inferred, and proven before its weights are
read.

Every rank traces one forward of the model without memory (`tensor_plan.infer`). The first rank then
makes a small model of the same class with the same adapters and infers its plan, which has to treat
every parameter, and exchange at every call, as that of the large model does; `plan_proof.certify`
proves that plan. A model that is small already is proven as it is. It takes a second or two, a
tenth of what inferring the plan does.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from recipe_lib.adapters.layers import AdaptedModule, AdapterSettings
from recipe_lib.config.schema import LoraConfig, MemoryConfig, ParallelConfig
from recipe_lib.errors import ConfigError, SetupError
from recipe_lib.external.modules import add_adapters
from recipe_lib.external.plan_proof import certify, find_plan_difference
from recipe_lib.external.tensor_plan.infer import infer_plan
from recipe_lib.external.tensor_plan.sharding_plan import ShardingPlan
from recipe_lib.external.tensor_plan.small_models import SMALL_MODEL, randomize
from recipe_lib.external.transformers_config import TRANSFORMERS
from recipe_lib.logs import get_logger
from recipe_lib.models import build_meta
from recipe_lib.models.language_model import list_layer_names
from recipe_lib.models.spec import ExternalSpec
from recipe_lib.ops.device import holds_values
from recipe_lib.parallel.fsdp import materialize
from recipe_lib.parallel.world import World

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
    first: SetupError | None = None
    with _disable_current_modes():  # a simulation's: the trace is none of it
        traced = _rebuild_on_meta(model)
        for inputs in build_example_inputs(model, "meta"):
            try:
                return infer_plan(
                    traced, inputs, size, tokens=tokens, others=_build_other_inputs(model, inputs)
                )
            except SetupError as error:
                first = first or error
    assert first is not None
    raise first


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
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.spec.vocab_size, (2, LENGTH), generator=generator).to(device)
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
            line = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            failure = (
                f"parallel.tensor={size}: the plan of {model.spec.family} could not be proven on a"
                f" small model ({line}); set parallel.tensor=1"
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
    certificate = certify(small, small_plan, ranks, next(build_example_inputs(small, "cpu")))
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
