"""Compares Longformer and BigBird with Hugging Face and with dense attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard.nn import (
    BigBirdAttention,
    Block,
    FeedForward,
    LongformerAttention,
    PerformerAttention,
    block_table,
)
from support import HAVE_CORE, assert_close, rel_l2

pytestmark = pytest.mark.skipif(not HAVE_CORE, reason="regard._core is not built")
B, WIDTH, HEADS = 3, 24, 4


def token_marks(L: int, *tokens: list[int]) -> Tensor:
    marks = torch.zeros(len(tokens), L, dtype=torch.bool)
    for sample, positions in enumerate(tokens):
        marks[sample, positions] = True
    return marks


def real_rows(L: int, lengths: Tensor) -> Tensor:
    return torch.arange(L) < lengths[:, None]


def dense_attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Computes attention with a mask. q (B, H, Lq, D), keep broadcastable to (B, H, Lq, Lk)."""
    s = (q @ k.mT) * q.shape[-1] ** -0.5
    return s.masked_fill(~keep, -torch.inf).softmax(-1) @ v


def split_heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def gradients(out: Tensor, dout: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, leaves, dout)


# Longformer compared with Hugging Face


def their_longformer(one_sided: int) -> Any:
    transformers = pytest.importorskip("transformers")
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    config = transformers.LongformerConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, attention_window=[2 * one_sided], num_hidden_layers=1,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    module = LongformerSelfAttention(config, 0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def run_their_longformer(theirs: Any, x: Tensor, lengths: Tensor, marks: Tensor) -> Tensor:
    marking = torch.where(real_rows(x.shape[1], lengths), 0.0, -10000.0).masked_fill(marks, 10000.0)
    out: Tensor = theirs(
        x, attention_mask=marking, is_index_masked=marking < 0, is_index_global_attn=marking > 0,
        is_global_attn=bool(marks.any()),
    )[0]  # fmt: skip
    return out


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "tokens", [([0], [0], [0]), ([0, 5, 71], [3], [0, 1, 2, 40]), ([70, 71], [], [1]), ([], [], [])]
)
def test_longformer_matches_hugging_face(training: bool, tokens: tuple[list[int], ...]) -> None:
    theirs, L = their_longformer(6), 72
    ours = LongformerAttention(WIDTH, HEADS, window=(6, 6), out=False).train(training)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(B, L, WIDTH, requires_grad=True)
    lengths, marks = torch.tensor([72, 50, 41]), token_marks(L, *tokens)
    out, expected = (
        ours(x, global_tokens=marks, lengths=lengths),
        run_their_longformer(theirs, x, lengths, marks),
    )
    real = real_rows(L, lengths)
    assert_close(out[real], expected[real], rtol=1e-5, atol=1e-5)
    dout = torch.randn(out.shape).masked_fill(~real[..., None], 0)
    names = [name for name, _ in ours.named_parameters() if marks.any() or "global" not in name]
    # The bias of the keys does not change the softmax: its gradient is only rounding error.
    names = [name for name in names if not name.startswith("key") or name.endswith("weight")]
    grads = gradients(out, dout, [x, *(ours.get_parameter(name) for name in names)])
    expected_grads = gradients(expected, dout, [x, *(theirs.get_parameter(name) for name in names)])
    for name, grad, expected_grad in zip(["x", *names], grads, expected_grads, strict=True):
        assert rel_l2(grad, expected_grad) < 1e-5, name


# Longformer compared with dense attention


def longformer_keep(L: int, window: tuple[int, int], dilation: list[int], marks: Tensor) -> Tensor:
    """Returns bool (B, H, L, L): the keys that each local query may attend to."""
    i, j = torch.arange(L)[:, None], torch.arange(L)
    bands = [
        (i - j <= window[0] * step) & (j - i <= window[1] * step) & ((i - j) % step == 0) for step in dilation
    ]
    return torch.stack(bands)[None] | marks[:, None, None]


def dense_longformer(
    module: LongformerAttention, x: Tensor, dilation: list[int], marks: Tensor, lengths: Tensor
) -> Tensor:
    """Computes the layer with dense masks. Rows of global tokens attend to all real tokens."""
    real = real_rows(x.shape[1], lengths)[:, None, None]
    q, k, v = (split_heads(layer(x)) for layer in (module.query, module.key, module.value))
    keep = longformer_keep(x.shape[1], module.window, dilation, marks) & real
    # Padded rows may be fully masked. Their results are ignored, but must not be NaN.
    keep = keep | (~keep.any(-1, keepdim=True))
    local = dense_attention(q, k, v, keep)
    layers = (module.query_global, module.key_global, module.value_global)
    q, k, v = (split_heads(layer(x)) for layer in layers)
    global_rows = dense_attention(q, k, v, real)
    mixed = torch.where(marks[:, None, :, None], global_rows, local)
    out: Tensor = module.out(mixed.transpose(1, 2).flatten(2))
    return out


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("window", [11, (7, 0), (2, 9), 1])
@pytest.mark.parametrize("dilation", [1, [1, 2, 3, 1], 4])
def test_longformer_matches_dense_attention(
    training: bool, window: int | tuple[int, int], dilation: int | list[int]
) -> None:
    L, lengths = 61, torch.tensor([61, 44, 23])
    marks = token_marks(L, [0, 30, 60], [7], [])
    module = LongformerAttention(WIDTH, HEADS, window=window, dilation=dilation).double().train(training)
    x = torch.randn(B, L, WIDTH, dtype=torch.float64, requires_grad=True)
    steps = dilation if isinstance(dilation, list) else [dilation] * HEADS
    out = module(x, global_tokens=marks, lengths=lengths)
    expected = dense_longformer(module, x, steps, marks, lengths)
    real = real_rows(L, lengths)
    assert_close(out[real], expected[real], rtol=1e-10, atol=1e-10)
    dout = torch.randn_like(out).masked_fill(~real[..., None], 0)
    leaves = [x, module.query.weight, module.value_global.weight, module.key_global.weight, module.out.bias]
    for grad, expected_grad in zip(
        gradients(out, dout, leaves), gradients(expected, dout, leaves), strict=True
    ):
        assert_close(grad, expected_grad, rtol=1e-9, atol=1e-9)


def test_many_global_tokens_use_projected_keys() -> None:
    """Few global tokens use the absorbed form; many use projected keys. Both forms agree."""
    module = LongformerAttention(WIDTH, HEADS, window=(3, 3)).eval()
    threshold = int(WIDTH * 6 / (WIDTH - 6))
    assert module._absorbs(threshold - 1)
    assert not module._absorbs(threshold + 1)
    x, marks = torch.randn(2, 40, WIDTH), token_marks(40, list(range(7)), [1, 39])
    with torch.no_grad():
        absorbed = module(x, global_tokens=marks)
        assert_close(absorbed, module.train()(x, global_tokens=marks))


@pytest.mark.parametrize("dilation", [1, 2])
def test_attend_matches_the_mask_pattern(dilation: int) -> None:
    """`attend` has no separate projections for global tokens, so it equals a `longformer` mask."""
    q, k, v = torch.randn(3, 2, HEADS, 50, 6)
    module = LongformerAttention(WIDTH, HEADS, window=(4, 4), dilation=dilation)
    tokens = [0, 17, 18]
    pattern = regard.masks.longformer((4, 4), tokens, dilation=dilation)
    assert_close(module.attend(q, k, v, global_tokens=tokens), regard.attention(q, k, v, mask=pattern))
    local_pattern = regard.masks.longformer((4, 4), dilation=dilation)
    assert_close(module.attend(q, k, v), regard.attention(q, k, v, mask=local_pattern))


def test_global_tokens_may_be_marks_or_positions() -> None:
    module, x = LongformerAttention(WIDTH, HEADS, window=(2, 2)).eval(), torch.randn(2, 20, WIDTH)
    outs = [
        module(x, global_tokens=tokens)
        for tokens in (
            [4, 9],
            torch.tensor([9, 4, 4]),
            torch.tensor([[4, 9], [9, 4]]),
            token_marks(20, [4, 9])[0],
        )
    ]
    for out in outs:
        assert torch.equal(out, outs[0])
    per_sample = module(x, global_tokens=torch.tensor([[4, 9], [3, -1]]))
    assert torch.equal(per_sample, module(x, global_tokens=token_marks(20, [4, 9], [3])))
    assert_close(per_sample[1:], module(x[1:], global_tokens=[3]))
    assert torch.equal(module(x, global_tokens=token_marks(20, [], [])), module(x))


def test_longformer_dropout_applies_only_in_training() -> None:
    module, x = LongformerAttention(WIDTH, HEADS, window=(2, 2), dropout=0.5), torch.randn(1, 30, WIDTH)
    assert not torch.equal(module(x, global_tokens=[0]), module(x, global_tokens=[0]))
    module.eval()
    assert torch.equal(module(x, global_tokens=[0]), module(x, global_tokens=[0]))


def test_longformer_in_a_block() -> None:
    sublayers = (LongformerAttention(WIDTH, HEADS, window=(3, 3)), FeedForward(WIDTH, 2 * WIDTH))
    block, x = Block(*sublayers).eval(), torch.randn(2, 20, WIDTH)
    lengths = torch.tensor([20, 9])
    attended = x + sublayers[0](block.attention.norm(x), global_tokens=[1], lengths=lengths)
    expected = attended + sublayers[1](block.feed_forward.norm(attended))
    assert_close(block(x, global_tokens=[1], lengths=lengths), expected)


@pytest.mark.parametrize("training", [False, True])
def test_autocast_and_transforms(training: bool) -> None:
    module, x = LongformerAttention(WIDTH, HEADS, window=(3, 3)).train(training), torch.randn(2, 20, WIDTH)

    def loss(x: Tensor) -> Tensor:
        return module(x, global_tokens=[1]).square().sum()  # type: ignore[no-any-return]

    leaf = x.clone().requires_grad_()
    assert_close(torch.func.grad(loss)(x), *torch.autograd.grad(loss(leaf), leaf))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast_out = module(x, global_tokens=[1])
    assert rel_l2(autocast_out, module(x, global_tokens=[1])) < 0.02


def test_padding_is_masked() -> None:
    module = LongformerAttention(WIDTH, HEADS, window=(9, 9)).eval()
    x = torch.randn(1, 30, WIDTH)
    expected = module(x[:, :20], global_tokens=[1])
    x[:, 20:] = float("nan")
    out = module(x, global_tokens=[1], lengths=torch.tensor([20]))
    assert_close(out[:, :20], expected)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window": 0}, ValueError, "window: expected an integer from 1"),
        ({"window": 512}, ValueError, r"window: expected an odd number of keys.* is 513 or \(256, 256\)"),
        (
            {"window": (1, 2, 3)},
            ValueError,
            r"window: expected a number of keys or distances \(left, right\)",
        ),
        ({"window": (-1, 2)}, ValueError, r"window\[0\]: expected an integer from 0"),
        (
            {"window": 9, "dilation": [1, 2]},
            ValueError,
            "dilation: expected an int or one for each of heads = 4",
        ),
        ({"window": 9, "dilation": 0}, ValueError, "dilation: expected an integer from 1"),
        ({"window": 9, "dropout": 2.0}, ValueError, "dropout: expected a probability"),
    ],
)
def test_wrong_longformers(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LongformerAttention(WIDTH, HEADS, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"global_tokens": [20]},
            "global_tokens: expected positions below the length 20 of sample 0, got 20",
        ),
        ({"global_tokens": [9], "lengths": torch.tensor([20, 8])}, "below the length 8 of sample 1, got 9"),
        ({"global_tokens": torch.ones(3, 20, dtype=torch.bool)}, "global_tokens: expected .*B = 2, L"),
        ({"global_tokens": torch.ones(19, dtype=torch.bool)}, "global_tokens: expected marks of all L = 20"),
        ({"global_tokens": torch.eye(20, dtype=torch.long)[:2]}, "pass `mask.bool\\(\\)` if 1 means global"),
        ({"lengths": torch.tensor([20, 21])}, "lengths: expected from 0 to L = 20, got values from 20 to 21"),
        ({"lengths": torch.tensor([3])}, r"lengths: expected integers \(B = 2,\)"),
    ],
)
def test_wrong_calls_of_longformer(options: dict[str, Any], message: str) -> None:
    module = LongformerAttention(WIDTH, HEADS, window=(2, 2))
    with pytest.raises(ValueError, match=message):
        module(torch.randn(2, 20, WIDTH), **options)
    with pytest.raises(ValueError, match="x: expected"):
        module(torch.randn(20, WIDTH))
    with pytest.raises(ValueError, match="x: expected"):
        module(torch.nested.nested_tensor([torch.randn(n, WIDTH) for n in (3, 4)], layout=torch.jagged))
    q = torch.randn(1, HEADS, 6, 4)
    with pytest.raises(ValueError, match="expected q, k and v of one length"):
        module.attend(q[:, :, :5], q, q)


@pytest.mark.parametrize("dilation", [1, 2])
def test_longformer_compiles_in_one_graph(dilation: int) -> None:
    module, x = (
        LongformerAttention(WIDTH, HEADS, window=(3, 3), dilation=dilation).eval(),
        torch.randn(2, 20, WIDTH),
    )
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-6)


def test_bigbird_with_a_table_compiles_in_one_graph() -> None:
    module, x, table = (
        BigBirdAttention(WIDTH, HEADS, block=4).eval(),
        torch.randn(2, 18, WIDTH),
        fixed_table(5),
    )
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert_close(compiled(x, table=table), module(x, table=table), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LongformerAttention(WIDTH, HEADS, window=(3, 3), dilation=2, device="meta"),
        lambda: BigBirdAttention(WIDTH, HEADS, block=4, device="meta"),
        lambda: PerformerAttention(WIDTH, HEADS, causal=True, device="meta"),
    ],
)
def test_meta_device(make: Any) -> None:
    """On the meta device, models can be built before their weights are loaded."""
    module = make()
    assert module(torch.empty(2, 20, WIDTH, device="meta")).shape == (2, 20, WIDTH)
    assert f"heads={HEADS}" in repr(module)


# BigBird compared with Hugging Face


def their_bigbird(block: int, longest: int, seed: int = 5) -> Any:
    transformers = pytest.importorskip("transformers")
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

    config = transformers.BigBirdConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, block_size=block, num_random_blocks=3,
        max_position_embeddings=longest, num_hidden_layers=1,
    )  # fmt: skip
    module = BigBirdBlockSparseAttention(config, seed=seed)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def run_their_bigbird(theirs: Any, x: Tensor, real: Tensor) -> Tensor:
    from transformers.models.big_bird.modeling_big_bird import BigBirdModel

    masks = BigBirdModel.create_masks_for_block_sparse_attn(real.float(), theirs.block_size)
    blocked, band, from_mask, to_mask = masks
    out: Tensor = theirs(x, band, from_mask, to_mask, blocked, blocked)[0]
    return out


def their_random_blocks(theirs: Any, L: int) -> Tensor:
    """Returns the random blocks (H, blocks - 2, random) that Hugging Face draws in training."""
    np.random.seed(theirs.seed)  # noqa: NPY002
    block = theirs.block_size
    plan = theirs._get_rand_attn_plan(L, block, theirs.num_random_blocks)
    blocks = theirs._bigbird_block_rand_mask_with_head(L, L, block, block, HEADS, *plan)
    return torch.tensor(np.stack(blocks)).long()


def fixed_table(blocks: int) -> Tensor:
    return block_table(blocks, HEADS, window=3, random=0, global_blocks=(0, -1), seed=0)


@pytest.mark.parametrize("L", [160, 104])
def test_bigbird_matches_hugging_face(L: int) -> None:
    theirs = their_bigbird(8, L)
    ours = BigBirdAttention(WIDTH, HEADS, block=8, out=False)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(B, L, WIDTH, requires_grad=True)
    real = real_rows(L, torch.tensor([L, L - 11, 48]))
    random_blocks = their_random_blocks(theirs, L)
    table = fixed_table(L // 8)
    assert not table[:, 1:-1].gather(-1, random_blocks).any()  # no random block is also a fixed block
    table[:, 1:-1].scatter_(-1, random_blocks, True)
    out, expected = ours(x, lengths=real.sum(1), table=table), run_their_bigbird(theirs, x, real)
    assert_close(out[real], expected[real], rtol=1e-5, atol=1e-5)
    dout = torch.randn(out.shape).masked_fill(~real[..., None], 0)
    names = ["query.weight", "key.weight", "value.weight", "value.bias"]
    grads = gradients(out, dout, [x, *(ours.get_parameter(name) for name in names)])
    expected_grads = gradients(expected, dout, [x, *(theirs.get_parameter(name) for name in names)])
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert rel_l2(grad, expected_grad) < 1e-5


def test_bigbird_of_hugging_face_in_evaluation() -> None:
    """In evaluation, Hugging Face takes block 0 for all 3 random blocks.

    So non-global query blocks count the keys of block 0 four times.
    """
    L, block = 160, 8
    theirs = their_bigbird(block, L).eval()
    x, real = torch.randn(1, L, WIDTH), torch.ones(1, L, dtype=torch.bool)
    q, k, v = (split_heads(layer(x)) for layer in (theirs.query, theirs.key, theirs.value))
    log_counts = torch.zeros(L, L)
    log_counts[block:-block, :block] = float(np.log(1 + theirs.num_random_blocks))
    mask = regard.masks.Blocks(fixed_table(L // block), block)
    ours = regard.attention(q, k, v, mask=mask, bias=log_counts).transpose(1, 2).flatten(2)
    assert_close(ours, run_their_bigbird(theirs, x, real), rtol=1e-5, atol=1e-5)


# BigBird compared with dense attention


def dense_bigbird(module: BigBirdAttention, x: Tensor, keep: Tensor) -> Tensor:
    q, k, v = (split_heads(layer(x)) for layer in (module.query, module.key, module.value))
    out: Tensor = module.out(dense_attention(q, k, v, keep).transpose(1, 2).flatten(2))
    return out


@pytest.mark.parametrize("L", [64, 61, 7, 130])
def test_bigbird_matches_dense_attention(L: int) -> None:
    module = BigBirdAttention(WIDTH, HEADS, block=8, random=2, seed=3).double()
    x = torch.randn(2, L, WIDTH, dtype=torch.float64, requires_grad=True)
    blocks = -(-L // 8)
    table = block_table(blocks, HEADS, window=3, random=2, global_blocks=(0, -1), seed=3)
    block_ids = torch.arange(L) // 8
    keep = table[:, block_ids[:, None], block_ids]
    out, expected = module(x), dense_bigbird(module, x, keep[None])
    assert_close(out, expected, rtol=1e-10, atol=1e-10)
    leaves, dout = [x, module.query.weight, module.value.weight], torch.randn_like(out)
    for grad, expected_grad in zip(
        gradients(out, dout, leaves), gradients(expected, dout, leaves), strict=True
    ):
        assert_close(grad, expected_grad, rtol=1e-9, atol=1e-9)
    assert torch.equal(module(x, table=table), out)


@pytest.mark.parametrize("G", [1, 8, 11])
@pytest.mark.parametrize("global_blocks", [(), (0, -1)])
def test_bigbird_with_extra_global_tokens(G: int, global_blocks: tuple[int, ...]) -> None:
    """BigBird-ETC: all tokens attend to the extra global tokens, which attend to all tokens.

    In the block table, the extra tokens come first and shift the blocks of the sequence.
    """
    L, lengths, pad = 61, torch.tensor([61, 40]), -G % 8
    module = BigBirdAttention(WIDTH, HEADS, block=8, random=1, global_blocks=global_blocks, seed=2).double()
    x, global_x = torch.randn(2, L, WIDTH).double(), torch.randn(2, G, WIDTH).double()
    extra_blocks, blocks = (pad + G) // 8, 8
    sequence_globals = [extra_blocks, extra_blocks + blocks - 1] if global_blocks else []
    table = block_table(
        extra_blocks + blocks,
        HEADS,
        window=3,
        random=1,
        global_blocks=[*range(extra_blocks), *sequence_globals],
        seed=2,
    )
    block_ids = torch.arange(pad, pad + G + L) // 8
    keep = table[:, block_ids[:, None], block_ids][None] & real_rows(G + L, lengths + G)[:, None, None]
    keep = keep | (~keep.any(-1, keepdim=True))
    expected = dense_bigbird(module, torch.cat((global_x, x), 1), keep)
    out, global_out = module(x, global_x, lengths=lengths)
    assert_close(global_out, expected[:, :G], rtol=1e-10, atol=1e-10)
    real = real_rows(L, lengths)
    assert_close(out[real], expected[:, G:][real], rtol=1e-10, atol=1e-10)
    assert keep[:, :, :, :G].all()
    assert keep[0, :, :G].all()


@pytest.mark.parametrize(("blocks", "random"), [(40, 3), (12, 5), (4, 3), (1, 2), (9, 0)])
def test_block_table(blocks: int, random: int) -> None:
    options: dict[str, Any] = {"window": 3, "global_blocks": (0, -1)}
    table = block_table(blocks, HEADS, random=random, seed=7, **options)
    fixed = fixed_table(blocks)
    random_blocks = table & ~fixed
    free_blocks = (~fixed).sum(-1)
    assert torch.equal(table & fixed, fixed)
    assert torch.equal(random_blocks.sum(-1), free_blocks.clamp(max=random))
    assert torch.equal(table, block_table(blocks, HEADS, random=random, seed=7, **options))
    if blocks == 40:
        assert not torch.equal(table, block_table(blocks, HEADS, random=random, seed=8, **options))
        assert not torch.equal(table[0], table[1])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window": 2}, ValueError, "window: expected an odd number of blocks, got 2"),
        ({"block": 0}, ValueError, "block: expected an integer from 1"),
        ({"random": -1}, ValueError, "random: expected an integer from 0"),
        ({"global_blocks": 2}, TypeError, "global_blocks: expected a sequence of block indices"),
        ({"seed": "a"}, TypeError, "seed: expected an int"),
    ],
)
def test_wrong_bigbirds(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BigBirdAttention(WIDTH, HEADS, **options)


def test_wrong_calls_of_bigbird() -> None:
    module, x = BigBirdAttention(WIDTH, HEADS, block=4), torch.randn(2, 16, WIDTH)
    with pytest.raises(ValueError, match="global_x: expected"):
        module(x, torch.randn(2, 3, WIDTH + 1))
    with pytest.raises(ValueError, match="table: expected None with global_x"):
        module(x, torch.randn(2, 3, WIDTH), table=fixed_table(4))
    with pytest.raises(ValueError, match=r"Blocks\(table"):
        module(x, table=fixed_table(5))
    for global_x in (None, torch.randn(2, 3, WIDTH)):
        with pytest.raises(ValueError, match="lengths: expected from 0 to L = 16, got values from -1 to 3"):
            module(x, global_x, lengths=torch.tensor([-1, 3]))
    options: dict[str, Any] = {"window": 3, "random": 1, "global_blocks": (0,), "seed": 0}
    for name, value in {"window": 2, "random": -1, "global_blocks": 0, "seed": "a"}.items():
        with pytest.raises((ValueError, TypeError), match=name):
            block_table(4, HEADS, **options | {name: value})


@pytest.mark.parametrize(
    "module",
    [LongformerAttention(WIDTH, HEADS, window=(4, 4)), BigBirdAttention(WIDTH, HEADS, block=4, dropout=0.1)],
    ids=["longformer", "bigbird"],
)
def test_training_lowers_the_loss(module: Any) -> None:
    """A few steps lower the loss, and every parameter gets a gradient."""
    torch.manual_seed(1)
    x, target = torch.randn(2, 32, WIDTH), torch.randn(2, 32, WIDTH)
    options = {"global_tokens": [0]} if isinstance(module, LongformerAttention) else {}
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = (module(x, **options) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(p.grad is not None for p in module.parameters())
