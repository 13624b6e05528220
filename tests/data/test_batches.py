"""Batches: padded by length, the same rows in a step however it is divided, counts without
communication.
"""

import json

import numpy as np
import pytest
import torch

from recipe_lib.config.schema import DataConfig
from recipe_lib.data import DataPlan, Dataset, build_dataset, make_step, make_validation_steps
from recipe_lib.data.dataset_report import DataReport
from recipe_lib.models import build_meta, init_weights
from tests.data.plans import list_global_rows
from tests.parallel.small_models import build_small_spec

PAD = 5  # a token like any other, on purpose


@pytest.fixture(scope="module")
def dataset(chatml, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    rows = [{"prompt": "the cat" * (n % 7), "completion": f" {n}"} for n in range(37)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return build_dataset(DataConfig(source=str(folder), format="prompt_completion"), chatml, 64)


def unpadded(steps) -> list[tuple[list[int], list[int]]]:
    """Every row of a step as (tokens, labels), in order of rank and micro-batch, without
    padding.
    """
    rows = []
    for step in steps:
        for batch in step.micro_batches:
            for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
                length = (
                    max((at for at, label in enumerate(labels) if label != -100), default=-1) + 1
                )
                rows.append((tokens[:length], labels[:length]))
    return rows


@pytest.mark.parametrize(
    ("ranks", "accumulation", "size"), [(1, 1, 8), (1, 8, 1), (2, 1, 4), (2, 2, 2), (4, 2, 1)]
)
def test_a_step_has_the_same_rows_however_it_is_divided(dataset, ranks, accumulation, size):
    rows = list_global_rows(len(dataset), seed=3, epoch=0, step=1, rows_per_step=8, shuffle=True)
    steps = [
        make_step(
            dataset,
            slots=rows,
            data_rank=rank,
            data_ranks=ranks,
            batch_size=size,
            accumulation=accumulation,
            pad_id=PAD,
        )
        for rank in range(ranks)
    ]
    expected = sorted(
        (dataset[int(i)].tokens.tolist(), dataset[int(i)].labels.tolist()) for i in rows
    )
    assert sorted(unpadded(steps)) == expected
    trained = int(sum(dataset.trained_counts[int(i)] for i in rows))
    for step in steps:
        assert len(step.micro_batches) == accumulation
        assert step.num_label_tokens == trained
        assert step.total_tokens == sum(len(dataset[int(i)].tokens) for i in rows)
    assert sum(int((b.labels != -100).sum()) for s in steps for b in s.micro_batches) == trained
    assert steps[0].padded_tokens == sum(b.tokens.numel() for s in steps for b in s.micro_batches)


def sort_by_length(dataset, slots):
    """Return the slots of a step, the longest first; equal ones in the order of the step."""
    slots = [np.atleast_1d(slot) for slot in slots]
    return sorted(slots, key=lambda slot: dataset.item_lengths[slot].sum(), reverse=True)


def test_micro_batch_m_of_rank_r_takes_the_agreed_rows(dataset):
    rows = list_global_rows(len(dataset), seed=3, epoch=0, step=0, rows_per_step=12, shuffle=True)
    ordered = np.concatenate(sort_by_length(dataset, rows))
    for rank in range(2):
        step = make_step(
            dataset,
            slots=rows,
            data_rank=rank,
            data_ranks=2,
            batch_size=3,
            accumulation=2,
            pad_id=PAD,
        )
        for number, batch in enumerate(step.micro_batches):
            own = ordered[(number * 2 + rank) * 3 :][:3]
            assert [
                t[: len(dataset[int(i)].tokens)]
                for t, i in zip(batch.tokens.tolist(), own, strict=True)
            ] == [dataset[int(i)].tokens.tolist() for i in own]


def test_padding_is_on_the_right_and_has_no_labels(dataset):
    rows = list_global_rows(len(dataset), seed=0, epoch=0, step=0, rows_per_step=4, shuffle=False)
    (batch,) = make_step(
        dataset, slots=rows, data_rank=0, data_ranks=1, batch_size=4, accumulation=1, pad_id=PAD
    ).micro_batches
    assert batch.tokens.dtype == batch.labels.dtype == torch.int64
    assert batch.positions is None and batch.attention.documents is None
    assert batch.tokens.shape == batch.labels.shape == (4, max(dataset.lengths[:4]))
    for at, (row,) in enumerate(sort_by_length(dataset, rows)):
        length = dataset.lengths[row]
        assert (batch.tokens[at, length:] == PAD).all() and (
            batch.labels[at, length:] == -100
        ).all()
        assert (batch.tokens[at, :length] == torch.from_numpy(dataset[row].tokens.copy())).all()


def test_rows_of_a_micro_batch_are_about_as_long(dataset):
    rows = list_global_rows(len(dataset), seed=3, epoch=0, step=0, rows_per_step=24, shuffle=True)
    steps = [
        make_step(dataset, slots=rows, data_rank=rank, data_ranks=2, batch_size=3, accumulation=4)
        for rank in range(2)
    ]
    widths = [step.micro_batches[number].tokens.shape[1] for number in range(4) for step in steps]
    assert widths == sorted(widths, reverse=True)
    lengths = np.sort(dataset.lengths[np.concatenate([np.atleast_1d(row) for row in rows])])
    assert [step.padded_tokens for step in steps] == [3 * lengths[2::3].sum()] * 2
    in_order = dataset.lengths[rows].reshape(8, 3).max(axis=1).sum() * 3
    assert steps[0].padded_tokens < 0.8 * in_order


def test_a_token_that_is_the_pad_id_is_trained(dataset):
    label = int(dataset[0].labels[-1])
    (batch,) = make_step(
        dataset,
        slots=list_global_rows(
            len(dataset), seed=0, epoch=0, step=0, rows_per_step=4, shuffle=False
        ),
        data_rank=0,
        data_ranks=1,
        batch_size=4,
        accumulation=1,
        pad_id=label,
    ).micro_batches
    assert (batch.labels[0] == label).sum() == (dataset[0].labels == label).sum() > 0


@pytest.mark.parametrize(("ranks", "size"), [(1, 5), (2, 4), (3, 4), (4, 16), (2, 1)])
def test_validation_sees_every_row_once(dataset, ranks, size):
    by_rank = [
        list(
            make_validation_steps(
                dataset, data_rank=rank, data_ranks=ranks, batch_size=size, pad_id=PAD
            )
        )
        for rank in range(ranks)
    ]
    assert len({len(steps) for steps in by_rank}) == 1
    seen = [row for steps in by_rank for row in unpadded(steps) if row[0]]
    assert sorted(seen) == sorted(
        (row.tokens.tolist(), row.labels.tolist()) for row in map(dataset.__getitem__, range(37))
    )
    for steps in zip(*by_rank, strict=True):
        counted = sum(int((b.labels != -100).sum()) for s in steps for b in s.micro_batches)
        assert {s.num_label_tokens for s in steps} == {counted}
        size = min(size, -(-37 // ranks))  # no more than a rank has
        assert all(
            b.tokens.shape[0] == size and b.tokens.shape[1] >= 1
            for s in steps
            for b in s.micro_batches
        )
        assert steps[0].padded_tokens == sum(
            b.tokens.numel() for s in steps for b in s.micro_batches
        )


def test_the_wrong_number_of_rows_is_our_mistake(dataset):
    with pytest.raises(ValueError, match="5 slots for 1 ranks x 2 micro-batches x 4"):
        make_step(
            dataset,
            slots=list_global_rows(
                len(dataset), seed=0, epoch=0, step=0, rows_per_step=5, shuffle=True
            ),
            data_rank=0,
            data_ranks=1,
            batch_size=4,
            accumulation=2,
        )


def test_moving_keeps_what_there_is(dataset):
    step = make_step(
        dataset,
        slots=list_global_rows(
            len(dataset), seed=0, epoch=0, step=0, rows_per_step=4, shuffle=True
        ),
        data_rank=0,
        data_ranks=1,
        batch_size=4,
        accumulation=1,
    ).to("meta")
    assert (
        step.micro_batches[0].tokens.device.type
        == step.micro_batches[0].labels.device.type
        == "meta"
    )
    assert step.micro_batches[0].attention.documents is None and step.num_label_tokens > 0


def made_dataset(rows: int, group: int = 1, longest: int = 16, seed: int = 0) -> Dataset:
    """Random rows; about half of the targets are trained, and at least the last."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(2, longest + 2, rows)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    ids = draw.integers(0, 512, offsets[-1]).astype(np.int32)
    trained = draw.integers(0, 2, offsets[-1]).astype(np.uint8)
    trained[offsets[:-1]], trained[offsets[1:] - 1] = 0, 1
    return Dataset(
        ids,
        offsets=offsets,
        trained=trained,
        report=DataReport("made", "text", longest),
        settings={},
        group=group,
    )


def documents(batch) -> list[tuple[list[int], list[int], list[int]]]:
    """(tokens, labels, positions) of each document that has a label, as attention and positions
    have it.
    """
    found = []
    for row in range(len(batch.tokens)):
        for number in range(int(batch.attention.documents[row].max()) + 1):
            inside = batch.attention.documents[row] == number
            part = [
                tensor[row][inside].tolist()
                for tensor in (batch.tokens, batch.labels, batch.positions)
            ]
            if any(label != -100 for label in part[1]):
                found.append(tuple(part))
    return found


@pytest.mark.parametrize(("ranks", "accumulation", "size"), [(1, 1, 4), (2, 2, 1), (4, 1, 1)])
def test_packed_rows_hold_their_documents_one_behind_the_other(ranks, accumulation, size):
    rows = made_dataset(60)
    plan = DataPlan(rows, seed=1, slots_per_step=4, shuffle=True, packing_capacity=40)
    slots = plan.list_slots(2)
    steps = [
        make_step(
            rows,
            slots=slots,
            data_rank=rank,
            data_ranks=ranks,
            batch_size=size,
            accumulation=accumulation,
            pad_id=PAD,
            multiple=8,
            pack_length=plan.get_pack_length(2),
        )
        for rank in range(ranks)
    ]
    found = [
        document for step in steps for batch in step.micro_batches for document in documents(batch)
    ]
    expected = [
        (
            rows[item].tokens.tolist(),
            rows[item].labels.tolist(),
            list(range(len(rows[item].tokens))),
        )
        for item in np.concatenate(slots).tolist()
    ]
    assert sorted(found) == sorted(expected) and len(found) > 4
    assert {batch.tokens.shape for step in steps for batch in step.micro_batches} == {(size, 40)}
    assert {step.num_items for step in steps} == {len(expected)}
    assert {step.total_tokens for step in steps} == {sum(len(tokens) for tokens, _, _ in expected)}
    assert {step.padded_tokens for step in steps} == {160}
    assert {step.num_label_tokens for step in steps} == {
        sum(label != -100 for _, labels, _ in expected for label in labels)
    }


def test_a_pack_of_one_is_packed_like_the_others():
    rows = made_dataset(4)
    (batch,) = make_step(
        rows,
        slots=[np.array([0]), np.array([1])],
        data_rank=0,
        data_ranks=1,
        batch_size=2,
        accumulation=1,
        pad_id=PAD,
        pack_length=20,
    ).micro_batches
    assert batch.tokens.shape == (2, 20) and batch.attention.documents is not None
    (batch,) = make_step(
        rows,
        slots=[np.array([0]), np.array([1])],
        data_rank=0,
        data_ranks=1,
        batch_size=2,
        accumulation=1,
        pad_id=PAD,
    ).micro_batches
    assert (
        batch.attention.documents is None and batch.positions is None and batch.sequence_ids is None
    )


def test_rows_are_as_long_as_a_multiple():
    rows = made_dataset(8)
    for multiple in (1, 7, 64):
        step = make_step(
            rows,
            slots=np.arange(8),
            data_rank=0,
            data_ranks=1,
            batch_size=8,
            accumulation=1,
            pad_id=PAD,
            multiple=multiple,
        )
        width = step.micro_batches[0].tokens.shape[1]
        assert width % multiple == 0 and 0 <= width - rows.lengths.max() < multiple
        assert step.padded_tokens == 8 * width


@pytest.fixture(scope="module")
def decoder():
    model = build_meta(build_small_spec(), torch.float64).to_empty(device="cpu")
    init_weights(model, 3, model.spec)
    return model


def loss_of(model, steps) -> torch.Tensor:
    batches = [batch for step in steps for batch in step.micro_batches]
    return sum(
        model(batch.tokens, batch.positions, batch.attention, labels=batch.labels)
        for batch in batches
    )


def test_the_loss_of_packed_rows_is_that_of_the_rows(decoder):
    rows = made_dataset(24)
    plan = DataPlan(rows, seed=0, slots_per_step=4, shuffle=True, packing_capacity=50)
    slots = plan.list_slots(0)
    packed = make_step(
        rows,
        slots=slots,
        data_rank=0,
        data_ranks=1,
        batch_size=2,
        accumulation=2,
        pad_id=PAD,
        multiple=16,
        pack_length=plan.get_pack_length(0),
    )
    items = np.concatenate(slots)
    alone = make_step(
        rows,
        slots=items,
        data_rank=0,
        data_ranks=1,
        batch_size=len(items),
        accumulation=1,
        pad_id=PAD,
    )
    losses, gradients = [], []
    for step in (packed, alone):
        decoder.zero_grad()
        loss = loss_of(decoder, [step])
        loss.backward()
        losses.append(loss.item())
        gradients.append(
            torch.cat([parameter.grad.flatten() for parameter in decoder.parameters()])
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert torch.allclose(*gradients, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("packing", [None, 24])
def test_pairs_stay_together_and_their_tokens_know_their_row(packing):
    pairs = made_dataset(40, group=2)
    plan = DataPlan(pairs, seed=3, slots_per_step=4, shuffle=True, packing_capacity=packing)
    for step in range(plan.count_steps(0)):
        slots = plan.list_slots(step)
        for rank in range(2):
            made = make_step(
                pairs,
                slots=slots,
                data_rank=rank,
                data_ranks=2,
                batch_size=2,
                accumulation=1,
                pad_id=PAD,
                multiple=4,
                pack_length=plan.get_pack_length(step),
            )
            assert made.num_items == sum(map(len, slots))
            (batch,) = made.micro_batches
            assert batch.tokens.shape[0] == (2 if packing else 4)
            ordered = slots if packing else sort_by_length(pairs, slots)
            own = np.concatenate(ordered[2 * rank : 2 * rank + 2])
            assert batch.num_sequences == 2 * len(own)
            for segment in range(batch.num_sequences):
                row = pairs[2 * int(own[segment // 2]) + segment % 2]
                inside = batch.sequence_ids == segment
                assert batch.tokens[inside].tolist() == row.tokens.tolist()
                assert batch.labels[inside].tolist() == row.labels.tolist()
            padding = batch.sequence_ids == -1
            assert (batch.labels[padding] == -100).all() and (batch.tokens[padding] == PAD).all()


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("packing", [None, 20])
@pytest.mark.parametrize(("ranks", "size"), [(1, 5), (2, 4), (3, 2)])
def test_validation_counts_every_item_once(decoder, group, packing, ranks, size):
    rows = made_dataset(22, group)
    by_rank = [
        list(
            make_validation_steps(
                rows,
                data_rank=rank,
                data_ranks=ranks,
                batch_size=size,
                pad_id=PAD,
                multiple=4,
                packing_capacity=packing,
            )
        )
        for rank in range(ranks)
    ]
    assert len({len(steps) for steps in by_rank}) == 1
    assert sum(step.num_items for step in by_rank[0]) == rows.items
    assert sum(step.num_label_tokens for step in by_rank[0]) == rows.trained_counts.sum()
    whole = loss_of(
        decoder,
        [
            make_step(
                rows,
                slots=np.arange(rows.items),
                data_rank=0,
                data_ranks=1,
                batch_size=rows.items,
                accumulation=1,
                pad_id=PAD,
            )
        ],
    )
    assert sum(loss_of(decoder, steps) for steps in by_rank).item() == pytest.approx(
        whole.item(), rel=1e-12
    )
    if packing:
        assert len(by_rank[0]) < -(-rows.items // size // ranks)


def test_packed_batches_move_whole():
    pairs = made_dataset(8, group=2)
    step = make_step(
        pairs,
        slots=[np.array([0, 1]), np.array([2, 3])],
        data_rank=0,
        data_ranks=1,
        batch_size=2,
        accumulation=1,
        pad_id=PAD,
    ).to("meta")
    batch = step.micro_batches[0]
    moved = [batch.tokens, batch.labels, batch.positions, batch.sequence_ids]
    moved += [batch.attention.documents, batch.attention.boundaries]
    assert {tensor.device.type for tensor in moved} == {"meta"}
    assert batch.num_sequences == 8 and step.num_items == 4
