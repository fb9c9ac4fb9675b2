"""Refuses arguments that DeepSpeed's functions have and ours do not, with what to set instead."""

from collections.abc import Iterable, Mapping

from pipemega.config.name_suggestions import did_you_mean
from pipemega.errors import ConfigError

_MESH = "set the sizes in the config section 'mesh'"
_REMEDIES: Mapping[str, str] = {
    # of deepspeed.initialize
    "args": "pass the path of the JSON file as config",
    "distributed_port": "torchrun sets the port",
    "mpu": _MESH,
    "mesh_param": _MESH,
    "dist_init_required": "initialize() starts torch.distributed if needed",
    "config_params": "pass it as config",
    # of deepspeed.pipe.PipelineModule
    "num_stages": "set mesh.pipeline in the config",
    "topology": _MESH,
    "partition_method": "set pipeline.partition in the config",
    "seed_layers": "set pipeline.seed_layers in the config",
    "base_seed": "set seed in the config",
    "activation_checkpoint_interval": "set pipeline.activation_checkpoint_interval in the config",
}


def refuse_arguments(call: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError if `given` is not empty; the same on every rank.

    Args:
        call: the function, for the message.
        given: names of arguments that it does not have.
        known: names of its arguments.
    """
    for name in given:
        remedy = _REMEDIES.get(name)
        hint = did_you_mean(name, known) if remedy is None else f": {remedy}"
        raise ConfigError(f"{call} has no argument {name!r}{hint}", on_every_rank=True)
