"""The config: one JSON file, one pydantic section per JSON object.

config            the whole file, the rules between its sections, warnings and notes
sections/         one class per section
declarations      how a key is declared: own, honoured, ignored, replaced, refused, block; types;
                  the DeepSpeed keys that have no counterpart
source            reads JSON with comments; remembers the line of each key
builder           plain values -> sections, with all errors; `load`
unknown_keys      the error of an unknown key; name_suggestions: "did you mean"
batch             train_batch_size = micro-batch size * micro-batches * data ranks; ramp-up
launch_variables  what torchrun, srun and mpirun tell a process
model_registry    the types of the section `model`
from_deepspeed    explains a file of DeepSpeed
reference_pages   JSON Schema; pages of the docs (text: *_page.md)
"""

from pipemega.config.batch import Batch
from pipemega.config.builder import Draft, examine, load
from pipemega.config.config import Config

__all__ = ["Batch", "Config", "Draft", "examine", "load"]
