"""Text from a trained byte model, by plain PyTorch on one device."""

from __future__ import annotations

import torch

from plait.api.job.gpt import BytesGPT


@torch.no_grad()
def sample_text(model: BytesGPT, prompt: str, length: int, temperature: float, seed: int = 0) -> str:
    """`prompt` and `length` more bytes drawn from the model; bytes that are no UTF-8 are shown as a replacement."""
    was_training = model.training
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    symbols = list(prompt.encode()) or [ord("\n")]
    for _ in range(length):
        logits = model(torch.tensor([symbols[-model.sequence :]]))[0, -1].float()
        chances = torch.softmax(logits / temperature, dim=0)
        symbols.append(int(torch.multinomial(chances, 1, generator=generator)))
    model.train(was_training)
    return bytes(symbols).decode(errors="replace")
