"""A transformer by its shape: parameters, floating-point operations and activations, in closed form.

    a heads, b rows of a microbatch, h hidden, l layers, s sequence, t ranks that split weights, V vocabulary

Formulas are those of Narayanan et al. 2021 ("Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", arXiv 2104.04473), Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer
Models", arXiv 2205.05198) and Qi et al. 2024 ("Zero Bubble Pipeline Parallelism", arXiv 2401.10241), written so that
they hold for grouped key-value heads, gated MLPs and attention without stored scores too; for a GPT they are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.errors import ConfigError
from plait.plan.parallelism import ALTERNATE, FULL, NONE, SELECTIVE

HALF_BYTES = 2  # bytes of an activation in bf16 or fp16
_SIZES = {  # by their names, the most that is credible
    "layers": 10_000, "hidden": 10**9, "heads": 10**9, "vocab": 10**9, "sequence": 10**9, "ffn": 10**9,
    "kv_heads": 10**9, "head_dim": 10**9, "num_experts": 100_000, "experts_per_token": 100_000, "shared_ffn": 10**9,
}  # fmt: skip


@dataclass(frozen=True)
class TransformerShape:
    """The shape of a decoder.

    Attributes:
        layers: number of layers.
        hidden: width of the residual stream.
        heads: attention heads.
        vocab: size of the vocabulary.
        sequence: tokens of a sequence.
        ffn: width of the MLP; 4 * hidden by default.
        kv_heads: key-value heads; as many as heads by default.
        gated: whether the MLP has a gate (SwiGLU), three matrices.
        biases: whether linear layers and norms have biases.
        tied: whether the output layer shares the embedding.
        learned_positions: whether positions are a table.
        dropout: whether there is dropout, whose masks are kept.
        stores_scores: whether attention keeps its scores, as it does without FlashAttention.
        num_experts: MLPs of a layer, of which a router gives each token some; 1 is a dense MLP.
        experts_per_token: how many of them a token has.
        head_dim: width of a head; hidden / heads by default.
        shared_ffn: width of the MLP that every token has beside its experts (shared experts); 0 if there is none.

    Raises ConfigError for a size below 1 or beyond what is credible, and for heads that do not divide the width.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    sequence: int
    ffn: int = 0
    kv_heads: int = 0
    gated: bool = False
    biases: bool = True
    tied: bool = True
    learned_positions: bool = True
    dropout: bool = True
    stores_scores: bool = True
    num_experts: int = 1
    experts_per_token: int = 1
    head_dim: int = 0
    shared_ffn: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "sequence"):
            if getattr(self, name) < 1:
                raise ConfigError(f"a transformer with {name} = {getattr(self, name)}; it is 1 or more")
        for name in ("ffn", "kv_heads", "head_dim", "shared_ffn"):
            if getattr(self, name) < 0:
                raise ConfigError(f"a transformer with {name} = {getattr(self, name)}; it is 1 or more, or left out")
        for name, most in _SIZES.items():
            if getattr(self, name) > most:
                raise ConfigError(f"a transformer with {name} of more than {most}; give {most} at most")
        if (not self.head_dim and self.hidden % self.heads) or self.heads % self.groups:
            raise ConfigError(
                f"a transformer with hidden = {self.hidden}, heads = {self.heads} and kv_heads = {self.groups}; heads"
                " divide hidden, or head_dim says how wide one is, and kv_heads divide heads"
            )
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ConfigError(
                f"a transformer with num_experts = {self.num_experts} and experts_per_token = {self.experts_per_token};"
                " a token has one or more of those there are"
            )

    @property
    def inner(self) -> int:
        """The width of the MLP."""
        return self.ffn or 4 * self.hidden

    @property
    def groups(self) -> int:
        """Key-value heads."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def attention_width(self) -> int:
        """The columns of all queries: hidden, if head_dim does not say otherwise."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        return self.head_width * self.groups

    @property
    def layer_weights(self) -> int:
        """Elements of a layer's matrices that a token is multiplied with: 12 h^2 for a GPT."""
        mlp = self.experts_per_token * self.mlp_weights + self.shared_weights
        return self.attention_weights + self.router_weights + mlp

    @property
    def attention_weights(self) -> int:
        return 2 * self.hidden * (self.attention_width + self.kv_width)

    @property
    def num_gates(self) -> int:
        """Matrices of an MLP that the residual stream is multiplied with."""
        return 2 if self.gated else 1

    @property
    def mlp_weights(self) -> int:
        """Elements of the matrices of one MLP."""
        return (self.num_gates + 1) * self.hidden * self.inner

    @property
    def shared_weights(self) -> int:
        """Elements of the matrices of the MLP that every token has beside its experts."""
        return (self.num_gates + 1) * self.hidden * self.shared_ffn

    @property
    def router_weights(self) -> int:
        return self.hidden * self.num_experts if self.num_experts > 1 else 0

    @property
    def expert_parameters(self) -> int:
        """Elements of a layer's experts; 0 if it has a dense MLP."""
        each = self.mlp_weights + self._mlp_biases(self.inner)
        return self.num_experts * each if self.num_experts > 1 else 0

    def _mlp_biases(self, width: int) -> int:
        return width * self.num_gates + self.hidden if self.biases and width else 0

    @property
    def layer_parameters(self) -> int:
        """Elements of all of a layer: 12 h^2 + 13 h for a GPT."""
        norms = 2 * self.hidden * (2 if self.biases else 1)
        biases = self.hidden + self.attention_width + 2 * self.kv_width
        mlp = self.expert_parameters or self.mlp_weights + self._mlp_biases(self.inner)
        mlp += self.shared_weights + self._mlp_biases(self.shared_ffn)
        return self.attention_weights + self.router_weights + mlp + norms + (biases if self.biases else 0)

    @property
    def embedding_parameters(self) -> int:
        """Elements of the embedding, of positions, and of an output layer of its own."""
        tables = self.vocab * (1 if self.tied else 2) + (self.sequence if self.learned_positions else 0)
        return tables * self.hidden

    @property
    def parameters(self) -> int:
        """All elements, without the last norm: 12 l h^2 (1 + 13/(12h) + (V+s)/(12 l h)) for a GPT (Narayanan et al.,
        equation 2)."""
        return self.layers * self.layer_parameters + self.embedding_parameters

    def matmul_flops(self, tokens: float) -> float:
        """Operations of a layer's matrices in a forward over `tokens` tokens: 24 b s h^2 for a GPT."""
        return 2.0 * tokens * self.layer_weights

    def attention_flops(self, tokens: float) -> float:
        """Operations of a layer's scores and their use in a forward, all of them counted: 4 b s^2 h."""
        return 4.0 * tokens * self.sequence * self.attention_width

    def head_flops(self, tokens: float) -> float:
        """Operations of the output layer in a forward: 2 b s h V."""
        return 2.0 * tokens * self.hidden * self.vocab

    def step_flops(self, rows: float, recompute: str = NONE) -> float:
        """Operations of a step over `rows` sequences; a backward takes twice a forward.

        Without recomputation these are the model's: 72 B l s h^2 (1 + s/(6h) + V/(12 l h)) for a GPT. With `full` the
        forward of layers is done twice: 96 B l s h^2 (1 + s/(6h) + V/(16 l h)) (Narayanan et al., equation 3). With
        `selective` all of the attention's operations count twice: 72 B l s h^2 (1 + s/(3h) + V/(12 l h)), as in
        Korthikanti et al. (equation 8), although only its forward is repeated.
        """
        tokens = rows * self.sequence
        layer = self.matmul_flops(tokens) + self.attention_flops(tokens)
        again = {
            NONE: 0.0,
            SELECTIVE: 3 * self.attention_flops(tokens),
            ALTERNATE: self.matmul_flops(tokens) * self.alternate_fraction,
            FULL: layer,
        }[recompute]
        return self.layers * (3 * layer + again) + 3 * self.head_flops(tokens)

    def cell_flops(self, tokens: float) -> tuple[float, float, float]:
        """Operations of a layer's forward, of its backward for inputs, and of that for weights (Qi et al., table 1)."""
        matmul, attention = self.matmul_flops(tokens), self.attention_flops(tokens)
        return matmul + attention, matmul + 2 * attention, matmul

    def activation_bytes(
        self, rows: float, weights: int = 1, sequence: bool = False, recompute: str = NONE, room: float = 1.0
    ) -> float:
        """Bytes of activations in half precision that one layer keeps from forward to backward on one rank.

        For a GPT with dropout and stored scores (Korthikanti et al., table 2), over t ranks that split weights:

            s b h (10 + 24/t + 5 a s / (h t))      without sequence parallelism
            s b h / t (34 + 5 a s / h)             with it
            the same without the last term         with selective recomputation
            2 s b h                                with full recomputation; over t, if ranks split sequences too

        With `alternate` these are the layer's input, the result of attention, and that of the first product and of
        every other one after it (the policy of torchtitan's "selective op" checkpointing). There is room for `room`
        times the rows that a balanced router sends to experts.
        """
        tokens = rows * self.sequence
        if recompute == FULL:
            return HALF_BYTES * tokens * self.hidden / (weights if sequence else 1)
        if recompute == ALTERNATE:
            ends = 2 * self.hidden  # the residual stream before and behind the layer
            kept = sum(columns for _, columns in self._products[:-1:2]) + self.attention_width
            return HALF_BYTES * tokens * (ends + kept / weights)
        whole, cut, arrived = self._whole_bytes(), self._cut_bytes(room), room * self._row_bytes
        scores = 5.0 * self.heads * self.sequence if self.stores_scores and recompute == NONE else 0.0
        arrived *= 2  # the results of experts, beside the rows that they are computed from
        return tokens * ((whole / weights if sequence else whole) + arrived + (cut + scores) / weights)

    @property
    def _products(self) -> list[tuple[int, int]]:
        """Rows and columns of the matrices of a layer, in order: query, key, value, out, then those of MLPs."""

        def mlp(width: int) -> list[tuple[int, int]]:
            return [(self.hidden, width)] * self.num_gates + [(width, self.hidden)]

        inputs = [(self.hidden, width) for width in (self.attention_width, self.kv_width, self.kv_width)]
        shared = mlp(self.shared_ffn) if self.shared_ffn else []
        return [*inputs, (self.attention_width, self.hidden), *shared, *mlp(self.inner) * self.experts_per_token]

    @property
    def alternate_fraction(self) -> float:
        """The part of a layer's products that is repeated if every other one is kept."""
        work = [rows * columns for rows, columns in self._products]
        return sum(work[1::2]) / sum(work)

    def _whole_bytes(self) -> float:
        """Bytes per token between the parts that ranks split: inputs of two norms and of two linear layers, and the
        masks of two dropouts."""
        return 4 * HALF_BYTES * self.hidden + (2 * self.hidden if self.dropout else 0)

    def _cut_bytes(self, room: float) -> float:
        """Bytes per token within them: query, key, value and the result of attention; what the MLP keeps: the input and
        the result of its activation function, and with a gate the other factor and the product."""
        attention = HALF_BYTES * 2 * (self.attention_width + self.kv_width)
        mlp = self.experts_per_token * self.inner * 2 * self.num_gates
        return attention + HALF_BYTES * (room * mlp + self.shared_ffn * 2 * self.num_gates)

    @property
    def _row_bytes(self) -> int:
        """Bytes per token of the rows that a router sends to experts, and of those that come back; each rank that
        splits the experts' weights has them whole."""
        return HALF_BYTES * self.experts_per_token * self.hidden if self.num_experts > 1 else 0

    def embedding_bytes(self, rows: float, pipeline: int, weights: int) -> float:
        """Bytes on the first stage beside the layers', with sequence parallelism: the masks of the dropout behind the
        embedding, for each microbatch in flight, and without a pipeline what the last norm, the output layer and the
        loss keep: s b h / t (p + 4 (1 + V/h)) for one with p = 1 (Korthikanti et al., section 4.3)."""
        tokens = rows * self.sequence / weights
        masks = tokens * self.hidden * pipeline
        return masks + (4 * tokens * (self.hidden + self.vocab) if pipeline == 1 else 0.0)
