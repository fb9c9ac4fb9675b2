"""One of two ranks: times of a layer with experts, of a dense MLP, and of plain exchanges.

Also what a GPT with experts keeps on each rank, and how often it exchanges the numbers of tokens.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipemega
from pipemega.distributed.mesh import Axis
from pipemega.distributed.topology import Topology
from pipemega.layer_costs import tensor_meter
from pipemega.models import GPTConfig, gpt
from pipemega.moe import dispatch
from pipemega.moe.experts import Experts, MixtureOfExperts
from pipemega.moe.router import Router, RouterConfig
from pipemega.parameters import initialize_parameters, normal

ROUNDS, EXPERTS, CHOSEN = 7, 8, 2
# Bytes/s of an emulated network; None: what gloo sends.
RATES = [None, 0.3e9]
# Tokens, hidden size, feed-forward size of an expert.
SIZES = [(1024, 256, 512), (2048, 256, 512), (1024, 512, 1024)]


def with_experts(hidden: int, ffn: int, expert: Axis) -> nn.Module:
    """Return a layer whose experts are divided over `expert`."""
    tensor, init = Axis("tensor"), normal(0.02)
    router = Router(RouterConfig(num_experts=EXPERTS, topk=CHOSEN), hidden, init)
    experts = Experts(
        EXPERTS, hidden, ffn, gated=False, activation=nn.functional.gelu, up_init=init,
        down_init=init, bias=False, expert=expert, tensor=tensor,
    )  # fmt: skip
    layer = MixtureOfExperts(router, experts, expert=expert, tensor=tensor)
    initialize_parameters(layer, "layer", 0)
    return layer


def dense(hidden: int, columns: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(hidden, columns, bias=False), nn.GELU(), nn.Linear(columns, hidden, bias=False)
    )


def step(layer: nn.Module, x: Tensor) -> None:
    layer(x).sum().backward()


def exchange(rows: Tensor) -> None:
    """Two exchanges of a forward and two of a backward, of rows that all ranks share evenly."""
    for _ in range(4):
        dist.all_to_all_single(torch.empty_like(rows), rows)


def seconds(action: Callable[..., None], *arguments: Any) -> float:
    """Return the time from a common start to the end on the last rank."""
    dist.barrier()
    began = time.perf_counter()
    action(*arguments)
    took = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def times(tokens: int, hidden: int, ffn: int) -> dict[str, list[float]]:
    """Return the seconds of each round, in turn."""
    torch.manual_seed(dist.get_rank())
    x = torch.randn(1, tokens, hidden, requires_grad=True)
    ranks = Axis("expert", (0, 1), dist.get_rank(), dist.group.WORLD)
    actions: dict[str, tuple[Any, ...]] = {
        "dense": (step, dense(hidden, CHOSEN * ffn), x),
        "expert 1": (step, with_experts(hidden, ffn, Axis("expert")), x),
        "expert 2": (step, with_experts(hidden, ffn, ranks), x),
        "exchanges": (exchange, torch.randn(CHOSEN * tokens, hidden)),
    }
    for action in actions.values():
        action[0](*action[1:])
    found: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(ROUNDS):
        for name, action in actions.items():
            found[name].append(seconds(*action))
    return found


# Micro-batches, samples of each, tokens of a sample, and the model of the steps with filled waits.
STEP = (8, 16, 64)
STEP_MODEL: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 4,
    "seq_length": STEP[2], "vocab_size": 256, "num_experts": EXPERTS,
    "attention_dropout": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip


@contextmanager
def network(rate: float | None) -> Iterator[list[float]]:
    """Emulate a network: an exchange ends at the earliest after its bytes / `rate` seconds.

    The rank sleeps until then. None: as gloo sends. Yields the seconds of the exchanges.
    """
    took: list[float] = []
    if rate is None:
        yield took
        return
    start = dispatch.start_all_to_all

    def delayed(x: Tensor, received: Any, sent: Any, axis: Axis) -> tuple[Tensor, Any]:
        rows, wait = start(x, received, sent, axis)
        seconds = x.nbytes / axis.size / rate
        ends = time.perf_counter() + seconds

        def wait_longer() -> None:
            wait()
            time.sleep(max(0.0, ends - time.perf_counter()))

        took.append(seconds)
        return rows, wait_longer

    rates = replace(tensor_meter.rates_for(None, Topology()), exchange=rate)
    with (
        mock.patch.object(dispatch, "start_all_to_all", delayed),
        mock.patch.object(tensor_meter, "_FULL", rates),
    ):
        yield took


def filled_steps(rate: float | None) -> dict[str, list[float]]:
    """Return the seconds of a step in each round: without exchanges, with, with W within them.

    And those of its exchanges: plain ones of as many bytes, or the emulated ones.
    """
    count, samples, length = STEP
    engines = {}
    tokens = torch.randint(256, (samples, length + 1))
    data = [(tokens[:, :-1], tokens[:, 1:])] * count
    rows = torch.randn(CHOSEN * samples * length, STEP_MODEL["hidden_size"])

    def exchanges() -> None:
        for _ in range(count * STEP_MODEL["num_layers"]):
            exchange(rows)

    with network(rate) as emulated:
        for name, expert, fills in (
            ("expert 1", 1, False), ("expert 2", 2, False), ("filled", 2, True),
        ):  # fmt: skip
            config = pipemega.load_config(
                {
                    "train_batch_size": 2 * count * samples,
                    "train_micro_batch_size_per_gpu": samples,
                    "mesh": {"data": 2, "expert": expert, "device": "cpu"},
                    "pipeline": {"schedule": "zb-h1", "fill_waits": fills},
                    "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
                    "model": STEP_MODEL,
                }
            )
            engines[name] = pipemega.initialize(gpt(GPTConfig.of(config, 256)), config)[0]
        found: dict[str, list[float]] = {name: [] for name in (*engines, "exchanges")}
        for number in range(1 + ROUNDS):
            for name, engine in engines.items():
                emulated.clear()
                took = seconds(engine.train_batch, iter(data))
                found[name] += [took] if number else []
            took = sum(emulated) if rate else seconds(exchanges)
            found["exchanges"] += [took] if number else []
    for engine in engines.values():
        engine.close()
    return found


def trained(expert: int, recompute: str) -> tuple[int, int]:
    """Train a step of a GPT; return the bytes of its experts, and the exchanges of counts.

    The bytes are those of weights, gradients and the state of Adam.
    """
    model = {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32,
        "vocab_size": 64, "num_experts": EXPERTS, "recompute": recompute,
    }  # fmt: skip
    keys = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "mesh": {"data": 2, "expert": expert, "device": "cpu"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "model": model,
    }
    config = pipemega.load_config(keys)
    exchanges = []

    def count(received: Tensor, *arguments: Any, **keys: Any) -> Any:
        exchanges.extend([None] * (received.dtype == torch.int64))
        return whole(received, *arguments, **keys)

    whole = dist.all_to_all_single
    engine, *_ = pipemega.initialize(gpt(GPTConfig.of(config, 64)), config)
    tokens = torch.randint(64, (2, 33))
    with mock.patch.object(dist, "all_to_all_single", count):
        engine.train_batch(iter([(tokens[:, :-1], tokens[:, 1:])] * 2))
    size = 0
    for group in engine.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.dim() == 3:
                state = engine.optimizer.state[parameter].values()
                size += sum(t.nbytes for t in (parameter, parameter.grad, *state) if t.dim())
    engine.close()
    return size, len(exchanges)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {
        "times": [times(*size) for size in SIZES],
        "filled": [filled_steps(rate) for rate in RATES],
        "bytes": [trained(expert, "none")[0] for expert in (1, 2)],
        "counts": [trained(2, recompute)[1] for recompute in ("none", "full")],
    }
    arguments.out.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
