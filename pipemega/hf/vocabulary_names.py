"""VocabularyNames: where a model has its table of embeddings and its head, and whether tied."""

from typing import Any

from torch import nn

from pipemega.hf.description import ModelDescription


class VocabularyNames:
    """Names of the modules with the vocabulary.

    Attributes:
        table: the embedding of the vocabulary; "" if the model has none (images).
        head: the linear that computes logits over the vocabulary; None without.
        head_is_tied: the head uses the weight of the table.
    """

    def __init__(self, description: ModelDescription) -> None:
        self._tied = description.tied
        self._owners = description.owners
        model = description.model
        self._modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
        words = _input_embeddings(model)
        self.table = ""
        self.head: str | None = None
        if isinstance(words, nn.Embedding):
            self.table = self._name_of(words)
            head = model.get_output_embeddings()
            self.head = None if head is None else self._name_of(head)
        self.head_is_tied = self._is_tied(self.head)

    def _name_of(self, module: nn.Module) -> str:
        names = [name for name, other in self._modules.items() if other is module]
        saved = [name for name in names if f"{name}.weight" not in self._tied]
        return (saved or names)[0]

    def _is_tied(self, module: str | None) -> bool:
        return module is not None and self._tied.get(f"{module}.weight") == f"{self.table}.weight"

    def is_table(self, name: str) -> bool:
        """Return whether a module is the table, or an embedding with its weight."""
        module = self._modules.get(name)
        if not self.table or not isinstance(module, nn.Embedding):
            return False
        return module is self._modules[self.table] or self._is_tied(name)

    @property
    def is_tied(self) -> bool:
        """Return whether several modules have the weight of the table."""
        return bool(self.table) and f"{self.table}.weight" in self._tied.values()

    def owner(self, name: str) -> str:
        """Return the outermost module with parameters that contains `name`."""
        return next(o for o in self._owners if name == o or name.startswith(f"{o}."))

    def drop_second_bias(self, model: nn.Module) -> None:
        """Remove the second name of the bias of the head (BERT's), which the head has."""
        other = self._tied.get(f"{self.head}.bias")
        if other is not None:
            path, _, last = other.rpartition(".")
            model.get_submodule(path)._parameters.pop(last)


def _input_embeddings(model: Any) -> nn.Module | None:
    try:
        embeddings: nn.Module = model.get_input_embeddings()
    except NotImplementedError:  # models without tokens, such as CLIP's image classifier
        return None
    return embeddings
