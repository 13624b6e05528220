"""Answers to many prompts at once: of different lengths in a batch, each with its own end and random numbers."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from recipe_lib.generation.sample import prompt_reader, sample_next
from recipe_lib.models.decoder import Decoder
from recipe_lib.models.spec import DecoderSpec, ModelSpec

STOP, LENGTH = "stop", "length"


@dataclass
class Generated:
    """tokens: the answer's ids, without the stop token. ended: `stop` at a stop token, `length` at a limit."""

    tokens: list[int] = field(default_factory=list)
    ended: str = LENGTH


@torch.no_grad()
def generate_batch(
    model: Decoder,
    spec: ModelSpec,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seeds: Sequence[int] | None = None,
    device: torch.device | None = None,
    any_rank: Callable[[bool], bool] | None = None,
) -> list[Generated]:
    """An answer to each prompt (ids, at least one each), as `generate` gives it to that prompt alone.

    An answer ends before a stop id, after `max_new_tokens`, or at `spec.max_positions` with its prompt. temperature,
    top_k, top_p: see `sample_next`; seeds: of each prompt's random numbers (needed above temperature 0), so that an
    answer does not depend on its batch. device: that computes; None: that of the weights. any_rank: whether a bool is
    true on any rank, of a model whose weights are sharded over ranks, which then read as many tokens as each other; a
    rank without prompts reads along. The rotations of longrope depend on the longest row.
    """
    if temperature > 0 and (seeds is None or len(seeds) != len(prompts)):
        raise ValueError(f"{len(prompts)} prompts at temperature {temperature}: a seed for each is needed")
    if not all(prompts):
        raise ValueError("generate_batch needs at least one token in each prompt to begin from")
    device = device or next(model.parameters()).device
    groups = [list(range(len(prompts)))]
    if not isinstance(spec, DecoderSpec) and any_rank is None and not spec.reads_padding(model):
        groups = [[number] for number in groups[0]]
    answers = [Generated() for _ in prompts]
    for numbers in groups:
        rows = [list(prompts[number]) for number in numbers] or [[0]]
        generators = [_generator(device, None if seeds is None else seeds[number]) for number in numbers]

        def choose(logits: Tensor, generators: list[torch.Generator | None] = generators) -> Tensor:
            if temperature == 0 or not generators:
                return sample_next(logits)
            options = (temperature, top_k, top_p)
            parts = zip(logits.split(1), generators, strict=True)
            return torch.cat([sample_next(row, *options, generator) for row, generator in parts])

        room = [min(max_new_tokens, spec.max_positions - len(row)) for row in rows]
        read = prompt_reader(model, spec, [len(row) for row in rows], max(map(len, rows)) + max_new_tokens, device)
        ends = _Ends([answers[number] for number in numbers], room, frozenset(stop_ids))
        _run(read, choose, _left_padded(rows, device), ends, max_new_tokens, any_rank or bool)
    return answers


def _run(
    read: Callable[[Tensor], Tensor],
    choose: Callable[[Tensor], Tensor],
    unread: Tensor,
    ends: "_Ends",
    max_new_tokens: int,
    any_rank: Callable[[bool], bool],
) -> None:
    for _ in range(max_new_tokens):
        if not any_rank(ends.is_open()):
            return
        chosen = choose(read(unread))
        ends.push(chosen.tolist())
        unread = chosen[:, None]


class _Ends:
    """Which answers of a batch still grow."""

    def __init__(self, answers: list[Generated], room: list[int], stop_ids: frozenset[int]) -> None:
        """room: tokens that each may have."""
        self._answers, self._room, self._stop_ids = answers, room, stop_ids
        self._open = [count > 0 for _, count in zip(answers, room, strict=False)]

    def is_open(self) -> bool:
        """Whether any does."""
        return any(self._open)

    def push(self, tokens: list[int]) -> None:
        """The next token of each row; those of answers that have ended are not looked at."""
        for row, answer in enumerate(self._answers):
            if not self._open[row]:
                continue
            if tokens[row] in self._stop_ids:
                answer.ended, self._open[row] = STOP, False
                continue
            answer.tokens.append(tokens[row])
            self._open[row] = len(answer.tokens) < self._room[row]


def _generator(device: torch.device, seed: int | None) -> torch.Generator | None:
    return None if seed is None else torch.Generator(device).manual_seed(seed)


def _left_padded(rows: list[list[int]], device: torch.device) -> Tensor:
    """`[b, s]`; what stands in the padding is read by nothing."""
    longest = max(map(len, rows))
    return torch.tensor([[row[0]] * (longest - len(row)) + row for row in rows], device=device)
