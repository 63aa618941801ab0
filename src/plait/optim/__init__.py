"""Optimizers that plait brings along, to be used as those of torch.optim are: `Lamb`, for large batches."""

from plait.optim.lamb import Lamb

__all__ = ["Lamb"]
