"""KTO runs: two ranks record what one does, with every lever that acts on the model; the preference
recipe's step is TRL's, step by step.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.ranks import run_ranks
from tests.recipes.labeled_runs import (
    build_arguments,
    train_all,
    write,
    write_answers,
    write_margins,
)
from tests.recipes.runs import DPO, read_metrics, run_here
from tests.selection import select_cases

KTO = ("dpo.loss=kto", "dpo.beta=0.5", "dpo.desirable_weight=1.3", "dpo.undesirable_weight=0.8")
ALL = (*KTO, "dpo.trainable=all")
APO = ("dpo.loss=apo_zero_unpaired", "dpo.trainable=all")
PACKED = "data.packing=true"
ONE = [KTO, ALL, APO, (*KTO, PACKED)]
TWO = [
    (*KTO, "gradient_accumulation_steps=2", "memory.activation_checkpointing=full"),
    (*KTO, PACKED, "parallel.context=2", "parallel.fsdp_wrap_policy=memory_efficient"),
    (*APO, "parallel.pipeline=2", "gradient_accumulation_steps=2"),
]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Of one rank, and of two."""
    data, cases = write_answers(tmp_path_factory.mktemp("kto")), select_cases(request, "case")
    return (
        run_ranks(train_all, 1, data, DPO, 1, ONE)[0],
        run_ranks(train_all, 2, data, DPO, 2, cases, timeout=300)[0],
    )


def basis(case: tuple[str, ...]) -> tuple[str, ...]:
    """The run of one rank that is the same."""
    return max((one for one in ONE if set(one) <= set(case)), key=len)


@pytest.mark.slow
@pytest.mark.parametrize("case", TWO, ids=" ".join)
def test_two_ranks_record_what_one_records(results: Any, case: tuple[str, ...]) -> None:
    expected, found = results[0][basis(case)], results[1][case]
    assert len(found) == len(expected)
    for mine, wanted in zip(found, expected, strict=True):
        assert mine.keys() == wanted.keys()
        assert mine == pytest.approx(wanted, rel=1e-8, abs=1e-10)


def test_what_is_recorded(results: Any) -> None:
    first, *_, last = results[0][KTO]
    assert first["loss"] == pytest.approx(0.5 * (1.3 * 3 + 0.8) / 4) or first["kl"] == 0
    assert {"kl", "reward_margin", "validation_kl", "validation_loss"} <= last.keys() | results[0][
        KTO
    ][1].keys()
    assert "kl" not in results[0][APO][0]
    assert any(
        line.get("kl", 0) > 0 or line.get("validation_kl", 0) > 0 for line in results[0][ALL]
    )


def test_pairs_are_taken_apart(tmp_path: Path) -> None:
    argv = build_arguments(
        write_margins(tmp_path),
        tmp_path / "run",
        DPO,
        "dpo.loss=kto",
        "batch_size=4",
        "max_steps=2",
    )
    run = run_here(argv, recipe=DPO)
    assert run.code == 0, run.said
    assert run.recipe.data.dataset.items == 48 and set(run.recipe.data.dataset.values.tolist()) == {
        0,
        1,
    }


def plain_steps(run: Any, folder: Path, steps: int) -> list[float]:
    """The losses of the run's steps by TRL's formulas on transformers' model: a loop of its own
    with torch's AdamW.
    """
    from transformers import LlamaForCausalLM

    policy, reference = (
        LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64) for _ in range(2)
    )
    cfg, data = run.recipe.cfg, run.recipe.data
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=3e-3, betas=tuple(cfg.optimizer.betas), weight_decay=0.0
    )

    def log_prob(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
        logits = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        return sum(logits[len(prompt) - 1 + at, token] for at, token in enumerate(answer))

    def parts(item: int) -> tuple[list[int], list[int]]:
        start, end = data.dataset._offsets[item], data.dataset._offsets[item + 1]
        ids, first = (
            data.dataset.ids[start:end].tolist(),
            data.dataset._trained[start:end].tolist().index(1),
        )
        return ids[:first], ids[first:]

    losses = []
    for step in range(steps):
        chosen = [int(slot[0]) for slot in data.plan.list_slots(step)]
        texts = [parts(item) for item in chosen]
        with torch.no_grad():
            old = [log_prob(reference, *text) for text in texts]
            pairs = [(texts[at][0], texts[at - 1][1]) for at in range(len(texts))]
            kl = sum(log_prob(policy, *pair) - log_prob(reference, *pair) for pair in pairs) / len(
                pairs
            )
            kl = kl.clamp(min=0)
        total = torch.zeros((), dtype=torch.float64)
        for text, before, item in zip(texts, old, chosen, strict=True):
            ratio = log_prob(policy, *text) - before
            if data.dataset.values[item]:
                total = total + 1.3 * (1 - torch.sigmoid(0.5 * (ratio - kl)))
            else:
                total = total + 0.8 * (1 - torch.sigmoid(0.5 * (kl - ratio)))
        loss = total / len(texts)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), cfg.clip_grad_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_steps_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    LlamaForCausalLM(LlamaConfig(**shape, **heads, bos_token_id=0, eos_token_id=1)).save_pretrained(
        tmp_path / "model"
    )
    given = (
        "batch_size=2",
        "gradient_accumulation_steps=2",
        f"model.path={tmp_path / 'model'}",
        "optimizer.weight_decay=0",
    )
    argv = build_arguments(write_answers(tmp_path), tmp_path / "run", DPO, *ALL, *given)
    run = run_here([word for word in argv if not word.startswith("model.preset")], recipe=DPO)
    assert run.code == 0, run.said
    recorded = [line["loss"] for line in read_metrics(tmp_path / "run")]
    assert recorded == pytest.approx(
        plain_steps(run, tmp_path / "model", len(recorded)), rel=1e-6
    )  # rotations of transformers are in fp32


def test_bad_labels(tmp_path: Path) -> None:
    good = {"prompt": "a", "completion": "b", "label": True}

    def refused(rows: list[dict[str, Any]], *overrides: str) -> str:
        argv = build_arguments(
            write(tmp_path / "rows.jsonl", rows), tmp_path / "run", DPO, "dpo.loss=kto", *overrides
        )
        run = run_here(argv, recipe=DPO)
        assert run.code == 2, run.said
        return run.said[-1]

    rows = [good, good | {"label": "maybe"}]
    assert ":2: .label: found 'maybe', expected true or false" in refused(rows)
    assert (
        "expected those of kto (prompt, completion, label), as the loss needs a label; name yours"
        " with data.for" in (refused([{"prompt": "a", "completion": "b"}]))
    )
    assert "found 2 answers, all with the label true" in refused([good, good], "batch_size=2")
    assert ".prompt: found no message of the user" in refused([good | {"prompt": []}])
    both = [good, good | {"label": False}] * 2
    assert "found steps of one sample, expected two or more" in refused(both, "batch_size=1")
