"""Batches: padded by length, the same rows in a step however it is divided, counts without communication."""

import json

import pytest
import torch

from recipe_lib.config.schema import DataConfig
from recipe_lib.data import build_dataset, global_rows, make_step, validation_steps

PAD = 5  # a token like any other, on purpose


@pytest.fixture(scope="module")
def dataset(chatml, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    rows = [{"prompt": "the cat" * (n % 7), "completion": f" {n}"} for n in range(37)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return build_dataset(DataConfig(source=str(folder), format="prompt_completion"), chatml, 64)


def unpadded(steps) -> list[tuple[list[int], list[int]]]:
    """Every row of a step as (tokens, labels), in order of rank and micro-batch, without padding."""
    rows = []
    for step in steps:
        for batch in step.micro_batches:
            for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
                length = max((at for at, label in enumerate(labels) if label != -100), default=-1) + 1
                rows.append((tokens[:length], labels[:length]))
    return rows


@pytest.mark.parametrize(("ranks", "accumulation", "size"), [(1, 1, 8), (1, 8, 1), (2, 1, 4), (2, 2, 2), (4, 2, 1)])
def test_a_step_has_the_same_rows_however_it_is_divided(dataset, ranks, accumulation, size):
    rows = global_rows(len(dataset), 3, 0, 1, 8, True)
    steps = [make_step(dataset, rows, rank, ranks, size, accumulation, PAD) for rank in range(ranks)]
    expected = sorted((dataset[int(i)].tokens.tolist(), dataset[int(i)].labels.tolist()) for i in rows)
    assert sorted(unpadded(steps)) == expected
    trained = sum(dataset.trained_tokens(int(i)) for i in rows)
    for step in steps:
        assert len(step.micro_batches) == accumulation
        assert step.trained_tokens == trained
        assert step.total_tokens == sum(len(dataset[int(i)].tokens) for i in rows)
    assert sum(int((b.labels != -100).sum()) for s in steps for b in s.micro_batches) == trained
    assert steps[0].padded_tokens == sum(b.tokens.numel() for s in steps for b in s.micro_batches)


def test_micro_batch_m_of_rank_r_takes_the_agreed_rows(dataset):
    rows = global_rows(len(dataset), 3, 0, 0, 12, True)
    for rank in range(2):
        step = make_step(dataset, rows, rank, 2, 3, 2, PAD)
        for number, batch in enumerate(step.micro_batches):
            own = rows[(number * 2 + rank) * 3 :][:3]
            assert [t[: len(dataset[int(i)].tokens)] for t, i in zip(batch.tokens.tolist(), own, strict=True)] == [
                dataset[int(i)].tokens.tolist() for i in own
            ]


def test_padding_is_on_the_right_and_has_no_labels(dataset):
    rows = global_rows(len(dataset), 0, 0, 0, 4, False)
    (batch,) = make_step(dataset, rows, 0, 1, 4, 1, PAD).micro_batches
    assert batch.tokens.dtype == batch.labels.dtype == torch.int64
    assert batch.positions is None and batch.attention is None
    assert batch.tokens.shape == batch.labels.shape == (4, max(dataset.lengths[:4]))
    for at, length in enumerate(dataset.lengths[:4]):
        assert (batch.tokens[at, length:] == PAD).all() and (batch.labels[at, length:] == -100).all()
        assert (batch.tokens[at, :length] == torch.from_numpy(dataset[at].tokens)).all()


def test_a_token_that_is_the_pad_id_is_trained(dataset):
    label = int(dataset[0].labels[-1])
    (batch,) = make_step(dataset, global_rows(len(dataset), 0, 0, 0, 4, False), 0, 1, 4, 1, label).micro_batches
    assert (batch.labels[0] == label).sum() == (dataset[0].labels == label).sum() > 0


@pytest.mark.parametrize(("ranks", "size"), [(1, 5), (2, 4), (3, 4), (4, 16), (2, 1)])
def test_validation_sees_every_row_once(dataset, ranks, size):
    by_rank = [list(validation_steps(dataset, rank, ranks, size, PAD)) for rank in range(ranks)]
    assert len({len(steps) for steps in by_rank}) == 1
    seen = [row for steps in by_rank for row in unpadded(steps) if row[0]]
    assert sorted(seen) == sorted(
        (row.tokens.tolist(), row.labels.tolist()) for row in map(dataset.__getitem__, range(37))
    )
    for steps in zip(*by_rank, strict=True):
        counted = sum(int((b.labels != -100).sum()) for s in steps for b in s.micro_batches)
        assert {s.trained_tokens for s in steps} == {counted}
        assert all(b.tokens.shape[0] == size and b.tokens.shape[1] >= 1 for s in steps for b in s.micro_batches)
        assert steps[0].padded_tokens == sum(b.tokens.numel() for s in steps for b in s.micro_batches)


def test_the_wrong_number_of_rows_is_our_mistake(dataset):
    with pytest.raises(ValueError, match="5 rows for 1 ranks x 2 micro-batches x 4"):
        make_step(dataset, global_rows(len(dataset), 0, 0, 0, 5, True), 0, 1, 4, 2)


def test_moving_keeps_what_there_is(dataset):
    step = make_step(dataset, global_rows(len(dataset), 0, 0, 0, 4, True), 0, 1, 4, 1).to("meta")
    assert step.micro_batches[0].tokens.device.type == step.micro_batches[0].labels.device.type == "meta"
    assert step.micro_batches[0].attention is None and step.trained_tokens > 0
