"""How fast devices and links are, where that is known: from FLOPs and bytes to time."""

from dataclasses import dataclass

from pipemega.pipeline.costs import CostModel
from pipemega.pipeline.schedules import ShareCosts
from pipemega.planning.layout import Layout


@dataclass(frozen=True)
class Rates:
    """What is known of speed.

    Args:
        costs: seconds of one rank's share of F, I and W, and of a message; the stages of a rank
            divide them by their FLOPs alike. None: by `tflops`.
        tflops: TFLOP/s that a device achieves. None: times are relative to a mean forward.
        link: GB/s between neighbouring pipeline ranks; None: messages take no time.
    """

    costs: ShareCosts | None = None
    tflops: float | None = None
    link: float | None = None

    @property
    def known(self) -> bool:
        """Whether times are seconds."""
        return self.costs is not None or self.tflops is not None

    def cost_model(self, layout: Layout, ranks: int) -> CostModel:
        """Times and bytes of each stage of `layout` on `ranks` pipeline ranks."""
        held = tuple(float(stage.held) for stage in layout.costs)
        kept = tuple(float(stage.kept) for stage in layout.costs)
        if self.costs is not None:
            times = CostModel.shared(layout.rank_of_stage, *self.costs)
            return CostModel(
                times.forward,
                times.backward_input,
                times.backward_weight,
                activation=held,
                kept=kept,
                message=times.message,
            )
        forward, backward, weight = (
            tuple(stage.flops[part] for stage in layout.costs) for part in range(3)
        )
        # Relative: a rank's mean forward is the unit of time.
        unit = self.tflops * 1e12 if self.tflops else sum(forward) / ranks or 1.0
        message = max(stage.message for stage in layout.costs)
        seconds = message / (self.link * 1e9) if self.link and self.tflops else 0.0
        return CostModel(
            tuple(f / unit for f in forward),
            tuple(b / unit for b in backward),
            tuple(w / unit for w in weight),
            activation=held,
            kept=kept,
            message=seconds,
        )
