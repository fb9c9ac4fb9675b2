"""Records what happens in a training, in order: one line of text for each event of this rank.

Only names that users have are observed, so that the lists do not depend on the modules of the
engine: the layers and data of the run, its callbacks, the calls of its loop, torch's collectives,
the lines of metrics.jsonl, and the renamed files.

    train_batch(                        a call of the loop
      read 0 1 2 3                      samples
      m0: F0 F1                         forwards of layers 0 and 1 with the micro-batch of sample 0;
                                        f0: without gradients
      m0: B1 W B0 W                     backwards: from the output of a layer; a product that is the
                                        gradient of some weight
      allreduce data f32[40]            a collective, its axis, its floating-point numbers
      send pipeline f32[16]             a message of torch.distributed
      record train 1                    a line of metrics.jsonl: its kind and step
      callback after_step               a method of a `pipemega.training.Callback`
      rename global_step2               a file or folder gets its final name
    ) finite                            what the call returned or raised

Small messages between pipeline ranks go through a socket and are not recorded. Of the threads only
the one that reads the data is recorded, because the main thread waits for it.
"""

import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipemega import Engine, StopTraining
from pipemega.training import Callback

# The layers of a run have no other way to it.
_current: "Recorder | None" = None

# After an error the connections are broken by receives, some more and some less.
_RECEIVES = ("recv_", "recv_any_source_")
_PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "matmul")
# A process group that is no axis of the mesh.
_GROUP = re.compile(r"<\w+>")
# In the name of a lock file.
_RANDOM = re.compile(r"\.[0-9a-f]{8}\b")


def record(event: str) -> None:
    """Add an event to the list of the run in progress, if there is one."""
    if _current is not None:
        _current.add(event)


class Recorder(TorchDispatchMode):
    """Records the events of one run on this rank.

    Args:
        folder: the folder of the run; its metrics.jsonl is watched.
        weight_shape: shape of the weight of a layer; no other product in the run has this shape.
    """

    def __init__(self, folder: Path, weight_shape: tuple[int, int]) -> None:
        super().__init__()
        self._weight_shape = torch.Size(weight_shape)
        self.folder, self._metrics = folder, folder / "metrics.jsonl"
        self._events: list[str] = []
        self._depth, self._num_records = 0, 0
        # Data are read in a thread.
        self._lock = threading.RLock()
        self._axes: dict[str, str] = {}

    def start(self, engine: Engine) -> None:
        """Forget the events so far, which are those of `initialize`."""
        self.clear()
        self.use(engine)

    def clear(self) -> None:
        self._add_records()
        self._events.clear()

    def use(self, engine: Engine) -> None:
        """Name the axes of the collectives, also of those that were recorded before."""
        mesh = engine.mesh
        for axis in (mesh.world, mesh.pipeline, mesh.data, mesh.tensor):
            if axis.group is not None:
                self._axes.setdefault(axis.group.group_name, axis.name)

    def add(self, event: str) -> None:
        with self._lock:
            self._add_records()
            self._events.append("  " * self._depth + event)

    def _add_records(self) -> None:
        """Add the lines that were written to metrics.jsonl since the last event."""
        if dist.get_rank() > 0 or not self._metrics.exists():
            return
        lines = self._metrics.read_text().splitlines()
        for line in map(json.loads, lines[self._num_records :]):
            name = line.get("event") or line.get("split") or ""
            words = ("record", line["kind"], name, str(line["step"]))
            self._events.append("  " * self._depth + " ".join(word for word in words if word))
        self._num_records = len(lines)

    def call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of the engine, as the loop does; an error is recorded and returned."""
        self.add(f"{name}(")
        self._depth += 1
        try:
            result = function(*args, **kwargs)
        except (Exception, StopTraining) as error:
            result = error
        self._add_records()
        self._depth -= 1
        self.add(f") {_described(result)}".rstrip())
        return result

    def reports(self, engine: Engine) -> None:
        """Record the steps that became final."""
        for report in engine.take_reports():
            words = [f"report loss {_described(report.loss)}"]
            words += [word for word in ("skipped", "overflow") if getattr(report, word)]
            self.add(", ".join([*words, f"undone so far {report.rollbacks}"]))

    def text(self) -> list[str]:
        """Return the list of the events, one line each; neighbours of one kind share a line."""
        self._add_records()
        lines: list[str] = []
        for event in self._events:
            for group, axis in self._axes.items():
                event = event.replace(f"<{group}>", axis)
            event = _GROUP.sub("another group", event)
            before = lines[-1].rsplit("  x", 1) if lines else [""]
            if lines and _joins(lines[-1], event):
                lines[-1] += f" {event.rsplit(' ', 1)[1]}"
            elif before[0] == event:
                times = int(before[1]) if len(before) > 1 else 1
                lines[-1] = f"{event}  x{times + 1}"
            else:
                lines.append(event)
        return lines

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._overloadpacket._qualified_op_name.partition("::")
        if namespace == "c10d" and name not in _RECEIVES:
            self.add(_collective(name, args))
        result = func(*args, **(kwargs or {}))
        is_product = namespace == "aten" and name in _PRODUCTS and not result.is_meta
        if is_product and result.shape == self._weight_shape:
            self.add(" W")
        return result


def _joins(line: str, event: str) -> bool:
    """Return whether an event continues a line: a sample, or a layer of the same pass."""
    head, _, tail = event.rpartition(" ")
    last = line.rsplit(" ", 1)[1][:1] if " " in line else ""
    if head.lstrip() in ("read", "valid"):
        return line.startswith(f"{head} ") and "x" not in line
    if tail == "W":
        return last in ("B", "W")
    is_pass = head.lstrip().startswith("m") and line.startswith(f"{head} ")
    return is_pass and (last == tail[0] or (tail[0] == "B" and last == "W"))


def _described(result: Any) -> str:
    if isinstance(result, BaseException):
        return f"raises {type(result).__name__}"
    if isinstance(result, Tensor) and result.numel() == 1:
        result = result.item()
    if isinstance(result, float):
        return "finite" if abs(result) < float("inf") else "not finite"
    return "" if result is None else type(result).__name__


def _collective(name: str, args: Any) -> str:
    leaves = pytree.tree_leaves(args)
    (group,) = (
        dist.ProcessGroup.unbox(leaf)
        for leaf in leaves
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type())
    )
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    # Bytes and integers are objects of Python, whose size may depend on the machine.
    size = f" f{found[0].itemsize * 8}[{sum(t.numel() for t in found)}]" if found else ""
    return f"{name.strip('_')} <{group.group_name}>{size}"


@contextmanager
def recording(folder: Path, weight_shape: tuple[int, int]) -> Iterator[Recorder]:
    """Record this thread in the block; `record` adds events."""
    global _current
    recorder = Recorder(folder, weight_shape)

    def renaming(function: Callable[..., None]) -> Callable[..., None]:
        def rename(source: Any, target: Any, **options: Any) -> None:
            function(source, target, **options)
            if threading.current_thread() is threading.main_thread():
                recorder.add(f"rename {_RANDOM.sub('.*', Path(target).name)}")

        return rename

    _current = recorder
    try:
        with (
            mock.patch("os.rename", renaming(os.rename)),
            mock.patch("os.replace", renaming(os.replace)),
            recorder,
        ):
            yield recorder
    finally:
        _current = None


class RecordedCallback(Callback):
    """Records its calls, and the reports of the steps.

    Args:
        does: name of a method -> what to do there, after the record.
    """

    def __init__(self, does: Mapping[str, Callable[[Any], object]] | None = None) -> None:
        self._does = dict(does or {})

    def _called(self, method: str, trainer: Any, detail: str = "") -> None:
        record(f"callback {method}{detail}")
        if _current is not None and method != "on_exception":
            _current.reports(trainer.engine)
        if method in self._does:
            self._does[method](trainer)

    def before_fit(self, trainer: Any) -> None:
        self._called("before_fit", trainer)

    def after_step(self, trainer: Any, loss: float) -> None:
        self._called("after_step", trainer, f" {trainer.engine.global_steps} {_described(loss)}")

    def after_epoch(self, trainer: Any, epoch: Any) -> None:
        self._called("after_epoch", trainer, f" {epoch.epoch}")

    def after_evaluation(self, trainer: Any, values: Mapping[str, float]) -> None:
        self._called("after_evaluation", trainer, f" {', '.join(values)}")

    def before_save(self, trainer: Any) -> None:
        self._called("before_save", trainer)

    def after_load(self, trainer: Any) -> None:
        self._called("after_load", trainer)

    def on_exception(self, trainer: Any, error: Exception) -> None:
        self._called("on_exception", trainer, f" {type(error).__name__}")

    def after_fit(self, trainer: Any) -> None:
        self._called("after_fit", trainer)

    def state_dict(self) -> dict[str, Any]:
        record("callback state_dict")
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        record(f"callback load_state_dict {state}")
