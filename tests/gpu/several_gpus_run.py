"""What test_several_gpus.py runs under torchrun: trains on one mesh, and tells the numbers."""

import json
import sys
from pathlib import Path

import pipemega
from pipemega.mesh import launched_rank
from tests.ranks.training_run import train


def main() -> None:
    config, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    with pipemega.run():
        result = train(config, "float32")
        if launched_rank() == 0:
            told = {key: result[key] for key in ("loss", "norm", "eval")}
            out.write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main()
