"""Find the training in a launch script, a list of arguments, or a YAML file of arguments."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from pipemega.compat.megatron.arguments import ARGUMENTS, normalized
from pipemega.compat.megatron.shell_run import ScriptRun
from pipemega.compat.megatron.shell_words import Scope, shown
from pipemega.errors import ConfigError

# A command with two of these starts a training of Megatron.
_TYPICAL = {
    "num-layers", "hidden-size", "num-attention-heads", "seq-length", "micro-batch-size",
    "global-batch-size", "tensor-model-parallel-size", "encoder-num-layers", "train-iters",
    "train-samples", "max-position-embeddings", "lr", "use-checkpoint-args",
}  # fmt: skip
_NOT_TRAINING = re.compile(
    r"preprocess|convert|evaluat|generat|inference|server|checkpoint|merge|mmlu|export|quantize"
    r"|prune|extract|tasks/|tools/|main\.py"
)
_OTHER_MODELS = re.compile(
    r"(?i)bert|t5|ict|retro|vision|vlm|mimo|llava|multimodal|mamba|hybrid|clip|vit|dino|biencoder"
    r"|realm|_vl|omni|diffusion|rl"
)
# Programs that train on examples, not on a stream of tokens.
FINE_TUNES = re.compile(r"(?i)fine_?tun|sft|instruct|alpaca|rlhf|dpo|grpo")
_RANKS = ("nproc-per-node", "num-gpus")
_NODES = ("nnodes", "num-nodes")
_SLURM = re.compile(r"^#SBATCH\s+(?:--nodes[= ]|-N\s*)(\d+)", re.MULTILINE)
_YAML_LINE = re.compile(r"^\s+(--[\w\-]+|--?[\w\-]+):\s*(.*?)\s*$")


class TrainingLaunch(NamedTuple):
    """One training that a script starts.

    Args:
        line: the line in the script; 0 if the arguments were given without a script.
        program: the script of Megatron, such as pretrain_gpt.py; "" if it is unknown.
        words: the arguments of the program.
        ranks: processes per node and nodes, as far as they are known.
        files: texts that the script writes, by name.
        notes: what could not be followed in the script.
    """

    line: int
    program: str
    words: tuple[str, ...]
    ranks: tuple[int | None, int | None] = (None, None)
    files: Mapping[str, str] = {}
    notes: tuple[str, ...] = ()

    @property
    def trains_other_model(self) -> bool:
        """Whether the program trains something else than a GPT."""
        return bool(_OTHER_MODELS.search(PurePosixPath(self.program).name))


def find_launches(
    source: str,
    folder: Path | None,
    variables: Mapping[str, str],
    parameters: Sequence[str] = (),
) -> list[TrainingLaunch]:
    """Return the trainings that `source` starts, in its order.

    Args:
        source: arguments, or the text of a script or of a YAML file with MODEL_ARGS.
        folder: the folder of the script; see `ScriptRun`.
        variables, parameters: as in `ScriptRun`.

    Raises:
        ConfigError: there is none, or the script cannot be parsed.
    """
    if re.search(r"^MODEL_ARGS:", source, re.MULTILINE):
        source = " ".join(_words_of_yaml(source))
    if source.lstrip().startswith("-") or re.match(r"(\s*#[^\n]*\n)+\s*--", source):
        scope = Scope(dict(variables), list(parameters))
        return [TrainingLaunch(0, "pretrain_gpt.py", tuple(_words_of_arguments(source, scope)))]
    slurm = _SLURM.search(source)
    nodes = dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), slurm[1]) if slurm else {}
    run = ScriptRun(folder, {**nodes, **variables}, parameters)
    run.script(source)
    launches = [
        TrainingLaunch(line, *_program(words), _ranks(words), run.files, tuple(run.notes))
        for line, words in run.commands
        if _starts_training(words)
    ]
    launches = [found for found in launches if not _NOT_TRAINING.search(found.program)] or launches
    if not launches:
        launches = list(_launch_of_variables(run))
    if not launches:
        raise ConfigError(
            "no training of Megatron was found: no command has arguments such as --num-layers and "
            "--micro-batch-size; give the arguments themselves"
        )
    return launches


def _words_of_arguments(text: str, scope: Scope) -> Iterator[str]:
    """Yield the words of arguments without a command: | and ; are ordinary characters there."""
    # One argument on each line needs no backslash.
    lines = [line.rstrip().removesuffix("\\") for line in text.splitlines()]
    try:
        words = shlex.split("\n".join(lines), comments=True)
    except ValueError as error:
        raise ConfigError(f"the arguments cannot be read: {error}") from None
    for word in words:
        yield scope.text('"' + word.replace('"', '\\"') + '"') if "$" in word else word


def _starts_training(words: Sequence[str]) -> bool:
    names = {normalized(word.partition("=")[0]) for word in words if word.startswith("--")}
    return len(names & _TYPICAL) >= 2


def _program(words: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Divide a command into the program and its arguments, without the launcher."""
    first = next(
        (at for at, word in enumerate(words)
         if word.startswith("--") and normalized(word.partition("=")[0]) in ARGUMENTS),
        len(words),
    )  # fmt: skip
    scripts = [at for at, word in enumerate(words) if word.split("\x02")[-1].endswith(".py")]
    before = [at for at in scripts if at < first] or scripts[:1]
    if before:
        return shown(words[before[-1]]), tuple(words[before[-1] + 1 :])
    modules = [at for at, word in enumerate(words[:first]) if word == "-m"]
    name = shown(words[modules[-1] + 1]) if modules else ""
    return name, tuple(words[first:])


def _ranks(words: Sequence[str]) -> tuple[int | None, int | None]:
    found: dict[str, int] = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        value = value if equals else following
        if word.startswith("-") and value.isdigit():
            found.setdefault(normalized(option), int(value))
    processes = next((found[name] for name in _RANKS if name in found), None)
    return processes, next((found[name] for name in _NODES if name in found), None)


def _launch_of_variables(run: ScriptRun) -> Iterator[TrainingLaunch]:
    """Yield a launch from the variables of a file that only sets them, for other scripts."""
    words: list[str] = []
    for value in run.scope.variables.values():
        texts = value.split() if isinstance(value, str) else value
        if any(word.startswith("--") and normalized(word.partition("=")[0]) in ARGUMENTS
               for word in texts):  # fmt: skip
            words += texts
    if _starts_training(words):
        note = "the script starts no training: the arguments in its variables were read"
        yield TrainingLaunch(0, "", tuple(words), files=run.files, notes=(*run.notes, note))


def _words_of_yaml(text: str) -> Iterator[str]:
    """Yield the words of `MODEL_ARGS:`, lines `--name: value`."""
    block = re.split(r"^MODEL_ARGS:[^\n]*$", text, maxsplit=1, flags=re.MULTILINE)[1]
    for line in block.splitlines():
        if line.strip() and not line[0].isspace():
            return
        found = _YAML_LINE.match(line)
        if found is None:
            continue
        value = re.sub(r"\s+#.*$", "", found[2])
        if value.lower() == "false":
            continue
        yield found[1]
        if value.startswith("[") and value.endswith("]"):
            yield from (shlex.quote(part.strip(" '\"")) for part in value[1:-1].split(","))
        elif value.lower() != "true":
            yield value if value[:1] in "'\"" else f'"{value}"' if " " in value else value
