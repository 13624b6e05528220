"""Training written out on a model of transformers: what a run has to come to.

Of ours it takes which rows a step has, with their tokens and labels, where adapters begin, and what a quantized matrix
stands for. A row is alone in its forward; weights that adapters change are made whole; the optimizer is a formula's.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.func import functional_call

from recipe_lib.adapters.quantized import dequantized
from tests.recipes.watched import rate_of
from tests.training.formulas import Formula, clipped

Rows = list[list[tuple[Tensor, Tensor]]]  # of each step: (tokens, labels) of each row, of pairs by turns


class ByHand:
    """`train` does all steps; then `losses`, `norms` and `weights` (by the names of the model's own parameters)."""

    def __init__(self, cfg: Any, start: dict[str, Tensor]) -> None:
        """start: every trained parameter of the run, where it begins, of which the adapters are taken over."""
        self.cfg = cfg
        self.dtype = {"fp64": torch.float64, "fp32": torch.float32}[cfg.dtype]
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            cfg.model.path, dtype=self.dtype, attn_implementation="eager"
        ).eval()
        self.frozen = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        self.is_adapted = any("lora_" in name for name in start)
        if self.is_adapted:
            self._quantize(start)
        begun = {name: value.to(self.dtype) for name, value in start.items()} if self.is_adapted else self.frozen
        self.formulas = {name: Formula(cfg.optimizer, name, value) for name, value in begun.items()}
        self.losses: list[float] = []
        self.norms: list[float] = []

    def train(self, steps: Rows) -> None:
        """Forward, backward, clipping and a step of the formula, for the rows of each step."""
        for number, rows in enumerate(steps):
            trained = {
                name: one.stored().to(self.dtype).clone().requires_grad_() for name, one in self.formulas.items()
            }
            loss = self._loss(self._effective(trained), rows)
            gradients = dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))
            gradients, norm = clipped(gradients, self.cfg.clip_grad_norm)
            for name, formula in self.formulas.items():
                formula.step(gradients[name], rate_of(self.cfg, number))
            self.losses.append(loss.item())
            self.norms.append(norm)

    @property
    def weights(self) -> dict[str, Tensor]:
        """Every trained parameter after the last step, fp64."""
        return {name: formula.stored() for name, formula in self.formulas.items()}

    def _quantize(self, start: dict[str, Tensor]) -> None:
        """All matrices of the layers are quantized, adapted or not."""
        if self.cfg.lora.quantize_base != "none":
            for name, value in self.frozen.items():
                if ".layers." in name and value.dim() == 2:
                    self.frozen[name] = dequantized(value, self.cfg.lora.quantize_base)

    def _effective(self, trained: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights that the model computes with."""
        if not self.is_adapted:
            return trained
        lora = self.cfg.lora
        scaling = lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)
        found = dict(self.frozen)
        for name in trained:
            prefix, _, kind = name.rpartition(".lora_A")
            if kind != ".weight":
                continue
            key = f"{prefix}.weight"
            adapted = self.frozen[key] + scaling * trained[f"{prefix}.lora_B.weight"] @ trained[name]
            lengths = trained.get(f"{prefix}.lora_magnitude_vector")
            if lengths is not None:
                adapted = adapted * (lengths / adapted.norm(dim=1).detach()).unsqueeze(1)
            found[key] = adapted
        return found

    def _loss(self, weights: dict[str, Tensor], rows: list[tuple[Tensor, Tensor]]) -> Tensor:
        if not hasattr(self.cfg, "dpo"):
            count = sum(int((labels >= 0).sum()) for _, labels in rows)
            return -sum(self._answer(weights, *row) for row in rows) / count  # type: ignore[return-value]
        return (
            sum(  # type: ignore[return-value]
                self._pair(weights, chosen, rejected) for chosen, rejected in zip(rows[::2], rows[1::2], strict=True)
            )
            / (len(rows) // 2)
        )

    def _answer(self, weights: dict[str, Tensor], tokens: Tensor, labels: Tensor) -> Tensor:
        """Sum of the log-probabilities of a row's labels."""
        logits = functional_call(self.model, weights, (), {"input_ids": tokens.unsqueeze(0), "use_cache": False}).logits
        return -F.cross_entropy(logits[0], labels, reduction="sum", ignore_index=-100)

    def _pair(self, weights: dict[str, Tensor], *answers: tuple[Tensor, Tensor]) -> Tensor:
        """arXiv 2305.18290 and the others that the config's `dpo.loss` names."""
        dpo = self.cfg.dpo
        found = []
        for tokens, labels in answers:
            answer = self._answer(weights, tokens, labels)
            if dpo.loss != "simpo":
                answer = answer - self._answer(self.frozen, tokens, labels)  # nothing of which requires a gradient
            found.append(answer / int((labels >= 0).sum()) if dpo.loss in ("ipo", "simpo") else answer)
        margin = found[0] - found[1]
        if dpo.loss == "ipo":
            return (margin - 1 / (2 * dpo.beta)) ** 2
        if dpo.loss == "simpo":
            return -F.logsigmoid(dpo.beta * margin - dpo.simpo_gamma)
        wrong = dpo.label_smoothing
        return -(1 - wrong) * F.logsigmoid(dpo.beta * margin) - wrong * F.logsigmoid(-dpo.beta * margin)
