"""The modules of a traced model: built by the user, or by a factory with only the local parameters.

A factory is called once for the description of the model and once when the stages of this rank are
built. Each time every parameter that is not local goes to the meta device as soon as its module
registers it, so at most one of them is in memory. Each call of a random function is seeded by its
number in the constructor, so the initial values are the same on every mesh.
"""

import copy
import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from pipemega.errors import ConfigError, PipemegaError
from pipemega.parameters import attach_shard, shard_of
from pipemega.random import derive_seed, preserve_all_rng

Factory = Callable[[], nn.Module]


class BuiltSource:
    """A module that the user has built; its layers use it directly.

    Attributes:
        structure: the module; its parameters may be on any device.
    """

    def __init__(self, module: nn.Module) -> None:
        _check_not_lazy(module, type(module).__name__)
        self.structure = module

    def prepare(self, names: Collection[str], seed: int) -> None:
        """Make the parameters `names` real: they are."""

    def module(self, device: torch.device | str | None) -> nn.Module:
        """Return the module with at least the prepared parameters."""
        return self.structure

    def on_meta(self) -> "BuiltSource":
        """Return a source with a copy of the module on the meta device."""
        return BuiltSource(copy_structure(self.structure, "meta"))

    @property
    def name(self) -> str:
        return type(self.structure).__name__


class FactorySource:
    """A function or class that builds the module.

    Attributes:
        structure: the module on the meta device.

    Raises:
        ConfigError: the factory fails, returns no module, or returns a module that it has built
            before; the same on every rank.
    """

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        function = factory.func if isinstance(factory, partial) else factory
        self.name = getattr(function, "__name__", type(function).__name__)
        self._registrations = _Registrations(lambda _: False)
        built = self._build(self._registrations, seed=0)
        _check_not_lazy(built, self.name)
        real = [name for name, parameter in built.named_parameters() if not parameter.is_meta]
        if real:
            raise ConfigError(
                f"from_module: {self.name}() returned a module with parameters from before the "
                f"call ({real[0]}): pass the module itself, or a function that builds it",
                on_every_rank=True,
            )
        self.structure = copy_structure(built, "meta")
        self._numbers = self._registrations.numbers_in(built)
        self._prepared: nn.Module | None = None

    def prepare(self, names: Collection[str], seed: int) -> None:
        """Build the module with the parameters `names` on the CPU and the others on meta."""
        local = {self._numbers[name] for name in names}
        needed = local | self._registrations.sources_of(local)
        # Of what a constructor replaces, as weight_norm does, it may use the values.
        needed |= set(range(self._registrations.count)) - set(self._numbers.values())
        registrations = _Registrations(needed.__contains__)
        built = self._build(registrations, seed)
        registrations.release(built, local)
        parameters = dict(built.named_parameters(remove_duplicate=False))
        for name in sorted(names):
            want, got = self.structure.get_parameter(name), parameters.get(name)
            if got is None or got.is_meta or got.shape != want.shape:
                found = "missing" if got is None else f"another one, {list(got.shape)},"
                raise ConfigError(
                    f"from_module: {self.name}() builds another module in each call: {name} was "
                    f"{list(want.shape)} in the first call and is {found} in the second: build the "
                    f"same module each time, or pass a built module"
                )
        self._prepared = built

    def module(self, device: torch.device | str | None) -> nn.Module:
        if device is not None and torch.device(device).type == "meta":
            return self.structure
        assert self._prepared is not None, "prepare() was not called"
        return self._prepared

    def on_meta(self) -> "FactorySource":
        return self

    def _build(self, registrations: "_Registrations", seed: int) -> nn.Module:
        try:
            with _reproducible(seed), registrations.installed():
                module = self._factory()
        except PipemegaError:
            raise
        except Exception as error:
            raise ConfigError(
                f"from_module: {self.name}() failed: {type(error).__name__}: {error}; it is called "
                f"without arguments, and its parameters have no values if they belong to other "
                f"ranks: use functools.partial for arguments, or pass a built module",
                on_every_rank=True,
            ) from error
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"from_module: {self.name}() returned {type(module).__name__}, not an nn.Module",
                on_every_rank=True,
            )
        return module


ModuleSource = BuiltSource | FactorySource


class _Registrations:
    """Sends each new parameter to the meta device when its module registers it.

    Args:
        is_local: whether the parameter with this number keeps its values.

    Attributes:
        numbers: parameter -> its number, in the order of the first registrations and copies.
        count: how many numbers are used.
    """

    def __init__(self, is_local: Callable[[int], bool]) -> None:
        self._is_local = is_local
        self.numbers: Any = WeakIdKeyDictionary()
        self._replaced: Any = WeakIdKeyDictionary()
        self._sources: dict[int, int] = {}
        self.count = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        handle = register_module_parameter_registration_hook(self._register)  # type: ignore[arg-type]
        deepcopy: Any = nn.Parameter.__deepcopy__

        def copied(parameter: nn.Parameter, memo: dict[int, Any]) -> Any:
            if id(parameter) not in memo and parameter in self.numbers:
                memo[id(parameter)] = self._copy(parameter, deepcopy)
            return memo[id(parameter)] if id(parameter) in memo else deepcopy(parameter, memo)

        nn.Parameter.__deepcopy__ = copied  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Parameter.__deepcopy__ = deepcopy  # type: ignore[method-assign]
            handle.remove()

    def numbers_in(self, module: nn.Module) -> dict[str, int]:
        """Return name -> number of the parameters of a module that was built with this object.

        Raises:
            ConfigError: a parameter was set without a registration; the same on every rank.
        """
        numbers = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if parameter not in self.numbers:
                raise ConfigError(
                    f"from_module: {type(module).__name__} sets its parameter {name} without "
                    f"register_parameter, so it cannot be built on one rank only: pass a built "
                    f"module",
                    on_every_rank=True,
                )
            numbers[name] = self.numbers[parameter]
        return numbers

    def sources_of(self, numbers: Collection[int]) -> set[int]:
        """Return the parameters whose values constructors copy into the parameters `numbers`."""
        found: set[int] = set()
        for number in numbers:
            while number in self._sources:
                number = self._sources[number]
                found.add(number)
        return found

    def release(self, module: nn.Module, local: Collection[int]) -> None:
        """Send the parameters of the built module that were only needed for copies to meta."""
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and self.numbers.get(parameter) not in local:
                    part._parameters[name] = _meta_parameter(parameter)

    def _copy(self, parameter: nn.Parameter, deepcopy: Callable[..., Any]) -> nn.Parameter:
        """Return a copy of a registered parameter: its module is copied, as in nn.Transformer."""
        number = self.count
        self.count += 1
        self._sources[number] = self.numbers[parameter]
        is_real = self._is_local(number) and not parameter.is_meta
        copied: nn.Parameter = deepcopy(parameter, {}) if is_real else _meta_parameter(parameter)
        self.numbers[copied] = number
        return copied

    def _register(self, module: nn.Module, name: str, parameter: Any) -> nn.Parameter | None:
        if parameter is None or parameter in self.numbers:
            return None
        if parameter in self._replaced:
            return self._replaced[parameter]  # type: ignore[no-any-return]
        number = self.count
        self.count += 1
        # Lazy parameters have no shape yet; their modules cannot be traced.
        if self._is_local(number) or nn.parameter.is_lazy(parameter):
            self.numbers[parameter] = number
            return None
        replacement = _meta_parameter(parameter)
        self.numbers[replacement] = number
        self._replaced[parameter] = replacement
        return replacement


class _SeededInitialization(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Seeds each random function by its number, also if it runs on the meta device."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed, self._count = seed, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in function.tags:
            torch.default_generator.manual_seed(derive_seed(self._seed, self._count))
            self._count += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def _reproducible(seed: int) -> Iterator[None]:
    with preserve_all_rng(), _SeededInitialization(seed), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        numpy.random.seed(seed % 2**32)
        random.seed(seed)
        yield


def _meta_parameter(parameter: Tensor) -> nn.Parameter:
    """Return a parameter on the meta device with the shard of `parameter`."""
    empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    return attach_shard(empty, shard_of(parameter))


def _check_not_lazy(module: nn.Module, name: str) -> None:
    for path, part in module.named_modules():
        if any(map(nn.parameter.is_lazy, chain(part.parameters(False), part.buffers(False)))):
            raise ConfigError(
                f"from_module: the shapes of {path or name} ({type(part).__name__}) are not known "
                f"yet: run the module once on an input, and pass the built module",
                on_every_rank=True,
            )


def copy_structure(module: nn.Module, device: str | None = None) -> nn.Module:
    """Return a copy of the modules with the same tensors, or with tensors on `device`."""
    memo: dict[int, Any] = {}
    # Results that a module stores, as weight_norm does, cannot be copied with their history.
    for value in (value for part in module.modules() for value in vars(part).values()):
        if isinstance(value, Tensor) and not value.is_leaf:
            memo[id(value)] = value.detach().to(device)
    for tensor in chain(module.parameters(), module.buffers()):
        memo[id(tensor)] = tensor
        if device is not None and isinstance(tensor, nn.Parameter):
            memo[id(tensor)] = _meta_parameter(tensor)
        elif device is not None:
            memo[id(tensor)] = torch.empty_like(tensor, device=device)
    return copy.deepcopy(module, memo)
