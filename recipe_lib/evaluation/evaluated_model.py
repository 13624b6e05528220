"""Load a model on the disk, or an adapter and its base, onto all ranks, to be evaluated.

`load_evaluated_model(cfg, source, ...)` returns the trained model; inside its
`use_base_weights()` it is the model that training began from.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import nn

from recipe_lib.adapters import add_adapters, disable_adapters, init_adapters
from recipe_lib.checkpoint.adapter_files import check_fits, read_adapter
from recipe_lib.checkpoint.huggingface import load_weights
from recipe_lib.checkpoint.open_exports import make_adapter_settings
from recipe_lib.checkpoint.peft_folders import load_adapter
from recipe_lib.config.schema import FullFinetuneConfig, LoraFinetuneConfig
from recipe_lib.generation.source import GenerationSource
from recipe_lib.logs import get_logger
from recipe_lib.memory.qat import FakeQuantization, fake_quantize_linears
from recipe_lib.models import build_meta, init_weights
from recipe_lib.models.decoder import Decoder
from recipe_lib.parallel import DTYPES, Parallel, World, materialize, parallelize
from recipe_lib.parallel.world import derive_seed


@dataclass
class EvaluatedModel:
    """A trained model in the memory of all ranks."""

    model: Decoder  # frozen, this rank's part
    parallel: Parallel  # how it is divided
    source: GenerationSource
    base: str | None  # the name of what it was trained from, None where that is not known
    rounding: FakeQuantization | None  # of the trained weights, as `qat` had it
    _load_base: Callable[[], None] | None = None

    @contextmanager
    def use_base_weights(self) -> Iterator[nn.Module]:
        """Give the model before training, with its own weights.

        Without adapters they replace the trained ones, for good.
        """
        if self.rounding is not None:
            self.rounding.is_on = False
        if self._load_base is not None:
            self._load_base()
        with disable_adapters(self.model) if self.source.adapter is not None else nullcontext():
            yield self.model


def load_evaluated_model(
    cfg: FullFinetuneConfig, source: GenerationSource, world: World, storage: str, base: Path | None
) -> EvaluatedModel:
    """Read the weights, each rank its part as `cfg.parallel` divides them.

    storage: how an adapter's base is kept, as `lora.quantize_base`. base: of a model without
    adapters, the folder that its training began from; None with cfg.model.preset: random weights of
    cfg.seed.
    """
    dtype = DTYPES[cfg.dtype]
    spec = source.base_spec or source.spec
    model = build_meta(spec, dtype)
    if source.adapter is not None:
        adapter = read_adapter(source.adapter)
        check_fits(adapter, spec)
        adapter_dtype = None if cfg.dtype == "fp64" else "fp32"
        lora = replace(
            make_adapter_settings(adapter, spec), quantize_base=storage, dtype=adapter_dtype
        )
        assert isinstance(cfg, LoraFinetuneConfig)
        cfg = replace(cfg, lora=lora)
        add_adapters(model, lora, dtype)
    model.requires_grad_(False)
    # From the first step on: what is evaluated is what the export rounds.
    rounding = fake_quantize_linears(model, cfg.qat, cfg.qat_group_size, start=0)
    if rounding is not None:
        get_logger().info("%s", rounding.describe())
    parallel = parallelize(model, cfg, world, for_training=False)
    materialize(model, cfg.memory, world.device)
    load_weights(model, spec, source.folder)
    if source.adapter is not None:
        init_adapters(model, 0)
        load_adapter(model, spec, source.adapter, some=True)
        return EvaluatedModel(
            model=model.eval(),
            parallel=parallel,
            source=source,
            base=str(source.folder),
            rounding=rounding,
        )
    # Read when it is asked for, as it takes the memory of the trained weights.
    load_base: Callable[[], None] | None = None
    if base is not None:
        load_base = partial(load_weights, model, source.spec, base)
    elif cfg.model.preset is not None:
        load_base = partial(init_weights, model, derive_seed(cfg.seed, "model"), source.spec)
    return EvaluatedModel(
        model=model.eval(),
        parallel=parallel,
        source=source,
        base=str(base) if base is not None else cfg.model.preset,
        rounding=rounding,
        _load_base=load_base,
    )
