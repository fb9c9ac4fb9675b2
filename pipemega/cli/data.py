"""python -m pipemega data prepare | info."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from pipemega.data.indexed import IndexedDataset, prefix_of
from pipemega.data.prepare import prepare, read_manifest, tokenizer_of
from pipemega.data.tokenizer import TextTokenizer

SHOWN_TOKENS = 200

PREPARE = """Turn text into token files that training reads.

  input           a text file (one document), JSON lines (one document a line: .jsonl, .ndjson,
                  .json), either of them packed as .gz, a folder, a glob, or 'python-stdlib':
                  the sources of this Python's own library, which need no download
  PREFIX.bin      the tokens                         (Megatron's format,
  PREFIX.idx      where each document starts          byte for byte)
  PREFIX.tokenizer.json, PREFIX.manifest.json        how they were made

Run again, it uses what is there, if corpus and settings are the same; otherwise it writes anew.
An interrupted run leaves no half-written file."""

EXAMPLES = """examples:
  python -m pipemega data prepare --input python-stdlib --output-prefix data/python
  python -m pipemega data prepare --input wiki/*.jsonl.gz --json-key text --workers 8 \\
      --tokenizer gpt2/tokenizer.json --output-prefix data/wiki

then, in the configuration:
  "data": {"data_path": "data/wiki", "tokenizer": "gpt2/tokenizer.json"}"""


def add_parser(subparsers: Any) -> None:
    """Add `data` with its two commands to the argparse sub-parsers of `python -m pipemega`."""
    data = subparsers.add_parser("data", help="prepare text for training, look at token files")
    commands = data.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    _add_prepare(commands)
    _add_info(commands)


def _add_prepare(commands: Any) -> None:
    parser = commands.add_parser(
        "prepare",
        help="turn text into token files",
        description=PREPARE,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="what to read")
    parser.add_argument(
        "--output-prefix", type=Path, required=True, metavar="PREFIX", help="what to write"
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="a tokenizer.json; default: train one"
    )
    choice.add_argument(
        "--vocab-size",
        type=int,
        default=8192,
        metavar="N",
        help="tokens of the byte-level BPE that is trained on the input (default: 8192)",
    )
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end each document with <|endoftext|>, so that the model learns where one ends "
        "(default: yes)",
    )
    parser.add_argument(
        "--json-key",
        default="text",
        metavar="KEY",
        help="the key of a JSON line that holds its text (default: text)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes that tokenize; 0 for none but this one (default: one per core)",
    )
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="show a progress bar (default: on a terminal)",
    )
    parser.set_defaults(func=run_prepare)


def _add_info(commands: Any) -> None:
    parser = commands.add_parser(
        "info",
        help="say what token files hold",
        description="Say what PREFIX.bin and PREFIX.idx hold, and show the first document.",
    )
    parser.add_argument("prefix", type=Path, help="the files' common path")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="decodes the first document (default: PREFIX.tokenizer.json, if there)",
    )
    parser.set_defaults(func=run_info)


def run_prepare(arguments: argparse.Namespace) -> int:
    """`data prepare`."""
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    progress = sys.stderr.isatty() if arguments.progress is None else arguments.progress
    done = prepare(
        arguments.input,
        arguments.output_prefix,
        tokenizer=arguments.tokenizer,
        vocab_size=arguments.vocab_size,
        append_eod=arguments.append_eod,
        json_key=arguments.json_key,
        workers=arguments.workers,
        say=say,
        progress=progress,
    )
    if not any(line.startswith("prepared") for line in lines):
        print(
            f"{prefix_of(arguments.output_prefix)} is up to date and is used as it is: "
            f"{done.describe()}"
        )
    return 0


def run_info(arguments: argparse.Namespace) -> int:
    """`data info`."""
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
        rows.append(("tokens in a sequence", f"{low:,} to {high:,}, on average {mean:,.1f}"))
        tokens = data.span(0, len(data))
        rows.append(("token ids", f"{tokens.min()} to {tokens.max()}"))
    manifest = read_manifest(data.prefix)
    if manifest is not None:
        ends = "each ends with" if manifest.append_eod else "none ends with"
        rows.append(("made of", f"{manifest.corpus}; {ends} token {manifest.eod}"))
        rows.append(("vocabulary", f"{manifest.vocab_size:,}"))
    for key, value in rows:
        print(f"{key:<21} {value}")
    _show_first_document(data, arguments.tokenizer)
    return 0


def _show_first_document(data: IndexedDataset, tokenizer: Path | None) -> None:
    path = tokenizer_of(data.prefix) if tokenizer is None else tokenizer
    if not data.num_documents or (tokenizer is None and not path.is_file()):
        return
    last = int(data.document_indices[1])
    tokens = data.span(0, last)
    text = TextTokenizer.load(path).decode(tokens[:SHOWN_TOKENS].tolist())
    shown = f"first {SHOWN_TOKENS} of " if len(tokens) > SHOWN_TOKENS else ""
    print(f"\nfirst document, {shown}{len(tokens):,} tokens:\n{text}")
