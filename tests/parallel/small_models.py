"""Small decoders and batches for the tests of sharding and checkpointing, and the loss of a plain
one in float64.
"""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from recipe_lib.adapters import init_adapters
from recipe_lib.models import DecoderSpec, build_meta, build_spec, init_weights
from recipe_lib.ops.dtensor_shards import get_detached_local, locate_local_part
from recipe_lib.ops.head_losses import CrossEntropy

VOCABULARY, WIDTH, MLP_WIDTH = 512, 32, 64
ROWS, LENGTH = 8, 12


def build_small_spec(
    *, tied: bool = False, layers: int = 3, vocabulary: int = VOCABULARY
) -> DecoderSpec:
    """A Llama whose embedding is larger than a layer: 512 x 32 against about 10 x 32 x 32."""
    spec = build_spec(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": WIDTH,
            "intermediate_size": MLP_WIDTH,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": vocabulary,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": tied,
        },
        "small",
    )
    return replace(spec, init_std=0.2)


def make_small_batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Tokens and labels `[rows, LENGTH]`, some of them ignored, not equally many in each row."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)
    labels = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)
    labels[torch.rand(rows, LENGTH, generator=generator) < 0.3] = -100
    return tokens, labels


@cache
def compute_plain_gradients(
    spec: DecoderSpec, dtype: torch.dtype = torch.float64
) -> tuple[float, dict[str, Tensor]]:
    """Mean loss of the small batch and gradients by name, of a model that is neither sharded nor
    checkpointed.
    """
    model = build_meta(spec, dtype).to_empty(device="cpu")
    init_weights(model, 3, spec)
    tokens, labels = make_small_batch()
    loss = model(tokens, labels=labels, head_loss=CrossEntropy(3)) / (labels != -100).sum()
    loss.backward()
    return float(loss.detach()), read_gradients(model)


def start_adapters(model: nn.Module) -> None:
    """Draw a model's adapters; B is not zero, which would hide A's gradient."""
    init_adapters(model, 4)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            get_detached_local(parameter).fill_(0.01)


def read_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by name; sharded ones are gathered (a collective)."""
    found = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {
        name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        for name, grad in found.items()
    }


def compute_gradient_difference(model: nn.Module, expected: dict[str, Tensor]) -> float:
    """The largest difference of this rank's parts of the gradients from the whole ones, each
    relative to the largest number of its gradient. AssertionError where other parameters have
    gradients.
    """
    found = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    assert found.keys() == expected.keys()
    differences = [0.0]
    for name, whole in expected.items():
        part, offset = locate_local_part(found[name])
        own = whole[
            tuple(
                slice(first, first + size) for first, size in zip(offset, part.shape, strict=True)
            )
        ]
        assert part.shape == own.shape, name
        if part.numel():
            differences.append(float((part - own).abs().max() / whole.abs().max()))
    return float(torch.tensor(differences).max())  # nan, if one is
