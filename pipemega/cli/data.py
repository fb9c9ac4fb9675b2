"""The commands `pipemega data prepare` and `pipemega data info`."""

import argparse
import os
import sys
from pathlib import Path

from pipemega.cli.run_options import Subparsers, add_command
from pipemega.data.tokens.corpus import prefix_of, read_manifest, tokenizer_of
from pipemega.data.tokens.prepare import PrepareOptions, prepare
from pipemega.data.tokens.token_files import IndexedDataset
from pipemega.data.tokens.tokenizers import load_tokenizer

SHOWN_TOKENS = 200

PREPARE = """Tokenize text into the token files that training reads.

  input           a text file (one document), JSON lines (one document per line: .jsonl, .ndjson,
                  .json), either compressed as .gz, a folder, a glob, or 'python-stdlib':
                  the sources of the Python standard library (no download)
  PREFIX.bin      the tokens                         (Megatron's format,
  PREFIX.idx      the start of each document          byte for byte)
  PREFIX.tokenizer.json, PREFIX.manifest.json        tokenizer and source of the files

A second run reuses existing files if corpus and settings are the same; otherwise it writes new
ones. An interrupted run leaves no partial file."""

EXAMPLES = """examples:
  pipemega data prepare --input python-stdlib --output-prefix data/python
  pipemega data prepare --input wiki/*.jsonl.gz --json-key text --workers 8 \\
      --tokenizer gpt2/tokenizer.json --output-prefix data/wiki

then, in the configuration:
  "data": {"data_path": "data/wiki", "tokenizer": "gpt2/tokenizer.json"}"""


def add_parser(subparsers: Subparsers) -> None:
    """Add `data` with its two commands to the parsers of `pipemega`."""
    data = subparsers.add_parser("data", help="prepare text for training; inspect token files")
    commands = data.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    _add_prepare(commands)
    _add_info(commands)


def _add_prepare(commands: Subparsers) -> None:
    summary = "tokenize text into token files"
    parser = add_command(commands, "prepare", PREPARE, EXAMPLES, summary)
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="text, see above")
    parser.add_argument(
        "--output-prefix",
        type=Path,
        required=True,
        metavar="PREFIX",
        help="path of the token files without .bin and .idx",
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="a tokenizer.json, vocab.json, SentencePiece .model, folder of a Hugging Face "
        "tokenizer, or tiktoken:NAME; default: train one",
    )
    choice.add_argument(
        "--vocab-size",
        type=int,
        default=8192,
        metavar="N",
        help="vocabulary size of the byte-level BPE trained on the input (default: 8192)",
    )
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end each document with the token of --eod-id (default: yes)",
    )
    parser.add_argument(
        "--eod-id",
        metavar="TOKEN",
        help="id or text of the token that ends a document (default: the end-of-sequence "
        "token that the tokenizer's files name, otherwise <|endoftext|>)",
    )
    parser.add_argument(
        "--json-key",
        default="text",
        metavar="KEY",
        help="key of the text in a JSON line (default: text)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="number of worker processes; 0: none (default: one per core)",
    )
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="show a progress bar (default: on a terminal)",
    )
    parser.set_defaults(func=run_prepare)


def _add_info(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "info",
        help="show the content of token files",
        description="Show statistics of PREFIX.bin and PREFIX.idx, and the first document.",
    )
    parser.add_argument("prefix", type=Path, help="path of the token files without .bin and .idx")
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="tokenizer for the first document (default: PREFIX.tokenizer.json)",
    )
    parser.set_defaults(func=run_info)


def run_prepare(arguments: argparse.Namespace) -> int:
    """Run `data prepare`."""
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    progress = sys.stderr.isatty() if arguments.progress is None else arguments.progress
    done = prepare(
        arguments.input,
        arguments.output_prefix,
        PrepareOptions(
            tokenizer=arguments.tokenizer,
            vocab_size=arguments.vocab_size,
            eod=_id_or_text(arguments.eod_id),
            append_eod=arguments.append_eod,
            json_key=arguments.json_key,
            workers=arguments.workers,
        ),
        say=say,
        progress=progress,
    )
    if not any(line.startswith("prepared") for line in lines):
        prefix = prefix_of(arguments.output_prefix)
        print(f"{prefix} is up to date and is reused: {done.describe()}")
    return 0


def _id_or_text(token: str | None) -> int | str | None:
    return int(token) if token is not None and token.isdecimal() else token


def run_info(arguments: argparse.Namespace) -> int:
    """Run `data info`."""
    data = IndexedDataset(arguments.prefix)
    size = data.bin_path.stat().st_size + data.idx_path.stat().st_size
    rows = [
        ("documents", f"{data.num_documents:,}"),
        ("sequences", f"{len(data):,}"),
        ("tokens", f"{data.num_tokens:,}"),
        ("dtype", data.dtype.name),
        ("bytes", f"{size:,} in {data.bin_path} and {data.idx_path}"),
    ]
    if len(data):
        low, mean, high = data.lengths.min(), data.lengths.mean(), data.lengths.max()
        rows.append(("tokens per sequence", f"{low:,} to {high:,}, mean {mean:,.1f}"))
        tokens = data.span(0, len(data))
        rows.append(("token ids", f"{tokens.min()} to {tokens.max()}"))
    manifest = read_manifest(data.prefix)
    if manifest is not None:
        ends = "ends with" if manifest.append_eod else "does not end with"
        rows.append(("corpus", f"{manifest.corpus}; each document {ends} token {manifest.eod}"))
        rows.append(("vocabulary", f"{manifest.vocab_size:,}"))
    for key, value in rows:
        print(f"{key:<21} {value}")
    _show_first_document(data, arguments.tokenizer)
    return 0


def _show_first_document(data: IndexedDataset, tokenizer: str | None) -> None:
    path = tokenizer_of(data.prefix)
    if not data.num_documents or (tokenizer is None and not path.is_file()):
        return
    last = int(data.document_indices[1])
    tokens = data.span(0, last)
    text = load_tokenizer(tokenizer or path).decode(tokens[:SHOWN_TOKENS].tolist())
    shown = f"first {SHOWN_TOKENS} of " if len(tokens) > SHOWN_TOKENS else ""
    print(f"\nfirst document, {shown}{len(tokens):,} tokens:\n{text}")
