"""No line that is shown or kept holds a secret, ordinary names stay as they are, and a config takes
no secret.
"""

import json
import random
import re
import string
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe_lib.cli.main import main
from recipe_lib.config import load_config
from recipe_lib.errors import ConfigError, UserError, run_for_exit_code
from recipe_lib.logs import redact

WORDS = [
    "task", "disk", "risk", "desk", "mask", "flask", "kiosk", "sk", "hf", "hf_models", "hf_datasets", "hf_transformers",
    "sk-learn-data", "sk-resnet50-imagenet", "sk-ant-colony-optimization-benchmark-runs", "sk-proj-notes", "ghp", "gh",
    "glpat_notes", "xox", "AKIA", "wandb", "key", "token", "tokens", "tokenizer", "secret-santa", "bearer",
    "password-strength",
    "classification-v2", "benchmark-rows", "assistant-7b", "Llama-3.1-8B-Instruct", "step_400", "2026-05-01T12:00:00",
    "checkpoints", "github_pages", "pypi-mirror", "npm_cache", "model-00001-of-00004.safetensors", "user@host",
]  # fmt: skip
HEX = st.sampled_from([7, 12, 32, 40, 64]).flatmap(
    lambda size: st.text("0123456789abcdef", min_size=size, max_size=size)
)
PARTS = st.one_of(
    st.sampled_from(WORDS),
    HEX,
    st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=12),
)
NAMES = st.builds(
    lambda parts, joint: joint.join(parts),
    st.lists(PARTS, min_size=1, max_size=4),
    st.sampled_from("-_."),
)
PATHS = st.builds(
    lambda root, names: root + "/".join(names),
    st.sampled_from(
        ["", "/", "./", "../", "~/", "s3://bucket/", "https://host:8080/", "hub:", "models--"]
    ),
    st.lists(NAMES, min_size=1, max_size=4),
)


def drawn(letters: str, size: int, seed: int) -> str:
    """Random letters, of which one is a digit, one is large and one is small where the alphabet has
    them.
    """
    source = random.Random(seed)
    text = [source.choice(letters) for _ in range(size)]
    for place, kind in zip(source.sample(range(1, size - 1), 3), ("4", "Q", "g"), strict=True):
        if kind in letters:
            text[place] = kind
    return "".join(text)


ALPHANUMERIC = string.ascii_letters + string.digits
TOKENS = [
    ("hf_{}", string.ascii_letters, 34), ("api_org_{}", string.ascii_letters, 34),
    ("sk-{}", ALPHANUMERIC, 48), ("sk-proj-{}T", ALPHANUMERIC + "-_", 155),
    ("sk-svcacct-{}T", ALPHANUMERIC + "-_", 120),
    ("sk-ant-api03-{}AA", ALPHANUMERIC + "-_", 93), ("sk-or-v1-{}", "0123456789abcdef", 64),
    ("sk-{}", "0123456789abcdef", 32), ("ghp_{}", ALPHANUMERIC, 36), ("gho_{}", ALPHANUMERIC, 36),
    ("ghs_{}", ALPHANUMERIC, 36), ("github_pat_{}", ALPHANUMERIC + "_", 82), ("glpat-{}x", ALPHANUMERIC + "-_", 19),
    ("AKIA{}", string.ascii_uppercase + string.digits, 16), ("ASIA{}", string.ascii_uppercase + string.digits, 16),
    ("xoxb-{}", ALPHANUMERIC + "-", 50), ("xoxp-{}", ALPHANUMERIC + "-", 70), ("AIza{}y", ALPHANUMERIC + "-_", 34),
    ("npm_{}", ALPHANUMERIC, 36), ("wandb_v1_{}", ALPHANUMERIC + "_", 77),
]  # fmt: skip
PLACES = [
    "{}", "model {} not found", "token={}", "https://host/x?a=1&b={}", "'{}'", '"{}",', "/data/{}/x", "runs/{}.txt",
    "--token {} --x", "path:{}", "({})", "Authorization: Bearer {}", "[{}]", "export HF_TOKEN={}", "a\n{}\nb",
]  # fmt: skip


@settings(max_examples=400, deadline=None, derandomize=True)
@given(PATHS)
def test_ordinary_paths_pass(path: str) -> None:
    assert redact(path) == path
    line = f"config: output_dir={path}, data.source: {path}"
    assert redact(line) == line


@pytest.mark.parametrize(("shape", "letters", "size"), TOKENS)
def test_tokens_of_known_shapes_do_not_pass(shape: str, letters: str, size: int) -> None:
    for seed, place in enumerate(PLACES):
        token = shape.format(drawn(letters, size, seed))
        shown = redact(place.format(token))
        assert "[secret]" in shown
        pieces = re.split(r"[-_]", token)
        assert token not in shown and max(pieces, key=len) not in shown, (place, token, shown)


def test_secrets_that_only_their_place_tells() -> None:
    key = "0123456789abcdef0123456789abcdef01234567"
    assert redact(f"revision {key} of models/{key}") == f"revision {key} of models/{key}"
    assert (
        redact(f"WANDB_API_KEY={key}, 'api_key': '{key}'; wandb login {key}")
        == "WANDB_API_KEY=[secret], 'api_key': '[secret]'; wandb login [secret]"
    )
    assert (
        redact("https://user:hf_secretsecret@x/y and http://10.0.0.1:80/a@b")
        == "https://[secret]@x/y and http://10.0.0.1:80/a@b"
    )
    assert redact(
        "{'Authorization': 'Bearer abc', 'x': 1}"
    ) == "{'Authorization': '[secret]', 'x': 1}".replace("'[secret]'", "'Bearer [secret]'")
    assert (
        redact("https://hub/x?access_token=0123456789&y=1")
        == "https://hub/x?access_token=[secret]&y=1"
    )


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD"]
)
def test_values_of_secret_variables_do_not_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "a.b+c/very$own?secret")
    assert redact("sent a.b+c/very$own?secret to x") == "sent [secret] to x"
    monkeypatch.setenv(name, "assistant")  # a careless value must not take words apart
    assert redact("assistants and assistant") == "assistants and [secret]"
    monkeypatch.setenv(name, "1")
    assert redact("step 1") == "step 1"
    monkeypatch.delenv(name)
    monkeypatch.setenv(f"{name}_PATH", "/data/rows/of/mine")
    assert redact("/data/rows/of/mine") == "/data/rows/of/mine"


TOKEN = "hf_" + "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefgh"


def test_a_config_takes_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"recipe: full_finetune_distributed\nmodel: {{path: {TOKEN}/x}}\ndata:\n  source:"
        f" rows.jsonl\n  columns: {{instruction: {TOKEN}}}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["output_dir=https://me:word@host/x"])
    remedy = (
        "holds what looks like a token or a password, and configs are written to disk; remove it,"
        " and set it as an environment variable (HF_TOKEN, WANDB_API_KEY) or use `hf auth login`"
    )
    assert caught.value.faults == [
        f"{path}:2: model.path: {remedy}",
        f"{path}:5: data.columns: {remedy}",
        f"command line: output_dir: {remedy}",
    ]


def test_the_value_of_a_variable_is_refused_in_a_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_ABCDEFGHIJKLMNOP")
    words = [
        "full_finetune_distributed",
        "--config",
        "demo/full",
        "model.path=hf_ABCDEFGHIJKLMNOP/x",
    ]
    assert main(["run", "--no-plan", *words]) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("error: command line: model.path: holds what looks like a token")
        and said.count("\n") == 1
    )
    assert "ABCDEF" not in said and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ["download", "https://user:hf_secretsecret@x/y"],
        ["validate", "https://user:hf_secretsecret@x/y"],
        ["run", "full_finetune_distributed", "--config", TOKEN],
        ["validate", "demo/full", f"model.nothing={TOKEN}"],
        ["validate", "demo/full", f"{TOKEN}=1"],
        [
            "validate",
            "demo/full",
            f"seed={'x' * 30}/{TOKEN}/{'y' * 40}",
        ],  # of which the middle is left out
    ],
)
def test_lines_of_errors_hold_no_secret(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "[secret]" in said
    assert "secretsecret" not in said and TOKEN[:12] not in said and TOKEN[-8:] not in said


def test_errors_that_are_kept_hold_no_secret() -> None:
    assert UserError(f"cannot read {TOKEN}").faults == ["cannot read [secret]"]


def test_tracebacks_hold_no_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)

    def fail() -> int:
        try:
            raise OSError(f"https://me:word@host refused {TOKEN}")
        except OSError as error:
            raise ValueError("bad") from error

    with pytest.raises(ValueError) as caught:
        run_for_exit_code(fail)
    sys.excepthook(caught.type, caught.value, caught.tb)
    said = capsys.readouterr().err
    assert "OSError: https://[secret]@host refused [secret]" in said and "ValueError: bad" in said
    assert TOKEN not in said
    thread = threading.Thread(target=lambda: int(TOKEN))
    thread.start()
    thread.join()
    said = capsys.readouterr().err
    assert "invalid literal" in said and TOKEN not in said


def test_redacted_json_is_json() -> None:
    line = {
        "a": f'Authorization: "x" {TOKEN}',
        "b": "https://u:p@h\\",
        "c": 'token="' + "0" * 40 + '"',
    }
    assert json.loads(redact(json.dumps(line)))["a"].endswith("[secret]")
