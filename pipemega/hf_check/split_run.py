"""One rank of the check: the split model computes the gradients of one step.

The reference: HF's model, unsplit, in one process, in float64.

Runs a function on several gloo ranks, which are processes on this machine.

Random micro-batches for a model of transformers: plain, padded and packed.

plain     tokens, or images, or audio; some labels do not count
padded    the last tokens are padding, which attention_mask marks
packed    two documents in each sequence, which position_ids mark

Keeps float64: models of transformers cast norms, softmax, positions and losses to float32.
"""

import inspect
import logging
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.forkserver import ensure_running
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pipemega.engine.initialize import initialize
from pipemega.errors import ConfigError, PeerError, PipelineError, PipemegaError
from pipemega.hf.hf_module import from_pretrained
from pipemega.hf.tasks import FLOAT_INPUT_SHAPES, special_model, task_of
from pipemega.hf.weights.safetensors_files import is_transposed
from pipemega.pipeline.microbatch_loss import WeightedLoss

# Imported once, by the process from which the ranks are forked.
_PRELOAD = (
    "torch._dynamo",
    "torch.distributed",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "pipemega.hf_check.split_run",
)
_TIMEOUT = 300.0


class RunRanks(Protocol):
    """Runs `function(*args)` on ranks 0 to world_size - 1; returns the results by rank."""

    def __call__(
        self, world_size: int, function: Callable[..., Any], *args: Any
    ) -> Sequence[Any]: ...


def prepare_ranks() -> None:
    """Start the process that imports the modules of the ranks; do not wait for it."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(_PRELOAD))
    ensure_running()


def launch_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function(*args)` in `world_size` processes that form one world.

    Raises:
        PipemegaError: the error of a rank.
    """
    context = multiprocessing.get_context("forkserver")
    # Plain pickle copies tensors; multiprocessing would share their memory.
    call = pickle.dumps((function, args))
    ranks = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world_size):
                here, there = context.Pipe()
                world = (rank, world_size, os.path.join(folder, "store"))
                process = context.Process(target=_run_rank, args=(there, world, call))
                process.start()
                there.close()
                ranks.append((process, here))
            return _collect([pipe for _, pipe in ranks])
        finally:
            for process, pipe in ranks:
                pipe.close()
                process.kill()
                process.join()


def _collect(pipes: Sequence[Any]) -> list[Any]:
    results: dict[int, Any] = {}
    errors: list[BaseException] = []
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = wait(list(waiting), _TIMEOUT)
        if not ready:
            raise PipelineError(f"ranks {sorted(waiting.values())} hang: no result in {_TIMEOUT} s")
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                failed, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, ConnectionError):
                failed, value = True, PipelineError(f"the process of rank {rank} has died")
            if failed:
                errors.append(value)
            else:
                results[rank] = value
    if errors:
        # The other ranks report that a peer has failed.
        raise next((e for e in errors if not isinstance(e, PeerError)), errors[0])
    return [results[rank] for rank in range(len(pipes))]


def _run_rank(pipe: Connection, world: tuple[int, int, str], call: bytes) -> None:
    rank, world_size, store = world
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # The lines of an ordinary run are not of interest here.
    logging.disable(logging.WARNING)
    try:
        function, args = pickle.loads(call)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=_TIMEOUT / 2),
        )
        answer = (False, function(*args))
    except PipemegaError as error:
        answer = (True, type(error)(str(error)))
    except BaseException:
        answer = (True, ConfigError(f"rank {rank} failed:\n{traceback.format_exc()}"))
    pipe.send_bytes(pickle.dumps(answer))
    with suppress(EOFError):
        # Until the parent has all results, the connections stay open for the other ranks.
        pipe.recv_bytes()


# Even, so that sequence parallelism can shard them.
LENGTH, DECODER_LENGTH, PADDING, FIRST_DOCUMENT = 12, 8, 3, 7
IGNORED = -100


@dataclass(frozen=True)
class RandomBatch:
    """The samples of one step.

    Args:
        kind: "plain", "padded" or "packed".
        inputs: HF's name -> tensor; the first dim of each tensor is the sample.
        labels: each label is at the position that predicts it; -100 does not count.
    """

    kind: str
    inputs: dict[str, Tensor]
    labels: Tensor

    def microbatches(self, number: int) -> list[tuple[dict[str, Tensor], Tensor]]:
        """Return `number` micro-batches of equal size, in order."""
        size = len(self.labels) // number
        cuts = [slice(m * size, (m + 1) * size) for m in range(number)]
        return [({k: v[cut] for k, v in self.inputs.items()}, self.labels[cut]) for cut in cuts]

    @property
    def documents(self) -> list[tuple[dict[str, Tensor], Tensor]]:
        """Return batches for the unsplit model: of packed samples, each document for itself."""
        if self.kind != "packed":
            return [(self.inputs, self.labels)]
        cuts = (slice(0, FIRST_DOCUMENT), slice(FIRST_DOCUMENT, None))
        return [
            ({name: value[:, cut] for name, value in self.inputs.items()}, self.labels[:, cut])
            for cut in cuts
        ]


def random_batches(model: Any, number: int) -> list[RandomBatch]:
    """Return the batches of the kinds that the model has inputs for, `number` samples each."""
    accepted = set(inspect.signature(model.forward).parameters)
    task = task_of(model.config, type(model))
    generator = torch.Generator().manual_seed(3)
    plain = _plain(model, number, task, generator)
    batches = [plain]
    if task == "image-classification" or model.main_input_name != "input_ids":
        return batches
    if "attention_mask" in accepted:
        batches.append(_padded(plain, is_decoder=task == "causal-lm"))
    if "position_ids" in accepted and task == "causal-lm":
        batches.append(_packed(plain))
    return batches


def _plain(model: Any, number: int, task: str, generator: torch.Generator) -> RandomBatch:
    config = model.config
    main = _main_input(model, number, generator)
    if task == "image-classification":
        labels = torch.randint(config.num_labels, (number,), generator=generator)
        return RandomBatch("plain", main, labels)
    if task == "mask-generation":
        return _masks(main, generator)
    length = DECODER_LENGTH if task == "seq2seq" else LENGTH
    tokens = _tokens(config, number, length + 1, generator)
    labels = tokens[:, 1:].clone()
    if task == "seq2seq":
        main["decoder_input_ids"] = tokens[:, :-1]
    elif task == "causal-lm":
        main["input_ids"] = tokens[:, :-1]
    elif task == "image-text-to-text":
        places = special_model(type(model).__name__).probe(config)["input_ids"][:, :-2]
        # The text has no places of an image.
        tokens[tokens == config.image_token_index] = 0
        main["input_ids"] = torch.cat([places.expand(number, -1), tokens[:, :-1]], 1)
        if config.is_encoder_decoder:
            main["decoder_input_ids"] = tokens[:, :-1]
        else:
            labels = F.pad(labels, (places.shape[1], 0), value=IGNORED)
    if "classification" in task:
        labels = torch.randint(config.num_labels, labels.shape, generator=generator)
    if task == "sequence-classification":
        return RandomBatch("plain", main, labels[:, 0].contiguous())
    # The number of labels differs between samples: the mean of the means is not the mean.
    for sample in range(number):
        labels[sample, : sample % 4] = IGNORED
    return RandomBatch("plain", main, labels)


def _main_input(model: Any, number: int, generator: torch.Generator) -> dict[str, Tensor]:
    config, name = model.config, model.main_input_name
    if name not in FLOAT_INPUT_SHAPES:
        return {"input_ids": _tokens(config, number, LENGTH, generator)}
    shape = (number, *FLOAT_INPUT_SHAPES[name](config))
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64)}


def _masks(main: dict[str, Tensor], generator: torch.Generator) -> RandomBatch:
    """Return images with two points each; a label of a point says whether it is inside."""
    pixels = main["pixel_values"]
    number, size = len(pixels), pixels.shape[-1]
    points = torch.rand(number, 2, 1, 2, generator=generator, dtype=torch.float64) * size
    inside = torch.randint(2, (number, 2, 1), generator=generator)
    masks = torch.randint(2, (number, 2, size // 2, size // 2), generator=generator)
    return RandomBatch("plain", {**main, "input_points": points, "input_labels": inside}, masks)


def _tokens(config: Any, number: int, length: int, generator: torch.Generator) -> Tensor:
    # Not the first ids, which are often special tokens.
    vocabulary = config.get_text_config().vocab_size
    return torch.randint(min(5, vocabulary // 2), vocabulary, (number, length), generator=generator)


def _padded(plain: RandomBatch, is_decoder: bool) -> RandomBatch:
    mask = torch.ones_like(plain.inputs["input_ids"])
    mask[:, -PADDING:] = 0
    labels = plain.labels
    if labels.shape == mask.shape:
        labels = labels.masked_fill(mask == 0, IGNORED)
        if is_decoder:
            # The last token before the padding predicts padding.
            labels = labels.clone()
            labels[:, -PADDING - 1] = IGNORED
    return RandomBatch("padded", {**plain.inputs, "attention_mask": mask}, labels)


def _packed(plain: RandomBatch) -> RandomBatch:
    tokens = plain.inputs["input_ids"]
    first = torch.arange(FIRST_DOCUMENT)
    positions = torch.cat([first, torch.arange(tokens.shape[1] - FIRST_DOCUMENT)])
    labels = plain.labels.clone()
    # The last token of a document predicts nothing.
    labels[:, FIRST_DOCUMENT - 1] = IGNORED
    inputs = {**plain.inputs, "position_ids": positions.expand_as(tokens).contiguous()}
    return RandomBatch("packed", inputs, labels)


def token_loss(logits: Tensor, labels: Tensor) -> WeightedLoss:
    """Return the sum over the labels that count, and their number."""
    losses = F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return WeightedLoss(losses, (labels != IGNORED).sum())


_CASTS = ("to", "type")


class KeepFloat64(TorchFunctionMode):
    """Within this mode, no operation casts a float64 tensor to float32.

    In float64 the results of a model that is split over ranks and of the unsplit model differ
    only by the order of sums, about 1e-15. A cast to float32 in between would raise this to 1e-7,
    which hides errors.

        with KeepFloat64():
            loss = model(input_ids=ids, labels=labels).loss
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not (args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "float":
            return args[0]
        if name in _CASTS:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@contextmanager
def float64_by_default() -> Iterator[None]:
    """Let forwards of transformers, which create tensors of the default dtype, create float64."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


@dataclass(frozen=True)
class Gradients:
    """The result of one step.

    Args:
        loss: mean over the labels that count.
        by_name: HF's name of each parameter -> gradient; zeros for a parameter without one.
    """

    loss: float
    by_name: dict[str, Tensor]


def random_model(config: Any, model_class: Any) -> Any:
    """Return HF's model in float64 with random weights, without dropout.

    Every parameter and every saved buffer is random: values such as 1 for a norm or 0 for a bias
    would hide errors.
    """
    build = getattr(model_class, "from_config", None) or model_class._from_config
    torch.manual_seed(0)
    model = build(config, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    saved = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for parameter in model.parameters():
            mean = 0.5 if parameter.dim() == 1 else 0.0
            parameter.normal_(mean, 0.2, generator=generator)
        for name, buffer in model.named_buffers():
            if name in saved and buffer.is_floating_point():
                buffer.add_(torch.rand(buffer.shape, generator=generator, dtype=torch.float64) / 8)
            elif name in saved and buffer.dim() > 1 and not bool(buffer.any()):
                # A table that is 0 until it is loaded: the experts of a token, in hash routing.
                buffer.copy_(torch.randint(2, buffer.shape, generator=generator))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def reference_gradients(model: Any, batch: RandomBatch) -> Gradients:
    """Return loss and gradients of one step."""
    model.zero_grad(set_to_none=True)
    special = special_model(type(model).__name__)
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    with float64_by_default(), KeepFloat64():
        for inputs, labels in batch.documents:
            output = special.output(forward(model, inputs))
            loss = (special.loss or token_loss)(output, labels)
            total, count = total + loss.sum, count + float(loss.weight)
    mean = total / count
    mean.backward()  # type: ignore[no-untyped-call]
    # A tied parameter has the name under which transformers saves it.
    tied = model.all_tied_weights_keys
    by_name = {
        tied.get(name, name): torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }
    return Gradients(mean.item(), by_name)


def forward(model: Any, inputs: dict[str, Tensor]) -> Any:
    """Call HF's model, without a key-value cache."""
    inputs = {**inputs, **special_model(type(model).__name__).constants}
    if "use_cache" in inspect.signature(model.forward).parameters:
        return model(**inputs, use_cache=False)
    return model(**inputs)


# Parameters after the step are `before - RATE * gradient`. A large rate keeps the digits of a
# small gradient.
RATE = 1024.0


@dataclass(frozen=True)
class SplitSettings:
    """How the model is split, and run.

    Args:
        folder: the folder of the model; when a rank runs, the folder of the small model.
        task: see `pipemega.from_pretrained`.
        expert: `mesh.expert`, and data ranks.
        attn_implementation: name of the attention implementation; None: transformers chooses.
        num_microbatches: of a step, on each data rank.
    """

    folder: str = ""
    task: str | None = None
    pipeline: int = 2
    tensor: int = 1
    expert: int = 1
    schedule: str = "1f1b"
    sequence_parallel: bool = False
    attn_implementation: str | None = None
    num_microbatches: int = 4
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.pipeline * self.tensor * self.expert

    def config(self, samples: int) -> dict[str, Any]:
        """Return the config of a run of one step with `samples` samples."""
        return {
            "train_batch_size": samples,
            "train_micro_batch_size_per_gpu": samples // (self.num_microbatches * self.expert),
            "gradient_clipping": 0.0,
            "mesh": {
                "pipeline": self.pipeline,
                "tensor": self.tensor,
                "data": self.expert,
                "expert": self.expert,
                "device": "cpu",
                "sequence_parallel": self.sequence_parallel,
            },
            "pipeline": {"schedule": self.schedule, "partition": "uniform"},
            "training": {"loss_reduction": "token"},
            "optimizer": {"type": "SGD", "params": {"lr": RATE}},
            **self.extra,
        }


def split_gradients(split: SplitSettings, batches: list[RandomBatch]) -> list[Gradients | str]:
    """Return the gradients for each batch, or the message with which it was refused; collective."""
    torch.set_num_threads(1)
    with float64_by_default():
        return [_gradients_or_message(split, batch) for batch in batches]


def _gradients_or_message(split: SplitSettings, batch: RandomBatch) -> Gradients | str:
    try:
        return _gradients(split, batch)
    except ConfigError as error:
        if not error.on_every_rank:
            raise
        return str(error)


def _gradients(split: SplitSettings, batch: RandomBatch) -> Gradients:
    net = from_pretrained(
        split.folder,
        task=split.task,
        sequence_parallel=split.sequence_parallel,
        attn_implementation=split.attn_implementation,
    )
    if batch.kind == "packed" and not net.follows_positions:
        raise ConfigError(
            "the position_ids restart within a sample (packed documents), but the layers of this "
            "family do not keep documents separate",
            on_every_rank=True,
        )
    engine, *_ = initialize(net, split.config(len(batch.labels)))
    try:
        before = engine.parameter_state()
        with KeepFloat64():
            parts = batch.microbatches(split.num_microbatches * split.expert)
            loss = engine.train_batch(iter(parts[engine.mesh.data.rank :: split.expert]))
        after = engine.parameter_state()
    finally:
        engine.close()
    transposed = {
        f"layers.{position}.{name}"
        for position, layer in enumerate(net.meta_layers)
        for name, parameter in layer.named_parameters()
        if is_transposed(parameter)
    }
    by_name: dict[str, Tensor] = {}
    for name, value in before.items():
        gradient = (value - after[name]) / RATE
        by_name[net.hf_name(name)] = gradient.T if name in transposed else gradient
    return Gradients(loss, by_name)
