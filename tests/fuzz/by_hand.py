"""Training written out on a model of transformers: what a run has to come to.

Of ours it takes which rows a step has, with their tokens and labels, where adapters begin, and what
a quantized matrix stands for. A row is alone in its forward; weights that adapters change are made
whole; the optimizer is a formula's.
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
    """One sequence. value: of its item: 1 or 0 of an answer that is wanted or not, a class, a
    pair's margin.
    """

    tokens: Tensor
    labels: Tensor
    value: float


Rows = list[list[tuple[Tensor, Tensor, float]]]  # of each step what a Row has; of pairs by turns


class ByHand:
    """`train` does all steps; then `losses`, `norms` and `weights` (by the names of the model's own
    parameters).
    """

    def __init__(self, cfg: Any, start: dict[str, Tensor]) -> None:
        """start: every trained parameter of the run, where it begins, of which the adapters are
        taken over.
        """
        self.cfg = cfg
        self.dtype = {"fp64": torch.float64, "fp32": torch.float32}[cfg.dtype]
        self.model = self._read(cfg.model.path)
        self.teacher: Any = self._read(cfg.distill.teacher) if hasattr(cfg, "distill") else None
        self.frozen = {
            name: parameter.detach() for name, parameter in self.model.named_parameters()
        }
        if hasattr(cfg, "reward"):  # a new head in place of the model's
            self.frozen.pop("lm_head.weight", None)
            self.frozen["score.weight"] = start["score.weight"].to(self.dtype)
        self.is_adapted = any("lora_" in name for name in start)
        if self.is_adapted:
            self._quantize(start)
        begun = (
            {name: value.to(self.dtype) for name, value in start.items()}
            if self.is_adapted
            else self.frozen
        )
        self.formulas = {name: Formula(cfg.optimizer, name, value) for name, value in begun.items()}
        self.losses: list[float] = []
        self.norms: list[float] = []
        self._best: tuple[float, dict[str, Tensor]] | None = None

    def _read(self, path: str) -> Any:
        eager = {
            "attn_implementation": "eager",
            "experts_implementation": "eager",
        }  # the latter alone takes fp64
        return transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=self.dtype, **eager
        ).eval()

    def train(self, steps: Rows, validation: Rows) -> None:
        """Forward, backward, clipping and a step of the formula, for the rows of each step.

        validation: its rows, by which the best step is chosen; none: the last step is.
        """
        for number, rows in enumerate(steps):
            trained = {
                name: one.stored().to(self.dtype).clone().requires_grad_()
                for name, one in self.formulas.items()
            }
            loss = self._loss(self._effective(trained), [Row(*row) for row in rows])
            gradients = dict(
                zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True)
            )
            gradients, norm = clip_gradients(gradients, self.cfg.clip_grad_norm)
            for name, formula in self.formulas.items():
                formula.step(gradients[name], compute_rate(self.cfg, number))
            self.losses.append(loss.item())
            self.norms.append(norm)
            for rows in validation:
                self._judge([Row(*row) for row in rows])

    @torch.no_grad()
    def _judge(self, rows: list[Row]) -> None:
        """Keep the weights of this step if its validation is the best so far."""
        stored = {name: formula.stored().clone() for name, formula in self.formulas.items()}
        weights = {name: value.to(self.dtype) for name, value in stored.items()}
        loss = self._loss(self._effective(weights), rows).item()
        if self.cfg.checkpoint.greater_is_better:
            loss = -loss
        if self._best is None or loss < self._best[0]:
            self._best = loss, stored

    @property
    def weights(self) -> dict[str, Tensor]:
        """Every trained parameter after the step that is exported, fp64."""
        if self._best is not None:
            return self._best[1]
        return {name: formula.stored() for name, formula in self.formulas.items()}

    def _quantize(self, start: dict[str, Tensor]) -> None:
        """All matrices of the layers are quantized, adapted or not; a router is none of them, and
        the experts' matrices `[E, o, i]` are one.
        """
        if self.cfg.lora.quantize_base != "none":
            for name, value in self.frozen.items():
                if (
                    ".layers." in name
                    and value.dim() >= 2
                    and not name.endswith(".mlp.gate.weight")
                ):
                    quantized = fake_quantize_weight(
                        value.flatten(0, -2), self.cfg.lora.quantize_base
                    )
                    self.frozen[name] = quantized.view_as(value)

    def _effective(self, trained: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights that the model computes with."""
        if not self.is_adapted:
            return trained
        lora = self.cfg.lora
        scaling = lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)
        found = dict(self.frozen)
        for name in trained:
            prefix, _, kind = name.rpartition(".lora_A")
            if "lora_" not in name:
                found[name] = trained[name]
            if kind != ".weight":
                continue
            key = f"{prefix}.weight"
            adapted = (
                self.frozen[key] + scaling * trained[f"{prefix}.lora_B.weight"] @ trained[name]
            )
            lengths = trained.get(f"{prefix}.lora_magnitude_vector")
            if lengths is not None:
                adapted = adapted * (lengths / adapted.norm(dim=1).detach()).unsqueeze(1)
            found[key] = adapted
        return found

    def _loss(self, weights: dict[str, Tensor], rows: list[Row]) -> Tensor:
        """The mean over what a step has: labels, pairs, answers or classes."""
        if hasattr(self.cfg, "reward"):
            return self._rewards(weights, rows)
        if not hasattr(self.cfg, "dpo"):
            count = sum(int((row.labels >= 0).sum()) for row in rows)
            each = self._taught if self.teacher is not None else self._answer
            sign = 1 if self.teacher is not None else -1
            return sign * sum(each(weights, row) for row in rows) / count  # type: ignore[return-value]
        if self.cfg.dpo.loss in ("kto", "apo_zero_unpaired"):
            return self._labeled(weights, rows)
        pairs = zip(rows[::2], rows[1::2], strict=True)
        return sum(self._pair(weights, *pair) for pair in pairs) / (len(rows) // 2)  # type: ignore[return-value]

    def _outputs(self, weights: dict[str, Tensor], tokens: Tensor) -> Any:
        options = {
            "input_ids": tokens.unsqueeze(0),
            "use_cache": False,
            "output_hidden_states": True,
        }
        weights = {name: value for name, value in weights.items() if name != "score.weight"}
        return functional_call(self.model, weights, (), options)

    def _answer(self, weights: dict[str, Tensor], row: Row) -> Tensor:
        """Sum of the log-probabilities of a row's labels."""
        logits = self._outputs(weights, row.tokens).logits
        return -F.cross_entropy(logits[0], row.labels, reduction="sum", ignore_index=-100)

    def _ratio(self, weights: dict[str, Tensor], row: Row) -> Tensor:
        """The same, less that of the reference, nothing of which requires a gradient."""
        return self._answer(weights, row) - self._answer(self.frozen, row)

    def _pair(self, weights: dict[str, Tensor], *answers: Row) -> Tensor:
        """arXiv 2305.18290 and the others that the config's `dpo.loss` names."""
        dpo = self.cfg.dpo
        found = []
        for row in answers:
            answer = (self._answer if dpo.loss == "simpo" else self._ratio)(weights, row)
            found.append(
                answer / int((row.labels >= 0).sum()) if dpo.loss in ("ipo", "simpo") else answer
            )
        margin = found[0] - found[1]
        if dpo.loss == "ipo":
            return (margin - 1 / (2 * dpo.beta)) ** 2
        if dpo.loss == "simpo":
            return -F.logsigmoid(dpo.beta * margin - dpo.simpo_gamma)
        wrong = dpo.label_smoothing
        return -(1 - wrong) * F.logsigmoid(dpo.beta * margin) - wrong * F.logsigmoid(
            -dpo.beta * margin
        )

    def _labeled(self, weights: dict[str, Tensor], rows: list[Row]) -> Tensor:
        """arXiv 2402.01306, equations 7 and 8; arXiv 2408.06266 without the point of reference."""
        dpo, point = self.cfg.dpo, 0.0
        if dpo.loss == "kto":
            others = [mark_answer(row, rows[at - 1]) for at, row in enumerate(rows)]
            with torch.no_grad():
                point = max(
                    0.0, sum(float(self._ratio(weights, row)) for row in others) / len(rows)
                )
        total = torch.zeros((), dtype=self.dtype)
        for row in rows:
            distance = dpo.beta * (self._ratio(weights, row) - point)
            good = dpo.desirable_weight * (1 - torch.sigmoid(distance))
            total = total + (
                good if row.value else dpo.undesirable_weight * (1 - torch.sigmoid(-distance))
            )
        return total / len(rows)

    def _rewards(self, weights: dict[str, Tensor], rows: list[Row]) -> Tensor:
        """Bradley and Terry's likelihood of pairs, or cross-entropy of classes."""
        reward, scores = self.cfg.reward, []
        for row in rows:
            last = int((row.labels >= 0).nonzero()[-1])
            scores.append(
                self._outputs(weights, row.tokens).hidden_states[-1][0, last]
                @ weights["score.weight"].T
            )
        if reward.loss == "classification":
            return F.cross_entropy(
                torch.stack(scores), torch.tensor([int(row.value) for row in rows])
            )
        chosen, rejected = torch.cat(scores[::2]), torch.cat(scores[1::2])
        margins = torch.tensor([row.value for row in rows[::2]], dtype=self.dtype)
        centered = (reward.center_rewards_coefficient or 0) * (chosen + rejected) ** 2
        return (centered - F.logsigmoid(chosen - rejected - margins)).mean()

    def _taught(self, weights: dict[str, Tensor], row: Row) -> Tensor:
        """arXiv 1503.02531, with the divergence that the config's section names, summed over a
        row's labels.
        """
        distill, labels = self.cfg.distill, row.labels >= 0
        own = self._outputs(weights, row.tokens).logits[0, labels]
        with torch.no_grad():
            other = self.teacher(row.tokens.unsqueeze(0)).logits[0, labels]
        q, p = ((logits / distill.temperature).softmax(-1) for logits in (own, other))
        if distill.divergence == "forward_kl":
            apart = (p * (p / q).log()).sum()
        elif distill.divergence == "reverse_kl":
            apart = (q * (q / p).log()).sum()
        else:
            mixture = distill.beta * p + (1 - distill.beta) * q
            apart = (
                distill.beta * (p * (p / mixture).log()).sum()
                + (1 - distill.beta) * (q * (q / mixture).log()).sum()
            )
        entropy = F.cross_entropy(own, row.labels[labels], reduction="sum")
        return distill.weight * distill.temperature**2 * apart + (1 - distill.weight) * entropy


def mark_answer(row: Row, other: Row) -> Row:
    """The row's prompt, and the other's answer."""
    first, answer = int((row.labels >= 0).nonzero()[0]), other.labels[other.labels >= 0]
    tokens = torch.cat([row.tokens[: first + 1], answer[:-1]])
    labels = torch.cat([torch.full((first,), -100), answer])
    return Row(tokens, labels, row.value)
