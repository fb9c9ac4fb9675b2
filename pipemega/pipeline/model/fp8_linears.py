"""Linear layers whose matrix products torchao computes in fp8.

    forward     y  = cast(x) cast(Wᵀ)
    backward    dx = cast(dy) cast(W)
                dW = cast(dyᵀ) cast(x)

Parameters, gradients and saved tensors stay in bf16, and so do all messages and collectives.
Casts, scales and products are torchao's, with the same arguments as in its `Float8Linear`. torchao
computes dx and dW together, and dW also for a frozen weight; here each has a function of its own,
because split backward computes dW later.

A tensor is scaled by its largest values on this rank: a shard of a weight has its own scale, as in
torchao and Megatron without a reduction of the maxima.

Source: Micikevicius et al. 2022, arXiv:2209.05433; torchao.float8.
"""

import logging
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipemega.config.sections.precision_sections import Fp8Section
from pipemega.distributed.mesh import Mesh, gather_objects
from pipemega.errors import ConfigError
from pipemega.pipeline.model.module import PipelineModule, Stage
from pipemega.pipeline.split_backward import undo_split_backward
from pipemega.tensor_parallel.layers import (
    ColumnParallelLinear,
    LinearProducts,
    RowParallelLinear,
    column_product,
)

# torch._scaled_mm multiplies matrices whose inner and last dims are multiples of it.
_MULTIPLE: Final = 16
# Set by tests: torchao emulates the products on any device, slower than bf16.
EMULATE = False


class Fp8Products(LinearProducts):
    """The products of torchao.float8.

    Args:
        recipe: `fp8.recipe`, the name of torchao's recipe.

    Raises:
        ImportError, AttributeError: torchao is missing, or another version than expected.
    """

    def __init__(self, recipe: str) -> None:
        float8, self._torchao = _import("torchao.float8"), _import("torchao.float8.float8_linear")
        config = float8.Float8LinearConfig.from_recipe_name(recipe)
        self._configs = [
            replace(config, emulate=EMULATE, pad_inner_dim=pads) for pads in (False, True)
        ]
        # torchao's function also patches the compiler for its casts.
        linear = nn.Linear(_MULTIPLE, _MULTIPLE, bias=False, device="meta")
        self._mm_configs = [
            float8.convert_to_float8_training(nn.Sequential(linear), config=c)[0].linear_mm_config
            for c in self._configs
        ]
        self._function = self._torchao.matmul_with_hp_or_float8_args
        roles = self._torchao.GemmInputRole
        self._input, self._weight, self._gradient = roles.INPUT, roles.WEIGHT, roles.GRAD_OUTPUT

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        c = self._configs[0]
        left = self._cast(x, c.cast_config_input, self._input, -1)
        return torch.mm(left, self._cast(weight.t(), c.cast_config_weight, self._weight, 0))

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        c = self._configs[0]
        left = self._cast(dy, c.cast_config_grad_output, self._gradient, -1)
        right = self._cast(weight.t(), c.cast_config_weight_for_grad_input, self._weight, -1)
        return torch.mm(left, right.t())

    def weight_gradient(self, x: Tensor, dy: Tensor) -> Tensor:
        c, pads = self._configs[0], _pads(x)
        left = self._cast(dy, c.cast_config_grad_output_for_grad_weight, self._gradient, 0, pads)
        right = self._cast(x, c.cast_config_input_for_grad_weight, self._input, 0, pads)
        return torch.mm(left.t(), right)

    def differentiable_output(self, x: Tensor, weight: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return super().differentiable_output(x, weight)
        # The compiler knows torchao's function, and fuses its casts into the graph.
        pads = _pads(x)
        y: Tensor = self._function.apply(x, weight.t(), self._mm_configs[pads], self._configs[pads])
        return y

    def _cast(self, tensor: Tensor, cast: Any, role: Any, dim: int, pads: bool = False) -> Tensor:
        """Return `tensor` in fp8, or as it is if the recipe keeps it.

        Args:
            cast, role: torchao's CastConfig and GemmInputRole.
            dim: the dim with one scale for each slice, in rowwise recipes.
            pads: pad the inner dim of the product.
        """
        if cast.scaling_type.value == "disabled":
            return tensor
        granularity = cast.scaling_granularity
        result: Tensor = self._torchao.hp_tensor_to_float8_dynamic(
            tensor,
            cast.target_dtype,
            self._mm_configs[pads],
            gemm_input_role=role,
            scaling_granularity=granularity,
            axiswise_dim=self._torchao.get_maybe_axiswise_dim(dim, granularity),
            round_scales_to_power_of_2=self._configs[0].round_scales_to_power_of_2,
        )
        return result


def _pads(x: Tensor) -> bool:
    # Not always: torchao copies a tensor that needs no padding.
    return x.shape[0] % _MULTIPLE != 0


def _import(name: str) -> Any:
    """Import a module of torchao, which warns and logs about features that are not used here."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module(name)
    finally:
        logging.disable(disabled)


def load_fp8(section: Fp8Section, device: torch.device) -> Fp8Products:
    """Return the products of `fp8.recipe` for this rank.

    Raises:
        ConfigError: the GPU has no fp8, or torchao is missing.
    """
    recipe = section.recipe
    needed = (8, 9) if recipe == "tensorwise" else (9, 0)
    way = "set fp8.enabled to false, which trains in bf16"
    if not EMULATE:
        needs = f"fp8.recipe {recipe!r} needs a CUDA GPU with compute capability "
        needs += f"{'.'.join(map(str, needed))} or newer"
        if device.type != "cuda":
            raise ConfigError(f"{needs}, and this rank runs on {device.type!r}: {way}")
        found = torch.cuda.get_device_capability(device)
        if found < needed:
            if found >= (8, 9):
                way = f"use fp8.recipe 'tensorwise', or {way}"
            name, number = torch.cuda.get_device_name(device), ".".join(map(str, found))
            raise ConfigError(f"{needs}, and {name} has {number}: {way}")
    try:
        return Fp8Products(recipe)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"fp8.enabled is true, and torchao's float8 cannot be used here ({error}): "
            f"pip install -e '.[fp8]', or {way}"
        ) from error


def enable_fp8(
    net: PipelineModule, stages: Mapping[int, Stage], products: LinearProducts | None
) -> Counter[str]:
    """Replace the products of the linears of the local stages; parameter names do not change.

    Before `enable_split_backward`, which defers the weight gradients of these products.

    Args:
        products: None: torch's, also in modules that an earlier engine has changed.

    Returns:
        the number of linears for each reason to stay in bf16, and with "" the others.
    """
    counts: Counter[str] = Counter()
    for module in {m for stage in stages.values() for m in stage.modules()}:
        _undo(module)
    if products is None:
        return counts
    for stage in stages.values():
        for position, layer in enumerate(stage.layers.values(), stage.start):
            linears = {name: m for name, m in layer.named_modules() if _is_linear(m)}
            for name, module in linears.items():
                is_last = position == len(net) - 1 and name == [*linears][-1]
                is_head = is_last or net.is_output_head(position, name)
                reason = "output head" if is_head else _reason(net, position, name, module)
                counts[reason] += 1
                if not reason:
                    _replace(module, products)
    return counts


def log_fp8(counts: Counter[str], recipe: str, mesh: Mesh, log: logging.Logger) -> None:
    """Log how many linears of the model run in fp8, and why others do not; collective."""
    total = sum(gather_objects(counts, mesh.pipeline), Counter[str]())
    others = "".join(f", {n} ({reason})" for reason, n in sorted(total.items()) if reason)
    log.log(
        logging.INFO if total[""] else logging.WARNING,
        f"fp8.recipe {recipe!r}: {total['']} of {total.total()} linears run in fp8; not in fp8: "
        f"embeddings, vocabulary-parallel heads, attention{others}",
    )


def _is_linear(module: nn.Module) -> bool:
    """Return whether `module` calls its product, or is exactly torch's linear."""
    product = getattr(module, "product", None)
    if isinstance(module, ColumnParallelLinear | RowParallelLinear):
        return product is F.linear or getattr(_adapter(module), "base", None) is F.linear
    return type(module) is nn.Linear and "forward" not in vars(module) and product is None


def _adapter(module: nn.Module) -> Any:
    """Return the product with an adapter of LoRA, around the one of the linear; else None."""
    product = vars(module).get("product")
    return product if hasattr(product, "base") else None


def _reason(net: PipelineModule, position: int, name: str, module: nn.Module) -> str:
    """Return why a linear stays in bf16; "" if it does not."""
    weight, last = module._parameters.get("weight"), name.rpartition(".")[2]
    if last in ("gate", "router"):
        return "router"
    if last in ("lora_A", "lora_B"):
        return "adapter"
    if f"{name}.weight".removeprefix(".") in net.specs[position].ties:
        return "tied weight"
    if weight is None or weight.dtype != torch.bfloat16:
        return "weight is not a bf16 parameter"
    if any(size % _MULTIPLE for size in weight.shape):
        return f"size not a multiple of {_MULTIPLE}"
    return ""


def _replace(module: nn.Module, products: LinearProducts) -> None:
    replaced: dict[str, Any] = {"product": products}
    if (adapter := _adapter(module)) is not None:
        adapter.base, replaced = products, {}
    elif isinstance(module, ColumnParallelLinear) and module.axis.size > 1:
        # It overlaps communication and computation.
        axis, slices = module.axis, module.sequence_parallel
        replaced["gathered_product"] = partial(
            column_product, axis=axis, sequence_parallel=slices, products=products
        )
    elif isinstance(module, nn.Linear):
        replaced["forward"] = MethodType(_forward, module)
    vars(module).update(replaced, _fp8=[*replaced])


def _forward(module: Any, x: Tensor) -> Tensor:
    y: Tensor = module.product(x, module.weight, module.bias)
    return y


def _undo(module: nn.Module) -> None:
    if "_fp8" not in vars(module):
        return
    undo_split_backward(module)
    for name in vars(module).pop("_fp8"):
        del vars(module)[name]
    if (adapter := _adapter(module)) is not None:
        adapter.base = F.linear
