"""Optimizers that plait adds to those of torch.optim, and that are used like them: `Lamb`, for large batches."""

from plait.optim.lamb import Lamb

__all__ = ["Lamb"]
