"""`tune generate`: what goes to standard output, what the model reads, and what is refused."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from recipe_lib.checkpoint.huggingface import load_weights
from recipe_lib.cli.answer import encode_prompt
from recipe_lib.cli.main import main
from recipe_lib.data import render_prompt
from recipe_lib.generation.sample import generate
from recipe_lib.generation.source import choose_dtype
from recipe_lib.models import build_meta, build_spec, read_config
from recipe_lib.tokenizers import load_tokenizer
from tests.cli.commands import start_forked

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>{% endif %}"
)


def write_model(
    folder: Path, *, positions: int = 64, bos: bool = True, template: str | None = None
) -> Path:
    """A random model of 260 tokens: the bytes, BOS and EOS."""
    folder.mkdir()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "</s>", "bos_token": "<s>" if bos else None, "add_bos_token": bos}
    if template:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=positions,
        bos_token_id=256,
        eos_token_id=257,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.3)
        model.lm_head.weight[257] = 0.0  # EOS is never the likeliest, so that lengths are known
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "plain")


def ids_after(folder: Path, prompt: list[int], count: int, **options: object) -> list[int]:
    """What the model says, by the loop itself."""
    spec = build_spec(read_config(folder), where=str(folder))
    loaded = build_meta(spec, torch.float32).to_empty(device="cpu")
    load_weights(loaded, spec, folder)
    return list(generate(loaded, spec, prompt, max_new_tokens=count, **options))


def text_after(folder: Path, prompt: list[int], count: int, **options: object) -> str:
    return load_tokenizer(folder).decode(ids_after(folder, prompt, count, **options))


def test_standard_output_is_the_text_and_a_newline(model: Path, capsys: pytest.CaptureFixture):
    tokenizer = load_tokenizer(model)
    prompt = [256, *tokenizer.encode("Once")]
    assert (
        main(["generate", str(model), "--raw", "--prompt", "Once", "--max-new-tokens", "30"]) == 0
    )
    printed = capsys.readouterr()
    assert printed.out == text_after(model, prompt, 30) + "\n"
    assert printed.err == ""
    assert len(ids_after(model, prompt, 30)) == 30


def test_an_empty_raw_prompt_begins_from_bos(model: Path, capsys: pytest.CaptureFixture):
    assert main(["generate", str(model), "--raw", "--prompt", "", "--max-new-tokens", "9"]) == 0
    assert capsys.readouterr().out == text_after(model, [256], 9) + "\n"


def test_an_empty_raw_prompt_needs_a_bos(tmp_path: Path, capsys: pytest.CaptureFixture):
    folder = write_model(tmp_path / "no_bos", bos=False)
    capsys.readouterr()  # transformers' progress
    assert main(["generate", str(folder), "--raw", "--prompt", ""]) == 2
    line = (
        "error: --prompt: is empty and the tokenizer has no BOS token to begin from; give a text\n"
    )
    assert capsys.readouterr().err == line


def test_what_is_wrong_with_a_tokenizer_is_put_right_in_its_folder(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    """There is no config, and so none of its keys."""

    def refused(folder: Path) -> str:
        capsys.readouterr()
        assert main(["generate", str(folder), "--prompt", "Once"]) == 2
        return capsys.readouterr().err

    folder = shutil.copytree(model, tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": "{% for %}"})
    )
    another = "put another one into the folder as chat_template.jinja"
    found, _, remedy = refused(folder).partition("; ")
    assert found.startswith(
        f"error: {folder}/tokenizer_config.json: chat_template: line 1: the chat template is not"
    )
    assert remedy == f"correct it, or {another}\n"
    (folder / "chat_template.jinja").mkdir()
    found = "cannot be read (is a folder, expected a regular file)"
    assert refused(folder) == f"error: {folder}/chat_template.jinja: {found}; {another}\n"
    (folder / "chat_template.jinja").rmdir()
    (folder / "chat_template.jinja").write_text("{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}"
                                                "{% endfor %}")  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recipe_lib.tokenizers.chat_template.TIMEOUT_SECONDS", 0.4)
        assert refused(folder).endswith(
            f"the chat template was stopped: it took more than 0.4 s; {another}\n"
        )
    (folder / "tokenizer.json").rename(folder / "b.model.v1")
    (folder / "a.model.v2").touch()
    assert refused(folder).endswith(
        "several tokenizers (a.model.v2, b.model.v1); leave one of them in the folder\n"
    )
    (folder / "b.model.v1").unlink()
    (folder / "a.model.v2").unlink()
    assert refused(folder).endswith("expected tokenizer.json or tokenizer.model; put the tokenizer's files into the "
                                    "folder\n")  # fmt: skip


def test_a_tokenizer_with_more_ids_than_the_model(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    folder = tmp_path / "other"
    shutil.copytree(model, folder)
    settings = json.loads((folder / "tokenizer.json").read_text())
    settings["model"]["vocab"] |= {"On": 299, "Onc": 300}
    settings["model"]["merges"] = [["O", "n"], ["On", "c"]]
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    assert main(["generate", str(folder), "--raw", "--prompt", "Once"]) == 2
    assert (
        capsys.readouterr().err
        == f"error: {folder}: the tokenizer writes the prompt with the id 300, the model knows ids"
        " up to 257; check that tokenizer and weights are of one model\n"
    )


def test_the_plain_template_of_training(model: Path, capsys: pytest.CaptureFixture):
    tokenizer = load_tokenizer(model)
    prompt = render_prompt(tokenizer, [{"role": "user", "content": "Hello"}])
    assert tokenizer.decode(prompt, skip_special=True) != "Hello"
    assert main(["generate", str(model), "--prompt", "Hello", "--max-new-tokens", "9"]) == 0
    assert capsys.readouterr().out == text_after(model, prompt, 9) + "\n"


def test_the_chat_template(tmp_path: Path, capsys: pytest.CaptureFixture):
    folder = write_model(tmp_path / "chat", template=TEMPLATE)
    capsys.readouterr()  # transformers' progress
    tokenizer = load_tokenizer(folder)
    prompt = [256, *tokenizer.encode("user: Hi"), 257, 256]
    assert encode_prompt(tokenizer, "Hi", raw=False) == prompt
    assert encode_prompt(tokenizer, "Hi", raw=True) == [256, *tokenizer.encode("Hi")]
    assert main(["generate", str(folder), "--prompt", "Hi", "--max-new-tokens", "9"]) == 0
    assert capsys.readouterr() == (text_after(folder, prompt, 9) + "\n", "")


def test_a_users_special_token_is_only_text(tmp_path: Path):
    tokenizer = load_tokenizer(write_model(tmp_path / "chat", template=TEMPLATE))
    assert encode_prompt(tokenizer, "a</s>b", raw=False).count(257) == 1
    assert 257 not in encode_prompt(tokenizer, "a</s>b", raw=True)


def test_draws_follow_the_seed(model: Path, capsys: pytest.CaptureFixture):
    def say(*words: str) -> str:
        arguments = [
            "generate",
            str(model),
            "--raw",
            "--prompt",
            "x",
            "--max-new-tokens",
            "20",
            *words,
        ]
        assert main(arguments) == 0
        return capsys.readouterr().out

    sampled = say("--temperature", "0.9", "--top-k", "40", "--top-p", "0.95", "--seed", "3")
    assert sampled == say("--temperature", "0.9", "--top-k", "40", "--top-p", "0.95", "--seed", "3")
    assert sampled != say("--temperature", "0.9", "--top-k", "40", "--top-p", "0.95", "--seed", "4")
    assert say() == say("--seed", "4") == say("--temperature", "1", "--top-k", "1")
    prompt = [256, *load_tokenizer(model).encode("x")]
    generator = torch.Generator().manual_seed(3)
    expected = text_after(
        model, prompt, 20, temperature=0.9, top_k=40, top_p=0.95, generator=generator
    )
    assert sampled == expected + "\n"


def test_it_ends_at_the_models_length(model: Path, capsys: pytest.CaptureFixture):
    assert (
        main(["generate", str(model), "--raw", "--prompt", "x" * 60, "--max-new-tokens", "100"])
        == 0
    )
    prompt = [256, *load_tokenizer(model).encode("x" * 60)]
    assert capsys.readouterr().out == text_after(model, prompt, 3) + "\n"
    assert main(["generate", str(model), "--raw", "--prompt", "x" * 63]) == 2
    line = "error: --prompt: 64 tokens; the model takes 64, completion included\n"
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["--max-new-tokens", "0"], ["--max-new-tokens: found 0, expected a number >= 1"]),
        (["--temperature", "-1"], ["--temperature: found -1.0, expected a number >= 0"]),
        (["--temperature", "nan"], ["--temperature: found nan, expected a number >= 0"]),
        (
            ["--temperature", "1", "--top-k", "0", "--top-p", "1.5"],
            [
                "--top-k: found 0, expected a number >= 1",
                "--top-p: found 1.5, expected a number above 0 and up to 1",
            ],
        ),
        (
            ["--top-k", "5", "--top-p", "0.5"],
            [
                "--top-k and --top-p: without effect at temperature 0, which takes the likeliest"
                " token; add --temperature 1"
            ],
        ),
        (["--seed", "-1"], ["--seed: found -1, expected a number from 0 to 2^63 - 1"]),
        (
            ["--max-new-tokens", "many"],
            [
                "tune generate: argument --max-new-tokens: invalid int value: 'many'; see `tune"
                " generate --help`"
            ],
        ),
    ],
)
def test_numbers_that_make_no_sense(
    words: list[str], lines: list[str], model: Path, capsys: pytest.CaptureFixture
):
    assert main(["generate", str(model), "--prompt", "x", *words]) == 2
    assert capsys.readouterr() == ("", "".join(f"error: {line}\n" for line in lines))


def test_an_empty_message_is_refused(model: Path, capsys: pytest.CaptureFixture):
    assert main(["generate", str(model), "--prompt", ""]) == 2
    line = "error: --prompt: is empty; give a text, or begin from nothing with --raw\n"
    assert capsys.readouterr() == ("", line)


def test_the_output_folder_of_a_run_leads_to_its_model(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    (tmp_path / "model").symlink_to(model)
    assert main(["generate", str(tmp_path), "--raw", "--prompt", "x", "--max-new-tokens", "9"]) == 0
    text = text_after(model, [256, *load_tokenizer(model).encode("x")], 9)
    assert capsys.readouterr() == (f"{text}\n", f"model: {tmp_path}/model\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_no_cuda_here(model: Path, capsys: pytest.CaptureFixture):
    assert main(["generate", str(model), "--prompt", "x", "--device", "cuda"]) == 2
    line = "error: --device: found cuda, but torch sees no CUDA device here; use --device cpu\n"
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize(
    ("name", "config", "dtype"),
    [
        ("auto", {"torch_dtype": "bfloat16"}, torch.bfloat16),
        ("auto", {"dtype": "float16"}, torch.float16),
        ("auto", {"text_config": {"torch_dtype": "bfloat16"}}, torch.bfloat16),
        ("auto", {}, torch.float32),
        ("bf16", {"dtype": "float32"}, torch.bfloat16),
    ],
)
def test_the_dtype(name: str, config: dict, dtype: torch.dtype):
    assert choose_dtype(name, config) is dtype


@pytest.mark.slow
def test_a_reader_that_leaves_and_an_interrupt(tmp_path: Path):
    folder = write_model(tmp_path / "long", positions=100_000)
    words = ["generate", "-q", folder, "--raw", "--prompt", "x", "--max-new-tokens", "90000"]
    for interrupted in (False, True):
        read, write = os.pipe()
        errors = tmp_path / "errors"
        with errors.open("w") as file:
            process = start_forked(*words, stdout=write, stderr=file.fileno())
        os.close(write)
        began = os.read(read, 1)
        if interrupted and process.pid is not None:
            os.kill(process.pid, signal.SIGINT)
            process.join(60)
        os.close(read)
        process.join(60)
        process.kill()
        assert began
        assert process.exitcode == 128 + (signal.SIGINT if interrupted else signal.SIGPIPE)
        assert errors.read_text() == ("interrupted\n" if interrupted else "")


def test_stories(realdata: Path, capsys: pytest.CaptureFixture):
    folder = str(realdata / "stories260K-hf")
    arguments = [
        "generate",
        folder,
        "--raw",
        "--prompt",
        "Once upon a time",
        "--max-new-tokens",
        "12",
    ]
    assert main(arguments) == 0
    assert capsys.readouterr() == (", there was a little girl named Lily. She\n", "")
