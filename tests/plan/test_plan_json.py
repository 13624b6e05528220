"""A plan as JSON: written, read back as the same plan, refused where it is another one; and its
reference page.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from recipe_lib.errors import ConfigError
from recipe_lib.plan import plan_schema as result
from recipe_lib.plan.plan_schema import SCHEMA_VERSION, DimensionPlan, Plan, Volume, read_plan
from tests.plan.plans import build_example_pipeline, build_example_plan

PAGE = Path(__file__).parents[2] / "docs" / "plan_json.md"
# Types in words of JSON.
WORDS = {int: "integer", float: "number", str: "text", bool: "true or false", Any: "anything"}


def as_json(plan: Plan) -> dict:
    return json.loads(json.dumps(plan.to_json()))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"receipt": "2026-11-20, rtx4090"},
        {"time": None, "advice": [], "layers": [], "communication": []},
    ],
)
def test_a_plan_reads_back(fields: dict, tmp_path: Path):
    plan = build_example_plan(**fields)
    assert Plan.from_json(as_json(plan)) == plan
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
    assert read_plan(tmp_path / "plan.json") == plan


def test_every_field_is_read_back():
    """One that is changed is another plan: nothing is left at a default."""
    plan = build_example_plan()
    content = as_json(plan)
    content["rank_plans"][0]["events"] += 1
    content["outside"]["reserve"] += 1
    read = Plan.from_json(content)
    assert (read.rank_plans[0].events, read.outside.reserve) == (30_001, 3 * 2**20 + 1)


def test_how_long_planning_took_is_in_no_file():
    slow = build_example_plan(seconds=9.0)
    quick = build_example_plan(seconds=1.0)
    assert json.dumps(slow.to_json()) == json.dumps(quick.to_json())


def test_new_keys_are_passed_over_and_defaults_filled_in():
    content = as_json(build_example_plan())
    content["tomorrow"] = content["time"]["tomorrow"] = 1
    del content["versions"], content["advice"][0]["note"]
    read = Plan.from_json(content)
    assert read.versions == {} and read.advice[0].note == ""


@pytest.mark.parametrize("number", [SCHEMA_VERSION + 1, 0, str(SCHEMA_VERSION), None])
def test_another_schema_is_refused(number: object):
    content = as_json(build_example_plan()) | {"schema": number}
    with pytest.raises(
        ConfigError, match=f"old.json: found schema {number}, expected {SCHEMA_VERSION}"
    ):
        Plan.from_json(content, "old.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: plan.pop("schema"), "x.json: found no `schema`; expected a plan"),
        (lambda plan: plan.pop("margin"), "x.json: found no `margin`"),
        (lambda plan: plan.update(margin="1"), "x.json: margin: found '1', expected int"),
        (lambda plan: plan.update(ranks=True), "x.json: ranks: found 'True', expected int"),
        (lambda plan: plan.update(mesh=[4]), r"x.json: mesh: found '\[4\]', expected dict"),
        (lambda plan: plan.update(mesh={"a": "b"}), "x.json: mesh.a: found 'b', expected int"),
        (lambda plan: plan.update(device=3), "x.json: device: found '3', expected an object"),
        (
            lambda plan: plan["rank_plans"][0]["peaks"][1].pop("host"),
            r"rank_plans\[0\]: peaks\[1\]: found no `host`",
        ),
        (
            lambda plan: plan["time"].update(step="1 s"),
            "x.json: time: step: found '1 s', expected float",
        ),
        (
            lambda plan: plan["time"].update(mfu=True),
            "x.json: time: mfu: found 'True', expected float",
        ),
        (lambda plan: plan.update(rank_plans=[]), "x.json: found a plan without peaks"),
    ],
)
def test_what_is_no_plan_is_refused(change, message: str):
    content = as_json(build_example_plan())
    change(content)
    with pytest.raises(ConfigError, match=message):
        Plan.from_json(content, "x.json")


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]", "3", "\xff"])
def test_files_that_are_no_plan(text: str, tmp_path: Path):
    path = tmp_path / "plan.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=str(path)):
        read_plan(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_plan(tmp_path / "missing.json")


def read_page() -> dict[str, dict[str, str]]:
    """Return the types of the page by class and key."""
    sections = {}
    for part in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        rows = [line.split(" | ") for line in part.splitlines() if line.startswith("| `")]
        assert all(len(row) == 3 and row[2] != "|" for row in rows), "a key without a description"
        sections[part.partition("\n")[0]] = {row[0].strip("| `"): row[1] for row in rows}
    return sections


def find_innermost(declared: Any) -> Any:
    """Return of `list[dict[str, int]] | None` int."""
    inside = [part for part in get_args(declared) if part is not type(None)]
    return find_innermost(inside[-1]) if inside else declared


def test_the_page_describes_every_key():
    """In the order of the fields; what may be null or left out is said."""
    for name, keys in read_page().items():
        described = getattr(result, name)
        declared = get_type_hints(described)
        entries = [entry for entry in dataclasses.fields(described) if entry.compare]
        assert list(keys) == [entry.name for entry in entries]
        for entry in entries:
            words = keys[entry.name]
            may_be_left_out = {entry.default, entry.default_factory} != {dataclasses.MISSING}
            assert words.endswith("(may be left out)") == may_be_left_out, entry.name
            assert (" or null" in words) == (type(None) in get_args(declared[entry.name])), (
                entry.name
            )
            innermost = find_innermost(declared[entry.name])
            word = WORDS.get(innermost) or f"[{innermost.__name__}](#{innermost.__name__.lower()})"
            assert word in words, entry.name


def test_the_page_describes_what_is_written():
    """Every object of a plan with all its parts has a section with just its keys."""
    sections = read_page()
    traffic = DimensionPlan(
        "data_shard", ["data_shard"], [[0, 1, 2, 3]], [Volume(1, 8, 6)], [Volume(1, 8, 6)]
    )
    plan = as_json(build_example_plan(pipeline=build_example_pipeline(), dimensions=[traffic]))
    pipeline = plan["pipeline"]
    objects = {"Plan": {key: value for key, value in plan.items() if key != "schema"}, "DeviceFacts": plan["device"],
               "RankPlan": plan["rank_plans"][0], "PhasePeak": plan["rank_plans"][0]["peaks"][0],
               "Alive": plan["rank_plans"][0]["alive"][0], "OutsideTorch": plan["outside"],
               "LayerRow": plan["layers"][0], "CommunicationRow": plan["communication"][0],
               "TimePlan": plan["time"], "Advice": plan["advice"][0], "PipelinePlan": pipeline,
               "StagePlan": pipeline["places"][0], "ActionSpan": pipeline["spans"][0],
               "DimensionPlan": plan["dimensions"][0], "Volume": plan["dimensions"][0]["rank_step"][0]}  # fmt: skip
    assert set(objects) == set(sections)
    for name, content in objects.items():
        assert list(sections[name]) == list(content)
