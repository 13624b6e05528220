"""Train a model of transformers by a plain loop, as the reference of a run.

`ByHand(cfg, start).train(...)` takes from the run each step's rows and the adapters' initial
weights, and from the library how a matrix is quantized. Every row has a forward of its own, and
adapters are merged into the weights. A `Formula` is one parameter's optimizer, in fp64.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.func import functional_call

from recipe_lib.adapters.quantized import fake_quantize_weight
from tests.recipes.watched import compute_rate
from tests.training.formulas import Formula, clip_gradients


class Row(NamedTuple):
    """One sequence of an item."""

    tokens: Tensor  # int64 `[s]`
    labels: Tensor  # int64 `[s]`, the token that follows; -100 where the loss counts none
    # Of the item: 1 for a desirable answer and 0 for another, a class, or a pair's margin.
    value: float


# Each step's rows as tuples of a Row's fields, which ranks can return. A pair is its chosen row and
# then its rejected one.
Rows = list[list[tuple[Tensor, Tensor, float]]]


class ByHand:
    """The plain loop: call `train`, then read `losses`, `norms` and `weights`."""

    def __init__(self, cfg: Any, start: dict[str, Tensor]) -> None:
        """Load the model. cfg: the run's config.

        start: the run's trained parameters before its first step. Of these only adapters and score
        heads are used; all other weights are read from the model's folder.
        """
        self.cfg = cfg
        self.dtype = {"fp64": torch.float64, "fp32": torch.float32}[cfg.dtype]
        self.model = self._load_model(cfg.model.path)
        self.teacher: Any = None
        if hasattr(cfg, "distill"):
            self.teacher = self._load_model(cfg.distill.teacher)
        # Weights before training, by name; with adapters they stay as they are.
        self.frozen = {
            name: parameter.detach() for name, parameter in self.model.named_parameters()
        }
        self.quantized = _list_matrices(self.model)
        if hasattr(cfg, "reward"):  # a new head in place of the model's
            self.frozen.pop("lm_head.weight", None)
            self.frozen["score.weight"] = start["score.weight"].to(self.dtype)
        self.is_adapted = any("lora_" in name for name in start)
        if self.is_adapted:
            self._quantize_base()
        trained = self.frozen
        if self.is_adapted:
            trained = {name: value.to(self.dtype) for name, value in start.items()}
        self.formulas = {
            name: Formula(cfg.optimizer, name, value) for name, value in trained.items()
        }
        self.losses: list[float] = []  # of each step
        self.norms: list[float] = []  # of each step's gradients, before clipping
        # (validation loss, negative if greater is better; weights) of the best step.
        self._best: tuple[float, dict[str, Tensor]] | None = None

    def _load_model(self, path: str) -> Any:
        """Return transformers' model of a folder in the run's dtype."""
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            dtype=self.dtype,
            attn_implementation="eager",
            experts_implementation="eager",  # no other computes in fp64
        )
        return model.eval()

    def train(self, steps: Rows, validation: Rows) -> None:
        """Do forward, backward, clipping and the optimizer's step for the rows of each step.

        validation: the one list of rows that chooses the best step, or nothing: `weights` are then
        those of the last step.
        """
        for step, rows in enumerate(steps):
            trained = {
                name: formula.round_weights().to(self.dtype).clone().requires_grad_()
                for name, formula in self.formulas.items()
            }
            loss = self._compute_loss(self._merge_adapters(trained), [Row(*row) for row in rows])
            gradients = torch.autograd.grad(loss, list(trained.values()))
            clipped, norm = clip_gradients(
                dict(zip(trained, gradients, strict=True)), self.cfg.clip_grad_norm
            )
            for name, formula in self.formulas.items():
                formula.step(clipped[name], compute_rate(self.cfg, step))
            self.losses.append(loss.item())
            self.norms.append(norm)
            for validation_rows in validation:
                self._keep_best([Row(*row) for row in validation_rows])

    @torch.no_grad()
    def _keep_best(self, rows: list[Row]) -> None:
        """Keep the weights of this step if its validation is the best so far."""
        stored = {name: formula.round_weights().clone() for name, formula in self.formulas.items()}
        weights = {name: value.to(self.dtype) for name, value in stored.items()}
        loss = self._compute_loss(self._merge_adapters(weights), rows).item()
        if self.cfg.checkpoint.greater_is_better:
            loss = -loss
        if self._best is None or loss < self._best[0]:
            self._best = loss, stored

    @property
    def weights(self) -> dict[str, Tensor]:
        """Return every trained parameter by name after the step that is exported, fp64."""
        if self._best is not None:
            return self._best[1]
        return {name: formula.round_weights() for name, formula in self.formulas.items()}

    def _quantize_base(self) -> None:
        """Round all matrices of the layers as the run quantizes them, adapted or not."""
        if self.cfg.lora.quantize_base == "none":
            return
        for name in self.quantized:
            value = self.frozen[name]
            matrix = value.flatten(0, -2)  # experts `[E, o, i]` are one matrix
            quantized = fake_quantize_weight(matrix, self.cfg.lora.quantize_base)
            self.frozen[name] = quantized.view_as(value)

    def _merge_adapters(self, trained: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights that the model computes with: adapters merged into frozen weights.

        Without adapters these are the trained weights themselves.
        """
        if not self.is_adapted:
            return trained
        lora = self.cfg.lora
        scaling = lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)
        weights = dict(self.frozen)
        for name in trained:
            prefix, _, suffix = name.rpartition(".lora_A")
            if "lora_" not in name:
                weights[name] = trained[name]
            if suffix != ".weight":
                continue
            # Of a linear `[o, i]`, or of the matrices of experts, `[E, o, i]` or `[E, i, o]`.
            key = prefix if prefix in self.frozen else f"{prefix}.weight"
            update = trained[f"{prefix}.lora_B.weight"] @ trained[name]
            if update.shape != self.frozen[key].shape:
                update = update.mT
            weight = self.frozen[key] + scaling * update
            magnitude = trained.get(f"{prefix}.lora_magnitude_vector")
            if magnitude is not None:  # DoRA
                weight = weight * (magnitude / weight.norm(dim=1).detach()).unsqueeze(1)
            weights[key] = weight
        return weights

    def _compute_loss(self, weights: dict[str, Tensor], rows: list[Row]) -> Tensor:
        """Return the mean loss over a step's label tokens, pairs, answers or rows."""
        if hasattr(self.cfg, "reward"):
            return self._compute_reward_loss(weights, rows)
        if not hasattr(self.cfg, "dpo"):
            num_labels = sum(int((row.labels >= 0).sum()) for row in rows)
            total = torch.zeros((), dtype=self.dtype)
            for row in rows:
                if self.teacher is not None:
                    total = total + self._compute_distillation_loss(weights, row)
                else:
                    total = total - self._compute_log_prob(weights, row)
            return total / num_labels
        if self.cfg.dpo.loss in ("kto", "apo_zero_unpaired"):
            return self._compute_unpaired_loss(weights, rows)
        total = torch.zeros((), dtype=self.dtype)
        for chosen, rejected in zip(rows[::2], rows[1::2], strict=True):
            total = total + self._compute_pair_loss(weights, chosen, rejected)
        return total / (len(rows) // 2)

    def _run_model(self, weights: dict[str, Tensor], tokens: Tensor) -> Any:
        """Return transformers' output for tokens `[s]`, computed with these weights."""
        options = {
            "input_ids": tokens.unsqueeze(0),
            "use_cache": False,
            "output_hidden_states": True,
        }
        weights = {name: value for name, value in weights.items() if name != "score.weight"}
        return functional_call(self.model, weights, (), options)

    def _compute_log_prob(self, weights: dict[str, Tensor], row: Row) -> Tensor:
        """Return the sum of the log-probabilities of a row's labels."""
        logits = self._run_model(weights, row.tokens).logits
        return -F.cross_entropy(logits[0], row.labels, reduction="sum", ignore_index=-100)

    def _compute_log_ratio(self, weights: dict[str, Tensor], row: Row) -> Tensor:
        """Return the policy's log-probability less that of the weights before training."""
        return self._compute_log_prob(weights, row) - self._compute_log_prob(self.frozen, row)

    def _compute_pair_loss(self, weights: dict[str, Tensor], *answers: Row) -> Tensor:
        """Return the loss of a pair: DPO (arXiv 2305.18290), IPO or SimPO, by the config.

        answers: the chosen row, then the rejected one.
        """
        dpo = self.cfg.dpo
        log_probs = []
        for row in answers:
            if dpo.loss == "simpo":
                log_prob = self._compute_log_prob(weights, row)
            else:
                log_prob = self._compute_log_ratio(weights, row)
            if dpo.loss in ("ipo", "simpo"):
                log_prob = log_prob / int((row.labels >= 0).sum())
            log_probs.append(log_prob)
        margin = log_probs[0] - log_probs[1]
        if dpo.loss == "ipo":
            return (margin - 1 / (2 * dpo.beta)) ** 2
        if dpo.loss == "simpo":
            return -F.logsigmoid(dpo.beta * margin - dpo.simpo_gamma)
        preferred = F.logsigmoid(dpo.beta * margin)
        flipped = F.logsigmoid(-dpo.beta * margin)
        return -(1 - dpo.label_smoothing) * preferred - dpo.label_smoothing * flipped

    def _compute_unpaired_loss(self, weights: dict[str, Tensor], rows: list[Row]) -> Tensor:
        """Return KTO's loss (arXiv 2402.01306, equations 7 and 8) or APO's (arXiv 2408.06266).

        APO's is KTO's with a KL estimate of zero.
        """
        dpo = self.cfg.dpo
        kl = 0.0
        if dpo.loss == "kto":
            # Each prompt with the answer of the row before it, the first with that of the last.
            mismatched = [swap_answer(row, rows[number - 1]) for number, row in enumerate(rows)]
            with torch.no_grad():
                log_ratios = [float(self._compute_log_ratio(weights, row)) for row in mismatched]
            kl = max(0.0, sum(log_ratios) / len(rows))
        total = torch.zeros((), dtype=self.dtype)
        for row in rows:
            reward = dpo.beta * (self._compute_log_ratio(weights, row) - kl)
            if row.value:
                loss = dpo.desirable_weight * (1 - torch.sigmoid(reward))
            else:
                loss = dpo.undesirable_weight * (1 - torch.sigmoid(-reward))
            total = total + loss
        return total / len(rows)

    def _compute_reward_loss(self, weights: dict[str, Tensor], rows: list[Row]) -> Tensor:
        """Return Bradley and Terry's loss of pairs, or the cross-entropy of classes."""
        reward = self.cfg.reward
        scores = []
        for row in rows:
            last_label = int((row.labels >= 0).nonzero()[-1])  # position that is scored
            hidden_states = self._run_model(weights, row.tokens).hidden_states[-1]
            scores.append(hidden_states[0, last_label] @ weights["score.weight"].T)
        if reward.loss == "classification":
            classes = torch.tensor([int(row.value) for row in rows])
            return F.cross_entropy(torch.stack(scores), classes)
        chosen = torch.cat(scores[::2])
        rejected = torch.cat(scores[1::2])
        margins = torch.tensor([row.value for row in rows[::2]], dtype=self.dtype)
        centering = (reward.center_rewards_coefficient or 0) * (chosen + rejected) ** 2
        return (centering - F.logsigmoid(chosen - rejected - margins)).mean()

    def _compute_distillation_loss(self, weights: dict[str, Tensor], row: Row) -> Tensor:
        """Return the distillation loss (arXiv 1503.02531), summed over a row's labels.

        The config names the divergence.
        """
        distill = self.cfg.distill
        has_label = row.labels >= 0
        student_logits = self._run_model(weights, row.tokens).logits[0, has_label]
        with torch.no_grad():
            teacher_logits = self.teacher(row.tokens.unsqueeze(0)).logits[0, has_label]
        q = (student_logits / distill.temperature).softmax(-1)
        p = (teacher_logits / distill.temperature).softmax(-1)
        if distill.divergence == "forward_kl":
            divergence = (p * (p / q).log()).sum()
        elif distill.divergence == "reverse_kl":
            divergence = (q * (q / p).log()).sum()
        else:
            mixture = distill.beta * p + (1 - distill.beta) * q
            from_teacher = (p * (p / mixture).log()).sum()
            from_student = (q * (q / mixture).log()).sum()
            divergence = distill.beta * from_teacher + (1 - distill.beta) * from_student
        cross_entropy = F.cross_entropy(student_logits, row.labels[has_label], reduction="sum")
        # The square of the temperature keeps gradients of one size (section 2 of the paper).
        distillation = distill.weight * distill.temperature**2 * divergence
        return distillation + (1 - distill.weight) * cross_entropy


# Ends of linears that are not quantized: routers, and those whose weight a kernel reads by itself.
_NOT_QUANTIZED = (
    ".mlp.gate",
    ".router.proj",
    ".router.layer",
    ".mixer.out_proj",
    ".mamba.out_proj",
)


def _list_matrices(model: Any) -> list[str]:
    """List the weights of the layers' linears, of torch's own class, and of their experts."""
    names = []
    for prefix, module in model.named_modules():
        for name, value in module.named_parameters(recurse=False):
            is_linear = type(module) is torch.nn.Linear and name == "weight"
            is_expert = value.dim() == 3 and not isinstance(module, torch.nn.Conv1d)
            if (
                ".layers." in prefix
                and (is_linear or is_expert)
                and not prefix.endswith(_NOT_QUANTIZED)
            ):
                names.append(f"{prefix}.{name}")
    return names


def swap_answer(row: Row, answered_row: Row) -> Row:
    """Return a row of the first row's prompt and the second row's answer."""
    first_label = int((row.labels >= 0).nonzero()[0])
    answer = answered_row.labels[answered_row.labels >= 0]
    tokens = torch.cat([row.tokens[: first_label + 1], answer[:-1]])
    labels = torch.cat([torch.full((first_label,), -100), answer])
    return Row(tokens, labels, row.value)
