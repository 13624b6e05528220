"""What is left of runs with `model.implementation=transformers`: merged, exported and generated
from as others do.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from recipe_lib.cli import answer as answering
from recipe_lib.cli import export, generate
from tests.recipes.external_kinds import build_settings
from tests.recipes.runs import FULL, LORA, ROOT, build_arguments, make_probe_tokens, run_here
from tests.selection import mark_slow_except

# Transposed linears and positions that are learned; experts that its files have apart.
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "mixtral": {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1},
    "gpt_neox": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "max_position_embeddings": 64},
}  # fmt: skip
QUESTION = "Tell me a story"


def base_of(folder: Path, kind: str) -> Path:
    """A random model whose greedy answers are no constant, with the demo's tokenizer."""
    torch.manual_seed(0)
    common = {
        "vocab_size": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "initializer_range": 0.3,
    }
    own = build_settings(kind) if kind == "gemma3" else common | KINDS[kind]
    config = transformers.AutoConfig.for_model(kind, **own)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    for file in (ROOT / "examples" / "demo" / "tokenizer").iterdir():
        shutil.copy(file, folder)
    return folder


def opened(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=make_probe_tokens(), use_cache=False).logits


def words(base: Path, output: Path, recipe: str) -> list[str]:
    config = "demo/full" if recipe == FULL else "demo/lora"
    return [
        *build_arguments(output, config),
        "~model.preset",
        f"model.path={base}",
        "model.implementation=transformers",
        "dtype=fp32",
        "device=cpu",
        "max_steps=2",
        "batch_size=2",
        "data.packing=false",
        "optimizer.lr=1e-2",
        "log.every_n_steps=1000",
        f"tokenizer.path={base}",
    ]


def said_by(model: Any, folder: Path, count: int = 20) -> str:
    """What transformers' greedy search answers."""
    from recipe_lib.tokenizers import StreamDecoder, load_tokenizer

    tokenizer = load_tokenizer(folder)
    prompt = torch.tensor([answering.encode_prompt(tokenizer, QUESTION, raw=True)])
    found = model.generate(
        prompt, max_new_tokens=count, do_sample=False, eos_token_id=list(tokenizer.stop_ids)
    )
    answer = found[0, prompt.shape[1] :].tolist()
    if answer and answer[-1] in tokenizer.stop_ids:
        answer = answer[:-1]
    assert len(set(answer)) > 1, "the answer says nothing"
    text = StreamDecoder(tokenizer, prompt[0].tolist())
    return "".join([*map(text.push, answer), text.finish()])


def answer_of(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    capsys.readouterr()
    options = [
        "--raw",
        "--prompt",
        QUESTION,
        "--max-new-tokens",
        "20",
        "--dtype",
        "fp32",
        "--device",
        "cpu",
        *more,
    ]
    assert generate.run([str(folder), *options]) == 0
    return capsys.readouterr().out.removesuffix("\n")


@pytest.mark.parametrize("kind", mark_slow_except(["gpt2", "mixtral"], ["gpt2"]))
def test_an_adapter_is_merged_and_generated_with(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the end of the run and by `tune export`, against PEFT's merge; answers against
    transformers' greedy search.
    """
    base, output = base_of(tmp_path / "base", kind), tmp_path / "out"
    more = ["lora.merge_on_save=true", "lora.rank=4"]
    run = run_here([*words(base, output, LORA), *more], recipe=LORA)
    assert run.code == 0, run.said
    theirs = peft.PeftModel.from_pretrained(opened(base), output / "adapter").merge_and_unload()
    merged = opened(output / "model")
    assert (logits_of(merged) - logits_of(theirs)).abs().max() < 2e-5 * logits_of(
        theirs
    ).abs().max()
    assert (logits_of(merged) - logits_of(opened(base))).abs().max() > 1e-3
    for what in ("model", "adapter"):
        assert answer_of(output / what, capsys) == said_by(theirs, base)

    assert export.run([str(output / "adapter"), "--merge", "--out", str(tmp_path / "merged")]) == 0
    assert "are merged, every tensor of the model is there" in capsys.readouterr().out
    assert (logits_of(opened(tmp_path / "merged")) - logits_of(merged)).abs().max() < 1e-5
    assert export.run([str(output / "adapter"), "--adapter", "--out", str(tmp_path / "again")]) == 0
    again = peft.PeftModel.from_pretrained(opened(base), tmp_path / "again").merge_and_unload()
    assert (logits_of(again) - logits_of(theirs)).abs().max() < 1e-5


@pytest.mark.slow
def test_a_merged_base_is_the_one_that_was_trained(tmp_path: Path) -> None:
    """In 4 bits, where the original weights would be another model; with lengths; in the order of
    the run's own.
    """
    base, output = base_of(tmp_path / "base", "gpt_neox"), tmp_path / "out"
    more = ["lora.merge_on_save=true", "lora.rank=4", "lora.quantize_base=nf4", "lora.dora=true"]
    run = run_here([*words(base, output, LORA), *more], recipe=LORA)
    assert run.code == 0, run.said
    with torch.no_grad():
        trained = run.recipe.model(make_probe_tokens())
    assert (logits_of(opened(output / "model")) - trained).abs().max() < 1e-4 * trained.abs().max()


@pytest.mark.slow
def test_an_adapter_says_which_class_its_base_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a multimodal model the library's own decoder would read the text model alone, which has
    other weights.
    """
    base, output = base_of(tmp_path / "base", "gemma3"), tmp_path / "out"
    run = run_here([*words(base, output, LORA), "lora.rank=4"], recipe=LORA)
    assert run.code == 0, run.said
    shutil.move(output / "adapter", tmp_path / "alone")  # without the run's config
    assert export.run([str(tmp_path / "alone"), "--merge", "--out", str(tmp_path / "merged")]) == 0
    theirs = peft.PeftModel.from_pretrained(opened(base), tmp_path / "alone").merge_and_unload()
    assert (logits_of(opened(tmp_path / "merged")) - logits_of(theirs)).abs().max() < 1e-5
    assert answer_of(tmp_path / "alone", capsys) == said_by(theirs, base)


def test_a_state_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, output = base_of(tmp_path / "base", "gpt2"), tmp_path / "out"
    run = run_here([*words(base, output, FULL), "checkpoint.save_every_n_steps=1"], recipe=FULL)
    assert run.code == 0, run.said
    (state,) = output.glob("state/step_2*")
    assert export.run([str(state), "--hf", "--out", str(tmp_path / "model")]) == 0
    assert "check: logits differ by" in capsys.readouterr().out
    assert (
        logits_of(opened(tmp_path / "model")) - logits_of(opened(output / "model"))
    ).abs().max() < 1e-6
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "gpt2"
