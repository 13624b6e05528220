"""`tune export CHECKPOINT --merge | --adapter | --hf | --gguf | --quantize`: what was trained, as others load it."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe_lib.checkpoint.weight_files import GGUF_KINDS, GROUP_SIZE, QUANTIZED_KINDS
from recipe_lib.cli.arguments import Parser
from recipe_lib.cli.export_source import (
    ExportSource,
    base_of,
    beside_weights,
    find_base,
    find_export,
    implementation_of,
    write_merged,
)
from recipe_lib.config.local_files import base_name
from recipe_lib.config.suggest import show
from recipe_lib.errors import DONE, CheckpointError, ConfigError
from recipe_lib.logs import print_wrapped

if TYPE_CHECKING:
    import torch

    from recipe_lib.checkpoint.verify import Comparison
    from recipe_lib.models import Decoder
    from recipe_lib.models.spec import ModelSpec

DESCRIPTION = """Writes what was trained in a form that other programs load, loads it again and compares logits.

CHECKPOINT is a run's output_dir, one of its state/step_N, or the folder of a PEFT adapter.

  --adapter  the adapter in PEFT's layout (adapter_config.json, adapter_model.safetensors)
  --merge    base and adapter as one Hugging Face model
  --hf       the model of a run that trained all weights, as a Hugging Face folder

and for these also a model folder, of a run or not:

  --gguf KIND      one file for llama.cpp and Ollama; of an adapter's folder, the adapter by itself
  --quantize KIND  a Hugging Face folder with linears in 4 or 8 bits, by torchao

An adapter's folder is only checked by --adapter without --out. The exit code is not 0 if the export differs."""


def run(words: list[str]) -> int:
    """Exports and checks; prints what was written and how it compares."""
    arguments = read(words)
    if arguments.gguf:
        from recipe_lib.cli.export_gguf import export_gguf

        export_gguf(arguments)
        return DONE
    if arguments.quantize:
        from recipe_lib.cli.export_quantized import export_quantized

        export_quantized(arguments)
        return DONE
    found = find_export(arguments)
    if arguments.hf:
        export_hf(found, arguments)
    else:
        export_adapted(found, arguments)
    return DONE


def parser() -> Parser:
    """The options of the verb."""
    options = Parser("export", DESCRIPTION)
    options.add_argument("checkpoint", metavar="CHECKPOINT", help="output_dir, state/step_N, or an adapter's folder")
    for name, text in (("merge", "base and adapter as one model"), ("adapter", "the adapter"), ("hf", "all weights")):
        options.add_argument(f"--{name}", action="store_true", help=text)
    options.add_argument("--gguf", choices=GGUF_KINDS, help="a GGUF file, its matrices in this type")
    options.add_argument("--pre", metavar="NAME", help="--gguf: llama.cpp's pre-tokenizer, if it is not recognized")
    options.add_argument("--quantize", choices=QUANTIZED_KINDS, help="a Hugging Face folder with quantized linears")
    size = f"--quantize int4: weights that share a scale; default: {GROUP_SIZE}, or a run's qat_group_size"
    options.add_argument("--group-size", type=int, metavar="N", help=size)
    options.add_argument(
        "--out",
        metavar="PATH",
        help="a new folder (--gguf: file); default: next to the checkpoint, in the run's folder",
    )
    options.add_argument(
        "--base", metavar="MODEL", help="the adapter's base; default: the one that run or adapter names"
    )
    options.add_argument(
        "--dtype", choices=("fp32", "bf16"), help="--merge: type of what is written; default: the run's"
    )
    options.add_argument("--device", default="cpu", choices=("auto", "cpu", "cuda"), help="for the check; default: cpu")
    options.add_argument("--recipe", help="a recipe of your own that the run was made with")
    return options


def read(words: list[str]) -> argparse.Namespace:
    """The command line."""
    arguments = parser().parse(words)
    kinds = ("merge", "adapter", "hf", "gguf", "quantize")
    if sum(bool(getattr(arguments, kind)) for kind in kinds) != 1:
        *others, last = (f"--{kind}" for kind in kinds)
        raise ConfigError(f"tune export: expected one of {', '.join(others)} and {last}; see `tune export --help`")
    if arguments.pre and not arguments.gguf:
        raise ConfigError("--pre: only a GGUF file names a pre-tokenizer; use it with --gguf, or leave it out")
    if arguments.group_size is not None and arguments.quantize != "int4":
        raise ConfigError("--group-size: is for --quantize int4; leave it out")
    if arguments.device != "cpu" and (arguments.gguf or arguments.quantize):
        raise ConfigError(
            f"--device: found {arguments.device}, but this export is made and checked on cpu; leave it out"
        )
    if arguments.dtype and not arguments.merge:
        raise ConfigError("--dtype: only a merged model may have another type; use it with --merge, or leave it out")
    if arguments.base and arguments.hf:
        raise ConfigError("--base: a run that trained all weights has no base; leave it out")
    return arguments


def _target(found: ExportSource, kind: str, arguments: argparse.Namespace) -> Path:
    """Where to write; a folder that is there is not touched."""
    if arguments.out:
        out = Path(arguments.out).expanduser()
    elif found.state is not None and found.run is not None:
        out = found.run / f"{kind}_{found.state.name}"
    else:
        assert found.adapter is not None
        out = found.run / kind if found.run else found.adapter.with_name(f"{found.adapter.absolute().name}-{kind}")
    if os.path.lexists(out):
        raise ConfigError(f"{out}: exists; choose another folder with --out, or remove it")
    return out


def export_hf(found: ExportSource, arguments: argparse.Namespace) -> None:
    """The model of a state of full fine-tuning."""
    from recipe_lib.checkpoint.rank_agreement import SingleRank
    from recipe_lib.checkpoint.state import holds_adapters, load_state
    from recipe_lib.checkpoint.verify import check_with_transformers, compare, load_model, prompt_logits
    from recipe_lib.checkpoint.weight_accounts import tell_left_out
    from recipe_lib.checkpoint.weights_out import export_model
    from recipe_lib.cli.inference_device import choose_device
    from recipe_lib.models import build_meta, preset_config, read_config, read_trained_spec
    from recipe_lib.models.meta_init import allocate
    from recipe_lib.parallel import DTYPES
    from recipe_lib.training.next_commands import model_commands, print_next
    from recipe_lib.units import GIB

    if found.state is None or holds_adapters(found.state):
        raise CheckpointError(f"{show(arguments.checkpoint)}: holds an adapter; use --merge or --adapter")
    cfg, out = found.cfg, _target(found, "model", arguments)
    device = choose_device(arguments.device)
    base = find_base(cfg.model.path) if cfg.model.path else None
    config = read_config(base) if base else preset_config(cfg.model.preset)
    spec = read_trained_spec(config, cfg.model.path or cfg.model.preset, cfg.model.implementation)
    dtype = DTYPES[cfg.dtype]
    model = build_meta(spec, dtype)
    allocate(model, device)
    model.eval()
    load_state(found.state, model, None, SingleRank())
    sizes = int(cfg.checkpoint.max_shard_gib * GIB)
    beside = beside_weights(found, base, spec, is_adapter=False)
    export_model(model, spec, config, out, max_shard_bytes=sizes, world=SingleRank(), **beside)
    if base:
        tell_left_out(spec, base, "export")
    trained = prompt_logits(model)
    del model
    tell(f"model: {out}", compare(trained, prompt_logits(load_model(spec, out, dtype, device))), dtype, out)
    print_wrapped(check_with_transformers(out, spec, dtype, device, trained))
    print_next(model_commands(out))


def export_adapted(found: ExportSource, arguments: argparse.Namespace) -> None:
    """The adapter of a folder or of a state, alone or merged into its base."""
    import tempfile

    from recipe_lib.checkpoint.huggingface import check_weights
    from recipe_lib.checkpoint.state import holds_adapters
    from recipe_lib.cli.inference_device import choose_device
    from recipe_lib.models import read_config, read_trained_spec

    if found.state is not None and not holds_adapters(found.state):
        raise CheckpointError(f"{found.state}: is of a run that trained all weights; use --hf")
    base = base_of(found, arguments)
    config = read_config(base)
    spec = read_trained_spec(config, str(base), implementation_of(found))
    check_weights(spec, base)
    device = choose_device(arguments.device)
    rewrite = found.state is not None or (arguments.adapter and arguments.out)
    out = None
    if arguments.merge:
        out = _target(found, "model", arguments)
    elif rewrite:
        out = _target(found, "adapter", arguments)
    if rewrite and found.adapter is not None:
        _refuse_copy(found.adapter, spec)
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
            _tell_next(found, arguments, spec, adapter)


def _refuse_copy(adapter: Path, spec: "ModelSpec") -> None:
    """Raise CheckpointError for an adapter whose file has more than what is written of a model: A, B and lengths."""
    from recipe_lib.checkpoint.adapter_files import check_fits, read_adapter

    saved = check_fits(read_adapter(adapter), spec)
    if saved.parts:
        raise CheckpointError(
            f"{adapter}: brings {min(saved.parts)} of its base along, which --adapter would not write; copy the folder "
            "as it is, or merge it (--merge)"
        )


def _trained_model(
    found: ExportSource, spec: "ModelSpec", base: Path, config: dict[str, Any], device: "torch.device"
) -> tuple["Decoder", "torch.dtype"]:
    """The model as it was trained: base, adapter, types and storage. And the type of its base."""
    import torch

    from recipe_lib.checkpoint.adapter_files import BASE_DTYPE, check_base, check_fits, read_adapter
    from recipe_lib.checkpoint.rank_agreement import SingleRank
    from recipe_lib.checkpoint.state import load_state
    from recipe_lib.checkpoint.verify import load_model, model_of_adapter
    from recipe_lib.cli.inference_device import choose_dtype
    from recipe_lib.parallel import DTYPES

    if found.state is not None:
        dtype = DTYPES[found.cfg.dtype]
        model = load_model(spec, base, dtype, device, found.cfg.lora)
        load_state(found.state, model, None, SingleRank())
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
    model: "Decoder", spec: "ModelSpec", found: ExportSource, base: Path, config: dict[str, Any], out: Path
) -> None:
    from recipe_lib.checkpoint.adapter_files import read_adapter
    from recipe_lib.checkpoint.adapter_out import export_adapter
    from recipe_lib.checkpoint.rank_agreement import SingleRank
    from recipe_lib.checkpoint.verify import adapter_settings_of

    if found.state is not None:
        lora, name = found.cfg.lora, str(found.cfg.model.path)
    else:
        assert found.adapter is not None
        adapter = read_adapter(found.adapter)
        lora, name = adapter_settings_of(adapter, spec), adapter.config.base
    export_adapter(
        model,
        spec,
        lora,
        out,
        base=base_name(name, base),
        base_folder=base,
        source_config=config,
        world=SingleRank(),
        **beside_weights(found, base, spec, is_adapter=True),
    )


def _check_adapter(
    found: ExportSource,
    base: Path,
    spec: "ModelSpec",
    adapter: Path,
    dtype: "torch.dtype",
    device: "torch.device",
    trained: tuple["torch.Tensor", "torch.Tensor"],
    written: bool,
) -> None:
    from recipe_lib.checkpoint.adapter_files import read_adapter
    from recipe_lib.checkpoint.verify import check_names, check_with_peft, compare, model_of_adapter, prompt_logits

    model, filled = model_of_adapter(adapter, spec, base, dtype, device)
    held = read_adapter(adapter)
    print_wrapped(f"check: {filled} modules have their adapter, none of {len(held.tensors)} in the file is left over")
    if written:
        check_names(adapter, spec)
        print_wrapped("check: names are those of the base's modules, as PEFT and vLLM look for them")
    if held.config.dora:
        print_wrapped("note: vLLM does not load DoRA adapters; serve the merged model there (tune export --merge)")
    logits = prompt_logits(model)
    del model  # PEFT's comes in its place
    tell(f"adapter: {adapter}", compare(trained[0], logits, trained[1]), dtype, adapter)
    print_wrapped(check_with_peft(adapter, base, spec, dtype, device, trained))


def _tell_next(found: ExportSource, arguments: argparse.Namespace, spec: "ModelSpec", adapter: Path) -> None:
    """The commands that go on from an adapter, each of which works with its folder as it is."""
    from recipe_lib.checkpoint.adapter_files import check_fits, read_adapter
    from recipe_lib.checkpoint.tokenizer_out import CHAT_TEMPLATE
    from recipe_lib.checkpoint.verify import adapter_settings_of
    from recipe_lib.training.next_commands import adapter_commands, merge_command, print_next

    held = read_adapter(adapter)
    if held.extras:  # which neither vLLM nor PEFT knows
        return
    lora, base = adapter_settings_of(held, spec), arguments.base or held.config.base
    template = (adapter / CHAT_TEMPLATE).is_file()
    given = bool(arguments.base) and os.path.abspath(arguments.base) != held.config.base
    commands = adapter_commands(adapter, base, lora, rank=lora.rank, with_base=given, template=template)
    # vLLM loads A and B alone: what else the file has of the base it would leave out or refuse.
    print_next(commands[:1] if check_fits(held, spec).parts else commands)
    is_of_run = found.run is not None and adapter.parent == found.run  # where a merged model would be the run's
    if not (is_of_run and (adapter.parent / "model").exists()):
        print_next([merge_command(adapter, arguments.base, arguments.recipe)])


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
    from recipe_lib.checkpoint.adapter_files import read_adapter
    from recipe_lib.checkpoint.verify import check_with_transformers, compare, load_model, prompt_logits
    from recipe_lib.models import read_config, read_trained_spec
    from recipe_lib.parallel import DTYPES
    from recipe_lib.training.next_commands import model_commands, print_next

    held = read_adapter(adapter)
    wanted = DTYPES[arguments.dtype] if arguments.dtype else dtype
    write_merged(found, base, adapter, out, dtype, wanted)
    spec = read_trained_spec(read_config(out), str(out), implementation_of(found))
    print_wrapped(f"check: {len(held.tensors)} adapted modules are merged, every tensor of the model is there")
    comparison = compare(trained[0], prompt_logits(load_model(spec, out, wanted, device)), trained[1])
    coarser = min(dtype, wanted, key=lambda kind: kind.itemsize)
    tell(f"model: {out}", comparison, coarser, out)
    print_wrapped(check_with_transformers(out, spec, coarser, device, *trained))
    if comparison.change and comparison.difference > comparison.change / 2:
        print_wrapped(
            "note: rounding hides what the adapter has learned; try --dtype fp32, or serve base and adapter apart"
        )
    print_next(model_commands(out))


def tell(written: str, comparison: "Comparison", dtype: "torch.dtype", out: Path) -> None:
    """Prints what was written and how it compares; CheckpointError if it differs by more than rounding."""
    print_wrapped(written)
    if not comparison.agrees(dtype):
        raise CheckpointError(f"{out}: does not compute what was trained: {comparison}; do not use it, and report this")
    print_wrapped(f"check: {comparison}, read with tune")
