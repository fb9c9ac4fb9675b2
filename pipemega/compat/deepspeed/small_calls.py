"""`deepspeed.zero`: scripts use its names at all stages; without ZeRO stage 3 parameters are whole.

`deepspeed.utils.logging`: the logger of pipemega, under DeepSpeed's names.

`deepspeed.runtime.utils`: what scripts use of it.

`deepspeed.ops.adam`: DeepSpeed's Adam classes as torch's Adam.

`deepspeed.runtime.lr_schedules`: DeepSpeed's schedules as schedulers of torch.

`deepspeed.utils.zero_to_fp32`: the fp32 weights of a checkpoint, for a module in one process.
"""

import logging
import os
import random
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipemega.checkpoint.deepspeed.deepspeed_folder import find_deepspeed
from pipemega.checkpoint.deepspeed.deepspeed_weights import read_deepspeed
from pipemega.checkpoint.save_load import open_path
from pipemega.config import load
from pipemega.distributed.mesh import launched_rank
from pipemega.errors import CheckpointError, ConfigError
from pipemega.monitor import RankLogger, get_logger
from pipemega.optimizer.lr_schedules import FormulaSchedule, build_schedule
from pipemega.pipeline.plan import partition
from pipemega.storage.filesystem import is_remote


class Init(nullcontext[None]):
    """Refuses to cut the parameters of a model over the data ranks while it is built.

    Args:
        enabled: False: the block changes nothing.

    Raises:
        ConfigError: `enabled` is true.
    """

    def __init__(self, *args: Any, enabled: bool = True, **kwargs: Any) -> None:
        if enabled:
            raise ConfigError(
                "zero.Init() cuts parameters over the data ranks (ZeRO stage 3), which does not "
                "exist here: build the model without it. If the model does not fit into the memory "
                "of a rank, write it as a PipelineModule of LayerSpecs, of which each rank builds "
                "only its layers; or use torch's fully_shard without this package"
            )
        super().__init__()


class GatheredParameters(nullcontext[None]):
    """Does nothing: parameters are whole on each rank.

    Takes the same arguments as DeepSpeed's class.
    """

    def __init__(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        super().__init__()


def register_external_parameter(module: Any, parameter: Any) -> None:
    """Do nothing: parameters are whole on each rank."""


class ZeroParamStatus(Enum):
    """The states of a parameter of ZeRO stage 3; no parameter has the attribute `ds_status`."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


logger = get_logger(launched_rank())


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks; None or -1 in them: on all."""
    rank = launched_rank()
    shown = [rank] if not ranks or -1 in ranks else ranks
    RankLogger(rank).log(level, f"[Rank {rank}] {message}", ranks=shown)


def set_log_level_from_string(log_level_str: str, custom_logger: Any = None) -> None:
    """Set the level of `custom_logger`; rank 0 of pipemega logs INFO and above, others warnings."""
    if custom_logger is not None:
        custom_logger.setLevel(log_level_str.upper())


def print_rank_0(message: Any, debug: bool = False, force: bool = False) -> None:
    """Print on rank 0, if `debug` or `force` is set."""
    if launched_rank() == 0 and (debug or force):
        print(message)


@cache
def warning_once(message: str) -> None:
    """Log a warning once."""
    get_logger(launched_rank()).warning(message)


def log_summary(show_straggler: bool = False) -> None:
    """Log on rank 0 where the table of `comms_logger` is; `show_straggler` has no effect."""
    log_dist(
        "comms_logger logs its table once, at the end of step comms_logger.profile_step: see above",
        ranks=[0],
    )


def set_random_seed(seed: int) -> None:
    """Seed torch, numpy and `random`."""
    numpy.random.seed(seed % 2**32)
    random.seed(seed)
    torch.manual_seed(seed)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the memory of the device on rank 0, if `force` is set."""
    if not force or launched_rank() != 0:
        return
    used = "the model is on the CPU"
    if torch.cuda.is_available():
        now, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        used = f"{now / 2**30:.2f} GiB allocated, {most / 2**30:.2f} GiB at most"
    get_logger().info(f"{message}: {used}")


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return the bounds of `num_parts` runs of items with (almost) as many items."""
    return partition.uniform(num_items, num_parts)


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return the bounds of `num_parts` runs of items with the lowest largest weight."""
    return partition.partition(weights, num_parts)


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Return the text of a call."""
    parts = [repr(arg) for arg in args] + [f"{key}={value!r}" for key, value in kwargs.items()]
    return f"{base}({', '.join(parts)})"


def ensure_directory_exists(filename: str) -> None:
    """Make the folder of a file."""
    os.makedirs(os.path.dirname(filename), exist_ok=True)


class FusedAdam(torch.optim.Adam):
    """torch's Adam with DeepSpeed's arguments; it decays as AdamW unless `adam_w_mode` is False.

    Args:
        bias_correction: must be True.
        set_grad_none, fp32_optimizer_states: have no effect: the engine owns the gradients.

    Raises:
        ValueError: bias_correction is False.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        **_: Any,
    ) -> None:
        if not bias_correction:
            raise ValueError("FusedAdam(bias_correction=False) is not supported: remove it")
        super().__init__(
            params,
            lr=lr,
            betas=(betas[0], betas[1]),
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            decoupled_weight_decay=adam_w_mode,
        )


class DeepSpeedCPUAdam(FusedAdam):
    """`FusedAdam` with the order of arguments of DeepSpeed's CPU optimizer."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params,
            lr,
            bias_correction,
            betas,
            eps,
            adam_w_mode=adamw_mode,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
        )


# Arguments of DeepSpeed's classes that are no keys of the config.
_UNUSED = ("last_batch_iteration", "verbose")


class DeepSpeedLR(LRScheduler):
    """A schedule of the config section `scheduler` over an optimizer of the user.

    Args:
        optimizer: its learning rates are set.
        type_name: `scheduler.type`.
        params: `scheduler.params`; parameters that are None are left out.

    Raises:
        ConfigError: the values are not valid in the config.
    """

    def __init__(self, optimizer: Optimizer, type_name: str, params: dict[str, Any]) -> None:
        given = {k: v for k, v in params.items() if k not in _UNUSED and v is not None}
        scheduler = {"type": type_name, "params": given}
        # The batch size has no meaning here; a config needs one.
        section = load({"train_batch_size": 1, "scheduler": scheduler}).scheduler
        assert section is not None
        formula = build_schedule(optimizer, section)
        assert isinstance(formula, FormulaSchedule)
        self._formula = formula
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Any]:
        self._formula.set_step(self.last_epoch)
        return self._formula.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = int(state_dict["last_epoch"])
        self._formula.set_step(self.last_epoch)


def warmup_lr(optimizer: Optimizer, **params: Any) -> DeepSpeedLR:
    return DeepSpeedLR(optimizer, "WarmupLR", params)


def warmup_decay_lr(optimizer: Optimizer, total_num_steps: int, **params: Any) -> DeepSpeedLR:
    return DeepSpeedLR(optimizer, "WarmupDecayLR", {"total_num_steps": total_num_steps, **params})


def warmup_cosine_lr(optimizer: Optimizer, total_num_steps: int, **params: Any) -> DeepSpeedLR:
    return DeepSpeedLR(optimizer, "WarmupCosineLR", {"total_num_steps": total_num_steps, **params})


def one_cycle(
    optimizer: Optimizer, cycle_min_lr: float, cycle_max_lr: float, **params: Any
) -> DeepSpeedLR:
    rates = {"cycle_min_lr": cycle_min_lr, "cycle_max_lr": cycle_max_lr}
    return DeepSpeedLR(optimizer, "OneCycle", {**rates, **params})


def lr_range_test(optimizer: Optimizer, **params: Any) -> DeepSpeedLR:
    return DeepSpeedLR(optimizer, "LRRangeTest", params)


_KINDS = ("parameters/", "buffers/")
# A module that is no pipeline is the only layer.
_MODULE = "layers.0."


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False
) -> dict[str, Tensor]:
    """Return the weights of a checkpoint of pipemega or DeepSpeed, on the CPU; not collective.

    Args:
        checkpoint_dir: a folder of checkpoints, or one checkpoint.
        tag: the checkpoint in the folder; None: the newest one.
        exclude_frozen_parameters: has no effect: all parameters are returned.

    Returns:
        Name -> tensor; the names of a module that is no pipeline are its own. A parameter that the
        module has under several names is there under the first: load the result with strict=False.
        Floating-point tensors are in fp32, also if the model is in fp64.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or has no shapes.
    """
    foreign = None if is_remote(checkpoint_dir) else find_deepspeed(checkpoint_dir, tag)
    if foreign is not None:
        weights = read_deepspeed(foreign)
        if weights.is_flat:
            raise CheckpointError(
                f"{foreign} does not say the shapes of its tensors: load it with "
                "engine.load_checkpoint(), or convert it with `pipemega checkpoint "
                "import-deepspeed`"
            )
        # Copies: `full` may be a view of the file.
        return {name: _fp32(tensor.full().clone()) for name, tensor in weights.tensors.items()}
    reader = open_path(os.fspath(checkpoint_dir), tag)
    names = {key.partition("/")[2]: key for key in reader.tensors.tensors if key.startswith(_KINDS)}
    is_module = all(name.startswith(_MODULE) for name in names)
    return {
        name.removeprefix(_MODULE) if is_module else name: _fp32(reader.tensors.read_full(key))
        for name, key in names.items()
    }


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Load `get_fp32_state_dict_from_zero_checkpoint` into a module on the CPU; return it."""
    model = model.cpu()
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model.load_state_dict(state, strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path, output_dir: str | Path, tag: str | None = None
) -> None:
    """Write `get_fp32_state_dict_from_zero_checkpoint` to `output_dir`/pytorch_model.bin."""
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    torch.save(state, folder / "pytorch_model.bin")


def _fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
