"""Memory and speed of LoRA beside full training and peft, in one process.

python benchmarks/lora/measure.py full|lora|peft|transformers
"""

import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

import pipemega
from pipemega.hf.hf_module import from_pretrained

LENGTH, BATCH, VOCAB, STEPS = 256, 2, 8000, 7
LORA = {"r": 16, "alpha": 32.0}


def config() -> Any:
    return transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=512, intermediate_size=1376, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=LENGTH,
    )  # fmt: skip


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids, labels = torch.randint(VOCAB, (2, BATCH, LENGTH), generator=generator)
    return ids, labels


def of_pipemega(lora: bool) -> Callable[[int], object]:
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "steps_per_print": None,
    }
    if lora:
        settings["lora"] = LORA
    engine, *_ = pipemega.initialize(from_pretrained(config(), pretrained=False), settings)
    return lambda step: engine.train_batch(iter([batch(step)]))


def of_transformers(lora: bool) -> Callable[[int], object]:
    model: Any = transformers.LlamaForCausalLM(config())
    if lora:
        import peft

        options = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
        model = peft.get_peft_model(model, options)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=True)

    def step(number: int) -> None:
        ids, labels = batch(number)
        logits = model(ids).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    kind = sys.argv[1]
    make = of_pipemega if kind in ("full", "lora") else of_transformers
    step = make(kind in ("lora", "peft"))
    seconds = []
    for number in range(STEPS):
        started = time.process_time()
        step(number)
        seconds.append(time.process_time() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    rate = BATCH * LENGTH / sorted(seconds)[len(seconds) // 2]
    print(f"{kind}: {rate:.0f} tokens per CPU second, peak {peak:.2f} GB")


if __name__ == "__main__":
    main()
