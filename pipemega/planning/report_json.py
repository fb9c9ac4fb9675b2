"""The report as JSON values, for scripts."""

from typing import Any

from pipemega.planning.advice import Advice
from pipemega.planning.cut_report import CutReport
from pipemega.planning.estimate import Report
from pipemega.planning.prediction import Prediction


def as_json(report: Report, advice: Advice) -> dict[str, Any]:
    """Return the report as JSON values: sizes in bytes, times in seconds if they are known."""
    topology, request = report.topology, report.request
    suggestions = [f"{s.change}: {s.peak} bytes" for s in advice.suggestions if s.fits]
    return {
        "mesh": {
            "world": topology.world_size,
            "pipeline": topology.pipeline,
            "data": topology.data,
            "tensor": topology.tensor,
            "ranks": [
                [topology.rank(p, 0, 0), topology.rank(p, topology.data - 1, topology.tensor - 1)]
                for p in range(topology.pipeline)
            ],
        },
        "batch": {
            "train_batch_size": report.batch.train_batch_size,
            "micro_batch_size": report.batch.micro_batch_size,
            "num_microbatches": report.batch.num_microbatches,
            "tokens": report.tokens,
        },
        "model": {
            "parameters": report.parameters,
            "layers": report.num_layers,
            "precision": report.precision,
        },
        "stages": [vars(stage) for stage in report.stages],
        "cut": None if report.cut is None else _cut(report.cut),
        "nccl_communicators": report.communicators,
        "device": {"type": request.device, "memory": request.limit},
        "time_unit": "seconds" if request.rates.known else "mean forward of a rank",
        "outcome": _prediction(report.prediction, report),
        "compare": [_prediction(other, report) for other in report.compared],
        "refused": report.refused,
        "fits": report.fits,
        "warnings": list(advice.warnings),
        "advice": [advice.recommendation, *suggestions] if advice.recommendation else suggestions,
        "faster": [alternative._asdict() for alternative in advice.alternatives],
        "train_steps": report.run_steps,
        "run_seconds": report.run_seconds,
        "tflops": request.rates.tflops,
        "notes": list(report.notes),
    }


def _cut(cut: CutReport) -> dict[str, Any]:
    return {
        "bounds": list(cut.bounds),
        "work": list(cut.work),
        "imbalance": cut.imbalance,
        "slower_than_best": cut.slower,
        "best_bounds": list(cut.best),
        "best_peak_bytes": cut.best_peak,
    }


def _prediction(prediction: Prediction, report: Report) -> dict[str, Any]:
    makespan = prediction.timeline.makespan
    tokens = report.tokens if report.request.rates.known else None
    return {
        "schedule": prediction.plan.name,
        "chunks": prediction.chunks,
        "makespan": makespan,
        "span": prediction.timeline.span,
        "bubble": prediction.timeline.bubble,
        "bubble_by_formula": prediction.bubble_formula,
        "tokens_per_second": tokens / makespan if tokens and makespan else None,
        "messages": prediction.messages,
        "message_bytes": prediction.message_bytes,
        "fits": prediction.fits(report.request.limit),
        "peak_bytes": prediction.peak,
        "memory": [
            {
                "rank": rank,
                "device": memory.device,
                "parameters": memory.footprint.parameters,
                "weights": memory.footprint.weights,
                "gradients": memory.footprint.gradients,
                "masters": memory.footprint.masters,
                "optimizer": memory.footprint.optimizer,
                "host": memory.footprint.host,
                "staging": memory.footprint.staging,
                "activations": memory.activations,
                "buffers": memory.buffers,
                "total": memory.total,
                "in_flight": memory.schedule_peak.in_flight,
            }
            for rank, memory in enumerate(prediction.memory)
        ],
    }
