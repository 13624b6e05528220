"""The sources of rows that a config names, whether as one (`data.source`) or as several (`data.sources`)."""

from recipe_lib.config.schema import DataConfig, SourceConfig

HUB = "hub:"


def resolved_sources(cfg: DataConfig) -> list[SourceConfig]:
    """Every source of training rows, what it leaves null filled in from the section `data`.

    `data.source` alone is one source of weight 1; none at all is an empty list. `cfg` is not changed.
    """
    if cfg.sources:
        return [_filled(source, cfg) for source in cfg.sources]
    return [] if cfg.source is None else [_filled(SourceConfig(cfg.source), cfg)]


def _filled(source: SourceConfig, cfg: DataConfig) -> SourceConfig:
    columns = cfg.columns if source.columns is None else source.columns
    return SourceConfig(
        source=source.source,
        weight=source.weight,
        format=cfg.format if source.format is None else source.format,
        split=cfg.split if source.split is None else source.split,
        columns=dict(columns),
        max_samples=cfg.max_samples if source.max_samples is None else source.max_samples,
    )


def is_hub(source: str | None) -> bool:
    """True for the name of a hub dataset."""
    return source is not None and source.startswith(HUB)
