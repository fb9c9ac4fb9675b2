"""Text from a model that is spread over a mesh: small and simple, without a cache."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pipemega.engine import Engine
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
    """Continues `prompt`, token by token, each by a whole pass through the pipeline.  Collective.

    Args:
        engine: of a model from token ids [1, seq_length] to logits of each tensor rank's share of
            the vocabulary.
        prompt: token ids; the last `seq_length` of prompt and continuation are what it sees.
        temperature: 0 takes the likeliest token; higher draws more freely.

    Returns:
        the new tokens, the same on every rank.
    """
    tokens = list(prompt)
    generator = torch.Generator().manual_seed(seed)
    mesh = engine.mesh
    for _ in range(num_tokens):
        window = tokens[-seq_length:]
        # Always a whole window, so that it can be cut for sequence parallelism: what stands
        # behind a token does not change what the model says after it.
        padded = torch.zeros(1, seq_length, dtype=torch.int64)
        padded[0, : len(window)] = torch.tensor(window)
        outputs = engine.infer([padded])
        choice = torch.zeros(1, dtype=torch.int64, device=mesh.device)
        if outputs is not None:
            logits = gather_from_tensor(outputs[0], mesh.tensor)[0, len(window) - 1, :vocab_size]
            choice[0] = _choose(logits.float().cpu(), temperature, generator)
        if mesh.pipeline.size > 1:
            last = mesh.pipeline.ranks[engine.plan.rank_of_stage[-1]]
            dist.broadcast(choice, src=last, group=mesh.pipeline.group)
        tokens.append(int(choice.item()))
    return tokens[len(prompt) :]


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0.0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator))
