"""The processes of one run, as `torchrun` starts them, and what they tell each other.

Every process holds the same plan and trains on its own share of each step's rows. All of them call every method here
in the same order; a run of one process calls the same methods, and nothing is sent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from blockdraft.errors import BlockdraftError
from blockdraft.runtime import process_place

T = TypeVar("T")
_BUCKET = 64 * 2**20  # bytes of gradients that are summed together
_LOST = ("connection", "closed by peer", "peer", "timed out", "timeout", "broken pipe")


@dataclass(frozen=True, slots=True)
class Processes:
    """This process among the `count` of a run.

    Attributes:
        rank: its number; the process of rank 0 writes, logs and speaks for all.
        device: where tensors are that travel.
    """

    rank: int = 0
    count: int = 1
    device: str = "cpu"

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This process's items, dealt in turn."""
        return items[self.rank :: self.count]

    def wait(self) -> None:
        """Wait until every process is here."""
        if self.count > 1:
            dist.all_reduce(torch.zeros(1, device=self.device))

    @contextlib.contextmanager
    def first_before_others(self) -> Iterator[None]:
        """The first process runs the block, and the others after it."""
        if not self.first:
            self.wait()
        yield
        if self.first:
            self.wait()

    def any(self, answer: bool) -> bool:
        """Whether any process says yes."""
        return answer if self.count == 1 else bool(self._sum(torch.tensor([float(answer)], dtype=torch.float64))[0])

    def summed(self, values: T) -> T:
        """Sums over all processes of a number, tensor, tuple or dataclass of those; None stays None.

        One message, in float64: counts stay exact up to 2^53. A whole number stays whole.
        """
        if self.count == 1:
            return values
        leaves = list(_leaves(values))
        flat = torch.cat([torch.as_tensor(leaf).detach().to("cpu", torch.float64).flatten() for leaf in leaves])
        parts = iter(self._sum(flat).split([torch.as_tensor(leaf).numel() for leaf in leaves]))
        return _rebuilt(values, parts)

    def _sum(self, flat: Tensor) -> Tensor:
        # An accelerator without float64 would round; its counts go by float32 then, as its losses do.
        moved = flat.to(self.device, torch.float32 if self.device.startswith("mps") else torch.float64)
        dist.all_reduce(moved)
        return moved.to("cpu", torch.float64)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up gradients over all processes; where a process has none, it adds zeros."""
        if self.count == 1:
            return
        for bucket in _buckets(list(parameters)):
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket])
            dist.all_reduce(flat)
            for parameter, summed in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = summed.view_as(parameter)

    def take_over(self, module: nn.Module) -> None:
        """Take the first process's weights and buffers: another kind of CPU may have rounded otherwise."""
        if self.count > 1:
            for tensor in module.state_dict().values():
                dist.broadcast(tensor, src=0)

    def in_turns(self, tensors: Sequence[Tensor], work: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
        """Each tensor after `work`, which keeps its shape; every process works on its share, and gives it away.

        Args:
            tensors: the same in all processes.
        """
        for start in range(0, len(tensors), self.count):
            group = tensors[start : start + self.count]
            own = work(group[self.rank]).to(group[self.rank].dtype) if self.rank < len(group) else None
            for owner, tensor in enumerate(group):
                done = own if owner == self.rank and own is not None else torch.empty_like(tensor)
                if self.count > 1:
                    done = done.contiguous()
                    dist.broadcast(done, src=owner)
                yield done


ALONE = Processes()


def whole(tensor: Tensor) -> Tensor:
    """A tensor as it is, or gathered from its shards; all processes of the run must ask together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextlib.contextmanager
def joined(device: str) -> Iterator[Processes]:
    """The processes of this run, connected while the block runs.

    Raises:
        BlockdraftError: another process ended before this one was done.
    """
    rank, count = process_place()
    if count == 1:
        yield ALONE
        return
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    dist.init_process_group(rank=rank, world_size=count)
    try:
        yield Processes(rank, count, device)
    except BlockdraftError as error:
        traceback.clear_frames(error.__traceback__)
        raise
    except RuntimeError as error:
        if not any(word in str(error).lower() for word in _LOST):
            raise
        raise BlockdraftError("another process of this run ended; its own line says why") from error
    finally:
        # A divided draft holds on to the connection, whose threads must have ended before the interpreter does.
        gc.collect()
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def _buckets(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if bucket and (size >= _BUCKET or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
    if bucket:
        yield bucket


def _leaves(values: Any) -> Iterator[Any]:
    if values is None:
        return
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        for field in dataclasses.fields(values):
            yield from _leaves(getattr(values, field.name))
    elif isinstance(values, tuple):
        for value in values:
            yield from _leaves(value)
    else:
        yield values


def _rebuilt(values: Any, parts: Iterator[Tensor]) -> Any:
    if values is None:
        return None
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        changed = {f.name: _rebuilt(getattr(values, f.name), parts) for f in dataclasses.fields(values)}
        return dataclasses.replace(values, **changed)
    if isinstance(values, tuple):
        return tuple(_rebuilt(value, parts) for value in values)
    part = next(parts)
    if isinstance(values, Tensor):
        return part.view(values.shape).to(values)
    return type(values)(part.item())
