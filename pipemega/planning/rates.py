"""Speed of devices and links: converts FLOPs and bytes to time."""

from dataclasses import dataclass, replace
from typing import Final

from pipemega.monitor import peak_tflops
from pipemega.pipeline.plan.costs import CostModel
from pipemega.pipeline.plan.stage_cut import LayerCosts
from pipemega.pipeline.schedules import RankCosts
from pipemega.planning.meta_model import StageLayout
from pipemega.planning.stage_counts import stage_times
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
        tflops: TFLOP/s that a device achieves, the mean over forward and backward of the model;
            None: times are relative to a mean forward.
        link: GB/s between neighbouring pipeline ranks; None: messages take no time.
        assumed: what `tflops` is assumed from; empty if the caller knows it.
        launch: seconds to launch a kernel; forward and backward take at least this for each kernel.
        layers: measured costs of the layers; their times replace the others.
    """

    costs: RankCosts | None = None
    tflops: float | None = None
    link: float | None = None
    assumed: str = ""
    launch: float = 0.0
    layers: LayerCosts | None = None

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
        unit = self._unit(layout, ranks)
        counted = stage_times(layout.costs, unit)
        if layout.vocabulary:
            counted = replace(counted, vocabulary=layout.vocabulary[0].times(unit))
        if self.layers is not None:
            times = self.layers.cost_model(layout.bounds)
            return _with_memory(times, counted)
        if self.costs is not None:
            times = CostModel.from_rank_costs(layout.rank_of_stage, *self.costs)
            return _with_memory(times, counted)
        message = max(stage.message for stage in layout.costs)
        seconds = message / (self.link * 1e9) if self.link and self.tflops else 0.0
        return replace(counted, message=seconds)

    def _unit(self, layout: StageLayout, ranks: int) -> float:
        """Return the seconds of the fixed table that are one unit of time.

        All times have the same ratio to those of the table, by which models are cut: the fastest
        cut is the same at every rate.
        """
        totals = layout.totals
        if not self.tflops:
            # The mean forward of a rank.
            return totals.forward / ranks or 1.0
        seconds = max(totals.flops / (self.tflops * 1e12), totals.kernels * self.launch)
        return totals.seconds / seconds if totals.seconds and seconds else 1.0


def _with_memory(times: CostModel, counted: CostModel) -> CostModel:
    """Return given times with the memory of `counted`, and its passes in the same unit."""
    given, known = (
        sum(map(sum, (c.forward, c.backward_input, c.backward_weight))) for c in (times, counted)
    )
    passes = counted.vocabulary.scaled(given / known if known else 1.0)
    return replace(times, activation=counted.activation, kept=counted.kept, vocabulary=passes)
