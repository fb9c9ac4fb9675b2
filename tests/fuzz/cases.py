"""Random training runs: what a case is, how it is drawn from a seed, how it is made smaller."""

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pipemega.pipeline.schedules import SCHEDULES, splits_backward
from tests.fuzz.experts import KINDS as EXPERTS
from tests.fuzz.layers import (
    FIRST,
    LAYERS,
    NOT_FROZEN,
    NOT_RECOMPUTED,
    ONE_DATA_RANK,
    TRAINED,
    WHOLE_BACKWARD,
)

# A gradient that is 0 in theory, as of a key bias, is rounding error: a small eps would make steps
# of it.
_EPS = 1e-4
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "AdamW": {"lr": 0.01, "eps": _EPS},
    "Adam": {"lr": 0.01, "eps": _EPS, "adam_w_mode": False},
    "NAdam": {"lr": 0.01, "eps": _EPS},
    "RAdam": {"lr": 0.01, "eps": _EPS},
    "Adamax": {"lr": 0.01, "eps": _EPS},
    "Adagrad": {"lr": 0.02, "eps": _EPS},
    "RMSprop": {"lr": 0.005, "eps": _EPS},
    "ASGD": {"lr": 0.02},
    "Adadelta": {"lr": 0.5, "eps": _EPS},
}
REFUSED_MESSAGES = ("message: object", "message: in place of a view")


@dataclass(frozen=True)
class Mesh:
    """Sizes of the mesh, and how its pipeline runs."""

    pipeline: int = 1
    data: int = 1
    tensor: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    partition: Any = "auto"
    zero: bool = False
    overlap: bool = False
    expert: int = 1

    @property
    def ranks(self) -> int:
        return self.pipeline * self.data * self.tensor

    @property
    def stages(self) -> int:
        return self.pipeline * self.chunks


@dataclass(frozen=True)
class Case:
    """One run, as JSON.

    Args:
        layers: kinds of `LAYERS`.
        style: "specs", or "built": modules that the caller has built.
        ends: "tensors"; "tokens": an embedding comes first; "tied": it is the last layer, too.
        data: where the micro-batches come from: "initialize", "iterator", "batch".
        mesh, resumed: meshes before and after `resume_at`.
        evaluate_at, resume_at: the step before which it happens; None: never.
        frozen: (first step, last step, position of a layer, and of layers that are tied to it).
    """

    layers: tuple[str, ...] = ("linear",)
    style: str = "specs"
    ends: str = "tensors"
    data: str = "initialize"
    example: bool = False
    shapes: str = "cached"
    mesh: Mesh = field(default_factory=Mesh)
    resumed: Mesh | None = None
    resume_at: int | None = None
    evaluate_at: int | None = None
    steps: int = 3
    micro_batches: int = 1  # of the whole batch, of all data ranks
    samples: int = 2  # of one micro-batch
    recompute: int = 0
    clipping: float = 0.0
    late_sync: bool = False
    offload: bool = False  # saved activations move to the host
    graphs: bool = False  # layers run as graphs
    optimizer: str = "SGD"
    weight_decay: float = 0.0
    fused: bool = False
    ignored: bool = False  # the loss leaves out some tokens
    fills: bool = False  # W run within exchanges
    frozen: tuple[tuple[int, int, int], ...] = ()

    def __str__(self) -> str:
        return json.dumps(
            {key: value for key, value in asdict(self).items() if value != asdict(Case())[key]}
        )

    @property
    def num_layers(self) -> int:
        return len(self.kinds)

    @property
    def meshes(self) -> list[Mesh]:
        return [self.mesh, *([self.resumed] if self.resumed else [])]

    @property
    def kinds(self) -> list[str]:
        """The kind of each layer of the model."""
        found = [kind for kind in self.layers for _ in LAYERS[kind]]
        first = [] if self.ends == "tensors" else ["words"]
        return [*first, *found, *(first if self.ends == "tied" else [])]

    def is_frozen(self, position: int, step: int) -> bool | None:
        """Return whether a layer is frozen in a step; None: it never is."""
        kinds = self.kinds

        def same(place: int) -> bool:
            tied = kinds[position] in ("tied", "words") and kinds[place] == kinds[position]
            return place == position or tied

        spans = [(first, last) for first, last, place in self.frozen if same(place)]
        return any(first <= step <= last for first, last in spans) if spans else None

    def boundaries(self, kind: str) -> set[int]:
        """Return the positions of the second layers of the pairs of this kind."""
        places = [position for position, other in enumerate(self.kinds) if other == kind]
        return {*places[1::2]}


def case_of(text: str) -> Case:
    """Return the case that `str` has printed."""
    values = json.loads(text)
    for key in ("mesh", "resumed"):
        if values.get(key):
            values[key] = Mesh(**values[key])
    for key in ("layers", "frozen"):
        values[key] = tuple(tuple(x) if isinstance(x, list) else x for x in values.get(key, ()))
    return Case(**values)


def draw(seed: int) -> Case:
    """Return the case of this seed."""
    rng = random.Random(seed)
    chance = lambda p: rng.random() < p  # noqa: E731
    mesh = _mesh(rng, rng.choice([1, 2, 2, 2, 4, 4, 4]))
    recompute = rng.choice([0, 0, 0, 1, 2])
    ends = rng.choice(["tensors", "tensors", "tensors", "tokens", "tied"])
    layers = _layers(rng, mesh, recompute, ends)
    may_fail = {*layers} & {*WHOLE_BACKWARD, *REFUSED_MESSAGES}
    if may_fail and mesh.schedule == "auto":
        mesh = replace(mesh, schedule="1f1b")  # known cuts, known backward
    micro_batches = mesh.data * rng.choice([1, 2, 2, 3, 4, 5])
    case = Case(
        layers=layers,
        style=rng.choice(["specs", "built"]),
        ends=ends,
        data=rng.choice(["initialize", "iterator", "batch"]),
        example=chance(0.3),
        shapes=rng.choice(["cached", "cached", "exchanged"]),
        mesh=mesh,
        steps=rng.choice([2, 3, 4]),
        micro_batches=micro_batches,
        samples=rng.choice([1, 2, 3]),
        recompute=recompute,
        clipping=rng.choice([0.0, 0.05, 0.5]),
        late_sync=chance(0.6 if mesh.overlap else 0.25),
        optimizer=rng.choice([*OPTIMIZERS, "AdamW", "AdamW", "SGD"]),
        weight_decay=rng.choice([0.0, 0.1]),
        evaluate_at=rng.choice([None, None, 0, 1, 2]),
        fused=chance(0.3),
    )
    bounds = [_bounds(rng, case, mesh)]
    if chance(0.45):
        others = [_mesh(rng, mesh.ranks) for _ in range(20)]
        fitting = [
            other
            for other in others
            if micro_batches % other.data == 0
            and other.stages <= case.num_layers
            and not (may_fail and other.schedule == "auto")
            and not (other.data > 1 and {*layers} & {*ONE_DATA_RANK})
        ]
        resumed = next(iter(fitting), mesh)
        bounds.append(_bounds(rng, case, resumed))
        resumed = replace(resumed, partition=bounds[1])
        case = replace(case, resumed=resumed, resume_at=rng.randrange(1, case.steps))
    case = replace(case, mesh=replace(mesh, partition=bounds[0]))
    if chance(0.25):
        spans = [sorted(rng.choices(range(case.steps), k=2)) for _ in range(2)]
        places = [p for p, kind in enumerate(case.kinds) if kind not in NOT_FROZEN]
        frozen = tuple((a, b, rng.choice(places)) for a, b in spans)
        some = replace(case, frozen=frozen)
        if any(k in TRAINED and some.is_frozen(p, 0) is None for p, k in enumerate(case.kinds)):
            case = some  # else a step would have no gradient at all
        if case.late_sync and case.data == "initialize":
            case = replace(case, data="iterator")
    # Last, so that a seed of an older version gives the same case in all else.
    case = replace(case, offload=chance(0.3))
    case = replace(case, graphs=not case.offload and chance(0.4))
    return _with_experts(rng, case) if chance(0.3) else case


def _with_experts(rng: random.Random, case: Case) -> Case:
    """Return `case` with experts in place of one or two layers, often divided over data ranks."""
    layers = [*case.layers]
    places = [place for place, kind in enumerate(layers) if kind in ("linear", "tanh", "norm")]
    for place in rng.sample(places, min(len(places), rng.choice([1, 1, 2]))):
        layers[place] = rng.choice([*EXPERTS])
    meshes = [
        mesh and replace(mesh, expert=rng.choice([n for n in (1, 2, 2, 4) if mesh.data % n == 0]))
        for mesh in (case.mesh, case.resumed)
    ]
    # What a layer accumulates in its forward is scaled with the rest by the weight of the loss.
    ignored = rng.random() < 0.5 and "inner backward" not in layers
    case = replace(case, layers=tuple(layers), mesh=meshes[0], resumed=meshes[1], ignored=ignored)
    # The exchanges are counted before the first step.
    known = case.data == "initialize" or case.example
    return replace(case, fills=rng.random() < 0.5 and known and not (case.offload or case.graphs))


def _mesh(rng: random.Random, ranks: int) -> Mesh:
    sizes = [(p, d, t) for p in (1, 2, 4) for d in (1, 2, 4) for t in (1, 2) if p * d * t == ranks]
    pipeline, data, tensor = rng.choice(sizes)
    names = ["1f1b", "auto", *SCHEDULES]
    schedule = rng.choice(names)
    family = SCHEDULES.get(schedule)
    chunks = family.default_chunks if family else 1
    if family and family.chunks is None and pipeline == 2:
        chunks = rng.choice([2, 3])
    zero = data > 1 and rng.random() < 0.6
    return Mesh(pipeline, data, tensor, schedule, chunks, "auto", zero, zero and rng.random() < 0.6)


def _layers(rng: random.Random, mesh: Mesh, recompute: int, ends: str) -> tuple[str, ...]:
    left_out = {*FIRST, "tied", "parallel", *EXPERTS}
    left_out |= {*NOT_RECOMPUTED} if recompute else set()
    left_out |= {*ONE_DATA_RANK} if mesh.data > 1 else set()
    refused = [*WHOLE_BACKWARD, *REFUSED_MESSAGES]
    left_out |= {*refused}
    kinds = [kind for kind in LAYERS if kind not in left_out]
    plain = ["linear", "linear", "tanh", "norm"]
    layers: list[str] = []
    wanted = mesh.stages + rng.randrange(1, 5)
    while sum(len(LAYERS[kind]) for kind in layers) < wanted:
        layers.append(rng.choice(plain if rng.random() < 0.35 else kinds))
    if not recompute and rng.random() < 0.15:
        layers.insert(rng.randrange(len(layers) + 1), rng.choice(refused))
    if rng.random() < 0.2:
        for _ in range(2):
            layers.insert(rng.randrange(len(layers) + 1), "tied")
    if rng.random() < (0.7 if mesh.tensor > 1 else 0.1):
        layers.insert(rng.randrange(len(layers) + 1), "parallel")
    if ends == "tensors" and rng.random() < 0.1:
        layers.insert(0, "in place on the input")
    # A step needs a trainable parameter.
    return *layers, "linear"


def _bounds(rng: random.Random, case: Case, mesh: Mesh) -> Any:
    """Return a partition of the layers."""
    given = any(kind in REFUSED_MESSAGES for kind in case.layers)
    if mesh.schedule == "auto" or (not given and rng.random() < 0.6):
        return rng.choice(["auto", "auto", "parameters", "uniform"])
    cuts = sorted(rng.sample(range(1, case.num_layers), mesh.stages - 1))
    return [0, *cuts, case.num_layers]


def predicted_refusal(case: Case) -> str | None:
    """Return words of the error with which pipemega must refuse `case`; None: it must train."""
    change = case.steps if case.resume_at is None else case.resume_at
    for mesh, steps in zip(case.meshes, (range(change), range(change, case.steps)), strict=False):
        if mesh.stages > case.num_layers:
            return "layers"
        fuses = case.fused and mesh.tensor == 1
        if fuses or (mesh.schedule != "auto" and splits_backward(mesh.schedule)):
            for position, kind in enumerate(case.kinds):
                trains = not all(case.is_frozen(position, step) for step in steps)
                if kind in WHOLE_BACKWARD and trains:
                    return "create_graph=True"
        if case.frozen and case.late_sync and case.data == "initialize" and mesh.pipeline > 1:
            return "With pipeline.optimizer_sync 'post_validate' and map-style training_data"
        cuts = set(mesh.partition[1:-1]) if isinstance(mesh.partition, list) else set()
        if case.boundaries("message: object") & cuts:
            return "object with tensors, Opaque"
        if case.boundaries("message: in place of a view") & cuts:
            return "shares its memory with another tensor"
    return None


def smaller(case: Case) -> Iterator[Case]:
    """Yield simpler cases, the largest simplification first."""
    plain = Case()
    yield replace(case, resumed=None, resume_at=None)
    one = {"pipeline": 1, "chunks": 1, "schedule": "1f1b", "partition": "auto", "tensor": 1}
    alone = replace(case.mesh, **one, data=1, expert=1, zero=False, overlap=False)  # type: ignore[arg-type]
    yield replace(case, mesh=alone, resumed=case.resumed and alone)
    for place in range(len(case.layers) - 1):
        yield _without(case, place)
    for key in (
        "frozen", "evaluate_at", "recompute", "offload", "graphs", "late_sync", "fused", "clipping",
        "weight_decay", "ignored",
        "optimizer", "ends", "style", "shapes", "example", "data", "samples",
    ):  # fmt: skip
        if not (key == "ends" and case.frozen):
            yield replace(case, **{key: getattr(plain, key)})
    for mesh_key in ("mesh", "resumed"):
        mesh = getattr(case, mesh_key)
        if mesh is None:
            continue
        for changes in (
            {"schedule": "1f1b", "chunks": 1, "partition": "auto"},
            {"zero": False, "overlap": False},
            {"overlap": False},
            {"expert": 1},
            {"partition": "uniform"},
        ):
            yield replace(case, **{mesh_key: replace(mesh, **changes)})
    for fewer in range(1, case.micro_batches):
        if all(fewer % mesh.data == 0 for mesh in case.meshes):
            yield replace(case, micro_batches=fewer)
    if case.steps > 1 + (case.resume_at or 0):
        yield replace(case, steps=case.steps - 1)


def _without(case: Case, place: int) -> Case:
    """Return `case` without one of its kinds, and with an even partition."""
    first = (case.ends != "tensors") + sum(len(LAYERS[kind]) for kind in case.layers[:place])
    count = len(LAYERS[case.layers[place]])
    frozen = tuple(
        (start, stop, position - count * (position > first))
        for start, stop, position in case.frozen
        if not first <= position < first + count
    )
    layers = (*case.layers[:place], *case.layers[place + 1 :])
    meshes = [m and replace(m, partition="uniform") for m in (case.mesh, case.resumed)]
    return replace(case, layers=layers, frozen=frozen, mesh=meshes[0], resumed=meshes[1])  # type: ignore[arg-type]
