"""The VAE's causal 3-D convolution and its norm in forms that are fast on CPUs and equal to DiffSynth's."""

import torch
from diffsynth.models.wan_video_vae import CausalConv3d, RMS_norm
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F


class FoldedCausalConv3d(CausalConv3d):
    """DiffSynth's CausalConv3d with its three temporal taps folded into the channels of one 2-D convolution.

    Same parameters, same result up to rounding (1e-5 relative); other shapes of kernel and stride go the usual way.
    """

    def forward(self, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
        """y [B, C_out, T, H, W] of x [B, C_in, T, H, W]; cache_x [B, C_in, 1 or 2, H, W] holds the frames before x."""
        if self.kernel_size[0] == 1 and self.stride == (1, 1, 1):
            return self._per_frame(x, self.weight[:, :, 0])
        if self.kernel_size[0] != 3 or self.stride != (1, 1, 1):
            return super().forward(x, cache_x)
        missing = self._padding[4]
        if cache_x is not None and missing > 0:
            x = torch.cat([cache_x.to(x.device), x], dim=2)
            missing -= cache_x.shape[2]
        frames = x.shape[2] + missing - 2
        if frames == 1:
            return self._last_frame(x)
        if missing > 0:
            x = torch.cat([x.new_zeros(*x.shape[:2], missing, *x.shape[3:]), x], dim=2)
        taps = torch.cat([x[:, :, tap : tap + frames] for tap in range(3)], dim=1)
        return self._per_frame(taps, self.weight.permute(0, 2, 1, 3, 4).flatten(1, 2))

    def _last_frame(self, x: Tensor) -> Tensor:
        """The one output frame of x, whose missing history is zero: taps without a frame are left out."""
        known = x.shape[2]
        weight = self.weight[:, :, 3 - known :].permute(0, 2, 1, 3, 4).flatten(1, 2)
        return self._per_frame(x.transpose(1, 2).flatten(1, 2)[:, :, None], weight)

    def _per_frame(self, x: Tensor, weight: Tensor) -> Tensor:
        batch, _, frames, height, width = x.shape
        pictures = x.transpose(1, 2).flatten(0, 1)
        y = F.conv2d(pictures, weight, self.bias, padding=(self._padding[2], self._padding[0]))
        return y.unflatten(0, (batch, frames)).transpose(1, 2)


class FoldedRmsNorm(RMS_norm):
    """DiffSynth's RMS_norm over channels (dimension 1), without the slow strided norm of torch on CPUs."""

    def forward(self, x: Tensor) -> Tensor:
        """x / |x| * sqrt(C) * gamma for x [B, C, ...]; |x| over channels, at least 1e-12."""
        inverse_norm = (x * x).sum(1, keepdim=True).clamp_min(1e-24).rsqrt()
        return x * inverse_norm * (self.gamma * self.scale) + self.bias


def fold_convolutions(model: Module) -> None:
    """Use the fast forms for every CausalConv3d and RMS_norm inside `model`; parameters and keys stay as they are."""
    for module in model.modules():
        if type(module) is CausalConv3d:
            module.__class__ = FoldedCausalConv3d
        if type(module) is RMS_norm and module.channel_first:
            module.__class__ = FoldedRmsNorm
