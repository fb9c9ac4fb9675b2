"""Two "nodes" on one machine: a torchrun each, which meet as those of a cluster do.

Either on two addresses of the loopback device, or in two network namespaces with a cable between
them, which can be cut. Everything that is started carries a token in its command line, by which
what is left of it is found.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]

CONFIG: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "seed": 3,
    "steps_per_print": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "mesh": {"pipeline": 2, "device": "cpu", "timeout_seconds": 60},
    "model": {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "seq_length": 16,
        "vocab_size": 64,
    },
    "data": {"mock": True},
    "training": {"train_steps": 4, "eval_interval": 0, "generate_tokens": 0, "progress": False},
}


class Node:
    """One torchrun with its ranks, and their output."""

    def __init__(self, process: "subprocess.Popen[str]", output: Path) -> None:
        self.process, self._output = process, output

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def wait(self, seconds: float) -> int:
        return self.process.wait(seconds)

    def wait_for(self, text: str, seconds: float) -> float:
        """Wait until the node has written `text`; return the seconds."""
        started = time.monotonic()
        while text not in self.output:
            if time.monotonic() - started > seconds:
                raise TimeoutError(f"{text!r} did not come within {seconds} s:\n{self.output}")
            time.sleep(0.05)
        return time.monotonic() - started


class TwoNodes:
    """Starts `pretrain_gpt.py` on both; nothing is left when the block ends.

    Args:
        folder: for configs and outputs; the nodes share it.
        namespaces: put a cable between them.
    """

    def __init__(self, folder: Path, namespaces: bool = False) -> None:
        self._folder = folder
        self._token = f"pipemega-nodes-{uuid.uuid4().hex}"
        self._starts = 0
        self._started: list[tuple[int, Node]] = []
        self._names: list[str] = []
        self.addresses = ["127.0.0.2", "127.0.0.3"]
        self.interfaces = ["lo", "lo"]
        if namespaces:
            self._lay_the_cable()

    def __enter__(self) -> "TwoNodes":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(0, 1)
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], check=False)

    def _lay_the_cable(self) -> None:
        short = uuid.uuid4().hex[:6]
        self._names = [f"pm{short}{node}" for node in range(2)]
        self.interfaces = [f"ve{short}{node}" for node in range(2)]
        self.addresses = ["10.77.0.1", "10.77.0.2"]
        for name in self._names:
            _ip("netns", "add", name)
        one, other = self.interfaces
        _ip("link", "add", one, "type", "veth", "peer", "name", other)
        for name, device, address in zip(self._names, self.interfaces, self.addresses, strict=True):
            _ip("link", "set", device, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            _ip("-n", name, "link", "set", device, "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def cut_the_cable(self) -> None:
        _ip("-n", self._names[0], "link", "set", self.interfaces[0], "down")

    def mend_the_cable(self) -> None:
        _ip("-n", self._names[0], "link", "set", self.interfaces[0], "up")

    def start(
        self, config: Mapping[str, Any], *options: str, ranks_per_node: int = 1
    ) -> list[Node]:
        """Start both nodes; `options` are passed to pretrain_gpt.py."""
        self._starts += 1
        run = self._folder / f"run{self._starts}"
        run.mkdir(parents=True)
        (run / "config.json").write_text(json.dumps(config))
        port = _free_port() if not self._names else 29400 + self._starts
        return [self._start_node(node, run, port, ranks_per_node, [*options]) for node in range(2)]

    def _start_node(self, node: int, run: Path, port: int, ranks: int, options: list[str]) -> Node:
        inside = ["ip", "netns", "exec", self._names[node]] if self._names else []
        launcher = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2"),
            f"--nproc_per_node={ranks}", "--rdzv_backend=c10d",
            f"--rdzv_endpoint={self.addresses[0]}:{port}", f"--rdzv_id={self._token}",
            f"--local_addr={self.addresses[node]}",
            # The hostname does not resolve to an address in the namespace.
            f"--rdzv_conf=is_host={1 - node}",
        ]  # fmt: skip
        script = [str(ROOT / "pretrain_gpt.py"), "--config", str(run / "config.json")]
        mark = ["--set", f"wandb.group={self._token}"]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "PYTHONUNBUFFERED": "1",
            "GLOO_SOCKET_IFNAME": self.interfaces[node],
        }
        output = run / f"node{node}.txt"
        with output.open("w") as file:
            process = subprocess.Popen(
                [*inside, *launcher, *script, *options, *mark],
                env=environment, cwd=run, stdout=file, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        self._started.append((node, Node(process, output)))
        return self._started[-1][1]

    def kill(self, *nodes: int) -> None:
        """Kill torchrun and ranks of some nodes at once, like a power failure."""
        for process in [p for p in self.left() if self._node_of(p) in nodes]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for number, node in self._started:
            if number in nodes:
                node.wait(30)

    def left(self) -> list[int]:
        """Return the processes of these nodes that still run."""
        found = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline")]
        return [process for process in found if self._token in _command_line(process)]

    def ranks_left(self) -> list[int]:
        """Return those of them that train."""
        return [p for p in self.left() if "--local_addr" not in _command_line(p)]

    def _node_of(self, process: int) -> int:
        """Return the node of a process by the address in its or its parent's command line."""
        for text in (_command_line(process), _command_line(_parent(process))):
            for node, address in enumerate(self.addresses):
                if f"--local_addr={address} " in text:
                    return node
        return 0


def can_cut_cables() -> bool:
    """Return whether this machine allows network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"pm{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode == 0:
        subprocess.run(["ip", "netns", "del", name], check=False)
    return made.returncode == 0


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _free_port() -> int:
    """Return a free port below the system's ephemeral range."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def _command_line(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""  # it ended meanwhile


def _parent(process: int) -> int:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rsplit(")", 1)[1].split()[1])


def rows_of(metrics: Path) -> list[dict[str, Any]]:
    """Return the training steps of a metrics.jsonl."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [row for row in rows if row["kind"] == "train"]
