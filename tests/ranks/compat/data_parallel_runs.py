"""Loops around `engine(x)`, `backward` and `step` that the ranks of the pool run."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipemega.compat.deepspeed as deepspeed

STEPS, MICRO_BATCHES, SAMPLES = 3, 2, 2
ADAM = {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Any:
        return self.head(torch.tanh(self.hidden(self.embedding(tokens))))


def net(seed: int = 2) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def tokens(step: int, micro_batch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
    return torch.randint(0, 11, (SAMPLES, 5), generator=generator)


def loss_of(model: Any, data: Tensor) -> Any:
    return nn.functional.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())


def config_of(world_size: int, **keys: Any) -> dict[str, Any]:
    return {
        "train_batch_size": SAMPLES * MICRO_BATCHES * world_size,
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_clipping": 0.25,
        "zero_optimization": {"stage": 1},
        "optimizer": ADAM,
        **keys,
    }


def state_of(engine: Any) -> dict[str, Tensor]:
    return {n: p.detach().double().clone() for n, p in engine.module.named_parameters()}


def trained(rank_seeds: bool, world_size: int, keys: dict[str, Any], given: bool) -> Any:
    """Train; return the losses of the steps and the parameters.

    Args:
        rank_seeds: the ranks build different models.
        given: the script has built the optimizer and the schedule.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = net(2 + rank if rank_seeds else 2)
    arguments: dict[str, Any] = {}
    if given:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        arguments = {"optimizer": optimizer, "lr_scheduler": schedule}
    engine, *_ = deepspeed.initialize(
        model=model, config=config_of(world_size, **keys), **arguments
    )
    losses = []
    for step in range(STEPS):
        for m in range(MICRO_BATCHES):
            engine.backward(loss_of(engine, tokens(step, m, rank)))
            engine.step()
        losses.append(engine.pipemega_engine.last_step.loss)
    return losses, state_of(engine)


def saved_and_loaded(folder: str, saves: bool) -> Any:
    """Train two steps and save; or load, and train the third step on the data of two ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    count = 2 * MICRO_BATCHES // size
    keys = {"train_batch_size": SAMPLES * MICRO_BATCHES * 2}
    engine, *_ = deepspeed.initialize(model=net(), config=config_of(size, **keys))
    first, last = (0, 2) if saves else (2, 3)
    if not saves:
        engine.load_checkpoint(folder)
        assert engine.global_steps == 2
    for step in range(first, last):
        for m in range(count):
            place = m * size + rank
            engine.backward(loss_of(engine, tokens(step, place // 2, place % 2)))
            engine.step()
    if saves:
        assert engine.save_checkpoint(folder)
    return state_of(engine)


def fails_in_forward() -> None:
    """Rank 1 raises in the second forward."""
    engine, *_ = deepspeed.initialize(model=net(), config=config_of(2))
    for m in range(MICRO_BATCHES):
        data = tokens(0, m, 0)
        if engine.global_rank == 1 and m == 1:
            data = data + 11
        engine.backward(loss_of(engine, data))
        engine.step()


def runs_fewer_steps() -> None:
    """Rank 1 ends after one step, and waits elsewhere."""
    mesh = {"timeout_seconds": 0.6}
    engine, *_ = deepspeed.initialize(model=net(), config=config_of(2, mesh=mesh))
    for step in range(2 - engine.global_rank):
        for m in range(MICRO_BATCHES):
            engine.backward(loss_of(engine, tokens(step, m, 0)))
            engine.step()
    time.sleep(1.5)


def two_engines() -> Any:
    """A generator and a discriminator with an engine each; return both states."""
    first, *_ = deepspeed.initialize(model=net(2), config=config_of(2))
    second, *_ = deepspeed.initialize(model=net(3), config=config_of(2))
    for m in range(MICRO_BATCHES):
        data = tokens(0, m, first.global_rank)
        for engine in (first, second):
            engine.backward(loss_of(engine, data))
            engine.step()
    return state_of(first), state_of(second)


def tiny_llama(folder: str) -> Any:
    """Train a Hugging Face model in bf16; save its weights, and return the losses."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
        )
    )  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=model, config=config_of(2, bf16={"enabled": True}, gradient_clipping=1.0)
    )
    data = tokens(0, 0, engine.global_rank)
    losses = []
    for _ in range(8):
        output = engine(input_ids=data, labels=data)
        engine.backward(output.loss)
        engine.step()
        losses.append(output.loss.item())
    if engine.global_rank == 0:
        engine.module.save_pretrained(folder)
    return losses
