"""The config: one JSON file, one pydantic section per JSON object.

config                       the whole file, the rules between its sections
load_config                  `load`: reads a file and reports all its errors
source                       reads JSON with comments; remembers the line of each key
build_sections               plain values -> sections, with all errors
unknown_keys                 the error of an unknown key
run_sizes                    rules about the size of the run: batch, ZeRO stage
config_warnings              warnings and notes about a valid config
key_kinds                    how a key is declared: own, honoured, ignored, replaced, refused, block
value_types                  types of values, and their text in messages and pages
batch_equation               train_batch_size = micro-batch size * micro-batches * data ranks
unsupported                  table of the DeepSpeed keys that have no counterpart here
json_schema, reference       JSON Schema; pages of the docs (text: *_page.md)
name_suggestions             "did you mean"
mesh, model, data, ...       one module per section
"""

from pipemega.config.batch import Batch
from pipemega.config.builder import Draft, examine, load
from pipemega.config.config import Config

__all__ = ["Batch", "Config", "Draft", "examine", "load"]
