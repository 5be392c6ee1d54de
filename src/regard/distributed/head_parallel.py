"""`HeadParallel`: tensor parallelism of attention and feed-forward layers."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from .._api.projection import Linear
from ._divisions import Division
from ._group import Group, check_mesh, group_of
from ._share import DividedDropout, LayerShare, SummedLinear, load_local, prepare, save_whole
from ._ulysses import head_shares

OUTPUTS = ("out", "down")  # the output projections, which are divided by columns
LAYERS = "Attention, LatentAttention, FeedForward, GatedFeedForward, or a module that contains one"


class HeadParallel(ParallelStyle):
    """Tensor parallelism: each rank holds some heads of a layer, or some of its hidden channels.

    A style for `torch.distributed.tensor.parallel.parallelize_module`. It applies to each
    `nn.Attention`, `nn.LatentAttention`, `nn.FeedForward` and `nn.GatedFeedForward` in a module, in
    place. Ranks take whole groups of query heads that share a key head. With fewer key heads than
    ranks, each key head is on several ranks. Inputs and outputs of a layer are the whole tensors, the
    same on all ranks. Numbers of heads need not be divisible.

    Parameters stay plain tensors: the rows of this rank for the projections, all others whole, with
    the same gradient on all ranks. `state_dict` returns whole parameters, as in a single process, and
    `load_state_dict` takes them. All ranks must call both.

    Dropout draws the pattern of a single process, if all ranks have called `torch.manual_seed` with
    the same number.

    Example:
        >>> mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        >>> model = parallelize_module(model, mesh["tp"], regard.distributed.HeadParallel())
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = group_of(check_mesh(device_mesh, 1))
        layers: list[Any] = [layer for layer in module.modules() if hasattr(layer, "_share")]
        if not layers:
            raise TypeError(f"module: expected {LAYERS}, got {type(module).__name__}")
        # All layers are checked before the first one is changed.
        shares = [_share_of(layer, group) for layer in layers]
        for layer, share in zip(layers, shares, strict=True):
            if self.src_data_rank is not None:
                _broadcast(layer, group, self.src_data_rank)
            _divide(layer, share)
        return module


def _share_of(layer: Any, group: Group) -> LayerShare:
    """Returns this rank's share in a layer. Raises if the layer cannot be divided."""
    name = type(layer).__name__
    if layer._share is not None:
        raise ValueError(f"module: expected a layer without HeadParallel, got {name} that already has it")
    outputs = [output for output in OUTPUTS if hasattr(layer, output)]
    if type(getattr(layer, outputs[0])) not in (nn.Linear, Linear):
        got = type(getattr(layer, outputs[0])).__name__
        raise TypeError(f"module: expected {name} with nn.Linear as {outputs[0]}, got {got}")
    units, key_units = layer._units
    shares = head_shares(units, key_units, group.size)
    divisions, undivided = {}, []
    rows_of_ranks = [layer._rows(*share) for share in shares]
    for name, _ in layer.named_parameters():
        child, _, kind = name.partition(".")
        if child in rows_of_ranks[0] and (child not in OUTPUTS or kind == "weight"):
            runs = tuple(tuple(rows[child]) for rows in rows_of_ranks)
            divisions[name] = Division(int(child in OUTPUTS), runs)
        elif child not in OUTPUTS and child != "position":
            undivided.append(name)
    return LayerShare(group, *shares[group.rank], units, divisions, tuple(undivided))


def _broadcast(layer: nn.Module, group: Group, source: int) -> None:
    for parameter in layer.parameters():
        if not parameter.is_meta and group.size > 1:
            dist.broadcast(parameter.detach(), group=group.process_group, group_src=source)


def _divide(layer: Any, share: LayerShare) -> None:
    """Replaces the parameters of a layer by this rank's rows and registers the hooks."""
    for name, division in share.divisions.items():
        owner, _, leaf = name.rpartition(".")
        module, whole = layer.get_submodule(owner), layer.get_parameter(name)
        local = division.local(whole.detach(), share.group.rank)
        setattr(module, leaf, nn.Parameter(local, whole.requires_grad))
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
    for name, (begin, end) in (("heads", share.units), ("kv_heads", share.key_units)):
        if hasattr(layer, name):
            setattr(layer, name, end - begin)
    layer._share = share
    _become(layer, OUTPUTS, SummedLinear)
    _become(layer, ("dropout",), DividedDropout)
    layer.register_forward_pre_hook(prepare, with_kwargs=True)
    layer.register_state_dict_post_hook(save_whole)
    layer.register_load_state_dict_pre_hook(load_local)


def _become(layer: Any, names: tuple[str, ...], subclass: type[nn.Module]) -> None:
    """Changes the class of a child of the layer to `subclass`, so that its hooks stay."""
    for name in names:
        child = getattr(layer, name, None)
        if isinstance(child, nn.Module):
            child.__class__, child.share = subclass, layer._share
