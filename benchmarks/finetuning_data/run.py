"""Measure fine-tuning data: tokenizing, packing, reading, and attention of packed samples.

python -m benchmarks.finetuning_data.run
"""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipemega import finetuning_dataset
from pipemega.data.finetuning.finetuning_dataset import pack
from pipemega.data.tokens.corpus import Skipped, python_stdlib
from pipemega.data.tokens.tokenizers import FastTokenizer
from pipemega.models.attention import causal_attention, document_mask, documents_of

CONVERSATIONS, LENGTH = 5_000, 2048
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{{ m['content'] }}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        measure_data(Path(name))
    measure_packing()
    measure_attention()


def measure_data(folder: Path) -> None:
    texts = [text for text, _ in python_stdlib().documents(Skipped())]
    (folder / "tokenizer.json").write_text(FastTokenizer.train(texts[:200], 8192).to_json())
    lines = "\n".join(texts).splitlines()
    random = np.random.RandomState(0)

    def text() -> str:
        start = random.randint(len(lines) - 40)
        return "\n".join(lines[start : start + random.randint(1, 40)]) + "."

    chats: list[dict[str, Any]] = [
        {"messages": [{"role": role, "content": text()} for role in ("user", "assistant") * 2]}
        for _ in range(CONVERSATIONS)
    ]
    pairs = [{"prompt": text(), "response": text()} for _ in range(CONVERSATIONS)]
    (folder / "chat.jinja").write_text(CHATML)
    (folder / "marked.jinja").write_text(
        CHATML.replace(
            "{{ m['content'] }}{{ '<|im_end|>\\n' }}",
            "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>\\n' }}"
            "{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}",
        )
    )
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("chat, answers by comparing texts", chats, {"chat_template": "chat.jinja"}),
        ("chat, answers marked", chats, {"chat_template": "marked.jinja"}),
        ("instruction", pairs, {"format": "instruction"}),
        ("text", [{"text": x["response"]} for x in pairs], {"format": "text"}),
    ]
    print(
        f"| {CONVERSATIONS:,} records | tokens | first run | later runs | filled | read a sample |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, records, keys in cases:
        (folder / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
        if "chat_template" in keys:
            keys["chat_template"] = str(folder / keys["chat_template"])
        section = {
            "format": "chat",
            "tokenizer": str(folder / "tokenizer.json"),
            "cache_path": str(folder / name.replace(" ", "-")),
            **keys,
        }

        def load(section: dict[str, Any] = section) -> Any:
            return finetuning_dataset(folder / "records.jsonl", section, seq_length=LENGTH)

        first, data = seconds(load)
        later, data = seconds(load)
        reading, _ = seconds(lambda data=data: [data[i] for i in range(200)])  # type: ignore[misc]
        filled = data._tokens / (len(data) * LENGTH)
        print(
            f"| {name} | {len(data._examples.tokens):,} | {first:.1f} s | {later:.2f} s | "
            f"{filled:.1%} | {reading / 200 * 1e3:.2f} ms |"
        )


def measure_packing() -> None:
    random = np.random.RandomState(0)
    print("\n| examples | samples | filled | pack |\n| ---: | ---: | ---: | ---: |")
    for number in (100_000, 1_000_000):
        lengths = np.clip(random.lognormal(5.5, 0.9, number), 8, LENGTH).astype(np.int64)
        taken, (_, bins) = seconds(lambda lengths=lengths: pack(lengths, LENGTH))  # type: ignore[misc]
        filled = lengths.sum() / ((len(bins) - 1) * LENGTH)
        print(f"| {number:,} | {len(bins) - 1:,} | {filled:.2%} | {taken:.1f} s |")


def measure_attention() -> None:
    q, k, v = (torch.randn(1, 8, LENGTH, 64, requires_grad=True) for _ in range(3))
    positions = (torch.arange(LENGTH) % 256).unsqueeze(0)
    documents = documents_of(positions, None)
    assert documents is not None

    def step(mask: torch.Tensor | None) -> None:
        causal_attention(q, k, v, mask).sum().backward()

    plain = min(seconds(lambda: step(None))[0] for _ in range(5))
    masked = min(seconds(lambda: step(document_mask(documents)))[0] for _ in range(5))
    print(
        f"\nattention of {LENGTH} tokens, forward and backward: {plain * 1e3:.0f} ms causal, "
        f"{masked * 1e3:.0f} ms with documents of 256 tokens"
    )


def seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


if __name__ == "__main__":
    main()
