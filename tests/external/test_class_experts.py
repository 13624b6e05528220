"""Experts of transformers' classes in 4 and 8 bits: what they compute, and what stays as it was."""

from contextlib import nullcontext
from math import prod
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recipe_lib.adapters.lora import quantize_frozen
from recipe_lib.adapters.quantized import QuantizedLinear, fake_quantize_weight
from recipe_lib.checkpoint.huggingface import load_weights
from recipe_lib.checkpoint.tensor_matching import read_headers
from recipe_lib.models import allocate, build_meta, read_config, read_spec
from tests.distributed.ranks import run_ranks
from tests.external.published_layouts import open_published, read_tensors, write_published
from tests.recipes.runs import (
    LORA,
    find_largest_difference,
    make_probe_tokens,
    read_losses,
    run_here,
)
from tests.recipes.test_published_models import build_words
from tests.selection import mark_slow_except

KINDS = (
    "glm4_moe_lite",
    "qwen3_5_moe",
    "qwen3_next",
    "gemma4_text",
    "granitemoehybrid",
    "nemotron_h",
    "lfm2_moe",
    "deepseek_v3",
    "ernie4_5_moe",
    "dots1",
    "gpt_oss",
    "llama4",
    "qwen3_moe",
    "afmoe",
)


def open_quantized(folder: Path, kind: str, watch: Any = None) -> Any:
    spec = read_spec(read_config(folder), str(folder), "transformers")
    model = build_meta(spec, torch.float32)
    quantize_frozen(model, kind, torch.float32)
    allocate(model, torch.device("cpu"))
    spec.build_weight_map(read_headers(folder))  # builds the class, once
    with watch or nullcontext():
        load_weights(model, spec, folder)
    return model.eval()


@torch.no_grad()
def dequantize_reference(published: Any, ours: Any, kind: str) -> int:
    """Round the weights of a transformers model that ours has quantized; return how many."""
    count = 0
    for name, module in ours.named_modules():
        if not isinstance(module, QuantizedLinear):
            continue
        count += 1
        is_expert = f"{name}.weight" in ours.tensor_names
        parameter = published.get_parameter(name if is_expert else f"{name}.weight")
        weight = parameter
        if is_expert:
            owner, _, child = name.rpartition(".")
            weight = parameter.transpose(1, 2) if module.transposed else parameter
        rounded = fake_quantize_weight(weight.reshape(-1, weight.shape[-1]), kind)
        rounded = rounded.view(weight.shape)
        assert not torch.equal(rounded, weight)
        parameter.copy_(rounded.transpose(1, 2) if is_expert and module.transposed else rounded)
    return count


@pytest.mark.parametrize("storage", ("nf4", "int8"))
@pytest.mark.parametrize("kind", mark_slow_except(KINDS, ("glm4_moe_lite", "gpt_oss")))
def test_logits_are_those_of_the_dequantized_weights(
    kind: str, storage: str, tmp_path: Path
) -> None:
    write_published(tmp_path, kind)
    published, _ = open_published(tmp_path)
    ours = open_quantized(tmp_path, storage)
    assert ours.tensor_names
    dequantize_reference(published, ours, storage)
    with torch.no_grad():
        tokens = make_probe_tokens()
        expected = published(input_ids=tokens, use_cache=False).logits
        difference = (ours(tokens) - expected).abs().max()
    assert difference <= 1e-5 * expected.abs().max()


def train(base: Path, output: Path, *overrides: str) -> Any:
    return run_here(build_words(base, output, LORA, *overrides), recipe=LORA)


WITH_EXPERTS = "lora.target_modules=[all-linear,experts]"
WITH_ALL = "lora.target_modules=[all-linear,experts,router]"


def open_by_peft(base: Path, adapter: Path) -> Any:
    """Open an adapter with PEFT, which has to have a place for each of its tensors."""
    adapted = peft.PeftModel.from_pretrained(open_published(base)[0], str(adapter)).eval()
    in_model = {name for name, _ in adapted.named_parameters() if ".lora_" in name}
    assert {name.replace(".default", "") for name in in_model} == set(read_tensors(adapter))
    return adapted


@pytest.mark.parametrize("kind", mark_slow_except(KINDS, ("nemotron_h",)))
def test_peft_opens_adapters_of_experts_and_a_run_reads_them(kind: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_published(base, kind)
    run = train(base, tmp_path / "run", WITH_EXPERTS, "max_steps=2")
    assert run.code == 0, run.said
    adapted = open_by_peft(base, tmp_path / "run" / "adapter")
    tokens = make_probe_tokens()
    with torch.no_grad():
        ours = run.recipe.model.eval()(tokens)
        theirs = adapted(input_ids=tokens, use_cache=False).logits
        plain = open_published(base)[0](input_ids=tokens, use_cache=False).logits
    scale = theirs.abs().max()
    assert (ours - theirs).abs().max() <= 1e-5 * scale
    assert (ours - plain).abs().max() > 1e-3 * scale
    # What PEFT writes of the same adapter is trained further.
    adapted.save_pretrained(tmp_path / "theirs")
    words = (WITH_EXPERTS, f"lora.adapter_path={tmp_path / 'theirs'}", "optimizer.lr=1e-12")
    again = train(base, tmp_path / "again", *words)
    assert again.code == 0, again.said
    with torch.no_grad():
        assert (again.recipe.model.eval()(tokens) - ours).abs().max() <= 1e-5 * scale


# Each balances, so that its choices are counted beside the adapter.
ROUTED = ("max_steps=2", "router_aux_loss_coef=0.1")


@pytest.mark.parametrize("targets", ("router", "all-linear,router", "all-linear,experts,router"))
@pytest.mark.parametrize(
    "kind",
    mark_slow_except(
        ("qwen3_moe", "glm4_moe_lite", "lfm2_moe", "llama4", "gpt_oss", "granitemoehybrid"),
        ("qwen3_moe",),
    ),
)
def test_peft_opens_adapters_of_routers(kind: str, targets: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_published(base, kind)
    words = (f"lora.target_modules=[{targets}]", *ROUTED)
    run = train(base, tmp_path / "run", *words, "lora.merge_on_save=true")
    assert run.code == 0, run.said
    run = train(base, tmp_path / "run2", *words)
    assert run.code == 0, run.said
    adapted = open_by_peft(base, tmp_path / "run2" / "adapter")
    tokens = make_probe_tokens()
    with torch.no_grad():
        ours = run.recipe.model.eval()(tokens)
        theirs = adapted(input_ids=tokens, use_cache=False).logits
        plain = open_published(base)[0](input_ids=tokens, use_cache=False).logits
        merged = open_published(tmp_path / "run" / "model")[0]
        of_merged = merged(input_ids=tokens, use_cache=False).logits
    scale = theirs.abs().max()
    assert (ours - theirs).abs().max() <= 1e-5 * scale
    assert (ours - of_merged).abs().max() <= 1e-4 * scale
    assert (ours - plain).abs().max() > 1e-4 * scale


ROUTER_FAULTS = {
    "lora.target_modules=[mlp.gate]": "is named by the word router; remove it",
    "lora.target_modules=[router] lora.dora=true": "set lora.dora=false (LoRA), or remove router",
    "lora.target_modules=[router] lora.dropout=0.1": "set lora.dropout=0, or remove router",
}


@pytest.mark.parametrize("words", ROUTER_FAULTS)
def test_adapters_of_routers_are_refused_in_one_line(words: str, tmp_path: Path) -> None:
    write_published(tmp_path / "base", "qwen3_moe")
    run = train(tmp_path / "base", tmp_path / "run", *words.split())
    assert run.code == 2 and ROUTER_FAULTS[words] in run.said[-1]


QUANTIZED = ("lora.quantize_base=nf4", "max_steps=2")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_lose_what_one_does(kind: str, tmp_path: Path) -> None:
    write_published(tmp_path / "base", kind)

    def run(ranks: int) -> list[float]:
        output = tmp_path / str(ranks)
        words = (WITH_ALL, *QUANTIZED, f"batch_size={2 // ranks}")
        found = train(tmp_path / "base", output, *words)
        assert found.code == 0, found.said
        return read_losses(output)

    one = run(1)
    two = run_ranks(run, 2, 2)[0]
    assert find_largest_difference(two, one) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("glm4_moe_lite", "gpt_oss", "llama4"))
def test_a_merged_model_computes_what_the_run_did(kind: str, tmp_path: Path) -> None:
    write_published(tmp_path / "base", kind)
    words = (WITH_EXPERTS, *QUANTIZED, "lora.merge_on_save=true")
    run = train(tmp_path / "base", tmp_path / "run", *words)
    assert run.code == 0, run.said
    merged, _ = open_published(tmp_path / "run" / "model")
    tokens = make_probe_tokens()
    with torch.no_grad():
        ours = run.recipe.model.eval()(tokens)
        theirs = merged(input_ids=tokens, use_cache=False).logits
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


class Shapes(TorchDispatchMode):
    """Notes the shapes of all tensors in 16 bits or more that operators make, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None):
        result = operator(*args, **kwargs or {})
        has_memory = isinstance(result, torch.Tensor) and not (result.is_meta or operator.is_view)
        if has_memory and result.element_size() > 1:
            self.shapes.add(tuple(result.shape))
        return result


@pytest.mark.parametrize("kind", ("glm4_moe_lite", "gpt_oss"))
def test_experts_are_quantized_one_at_a_time(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of experts apart in files (GLM) and in one tensor (gpt-oss)."""
    write_published(tmp_path, kind)
    monkeypatch.setattr("recipe_lib.adapters.quantized._PIECE_ELEMENTS", 2**12)
    made = Shapes()
    ours = open_quantized(tmp_path, "nf4", watch=made)
    shapes = ours.spec.layout().shapes
    experts = [shapes[name] for name in ours.tensor_names.values()]
    others = {shape for name, shape in shapes.items() if shape not in experts}
    largest = max(prod(shape) for shape in made.shapes - others)
    assert 2**12 <= largest <= max(prod(shape[1:]) for shape in experts)
