"""The fp32 master weights in the optimizer files of ZeRO stages 1 and 2, and of bf16 runs.

Each data rank has a slice of the flattened parameters of a group. `param_slice_mappings` names, for
each parameter, the range of its elements in this slice; the ranges of all data ranks, in order,
are the flattened parameter:

    rank 0   [ a a a a b b ]     a: start 0, 4 elements;   b: start 4, 2 elements
    rank 1   [ b b b c c c ]     b: start 0, 3 elements;   c: start 3, 3 elements
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from pipemega.checkpoint.deepspeed.stored_tensor import StoredTensor
from pipemega.checkpoint.deepspeed.torch_files import LeftOut, TorchFile, read_torch_file
from pipemega.errors import CheckpointError

FlatMasters = Mapping[str, list[Tensor]]
"""Name of a parameter -> its elements, in one tensor of each data rank that has some."""


def read_masters(files: Sequence[Path]) -> tuple[FlatMasters | None, list[TorchFile]]:
    """Return the master weights of one model-parallel rank, and the files.

    None: DeepSpeed was older than 0.7, which did not store the names; or the optimizer has none.

    Args:
        files: one of each data rank, in order.

    Raises:
        CheckpointError: a file is damaged.
    """
    found: dict[str, list[Tensor]] = {}
    read = [read_torch_file(path) for path in files]
    for file in read:
        state = file.value.get("optimizer_state_dict") if isinstance(file.value, dict) else None
        if not isinstance(state, dict):
            return None, read
        groups, names = state.get("single_partition_of_fp32_groups"), _names_of(state)
        if groups is None or names is None:
            return None, read
        for flat, ranges in zip(groups, names, strict=True):
            for name, (start, length) in ranges.items():
                if start + length > flat.numel():
                    raise CheckpointError(
                        f"{file.path} is damaged: '{name}' should be the elements {start} to "
                        f"{start + length} of a slice that has only {flat.numel()}: copy it again"
                    )
                found.setdefault(name, []).append(flat.detach().narrow(0, start, length))
    return found, read


def _names_of(state: Mapping[str, Any]) -> list[dict[str, tuple[int, int]]] | None:
    """Return for each group: name -> (start, length) in the slice of this data rank."""
    mappings = state.get("param_slice_mappings")
    if mappings is None:
        return None
    groups = []
    for mapping in mappings:
        ranges = {}
        for name, address in mapping.items():
            # A deepspeed.utils.tensor_fragment.fragment_address.
            values = address.state if isinstance(address, LeftOut) else {}
            if not {"start", "numel"} <= values.keys():
                return None
            ranges[name] = (int(values["start"]), int(values["numel"]))
        groups.append(ranges)
    return groups


def replace_by_masters(weights: dict[str, StoredTensor], masters: FlatMasters, where: Path) -> None:
    """Replace weights by their masters, whose values, cast to the weights' dtype, are equal.

    A tied module is "tied_modules.<key>." in the names of masters; its position is found by
    comparing the values.

    Raises:
        CheckpointError: a weight is not its master, cast; the files do not belong together.
    """
    for name, flat in masters.items():
        places = [name] if name in weights else _places_of_tied(name, weights, masters)
        if not places:
            raise CheckpointError(
                f"{where.parent} is incomplete: {where.name} has a master weight of '{name}', and "
                f"no file has this weight: copy all files of the checkpoint"
            )
        found = False
        for place in places:
            numel = sum(part.numel() for part in flat)
            if numel == weights[place].numel:
                master = StoredTensor.of_flat(weights[place].shape, flat)
                if master.equals(weights[place]):
                    weights[place], found = master, True
        if not found:
            raise CheckpointError(
                f"the fp32 master weight of '{name}' in {where} does not round to the weight of "
                f"the model: are the optimizer files those of this checkpoint? Import the weights "
                f"of the model with --no-masters"
            )


def _places_of_tied(
    name: str, weights: Mapping[str, StoredTensor], masters: FlatMasters
) -> list[str]:
    prefix, _, rest = name.partition(".")
    inner = rest.partition(".")[2]
    if prefix != "tied_modules":
        return []
    layers = [weight.partition(".") for weight in weights]
    return [
        f"{layer}.{own}" for layer, _, own in layers
        if own == inner and f"{layer}.{own}" not in masters
    ]  # fmt: skip
