"""plait trains any PyTorch model on any number of devices."""
