"""DeepSpeedWeights: all weights of a checkpoint of DeepSpeed, by DeepSpeed's names.

pipeline     "<position of the layer>.<name in the layer>"
others       the name in the state_dict of the module
universal    the same; in a pipeline "tied_modules.<key>.<name>" for tied layers

The fp32 master weights in the optimizer files of ZeRO stages 1 and 2, and of bf16 runs.

Each data rank has a slice of the flattened parameters of a group. `param_slice_mappings` names, for
each parameter, the range of its elements in this slice; the ranges of all data ranks, in order,
are the flattened parameter:

    rank 0   [ a a a a b b ]     a: start 0, 4 elements;   b: start 4, 2 elements
    rank 1   [ b b b c c c ]     b: start 0, 3 elements;   c: start 3, 3 elements
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipemega.checkpoint.deepspeed.deepspeed_folder import (
    DeepSpeedFolder,
    LeftOut,
    StoredTensor,
    TorchFile,
    list_files,
    read_torch_file,
)
from pipemega.checkpoint.deepspeed.shard_rules import Rule, ShardRules, join_along
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


# Buffers of torch's modules, for versions of DeepSpeed that do not store `buffer_names`.
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
# Keys of a model file that DeepSpeed writes; the others are the user's client_state.
_OWN_KEYS = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes",
    "shared_params", "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd",
    "sparse_tensor_module_names", "skipped_steps", "global_steps", "global_samples",
    "dp_world_size", "mp_world_size", "ds_config", "ds_version", "universal_checkpoint_info",
    "checkpoint_parallel_dimensions", "csr_tensor_module_names",
}  # fmt: skip
_VOCABULARY = ("word_embeddings", "lm_head", "final_linear", "output_layer")


@dataclass(frozen=True)
class ReadOptions:
    """How a checkpoint is read.

    Args:
        masters: take fp32 master weights where the files have them.
        shards: regular expression of DeepSpeed's names -> how their shards form the parameter.
        vocabulary: rows of the embedding and the output head, without padding; None: as
            `universal_checkpoint_info` says, else all.
        in_run: DeepSpeed's name -> whole shape, of the parameters of the run whose shards are
            consecutive slices.
        tensor_size: tensor ranks of the run. If the files have as many shards, each rank takes its
            own for the parameters `in_run`: their order in the whole does not matter then.
    """

    masters: bool = True
    shards: Mapping[str, Rule] = field(default_factory=dict)
    vocabulary: int | None = None
    in_run: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    tensor_size: int = 1

    def __post_init__(self) -> None:
        for pattern in self.shards:
            try:
                re.compile(pattern)
            except re.error as error:
                raise CheckpointError(
                    f"--shards: the pattern {pattern!r} is not valid: {error}"
                ) from error


@dataclass(frozen=True)
class DeepSpeedWeights:
    """The weights of a checkpoint; their values are read from the files when they are used.

    Args:
        path: the path of the checkpoint.
        kind: "pipeline", "module" or "universal".
        tensors: DeepSpeed's name -> tensor.
        buffers: the names of the tensors that are no parameters.
        state: plain values of the run: `global_steps`, `global_samples`, `ds_version`.
        client: the user's client_state.
        left_out: file -> the classes of the user's objects that were not loaded.
        has_masters: whether parameters are fp32 master weights.
        is_flat: the tensors are flattened, and the files do not say their shapes.
    """

    path: Path
    kind: str
    tensors: Mapping[str, StoredTensor]
    buffers: frozenset[str]
    state: Mapping[str, Any]
    client: Mapping[str, Any]
    left_out: Mapping[str, tuple[str, ...]]
    has_masters: bool
    is_flat: bool

    @property
    def global_steps(self) -> int:
        return int(self.state.get("global_steps") or 0)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def read_deepspeed(path: Path, options: ReadOptions | None = None) -> DeepSpeedWeights:
    """Read the index of a checkpoint that DeepSpeed wrote.

    Raises:
        CheckpointError: a file is missing or damaged, a value is no tensor, or the tensor-parallel
            shards cannot be joined.
    """
    return _Reader(list_files(path), options or ReadOptions()).read()


class _Reader:
    def __init__(self, files: DeepSpeedFolder, options: ReadOptions) -> None:
        self._files, self._options = files, options
        self._left_out: dict[str, tuple[str, ...]] = {}
        self._has_masters = self._is_flat = False
        self._models = [_dict_of(self._read(path)) for path in files.models]
        self._first = self._models[0] if self._models else {}
        self._rules = ShardRules(options.shards, self._first)

    def read(self) -> DeepSpeedWeights:
        files = self._files
        if files.universal:
            kind, tensors = "universal", self._universal_weights()
        elif files.layers:
            kind, tensors = "pipeline", self._pipeline_weights()
        else:
            kind, tensors = "module", self._module_weights()
        if not tensors:
            raise CheckpointError(f"{files.path} contains no weights")
        self._refuse_missing(tensors)
        self._check_options(tensors)
        state = ("global_steps", "global_samples", "ds_version")
        return DeepSpeedWeights(
            path=files.path,
            kind=kind,
            tensors={name: self._without_padding(name, t) for name, t in tensors.items()},
            buffers=frozenset(self._buffers(tensors)),
            state={key: self._first[key] for key in state if key in self._first},
            client=self._client(),
            left_out=self._left_out,
            has_masters=self._has_masters,
            is_flat=self._is_flat,
        )

    def _read(self, path: Path) -> TorchFile:
        return self._noted(read_torch_file(path))

    def _noted(self, file: TorchFile) -> TorchFile:
        users = tuple(n for n in file.left_out if not n.startswith("deepspeed."))
        if users:
            self._left_out[file.path.name] = users
        return file

    def _universal_weights(self) -> dict[str, StoredTensor]:
        self._has_masters = True
        weights = {}
        for name, path in self._files.universal.items():
            value = self._read(path).value
            if isinstance(value, dict):
                value = value.get("param")
            else:
                # Converted from ZeRO stage 3.
                self._is_flat = True
            weights[name] = _stored(name, value, path)
        return weights

    def _pipeline_weights(self) -> dict[str, StoredTensor]:
        shards: list[dict[str, StoredTensor]] = []
        for position, paths in self._files.layers.items():
            for rank, path in enumerate(paths):
                if rank == len(shards):
                    shards.append({})
                shards[rank] |= {
                    f"{position}.{name}": _stored(name, value, path)
                    for name, value in _flat(_dict_of(self._read(path)))
                }
        self._take_masters(shards)
        return self._joined(shards)

    def _module_weights(self) -> dict[str, StoredTensor]:
        shards = []
        for path, content in zip(self._files.models, self._models, strict=True):
            module = content.get("module")
            if not isinstance(module, dict):
                raise CheckpointError(
                    f"{path} has no weights ('module'): a pipeline of DeepSpeed stores them in "
                    f"layer_XX-model_YY-model_states.pt files, which are missing; copy them too"
                )
            shards.append({name: _stored(name, value, path) for name, value in _flat(module)})
        self._take_masters(shards)
        for shard, content in zip(shards, self._models, strict=True):
            # Further names of parameters, of which only the first have masters.
            shared = content.get("shared_params")
            for name, first in shared.items() if isinstance(shared, dict) else ():
                if {name, first} <= shard.keys():
                    shard[name] = shard[first]
        return self._joined(shards)

    def _take_masters(self, shards: list[dict[str, StoredTensor]]) -> None:
        """Replace the weights by masters; the tensor rank is the last digit of the rank."""
        for rank, paths in self._files.optimizers.items() if self._options.masters else ():
            masters, read = read_masters(paths)
            for file in read:
                self._noted(file)
            if masters:
                replace_by_masters(shards[rank % len(shards)], masters, paths[0])
                self._has_masters = True

    def _joined(self, shards: list[dict[str, StoredTensor]]) -> dict[str, StoredTensor]:
        first = shards[0]
        for rank, other in enumerate(shards[1:], 1):
            if different := sorted(first.keys() ^ other.keys()):
                raise CheckpointError(
                    f"{self._files.path}: the tensor ranks 0 and {rank} do not have the same "
                    f"parameters; only one has {different[0]}"
                )
        parts = {name: [shard[name] for shard in shards] for name in first}
        return {
            name: self._as_in_run(name, found) or self._rules.join(name, found, first)
            for name, found in parts.items()
        }

    def _as_in_run(self, name: str, shards: list[StoredTensor]) -> StoredTensor | None:
        shape, part = self._options.in_run.get(name, ()), shards[0].shape
        if not 1 < len(shards) == self._options.tensor_size or len(shape) != len(part):
            return None
        dims = [dim for dim, size in enumerate(shape) if size != part[dim]]
        if len(dims) != 1 or shape[dims[0]] != part[dims[0]] * len(shards):
            return None
        return join_along(name, shards, dims[0])

    def _refuse_missing(self, tensors: Mapping[str, StoredTensor]) -> None:
        """Refuse a checkpoint without a parameter that `param_shapes` lists."""
        for path, model in zip(self._files.models, self._models, strict=True):
            groups = model.get("param_shapes")
            for name in (
                (n for g in groups if isinstance(g, dict) for n in g)
                if isinstance(groups, list)
                else ()
            ):
                inner = name.split(".", 2)[2:] if name.startswith("tied_modules.") else []
                is_tied = inner and any(t.partition(".")[2] == inner[0] for t in tensors)
                if name not in tensors and not is_tied:
                    raise CheckpointError(
                        f"{self._files.path} is incomplete: {path.name} lists the parameter "
                        f"'{name}', and no file has it: copy all files of the checkpoint"
                    )

    def _check_options(self, tensors: Mapping[str, StoredTensor]) -> None:
        """Refuse options that have no effect on any tensor."""
        unused = [p for p in self._options.shards if not any(re.fullmatch(p, n) for n in tensors)]
        if unused:
            raise CheckpointError(
                f"--shards: the pattern {unused[0]!r} matches no name of the checkpoint, such as "
                f"'{next(iter(tensors))}'"
            )
        rows = self._options.vocabulary
        tables = {name: t.shape for name, t in tensors.items() if _is_vocabulary(name, t)}
        if rows is not None and (
            rows < 1 or not any(shape[0] >= rows for shape in tables.values())
        ):
            found = ", ".join(f"{name} {list(shape)}" for name, shape in tables.items())
            raise CheckpointError(
                f"--vocab-size {rows}: no tensor with a name such as {', '.join(_VOCABULARY)} has "
                f"{rows} rows or more; the checkpoint has: {found or 'none of these'}"
            )

    def _without_padding(self, name: str, tensor: StoredTensor) -> StoredTensor:
        rows = self._options.vocabulary or self._rules.universal.get("original_vocab_size")
        # In a universal checkpoint the padding is removed already.
        is_vocabulary = _is_vocabulary(name, tensor)
        as_in_run = tensor.shape == self._options.in_run.get(name)
        if not isinstance(rows, int) or not is_vocabulary or as_in_run or tensor.shape[0] <= rows:
            return tensor
        return tensor.first_rows(rows)

    def _buffers(self, tensors: Mapping[str, StoredTensor]) -> Iterable[str]:
        stored = {
            name for model in self._models for name in model.get("buffer_names") or ()
            if isinstance(name, str)
        }  # fmt: skip
        # A tied layer has its key in the names of buffers, and its position in the file names.
        tied = {name.split(".", 2)[2] for name in stored if name.startswith("tied_modules.")}
        for name, tensor in tensors.items():
            of_torch = name.rpartition(".")[2] in _BUFFERS or not tensor.dtype.is_floating_point
            if name in stored or name.partition(".")[2] in tied or of_torch:
                yield name

    def _client(self) -> dict[str, Any]:
        return {
            key: value
            for key, value in self._first.items()
            if key not in _OWN_KEYS and isinstance(key, str) and _is_plain(value)
        }


def _is_vocabulary(name: str, tensor: StoredTensor) -> bool:
    parts = name.split(".")
    return len(parts) > 1 and parts[-2] in _VOCABULARY and len(tensor.shape) == 2


def _dict_of(file: TorchFile) -> dict[str, Any]:
    if not isinstance(file.value, dict):
        raise CheckpointError(
            f"{file.path} contains a {type(file.value).__name__}, not a dict as DeepSpeed writes it"
        )
    return file.value


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Return the values of nested dicts: Megatron's state_dict is one."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif not key.endswith("_extra_state"):
            yield f"{prefix}{key}", value


def _stored(name: str, value: Any, path: Path) -> StoredTensor:
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_quantized:
        kind = value.class_name if isinstance(value, LeftOut) else type(value).__name__
        raise CheckpointError(
            f"'{name}' in {path} is a {kind}, and only dense tensors can be imported"
        )
    return StoredTensor.whole(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(k) and _is_plain(v) for k, v in value.items())
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | bytes | Tensor)
