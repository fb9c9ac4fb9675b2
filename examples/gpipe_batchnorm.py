"""Train a network with BatchNorm by GPipe: micro-batches, recomputation, deferred statistics.

    torchrun --nproc_per_node=2 examples/gpipe_batchnorm.py
    torchrun --nproc_per_node=2 examples/gpipe_batchnorm.py --plain

With deferred statistics the running mean and variance cover whole mini-batches, as without
micro-batches. `--plain` keeps nn.BatchNorm2d as it is, and the log warns about the statistics.
"""

import torch
from torch import nn

import pipemega
from pipemega import LayerSpec, pretrain
from pipemega.training import Accuracy

CLASSES, SIZE = 8, 16
CONFIG = {
    "train_batch_size": 64,
    "gradient_accumulation_steps": 8,
    "mesh": {"pipeline": 2},
    "pipeline": {
        "schedule": "gpipe",
        "partition": "parameters",
        "activation_checkpoint_interval": 1,
    },
    "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "nesterov": True}},
    "training": {"epochs": 3},
}


def waves(count, seed):
    """Return (image, class) of noisy waves; the class is the direction of the wave."""
    random = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    samples = []
    for number in range(count):
        angle = torch.tensor(torch.pi * (number % CLASSES) / CLASSES)
        phase, noise = torch.rand((), generator=random), torch.randn(SIZE, SIZE, generator=random)
        wave = torch.sin(x * angle.cos() + y * angle.sin() + 2 * torch.pi * phase)
        samples.append(((wave + noise)[None], number % CLASSES))
    return samples


def block(channels, outputs):
    return [
        LayerSpec(nn.Conv2d, channels, outputs, 3, stride=2, padding=1, bias=False),
        LayerSpec(nn.BatchNorm2d, outputs),
        torch.relu,
    ]


def main(arguments=None):
    parser = pipemega.add_arguments(pretrain.ScriptParser(description=__doc__), CONFIG)
    parser.add_argument("--plain", action="store_true", help="do not defer the statistics")
    parser.add_argument("--samples", type=int, default=1024, help="samples of an epoch")
    args = parser.parse_args(arguments)
    config = pipemega.load_config(args.config, args.set)
    head = [nn.Flatten(), LayerSpec(nn.Linear, 256, CLASSES)]
    model = pipemega.PipelineModule(
        [*block(1, 16), *block(16, 32), *block(32, 64), *head],
        loss_fn=nn.functional.cross_entropy,
        deferred_batch_norm=not args.plain,
    )
    engine, *_ = pipemega.initialize(model, config, waves(args.samples, seed=1))
    trainer = pipemega.Trainer(engine, waves(256, seed=2), metrics={"top1": Accuracy()})
    trainer.fit()
    return trainer


if __name__ == "__main__":
    with pipemega.run():
        main()
