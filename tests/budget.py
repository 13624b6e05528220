"""Seconds of CPU that each file of tests takes, its ranks and other child processes among them, and
a budget for them.

    pytest -p tests.budget --file-budget 10      a file that takes more fails the session, which prints the slowest

CPU and not time on a clock: a busy machine does not make a file longer. What a fixture takes counts
for the test that asked first; what a process takes counts when it has been waited for.
"""

import resource
from collections import Counter
from collections.abc import Iterator

import pytest

PROPERTY = "cpu_seconds"
SHOWN = 10


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--file-budget", type=float, metavar="SECONDS", help="most seconds of CPU of a file's tests"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FileBudget(config.getoption("--file-budget")), "file-budget")


def read_cpu_seconds() -> float:
    """Return the seconds of CPU of this process and of all its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class FileBudget:
    """Adds up what the reports of tests say; in a worker of xdist it notes them, in the first
    process it judges.
    """

    def __init__(self, budget: float | None) -> None:
        self.budget = budget
        self.seconds: Counter[str] = Counter()
        self.last = 0.0

    def pytest_runtest_logstart(self) -> None:
        self.last = read_cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report = yield
        now = read_cpu_seconds()
        report.user_properties = [(PROPERTY, now - self.last)]  # type: ignore[attr-defined]
        self.last = now
        return report  # type: ignore[return-value]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += float(
            dict(report.user_properties)[PROPERTY]
        )  # type: ignore[arg-type]

    def over_budget(self) -> list[str]:
        """Return a line for each file over the budget."""
        if self.budget is None:
            return []
        return [
            f"{file}: found {seconds:.1f} s of CPU, expected at most {self.budget:g}: thin it or"
            " mark tests slow"
            for file, seconds in self.seconds.most_common()
            if seconds > self.budget
        ]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (
            self.over_budget()
            and not hasattr(session.config, "workerinput")
            and session.exitstatus == 0
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total = sum(self.seconds.values())
        terminalreporter.write_sep(
            "=", f"{total:.0f} s of CPU; the slowest files of {len(self.seconds)}"
        )
        for file, seconds in self.seconds.most_common(SHOWN):
            terminalreporter.write_line(f"{seconds:6.1f} s {file}")
        for line in self.over_budget():
            terminalreporter.write_line(f"error: {line}", red=True)
