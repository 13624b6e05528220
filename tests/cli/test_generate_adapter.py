"""`tune generate` with an adapter: it finds its base, and answers as PEFT and the merged model
do.
"""

import json
import os
import shutil
from pathlib import Path

import peft
import pytest
import torch
import transformers

from recipe_lib.cli.main import main
from tests.cli.adapter_runs import write_adapter_run

QUESTION = ["--prompt", "Once upon a time", "--max-new-tokens", "24"]


@pytest.fixture(scope="module")
def plain_run(realdata: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a copy of the base, beside it."""
    folder = tmp_path_factory.mktemp("plain")
    shutil.copytree(realdata / "stories260K-hf", folder / "base")
    write_adapter_run(realdata, folder / "run", f"model.path={folder / 'base'}")
    return folder / "run"


def said(capsys: pytest.CaptureFixture, *words: object) -> tuple[str, str]:
    """What the verb prints, with the code 0."""
    capsys.readouterr()
    assert main(["generate", *map(str, words)]) == 0
    return capsys.readouterr()


def refused(capsys: pytest.CaptureFixture, *words: object) -> str:
    """The one line of an error."""
    capsys.readouterr()
    assert main(["generate", *map(str, words)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: ") and printed.err.count("\n") == 1
    return printed.err


@pytest.mark.slow
def test_run_adapter_and_merged_model_say_the_same(
    realdata: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Of a run whose base was kept in NF4."""
    run = tmp_path / "run"
    write_adapter_run(realdata, run, "lora.quantize_base=nf4")
    answer, told = said(capsys, run, *QUESTION)
    assert told == f"adapter: {run}/adapter on {realdata}/stories260K-hf, kept in nf4\n"
    assert said(capsys, run / "adapter", *QUESTION) == (answer, told)
    assert said(capsys, realdata / "stories260K-hf", *QUESTION)[0] != answer
    assert main(["export", str(run), "--merge", "--out", str(tmp_path / "merged")]) == 0
    assert said(capsys, tmp_path / "merged", *QUESTION) == (answer, "")


def test_it_says_what_peft_says(plain_run: Path, capsys: pytest.CaptureFixture) -> None:
    adapter = plain_run / "adapter"
    base = transformers.AutoModelForCausalLM.from_pretrained(
        plain_run.parent / "base", dtype=torch.float32
    )
    model, tokenizer = (
        peft.PeftModel.from_pretrained(base, adapter),
        transformers.AutoTokenizer.from_pretrained(adapter),
    )
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Who?"}]
    asked = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**asked, max_new_tokens=24, do_sample=False)[
        0, asked["input_ids"].shape[1] :
    ]
    words = ["--prompt", "Who?", "--system", "Be kind.", "--max-new-tokens", "24"]
    assert (
        said(capsys, adapter, *words)[0]
        == tokenizer.decode(answer, skip_special_tokens=True) + "\n"
    )


def test_the_base_may_be_kept_otherwise(plain_run: Path, capsys: pytest.CaptureFixture) -> None:
    for storage in ("nf4", "int8"):
        answer, told = said(capsys, plain_run, *QUESTION, "--quantize-base", storage)
        assert told.endswith(f"/base, kept in {storage}\n") and answer.strip()


def test_a_base_that_has_moved(
    plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    adapter = shutil.copytree(plain_run / "adapter", tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    gone = tmp_path / "gone"
    (adapter / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": str(gone)})
    )
    line = refused(capsys, adapter, *QUESTION)
    begin = f"error: {adapter}: its base is {gone}: no such folder"
    assert line.startswith(begin) and line.endswith("say where it is with --base\n")
    answer, _ = said(capsys, plain_run / "adapter", *QUESTION)
    assert said(capsys, adapter, *QUESTION, "--base", plain_run.parent / "base")[0] == answer
    (adapter / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": None})
    )
    line = refused(capsys, adapter, *QUESTION)
    assert line == f"error: {adapter}: adapter_config.json names no base; give it with --base\n"


def test_an_adapter_in_the_place_of_a_base(
    plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    adapter = plain_run / "adapter"
    line = refused(capsys, adapter, *QUESTION, "--base", adapter)
    assert (
        line == f"error: --base: {adapter} is an adapter, not a model; name the model that it was"
        " trained on\n"
    )
    copy = shutil.copytree(adapter, tmp_path / "adapter")
    config = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": str(adapter)})
    )
    line = refused(capsys, copy, *QUESTION)
    named = f"adapter_config.json names the base {adapter}"
    assert (
        line
        == f"error: {copy}: {named}, which is an adapter; give the model that it was trained on"
        " with --base\n"
    )


def test_another_base_than_it_was_trained_on(
    plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        plain_run.parent / "base", dtype=torch.float32
    )
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    model.save_pretrained(tmp_path / "other")
    assert str(tmp_path / "other") in refused(
        capsys, plain_run / "adapter", *QUESTION, "--base", tmp_path / "other"
    )


def test_a_run_without_a_model(
    plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    shutil.copytree(plain_run, tmp_path / "run", ignore=shutil.ignore_patterns("adapter"))
    assert (
        refused(capsys, tmp_path / "run", *QUESTION)
        == f"error: {tmp_path}/run: is a run without model/ and adapter/; write one from its states"
        " with `tune export` (--hf, or --adapter)\n"
    )


def test_a_state_is_no_model(realdata: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_adapter_run(
        realdata, tmp_path / "run", "checkpoint.save_every_n_steps=2", "checkpoint.save_model=false"
    )
    assert (
        refused(capsys, tmp_path / "run/state/step_2", *QUESTION)
        == f"error: {tmp_path}/run/state/step_2: is a state to resume from, no model; write one"
        " with `tune export` (--hf, --adapter)\n"
    )


def test_of_model_and_adapter_the_newer_is_taken(
    plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A model that was merged before the run was gone on with is older than its adapter."""
    run = shutil.copytree(plain_run, tmp_path / "run")
    assert main(["export", str(run), "--merge"]) == 0
    assert said(capsys, run, *QUESTION)[1] == f"model: {run}/model\n"
    later = (run / "model" / "config.json").stat().st_mtime + 60
    os.utime(run / "adapter" / "adapter_config.json", (later, later))
    assert said(capsys, run, *QUESTION)[1].startswith(f"adapter: {run}/adapter on ")


def test_a_damaged_adapter(plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for name, content in (
        (
            "adapter_model.safetensors",
            (plain_run / "adapter/adapter_model.safetensors").read_bytes()[:5000],
        ),
        ("adapter_model.safetensors", b""),
        ("adapter_config.json", b'{"r": '),
        ("tokenizer.json", b"["),
    ):
        adapter = shutil.copytree(plain_run / "adapter", tmp_path / "adapter", dirs_exist_ok=True)
        (adapter / name).write_bytes(content)
        assert str(adapter) in refused(capsys, adapter, *QUESTION), name
    (adapter / "adapter_model.safetensors").unlink()
    shutil.copy(plain_run / "adapter/tokenizer.json", adapter)
    assert str(adapter) in refused(capsys, adapter, *QUESTION)


def test_words_for_adapters_with_a_model(plain_run: Path, capsys: pytest.CaptureFixture) -> None:
    base = plain_run.parent / "base"
    line = refused(capsys, base, *QUESTION, "--base", base)
    assert line == f"error: --base: {base} is a model, not an adapter; leave --base out\n"
    line = refused(capsys, base, *QUESTION, "--quantize-base", "nf4")
    assert (
        line
        == "error: --quantize-base: the base of an adapter can be quantized; this is a model, leave"
        " it out\n"
    )


def test_an_adapter_of_pefts_own(
    plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Without a tokenizer beside it, and without our metadata: the base's are taken."""
    base = plain_run.parent / "base"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    made = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    made.save_pretrained(tmp_path / "theirs")
    tokens = torch.tensor([[1, 403, 407, 261, 378]])
    answer = made.generate(tokens, max_new_tokens=12, do_sample=False)[0, 5:]
    tokenizer = transformers.AutoTokenizer.from_pretrained(plain_run / "adapter")
    text = tokenizer.decode(tokens[0, 1:])
    assert tokenizer(text).input_ids == tokens[0].tolist()
    words = ["--raw", "--prompt", text, "--max-new-tokens", "12"]
    printed = said(capsys, tmp_path / "theirs", *words)[0]
    assert (text + printed).rstrip("\n") == tokenizer.decode(
        [*tokens[0, 1:], *answer], skip_special_tokens=True
    )
