"""Launch scripts and arguments of Megatron-LM and Megatron-DeepSpeed as configs.  Imports no torch.

script text  -> shell_syntax (nodes)  -> shell_run (commands)  -> training_launch (the training)
words        -> given (arguments)     -> model_keys, training_keys, data_keys -> conversion (config)
page         prints the table of all arguments, docs/megatron.md
"""

from pipemega.compat.megatron.conversion import MegatronConversion, convert
from pipemega.compat.megatron.training_launch import TrainingLaunch, find_launches

__all__ = ["MegatronConversion", "TrainingLaunch", "convert", "find_launches"]
