"""Train a model of images from a config: a ViT or a ResNet on CIFAR, digits or a folder of images.

The config has the model, the data and the mesh; see docs/data.md. torchrun starts one process per
GPU; without GPUs the processes train on the CPU.

    torchrun --nproc_per_node=2 examples/train_vision.py --config configs/vit_digits.json
    torchrun --nproc_per_node=4 examples/train_vision.py --config configs/resnet_digits.json \\
        --set mesh.pipeline=4
"""

import pipemega
from pipemega import pretrain


def main() -> None:
    parser = pipemega.add_arguments(pretrain.ScriptParser(description=__doc__))

    with pipemega.run():
        args = parser.parse_args()
        config = pipemega.load_config(args.config, args.set)
        pretrain.require_images(config)
        mesh = pipemega.build_mesh(config)
        data = pretrain.load_datasets(config, mesh)
        model = pipemega.build_model(config, mesh)
        engine, *_ = pipemega.initialize(model, config, data.train, mesh=mesh)
        trainer = pipemega.Trainer(
            engine,
            data.valid,
            flops_per_sample=pretrain.flops_per_sample(config, mesh),
            metrics=pretrain.image_metrics(data),
        )
        trainer.fit()
        pretrain.print_results(trainer, data)


if __name__ == "__main__":
    main()
