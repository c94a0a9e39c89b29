"""Configuration: the schema of keys, config files with overrides, and the checks across keys.
Imports no jax.
"""

from lm.config.convert import default_config, flatten, from_dict, to_dict
from lm.config.resolved import Resolved, ResolvedModel, as_resolved, saved_config
from lm.config.schema import (
    MESH_AXES,
    SPLITS,
    Branch,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    branches_of,
    init_run,
    layer_windows,
    looped_layers,
    mixer_of,
    n_applied_layers,
    present_mixers,
    query_heads,
    schema,
    turns,
    width_factor,
)

__all__ = [
    "MESH_AXES",
    "SPLITS",
    "Branch",
    "Config",
    "DataConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Resolved",
    "ResolvedModel",
    "TrainConfig",
    "as_resolved",
    "branches_of",
    "default_config",
    "flatten",
    "from_dict",
    "init_run",
    "layer_windows",
    "looped_layers",
    "mixer_of",
    "n_applied_layers",
    "present_mixers",
    "query_heads",
    "saved_config",
    "schema",
    "to_dict",
    "turns",
    "width_factor",
]
