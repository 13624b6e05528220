"""Run random combinations of settings on 1, 2 and 4 ranks, and compare them with one process.

    python -m tests.fuzz [--seed 1000] [--cases 30] [--only SEED] [--keep FOLDER]
        [--classes]

One process is also compared with training written by hand. Prints a line for each combination; for
a wrong one what differs, and the command that runs it. Exit code 1 if any is wrong.
"""

import argparse
import os
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

# Before torch is imported, which reads them.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ |= {"TUNE_PLAN": "off", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

from tests.distributed.ranks import import_compiler  # noqa: E402
from tests.fuzz.cases import CLASSES, MODELS, TEACHER, draw_case  # noqa: E402
from tests.fuzz.compare import Outcome, try_case, write_models_and_samples  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    """Run `--cases` combinations that are not refused, of the seeds from `--seed` on.

    Returns the exit code.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "--seed", type=int, default=1000, help="the first combination's; the next ones count up"
    )
    parser.add_argument("--cases", type=int, default=30, help="how many that run")
    parser.add_argument("--only", type=int, help="the seed of the one combination to run")
    parser.add_argument(
        "--keep", type=Path, help="where to leave models, rows and what the runs write"
    )
    parser.add_argument(
        "--classes", action="store_true", help="hybrids and mixtures of transformers' classes"
    )
    args = parser.parse_args(argv)
    models = tuple(CLASSES) if args.classes else MODELS
    if args.only is not None:
        args.seed = args.only
        args.cases = 1
    import_compiler()  # once, for all ranks, which are forks
    outcomes: list[Outcome] = []
    with nullcontext(args.keep) if args.keep else TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        write_models_and_samples(folder, dict.fromkeys((*models, TEACHER), 4))
        print(f"fuzz: seeds from {args.seed} on, {args.cases} cases, in {folder}", flush=True)
        seed = args.seed
        while sum(outcome.verdict != "refused" for outcome in outcomes) < args.cases:
            outcomes.append(try_case(draw_case(seed, models), folder))
            show(outcomes[-1])
            seed += 1
            if args.only is not None:  # though it may be refused
                break
    print(summarize(outcomes))
    return int(any(outcome.verdict == "wrong" for outcome in outcomes))


def show(outcome: Outcome) -> None:
    """Print a line with the outcome's differences, and below it its messages."""
    differences = "".join(
        f", {name}: loss {far.loss:.1e} norm {far.norm:.1e} weights {far.weights:.1e}"
        for name, far in outcome.far.items()
    )
    print(f"{outcome.verdict:8}{outcome.seconds:6.1f} s  {outcome.case}{differences}", flush=True)
    for line in outcome.said:
        print(f"    {line}", flush=True)


def summarize(outcomes: list[Outcome]) -> str:
    """Return the counts of verdicts, ranks, recipes, dtypes and refused draws."""
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    cases = [outcome.case for outcome in outcomes if outcome.verdict != "refused"]
    ranks = ", ".join(
        f"{count} on {number}"
        for number, count in sorted(Counter(case.ranks for case in cases).items())
    )
    recipes = ", ".join(
        f"{count} {name.partition('_')[0]}"
        for name, count in Counter(case.recipe for case in cases).items()
    )
    dtypes = dict(Counter(case.dtype for case in cases))
    refused = sum(outcome.case.redrawn for outcome in outcomes)
    return (
        f"fuzz: {verdicts['equal']} equal, {verdicts['wrong']} wrong, {verdicts['refused']} refused"
        f" at their start; {refused} draws were refused by the validator or had too few levers;"
        f" ranks: {ranks}; recipes: {recipes}; dtypes: {dtypes}"
    )


if __name__ == "__main__":
    sys.exit(main())
