"""Samples per second of GPTDataset, beside the reads that Megatron's GPTDataset makes.

    python -m benchmarks.loader.run            from the root of the repository

Both read the same token files through the same index arrays, in one process with one thread, and
alternate. megatron-core is not a dependency: `MegatronReads` makes the reads of a sample as its
`core/datasets/gpt_dataset.py` describes them (without reset of positions and masks, whose tensors
it caches), including its conversion to int64 and its tensors. Each slice of the memmaps that
Megatron's `np.load(mmap_mode="r")` returns runs Python code of numpy, so the same reads are also
measured with plain arrays over the same memory.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.ranks import machine
from pipemega.data.tokens.gpt_dataset import GPTDataset, SampleFormat, Split
from pipemega.data.tokens.token_files import IndexedDataset, IndexedWriter

# Sequence length, tokens of a document on average.
CASES = ((256, 400), (1024, 600), (4096, 600), (1024, 50))
# Name -> whether the index arrays are plain.
OTHERS = {"Megatron's reads": False, "with plain arrays": True}


class MegatronReads:
    """Reads of one sample: the parts of its documents, joined, as int64 tensors."""

    def __init__(self, dataset: GPTDataset, *, plain_arrays: bool) -> None:
        arrays = dataset._indices
        self.indices = list(arrays) if plain_arrays else [memmap_of(array) for array in arrays]
        self.length = dataset.format.seq_length
        index = dataset.data
        tokens = np.memmap(index.bin_path, dtype=index.dtype, mode="r")
        self.buffer, self.item = memoryview(tokens), index.dtype.itemsize
        self.dtype, self.lengths = index.dtype, np.asarray(index.lengths)
        self.pointers = np.concatenate([[0], np.cumsum(self.lengths[:-1], dtype=np.int64)])
        self.pointers *= self.item
        self.mask = torch.ones(self.length, dtype=torch.float)
        self.positions = torch.arange(self.length, dtype=torch.long)

    def part(self, document: int, offset: int, length: int | None) -> Any:
        count = int(self.lengths[document]) - offset if length is None else length
        start = int(self.pointers[document]) + offset * self.item
        return np.frombuffer(self.buffer, dtype=self.dtype, count=count, offset=start)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        documents, samples, shuffle = self.indices
        window = shuffle[index]
        (first, begin), (last, end) = samples[window], samples[window + 1]
        if first == last:
            parts = [self.part(documents[first], begin, end - begin + 1)]
        else:
            parts = [
                self.part(
                    documents[i],
                    begin if i == first else 0,
                    end + 1 if i == last else None,
                )
                for i in range(first, last + 1)
            ]
        text = torch.from_numpy(np.concatenate(parts).astype(np.int64)).long()
        tokens, labels = text[:-1].contiguous(), text[1:].contiguous()
        return {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": self.mask.clone(),
            "position_ids": self.positions,
        }


def memmap_of(array: Any) -> np.memmap[Any, Any]:
    """Return the memmap that `array` is a view of."""
    assert isinstance(array.base, np.memmap), "the index is in memory"
    return array.base


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4_000_000)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the rates to this file")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    about = machine()
    print(f"{about['cpu']}, {about['cores']} cores, torch {about['torch']}; samples/s, medians\n")
    print(
        "| tokens of a sample | of a document | GPTDataset | Megatron's reads | ratio "
        "| with plain arrays | ratio |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    results: list[dict[str, Any]] = []
    for seq_length, document in CASES:
        with tempfile.TemporaryDirectory() as folder:
            rates = compare(Path(folder, "text"), seq_length, document, options)
        ratios = {
            name: median(a / b for a, b in zip(rates["ours"], rates[name], strict=True))
            for name in OTHERS
        }
        cells = [f"{median(rates['ours']):,.0f}"]
        for name, ratio in ratios.items():
            cells += [f"{median(rates[name]):,.0f}", f"{ratio:.2f}"]
        print(f"| {seq_length} | {document} | {' | '.join(cells)} |")
        results.append({"seq_length": seq_length, "document": document, "ratios": ratios, **rates})
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for name in OTHERS:
        worst = min(result["ratios"][name] for result in results)
        verdict = "reached" if worst >= 1 else "missed"
        print(f"\n{name}: lowest ratio {worst:.2f}; target at least 1: {verdict}")
    return 0


def compare(
    prefix: Path, seq_length: int, document: int, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Return samples per second of both in each round, after a check that the samples are equal."""
    random = np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16) as writer:
        for length in random.integers(document // 2, document * 3 // 2, options.tokens // document):
            writer.add_document(random.integers(0, 50_000, length).astype(np.uint16))
    data = IndexedDataset(prefix)
    dataset = GPTDataset(
        data,
        Split("train", range(len(data)), "data.split"),
        sample_format=SampleFormat(seq_length, vocab_size=50_000),
        num_samples=options.samples,
        seed=1,
    )
    readers: dict[str, Callable[[int], Any]] = {"ours": dataset.__getitem__}
    tokens, labels = dataset[3]
    for name, plain_arrays in OTHERS.items():
        other = MegatronReads(dataset, plain_arrays=plain_arrays)
        assert torch.equal(tokens, other[3]["tokens"]), "other tokens"
        assert torch.equal(labels, other[3]["labels"]), "other labels"
        readers[name] = other.__getitem__
    rates: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(options.rounds):
        for name, read in readers.items():
            started = time.perf_counter()
            for index in range(options.samples):
                read(index)
            rates[name].append(options.samples / (time.perf_counter() - started))
    return rates


if __name__ == "__main__":
    raise SystemExit(main())
