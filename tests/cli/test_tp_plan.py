"""`tune tp-plan`: its report, its numbers, and what it refuses."""

import json
import sys

import pytest

from recipe_lib.cli.main import main
from recipe_lib.config.suggest import show
from tests.external.tensor_plan.stored_plan import read_stored_plan

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 160,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
QWEN3 = LLAMA | {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 8,
    "tie_word_embeddings": True,
}
# Layers that are unlike: the first has no experts.
UNLIKE = LLAMA | {
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [0],
}
NO_SHARE = LLAMA | {
    "hidden_size": 48,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "intermediate_size": 97,
}


@pytest.fixture(scope="module", autouse=True)
def _transformers():
    pytest.importorskip("transformers")


def model(tmp_path, config) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def planned(tmp_path, config, *words: str) -> dict:
    """What --json writes."""
    path = tmp_path / "plan.json"
    assert main(["tp-plan", model(tmp_path, config), "--json", str(path), *words]) == 0
    return json.loads(path.read_text())


def test_the_report_says_what_is_cut_and_what_is_sent(tmp_path, capsys):
    assert main(["tp-plan", model(tmp_path, LLAMA), "--tensor", "2,4,3", "--tokens", "1024"]) == 0
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "model.layers.*.self_attn.q_proj.weight 3 64 x 64 column 0 16" in lines
    assert "model.layers.*.self_attn.k_proj.weight 3 32 x 64 column 0 8" in lines
    assert "model.layers.*.mlp.down_proj.weight 3 64 x 96 row 1 1" in lines
    assert any(
        line.startswith(
            "leave model.layers.*.self_attn.o_proj 3 linear output, dim 2 modeling_llama"
        )
        for line in lines
    )
    assert any(
        line.startswith(
            "model.norm.weight 1 64 partial dimension 0: hidden states have it, and norms"
        )
        for line in lines
    )
    assert any(
        line.startswith("gather model.layers.*.input_layernorm 3 mul output, dim 1 ")
        for line in lines
    )
    # (t - 1) / t x 1024 tokens x 2 bytes x 64 numbers of a gather or a scatter: 4 in each layer,
    # and others
    assert "forward 7 all-gathers, 1 all-reduce, 6 reduce-scatters 960.00 KiB 1.41 MiB" in lines
    assert "backward 14 all-gathers, 7 reduce-scatters 1.31 MiB 1.97 MiB" in lines
    assert "legal sizes: 2, 4" in lines
    assert any(
        line.startswith("replicated for 3 ranks: 3 ranks do not divide the 4 units of model.layers")
        for line in lines
    )


def test_the_numbers_are_those_of_the_formulas(tmp_path, capsys):
    tokens, width, layers = 1024, 64, 3
    found = planned(tmp_path, LLAMA, "--tensor", "2,4", "--tokens", str(tokens))
    matrices = layers * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64) + 2 * 160 * 64
    norms = (2 * layers + 1) * 64
    assert found["legal_sizes"] == [2, 4]
    for size in (2, 4):
        numbers = found["sizes"][str(size)]
        assert numbers["parameter_bytes"] == 2 * (matrices // size + norms)
        assert numbers["cut_share"] == pytest.approx(matrices / (matrices + norms))
        whole = 2 * tokens * width
        ring = 2 * (size - 1) / size
        assert numbers["sent_bytes"] == {
            # Two products that sum in each layer, and tokens that are gathered twice; the
            # embedding, the head's input.
            "forward": ring * whole * (2 * layers + 1) + ring / 2 * whole,
            # The same backward, and the gathers once more; the tokens that the first layer took
            # from the embedding.
            "backward": ring / 2 * whole * (4 * layers + 1 + 2 * layers + 1 + 1),
            "loss": ring * 4 * tokens * 3,
            "gradients": ring * 4 * norms,
        }
    plan = read_stored_plan(found["plans"][found["sizes"]["2"]["plan"]])
    assert plan.hash() == found["sizes"]["2"]["plan"]
    assert "cut" in capsys.readouterr().out


def test_partial_gradients_are_summed_once_a_step_and_a_tied_table_is_held_once(tmp_path, capsys):
    found = planned(tmp_path, QWEN3, "--tensor", "2")["sizes"]["2"]
    assert found["sent_bytes"]["gradients"] == 4 * (
        3 * (2 * 8 + 2 * 64) + 64
    )  # of norms over heads, and of tokens, in fp32
    matrices = 3 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64) + 160 * 64
    assert found["parameter_bytes"] == 2 * (matrices // 2 + 3 * (2 * 64 + 2 * 8) + 64)
    assert "once a step (fp32 partial gradients)" in capsys.readouterr().out


def test_unlike_layers_stay_apart(tmp_path, capsys):
    assert main(["tp-plan", model(tmp_path, UNLIKE), "--tensor", "2"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith("model.layers.*.mlp.gate_proj.weight 1 ") for line in lines)
    assert any(line.startswith("model.layers.*.mlp.experts.gate_up_proj 2 ") for line in lines)


def test_the_certificate_passes_on_a_small_copy(tmp_path, capsys):
    assert main(["tp-plan", model(tmp_path, QWEN3), "--tensor", "2", "--certify"]) == 0
    assert "certificate, 2 ranks: passed, " in capsys.readouterr().out


def other_rows(held):
    for each in held["parameters"]:
        if "k_proj" in each["name"]:  # every other head, not the first half of them
            each["segments"] = [each["segments"][0] // 2] * 2
    return "self_attn.o_proj.weight"


def full_gradients(held):
    for each in held["parameters"]:
        each["gradient"] = "full" if each["gradient"] == "partial" else each["gradient"]
    return "the gradient of model.layers.0.input_layernorm.weight is off by"


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [other_rows, full_gradients])
def test_a_certificate_that_fails_is_exit_code_3(spoil, tmp_path, capsys, monkeypatch):
    from recipe_lib.external.tensor_plan import transformers_models

    right, lines = transformers_models.infer_plan_and_mask, []

    def wrong(*asked):
        plan, mask = right(*asked)
        held = plan.to_dict()
        lines.append(spoil(held))
        return read_stored_plan(held), mask

    monkeypatch.setattr(transformers_models, "infer_plan_and_mask", wrong)
    assert main(["tp-plan", model(tmp_path, QWEN3), "--tensor", "2", "--certify"]) == 3
    out = capsys.readouterr().out
    assert "certificate, 2 ranks: NOT PASSED" in out and lines[0] in out


def test_a_plan_whose_tokens_cannot_be_shared_gives_way_to_one_without(
    tmp_path, capsys, monkeypatch
):
    from recipe_lib.external.tensor_plan import transformers_models

    right = transformers_models.infer_plan_and_mask

    def wrong(*asked):
        plan, mask = right(*asked)
        held = plan.to_dict()
        held["boundaries"] = [each for each in held["boundaries"] if each["kind"] != "slice"]
        return read_stored_plan(held), mask

    monkeypatch.setattr(transformers_models, "infer_plan_and_mask", wrong)
    assert main(["tp-plan", model(tmp_path, QWEN3), "--tensor", "2", "--certify"]) == 0
    out = capsys.readouterr().out
    assert "certificate, 2 ranks: passed" in out and " gather " not in out


def test_a_size_that_the_small_copy_does_not_allow_is_proven_with_fewer_ranks(tmp_path, capsys):
    config = LLAMA | {
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 8,
        "vocab_size": 2**14,
    }
    assert main(["tp-plan", model(tmp_path, config), "--tensor", "4,8", "--certify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    four, eight = (
        line.partition("passed, ")[2] for line in lines if line.startswith("certificate, ")
    )
    assert four.endswith(" on a small model") and eight == f"{four}, by 4 ranks"


def test_sizes_of_which_none_is_legal_are_exit_code_2(tmp_path, capsys):
    assert main(["tp-plan", model(tmp_path, LLAMA), "--tensor", "5,7"]) == 2
    said = capsys.readouterr()
    first, second = said.err.splitlines()
    assert first.startswith(
        "error: --tensor 5,7: 5 ranks do not divide the 4 units of model.layers.*.self_attn.q_proj"
    )
    assert first.endswith("; legal sizes: 2, 4") and "7 ranks do not divide" in second
    assert said.out == ""


def test_a_model_of_which_little_can_be_cut_says_why(tmp_path, capsys):
    assert main(["tp-plan", model(tmp_path, NO_SHARE), "--tensor", "2"]) == 2
    assert "legal sizes: none" in capsys.readouterr().err


NOTHING = "found no folder, no preset and nothing in the hub cache; "


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["nowhere/model"],
            f"tune tp-plan: nowhere/model: {NOTHING}fetch it with `tune download nowhere/model`",
        ),
        (
            ["/nope"],
            (
                "tune tp-plan: /nope: no such folder; expected a model folder, a preset, or a hub"
                " id such as OWNER/"
            ),
        ),
        (["llama3/8b"], f"tune tp-plan: llama3/8b: {NOTHING}did you mean llama3/8B?"),
        (
            ["llama3/8B", "--tensor", "two"],
            "--tensor: found 'two', expected numbers above 1, commas between them",
        ),
        (["llama3/8B", "--tensor", "1"], "--tensor: found '1', expected numbers above 1"),
        (["llama3/8B", "--tokens", "0"], "--tokens: found 0, expected a number >= 1"),
        (["llama3/8B", "--json", "no/such/plan.json"], "--json: no/such: no such folder"),
        ([], "tune tp-plan: MODEL is missing"),
    ],
)
def test_mistakes_are_one_line(words, line, capsys):
    assert main(["tp-plan", *words]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"error: {line}") and said.err.count("\n") == 1 and said.out == ""


def test_a_kind_of_model_that_transformers_does_not_have_is_told(tmp_path, capsys):
    folder = model(tmp_path, LLAMA | {"model_type": "mine"})
    assert main(["tp-plan", folder]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        f"error: {show(folder)}: config.json: model_type 'mine' is not one of transformers';"
        " install a"
    )


def test_a_config_that_its_class_cannot_compute_with_is_told(tmp_path, capsys):
    assert main(["tp-plan", model(tmp_path, LLAMA | {"num_attention_heads": 0})]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "config.json: the config of 'llama' does not take it (" in line


def test_without_transformers_the_extra_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["tp-plan", model(tmp_path, LLAMA)]) == 2
    assert (
        capsys.readouterr().err == "error: tune tp-plan: found no package transformers; pip install"
        " 'transformers<6,>=4.57'\n"
    )
