"""Train a ResNet-50 on small images: 2 pipeline stages, 4 micro-batches per step.

    torchrun --nproc_per_node=2 examples/resnet_pipeline.py
    torchrun --nproc_per_node=2 examples/resnet_pipeline.py --set data.images=cifar10 \\
        --set data.path=/data/cifar
    torchrun --nproc_per_node=2 examples/resnet_pipeline.py --torchvision

`--torchvision` needs `pip install torchvision`.
"""

from functools import partial

import torch

import pipemega
from pipemega import pretrain

CONFIG = {
    "train_batch_size": 64,
    "gradient_accumulation_steps": 4,
    "mesh": {"pipeline": 2},
    "model": {
        "type": "resnet",
        "depth": 50,
        "num_classes": 10,
        "image_size": 32,
        "batch_norm": "deferred",
    },
    "data": {"images": "glyphs"},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    "scheduler": {"type": "linear", "params": {"warmup_steps": 10}},
    "training": {"epochs": 2},
}


def torchvision_resnet():
    """Return torchvision's ResNet-50, cut between the modules of `sequence`."""
    from torchvision.models import resnet50

    sequence = ["conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4"]
    sequence += ["avgpool", (partial(torch.flatten, start_dim=1), "behind"), "fc"]
    return pipemega.PipelineModule.from_module(
        partial(resnet50, num_classes=10),
        exec_seq=sequence,
        loss_fn=torch.nn.functional.cross_entropy,
        deferred_batch_norm=True,
    )


def main(arguments=None):
    parser = pipemega.add_arguments(pretrain.ScriptParser(description=__doc__), CONFIG)
    parser.add_argument("--torchvision", action="store_true", help="use torchvision's resnet50")
    args = parser.parse_args(arguments)
    config = pipemega.load_config(args.config, args.set)
    mesh = pipemega.build_mesh(config)
    data = pretrain.load_datasets(config, mesh)
    model = torchvision_resnet() if args.torchvision else pipemega.build_model(config, mesh)
    engine, *_ = pipemega.initialize(model, config, data.train, mesh=mesh)
    trainer = pipemega.Trainer(engine, data.valid, metrics=pretrain.image_metrics(data))
    trainer.fit()
    return trainer


if __name__ == "__main__":
    with pipemega.run():
        main()
