"""Scores at the last tokens of sequences against TRL's RewardTrainer and transformers' classifiers:
losses, accuracy, gradients, however sequences are batched.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from recipe_lib.data import Dataset, StepBatches, make_step
from recipe_lib.errors import CheckpointError, ConfigError, DataError
from recipe_lib.methods.reward.config import RewardConfig
from recipe_lib.methods.reward.items import prepare_items
from recipe_lib.methods.reward.loss import compute_score_loss, compute_score_metrics, compute_scores
from recipe_lib.models import read_config
from recipe_lib.models.decoder import Decoder
from recipe_lib.models.families import build_scored_spec, count_head_labels, make_score_config
from recipe_lib.training.resolve_model import ResolvedModel
from tests.training import labeled

PAIRS = [(5, 4, 6), (2, 9, 1), (7, 1, 3), (3, 3, 3), (1, 6, 8), (4, 2, 5)]
MARGINS = [0.0, 0.5, -0.2, 1.0, 0.0, 0.3]
TEXTS = [(1, 5), (1, 12), (1, 3), (1, 8), (1, 1), (1, 7)]
CLASSES = [0.0, 2.0, 1.0, 1.0, 0.0, 2.0]
LOSSES = {
    "pairs": RewardConfig(),
    "centered": RewardConfig(center_rewards_coefficient=0.05),
    "classes": RewardConfig(loss="classification", num_labels=3),
}


def items(cfg: RewardConfig) -> Dataset:
    if cfg.loss == "classification":
        return labeled.build_sequences(TEXTS, CLASSES).convert_to_scored(labeled.LIMIT)
    return labeled.build_sequences(PAIRS, MARGINS, group=2).convert_to_scored(labeled.LIMIT)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Any, Decoder]]:
    """By number of labels, transformers' model and ours."""
    found = {}
    for labels in (1, 3):
        folder = tmp_path_factory.mktemp(f"scored{labels}")
        theirs = labeled.save_theirs(labels, folder, num_labels=labels)
        spec = build_scored_spec(read_config(folder), str(folder), None)
        assert spec.num_labels == labels
        found[labels] = theirs, labeled.load_ours(spec, folder)
    return found


def step(model: Decoder, cfg: RewardConfig, batches: list[StepBatches]) -> dict[str, float]:
    """What a recipe does with the micro-batches of all ranks, here one after the other; leaves
    gradients.
    """
    count = batches[0].num_items
    model.zero_grad()
    sums = torch.zeros(2 if cfg.loss == "classification" else 4, dtype=torch.float64)
    for batch in (batch for each in batches for batch in each.micro_batches):
        assert batch.targets is not None
        loss, numbers = compute_score_loss(compute_scores(model, batch), batch.targets, cfg)
        (loss / count).backward()
        sums += numbers
    metrics = compute_score_metrics(sums, num_items=count, cfg=cfg)
    return {name: float(value) for name, value in metrics.items()}


def whole_step(model: Decoder, cfg: RewardConfig) -> dict[str, float]:
    slots = list(np.arange(len(PAIRS)).reshape(-1, 1))
    return step(model, cfg, [make_step(items(cfg), slots, 0, 1, len(slots), 1, labeled.PAD)])


@pytest.mark.parametrize("name", ["pairs", "centered"])
def test_rewards_equal_trl(models: Any, name: str, tmp_path: Path) -> None:
    from datasets import Dataset as Rows
    from trl import RewardConfig as TrlConfig
    from trl import RewardTrainer
    from trl.trainer.reward_trainer import DataCollatorForPreference

    cfg, (theirs, ours) = LOSSES[name], models[1]
    given = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": []}
    arguments = TrlConfig(
        str(tmp_path), center_rewards_coefficient=cfg.center_rewards_coefficient, **given
    )
    rows = Rows.from_list([{"chosen": "a b", "rejected": "c"}] * 2)
    trainer = RewardTrainer(
        theirs, arguments, train_dataset=rows, processing_class=labeled.build_tokenizer()
    )
    theirs.config.pad_token_id = labeled.PAD
    dataset = items(cfg)
    ids = [sum(labeled.split_parts(dataset, number), []) for number in range(len(dataset))]
    examples = [
        {"chosen_ids": ids[2 * at], "rejected_ids": ids[2 * at + 1], "margin": margin}
        for at, margin in enumerate(MARGINS)
    ]
    theirs.zero_grad()
    theirs.train()
    loss = trainer.compute_loss(theirs, DataCollatorForPreference(labeled.PAD)(examples))
    loss.backward()
    logged = {key: value[-1] for key, value in trainer._metrics["train"].items()}
    found = whole_step(ours, cfg)
    assert found["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert found["accuracy"] == pytest.approx(logged["accuracy"])
    assert found["reward_margin"] == pytest.approx(logged["margin"], rel=1e-5)
    assert (found["reward_chosen"] + found["reward_rejected"]) / 2 == pytest.approx(
        logged["mean_reward"], rel=1e-5
    )
    labeled.assert_gradients(ours, theirs)


def test_classes_equal_transformers(models: Any) -> None:
    theirs, ours = models[3]
    dataset = items(LOSSES["classes"])
    ids = [
        torch.tensor(sum(labeled.split_parts(dataset, number), []))
        for number in range(len(dataset))
    ]
    tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=labeled.PAD)
    theirs.zero_grad()
    classes = torch.tensor(CLASSES).long()
    expected = theirs(input_ids=tokens, attention_mask=tokens != labeled.PAD, labels=classes)
    expected.loss.backward()
    found = whole_step(ours, LOSSES["classes"])
    right = (expected.logits.argmax(1) == classes).double().mean()
    assert found == {
        "loss": pytest.approx(float(expected.loss.detach()), rel=1e-5),
        "accuracy": pytest.approx(float(right)),
    }
    labeled.assert_gradients(ours, theirs)


@pytest.mark.parametrize("division", ["micro-batches", "ranks", "packed"])
@pytest.mark.parametrize("name", ["centered", "classes"])
def test_however_a_step_is_divided(models: Any, name: str, division: str) -> None:
    cfg = LOSSES[name]
    model, dataset = models[1 if name == "centered" else 3][1].double(), items(cfg)
    expected = whole_step(model, cfg)
    wanted = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    slots = list(np.arange(len(PAIRS)).reshape(-1, 1))
    if division == "ranks":
        batches = [
            make_step(dataset, slots, rank, 3, 1, 2, labeled.PAD, multiple=8) for rank in range(3)
        ]
    elif division == "packed":
        packs = [np.array([0, 3]), np.array([1]), np.array([2, 4, 5])]
        batches = [make_step(dataset, packs, 0, 1, 1, 3, pack_length=64)]
        assert batches[0].micro_batches[2].attention.documents is not None
    else:
        batches = [make_step(dataset, slots, 0, 1, 2, 3, labeled.PAD)]
    assert step(model, cfg, batches) == pytest.approx(expected, rel=1e-10)
    for key, parameter in model.named_parameters():
        assert float((parameter.grad - wanted[key]).norm()) < 1e-10 * float(wanted[key].norm())
    model.float()


def test_a_sequence_has_all_its_ids_up_to_the_limit() -> None:
    dataset = labeled.build_sequences(TEXTS, CLASSES).convert_to_scored(9)
    for number in range(len(dataset)):
        ids = sum(labeled.split_parts(dataset, number), [])[:9]
        row = dataset[number]
        assert row.tokens.tolist() == ids and dataset.lengths[number] == len(ids)
        assert (row.labels != -100).tolist() == [False] * (len(ids) - 1) + [True]
    assert dataset.trained_counts.tolist() == [1] * len(TEXTS)


def settled(
    names: list[str], labels: int = 3, known: list[str] | None = None, validation: Any = None
) -> Any:
    """Of samples of these classes: values and names after they are settled."""

    def classes(found: list[str]) -> Dataset:
        seen = list(dict.fromkeys(found))
        dataset = labeled.build_sequences(
            [(1, 3)] * len(found), [float(seen.index(name)) for name in found]
        )
        dataset.report.classes = seen
        return dataset.convert_to_scored(8)

    special = SimpleNamespace(
        stop_ids={1}, eos_id=1, bos_id=0, pad_id=labeled.PAD, special_texts=(), place="t"
    )
    special.encode_pieces = lambda texts: []
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    if known is not None:
        config = make_score_config(config, known, None) | {
            "architectures": ["LlamaForSequenceClassification"]
        }
    data = SimpleNamespace(
        dataset=classes(names), validation_dataset=validation and classes(validation)
    )
    data.tokenizer = special
    source = ResolvedModel("m", None, config, SimpleNamespace(num_labels=labels))  # type: ignore[arg-type]
    source = prepare_items(data, source, LOSSES["classes"])
    return data, source.config


def test_names_of_classes() -> None:
    data, config = settled(["dog", "cat", "emu", "cat"], validation=["emu", "dog"])
    assert data.dataset.values.tolist() == [
        1,
        0,
        2,
        0,
    ] and data.validation_dataset.values.tolist() == [2, 1]
    assert (
        config["id2label"] == {"0": "cat", "1": "dog", "2": "emu"}
        and config["pad_token_id"] == labeled.PAD
    )
    assert (
        config["problem_type"] == "single_label_classification"
        and count_head_labels(config) is None
    )
    data, config = settled(["2", "0", "1", "0"])
    assert data.dataset.values.tolist() == [2, 0, 1, 0] and config["label2id"]["LABEL_2"] == 2
    data, config = settled(["cat", "dog"], known=["emu", "dog", "cat"])  # a checkpoint's own order
    assert data.dataset.values.tolist() == [2, 1] and count_head_labels(config) == 3


def test_classes_that_cannot_be_are_refused() -> None:
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: settled(["a", "a"]), DataError, r"found one class \(a\) in all samples"),
        (
            lambda: settled(["1", "b", "0"]),
            DataError,
            r"found classes by number \(0\) and by name \(b\)",
        ),
        (
            lambda: settled(["a", "b"]),
            ConfigError,
            r"found 3, and 2 classes in made \(a, b\); set reward.num_labels=2",
        ),
        (
            lambda: settled(["1", "4"]),
            ConfigError,
            r"found 3, and 5 classes in made \(1, 4, counted from 0\); set reward.num_labels=5",
        ),
        (
            lambda: settled(["a", "b", "c"], validation=["d", "a"]),
            DataError,
            r"found the class d, which no training",
        ),
    ]
    for run, error, line in cases:
        with pytest.raises(error, match=line):
            run()


def test_specs_of_scored_models() -> None:
    config = labeled.SHAPE | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 1e-6,
    }
    assert build_scored_spec(config, "here", 2).num_labels == 2
    with pytest.raises(
        CheckpointError, match=r"^here: config.json: has no score head .*; set reward.num_labels to"
    ):
        build_scored_spec(config, "here", None)
    scored = config | {
        "architectures": ["LlamaForSequenceClassification"],
        "id2label": {"0": "a", "1": "b", "2": "c"},
    }
    assert build_scored_spec(scored, "here", None).num_labels == 3
    with pytest.raises(
        CheckpointError,
        match=r"its score head has 3 rows, the config asks for 1; set reward.num_lab",
    ):
        build_scored_spec(scored, "here", 1)
    gemma = {
        "architectures": ["Gemma3TextForSequenceClassification"],
        "model_type": "gemma3_text",
        "hidden_size": 8,
    }
    assert build_scored_spec(config | gemma | {"head_dim": 4}, "here", 2).family == "gemma3"
