"""Writes tiny checkpoints in the file format of DeepSpeed."""

import sys
import types
import unittest.mock
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


class Address:
    """Stands for deepspeed.utils.tensor_fragment.fragment_address."""

    def __init__(self, numel: int, start: int) -> None:
        self.numel, self.start = numel, start


@contextmanager
def deepspeed_classes() -> Iterator[None]:
    """Pickle `Address` under DeepSpeed's name."""
    names = ("deepspeed", "deepspeed.utils", "deepspeed.utils.tensor_fragment")
    modules = {name: types.ModuleType(name) for name in names}
    modules[names[-1]].fragment_address = Address  # type: ignore[attr-defined]
    own = Address.__module__, Address.__qualname__
    Address.__module__, Address.__qualname__ = names[-1], "fragment_address"
    try:
        with unittest.mock.patch.dict(sys.modules, modules):
            yield
    finally:
        Address.__module__, Address.__qualname__ = own


def write_pipeline(
    folder: Path,
    layers: Mapping[int, Weights | Sequence[Weights]],
    *,
    tag: str = "global_step7",
    state: Mapping[str, Any] | None = None,
) -> Path:
    """Write layer files, one of each tensor rank if a layer is a sequence; return the checkpoint.

    Args:
        state: more entries of mp_rank_00_model_states.pt.
    """
    path = _begin(folder, tag)
    for position, weights in layers.items():
        if isinstance(weights, Mapping):
            torch.save(dict(weights), path / f"layer_{position:02d}-model_states.pt")
            continue
        for rank, shard in enumerate(weights):
            name = f"layer_{position:02d}-model_{rank:02d}-model_states.pt"
            torch.save(dict(shard), path / name)
    _write_state(path, {"module": None, **(state or {})})
    return path


def write_module(
    folder: Path, shards: Sequence[Mapping[str, Any]], state: Mapping[str, Any] | None = None
) -> Path:
    """Write the state_dict of a model without a pipeline, one of each tensor rank."""
    path = _begin(folder, "global_step7")
    for rank, module in enumerate(shards):
        _write_state(path, {"module": dict(module), **(state or {})}, rank)
    return path


def write_masters(path: Path, masters: Weights, data_size: int, rank: int = 0) -> None:
    """Write ZeRO's optimizer files: the flattened masters in `data_size` equal slices."""
    flat = torch.cat([tensor.flatten() for tensor in masters.values()])
    length = -(-flat.numel() // data_size)
    for data in range(data_size):
        low, high = data * length, (data + 1) * length
        names, start = {}, 0
        for name, tensor in masters.items():
            first, last = max(low, start), min(high, start + tensor.numel())
            if first < last:
                names[name] = Address(last - first, first - low)
            start += tensor.numel()
        state = {
            "single_partition_of_fp32_groups": [flat[low:high].clone()],
            "param_slice_mappings": [names],
            "zero_stage": 1,
        }
        name = f"zero_pp_rank_{data}_mp_rank_{rank:02d}_optim_states.pt"
        with deepspeed_classes():
            torch.save({"optimizer_state_dict": state, "ds_version": "0.19.8"}, path / name)


def write_universal(folder: Path, weights: Weights, *, flat: bool = False) -> Path:
    """Write zero/<name>/fp32.pt files; flat: as converted from ZeRO stage 3."""
    path = _begin(folder, "global_step7")
    for name, tensor in weights.items():
        (path / "zero" / name).mkdir(parents=True)
        value: Any = tensor.flatten() if flat else {"param": tensor, "cat_dim": 0}
        torch.save(value, path / "zero" / name / "fp32.pt")
        torch.save(torch.zeros_like(tensor), path / "zero" / name / "exp_avg.pt")
    return path


def _begin(folder: Path, tag: str) -> Path:
    (folder / tag).mkdir(parents=True)
    (folder / "latest").write_text(tag)
    return folder / tag


def _write_state(path: Path, state: Mapping[str, Any], rank: int = 0) -> None:
    own = {"global_steps": 7, "global_samples": 56, "ds_version": "0.19.8"}
    torch.save({**own, **state}, path / f"mp_rank_{rank:02d}_model_states.pt")
