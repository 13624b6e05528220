"""Reward and classification runs: two ranks record what one does, and transformers and PEFT give
exports' sequences the scores that the run's model gives them.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe_lib.cli.main import main
from recipe_lib.methods.reward.loss import pick_sequence_scores
from tests.distributed.ranks import run_ranks
from tests.recipes.labeled_runs import (
    build_arguments,
    list_validation_overrides,
    train_all,
    write,
    write_classes,
    write_margins,
)
from tests.recipes.runs import LORA, PLAIN, REWARD, read_metrics, run_here
from tests.selection import select_cases

PAIRS = ("reward.center_rewards_coefficient=0.1", "lora.rank=4")
ALL = ("reward.trainable=all",)
CLASSES = ("reward.loss=classification", "reward.num_labels=3", "lora.dtype=fp32", "dtype=fp32")
PACKED = "data.packing=true"
ONE = {"pairs": [PAIRS, ALL], "classes": [CLASSES]}
TWO = {
    "pairs": [
        (*PAIRS, "parallel.tensor=2"),
        (*ALL, "parallel.pipeline=2", "gradient_accumulation_steps=2"),
    ],
    "classes": [
        (
            *CLASSES,
            "parallel.fsdp_wrap_policy=memory_efficient",
            "memory.activation_checkpointing=selective",
            "checkpoint.save_every_n_steps=1",
            "checkpoint.keep_last_n=3",
        ),
    ],
}
CASES = [(kind, case) for kind, cases in TWO.items() for case in cases]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Any, Any]:
    """By kind, ranks and overrides."""
    found = {}
    wanted = select_cases(request, "case")
    for kind, write_rows in (("pairs", write_margins), ("classes", write_classes)):
        data = write_rows(tmp_path_factory.mktemp(kind))
        cases = [case for held, case in wanted if held == kind]
        one = [case for case in ONE[kind] if any(set(case) <= set(two) for two in cases)]
        for ranks, chosen in ((1, one), (2, cases)):
            made = (
                run_ranks(train_all, ranks, data, REWARD, ranks, chosen, timeout=300)[0]
                if chosen
                else {}
            )
            found |= {(kind, ranks, case): lines for case, lines in made.items()}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case[1]))
def test_two_ranks_record_what_one_records(results: Any, case: tuple[str, tuple[str, ...]]) -> None:
    kind, overrides = case
    basis = next(one for one in ONE[kind] if set(one) <= set(overrides))
    found, expected = results[kind, 2, overrides], results[kind, 1, basis]
    assert len(found) == len(expected)
    tolerance = {"rel": 1e-4, "abs": 1e-5} if kind == "classes" else {"rel": 1e-8, "abs": 1e-10}
    for mine, wanted in zip(found, expected, strict=True):
        assert mine.keys() == wanted.keys()
        assert mine == pytest.approx(wanted, **tolerance)


def stories(realdata: Path, data: Path, output: Path, *overrides: str) -> list[str]:
    given = (
        "dtype=fp32",
        "batch_size=4",
        "checkpoint.save_model=true",
        f"model.path={realdata / 'stories260K-hf'}",
    )
    words = build_arguments(
        data, output, REWARD, *given, *list_validation_overrides(data), *overrides
    )
    return [word for word in words if not word.startswith(("model.preset", "tokenizer.path"))]


def scores_of(run: Any, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the validation sequences, one at a time and padded together: by the run's model, and by a
    loaded one.
    """
    data = run.recipe.data.validation_dataset
    rows = [torch.from_numpy(data[number].tokens).long() for number in range(len(data))]
    own = [run.recipe.model.eval()(row.unsqueeze(0))[0, -1] for row in rows]
    pad = model.config.pad_token_id
    assert pad is not None and not any(row[-1] == pad for row in rows)
    together = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    found = model.eval()(input_ids=together, attention_mask=mask).logits
    return torch.stack(own), found


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("kind", ["pairs", "classes"])
def test_transformers_opens_the_model_with_equal_scores(
    kind: str, realdata: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    data = write_margins(tmp_path) if kind == "pairs" else write_classes(tmp_path)
    own = ALL if kind == "pairs" else (*ALL, "reward.loss=classification", "reward.num_labels=3")
    with torch.enable_grad():
        first = run_here(stories(realdata, data, tmp_path / "first", *own), recipe=REWARD)
    assert first.code == 0, first.said
    folder = tmp_path / "first" / "model"
    loaded, loading = AutoModelForSequenceClassification.from_pretrained(
        folder, output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    own_scores, found = scores_of(first, loaded)
    assert torch.allclose(found, own_scores, rtol=1e-5, atol=1e-5) and own_scores.abs().max() > 0.01
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert AutoTokenizer.from_pretrained(folder).pad_token_id == config["pad_token_id"]
    if kind == "classes":
        assert loaded.config.id2label == {0: "cat", 1: "dog", 2: "fish"}
    with (
        torch.enable_grad()
    ):  # a checkpoint with a head is gone on with; the number of labels is its own
        more = [word for word in own if "num_labels" not in word]
        argv = stories(
            realdata, data, tmp_path / "second", *more, f"model.path={folder}", "optimizer.lr=1e-12"
        )
        second = run_here([word for word in argv if f"{realdata}" not in word], recipe=REWARD)
    assert second.code == 0, second.said
    assert any("score head:" in line and "read from the checkpoint" in line for line in second.said)
    assert torch.allclose(second.recipe.model.score.weight, loaded.score.weight, atol=1e-6)


@pytest.mark.slow
@torch.no_grad()
def test_peft_opens_the_adapter_and_the_merged_model_is_the_same(
    realdata: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    from peft import AutoPeftModelForSequenceClassification, PeftModel
    from transformers import AutoModelForSequenceClassification

    data, base = write_classes(tmp_path), realdata / "stories260K-hf"
    own = ("reward.loss=classification", "reward.num_labels=3", "lora.merge_on_save=true")
    with torch.enable_grad():
        run = run_here(stories(realdata, data, tmp_path / "run", *own), recipe=REWARD)
    assert run.code == 0, run.said
    adapter = tmp_path / "run" / "adapter"
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS" and config["modules_to_save"] == ["score"]
    frozen = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=3, dtype=torch.float32
    )
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    frozen.config.pad_token_id = merged.config.pad_token_id
    own_scores, found = scores_of(run, PeftModel.from_pretrained(frozen, adapter))
    assert torch.allclose(found, own_scores, rtol=1e-5, atol=1e-5) and own_scores.abs().max() > 0.01
    assert AutoPeftModelForSequenceClassification.from_pretrained(adapter, num_labels=3) is not None
    assert torch.allclose(scores_of(run, merged)[1], own_scores, rtol=1e-5, atol=1e-5)
    assert merged.config.id2label == {0: "cat", 1: "dog", 2: "fish"}
    with torch.enable_grad():
        argv = stories(
            realdata,
            data,
            tmp_path / "more",
            *own[:2],
            f"lora.adapter_path={adapter}",
            "optimizer.lr=1e-12",
        )
        more = run_here(argv, recipe=REWARD)
        assert more.code == 0, more.said
        causal = [
            "--config",
            str(PLAIN),
            f"recipe={LORA}",
            f"model.path={base}",
            f"lora.adapter_path={adapter}",
        ]
        causal += [
            "data.source=examples/demo/train.jsonl",
            "data.format=alpaca",
            "device=cpu",
            "dtype=fp32",
        ]
        refused = run_here([*causal, f"output_dir={tmp_path / 'no'}"], recipe=LORA)
    assert torch.allclose(scores_of(more, merged)[0], own_scores, atol=1e-5)
    assert refused.code == 2 and "is an adapter with a score head, which" in refused.said[-1]
    for verb in (
        ["eval"],
        ["generate", "--prompt", "x"],
        ["export", "--gguf", "f16"],
        ["export", "--quantize", "int8"],
    ):
        what = adapter if verb[0] == "generate" else tmp_path / "run" / "model"
        assert main([*verb, str(what)]) == 2
        (line,) = capsys.readouterr().err.splitlines()[-1:]
        assert "a score head, which predicts no tokens" in line


@torch.no_grad()
def test_an_adapter_of_peft_is_gone_on_with(realdata: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    base = AutoModelForSequenceClassification.from_pretrained(
        realdata / "stories260K-hf", num_labels=1, dtype=torch.float32
    )
    theirs = get_peft_model(
        base,
        LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"]),
    )
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    own = (
        "lora.rank=4",
        "lora.alpha=8",
        "lora.target_modules=[q, up]",
        f"lora.adapter_path={tmp_path / 'theirs'}",
    )
    with torch.enable_grad():
        argv = stories(
            realdata,
            write_margins(tmp_path),
            tmp_path / "run",
            *own,
            "optimizer.lr=1e-12",
            "max_steps=1",
        )
        run = run_here(argv, recipe=REWARD)
    assert run.code == 0, run.said
    base.config.pad_token_id = 1  # BOS
    own_scores, found = scores_of(run, theirs)
    assert torch.allclose(found, own_scores, rtol=1e-5, atol=1e-5) and own_scores.abs().max() > 0.01


def test_a_step_has_the_gradient_of_the_mean_over_its_pairs(tmp_path: Path) -> None:
    """Of a model that has not moved, by a plain backward: two runs that agree say nothing of a
    fault of both.
    """
    still = (
        *ALL,
        "max_steps=1",
        "optimizer.lr=1e-30",
        "batch_size=3",
        "gradient_accumulation_steps=2",
    )
    argv = build_arguments(
        write_margins(tmp_path), tmp_path / "run", REWARD, *still, "clip_grad_norm=null"
    )
    run = run_here(argv, recipe=REWARD)
    assert run.code == 0, run.said
    model = run.recipe.model
    losses = []
    for batch in next(run.recipe.data.batches(0)).micro_batches:
        scores = pick_sequence_scores(model(batch.tokens, batch.positions, batch.attention), batch)[
            :, 0
        ]
        losses.append(-torch.nn.functional.logsigmoid(scores[0::2] - scores[1::2] - batch.targets))
    mean = torch.cat(losses).mean()
    mean.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    (step,) = read_metrics(tmp_path / "run")
    assert step["loss"] == pytest.approx(float(mean), rel=1e-9)
    assert step["grad_norm"] == pytest.approx(float(norm), rel=1e-9)


@pytest.mark.slow
def test_accuracy_rises(realdata: Path, tmp_path: Path) -> None:
    data = write_classes(tmp_path)
    own = (
        "reward.loss=classification",
        "reward.num_labels=3",
        "max_steps=25",
        "epochs=10",
        "validation.every_n_steps=25",
    )
    argv = stories(realdata, data, tmp_path / "run", *own, "checkpoint.save_model=false", PACKED)
    run = run_here([*argv, "lr_scheduler.warmup_steps=0"], recipe=REWARD)
    assert run.code == 0, run.said
    last = read_metrics(tmp_path / "run")[-1]
    assert last["validation_accuracy"] == 1 and last["validation_sequences"] == 7
    batch = next(run.recipe.data.batches(0)).micro_batches[0]
    assert pick_sequence_scores(torch.zeros(*batch.tokens.shape, 3), batch).shape == (
        batch.num_sequences,
        3,
    )


def test_bad_samples(tmp_path: Path) -> None:
    def refused(rows: list[dict[str, Any]], *overrides: str) -> str:
        argv = build_arguments(
            write(tmp_path / "rows.jsonl", rows), tmp_path / "run", REWARD, *overrides
        )
        run = run_here(argv, recipe=REWARD)
        assert run.code == 2, run.said
        return run.said[-1]

    classes = ("reward.loss=classification", "reward.num_labels=2")
    assert "found one class (a) in all samples" in refused(
        [{"text": "x", "label": "a"}] * 3, *classes
    )
    mixed = [{"text": "x", "label": 0}, {"text": "y", "label": "b"}]
    assert "found classes by number (0) and by name (b)" in refused(mixed, *classes)
    lacking = [{"text": "x", "label": 1}, {"text": "y"}]
    assert ":2: found the columns text, expected label (format classification)" in refused(
        lacking, *classes
    )
    assert ".label: found 1.5, expected text or a whole number" in refused(
        [{"text": "x", "label": 1.5}], *classes
    )
    assert "found text and prompt, expected one of" in refused(
        [{"text": "x", "prompt": "y", "label": 1}], *classes
    )
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert ":1: .margin: found no finite number" in refused([pair | {"margin": "large"}])
    assert "found answers without a prompt" in refused([{"chosen": "b", "rejected": "c"}])
    assert "expected those of preference (chosen, rejected)" in refused([{"text": "x", "label": 1}])
