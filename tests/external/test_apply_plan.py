"""Models of transformers that the Trainer of transformers trains by inferred plans: one process and
two ranks alike.
"""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from recipe_lib.errors import ConfigError, SetupError
from recipe_lib.external.apply_plan import infer_tensor_plan, seen_as_one_process
from tests.distributed.ranks import run_ranks

ROOT = Path(__file__).parent.parent.parent

SMALL = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None}  # fmt: skip
# qwen3 has norms of heads, whose gradients are parts of a sum, and an uneven vocabulary; phi3 has
# fused matrices, each cut within its parts.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": SMALL | {"head_dim": 8},
    "phi3": SMALL | {"vocab_size": 100},
}
STEPS = 6


def model_of(kind: str, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **MODELS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def rows() -> list[dict[str, Tensor]]:
    tokens = torch.randint(3, 101, (8, 12), generator=torch.Generator().manual_seed(1))
    return [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in tokens
    ]


def batch() -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows()[:2]]) for name in rows()[0]}


def trained(model: Any, folder: Path) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of the steps that a Trainer does."""
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2,
        max_grad_norm=0.5, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=rows())
    trainer.train()
    steps = [line for line in trainer.state.log_history if "grad_norm" in line]
    return [line["loss"] for line in steps], [float(line["grad_norm"]) for line in steps]


def shared(kind: str, folder: str) -> dict[str, Any]:
    """One rank's view of a model that a Trainer has trained on all of them."""
    model, mesh = model_of(kind), init_device_mesh("cpu", (dist.get_world_size(),))
    plan = infer_tensor_plan(model, batch(), mesh.size(), tokens=True)
    assert plan.sharding.shared_tokens
    plan.apply(model, mesh)
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    with seen_as_one_process():
        losses, norms = trained(model, Path(folder))
    plan.save_pretrained(model, folder)
    state = plan.full_state_dict(model)
    plan.load_full_state_dict(model, model_of(kind).state_dict())
    again = plan.full_state_dict(model)
    return {"losses": losses, "norms": norms, "state": state, "again": again, "held": held}


@pytest.mark.slow
def test_a_trainer_on_two_ranks_is_one_of_one_process(tmp_path: Path) -> None:
    """Losses, gradient norms and final weights in float64; and the folder that it writes is one of
    transformers'.
    """
    model = model_of("qwen3")
    losses, norms = trained(model, tmp_path / "one")
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.3 and max(norms) > 0.5
    first, second = run_ranks(shared, 2, "qwen3", str(tmp_path / "two"), timeout=300)
    assert first["losses"] == second["losses"]
    assert first["losses"] == pytest.approx(losses, rel=1e-9)
    assert first["norms"] == pytest.approx(norms, rel=1e-6)
    assert first["held"] < 0.6 * sum(parameter.numel() for parameter in model.parameters())
    assert not second["state"]
    wanted = model.state_dict()
    began = model_of("qwen3").state_dict()
    assert first["state"].keys() == wanted.keys()
    for name, value in wanted.items():
        assert (first["state"][name] - value).abs().max() < 1e-9, name
        assert torch.equal(first["again"][name], began[name]), name
    opened, found = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "two", output_loading_info=True, dtype=torch.float64
    )
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        logits = [each(input_ids=batch()["input_ids"]).logits for each in (opened, model.eval())]
    assert (logits[0] - logits[1]).abs().max() < 1e-8


def round_trip_renamed() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the state gathered from ranks, and again after it was loaded into zeroed parameters.

    A hook of the model gives its fused matrices names that no parameter has.
    """
    model = model_of("phi3")

    def rename(module: Any, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
        for name in [name for name in state if "gate_up_proj" in name]:
            state[name.replace("gate_up_proj", "gate_and_up")] = state.pop(name)

    model._register_state_dict_hook(rename)
    plan = infer_tensor_plan(model, torch.randint(3, 100, (2, 12)), 2, tokens=False)
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    plan.apply(model, init_device_mesh("cpu", (2,)))
    state = plan.full_state_dict(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    plan.load_full_state_dict(model, whole)
    return state, plan.full_state_dict(model)


def test_fused_matrices_that_a_hook_renames_are_gathered_in_order() -> None:
    """The parameter says how its rows are cut, not the name that the state has it under."""
    (state, loaded_state), _ = run_ranks(round_trip_renamed, 2, timeout=300)
    whole = model_of("phi3").state_dict()
    assert len(state) == len(whole)
    for name, value in whole.items():
        renamed = name.replace("gate_up_proj", "gate_and_up")
        assert torch.equal(state[renamed], value), name
        assert torch.equal(loaded_state[renamed], value), name


@pytest.mark.slow
def test_the_documented_script_runs(tmp_path: Path) -> None:
    """The script of docs/external_models.md, as it is there, on two ranks."""
    text = (ROOT / "docs" / "external_models.md").read_text()
    (script,) = [
        found
        for found in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        if "infer_tensor_plan" in found
    ]
    model_of("qwen3", torch.float32).save_pretrained(tmp_path / "model")
    (tmp_path / "rows.json").write_text(json.dumps([row["input_ids"].tolist() for row in rows()]))

    def run() -> None:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(script.replace('"model"', f'"{tmp_path}/model"'), "script", "exec"), names)  # noqa: S102

    os.chdir(tmp_path)
    try:
        run_ranks(run, 2, process_group=False, timeout=300)
    finally:
        os.chdir(ROOT)
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("model", "trained")
    )
    assert before.keys() == after.keys()
    assert all((after[name] - value).abs().max() > 1e-5 for name, value in before.items())


def test_a_plan_is_certified_and_a_wrong_one_is_not() -> None:
    """A small model as it is; a larger one on a small copy of its class, whose plan has to be the
    same.
    """
    small = model_of("qwen3", torch.float32)
    large = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("qwen3", **(MODELS["qwen3"] | {"vocab_size": 40_000}))
    )
    for model in (small, large):
        plan = infer_tensor_plan(model, batch(), 2)
        assert plan.legal_sizes == (2,) and plan.certify() == plan.certify(model, 2) > 20
        mistaken = tuple(
            replace(each, gradient="full") if each.dim < 0 else each
            for each in plan.sharding.parameters
        )
        wrong = replace(plan, sharding=replace(plan.sharding, parameters=mistaken))
        with pytest.raises(SetupError, match="tensor plan of Qwen3ForCausalLM.*(q_norm|k_norm)"):
            wrong.certify(model, 2)
    with pytest.raises(
        SetupError, match=r"3 ranks cannot share this plan's axes, expected one of \[2\]"
    ):
        infer_tensor_plan(small, batch(), 2).certify(small, 3)
    mesh: Any = SimpleNamespace(ndim=1, shape=(3,), size=lambda: 3)
    with pytest.raises(
        ConfigError, match=r"found a mesh of \(3,\), expected one dimension of 2 ranks"
    ):
        plan.apply(small, mesh)


def adapted(mesh: Any) -> tuple[float, dict[str, Tensor]]:
    """The norm and the gradients of two backwards of a checkpointed model with PEFT's adapters;
    mesh: None alone.
    """
    import peft

    model = model_of("qwen3")
    torch.manual_seed(1)
    settings = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    found: Any = peft.get_peft_model(model, settings).double()
    if mesh is not None:
        infer_tensor_plan(found, batch(), mesh.size()).apply(found, mesh)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found.train()
    for _ in range(2):
        found(**batch()).loss.backward()
    trained = {
        name: parameter for name, parameter in found.named_parameters() if parameter.requires_grad
    }
    norm = torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
    gradients = {name: parameter.grad for name, parameter in trained.items()}
    if mesh is None:
        return float(norm), gradients
    return float(norm.full_tensor()), {name: each.full_tensor() for name, each in gradients.items()}


@pytest.mark.slow
def test_a_plain_loop_trains_adapters_of_peft() -> None:
    """Two micro-batches of one step, clipped, against one process."""
    norm, gradients = adapted(None)
    (shared, found), _ = run_ranks(lambda: adapted(init_device_mesh("cpu", (2,))), 2)
    assert shared == pytest.approx(norm, rel=1e-6) and len(gradients) == 28
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 1e-6 and (found[name] - gradient).abs().max() < 1e-7, name
