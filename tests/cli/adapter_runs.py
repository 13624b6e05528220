"""Train an adapter in seconds, for the tests of the commands that read one."""

import json
from pathlib import Path
from typing import Any

from tests.recipes.runs import LORA, build_story_arguments, run_here

ROWS = [  # conversations of (role, content)
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
    """Train a real model of 260 K weights on two conversations for two steps; return the run.

    realdata: the folder that has the model. output: the run's folder. more: further words of the
    command line.
    """
    rows_file = output.with_name(f"{output.name}.jsonl")
    rows_file.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for turns in ROWS:
        messages = [{"role": role, "content": text} for role, text in turns]
        lines.append(json.dumps({"messages": messages}) + "\n")
    rows_file.write_text("".join(lines))
    data = [f"data.source={rows_file}", "data.format=messages", "data.cache=false"]
    # The learning rate is high so that two steps give the adapter an effect.
    steps = ["max_steps=2", "batch_size=1", "optimizer.lr=1e-2", f"recipe={recipe}"]
    run = run_here(build_story_arguments(realdata, output, *data, *steps, *more), recipe=recipe)
    assert run.code == 0, run.said
    return run
