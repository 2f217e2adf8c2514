"""The model of `unlike.LingConfig`, written from the Ring 2.5 release: each token's sum is computed anew, one after the other."""

import torch
from torch import nn
from transformers import DeepseekV3ForCausalLM

from scripts.tiny_configs.unlike import LingConfig


class Lightning(nn.Module):
    def __init__(self, config: LingConfig, layer: int):
        super().__init__()
        self.config, self.heads, self.width = config, config.num_attention_heads, config.head_dim
        wide = self.heads * self.width
        self.query_key_value = nn.Linear(config.hidden_size, 3 * wide, bias=False)
        self.g_proj = nn.Linear(config.hidden_size, wide, bias=False)
        self.dense = nn.Linear(wide, config.hidden_size, bias=False)
        self.query_layernorm, self.key_layernorm = nn.RMSNorm(self.width), nn.RMSNorm(self.width)
        self.g_norm = nn.RMSNorm(wide)
        self.query_layernorm.eps = self.key_layernorm.eps = self.g_norm.eps = config.rms_norm_eps
        decay = 1 - (layer - 1) / (config.num_hidden_layers - 1) + 1e-5
        self.rate = torch.tensor([decay * 2 ** (-8 / self.heads * (i + 1)) for i in range(self.heads)])

    def forward(self, hidden_states, **kwargs):
        batch, length, _ = hidden_states.shape
        q, k, v = self.query_key_value(hidden_states).view(batch, length, 3, self.heads, self.width).unbind(2)
        q, k = self.turned(self.query_layernorm(q)), self.turned(self.key_layernorm(k))
        state = hidden_states.new_zeros(batch, self.heads, self.width, self.width)
        sums = []
        for t in range(length):
            state = state * torch.exp(-self.rate.to(state))[:, None, None] + k[:, t, :, :, None] * v[:, t, :, None, :]
            sums.append((q[:, t, :, :, None] * state).sum(-2) / self.width**0.5)
        groups = torch.stack(sums, 1).view(batch, length, self.config.group_norm_size, -1)
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.g_norm.eps)
        gated = normed.reshape(batch, length, -1) * self.g_norm.weight * torch.sigmoid(self.g_proj(hidden_states))
        return self.dense(gated), None

    def turned(self, x):
        width = int(self.width * self.config.partial_rotary_factor)
        angles = torch.arange(x.shape[1])[:, None] / self.config.rope_theta ** (torch.arange(0, width, 2) / width)
        cos, sin = angles.cos()[:, None].to(x), angles.sin()[:, None].to(x)
        first, second, rest = x[..., : width // 2], x[..., width // 2 : width], x[..., width:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


class Ling(DeepseekV3ForCausalLM):
    config_class = LingConfig

    def __init__(self, config: LingConfig):
        super().__init__(config)
        for i, layer in enumerate(self.model.layers):
            if not config.is_full(i):
                layer.self_attn = Lightning(config, i)
