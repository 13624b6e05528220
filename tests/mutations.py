"""Make faults on purpose, one at a time, each of which some test has to see.

    python -m tests.mutations [NAME ...] [--jobs N]   make each in a copy and run its tests
    python -m tests.mutations --check                 only look whether each can still be made
    python -m tests.mutations --unchanged             run the same tests without any of the faults

Prints a line for each: its name, `red` or `GREEN`, seconds, and the first test that failed. The
exit code is 1 if one is green or cannot be made. The working tree is never changed. The faults
stand in tests/mutation_table.py. Where the code of one is rewritten, the fault is made in the new
code, and not removed.
"""

import argparse
import compileall
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.mutation_table import MUTATIONS, Mutation

ROOT = Path(__file__).parent.parent
SECONDS = 1800  # for the tests of one fault: to hang is to be seen
MOST_SAID = 200  # characters of a failure that are shown
RED = "red"  # a test failed, as it should
GREEN = "GREEN"  # all tests passed
BROKEN = "BROKEN"  # no test has judged
_VERDICTS = {0: GREEN, 1: RED}  # by pytest's exit code; with any other no test has judged


@dataclass(frozen=True)
class Outcome:
    """How the tests of a fault ended."""

    name: str
    verdict: str  # RED, GREEN or BROKEN
    seconds: float
    said: str  # the first test that failed, or why none has judged

    def __str__(self) -> str:
        return f"{self.name:32}{self.verdict:8}{self.seconds:6.0f} s  {self.said}".rstrip()


def find_fault(mutation: Mutation, root: Path = ROOT) -> str | None:
    """Return why a mutation cannot be made in the files under `root`; None: it can."""
    path = root / mutation.path
    if not path.is_file():
        return f"{mutation.name}: {mutation.path} is not there"
    count = path.read_text(encoding="utf-8").count(mutation.old)
    if count != 1:
        return f"{mutation.name}: {mutation.path} has {mutation.old!r} {count} times, expected once"
    files = [word.partition("::")[0] for word in mutation.tests if word.startswith("tests/")]
    missing = [file for file in files if not (root / file).exists()]
    return f"{mutation.name}: {missing[0]} is not there" if missing else None


def copy_checkout(target: Path) -> None:
    """Copy the files that git tracks, and new ones that it does not ignore, as they are now.

    Compiles recipe_lib's bytecode there, which the hard-linked copies of this copy then share.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in dict.fromkeys(listed.stdout.rstrip("\0").split("\0")):
        if (ROOT / name).is_file():  # else it was removed, and git does not know yet
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    compileall.compile_dir(target / "recipe_lib", quiet=1)


def make_mutation(mutation: Mutation, root: Path) -> None:
    """Make a fault in a file under `root`.

    The file is a hard link to that of another copy: it is replaced, not changed.
    """
    path = root / mutation.path
    text = path.read_text(encoding="utf-8")
    path.unlink()
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")


def run_tests(tests: Sequence[str], folder: Path) -> tuple[str, str]:
    """Run tests of the checkout in `folder` until one fails; return (verdict, what to show of it).

    tests: arguments of pytest.
    """
    options = ["-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider"]
    options.append(f"--basetemp={folder.parent / 'tmp'}")
    # PYTHONPATH: else processes that a test starts elsewhere import what is installed.
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return RED, f"no end within {SECONDS} s"
    verdict = _VERDICTS.get(done.returncode, BROKEN)
    if verdict == BROKEN:
        return BROKEN, f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-300:]}"
    failed = re.search(r"^(?:FAILED|ERROR) (.+)", done.stdout, re.MULTILINE)
    return verdict, failed[1][:MOST_SAID] if failed else ""


def try_mutation(mutation: Mutation, base: Path, *, unchanged: bool = False) -> Outcome:
    """Run the tests of a fault in a copy of the checkout `base` that has the fault.

    unchanged: without the fault.
    """
    start = time.monotonic()
    fault = find_fault(mutation, base)
    if fault is not None:
        return Outcome(name=mutation.name, verdict=BROKEN, seconds=0.0, said=fault)
    with TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve() / "checkout"
        shutil.copytree(base, folder, copy_function=os.link)
        if not unchanged:
            make_mutation(mutation, folder)
        verdict, said = run_tests(mutation.tests, folder)
    seconds = time.monotonic() - start
    return Outcome(name=mutation.name, verdict=verdict, seconds=seconds, said=said)


def choose_mutations(names: Sequence[str]) -> list[Mutation]:
    """Return the mutations of these names, or all if there are none, in the table's order.

    Ends the process with a message if a name is unknown.
    """
    unknown = set(names) - {mutation.name for mutation in MUTATIONS}
    if unknown:
        known = ", ".join(mutation.name for mutation in MUTATIONS)
        sys.exit(f"there is no mutation {min(unknown)}; there are {known}")
    return [mutation for mutation in MUTATIONS if not names or mutation.name in names]


def try_all(mutations: Sequence[Mutation], jobs: int, *, unchanged: bool) -> int:
    """Try mutations, `jobs` at a time, and print each outcome; return the exit code.

    The code is 1 if one is not RED, or with `unchanged` not GREEN.
    """
    expected = GREEN if unchanged else RED
    as_expected = 0
    with TemporaryDirectory(prefix="mutations-") as name, ThreadPoolExecutor(jobs) as pool:
        base = Path(name).resolve() / "checkout"
        copy_checkout(base)
        for outcome in pool.map(partial(try_mutation, base=base, unchanged=unchanged), mutations):
            print(outcome, flush=True)
            as_expected += outcome.verdict == expected
    print(f"{as_expected} of {len(mutations)} are {expected}")
    return int(as_expected < len(mutations))


def main(argv: list[str] | None = None) -> int:
    """Try the mutations that are named, or look whether they can be made; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--check", action="store_true", help="only look whether each can be made")
    parser.add_argument("--unchanged", action="store_true", help="run the tests without the faults")
    chosen = parser.parse_args(argv)
    mutations = choose_mutations(chosen.names)
    if not chosen.check:
        return try_all(mutations, chosen.jobs, unchanged=chosen.unchanged)
    faults = [fault for fault in map(find_fault, mutations) if fault is not None]
    print("\n".join(faults) or f"all {len(mutations)} can be made")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
