"""Train a ViT on tensor 2 x pipeline 2 ranks, with a loop of its own around `train_batch`.

    torchrun --nproc_per_node=4 examples/vit_hybrid.py
    torchrun --nproc_per_node=2 examples/vit_hybrid.py --set mesh.tensor=1
    torchrun --nproc_per_node=4 examples/vit_hybrid.py --set data.images=cifar10 \\
        --set data.path=/data/cifar --set model.image_size=32

The number of data ranks is the number of processes / (tensor x pipeline).
"""

from tqdm import tqdm

import pipemega
from pipemega import pretrain

CONFIG = {
    "train_batch_size": 64,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "mesh": {"tensor": 2, "pipeline": 2},
    "model": {
        "type": "vit",
        "image_size": 16,
        "patch_size": 4,
        "num_channels": 1,
        "num_classes": 10,
        "hidden_size": 64,
        "num_layers": 4,
        "num_attention_heads": 4,
        "init": "torch",
        "drop_path": 0.1,
        "label_smoothing": 0.1,
    },
    "data": {"images": "glyphs", "transforms": {"mixup": 0.1}},
    "optimizer": {"type": "Lamb", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "scheduler": {"type": "cosine", "params": {"warmup_steps": 20}},
    "training": {"train_steps": 200, "eval_interval": 50},
    "steps_per_print": 25,
}


def main(arguments=None):
    parser = pipemega.add_arguments(pretrain.ScriptParser(description=__doc__), CONFIG)
    args = parser.parse_args(arguments)
    config = pipemega.load_config(args.config, args.set)
    mesh = pipemega.build_mesh(config)
    data = pretrain.load_datasets(config, mesh)
    model = pipemega.build_model(config, mesh)
    engine, *_ = pipemega.initialize(model, config, data.train, mesh=mesh)

    losses = []
    for step in tqdm(range(1, config.training.train_steps + 1), disable=mesh.rank > 0):
        engine.train_batch()
        if step % config.training.eval_interval == 0:
            losses.append(engine.evaluate(data.valid))
    return losses


if __name__ == "__main__":
    with pipemega.run():
        main()
