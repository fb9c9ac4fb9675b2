"""A ViT of torch's own modules, with the structure and the names of torchvision's."""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn


class _Layer(nn.Module):
    def __init__(self, heads: int, hidden: int, ffn: int, epsilon: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden, eps=epsilon)
        self.self_attention = nn.MultiheadAttention(hidden, heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(hidden, eps=epsilon)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, ffn), nn.GELU(), nn.Dropout(0.0), nn.Linear(ffn, hidden)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        y, _ = self.self_attention(y, y, y, need_weights=False)
        x = x + y
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


class _Encoder(nn.Module):
    def __init__(self, layers: int, length: int, hidden: int, **sizes: Any) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.randn(1, length, hidden) / 50)
        self.layers = nn.Sequential(
            OrderedDict(
                (f"encoder_layer_{i}", _Layer(hidden=hidden, **sizes)) for i in range(layers)
            )
        )
        self.ln = nn.LayerNorm(hidden, eps=sizes["epsilon"])

    def forward(self, x: Tensor) -> Tensor:
        return self.ln(self.layers(x + self.pos_embedding))  # type: ignore[no-any-return]


class ReferenceViT(nn.Module):
    """images -> logits, of the section `model` of a config."""

    def __init__(self, section: Any) -> None:
        super().__init__()
        s = section
        has_token = s.pool == "class"
        self.conv_proj = nn.Conv2d(s.num_channels, s.hidden_size, s.patch_size, s.patch_size)
        if has_token:
            self.class_token = nn.Parameter(torch.randn(1, 1, s.hidden_size) / 50)
        self.encoder = _Encoder(
            s.num_layers,
            s.num_patches + has_token,
            s.hidden_size,
            heads=s.num_attention_heads,
            ffn=s.feed_forward_size,
            epsilon=s.norm_epsilon,
        )
        self.heads = nn.Sequential(OrderedDict(head=nn.Linear(s.hidden_size, s.num_classes)))
        self._has_token = has_token

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv_proj(images).flatten(2).transpose(1, 2)
        if self._has_token:
            x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1)
        x = self.encoder(x)
        return self.heads(x[:, 0] if self._has_token else x.mean(1))  # type: ignore[no-any-return]
