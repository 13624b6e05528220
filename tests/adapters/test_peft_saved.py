"""What an adapter's file has besides A and B: merged and generated with as PEFT does, over families
and kinds.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe_lib.checkpoint.adapter_files import check_adapter
from recipe_lib.checkpoint.gguf.gguf_adapter import write_gguf_adapter
from recipe_lib.cli import main
from recipe_lib.config.schema import LoraConfig
from recipe_lib.errors import CheckpointError
from recipe_lib.generation.source import find_source, load_source
from tests.adapters.hugging_face import read_folder_spec
from tests.adapters.peft_folders import (
    FAMILIES,
    ask_peft,
    change_tensors,
    compute_relative_difference,
    make_base,
    make_tokens,
    merge,
    read_merged,
    train_with_peft,
)
from tests.selection import mark_slow_except

WHOLE = ["embed_tokens", "lm_head"]
# kind -> (rows of a resized vocabulary, what PEFT is told)
KINDS: dict[str, tuple[int | None, dict[str, Any]]] = {
    "embedding": (None, {"modules_to_save": ["embed_tokens"]}),
    "head": (None, {"modules_to_save": ["lm_head"]}),
    "both": (None, {"modules_to_save": WHOLE}),
    "both, tied again": (None, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "both of more tokens": (100, {"modules_to_save": WHOLE}),
    "both of fewer tokens": (90, {"modules_to_save": WHOLE}),
    "embedding of more tokens": (100, {"modules_to_save": ["embed_tokens"]}),
    "more tokens alone": (100, {}),
    "adapted, more tokens": (100, {"target_modules": ["q_proj", *WHOLE]}),
    "adapted with DoRA, more tokens": (
        100,
        {"target_modules": ["q_proj", *WHOLE], "use_dora": True},
    ),
    "norms": (None, {"modules_to_save": ["norm", "input_layernorm"]}),
    "linears": (None, {"modules_to_save": ["o_proj", "down_proj"]}),
    "a block": (None, {"modules_to_save": ["self_attn"], "target_modules": ["down_proj"]}),
    "rows of tokens": (None, {"trainable_token_indices": [3, 90]}),
    "rows of both": (
        None,
        {"trainable_token_indices": {"embed_tokens": [3, 90], "lm_head": [90, 5]}},
    ),
    "rows of new tokens": (100, {"trainable_token_indices": [97, 99]}),
    "all biases": (None, {"bias": "all"}),
    "adapted biases": (None, {"bias": "lora_only", "target_modules": ["q_proj", "o_proj"]}),
    "biases of adapters": (None, {"lora_bias": True}),
    "router": (None, {"modules_to_save": ["gate"]}),
}
NAMES = {"phi3": {"q_proj": "qkv_proj"}}
# PEFT has no such adapter, or no such model: experts are no linears, and what has no bias cannot
# take one up.
CANNOT = {("qwen3_moe", "linears"), ("qwen3_moe", "a block")}
CANNOT |= {(family, "router") for family in FAMILIES if family != "qwen3_moe"}
CANNOT |= {(family, "biases of adapters") for family in FAMILIES if family != "qwen2"}
QUICK = ["llama: both", "llama: rows of tokens", "qwen2: embedding", "qwen2: rows of both", "phi3: linears",
         "qwen2: biases of adapters", "qwen2: all biases", "gemma: head", "qwen3_moe: router"]  # fmt: skip
# And each other kind with one of the families.
CASES = [*QUICK, "llama: norms", "llama: both, tied again", "phi3: both of fewer tokens", "qwen2: both of more tokens",
         "gemma: embedding of more tokens", "gemma: more tokens alone", "qwen2: adapted, more tokens",
         "qwen3_moe: adapted with DoRA, more tokens", "gemma: a block", "phi3: rows of new tokens",
         "gemma: adapted biases"]  # fmt: skip
GENERATED = [
    "llama: both",
    "qwen2: rows of both",
    "qwen2: biases of adapters",
    "qwen2: adapted, more tokens",
]


def make_case(case: str, folder: Path) -> tuple[Path, Path, int | None]:
    """Base, adapter, and the vocabulary that PEFT has to be given."""
    family, kind = case.split(": ")
    base = make_base(folder / "base", family)
    vocabulary, settings = KINDS[kind]
    targets = settings.get("target_modules", ["q_proj"])
    settings = settings | {
        "target_modules": [NAMES.get(family, {}).get(name, name) for name in targets]
    }
    return base, train_with_peft(base, folder / "adapter", vocabulary, **settings), vocabulary


def test_every_family_has_a_case_that_is_always_run() -> None:
    assert {case.split(": ")[0] for case in QUICK} == set(FAMILIES)
    assert {case.split(": ")[1] for case in CASES} == set(KINDS)


@pytest.mark.parametrize("case", mark_slow_except(CASES, QUICK))
def test_merged_as_peft_does(case: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    base, adapter, vocabulary = make_case(case, tmp_path)
    logits, tensors = ask_peft(base, adapter, vocabulary)
    assert merge(base, adapter, tmp_path / "out", capsys) == (0, "")
    own_logits, own_tensors, config = read_merged(tmp_path / "out")
    assert compute_relative_difference(own_logits, logits) < 1e-5
    assert config.vocab_size == logits.shape[-1]
    shared = {
        "model.embed_tokens.weight",
        "lm_head.weight",
    }  # PEFT itself makes one of the two matrices of a tied base
    for name, tensor in tensors.items():
        if name not in shared:
            assert compute_relative_difference(own_tensors[name], tensor) < 1e-5, name


@pytest.mark.parametrize("case", mark_slow_except(GENERATED, GENERATED[:2]))
def test_generated_with_as_peft_does(case: str, tmp_path: Path) -> None:
    base, adapter, vocabulary = make_case(case, tmp_path)
    logits, _ = ask_peft(base, adapter, vocabulary)
    source = find_source(str(adapter), str(base))
    assert source.spec.vocab_size == logits.shape[-1]
    model = load_source(source, torch.float32, torch.device("cpu"), "none")
    with torch.no_grad():
        assert compute_relative_difference(model(make_tokens(vocabulary)), logits) < 1e-5


ROWS = {
    ("llama", "q_proj"): "",
    ("phi3", "qkv_proj"): "several matrices",
    ("qwen2", "k_proj"): "a bias",
}


@pytest.mark.parametrize(("family", "linear"), ROWS)
def test_rows_of_a_linear_are_merged_or_refused(
    family: str, linear: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    base = make_base(tmp_path / "base", family)
    settings = {"target_modules": ["o_proj"], "trainable_token_indices": {linear: [1, 3]}}
    adapter = train_with_peft(base, tmp_path / "adapter", None, **settings)
    code, said = merge(base, adapter, tmp_path / "out", capsys)
    why_not = ROWS[family, linear]
    if why_not:
        assert (
            code == 2
            and said.count("error: ") == 1
            and "trainable_token_indices" in said
            and why_not in said
        ), said
        assert not (tmp_path / "out").exists()
    else:
        assert (code, said) == (0, "")
        assert (
            compute_relative_difference(
                read_merged(tmp_path / "out")[0], ask_peft(base, adapter, None)[0]
            )
            < 1e-5
        )


@pytest.mark.slow
def test_what_was_tied_stays_one_matrix_where_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    kinds = {"both, tied again": True, "both": False}
    for kind, tied in kinds.items():
        base, adapter, _ = make_case(f"qwen2: {kind}", tmp_path / kind)
        assert merge(base, adapter, tmp_path / kind / "out", capsys) == (0, "")
        config = json.loads((tmp_path / kind / "out" / "config.json").read_text())
        assert config["tie_word_embeddings"] is tied, kind


@pytest.mark.slow
def test_the_base_alone_is_still_the_base(tmp_path: Path) -> None:
    from recipe_lib.adapters import disable_adapters
    from tests.adapters.hugging_face import load_plain

    base, adapter, _ = make_case("qwen2: rows of both", tmp_path)
    model = load_source(
        find_source(str(adapter), str(base)), torch.float32, torch.device("cpu"), "none"
    )
    with disable_adapters(model):
        assert torch.equal(model(make_tokens()), load_plain(base)(make_tokens()).detach())
    with torch.no_grad():
        assert not torch.equal(model(make_tokens()), load_plain(base)(make_tokens()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["both"])
def test_such_an_adapter_is_merged_before_it_is_trained_on(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    base, adapter, _ = make_case(f"qwen2: {kind}", tmp_path)
    with pytest.raises(CheckpointError, match="tune export .* --merge"):
        check_adapter(
            adapter,
            read_folder_spec(base),
            LoraConfig(rank=4, alpha=6.0, target_modules=["q"]),
            base,
        )
    assert merge(base, adapter, tmp_path / "out", capsys) == (0, "")


def test_a_module_that_is_named_and_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    base, adapter, _ = make_case("llama: both", tmp_path)
    change_tensors(adapter, lambda tensors: tensors.pop("base_model.model.lm_head.weight"))
    code, err = merge(base, adapter, tmp_path / "out", capsys)
    assert (
        code == 2 and "modules_to_save" in err and "lm_head.weight" in err and err.count("\n") == 1
    )
    assert not (tmp_path / "out").exists()


def test_biases_that_no_weight_can_take_up(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    base = make_base(tmp_path / "base", "llama")
    adapter = train_with_peft(base, tmp_path / "adapter", lora_bias=True)
    with pytest.raises(RuntimeError, match="Impossible to merge"):
        ask_peft(base, adapter)
    code, err = merge(base, adapter, tmp_path / "out", capsys)
    assert code == 2 and "lora_B.bias" in err and "lora_bias" in err and err.count("\n") == 1


CHANGED = ["llama: both", "qwen2: rows of tokens", "qwen2: all biases"]


@pytest.mark.parametrize("case", mark_slow_except(CHANGED, CHANGED[:1]))
def test_only_what_works_with_such_an_adapter_is_done_or_named(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    base, adapter, _ = make_case(case, tmp_path)
    words = ["export", str(adapter), "--adapter", "--base", str(base)]
    assert (
        main.main([*words, "--out", str(tmp_path / "out")]) == 2
    )  # a copy would lose what was saved
    err = capsys.readouterr().err
    assert "brings model." in err or "brings lm_head" in err
    assert "--merge" in err and not (tmp_path / "out").exists()
    assert main.main(words) == 0
    said = capsys.readouterr().out
    assert "next: tune generate" in said and "--merge" in said
    assert "vllm" not in said  # which loads A and B alone


def test_an_adapter_in_gguf_has_no_place_for_it(tmp_path: Path) -> None:
    base, adapter, _ = make_case("llama: rows of tokens", tmp_path)
    with pytest.raises(
        CheckpointError, match="brings model.embed_tokens.weight of the base along.*--merge"
    ):
        write_gguf_adapter(adapter, base, tmp_path / "out.gguf", "f32", name="x")
