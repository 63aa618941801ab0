"""The mean of tensors over replicas, compressed if the plan says so.

none              an all-reduce of float32, or of float64 for float64 tensors
bf16 ... int4     each replica owns a part: it receives the coded terms of all others, adds them up in float32, and
                  sends the coded mean to all; 2(N-1)/N of the coded bytes leave a replica
topk:F            each replica sends the largest fraction F of its numbers, with their indices, to all
powersgd:R        each matrix M is sent as M Q and M^T P of R columns, which are summed (Vogels et al. 2019, "PowerSGD:
                  Practical Low-Rank Gradient Compression for Distributed Optimization")

The compression error is added to what the replica exchanges next (error feedback; Seide et al. 2014, "1-Bit Stochastic
Gradient Descent"; Karimireddy et al. 2019). The owner of a mean keeps the error of coding it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from plait.comm.protocol import Comm, Work
from plait.cost.wire_bytes import as_matrix, is_smaller, num_kept, num_owned
from plait.engine.local_sgd.tensor_compression import decode, encode, first_factor
from plait.errors import PlanError
from plait.plan.compression import Compression

NamedTensors = Mapping[str, Tensor]


class Pending:
    """An exchange in flight."""

    def __init__(self, rounds: Sequence[Callable[[], None]], result: Callable[[], dict[str, Tensor]]) -> None:
        self._rounds = list(rounds)
        self._result = result

    @classmethod
    def completed(cls, means: dict[str, Tensor]) -> Pending:
        """An exchange that has ended with these means."""
        return cls([], lambda: means)

    @property
    def num_rounds(self) -> int:
        """The number of communication rounds that are still to be started."""
        return len(self._rounds)

    def advance(self) -> None:
        """Start the next round of the exchange, if there is one."""
        if self._rounds:
            self._rounds.pop(0)()

    def wait(self) -> dict[str, Tensor]:
        """Finish the exchange. Returns the means by name."""
        while self._rounds:
            self.advance()
        return self._result()


class MeanExchange:
    """Exchanges along one axis.

    exempt   glob patterns of names that are exchanged uncompressed
    errors   compression errors by name, float32 of the tensors' shapes
    factors  the right factor Q of each matrix by name, PowerSGD's warm start
    """

    def __init__(self, comm: Comm, compression: Compression, exempt: Sequence[str] = ()) -> None:
        self._comm = comm
        self._compression = compression
        self._exempt = tuple(exempt)
        self.errors: dict[str, Tensor] = {}
        self.factors: dict[str, Tensor] = {}

    def start(self, tensors: NamedTensors) -> Pending:
        """Begin to exchange floating-point tensors. All replicas must give the same names; means have
        `dtype_of_mean`.

        Raises PlanError for an integer tensor, which has no mean.
        """
        for name, tensor in tensors.items():
            if not tensor.is_floating_point():
                raise PlanError(
                    f"{name} is {str(tensor.dtype).removeprefix('torch.')}: only tensors of floating point numbers have"
                    " a mean, and can be compressed; leave it out of what replicas exchange"
                )
        plain = {name: t for name, t in tensors.items() if self._is_plain(name, t)}
        rest = {name: t for name, t in tensors.items() if name not in plain}
        kind = self._compression.kind
        parts = [_all_reduced(self._comm, plain)] if plain else []
        if rest:
            corrected = {name: self._corrected(name, tensor) for name, tensor in rest.items()}
            start = {"topk": self._top_k, "powersgd": self._power_sgd}.get(kind, self._coded)
            parts.append(start(corrected))
        return _combined(parts)

    def mean(self, tensors: NamedTensors) -> dict[str, Tensor]:
        """Exchange the tensors; returns their means by name."""
        return self.start(tensors).wait()

    def _is_plain(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor is exchanged uncompressed: it is exempt, or too small for the compressor to make it
        smaller."""
        exempt = any(fnmatch.fnmatchcase(name, pattern) for pattern in self._exempt)
        return exempt or not is_smaller(tensor.shape, self._compression, self._comm.size)

    def _corrected(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor plus its earlier compression error, in new contiguous memory."""
        error = self.errors.get(name)
        wide = tensor.detach().float()
        return wide.clone(memory_format=torch.contiguous_format) if error is None else (wide + error).contiguous()

    def _keep_error(self, name: str, error: Tensor) -> None:
        """Keep the compression error for the next exchange. The error of an overflow, whose step is skipped, is
        dropped."""
        self.errors[name] = error.where(error.isfinite().all(), 0)

    def _coded(self, tensors: dict[str, Tensor]) -> Pending:
        comm, kind, size = self._comm, self._compression.kind, self._comm.size
        owned = {name: num_owned(tensor.numel(), size) for name, tensor in tensors.items()}
        num = sum(owned.values())
        rows = torch.zeros(size, num, dtype=torch.float32, device=next(iter(tensors.values())).device)
        for part, tensor in zip(rows.split(list(owned.values()), 1), tensors.values(), strict=True):
            part.copy_(functional.pad(tensor.reshape(-1), (0, part.numel() - tensor.numel())).view_as(part))
        coded = encode(rows, kind)
        error = rows - decode(coded, kind, num)
        works: list[Work] = [comm.all_to_all(coded)]

        def apart(joined: Tensor) -> dict[str, Tensor]:
            parts = zip(joined.split(list(owned.values()), 1), tensors.items(), strict=True)
            return {n: part.reshape(-1)[: like.numel()].view(like.shape) for part, (n, like) in parts}

        def add_up() -> None:
            own = decode(works.pop().wait(), kind, num).sum(0) / size
            again = encode(own, kind)
            error[comm.rank] += size * (own - decode(again, kind, num))
            works.append(comm.all_gather(again))

        def result() -> dict[str, Tensor]:
            for name, left in apart(error).items():
                self._keep_error(name, left)
            return apart(decode(works.pop().wait(), kind, num))

        return Pending([add_up], result)

    def _top_k(self, tensors: dict[str, Tensor]) -> Pending:
        places = {
            name: tensor.reshape(-1).abs().topk(num_kept(tensor.numel(), self._compression), sorted=False).indices
            for name, tensor in tensors.items()
        }
        values = torch.cat([tensor.reshape(-1)[places[name]] for name, tensor in tensors.items()])
        numbers = torch.cat([at.to(torch.int32) for at in places.values()])
        work = self._comm.all_gather(torch.cat([numbers.view(torch.uint8), values.view(torch.uint8)]))

        def result() -> dict[str, Tensor]:
            means = {name: torch.zeros_like(tensor).reshape(-1) for name, tensor in tensors.items()}
            counts = [at.numel() for at in places.values()]
            for row in work.wait():
                at, terms = row.contiguous().chunk(2)
                split = zip(at.view(torch.int32).split(counts), terms.view(torch.float32).split(counts), strict=True)
                for mean, (here, term) in zip(means.values(), split, strict=True):
                    mean.index_add_(0, here.long(), term)
            for name, tensor in tensors.items():
                tensor.view(-1)[places[name]] = 0
                self._keep_error(name, tensor)
            return {name: mean.div_(self._comm.size).view(tensors[name].shape) for name, mean in means.items()}

        return Pending([], result)

    def _power_sgd(self, tensors: dict[str, Tensor]) -> Pending:
        matrices = {name: tensor.reshape(as_matrix(tensor.shape)) for name, tensor in tensors.items()}
        for name, matrix in matrices.items():
            if name not in self.factors:
                self.factors[name] = first_factor(name, matrix.shape[1], self._compression.rank).to(matrix)
        left = {name: matrix @ self.factors[name] for name, matrix in matrices.items()}
        pending = [_all_reduced(self._comm, left)]

        def second() -> None:
            for name, mean in pending.pop().wait().items():
                left[name] = torch.linalg.qr(mean).Q
            right = {name: matrix.T @ left[name] for name, matrix in matrices.items()}
            pending.append(_all_reduced(self._comm, right))

        def result() -> dict[str, Tensor]:
            found = {}
            for name, factor in pending.pop().wait().items():
                self.factors[name] = factor
                mean = left[name] @ factor.T
                self._keep_error(name, (matrices[name] - mean).view(tensors[name].shape))
                found[name] = mean.view(tensors[name].shape)
            return found

        return Pending([second], result)


def _all_reduced(comm: Comm, tensors: NamedTensors) -> Pending:
    like = dict(tensors)
    work = comm.all_reduce(_flat(tensors), consume=True)
    return Pending([], lambda: _split(work.wait() / comm.size, like))


def _combined(parts: Sequence[Pending]) -> Pending:
    def advance() -> None:
        for part in parts:
            part.advance()

    def result() -> dict[str, Tensor]:
        return {name: mean for part in parts for name, mean in part.wait().items()}

    return Pending([advance] * max((part.num_rounds for part in parts), default=0), result)


def dtype_of_mean(dtype: torch.dtype) -> torch.dtype:
    """The dtype of uncompressed sums of this dtype: float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)


def _flat(tensors: NamedTensors) -> Tensor:
    """The tensors as one flat tensor, in the widest of their dtypes."""
    return torch.cat([tensor.detach().to(dtype_of_mean(tensor.dtype)).reshape(-1) for tensor in tensors.values()])


def _split(flat: Tensor, like: NamedTensors) -> dict[str, Tensor]:
    """The inverse of `_flat`: views of the flat tensor in the shapes of `like`."""
    found, at = {}, 0
    for name, tensor in like.items():
        found[name] = flat[at : at + tensor.numel()].view(tensor.shape)
        at += tensor.numel()
    return found
