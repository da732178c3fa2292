"""Load the controller's configuration: one commented TOML file, validated before use."""

from slurm_migbatch.config.reader import DEFAULT_PATH, ConfigError, Problem, load, loads
from slurm_migbatch.config.schema import (
    Config,
    DaemonConfig,
    DispatchConfig,
    GpuConfig,
    LendingConfig,
    ModelConfig,
    MovesConfig,
    QueryConfig,
    StoreConfig,
    SubmitConfig,
    SupplyConfig,
)
from slurm_migbatch.config.writer import render, text_of

__all__ = [
    "DEFAULT_PATH",
    "Config",
    "ConfigError",
    "DaemonConfig",
    "DispatchConfig",
    "GpuConfig",
    "LendingConfig",
    "ModelConfig",
    "MovesConfig",
    "Problem",
    "QueryConfig",
    "StoreConfig",
    "SubmitConfig",
    "SupplyConfig",
    "load",
    "loads",
    "render",
    "text_of",
]
