"""Runs of recipes that add layers to a checkpoint's model: started, trained, exported, read again,
or refused first.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from recipe_lib.checkpoint.safetensors_files import EXTRA_PARAMETERS_KEY
from tests.distributed.ranks import run_ranks
from tests.recipes.runs import (
    DPO,
    FULL,
    LORA,
    Run,
    expect_done,
    find_largest_difference,
    import_recipe_module,
    list_parameters,
    read_losses,
    run_here,
)
from tests.recipes.test_adapter_runs import arguments as adapter_arguments
from tests.recipes.test_dpo import arguments as pair_arguments
from tests.recipes.test_dpo import write_pairs

SAVE = "checkpoint.extra_parameters=save"
NAMES = [f"model.layers.{layer}.mlp.extra.weight" for layer in range(5)]


def add_layers(model: Any, dtype: torch.dtype) -> None:
    """A linear behind each MLP, beside what it gives."""
    layers = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    for layer in layers:
        width = (
            model.get_input_embeddings().embedding_dim
            if hasattr(model, "config")
            else model.spec.width
        )
        layer.mlp.extra = nn.Linear(width, width, bias=False, device="meta", dtype=dtype)
        layer.mlp.register_forward_hook(lambda mlp, args, output: output + mlp.extra(output))


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes a recipe's `setup_model` add the layers, as an edited copy does, behind the call that
    is named.
    """

    def edit(
        recipe: str, behind: str = "build_meta", change: Callable[..., None] = add_layers
    ) -> None:
        module = import_recipe_module(recipe)
        original = getattr(module, behind)

        def call(*args: Any) -> Any:
            result = original(*args)
            change(args[0] if result is None else result, args[-1])
            return result

        monkeypatch.setattr(module, behind, call)

    yield edit


def full(realdata: Path, output: Path, *overrides: str) -> list[str]:
    own = [
        word
        for word in adapter_arguments(realdata, output, *overrides)
        if not word.startswith("lora.")
    ]
    own[1] = str(Path(__file__).parent / "plain.yaml")
    return [*own, "recipe=full_finetune_distributed"]


def start_of(found: dict[str, torch.Tensor]) -> Callable[[Any], None]:
    """Before training, the whole parameters that the recipe has added."""
    return lambda recipe: found.update(
        {name: one for name, one in list_parameters(recipe).items() if "extra" in name}
    )


def test_a_run_that_would_lose_them_is_refused_before_weights_are_read(
    realdata: Path, tmp_path: Path, copies: Any
) -> None:
    for name, recipe, argv in ((FULL, FULL, full), (LORA, LORA, adapter_arguments)):
        copies(recipe)
        run = run_here(argv(realdata, tmp_path / name), recipe=recipe)
        assert run.code == 2
        assert (
            run.said[-1]
            == f"error: checkpoint.extra_parameters: found {NAMES[0]} and 4 more, which the recipe"
            " added and no other program knows; set checkpoint.extra_parameters=save to write"
            " it too, or checkpoint.save_model=false"
        )
        assert not (tmp_path / name).exists()
    assert (
        run_here(full(realdata, tmp_path / "no", "checkpoint.save_model=false", "max_steps=1")).code
        == 0
    )


@pytest.mark.slow
def test_export_and_round_trip(realdata: Path, tmp_path: Path, copies: Any) -> None:
    """Started with finite numbers, said, trained, written, read by the recipe, refused by others
    but transformers.
    """
    from transformers import AutoModelForCausalLM

    copies(FULL)
    start: dict[str, torch.Tensor] = {}
    first = run_here(full(realdata, tmp_path / "first", SAVE, "max_steps=2"), start_of(start))
    assert first.code == 0, first.said
    said = "extra parameters: 20,480 numbers start from reset_parameters, no checkpoint has them: "
    assert f"{said}model.layers.*.mlp.extra.weight (5)" in first.said
    assert any(
        "transformers and other programs ignore its extra parameters" in line for line in first.said
    )
    assert list(start) == NAMES
    assert all(
        0.12 < value.abs().max() <= 0.125 for value in start.values()
    )  # torch's bound: 1 / sqrt(64)
    file = tmp_path / "first" / "model" / "model.safetensors"
    written = load_file(file)
    assert len(written) == 47 + 5
    with safe_open(file, "pt") as held:
        assert held.metadata()[EXTRA_PARAMETERS_KEY].split() == NAMES
    trained = dict(first.recipe.model.named_parameters())
    for name in NAMES:
        assert torch.equal(written[name], trained[name]) and not torch.equal(
            written[name], start[name]
        )
    again: dict[str, torch.Tensor] = {}
    argv = [*full(realdata, tmp_path / "second", SAVE, "max_steps=1"), f"model.path={file.parent}"]
    second = run_here(argv, start_of(again))
    assert second.code == 0, second.said
    assert (
        "extra parameters: 20,480 numbers are read: model.layers.*.mlp.extra.weight (5)"
        in second.said
    )
    assert all(torch.equal(again[name], written[name]) for name in NAMES)
    other, loading = AutoModelForCausalLM.from_pretrained(
        file.parent, dtype=torch.float32, output_loading_info=True
    )
    assert set(loading["unexpected_keys"]) == set(NAMES) and not loading["missing_keys"]
    assert torch.equal(other.model.norm.weight, trained["model.norm.weight"])


@pytest.mark.slow
def test_several_ranks_and_a_resumed_run_do_as_one(
    realdata: Path, tmp_path: Path, copies: Any
) -> None:
    """Two shards, and two stages of a pipeline: the same start bit for bit, the same losses and
    export.
    """
    copies(FULL)
    expected: dict[str, torch.Tensor] = {}
    run = run_here(
        full(realdata, tmp_path / "one", SAVE, "checkpoint.save_every_n_steps=3"),
        start_of(expected),
    )
    assert run.code == 0, run.said
    states = tmp_path / "one" / "state"
    argv = full(realdata, tmp_path / "resumed", SAVE, f"resume={states / 'step_3'}")
    assert run_here(argv).code == 0
    assert read_losses(tmp_path / "resumed") == read_losses(tmp_path / "one")[3:]

    cases = {
        "shards": ("batch_size=2",),
        "stages": ("parallel.pipeline=2", "batch_size=2", "gradient_accumulation_steps=2"),
    }

    def train() -> dict[str, dict[str, torch.Tensor]]:
        found: dict[str, dict[str, torch.Tensor]] = {folder: {} for folder in cases}
        for folder, overrides in cases.items():
            expect_done(
                run_here(
                    full(realdata, tmp_path / folder, SAVE, *overrides), start_of(found[folder])
                )
            )
        return found

    one = load_file(tmp_path / "one" / "model" / "model.safetensors")
    of_ranks = run_ranks(train, 2)
    for folder in cases:
        ranks = [found[folder] for found in of_ranks]
        assert {name for found in ranks for name in found} == set(NAMES)
        assert all(
            torch.equal(value, expected[name]) for found in ranks for name, value in found.items()
        )
        assert (
            find_largest_difference(read_losses(tmp_path / folder), read_losses(tmp_path / "one"))
            < 1e-5
        )
        other = load_file(tmp_path / folder / "model" / "model.safetensors")
        assert other.keys() == one.keys()
        assert all(torch.allclose(other[name], one[name], atol=1e-3) for name in one)
    assert (
        any("model.layers.4" in name for name in ranks[1])
        and NAMES[0] in ranks[0]
        and len(ranks[1]) < 5
    )


@pytest.mark.slow
def test_what_ranks_could_not_run_is_refused(realdata: Path, tmp_path: Path, copies: Any) -> None:
    def outside(model: Any, dtype: torch.dtype) -> None:
        model.model.extra = nn.Linear(64, 64, device="meta", dtype=dtype)

    def shared(model: Any, dtype: torch.dtype) -> None:
        model.model.layers[0].extra = model.model.layers[4].extra = nn.Linear(
            64, 64, device="meta", dtype=dtype
        )

    def hooked(model: Any, dtype: torch.dtype) -> None:
        model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *_: None)

    cases: tuple[tuple[str, Callable[..., None], str, str], ...] = (
        (
            "outside",
            outside,
            "parallel.pipeline=2",
            "pipeline: found model.extra.weight, which the recipe added",
        ),
        (
            "shared",
            shared,
            "parallel.pipeline=2",
            "pipeline: found model.layers.0.extra.weight, which",
        ),
        (
            "tensor",
            add_layers,
            "parallel.tensor=2",
            f"parallel.tensor: found {NAMES[0]}, which the recipe added",
        ),
        (
            "hook",
            hooked,
            "parallel.tensor=2",
            "parallel.tensor: found a hook of model.layers.1.self_attn.q_proj, wh",
        ),
    )
    module = import_recipe_module(FULL)
    original = module.build_meta

    def refused() -> dict[str, list[str]]:
        said = {}
        for name, change, lever, _ in cases:

            def build(spec: Any, dtype: Any, change: Any = change) -> Any:
                model = original(spec, dtype)
                change(model, dtype)
                return model

            module.build_meta = build
            argv = full(
                realdata,
                tmp_path / name,
                SAVE,
                lever,
                "gradient_accumulation_steps=2",
                "batch_size=2",
            )
            run = run_here(argv)
            assert run.code == 2
            said[name] = run.said
        return said

    found = run_ranks(refused, 2)
    for name, _, _, line in cases:
        assert any(line in told for said in found for told in said[name]), (
            found
        )  # by one of the ranks


@pytest.mark.slow
@pytest.mark.parametrize("trained", [True, False])
def test_adapters_with_added_layers(
    realdata: Path, tmp_path: Path, copies: Any, trained: bool
) -> None:
    """PEFT opens the folder without the layers, and with them computes what was trained; the recipe
    goes on from it.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    copies(
        LORA,
        "add_adapters" if trained else "build_meta",
        lambda model, dtype: add_layers(model, torch.float32),
    )
    start: dict[str, torch.Tensor] = {}
    first = run_here(
        adapter_arguments(
            realdata, tmp_path / "first", SAVE, "lora.merge_on_save=true", "max_steps=2"
        ),
        start_of(start),
        recipe=LORA,
    )
    assert first.code == 0, first.said
    adapter = tmp_path / "first" / "adapter"
    held = load_file(adapter / "adapter_model.safetensors")
    for name in NAMES:
        saved = held[f"base_model.model.{name}"]
        assert torch.equal(saved, first.recipe.model.get_parameter(name))
        assert torch.equal(saved, start[name]) != trained
    merged = load_file(tmp_path / "first" / "model" / "model.safetensors")
    assert all(torch.equal(merged[name], held[f"base_model.model.{name}"]) for name in NAMES)
    tokens = torch.randint(3, 500, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        own = first.recipe.model.eval()(tokens)
        for has_layers in (False, True):
            base = AutoModelForCausalLM.from_pretrained(
                realdata / "stories260K-hf", dtype=torch.float32
            )
            if has_layers:
                for layer in base.model.layers:
                    layer.mlp.extra = nn.Linear(64, 64, bias=False)
                    layer.mlp.register_forward_hook(
                        lambda mlp, args, output: output + mlp.extra(output)
                    )
            theirs = PeftModel.from_pretrained(base, adapter).eval()(tokens).logits
            assert ((theirs - own).abs().max() <= 1e-5 * own.abs().max()) == has_layers
    again: dict[str, torch.Tensor] = {}
    argv = adapter_arguments(
        realdata, tmp_path / "second", SAVE, f"lora.adapter_path={adapter}", "max_steps=1"
    )
    second = run_here(argv, start_of(again), recipe=LORA)
    assert second.code == 0, second.said
    assert all(torch.equal(again[name], held[f"base_model.model.{name}"]) for name in NAMES)
    assert (
        "extra parameters: 20,480 numbers are read: model.layers.*.mlp.extra.weight (5)"
        in second.said
    )


def test_a_trained_layer_that_no_optimizer_has_is_refused(
    realdata: Path, tmp_path: Path, copies: Any, monkeypatch: Any
) -> None:
    from recipe_lib.adapters import get_adapter_parameters

    copies(LORA, "add_adapters")
    module = import_recipe_module(LORA)

    def setup_optimizer(self: Any) -> None:
        self.optimizer = torch.optim.SGD(get_adapter_parameters(self.model).values(), lr=0.1)

    monkeypatch.setattr(module.LoraFinetune, "setup_optimizer", setup_optimizer)
    run = run_here(adapter_arguments(realdata, tmp_path / "run", SAVE), recipe=LORA)
    assert run.code == 2
    assert f"{NAMES[0]}: requires a gradient, and no optimizer has it" in run.said[-1]


def test_forgotten_adapters_are_refused(realdata: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(import_recipe_module(LORA), "init_adapters", lambda *_: None)
    run = run_here(adapter_arguments(realdata, tmp_path / "run"), recipe=LORA)
    assert run.code == 2
    assert (
        "lora_A.weight and" in run.said[-1]
        and "more have no values after load_weights" in run.said[-1]
    )


def test_preferences(realdata: Path, tmp_path: Path, copies: Any) -> None:
    """A reference that would move is refused; a frozen copy begins as the model, so that no reward
    differs.
    """
    write_pairs(tmp_path)

    def run(name: str, *overrides: str) -> Run:
        given = (
            "batch_size=2",
            "dtype=fp32",
            f"model.path={realdata / 'stories260K-hf'}",
            "~model.preset",
        )
        return run_here(
            pair_arguments(tmp_path / "pairs.jsonl", tmp_path / name, *given, *overrides),
            recipe=DPO,
        )

    with pytest.MonkeyPatch.context() as patched:
        module = import_recipe_module(DPO)
        original = module.add_adapters

        def add(model: Any, *others: Any) -> None:
            original(model, *others)
            add_layers(model, torch.float32)

        patched.setattr(module, "add_adapters", add)
        found = run("moving")
        assert (
            found.code == 2 and f"{NAMES[0]}: is trained and part of no adapter" in found.said[-1]
        )
        assert run("free", "dpo.reference_free=true", "max_steps=1").code == 0
    copies(DPO)
    found = run("full", "dpo.trainable=all")
    assert found.code == 0, found.said
    lines = [
        json.loads(line) for line in (tmp_path / "full" / "metrics.jsonl").read_text().splitlines()
    ]
    assert lines[0]["reward_margin"] == 0 and lines[-1]["reward_margin"] != 0


@pytest.mark.slow
def test_models_of_transformers(realdata: Path, tmp_path: Path, copies: Any) -> None:
    """Added layers have no adapter, and are exported and read under their own names."""
    copies(FULL)
    external = "model.implementation=transformers"
    first = run_here(full(realdata, tmp_path / "full", SAVE, external, "max_steps=2"))
    assert first.code == 0, first.said
    written = load_file(tmp_path / "full" / "model" / "model.safetensors")
    assert all(torch.equal(written[name], first.recipe.model.get_parameter(name)) for name in NAMES)
    copies(LORA)
    argv = [
        *adapter_arguments(realdata, tmp_path / "lora", SAVE, external),
        f"model.path={tmp_path}/full/model",
    ]
    found: dict[str, torch.Tensor] = {}
    second = run_here(argv, start_of(found), recipe=LORA)
    assert second.code == 0, second.said
    assert all(torch.equal(found[name], written[name]) for name in NAMES)
    held = load_file(tmp_path / "lora" / "adapter" / "adapter_model.safetensors")
    assert not any("extra" in name and "lora" in name for name in held)


def test_a_model_that_lost_a_part_is_refused(realdata: Path, tmp_path: Path, copies: Any) -> None:
    def wrap(model: Any, dtype: torch.dtype) -> None:
        model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp)

    copies(FULL, change=wrap)
    run = run_here(full(realdata, tmp_path / "run", SAVE))
    assert run.code == 2
    assert (
        "the recipe's model has no model.layers.0.mlp.down_proj.weight and 2 more, which"
        " config.json" in run.said[-1]
    )
