"""pipemega in the comparison: its GPT with the weights of the other systems, or their modules."""

import gc
import logging
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch

import pipemega
from benchmarks.pipeline_cpu.cut import blocks_before, layer_bounds
from benchmarks.pipeline_cpu.model import (
    Sizes,
    build_layer,
    initial_state,
    loss_fn,
    micro_batches,
)
from benchmarks.pipeline_cpu.peers import Place
from pipemega import LayerSpec, PipelineModule
from pipemega.config import load
from pipemega.distributed.topology import Topology
from pipemega.engine.engine import Engine
from pipemega.layer_costs.stage_costs import Sample
from pipemega.models import GPTConfig, gpt
from pipemega.pipeline.model.module import Stage
from pipemega.pipeline.schedules import AUTO, build_plan
from pipemega.planning.meta_model import MetaModel
from pipemega.planning.prediction import Rates, predict
from pipemega.planning.schedule_tuner import TIMED, WARM_UP

# Names of pipemega -> names of the other systems, within a block.
_BLOCK = {
    "attention_norm": "norm1",
    "attention.qkv": "qkv",
    "attention.output": "out",
    "mlp_norm": "norm2",
    "mlp.up": "up",
    "mlp.down": "down",
}


# Suffixes of a schedule: the stage bounds of the other systems; the memory of another schedule.
HAND, BYTES = "@hand-cut", "-bytes"


def train(
    sizes: Sizes, place: Place, system: str, *, own_modules: bool = False
) -> Callable[[int], float | None]:
    """Build the engine of `SCHEDULE`, `SCHEDULE@hand-cut` or `auto@OTHER-bytes`.

    The first has no key about stages in its config, as a user starts. The last has the limit
    pipeline.memory_limit: what schedule OTHER holds on its fullest rank, by plan.

    For schedule "auto" a first engine measures the stages and stores their costs in the cache; the
    returned engine starts with the plan for these costs.

    Args:
        own_modules: train the modules of the other systems, as the caller of `initialize` gives
            them: it sees no data before the caller's iterator yields them.
    """
    logging.getLogger("pipemega").setLevel(logging.WARNING)
    schedule, _, option = system.partition("@")
    pipeline: dict[str, Any] = {"schedule": schedule}
    if system.endswith(HAND):
        pipeline["partition"] = _hand_cut(sizes, place, schedule, own_modules=own_modules)
    elif option.endswith(BYTES):
        pipeline["memory_limit"] = _held_by(sizes, place, option.removesuffix(BYTES))
    build = _engine_of_own_modules if own_modules else _engine
    if schedule != AUTO:
        return _step(build(sizes, place, pipeline), sizes)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder if place.rank == 0 else os.devnull
        measure = _step(build(sizes, place, pipeline), sizes)
        for number in range(WARM_UP + TIMED):
            measure(number)
        # Free it before memory is measured; an engine is in reference cycles.
        del measure
        gc.collect()
        engine = _engine(sizes, place, pipeline)
    return _step(engine, sizes)


def _step(engine: Engine, sizes: Sizes) -> Callable[[int], float | None]:
    def step(number: int) -> float:
        return engine.train_batch(iter(micro_batches(sizes, number)))

    return step


def _hand_cut(sizes: Sizes, place: Place, schedule: str, *, own_modules: bool) -> list[int]:
    """Return the stage bounds of the other systems for a schedule."""
    plan = build_plan(schedule, place.world_size, sizes.num_microbatches)
    if own_modules:
        return layer_bounds(sizes, plan.rank_of_stage, place.split)
    blocks = blocks_before(sizes, plan.rank_of_stage, place.split)
    # Their layer 0 is two layers here, tokens and positions; their last is norm and head.
    return [0, *(2 + count for count in blocks[1:-1]), sizes.layers + 4]


def _held_by(sizes: Sizes, place: Place, schedule: str) -> float:
    """Return the bytes of activations that a schedule holds on its fullest rank, by plan."""
    config = load(_config(sizes, place, {"schedule": schedule}))
    tokens = torch.empty(sizes.micro_batch, sizes.seq, dtype=torch.int64)
    topology = Topology(place.world_size, 1, 1)
    net = gpt(_gpt_config(sizes)).on_meta()
    model = MetaModel(config, net, Sample.like(tokens, tokens), topology, "cpu")
    plan = build_plan(schedule, place.world_size, sizes.num_microbatches)
    return max(predict(model, plan, Rates()).timeline.peak)


def _config(sizes: Sizes, place: Place, pipeline: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": sizes.micro_batch,
        "gradient_accumulation_steps": sizes.num_microbatches,
        "gradient_clipping": 0.0,
        "mesh": {"pipeline": place.world_size, "device": "cpu"},
        "pipeline": pipeline,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": sizes.lr, "weight_decay": sizes.weight_decay},
        },
    }


def _engine(sizes: Sizes, place: Place, pipeline: dict[str, Any]) -> Engine:
    engine, *_ = pipemega.initialize(gpt(_gpt_config(sizes)), _config(sizes, place, pipeline))
    state = initial_state(sizes)
    with torch.no_grad():
        for stage in engine.module:
            assert isinstance(stage, Stage)
            for name, parameter in stage.logical_names().items():
                theirs = state[_their_name(name, sizes)]
                # No padding: the vocabulary is a multiple of the padding unit.
                assert theirs.shape == parameter.shape, name
                parameter.copy_(theirs)
    return engine


def _engine_of_own_modules(sizes: Sizes, place: Place, pipeline: dict[str, Any]) -> Engine:
    layers = [LayerSpec(build_layer, sizes, index) for index in range(sizes.num_units)]
    net = PipelineModule(layers, loss_fn)
    return pipemega.initialize(net, _config(sizes, place, pipeline))[0]


def _gpt_config(sizes: Sizes) -> GPTConfig:
    return GPTConfig(
        vocab_size=sizes.vocab,
        seq_length=sizes.seq,
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        ffn_hidden_size=4 * sizes.hidden,
        num_query_groups=sizes.heads,
        kv_channels=sizes.hidden // sizes.heads,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        untie_embeddings_and_output_weights=True,
    )


def _their_name(name: str, sizes: Sizes) -> str:
    _, position, inner = name.split(".", 2)
    place, last = int(position), sizes.layers + 3
    if place == 0:
        return "layers.0.token.weight"
    if place == 1:
        return "layers.0.position.weight"
    if place == last - 1:
        return f"layers.{sizes.layers + 1}.{inner}"
    if place == last:
        return f"layers.{sizes.layers + 1}.project.weight"
    part, _, kind = inner.rpartition(".")
    return f"layers.{place - 1}.{_BLOCK[part]}.{kind}"
