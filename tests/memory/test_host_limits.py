"""Host memory: what torch takes for pinned blocks, what a machine or its control group leaves, and
the refusal.
"""

from pathlib import Path

import pytest

from recipe_lib.errors import SetupError
from recipe_lib.memory.peaks import check_host_needs, find_free_host_memory, round_up_to_pinned
from recipe_lib.units import GIB, MIB


@pytest.mark.parametrize(
    ("size", "taken"),
    [(0, 0), (1, 1), (1025, 2048), (56 * MIB, 64 * MIB), (64 * MIB, 64 * MIB), (GIB + 1, 2 * GIB)],
)
def test_pinned_blocks_are_powers_of_two(size: int, taken: int) -> None:
    assert round_up_to_pinned(size) == taken


def machine(folder: Path, available: int, cgroup: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A /proc and a /sys/fs/cgroup. available: KiB."""
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "meminfo").write_text(
        f"MemTotal: 99999999 kB\nMemAvailable:  {available} kB\n"
    )
    (folder / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, text in files.items():
        path = folder / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "proc", folder / "groups"


LIMITED = {
    "job/memory.max": "max\n",
    "job/memory.current": "5\n",
    "memory.max": f"{8 * MIB}\n",
    "memory.current": f"{6 * MIB}\n",
    "memory.stat": f"anon {5 * MIB}\ninactive_file {MIB}\nactive_file 0\n",
}


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {}, (64 * MIB, "free on this machine")),
        ("0::/job\n", LIMITED, (3 * MIB, "left in this process's control group")),
        ("0::/elsewhere\n", LIMITED, (3 * MIB, "left in this process's control group")),
        ("0::/job\n", LIMITED | {"memory.max": f"{900 * MIB}"}, (64 * MIB, "free on this machine")),
        (
            "4:cpu:/x\n3:memory:/job\n",
            {
                "memory/job/memory.limit_in_bytes": str(9 * MIB),
                "memory/job/memory.usage_in_bytes": str(2 * MIB),
            },
            (7 * MIB, "left in this process's control group"),
        ),
    ],
)
def test_what_is_left(
    cgroup: str, files: dict[str, str], expected: tuple[int, str], tmp_path: Path
) -> None:
    assert find_free_host_memory(*machine(tmp_path, 64 * 1024, cgroup, files)) == expected


def test_this_machine_has_some() -> None:
    room, what = find_free_host_memory()
    assert room > MIB and what


def test_enough_is_no_error() -> None:
    check_host_needs({"cpu_offload": 4 * GIB}, 8.0, 2, (8 * GIB, "free on this machine"))
    check_host_needs({}, 0.001, 2, (0, "free on this machine"))


@pytest.mark.parametrize(
    ("allowed", "free", "found", "more"),
    [
        (None, 10 * GIB, "10.00 GiB free on this machine", "use a machine with more"),
        (
            11.5,
            99 * GIB,
            "11.50 GiB allowed by memory.host_memory_limit_gib",
            "raise memory.host_memory_limit_gib",
        ),
        (64.0, 11 * GIB, "11.00 GiB free on this machine", "use a machine with more"),
    ],
)
def test_too_little_is_one_line_with_the_numbers(
    allowed: float | None, free: int, found: str, more: str
) -> None:
    needs = {"optimizer_offload": 2 * GIB, "activation_offload": GIB}
    with pytest.raises(SetupError) as raised:
        check_host_needs(needs, allowed, 4, (free, "free on this machine"))
    assert (
        str(raised.value)
        == f"host memory: found {found}, expected 12.00 GiB for 4 ranks on this machine (each:"
        f" memory.optimizer_offload 2.00 GiB, memory.activation_offload 1.00 GiB); {more}, or"
        " choose optimizer.state_bits=8, or choose a smaller batch_size or"
        " memory.activation_checkpointing=full"
    )
