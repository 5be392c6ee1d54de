"""Point-to-point exchange of tensors between the ranks of a mesh, with gradients and a byte count."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from .._tools.arguments import describe

Shape = tuple[int, ...]
sent_bytes = 0  # by this process, since it was last set to 0


class Group(NamedTuple):
    """This rank's place in a one-dimensional mesh, or among all ranks of a mesh."""

    process_group: Any  # None: the default group, for messages between two ranks
    rank: int
    size: int
    members: tuple[int, ...] = ()  # ranks of the default group, if it is used


def group_of(mesh: DeviceMesh, dim: int = 0) -> Group:
    return Group(mesh.get_group(dim), mesh.get_local_rank(dim), mesh.size(dim))


def groups_of(mesh: DeviceMesh) -> list[Group]:
    """Returns the group of each dim of a mesh, which may have one or two."""
    mesh = check_mesh(mesh)
    if mesh.ndim > 2:
        check_mesh(mesh, 2)
    return [group_of(mesh, dim) for dim in range(mesh.ndim)]


def flat_group(mesh: DeviceMesh) -> Group:
    """Returns the group of all ranks of a mesh, in the order of the flattened mesh."""
    if mesh.ndim == 1:
        return group_of(mesh)
    members = tuple(mesh.mesh.flatten().tolist())
    return Group(None, members.index(dist.get_rank()), len(members), members)


def check_mesh(mesh: object, dims: int | None = None) -> DeviceMesh:
    if not isinstance(mesh, DeviceMesh):
        hint = "as from torch.distributed.device_mesh.init_device_mesh"
        raise TypeError(f"mesh: expected a DeviceMesh, {hint}, got {describe(mesh)}")
    if dims is not None and mesh.ndim != dims:
        names = mesh.mesh_dim_names
        hint = f"; select a dim, as in mesh[{names[-1]!r}]" if names and dims < mesh.ndim else ""
        raise ValueError(f"mesh: expected {dims} dim(s), got {mesh.ndim} with names {names}{hint}")
    return mesh


class Transfer(NamedTuple):
    """Sends and receives under way. The tensors stay alive until `wait` returns."""

    group: Group
    works: list[Any]
    peers: list[str]
    tensors: list[Tensor]

    def wait(self) -> None:
        for work, peer in zip(self.works, self.peers, strict=True):
            with named(self.group, peer):
                work.wait()


@contextlib.contextmanager
def named(group: Group, peer: str) -> Iterator[None]:
    """Adds the ranks to the error of a peer that died or did not answer within the time-out."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"regard.distributed: rank {group.rank} of {group.size} waited for {peer}, which failed, stalled "
            f"beyond the process group's time-out, or left the call: {error}"
        ) from error


def start(
    group: Group, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
) -> Transfer:
    """Starts sending tensors to ranks and receiving into tensors. Skips empty tensors.

    Tensors must be contiguous. Messages between two ranks arrive in the order of the lists.
    """
    global sent_bytes
    operations, peers, tensors = [], [], []
    for call, verb, items in ((dist.isend, "to receive from it", sends), (dist.irecv, "to send", receives)):
        for peer, x in items:
            if x.numel() == 0:
                continue
            to = {"peer": group.members[peer]} if group.members else {"group_peer": peer}
            operations.append(dist.P2POp(call, x, group=group.process_group, **to))
            peers.append(f"rank {peer} {verb}")
            tensors.append(x)
            sent_bytes += x.nbytes if call is dist.isend else 0
    if not operations:
        return Transfer(group, [], [], [])
    with named(group, " or ".join(sorted(set(peers)))):
        works = dist.batch_isend_irecv(operations)
    if len(works) != len(peers):  # a backend that coalesces returns one handle
        peers = [", ".join(peers)] * len(works)
    return Transfer(group, works, peers, tensors)


def swap(group: Group, tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
    """Sends tensors[j] to rank j and returns what each rank sent, of the given shapes."""
    like = tensors[group.rank]
    received = [like.new_empty(shape) for shape in shapes]
    received[group.rank] = like
    others = [j for j in range(group.size) if j != group.rank]
    sends = [(j, tensors[j].contiguous()) for j in others]
    start(group, sends, [(j, received[j]) for j in others]).wait()
    return received


class Swap(Function):
    """`swap`, with gradients: the gradient of each tensor comes back from the rank that it went to."""

    @staticmethod
    def forward(ctx: Any, group: Group, shapes: Sequence[Shape], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.shapes = group, [tuple(x.shape) for x in tensors]
        received = swap(group, tensors, shapes)
        received[group.rank] = received[group.rank].clone()  # an input must not be returned as it is
        return tuple(received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *swapped(ctx.group, grads, ctx.shapes)


def swapped(group: Group, tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
    """Differentiable `swap`."""
    if not torch.is_grad_enabled():
        return tuple(swap(group, tensors, shapes))
    return Swap.apply(group, shapes, *tensors)  # type: ignore[no-any-return,no-untyped-call]


def refuse_second_derivatives(method: str) -> None:
    """Raises if autograd records a backward pass, which would leave out the exchanges of the ranks."""
    if torch.is_grad_enabled():
        raise NotImplementedError(f"create_graph: expected False with {method}, got True")


def send(group: Group, peer: int, x: Tensor) -> Transfer:
    """Starts sending a tensor to a rank."""
    return start(group, [(peer, x.contiguous())], [])


def receive(group: Group, peer: int, like: Tensor) -> Tensor:
    """Waits for a tensor from a rank, of the shape and dtype of `like`."""
    x = torch.empty_like(like, memory_format=torch.contiguous_format)
    start(group, [], [(peer, x)]).wait()
    return x


def wait(transfers: Sequence[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()


def all_headers(group: Group, header: Sequence[int]) -> list[list[int]]:
    """Returns the integers that each rank passes, in the order of the ranks."""
    if group.size == 1:
        return [list(header)]
    device = torch.device("cpu")
    if dist.get_backend(group.process_group) == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    mine = torch.tensor(header, dtype=torch.int64, device=device)
    every = [torch.empty_like(mine) for _ in range(group.size)]
    with named(group, "the other ranks to begin the same call"):
        dist.all_gather(every, mine, group=group.process_group)
    return [x.tolist() for x in every]
