"""`tune tp-plan`: how tensor parallel would share a model among ranks, from its config.json alone."""

import argparse
import contextlib
import io
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe_lib.cli.arguments import Parser
from recipe_lib.config.extras import install_line
from recipe_lib.config.suggest import nearest, show
from recipe_lib.errors import DONE, ConfigError, SetupError
from recipe_lib.foreign.transformers_config import plain_numbers
from recipe_lib.logs import silence_torchao

if TYPE_CHECKING:
    from recipe_lib.foreign.tensor_plan import TensorPlan

NOT_CERTIFIED = 3  # exit code
SMALL = 2**20  # parameters of a model that is proven as it is
# Entries of config.json that say how weights are stored, not what the model is.
STORED = ("architectures", "auto_map", "dtype", "quantization_config", "torch_dtype", "transformers_version")
DESCRIPTION = """Tells how tensor parallel would share a model among the ranks of a group: which parameter is cut where,
what ranks send each other, what each of them holds, and what stays whole and why. The plan comes from one forward of
transformers' model on the meta device: needs config.json, no weights and no GPU.

  tune tp-plan llama3/8B --tensor 2,4,8
  tune tp-plan outputs/demo/model --tensor 2 --certify

MODEL is a folder, a config.json, a hub id that was downloaded, or a preset of `model.preset`.

Exit codes: 0 a plan for at least one of the sizes; 3 --certify did not prove one of them; 2 a mistake to correct,
or no plan for any of the sizes."""


def run(words: list[str]) -> int:
    """Prints the plan, and writes it where asked to."""
    arguments = read(words)
    held = config_of(arguments.model)
    with quiet():
        config = transformers_config(held, arguments.model)
        whole, plans, illegal = plans_for(config, arguments.tensor)
        proofs = certificates(config, plans) if arguments.certify else []
    if arguments.json:
        from recipe_lib.files import replace_text

        text = json.dumps(as_json(arguments, whole, plans, illegal, proofs), indent=2) + "\n"
        if arguments.json == "-":
            sys.stdout.write(text)
        else:
            replace_text(Path(arguments.json), text)
    if arguments.json != "-":
        from recipe_lib.cli.tp_plan_report import report

        report(arguments.model, arguments.tokens, whole, plans, illegal, proofs)
    return NOT_CERTIFIED if any(proof["failures"] for proof in proofs) else DONE


def read(words: Sequence[str]) -> argparse.Namespace:
    """The command line, checked as far as it can be without torch."""
    from recipe_lib.cli.outputs import check_output

    parser = Parser("tp-plan", DESCRIPTION)
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder, config.json, hub id in the cache, or preset")
    add("--tensor", default="2,4,8", metavar="T,...", help="ranks of a group; default: 2,4,8")
    add("--tokens", type=int, default=8192, metavar="N", help="tokens of a micro-batch, b x s; default: 8192")
    add("--certify", action="store_true", help="also prove the plan on a small copy with random weights")
    add("--json", metavar="FILE", help="also write the plan and its numbers as JSON; -: in place of the report")
    arguments = parser.parse(words)
    arguments.tensor = read_sizes(arguments.tensor)
    if arguments.tokens < 1:
        raise ConfigError(f"--tokens: found {arguments.tokens}, expected a number >= 1")
    check_output("--json", arguments.json)
    return arguments


def read_sizes(text: str) -> tuple[int, ...]:
    """`2,4` as numbers."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and 1 < int(part) < 2**20 for part in parts):
        raise ConfigError(f"--tensor: found {show(text)!r}, expected numbers above 1, commas between them: 2,4,8")
    return tuple(dict.fromkeys(map(int, parts)))


def config_of(name: str) -> dict[str, Any]:
    """The contents of MODEL's config.json. Raises ConfigError where there is none on this machine."""
    from recipe_lib.config.places import list_presets
    from recipe_lib.models.spec import preset_config, read_config

    path = Path(name).expanduser()
    presets = list_presets()
    if path.exists():
        return read_config(path)
    if name in presets:
        return preset_config(name)
    cached = in_hub_cache(name)
    if cached is not None:
        return read_config(Path(cached))
    near = nearest(name, presets)
    hint = f"did you mean {near}?" if near else f"fetch it with `tune download {show(name)}`, or name a preset"
    raise ConfigError(f"tune tp-plan: {show(name)}: found no folder, no preset and nothing in the hub cache; {hint}")


def in_hub_cache(name: str) -> str | None:
    """The config.json of a hub id, if the hub's cache on this machine has it."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # a path and no hub id
        return None
    return found if isinstance(found, str) else None


def transformers_config(held: dict[str, Any], name: str) -> Any:
    """transformers' config of a config.json's contents. Raises SetupError where transformers has none."""
    silence_torchao()
    try:
        import transformers
    except ImportError:
        raise SetupError(f"tune tp-plan: found no package transformers; {install_line('transformers')}") from None
    kind = str(held.get("model_type"))
    rest = {key: plain_numbers(value) for key, value in held.items() if key not in (*STORED, "model_type")}
    try:
        return transformers.AutoConfig.for_model(kind, **rest)
    except Exception as error:  # a config of any kind may be wrong in any way
        line = (str(error).strip().splitlines() or [""])[0]
        raise SetupError(
            f"{show(name)}: transformers {transformers.__version__} makes no config of model_type={show(kind)}"
            f" ({type(error).__name__}: {show(line, 200)}); expected one of its causal language models"
        ) from error


def plans_for(config: Any, sizes: Sequence[int]) -> tuple["TensorPlan", dict[int, "TensorPlan"], dict[int, str]]:
    """The plan that cuts every axis; size to plan; and size to why there is none.

    A size that cannot share every axis gets a plan of its own, around those that it can share.

    Raises ConfigError if no size has a plan.
    """
    from recipe_lib.foreign.tensor_plan.summary import why_not
    from recipe_lib.foreign.tensor_plan.transformers_models import plan_for_config

    whole = plan_for_config(config)
    plans: dict[int, TensorPlan] = {}
    illegal: dict[int, str] = {}
    for size in sizes:
        plan = whole if size in whole.legal_sizes else plan_for_config(config, size)
        if size in plan.legal_sizes:
            plans[size] = plan
        else:
            illegal[size] = why_not(whole, size)
    if not plans:
        legal = ", ".join(map(str, whole.legal_sizes)) or "none"
        reasons = dict.fromkeys(illegal.values())
        raise ConfigError(*(f"--tensor {','.join(map(str, sizes))}: {why}; legal sizes: {legal}" for why in reasons))
    return whole, plans, illegal


def certificates(config: Any, plans: dict[int, "TensorPlan"]) -> list[dict[str, Any]]:
    """The proof for each size, of a small copy of the model: size, ranks, plan, checked, failures (lines).

    Forward by taint and rehearsal (certificate.certify), and the gradient of every parameter. The copy has a plan of
    its own, which has to hold every parameter as the model's does. ranks: fewer than size where it has fewer heads.
    """
    from recipe_lib.foreign.tensor_plan.certificate import certify
    from recipe_lib.foreign.tensor_plan.gradients import gradient_failures
    from recipe_lib.foreign.tensor_plan.shrink import randomize, shrink
    from recipe_lib.foreign.tensor_plan.summary import held_differently, held_elements
    from recipe_lib.foreign.tensor_plan.transformers_models import example_inputs, plan_and_mask, transformers_model

    elements = held_elements(next(iter(plans.values())), 1)
    small = config if elements <= SMALL else shrink(config)

    def build() -> Any:
        model = transformers_model(small, "cpu")
        randomize(model)
        return model

    whole, mask = plan_and_mask(small)
    inputs = example_inputs(small, device="cpu", mask=mask)
    found: list[dict[str, Any]] = []
    for size, plan in plans.items():
        copied = plan_and_mask(small, size)[0] if held_differently(plan, whole) else whole
        failures = held_differently(plan, copied)
        ranks = max((legal for legal in copied.legal_sizes if legal <= size), default=0)
        if not ranks:
            failures.append(f"no {size} ranks or fewer can share the small copy")
        same = next((each for each in found if each["ranks"] == ranks and each["plan"] == copied.hash()), None)
        checked = same["checked"] if same else 0
        if not failures and same is None:
            certificate = certify(build, copied, ranks, inputs)
            failures = [*certificate.failures, *gradient_failures(build, copied, ranks, inputs)]
            checked = certificate.checked + len(copied.parameters)
        failures = failures or (same["failures"] if same else [])
        proof = {"size": size, "ranks": ranks, "plan": copied.hash(), "checked": checked, "failures": failures}
        found.append(proof)
    return found


def as_json(
    arguments: argparse.Namespace,
    whole: "TensorPlan",
    plans: dict[int, "TensorPlan"],
    illegal: dict[int, str],
    proofs: list[dict[str, Any]],
) -> dict[str, Any]:
    """What --json writes; bytes throughout."""
    from recipe_lib.foreign.tensor_plan.summary import BYTES, cut_share, held_elements, step_bytes

    unlike = {plan.hash(): plan for plan in plans.values()}
    sizes = {
        str(size): {
            "plan": plan.hash(),
            "parameter_bytes": BYTES * held_elements(plan, size),
            "cut_share": cut_share(plan),
            "sent_bytes": step_bytes(plan, size, arguments.tokens),
        }
        for size, plan in plans.items()
    }
    return {
        "model": arguments.model,
        "tokens": arguments.tokens,
        "legal_sizes": list(whole.legal_sizes),
        "sizes": sizes,
        "not_legal": {str(size): why for size, why in illegal.items()},
        "plans": {name: plan.to_dict() for name, plan in unlike.items()},
        "certificates": proofs,
    }


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps what transformers says while it builds models off the terminal; errors come as exceptions."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
