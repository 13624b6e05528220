"""Traces written by hand, and random ones that look like training, for tests of what reads
traces.
"""

import random

from recipe_lib.plan.tracing.trace import ALLOC, FREE, OP, PHASE, Op, Storage, Trace


class Writer:
    """Writes a trace event by event."""

    def __init__(self):
        self.trace = Trace()

    def phase(self, name: str) -> None:
        self.trace.phases.append(name)
        self.trace.events.append((PHASE, len(self.trace.phases) - 1))

    def alloc(self, num_bytes: int, **fields) -> int:
        fields.setdefault("phase", len(self.trace.phases) - 1)
        self.trace.storages.append(Storage(num_bytes, **fields))
        self.trace.events.append((ALLOC, len(self.trace.storages) - 1))
        return len(self.trace.storages) - 1

    def free(self, number: int) -> None:
        self.trace.events.append((FREE, number))

    def op(self, name: str) -> None:
        self.trace.ops.append(Op(name))
        self.trace.events.append((OP, len(self.trace.ops) - 1))


def build_training_steps(layers: int = 6, steps: int = 2, seed: int = 0) -> Trace:
    """Weights for good; in each step activations that pile up and are freed in reverse, gathers on
    a second stream, temporaries of odd sizes; gradients and optimizer states from the first step
    on.
    """
    rng, writer = random.Random(seed), Writer()
    writer.phase("setup")
    weights = [
        writer.alloc(rng.randrange(1, 40 * 2**20), kind="parameters", label=f"w{n}")
        for n in range(layers)
    ]
    writer.alloc(12345, device=False)
    writer.alloc(0)
    for step in range(steps):
        writer.phase("first step" if step == 0 else "step")
        kept = []
        for part in ("forward", "backward"):
            for layer in range(layers):
                module = f"layers.{layer if part == 'forward' else layers - 1 - layer}"
                place = {"module": module, "part": part}
                gathered = writer.alloc(
                    4 * writer.trace.storages[weights[layer]].bytes,
                    stream=1,
                    kind="gathered",
                    **place,
                )
                temporary = [
                    writer.alloc(rng.randrange(1, 5 * 2**20), op="mm", **place) for _ in range(8)
                ]
                writer.op("mm")
                rng.shuffle(temporary)
                if part == "forward":
                    kept.append(
                        writer.alloc(
                            rng.randrange(1, 30 * 2**20), kind="activations", op="mm", **place
                        )
                    )
                else:
                    writer.free(kept.pop())
                for number in [*temporary, gathered]:
                    writer.free(number)
        if step == 0:
            for number in weights:
                writer.alloc(
                    2 * writer.trace.storages[number].bytes,
                    kind="optimizer",
                    part="optimizer",
                    op="zeros_like",
                )
    return writer.trace
