"""One rank of the benchmark: trains interleaved steps of several engines in one process."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipemega import initialize
from pipemega.engine.engine import Engine
from pipemega.models import GPTConfig, gpt
from pipemega.models.transformer_block import Block
from pipemega.pipeline import vocabulary_runs
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.simulate import CostModel, VocabularyCosts
from pipemega.pipeline.schedules import build_plan
from pipemega.pipeline.schedules.vocabulary_passes import with_vocabulary
from pipemega.planning.meta_model import MetaModel, model_and_sample
from pipemega.planning.prediction import Rates, predict
from pipemega.tensor_parallel import VocabParallelHead

BLOCKS, SEQUENCE, MICRO_BATCHES = 8, 128, 8
# With sleeping stages: seconds of F of a block, and the head in blocks.
SECONDS, HEAD, SLEEPING_RANKS, SLEEPING_MICRO_BATCHES = 0.004, 10.7, 4, 16


def config(vocab_size: int, hidden: int, count: int, ranks: int, **pipeline: Any) -> dict[str, Any]:
    return {
        "train_batch_size": count,
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**9,
        "mesh": {"pipeline": ranks, "device": "cpu"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "pipeline": {"schedule": "1f1b", **pipeline},
        "model": {
            "num_layers": BLOCKS,
            "hidden_size": hidden,
            "num_attention_heads": 4,
            "seq_length": SEQUENCE if hidden > 16 else 8,
            "vocab_size": vocab_size,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "untie_embeddings_and_output_weights": True,
        },
    }


def engine_of(settings: dict[str, Any], plan: Plan | None = None) -> Engine:
    from pipemega.config import load

    loaded = load(settings)
    net = gpt(GPTConfig.of(loaded, settings["model"]["vocab_size"]))
    engine, *_ = initialize(net, loaded, plan=plan)
    return engine


def step_of(engine: Engine) -> Callable[[], float]:
    """Return a function that trains a step and returns its seconds on the slowest rank."""
    generator = torch.Generator().manual_seed(0)
    vocabulary, length = engine.config.model.vocab_size, engine.config.model.seq_length  # type: ignore[union-attr]

    def batch() -> tuple[Tensor, Tensor]:
        tokens = torch.randint(vocabulary, (1, length + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:].clone()

    def step() -> float:
        batches = [batch() for _ in range(engine.batch.num_microbatches)]
        dist.barrier()
        started = time.perf_counter()
        engine.train_batch(iter(batches))
        dist.barrier()
        return time.perf_counter() - started

    return step


def real(vocabulary: int, rounds: int) -> dict[str, Any]:
    """Compare the best cuts without a cut vocabulary with the cut vocabulary, computing."""
    cuts: dict[str, dict[str, Any]] = {
        "cut by time": {},
        "head alone": {"partition": [0, BLOCKS + 3, BLOCKS + 4]},
        "parallel": {"vocabulary": "parallel"},
    }
    engines = {
        name: engine_of(config(vocabulary, 256, MICRO_BATCHES, 2, **pipeline))
        for name, pipeline in cuts.items()
    }
    results = _interleaved(engines, rounds)
    for name, engine in engines.items():
        held = sum(p.numel() for p in engine.module.parameters())
        engine.trace_next_step(memory=True)
        step_of(engine)()
        memory = [0.0] * dist.get_world_size()
        if engine.last_trace is not None:
            memory = list(engine.last_trace.timeline.peak)
        # Parameter, gradient and two states of Adam.
        shared: list[Any] = [memory]
        dist.broadcast_object_list(shared)
        live = 16 * held + shared[0][dist.get_rank()]
        results[name] |= {"parameters": held, "live": live, "simulated": simulated(engine)}
    return results


def simulated(engine: Engine) -> float:
    """Return the seconds of the forwards and backwards of a step, by the fixed table of rates."""
    topology = engine.mesh.topology
    model = MetaModel(engine.config, *model_and_sample(engine.config, topology), topology, "cpu")
    rates = Rates(layers=model.layer_costs)
    return predict(model, engine.plan, rates, engine.steps.model.bounds).timeline.makespan


def sleeping(rounds: int) -> dict[str, Any]:
    """Compare the same with sleeping layers, on more ranks than the machine has cores."""
    _let_layers_sleep()
    ranks, count = SLEEPING_RANKS, SLEEPING_MICRO_BATCHES
    share = BLOCKS / ranks * SECONDS
    passes = VocabularyCosts(
        output=2 * HEAD / ranks * SECONDS, output_weight=HEAD / ranks * SECONDS
    )
    costs = CostModel(
        (share,) * ranks, (share,) * ranks, (share,) * ranks, vocabulary=passes, message=0.001
    )
    plan = with_vocabulary(build_plan("1f1b", ranks, count), costs)
    # The head needs longer than all blocks: alone on a rank it is the best cut.
    alone = {"partition": [0, 4, 7, BLOCKS + 3, BLOCKS + 4]}
    even = [0, 4, 6, 8, BLOCKS + 4]
    engines = {
        "head alone": engine_of(config(64, 16, count, ranks, **alone)),
        "parallel": engine_of(
            config(64, 16, count, ranks, vocabulary="parallel", partition=even), plan
        ),
    }
    return _interleaved(engines, rounds)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradient, None, None


def _let_layers_sleep() -> None:
    """Let each block sleep F and B, the fused head all three products in F, and S and T."""

    def sleeps(owner: Any, name: str, forward: float, backward: float) -> None:
        original = getattr(owner, name)

        def method(self: Any, x: Any) -> Any:
            return original(self, _Sleep.apply(x, forward, backward))  # type: ignore[no-untyped-call]

        setattr(owner, name, method)

    sleeps(Block, "forward", SECONDS, 2 * SECONDS)
    sleeps(VocabParallelHead, "forward", 3 * HEAD * SECONDS, 0.0)
    for name, products in (("output_pass", 2), ("logit_gradient", 1)):
        original, seconds = getattr(vocabulary_runs, name), products * HEAD * SECONDS

        def function(*arguments: Any, _run: Any = original, _seconds: float = seconds) -> Any:
            time.sleep(_seconds / SLEEPING_RANKS)
            return _run(*arguments)

        setattr(vocabulary_runs, name, function)


def _interleaved(engines: dict[str, Engine], rounds: int) -> dict[str, Any]:
    """Return the medians of whole steps, and of the pipelines of traced steps.

    They are different steps, because rank 0 draws the timeline of a traced step.
    """
    steps = {name: step_of(engine) for name, engine in engines.items()}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    pipeline: dict[str, list[float]] = {name: [] for name in engines}
    for round_number in range(rounds + 1):
        for name, step in steps.items():
            taken = step()
            engines[name].trace_next_step()
            step()
            timeline = engines[name].last_timeline
            if round_number:  # the first step opens connections
                seconds[name].append(taken)
                pipeline[name].append(timeline.makespan if timeline else 0.0)
    return {
        name: {"seconds": median(times), "pipeline": median(pipeline[name])}
        for name, times in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=0, help="0: sleeping layers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    run = sleeping if not options.vocabulary else lambda n: real(options.vocabulary, n)
    options.out.write_text(json.dumps(run(options.rounds)))
    # Otherwise C++ may end the process with an error, because threads of gloo still run.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
