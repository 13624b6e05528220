"""Tasks of lm-evaluation-harness (extra `eval`) on our own model object, without an export.

Texts become tokens as its own class for Hugging Face models makes them: BOS where the tokenizer
begins with one, a context's trailing spaces with what follows it, contexts cut on the left to what
the model reads.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence

from recipe_lib.config.local_files import format_install_line
from recipe_lib.config.suggest import did_you_mean, show
from recipe_lib.errors import ConfigError, SetupError
from recipe_lib.generation.sample import generate_batch
from recipe_lib.models.spec import ModelSpec
from recipe_lib.ops.chunked_heads import IGNORED
from recipe_lib.parallel.world import derive_seed
from recipe_lib.tokenizers import Tokenizer
from recipe_lib.training.validation import token_scores_of

if TYPE_CHECKING:
    from lm_eval.api.model import LM

MAX_NEW_TOKENS = 256  # of an answer, where a task does not say
_DRAWS = ("temperature", "top_k", "top_p")


def run_tasks(
    model: "LM",
    tasks: Sequence[str],
    *,
    include_path: str | None,
    num_fewshot: int | None,
    limit: int | None,
) -> dict[str, Any]:
    """What the harness reports: task -> metric -> number. ConfigError for a task that it does not
    know.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include_path, include_defaults=include_path is None)
    if any(
        name not in manager.all_tasks for name in tasks
    ):  # its own are thousands of files to look at
        manager = TaskManager(include_path=include_path)
    for name in tasks:
        if name not in manager.all_tasks:
            hint = (
                did_you_mean(name, manager.all_tasks)
                or "; `lm-eval ls tasks` lists them, --include-path adds yours"
            )
            raise ConfigError(f"--lm-eval: unknown task {show(name)}{hint}")
    found = simple_evaluate(
        model, tasks=list(tasks), num_fewshot=num_fewshot, limit=limit, task_manager=manager, log_samples=False,
        bootstrap_iters=1000,
    )  # fmt: skip
    return {} if found is None else dict(found["results"])


def flatten_metrics(results: dict[str, Any]) -> dict[tuple[str, str], float]:
    """(task, metric) -> number, of what `run_tasks` gives; standard errors and names are left
    out.
    """
    rows = {}
    for task, metrics in results.items():
        for key, value in metrics.items():
            name, _, way = key.partition(",")
            if (
                isinstance(value, int | float)
                and not name.endswith("_stderr")
                and name not in ("alias", "sample_len")
            ):
                rows[task, name if way in ("", "none") else f"{name} ({way})"] = float(value)
    return rows


def build_harness_model(model: torch.nn.Module, **options: Any) -> "LM":
    """Our model as the harness asks it; options: of `HarnessMethods`. SetupError without the extra
    `eval`.
    """
    try:
        from lm_eval.api.model import TemplateLM
    except ModuleNotFoundError as error:
        raise SetupError(
            f"--lm-eval: lm-evaluation-harness is not installed; {format_install_line('eval')}"
        ) from error

    class HarnessModel(HarnessMethods, TemplateLM):
        """Both."""

    return HarnessModel(model, **options)


class HarnessMethods:
    """What the harness' `TemplateLM` leaves to its subclasses: likelihoods by
    `continuation_scores`, answers by `generate_batch`.
    """

    tokenizer_name = "tune-recipes"

    def __init__(
        self,
        model: torch.nn.Module,
        spec: ModelSpec,
        tokenizer: Tokenizer,
        device: torch.device,
        batch_size: int,
        seed: int,
    ) -> None:
        """seed: root of the random numbers of each request. batch_size: requests at a time."""
        super().__init__()
        self._model: Any = model
        self._spec, self._tokenizer, self._device = spec, tokenizer, device
        self._batch_size, self._seed = batch_size, seed

    @property
    def eot_token_id(self) -> int:
        if self._tokenizer.eos_id is None:
            raise ConfigError(
                "--lm-eval: the tokenizer has no EOS token, which tasks end a text with"
            )
        return self._tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self.eot_token_id if self._tokenizer.bos_id is None else self._tokenizer.bos_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        begins = string.startswith(self._tokenizer.decode([self.prefix_token_id]))
        add_bos = self._tokenizer.add_bos_by_default and (
            not begins if add_special_tokens is None else add_special_tokens
        )
        return self._tokenizer.encode(string, add_bos=add_bos, allow_special=True)

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        pairs = [(list(context), list(continuation)) for _, context, continuation in requests]
        return score_continuations(
            self._model, pairs, self._spec.max_positions, self._device, self._batch_size
        )

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """The log-likelihoods of whole texts, in windows of what the model reads."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows, owners = [], []
        for number, (text,) in enumerate(request.args for request in requests):
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._spec.max_positions,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(number)
        sums = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[owner] += score
        return sums

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Answers up to the texts that end them."""
        from lm_eval.models.utils import (
            handle_stop_sequences,
            normalize_gen_kwargs,
            postprocess_generated_text,
        )

        end = self._tokenizer.decode([self.eot_token_id])
        answers: list[str] = [""] * len(requests)
        for numbers, options in _batch_by_options(
            [dict(request.args[1]) for request in requests], self._batch_size
        ):
            kwargs = normalize_gen_kwargs(options, MAX_NEW_TOKENS)
            until, count = (
                handle_stop_sequences(kwargs.get("until"), eos=end),
                int(kwargs["max_gen_toks"]),
            )
            draws = (
                {name: kwargs[name] for name in _DRAWS if kwargs.get(name)}
                if kwargs["do_sample"]
                else {}
            )
            room = self._spec.max_positions - count
            if room < 1:
                raise ConfigError(
                    f"--lm-eval: an answer of {count} tokens: the model reads"
                    f" {self._spec.max_positions}"
                )
            prompts = [self.tok_encode(requests[number].args[0])[-room:] for number in numbers]
            found = generate_batch(
                self._model, self._spec, prompts, max_new_tokens=count, stop_ids={self.eot_token_id},
                device=self._device, seeds=[derive_seed(self._seed, f"answer {number}") for number in numbers], **draws,
            )  # fmt: skip
            for number, answer in zip(numbers, found, strict=True):
                text = self._tokenizer.decode(answer.tokens, skip_special=True)
                answers[number] = postprocess_generated_text(text, stop=until, think_end_token=None)
        return answers


def _batch_by_options(
    options: list[dict[str, Any]], batch_size: int
) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Batches of requests that are generated in the same way: their numbers, and how."""
    groups: dict[str, list[int]] = {}
    for number, each in enumerate(options):
        groups.setdefault(repr(sorted(each.items())), []).append(number)
    for numbers in groups.values():
        for start in range(0, len(numbers), batch_size):
            yield numbers[start : start + batch_size], options[numbers[0]]


@torch.no_grad()
def score_continuations(
    model: torch.nn.Module,
    pairs: Sequence[tuple[list[int], list[int]]],
    most: int,
    device: torch.device,
    batch_size: int,
) -> list[tuple[float, bool]]:
    """(log-likelihood, whether greedy decoding gives it) of each continuation after its context,
    both ids.

    most: tokens that the model reads; a longer context loses its beginning.
    """
    found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
    order = sorted(
        range(len(pairs)), key=lambda number: -len(pairs[number][0]) - len(pairs[number][1])
    )
    for start in range(0, len(order), batch_size):
        numbers = order[start : start + batch_size]
        whole = [(pairs[number][0] + pairs[number][1])[-(most + 1) :] for number in numbers]
        counts = [
            min(len(pairs[number][1]), len(ids) - 1)
            for number, ids in zip(numbers, whole, strict=True)
        ]
        tokens = pad_sequence(
            [torch.tensor(ids[:-1], dtype=torch.int64) for ids in whole], batch_first=True
        )
        targets = [
            torch.tensor(
                [IGNORED] * (len(ids) - 1 - count) + ids[len(ids) - count :], dtype=torch.int64
            )
            for ids, count in zip(whole, counts, strict=True)
        ]
        labels = pad_sequence(targets, batch_first=True, padding_value=IGNORED).to(device)
        scores = token_scores_of(model, tokens.to(device), labels)
        sums = scores[..., 0].double().sum(dim=1)
        greedy = ((scores[..., 0] == scores[..., 1]) | (labels == IGNORED)).all(dim=1)
        for number, total, right in zip(numbers, sums.tolist(), greedy.tolist(), strict=True):
            found[number] = (total, right)
    return found
