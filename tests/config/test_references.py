"""`${key}` has the value of another key, from whichever file or override; what cannot be filled in
is one line.
"""

import pytest

from recipe_lib.cli.main import main
from recipe_lib.config.load import load_with_origins as load_all

GOOD = "model: {path: x}\ndata: {source: rows.jsonl}\n"


def test_values_of_other_keys(load):
    text = (
        "seed: 7\nepochs: ${batch_size}\nbatch_size: 4\noutput_dir: out/${optimizer.name}-${seed}\n"
    )
    cfg = load(text, "seed=8")
    assert (cfg.epochs, cfg.output_dir) == (4, "out/adamw-8")
    assert load("", "max_steps=${batch_size}", "batch_size=3").max_steps == 3
    assert load("max_steps: ${batch_size}\n", "max_steps=9").max_steps == 9
    assert load("max_steps: ${batch_size}\n", "~max_steps").max_steps is None


def test_other_types_and_places(load):
    assert load("optimizer: {lr: 1e-4, eps: '${.lr}'}\n").optimizer.eps == 1e-4
    assert load(
        "optimizer: {betas: [0.5, '${clip_grad_norm}']}\nclip_grad_norm: 0.25\n"
    ).optimizer.betas == [0.5, 0.25]
    assert load(
        "optimizer: {betas: [0.1, 0.2]}\nmemory: {cpu_offload: '${checkpoint.save_model}'}\n"
    ).memory.cpu_offload
    assert load("resume: '${model.preset}'\n").resume is None
    cfg = load(
        "",
        "~data.source",
        "data.sources=[{source: '${output_dir}/a', weight: '${epochs}'}]",
        "epochs=2",
    )
    assert (cfg.data.sources[0].source, cfg.data.sources[0].weight) == ("outputs/run/a", 2.0)
    assert load("data: {source: x, columns: {output: '${optimizer.name}'}}\n").data.columns == {
        "output": "adamw"
    }
    assert load("max_steps: ${epochs}\nepochs: ${batch_size}\nbatch_size: 5\n").max_steps == 5


@pytest.mark.parametrize(
    ("text", "fault"),
    [("max_steps: ${epoch}\n", "1: max_steps: found '${epoch}': there is no key epoch; did you mean epochs?"),
     ("seed: 1\nmax_steps: ${oc.env:HOME}\n",
      "2: max_steps: found '${oc.env:HOME}', expected ${section.key} of this config; environment variables and "
      "resolvers are refused, write the value itself"),
     ("max_steps: ${max_steps}\n",
      "1: max_steps: found '${max_steps}': the keys name each other in a circle; write one value itself"),
     ("max_steps: ${optimizer.name}\n",
      "1: max_steps: found '${optimizer.name}', which is 'adamw', expected an integer >= 1, or null"),
     ("max_steps: ${tp_size}\n",
      "1: max_steps: found '${tp_size}': there is no key tp_size; did you mean parallel.tensor?"),
     ("max_steps: ${training.steps}\n",
      "1: max_steps: found '${training.steps}': there is no key training.steps; did you mean max_steps?"),
     ("max_steps: ${HOME}\n",
      "1: max_steps: found '${HOME}': there is no key HOME; `tune cat CONFIG --describe` lists all keys"),
     ("output_dir: out-\\${seed}\n",
      "1: output_dir: found 'out-\\${seed}', expected no ${ that is meant as text"),
     ("max_steps: ${optimizer\n", "1: max_steps: found '${optimizer', expected ${section.key}"),
     ("optimizer: {betas: [${seed}, 0.9]}\n",
      "1: not valid YAML: inside a list or mapping ${...} has to be in quotes")],
)  # fmt: skip
def test_what_cannot_be_filled_in(faults, text, fault):
    assert faults(text) == [f"c.yaml:{fault}"]


def test_words_and_numbers_in_texts(load):
    cfg = load(
        "output_dir: ${dtype}-${max_steps}-${compile}\nlog: {run_name: '${seed}'}\n", "seed=42"
    )
    assert (cfg.output_dir, cfg.log.run_name) == ("bf16-null-false", "42")
    assert load("output_dir: '123'\nlog: {run_name: '${output_dir}'}\n").log.run_name == "123"


def test_the_line_of_a_value_inside_a_list(faults):
    text = "max_steps: 3\ndata:\n  sources:\n  - source: a\n  - source: b\n    weight: ${nope}\n"
    (line,) = [line for line in faults(text) if "nope" in line]
    assert ":6: data.sources: found '${nope}': there is no key nope" in line


def test_a_circle_and_a_fault_elsewhere(faults):
    found = faults("max_steps: ${epochs}\nepochs: ${max_steps}\n")
    assert (
        found[0]
        == "c.yaml:2: epochs: found '${max_steps}': the keys name each other in a circle; write one"
        " value itself"
    )
    circles = (
        "max_steps: ${epochs}\nepochs: ${max_steps}\nbatch_size:"
        " ${epochs}\ngradient_accumulation_steps: ${dtype}\n"
    )
    assert sorted(faults(f"{circles}seed: ${{seed}}\noutput_dir: ${{nope}}\n")) == [
        found[0],
        (
            "c.yaml:4: gradient_accumulation_steps: found '${dtype}', which is 'bf16', expected an"
            " integer >= 1"
        ),
        (
            "c.yaml:5: seed: found '${seed}': the keys name each other in a circle; write one value"
            " itself"
        ),
        (
            "c.yaml:6: output_dir: found '${nope}': there is no key nope; `tune cat CONFIG"
            " --describe` lists all keys"
        ),
    ]
    assert faults("max_steps: ${epochs}\nepochs: many\n") == [
        "c.yaml:2: epochs: found 'many', expected an integer >= 1"
    ]


def test_later_files_win_key_by_key(tmp_path):
    base = tmp_path / "base.yaml"
    mine = tmp_path / "mine.yaml"
    base.write_text(GOOD + "seed: 3\noptimizer:\n  lr: 1e-3\n  eps: 1e-6\nmax_steps: ${seed}\n")
    mine.write_text("seed: 5\noptimizer:\n  lr: 1e-4\n")
    loaded = load_all([base, mine], ["epochs=2"])
    cfg = loaded.cfg
    where = {name: place for name, _, place in loaded.rows}
    assert (cfg.seed, cfg.max_steps, cfg.optimizer.lr, cfg.optimizer.eps, cfg.epochs) == (
        5,
        5,
        1e-4,
        1e-6,
        2,
    )
    assert where["optimizer.lr"] == f"{mine}:3" and where["optimizer.eps"] == f"{base}:6"
    assert load_all([mine, base]).cfg.seed == 3


def test_faults_name_the_right_file(tmp_path, capsys):
    base = tmp_path / "base.yaml"
    mine = tmp_path / "mine.yaml"
    base.write_text(GOOD + "seed: x\nresume: latest\n")
    mine.write_text("epoch: 3\noverwrite_output_dir: true\n")
    assert main(["validate", str(base), "--config", str(mine)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: {base}:3: seed: found 'x', expected an integer >= 0",
        f"error: {mine}:1: epoch: unknown key; did you mean epochs?",
        (
            f"error: {mine}:2, {base}:4: resume, overwrite_output_dir: one goes on from what"
            " output_dir holds, the other replaces it; remove one of the two"
        ),
    ]


def test_on_the_command_line(tmp_path, capsys):
    mine = tmp_path / "mine.yaml"
    mine.write_text("seed: 5\noutput_dir: out/${seed}\n")
    assert main(["validate", "--config", "demo/full", "--config", str(mine), "epochs=2"]) == 0
    assert capsys.readouterr().out.startswith(
        f"demo/full, {mine}: a valid config of full_finetune_distributed\n"
    )
    assert main(["cat", "demo/full", "--config", str(mine), "--resolved"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(
        line.startswith("output_dir: out/5 ") and line.endswith(f"# {mine}:2") for line in lines
    )
    assert main(["cat", "demo/full", "--config", str(mine)]) == 2
    assert main(["data", "check", "demo/full", "--config", str(tmp_path / "absent.yaml")]) == 2


CHAIN = (
    "data.cache_dir",
    "tokenizer.path",
    "log.run_name",
    "output_dir",
    "model.path",
    "data.source",
    "resume",
)


@pytest.mark.parametrize("start", ["x", "''", "${resume}", "[a, b]"])
@pytest.mark.parametrize("written", ["${%s}" * 10, "a ${%s} ${%s} ${%s}"])
def test_names_that_grow_end_in_a_line(faults, monkeypatch, start, written):
    """Ten names of ten names: filled in anew each time they would be a million texts."""
    monkeypatch.setattr("recipe_lib.config.references.MOST_CHARACTERS", 2**12)
    values = dict(
        zip(CHAIN, [start, *(written.replace("%s", name) for name in CHAIN[:-1])], strict=True)
    )
    sections: dict[str, list[str]] = {}
    for key, value in values.items():
        section, _, word = key.rpartition(".")
        sections.setdefault(section, []).append(
            f"{word}: {value if value in ('[a, b]', chr(39) * 2) else repr(value)}"
        )
    lines = [line for section, inner in sections.items() for line in
             (inner if not section else [f"{section}: {{{', '.join(inner)}}}"])]  # fmt: skip
    found = faults("\n".join(reversed(lines)) + "\n")
    assert found and all("\n" not in line and len(line) < 400 for line in found)


def test_names_are_filled_in_within_bounds(faults, monkeypatch):
    monkeypatch.setattr("recipe_lib.config.references.MOST_CHARACTERS", 2**12)
    (line,) = faults("log: {run_name: '" + "${seed}" * 20 + "'}\n")
    assert "the names of the config grow beyond 4096 characters; write it out" in line
