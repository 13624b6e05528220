"""Measured seconds of single operators, as a line over their work: what a CPU is planned with. No torch in here."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np


@dataclass(frozen=True)
class OperatorTime:
    """Seconds of one call: base, and more for each operation (multiply and add are two) and each byte moved."""

    base: float
    per_flop: float
    per_byte: float

    def seconds(self, flops: float, num_bytes: float) -> float:
        """Of a call of that size."""
        return self.base + self.per_flop * flops + self.per_byte * num_bytes


def fit(points: Sequence[tuple[float, float, float]]) -> OperatorTime:
    """The line nearest to measured points (flops, bytes, seconds), none of its numbers below 0; errors count as shares,
    so that small calls weigh as much as large ones. ValueError without points."""
    if not points:
        raise ValueError("no points to fit")
    known = np.array(points, dtype=float)
    seconds = np.maximum(known[:, 2], 1e-9)
    terms = np.stack([np.ones(len(known)), known[:, 0], known[:, 1]], axis=1) / seconds[:, None]
    best, least = np.array([float(np.median(seconds)), 0.0, 0.0]), np.inf
    for count in (1, 2, 3):
        for chosen in combinations(range(3), count):
            columns = list(chosen)
            found, *_ = np.linalg.lstsq(terms[:, columns], np.ones(len(known)), rcond=None)
            off = float(np.square(terms[:, columns] @ found - 1).sum())
            if (found >= 0).all() and off < least * 0.999:  # fewer terms where more do not help
                best, least = np.zeros(3), off
                best[columns] = found
    return OperatorTime(*map(float, best))


def operator_key(name: str, dtype: str) -> str:
    """By which a calibration knows an operator."""
    return f"{name} {dtype}".strip()
