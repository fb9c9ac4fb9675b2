"""Selection of fused kernels and detection of NVIDIA apex."""

import sys
import textwrap

import pytest
import torch
from torch import nn

from pipemega.config.sections.optimizer_section import AdamParams
from pipemega.distributed.mesh import Mesh
from pipemega.kernels import Kernels
from pipemega.optimizer import ModelParams, PlainMasterParams, build_optimizer
from pipemega.optimizer.param_groups import pack, unpack

FAKE_ADAM = """
    import torch

    class FusedAdam(torch.optim.Optimizer):
        '''Counts its steps per group, as in NVIDIA apex.'''

        def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8,
                     adam_w_mode=True, weight_decay=0.0, amsgrad=False):
            assert adam_w_mode
            super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

        def step(self):
            for group in self.param_groups:
                group["step"] = group.get("step", 0) + 1
                for p in group["params"]:
                    self.state[p]["exp_avg"] = p.grad.clone()
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install modules with the given sources; remove them after the test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)

    def install(**sources):
        for path, source in sources.items():
            file = tmp_path / (path.replace("__", "/") + ".py")
            file.parent.mkdir(exist_ok=True)
            file.write_text(textwrap.dedent(source))

    yield install
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("apex", "amp_C"):
            del sys.modules[name]


def install_nvidia_apex(installed):
    installed(
        amp_C="",
        apex__optimizers=FAKE_ADAM,
        apex__normalization="""
            from torch import nn
            class FusedLayerNorm(nn.LayerNorm): pass
            class FusedRMSNorm(nn.RMSNorm): pass
        """,
    )


def test_an_apex_package_that_is_not_nvidias_is_never_imported(installed):
    installed(apex__optimizers="raise AssertionError('imported')")
    kernels = Kernels.detect("cuda")
    assert kernels.adam is None
    assert kernels.layer_norm is nn.LayerNorm
    assert "NVIDIA apex not found" in kernels.description
    assert not any(name.split(".")[0] == "apex" for name in sys.modules)


def test_nvidias_apex_is_detected_by_its_extension_module_and_used(installed):
    install_nvidia_apex(installed)
    kernels = Kernels.detect("cuda")
    assert kernels.adam.__name__ == "FusedAdam"
    assert kernels.layer_norm.__name__ == "FusedLayerNorm"
    assert kernels.rms_norm.__name__ == "FusedRMSNorm"
    assert kernels.description.startswith("kernels: NVIDIA apex")
    assert Kernels.detect("cpu").adam is None


def test_an_incomplete_apex_is_not_used_and_the_reason_is_reported(installed):
    installed(amp_C="", apex__optimizers="")
    kernels = Kernels.detect("cuda")
    assert kernels.adam is None
    assert "NVIDIA apex is installed but incomplete" in kernels.description


def test_adam_of_apex_is_used_if_it_supports_the_options_and_dtypes(installed):
    install_nvidia_apex(installed)
    kernels = Kernels.detect("cuda")

    def kind(params, dtype=torch.float32, name="AdamW"):
        groups = [{"params": [nn.Parameter(torch.zeros(2, dtype=dtype))]}]
        return type(build_optimizer(name, AdamParams(**params), groups, kernels=kernels)).__name__

    assert kind({"lr": 0.1}) == "FusedAdam"
    assert kind({"torch_adam": True}) == "AdamW"
    assert kind({"amsgrad": True}) == "AdamW"
    assert kind({}, dtype=torch.float64) == "AdamW"


def masters(weight):
    return PlainMasterParams(ModelParams([("w", weight)]), Mesh.single())


def test_step_counts_of_apex_per_group_are_saved_per_parameter_and_loaded_again(installed):
    install_nvidia_apex(installed)
    kernels = Kernels.detect("cuda")

    def build():
        weight = nn.Parameter(torch.ones(2))
        weight.grad = torch.full((2,), 3.0)
        optimizer = build_optimizer("Adam", AdamParams(), [{"params": [weight]}], kernels=kernels)
        return weight, optimizer

    weight, optimizer = build()
    optimizer.step()
    optimizer.step()
    packed = pack(optimizer, masters(weight))
    assert packed["w"]["step"] == torch.tensor(2.0)
    other, fresh = build()
    unpack(fresh, masters(other), packed)
    assert fresh.param_groups[0]["step"] == 2
    assert torch.equal(fresh.state[other]["exp_avg"], torch.full((2,), 3.0))

    # The same state under torch's Adam, as on a machine without apex.
    torch_adam = torch.optim.AdamW([{"params": [weight]}], fused=True)
    unpack(torch_adam, masters(weight), {"w": {**packed["w"], "exp_avg_sq": torch.ones(2)}})
    weight.grad = torch.full((2,), 3.0)
    torch_adam.step()
    assert torch_adam.state[weight]["step"] == torch.tensor(3.0)


@pytest.mark.parametrize(
    ("optimizer", "device", "expected"),
    [
        (torch.optim.AdamW, "cpu", {"fused": True}),
        (torch.optim.AdamW, "cuda", {"fused": True}),
        (torch.optim.Adagrad, "cpu", {"fused": True}),
        (torch.optim.Adagrad, "cuda", {"foreach": True}),
        (torch.optim.RMSprop, "cpu", {}),
        (torch.optim.RMSprop, "cuda", {"foreach": True}),
    ],
)
def test_torch_optimizers_use_fused_or_foreach_where_it_is_faster(optimizer, device, expected):
    kernels = Kernels(torch.device(device))
    assert kernels.optimizer_arguments(optimizer, [torch.zeros(1)]) == expected
