"""Load the controller's configuration: one commented TOML file, validated before use."""

from slurm_migbatch.config.reader import DEFAULT_PATH, ConfigError, Problem, load, loads
from slurm_migbatch.config.schema import (
    ClusterConfig,
    Config,
    DaemonConfig,
    DispatchConfig,
    GpuConfig,
    LearningConfig,
    LendingConfig,
    ModelConfig,
    MovesConfig,
    NodeApiConfig,
    QueryConfig,
    ReportConfig,
    StoreConfig,
    SubmitConfig,
    SupplyConfig,
)
from slurm_migbatch.config.writer import render, text_of

__all__ = [
    "DEFAULT_PATH",
    "ClusterConfig",
    "Config",
    "ConfigError",
    "DaemonConfig",
    "DispatchConfig",
    "GpuConfig",
    "LearningConfig",
    "LendingConfig",
    "ModelConfig",
    "MovesConfig",
    "NodeApiConfig",
    "Problem",
    "QueryConfig",
    "ReportConfig",
    "StoreConfig",
    "SubmitConfig",
    "SupplyConfig",
    "load",
    "loads",
    "render",
    "text_of",
]
