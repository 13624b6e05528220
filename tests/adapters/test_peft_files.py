"""Adapters in PEFT's layout: ours load in PEFT, PEFT's load in ours, and both compute the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from recipe_lib.adapters.peft_names import PREFIX, FileModule, build_file_modules
from recipe_lib.checkpoint.adapter_config import AdapterConfig
from recipe_lib.checkpoint.adapter_files import check_adapter
from recipe_lib.checkpoint.peft_folders import export_adapter, load_adapter
from recipe_lib.checkpoint.rank_groups import SingleRank
from recipe_lib.config.schema import LoraConfig, ParallelConfig
from recipe_lib.models import build_spec, read_config
from tests.adapters.adapted import EVERYWHERE, LINEARS, Setting, build_adapted
from tests.adapters.hugging_face import (
    VARIANTS,
    build_config,
    compute_difference,
    load_ours,
    load_with_peft,
    save_with_peft,
    write_tiny_folder,
)
from tests.distributed.ranks import run_ranks
from tests.parallel.small_models import build_small_spec
from tests.selection import mark_slow_but, mark_slow_except


def write(model: Any, folder: Path, cfg: LoraConfig, out: Path, **more: Any) -> Path:
    export_adapter(
        model,
        model.spec,
        cfg,
        out,
        base=str(folder),
        base_folder=folder,
        world=SingleRank(),
        **more,
    )
    return out


@pytest.fixture(scope="module")
def phi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("phi") / "base", "phi3")


@pytest.mark.parametrize("variant", mark_slow_except(VARIANTS, ("lora", "dora", "embedding")))
def test_ours_loads_in_peft_and_in_ours(variant: str, realdata: Path, tmp_path: Path) -> None:
    folder, cfg = realdata / "stories260K-hf", build_config(**VARIANTS[variant])
    model = load_ours(folder, cfg)
    out = write(model, folder, cfg, tmp_path / "adapter")
    assert compute_difference(model, load_with_peft(folder, out)) < 1e-5
    check_adapter(out, model.spec, cfg, folder)
    again = load_ours(folder, cfg, moved=0)
    assert compute_difference(model, again) > 1e-3
    modules = {"lora": 10, "embedding": 1, "head": 1, "everywhere": 37}.get(variant, 35)
    assert load_adapter(again, model.spec, out) == modules
    assert compute_difference(model, again) == 0


@pytest.mark.parametrize(
    ("theirs", "mine"),
    [
        ({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}, {"target_modules": ["q", "v"]}),
        ({"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "use_rslora": True}, {"rslora": True}),
        ({"r": 4, "lora_alpha": 8, "target_modules": r".*\.(up|down)_proj", "use_dora": True},
         {"target_modules": ["up", "down"], "dora": True}),
        ({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_dora": True},
         {"target_modules": ["q", "embedding", "head"], "dora": True}),
        ({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj"], "rank_pattern": {"k_proj": 2},
          "alpha_pattern": {"layers.1.self_attn.q_proj": 3.0}}, {"target_modules": ["q", "k"]}),
        ({"r": 2, "lora_alpha": 4, "target_modules": ["o_proj", "gate_proj"],
          "rank_pattern": {"^model.layers.0.mlp.gate_proj": 4}}, {"target_modules": ["o", "gate"]}),
    ],
    ids=["lora", "all-linear", "pattern", "embedding", "smaller-ranks", "larger-rank"],
)  # fmt: skip
def test_pefts_loads_in_ours(theirs: dict, mine: dict, realdata: Path, tmp_path: Path) -> None:
    folder, cfg = realdata / "stories260K-hf", build_config(**mine)
    model = save_with_peft(folder, tmp_path / "adapter", **theirs)
    own = load_ours(folder, cfg, moved=0)
    check_adapter(tmp_path / "adapter", own.spec, cfg, folder)
    assert compute_difference(own, model) > 1e-3
    load_adapter(own, own.spec, tmp_path / "adapter")
    assert compute_difference(own, model) < 1e-5
    out = write(own, folder, cfg, tmp_path / "again")
    assert compute_difference(own, load_with_peft(folder, out)) < 1e-5


@pytest.mark.parametrize(
    "targets",
    mark_slow_but([LINEARS, ["q", "v", "up"], ["o"], ["k"]], 1),
    ids=lambda targets: "-".join(targets),
)
@pytest.mark.parametrize(
    "kind", [{}, {"rslora": True}, {"dora": True}], ids=["lora", "rslora", "dora"]
)
def test_fused_projections_are_stacked_exactly(
    targets: list[str], kind: dict, phi: Path, tmp_path: Path
) -> None:
    cfg = build_config(target_modules=targets, **kind)
    model = load_ours(phi, cfg)
    out = write(model, phi, cfg, tmp_path / "adapter")
    assert compute_difference(model, load_with_peft(phi, out)) < 1e-5
    check_adapter(out, model.spec, cfg, phi)
    again = load_ours(phi, cfg, moved=0)
    load_adapter(again, model.spec, out)
    assert compute_difference(model, again) == 0


@pytest.mark.parametrize("kind", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_pefts_fused_adapter_loads_in_ours(kind: dict, phi: Path, tmp_path: Path) -> None:
    model = save_with_peft(
        phi, tmp_path / "a", r=4, lora_alpha=8, target_modules=["qkv_proj", "gate_up_proj"], **kind
    )
    cfg = build_config(target_modules=["q", "k", "v", "gate", "up"], dora=bool(kind))
    own = load_ours(phi, cfg, moved=0)
    check_adapter(tmp_path / "a", own.spec, cfg, phi)
    load_adapter(own, own.spec, tmp_path / "a")
    assert compute_difference(own, model) < 1e-5


def test_servers_see_one_scaling_and_room_for_the_largest_rank(phi: Path, tmp_path: Path) -> None:
    cfg = build_config(target_modules=["q", "k", "v", "o", "up"])
    out = write(load_ours(phi, cfg), phi, cfg, tmp_path / "adapter")
    fields = json.loads((out / "adapter_config.json").read_text())
    assert (fields["r"], fields["lora_alpha"]) == (12, 24)
    assert fields["rank_pattern"] == {"o_proj": 4, "gate_up_proj": 4}
    assert fields["alpha_pattern"] == {"o_proj": 8, "gate_up_proj": 8}
    with safe_open(str(out / "adapter_model.safetensors"), "pt") as file:
        assert file.get_slice(
            f"{PREFIX}model.layers.1.self_attn.qkv_proj.lora_A.weight"
        ).get_shape() == [12, 32]
        assert file.metadata()["format"] == "pt"


def test_a_multimodal_base_gets_the_names_of_its_model(tmp_path: Path) -> None:
    """Checked on the modules that transformers makes, with a vision tower that has projections of
    the same names.
    """
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from transformers import AutoModelForImageTextToText, Gemma3Config

    text = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16, "max_position_embeddings": 64,
    }  # fmt: skip
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    settings = Gemma3Config(
        text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14}
    )
    outer = settings.to_dict() | {"architectures": ["Gemma3ForConditionalGeneration"]}
    spec, cfg = build_spec(outer, "tiny"), build_config(target_modules=["q", "down"])
    with build_adapted(spec, Setting(cfg, dtype=torch.float32)) as (model, world):
        export_adapter(
            model, spec, cfg, tmp_path / "a", base="tiny", world=world, source_config=outer
        )
    fields = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    with torch.device("meta"):
        theirs = AutoModelForImageTextToText.from_config(settings)
        theirs = get_peft_model(
            theirs, PeftConfig(r=4, target_modules=fields["target_modules"], task_type="CAUSAL_LM")
        )
    names = {
        name.replace(".default", "") for name, _ in theirs.named_parameters() if "lora_" in name
    }
    assert names == load_file(tmp_path / "a" / "adapter_model.safetensors").keys()
    check_adapter(tmp_path / "a", spec, cfg)


@pytest.mark.parametrize(
    "name", ["model.language_model.layers.1", "language_model.model.layers.1", "model.layers.1"]
)
def test_patterns_may_name_the_modules_of_a_multimodal_model(name: str) -> None:
    patterns = {
        "rank_pattern": {f"{name}.mlp.up_proj": 2},
        "alpha_pattern": {f"{name}.mlp.up_proj": 3.0},
    }
    settings = AdapterConfig(rank=4, alpha=8.0, rslora=False, dora=False, **patterns)
    first, second = (
        FileModule(f"model.layers.{number}.mlp.up_proj", 8, 8, ()) for number in (0, 1)
    )
    assert settings.get_rank(second) == 2
    assert (settings.compute_scaling(first), settings.compute_scaling(second)) == (2.0, 1.5)


@pytest.mark.parametrize(
    "layout",
    [
        "gemma-2b-it",
        "llama-2-7b-chat",
        "mistral-7b-instruct-v0.3",
        "qwen2.5-14b-cogito",
        "phi-3-mini-merge",
    ],
)
def test_modules_have_the_names_of_real_checkpoints(layout: str, realdata: Path) -> None:
    folder = realdata / "hf-layouts" / layout
    names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    spec = build_spec(read_config(folder), layout)
    modules = set(build_file_modules(spec)) - ({"lm_head"} if spec.tied else set())
    assert {f"{name}.weight" for name in modules} <= names.keys()
    assert len(modules) == (4 if spec.fused_file else 7) * spec.num_layers + 1 + (not spec.tied)


@pytest.mark.slow
def test_two_ranks_write_and_read_what_one_does(tmp_path: Path) -> None:
    spec = build_small_spec()
    cfg = build_config(target_modules=EVERYWHERE, dora=True, rank=3)
    setting = Setting(
        cfg, parallel=ParallelConfig(fsdp_wrap_policy="memory_efficient"), dtype=torch.float32
    )

    def export(out: Path) -> None:
        with build_adapted(spec, setting) as (model, world):
            export_adapter(model, spec, cfg, out, base="base", world=world)

    def read(folder: Path, out: Path) -> None:
        with build_adapted(spec, setting, moved=0) as (model, world):
            load_adapter(model, spec, folder)
            export_adapter(model, spec, cfg, out, base="base", world=world)

    export(tmp_path / "one")
    run_ranks(export, 2, tmp_path / "two")
    run_ranks(read, 2, tmp_path / "one", tmp_path / "again")
    one, two, again = (
        tmp_path / name / "adapter_model.safetensors" for name in ("one", "two", "again")
    )
    files = [load_file(file) for file in (one, two)]
    for name, tensor in files[0].items():
        if "magnitude" in name:  # lengths are sums in another order
            torch.testing.assert_close(tensor, files[1][name], rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(tensor, files[1][name]), name
    assert one.read_bytes() == again.read_bytes()
