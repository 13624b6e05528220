"""Runs of seconds that leave an adapter with an effect, for the tests of what can be done with
it.
"""

import json
from pathlib import Path
from typing import Any

from tests.recipes.runs import LORA, run_here, write_stories

ROWS = [
    [("user", "Hi"), ("assistant", "Hello, you.")],
    [
        ("system", "Be kind."),
        ("user", "Who?"),
        ("assistant", "Me."),
        ("user", "So"),
        ("assistant", "it is."),
    ],
]


def write_adapter_run(realdata: Path, output: Path, *more: str, recipe: str = LORA) -> Any:
    """Trains the stories' model on two conversations for two steps; `more` are words of the command
    line.
    """
    rows = output.with_name(f"{output.name}.jsonl")
    rows.parent.mkdir(parents=True, exist_ok=True)
    found = [
        {"messages": [{"role": role, "content": text} for role, text in turns]} for turns in ROWS
    ]
    rows.write_text("".join(json.dumps(row) + "\n" for row in found))
    data = [f"data.source={rows}", "data.format=messages", "data.cache=false"]
    steps = ["max_steps=2", "batch_size=1", "optimizer.lr=1e-2", f"recipe={recipe}"]
    run = run_here(write_stories(realdata, output, *data, *steps, *more), recipe=recipe)
    assert run.code == 0, run.said
    return run
