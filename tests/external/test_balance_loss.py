"""The load of experts and the balance loss of mixtures of transformers' classes."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from recipe_lib.adapters import add_adapters
from recipe_lib.config.schema import LoraConfig
from recipe_lib.errors import ConfigError
from recipe_lib.external.inspection import restore_numbers
from recipe_lib.external.module_spec import ModuleSpec, read_spec
from recipe_lib.external.tensor_plan.small_models import randomize
from recipe_lib.models import allocate, build_meta
from recipe_lib.models.mixture import BalanceLoss, ExpertLoad, Routers
from recipe_lib.ops.attention import AttentionInfo, RealTokens
from tests.distributed.ranks import run_ranks
from tests.external.hybrids import HYBRIDS, InDouble, make_hybrid_config
from tests.external.published_layouts import make_config, write_published
from tests.recipes.runs import (
    FULL,
    LORA,
    find_largest_difference,
    keep_latest,
    offload_on_a_cpu,
    read_metrics,
    run_here,
)
from tests.recipes.test_published_models import build_words
from tests.selection import mark_slow_except

LENGTH = 32
TOP_K = 2  # of all small models
WEIGHT = 0.3
TOGETHER = "softmax; {} takes all layers together in its own"
ANOTHER = "softmax; {} has another formula in its own"  # as its choices have a bias
SIGMOID = "sigmoid; {} has no such loss of its own"
SOFTMAX = "softmax; {} has no such loss of its own"
# model_type -> what a run says of the loss; {} is the class.
KINDS = {
    "qwen3_moe": TOGETHER,
    "mixtral": TOGETHER,
    "olmoe": TOGETHER,
    "qwen3_5_moe_text": TOGETHER,
    "qwen3_5_moe": TOGETHER,
    "qwen3_next": TOGETHER,
    "qwen4_exp_text": TOGETHER,
    "qwen2_moe": TOGETHER,
    "qwen3_vl_moe": TOGETHER,
    "gpt_oss": TOGETHER,
    "granitemoe": TOGETHER,
    "granitemoeshared": TOGETHER,
    "granitemoehybrid": TOGETHER,
    "granitemoe_swa": TOGETHER,
    "flex_olmo": TOGETHER,
    "jamba": TOGETHER,
    "mellum": TOGETHER,
    "minimax": TOGETHER,
    "phimoe": TOGETHER,
    "deepseek_v4": ANOTHER,
    "ernie4_5_moe": ANOTHER,
    "laguna": ANOTHER,
    "minimax_m2": ANOTHER,
    "minimax_m3_vl_text": ANOTHER,
    "aria_text": SOFTMAX,
    "cohere2_moe": SOFTMAX,
    "deepseek_v2": SOFTMAX,
    "mistral4": SOFTMAX,
    "gemma4_text": "as the router returns them; {} has no such loss of its own",
    "afmoe": SIGMOID,
    "axk1": SIGMOID,
    "axk2": SIGMOID,
    "bailing_hybrid": SIGMOID,
    "beam": SIGMOID,
    "deepseek_v3": SIGMOID,
    "deepseek_v32": SIGMOID,
    "dots1": SIGMOID,
    "exaone_moe": SIGMOID,
    "glm4_moe": SIGMOID,
    "glm4_moe_lite": SIGMOID,
    "glm_moe_dsa": SIGMOID,
    "hy_v3": SIGMOID,
    "hy_v4": SIGMOID,
    "kimi_linear": SIGMOID,
    "kolibri1": SIGMOID,
    "inkling_text": SIGMOID,
    "inkling2_text": SIGMOID,
    "lfm2_moe": SIGMOID,
    "llama4": SIGMOID,
    "mimo_v2_flash": SIGMOID,
    "nemotron_h": SIGMOID,
    "solar_open": SIGMOID,
    "step3p7": SIGMOID,
}
# model_type -> what is said where the loss is asked for.
REFUSED = {
    "jetmoe": "does not return the logits, scores and indices of its experts",
    # One choice, or some, are of no expert.
    "longcat_flash": "chooses among 260, which are not the experts beside it",
    "zaya": "chooses among 5, which are not the experts beside it",
}
# model_type -> why it is in neither.
UNTESTED = {
    "dbrx": "its class does not build from its config",
    "doge": "a small copy has no experts",
    "dots3_note": "its config has no default that can be made smaller",
    "dots3_note_text": "as dots3_note",
    "flint": "a small copy has no experts",
    "gemma4": "around gemma4_text",
    "hunyuan_v1_moe": "a small copy has one expert",
    "llama4_text": "inside llama4",
    "qwen4_exp": "around qwen4_exp_text",
}


def make_spec(kind: str, **changed: Any) -> ModuleSpec:
    if kind in HYBRIDS:
        return read_spec(make_hybrid_config(kind) | changed, kind)
    text = make_config(kind).to_json_string(use_diff=False)
    return read_spec(restore_numbers(json.loads(text)) | changed, kind)


def build(spec: ModuleSpec) -> tuple[Any, Routers]:
    """Build a model in fp64 with random weights, whose routers are recorded."""
    model: Any = build_meta(spec, torch.float64)
    model.set_experts_implementation("eager")  # grouped matmuls take no fp64
    routers = spec.record_routers(model)
    allocate(model, torch.device("cpu"))
    randomize(model)
    return model.eval(), routers


def begin_counting(routers: Routers) -> None:
    balance = BalanceLoss(WEIGHT, len(routers.sizes))
    balance.begin(1)
    for name, counter in routers.counters.items():
        counter.balance = balance
        counter.load = ExpertLoad(routers.sizes[name], torch.device("cpu"))


def take_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    return gradients


def make_tokens(model: Any, lengths: tuple[int, int]) -> tuple[torch.Tensor, RealTokens]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, min(60, model.spec.vocab_size), (2, LENGTH), generator=generator)
    return tokens, RealTokens.from_lengths(lengths, LENGTH)


def get_class_loss(model: Any) -> Any:
    """Return transformers' function of one class."""
    return sys.modules[type(model).__module__].load_balancing_loss_func  # type: ignore[attr-defined]


EQUAL = ("qwen3_moe", "mixtral", "olmoe", "qwen3_5_moe_text", "qwen3_next", "gpt_oss", "minimax")


@pytest.mark.parametrize("lengths", [(LENGTH, LENGTH), (LENGTH, 20), (9, 1)], ids=str)
@pytest.mark.parametrize("kind", mark_slow_except(EQUAL, ("qwen3_moe", "qwen3_5_moe_text")))
def test_loss_and_gradients_are_those_of_transformers(kind: str, lengths: tuple[int, int]) -> None:
    """Of each layer by itself; the class computes one of all layers' tokens together."""
    model, routers = build(make_spec(kind))
    tokens, real = make_tokens(model, lengths)
    mask = real.make_mask(tokens.device).view_as(tokens).long()
    with InDouble():
        output = model.class_forward(input_ids=tokens, output_router_logits=True, use_cache=False)
        losses = [
            get_class_loss(model)((logits,), size, TOP_K, mask)
            for logits, size in zip(output.router_logits, routers.sizes.values(), strict=True)
        ]
        expected = torch.stack(losses).mean()
        (WEIGHT * expected).backward()
    gradients = take_gradients(model)
    begin_counting(routers)
    with InDouble():
        (model(tokens, attention=AttentionInfo(real=real)) * 0).sum().backward()
    found = take_gradients(model)
    loads = [counter.load for counter in routers.counters.values()]
    loss = torch.stack([load.loss for load in loads if load is not None]).mean()
    assert abs(loss - expected) <= 1e-10
    assert gradients
    for name, gradient in gradients.items():
        assert (found[name] - gradient).abs().max() <= 1e-10, name
    for load in loads:
        assert load is not None
        assert int(load.rows.sum()) == load.expected == sum(lengths) * TOP_K and load.calls == 1


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe"])
def test_loss_of_one_layer_is_what_the_class_returns(kind: str) -> None:
    lengths = (LENGTH, 20)
    model, routers = build(make_spec(kind, num_hidden_layers=1))
    tokens, real = make_tokens(model, lengths)
    mask = real.make_mask(tokens.device).view_as(tokens)
    labels = tokens.roll(-1, dims=1).masked_fill(~mask, -100)
    with InDouble():
        output = model.class_forward(
            input_ids=tokens,
            attention_mask=mask.long(),
            output_router_logits=True,
            use_cache=False,
        )
        logits = output.logits.flatten(0, 1)
        plain = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
        (plain + WEIGHT * output.aux_loss).backward()
    gradients = take_gradients(model)
    (counter,) = routers.counters.values()
    begin_counting(routers)
    assert counter.load is not None
    with InDouble():
        model(tokens, attention=AttentionInfo(real=real), labels=labels).backward()
    assert abs(counter.load.loss - output.aux_loss) <= 1e-10
    found = take_gradients(model)
    for name, gradient in gradients.items():
        assert (found[name] - gradient).abs().max() <= 1e-10, name


def test_sigmoid_scores_are_shares_of_their_sum() -> None:
    """A loop over tokens and experts, of the choices that a class made with a bias."""
    model, routers = build(make_spec("deepseek_v3"))
    tokens, real = make_tokens(model, (LENGTH, 20))
    ((name, counter),) = routers.counters.items()
    begin_counting(routers)
    router = model.get_submodule(name)
    router.e_score_correction_bias.copy_(torch.linspace(-1, 1, 4))
    outputs: list[Any] = []
    router.register_forward_hook(lambda module, args, output: outputs.append(output))
    model(tokens, attention=AttentionInfo(real=real))
    logits, _, chosen = outputs[0]
    mask = real.make_mask(tokens.device)
    num_tokens = int(mask.sum())
    expected = 0.0
    for expert in range(4):
        share = (
            sum(float(row[expert] / row.sum()) for row in logits[mask].detach().sigmoid())
            / num_tokens
        )
        count = sum(int(choice == expert) for row in chosen[mask].tolist() for choice in row)
        expected += 4 * share * count / num_tokens
        assert counter.load is not None and count == counter.load.rows[expert]
    assert counter.load is not None
    assert abs(float(counter.load.loss) - expected) <= 1e-6  # the router computes in fp32


def test_without_gradients_nothing_is_counted() -> None:
    model, routers = build(make_spec("qwen3_moe"))
    begin_counting(routers)
    tokens, real = make_tokens(model, (LENGTH, 20))
    with torch.no_grad():
        model(tokens, attention=AttentionInfo(real=real))
    for counter in routers.counters.values():
        assert counter.load is not None
        assert counter.load.calls == counter.load.expected == int(counter.load.rows.sum()) == 0


@pytest.mark.parametrize("kind", mark_slow_except(KINDS, ("qwen3_moe", "nemotron_h", "minimax_m2")))
def test_routers_of_a_class_are_read(kind: str) -> None:
    spec = make_spec(kind)
    routers = spec.record_routers(build_meta(spec, torch.float32))
    assert routers.sizes and set(routers.sizes.values()) == {4}
    assert routers.convention == KINDS[kind].format(spec.architecture)


def test_every_causal_class_that_names_its_routers_is_listed() -> None:
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        name = model_type_to_module_name(kind)
        try:
            file = find_spec(f"transformers.models.{name}.modeling_{name}")
        except ModuleNotFoundError:
            continue
        if file is not None and '"router_logits"' in Path(str(file.origin)).read_text():
            assert kind in KINDS | REFUSED | UNTESTED, kind


@pytest.mark.parametrize("kind", REFUSED)
def test_routers_that_cannot_be_read_are_refused(kind: str) -> None:
    spec = make_spec(kind)
    with pytest.raises(ConfigError, match=f"{REFUSED[kind]}; set router_aux_loss_coef=0$"):
        spec.record_routers(build_meta(spec, torch.float32))


@pytest.mark.parametrize("fault", ["parameters", "weight", "logits", "scores"])
def test_routers_that_their_class_freezes_are_refused(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    kind: Any = modeling_qwen3_moe.Qwen3MoeTopKRouter
    constructor = kind.__init__
    forward = kind.forward

    def construct(self: Any, config: Any) -> None:
        constructor(self, config)
        self.weight.requires_grad_(fault != "parameters")

    def run(self: Any, hidden: Any) -> Any:
        outputs = list(forward(self, hidden))
        if fault == "weight":  # logits have a gradient, which is none of the router's
            outputs[0] = hidden @ self.weight.detach().t()
        elif fault != "parameters":
            index = 0 if fault == "logits" else 1
            outputs[index] = outputs[index].detach()
        return tuple(outputs)

    monkeypatch.setattr(kind, "__init__", construct)
    monkeypatch.setattr(kind, "forward", run)
    spec = make_spec("qwen3_moe", rms_norm_eps=1e-4 + len(fault) * 1e-6)  # none that is cached
    with pytest.raises(ConfigError, match="its class freezes model.layers.0.mlp.gate; set"):
        spec.record_routers(build_meta(spec, torch.float32))
    adapters = LoraConfig(rank=4, target_modules=["router"])
    with pytest.raises(ConfigError, match="router: .* no gradient; remove it from the list$"):
        add_adapters(build_meta(spec, torch.float32), adapters, torch.float32)


def train(base: Path, output: Path, recipe: str, *overrides: str) -> list[list[float]]:
    words = build_words(
        base,
        output,
        recipe,
        "max_steps=3",
        "device=auto",
        "data.pad_to_multiple_of=64",
        "checkpoint.save_model=false",
        "router_aux_loss_coef=0.5",
        "optimizer.lr=1e-3",
        *overrides,
    )
    run = run_here(keep_latest(*words), recipe=recipe)
    assert run.code == 0, run.said
    is_said = any(line.startswith("balance loss: 0.5 x ") for line in run.said)
    assert is_said == (torch.distributed.get_rank() == 0)
    keys = ("loss", "grad_norm", "expert_load_max_over_mean", "dropped_tokens", "router_aux_loss")
    lines = [line for line in read_metrics(output) if "loss" in line]
    return [[line[key] for line in lines] for key in keys]


# Name -> (ranks, recipe, overrides), compared with one plain process.
RUNS = {
    "two ranks": (2, FULL, ()),
    "stages": (2, FULL, ("parallel.pipeline=2",)),
    "computed again": (1, FULL, ("memory.activation_checkpointing=full",)),
    "selective": (1, FULL, ("memory.activation_checkpointing=selective",)),
    "all kept": (1, FULL, ("memory.recompute_cheap=false",)),
    "on the host": (1, LORA, ("memory.stream_layers=true",)),
    "adapters, two ranks": (2, LORA, ()),
}


def train_one(folder: Path, name: str, kind: str) -> list[list[float]]:
    ranks, recipe, overrides = RUNS[name]
    offload_on_a_cpu()
    # The loss is one of each micro-batch, which has one sequence here.
    accumulated = f"gradient_accumulation_steps={4 if name == 'stages' else 4 // ranks}"
    return train(folder / kind, folder / name, recipe, "batch_size=1", accumulated, *overrides)


def train_plainly(folder: Path, recipe: str, kind: str) -> list[list[float]]:
    words = ("batch_size=1", "gradient_accumulation_steps=4")
    return train(folder / kind, folder / "plain", recipe, *words)


RUN_CASES = [f"{kind} {name}" for kind in ("qwen3_moe", "glm4_moe", "qwen3_next") for name in RUNS]


@pytest.mark.parametrize("case", mark_slow_except(RUN_CASES, ("qwen3_moe two ranks",)))
def test_runs_record_what_one_process_does(case: str, tmp_path: Path) -> None:
    kind, _, name = case.partition(" ")
    write_published(tmp_path / kind, kind)
    expected = run_ranks(train_plainly, 1, tmp_path, RUNS[name][1], kind, timeout=200)[0]
    found = run_ranks(train_one, RUNS[name][0], tmp_path, name, kind, timeout=200)[0]
    for column in (0, 1, 2, 4):
        assert find_largest_difference(found[column], expected[column]) <= 1e-5
    assert expected[3] == found[3] == [0, 0, 0]
    assert expected[4][0] != expected[4][-1]
