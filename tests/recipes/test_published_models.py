"""Folders as they are published are trained, and come out with all that was not trained."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from recipe_lib.checkpoint.huggingface import load_weights
from recipe_lib.checkpoint.tensor_matching import list_carried
from recipe_lib.cli.main import main
from recipe_lib.external.tensor_plan.small_models import shrink
from recipe_lib.models import allocate, build_meta, read_config, read_spec
from recipe_lib.models.spec import ExternalSpec
from recipe_lib.units import pluralize
from tests.external.published_layouts import (
    EXTRAS,
    KINDS,
    open_published,
    read_tensors,
    write_published,
)
from tests.recipes.runs import FULL, LORA, build_arguments, make_probe_tokens, run_here
from tests.selection import mark_slow_but, mark_slow_except


def build_words(base: Path, output: Path, recipe: str, *overrides: str) -> list[str]:
    config = "demo/full" if recipe == FULL else "demo/lora"
    words = [*build_arguments(output, config), f"model.path={base}", "~model.preset",
             "model.implementation=transformers", "dtype=fp32", "device=cpu", "max_steps=1",
             "data.packing=false", "optimizer.lr=1e-2"]  # fmt: skip
    return [*[word for word in words if not word.startswith("model.preset=")], *overrides]


def compute_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=make_probe_tokens(), use_cache=False).logits


@pytest.mark.parametrize("kind", mark_slow_except(KINDS, ("qwen3_5",)))
def test_what_is_not_trained_comes_out_as_it_went_in(kind: str, tmp_path: Path) -> None:
    base = tmp_path / kind
    published = write_published(base, kind, dtype=torch.bfloat16)
    spec = read_spec(read_config(base), str(base), "transformers")
    assert isinstance(spec, ExternalSpec)
    ours = build_meta(spec, torch.float32)
    allocate(ours, torch.device("cpu"))
    load_weights(ours, spec, base)
    text_model = getattr(published, "thinker", published)
    expected = compute_logits(text_model)
    with torch.no_grad():
        difference = (ours.eval()(make_probe_tokens()) - expected).abs().max()
    assert difference <= 1e-6 * expected.abs().max()
    run = run_here(build_words(base, tmp_path / "full", FULL), recipe=FULL)
    assert run.code == 0, run.said
    before = read_tensors(base)
    after = read_tensors(tmp_path / "full" / "model")
    assert before.keys() == after.keys()
    extras = {name for name, _ in EXTRAS.get(kind, ())}
    carried = list_carried(spec, base).keys()
    assert extras <= carried and (carried - extras or not spec.is_multimodal())
    assert any(not torch.equal(before[name], after[name]) for name in before.keys() - carried)
    for name in carried:
        assert before[name].dtype == after[name].dtype
        assert torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)), name
    told = [line for line in run.said if "carried unchanged" in line]
    assert len(told) == 1 and f"({pluralize(len(carried), 'tensor')}, " in told[0]
    card = (tmp_path / "full" / "model" / "README.md").read_text()
    assert told[0].partition("carried unchanged: ")[2].rpartition(": ")[0] in card
    file = "preprocessor_config.json"
    assert (base / file).read_bytes() == (tmp_path / "full" / "model" / file).read_bytes()
    _, report = open_published(tmp_path / "full" / "model")
    assert not report["missing_keys"] and not report["mismatched_keys"]
    assert not report["unexpected_keys"]


def test_a_class_that_does_not_run_without_data_keeps_its_parts_frozen(tmp_path: Path) -> None:
    published = write_published(tmp_path, "step3p7")
    spec = read_spec(read_config(tmp_path), str(tmp_path), "transformers")
    ours = build_meta(spec, torch.float32)
    allocate(ours, torch.device("cpu"))
    load_weights(ours, spec, tmp_path)
    with torch.no_grad():
        assert torch.equal(ours.eval()(make_probe_tokens()), compute_logits(published))
    vision = ours.get_submodule("model.vision_model")
    assert not any(parameter.requires_grad for parameter in vision.parameters())
    carried = list_carried(spec, tmp_path)
    assert any(name.startswith("vision_model.") for name in carried)
    assert not any(".layers." in name and "vision" not in name for name in carried)


def test_packing_keeps_the_windows_of_a_text_model_inside(tmp_path: Path) -> None:
    write_published(tmp_path, "gemma3")
    spec = read_spec(read_config(tmp_path), str(tmp_path), "transformers")
    assert isinstance(spec, ExternalSpec)
    spec.check_packing(
        1, compiled=False
    )  # raises where a document's logits differ from those of it alone


# Bloom's attention takes no mask for documents.
@pytest.mark.parametrize(
    ("kind", "packs"),
    [pytest.param("qwen3_5", True, marks=pytest.mark.slow), ("bloom", False)],
)
def test_packing_is_chosen_by_what_the_model_can(
    kind: str, packs: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_published(tmp_path / kind, kind)
    never = build_words(tmp_path / kind, tmp_path / "out", FULL)
    words = ["data.packing=auto" if word == "data.packing=false" else word for word in never]
    told = "data.packing=auto: " + (
        "several sequences in a row" if packs else "one sequence in a row, with padding, as Bloom"
    )
    assert main(["plan", FULL, *words[words.index("--config") :], "--full"]) == 0
    assert told in " ".join(capsys.readouterr().out.split())
    run = run_here(words, recipe=FULL)
    assert run.code == 0, run.said
    assert [line for line in run.said if told in line], run.said
    if not packs:
        never = build_words(tmp_path / kind, tmp_path / "packed", FULL)
        always = [word.replace("packing=false", "packing=true") for word in never]
        run = run_here(always, recipe=FULL)
        assert run.code == 2 and "set data.packing=" in run.said[-1]


def test_a_small_copy_keeps_layers_that_share_keys() -> None:
    config = transformers.CONFIG_MAPPING["gemma4_text"](
        num_hidden_layers=6, layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=2,
    )  # fmt: skip
    small = shrink(config)
    assert small.num_hidden_layers == 4 and small.num_kv_shared_layers == 2
    transformers.AutoModelForCausalLM.from_config(small)


@pytest.mark.parametrize("kind", mark_slow_except(KINDS, ("mistral3",)))
def test_peft_opens_the_adapter_over_the_published_class(kind: str, tmp_path: Path) -> None:
    base = tmp_path / kind
    write_published(base, kind)
    run = run_here(build_words(base, tmp_path / "lora", LORA), recipe=LORA)
    assert run.code == 0, run.said
    published, _ = open_published(base)
    adapted = peft.PeftModel.from_pretrained(published, str(tmp_path / "lora" / "adapter"))
    in_model = {name for name, _ in adapted.named_parameters() if ".lora_" in name}
    in_file = read_tensors(tmp_path / "lora" / "adapter")
    assert {name.replace(".default", "") for name in in_model} == set(in_file)
    changes = [bool(value.any()) for name, value in adapted.named_parameters() if ".lora_B" in name]
    # The indexer of sparse attention chooses tokens, and has no gradient.
    assert all(changes) or (kind == "glm_moe_dsa" and any(changes))


@pytest.mark.parametrize(
    ("kind", "text_class"),
    mark_slow_but([("mistral3", "MistralForCausalLM"), ("qwen3_5", "Qwen3_5ForCausalLM")], count=1),
)
def test_the_text_model_alone_is_exported(kind: str, text_class: str, tmp_path: Path) -> None:
    base = tmp_path / kind
    write_published(base, kind)
    words = build_words(base, tmp_path / "full", FULL, "checkpoint.carry=false")
    run = run_here(words, recipe=FULL)
    assert run.code == 0, run.said
    folder = tmp_path / "full" / "model"
    assert read_config(folder)["architectures"] == [text_class]
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert type(model).__name__ == text_class
    assert not any(report.values())
    whole, _ = open_published(base)
    assert compute_logits(model).shape == compute_logits(whole).shape


@pytest.mark.slow
def test_an_adapter_that_peft_made_over_the_published_class_is_read(tmp_path: Path) -> None:
    """Its file says nothing of this library; names are those of the class."""
    base = tmp_path / "base"
    write_published(base, "qwen3_5")
    published, _ = open_published(base)
    targets = ["q_proj", "v_proj", "in_proj_qkv", "down_proj"]
    settings = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(published, settings)
    for name, parameter in adapted.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    expected = compute_logits(adapted)
    folders = {"--base": base, "--out": tmp_path / "merged"}
    options = [str(word) for pair in folders.items() for word in pair]
    assert main(["export", str(tmp_path / "adapter"), "--merge", *options]) == 0
    merged, report = open_published(tmp_path / "merged")
    assert not report["missing_keys"] and not report["unexpected_keys"]
    difference = (compute_logits(merged) - expected).abs().max()
    assert difference <= 1e-5 * expected.abs().max()
