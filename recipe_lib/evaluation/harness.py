"""Run tasks of lm-evaluation-harness (extra `eval`) on our own model object, without an export.

cli/eval_ranks.py calls `run_tasks(build_harness_model(...), tasks)`. Texts become tokens as in the
harness' own class for Hugging Face models: BOS if the tokenizer adds one, the trailing spaces of a
context moved to its continuation, contexts cut on the left to what the model reads.
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
from recipe_lib.training.losses import compute_token_scores

if TYPE_CHECKING:
    from lm_eval.api.model import LM

MAX_NEW_TOKENS = 256  # of an answer, where a task does not say
# Options of a request that `generate_batch` takes too.
_SAMPLING = ("temperature", "top_k", "top_p")


def run_tasks(
    model: "LM",
    tasks: Sequence[str],
    *,
    include_path: str | None,
    num_fewshot: int | None,
    limit: int | None,
) -> dict[str, Any]:
    """Return what the harness reports: task -> `metric,filter` -> number or text.

    include_path: folder of the user's own tasks; None: none. num_fewshot: examples before a
    question; None: as many as the task says. limit: documents of a task; None: all. Raises
    ConfigError for a task that the harness does not know.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include_path, include_defaults=include_path is None)
    # The harness' own tasks are thousands of files. With a folder of one's own they are read only
    # if a name is not found there.
    if any(name not in manager.all_tasks for name in tasks):
        manager = TaskManager(include_path=include_path)
    for name in tasks:
        if name not in manager.all_tasks:
            hint = (
                did_you_mean(name, manager.all_tasks)
                or "; `lm-eval ls tasks` lists them, --include-path adds yours"
            )
            raise ConfigError(f"--lm-eval: unknown task {show(name)}{hint}")
    report = simple_evaluate(
        model,
        tasks=list(tasks),
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=manager,
        log_samples=False,
        bootstrap_iters=1000,
    )
    # The harness returns None on all ranks but the first.
    return {} if report is None else dict(report["results"])


def flatten_metrics(results: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Return the numbers of `run_tasks`' results by (task, metric), without standard errors.

    A metric whose answers went through a filter is called `metric (filter)`.
    """
    rows = {}
    for task, metrics in results.items():
        for key, value in metrics.items():
            name, _, filter_name = key.partition(",")
            is_metric = not name.endswith("_stderr") and name not in ("alias", "sample_len")
            if isinstance(value, int | float) and is_metric:
                label = name if filter_name in ("", "none") else f"{name} ({filter_name})"
                rows[task, label] = float(value)
    return rows


def build_harness_model(model: torch.nn.Module, **options: Any) -> "LM":
    """Return our model as an object of the harness' class. options: arguments of `HarnessMethods`.

    Raises SetupError without the extra `eval`.
    """
    try:
        from lm_eval.api.model import TemplateLM
    except ModuleNotFoundError as error:
        raise SetupError(
            f"--lm-eval: lm-evaluation-harness is not installed; {format_install_line('eval')}"
        ) from error

    # Defined here, as the harness is imported only when a task runs.
    class HarnessModel(HarnessMethods, TemplateLM):
        """Our methods, and the harness' for the rest."""

    return HarnessModel(model, **options)


class HarnessMethods:
    """The methods that the harness' `TemplateLM` leaves to its subclasses, under its names.

    Likelihoods come from `score_continuations`, answers from `generate_batch`.
    """

    tokenizer_name = "tune-recipes"  # part of the harness' key for cached requests

    def __init__(
        self,
        model: torch.nn.Module,
        spec: ModelSpec,
        tokenizer: Tokenizer,
        device: torch.device,
        batch_size: int,
        seed: int,
    ) -> None:
        """Keep model and settings. seed: root of each request's seed. batch_size: of requests."""
        super().__init__()
        self._model: Any = model
        self._spec = spec
        self._tokenizer = tokenizer
        self._device = device
        self._batch_size = batch_size
        self._seed = seed

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
        if add_special_tokens is None:  # a chat template may have written BOS already
            prefix = self._tokenizer.decode([self.prefix_token_id])
            add_special_tokens = not string.startswith(prefix)
        add_bos = self._tokenizer.add_bos_by_default and add_special_tokens
        return self._tokenizer.encode(string, add_bos=add_bos, allow_special=True)

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        # requests: (texts or None, ids of the context, ids of the continuation) of each.
        return score_continuations(
            self._model,
            [(list(context), list(continuation)) for _, context, continuation in requests],
            max_length=self._spec.max_positions,
            device=self._device,
            batch_size=self._batch_size,
        )

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, summed over windows of max_positions."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows = []
        owners = []  # of each window, the number of its text
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
        """Return the text of each answer, up to the first of the request's texts that end it.

        Raises ConfigError for an answer that leaves the prompt no room.
        """
        from lm_eval.models.utils import (
            handle_stop_sequences,
            normalize_gen_kwargs,
            postprocess_generated_text,
        )

        end = self._tokenizer.decode([self.eot_token_id])
        answers: list[str] = [""] * len(requests)
        request_options = [dict(request.args[1]) for request in requests]
        for request_numbers, options in _batch_by_options(request_options, self._batch_size):
            kwargs = normalize_gen_kwargs(options, MAX_NEW_TOKENS)
            until = handle_stop_sequences(kwargs.get("until"), eos=end)
            count = int(kwargs["max_gen_toks"])
            sampling: dict[str, Any] = {}  # empty: the likeliest tokens
            if kwargs["do_sample"]:
                sampling = {name: kwargs[name] for name in _SAMPLING if kwargs.get(name)}
            room = self._spec.max_positions - count  # tokens of a prompt; it keeps its end
            if room < 1:
                raise ConfigError(
                    f"--lm-eval: an answer of {count} tokens: the model reads"
                    f" {self._spec.max_positions}"
                )
            # Answers go to the stop token; the texts that end them are cut off afterwards.
            generated = generate_batch(
                self._model,
                self._spec,
                [self.tok_encode(requests[number].args[0])[-room:] for number in request_numbers],
                max_new_tokens=count,
                stop_ids={self.eot_token_id},
                device=self._device,
                seeds=[derive_seed(self._seed, f"answer {number}") for number in request_numbers],
                **sampling,
            )
            for number, answer in zip(request_numbers, generated, strict=True):
                text = self._tokenizer.decode(answer.tokens, skip_special=True)
                answers[number] = postprocess_generated_text(text, stop=until, think_end_token=None)
        return answers


def _batch_by_options(
    options: list[dict[str, Any]], batch_size: int
) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Yield batches of requests with the same options: their numbers, and the options."""
    groups: dict[str, list[int]] = {}  # the options as text, for a key -> numbers of requests
    for number, request_options in enumerate(options):
        groups.setdefault(repr(sorted(request_options.items())), []).append(number)
    for request_numbers in groups.values():
        for start in range(0, len(request_numbers), batch_size):
            yield request_numbers[start : start + batch_size], options[request_numbers[0]]


@torch.no_grad()
def score_continuations(
    model: torch.nn.Module,
    pairs: Sequence[tuple[list[int], list[int]]],
    max_length: int,
    device: torch.device,
    batch_size: int,
) -> list[tuple[float, bool]]:
    """Return the log-likelihood (nats) of each continuation, and True if greedy decoding gives it.

    pairs: ids of context and continuation. max_length: tokens that the model reads; a longer
    context loses its beginning. batch_size: pairs.
    """
    results: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
    # Pairs of like length together, so that a batch has little padding; the longest first.
    order = sorted(range(len(pairs)), key=lambda number: -sum(map(len, pairs[number])))
    for start in range(0, len(order), batch_size):
        pair_numbers = order[start : start + batch_size]
        inputs = []
        targets = []
        for number in pair_numbers:
            context, continuation = pairs[number]
            # The last token is a label alone, so one more than the model reads.
            ids = (context + continuation)[-(max_length + 1) :]
            count = min(len(continuation), len(ids) - 1)
            ignored = [IGNORED] * (len(ids) - 1 - count)
            inputs.append(torch.tensor(ids[:-1], dtype=torch.int64))
            targets.append(torch.tensor(ignored + ids[len(ids) - count :], dtype=torch.int64))
        tokens = pad_sequence(inputs, batch_first=True).to(device)
        labels = pad_sequence(targets, batch_first=True, padding_value=IGNORED).to(device)
        # [b, s, 2]: log-likelihood of the label, and of the likeliest token.
        scores = compute_token_scores(model, tokens, labels)
        log_likelihoods = scores[..., 0].double().sum(dim=1)
        # Labels that are as likely as the likeliest token.
        is_greedy = ((scores[..., 0] == scores[..., 1]) | (labels == IGNORED)).all(dim=1)
        rows = zip(pair_numbers, log_likelihoods.tolist(), is_greedy.tolist(), strict=True)
        for number, log_likelihood, greedy in rows:
            results[number] = (log_likelihood, greedy)
    return results
