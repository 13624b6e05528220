"""Plans for transformers' causal language models, from their config alone."""

from typing import Any

import torch

from recipe_lib.errors import SetupError
from recipe_lib.external.inspection import require_transformers
from recipe_lib.external.tensor_plan.infer import infer_plan
from recipe_lib.external.tensor_plan.sharding_plan import ShardingPlan

# The form of the attention mask: of four dimensions, because one of two makes some models read its
# values, which meta tensors do not have; some models take no other, and some none at all.
MASKS = ("square", "row", "none")
# A model that cannot be traced without values is traced with them if its parameters take no more
# than this.
_SMALL = 2**28


def build_transformers_model(
    config: Any, device: str = "meta", attention: str = "eager"
) -> torch.nn.Module:
    """Build the causal language model of a transformers config; on meta it takes no memory.

    attention: what transformers calls its implementation; a plan's calls are those of the one it
    was made with.

    Raises SetupError if transformers is not installed.
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
    """Build inputs for one forward of a transformers causal language model: ids [b, s], a mask, no
    cache.

    mask: `square` (causal, [b, 1, s, s]), `row` (all ones, [b, s]) or `none`.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    words = getattr(text, "vocab_size", None) or config.vocab_size
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
    """Infer the tensor parallel plan of a transformers causal language model from its config alone.

    size: takes only axes that this many ranks can share; 0 takes all. tokens: shares out tokens,
    too. Raises SetupError where no forward can be traced.
    """
    return infer_plan_and_mask(config, size, tokens)[0]


def infer_plan_and_mask(
    config: Any, size: int = 0, tokens: bool = True
) -> tuple[ShardingPlan, str]:
    """Infer the plan; return the form of the attention mask with which the forward could be traced,
    too.
    """
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
