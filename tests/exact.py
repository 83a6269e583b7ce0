"""Makes float64 models float64 throughout: transformers' norms make a detour over float32, which turns a difference of
1e-14 into a step of float32 once in a while. To be imported for its effect; other dtypes are computed as ever."""

import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.granite.modeling_granite import GraniteRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm


def _exact(kind, forward):
    original = kind.forward

    def replaced(norm, states):
        return forward(norm, states) if states.dtype == torch.float64 else original(norm, states)

    kind.forward = replaced


def _scaled(states, eps):
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + eps)


_exact(LlamaRMSNorm, lambda norm, states: norm.weight * _scaled(states, norm.variance_epsilon))
_exact(GraniteRMSNorm, lambda norm, states: norm.weight * _scaled(states, norm.variance_epsilon))
_exact(Gemma2RMSNorm, lambda norm, states: (1 + norm.weight.double()) * _scaled(states, norm.eps))
