"""Export the fine-tuned model, and let transformers answer the validation questions with it.

python examples/finetune_llama/export_and_evaluate.py
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipemega.cli import main as pipemega


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/finetune_llama"))
    folder = parser.parse_args().folder
    checkpoints, exported = str(folder / "checkpoints"), str(folder / "finetuned")
    pipemega(["evaluate", checkpoints, "--data", str(folder / "valid.jsonl")])
    pipemega(["hf", "export", checkpoints, exported])

    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported)
    lines = (folder / "valid.jsonl").read_text(encoding="utf-8").splitlines()
    right = 0
    for number, line in enumerate(lines):
        question, answer = json.loads(line)["messages"]
        inputs = tokenizer.apply_chat_template(
            [question], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=5, do_sample=False)
        text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += text == answer["content"]
        if number < 3:
            print(f"{question['content']} {text}")
    print(f"{right} of {len(lines)} answers are right")


if __name__ == "__main__":
    main()
