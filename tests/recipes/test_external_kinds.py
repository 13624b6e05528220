"""Architectures whose files, configs or modules are unlike others', trained by
`model.implementation=transformers`.

The oracle is transformers: its loss on the same tokens, and its logits of the folders that a run
leaves.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors import safe_open

from tests.recipes.external_kinds import build_settings
from tests.recipes.runs import FULL, LORA, build_arguments, make_probe_tokens, read_losses, run_here
from tests.selection import mark_slow_except


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny random model, as transformers' save_pretrained writes it."""
    root = tmp_path_factory.mktemp("saved")

    def make(kind: str) -> Path:
        folder = root / kind
        if not folder.exists():
            torch.manual_seed(0)
            config = transformers.AutoConfig.for_model(kind, **build_settings(kind))
            transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32
            ).save_pretrained(folder)
        return folder

    return make


def opened(folder: Path) -> Any:
    """transformers' own model of a folder, of which it has to find every tensor."""
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), (
        found
    )
    return model


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=make_probe_tokens(), use_cache=False).logits


def names_in(folder: Path) -> set[str]:
    with safe_open(str(folder / "model.safetensors"), framework="pt") as file:
        return set(file.keys())


def train(folder: Path, output: Path, recipe: str, *words: str) -> tuple[Any, list[Any]]:
    """A run of two steps, and the micro-batches that it computed losses of."""
    batches: list[Any] = []

    def watch(made: Any) -> None:
        original = made.compute_loss

        def compute_loss(batch: Any) -> torch.Tensor:
            batches.append(batch)
            return original(batch)

        made.compute_loss = compute_loss

    common = ("~model.preset", f"model.path={folder}", "model.implementation=transformers", "dtype=fp32", "device=cpu",
              "max_steps=2", "batch_size=2", "data.packing=false", "log.every_n_steps=1000",
              "tokenizer.path=examples/demo/tokenizer", "lr_scheduler.type=constant")  # fmt: skip
    config = "demo/full" if recipe == FULL else "demo/lora"
    run = run_here(
        [*build_arguments(output, config), *common, *words], before_training=watch, recipe=recipe
    )
    return run, batches


def loss_of(model: Any, batch: Any) -> float:
    """transformers' mean loss of the trained tokens of a micro-batch; its labels are shifted
    already.
    """
    with torch.no_grad():
        logits = model(input_ids=batch.tokens, use_cache=False).logits
    return F.cross_entropy(
        logits.flatten(0, 1).float(), batch.labels.flatten(), ignore_index=-100
    ).item()


@pytest.mark.parametrize(
    "kind",
    mark_slow_except(["apertus", "granitemoehybrid", "mixtral", "gemma3"], ["apertus", "mixtral"]),
)
def test_all_of_a_model_trains(saved: Callable[[str], Path], tmp_path: Path, kind: str):
    folder = saved(kind)
    run, batches = train(folder, tmp_path, FULL, "optimizer.lr=1e-3")
    assert run.code == 0, run.said
    assert read_losses(tmp_path)[0] == pytest.approx(loss_of(opened(folder), batches[0]), rel=1e-5)
    exported = opened(tmp_path / "model")
    with torch.no_grad():
        assert (run.recipe.model(make_probe_tokens()) - logits_of(exported)).abs().max() <= 1e-5
    assert (logits_of(exported) - logits_of(opened(folder))).abs().max() > 1e-4
    assert names_in(tmp_path / "model") == names_in(folder)


@pytest.mark.parametrize(
    "kind",
    mark_slow_except(
        ["llama4_text", "falcon_h1", "nemotron_h", "qwen3_moe"], ["llama4_text", "qwen3_moe"]
    ),
)
def test_adapters_train_and_peft_opens_them(
    saved: Callable[[str], Path], tmp_path: Path, kind: str
):
    folder = saved(kind)
    run, batches = train(folder, tmp_path, LORA, "lora.rank=4", "optimizer.lr=1e-2")
    assert run.code == 0, run.said
    assert read_losses(tmp_path)[0] == pytest.approx(loss_of(opened(folder), batches[0]), rel=1e-5)
    model = peft.PeftModel.from_pretrained(opened(folder), tmp_path / "adapter")
    with torch.no_grad():
        assert (run.recipe.model(make_probe_tokens()) - logits_of(model)).abs().max() <= 1e-5
    assert (logits_of(model) - logits_of(opened(folder))).abs().max() > 1e-4


def said_of_adapters(run: Any) -> str:
    (line,) = [line for line in run.said if line.startswith("adapters:")]
    return line


def test_the_log_names_the_modules_that_have_an_adapter(
    saved: Callable[[str], Path], tmp_path: Path
):
    """Of a mixture: those of attention, and what of the layers has none."""
    run, _ = train(saved("qwen3_moe"), tmp_path, LORA)
    with safe_open(str(tmp_path / "adapter" / "adapter_model.safetensors"), framework="pt") as file:
        written = {name.split(".")[-3] for name in file.keys()}
    line = said_of_adapters(run)
    assert line.startswith("adapters: LoRA of rank 8 on q_proj, k_proj, v_proj, o_proj: ")
    assert written == {"q_proj", "k_proj", "v_proj", "o_proj"}
    experts = 2 * 4 * (2 * 16 * 32 + 32 * 16)  # layers x experts x gate and up, down
    router, attention = 2 * 4 * 32, 2 * (2 * 32 * 32 + 2 * 16 * 32)
    share = (experts + router) / (experts + router + attention)
    assert (
        f"none on experts.gate_up_proj, experts.down_proj, mlp.gate ({share:.1%} of the layers'"
        " weights)" in line
    )


def test_a_layer_without_a_target_is_counted(saved: Callable[[str], Path], tmp_path: Path):
    run, _ = train(saved("nemotron_h"), tmp_path, LORA, "lora.target_modules=[q_proj, in_proj]")
    assert "on in_proj (in 1 of 2 layers), q_proj (in 1 of 2 layers): " in said_of_adapters(run)


REFUSED = {
    "no such linear": (
        "qwen3_moe",
        "lora.target_modules=[gate_up_proj]",
        "'gate_up_proj' is the end of no linear",
    ),
    "a router": (
        "llama4_text",
        "lora.target_modules=[feed_forward.router]",
        "cannot have an adapter: it is no linear, and is named by the word router",
    ),
    "read by a kernel": (
        "falcon_h1",
        "lora.target_modules=[out_proj]",
        "its layer reads the weight without calling",
    ),
    "experts of an unknown layout in 4 bits": (
        "jetmoe",
        "lora.quantize_base=nf4",
        (
            "would stay in fp32: torch's own linears and experts are quantized, with nf4 those of"
            " blocks of 64, and JetMoeParallelExperts.weight is in no layout of experts that is"
            " known; set lora.quantize_base=none"
        ),
    ),
    "adapters of experts of an unknown layout": (
        "jetmoe",
        "lora.target_modules=[experts]",
        (
            "lora.target_modules: experts: JetMoeParallelExperts.weight is in no layout of experts"
            " that is known; remove it from the list"
        ),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_adapter_or_quantized_weight_can_be_is_refused(
    saved: Callable[[str], Path], tmp_path: Path, case: str
):
    kind, word, line = REFUSED[case]
    run, _ = train(saved(kind), tmp_path, LORA, word)
    assert run.code == 2 and line in run.said[-1] and run.recipe is None, run.said
    assert not (tmp_path / "adapter").exists()


def test_quantized_weights_are_counted(saved: Callable[[str], Path], tmp_path: Path):
    run, _ = train(saved("apertus"), tmp_path, LORA, "lora.quantize_base=nf4")
    assert said_of_adapters(run).endswith("; 12 linears of the layers in nf4")


@pytest.mark.parametrize("source", ["native", "transformers"])
def test_the_vision_part_of_a_model_is_said_to_be_carried(
    saved: Callable[[str], Path], tmp_path: Path, source: str
):
    folder = saved("gemma3")
    run, _ = train(folder, tmp_path, FULL, f"model.implementation={source}")
    lines = [line for line in run.said if "vision_tower" in line]
    exported = json.loads((tmp_path / "model" / "config.json").read_text())
    kept = {name for name in names_in(tmp_path / "model") if "vision_tower" in name}
    count = sum("language_model" not in name for name in names_in(folder))
    parts = f"multi_modal_projector.*, vision_tower.* ({count} tensors"
    assert [line.partition(parts)[0] for line in lines] == [
        "model: left out: ",
        "export: carried unchanged: ",
    ]
    assert exported["model_type"] == "gemma3" and kept
    with safe_open(str(folder / "model.safetensors"), framework="pt") as old:
        with safe_open(str(tmp_path / "model" / "model.safetensors"), framework="pt") as new:
            assert all(torch.equal(old.get_tensor(name), new.get_tensor(name)) for name in kept)


def test_experts_that_are_missing_are_named(saved: Callable[[str], Path], tmp_path: Path):
    from safetensors.torch import load_file, save_file

    folder = saved("mixtral")
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes((folder / "config.json").read_bytes())
    del tensors["model.layers.1.block_sparse_moe.experts.2.w2.weight"]
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    run, _ = train(tmp_path / "model", tmp_path / "out", FULL)
    assert run.code == 2
    assert "model.layers.1.mlp.experts.down_proj is made of 3 tensors" in run.said[-1]
    assert "which make [3, 32, 48]; config.json makes it [4, 32, 48]" in run.said[-1]


def test_an_encoder_is_refused(tmp_path: Path):
    """It sees the tokens that it is to learn."""
    small = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
    }
    (tmp_path / "config.json").write_text(
        json.dumps(small | {"model_type": "bert", "vocab_size": 512})
    )
    words = ["model.implementation=transformers", f"model.preset={tmp_path}/config.json"]
    run = run_here([*build_arguments(tmp_path / "out"), *words])
    assert run.code == 2 and "'bert' lets each token see later ones" in run.said[-1]
