"""What a program does of a transformer's step, beside how it is spread: dtypes, bytes of states and of activations."""

from __future__ import annotations

from dataclasses import dataclass

from plait.cost.memory_model import StateBytes
from plait.cost.transformer import HALF_BYTES
from plait.cost.transformer_states import StateTraffic

# Adam in mixed precision: half-precision weights and gradients, float32 weights and two moments.
MIXED = StateBytes(parameters=2, gradients=2, optimizer=12)


@dataclass(frozen=True)
class TransformerProgram:
    """What a program does of a step, beside how it is spread.

    Attributes:
        dtype: of products; its peak is the device's.
        states: bytes per parameter.
        traffic: how often what a layer keeps is read or written between products, in a forward. About 2: it is written,
            and read once. Fused kernels have less.
        causal: the fraction of attention's products that is computed: 0.5 if kernels skip what the mask hides.
        attention: how fast attention's products are, relative to products of matrices; 0 for what the device reaches.
        gather_efficiency: of the links, in gathers of parameters for their use.
        loss_bytes: bytes per element of the logits that the loss keeps, its gradient included.
        value_bytes: bytes of an activation.
        stream_bytes: bytes of a value of the residual stream, which autocast leaves in float32.
        reduce_bytes: bytes per parameter of gradients as they are summed over ranks; 0 for those of `states`.
        hides_sums: whether sums of gradients run while the last backward computes.
        repeats_sums: whether a layer that is recomputed sums over ranks that split weights, and gathers parameters,
            once more for that. If not, only gathers of a sequence are repeated, and the sum after attention is kept.
        contention: the seconds that compute loses for each second of a collective that it hides.
        repeats_heads: whether keys and values are repeated for all heads before they go around a ring of a context.
        ring_gradient_bytes: bytes per element of their gradients as they go around; 0 for those of an activation.
        ring_traffic: bytes per element of the queries that each further step of a ring reads and writes beside
            attention itself, in forward and in backward: copies of what is sent, merges of partial results, sums of
            partial gradients. By default as counted in torch.distributed.tensor.experimental._attention of 2.6.
    """

    dtype: str = "bfloat16"
    states: StateBytes = MIXED
    traffic: float = 2.0
    causal: float = 1.0
    attention: float = 0.0
    gather_efficiency: float = 1.0
    loss_bytes: float = 6.0
    value_bytes: int = HALF_BYTES
    stream_bytes: int = HALF_BYTES
    reduce_bytes: int = 0
    hides_sums: bool = False
    repeats_sums: bool = True
    contention: float = 0.0
    repeats_heads: bool = False
    ring_gradient_bytes: int = 0
    ring_traffic: tuple[float, float] = (41.0, 58.0)

    @property
    def summed_bytes(self) -> float:
        """Bytes per parameter of gradients as they are summed over ranks."""
        return self.reduce_bytes or self.states.gradients

    @property
    def state_traffic(self) -> StateTraffic:
        """How states are stored and sent."""
        return StateTraffic(
            self.states, self.summed_bytes, self.value_bytes, self.stream_bytes, self.gather_efficiency,
            self.hides_sums, self.repeats_sums, self.contention,
        )  # fmt: skip


DEFAULT_PROGRAM = TransformerProgram()
