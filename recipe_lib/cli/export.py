"""`tune export CHECKPOINT --merge | --adapter | --hf`: what was trained, as others load it, and checked."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe_lib.cli.arguments import Parser
from recipe_lib.config.suggest import show
from recipe_lib.errors import DONE, CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch

    from recipe_lib.checkpoint.verify import Comparison
    from recipe_lib.models import Decoder, DecoderSpec

DESCRIPTION = """Writes what was trained in a form that other programs load, loads it again and compares logits.

CHECKPOINT is a run's output_dir, one of its state/step_N, or the folder of a PEFT adapter.

  --adapter  the adapter in PEFT's layout (adapter_config.json, adapter_model.safetensors)
  --merge    base and adapter as one Hugging Face model
  --hf       the model of a run that trained all weights, as a Hugging Face folder

An adapter's folder is only checked by --adapter without --out. The exit code is not 0 if the export differs."""
CONFIG, STATES = "config.yaml", "state"


@dataclass(frozen=True)
class ExportSource:
    """What CHECKPOINT is. run: the output_dir it is in, cfg: that run's config; adapter or state: one of the two."""

    run: Path | None
    cfg: Any
    adapter: Path | None
    state: Path | None


def run(words: list[str]) -> int:
    """Exports and checks; prints what was written and how it compares."""
    arguments = read(words)
    found = find(arguments)
    if arguments.hf:
        export_hf(found, arguments)
    else:
        export_adapted(found, arguments)
    return DONE


def read(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser("export", DESCRIPTION)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="output_dir, state/step_N, or an adapter's folder")
    for name, text in (("merge", "base and adapter as one model"), ("adapter", "the adapter"), ("hf", "all weights")):
        parser.add_argument(f"--{name}", action="store_true", help=text)
    parser.add_argument(
        "--out", metavar="DIR", help="a new folder; default: next to the checkpoint, in the run's folder"
    )
    parser.add_argument(
        "--base", metavar="MODEL", help="the adapter's base; default: the one that run or adapter names"
    )
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16"), help="--merge: type of what is written; default: the run's"
    )
    parser.add_argument("--device", default="cpu", choices=("auto", "cpu", "cuda"), help="for the check; default: cpu")
    parser.add_argument("--recipe", help="a recipe of your own that the run was made with")
    arguments = parser.parse(words)
    if sum((arguments.merge, arguments.adapter, arguments.hf)) != 1:
        raise ConfigError("tune export: expected one of --merge, --adapter and --hf; see `tune export --help`")
    if arguments.dtype and not arguments.merge:
        raise ConfigError("--dtype: only a merged model may have another type; use it with --merge, or leave it out")
    if arguments.base and arguments.hf:
        raise ConfigError("--base: a run that trained all weights has no base; leave it out")
    return arguments


def find(arguments: argparse.Namespace) -> ExportSource:
    """Looks at the folder; a state is verified byte by byte. CheckpointError, ConfigError."""
    path, shown = Path(arguments.checkpoint).expanduser(), show(arguments.checkpoint)
    if not path.is_dir():
        raise CheckpointError(f"{shown}: no such folder; expected a run's output_dir, a state/step_N, or an adapter")
    if (path / "adapter_config.json").is_file():
        return ExportSource(*_run_at(path.parent, arguments, path.name == "adapter"), adapter=path, state=None)
    if (path / "manifest.json").is_file():
        folder, cfg = _run_at(path.parent.parent, arguments)
        if cfg is None:
            raise CheckpointError(f"{shown}: {CONFIG} of its run is missing; expected the state inside its output_dir")
        return ExportSource(folder, cfg, None, _state(path.parent, str(path)))
    folder, cfg = _run_at(path, arguments)
    if folder is None:
        what = "is a model folder already" if (path / "config.json").is_file() else "is no run, state or adapter"
        raise CheckpointError(f"{shown}: {what}; expected a run's output_dir, a state/step_N, or an adapter's folder")
    if not arguments.hf and (path / "adapter" / "adapter_config.json").is_file():
        folder, cfg = _run_at(path, arguments, adapter=True)
        _tell_of_newer_state(path / STATES, path / "adapter" / "adapter_config.json")
        return ExportSource(folder, cfg, path / "adapter", None)
    state = _state(path / STATES, "latest") if (path / STATES).is_dir() else None
    if state is None:
        raise CheckpointError(
            f"{shown}: holds neither an adapter nor a state; set checkpoint.save_every_n_steps in the run"
        )
    return ExportSource(folder, cfg, None, state)


def _tell_of_newer_state(states: Path, adapter: Path) -> None:
    """Of a run that had ended, was gone on with and has not ended again, the adapter is older than the states."""
    saved = {path.stat().st_mtime: path.parent for path in states.glob("step_*/manifest.json")}
    if saved and max(saved) > adapter.stat().st_mtime:
        print(f"note: {saved[max(saved)]} is newer than {adapter.parent}, which is taken; name the state to export it")


def _owner(folder: Path) -> Path:
    """Where the config of the run is that made `folder/adapter`: a run that replaces it may be under way."""
    from recipe_lib.checkpoint.run_files import read_record

    record = read_record(folder)
    if record is None or "adapter" not in record.earlier or not record.kept:
        return folder
    print(f"note: {folder / 'adapter'} is of the run before the one in {folder}; see {folder / record.kept[0]}")
    return folder / record.kept[0]


def _run_at(folder: Path, arguments: argparse.Namespace, adapter: bool = False) -> tuple[Path | None, Any]:
    """The run's folder and config, if the folder is a run's."""
    config = (_owner(folder) if adapter else folder) / CONFIG
    if not config.is_file():
        return None, None
    from recipe_lib.cli.recipes import recipe_for
    from recipe_lib.config import load_config

    return folder, load_config(config, [], recipe_for(str(config), arguments.recipe).schema())


def _state(root: Path, which: str) -> Path | None:
    from recipe_lib.checkpoint.rank_agreement import SingleRank
    from recipe_lib.checkpoint.state import find_state

    return find_state(root, which, SingleRank())


def _target(found: ExportSource, kind: str, arguments: argparse.Namespace) -> Path:
    """Where to write; a folder that is there is not touched."""
    if arguments.out:
        out = Path(arguments.out).expanduser()
    elif found.state is not None and found.run is not None:
        out = found.run / f"{kind}_{found.state.name}"
    else:
        assert found.adapter is not None
        out = found.run / kind if found.run else found.adapter.with_name(f"{found.adapter.absolute().name}-{kind}")
    if out.exists():
        raise ConfigError(f"{out}: exists; choose another folder with --out, or remove it")
    return out


def export_hf(found: ExportSource, arguments: argparse.Namespace) -> None:
    """The model of a state of full fine-tuning."""
    from recipe_lib.checkpoint.rank_agreement import SingleRank
    from recipe_lib.checkpoint.state import holds_adapters, load_trained
    from recipe_lib.checkpoint.verify import compare, plain_model, prompt_logits
    from recipe_lib.checkpoint.weights_out import export_model
    from recipe_lib.cli.inference_device import choose_device
    from recipe_lib.models import build_meta, preset_config, read_config, spec_from_config
    from recipe_lib.parallel import DTYPES
    from recipe_lib.units import GIB

    if found.state is None or holds_adapters(found.state):
        raise CheckpointError(f"{show(arguments.checkpoint)}: holds an adapter; use --merge or --adapter")
    cfg, out = found.cfg, _target(found, "model", arguments)
    device = choose_device(arguments.device)
    config = read_config(_base(cfg.model.path)) if cfg.model.path else preset_config(cfg.model.preset)
    spec = spec_from_config(config, where=cfg.model.path or cfg.model.preset)
    dtype = DTYPES[cfg.dtype]
    model = build_meta(spec, dtype).to_empty(device=device).eval()
    load_trained(found.state, model, SingleRank())
    sizes = int(cfg.checkpoint.max_shard_gib * GIB)
    export_model(model, spec, config, out, max_shard_bytes=sizes, world=SingleRank(), **_tokenizer(cfg, None))
    trained = prompt_logits(model)
    del model
    tell(f"model: {out}", compare(trained, prompt_logits(plain_model(spec, out, dtype, device))), dtype, out)


def _base(name: str) -> Path:
    from recipe_lib.checkpoint.huggingface import find_checkpoint

    return find_checkpoint(name)


def _tokenizer(cfg: Any, base: Path | None) -> dict[str, Any]:
    """Arguments of an export: the tokenizer's files, and the template and stop tokens that the run used."""
    if cfg is None:
        return {"tokenizer_folder": base}
    from recipe_lib.tokenizers import load_tokenizer

    folder = Path(cfg.tokenizer.path or base or _base(cfg.model.path))
    template = cfg.tokenizer.chat_template
    return {
        "tokenizer_folder": folder,
        "chat_template": Path(template) if template else None,
        "stop_ids": load_tokenizer(folder, template).stop_ids,
    }


def export_adapted(found: ExportSource, arguments: argparse.Namespace) -> None:
    """The adapter of a folder or of a state, alone or merged into its base."""
    import tempfile

    from recipe_lib.checkpoint.huggingface import check_weights
    from recipe_lib.checkpoint.state import holds_adapters
    from recipe_lib.cli.inference_device import choose_device
    from recipe_lib.models import read_config, spec_from_config

    if found.state is not None and not holds_adapters(found.state):
        raise CheckpointError(f"{found.state}: is of a run that trained all weights; use --hf")
    base = _base_of(found, arguments)
    config = read_config(base)
    spec = spec_from_config(config, where=str(base))
    check_weights(spec, base)
    device = choose_device(arguments.device)
    rewrite = found.state is not None or (arguments.adapter and arguments.out)
    out = None
    if arguments.merge:
        out = _target(found, "model", arguments)
    elif rewrite:
        out = _target(found, "adapter", arguments)
    model, dtype = _trained_model(found, spec, base, config, device)
    trained = prompt_logits_of(model)
    with tempfile.TemporaryDirectory(prefix="tune-export-") as scratch:
        adapter = found.adapter or Path(scratch) / "adapter"
        if rewrite:
            adapter = out if arguments.adapter and out else adapter
            _write_adapter(model, spec, found, base, config, adapter)
        del model
        if arguments.merge and out:
            _check_merged(found, arguments, base, adapter, out, dtype, device, trained)
        else:
            _check_adapter(found, base, spec, adapter, dtype, device, trained, written=bool(rewrite))


def _base_of(found: ExportSource, arguments: argparse.Namespace) -> Path:
    if arguments.base:
        return _base(arguments.base)
    if found.cfg is not None:
        if not found.cfg.model.path:
            raise CheckpointError(
                f"{show(arguments.checkpoint)}: was trained with random weights (model.preset), which are in no "
                "checkpoint; start from model.path to have an adapter that others can load"
            )
        return _named_base(found.cfg.model.path)
    from recipe_lib.checkpoint.adapter_config import read_adapter_config

    assert found.adapter is not None
    name = read_adapter_config(found.adapter).base
    if not name:
        raise CheckpointError(f"{show(arguments.checkpoint)}: adapter_config.json names no base; give it with --base")
    return _named_base(name)


def _named_base(name: str) -> Path:
    """The base that a run or an adapter names, perhaps by a path from another folder or machine."""
    try:
        return _base(name)
    except CheckpointError as error:
        raise CheckpointError(f"{error}, or say where the base is with --base") from error


def _trained_model(
    found: ExportSource, spec: "DecoderSpec", base: Path, config: dict[str, Any], device: "torch.device"
) -> tuple["Decoder", "torch.dtype"]:
    """The model as it was trained: base, adapter, types and storage. And the type of its base."""
    import torch

    from recipe_lib.checkpoint.adapter_files import BASE_DTYPE, check_base, check_fits, read_adapter
    from recipe_lib.checkpoint.rank_agreement import SingleRank
    from recipe_lib.checkpoint.state import load_trained
    from recipe_lib.checkpoint.verify import model_of_adapter, model_with_adapters
    from recipe_lib.cli.inference_device import choose_dtype
    from recipe_lib.parallel import DTYPES

    if found.state is not None:
        dtype = DTYPES[found.cfg.dtype]
        model = model_with_adapters(spec, base, found.cfg.lora, dtype, device)
        load_trained(found.state, model, SingleRank())
        return model, dtype
    assert found.adapter is not None
    adapter = read_adapter(found.adapter)
    check_fits(adapter, spec)
    check_base(adapter, spec, base)
    named = adapter.metadata.get(BASE_DTYPE, "")
    known = {str(kind).removeprefix("torch."): kind for kind in (torch.float64, torch.float32, torch.bfloat16)}
    dtype = known.get(named) or choose_dtype("auto", config)
    return model_of_adapter(found.adapter, spec, base, dtype, device)[0], dtype


def prompt_logits_of(model: "Decoder") -> tuple["torch.Tensor", "torch.Tensor"]:
    """Logits of the model, and of its base alone."""
    from recipe_lib.checkpoint.verify import prompt_logits

    return prompt_logits(model), prompt_logits(model, with_adapters=False)


def _write_adapter(
    model: "Decoder", spec: "DecoderSpec", found: ExportSource, base: Path, config: dict[str, Any], out: Path
) -> None:
    from recipe_lib.checkpoint.adapter_files import read_adapter
    from recipe_lib.checkpoint.adapter_out import export_adapter
    from recipe_lib.checkpoint.rank_agreement import SingleRank
    from recipe_lib.checkpoint.verify import adapter_settings_of

    if found.state is not None:
        lora, name = found.cfg.lora, found.cfg.model.path
    else:
        assert found.adapter is not None
        adapter = read_adapter(found.adapter)
        lora, name = adapter_settings_of(adapter, spec), adapter.config.base or str(base)
    export_adapter(
        model,
        spec,
        lora,
        out,
        base=name,
        base_folder=base,
        source_config=config,
        world=SingleRank(),
        **_tokenizer(found.cfg, base),
    )


def _check_adapter(
    found: ExportSource,
    base: Path,
    spec: "DecoderSpec",
    adapter: Path,
    dtype: "torch.dtype",
    device: "torch.device",
    trained: tuple["torch.Tensor", "torch.Tensor"],
    written: bool,
) -> None:
    from recipe_lib.checkpoint.adapter_files import read_adapter
    from recipe_lib.checkpoint.verify import check_names, compare, model_of_adapter, prompt_logits

    model, filled = model_of_adapter(adapter, spec, base, dtype, device)
    held = read_adapter(adapter)
    print(f"check: {filled} modules have their adapter, none of {len(held.tensors)} in the file is left over")
    if written:
        check_names(adapter, spec, base)
        print("check: names are those of the base's modules, as PEFT and vLLM look for them")
    if held.config.dora:
        print("note: vLLM does not load DoRA adapters; serve the merged model there (tune export --merge)")
    tell(f"adapter: {adapter}", compare(trained[0], prompt_logits(model), trained[1]), dtype, adapter)


def _check_merged(
    found: ExportSource,
    arguments: argparse.Namespace,
    base: Path,
    adapter: Path,
    out: Path,
    dtype: "torch.dtype",
    device: "torch.device",
    trained: tuple["torch.Tensor", "torch.Tensor"],
) -> None:
    from recipe_lib.checkpoint.adapter_files import BASE_STORAGE, read_adapter
    from recipe_lib.checkpoint.merged import merge_adapter
    from recipe_lib.checkpoint.rank_agreement import SingleRank
    from recipe_lib.checkpoint.verify import compare, plain_model, prompt_logits
    from recipe_lib.models import read_config, spec_from_config
    from recipe_lib.parallel import DTYPES

    held = read_adapter(adapter)
    wanted = DTYPES[arguments.dtype] if arguments.dtype else dtype
    merge_adapter(
        base,
        adapter,
        out,
        quantize=held.metadata.get(BASE_STORAGE, "none"),
        dtype=dtype,
        out_dtype=wanted,
        ranks=SingleRank(),
        **_tokenizer(found.cfg, base),
    )
    spec = spec_from_config(read_config(out), where=str(out))
    print(f"check: {len(held.tensors)} adapted modules are merged, every tensor of the model is there")
    comparison = compare(trained[0], prompt_logits(plain_model(spec, out, wanted, device)), trained[1])
    tell(f"model: {out}", comparison, min(dtype, wanted, key=lambda kind: kind.itemsize), out)
    if comparison.change and comparison.difference > comparison.change / 2:
        print("note: rounding hides what the adapter has learned; try --dtype fp32, or serve base and adapter apart")


def tell(written: str, comparison: "Comparison", dtype: "torch.dtype", out: Path) -> None:
    """Prints what was written and how it compares; CheckpointError if it differs by more than rounding."""
    print(written)
    if not comparison.agrees(dtype):
        raise CheckpointError(f"{out}: does not compute what was trained: {comparison}; do not use it, and report this")
    print(f"check: {comparison}")
