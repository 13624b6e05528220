"""Plans of unlike models: transformers' own, and one that was written to be hostile."""

import copy
import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.tensor_plans import compare_plans, randomize
from recipe_lib.errors import ConfigError, SetupError
from recipe_lib.external import certificate
from recipe_lib.external.certificate import certify, measure_rank_errors
from recipe_lib.external.tensor_plan.infer import infer_plan
from recipe_lib.external.tensor_plan.small_models import shrink
from recipe_lib.external.tensor_plan.transformers_models import (
    build_example_inputs,
    build_transformers_model,
    infer_config_plan,
    infer_plan_and_mask,
)
from tests.external.tensor_plan.stored_plan import read_stored_plan

_place = Path(__file__).with_name("hostile.py")
_spec = importlib.util.spec_from_file_location("hostile", _place)
hostile = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hostile)

# Whether fused or with head norms, MLA, experts, parallel residuals, ALiBi, another library's
# linears, tied or not.
MODELS = {
    "qwen3": 1.0,
    "gpt2": 0.9,
    "phi3": 1.0,
    "gemma3_text": 1.0,
    "mixtral": 0.9,
    "bloom": 1.0,
    "deepseek_v3": 0.7,
    "opt": 0.8,
    "gpt_neox": 1.0,
    "cohere": 1.0,
}


def small_config(name, **changes):
    transformers = pytest.importorskip("transformers")
    config = shrink(transformers.AutoConfig.for_model(name))
    for key, value in changes.items():
        setattr(config, key, value)
    return config


def random_model(config):
    model = build_transformers_model(config, "cpu")
    randomize(model)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_is_proven_and_misses_nothing_of_transformers_own(name):
    config = small_config(name)
    plan, mask = infer_plan_and_mask(config)
    model = random_model(config)
    inputs = build_example_inputs(config, device="cpu", mask=mask)
    for size in {2, 4} & set(plan.legal_sizes):
        certificate = certify(model, plan, size, inputs)
        assert certificate.checked and not certificate.failures, certificate.failures
    assert 2 in plan.legal_sizes
    cut = sum(torch.Size(each.shape).numel() for each in plan.parameters if each.dim >= 0)
    assert cut / sum(parameter.numel() for parameter in model.parameters()) > MODELS[name] - 0.05
    agreed, _, theirs = compare_plans(model, plan).partition("/")
    assert agreed == theirs
    double = name not in ("mixtral", "deepseek_v3")  # grouped products take no float64
    errors = measure_rank_errors(model.double() if double else model, plan, 2, inputs)
    # cohere and gemma compute norms in float32 whatever they are given
    assert max(errors.values()) < 1e-4, max(errors, key=errors.get)


def test_gate_and_up_that_alternate_share_an_axis():
    config = small_config("gpt_oss")
    plan = infer_config_plan(config)
    found = plan.parameter("model.layers.0.mlp.experts.gate_up_proj")
    assert (found.role, found.dim, found.unit) == ("column", 2, 2)
    assert found.segments == (2 * config.intermediate_size,)
    certificate = certify(random_model(config), plan, 2, build_example_inputs(config, device="cpu"))
    assert certificate.checked and not certificate.failures, certificate.failures


def test_the_plan_of_fused_attention_cuts_the_same_parameters():
    config = small_config("qwen3")
    model = build_transformers_model(config, attention="sdpa")
    plan, eager = infer_plan(model, build_example_inputs(config)), infer_config_plan(config)
    assert [(each.name, each.role, each.dim) for each in plan.parameters] == [
        (each.name, each.role, each.dim) for each in eager.parameters
    ]


def test_norms_of_heads_have_partial_gradients_and_taking_them_for_full_is_wrong():
    config = small_config("qwen3")
    plan = infer_config_plan(config, tokens=False)
    partial = {each.name.split(".")[-2] for each in plan.parameters if each.gradient == "partial"}
    assert partial == {"q_norm", "k_norm"}
    held = plan.to_dict()
    for each in held["parameters"]:
        each["gradient"] = "full" if each["gradient"] == "partial" else each["gradient"]
    errors = measure_rank_errors(
        random_model(config).double(),
        read_stored_plan(held),
        2,
        build_example_inputs(config, device="cpu"),
    )
    wrong = {name.split(".")[-2] for name, error in errors.items() if error > 0.1}
    assert wrong == {"q_norm", "k_norm"}


def test_a_missing_entry_point_makes_gradients_wrong():
    config = small_config("llama")
    held = infer_config_plan(config).to_dict()
    entering = next(each for each in held["boundaries"] if each["kind"] == "enter")
    held["boundaries"].remove(entering)
    model = random_model(config).double()
    errors = measure_rank_errors(
        model, read_stored_plan(held), 2, build_example_inputs(config, device="cpu")
    )
    assert errors["model.layers.0.input_layernorm.weight"] > 0.1


def test_fused_weights_are_cut_by_segments_and_a_contiguous_cut_is_caught():
    config = small_config("phi3", num_key_value_heads=4)
    plan = infer_config_plan(config)
    fused = plan.parameter("model.layers.0.self_attn.qkv_proj.weight")
    width = config.hidden_size // config.num_attention_heads
    assert fused.segments == (config.num_attention_heads * width, 4 * width, 4 * width)
    assert fused.unit == sum(fused.segments) // 4
    for name in ("qkv_proj", "gate_up_proj"):
        held = plan.to_dict()
        for each in held["parameters"]:
            if name in each["name"]:
                each["segments"] = [sum(each["segments"])]
        inputs = build_example_inputs(config, device="cpu")
        certificate = certify(random_model(config), read_stored_plan(held), 2, inputs)
        assert "what the model gives is off by" in certificate.failures[0]
        row = "o_proj" if name == "qkv_proj" else "down_proj"
        assert any(
            f"layers.0.{'self_attn' if row == 'o_proj' else 'mlp'}.{row}" in each
            for each in certificate.failures
        )


def test_an_axis_forced_through_a_norm_over_all_heads_is_caught():
    config = small_config("olmo2")
    open_model = build_transformers_model(config)
    for module in open_model.modules():
        if hasattr(module, "q_norm"):
            module.q_norm, module.k_norm = nn.Identity(), nn.Identity()
    plan = infer_plan(open_model, build_example_inputs(config))
    assert plan.parameter("model.layers.0.self_attn.q_proj.weight").role == "column"
    certificate = certify(random_model(config), plan, 2, build_example_inputs(config, device="cpu"))
    rows = {each.name for each in plan.parameters if each.name.endswith("o_proj.weight")}
    assert rows and certificate.failures


def test_a_missing_rewrite_is_caught():
    config = small_config("phi3")
    plan = infer_config_plan(config)
    assert plan.rewrites
    held = {**plan.to_dict(), "rewrites": []}
    inputs = build_example_inputs(config, device="cpu")
    assert certify(random_model(config), read_stored_plan(held), 2, inputs).failures


def test_fewer_heads_of_keys_than_ranks_cut_the_groups_instead():
    config = small_config("llama", num_key_value_heads=2, num_attention_heads=16)
    assert infer_config_plan(config).legal_sizes == (2,)
    plan = infer_config_plan(config, size=4)
    assert plan.legal_sizes == (2, 4, 8)
    assert plan.parameter("model.layers.0.self_attn.k_proj.weight").role == "replicated"
    assert plan.parameter("model.layers.0.self_attn.q_proj.weight").role == "column"
    model, inputs = random_model(config), build_example_inputs(config, device="cpu")
    certificate = certify(model, plan, 4, inputs)
    assert certificate.checked and not certificate.failures, certificate.failures
    assert max(measure_rank_errors(model.double(), plan, 4, inputs).values()) < 1e-6


@pytest.mark.parametrize("keys", [1, 2])
def test_another_way_after_the_last_exchange_is_taken(keys):
    # with one head in a group on each rank, transformers repeats no keys and makes fewer calls
    config = small_config("llama", num_key_value_heads=keys, num_attention_heads=8)
    size = 8 // keys
    plan = infer_config_plan(config, size=size)
    assert size in plan.legal_sizes
    model, inputs = random_model(config), build_example_inputs(config, device="cpu")
    certificate = certify(model, plan, size, inputs)
    assert certificate.checked and not certificate.failures, certificate.failures
    assert max(measure_rank_errors(model.double(), plan, size, inputs).values()) < 1e-12


class Branches(nn.Module):
    """Makes a call more where it has few heads, and a product that sums over them after it."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)
        self.heads = 4

    def forward(self, x):
        hidden = self.first(self.norm(x)).view(*x.shape[:2], self.heads, 8)
        if self.heads == 1:
            hidden = hidden.relu()
        return self.norm(nn.functional.linear(hidden.softmax(-1).flatten(2), self.second.weight))


def test_a_size_that_would_send_the_forward_another_way_is_not_legal():
    inputs = {"x": torch.zeros(2, 4, 16)}
    plan = infer_plan(Branches().to("meta"), {"x": inputs["x"].to("meta")})
    assert plan.axes and plan.legal_sizes == (2,)
    assert any(reason.startswith("4 ranks: a comparison of sizes") for reason in plan.refused)
    certificate = certify(Branches(), plan, 4, inputs)
    assert any("its forward went another way" in each for each in certificate.failures)


ONE_KEY_HEAD = {"falcon": "self_attention.query_key_value", "gpt_bigcode": "attn.c_attn"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_KEY_HEAD)
def test_of_a_fused_matrix_the_queries_are_cut_and_the_key_head_is_whole(name):
    config = small_config(name)
    plan = infer_config_plan(config)
    fused = plan.parameter(f"transformer.h.0.{ONE_KEY_HEAD[name]}.weight")
    assert (fused.role, fused.dim, fused.segments, fused.whole) == ("column", 0, (64, 8, 8), (1, 2))
    model, inputs = random_model(config), build_example_inputs(config, device="cpu")
    for size in (2, 4):
        certificate = certify(model, plan, size, inputs)
        assert certificate.checked and not certificate.failures, certificate.failures
        assert (
            max(measure_rank_errors(copy.deepcopy(model).double(), plan, size, inputs).values())
            < 1e-12
        )


def test_a_key_head_of_which_a_rank_has_its_part_alone_is_caught():
    config = small_config("gpt_bigcode")
    held = infer_config_plan(config, tokens=False).to_dict()
    held["boundaries"] = [each for each in held["boundaries"] if each["kind"] != "assemble"]
    for each in held["parameters"]:
        each["whole"] = []
    certificate = certify(
        random_model(config), read_stored_plan(held), 2, build_example_inputs(config, device="cpu")
    )
    assert certificate.failures


def test_rows_that_all_ranks_use_and_whose_gradient_is_not_summed_are_caught(monkeypatch):
    config = small_config("gpt_bigcode")
    plan = infer_config_plan(config, tokens=False)  # so that nothing else is scattered
    ranks = certificate._RankGroup.build_ranks

    def without_sum(group, rank):
        own = lambda tensor: tensor.chunk(group.size)[rank].clone()  # noqa: E731
        return dataclasses.replace(ranks(group, rank), reduce_scatter=own)

    monkeypatch.setattr(certificate._RankGroup, "build_ranks", without_sum)
    errors = measure_rank_errors(
        random_model(config).double(), plan, 2, build_example_inputs(config, device="cpu")
    )
    wrong = {name.split(".", 3)[3] for name, error in errors.items() if error > 1e-3}
    assert wrong == {"attn.c_attn.weight", "attn.c_attn.bias"}


@pytest.mark.parametrize("size", [2, 4])
def test_a_hostile_model_is_planned_by_its_structure(size):
    with torch.device("meta"):
        model = hostile.Thing()
    plan = infer_plan(model, {"numbers": torch.zeros(2, 9, dtype=torch.long, device="meta")})
    roles = {
        each.name: each.role
        for each in plan.parameters
        if each.name.startswith(("many.0", "table"))
    }
    assert roles["table"] == "vocabulary"
    assert roles["many.0.alpha.weight"] == roles["many.0.gamma"] == "column"
    assert roles["many.0.beta"] == roles["many.0.delta.weight"] == "row"
    assert roles["many.0.epsilon"] == roles["many.0.alpha.bias"] == "sharded"
    assert plan.parameter("many.0.gamma").segments == (40, 40)
    assert plan.parameter("many.0.pair").gradient == "partial"
    assert plan.parameter("many.0.delta.bias").after_reduction
    real = hostile.Thing()
    randomize(real)
    inputs = {"numbers": torch.randint(0, 101, (2, 8), generator=torch.Generator().manual_seed(0))}
    certificate = certify(real, plan, size, inputs)
    assert certificate.checked and not certificate.failures, certificate.failures
    assert max(measure_rank_errors(real.double(), plan, size, inputs).values()) < 1e-12
    certificate = certify(real, plan, size, inputs)  # in float64
    assert certificate.checked and not certificate.failures


class Constant(nn.Module):
    """Its number of heads stands in the code."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        heads = self.first(self.norm(x)).view(2, 4, 4, 8)
        return self.norm(self.second(heads.softmax(-1).flatten(2)))


def test_a_size_that_stands_in_the_code_refuses_the_axis_and_names_the_line():
    line = next(
        number
        for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if ".view(2, 4" in text
    )
    plan = infer_plan(Constant().to("meta"), {"x": torch.zeros(2, 4, 16, device="meta")})
    assert not plan.axes and not plan.legal_sizes
    assert any(
        f"test_plans.py:{line}" in reason and "takes the size 4" in reason
        for reason in plan.refused
    )


class Opaque(nn.Module):
    """Uses an operator that nobody knows."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)

    def forward(self, x):
        hidden = self.first(self.norm(x))
        return self.norm(
            self.second(torch.linalg.matrix_exp(hidden.unflatten(-1, (-1, 4, 4))).flatten(-3))
        )


def test_an_unknown_operator_keeps_whole_what_it_touches():
    plan = infer_plan(Opaque().to("meta"), {"x": torch.zeros(2, 4, 16, device="meta")})
    assert not plan.axes
    assert "linalg_matrix_exp" in plan.parameter("first.weight").reason
    assert any("no rule for the operator linalg_matrix_exp" in reason for reason in plan.refused)


def test_tracing_leaves_the_model_as_it_was():
    config = small_config("phi3")
    model = build_transformers_model(config).train()
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(False)
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    plan = infer_plan(model, build_example_inputs(config))
    assert (
        model.training and [parameter.requires_grad for parameter in model.parameters()] == wanted
    )
    kinds = {
        type(value)
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, int)
    }
    assert kinds <= {int, bool} and {
        type(config.hidden_size),
        type(config.num_attention_heads),
    } == {int}
    assert plan.hash() == infer_config_plan(config).hash()  # what is frozen makes no difference


def test_a_plan_survives_being_written_and_its_hash_tells_plans_apart():
    plan = infer_config_plan(small_config("qwen3"))
    again = read_stored_plan(plan.to_dict())
    assert again == plan and again.hash() == plan.hash()
    assert infer_config_plan(small_config("qwen3", intermediate_size=192)).hash() != plan.hash()
    with pytest.raises(
        ConfigError, match=r"tensor plan: found no list axes, expected what to_dict wrote"
    ):
        read_stored_plan({})
    broken = plan.to_dict()
    broken["axes"][0]["color"] = 1
    with pytest.raises(ConfigError, match=r"tensor plan, axes: found .*color.*expected the keys"):
        read_stored_plan(broken)
    with pytest.raises(ConfigError, match=r"no parameter nobody, expected one of the model's"):
        plan.parameter("nobody")


def test_a_forward_that_fails_is_told_with_its_place():
    with pytest.raises(
        SetupError,
        match=r"Constant: the forward failed at norm while it was traced \(RuntimeError: ",
    ):
        infer_plan(Constant().to("meta"), {"x": torch.zeros(2, 4, 15, device="meta")})
