"""Hugging Face models as PipelineModules.

`load_model`: from_pretrained; `hf_module`: HFPipelineModule; `description`: the model on the meta
device; `segments`, `layers_on_ranks`: its parts on one rank; `families`, `sharding_styles`: how the
layers of a family are sharded; `weight_source`: where initial values come from;
`text_generation`: generates text.

transformers is imported inside functions only: its import takes 4 s.
"""

from pipemega.hf.hf_module import HFPipelineModule, from_pretrained
from pipemega.hf.weights.safetensors_files import WeightSource, is_transposed

__all__ = ["HFPipelineModule", "WeightSource", "from_pretrained", "is_transposed"]
