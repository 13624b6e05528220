"""The proof that an inferred plan is right, before a rank's weights are read by it.

A small model of the same class and with the same adapters gets random weights on the host and its own plan, which
has to treat every parameter, and exchange at every call, as that of the large model does. It passes the certificate
(`recipe_lib.external.tensor_plan.certificate`), and the gradients that its ranks come to are those of the whole model.
A model that is small already is proven as it is. The outcome is kept in the cache folder by the hash of the plan.
"""

import hashlib
import inspect
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from recipe_lib.adapters.layers import AdaptedModule, AdapterSettings
from recipe_lib.config.local_files import cache_root
from recipe_lib.config.schema import LoraConfig, MemoryConfig
from recipe_lib.errors import SetupError, StorageError
from recipe_lib.external.adapters import add_adapters
from recipe_lib.external.tensor_plan.certificate import certify
from recipe_lib.external.tensor_plan.gradient_proof import gradient_failures
from recipe_lib.external.tensor_plan.infer import infer_plan
from recipe_lib.external.tensor_plan.propagation import period
from recipe_lib.external.tensor_plan.sharding_plan import ShardingPlan
from recipe_lib.external.tensor_plan.summary import pattern_of
from recipe_lib.external.tensor_plan.transformers_models import randomize
from recipe_lib.external.transformers_config import TRANSFORMERS
from recipe_lib.files import replace_text
from recipe_lib.models import build_meta
from recipe_lib.models.language_model import layer_names
from recipe_lib.models.spec import ExternalSpec
from recipe_lib.parallel.fsdp import materialize
from recipe_lib.parallel.world import World

LENGTH = 16  # tokens of a row that a forward is traced with; two rows
_RANK = 4  # of a small model's adapters
# Heads of keys of a small model, and the most ranks: either these divide them, or they are fewer.
_SMALL_HEADS = ((4, 2**16), (2, 4))
_SMALL = 2**20  # elements of a model that needs no smaller one


def plan_of_model(model: Any, size: int, tokens: bool = True) -> ShardingPlan:
    """The plan of an external model as `build_meta` made it, adapters included, for `size` ranks.

    It is traced without memory, and as training calls it: without a mask where the class does without one. tokens:
    shares out tokens, too, but where the calls of a forward depend on whether documents share its rows. Raises
    SetupError.
    """
    first: SetupError | None = None
    with _disable_current_modes():  # a simulation's: the trace is none of it
        traced = _on_meta(model)
        for inputs in example_inputs(model, "meta"):
            try:
                return infer_plan(traced, inputs, size, tokens, _others(model, inputs))
            except SetupError as error:
                first = first or error
    assert first is not None
    raise first


def _on_meta(model: Any) -> Any:
    """The same model anew, with all that it holds on the meta device, and its class' own forward."""
    # In float32, as the small one, whatever its weights are: some of what converts types does nothing then.
    made = _made_anew(model, model.spec, torch.float32)  # whole, whatever stages of it the model has
    for module in made.modules():
        held = vars(module) | module._buffers
        for name, value in held.items():
            if isinstance(value, torch.Tensor):
                setattr(module, name, value.to("meta"))
    made.forward = made.class_forward
    return made


def _others(model: Any, inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """What else a forward gets: rows that hold several documents, and longer ones."""
    accepted = inspect.signature(model.class_forward).parameters
    *_, masked = example_inputs(model, "meta")
    rows = inputs["input_ids"]
    positions = torch.arange(LENGTH, device=rows.device).expand(rows.shape)
    packed = {key: value for key, value in (masked | {"position_ids": positions}).items() if key in accepted}
    return [packed, *([inputs | {"input_ids": rows.repeat(1, 2)}] if "attention_mask" not in inputs else [])]


def example_inputs(model: Any, device: str) -> Iterator[dict[str, Any]]:
    """What a forward may be called with: tokens alone, or with a mask `[b, 1, s, s]`."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.spec.vocab_size, (2, LENGTH), generator=generator).to(device)
    cached = {"use_cache": False} if model.spec.source.implementation == TRANSFORMERS else {}
    yield {"input_ids": tokens, **cached}
    mask = torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(1).expand(2, 1, -1, -1)
    yield {"input_ids": tokens, **cached, "attention_mask": mask.contiguous().to(device)}


def prove(model: Any, plan: ShardingPlan, world: World) -> str:
    """Proves the plan on the first rank, or finds that it was proven; one line on how. A collective.

    Raises SetupError on every rank if it is not right.
    """
    said = ["", ""]
    if world.is_main:
        size = world.mesh["tensor"].size()
        try:
            said[0] = proof(model, plan, size)
        except SetupError as error:
            said[1] = str(error)
        except Exception as error:  # noqa: BLE001  (of the class' own code: the other ranks wait to hear of it)
            line = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            said[1] = (
                f"parallel.tensor={size}: the plan of {model.spec.family} could not be proven on a small model "
                f"({line}); set parallel.tensor=1"
            )
    said = world.gather_json(said)[0]
    if said[1]:
        raise SetupError(said[1])
    return str(said[0])


def proof(model: Any, plan: ShardingPlan, size: int) -> str:
    """How the plan was proven for `size` ranks, in this process. Raises SetupError if it is not right."""
    file = _file_of(model, plan, size)
    if file.is_file():
        return f"proven before ({file})"
    family, other, ranks = model.spec.family, "", 0
    for keys, most in _SMALL_HEADS:
        small, ranks = _small_model(model, keys), min(size, most)
        small_plan = plan_of_model(small, ranks, plan.shared_tokens > 0)
        if ranks not in small_plan.legal_sizes:  # it may have fewer heads
            ranks = max((legal for legal in small_plan.legal_sizes if legal <= ranks), default=0)
            small_plan = plan_of_model(small, ranks, plan.shared_tokens > 0)
        found = plan_differences(plan, small_plan)
        other = other or found
        if not found and ranks:
            other = ""
            break
    if other or not ranks:
        raise SetupError(
            f"parallel.tensor={size}: the plan of {family} could not be proven on a small model: {other}; "
            "set parallel.tensor=1"
        )
    checked = _check(small, small_plan, ranks, family)
    _keep(file, json.dumps({"plan": plan.hash(), "tensor": size, "ranks": ranks, "comparisons": checked}))
    return f"proven on a model of {sum(p.numel() for p in small.parameters()):,} parameters: {checked} comparisons"


def _keep(file: Path, text: str) -> None:
    """Writes the outcome, if the cache can be written: without it the next start proves the plan again."""
    with suppress(OSError, StorageError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, text)


def _check(small: Any, plan: ShardingPlan, ranks: int, family: str) -> int:
    """The number of comparisons that came out equal. Raises SetupError."""
    materialize(small, MemoryConfig(), torch.device("cpu"))
    randomize(small)
    small.forward = small.class_forward
    inputs = next(example_inputs(small, "cpu"))
    certificate = certify(small, plan, ranks, inputs)
    faults = list(certificate.failures) or gradient_failures(small, plan, ranks, inputs)
    if not certificate.checked:
        faults.append("nothing was compared")
    if faults:
        raise SetupError(
            f"parallel.tensor: the plan of {family} for {ranks} ranks is wrong ({faults[0]}"
            f"{f', and {len(faults) - 1} more' if len(faults) > 1 else ''}); set parallel.tensor=1"
        )
    return certificate.checked + len(plan.parameters)


def _small_model(model: Any, keys: int) -> Any:
    """A model of the same class, without memory yet; of the same shape if that is small. keys: as in `shrink`."""
    of_transformers = model.spec.source.implementation == TRANSFORMERS
    held = {
        id(parameter): parameter.numel() for module in all_modules(model).values() for parameter in module.parameters()
    }
    large = sum(held.values()) > _SMALL
    return _made_anew(model, model.spec.shrunk(keys=keys) if of_transformers and large else model.spec, torch.float32)


def all_modules(model: Any) -> dict[str, nn.Module]:
    """The modules of an external model by name, with those that other ranks of a pipeline have."""
    found = dict(model.named_modules())
    for path, module in model.elsewhere.items():
        found |= {f"{path}.{name}" if name else path: each for name, each in module.named_modules()}
    return found


def _made_anew(model: Any, spec: ExternalSpec, dtype: torch.dtype) -> Any:
    """A model of the spec with adapters on the linears that have one in `model`, parameters on meta."""
    made = build_meta(spec, dtype)
    layers = [*layer_names(model), *model.elsewhere]
    adapted = {name: module for name, module in all_modules(model).items() if isinstance(module, AdaptedModule)}
    if adapted:
        ends = {name.removeprefix(f"{layer}.") for layer in layers for name in adapted if name.startswith(f"{layer}.")}
        rank = next(iter(adapted.values())).settings.rank if spec == model.spec else _RANK
        settings = AdapterSettings(rank=rank, scaling=2.0, dropout=0.0, dora=False, dtype=dtype)
        made.requires_grad_(False)
        add_adapters(made, LoraConfig(target_modules=sorted(ends)), settings)
    return made


def plan_differences(large: ShardingPlan, small: ShardingPlan) -> str:
    """What one of the plans does with a kind of parameter, or at a call, and the other does not; empty: nothing."""
    for found, there in ((_parameters(large), _parameters(small)), (_exchanges(large), _exchanges(small))):
        for name in sorted(found.keys() | there.keys()):
            if found.get(name) != there.get(name):
                return f"{name} has {sorted(found.get(name, ()))}, there {sorted(there.get(name, ()))}"
    return ""


def _parameters(plan: ShardingPlan) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for each in plan.parameters:
        once = period(list(each.segments))  # as often as there are groups of heads, which may be fewer
        segments = f"{len(once)} {len(each.segments) > len(once)}"
        said = f"{each.role} {each.dim} {each.gradient} {segments} {each.whole} {each.after_reduction}"
        found.setdefault(pattern_of(each.name), set()).add(said)
    return found


def _exchanges(plan: ShardingPlan) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for each in plan.boundaries:
        call = f"{each.kind} {each.call} {each.place} {each.function} {each.bias}"
        said = f"{call} {each.taken} {each.dim} {each.tokens_first} {each.mean} {each.whole}"
        found.setdefault(pattern_of(each.module), set()).add(said)
    return found


def _file_of(model: Any, plan: ShardingPlan, size: int) -> Path:
    """Where the outcome is kept: by the plan, the class, and the releases of what runs it."""
    source = model.spec.source
    parts = [plan.hash(), str(size), torch.__version__, model.spec.family, source.implementation, source.attention]
    if model.spec.source.implementation == TRANSFORMERS:
        import transformers

        parts.append(transformers.__version__)
    return cache_root(None) / "tensor_plans" / f"{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:32]}.json"
