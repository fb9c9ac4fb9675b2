"""SafetensorsSource: each rank reads its slices of a folder's weights; no rank holds the model."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipemega.errors import CheckpointError
from pipemega.hf.key_mapping import KeyMapping, StoredPart
from pipemega.hf.safetensors_files import SafetensorsFolder, listed
from pipemega.hf.weight_names import check_names
from pipemega.hf.weight_source import is_transposed
from pipemega.hf.whole_model import whole_model
from pipemega.parameters import shard_of


class SafetensorsSource:
    """A WeightSource that reads a folder as `save_pretrained` writes it.

    Values are cast to the dtype of the tensors that are filled. Of experts that are stored one by
    one, a rank reads its slice of each.

    Args:
        folder: of safetensors files.
        config: the `PretrainedConfig` of the folder.
        class_name: the class of transformers that is built.

    Raises:
        CheckpointError: the folder is missing, incomplete or damaged, or has other tensors than
            the model.
    """

    def __init__(self, folder: str | Path, config: Any, class_name: str) -> None:
        self.files = SafetensorsFolder(folder)
        self._model = whole_model(config, class_name)
        self._mapping = KeyMapping(self.files, self._model)
        check_names(self._mapping, self._model, self.files.folder)
        different = self._mapping.different_shapes()
        if different:
            raise CheckpointError(
                f"{self.files.folder} has other shapes than its config.json: "
                f"{listed(different, 3)}. Use the config.json of these weights",
                on_every_rank=True,
            )

    def has(self, name: str) -> bool:
        return bool(self._mapping.stored_names(name))

    def load(self, name: str, tensor: Tensor) -> None:
        """Fill `tensor`, this rank's shard of the model's tensor `name`.

        Raises:
            CheckpointError: the files have several values of a tied tensor.
        """
        stored = self._mapping.stored_names(name)
        with torch.no_grad():
            self._fill(stored[0], tensor.data, tensor)
            for other in stored[1:]:
                again = torch.empty_like(tensor)
                self._fill(other, again, tensor)
                if not torch.equal(tensor, again):
                    raise CheckpointError(
                        f"{self.files.folder} has different values of {stored[0]} and {other}, "
                        f"and its config.json ties them: set tie_word_embeddings to false there"
                    )

    def _fill(self, name: str, local: Tensor, like: Tensor) -> None:
        """Copy the shard of `like` into `local`."""
        shard, transposed = shard_of(like), is_transposed(like)
        if name in self._mapping.conversions:
            made = self._mapping.conversions[name].convert(
                self._model, lambda key: self.files.read(key).clone()
            )[name]
            shard.copy_from_full(made.T if transposed else made, local)
            return
        view = local.T if transposed else local
        dim, segments = shard.dim, shard.segments
        if dim is None:
            dim, segments = 0, ((0, view.shape[0] if view.dim() else 1, 0),)
        else:
            # Padding stays 0.
            local.zero_()
            dim = local.dim() - 1 - dim if transposed else dim
        for part in self._mapping.parts[name]:
            for segment in segments:
                self._copy_part(part, view, dim, segment)

    def _copy_part(
        self, part: StoredPart, local: Tensor, dim: int, segment: tuple[int, int, int]
    ) -> None:
        """Copy the common region of a stored tensor and of one segment of the shard.

        Args:
            local: the local tensor, with its dims in the order of the files.
            dim: the dim of the shard.
            segment: (start in the model's tensor, length, start in `local`).
        """
        start, length, offset = segment
        index: list[slice] = []
        for d, (low, high) in enumerate(part.box):
            first, last, at = low, high, low
            if d == dim:
                first, last = max(low, start), min(high, start + length)
                at = first - start + offset
            if first >= last:
                return
            local = local.narrow(d, at, last - first)
            index.append(slice(first - low, last - low))
        own = index if part.expert is None else index[1:]
        local.copy_(self.files.read(part.key, tuple(own)))
