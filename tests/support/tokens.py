"""Small networks of patch tokens and with channels last, as people write them: no library, no table of taps."""

import torch
from torch import Tensor, nn


class TokenBlock(nn.Module):
    """Attention and a linear layer, each beside a shortcut."""

    def __init__(self, d: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.mlp = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, dim=-1) @ v
        return x + self.mlp(self.norm2(x)).relu()


class ViT(nn.Module):
    """Patches of `patch` pixels behind a class token and registers; classified by the class token, or by the mean of the patches.

    With `num_classes` 0 it is a backbone, which returns all tokens.
    """

    def __init__(
        self, d: int = 8, *, depth: int = 4, patch: int = 4, registers: int = 2, pool: str = "token", num_classes: int = 3
    ):
        super().__init__()
        self.pool, self.num_classes = pool, num_classes
        self.patches = nn.Conv2d(3, d, patch, stride=patch)
        self.cls_token, self.reg_token = nn.Parameter(torch.randn(1, 1, d)), nn.Parameter(torch.randn(1, registers, d))
        self.blocks = nn.Sequential(*(TokenBlock(d) for _ in range(depth)))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, num_classes) if num_classes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        extra = [token.expand(x.shape[0], -1, -1) for token in (self.cls_token, self.reg_token)]
        tokens = self.norm(self.blocks(torch.cat([*extra, patches], dim=1)))
        if not self.num_classes:
            return tokens
        n = 1 + self.reg_token.shape[1]
        return self.head(tokens[:, 0] if self.pool == "token" else tokens[:, n:].mean(dim=1))


class LastBlock(nn.Module):
    """A linear layer for each pixel, and the mean of its neighbours; channels last."""

    def __init__(self, d: int):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x)).relu() + x.mean(dim=(1, 2), keepdim=True)


class Merge(nn.Module):
    """Four pixels become one of twice the channels."""

    def __init__(self, d: int):
        super().__init__()
        self.reduction = nn.Linear(4 * d, 2 * d)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, d = x.shape
        return self.reduction(x.view(b, h // 2, 2, w // 2, 2, d).permute(0, 1, 3, 2, 4, 5).reshape(b, h // 2, w // 2, 4 * d))


class Stage(nn.Module):
    def __init__(self, d: int, depth: int = 2):
        super().__init__()
        self.blocks = nn.Sequential(*(LastBlock(d) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class ChannelsLastNet(nn.Module):
    """Two stages of maps [b h w d], as Swin has them."""

    def __init__(self, d: int = 6, *, num_classes: int = 3):
        super().__init__()
        self.patches, self.stage1, self.merge = nn.Conv2d(3, d, 2, stride=2), Stage(d), Merge(d)
        self.stage2, self.norm, self.head = Stage(2 * d), nn.LayerNorm(2 * d), nn.Linear(2 * d, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        f = self.merge(self.stage1(self.patches(x).permute(0, 2, 3, 1)))
        return self.head(self.norm(self.stage2(f)).mean(dim=(1, 2)))
