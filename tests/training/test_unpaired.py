"""Losses of single answers against TRL's KTOTrainer: the loss, rewards, the KL estimate and
gradients of a step.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from recipe_lib.data import StepBatches, make_step, make_validation_steps
from recipe_lib.data.dataset import Dataset
from recipe_lib.errors import ConfigError
from recipe_lib.methods.dpo.checks import check_labels
from recipe_lib.methods.dpo.config import DpoConfig
from recipe_lib.methods.dpo.loss import (
    compute_single_answer_loss,
    compute_step_metrics,
    estimate_kl,
)
from recipe_lib.models import build_spec, read_config
from recipe_lib.models.decoder import Decoder
from recipe_lib.ops.head_losses import TokenLogProbs
from recipe_lib.training import compute_answer_logps
from tests.training import labeled

LENGTHS = [(5, 4), (2, 9), (7, 1), (3, 3), (1, 6), (4, 12), (6, 5), (2, 7)]
WANTED = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0]
LOSSES = {
    "kto": DpoConfig(loss="kto", beta=0.4),
    "weights": DpoConfig(loss="kto", beta=0.2, desirable_weight=1.3, undesirable_weight=0.7),
    "apo": DpoConfig(loss="apo_zero_unpaired", beta=0.3, undesirable_weight=1.5),
}


def answers() -> Dataset:
    return labeled.build_sequences(LENGTHS, WANTED).convert_to_labeled_answers()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Decoder]]:
    """A policy and a reference, each TRL's and ours."""
    found = {}
    for seed, name in (
        (1, "policy"),
        (0, "reference"),
    ):  # the other way round the estimate is below 0
        folder = tmp_path_factory.mktemp(name)
        theirs = labeled.save_theirs(seed, folder)
        found[name] = (
            theirs,
            labeled.load_ours(build_spec(read_config(folder), str(folder)), folder),
        )
    return found


def log_probs(model: Decoder, batch: Any, cfg: DpoConfig) -> torch.Tensor:
    inputs = (batch.tokens, batch.positions, batch.attention)
    return compute_answer_logps(
        model(*inputs, labels=batch.labels, head_loss=TokenLogProbs(3)),
        batch,
        mean=cfg.takes_mean_logps,
    )


def step(
    policy: Decoder, reference: Decoder, cfg: DpoConfig, batches: list[StepBatches]
) -> dict[str, float]:
    """What a recipe does with the micro-batches of all ranks, here one after the other; leaves
    gradients.
    """
    items = batches[0].num_items
    mismatched = [batch for each in batches for batch in each.mismatched if cfg.loss == "kto"]
    world: Any = SimpleNamespace(device=torch.device("cpu"), all_reduce_sum=lambda total: total)
    kl = None
    if mismatched:
        kl = estimate_kl(
            (log_probs(policy, batch, cfg) for batch in mismatched),
            (log_probs(reference, batch, cfg) for batch in mismatched),
            items,
            world,
        )
    policy.zero_grad()
    sums = torch.zeros(5, dtype=torch.float64)
    for batch in (batch for each in batches for batch in each.micro_batches):
        with torch.no_grad():
            old = log_probs(reference, batch, cfg)
        assert batch.targets is not None
        loss, numbers = compute_single_answer_loss(
            log_probs(policy, batch, cfg), old, batch.targets, kl, cfg
        )
        (loss / items).backward()
        sums += numbers
    metrics = compute_step_metrics(sums, num_items=items, kl=kl, cfg=cfg)
    return {name: float(value) for name, value in metrics.items()}


def trl_step(pair: Any, cfg: DpoConfig, folder: Path) -> dict[str, float]:
    """TRL's of the same tokens, all of them in one batch; leaves gradients."""
    from datasets import Dataset as Rows
    from trl import KTOConfig, KTOTrainer

    arguments = KTOConfig(
        str(folder),
        per_device_train_batch_size=len(LENGTHS),
        loss_type=cfg.loss,
        beta=cfg.beta,
        desirable_weight=cfg.desirable_weight,
        undesirable_weight=cfg.undesirable_weight,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
    )
    rows = Rows.from_list(
        [{"prompt": "a", "completion": " b", "label": bool(at % 2)} for at in range(len(LENGTHS))]
    )
    (policy, _), (reference, _) = pair["policy"], pair["reference"]
    trainer = KTOTrainer(
        policy, reference, arguments, train_dataset=rows, processing_class=labeled.build_tokenizer()
    )
    dataset = answers()
    made = [labeled.split_parts(dataset, number) for number in range(len(dataset))]
    examples = [
        {
            "prompt_ids": prompt,
            "completion_ids": answer,
            "KL_completion_ids": made[at - 1][1],
            "label": wanted > 0,
        }
        for at, ((prompt, answer), wanted) in enumerate(zip(made, WANTED, strict=True))
    ]
    batch = trainer.data_collator(examples)
    policy.zero_grad()
    policy.train()
    loss = trainer.compute_loss(policy, batch)
    loss.backward()
    logged = trainer._metrics["train"]
    names = {
        "rewards/chosen": "reward_chosen",
        "rewards/rejected": "reward_rejected",
        "rewards/margins": "reward_margin",
    }
    found = {own: logged[name][-1] for name, own in names.items()} | {"loss": float(loss.detach())}
    return found | ({"kl": logged["kl"][-1]} if cfg.loss == "kto" else {})


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_equals_trl(pair: Any, name: str, tmp_path: Path) -> None:
    cfg = LOSSES[name]
    expected = trl_step(pair, cfg, tmp_path)
    assert cfg.loss != "kto" or expected["kl"] > 0.1
    policy, reference = pair["policy"][1], pair["reference"][1]
    slots = list(np.arange(len(LENGTHS)).reshape(-1, 1))
    whole = [
        make_step(answers(), slots, 0, 1, len(slots), 1, labeled.PAD, mismatched=labeled.LIMIT)
    ]
    assert step(policy, reference, cfg, whole) == pytest.approx(expected, rel=1e-5)
    labeled.assert_gradients(policy, pair["policy"][0])


def test_the_estimate_is_0_at_the_least(pair: Any) -> None:
    """The other way round the mean difference is below 0."""
    slots = list(np.arange(len(LENGTHS)).reshape(-1, 1))
    whole = [
        make_step(answers(), slots, 0, 1, len(slots), 1, labeled.PAD, mismatched=labeled.LIMIT)
    ]
    assert step(pair["reference"][1], pair["policy"][1], LOSSES["kto"], whole)["kl"] == 0


@pytest.mark.parametrize("division", ["micro-batches", "ranks", "packed"])
def test_however_a_step_is_divided(pair: Any, division: str) -> None:
    """Two ranks of two micro-batches, or packs of two and more samples: the same step."""
    dataset, cfg = answers(), LOSSES["weights"]
    policy, reference = pair["policy"][1].double(), pair["reference"][1].double()
    slots = list(np.arange(len(LENGTHS)).reshape(-1, 1))
    more = {"pad_id": labeled.PAD, "mismatched": labeled.LIMIT}
    expected = step(policy, reference, cfg, [make_step(dataset, slots, 0, 1, 8, 1, **more)])
    wanted = {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}
    if division == "ranks":
        batches = [make_step(dataset, slots, rank, 2, 2, 2, **more) for rank in range(2)]
    elif division == "packed":
        packs = [np.array([0, 1, 2]), np.array([3]), np.array([4, 5]), np.array([6, 7])]
        batches = [make_step(dataset, packs, 0, 1, 2, 2, pack_length=32, multiple=4, **more)]
        assert all(batch.attention.documents is not None for batch in batches[0].mismatched)
    else:
        batches = [make_step(dataset, slots, 0, 1, 1, 8, **more)]
    assert step(policy, reference, cfg, batches) == pytest.approx(expected, rel=1e-10)
    for name, parameter in policy.named_parameters():
        assert float((parameter.grad - wanted[name]).norm()) < 1e-10 * float(wanted[name].norm())
    policy.float()
    reference.float()


def test_mismatched_sequences() -> None:
    """Each prompt with the answer before it, cut at the limit; of a validation the same, whatever
    its batches.
    """
    dataset = answers()
    made = [labeled.split_parts(dataset, number) for number in range(len(dataset))]
    expected = []
    for at, (prompt, _) in enumerate(made):
        ids = [*prompt, *made[at - 1][1]]
        expected.append((ids[:-1][:9], [-100] * (len(prompt) - 1) + made[at - 1][1]))
    slots = list(np.arange(len(LENGTHS)).reshape(-1, 1))
    for steps in (
        [make_step(dataset, slots, 0, 1, 4, 2, labeled.PAD, mismatched=9)],
        list(make_validation_steps(dataset, 0, 1, 3, labeled.PAD, mismatched=9)),
        list(
            make_validation_steps(dataset, 0, 1, 2, labeled.PAD, packing_capacity=32, mismatched=9)
        ),
    ):
        found = []
        for batch in (batch for one in steps for batch in one.mismatched):
            assert batch.sequence_ids is not None and batch.targets is None
            for number in range(batch.num_sequences):
                here = batch.sequence_ids == number
                found.append((batch.tokens[here].tolist(), batch.labels[here].tolist()))
        key = str
        assert sorted(found, key=key) == sorted(
            ((tokens, labels[:9]) for tokens, labels in expected), key=key
        )


def test_pairs_are_taken_apart() -> None:
    pairs = labeled.build_sequences([(3, 2, 4), (2, 5, 1)], [0.0, 0.0], group=2)
    split = pairs.convert_to_labeled_answers()
    assert split.items == 4 and split.values.tolist() == [1, 0, 1, 0] and split.group == 1
    assert [labeled.split_parts(split, number) for number in range(4)] == [
        labeled.split_parts(pairs, at) for at in range(4)
    ]
    assert split.fingerprint != pairs.fingerprint
    assert len(set(split.digests.tolist())) == 4


def test_one_label_and_steps_of_one_sample_are_refused() -> None:
    def data(values: list[float], size: int) -> Any:
        plan = SimpleNamespace(list_slots=lambda step: [np.array([0])] * size)
        return SimpleNamespace(
            dataset=SimpleNamespace(values=np.array(values)), global_batch_size=size, plan=plan
        )

    check_labels(data([1, 0], 2), LOSSES["kto"])
    check_labels(data([1, 0], 1), LOSSES["apo"])
    for values, word in (([1, 1], "true"), ([0, 0], "false")):
        with pytest.raises(
            ConfigError, match=rf"^data.source: found 2 answers, all with the label {word}, .*; add"
        ):
            check_labels(data(values, 2), LOSSES["kto"])
    with pytest.raises(
        ConfigError,
        match=r"^batch_size: found steps of one sample, expected two or more: .*; raise",
    ):
        check_labels(data([1, 0], 1), LOSSES["kto"])
