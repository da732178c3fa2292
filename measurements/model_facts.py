"""Print a section `[models.NAME]` of migbatch.toml for a network of images, as PyTorch counts and measures it.

    python measurements/model_facts.py torchvision:resnet50 224
    python measurements/model_facts.py timm:mixer_b16_224 224 --name mixer-b16
    python measurements/model_facts.py mymodels.unet:build 512

The network is built with random weights on the GPU: by a function of torchvision.models (also of its detection and
segmentation) or timm, or by a function of a module of one's own that returns a torch.nn.Module. Its parameters and
operations are counted, its kernels are counted in one pass (0.7 of them: some only change the layout of data), and its
live activations are what the peak of PyTorch's allocator grows by for each item of a batch, in 32-bit inference. What
training keeps are the tensors that autograd saves for each item (not of torchvision's networks for detection). Needs
torch and a GPU, and torchvision or timm for their networks.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils.flop_counter import FlopCounterMode

LAUNCHED: Final = 0.7
"""Launches that a pass waits for, relative to the kernels that ran."""
BATCHES: Final = (1, 8)


def built(target: str) -> torch.nn.Module:
    """Return the network that `target` names, in evaluation mode on the GPU."""
    module, _, name = target.partition(":")
    with torch.device("cuda"):
        if module == "timm":
            network: Any = importlib.import_module("timm").create_model(name, pretrained=False)
        elif module == "torchvision":
            network = _of_torchvision(name)
        else:
            network = getattr(importlib.import_module(module), name)()
    evaluated: torch.nn.Module = network.eval()
    return evaluated


def _of_torchvision(name: str) -> Any:
    models = importlib.import_module("torchvision.models")
    for part in (models.detection, models.segmentation):
        if hasattr(part, name):
            return getattr(part, name)(weights=None, weights_backbone=None)
    return getattr(models, name)(weights=None)


def inputs(network: torch.nn.Module, batch: int, side: int) -> Any:
    """Return a batch of random square images; a list of them for torchvision's networks for detection."""
    images = torch.rand(batch, 3, side, side, device="cuda")
    return list(images) if ".detection." in type(network).__module__ else images


def operations(step: Callable[[], object]) -> int:
    """Return the operations of matrix products and convolutions of one call."""
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


def kernels(step: Callable[[], object]) -> int:
    """Return the number of kernels that one call runs on the GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def working_mib(network: torch.nn.Module, batch: int, side: int) -> float:
    """Return the MiB that a pass over a batch needs beside the weights and the input."""
    images = inputs(network, batch, side)
    network(images)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    network(images)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def saved_mib(network: torch.nn.Module, images: Any) -> float:
    """Return the MiB of the tensors that a forward pass saves for the backward pass, beside the weights."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*network.parameters(), *network.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage  # kept, so that no other one gets its address
        return tensor

    network.train()
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        network(images)
    network.eval()
    return sum(storage.nbytes() for storage in saved.values()) / 2**20


def kept_mib(network: torch.nn.Module, side: int) -> float:
    """Return the MiB that training keeps for one item; 0 if it is not counted."""
    two, four = inputs(network, 2, side), inputs(network, 4, side)
    if isinstance(two, list):  # a network for detection trains with boxes
        return 0.0
    return (saved_mib(network, four) - saved_mib(network, two)) / 2


def main() -> None:
    """Measure the network of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="torchvision:NAME, timm:NAME or MODULE:FUNCTION")
    parser.add_argument("side", type=int, help="side of the square image, in pixels")
    parser.add_argument("--name", help="name of the model in hints [default: the function's]")
    asked = parser.parse_args()
    network = built(asked.target)
    one = inputs(network, 1, asked.side)
    few, many = BATCHES
    kept = kept_mib(network, asked.side)  # first: what a network caches in inference mode cannot be trained with
    with torch.inference_mode():
        network(one)
        live = (working_mib(network, many, asked.side) - working_mib(network, few, asked.side)) / (many - few)
        flops, launches = operations(lambda: network(one)), kernels(lambda: network(one))
    name = asked.name or asked.target.partition(":")[2].replace("_", "-")
    lines = (
        f'[models."{name}"]',
        'unit = "px"',
        f"reference = {asked.side}",
        f"params_m = {sum(weight.numel() for weight in network.parameters()) / 1e6:.1f}",
        f"gflops = {flops / 1e9:.2f}",
        f"kernels = {max(round(LAUNCHED * launches), 1)}",
        f"activation_mib = {max(live, 0.1):.1f}",
        f"kept_mib = {kept:.1f}",
        "weight_bytes = 4",
    )
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
