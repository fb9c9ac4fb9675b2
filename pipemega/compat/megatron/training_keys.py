"""Batch, length, optimizer, learning rate and precision from Megatron's arguments.

The config section `data` from Megatron's arguments.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from pipemega.compat.megatron.arguments import Given
from pipemega.compat.megatron.shell_words import names_of_unknown, shown

_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")


def batch_keys(given: Given) -> dict[str, Any]:
    """Return the keys of the batch."""
    micro, batch = given.number("micro-batch-size"), given.number("global-batch-size")
    if micro is None and "micro-batch-size" not in given:
        given.say("unknown", "micro-batch-size", "it is missing: the config needs it")
    if batch is None:
        if "global-batch-size" not in given:
            return {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": 1}
        return {"train_micro_batch_size_per_gpu": micro}
    return {"train_batch_size": batch, "train_micro_batch_size_per_gpu": micro}


def length_keys(given: Given) -> dict[str, Any]:
    """Return the length of the run: steps or samples."""
    steps, samples = given.number("train-iters"), given.number("train-samples")
    tokens = _in_samples(given, "train-tokens")
    if steps is not None and samples is not None:
        given.say("changed", "train-samples", "--train-iters is given too, and is the length of "
                  "the run")  # fmt: skip
        samples = None
    if steps is not None and tokens is not None:
        # Megatron-DeepSpeed stops at the first of the two.
        steps, tokens = min(steps, _as_steps(given, tokens)), None
    if tokens is not None:
        samples = tokens if samples is None else min(samples, tokens)
    if steps is None and samples is None:
        names = ("train-iters", "train-samples", "train-tokens")
        if not any(name in given for name in names):
            given.say("changed", "", "neither --train-iters nor --train-samples is given: set "
                      "training.train_steps")  # fmt: skip
        return {}
    return {"train_steps": steps} if steps is not None else {"train_samples": samples}


def _in_samples(given: Given, name: str) -> int | None:
    """Return an argument in tokens as samples."""
    tokens, length = given.number(name), given.number("seq-length")
    if tokens is None or not length:
        return None
    samples: int = -(-int(tokens) // length)
    given.say("changed", name, f"divided by --seq-length {length}: {samples:,} samples")
    return samples


def training_section(given: Given) -> dict[str, Any]:
    """Return the section `training`."""
    training: dict[str, Any] = length_keys(given)
    training["rampup_batch_size"] = given.numbers("rampup-batch-size")
    training["exit_interval"] = given.number("exit-interval")
    training["exit_after_minutes"] = given.number("exit-duration-in-mins")
    training["kill_switch_path"] = given.text("kill-switch-path")
    evaluations = given.number("eval-iters", 100)
    if evaluations and _has_validation(given):
        training["eval_interval"] = given.number("eval-interval", 1000)
        training["eval_steps"] = evaluations
    else:
        training["eval_interval"] = 0
    per_token = given.flag("calculate-per-token-loss")
    training["loss_reduction"] = "token" if per_token else "micro_batch"
    training["weight_decay_norms_and_biases"] = False
    if given.flag("deterministic-mode"):
        training["deterministic_mode"] = True
    unchecked = ("no-check-for-nan-in-loss-and-grad", "fp16", "deepspeed")
    if not any(given.flag(name) for name in unchecked):
        training["on_nonfinite"] = {"policy": "stop"}
    found = {key: value for key, value in training.items() if value is not None}
    for key in ("exit_after_minutes", "exit_interval"):
        if found.get(key) == 0:
            del found[key]
    return found


def _has_validation(given: Given) -> bool:
    """Whether the data have a validation set: its share in --split is not 0."""
    shares = given.text("split", "969,30,1").replace("/", ",").split(",")
    try:
        return "valid-data-path" in given or (len(shares) > 1 and float(shares[1]) > 0)
    except ValueError:
        return True


def optimizer_section(given: Given) -> dict[str, Any]:
    """Return the section `optimizer`."""
    name = given.text("optimizer", "adam").lower()
    decay = _weight_decay(given)
    rate = given.number("lr")
    if "lr" not in given:
        given.say("changed", "lr", "it is missing: optimizer.params.lr has pipemega's default")
    params: dict[str, Any] = {} if rate is None else {"lr": rate}
    if name == "sgd":
        momentum = given.number("sgd-momentum", 0.9)
        return {"type": "SGD", "params": params | {"momentum": momentum, "weight_decay": decay}}
    if name not in ("adam", "adamw"):
        given.say("refused", "optimizer", "only adam and sgd have a counterpart; optimizer.type "
                  "has the optimizers of torch")  # fmt: skip
    betas = [given.number("adam-beta1", 0.9), given.number("adam-beta2", 0.999)]
    params |= {"betas": betas, "eps": given.number("adam-eps", 1e-8), "weight_decay": decay}
    return {"type": "AdamW", "params": params}


def _weight_decay(given: Given) -> float:
    """Return the weight decay, in Megatron's constant form."""
    decay: float = given.number("weight-decay", 0.01)
    start, end = given.number("start-weight-decay"), given.number("end-weight-decay")
    if start is not None and start == end:
        return float(start)
    return decay


def scheduler_section(given: Given, training: dict[str, Any]) -> dict[str, Any]:
    """Return the section `scheduler`, with lengths in steps or samples, as `training` has them."""
    style = given.text("lr-decay-style", "linear")
    kind = next((known for known in _STYLES if known.lower() == style.lower()), None)
    if kind is None:
        given.say("refused", "lr-decay-style", f"it must be one of {', '.join(_STYLES)}")
        kind = "linear"
    params: dict[str, Any] = {}
    if kind != "constant":
        params["min_lr"] = given.number("min-lr", 0.0)
    init = given.number("lr-warmup-init")
    if init:
        params["warmup_init_lr"] = init
    unit = "samples" if "train_samples" in training else "steps"
    params |= _lengths(given, unit)
    length = given.number("train-iters" if unit == "steps" else "train-samples")
    if length is not None and length > training.get(f"train_{unit}", length):
        # --train-tokens ends the run, but not the decay, before this length.
        params.setdefault(f"decay_{unit}", length)
    if kind == "WSD":
        params |= _wsd(given, unit)
    return {"type": kind, "params": params}


def _lengths(given: Given, unit: str) -> dict[str, Any]:
    params: dict[str, Any] = {}
    fraction = given.number("lr-warmup-fraction")
    for what in ("decay", "warmup"):
        steps, samples = given.number(f"lr-{what}-iters"), given.number(f"lr-{what}-samples")
        tokens = _in_samples(given, f"lr-{what}-tokens")
        samples = tokens if tokens is not None else samples
        if fraction is not None and what == "warmup":
            params["warmup_fraction"] = fraction
            if steps or samples:
                given.say("refused", "lr-warmup-fraction", "the warm-up has a second length, "
                          "--lr-warmup-iters, -samples or -tokens: keep one")  # fmt: skip
        elif unit == "samples" and steps:
            given.say("refused", f"lr-{what}-iters", "with a length in samples Megatron takes "
                      f"--lr-{what}-samples")  # fmt: skip
        elif unit == "steps" and samples and tokens is None:
            given.say("refused", f"lr-{what}-samples", "with a length in iterations Megatron takes "
                      f"--lr-{what}-iters")  # fmt: skip
        elif unit == "steps" and tokens:
            params[f"{what}_steps"] = _as_steps(given, tokens)
        else:
            number = steps if unit == "steps" else samples
            params |= {f"{what}_{unit}": number} if number else {}
    return params


def _as_steps(given: Given, samples: int) -> int:
    batch = given.number("global-batch-size") or given.number("micro-batch-size") or 1
    return -(-samples // batch)


def _wsd(given: Given, unit: str) -> dict[str, Any]:
    ending = "iters" if unit == "steps" else "samples"
    length = given.number(f"lr-wsd-decay-{ending}")
    if length is None:
        given.say("unknown", f"lr-wsd-decay-{ending}", "it is missing: WSD needs it")
        return {}
    style = given.text("lr-wsd-decay-style", "exponential")
    return {f"wsd_decay_{unit}": length, "wsd_decay_style": style}


def precision_keys(given: Given) -> dict[str, Any]:
    """Return the sections of the precision."""
    found: dict[str, Any] = {}
    if given.flag("bf16"):
        found["bf16"] = {"enabled": True}
    if given.flag("fp16"):
        found["fp16"] = _fp16(given)
    if given.flag("grad-reduce-in-bf16"):
        found["data_types"] = {"grad_accum_dtype": "bf16"}
    if "fp8-format" in given:
        found["fp8"] = {"enabled": True, "recipe": "tensorwise"}
        if given.text("fp8-format") != "hybrid":
            given.say("refused", "fp8-format", "only hybrid has a counterpart, as tensorwise")
        if given.text("fp8-recipe") != "tensorwise":
            text = "only tensorwise has a counterpart; Megatron's default is delayed scaling"
            given.say("refused", "fp8-recipe", text)
    return found


def _fp16(given: Given) -> dict[str, Any]:
    static = given.number("loss-scale")
    if static:
        return {"enabled": True, "loss_scale": static}
    scale = given.number("initial-loss-scale", 2.0**32)
    power = round(math.log2(scale)) if scale >= 1 else 0
    if 2.0**power != scale:
        given.say("changed", "initial-loss-scale", f"not a power of 2: 2**{power} is used")
    return {
        "enabled": True,
        "initial_scale_power": power,
        "loss_scale_window": int(given.number("loss-scale-window", 1000)),
        "hysteresis": given.number("hysteresis", 2),
        "min_loss_scale": given.number("min-loss-scale", 1.0),
    }


def zero_section(given: Given) -> dict[str, Any]:
    """Return the section `zero_optimization`; with a DeepSpeed JSON file, its stage counts."""
    found: dict[str, Any] = {}
    if given.flag("use-distributed-optimizer"):
        found["stage"] = 1
        if given.flag("overlap-param-gather"):
            found["overlap_comm"] = True
    elif given.flag("deepspeed") and "zero-stage" in given:
        found["stage"] = given.number("zero-stage", 0)
    if given.flag("optimizer-cpu-offload"):
        found["offload_optimizer"] = {"device": "cpu"}
    return found


def output_keys(given: Given) -> dict[str, Any]:
    """Return the sections of logging."""
    found: dict[str, Any] = {"steps_per_print": given.number("log-interval", 100)}
    monitor = {
        name.replace("-", "_"): True
        for name in ("log-params-norm", "log-num-zeros-in-grad")
        if given.flag(name)
    }
    if monitor:
        found["monitor"] = monitor
    if given.number("timing-log-level", 0) or given.flag("log-timers-to-tensorboard"):
        found["wall_clock_breakdown"] = True
    if given.flag("log-memory-to-tensorboard"):
        found["memory_breakdown"] = True
    if given.text("tensorboard-dir"):
        found["tensorboard"] = {"enabled": True, "output_path": given.text("tensorboard-dir")}
    names = {"project": "project", "exp-name": "name", "entity": "team", "save-dir": "dir"}
    wandb = {key: given.text(f"wandb-{name}") for name, key in names.items()}
    wandb = {key: value for key, value in wandb.items() if value}
    if "project" in wandb:
        found["wandb"] = {"enabled": True, **wandb}
    return found


def checkpoint_section(given: Given, training: dict[str, Any]) -> dict[str, Any]:
    """Return the section `checkpoint`; sets `training.resume` if the run continues itself."""
    save, load = given.text("save"), given.text("load")
    found: dict[str, Any] = {} if save is None else {"save": save}
    interval = given.number("save-interval")
    if save is not None and interval:
        found["interval"] = interval
    retain = given.number("save-retain-interval")
    if save is not None and retain:
        found |= {"keep_last": 1, "keep_every": retain}
    finetune = given.flag("finetune")
    if load is not None:
        if load == save and not finetune:
            training["resume"] = "auto"
        else:
            found["load"] = load
        given.say("note", "load", "pipemega's checkpoints are read, not Megatron's; weights come "
                  "from `pipemega hf` or `pipemega checkpoint import-deepspeed`")  # fmt: skip
    if finetune and load is not None:
        found["load_module_only"] = True
    if "pretrained-checkpoint" in given and "load" not in found:
        found |= {"load": given.text("pretrained-checkpoint"), "load_module_only": True}
    if given.flag("no-load-optim"):
        found["load_optimizer_states"] = False
    if given.flag("no-load-lr-state"):
        found["load_lr_scheduler_states"] = False
    if given.flag("async-save") and save is not None:
        found["async"] = True
    if given.flag("override-opt-param-scheduler"):
        found["override_opt_param_scheduler"] = True
    if given.flag("use-checkpoint-opt-param-scheduler"):
        found["use_checkpoint_opt_param_scheduler"] = True
    if "load-tag" in given and "load" in found:
        found["load_tag"] = given.text("load-tag")
    return found


_SPLITS = ("train", "valid", "test")
_WHOLE = ("0:1", "0:1.0", "0.0:1.0", "0.0:1")
Blend = str | list[Any]


def data_section(given: Given, folder: Path | None) -> dict[str, Any]:
    """Return the section `data`.

    Args:
        folder: where files with data paths are searched; None: nowhere.
    """
    data: dict[str, Any] = _paths(given, folder)
    if given.flag("mock-data"):
        data = {"mock": True}
    if "data_path" in data:
        data["split"] = given.text("split", "969,30,1").replace("/", ",")
    if not data and not any("data-path" in name or "split-paths" in name for name in given.values):
        given.say("changed", "", "no data: set data.data_path")
    loader = given.text("dataloader-type", "single")
    if loader == "external":
        given.say("refused", "dataloader-type", "an external loader is the training_data of "
                  "pipemega.initialize")  # fmt: skip
    elif loader == "cyclic":
        data["dataloader_type"] = loader
        if given.flag("no-data-sharding"):
            data["data_sharding"] = False
    data["num_workers"] = given.number("num-workers", 2)
    data["cache_path"] = given.text("data-cache-path")
    for name in ("eod-mask-loss", "reset-position-ids", "reset-attention-mask"):
        if given.flag(name):
            data[name.replace("-", "_")] = True
    if "reset_attention_mask" in data:
        data["reset_position_ids"] = True
    data |= _tokenizer(given, masks="eod_mask_loss" in data or "reset_position_ids" in data)
    return {key: value for key, value in data.items() if value is not None}


def _paths(given: Given, folder: Path | None) -> dict[str, Any]:
    """Return the keys of the token files."""
    found: dict[str, Any] = {}
    words = given.values.get("data-path")
    if words is None and "data-args-path" in given:
        words = _words_of_file(given, "data-args-path", folder)
    if words:
        found["data_path"] = blend(words)
    for split in _SPLITS:
        words = given.values.get(f"{split}-data-path")
        if words:
            found[f"{split}_data_path"] = blend(words)
    found |= _splits_of_file(given, folder) | _weighted_splits(given, folder)
    return found


def blend(words: Sequence[str]) -> Blend:
    """Return prefixes, or weights and prefixes, as `data.data_path` takes them."""
    texts = [shown(part) for word in words for part in word.split()]
    if len(texts) == 1:
        return texts[0]
    weights = [_number(text) for text in texts[::2]]
    if len(texts) % 2 == 0 and all(weight is not None for weight in weights):
        pairs = zip(weights, texts[1::2], strict=True)
        return [part for pair in pairs for part in pair]
    return texts


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _read(given: Given, name: str, folder: Path | None) -> str | None:
    """Return the content of the file that an argument names."""
    path = given.text(name)
    known = path is not None and not names_of_unknown(" ".join(given.values[name]))
    for base in (folder, Path.cwd()) if known else ():
        file = None if base is None else base / Path(path).expanduser()
        if file is not None and file.is_file():
            return file.read_text(encoding="utf-8", errors="replace")
    given.say("unknown", name, "the file was not found: write its data paths into the config")
    return None


def _words_of_file(given: Given, name: str, folder: Path | None) -> list[str] | None:
    text = _read(given, name, folder)
    return None if text is None else text.split()


def _splits_of_file(given: Given, folder: Path | None) -> dict[str, Any]:
    """Read the JSON file of --per-split-data-args-path: {"train": [...], "valid": [...]}."""
    name = "per-split-data-args-path"
    text = _read(given, name, folder) if name in given else None
    if text is None:
        return {}
    try:
        content = json.loads(text)
        return {f"{split}_data_path": blend([str(word) for word in content[split]])
                for split in _SPLITS if content.get(split)}  # fmt: skip
    except (ValueError, AttributeError, TypeError):
        given.say("unknown", name, 'the file must be JSON such as {"train": [...], "valid": [...]}')
        return {}


def _weighted_splits(given: Given, folder: Path | None) -> dict[str, Any]:
    """Read Megatron-DeepSpeed's `NAME: weight start:end prefix, weight start:end prefix`."""
    found: dict[str, Any] = {}
    for split in _SPLITS:
        name = f"{split}-weighted-split-paths"
        words = given.values.get(name)
        if words is None and f"{name}-path" in given:
            name = f"{name}-path"
            words = _words_of_file(given, name, folder)
        if not words:
            continue
        # Quotes and the group name ("train:") are no part of the data paths.
        text = " ".join(map(shown, words)).replace('"', " ").replace("'", " ")
        groups = [part for part in text.split() if part.endswith(":")]
        if len(groups) > 1:
            given.say("refused", name, "there is one validation set: keep one group")
            continue
        parts = text.split(":", 1)[1] if groups else text
        entries = [part.split() for part in parts.split(",") if part.strip()]
        if any(len(entry) != 3 or entry[1].count(":") != 1 for entry in entries):
            given.say("refused", name, "each entry must be `weight start:end prefix`")
            continue
        if all(entry[1] in _WHOLE for entry in entries):
            words = [word for entry in entries for word in (entry[0], entry[2])]
            found[f"{split}_data_path"] = blend(words)
        else:
            found[f"{split}_data_path"] = ", ".join(" ".join(entry) for entry in entries)
    return found


def _tokenizer(given: Given, masks: bool) -> dict[str, Any]:
    """Return the tokenizer, and the id that ends a document if masks need it without one."""
    kind = given.text("tokenizer-type", "").lower()
    model, vocabulary = given.text("tokenizer-model"), given.text("vocab-file")
    if "null" in kind or (not kind and model is None and vocabulary is None):
        size = given.number("vocab-size")
        eod = given.number("null-tokenizer-eod-id", size)
        return {"eod_id": eod} if masks and eod is not None else {}
    if "bert" in kind:
        given.say("refused", "tokenizer-type", "WordPiece comes from a folder of transformers")
    if model is not None:
        if "tiktoken" in kind and not model.endswith((".model", ".tiktoken")):
            given.say("changed", "tokenizer-model", "a tiktoken vocabulary in NVIDIA's JSON form "
                      "is not read: use a tokenizer.json, or tiktoken:NAME")  # fmt: skip
        elif "sentencepiece" not in kind and "/" in model and not model.startswith(("/", ".", "$")):
            given.say("changed", "tokenizer-model", "nothing is downloaded: give a folder with the "
                      "tokenizer's files")  # fmt: skip
        return {"tokenizer": model}
    merges = given.text("merge-file")
    if vocabulary is not None and merges is not None:
        first, second = PurePosixPath(vocabulary), PurePosixPath(merges)
        beside = first.parent == second.parent
        if not (beside and (first.name, second.name) == ("vocab.json", "merges.txt")):
            return {"tokenizer": f"{vocabulary},{merges}"}
    return {} if vocabulary is None else {"tokenizer": vocabulary}
