"""Arguments of Megatron-LM become the keys that mean the same."""

from pathlib import Path
from typing import Any

import pytest

from pipemega.compat.megatron import MegatronConversion, convert, find_launches
from pipemega.config import load
from pipemega.errors import ConfigError

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 "
)
STEPS = SMALL + "--train-iters 100 --mock-data --vocab-size 128 "
SAMPLES = SMALL + "--train-samples 800 --mock-data --vocab-size 128 "


def conversion_of(
    arguments: str, folder: Path | None = None, **variables: str
) -> MegatronConversion:
    return convert(find_launches(arguments, folder, variables)[0], folder)


def config_of(arguments: str) -> dict[str, Any]:
    return conversion_of(arguments).config


def value_at(config: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        config = config.get(part, {})
    return config


def lines_of(conversion: MegatronConversion) -> list[str]:
    return [str(remark) for remark in conversion.remarks]


def test_the_defaults_of_megatron_are_written_out() -> None:
    config = config_of(STEPS)
    assert load(config).batch(1).num_microbatches == 4
    assert config == {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "seed": 1234,
        "gradient_clipping": 1.0,
        "mesh": {"tensor": 1, "pipeline": 1},
        "model": {
            "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 256,
            "seq_length": 32, "init_method_std": 0.02, "attention_dropout": 0.1,
            "hidden_dropout": 0.1, "make_vocab_size_divisible_by": 128, "vocab_size": 128,
        },
        "data": {"mock": True, "num_workers": 2},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
        },
        "scheduler": {"type": "linear", "params": {"min_lr": 0.0}},
        "training": {
            "train_steps": 100, "eval_interval": 1000, "eval_steps": 100,
            "loss_reduction": "micro_batch", "weight_decay_norms_and_biases": False,
            "on_nonfinite": {"policy": "stop"},
        },
        "steps_per_print": 100,
    }  # fmt: skip


KEYS = {
    "--swiglu": {"model.swiglu": True, "model.ffn_hidden_size": 128},
    "--squared-relu": {"model.squared_relu": True},
    "--group-query-attention": {"model.num_query_groups": 1},
    "--group-query-attention --num-query-groups 2": {"model.num_query_groups": 2},
    "--num-key-value-heads 2": {"model.num_query_groups": 2},
    "--attention-head-type multiquery": {"model.num_query_groups": 1},
    "--max-position-embeddings 64": {"model.max_position_embeddings": 64},
    "--position-embedding-type rope --rotary-base 500000 --rotary-percent 0.5": {
        "model.position_embedding_type": "rope", "model.rotary_base": 500000.0,
        "model.rotary_percent": 0.5,
    },
    "--use-rotary-position-embeddings --use-rope-scaling": {
        "model.rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        },
    },
    "--normalization RMSNorm --norm-epsilon 1e-6": {
        "model.normalization": "RMSNorm", "model.norm_epsilon": 1e-6,
    },
    "--normalization rmsnorm --layernorm-epsilon 1e-6": {
        "model.normalization": "RMSNorm", "model.norm_epsilon": 1e-6,
    },
    "--disable-bias-linear --add-qkv-bias": {
        "model.add_bias_linear": False, "model.add_qkv_bias": True,
    },
    "--qk-layernorm --embed-layernorm --untie-embeddings-and-output-weights": {
        "model.qk_layernorm": True, "model.embedding_norm": True,
        "model.untie_embeddings_and_output_weights": True,
    },
    "--pad-vocab-size-to 256": {"model.pad_vocab_size_to": 256},
    "--tokenizer-type NullTokenizer --vocab-size 127": {"model.vocab_size": 128},
    "--recompute-activations": {"model.recompute": "selective"},
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": {
        "model.recompute": "full", "model.recompute_method": {},
    },
    "--recompute-granularity full --recompute-method block --recompute-num-layers 2": {
        "model.recompute": "full", "model.recompute_method": "block",
        "model.recompute_num_layers": 2,
    },
    "--checkpoint-activations --checkpoint-num-layers 2": {
        "model.recompute": "full", "model.recompute_method": "uniform",
        "model.recompute_num_layers": 2,
    },
    "--activations-checkpoint-method block --activations-checkpoint-num-layers 3": {
        "model.recompute": "full", "model.recompute_method": "block",
        "model.recompute_num_layers": 3,
    },
    "--tensor-model-parallel-size 2 --sequence-parallel": {
        "mesh.tensor": 2, "mesh.sequence_parallel": True,
    },
    "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap": {
        "mesh.tensor": 2, "mesh.sequence_parallel": True, "mesh.overlap_sequence_parallel": True,
    },
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1": {
        "mesh.pipeline": 2, "pipeline.schedule": "interleaved", "pipeline.chunks": 2,
    },
    "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1": {
        "pipeline.partition": [0, 3, 8],
    },
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t*3L": {
        "pipeline.partition": [0, 3, 8],
    },
    "--pipeline-model-parallel-size 2 --pp-partition-method type:transformer|embedding": {
        "pipeline.partition": "type:Block|Embedding",
    },
    "--pipeline-model-parallel-size 2 --enable-zbh1-pipeline": {"pipeline.schedule": "zb-h1"},
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather": {
        "zero_optimization": {"stage": 1, "overlap_comm": True},
    },
    "--optimizer-cpu-offload": {"zero_optimization.offload_optimizer.device": "cpu"},
    "--distributed-timeout-minutes 5": {"mesh.timeout_seconds": 300},
    "--rampup-batch-size 2 2 100": {"training.rampup_batch_size": [2, 2, 100]},
    "--exit-interval 10 --exit-duration-in-mins 60": {
        "training.exit_interval": 10, "training.exit_after_minutes": 60.0,
    },
    "--kill-switch-path /tmp/stop": {"training.kill_switch_path": "/tmp/stop"},
    "--eval-iters 0": {"training.eval_interval": 0},
    "--eval-interval 50 --eval-iters 5": {"training.eval_interval": 50, "training.eval_steps": 5},
    "--calculate-per-token-loss": {"training.loss_reduction": "token"},
    "--no-check-for-nan-in-loss-and-grad": {"training.on_nonfinite": {}},
    "--deterministic-mode": {"training.deterministic_mode": True},
    "--optimizer sgd --sgd-momentum 0.5 --weight-decay 0": {
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.5, "weight_decay": 0.0}},
    },
    "--start-weight-decay 0.1 --end-weight-decay 0.1": {"optimizer.params.weight_decay": 0.1},
    "--adam-beta2 0.95 --adam-eps 1e-6": {
        "optimizer.params.betas": [0.9, 0.95], "optimizer.params.eps": 1e-6,
    },
    "--lr-decay-style cosine --lr-warmup-iters 5 --lr-decay-iters 90 --min-lr 1e-5": {
        "scheduler": {
            "type": "cosine", "params": {"min_lr": 1e-5, "decay_steps": 90, "warmup_steps": 5},
        },
    },
    "--lr-warmup-fraction 0.1 --lr-warmup-init 1e-6": {
        "scheduler.params": {"min_lr": 0.0, "warmup_init_lr": 1e-6, "warmup_fraction": 0.1},
    },
    "--lr-decay-style constant": {"scheduler": {"type": "constant", "params": {}}},
    "--lr-decay-style WSD --lr-wsd-decay-iters 20 --lr-wsd-decay-style minus_sqrt": {
        "scheduler": {
            "type": "WSD",
            "params": {"min_lr": 0.0, "wsd_decay_steps": 20, "wsd_decay_style": "minus_sqrt"},
        },
    },
    "--override-opt_param-scheduler": {"checkpoint.override_opt_param_scheduler": True},
    "--use-checkpoint-opt_param-scheduler": {
        "checkpoint.use_checkpoint_opt_param_scheduler": True,
    },
    "--fp16": {
        "fp16": {
            "enabled": True, "initial_scale_power": 32, "loss_scale_window": 1000,
            "hysteresis": 2, "min_loss_scale": 1.0,
        },
        "training.on_nonfinite": {},
    },
    "--fp16 --initial-loss-scale 65536": {"fp16.initial_scale_power": 16},
    "--bf16 --grad-reduce-in-bf16": {
        "bf16.enabled": True, "data_types.grad_accum_dtype": "bf16",
    },
    "--save runs/a --load runs/a --save-interval 10 --async-save": {
        "checkpoint": {"save": "runs/a", "interval": 10, "async": True}, "training.resume": "auto",
    },
    "--load runs/b --finetune --no-load-optim": {
        "checkpoint": {
            "load": "runs/b", "load_module_only": True, "load_optimizer_states": False,
        },
    },
    "--save runs/a --save-interval 10 --save-retain-interval 50": {
        "checkpoint.keep_every": 50, "checkpoint.keep_last": 1,
    },
    "--log-interval 5 --log-params-norm --log-num-zeros-in-grad --timing-log-level 1": {
        "steps_per_print": 5, "monitor.log_params_norm": True,
        "monitor.log_num_zeros_in_grad": True, "wall_clock_breakdown": True,
    },
    "--tensorboard-dir tb --wandb-project p --wandb-exp-name n --wandb-entity e": {
        "tensorboard": {"enabled": True, "output_path": "tb"},
        "wandb": {"enabled": True, "project": "p", "name": "n", "team": "e"},
    },
    "--dataloader-type cyclic --num-workers 0 --seed 7": {
        "data.dataloader_type": "cyclic", "data.num_workers": 0, "seed": 7,
    },
    "--reset-position-ids --reset-attention-mask --eod-mask-loss --tokenizer-type NullTokenizer": {
        "data.reset_position_ids": True, "data.reset_attention_mask": True,
        "data.eod_mask_loss": True, "data.eod_id": 128,
    },
}  # fmt: skip


@pytest.mark.parametrize("arguments", KEYS)
def test_an_argument_sets_its_keys_in_a_config_that_loads(arguments: str) -> None:
    conversion = conversion_of(STEPS + arguments)
    found = {key: value_at(conversion.config, key) for key in KEYS[arguments]}
    assert found == KEYS[arguments]
    assert conversion.is_complete, lines_of(conversion)
    load(conversion.config)


SAMPLE_KEYS = {
    "--lr-warmup-samples 80 --lr-decay-samples 700 --lr-decay-style cosine": {
        "training.train_samples": 800,
        "scheduler": {
            "type": "cosine",
            "params": {"min_lr": 0.0, "decay_samples": 700, "warmup_samples": 80},
        },
    },
    "--train-tokens 12800 --lr-decay-tokens 6400 --lr-warmup-tokens 320": {
        "training.train_samples": 400,
        "scheduler.params": {"min_lr": 0.0, "decay_samples": 200, "warmup_samples": 10},
    },
    "--train-tokens 12800": {"training.train_samples": 400, "scheduler.params.decay_samples": 800},
    "--lr-decay-style WSD --lr-wsd-decay-samples 80": {"scheduler.params.wsd_decay_samples": 80},
}  # fmt: skip


@pytest.mark.parametrize("arguments", SAMPLE_KEYS)
def test_lengths_in_samples_and_tokens_become_samples(arguments: str) -> None:
    conversion = conversion_of(SAMPLES + arguments)
    expected = SAMPLE_KEYS[arguments]
    assert {key: value_at(conversion.config, key) for key in expected} == expected
    load(conversion.config)


def test_the_line_of_a_length_in_tokens_says_how_it_becomes_samples() -> None:
    lines = lines_of(conversion_of(SAMPLES + "--train-tokens 12800"))
    assert "changed: --train-tokens 12800: divided by --seq-length 32: 400 samples" in lines


@pytest.mark.parametrize(("tokens", "steps", "decay"), [(1280, 5, 100), (10**6, 100, None)])
def test_a_run_ends_at_the_first_of_its_iterations_and_tokens(
    tokens: int, steps: int, decay: int | None
) -> None:
    config = config_of(STEPS + f"--train-tokens {tokens}")
    assert config["training"]["train_steps"] == steps
    assert config["scheduler"]["params"].get("decay_steps") == decay


FOLDERS = """
here=$(realpath $0)
a=$(dirname $here); b="$( cd "$(dirname "${BASH_SOURCE[0]}")" >/dev/null 2>&1 && pwd )"
c=$(cd `dirname $0`/..; pwd); d=$(dirname "$(readlink -f "$0")"); e=${0%/*}; f=$(pwd)
python pretrain_gpt.py --num-layers 4 --hidden-size 64 --micro-batch-size 2 \\
    --data-path $a/1 $b/2 $c/3 $d/4 $e/5 $f/6 $(find data -name x)/7
"""


def test_paths_beside_the_script_are_known() -> None:
    variables = {"0": "/home/me/run/train.sh", "PWD": "/home/me"}
    conversion = convert(find_launches(FOLDERS, None, variables)[0])
    paths = ["/home/me/run/1", "/home/me/run/2", "/home/me/3", "/home/me/run/4", "/home/me/run/5"]
    assert conversion.config["data"]["data_path"] == [
        *paths, "/home/me/6", "$(find data -name x)/7",
    ]  # fmt: skip
    conversion = convert(find_launches(FOLDERS, None, {})[0])
    assert conversion.config["data"]["data_path"][1] == (
        '$(cd "$(dirname "${BASH_SOURCE[0]}")" >/dev/null 2>&1 && pwd)/2'
    )


def test_a_long_value_without_a_result_is_shown_as_in_the_script() -> None:
    script = "python t.py --num-layers 2 --hidden-size 8 --micro-batch-size $(ssh a 'nproc' | wc)"
    lines = lines_of(convert(find_launches(script, None, {})[0]))
    assert any("--micro-batch-size $(ssh a 'nproc' | wc): $(ssh" in line for line in lines), lines


DATA = {
    "--data-path a": {"data_path": "a", "split": "969,30,1"},
    "--data-path 0.3 a 0.7 b --split 99,1": {
        "data_path": [0.3, "a", 0.7, "b"], "split": "99,1",
    },
    '--data-path "0.3 a 0.7 b"': {"data_path": [0.3, "a", 0.7, "b"], "split": "969,30,1"},
    "--data-path a b --data-cache-path c": {
        "data_path": ["a", "b"], "split": "969,30,1", "cache_path": "c",
    },
    "--train-data-path 1 a 3 b --valid-data-path c --test-data-path d": {
        "train_data_path": [1.0, "a", 3.0, "b"], "valid_data_path": "c", "test_data_path": "d",
    },
    "--data-path a --vocab-file t/vocab.json --merge-file t/merges.txt": {
        "data_path": "a", "split": "969,30,1", "tokenizer": "t/vocab.json",
    },
    "--data-path a --vocab-file t/gpt2-vocab.json --merge-file u/gpt2-merges.txt": {
        "data_path": "a", "split": "969,30,1",
        "tokenizer": "t/gpt2-vocab.json,u/gpt2-merges.txt",
    },
    "--data-path a --tokenizer-type SentencePieceTokenizer --tokenizer-model t.model": {
        "data_path": "a", "split": "969,30,1", "tokenizer": "t.model",
    },
    '--train-weighted-split-paths "train: 0.3 0:1 a, 0.7 0:1 b"': {
        "train_data_path": [0.3, "a", 0.7, "b"],
    },
    '--train-weighted-split-paths "train: 0.3 0:0.9 a, 0.7 0:1 b"': {
        "train_data_path": "0.3 0:0.9 a, 0.7 0:1 b",
    },
    "--data-path a --dataloader-type cyclic --no-data-sharding": {
        "data_path": "a", "split": "969,30,1", "dataloader_type": "cyclic", "data_sharding": False,
    },
    "--data-path a --no-data-sharding": {"data_path": "a", "split": "969,30,1"},
}  # fmt: skip


@pytest.mark.parametrize("arguments", DATA)
def test_the_data_arguments_set_the_section_data(arguments: str) -> None:
    conversion = conversion_of(f"{SMALL} --train-iters 10 {arguments}")
    assert conversion.config["data"] == {**DATA[arguments], "num_workers": 2}
    load(conversion.config)


def test_files_with_data_paths_are_read(tmp_path: Path) -> None:
    (tmp_path / "args.txt").write_text("0.3 a\n0.7 b\n")
    (tmp_path / "splits.json").write_text('{"train": ["1", "a"], "valid": ["b"]}')
    (tmp_path / "split.txt").write_text('"train: 0.3 0:1 a, 0.7 0:1 b"')

    def data(arguments: str) -> Any:
        return conversion_of(SMALL + arguments, tmp_path).config["data"]

    assert data("--data-args-path args.txt")["data_path"] == [0.3, "a", 0.7, "b"]
    found = data("--per-split-data-args-path splits.json")
    assert (found["train_data_path"], found["valid_data_path"]) == ([1.0, "a"], "b")
    found = data("--train-weighted-split-paths-path split.txt")
    assert found["train_data_path"] == [0.3, "a", 0.7, "b"]


REFUSED = {
    "--context-parallel-size 2": "refused: --context-parallel-size 2: there is no context",
    "--bf16 --fp8-format hybrid": (
        "refused: --fp8-recipe: only tensorwise has a counterpart; Megatron's default is delayed"
    ),
    "--bf16 --fp8-format e4m3 --fp8-recipe tensorwise": (
        "refused: --fp8-format e4m3: only hybrid has a counterpart, as tensorwise"
    ),
    "--fp8-e4m3": "refused: --fp8-e4m3: use --fp8-format hybrid --fp8-recipe tensorwise, or --bf16",
    "--position-embedding-type alibi": (
        "refused: --position-embedding-type alibi: positions must be learned_absolute or rope; a "
        "BLOOM config with model.type 'hf' has ALiBi"
    ),
    "--optimizer lion": "refused: --optimizer lion: only adam and sgd have a counterpart",
    "--dataloader-type external": "refused: --dataloader-type external: an external loader",
    "--micro-batch-size two": "refused: --micro-batch-size two: the value must be an integer",
    "--lr-decay-samples 5": (
        "refused: --lr-decay-samples 5: with a length in iterations Megatron takes --lr-decay-iters"
    ),
    "--lr-warmup-fraction 0.1 --lr-warmup-iters 5": (
        "refused: --lr-warmup-fraction 0.1: the warm-up has a second length, --lr-warmup-iters, "
        "-samples or -tokens: keep one"
    ),
    "--lr $RATE": "unknown: --lr $RATE: $RATE has no value in the script: give --var RATE=VALUE",
    "--deepspeed_config ds.json": (
        "unknown: --deepspeed_config ds.json: the file was not found: its keys are not in this"
    ),
    '--train-weighted-split-paths "a: 1 0.9 x"': (
        "refused: --train-weighted-split-paths a: 1 0.9 x: each entry must be `weight start:end"
    ),
}  # fmt: skip


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_would_train_something_else_is_refused_by_name(arguments: str) -> None:
    conversion = conversion_of(STEPS + arguments)
    assert any(line.startswith(REFUSED[arguments]) for line in lines_of(conversion)), lines_of(
        conversion
    )
    assert not conversion.is_complete


def test_fp8_with_current_scaling_has_keys() -> None:
    found = conversion_of(STEPS + "--bf16 --fp8-format hybrid --fp8-recipe tensorwise")
    assert found.is_complete
    assert found.config["fp8"] == {"enabled": True, "recipe": "tensorwise"}


LINES = {
    "--transformer-impl local": "ignored: --transformer-impl local: the same numbers in another",
    "--context-parallel-size 1": (
        "ignored: --context-parallel-size 1: this value is what pipemega does"
    ),
    "--fp32-residual-connection": "changed: --fp32-residual-connection: residuals have the dtype",
    "--hiden-size 3": (
        "ignored: --hiden-size 3: not an argument of Megatron-LM or its forks; did you mean "
        "'hidden-size'?"
    ),
    "--save $OUT/x": (
        "note: without a value in the script, and left as text: $OUT; --var NAME=VALUE sets a"
    ),
    "--bf16 leftover": "note: words that belong to no argument were left out: leftover",
}  # fmt: skip


@pytest.mark.parametrize("arguments", LINES)
def test_every_argument_without_a_counterpart_has_a_line(arguments: str) -> None:
    conversion = conversion_of(STEPS + arguments)
    assert any(line.startswith(LINES[arguments]) for line in lines_of(conversion)), lines_of(
        conversion
    )
    assert conversion.is_complete


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"fp16": {"enabled": true}, "zero_optimization": {"stage": 1}}',
         ["changed: --bf16: the precision of the DeepSpeed file is used: fp16",
          "changed: --zero-stage 2: zero_optimization.stage of the DeepSpeed file is used: 1"]),
        ('{"fp16": {"enabled": false}}',
         ["changed: --bf16: the precision of the DeepSpeed file is used: fp32"]),
        ('{"bfloat16": {"enabled": true}, "zero_optimization": {"stage": 2}}', []),
        ('{"steps_per_print": 3}', []),
    ],
)  # fmt: skip
def test_a_precision_or_stage_that_the_deepspeed_file_replaces_has_a_line(
    tmp_path: Path, content: str, expected: list[str]
) -> None:
    (tmp_path / "ds.json").write_text(content, encoding="utf-8")
    arguments = STEPS + "--bf16 --zero-stage 2 --deepspeed --deepspeed_config ds.json"
    lines = lines_of(conversion_of(arguments, tmp_path))
    assert [line for line in lines if line.startswith("changed")] == expected


def test_the_keys_of_the_deepspeed_file_count_before_arguments() -> None:
    script = f"""
    BS=8
    cat <<EOT > ds.json
    {{"train_batch_size": $BS, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5,
      "zero_optimization": {{"stage": 1}}, "bf16": {{"enabled": true}},
      "optimizer": {{"type": "Adam"}}}}
    EOT
    deepspeed --num_gpus 2 pretrain_gpt.py {STEPS} --clip-grad 1.0 --fp16 --deepspeed \\
        --deepspeed_config ds.json --zero-stage 0
    """.replace("\n    ", "\n")
    conversion = conversion_of(script)
    config = conversion.config
    assert (config["gradient_clipping"], config["bf16"]) == (0.5, {"enabled": True})
    assert config["zero_optimization"] == {"stage": 1}
    assert "fp16" not in config
    assert config["optimizer"]["type"] == "AdamW"
    assert conversion.is_complete
    assert "changed: --clip-grad 1.0: gradient_clipping of the DeepSpeed file is used: 0.5" in (
        lines_of(conversion)
    )
    load(config)


LAUNCHERS = {
    "torchrun --nproc_per_node=4 --nnodes 2 pretrain_gpt.py ARGS": (4, 2),
    "python -m torch.distributed.launch --nproc_per_node 8 pretrain_gpt.py ARGS": (8, None),
    "srun -n 16 bash -c 'python -u /x/pretrain_gpt.py ARGS'": (None, None),
    "N=2\nCMD=\"pretrain_gpt.py ARGS\"\ndeepspeed --num_gpus $N $CMD 2>&1 | tee log": (2, None),
    "OPTS='ARGS'\nrun() { torchrun pretrain_gpt.py $OPTS; }\nrun": (None, None),
    "if true; then\n eval \"torchrun pretrain_gpt.py ARGS\"\nfi": (None, None),
    "MODEL_OPTIONS='ARGS'": (None, None),
    "ARGS": (None, None),
}  # fmt: skip


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_training_is_found_behind_every_launcher(launcher: str) -> None:
    (launch,) = find_launches(launcher.replace("ARGS", STEPS), None, {})
    assert launch.ranks == LAUNCHERS[launcher]
    assert convert(launch).config == config_of(STEPS)


def test_the_yaml_of_megatrons_own_tests_is_read() -> None:
    lines = [word for word in STEPS.split("--") if word.strip()]
    text = "ENV_VARS:\n  A: 1\nMODEL_ARGS:\n  # sizes\n"
    for line in lines:
        name, _, value = line.strip().partition(" ")
        text += f"  --{name}: {value or 'true'}\n"
    (launch,) = find_launches(text + "  --swiglu: false\nTEST_TYPE: regular\n", None, {})
    assert convert(launch).config == config_of(STEPS)


def test_each_training_of_a_sweep_is_found() -> None:
    launches = find_launches(f"for LR in 1 2; do\npretrain_gpt.py {STEPS} --lr $LR\ndone", None, {})
    assert [convert(one).config["optimizer"]["params"]["lr"] for one in launches] == [1.0, 2.0]


def test_a_script_without_a_training_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no training of Megatron was found"):
        find_launches("echo --num-layers 3\npython train.py --lr 1", None, {})


def test_the_training_of_another_model_is_refused() -> None:
    conversion = conversion_of(f"torchrun pretrain_bert.py {STEPS}")
    assert lines_of(conversion)[0].startswith("refused: pretrain_bert.py does not train a GPT")
