"""Measure the CPU seconds of each file of tests, and hold them to a budget: a plugin of pytest.

    pytest -p tests.budget --file-budget 10

prints the slowest files and fails the session if one takes more. Ranks and other child processes
count when they have ended; a fixture counts for the first test that asks for it. The seconds are
those of a machine on which all files take `SESSION_SECONDS`: on a slower one a file has as much
more as all files take more.
"""

import resource
from collections import Counter
from collections.abc import Iterator

import pytest

PROPERTY = "cpu_seconds"  # name in `user_properties` of a report, which xdist sends
SHOWN = 10  # slowest files that are printed
SESSION_SECONDS = 720  # of CPU: six minutes on two cores, which `make test` is meant to take


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--file-budget", type=float, metavar="SECONDS", help="most seconds of CPU of a file's tests"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FileBudget(config.getoption("--file-budget")), "file-budget")


def read_cpu_seconds() -> float:
    """Return the seconds of CPU of this process and of all its children that have ended.

    CPU and not time on a clock: a busy machine does not make a file slower.
    """
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class FileBudget:
    """Measures each test and adds up its file's seconds.

    With xdist the workers measure, and the first process adds up the reports that they send.
    """

    def __init__(self, budget: float | None) -> None:
        self.budget = budget  # seconds; None: there is none
        self.seconds: Counter[str] = Counter()  # by file
        self.last = 0.0  # CPU seconds of the process up to the last report

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
        seconds = dict(report.user_properties)[PROPERTY]
        self.seconds[report.nodeid.partition("::")[0]] += float(seconds)  # type: ignore[arg-type]

    def list_over_budget(self) -> list[str]:
        """Return a line for each file over the budget."""
        if self.budget is None:
            return []
        most = self.budget * max(1, sum(self.seconds.values()) / SESSION_SECONDS)
        return [
            f"{file}: found {seconds:.1f} s of CPU, expected at most {most:.1f}: thin it or mark"
            " tests slow"
            for file, seconds in self.seconds.most_common()
            if seconds > most
        ]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        is_worker = hasattr(session.config, "workerinput")
        if self.list_over_budget() and not is_worker and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total = sum(self.seconds.values())
        terminalreporter.write_sep(
            "=", f"{total:.0f} s of CPU; the slowest files of {len(self.seconds)}"
        )
        for file, seconds in self.seconds.most_common(SHOWN):
            terminalreporter.write_line(f"{seconds:6.1f} s {file}")
        for line in self.list_over_budget():
            terminalreporter.write_line(f"error: {line}", red=True)
