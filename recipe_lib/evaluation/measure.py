"""What a model makes of a dataset, each sequence once, divided among the ranks: likelihoods, and answers."""

import math
from dataclasses import dataclass, field

from torch import nn

from recipe_lib.config.mesh import padded_multiple
from recipe_lib.config.schema import FullFinetuneConfig
from recipe_lib.data import Dataset, validation_steps
from recipe_lib.generation.batch import Generated
from recipe_lib.parallel import Parallel, World
from recipe_lib.training import result_of_each
from recipe_lib.training.sequence_scores import scores_by, sequence_sums


@dataclass(frozen=True)
class SequenceScore:
    """log_likelihood: of the label tokens, a sum in nats. tokens: how many there are. right: how many of them are the
    likeliest token after those before."""

    log_likelihood: float
    tokens: int
    right: int


@dataclass
class Measured:
    """One model. scores, answers: by number of the sequence. metrics: name -> by number."""

    scores: dict[int, SequenceScore] = field(default_factory=dict)
    answers: dict[int, Generated] = field(default_factory=dict)
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)

    def numbers(self) -> dict[str, float]:
        """loss (mean over label tokens), perplexity, token_accuracy, and the means of the metrics."""
        tokens = sum(score.tokens for score in self.scores.values())
        loss = -math.fsum(score.log_likelihood for score in self.scores.values()) / max(1, tokens)
        found = {
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
            "token_accuracy": sum(score.right for score in self.scores.values()) / max(1, tokens),
        }
        return found | {name: math.fsum(each.values()) / len(each) for name, each in self.metrics.items() if each}


def score_sequences(
    model: nn.Module,
    parallel: Parallel,
    dataset: Dataset,
    cfg: FullFinetuneConfig,
    world: World,
    pad_id: int | None,
) -> dict[int, SequenceScore]:
    """The scores of all sequences, on every rank. Collective."""
    batch_size = cfg.validation.batch_size or cfg.batch_size
    steps = validation_steps(
        dataset, world.data_rank, world.data_ranks, batch_size, pad_id, multiple=padded_multiple(cfg)
    )
    own: list[tuple[int, float, int, int]] = []
    for batches in steps:
        micro_batch = batches.to(world.device).micro_batches[0]
        (scores,) = result_of_each(parallel, scores_by(model), [micro_batch])
        if scores is None:  # another stage of the pipeline has them
            continue
        sums = sequence_sums(scores, micro_batch).tolist()
        for row, (likelihood, tokens, right) in zip(micro_batch.sequences, sums, strict=True):
            own += [(number, likelihood, int(tokens), int(right)) for number in row]  # none in a row that fills up
    gathered = sorted(row for rows in world.gather_json(own) for row in rows)
    return {number: SequenceScore(*numbers) for number, *numbers in gathered}
