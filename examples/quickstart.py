"""The shortest tour: one call, a few masks, the cost of a call."""

import torch

import regard
from regard import masks as M

q = torch.randn(2, 8, 1024, 64)  # (B, Hq, Lq, D)
k = v = torch.randn(2, 2, 1024, 64)  # (B, Hkv, Lk, D): four query heads share one key head

out = regard.attention(q, k, v, mask=M.Causal())
print("causal           ", tuple(out.shape))

lengths = torch.tensor([1024, 700])
mask = M.sliding(256) & M.Lengths(lengths)  # a window of 256 keys, and padding
out, lse = regard.attention(q, k, v, mask=mask, softcap=30.0, dropout=0.1, return_lse=True)
print("with many options", tuple(out.shape), tuple(lse.shape))

one = regard.attention(q[:, :, -1:], k, v, mask=M.Causal())  # bottom-right alignment: position 1023
print("decoding         ", tuple(one.shape))

print(mask)
print(M.longformer(7, global_tokens=[0]).draw(12, 12))
print(regard.plan(q, k, v, mask=mask))
