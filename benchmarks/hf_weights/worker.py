"""One rank of the benchmark: loads its shard of a folder; or one process that exports."""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

import pipemega
from pipemega.hf.placeholders import whole_model
from pipemega.hf.weights.checkpoint_model import export_checkpoint
from pipemega.pipeline.model.module import BuildOptions
from pipemega.pipeline.model.stages import build_local_model, stage_bounds


class Peak:
    """Measures the peak memory of this process above the memory at the beginning."""

    def __init__(self) -> None:
        # Resets VmHWM to the present memory.
        Path("/proc/self/clear_refs").write_text("5")
        self._before, self._start = _memory_kb("VmRSS"), time.perf_counter()

    def result(self) -> dict[str, float]:
        seconds = time.perf_counter() - self._start
        return {"peak": (_memory_kb("VmHWM") - self._before) / 1e3, "seconds": seconds}


def _memory_kb(field: str) -> int:
    """Return VmRSS, the memory of this process, or VmHWM, its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def load(options: argparse.Namespace) -> dict[str, float]:
    """Build this rank's stages from the folder, in its dtype."""
    torch.set_default_dtype(torch.bfloat16)
    sizes = {"pipeline": options.pipeline, "tensor": options.tensor, "device": "cpu"}
    config = {"train_micro_batch_size_per_gpu": 1, "mesh": sizes}
    mesh = pipemega.build_mesh(pipemega.load_config(config))
    net = pipemega.from_pretrained(options.folder)
    build = BuildOptions(tensor=mesh.tensor, device=mesh.device, seed=0)
    stages = options.pipeline
    bounds = stage_bounds(net, "parameters", stages, mesh, build, lambda: (None, None))
    assert net.tied_parameters is not None  # on meta, before the measurement
    peak = Peak()
    local = build_local_model(net, mesh, bounds, range(stages), build)
    result = peak.result()
    tensors = [p for s in local.stages.values() for p in s.parameters()]
    assert net.source is not None
    result["shard"] = sum(t.numel() * t.element_size() for t in tensors) / 1e6
    result["largest"] = max(t.numel() * t.element_size() for t in tensors) / 1e6
    result["read"] = net.source.files.bytes_read / 1e6
    if mesh.world.size > 1:
        dist.barrier()
    return result


def save(options: argparse.Namespace) -> dict[str, float]:
    """Save the model of the folder as a checkpoint."""
    torch.set_default_dtype(torch.bfloat16)
    net = pipemega.from_pretrained(options.folder)
    config = {"train_micro_batch_size_per_gpu": 1, "mesh": {"device": "cpu"}}
    engine, *_ = pipemega.initialize(net, config)
    engine.save_checkpoint(f"{options.work}/checkpoint")
    engine.close()
    return {}


def export(options: argparse.Namespace) -> dict[str, float]:
    """Export the checkpoint that `save` wrote."""
    # The import is not part of the measurement.
    whole_model(transformers.LlamaConfig(num_hidden_layers=1), "LlamaForCausalLM")
    peak = Peak()
    export_checkpoint(f"{options.work}/checkpoint", f"{options.work}/out")
    return peak.result()


MODES = {"load": load, "save": save, "export": export}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("--folder")
    parser.add_argument("--work")
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--out")
    options = parser.parse_args()
    result = MODES[options.mode](options)
    Path(options.out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
