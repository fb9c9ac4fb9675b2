"""MFU on GPUs, estimated: what takes the time of a step, and what each setting saves.

MFU: FLOPs of the model, without recomputation, over the bf16 peak of all GPUs. The times of kernels
were measured on one H200; those of communication are assumed. Nothing between GPUs was measured.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from pipemega.config.sections.gpt_section import GPTSection
from pipemega.layer_costs.counted_model import flops_per_token
from pipemega.layer_costs.tensor_meter import GPUS_PER_NODE, NETWORK, NVLINK, KernelKind
from pipemega.models.build_model import ModelContext
from pipemega.monitor import peak_tflops
from pipemega.optimizer.build_step import precision_of
from pipemega.planning.estimate import Report
from pipemega.planning.meta_model import vocabulary_of

# Seconds of kernels on an H200 over those of `kernel_rates`: benchmarks/gpu_single/README.md.
_MEASURED: Final[dict[KernelKind, float]] = {"products": 0.69, "attention": 0.79, "others": 0.85}
# Bytes/s of the memory, by the data sheet; the first is the device of the measurements.
_BANDWIDTH: Final = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.0e12, "B200": 8.0e12}
# Share of it that kernels reach, as measured.
_REACHED = 0.6
_MULTIPROCESSORS = 132
# Blocks of a waiting message on NCCL without a bound, and the share of a step in which one waits.
_MOST_BLOCKS, _WAITING = 32, 0.5
# What the compiler saves of the time of other kernels: measured, 0.5 to 0.9 % of a step.
_SAVED_BY_COMPILER = 0.03
# Share of the collectives that products of four pieces hide.
_OVERLAPPED = 3 / 4
# What fp8 saves of the time of matrix products, with its casts, if it is not counted: assumed.
_SAVED_BY_FP8 = 0.4
# Seconds of the host for the launch of a kernel: assumed.
_LAUNCH = 7e-6
# One product of halves adds to fp32: the 16-bit gradient is not written and read.
_BYTES_OF_A_GRADIENT = 4


@dataclass(frozen=True)
class Item:
    """A setting that saves time.

    Args:
        key: the key in the config.
        part: the part of a step in which it saves time.
        saved: seconds of a step.
    """

    name: str
    key: str
    is_on: bool
    part: str
    saved: float


@dataclass(frozen=True)
class Efficiency:
    """The estimated time of a step on the rank with the most work.

    Args:
        device: name of the device.
        ideal: seconds in which the ranks would compute the FLOPs of the model at their peak.
        parts: what takes the time -> seconds, with the items that are on.
        idle: share of the step in which the rank waits for other stages.
    """

    device: str
    ideal: float
    parts: dict[str, float]
    idle: float
    items: tuple[Item, ...]

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values()) / (1 - self.idle)

    @property
    def mfu(self) -> float:
        return self.ideal / self.seconds

    @property
    def shares(self) -> dict[str, float]:
        """The parts as shares of the step, with the time without work."""
        shares = {name: value / self.seconds for name, value in self.parts.items() if value}
        return shares | ({"bubble": self.idle} if self.idle else {})

    def mfu_with(self, item: Item, is_on: bool) -> float:
        """Return the MFU with one item on or off, and the others as they are."""
        saved = item.saved * (int(is_on) - int(item.is_on)) / (1 - self.idle)
        return self.ideal / (self.seconds - saved)


def efficiency(report: Report) -> Efficiency | None:
    """Return the estimate for GPTs in bf16 and fp16 on GPUs; None for others."""
    request, topology = report.request, report.topology
    config = request.config
    name = next((known for known in _BANDWIDTH if known in request.device_name), None)
    built_in = isinstance(config.model, GPTSection) and request.model is None
    if request.device != "cuda" or not built_in or name is None or not report.tokens:
        return None
    if config.mesh.mixed_devices or not precision_of(config).master:
        return None
    peak = 1e12 * (peak_tflops(name) or 0.0)
    context = ModelContext.of(config, topology, "meta", vocabulary_of(config).size)
    flops = report.tokens * flops_per_token(context)
    timeline = report.prediction.timeline
    rank = max(range(topology.pipeline), key=timeline.busy)
    work = _Work(report, rank, peak, _BANDWIDTH[name])
    parts, items = work.parts(), tuple(work.items())
    for item in items:
        parts[item.part] -= item.saved if item.is_on else 0.0
    ideal = flops / (peak * topology.world_size)
    return Efficiency(name, ideal, parts, timeline.bubble_of(rank), items)


class _Work:
    """The parts of a step of one pipeline rank, and what saves time in them."""

    def __init__(self, report: Report, rank: int, peak: float, bandwidth: float) -> None:
        self._report, self._rank = report, rank
        self._config, self._topology = report.request.config, report.topology
        self._count = report.batch.num_microbatches
        self._footprint = report.prediction.layout.footprints[rank]
        self._bandwidth = _REACHED * bandwidth
        slower: dict[KernelKind, float] = {
            "products": 1e12 * (peak_tflops("H200") or 0.0) / peak,
            "others": _BANDWIDTH["H200"] / bandwidth,
        }
        layout = report.prediction.layout
        own = [c for c, at in zip(layout.costs, layout.rank_of_stage, strict=True) if at == rank]
        self._kernels: dict[KernelKind, float] = {
            kind: factor
            * slower.get(kind, slower["products"])
            * self._count
            * sum(stage.kinds.get(kind, 0.0) for stage in own)
            for kind, factor in _MEASURED.items()
        }
        self._saved_by_fp8 = _SAVED_BY_FP8 * self._kernels["products"]
        if self._config.fp8.enabled:
            counted = sum(stage.seconds_without_fp8 - sum(stage.seconds) for stage in own)
            self._saved_by_fp8 = _MEASURED["products"] * slower["products"] * self._count * counted
        self._computing = sum(self._kernels.values())
        self._exchanges = self._count * sum(stage.kinds.get("exchanges", 0.0) for stage in own)
        waits = [stage.waits for stage in own]
        self._fillable = self._count * sum(min(w.forward + w.backward, w.weight) for w in waits)
        self._launched = sum(sum(stage.kernels) for stage in own)

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part, with all items off."""
        f = self._footprint
        moved = f.weights + 2 * f.gradients + 2 * (f.masters + f.optimizer)
        return {
            "matrix products": self._kernels["products"],
            "attention": self._kernels["attention"],
            "other kernels": self._kernels["others"],
            "launches of kernels": self._launches(),
            "multiprocessors of messages": self._messages(_MOST_BLOCKS),
            "tensor-parallel communication": self._tensor_parallel(),
            "exchange of tokens": self._exchanges,
            "reduction of gradients": self._reduction(),
            "optimizer step": moved / self._bandwidth,
        }

    def items(self) -> Iterator[Item]:
        """Yield the settings that save time on this mesh."""
        config, others = self._config, self._kernels["others"]
        compiles = config.compile.applies("cuda")
        yield Item(
            "compiled layers", "compile.enabled", compiles, "other kernels",
            _SAVED_BY_COMPILER * others,
        )  # fmt: skip
        halves = config.data_types.grad_accum_dtype in (None, "fp32")
        gradients = _BYTES_OF_A_GRADIENT * self._footprint.parameters * self._count * halves
        yield Item(
            "fused weight gradients", "gradient_accumulation_fusion",
            config.fuses_gradients("cuda"), "other kernels",
            min(gradients / self._bandwidth, 0.5 * others),
        )  # fmt: skip
        if waits := self._launches():
            yield Item(
                "CUDA graphs", "compile.cuda_graphs", config.compile.cuda_graphs,
                "launches of kernels", waits,
            )  # fmt: skip
        yield Item(
            "fp8 linears", "fp8.enabled", config.fp8.enabled, "matrix products",
            self._saved_by_fp8,
        )  # fmt: skip
        if self._topology.pipeline > 1:
            bound = config.pipeline.max_ctas
            saved = self._messages(_MOST_BLOCKS) - self._messages(bound or 4)
            yield Item(
                "bounded messages", "pipeline.max_ctas", bound > 0,
                "multiprocessors of messages", saved,
            )  # fmt: skip
        if self._topology.tensor > 1 and config.mesh.sequence_parallel:
            # Compiled layers have plain collectives.
            is_on = config.mesh.overlaps_products("cuda") and not compiles
            yield Item(
                "overlapped products", "mesh.overlap_sequence_parallel", is_on,
                "tensor-parallel communication", _OVERLAPPED * self._tensor_parallel(),
            )  # fmt: skip
        if self._fillable:
            yield Item(
                "filled exchanges", "pipeline.fill_waits", config.pipeline.fill_waits,
                "exchange of tokens", self._fillable,
            )  # fmt: skip
        if self._topology.data > 1 and config.zero_optimization.stage:
            # Half of it is the gathering. Reductions run beside the last backward.
            hidden = min(self._reduction() / 2, 2 / 3 * self._computing / self._count)
            is_on = config.zero_optimization.overlap("cuda") != "nothing"
            yield Item(
                "overlapped reductions", "zero_optimization.overlap_comm", is_on,
                "reduction of gradients", hidden,
            )  # fmt: skip

    def _launches(self) -> float:
        """Return how long the device waits for the host, which launches each kernel."""
        return max(0.0, _LAUNCH * self._count * self._launched - self._computing)

    def _messages(self, blocks: int) -> float:
        """Return what the kernels lose to blocks of waiting messages."""
        if self._topology.pipeline == 1:
            return 0.0
        return self._computing * _WAITING * blocks / _MULTIPROCESSORS

    def _tensor_parallel(self) -> float:
        ranks, model = self._topology.tensor, self._config.model
        assert isinstance(model, GPTSection)
        # Attention and MLP: an all-reduce in F and in B, or what sequence parallelism does instead.
        per_block = 6 if model.recompute == "full" else 4
        size = 2 * self._report.batch.micro_batch_size * model.seq_length * model.hidden_size
        with_experts = _expert_blocks(self._report, self._rank)
        moved: float = 2 * size * per_block * len(_blocks(self._report, self._rank))
        if self._topology.expert > 1:
            # In place of an all-reduce of the tokens, gathers of their copies; see `Dispatch`.
            moved += (2 * model.moe_router_topk - 1) * size * per_block / 2 * with_experts
        return self._count * (ranks - 1) / ranks * moved / NVLINK

    def _reduction(self) -> float:
        ranks = self._topology.data
        link = NVLINK if self._topology.world_size <= GPUS_PER_NODE else NETWORK
        return 2 * (ranks - 1) / ranks * self._footprint.gradients / link


def _blocks(report: Report, rank: int) -> list[int]:
    """Return the blocks of a GPT on a pipeline rank."""
    model, layout = report.request.config.model, report.prediction.layout
    assert isinstance(model, GPTSection)
    first = 2  # after embedding and positions
    return [
        block
        for stage, at in enumerate(layout.rank_of_stage)
        if at == rank
        for block in range(model.num_layers)
        if layout.bounds[stage] <= first + block < layout.bounds[stage + 1]
    ]


def _expert_blocks(report: Report, rank: int) -> int:
    model = report.request.config.model
    assert isinstance(model, GPTSection)
    return sum(model.expert_layers[block] for block in _blocks(report, rank))
