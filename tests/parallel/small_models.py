"""Build small decoders and batches for the tests of sharding and activation checkpointing.

`compute_plain_gradients` gives the gradients of an unsharded model; a test compares those of its
own model with them by `read_gradients` or `compute_gradient_difference`.
"""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from recipe_lib.adapters import init_adapters
from recipe_lib.models import DecoderSpec, build_meta, build_spec, init_weights
from recipe_lib.ops.dtensor_shards import get_detached_local, locate_local_part
from recipe_lib.ops.head_losses import CrossEntropy

VOCABULARY = 512
WIDTH = 32  # of hidden states
MLP_WIDTH = 64
ROWS = 8  # sequences of the small batch
LENGTH = 12  # tokens of each


def build_small_spec(
    *, tied: bool = False, layers: int = 3, vocabulary: int = VOCABULARY
) -> DecoderSpec:
    """Return the spec of a Llama with an embedding (512 x 32) larger than a layer (9 x 32 x 32).

    tied: the head is the embedding.
    """
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
    """Return random tokens and labels int64 `[rows, LENGTH]`, the same every time.

    Some labels are -100, not equally many in each row.
    """
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)
    labels = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)
    labels[torch.rand(rows, LENGTH, generator=generator) < 0.3] = -100
    return tokens, labels


@cache
def compute_plain_gradients(
    spec: DecoderSpec, dtype: torch.dtype = torch.float64
) -> tuple[float, dict[str, Tensor]]:
    """Return the small batch's mean loss and the gradients by name, of a plain model.

    A plain model is neither sharded nor checkpoints activations.
    """
    model = build_meta(spec, dtype).to_empty(device="cpu")
    init_weights(model, 3, spec)
    tokens, labels = make_small_batch()
    # CrossEntropy(3): logits are computed for a third of the tokens at a time.
    loss = model(tokens, labels=labels, head_loss=CrossEntropy(3)) / (labels != -100).sum()
    loss.backward()
    return float(loss.detach()), read_gradients(model)


def start_adapters(model: nn.Module) -> None:
    """Initialize a model's adapters at random, with all of B 0.01."""
    init_adapters(model, 4)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            get_detached_local(parameter).fill_(0.01)  # zeros would make A's gradient zero


def read_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the full gradients by name; sharded ones are gathered (a collective)."""
    return {
        name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        for name, grad in _list_local_gradients(model).items()
    }


def compute_gradient_difference(model: nn.Module, expected: dict[str, Tensor]) -> float:
    """Return the largest difference of this rank's gradient shards from the full `expected` ones.

    Each is relative to the largest absolute value of its full gradient; NaN if any is. Raises
    AssertionError where the model has gradients of other parameters than `expected`.
    """
    gradients = _list_local_gradients(model)
    assert gradients.keys() == expected.keys()
    differences = [0.0]
    for name, full_gradient in expected.items():
        shard, offset = locate_local_part(gradients[name])
        bounds = zip(offset, shard.shape, strict=True)
        expected_shard = full_gradient[tuple(slice(first, first + size) for first, size in bounds)]
        assert shard.shape == expected_shard.shape, name
        if shard.numel():
            difference = (shard - expected_shard).abs().max() / full_gradient.abs().max()
            differences.append(float(difference))
    return float(torch.tensor(differences).max())  # Python's max would pass over a NaN


def _list_local_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients by name, sharded as this rank has them, of parameters that have one."""
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
