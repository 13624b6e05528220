"""Whatever a file or a command line holds: a config object or ConfigError, in printable lines, and
nothing else.
"""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recipe_lib.config import FullFinetuneConfig, load_config
from recipe_lib.config.describe import format_config
from recipe_lib.config.flat_schema import read_schema
from recipe_lib.errors import ConfigError

BASE = """\
# a config
recipe: full_finetune_distributed
model:
  path: some/checkpoint
data: {source: rows.jsonl, columns: {instruction: question}}
optimizer:
  lr: 2e-5
  betas: [0.9, 0.95]
parallel:
  fsdp_wrap_policy: [model.layers.*, "lm_head"]
log:
  trackers: [wandb]
  run_name: 'a b'
batch_size: 2
resume: null
"""

KEYS = list(read_schema(FullFinetuneConfig).keys)
PIECES = st.sampled_from(
    ["{", "}", "[", "]", ":", ": ", "-", "- ", "&a ", "*a", "!", "!!int ", "!!python/object:os.system ", "'", '"', "|",
     ">", "%", "@", "`", "\t", "\n", "\n  ", "#", " #", ",", "?", "? ", "~", "null", "none", "true", "1e999", ".nan",
     "${x}", "---\n", "...\n", "<<: ", "\\", "\0", "\x85", "\u2028", "\ufeff", "\ud7ff", "0x1", "1_0", "9" * 30, "=",
     "???", "é", "😀", *KEYS]
)  # fmt: skip


@st.composite
def mutated(draw) -> str:
    """The base with some pieces put in, taken out, doubled or moved."""
    text = BASE
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        how = draw(st.sampled_from(["insert", "replace", "remove", "double", "cut"]))
        piece = draw(PIECES)
        if how == "insert":
            text = text[:start] + piece + text[start:]
        elif how == "replace":
            text = text[:start] + piece + text[end:]
        elif how == "remove":
            text = text[:start] + text[end:]
        elif how == "double":
            text = text[:end] + text[start:end] + text[end:]
        else:
            text = text[:start]
    return text


VALUES = st.one_of(
    st.text(max_size=20),
    PIECES,
    st.integers().map(str),
    st.floats().map(str),
    st.lists(PIECES, max_size=3).map(lambda parts: f"[{', '.join(parts)}]"),
    st.dictionaries(st.sampled_from(["a", "source", "lr"]), PIECES, max_size=2).map(
        lambda entries: "{" + ", ".join(f"{name}: {value}" for name, value in entries.items()) + "}"
    ),
)
NAMES = st.one_of(
    st.sampled_from(KEYS),
    st.sampled_from(KEYS).map(lambda name: name.rpartition(".")[0] or name),
    st.text(max_size=12),
)


def outcome(path: Path, overrides: list[str]) -> FullFinetuneConfig | None:
    """The config or None for a refusal in well-made lines; anything else fails the test."""
    try:
        cfg = load_config(path, overrides)
    except ConfigError as error:
        assert error.faults
        for fault in error.faults:
            assert fault.isprintable()
            assert fault.startswith((str(path), "command line: ", "the first 50"))
        return None
    assert isinstance(cfg, FullFinetuneConfig)
    return cfg


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "c.yaml"


def run(count: int):
    return settings(
        max_examples=count,
        deadline=5000,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@pytest.mark.slow
@run(70)
@given(text=mutated())
def test_mutated_files(path, text):
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    cfg = outcome(path, [])
    if cfg is not None:  # what is accepted can be written down and read again
        path.write_text(format_config(cfg))
        assert load_config(path) == cfg


@run(40)
@given(data=st.binary(max_size=200))
def test_any_bytes(path, data):
    path.write_bytes(data)
    outcome(path, [])


@pytest.mark.slow
@run(50)
@given(name=NAMES, value=VALUES)
def test_any_override(path, name, value):
    path.write_text(BASE)
    outcome(path, [f"{name}={value}"])


@run(15)
@given(words=st.lists(st.text(max_size=20), max_size=4))
def test_any_words(path, words):
    path.write_text(BASE)
    outcome(path, words)
    outcome(path, [f"~{word}" for word in words])
