"""Optimizers that plait adds to torch.optim, with the same interface: `Lamb`, for large batches."""

from plait.optim.lamb import Lamb

__all__ = ["Lamb"]
