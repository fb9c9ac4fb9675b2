"""Train the model of a config on token data: any model.type, with new weights or loaded ones.

The config also has the data and the mesh (data x tensor x pipeline ranks); docs/models.md describes
the types of models, docs/config.md all keys. torchrun starts one process per GPU; without GPUs the
processes train on the CPU.

    torchrun --nproc_per_node=4 pretrain_gpt.py --config configs/quickstart.json
    torchrun --nproc_per_node=4 pretrain_gpt.py --config configs/quickstart.json \\
        --set pipeline.schedule=gpipe --set training.train_steps=50
"""

import pipemega
from pipemega import pretrain


def main() -> None:
    parser = pipemega.add_arguments(pretrain.ScriptParser(description=__doc__))

    with pipemega.run():
        args = parser.parse_args()
        config = pipemega.load_config(args.config, args.set)
        mesh = pipemega.build_mesh(config)
        data = pretrain.load_datasets(config, mesh)
        model = pipemega.build_model(config, mesh, data.vocab_size)
        engine, *_ = pipemega.initialize(model, config, data.train, mesh=mesh)
        trainer = pipemega.Trainer(
            engine,
            data.valid,
            flops_per_token=pretrain.flops_per_token(config, mesh, data.vocab_size),
            callbacks=pretrain.sample_texts(engine, data),
        )
        trainer.fit()
        pretrain.print_results(trainer, data)


if __name__ == "__main__":
    main()
