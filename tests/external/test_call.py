"""Models of transformers' own classes, built, loaded and called as ours are: losses and gradients
of plain ones.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from recipe_lib.checkpoint.huggingface import check_weights, load_weights
from recipe_lib.config import register
from recipe_lib.config.schema import MemoryConfig
from recipe_lib.data import check_packing_isolation
from recipe_lib.errors import CheckpointError, SetupError
from recipe_lib.external.module_spec import ModuleSpec, read_spec
from recipe_lib.logs import get_logger
from recipe_lib.models import build_meta, init_weights
from recipe_lib.models.weight_names import compute_parameter_shapes
from recipe_lib.ops.head_losses import CrossEntropy, TokenLogProbs
from recipe_lib.parallel import materialize

SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 2}
GPT = {
    "vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# Tied and not; linears of three classes; fused projections; scales and caps behind the head; alibi;
# windows; experts.
CASES: dict[str, dict[str, Any]] = {
    "gpt2": GPT,
    "gptj": GPT | {"rotary_dim": 4},  # a head with a bias
    "gpt_neox": SMALL,
    "falcon": SMALL,
    "bloom": SMALL | {"n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "opt": SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.0},
    "qwen3": GROUPED | {"head_dim": 8},
    "phi3": GROUPED,
    "gemma2": GROUPED | {"head_dim": 8, "sliding_window": 8},
    "cohere": GROUPED | {"logit_scale": 3.0},
    "granite": GROUPED | {"logits_scaling": 0.3},
}
SCALED = ("gemma2", "cohere", "granite")
CPU = torch.device("cpu")


def config_of(kind: str) -> dict[str, Any]:
    return CASES[kind] | {"model_type": kind}


def theirs(spec: ModuleSpec, dtype: torch.dtype) -> Any:
    """The same class as a user of transformers has it, with weights that are not small."""
    torch.manual_seed(0)
    config, attention = (
        transformers.AutoConfig.for_model(**spec.source.config),
        spec.source.attention,
    )
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation=attention
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def ours(spec: ModuleSpec, dtype: torch.dtype) -> Any:
    model = build_meta(spec, dtype)
    materialize(model, MemoryConfig(), CPU)
    return model


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(3, 61, (2, 13), generator=generator) for _ in range(2))
    labels[0, 9:] = -100
    return tokens, labels


@pytest.mark.parametrize("kind", CASES)
def test_loss_and_gradients_are_those_of_the_class_itself(kind: str):
    """In fp64, computed in chunks, against plain cross-entropy of all logits; buffers have their
    class' values.
    """
    spec = read_spec(config_of(kind), "here")
    other, model = theirs(spec, torch.float64), ours(spec, torch.float64)
    model.load_state_dict(other.state_dict())
    found = dict(model.named_buffers())
    assert all(torch.equal(buffer, found[name]) for name, buffer in other.named_buffers())

    tokens, labels = rows()
    logits = other(input_ids=tokens, use_cache=False).logits
    assert torch.equal(model(tokens), logits)
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    each.sum().backward()
    loss = model(tokens, labels=labels, head_loss=CrossEntropy(3))
    loss.backward()
    assert loss.item() == pytest.approx(each.sum().item(), rel=1e-12)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in other.named_parameters():
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        got = gradients[name]
        assert (wanted - (0 if got is None else got)).abs().max() <= 1e-10, name

    slopes = torch.linspace(0.5, 2, labels.numel()).view_as(labels)
    other.zero_grad(), model.zero_grad()
    logits = other(input_ids=tokens, use_cache=False).logits
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    (-each * slopes).sum().backward()
    log_probs = model(tokens, labels=labels, head_loss=TokenLogProbs(3))
    (log_probs * slopes).sum().backward()
    assert (log_probs + each).abs().max() <= 1e-12
    head = model.get_output_embeddings().weight.grad
    assert (head - other.get_output_embeddings().weight.grad).abs().max() <= 1e-10


@pytest.mark.parametrize("kind", SCALED)
def test_what_follows_the_head_is_not_forgotten(kind: str):
    """The logits of these classes are not the head's own; so the test above is one of what comes
    after, too.
    """
    spec = read_spec(config_of(kind), "here")
    model = ours(spec, torch.float64)
    init_weights(model, 0, spec)
    read: list[Tensor] = []
    handle = model.get_output_embeddings().register_forward_hook(
        lambda module, inputs, output: read.append(output)
    )
    logits = model(rows()[0])
    handle.remove()
    assert (logits - read[0]).abs().max() > 1e-6 * logits.abs().max()


def test_logits_of_all_tokens_never_exist():
    """The largest tensor that a step makes is a chunk's logits, not those of all tokens."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes = (61, 32)  # of the weight, and of its transpose

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(
            self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = operator(*args, **(kwargs or {}))
            if (
                isinstance(result, Tensor)
                and result.dim() > 1
                and result.shape[-1] == 61
                and result.shape[0] not in sizes
            ):
                self.elements = max(self.elements, result.numel())
            return result

    spec = read_spec(config_of("granite"), "here")
    model = ours(spec, torch.float32)
    init_weights(model, 0, spec)
    tokens, labels = rows()
    model(
        tokens, labels=labels, head_loss=CrossEntropy(13)
    )  # the first call finds what follows the head
    with Largest() as largest:
        model(tokens, labels=labels, head_loss=CrossEntropy(13)).backward()
    assert 0 < largest.elements <= 2 * 61


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "qwen3"])
def test_packed_documents_are_apart(kind: str):
    spec = read_spec(config_of(kind), "here")
    model = ours(spec, torch.float32)
    init_weights(model, 0, spec)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 0.05
            )
    check_packing_isolation(model, spec, CPU)


def test_documents_that_a_class_cannot_keep_apart_are_refused():
    spec = read_spec(config_of("bloom"), "here")
    model = ours(spec, torch.float32)
    init_weights(model, 0, spec)
    with pytest.raises(
        SetupError, match="^data.packing: bloom takes no mask .*; set data.packing=false$"
    ):
        check_packing_isolation(model, spec, CPU)


def test_random_weights_begin_as_the_class_begins_them():
    """Norms of ones, those around one of zeros, biases of zeros, matrices of the config's
    deviation.
    """
    for kind, norm in (("gpt2", 1.0), ("gemma2", 0.0)):
        spec = read_spec(config_of(kind) | {"initializer_range": 0.05}, "here")
        model = ours(spec, torch.float32)
        init_weights(model, 7, spec)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                assert 0.04 < parameter.std() < 0.06, name
            else:
                assert torch.equal(
                    parameter, torch.full_like(parameter, 0.0 if "bias" in name else norm)
                ), name


@pytest.mark.parametrize("prefix", [True, False])
def test_a_saved_folder_is_read(tmp_path: Path, prefix: bool):
    """As save_pretrained writes it, and as the first files of GPT-2 were: without the name of the
    body.
    """
    from safetensors.torch import load_file, save_file

    spec = read_spec(config_of("gpt2"), "here")
    other = theirs(spec, torch.float32)
    other.save_pretrained(tmp_path)
    if not prefix:
        tensors = load_file(tmp_path / "model.safetensors")
        bare = {
            name.removeprefix("transformer."): tensor.contiguous()
            for name, tensor in tensors.items()
        }
        save_file(bare, tmp_path / "model.safetensors", {"format": "pt"})
    check_weights(spec, tmp_path)
    model = ours(spec, torch.float32)
    load_weights(model, spec, tmp_path)
    tokens, _ = rows()
    assert torch.equal(model(tokens), other(input_ids=tokens, use_cache=False).logits)


def test_weights_of_other_names_are_refused(tmp_path: Path):
    spec = read_spec(config_of("qwen3"), "here")
    theirs(read_spec(config_of("gpt2"), "here"), torch.float32).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="are missing") as caught:
        check_weights(spec, tmp_path)
    assert any("belong to no part of this model" in fault for fault in caught.value.faults)


def test_experts_are_read_joined_and_apart(tmp_path: Path):
    """Files of mixture-of-experts models have each expert's matrices apart; the module has them
    joined.
    """
    from recipe_lib.checkpoint.huggingface import compute_base_fingerprint

    spec = read_spec(GROUPED | {"model_type": "mixtral", "num_local_experts": 4}, "here")
    other = theirs(spec, torch.float32)
    other.save_pretrained(tmp_path / "apart")
    other.save_pretrained(tmp_path / "joined", save_original_format=False)
    tokens, _ = rows()
    for folder in ("apart", "joined"):
        check_weights(spec, tmp_path / folder)
        model = ours(spec, torch.float32)
        load_weights(model, spec, tmp_path / folder)
        assert torch.equal(model(tokens), other(input_ids=tokens, use_cache=False).logits)
    assert compute_base_fingerprint(spec, tmp_path / "apart") == compute_base_fingerprint(
        spec, tmp_path / "joined"
    )


@pytest.mark.parametrize(
    "config, said",
    [
        ({}, "model_type: found None, expected the name of an architecture"),
        (
            {"model_type": "nobodys"},
            "model_type 'nobodys' is not one of transformers'; install a release",
        ),
        (
            {"model_type": "nobodys", "auto_map": {"AutoConfig": "x.Y"}},
            "its own code is not run: convert it",
        ),
        ({"model_type": "bart"}, None),
        ({"model_type": "t5"}, "model_type 't5' is no causal language model in transformers"),
        ({"model_type": "gpt2", "n_embd": 33, "n_head": 4}, "gpt2 cannot be built"),
        (
            {"model_type": "qwen3", "layer_types": ["none"]},
            "the config of 'qwen3' does not take it",
        ),
        (
            {"model_type": "gpt2", "quantization_config": {"quant_method": "gptq"}},
            "the weights are quantized",
        ),
    ],
)
def test_configs_that_no_class_takes(config: dict[str, Any], said: str | None):
    if said is None:
        assert (
            read_spec(
                config | {"vocab_size": 61, "d_model": 16, "decoder_layers": 1}, "here"
            ).family
            == "bart"
        )
        return
    with pytest.raises(CheckpointError) as caught:
        read_spec(config, "here")
    assert said in str(caught.value) and str(caught.value).startswith("here: ")


def test_without_transformers(monkeypatch: pytest.MonkeyPatch):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else found(name)
    )
    with pytest.raises(
        SetupError, match="found no package transformers; pip install 'transformers<6,>=4.57'$"
    ):
        read_spec(config_of("gpt2"), "here")


class Layer(nn.Module):
    """Half the layer's input, and a mean of what came before, mixed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.register_buffer("share", torch.tensor(0.5), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        order = torch.arange(1, hidden.shape[1] + 1).view(1, -1, 1)
        return self.share * hidden + torch.tanh(self.mix(hidden.cumsum(1) / order))


class Own(nn.Module):
    """A user's model: no method that says which module is which."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.words = nn.Embedding(config["vocab_size"], 16)
        self.blocks = nn.ModuleList(Layer(16) for _ in range(config["layers"]))
        self.out = nn.Linear(16, config["vocab_size"])
        self.wide = config.get("wide", False)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.words(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.out(hidden)
        return logits - logits.mean(-1, keepdim=True) if self.wide else logits * 2 + 1


class HeadElsewhere(Own):
    """Its projection is not among its modules."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.heads = [self.out]
        del self.out

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def get_output_embeddings(self) -> nn.Module:
        return self.heads[0]


def test_a_projection_that_is_no_module_of_the_model_is_refused() -> None:
    register("model", "head_elsewhere")(HeadElsewhere)
    spec = read_spec({"vocab_size": 61, "layers": 2}, "here", "head_elsewhere")
    with pytest.raises(SetupError, match="HeadElsewhere: its output projection is no module of it"):
        build_meta(spec, torch.float32)


@pytest.mark.parametrize("wide", [False, True])
def test_a_module_of_a_users_own(wide: bool, caplog: pytest.LogCaptureFixture):
    """Its loss is that of its logits, in chunks where the rest is done to each logit by itself,
    else of all.
    """
    register("model", f"own{wide}")(Own)
    config = {"vocab_size": 61, "layers": 2, "wide": wide}
    spec = read_spec(config, "here", f"own{wide}")
    assert (spec.vocab_size, spec.num_layers, spec.tied) == (61, 2, False)
    assert compute_parameter_shapes(spec)["out.bias"] == (61,)
    model, other = ours(spec, torch.float64), Own(config).double()
    model.load_state_dict(other.state_dict())
    tokens, labels = rows()
    get_logger().addHandler(caplog.handler)
    try:
        loss = model(tokens, labels=labels, head_loss=CrossEntropy(4))
    finally:
        get_logger().removeHandler(caplog.handler)
    wanted = F.cross_entropy(other(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    loss.backward(), wanted.backward()
    for mine, their in zip(model.parameters(), other.parameters(), strict=True):
        assert (mine.grad - their.grad).abs().max() <= 1e-10
    assert ("makes all logits at once" in caplog.text) == wide
