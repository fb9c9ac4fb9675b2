"""Run a script whose `import deepspeed` is `pipemega.compat.deepspeed`.

python -m pipemega.compat.deepspeed script.py ...
torchrun --nproc_per_node=4 -m pipemega.compat.deepspeed [--set KEY=VALUE] [-m] script ...

`--set` changes a key of the config that the script gives to `initialize`.
"""

import runpy
import sys
from pathlib import Path

from pipemega.compat.deepspeed.process_topology import CONFIG_CHANGES
from pipemega.compat.deepspeed.virtual_modules import install_as_deepspeed
from pipemega.errors import ConfigError
from pipemega.fault_tolerance.run import run

_USAGE = (
    "usage: python -m pipemega.compat.deepspeed [--set KEY=VALUE ...] [-m] SCRIPT [arguments of "
    "the script]"
)
_NO_GPU = "without a GPU, replace torch.cuda.set_device(i) by get_accelerator().set_device(i)"
# Part of the message of an error of the script -> what to do.
_HINTS = {
    "_cuda_setDevice": _NO_GPU,
    "Found no NVIDIA driver": _NO_GPU,
    "The 'deepspeed>=": "transformers' Trainer needs the real DeepSpeed: use pipemega.Trainer and "
    "from_pretrained, or deepspeed.initialize in a loop of your own (docs/coming_from.md)",
}


def main() -> None:
    """Run the script of the command line; an error on one rank ends all ranks."""
    arguments = sys.argv[1:]
    while arguments and arguments[0].partition("=")[0] == "--set":
        values = arguments.pop(0).split("=", 1)[1:]
        CONFIG_CHANGES.extend(values or arguments[:1])
        arguments = arguments if values else arguments[1:]
    is_module = arguments[:1] == ["-m"]
    if is_module:
        arguments = arguments[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        sys.exit(0 if arguments else 2)
    install_as_deepspeed()
    sys.argv = arguments
    sys.path.insert(0, str(Path.cwd() if is_module else Path(arguments[0]).resolve().parent))
    with run():
        try:
            if is_module:
                runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(arguments[0], run_name="__main__")
        except Exception as error:
            hints = [hint for text, hint in _HINTS.items() if text in str(error)]
            if not hints:
                raise
            raise ConfigError(f"{type(error).__name__}: {error}: {hints[0]}") from error


if __name__ == "__main__":
    main()
