"""The chunked divergence against plain torch on full logits in float64: values, gradients, memory;
the k likeliest tokens, padded vocabularies, adapters, and ranks that share the vocabulary.
"""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from recipe_lib.errors import SetupError
from recipe_lib.ops.distillation import Distillation, Divergence, TeacherStates
from recipe_lib.ops.gathered import Group
from recipe_lib.ops.head_losses import OutputAdapter, makes_gradients_in_forward, run_head_loss
from tests.distributed.ranks import run_ranks
from tests.ops.test_cross_entropy import LiveBytes, relative

ROWS = 2
LENGTH = 12
D = 16
TEACHER_D = 20
V = 64
KINDS = ("forward_kl", "reverse_kl", "jensen_shannon")


class Heads:
    """A student's and a teacher's hidden states, weights and biases, and labels with some
    ignored.
    """

    def __init__(
        self, student: int = V, teacher: int = V, dtype: torch.dtype = torch.float64
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        draw = partial(torch.randn, generator=generator, dtype=torch.float64)
        self.hidden = draw(ROWS, LENGTH, D).to(dtype).requires_grad_()
        self.weight = draw(student, D).mul(0.5).to(dtype).requires_grad_()
        self.bias = draw(student).to(dtype).requires_grad_()
        self.of_teacher = draw(ROWS, LENGTH, TEACHER_D).to(dtype)
        self.teacher_weight, self.teacher_bias = (
            draw(teacher, TEACHER_D).mul(0.5).to(dtype),
            draw(teacher).to(dtype),
        )
        self.labels = torch.randint(0, min(student, teacher), (ROWS, LENGTH), generator=generator)
        self.labels[:, ::4] = -100

    def states(
        self, hidden: Tensor | None = None, weight: Tensor | None = None, **head: Any
    ) -> TeacherStates:
        weight = self.teacher_weight if weight is None else weight

        def run(hidden: Tensor, *, labels: Tensor, head_loss: Any) -> Tensor:
            return head_loss(hidden, weight, labels, **head)

        return TeacherStates(self.of_teacher if hidden is None else hidden, run, self.labels)


def capped(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else cap * torch.tanh(logits / cap)


def plain(
    student: Tensor, teacher: Tensor, labels: Tensor, divergence: Divergence, weight: float
) -> Tensor:
    """The loss of logits `[b, s, v]`, capped already, by the definitions; student's and teacher's
    may differ in v.
    """
    common = min(student.shape[-1], teacher.shape[-1])
    q, p = (
        (each[..., :common] / divergence.temperature).softmax(-1) for each in (student, teacher)
    )
    if divergence.kind == "forward_kl":
        found = (p * (p.log() - q.log())).sum(-1)
    elif divergence.kind == "reverse_kl":
        found = (q * (q.log() - p.log())).sum(-1)
    else:
        beta = divergence.beta
        mixture = beta * p + (1 - beta) * q
        found = beta * (p * (p / mixture).log()).sum(-1) + (1 - beta) * (
            q * (q / mixture).log()
        ).sum(-1)
    wanted = labels != -100
    tokens = F.cross_entropy(
        student.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    return weight * divergence.temperature**2 * found[wanted].sum() + (1 - weight) * tokens


def assert_equal(
    ours: Tensor, wanted: Tensor, leaves: list[Tensor], tolerance: float = 1e-12
) -> None:
    assert ours.shape == () and relative(ours, wanted) < tolerance
    gradients = torch.autograd.grad(0.37 * ours, leaves)
    for mine, other in zip(gradients, torch.autograd.grad(0.37 * wanted, leaves), strict=True):
        assert mine.shape == other.shape and relative(mine, other) < tolerance


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "chunks, temperature, weight, caps, biased",
    [
        (1, 1.0, 1.0, (None, None), False),
        (4, 2.0, 0.5, (None, None), True),
        (7, 0.7, 0.3, (3.0, 5.0), True),
        (1000, 4.0, 0.9, (3.0, None), False),
        (4, 1.0, 0.5, (None, 4.0), False),
    ],
)
def test_values_and_gradients_equal_full_logits(
    kind: str, chunks: int, temperature: float, weight: float, caps: tuple[Any, Any], biased: bool
) -> None:
    heads = Heads()
    divergence = Divergence(kind, temperature, 0.3)
    of_student, of_teacher = (
        {"bias": each} if biased else {} for each in (heads.bias, heads.teacher_bias)
    )
    sums = torch.zeros(2, dtype=torch.float64)
    loss = Distillation(
        heads.states(softcap=caps[1], **of_teacher), divergence, weight, chunks, sums
    )
    ours = loss(heads.hidden, heads.weight, heads.labels, softcap=caps[0], **of_student)
    student = capped(F.linear(heads.hidden, heads.weight, heads.bias if biased else None), caps[0])
    teacher = capped(
        F.linear(heads.of_teacher, heads.teacher_weight, of_teacher.get("bias")), caps[1]
    )
    compared = (student, teacher, heads.labels, divergence)
    assert_equal(ours, plain(*compared, weight), [heads.hidden, heads.weight, *of_student.values()])
    parts = torch.stack([plain(*compared, 1.0), plain(*compared, 0.0)])
    assert relative(sums, parts) < 1e-12 and makes_gradients_in_forward(loss)


@pytest.mark.parametrize(
    "kind, beta", [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jensen_shannon", 0.25)]
)
def test_divergences_are_those_of_trl(kind: str, beta: float) -> None:
    """Whose beta of 0 and 1 are the two directions, and which leaves T^2 out."""
    from trl.experimental.gkd import GKDTrainer

    heads = Heads()
    ours = Distillation(heads.states(), Divergence(kind, 1.5, beta), 1.0, 3)(
        heads.hidden, heads.weight, heads.labels
    )
    logits = heads.hidden @ heads.weight.t(), heads.of_teacher @ heads.teacher_weight.t()
    wanted = GKDTrainer.generalized_jsd_loss(
        *logits, heads.labels, beta=beta, temperature=1.5, reduction="sum"
    )
    assert_equal(ours, wanted * 1.5**2, [heads.hidden, heads.weight])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("student, teacher", [(V, V + 8), (V + 8, V)])
def test_a_padded_vocabulary_is_compared_over_the_ids_that_both_have(
    kind: str, student: int, teacher: int
) -> None:
    heads = Heads(student, teacher)
    divergence = Divergence(kind, 1.5)
    ours = Distillation(heads.states(), divergence, 0.5, 4)(
        heads.hidden, heads.weight, heads.labels
    )
    logits = heads.hidden @ heads.weight.t(), heads.of_teacher @ heads.teacher_weight.t()
    assert_equal(ours, plain(*logits, heads.labels, divergence, 0.5), [heads.hidden, heads.weight])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_an_adapted_head_has_the_gradients_of_its_adapter(kind: str, softcap: float | None) -> None:
    heads = Heads()
    frozen, divergence = heads.weight.detach(), Divergence(kind, 2.0)
    first, second = (
        torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((4, D), (V, 4))
    )

    def project(tokens: Tensor, a: Tensor, b: Tensor, frozen_part: Any = None) -> Tensor:
        return tokens @ frozen.t() + tokens @ a.t() @ b.t()

    adapter = OutputAdapter(project, (first, second), lambda tokens: tokens @ frozen.t())
    loss = Distillation(heads.states(), divergence, 0.5, 4)
    ours = loss(heads.hidden, frozen, heads.labels, softcap=softcap, adapter=adapter)
    logits = (
        capped(project(heads.hidden, first, second), softcap),
        heads.of_teacher @ heads.teacher_weight.t(),
    )
    assert_equal(ours, plain(*logits, heads.labels, divergence, 0.5), [heads.hidden, first, second])


def test_a_frozen_weight_and_a_validation_keep_nothing() -> None:
    heads = Heads()
    loss = Distillation(heads.states(), Divergence(), 0.5, 4)
    ours = loss(heads.hidden, heads.weight.detach(), heads.labels)
    with LiveBytes() as live:
        without = Distillation(heads.states(), Divergence(), 0.5, 4)(
            heads.hidden.detach(), heads.weight.detach(), heads.labels
        )
        assert live.now <= 64 and torch.equal(ours.detach(), without) and not without.requires_grad
    ours.backward()
    assert heads.hidden.grad is not None
    with pytest.raises(RuntimeError, match="second time"):
        loss_again = loss(heads.hidden, heads.weight, heads.labels)
        torch.autograd.grad(loss_again, heads.hidden, retain_graph=True)
        torch.autograd.grad(loss_again, heads.hidden)


@pytest.mark.parametrize("part", ["finish", "adapter"])
def test_a_teachers_head_with_more_than_a_softcap_and_a_bias_is_refused(part: str) -> None:
    heads = Heads()

    def run(hidden: Tensor, *, labels: Tensor, head_loss: Any) -> Tensor:
        weight = heads.teacher_weight
        options: Any = {part: object()}
        return run_head_loss(head_loss, hidden, weight, labels, **options)

    loss = Distillation(TeacherStates(heads.of_teacher, run, heads.labels), Divergence(), 0.5, 4)
    with pytest.raises(SetupError, match=f"an output head that also has {part}, expected"):
        loss(heads.hidden, heads.weight, heads.labels)


@pytest.mark.parametrize("kind", KINDS)
def test_all_ignored_is_zero_with_a_graph_and_large_logits_stay_finite(kind: str) -> None:
    heads = Heads(dtype=torch.float32)
    nothing = torch.full_like(heads.labels, -100)
    loss = Distillation(heads.states(), Divergence(kind), 0.5, 4)(
        heads.hidden, heads.weight, nothing
    )
    assert not loss and not any(
        grad.any() for grad in torch.autograd.grad(loss, (heads.hidden, heads.weight))
    )
    states = heads.states(heads.of_teacher * 1e3)
    loss = Distillation(states, Divergence(kind), 0.5, 4)(
        heads.hidden * 1e3, heads.weight, heads.labels
    )
    grads = torch.autograd.grad(loss, (heads.hidden, heads.weight))
    assert loss.isfinite() and all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize(
    "kind, cap, tensors",
    [("forward_kl", None, 4), ("reverse_kl", 9.0, 5), ("jensen_shannon", None, 5)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_bytes_are_those_of_a_chunk(
    kind: str, cap: float | None, tensors: int, dtype: torch.dtype
) -> None:
    """So many `[m, v]` in fp32 as the module's text says; of the whole, gradients of hidden states
    and weight alone.
    """
    n, d, v, chunks = 512, 8, 4096, 8
    hidden, weight = (
        torch.randn(1, n, d).to(dtype).requires_grad_(),
        torch.randn(v, d).to(dtype).requires_grad_(),
    )
    labels = torch.randint(0, v, (1, n))
    heads = Heads()
    states = heads.states(torch.randn(1, n, d).to(dtype), torch.randn(v, d).to(dtype), softcap=cap)
    with LiveBytes() as live:
        loss = Distillation(states, Divergence(kind, 2.0), 0.5, chunks)(
            hidden, weight, labels, softcap=cap
        )
        kept = live.now
        loss.backward()
    chunk = n // chunks * v * 4
    narrow = chunk // 2 if dtype == torch.bfloat16 else 0
    gradients = hidden.nbytes + weight.nbytes
    assert kept <= gradients + 64
    assert (
        (tensors - 0.1) * chunk
        < live.peak - gradients
        <= tensors * chunk + narrow + 64 * n
        < n * v * 4
    )
    assert not {(n, v), (1, n, v)} & live.shapes


def share(heads: Heads, kind: str) -> list[Any]:
    """Value and gradients of a rank that has a part of the tokens and of both vocabularies."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = Group(dist.group.WORLD.group_name, size, rank)  # type: ignore[union-attr]

    def part(values: Tensor) -> Tensor:
        return values.detach().chunk(size)[rank].clone()

    hidden, weight, bias = (
        part(each).requires_grad_()
        for each in (heads.hidden.flatten(0, 1), heads.weight, heads.bias)
    )
    states = heads.states(
        part(heads.of_teacher.flatten(0, 1)), part(heads.teacher_weight), group=group
    )
    loss = Distillation(states, Divergence(kind, 1.5), 0.5, 3)
    found = loss(hidden, weight, heads.labels, group=group, bias=bias, softcap=9.0)
    return [found.detach(), *torch.autograd.grad(found, (hidden, weight, bias))]


def test_ranks_that_share_the_vocabulary_have_the_values_of_one() -> None:
    """Vocabularies that are cut at the same places, and at others."""
    cases = [(kind, sizes) for kind in KINDS for sizes in ((V, V), (V, V + 8), (V + 8, V))]

    def share_all() -> list[Any]:
        return [share(Heads(*sizes), kind) for kind, sizes in cases]

    first, second = run_ranks(share_all, 2)
    for number, (kind, sizes) in enumerate(cases):
        heads = Heads(*sizes)
        leaves = (heads.hidden, heads.weight, heads.bias)
        loss = Distillation(heads.states(), Divergence(kind, 1.5), 0.5, 3)
        wanted = loss(*leaves[:2], heads.labels, bias=heads.bias, softcap=9.0)
        assert relative(first[number][0], wanted) < 1e-12 and torch.equal(
            first[number][0], second[number][0]
        )
        gradients = torch.autograd.grad(wanted, leaves)
        for mine, other, whole in zip(
            first[number][1:], second[number][1:], gradients, strict=True
        ):
            assert relative(torch.cat([mine, other]), whole.reshape(-1, *mine.shape[1:])) < 1e-12
