"""Generate text with a trained model.

  CHECKPOINT   a folder of checkpoints, one checkpoint, or a URL that fsspec opens; or a folder of
               transformers with config.json and safetensors, such as `pipemega hf export` writes

The text is printed without the prompt. Generation ends at the end-of-document token, or after
--max-tokens. With a temperature, equal seeds give equal texts.

One process holds the whole model; keys and values of earlier tokens are cached. Under torchrun the
mesh is the mesh of the run, with more or fewer data ranks; set mesh.pipeline and mesh.tensor for
another mesh. On several ranks a GPT has these caches too; a model of transformers computes the
whole sequence for each token.
"""

import argparse
import json
import time
from typing import Any

from pipemega.cli.run_options import (
    Subparsers,
    add_command,
    add_model_options,
    launched,
    positive_count,
    progress,
)
from pipemega.distributed.mesh import launched_world_size
from pipemega.engine.run.run_arguments import build_mesh_of
from pipemega.errors import ConfigError
from pipemega.hf.text_generation import text_generator
from pipemega.training.evaluation_sets import PromptEncoder
from pipemega.training.generation import Sampling
from pipemega.training.trained_model import find_model, open_model

_EPILOG = """\
examples:
  python -m pipemega generate runs/mine --prompt "def main():" --max-tokens 100
  python -m pipemega generate runs/mine --prompt "Once" --temperature 0.8 --top-p 0.95 --seed 7
  python -m pipemega generate exported/ --chat --prompt "What is a pipeline bubble?"
  torchrun --nproc_per_node=4 -m pipemega generate runs/mine --prompt "Once" --json
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the command `generate`."""
    parser = add_command(subparsers, "generate", __doc__, _EPILOG)
    add_model_options(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        required=True,
        metavar="TEXT",
        help="the text to continue; repeatable: one text is generated for each prompt",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is a message of a user: apply the chat template of the tokenizer's folder",
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat: the system message")
    parser.add_argument(
        "--max-tokens",
        type=positive_count,
        default=256,
        metavar="N",
        help="largest number of new tokens (default: 256)",
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TOKEN",
        help="a token that ends the text, besides the end-of-document token; repeatable",
    )
    _add_sampling(parser)
    parser.set_defaults(func=run)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="X",
        help="0: always the most likely token (default); higher values sample more evenly",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the most likely tokens whose probabilities add up to P (default: 1)",
    )
    parser.add_argument(
        "--top-k", type=int, metavar="K", help="sample from the K most likely tokens"
    )
    parser.add_argument(
        "--seed", type=int, default=1234, metavar="N", help="random seed (default: 1234)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Generate a text for each prompt, and print them on rank 0."""
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    with launched(arguments):
        source = find_model(arguments.checkpoint, arguments.tag)
        config = source.config_for(launched_world_size(), arguments.overrides)
        mesh = build_mesh_of(config)
        # Before the model: a missing tokenizer is reported at once.
        encoder = PromptEncoder.of(config, arguments.stop)
        prompts = [_prompt(encoder, text, arguments) for text in arguments.prompt]
        net, engine = open_model(source, config, mesh)
        generator = text_generator(engine, net, source.vocab_size(config))
        stop = {*encoder.stop, *generator.end_tokens}
        if arguments.chat and encoder.chat_tokenizer.eos_token_id is not None:
            stop.add(encoder.chat_tokenizer.eos_token_id)
        results = []
        for text, prompt in zip(arguments.prompt, prompts, strict=True):
            started = time.perf_counter()
            most = arguments.max_tokens
            with progress(most, "token", shows=mesh.rank == 0) as advance:
                tokens = generator.generate(prompt, most, sampling, stop, lambda _: advance(1))
            ended = bool(tokens) and tokens[-1] in stop
            results.append(
                {
                    "prompt": text,
                    "text": encoder.decode(tokens[:-1] if ended else tokens),
                    "tokens": len(tokens),
                    "finish_reason": "stop" if ended else "length",
                    "seconds": round(time.perf_counter() - started, 3),
                }
            )
        if mesh.rank == 0:
            _print(results, as_json=arguments.json)
    return 0


def _prompt(encoder: PromptEncoder, text: str, arguments: argparse.Namespace) -> list[int]:
    if not _is_utf8(text):
        raise ConfigError(f"--prompt {text!a} is not UTF-8 text", on_every_rank=True)
    if arguments.chat:
        return encoder.encode_chat(text, arguments.system)
    if arguments.system is not None:
        raise ConfigError("--system is for --chat, which applies the chat template")
    return encoder.encode(text)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    # Bytes of the command line that are not UTF-8 become lone surrogates.
    except UnicodeEncodeError:
        return False
    return True


def _print(results: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(results, indent=1, ensure_ascii=False))
        return
    for number, result in enumerate(results):
        if len(results) > 1:
            print("\n" * (number > 0) + f"> {result['prompt']}")
        print(result["text"])
