"""Checks of data against the model that is to read it."""

from recipe_lib.data.dataset import Dataset, overlap
from recipe_lib.data.samples import TextTokenizer
from recipe_lib.errors import DataError
from recipe_lib.logs import warn_on_first_rank


def check_vocabulary(tokenizer: TextTokenizer, model_vocab_size: int, *datasets: Dataset | None) -> None:
    """Raises DataError if the tokenizer, or a sequence of the datasets, has an id that the model has no embedding for.

    A special token beyond the model's vocabulary is let pass while no sequence uses it: real checkpoints list some.
    """
    place = tokenizer.place
    needed = max([tokenizer.ordinary_size - 1, *(i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None)])
    if needed >= model_vocab_size:
        raise DataError(
            f"{place}: found {needed + 1} tokens, expected at most the model's vocab_size={model_vocab_size}; "
            "set tokenizer.path to the tokenizer of this model"
        )
    for dataset in datasets:
        if dataset is not None and dataset.largest_id >= model_vocab_size:
            token = tokenizer.token_bytes(dataset.largest_id).decode(errors="replace")
            raise DataError(
                f"{dataset.report.source}: found the token {token!r} with the id {dataset.largest_id}, expected ids "
                f"below the model's vocab_size={model_vocab_size}; use a chat template whose tokens the model has"
            )


def warn_of_positions(max_positions: int, *datasets: Dataset | None) -> None:
    """Warns of sequences that are longer than what the model was made for: they run, at positions that it never saw."""
    for dataset in datasets:
        longer = int((dataset.lengths > max_positions).sum()) if dataset is not None else 0
        if dataset is not None and longer:
            warn_on_first_rank(
                "warning: %d of %d %s of %s are longer than the %d tokens that the model was made for "
                "(max_position_embeddings in its config.json); max_seq_len=%d cuts them",
                longer, len(dataset), _sequences(dataset), dataset.report.source, max_positions, max_positions,
            )  # fmt: skip


def warn_of_overlap(training: Dataset, validation: Dataset | None) -> None:
    """Warns of validation sequences that are trained on, token by token the same: their loss says nothing of new
    text."""
    if validation is None:
        return
    shared = overlap(training, validation)
    if len(shared):
        warn_on_first_rank(
            "warning: %d of %d validation %ss of %s are training %ss as well (first: %s); take them out of one",
            len(shared), validation.items, validation.report.noun, validation.report.source, validation.report.noun,
            validation.place(int(shared[0])),
        )  # fmt: skip


def _sequences(dataset: Dataset) -> str:
    return "sequences" if dataset.group == 1 else f"sequences (two for each of {dataset.items} pairs)"
