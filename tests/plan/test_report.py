"""The report of a plan: every figure in it can be worked out again, and the branches of the tree
add up.
"""

import dataclasses
import re
from collections import Counter
from fractions import Fraction

import pytest

from recipe_lib.plan.plan_schema import DOES_NOT_FIT, FITS, RISKY, Alive, PhasePeak, Plan, RankPlan
from recipe_lib.plan.views.report import render as render_report
from recipe_lib.units import GIB, MIB, format_bytes, format_count, format_duration
from tests.plan.plans import LAYER, LAYERS, VOCABULARY, build_example_plan, list_alive_storages


def render(plan: Plan, **options: int | bool) -> str:
    """With all tables, unless said otherwise."""
    return render_report(plan, **({"full": True} | options))  # type: ignore[arg-type]


UNITS = {"B": 1, "KiB": 1024, "MiB": MIB, "GiB": GIB}
SIZE = re.compile(r"([+-]?[\d,]+(?:\.\d+)?) (B|KiB|MiB|GiB)\b")


def section(text: str, title: str) -> list[str]:
    """The lines under a heading, up to the next empty one."""
    lines = text.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith(title))
    end = next((at for at in range(start, len(lines)) if not lines[at]), len(lines))
    return lines[start + 1 : end]


def hundredths(text: str) -> int:
    """`1,234.56` -> 123456."""
    return int(text.replace(",", "").replace(".", ""))


def tree(text: str) -> list[tuple[int, str, int, str, int]]:
    """(indent, name, hundredths of the unit, unit, tensors) of each line of the tree."""
    rows = []
    for line in section(text, "live at the peak"):
        found = re.fullmatch(
            r"( *)(\S.*?) +(-?[\d,]+\.\d\d) (GiB|MiB|KiB) +(?:(-?[\d.]+)%)?(?: +([\d,]+)"
            r" tensors?)?",
            line,
        )
        if found:
            count = int((found[6] or "0").replace(",", ""))
            rows.append((len(found[1]), found[2], hundredths(found[3]), found[4], count))
    return rows


def children(rows: list[tuple[int, str, int, str, int]], at: int) -> list[int]:
    """Places of the lines one level below that at `at`."""
    found = []
    for below in range(at + 1, len(rows)):
        if rows[below][0] <= rows[at][0]:
            break
        if rows[below][0] == rows[at][0] + 2:
            found.append(below)
    return found


def check_tree(text: str, plan: Plan) -> None:
    rows = tree(text)
    unit = UNITS[rows[0][3]]
    assert rows[0][1] == "active"
    assert rows[0][2] == round(plan.heaviest.peak.active * 100 / unit)
    for at, (_, name, number, _, count) in enumerate(rows):
        if below := children(rows, at):
            assert number == sum(rows[child][2] for child in below), name
            assert count == sum(rows[child][4] for child in below), name
    kinds = Counter()
    for alive in plan.heaviest.alive:
        kinds[alive.kind] += alive.bytes
    shown = {rows[child][1]: rows[child][2] for child in children(rows, 0)}
    assert set(shown) - {"rounded up to blocks"} == set(kinds)
    for kind, num_bytes in kinds.items():
        assert abs(shown[kind] - Fraction(num_bytes * 100, unit)) <= 1.5


@pytest.mark.parametrize("depth", [1, 2, 3, 9])
@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_tree_adds_up_to_the_peak(depth: int, width: int):
    plan = build_example_plan()
    text = render(plan, depth=depth, width=width)
    check_tree(text, plan)
    deepest = max(indent for indent, *_ in tree(text)) // 2 - 1
    assert deepest == min(depth, 3)
    assert (f"--depth {depth + 1} opens" in text) == (depth < 3)


def test_layers_alike_are_one_line():
    rows = {
        name: (number, count)
        for _, name, number, _, count in tree(render(build_example_plan(), depth=3, width=100))
    }
    assert rows["model.layers.0-31"] == (round(LAYERS * (LAYER // 4) * 100 / GIB), 2 * LAYERS)
    assert "model.layers.0" not in rows and "model.layers.31.mlp" not in rows
    # Only layer 31 has more activations than the others, and says in what.
    assert {"model.layers.0-30", "model.layers.31", "mlp", "itself"} <= set(rows)
    assert abs(rows["lm_head.weight"][0] - VOCABULARY // 4 * 100 / GIB) < 1


def test_small_branches_are_folded():
    alive = [
        Alive("temporary", f"block.{name}", "", 1000 + 7 * at, 1)
        for at, name in enumerate("abcdefghijklmnopqrs")
    ]
    alive.append(Alive("temporary", "large", "", 10 * GIB, 1))
    plan = with_alive(alive)
    text = render(plan, depth=2, width=90)
    check_tree(text, plan)
    assert [name for indent, name, *_ in tree(text) if indent == 6] == ["large", "19 smaller"]


def test_what_blocks_take_beyond_their_tensors_is_a_line():
    plan = build_example_plan()
    plan.heaviest.peak.active += 2 * GIB
    text = render(plan, depth=3, width=100)
    check_tree(text, plan)
    found = {name: number for _, name, number, _, _ in tree(text)}
    assert abs(found["rounded up to blocks"] - 200) <= 1


def test_a_small_plan_is_told_in_smaller_units():
    plan = with_alive(
        [Alive("parameters", "", "a.weight", 3 * MIB, 2), Alive("batch", "", "tokens", 777, 1)]
    )
    text = render(plan, width=80)
    check_tree(text, plan)
    assert tree(text)[0][2:4] == (300, "MiB")


def with_alive(alive: list[Alive]) -> Plan:
    """A plan of one phase with these storages."""
    active = sum(found.bytes for found in alive)
    return build_example_plan(
        rank_plans=[
            RankPlan(
                0,
                {},
                [PhasePeak("step", active, active, active, active, 0, requested=active)],
                alive,
            )
        ]
    )


@pytest.mark.parametrize("margin", [13 * GIB + 123, 0, -7 * GIB - 1])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_headline_adds_up(margin: int, width: int):
    verdict = DOES_NOT_FIT if margin < 0 else RISKY
    plan = build_example_plan(margin=margin, verdict=verdict)
    text = " ".join(
        line.strip() for line in render(plan, width=width).split("\n\n")[0].splitlines()
    )
    found = re.fullmatch(
        r"(RISKY|DOES NOT FIT)  ?(\d+) x (\S+) \((\S+) GiB each\)  ?peak reserved (\S+) \+ outside"
        r" torch (\S+)"
        r" = (\S+) GiB, (margin|exceeds by) (\S+) GiB",
        text,
    )
    assert found and found[1] == verdict.upper() and found[2] == "4" and found[3] == "rtx4090"
    memory, reserved, outside, total, left = (hundredths(found[at]) for at in (4, 5, 6, 7, 9))
    assert memory == round(plan.device.memory * 100 / GIB)
    assert reserved == round((plan.device.usable - margin) * 100 / GIB)
    assert outside == round(plan.outside.total * 100 / GIB)
    assert total == reserved + outside
    assert total + (left if found[8] == "margin" else -left) == memory
    assert (found[8] == "exceeds by") == (margin < 0)


@pytest.mark.parametrize(
    ("verdict", "usable", "says"),
    [
        (RISKY, 11 * GIB, "the margin is below"),
        (RISKY, 9 * GIB, "needs PYTORCH_ALLOC_CONF=expandable_segments:True, with which 8.49 GiB"),
        (RISKY, 8_600 * MIB, "fits only after retries of the allocator"),
        (DOES_NOT_FIT, 8_600 * MIB, "its tensors would fit, but not in the blocks"),
        (DOES_NOT_FIT, GIB, "the tensors alone take 8."),
    ],
)
def test_why_and_what_to_do(verdict: str, usable: int, says: str):
    """Told at the end, where a terminal stands still, whether it fits or not."""
    plan = build_example_plan(verdict=verdict)
    plan.device.usable, plan.margin = usable, usable - plan.heaviest.reserved
    text = render(plan, width=120)
    assert says in " ".join(text.split("\n\n")[1].split()).removeprefix("why ")
    assert ending(text)[0].startswith(f"{verdict.upper()}: ")
    assert ending(text)[1].endswith("--search looks for the fastest settings that fit")
    assert "--advice" not in ending(text)[1]  # it was asked for
    plan.advice, plan.next_lever = [], "optimizer.state_bits=8 lowers it"
    for full in (False, True):
        assert (
            ending(render(plan, width=120, full=full))[1]
            == "next: optimizer.state_bits=8 lowers it; --advice says what each lever gains;"
            " --search looks for the fastest settings that fit"
        )
    plan.verdict = FITS
    assert not re.search(r"^  why |--search", render(plan, width=120), re.MULTILINE)


def ending(text: str) -> list[str]:
    """The last two sentences: the verdict, and what is next."""
    last = text.rstrip().split("\n\n")[-1]
    return [" ".join(part.split()) for part in last.split("\n", 1)]


@pytest.mark.parametrize("margin", [13 * GIB + 123, 5 * MIB + 77, -7 * GIB - 1])
def test_the_last_lines_repeat_the_first_one_s_verdict_and_margin(margin: int):
    plan = build_example_plan(margin=margin, verdict=DOES_NOT_FIT if margin < 0 else FITS)
    first = " ".join(render(plan, width=120, full=False).split("\n\n")[0].split())
    last = ending(render(plan, width=120, full=False))[0]
    assert last.partition(":")[0] == first.partition("  ")[0].partition(" 4 x")[0]
    left = re.search(r"(?:margin|exceeds by) (\S+ [KMG]iB)$", first)[1]
    assert left in last and last.endswith("on each of 4 x rtx4090")


def test_a_lever_that_was_tried_comes_before_one_that_was_not():
    plan = build_example_plan(
        verdict=DOES_NOT_FIT, margin=-GIB, next_lever="batch_size=1 lowers it"
    )
    assert ending(render(plan))[1].startswith(
        "next: memory.checkpointing=full: 2.00 GiB less at the peak, a step 0.31 s longer, fits;"
        " --search"
    )
    plan.verdict, plan.margin = FITS, GIB  # nothing that was tried makes it faster
    assert ending(render(plan))[1] == "next: batch_size=1 lowers it"


def test_the_short_report_has_what_decides_and_says_what_it_leaves_out():
    plan = build_example_plan(advice=[], notes=["there is no GPU here"])
    text = render(plan, width=120, full=False)
    assert len(text.splitlines()) < 40 < len(render(plan, width=120).splitlines())
    headings = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert [line.split()[0] for line in headings] == [
        "FITS", "memory", "live", "notes", "planned", f"{FITS.upper()}:", "next:",
    ]  # fmt: skip
    assert sum("--full shows the other tables" in line for line in headings) == 1
    assert "- there is no GPU here" in text and "planned in 19.20 s of wall time" in text
    assert "4.00 s, 512 tokens a second, bound by communication" in " ".join(text.split())
    assert "--full" not in render(plan)


def test_the_short_tree_sums_small_kinds_up():
    plan = build_example_plan()
    plan.heaviest.alive += [
        Alive("workspace", "", "", 7777, 1),
        Alive("logits", "", "", 123_456, 2),
    ]
    plan.heaviest.peak.active += 7777 + 123_456
    rows = tree(render(plan, full=False, width=100))
    kinds = [rows[child] for child in children(rows, 0)]
    assert kinds[-1][1].endswith(" smaller") and max(indent for indent, *_ in rows) == kinds[0][0]
    assert rows[0][2] == sum(row[2] for row in kinds) and rows[0][4] == sum(row[4] for row in kinds)
    check_tree(
        render(plan, full=False, width=100, depth=3), plan
    )  # who asks for levels gets all of them


def test_nothing_is_said_twice():
    """Why a length is taken, where a note says so as well; that times are not calibrated."""
    reason = "meta/x: no such folder, and not in the hub cache"
    plan = build_example_plan(assumptions=[f"{reason}; fetch it", "Row length 512."])
    plan.sequence = {
        "tokens": 512,
        "source": f"max_seq_len, as the dataset is not available: {reason}",
    }
    plan.time = dataclasses.replace(plan.time, error="not calibrated: good for ranking only")
    text = " ".join(render(plan, width=120).split())
    assert text.count("not in the hub cache") == 1 and "as the dataset is not available" in text
    assert text.count("not calibrated") == 1 and "not calibrated: good for ranking only" in text
    plan.assumptions = []
    assert " ".join(render(plan, width=120).split()).count("not in the hub cache") == 1


@pytest.mark.parametrize("width", [80, 100])
def test_phases(width: int):
    plan = build_example_plan()
    header, *lines = section(render(plan, width=width), "memory by phase")
    assert header.split()[:6] == ["phase", "active", "allocated", "reserved", "expandable", "host"]
    for peak, line in zip(plan.heaviest.peaks, lines, strict=False):
        sizes = (peak.active, peak.allocated, peak.reserved, peak.reserved_expandable, peak.host)
        assert line.split()[0] == peak.phase
        assert [found[0] for found in SIZE.finditer(line)] == [format_bytes(size) for size in sizes]


def test_outside_torch_adds_up_and_names_its_options():
    plan = build_example_plan()
    lines = section(render(plan, width=80), "outside PyTorch's allocator")
    numbers = [hundredths(SIZE.search(line)[1]) for line in lines]
    assert numbers[0] == sum(numbers[1:]) == round(plan.outside.total * 100 / GIB)
    assert [re.search(r"--\w+-gib", line)[0] for line in lines[1:]] == [
        "--context-gib",
        "--nccl-gib",
        "--reserve-gib",
    ]


def test_several_ranks():
    plan = build_example_plan()
    first = plan.rank_plans[0]
    peaks = [
        dataclasses.replace(peak, reserved=peak.reserved + GIB, host=peak.host + GIB)
        for peak in first.peaks
    ]
    plan.rank_plans.append(
        dataclasses.replace(first, rank=3, coordinates={"data_shard": 3}, peaks=peaks)
    )
    text = render(plan, width=100)
    header, *lines = section(text, "ranks")
    assert [line.split()[0] for line in lines] == ["0", "3"]
    assert ["heaviest" in line for line in lines] == [False, True]
    for rank, line in zip(plan.rank_plans, lines, strict=True):
        sizes = (rank.peak.active, rank.reserved, rank.reserved_expandable, rank.host)
        assert [found[0] for found in SIZE.finditer(line)] == [format_bytes(size) for size in sizes]
    assert "memory by phase, rank 3 (data_shard 3), heaviest of 2 planned" in text
    host = " ".join(section(text, "host memory"))
    assert [found[0] for found in SIZE.finditer(host)] == [
        format_bytes(6 * GIB + 3),
        format_bytes(4 * (6 * GIB + 3)),
    ]


def test_layers_total_counts_no_module_twice():
    plan = build_example_plan()
    *lines, total, note = section(render(plan, width=120), "layers")
    own = [row for row in plan.layers if ".mlp" not in row.module]
    sums = [
        format_bytes(sum(getattr(row, name) for row in own))
        for name in ("bytes", "local_bytes", "kept")
    ]
    assert [found[0] for found in SIZE.finditer(total)][2:] == sums  # after two counts, in billions
    assert format_count(sum(row.parameters for row in own)) in total
    named = {line.split()[0]: line for line in lines}
    sizes = [LAYERS * LAYER, LAYERS * (LAYER // 4), LAYERS * 4_194_304]
    found = [found[0] for found in SIZE.finditer(named["model.layers.0-31"])]
    assert found[2:] == [format_bytes(size) for size in sizes]
    assert "mlp" in named and "model.layers.0" not in named and note.strip().startswith("Kept")


def test_modules_are_named_at_80_columns():
    """A module inside another is shortened and indented below it, so that its name fits; one layer
    that keeps more for backward than the others stands with them.
    """
    plan = build_example_plan()
    plan.layers[1].kept += 1000
    lines = section(render(plan, width=80), "layers")
    names = [line[: len(line) - len(line.lstrip())] + line.split()[0] for line in lines[1:-1]]
    assert names == [
        "  model.embed_tokens",
        "  model.layers.0-31",
        "    mlp",
        "  model.norm",
        "  total",
    ]


def test_communication_totals():
    plan = build_example_plan()
    header, *lines = section(render(plan, width=120), "communication")
    each = LAYERS * (LAYER * 3 // 4)
    rows = {
        " ".join(line.split()[:2]): [found[0] for found in SIZE.finditer(line)] for line in lines
    }
    for name in ("all_gather forward", "all_gather backward", "reduce_scatter backward"):
        assert rows[name] == [format_bytes(LAYER), format_bytes(LAYERS * LAYER), format_bytes(each)]
    assert rows["data_shard: ranks"] == [format_bytes(3 * LAYERS * LAYER), format_bytes(3 * each)]
    assert rows["world: ranks"] == ["12 B", "18 B"]
    assert rows["one rank"] == [format_bytes(3 * LAYERS * LAYER + 12), format_bytes(3 * each + 18)]
    assert rows["all 4"] == [format_bytes(4 * (3 * each + 18))]
    assert [line.split()[:3] for line in lines if ": ranks" in line] == [
        ["data_shard:", "ranks", "0-3"],
        ["world:", "ranks", "0-3"],
    ]
    alone = next(line for line in lines if "data_shard:" in line)
    assert alone.rstrip().endswith(format_duration(3 * LAYERS * 0.0327))
    assert sum("model.layers.0-31" in line for line in lines) == 3


def test_time_says_what_it_is_worth():
    plan = build_example_plan()
    text = " ".join(" ".join(section(render(plan, width=80), "time of a step")).split())
    assert "4.00 s, -50 % to +20 %" in text
    assert (
        "1.25 s: matmuls 80%, attention 10%, memory-bound 10%" in text and "1,234 operators" in text
    )
    assert "bound by communication" in text and "1,000 steps, 1h06m" in text
    plan.time = dataclasses.replace(
        plan.time, calibrated=True, error="+-12 %", communication=1.5, launch=2.0, total=None
    )
    text = " ".join(" ".join(section(render(plan, width=80), "time of a step")).split())
    assert "4.00 s, calibrated; error: +-12 %" in text
    assert "bound by the CPU" in text and text.endswith("1,000 steps")


def test_advice():
    lines = section(render(build_example_plan(), width=80), "effect of one override")
    assert [line.split() for line in lines[1:]] == [
        ["memory.checkpointing=full", "-2.00", "GiB", "+310.0", "ms", "fits"],
        ["Layers", "run", "twice."],
        ["batch_size=2", "+900.00", "MiB", "not", "planned", "does", "not", "fit"],
    ]


def test_parts_that_were_not_planned_are_left_out():
    text = render(
        build_example_plan(
            time=None, communication=[], layers=[], advice=[], assumptions=[], not_modeled=[]
        ),
        width=80,
    )
    for title in (
        "time of a step",
        "communication",
        "layers",
        "what one change",
        "assumed",
        "not modeled",
        "ranks",
    ):
        assert not re.search(f"^{title}", text, re.MULTILINE), title


@pytest.mark.parametrize("width", [80, 93, 120])
@pytest.mark.parametrize("length", [1, 40, 200])
def test_lines_fit(width: int, length: int):
    """However long names are."""
    plan = build_example_plan(assumptions=["word " * length], overrides=["a" * length])
    for row in [*plan.layers, *plan.communication]:
        row.module = row.module.replace("model", "m" * length)
    alive = [
        dataclasses.replace(found, label=f"{'m' * length}.{found.label}")
        for found in list_alive_storages()
    ]
    plan.heaviest.alive = alive
    plan.heaviest.peak.module = "m" * length
    text = render(plan, depth=5, width=width)
    assert max(map(len, text.splitlines())) <= width
    check_tree(text, plan)


def test_control_characters_are_written_out():
    evil = "a\x1b[2Jb\nc\u202e"
    plan = build_example_plan(
        model=evil, overrides=[evil], assumptions=[evil], versions={evil: evil}, mesh={evil: 4}
    )
    plan.heaviest.alive[0].label = plan.heaviest.peak.module = plan.layers[0].module = evil
    plan.advice[0].override = plan.advice[0].note = plan.communication[0].dim = evil
    text = render(plan, depth=4, width=100)
    assert "\x1b" not in text and "[2Jb" in text
    assert (
        len(text.splitlines())
        <= len(render(build_example_plan(), depth=4, width=100).splitlines()) + 12
    )


def test_color_changes_nothing_but_style():
    plain, styled = (
        render(build_example_plan(), width=100, color=color) for color in (False, True)
    )
    assert "\x1b" not in plain and styled.startswith("\x1b[1;32mFITS")
    assert re.sub(r"\x1b\[[\d;]*m", "", styled) == plain


def test_width_follows_the_terminal(monkeypatch: pytest.MonkeyPatch):
    for columns, width in (("40", 60), ("97", 97), ("300", 120)):
        monkeypatch.setenv("COLUMNS", columns)
        assert render(build_example_plan()) == render(build_example_plan(), width=width)
        assert render(build_example_plan(), full=False) == render(
            build_example_plan(), full=False, width=width
        )
