"""What torch.compile makes of a sum with a multiple of a matrix product: python add_alpha.py (needs
a C++ compiler).
"""

import torch


def sums(tensor, first, second):
    """The same number four times."""
    return {
        "add(t, mm, alpha=2)": lambda: torch.add(tensor, first @ second, alpha=2),
        "sub(t, mm, alpha=-2)": lambda: torch.sub(tensor, first @ second, alpha=-2),
        "t + 2 * mm": lambda: tensor + 2 * (first @ second),
        "add(t, mm.relu(), alpha=2)": lambda: torch.add(tensor, (first @ second).relu(), alpha=2),
    }


print("torch", torch.__version__)
values = (torch.ones(2, 2), torch.ones(2, 3), torch.ones(3, 2))
for name, run in sums(*values).items():
    torch._dynamo.reset()
    print(
        f"{name:27} eager {run().unique().tolist()}, compiled"
        f" {torch.compile(run)().unique().tolist()}"
    )
