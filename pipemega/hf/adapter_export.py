"""Export the LoRA adapter of a checkpoint in peft's format."""

import shutil
from pathlib import Path

from torch import Tensor

from pipemega.checkpoint.save_load import CheckpointReader
from pipemega.config.lora import LoraSection
from pipemega.errors import CheckpointError
from pipemega.hf.checkpoint_model import lora_of, model_to_export, source_folder
from pipemega.hf.export import CheckpointTensor, refuse_existing
from pipemega.hf.key_mapping import tied_names
from pipemega.hf.whole_model import whole_model
from pipemega.lora.low_rank import A, B
from pipemega.lora.merging import adapter_of
from pipemega.lora.peft_files import save_adapter

# End of the name of a class of transformers -> task type of peft.
_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": "SEQ_CLS",
}


def export_adapter(reader: CheckpointReader, path: str | Path) -> int:
    """Write the adapter, for the model that `hf export` would write; return its bytes.

    The linears of the built-in GPT are those of GPT2 or Llama: q, k and v of Llama get the A of the
    fused linear, and their rows of its B.

    Raises:
        CheckpointError: the run had no adapter, its model is not one of transformers, or the folder
            is not empty.
    """
    section = lora_of(reader)
    if section is None:
        raise CheckpointError(
            f"{reader.full_path} has no adapter: its run had no section 'lora'; export the whole "
            f"model without --adapter"
        )
    folder = Path(path).absolute()
    refuse_existing(folder)
    exported = model_to_export(reader)
    tied = tied_names(whole_model(exported.config, exported.class_name))
    tensors: dict[str, Tensor] = {}
    for name, place in exported.tensors.items():
        a, b = adapter_of(place.key)
        if name.endswith("weight") and a in reader.tensors.tensors:
            module = name.removesuffix("weight")
            tensors[f"{module}{A}.weight"] = reader.tensors.read_full(a, None)
            tensors[f"{module}{B}.weight"] = reader.tensors.read_full(b, place.rows)
        elif _is_trained(section, place, names := tied.get(name, (name,))):
            whole = reader.tensors.read_full(place.key, place.rows)
            # peft trains the names of a tied tensor apart, unless the adapter has all of them.
            for each in names:
                tensors[each] = whole.T if place.transposed else whole
    source, temporary = source_folder(reader), folder.with_name(f".{folder.name}.exporting")
    shutil.rmtree(temporary, ignore_errors=True)
    task = next((t for end, t in _TASKS.items() if exported.class_name.endswith(end)), None)
    save_adapter(
        temporary,
        section,
        tensors,
        fan_in_fan_out=any(place.transposed for place in exported.tensors.values()),
        base=None if source is None else str(source),
        task_type=task,
        ties=any(name in tied for name in tensors),
    )
    if folder.exists():
        folder.rmdir()
    temporary.rename(folder)
    return sum(tensor.nbytes for tensor in tensors.values())


def _is_trained(section: LoraSection, place: CheckpointTensor, names: tuple[str, ...]) -> bool:
    """Return whether a tensor with these names belongs to a module of `lora.train_also`."""
    for own in (*names, place.key.partition("/")[2]):
        if any(f".{module}." in f".{own}" for module in section.train_also):
            return True
    return False
