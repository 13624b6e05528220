"""What bash completes after `tune`, by bash itself."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.commands import tune

COMPLETE = """
source {script}
name=$(complete -p tune | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=()
$name tune "${{COMP_WORDS[$COMP_CWORD]}}" "${{COMP_WORDS[$((COMP_CWORD - 1))]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `eval` is given."""
    pytest.importorskip("shtab")
    done = tune("completion", "bash")
    assert done.returncode == 0, done.stderr
    path = tmp_path_factory.mktemp("completion") / "tune.bash"
    path.write_text(done.stdout)
    return path


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("tune pl", {"plan"}),
        ("tune cat qwen3/8B_q", {"qwen3/8B_qlora"}),
        ("tune run demo/", {"demo/distill", "demo/full", "demo/lora"}),
        ("tune run --config qwen3/0.6B_l", {"qwen3/0.6B_lora"}),
        ("tune run dpo", {"dpo_distributed"}),
        ("tune data ch", {"check"}),
        ("tune data check demo/l", {"demo/lora"}),
        ("tune plan --fu", {"--full"}),
        ("tune run --nproc", {"--nproc-per-node", "--nproc_per_node"}),
        ("tune export --me", {"--merge"}),
        ("tune completion ", {"bash", "zsh"}),
    ],
)
def test_bash_completes(words: str, expected: set[str], script: Path, tmp_path: Path):
    listed = [f"'{word}'" for word in words.split(" ")]
    said = subprocess.run(
        ["bash", "-c", COMPLETE.format(script=script, words=" ".join(listed))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert {line.strip() for line in said.stdout.splitlines() if line.strip()} == expected


def test_a_shell_that_is_not_known():
    done = tune("completion", "csh")
    assert done.returncode == 2 and "csh" in done.stderr and len(done.stderr.splitlines()) == 1
