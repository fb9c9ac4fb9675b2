"""Train a classifier with its big embedding on the CPU, and the other layers on GPUs.

    torchrun --nproc_per_node=2 examples/heterogeneous_embedding.py
    torchrun --nproc_per_node=3 examples/heterogeneous_embedding.py --set mesh.pipeline=3 \\
        --set 'mesh.device=["cpu", "cuda", "cuda"]'

The optimizer of a layer is on the device of the layer. Without a GPU all ranks are CPUs.
"""

import torch
from torch import nn

import pipemega
from pipemega import LayerSpec, pretrain
from pipemega.training import Accuracy, Timing

WORDS, CLASSES, PER_SAMPLE = 20_000, 10, 16
FAST = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = {
    "train_batch_size": 256,
    "gradient_accumulation_steps": 4,
    "mesh": {"pipeline": 2, "device": ["cpu", FAST]},
    "data": {"prefetch": 64},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "training": {"epochs": 2},
}


class Clicks(torch.utils.data.IterableDataset):
    """Samples (word ids, class); most ids of a sample are ids of its class."""

    deterministic = True  # a sample depends only on its number: a thread reads ahead

    def __init__(self, count, seed):
        self.count, self.seed = count, seed

    def __iter__(self):
        random = torch.Generator().manual_seed(self.seed)
        for _ in range(self.count):
            label = int(torch.randint(CLASSES, (), generator=random))
            ids = torch.randint(WORDS // CLASSES, (PER_SAMPLE,), generator=random)
            noise = torch.randint(2 * CLASSES, (PER_SAMPLE,), generator=random)
            rest = torch.where(noise < CLASSES, noise, label)
            yield ids * CLASSES + rest, label


def build_model(hidden=64):
    return pipemega.PipelineModule(
        [
            LayerSpec(nn.EmbeddingBag, WORDS, hidden, device="cpu"),
            LayerSpec(nn.Linear, hidden, 4 * hidden, device=FAST),
            torch.relu,
            LayerSpec(nn.Linear, 4 * hidden, CLASSES, device=FAST),
        ],
        loss_fn=nn.functional.cross_entropy,
    )


def main(arguments=None):
    parser = pipemega.add_arguments(pretrain.ScriptParser(description=__doc__), CONFIG)
    parser.add_argument("--samples", type=int, default=20_000, help="samples of an epoch")
    args = parser.parse_args(arguments)
    config = pipemega.load_config(args.config, args.set)
    engine, *_ = pipemega.initialize(build_model(), config, Clicks(args.samples, seed=1))
    trainer = pipemega.Trainer(
        engine,
        Clicks(args.samples // 10, seed=2),
        metrics={"top1": Accuracy(), "top5": Accuracy(k=5)},
        callbacks=[Timing()],
    )
    trainer.fit()
    return trainer


if __name__ == "__main__":
    with pipemega.run():
        main()
