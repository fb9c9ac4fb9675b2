"""Builds and checks the optimizer of `initialize(optimizer=...)`; all ranks get the same error.

Optimizers and parameter groups that were built over the parameters of the model itself.

    optimizer.param_groups[k]    lr, betas, ...    params: parameters of the model
                                                           |  logical names
                                                           v
                                                   params: masters of this rank

The object of the caller becomes the optimizer of the engine, as in DeepSpeed: a scheduler that was
built over it, and code that changes the options of its groups, work as before.

Tests whether an optimizer computes the same with parameters that are cut over ranks.

    whole      | a a a a a a |  | b b b |          one optimizer over all parameters
    pipeline   | a a a a a a |  and | b b b |      one optimizer for the parameters of each rank
    tensor     | a a a |   and | a a a |           one for the first halves, one for the others
    ZeRO       | a a |     and | a a a a |         as tensor, but 1-D slices, of other sizes

The parameters are small, in groups like the model's; all optimizers get the same gradients
for a few steps.  If they give other values, the optimizer computes with norms, whole matrices or
several parameters, and would train another model on the mesh.
"""

import inspect
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipemega.config.sections.optimizer_section import GroupSpec
from pipemega.distributed.mesh import Axis, Mesh, gather_objects, on_all_ranks
from pipemega.errors import ConfigError
from pipemega.optimizer.param_groups import check_options, listed, options_of
from pipemega.parameters import shard_of
from pipemega.random import preserve_rng

Groups = list[dict[str, Any]]
OptimizerMaker = Callable[[Groups], Any]
"""Parameter groups -> torch optimizer over these parameters."""


def build_user_optimizer(
    make: OptimizerMaker,
    groups: Groups,
    named: Mapping[str, Tensor],
    specs: Sequence[GroupSpec],
    world: Axis,
) -> Optimizer:
    """Call `make`, and check what it returns; collective.

    Args:
        groups: what `make` gets.
        named: logical name -> the parameters in `groups`.
        specs: the specs of the groups; their options must be options of the optimizer.
        world: the axis of all ranks.

    Raises:
        ConfigError: `make` fails, or returns something that the engine cannot use; the same on
            every rank.
    """

    def build() -> Optimizer:
        optimizer = call(make, groups, named)
        check_options(specs, optimizer)
        return optimizer

    optimizer = on_all_ranks(world, build)
    check_group_counts(len(optimizer.param_groups), world)
    return optimizer


def check_group_counts(count: int, world: Axis) -> None:
    """Check that all ranks have as many parameter groups as this one; collective.

    Raises:
        ConfigError: they have not; on every rank.
    """
    counts = gather_objects(count, world)
    other = next((rank for rank, count in enumerate(counts) if count != counts[0]), None)
    if other is not None:
        raise ConfigError(
            f"the optimizer has {counts[0]} parameter groups on rank 0 and {counts[other]} on rank "
            f"{other}: keep groups without parameters, so that schedules and checkpoints see the "
            "same groups on every rank",
            on_every_rank=True,
        )


def call(make: OptimizerMaker, groups: Groups, named: Mapping[str, Tensor]) -> Optimizer:
    """Call `make` and check the result on this rank.

    Raises:
        ConfigError: the reason why the engine cannot use the result.
    """
    # Copies: an optimizer adds its defaults to the groups that it gets.
    optimizer = made_by(make, [{**group, "params": list(group["params"])} for group in groups])
    name = type(optimizer).__name__
    if _needs_closure(optimizer):
        raise ConfigError(
            f"{name}.step() needs a closure that evaluates the model again, which a pipeline "
            "cannot do: use an optimizer whose step() needs none, such as AdamW"
        )
    _check_parameters(optimizer, named)
    if any("lr" not in group for group in optimizer.param_groups):
        raise ConfigError(
            f"a parameter group of {name} has no option 'lr', which the engine reports in each "
            "step: add it to the groups, 1.0 if the optimizer has no learning rate"
        )
    return optimizer


def made_by(make: Callable[[Any], Any], parameters: Any) -> Optimizer:
    """Return the optimizer that the function of the caller makes of the parameters.

    Raises:
        ConfigError: it fails, or returns something else.
    """
    try:
        optimizer = make(parameters)
    except Exception as error:
        raise ConfigError(f"optimizer raised {type(error).__name__}: {error}") from error
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer must return a torch.optim.Optimizer, and it returns {_shown(optimizer)}: "
            "write optimizer=lambda params: AdamW(params, lr=1e-4)"
        )
    return optimizer


def _check_parameters(optimizer: Optimizer, named: Mapping[str, Tensor]) -> None:
    """Check that the optimizer has exactly the parameters that it was given."""
    name = type(optimizer).__name__
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if missing := [key for key, p in named.items() if id(p) not in held]:
        raise ConfigError(
            f"the optimizer {name} drops {len(missing)} of the {len(named)} parameters that this "
            f"rank has given it: {listed(missing)}. A parameter that is not to be trained has "
            "requires_grad False in its layer; all others belong in the optimizer"
        )
    given = {id(p) for p in named.values()}
    others = [p for g in optimizer.param_groups for p in g["params"] if id(p) not in given]
    if others:
        shapes = ", ".join(str(tuple(p.shape)) for p in others[:3])
        raise ConfigError(
            f"the optimizer {name} holds {len(others)} parameters that it was not given, such as "
            f"of shape {shapes}: build it over the argument of the function, which are the master "
            "weights or slices that this rank updates, and not over the parameters of a module"
        )


def _needs_closure(optimizer: Optimizer) -> bool:
    """Return whether `step` has a parameter without a default."""
    # Of the class: a scheduler replaces the method of the object by a function with `self`.
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.kind in positional and p.default is p.empty for p in parameters)


def _shown(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


# Set by torch and by schedulers on the object, for this object only.
_OF_ONE_OBJECT = ("step", "zero_grad", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class GivenGroups:
    """Groups of parameters of the model, by the logical names of the parameters.

    Args:
        groups: parameters; or groups as torch's optimizers take them, {"params": [...], "lr": 1.0}.
        names: id of each local parameter of the model -> its logical name.

    Raises:
        ConfigError: an entry is neither, or a parameter is not one of the model.
    """

    def __init__(
        self, groups: Iterable[Tensor | Mapping[str, Any]], names: Mapping[int, str]
    ) -> None:
        entries: list[Any] = list(groups)
        if not any(isinstance(entry, Mapping) for entry in entries):
            entries = [{"params": entries}]
        self._options: list[dict[str, Any]] = []
        self._names: list[list[str]] = []
        for number, entry in enumerate(entries):
            if not isinstance(entry, Mapping) or "params" not in entry:
                raise ConfigError(
                    f"parameter group {number} must be a dict with the key 'params', and is a "
                    f"{type(entry).__name__}: give either parameters or groups"
                )
            given = entry["params"]
            parameters = [given] if isinstance(given, Tensor) else list(given)
            self._options.append(options_of(entry))
            self._names.append([_name_of(p, names, number) for p in parameters])

    def __len__(self) -> int:
        return len(self._names)

    @property
    def names(self) -> frozenset[str]:
        """The logical names of all parameters in the groups."""
        return frozenset(name for group in self._names for name in group)

    def of(self, named: Mapping[str, Tensor]) -> Groups:
        """Return the groups with other tensors for the parameters.

        Args:
            named: logical name -> tensor; names that are missing there are left out.
        """
        return [
            {**options, "params": [named[name] for name in names if name in named]}
            for options, names in zip(self._options, self._names, strict=True)
        ]


class GivenOptimizer:
    """A torch optimizer that was built over parameters of the model; for `initialize(optimizer=)`.

    Args:
        optimizer: an optimizer without state, which has made no step.
        names: id of each local parameter of the model -> its logical name.

    Raises:
        ConfigError: it has state already, or holds a parameter that is not of the model.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        if len(optimizer.state):
            raise ConfigError(
                f"the optimizer {type(optimizer).__name__} has the state of "
                f"{len(optimizer.state)} parameters already, which the engine cannot take over: "
                "give an optimizer that has made no step and loaded no state; "
                "engine.load_checkpoint() restores the state that engine.save_checkpoint() saved"
            )
        self.optimizer = optimizer
        self.groups = GivenGroups(optimizer.param_groups, names)

    def attach(self, groups: Sequence[Mapping[str, Any]]) -> Optimizer:
        """Give the optimizer the parameters of `groups`, and return it; options are unchanged."""
        for own, group in zip(self.optimizer.param_groups, groups, strict=True):
            own["params"] = group["params"]
        return self.optimizer

    def copied(self, groups: Groups) -> Optimizer:
        """Return a copy of the optimizer over `groups`, without state and hooks."""
        kept = {k: v for k, v in vars(self.optimizer).items() if k not in _OF_ONE_OBJECT}
        twin: Optimizer = object.__new__(type(self.optimizer))
        # Adds what torch needs and is missing here.
        twin.__setstate__({**kept, "state": defaultdict(dict), "param_groups": groups})
        return twin


def as_optimizer(given: Any, parameters: Any) -> Optimizer:
    """Return the optimizer of the caller: `given`, or what this function makes of `parameters`.

    Raises:
        ConfigError: it is neither an optimizer nor a function that makes one.
    """
    if isinstance(given, Optimizer):
        return given
    if not callable(given):
        raise ConfigError(
            f"initialize(optimizer=...) takes a torch.optim.Optimizer, or a function of the "
            f"parameters that returns one, not a {type(given).__name__}",
            on_every_rank=True,
        )
    return made_by(given, parameters)


def freeze_others(
    named: Mapping[str, nn.Parameter], groups: GivenGroups, log: logging.Logger
) -> None:
    """Freeze the parameters that are in no group: the engine trains all that require a gradient.

    Args:
        named: logical name -> parameter of this rank.
    """
    kept = groups.names
    others = [n for n, p in named.items() if p.requires_grad and n not in kept]
    for name in others:
        named[name].requires_grad_(False)
    if others:
        log.info(
            f"{len(others)} parameters of this rank are in no parameter group, so they are not "
            f"trained: {listed(others)}"
        )


def _name_of(parameter: Any, names: Mapping[int, str], group: int) -> str:
    name = names.get(id(parameter))
    if name is None:
        shape = tuple(parameter.shape) if isinstance(parameter, Tensor) else type(parameter)
        raise ConfigError(
            f"parameter group {group} holds a parameter of shape {shape} that is not one of the "
            "model: build the groups and the optimizer over model.parameters(), after the last "
            "change of the model"
        )
    return name


# Some optimizers compute with norms or matrices only after a number of steps.
_STEPS = 30
_SIZES = (6, 4, 3, 2, 2)
# Rounding of fp32 state is below, a weight decay of 1e-4 is above.
_TOLERANCE = 1e-5
_LR = 1e-2  # in place of 0, with which no parameter would change

Split = Callable[[Tensor], list[Tensor]]
"""Tensor -> its parts; the optimizers of all parts together update the tensor."""


class _Layout(NamedTuple):
    """How a mesh cuts parameters.

    Args:
        what: description of the layout for messages, with the key and its value.
        needs: what the optimizer must do.
        advice: how to avoid the cut.
        split: tensor -> parts; one optimizer for the first parts, one for the second..
        alone: each tensor has an optimizer of its own.
    """

    what: str
    needs: str
    advice: str
    split: Split
    alone: bool = False


def check_cuts(
    make: OptimizerMaker,
    groups: Sequence[Mapping[str, Any]],
    mesh: Mesh,
    shard_axis: Axis | None,
) -> None:
    """Refuse an optimizer that gives other values on this mesh than in one process.  Collective.

    Args:
        make: builds the optimizer from groups; called several times.
        groups: the groups of the masters of this rank; their options are used.
        mesh: the mesh that cuts the parameters.
        shard_axis: the data ranks that hold slices of each parameter (ZeRO); None: they are whole.

    Raises:
        ConfigError: the optimizer gives other values; the message has the layout, the difference
            and the alternatives; on every rank.
    """
    layouts = list(_layouts(mesh, shard_axis))
    if not layouts:
        return
    local = [{len(shard_of(p).shape) for p in group["params"]} for group in groups]
    # Of the whole model, so that all ranks do the same test.
    gathered = gather_objects(local, mesh.world)
    dims = [sorted(set().union(*of_group)) for of_group in zip(*gathered, strict=True)]
    masters = [p for group in groups for p in group["params"]]
    device = masters[0].device if masters else mesh.device
    options = [options_of(group) for group in groups]

    def check() -> None:
        for layout in layouts:
            with preserve_rng(device):
                problem = _problem(make, options, dims, layout, device)
            if problem is not None:
                raise ConfigError(
                    f"{problem}. On this mesh {layout.what}, so the optimizer must update "
                    f"{layout.needs}. {layout.advice}, or use an optimizer such as AdamW or SGD; "
                    "if the test is wrong, set zero_allow_untested_optimizer to true"
                )

    # The function of a user may differ between ranks.
    on_all_ranks(mesh.world, check)


def _layouts(mesh: Mesh, shard_axis: Axis | None) -> Iterator[_Layout]:
    if mesh.pipeline.size > 1:
        yield _Layout(
            f"mesh.pipeline ({mesh.pipeline.size}) gives each rank the parameters of its stages",
            "each parameter without the others",
            "Set mesh.pipeline to 1",
            lambda tensor: [tensor],
            alone=True,
        )
    each = "each element separately, with a state of the shape of the parameter"
    if mesh.tensor.size > 1:
        for dim in (0, 1):
            yield _Layout(
                f"mesh.tensor ({mesh.tensor.size}) shards parameters",
                each,
                "Set mesh.tensor to 1",
                lambda tensor, dim=dim: _halves(tensor, dim),  # type: ignore[misc]
            )
    if mesh.expert.size > 1:
        yield _Layout(
            f"mesh.expert ({mesh.expert.size}) shards the parameters of experts",
            each,
            "Set mesh.expert to 1",
            lambda tensor: _halves(tensor, 0),
        )
    if shard_axis is not None:
        yield _Layout(
            f"zero_optimization.stage 1 gives each of {shard_axis.size} data ranks a 1-D slice of "
            "each parameter",
            each,
            "Set zero_optimization.stage to 0",
            _slices,
        )


def _halves(tensor: Tensor, dim: int) -> list[Tensor]:
    # A parameter without this dim is not sharded.
    return [tensor] if tensor.dim() <= dim else list(tensor.chunk(2, dim))


def _slices(tensor: Tensor) -> list[Tensor]:
    flat, cut = tensor.reshape(-1), tensor.numel() // 3
    return [flat[:cut], flat[cut:], flat[:0]]


def _problem(
    make: OptimizerMaker,
    options: Sequence[Mapping[str, Any]],
    dims: Sequence[Sequence[int]],
    layout: _Layout,
    device: torch.device,
) -> str | None:
    """Return how the optimizer differs under `layout`; None if it does not.

    Raises:
        ConfigError: it fails with whole parameters.
    """
    for dtype in (torch.float64, torch.float32):
        tensors = _tensors(dims, dtype, device)
        try:
            whole = _train(make, options, [tensors])
        except ConfigError as error:
            # Some kernels have no fp64.
            if dtype == torch.float64:
                continue
            raise ConfigError(
                f"the optimizer fails with small parameters of as many dims as those of the model "
                f"have: {error}. If it works with the model, set zero_allow_untested_optimizer to "
                "true"
            ) from error
        try:
            cut = _train(make, options, _parts(tensors, layout))
        except ConfigError as error:
            return f"the optimizer cannot update parts of parameters: {error}"
        return _difference(tensors, whole, _joined(tensors, layout, cut))
    return None


class _Tensor(NamedTuple):
    """A parameter and its gradients.

    Args:
        group: index of its group.
        value: the first value.
        gradients: one gradient for each step.
    """

    group: int
    value: Tensor
    gradients: list[Tensor]


def _tensors(
    dims: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> list[_Tensor]:
    """Return two tensors for each number of dims of each group, with gradients of other sizes."""
    generator = torch.Generator().manual_seed(0)

    def normal(shape: Sequence[int]) -> Tensor:
        values = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
        return values.to(device, dtype)

    found = []
    for group, counts in enumerate(dims):
        for count in counts:
            for size, noise in ((1.0, 0.5), (30.0, 3.0)):
                shape = _SIZES[:count]
                # Rows of other sizes, so that norms of parts differ from the norm of the whole.
                scale = size * torch.linspace(0.2, 3.0, shape[0] if shape else 1)
                scale = scale.view(-1, *[1] * (count - 1)).to(device, dtype)
                scale = scale if shape else scale[0]
                # With little noise, estimates of the distance to the optimum grow.
                mean = normal(shape)
                gradients = [(mean + noise * normal(shape)) * scale for _ in range(_STEPS)]
                found.append(_Tensor(group, normal(shape), gradients))
    return found


def _parts(tensors: Sequence[_Tensor], layout: _Layout) -> list[list[_Tensor]]:
    """Return the tensors of each optimizer under `layout`."""
    if layout.alone:
        return [[tensor] for tensor in tensors]
    split = [
        [
            _Tensor(tensor.group, value, list(gradients))
            for value, *gradients in zip(
                layout.split(tensor.value), *map(layout.split, tensor.gradients), strict=True
            )
        ]
        for tensor in tensors
    ]
    count = max(map(len, split), default=0)
    return [[parts[i] for parts in split if i < len(parts)] for i in range(count)]


def _train(
    make: OptimizerMaker,
    options: Sequence[Mapping[str, Any]],
    optimizers: Sequence[Sequence[_Tensor]],
) -> list[list[Tensor]]:
    """Return the values of the tensors of each optimizer after some steps.

    Raises:
        ConfigError: the optimizer cannot be built, or its step fails.
    """
    return [_train_one(make, options, tensors) for tensors in optimizers]


def _train_one(
    make: OptimizerMaker, options: Sequence[Mapping[str, Any]], tensors: Sequence[_Tensor]
) -> list[Tensor]:
    parameters = [nn.Parameter(tensor.value.clone()) for tensor in tensors]
    groups: list[dict[str, Any]] = [{**group, "params": []} for group in options]
    for tensor, parameter in zip(tensors, parameters, strict=True):
        groups[tensor.group]["params"].append(parameter)
    named = {f"test parameter {i}": parameter for i, parameter in enumerate(parameters)}
    optimizer = call(make, groups, named)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] or _LR
    for step in range(_STEPS):
        for tensor, parameter in zip(tensors, parameters, strict=True):
            parameter.grad = tensor.gradients[step].clone()
        try:
            optimizer.step()
        except Exception as error:
            name = type(optimizer).__name__
            raise ConfigError(f"{name}.step() raised {type(error).__name__}: {error}") from error
    return [parameter.detach() for parameter in parameters]


def _joined(
    tensors: Sequence[_Tensor], layout: _Layout, trained: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Return the tensors that the parts of `trained` are parts of."""
    if layout.alone:
        return [part for (part,) in trained]
    queues = [iter(parts) for parts in trained]
    joined = []
    for tensor in tensors:
        whole = torch.empty_like(tensor.value)
        for part, queue in zip(layout.split(whole), queues, strict=False):
            part.copy_(next(queue))
        joined.append(whole)
    return joined


def _difference(
    tensors: Sequence[_Tensor], whole: Sequence[Sequence[Tensor]], cut: Sequence[Tensor]
) -> str | None:
    """Return the largest difference, relative to the update of its tensor; None if it is small."""
    worst = 0.0
    for tensor, one, other in zip(tensors, whole[0], cut, strict=True):
        update = float((one - tensor.value).abs().max())
        change = float((one - other).abs().max())
        if change != 0:
            share = change / update if update else math.inf
            worst = max(worst, math.inf if math.isnan(share) else share)
    if worst <= _TOLERANCE:
        return None
    return (
        "the optimizer does not work on parts of the parameters: in a test its updates of cut "
        f"parameters differ from those of whole ones by {worst:.2g} of the update"
    )
