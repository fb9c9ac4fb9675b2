"""Train a Llama of transformers with the zero-bubble schedule ZB-V, from embeddings as inputs.

    torchrun --nproc_per_node=4 examples/zero_bubble_llama.py
    torchrun --nproc_per_node=4 examples/zero_bubble_llama.py --graph
    torchrun --nproc_per_node=4 examples/zero_bubble_llama.py --set mesh.pipeline=2 \\
        --set mesh.tensor=2 --set mesh.sequence_parallel=true

`--graph` searches for a plan with given costs of F, B, W and of a message, in place of `zb-v`.
"""

import torch
from transformers import LlamaConfig

import pipemega
from pipemega import pretrain
from pipemega.pipeline.pipeline_graph import PipelineGraph

SEQ, HIDDEN, VOCABULARY = 16, 16, 64
CONFIG = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 8,
    "mesh": {"pipeline": 4},
    "pipeline": {"schedule": "zb-v"},
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
    "training": {"train_steps": 40},
    "steps_per_print": 10,
}


def sequences(count):
    """Return (embeddings, next tokens) of sequences that count in steps of 1 to 8."""
    table = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(0))
    starts = torch.arange(count)[:, None]
    tokens = (starts + torch.arange(SEQ + 1) * (starts % 8 + 1)) % VOCABULARY
    return [({"inputs_embeds": table[row[:-1]]}, row[1:]) for row in tokens]


def graph(config, mesh):
    """Return the plan for equal times of F, B and W, and a tenth of them for a message."""
    f_mem, w_mem = 34 * HIDDEN + 5 * 4 * SEQ, -32 * HIDDEN
    num_microbatches = config.batch(mesh.data.size).num_microbatches
    return PipelineGraph(
        mesh.pipeline.size, num_microbatches, f_cost=1, b_cost=1, w_cost=1, c_cost=0.1,
        f_mem=f_mem, b_mem=-w_mem - f_mem, w_mem=w_mem,
    ).get_v_schedule()  # fmt: skip


def main(arguments=None):
    parser = pipemega.add_arguments(pretrain.ScriptParser(description=__doc__), CONFIG)
    parser.add_argument("--graph", action="store_true", help="search for a plan with given costs")
    args = parser.parse_args(arguments)
    config = pipemega.load_config(args.config, args.set)
    mesh = pipemega.build_mesh(config)
    llama = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN,
        num_hidden_layers=8, num_attention_heads=4,
    )  # fmt: skip
    engine, *_ = pipemega.initialize(
        pipemega.from_pretrained(llama, pretrained=False),
        config,
        sequences(512),
        mesh=mesh,
        plan=graph(config, mesh) if args.graph else None,
    )
    losses = []
    while not engine.is_complete:
        losses.append(engine.train_batch())
    return losses


if __name__ == "__main__":
    with pipemega.run():
        main()
