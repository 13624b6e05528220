"""The loop: transformers' greedy tokens, and the same with and without kept keys and values."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from recipe_lib.checkpoint.huggingface import load_weights
from recipe_lib.generation.sample import generate
from recipe_lib.models import Decoder, DecoderSpec, build_meta, build_spec, read_config

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
PROMPT = [1, 5, 17, 80, 3]


def load(folder: Path) -> tuple[Decoder, DecoderSpec]:
    """Our model of a checkpoint, fp32."""
    spec = build_spec(read_config(folder), where=str(folder))
    model = build_meta(spec, torch.float32).to_empty(device="cpu")
    load_weights(model, spec, folder)
    return model.eval(), spec


def save(config: PreTrainedConfig, folder: Path) -> AutoModelForCausalLM:
    """A random model of transformers, written to `folder`. Large weights, so that the tokens
    vary.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.25)
    model.save_pretrained(folder)
    return model


CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "mistral with a window of 4": MistralConfig(**SIZES, sliding_window=4),
    "gemma2 with a window of 4": Gemma2Config(
        **SIZES, sliding_window=4, query_pre_attn_scalar=8, tie_word_embeddings=False
    ),
    "qwen3": Qwen3Config(**SIZES),
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(transformers' model, ours, its spec)"""
    folder = tmp_path_factory.mktemp("model")
    theirs = save(CONFIGS[request.param], folder)
    return theirs, *load(folder)


def test_greedy_tokens_are_those_of_transformers(both: tuple):
    theirs, ours, spec = both
    expected = theirs.generate(torch.tensor([PROMPT]), max_new_tokens=40, do_sample=False)[
        0, len(PROMPT) :
    ].tolist()
    found = list(generate(ours, spec, PROMPT, max_new_tokens=40))
    assert found == expected
    assert len(set(found)) > 5  # a test that a stuck model could pass would show little


def test_kept_keys_and_values_change_nothing(both: tuple):
    _, ours, spec = both
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(40):
            tokens.append(int(ours(torch.tensor([tokens]))[0, -1].argmax()))
    assert list(generate(ours, spec, PROMPT, max_new_tokens=40)) == tokens[len(PROMPT) :]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, DecoderSpec]:
    folder = tmp_path_factory.mktemp("llama")
    save(CONFIGS["llama"], folder)
    return load(folder)


def test_it_ends_before_a_stop_id(llama: tuple):
    whole = list(generate(*llama, PROMPT, max_new_tokens=20))
    stop = whole[7]
    assert (
        list(generate(*llama, PROMPT, max_new_tokens=20, stop_ids={stop}))
        == whole[: whole.index(stop)]
    )


def test_it_ends_at_the_length_the_model_was_made_for(llama: tuple):
    assert len(list(generate(*llama, PROMPT, max_new_tokens=1000))) == 64 - len(PROMPT)
    assert list(generate(*llama, list(range(64)), max_new_tokens=5)) == []


def test_draws_repeat_with_the_seed_and_differ_with_another(llama: tuple):
    def drawn(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return list(
            generate(*llama, PROMPT, max_new_tokens=20, temperature=1.0, generator=generator)
        )

    assert drawn(1) == drawn(1) != drawn(2)


def test_nothing_to_begin_from_is_refused(llama: tuple):
    with pytest.raises(ValueError, match="at least one token"):
        next(generate(*llama, [], max_new_tokens=1))


def test_logits_of_the_whole_prompt_are_never_made(llama: tuple):
    shapes = []
    model, spec = llama
    hook = model.lm_head.register_forward_hook(
        lambda module, inputs, output: shapes.append(tuple(output.shape))
    )
    list(generate(model, spec, PROMPT, max_new_tokens=3))
    hook.remove()
    assert shapes == [(1, 1, spec.vocab_size)] * 3


@pytest.mark.slow
def test_stories_go_on_as_in_transformers(realdata: Path):
    folder = realdata / "stories260K-hf"
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours, spec = load(folder)
    prompt = [1, 403, 407, 261, 378]
    expected = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=200, do_sample=False, eos_token_id=2
    )
    expected = [token for token in expected[0, len(prompt) :].tolist() if token != 2]
    assert list(generate(ours, spec, prompt, max_new_tokens=200, stop_ids={2})) == expected
    assert len(expected) > 100
