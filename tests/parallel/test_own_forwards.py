"""Forwards that a recipe gives to modules of a decoder: what ranks that share matrices, tokens or
layers would replace or skip is refused, and nothing else.
"""

from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

from recipe_lib.config.schema import FullFinetuneConfig, ParallelConfig
from recipe_lib.errors import ConfigError
from recipe_lib.models import build_meta, build_spec, read_preset_config
from recipe_lib.models.decoder import Attention, Decoder, OutputHead
from recipe_lib.parallel import parallelize, start_world
from recipe_lib.parallel.context import refuse_for_context
from recipe_lib.parallel.tensor import refuse_for_tensor
from tests.distributed.ranks import run_ranks
from tests.parallel.small_models import build_small_spec

ATTENTION = "model.layers.0.self_attn"
TENSOR = {"tensor": 2}
PIPELINE = {"pipeline": 2, "pipeline_schedule": "gpipe"}
ZERO_BUBBLE = {"pipeline": 2, "pipeline_schedule": "zbv"}


class OwnHead(OutputHead):
    """A head of a recipe's own, by its class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def give_forward(model: nn.Module, name: str) -> None:
    """Give a module another forward, as a recipe that was copied does."""
    module: Any = model.get_submodule(name)
    own = type(module).forward
    module.forward = MethodType(
        lambda module, *args, **kwargs: own(module, *args, **kwargs), module
    )


# (sizes, the module that is given a forward, its name in the error; None: it is not refused)
CASES: list[tuple[dict[str, Any], str, str | None]] = [
    ({"context": 2}, ATTENTION, ATTENTION),
    ({"context": 2}, "lm_head", None),
    (TENSOR, ATTENTION, ATTENTION),
    (TENSOR, f"{ATTENTION}.q_proj", f"{ATTENTION}.q_proj"),
    (TENSOR, "model.layers.1.mlp.down_proj", "model.layers.1.mlp.down_proj"),
    (TENSOR, "model.embed_tokens", "model.embed_tokens"),
    (TENSOR, "lm_head", "lm_head"),
    (TENSOR, "model", "model"),
    (TENSOR, "", "the model"),
    (PIPELINE, "", "the model"),
    (PIPELINE, "model", "model"),
    (PIPELINE, "lm_head", None),
    (PIPELINE, f"{ATTENTION}.q_proj", None),
    (ZERO_BUBBLE, f"{ATTENTION}.q_proj", f"{ATTENTION}.q_proj"),
    (ZERO_BUBBLE, ATTENTION, None),
]


def divide(sizes: dict[str, Any], name: str) -> str:
    """Return the error of `parallelize` on a model with a forward of its own, or ""."""
    cfg = FullFinetuneConfig(
        device="cpu", gradient_accumulation_steps=4, parallel=ParallelConfig(**sizes)
    )
    model = build_meta(build_small_spec(layers=4), torch.float32)
    give_forward(model, name)
    with start_world(cfg) as world:
        try:
            parallelize(model, cfg, world)
        except ConfigError as error:
            return str(error)
    return ""


def test_a_forward_that_would_be_replaced_or_skipped_is_refused() -> None:
    results = run_ranks(lambda: [divide(sizes, name) for sizes, name, _ in CASES], 2)
    for errors in results:
        for (sizes, name, named), error in zip(CASES, errors, strict=True):
            key = next(iter(sizes))
            if named is None:
                assert error == "", (sizes, name)
                continue
            words = f"parallel.{key}: found another forward of {named}, which the recipe added,"
            assert error.startswith(words), (sizes, name, error)
            assert error.endswith(f"set parallel.{key}=1") and "\n" not in error


def test_a_recipes_class_is_told_from_the_librarys() -> None:
    model = build_meta(build_small_spec(), torch.float32)
    refuse_for_tensor(model)
    refuse_for_context(model)
    model.aux = nn.Dropout()  # without parameters, run by the recipe alone
    refuse_for_tensor(model)
    model.lm_head.__class__ = OwnHead
    with pytest.raises(ConfigError, match="another forward of lm_head"):
        refuse_for_tensor(model)
    refuse_for_context(model)


@pytest.mark.parametrize("name", ["experts", "router", "experts.down_proj"])
def test_forwards_of_a_mixture_are_refused(name: str) -> None:
    spec = build_spec(read_preset_config("qwen3_moe/30B"), "qwen3_moe/30B")
    model: Decoder = build_meta(spec, torch.float32)
    refuse_for_tensor(model)
    give_forward(model, f"model.layers.3.mlp.{name}")
    with pytest.raises(ConfigError, match=rf"another forward of model\.layers\.3\.mlp\.{name}, "):
        refuse_for_tensor(model)


def test_an_attention_of_a_recipes_class_is_refused() -> None:
    class OwnAttention(Attention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    for refuse in (refuse_for_tensor, refuse_for_context):
        model = build_meta(build_small_spec(), torch.float32)
        model.get_submodule(ATTENTION).__class__ = OwnAttention
        with pytest.raises(ConfigError, match=f"another forward of {ATTENTION}, "):
            refuse(model)
