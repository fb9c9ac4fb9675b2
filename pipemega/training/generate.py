"""Generate text with a model on any mesh; simple, without a key-value cache."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pipemega.distributed.device_collectives import broadcast
from pipemega.distributed.device_waits import synchronize
from pipemega.engine.engine import Engine
from pipemega.tensor_parallel.collectives import gather_from_tensor


def generate(
    engine: Engine,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    seq_length: int,
    vocab_size: int,
    temperature: float = 0.0,
    seed: int = 1234,
) -> list[int]:
    """Generate tokens after `prompt`; each runs a full forward pass.  Collective.

    Args:
        engine: its model maps token ids [1, seq_length] to logits [1, seq_length, vocabulary
            shard].
        prompt: token ids; the context is the last `seq_length` tokens of prompt and new tokens.
        temperature: 0 selects the most likely token; higher values sample more evenly.

    Returns:
        The new tokens, the same on every rank.
    """
    tokens = list(prompt)
    generator = torch.Generator().manual_seed(seed)
    mesh = engine.mesh
    for _ in range(num_tokens):
        window = tokens[-seq_length:]
        # Padded to the full length, which sequence parallelism can split. With causal attention
        # the padding does not change the logits before it.
        padded = torch.zeros(1, seq_length, dtype=torch.int64)
        padded[0, : len(window)] = torch.tensor(window)
        outputs = engine.infer([padded])
        choice = torch.zeros(1, dtype=torch.int64, device=mesh.device)
        if outputs is not None:
            logits = gather_from_tensor(outputs[0], mesh.tensor)[0, len(window) - 1, :vocab_size]
            synchronize()
            choice[0] = _sample(logits.float().cpu(), temperature, generator)
        if mesh.pipeline.size > 1:
            last = mesh.pipeline.ranks[engine.plan.rank_of_stage[-1]]
            broadcast(choice, last, mesh.pipeline)
        synchronize()
        tokens.append(int(choice.item()))
    return tokens[len(prompt) :]


def _sample(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0.0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator))
