"""Every lowering, by op."""

from plait.backends.xla.lowerings import attentions, indexing, of_elements, of_shapes, products, reductions
from plait.backends.xla.lowerings.table import LOWERINGS

__all__ = ["LOWERINGS", "attentions", "indexing", "of_elements", "of_shapes", "products", "reductions"]
