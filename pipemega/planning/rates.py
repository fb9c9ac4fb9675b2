"""Speed of devices and links: converts FLOPs and bytes to time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from pipemega.monitor import peak_tflops
from pipemega.pipeline.plan.costs import CostModel
from pipemega.pipeline.schedules import RankCosts
from pipemega.planning.layer_times import LayerTimes
from pipemega.planning.meta_model import StageLayout
from pipemega.printing import percent

# Seconds from one kernel to the next if the kernels are short: torch's dispatcher launches them one
# by one. It is why small micro-batches are slow.
LAUNCH_SECONDS: Final = 5e-6
# Share of the peak FLOP/s that is assumed if only the device is known.
ASSUMED_SHARE: Final = 0.4


@dataclass(frozen=True)
class Rates:
    """Known speeds.

    Args:
        costs: seconds of F, I and W of one rank and of a message; the stages of a rank share them
            equally. None: use `tflops`.
        tflops: TFLOP/s that a device achieves; None: times are relative to a mean forward.
        link: GB/s between neighbouring pipeline ranks; None: messages take no time.
        assumed: what `tflops` is assumed from; empty if the caller knows it.
        launch: seconds to launch a kernel; an instruction takes at least this for each kernel.
        layers: measured times of the layers; they replace the others.
    """

    costs: RankCosts | None = None
    tflops: float | None = None
    link: float | None = None
    assumed: str = ""
    launch: float = 0.0
    layers: LayerTimes | None = None

    @classmethod
    def of(
        cls,
        costs: RankCosts | None,
        tflops: float | None,
        link: float | None,
        device: str | None = None,
    ) -> "Rates":
        """Return the given rates; without any, those assumed for a known device ("H100-80GB")."""
        assumed, peak = "", peak_tflops(device.replace("-", " ")) if device else None
        if costs is None and tflops is None and peak is not None:
            tflops = ASSUMED_SHARE * peak
            share = percent(ASSUMED_SHARE, 0)
            assumed = f"{share} of the bf16 peak of {device}; --tflops sets another rate"
        return cls(costs, tflops, link, assumed, LAUNCH_SECONDS)

    @property
    def known(self) -> bool:
        """Whether times are in seconds."""
        return self.layers is not None or self.costs is not None or self.tflops is not None

    def cost_model(self, layout: StageLayout, ranks: int) -> CostModel:
        """Return times and bytes of each stage of `layout` on `ranks` pipeline ranks."""
        held = tuple(float(stage.held) for stage in layout.costs)
        kept = tuple(float(stage.kept) for stage in layout.costs)
        if self.layers is not None:
            return replace(self.layers.cost_model(layout), activation=held, kept=kept)
        if self.costs is not None:
            times = CostModel.from_rank_costs(layout.rank_of_stage, *self.costs)
            return replace(times, activation=held, kept=kept)
        flops = [*zip(*(stage.flops for stage in layout.costs), strict=True)]
        kernels = [*zip(*(stage.kernels for stage in layout.costs), strict=True)]
        # Without tflops, the unit of time is the mean forward of a rank.
        unit = self.tflops * 1e12 if self.tflops else sum(flops[0]) / ranks or 1.0
        launch = self.launch if self.tflops else 0.0

        def seconds_of(kind: int) -> tuple[float, ...]:
            pairs: Sequence[tuple[float, int]] = [*zip(flops[kind], kernels[kind], strict=True)]
            return tuple(max(work / unit, count * launch) for work, count in pairs)

        message = max(stage.message for stage in layout.costs)
        seconds = message / (self.link * 1e9) if self.link and self.tflops else 0.0
        return CostModel(
            seconds_of(0),
            seconds_of(1),
            seconds_of(2),
            activation=held,
            kept=kept,
            message=seconds,
        )
