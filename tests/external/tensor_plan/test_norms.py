"""Norms over all heads in inferred plans: sums and means over a sharded axis, which ranks put
together.
"""

import dataclasses

import pytest
import torch
from torch import nn

from recipe_lib.external.certificate import certify, measure_rank_errors
from recipe_lib.external.tensor_plan.infer import infer_plan
from recipe_lib.external.tensor_plan.small_models import randomize, shrink
from recipe_lib.external.tensor_plan.transformers_models import (
    build_example_inputs,
    build_transformers_model,
    infer_config_plan,
)


def small_config(name, **changes):
    transformers = pytest.importorskip("transformers")
    return shrink(transformers.AutoConfig.for_model(name, **changes))


class NormOfHeads(nn.Module):
    """A norm over all heads, as OLMo 2's, in the type that it is given; of centered values, so that
    there are two.
    """

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.words, self.before = nn.Embedding(64, 32), nn.LayerNorm(32)
        self.wide, self.narrow, self.head = (
            nn.Linear(32, 48),
            nn.Linear(48, 32),
            nn.Linear(32, 64, bias=False),
        )
        self.scale = nn.Parameter(torch.ones(48))

    def forward(self, input_ids):
        hidden = self.words(input_ids)
        wide = self.wide(self.before(hidden))
        wide = wide - wide.mean(-1, keepdim=True)
        if self.way == "variance":
            spread = wide.var(-1, keepdim=True)
        elif self.way == "largest":
            spread = wide.abs().amax(-1, keepdim=True)
        else:
            spread = wide.square().sum(-1, keepdim=True) / 48
        return self.head(
            hidden + self.narrow(torch.tanh(self.scale * wide * torch.rsqrt(spread + 1e-6)))
        )


def norm_of_heads(way="sum"):
    inputs = {"input_ids": torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))}
    model = NormOfHeads(way)
    randomize(model)
    return model.double(), infer_plan(model, inputs), inputs


@pytest.mark.parametrize("size", [2, 4])
def test_means_and_sums_over_a_cut_axis_are_put_together(size):
    model, plan, inputs = norm_of_heads()
    assert (plan.parameter("wide.weight").role, plan.parameter("scale").role) == (
        "column",
        "sharded",
    )
    reduced = [
        (each.kind, each.function, each.mean, each.width)
        for each in plan.boundaries
        if each.width == 1
    ]
    assert [each for each in reduced if each[0] == "leave"] == [
        ("leave", "mean", True, 1),
        ("leave", "sum", False, 1),
    ]
    certificate = certify(model, plan, size, inputs)
    assert certificate.checked and not certificate.failures, certificate.failures
    assert max(measure_rank_errors(model, plan, size, inputs).values()) < 1e-12


def left_out(plan, kind, function):
    found = [each for each in plan.boundaries if (each.kind, each.function) != (kind, function)]
    assert len(found) == len(plan.boundaries) - 1
    return dataclasses.replace(plan, boundaries=tuple(found))


@pytest.mark.parametrize("function", ["mean", "sum"])
def test_a_mean_of_a_rank_s_part_alone_is_caught(function):
    model, plan, inputs = norm_of_heads()
    assert certify(model, left_out(plan, "leave", function), 2, inputs).failures


def test_a_mean_taken_for_a_sum_is_caught():
    model, plan, inputs = norm_of_heads()
    wrong = dataclasses.replace(
        plan, boundaries=tuple(dataclasses.replace(each, mean=False) for each in plan.boundaries)
    )
    assert any(
        "what the model gives is off by" in each
        for each in certify(model, wrong, 2, inputs).failures
    )
    assert max(measure_rank_errors(model, wrong, 2, inputs).values()) > 1e-2


def test_a_gradient_of_a_mean_that_is_not_summed_is_caught():
    model, plan, inputs = norm_of_heads()
    wrong = left_out(plan, "enter", "rsqrt")
    errors = measure_rank_errors(model, wrong, 2, inputs)
    assert errors["output 0"] < 1e-12 and max(errors.values()) > 1e-2
    assert certify(model, wrong, 2, inputs).failures


@pytest.mark.parametrize(("way", "operator"), [("variance", "var"), ("largest", "amax")])
def test_what_is_no_sum_over_an_axis_keeps_it_whole_and_says_so(way, operator):
    found = norm_of_heads(way)[1].parameter("wide.weight")
    assert found.role == "replicated" and f"{operator} in the model itself" in found.reason


def test_hidden_states_are_not_cut_though_their_norms_take_means():
    plan = infer_config_plan(small_config("olmo2"))
    for name in ("q_proj", "k_proj"):
        assert plan.parameter(f"model.layers.0.self_attn.{name}.weight").role == "column"
    assert plan.parameter("model.layers.0.post_attention_layernorm.weight").role == "replicated"
    assert plan.parameter("model.embed_tokens.weight").role == "vocabulary"


def test_mamba_2_with_one_group_shares_its_heads_and_keeps_what_all_of_them_use():
    """in_proj is [z | x | B | C | dt]; conv_dim, an attribute, counts x, B and C."""
    config = small_config("bamba")
    plan = infer_config_plan(config)
    projection = plan.parameter("model.layers.0.mamba.in_proj.weight")
    assert (projection.segments, projection.whole) == ((128, 128, 16, 16, 16), (2, 3))
    (divided,) = [
        each
        for each in plan.rewrites
        if each.module == "model.layers.0.mamba" and each.attribute == "conv_dim"
    ]
    assert (divided.value, divided.kept) == (160, 32)
    model, inputs = (
        build_transformers_model(config, "cpu"),
        build_example_inputs(config, device="cpu"),
    )
    randomize(model)
    for size in (2, 4):
        certificate = certify(model, plan, size, inputs)
        assert certificate.checked and not certificate.failures, certificate.failures
    assert (
        max(measure_rank_errors(model, plan, 2, inputs).values()) < 1e-4
    )  # in float32, as the scan and the norm are
    whole = dataclasses.replace(divided, kept=0)
    wrong = dataclasses.replace(
        plan, rewrites=tuple(whole if each is divided else each for each in plan.rewrites)
    )
    assert certify(model, wrong, 2, inputs).failures
