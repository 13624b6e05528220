"""Infer tensor-parallel plans of transformers' causal language models, from their config alone.

`tune tp-plan` and tests call `infer_config_plan` or `infer_plan_and_mask`. A plan says how ranks
cut each parameter, and at which calls of the forward they exchange tensors.
"""

from typing import Any

import torch

from recipe_lib.errors import SetupError
from recipe_lib.external.inspection import require_transformers
from recipe_lib.external.tensor_plan.infer import infer_plan
from recipe_lib.external.tensor_plan.sharding_plan import ShardingPlan

# Forms of the attention mask, in the order in which they are tried. `square`, `[b, 1, s, s]`, is
# first: `row`, `[b, s]`, makes some models read its values, which meta tensors do not have. Some
# models take `row` alone, and some no mask at all.
MASKS = ("square", "row", "none")
# Bytes. A model that cannot be traced on meta is traced on the CPU if its parameters take no more.
_SMALL = 2**28


def build_transformers_model(
    config: Any, device: str = "meta", attention: str = "eager"
) -> torch.nn.Module:
    """Build the causal language model of a transformers config; on meta it takes no memory.

    attention: transformers' `attn_implementation`. A plan serves the one it was made with, as
    others make other calls. Raises SetupError if transformers is not installed.
    """
    require_transformers()
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention
        )
    return model.eval()


def build_example_inputs(
    config: Any, batch: int = 2, length: int = 16, device: str = "meta", mask: str = "square"
) -> dict[str, Any]:
    """Build keyword arguments of one forward: random ids `[batch, length]`, a mask, no cache.

    mask: `square` (causal, `[b, 1, s, s]`, added to scores), `row` (all ones, `[b, s]`) or `none`.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    words = getattr(text, "vocab_size", None) or config.vocab_size
    # Not the first three ids: one may be padding, of which classes warn.
    ids = torch.randint(
        min(3, words - 1), words, (batch, length), generator=torch.Generator().manual_seed(0)
    )
    inputs: dict[str, Any] = {"input_ids": ids.to(device), "use_cache": False}
    if mask == "square":
        square = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)
        inputs["attention_mask"] = square.expand(batch, 1, -1, -1).contiguous().to(device)
    elif mask == "row":
        inputs["attention_mask"] = torch.ones(batch, length, dtype=torch.long, device=device)
    return inputs


def infer_config_plan(config: Any, size: int = 0, tokens: bool = True) -> ShardingPlan:
    """Infer the tensor-parallel plan of a transformers causal language model from its config alone.

    size: number of ranks; only dimensions that they can share are cut; 0: all that some number can
    share. tokens: ranks share tokens as well (sequence parallel). Raises SetupError where no
    forward can be traced.
    """
    return infer_plan_and_mask(config, size, tokens)[0]


def infer_plan_and_mask(
    config: Any, size: int = 0, tokens: bool = True
) -> tuple[ShardingPlan, str]:
    """Infer the plan as `infer_config_plan` does; return also the entry of `MASKS` that worked."""
    model = build_transformers_model(config)
    num_bytes = sum(
        parameter.numel() * parameter.element_size() for parameter in model.parameters()
    )
    errors: list[SetupError] = []
    for device in ("meta", "cpu") if num_bytes <= _SMALL else ("meta",):
        model = model if device == "meta" else build_transformers_model(config, device)
        for mask in MASKS:
            try:
                return infer_plan(
                    model,
                    inputs=build_example_inputs(config, device=device, mask=mask),
                    size=size,
                    tokens=tokens,
                ), mask
            except SetupError as error:
                errors.append(error)
    raise errors[0]
