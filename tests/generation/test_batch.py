"""Batches of prompts of different lengths: each answer is the one that transformers gives to its
prompt alone.
"""

from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    OlmoeConfig,
    SmolLM3Config,
)

from recipe_lib.checkpoint.huggingface import load_weights
from recipe_lib.generation.sample import Generated, generate, generate_batch
from recipe_lib.models import build_meta, read_config, read_trained_spec
from recipe_lib.models.meta_init import allocate
from tests.generation.test_generate import CONFIGS, SIZES, load, save

PROMPTS = [[5], [1, 5, 17, 80, 3], [9, 9, 2, 40, 41, 42, 7, 11, 30], [80, 81, 4]]
MORE = {
    "gemma3 with windows and two rotations": Gemma3TextConfig(**SIZES, sliding_window=4, tie_word_embeddings=False),
    "gpt-oss with sinks": GptOssConfig(
        **SIZES, sliding_window=4, num_local_experts=4, num_experts_per_tok=2, rope_parameters={
            "rope_type": "default", "rope_theta": 10000.0}
    ),
    "olmoe": OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2),
    "smollm3": SmolLM3Config(**SIZES, no_rope_layer_interval=2),
    "granite": GraniteConfig(**SIZES, embedding_multiplier=3.0, residual_multiplier=0.6, logits_scaling=1.7),
}  # fmt: skip


@pytest.fixture(scope="module", params=[*CONFIGS, *MORE])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(transformers' model, ours, its spec)"""
    folder = tmp_path_factory.mktemp("model")
    theirs = save({**CONFIGS, **MORE}[request.param], folder)
    return theirs, *load(folder)


def alone(theirs, prompt: list[int], count: int) -> list[int]:
    found = theirs.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return found[0, len(prompt) :].tolist()


def test_each_prompt_of_a_batch_gets_the_answer_that_it_gets_alone(both: tuple):
    theirs, ours, spec = both
    found = generate_batch(ours, spec, PROMPTS, max_new_tokens=24)
    assert [answer.tokens for answer in found] == [alone(theirs, prompt, 24) for prompt in PROMPTS]
    assert (
        len({token for answer in found for token in answer.tokens}) > 12
    )  # a stuck model would show little


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("llama")
    theirs = save(CONFIGS["llama"], folder)
    return theirs, *load(folder), folder


def test_each_answer_has_its_own_end(llama: tuple):
    theirs, ours, spec, _ = llama
    whole = [alone(theirs, prompt, 20) for prompt in PROMPTS]
    stop = {whole[0][6], whole[1][2]}
    found = generate_batch(ours, spec, PROMPTS, max_new_tokens=20, stop_ids=stop)
    for answer, tokens in zip(found, whole, strict=True):
        end = next((at for at, token in enumerate(tokens) if token in stop), None)
        assert answer == Generated(tokens[:end], "length" if end is None else "stop")
    assert {answer.ended for answer in found} == {"length", "stop"} or all(
        a.ended == "stop" for a in found
    )


def test_answers_end_where_the_model_does(llama: tuple):
    _, ours, spec, _ = llama
    long = [list(range(1, 1 + length)) for length in (60, 64, 50)]
    found = generate_batch(ours, spec, long, max_new_tokens=1000)
    assert [len(answer.tokens) for answer in found] == [4, 0, 14]
    assert found[0].tokens == list(generate(ours, spec, long[0], max_new_tokens=1000))


def test_what_is_drawn_depends_on_the_prompt_and_its_seed_alone(llama: tuple):
    _, ours, spec, _ = llama
    options = {"max_new_tokens": 12, "temperature": 1.0, "top_k": 20, "top_p": 0.9}
    together = generate_batch(ours, spec, PROMPTS, seeds=[3, 4, 5, 6], **options)
    for number, seed in enumerate([3, 4, 5, 6]):
        generator = torch.Generator().manual_seed(seed)
        expected = list(generate(ours, spec, PROMPTS[number], generator=generator, **options))
        assert together[number].tokens == expected
    other = generate_batch(ours, spec, PROMPTS, seeds=[7, 8, 9, 10], **options)
    assert [answer.tokens for answer in other] != [answer.tokens for answer in together]
    with pytest.raises(ValueError, match="a seed for each"):
        generate_batch(ours, spec, PROMPTS, max_new_tokens=2, temperature=1.0)


def test_a_rank_reads_as_many_tokens_as_the_others(llama: tuple):
    """any_rank: another rank is not done before its fifth token; one without prompts reads
    along.
    """
    _, ours, spec, _ = llama
    for prompts in (PROMPTS, []):
        asked, calls = [], []
        hook = ours.lm_head.register_forward_hook(lambda *_, calls=calls: calls.append(1))

        def any_rank(own: bool, asked: list = asked) -> bool:
            asked.append(own)
            return own or len(asked) <= 5

        found = generate_batch(
            ours, spec, prompts, max_new_tokens=3 if prompts else 8, any_over_ranks=any_rank
        )
        hook.remove()
        assert [len(answer.tokens) for answer in found] == [3] * len(prompts)
        assert len(calls) == (3 if prompts else 5)


def external(folder: Path):
    """The same folder as transformers' own module."""
    spec = read_trained_spec(read_config(folder), str(folder), "transformers")
    model = build_meta(spec, torch.float32)
    allocate(model, torch.device("cpu"))
    load_weights(model, spec, folder)
    return model.eval(), spec


def test_models_of_transformers_answer_in_batches(llama: tuple, tmp_path: Path):
    theirs, _, _, folder = llama
    found = generate_batch(*external(folder), PROMPTS, max_new_tokens=16)
    assert [answer.tokens for answer in found] == [alone(theirs, prompt, 16) for prompt in PROMPTS]
    gpt2 = save(GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=32, eos_token_id=None,
                           bos_token_id=1, tie_word_embeddings=True), tmp_path)  # fmt: skip
    model, spec = external(tmp_path)
    found = generate_batch(model, spec, PROMPTS, max_new_tokens=30)
    assert [answer.tokens for answer in found] == [
        alone(gpt2, prompt, 32 - len(prompt))[:30] for prompt in PROMPTS
    ]


def test_a_class_without_a_mask_answers_one_prompt_after_the_other(
    llama: tuple, monkeypatch: pytest.MonkeyPatch
):
    theirs, _, _, folder = llama
    model, spec = external(folder)
    monkeypatch.setattr(type(model), "reads_padding", False)
    found = generate_batch(model, spec, PROMPTS, max_new_tokens=8)
    assert [answer.tokens for answer in found] == [alone(theirs, prompt, 8) for prompt in PROMPTS]


def test_positions_count_from_the_first_token_of_each_prompt(llama: tuple):
    """Rotations are relative, so that tokens alone would not show a row whose padding counts."""
    _, ours, spec, _ = llama
    seen = []
    hook = ours.register_forward_pre_hook(lambda module, args: seen.append(args[1].tolist()))
    generate_batch(ours, spec, [[5], [1, 5, 17]], max_new_tokens=3)
    hook.remove()
    assert seen == [[[0, 0, 0], [0, 1, 2]], [[1], [3]], [[2], [4]]]
