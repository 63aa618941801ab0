"""The families of zoo_examples.py and zoo_papers.py by name, in float64: what differs is no rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import zoo_examples as examples
import zoo_papers as papers
from torch import nn
from torch.utils import _pytree
from zoo import Case


def double(build: Callable[[], nn.Module], loss_fn: Callable[[Any, Any], Any], batch: Callable[[], Any]) -> Case:
    """The family in float64, its batch too."""

    def wide(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.double() if leaf.is_floating_point() else leaf

    return Case(lambda: build().double(), loss_fn, lambda: _pytree.tree_map(wide, batch()))


MORE: dict[str, Case] = {
    "mnist": double(examples.MnistNet, examples.nll_loss, examples.digits),
    "word_lstm": double(examples.RNNModel, examples.words_loss, examples.words),
    "word_transformer": double(examples.TransformerModel, examples.words_loss, examples.words),
    "vae": double(examples.VAE, examples.vae_loss, examples.pictures),
    "dcgan_discriminator": double(
        lambda: examples.DCGAN("discriminator"), examples.dcgan_loss, examples.noise_and_pictures
    ),
    "dcgan_generator": double(lambda: examples.DCGAN("generator"), examples.dcgan_loss, examples.noise_and_pictures),
    "super_resolution": double(examples.SuperResolution, examples.mse_loss, examples.small_and_large),
    "siamese": double(examples.Siamese, examples.siamese_loss, examples.two_pictures),
    "gcn": double(examples.GCN, examples.graph_loss, examples.graphs),
    "gat": double(examples.GAT, examples.graph_loss, examples.graphs),
    "time_sequence": double(examples.Sequence, examples.mse_loss, examples.waves),
    "reinforce": double(lambda: examples.Policy(critic=False), examples.policy_loss, examples.episodes),
    "actor_critic": double(lambda: examples.Policy(critic=True), examples.policy_loss, examples.episodes),
    "neural_style": double(examples.NeuralStyle, examples.style_loss, examples.colours),
    "translation": double(examples.Encoder, examples.translation_loss, lambda: examples.words(4)),
    "timm_vit": double(papers.TimmViT, papers.class_loss, papers.images),
    "mbconv": double(papers.MobileNet, papers.class_loss, papers.images),
    "densenet": double(papers.DenseNet, papers.class_loss, papers.images),
    "shufflenet": double(papers.ShuffleNet, papers.class_loss, papers.images),
    "mae": double(papers.MAE, papers.mae_loss, papers.images),
    "two_encoders": double(papers.CLIP, papers.clip_loss, papers.images_and_text),
    "dit": double(papers.DiT, papers.diffusion_loss, papers.noised),
    "diffusion_unet": double(papers.UNet2D, papers.diffusion_loss, papers.noised),
    "dlrm": double(papers.DLRM, papers.click_loss, papers.clicks),
    "deepfm": double(papers.DeepFM, papers.click_loss, papers.clicks),
    "two_tower": double(papers.TwoTower, papers.in_batch_loss, papers.ratings),
    "simsiam": double(papers.SimSiam, papers.simsiam_loss, papers.two_views),
    "barlow_twins": double(papers.BarlowTwins, papers.barlow_loss, papers.two_views),
    "titan_llama": double(papers.TitanLlama, papers.next_loss, papers.text),
    "nanogpt": double(papers.NanoGPT, papers.next_loss, papers.text),
    "retnet": double(papers.RetNet, papers.next_loss, papers.text),
    "switch": double(papers.SwitchMoE, papers.switch_loss, papers.text),
    "wavenet": double(papers.WaveNet, papers.next_loss, papers.text),
    "perceiver": double(papers.Perceiver, papers.class_loss, papers.text_class),
    "pinn": double(papers.PINN, papers.heat_loss, papers.points),
    "nerf": double(papers.NeRF, papers.mse_loss, papers.rays),
    "pointnet": double(papers.PointNet, papers.class_loss, papers.clouds),
    "realnvp": double(papers.RealNVP, papers.flow_loss, papers.samples),
    "mixture_density": double(papers.MixtureDensity, papers.mixture_loss, papers.samples),
    "fourier_operator": double(papers.FourierOperator, papers.mse_loss, papers.signals),
    "neural_ode": double(papers.NeuralODE, papers.mse_loss, papers.signals),
    "wgan_critic": double(papers.Critic, papers.critic_loss, papers.samples),
    "ctc_speech": double(papers.Speech, papers.ctc_loss, papers.speech),
}
