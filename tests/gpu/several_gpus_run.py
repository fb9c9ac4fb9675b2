"""Training run that test_several_gpus.py starts with torchrun; writes its results as JSON."""

import json
import sys
from pathlib import Path

import pipemega
from pipemega.distributed.mesh import launched_rank
from tests.ranks.training_runs import train


def main() -> None:
    config, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    with pipemega.run():
        result = train(config, "float32")
        if launched_rank() == 0:
            metrics = {key: result[key] for key in ("loss", "norm", "eval")}
            out.write_text(json.dumps(metrics), encoding="utf-8")


if __name__ == "__main__":
    main()
