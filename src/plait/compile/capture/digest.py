"""A short text that distinguishes captured steps, which ranks compare before they run their graphs together."""

from __future__ import annotations

import hashlib
import re
import zlib
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from plait.compile.capture.capture import Captured

_MOST_BYTES = 1 << 20  # bytes read of each constant
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of a function or an object, which differs between processes
_known: WeakKeyDictionary[GraphModule, str] = WeakKeyDictionary()  # ranks that are threads share captures


def captured_digest(captured: Captured) -> str:
    """The number of calls, and a checksum of the calls, their shapes and the constants that they read."""
    found = _known.get(captured.graph)
    if found is None:
        sums = hashlib.sha256()
        num_calls = 0
        places: dict[Node, str] = {}  # not names, which also count removed nodes, such as a number that one rank prints
        for node in captured.graph.graph.nodes:
            num_calls += node.op == "call_function"
            places[node] = f"%{len(places)}"
            value = node.meta.get("val")
            shape = tuple(value.shape) if torch.is_tensor(value) else ()
            target = node.target if node.op == "call_function" else ""
            args = map_arg((node.args, node.kwargs), places.__getitem__)
            sums.update(_ADDRESS.sub("", f"{node.op} {target} {args} {shape}\n").encode())
        for constant in captured.constants.values():
            sums.update(f"{_checksum(constant)}\n".encode())
        inputs = [(i.kind, "" if i.kind == "constant" else i.name) for i in captured.inputs]
        sums.update(f"{inputs} {captured.frozen} {captured.outputs}".encode())
        found = _known[captured.graph] = f"{num_calls} calls, checksum {sums.hexdigest()[:8]}"
    return found


def _checksum(tensor: Tensor) -> str:
    flat = tensor.detach().reshape(-1)
    flat = flat[: _MOST_BYTES // max(flat.element_size(), 1)].cpu().contiguous()
    return f"{tensor.dtype} {tuple(tensor.shape)} {zlib.crc32(flat.view(torch.uint8).numpy().tobytes()):08x}"
