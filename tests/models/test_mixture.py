"""Mixtures of experts against transformers, whose experts are a loop over the tokens of each; in
fp64 against a loop.

(transformers computes norms, rotations and the router's softmax in fp32 in an fp64 model, too.)
"""

import json
from pathlib import Path

import pytest
import torch
import transformers

from recipe_lib.generation.sample import generate
from recipe_lib.models import Decoder
from recipe_lib.models.mixture import BalanceLoss, ExpertLoad, Mixture
from recipe_lib.ops.attention import (
    AttentionInfo,
    RealTokens,
    compute_document_positions,
    make_attention_info,
)
from recipe_lib.ops.head_losses import CrossEntropy
from tests.models.reference import CASES, build_reference_model, load_ours

MIXTURES = [case for case in CASES if case.startswith(("mixtral", "qwen3-moe", "olmoe", "gpt-oss"))]
LENGTH = 33
# Of the largest number of a tensor: what two orders of the same sums may differ by.
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12}
FP32 = torch.float32


def pair(
    case: str, folder: Path, dtype: torch.dtype = FP32
) -> tuple[Decoder, transformers.PreTrainedModel]:
    model = build_reference_model(case, dtype=dtype)
    model.set_experts_implementation("eager")
    model.save_pretrained(folder)
    return load_ours(folder, dtype), model


def tokens(rows: int = 2) -> torch.Tensor:
    return torch.randint(3, 97, (rows, LENGTH), generator=torch.Generator().manual_seed(8))


def close(found: torch.Tensor, expected: torch.Tensor, name: str = "") -> None:
    bound = TOLERANCES[found.dtype] * max(1e-2, float(expected.detach().abs().max()))
    torch.testing.assert_close(
        found, expected, atol=bound, rtol=0, msg=lambda text: f"{name}: {text}"
    )


def gradient_of(model: transformers.PreTrainedModel, name: str) -> torch.Tensor:
    """transformers' gradient of a parameter of ours."""
    is_oss = model.config.model_type == "gpt_oss"
    if ".router." in name and not is_oss:
        name = name.replace(".router.", ".gate.")
    if ".experts." in name:
        module, kind = name.rsplit(".", 1)
        found = model.get_parameter(module if kind == "weight" else f"{module}_bias").grad
        return found.transpose(1, 2) if is_oss and kind == "weight" else found
    return model.get_parameter(name).grad


@pytest.mark.parametrize("case", MIXTURES)
def test_logits_and_every_gradient(case: str, tmp_path: Path) -> None:
    ours, model = pair(case, tmp_path)
    inputs, labels = tokens(), tokens().roll(-1, dims=1)
    labels[0, :5] = -100
    expected = model(inputs).logits
    close(ours(inputs), expected)
    loss = ours(inputs, labels=labels, head_loss=CrossEntropy(3))
    torch.nn.functional.cross_entropy(
        expected.flatten(0, 1), labels.flatten(), reduction="sum"
    ).backward()
    loss.backward()
    for name, parameter in ours.named_parameters():
        close(parameter.grad, gradient_of(model, name), name)


def by_a_loop(layer: Mixture, tokens: torch.Tensor) -> torch.Tensor:
    """Token by token and expert by expert, from the weights."""
    experts, gate, summed = layer.experts, layer.experts.gate, []
    for token in tokens:
        logits = layer.router.weight @ token
        logits = logits if layer.router.bias is None else logits + layer.router.bias
        chosen = logits.argsort(descending=True)[: layer.top_k]
        shares = torch.exp(logits) / torch.exp(logits[chosen] if layer.normalized else logits).sum()
        total = torch.zeros_like(token)
        for expert in chosen.tolist():
            inner = experts.gate_up_proj.weight[expert] @ token
            if experts.gate_up_proj.bias is not None:
                inner = inner + experts.gate_up_proj.bias[expert]
            first, second = (inner[::2], inner[1::2]) if gate.interleaved else inner.chunk(2)
            if gate.activation == "clamped_swiglu":
                first, second = first.clamp(max=gate.limit), second.clamp(-gate.limit, gate.limit)
                product = (second + 1) * first * torch.sigmoid(gate.alpha * first)
            else:
                product = first * torch.sigmoid(first) * second
            out = experts.down_proj.weight[expert] @ product
            out = out if experts.down_proj.bias is None else out + experts.down_proj.bias[expert]
            total = total + shares[expert] * out
        summed.append(total)
    return torch.stack(summed)


@pytest.mark.parametrize("case", MIXTURES)
def test_the_layer_in_fp64_is_that_of_a_loop(case: str, tmp_path: Path) -> None:
    ours, _ = pair(case, tmp_path, torch.float64)
    layer = next(module for module in ours.modules() if isinstance(module, Mixture))
    hidden = torch.randn(2, 11, 48, dtype=torch.float64, requires_grad=True)
    slopes = torch.randn(2, 11, 48, dtype=torch.float64)
    wanted = [hidden, *layer.parameters()]
    expected = by_a_loop(layer, hidden.flatten(0, 1)).view_as(hidden)
    expected_grads = torch.autograd.grad((expected * slopes).sum(), wanted)
    found = layer(hidden)
    close(found, expected)
    for mine, theirs in zip(
        torch.autograd.grad((found * slopes).sum(), wanted), expected_grads, strict=True
    ):
        close(mine, theirs)


@pytest.mark.parametrize("case", ["mixtral", "gpt-oss", "qwen3-moe-unnormalized"])
def test_experts_without_a_token_and_some_with_all(case: str, tmp_path: Path) -> None:
    """All logits are equal, so every token chooses the same experts; the others have no row, and a
    gradient of 0.
    """
    ours, model = pair(case, tmp_path)
    with torch.no_grad():
        for each in (ours, model):
            for name, parameter in each.named_parameters():
                if ".mlp.router." in name or ".mlp.gate." in name:
                    parameter.zero_()
    inputs = tokens()
    expected, found = model(inputs).logits, ours(inputs)
    close(found, expected)
    generator = torch.Generator().manual_seed(3)
    slopes = torch.randn(expected.shape, generator=generator)
    (found * slopes).sum().backward()
    (expected * slopes).sum().backward()
    for name, parameter in ours.named_parameters():
        close(parameter.grad, gradient_of(model, name), name)
        if name.endswith("experts.down_proj.weight"):
            idle = parameter.grad.flatten(1).abs().amax(1) == 0
            assert len(idle) - int(idle.sum()) == ours.spec.mixture.top_k


@pytest.mark.parametrize("lengths", [(LENGTH, LENGTH), (LENGTH, 20), (9, 1)], ids=str)
def test_balance_loss_is_that_of_transformers(lengths: tuple[int, int], tmp_path: Path) -> None:
    """Of a model with one layer that has experts: transformers multiplies means over all layers'
    tokens together. What is behind the lengths is padding, of which transformers has a mask.
    """
    ours, model = pair("qwen3-moe-unnormalized", tmp_path)
    (layer,) = (module for module in ours.modules() if isinstance(module, Mixture))
    inputs, labels, real = (
        tokens(),
        tokens().roll(-1, dims=1),
        RealTokens.from_lengths(lengths, LENGTH),
    )
    mask = real.make_mask(inputs.device).view_as(inputs)
    labels[~mask] = -100
    found = model(inputs, attention_mask=mask.long(), output_router_logits=True)
    plain = torch.nn.functional.cross_entropy(found.logits.flatten(0, 1), labels.flatten())
    (plain + 0.3 * found.aux_loss).backward()
    layer.balance = BalanceLoss(0.3, 1)
    layer.balance.begin(1)
    layer.load = ExpertLoad(4, torch.device("cpu"))
    (ours(inputs, attention=AttentionInfo(real=real), labels=labels) / sum(lengths)).backward()
    load = layer.load
    torch.testing.assert_close(load.loss, found.aux_loss.detach().double())
    assert int(load.rows.sum()) == load.expected == sum(lengths) and load.calls == 1
    for name, parameter in ours.named_parameters():
        close(parameter.grad, gradient_of(model, name), name)
    load.clear()
    with torch.no_grad():
        ours(inputs)
    assert int(load.rows.sum()) == load.expected == load.calls == 0


@pytest.mark.parametrize("case", MIXTURES)
@torch.no_grad()
def test_greedy_text_is_that_of_transformers(case: str, tmp_path: Path) -> None:
    ours, model = pair(case, tmp_path)
    prompt = tokens(1)[:, :9]
    expected = model.generate(
        prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, 9:]
    found = list(generate(ours, ours.spec, prompt[0].tolist(), max_new_tokens=12))
    assert found == expected.tolist()


@pytest.mark.parametrize("case", ["mixtral-all", "gpt-oss", "olmoe"])
@torch.no_grad()
def test_documents_in_one_row_equal_separate_rows(case: str, tmp_path: Path) -> None:
    ours, _ = pair(case, tmp_path)
    lengths, rows = [[9, 20, 4], [LENGTH]], tokens()
    packed = ours(
        rows, compute_document_positions(lengths, LENGTH), make_attention_info(lengths, LENGTH)
    )
    for row, parts in enumerate(lengths):
        start = 0
        for length in parts:
            piece = slice(start, start + length)
            close(packed[row, piece], ours(rows[row : row + 1, piece])[0])
            start += length


@pytest.mark.parametrize("changed", [{}, {"rope_scaling": None}], ids=str)
@torch.no_grad()
def test_gpt_oss_without_a_rope_object_has_its_classs_own(
    changed: dict[str, None], tmp_path: Path
) -> None:
    """YaRN, of which transformers keeps the numbers in the class."""
    build_reference_model("gpt-oss").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config.pop("rope_parameters")
    path.write_text(json.dumps(config | changed))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    ours = load_ours(tmp_path)
    assert ours.spec.rope.kind == "yarn"
    close(ours(tokens()), model(tokens()).logits)
