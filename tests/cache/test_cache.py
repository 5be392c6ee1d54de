"""Tests of caches: decoding matches full attention, failed calls change nothing, memory use."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard import cache as C, masks as M, scores
from regard.cache._attend import ScaledKeywords
from support import assert_close, rel_l2
from support.cache import (
    EXACT,
    KINDS,
    PAGE,
    SINKS,
    WINDOW,
    Cache,
    D,
    Dv,
    H,
    Hkv,
    append,
    as_stored,
    attend,
    expected,
    new,
    tokens,
)

LIMITS = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
COPIES = [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))]
every_cache = pytest.mark.parametrize("kind", KINDS)


def attend_in_chunks(
    cache: Cache, q: Tensor, k: Tensor, v: Tensor, sizes: list[int], **options: Any
) -> Tensor:
    """Attends to all tokens in chunks whose sizes cycle through `sizes`. Returns (B, H, N, Dv)."""
    outs, begin, N = [], 0, q.shape[2]
    while begin < N:
        end = min(begin + sizes[len(outs) % len(sizes)], N)
        outs.append(attend(cache, *(x[:, :, begin:end] for x in (q, k, v)), **options))
        begin = end
    return torch.cat(outs, 2)


def decode_token_by_token(cache: Cache, q: Tensor, k: Tensor, v: Tensor) -> None:
    for i in range(q.shape[2]):
        attend(cache, *(x[:, :, i : i + 1] for x in (q, k, v)))


def content(cache: Cache) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in cache.state_dict().items()}


def assert_same(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    assert before.keys() == after.keys()
    for name, x in before.items():
        assert torch.equal(x, after[name]), name


# Decoding


@pytest.mark.parametrize("kind", ["growing", "fixed", "sliding", "streaming", "int8", "int4"])
def test_extend_matches_append_and_returns_the_stored_keys(kind: str) -> None:
    """A token like the previous one (shape, dtype, no grad) takes a fast path without checks.

    Any other token must still be checked.
    """
    extended, appended = new(kind), new(kind)
    _, k, v = tokens(kind, 2, 90)
    for i, j in [(0, 5), *((i, i + 1) for i in range(5, 80)), (80, 83), (83, 84), (84, 85)]:
        rows = extended.rows_with(j - i)
        stored = extended.extend(k[:, :, i:j], v[:, :, i:j])
        append(appended, k[:, :, i:j], v[:, :, i:j])
        assert stored.length == rows
        assert torch.equal(stored.dense(k.dtype)[0][:, :, i - j :], as_stored(kind, k[:, :, i:j]))
        assert_same(content(extended), content(appended))
    with pytest.raises(TypeError, match=r"v: expected a tensor of torch\.float32"):
        extended.extend(k[:, :, 85:86], v[:, :, 85:86].double())
    with pytest.raises(RuntimeError, match="k: expected requires_grad=False"):
        extended.extend(k[:, :, 85:86].requires_grad_(), v[:, :, 85:86])
    assert len(extended) == 85


@every_cache
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("sizes", [[1], [3], [17], [1, 17, 3]], ids=str)
def test_chunked_decoding_matches_full_attention(kind: str, dtype: torch.dtype, sizes: list[int]) -> None:
    q, k, v = tokens(kind, 2, 53, dtype)
    cache = new(kind, 2, dtype)
    out = attend_in_chunks(cache, q, k, v, sizes)
    assert out.dtype is dtype
    assert rel_l2(out, expected(kind, q, k, v)) < LIMITS[dtype]
    assert len(cache) == 53
    assert cache.lengths.tolist() == [53, 53]


@every_cache
def test_samples_of_different_length(kind: str) -> None:
    """Ragged chunks: each sample matches the same sample alone, and padded rows are zero."""
    counts = [[5, 0, 17], [1, 1, 1], [0, 9, 3], [1, 1, 1], [17, 2, 30], [1, 1, 1]]
    B, total = 3, [sum(column) for column in zip(*counts, strict=True)]
    q, k, v = tokens(kind, B, max(total))
    cache, starts = new(kind, B), [0] * B
    outs: list[list[Tensor]] = [[] for _ in range(B)]
    for step in counts:
        L = max(step)
        indices = [[min(starts[b] + i, max(total) - 1) for i in range(L)] for b in range(B)]
        chunk = [torch.stack([x[b, :, indices[b]] for b in range(B)]) for x in (q, k, v)]
        lengths = None if min(step) == L else step
        out, lse = attend(cache, *chunk, lengths=lengths, return_lse=True)
        for b, count in enumerate(step):
            outs[b].append(out[b, :, :count])
            assert not out[b, :, count:].any()
            assert (lse[b, :, count:] == -torch.inf).all()
            starts[b] += count
    assert cache.lengths.tolist() == total
    for b, length in enumerate(total):
        alone = expected(kind, *(x[b : b + 1, :, :length] for x in (q, k, v)))
        assert rel_l2(torch.cat(outs[b], 1)[None], alone) < LIMITS[torch.float32]


def relative() -> scores.RelativeBias:
    return scores.RelativeBias(torch.randn(8, H), bidirectional=False, max_distance=20)


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "alibi": lambda: {"bias": scores.Alibi.standard(H)},
    "relative": lambda: {"bias": relative()},
    "softcap and sink": lambda: {"softcap": 3.0, "sink": torch.randn(H)},
    "alibi and sink": lambda: {"bias": scores.Alibi.standard(H), "sink": torch.randn(H)},
    "dilated": lambda: {"mask": M.Dilated(2)},
    "default scale": lambda: {"scale": None},
}


@every_cache
@pytest.mark.parametrize("name", OPTIONS)
def test_options(kind: str, name: str) -> None:
    if kind == "latent" and name == "default scale":
        pytest.skip("a latent has no default scale")
    options = OPTIONS[name]()
    q, k, v = tokens(kind, 2, 53)
    out = attend_in_chunks(new(kind), q, k, v, [1, 3, 17], **options)
    options64 = {key: x for key, x in options.items() if key != "bias"}
    if "bias" in options:
        options64["bias"] = options["bias"].dense(53, 53)[None].double()
    if "sink" in options:
        options64["sink"] = options["sink"].double()
    assert rel_l2(out, expected(kind, q, k, v, **options64)) < LIMITS[torch.float32]


@every_cache
def test_window_counts_the_query_itself(kind: str) -> None:
    q, k, v = tokens(kind, 2, 40)
    out = attend_in_chunks(new(kind), q, k, v, [1, 17], window=5)
    assert rel_l2(out, expected(kind, q, k, v, mask=M.Window(4, 0))) < LIMITS[torch.float32]


def prompt_masks(N: int) -> dict[str, M.Mask]:
    """Returns masks over a prompt of N tokens whose chunks have other masks than the prompt."""
    g = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 3, (N,), generator=g).sort().values
    return {
        "dense": M.Dense(torch.rand(2, H, N, N, generator=g) > 0.4),
        "blocks": M.Blocks(torch.rand(1, 9, 9, generator=g) > 0.4, 6),
        "two documents": M.Documents(ids, ids.roll(1)),
        "random": M.RandomBlocks(2, 8) | M.Global([0, 30]),
        "not": ~M.Documents(ids) | M.sliding(5),
    }


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("sliding", "streaming")])
@pytest.mark.parametrize("name", prompt_masks(1))
def test_prefill_in_chunks_takes_the_cut_mask_of_the_prompt(kind: str, name: str) -> None:
    N, sizes = 53, (20, 17, 1, 15)
    q, k, v = tokens(kind, 2, N)
    cache, mask, outs, begin = new(kind), prompt_masks(N)[name], [], 0
    for size in sizes:
        end = begin + size
        part = mask.cut(begin, end, 0, end, Lk=N)
        outs.append(attend(cache, *(x[:, :, begin:end] for x in (q, k, v)), mask=part))
        begin = end
    assert rel_l2(torch.cat(outs, 2), expected(kind, q, k, v, mask=mask)) < LIMITS[torch.float32]


@every_cache
def test_biases_of_samples_of_different_length(kind: str) -> None:
    q, k, v = tokens(kind, 2, 41)
    cache, bias = new(kind), relative()
    append(cache, *(x[:, :, :31] for x in (k, v)), lengths=[31, 4])
    chunk = [torch.stack([x[0, :, 31:36], x[1, :, 4:9]]) for x in (q, k, v)]
    out = attend(cache, *chunk, bias=bias)
    for b, n in ((0, 36), (1, 9)):
        sample = (x[b : b + 1, :, :n] for x in (q, k, v))
        alone = expected(kind, *sample, bias=bias.dense(n, n)[None].double())
        assert rel_l2(out[b : b + 1], alone[:, :, n - 5 :]) < LIMITS[torch.float32]


@pytest.mark.parametrize("kind", ["growing", "paged", "int8", "latent"])
def test_mask_and_bias_tensors(kind: str) -> None:
    q, k, v = tokens(kind, 2, 20)
    keep, bias = torch.rand(2, H, 3, 20) < 0.7, torch.randn(1, H, 3, 20)
    cache = new(kind)
    append(cache, k[:, :, :17], v[:, :, :17])
    out = attend(cache, *(x[:, :, 17:] for x in (q, k, v)), mask=keep, bias=bias)
    reference = expected(kind, q[:, :, 17:], k, v, mask=M.Dense(keep), bias=bias.double())
    assert rel_l2(out, reference) < LIMITS[torch.float32]


@every_cache
def test_lse(kind: str) -> None:
    q, k, v = tokens(kind, 2, 30)
    cache = new(kind)
    append(cache, k[:, :, :29], v[:, :, :29])
    _, lse = attend(cache, *(x[:, :, 29:] for x in (q, k, v)), return_lse=True)
    _, reference = expected(kind, q, k, v, return_lse=True)
    assert_close(lse, reference[:, :, 29:])


@every_cache
def test_fewer_queries_than_tokens(kind: str) -> None:
    """The queries are those of the last tokens: a prefill often needs only the last output."""
    q, k, v = tokens(kind, 2, 23)
    cache = new(kind)
    reference = expected(kind, q, k, v)[:, :, -1:]
    assert rel_l2(attend(cache, q[:, :, -1:], k, v), reference) < LIMITS[torch.float32]
    scale = {"scale": 0.3}
    assert rel_l2(cache.attend(q[:, :, -1:], **scale), reference) < LIMITS[torch.float32]
    assert len(cache) == 23


def test_more_queries_than_a_window_holds() -> None:
    q, k, v = tokens("sliding", 2, 60)
    cache = new("sliding")
    append(cache, k, v)
    with pytest.raises(ValueError, match="q: expected fewer queries, got Lq = 5: keys of the first query"):
        cache.attend(q[:, :, -5:])


def test_positions() -> None:
    cache = new("growing")
    append(cache, *tokens("growing", 2, 5)[1:], lengths=[5, 2])
    assert cache.positions(3).tolist() == [[5, 6, 7], [2, 3, 4]]


@every_cache
def test_repeated_steps_are_still_checked(kind: str) -> None:
    """Repeated steps take a fast path, which must notice changed arguments."""
    q, k, v = tokens(kind, 2, 1)
    cache = new(kind)
    for _ in range(2):
        attend(cache, q, k, v)
    with pytest.raises(RuntimeError, match="expected requires_grad=False"):
        attend(cache, q, k.clone().requires_grad_(), v)
    with pytest.raises(TypeError, match="expected a tensor of"):
        attend(cache, q, k.double(), v)
    with pytest.raises(ValueError, match="softcap"):
        attend(cache, q, k, v, softcap=-1.0)
    with pytest.raises(ValueError, match="device"):
        attend(cache, q.to("meta"), k, v)
    attend(cache, q, k, v, sink=torch.zeros(H))
    with pytest.raises(ValueError, match="sink: expected q's device cpu, got meta"):
        attend(cache, q, k, v, sink=torch.zeros(H, device="meta"))
    assert len(cache) == 3
    if kind != "paged":
        cache.reorder([1])
        with pytest.raises(ValueError, match="expected shape"):
            attend(cache, q, k, v)
        attend(cache, q[1:], k[1:], v[1:])
        assert len(cache) == 4


# Memory


BYTES = {
    "growing": lambda rows: 2 * Hkv * rows * (D + Dv) * 4,
    "fixed": lambda rows: 2 * Hkv * rows * (D + Dv) * 4,
    "sliding": lambda rows: 2 * Hkv * (WINDOW + 2 + 16) * (D + Dv) * 4,
    "streaming": lambda rows: 2 * Hkv * (SINKS + WINDOW + 2 + 16) * (D + Dv) * 4,
    "paged": lambda rows: 2 * Hkv * rows * (D + Dv) * 4,
    "int8": lambda rows: 2 * Hkv * rows * (2 + 1) * 34,
    "int4": lambda rows: 2 * Hkv * rows * (2 + 1) * 20,
    "latent": lambda rows: 2 * rows * D * 4,
}


@every_cache
def test_nbytes(kind: str) -> None:
    q, k, v = tokens(kind, 2, 70)
    cache = new(kind)
    attend_in_chunks(cache, q, k, v, [3])
    assert cache.nbytes == BYTES[kind](128 if kind == "growing" else 96)


class WriteCounter(TorchDispatchMode):
    """Counts the elements that operators write to existing tensors or copy to new ones."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if any(fragment in name for fragment in ("copy", "clone", "cat", "index", "stack", "fill", "gather")):
            self.count += args[0].numel() if isinstance(args[0], Tensor) else sum(x.numel() for x in args[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["fixed", "latent"])
def test_decoding_copies_no_stored_keys(kind: str) -> None:
    q, k, v = tokens(kind, 2, 512)
    cache = new(kind, capacity=512)
    pointers = [tensor.data_ptr() for tensor in cache._content.storage.tensors.values()]
    with WriteCounter() as writes:
        decode_token_by_token(cache, q, k, v)
    assert [tensor.data_ptr() for tensor in cache._content.storage.tensors.values()] == pointers
    assert writes.count == k.numel() + (0 if kind == "latent" else v.numel())


def test_growing_copies_each_key_less_than_twice() -> None:
    _, k, v = tokens("growing", 2, 512)
    cache = new("growing")
    with WriteCounter() as writes:
        for i in range(512):
            cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
    assert writes.count < 2 * (k.numel() + v.numel())


def test_sliding_memory_is_bounded_and_copies_are_few() -> None:
    q, k, v = tokens("streaming", 1, 600)
    cache = C.SlidingCache(1, Hkv, D, Dv, window=32, sinks=4)
    assert cache.spare == 16
    nbytes = cache.nbytes
    with WriteCounter() as writes:
        decode_token_by_token(cache, q, k, v)
    assert cache.nbytes == nbytes
    assert writes.count < (1 + (4 + 32 + 16) / 16) * (k.numel() + v.numel())


@pytest.mark.parametrize("kind", ["growing", "sliding", "streaming", "int4", "latent"])
def test_replaced_storage_is_freed(kind: str) -> None:
    q, k, v = tokens(kind, 2, 80)
    cache = new(kind)
    attend(cache, *(x[:, :, :1] for x in (q, k, v)))
    first = weakref.ref(next(iter(cache._content.storage.tensors.values())))
    fork = cache.fork()
    cache.reorder([1, 0])
    assert first() is None
    second = weakref.ref(next(iter(cache._content.storage.tensors.values())))
    append(cache, k[:, :, 1:], v[:, :, 1:])
    assert (second() is None) == (kind in ("growing", "sliding", "streaming"))
    assert len(fork) == 1


def test_a_latent_has_no_default_scale() -> None:
    cache: Any = new("latent")
    with pytest.raises(TypeError, match="scale: expected a number"):
        cache.attend(torch.randn(2, H, 1, D), torch.randn(2, 1, D), scale=None)
    assert len(cache) == 0


def test_latent_values_are_a_view_of_the_keys() -> None:
    cache = new("latent")
    append(cache, *tokens("latent", 2, 5)[1:])
    stored = cache._content.storage.stored(5)
    assert stored.k.data_ptr() == stored.v.data_ptr()
    k, v = stored.dense(torch.float32)
    assert torch.equal(k[..., :Dv], v)


# Quantisation


@pytest.mark.parametrize(("bits", "limit"), [(8, 0.01), (4, 0.12)])
def test_quantization_error(bits: int, limit: float) -> None:
    q, k, v = torch.randn(1, 8, 4, 128), torch.randn(1, 2, 1024, 128), torch.randn(1, 2, 1024, 128)
    errors = C.quantization_error(k, v, q, bits=bits)
    assert errors.out is not None
    assert limit / 3 < errors.out < limit
    assert 0 < errors.k < limit
    assert 0 < errors.v < limit
    assert C.quantization_error(k, v, bits=bits) == errors._replace(out=None)


def test_quantization_error_of_zeros_and_wrong_arguments() -> None:
    q, zeros = torch.randn(1, 2, 3, 8), torch.zeros(1, 2, 3, 8)
    assert C.quantization_error(zeros, zeros, q) == (8, 0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="mask: expected no options of attention without q"):
        C.quantization_error(zeros, zeros, mask=M.Causal())
    with pytest.raises(TypeError, match="v: expected a float tensor, got int64"):
        C.quantization_error(zeros, zeros.long())


@pytest.mark.parametrize(("kind", "levels"), [("int8", 254), ("int4", 15)])
@pytest.mark.parametrize("channels", [32, 37, 5, 1])
def test_dequantised_values_are_close(kind: str, levels: int, channels: int) -> None:
    """Rounding loses up to half a step in each group.

    With 4 bits it loses a little more: the least-squares fit moves the ends of the range inwards.
    """
    x = torch.randn(4, 3, 50, channels) * torch.logspace(-2, 2, 50)[:, None] + 3
    dequantised = as_stored(kind, x)
    for group in range(0, channels, 32):
        values = x[..., group : group + 32]
        if kind == "int8":
            step = 2 * values.abs().amax(-1) / levels
        else:
            step = (values.amax(-1) - values.amin(-1)) / levels
        error = (dequantised[..., group : group + 32] - values).abs().amax(-1)
        assert (error <= 1.01 * step + 2e-3 * values.abs().amax(-1)).all()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantising_constant_zero_and_non_finite_groups(kind: str) -> None:
    constant = as_stored(kind, torch.full((2, 40), 2.5))
    assert_close(constant, torch.full((2, 40), 2.5), rtol=1e-3)
    assert not as_stored(kind, torch.zeros(2, 40)).any()
    for value in (torch.nan, torch.inf, 1e9):
        x = torch.ones(1, 64)
        x[0, 3] = value
        dequantised = as_stored(kind, x)
        assert dequantised[0, :32].isnan().any(), "a group that cannot be encoded must contain NaN"
        assert dequantised[0, 32:].isfinite().all()


# Errors


def failing_calls(kind: str) -> dict[str, tuple[type[Exception], str, Callable[[Cache], Any]]]:
    q, k, v = tokens(kind, 2, 3)
    k_name = "latent" if kind == "latent" else "k"
    return {
        "dtype": (TypeError, f"{k_name}: expected a tensor of", lambda c: attend(c, q, k.double(), v)),
        "q dtype": (TypeError, "q: expected a tensor of torch.float32", lambda c: attend(c, q.half(), k, v)),
        "D": (ValueError, f"{k_name}: expected shape", lambda c: attend(c, q, k[..., 1:], v)),
        "B": (ValueError, f"{k_name}: expected shape", lambda c: attend(c, q, k[:1], v[:1])),
        "q B": (ValueError, "q: expected", lambda c: attend(c, q[:1], k, v)),
        "rank": (ValueError, f"{k_name}: expected shape", lambda c: attend(c, q, k[0], v)),
        "lengths": (ValueError, "lengths: expected 0 to L = ", lambda c: attend(c, q, k, v, lengths=[4, 0])),
        "lengths B": (ValueError, "lengths: expected integers", lambda c: attend(c, q, k, v, lengths=[1])),
        "Lq": (ValueError, "q: expected a query", lambda c: attend(c, q[:, :, :2], k, v, lengths=[1, 2])),
        "impl": (ValueError, "impl: expected", lambda c: attend(c, q, k, v, impl="best")),
        "softcap": (ValueError, "softcap", lambda c: attend(c, q, k, v, softcap=-1.0)),
        "heads": (ValueError, "heads", lambda c: attend(c, q[:, :5], k, v)),
        "window": (ValueError, "window", lambda c: attend(c, q, k, v, window=0)),
        "mask": (TypeError, "mask", lambda c: attend(c, q, k, v, mask=torch.ones(3, 3))),
        "incomplete inputs": (ValueError, "k, v: expected both|lengths: expected None", _omit_input),
        "crop": (ValueError, "n: expected at most", lambda c: c.crop(10**6)),
        "crop more": (ValueError, "n: expected at most", lambda c: c.crop(-40)),
        "reorder": (ValueError, "index: expected", lambda c: c.reorder([0, 7])),
        "state": (ValueError, "state: expected the tensors", lambda c: c.load_state_dict({})),
        "state shape": (ValueError, "(state|lengths): expected", lambda c: c.load_state_dict(_bad_state(c))),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["growing", "paged", "int8"])
def test_swapped_heads_and_lengths_are_recognised(kind: str) -> None:
    swapped = (x.transpose(1, 2) for x in tokens(kind, 2, Hkv + 2))
    with pytest.raises(ValueError, match=r"k: expected .*; is this \(B, L, H, D\)\? transpose\(1, 2\)$"):
        attend(new(kind), *swapped)


def test_tokens_of_another_batch_or_of_other_heads_say_which_cache_to_use() -> None:
    k, v = torch.zeros(3, 2, 5, 8), torch.zeros(3, 2, 5, 8)
    for wrong, needed in ((C.KVCache(1, 2, 8), "B = 3"), (C.KVCache(1, 4, 8), "B = 3, Hkv = 2")):
        with pytest.raises(ValueError, match=f"k: expected .* got .*; use a cache with {needed}$"):
            wrong.append(k, v)
    with pytest.raises(ValueError, match=r"latent: expected .* got \(3, 4, 8\); use a cache with B = 3$"):
        C.LatentCache(1, 6, 2).append(torch.zeros(3, 4, 8))
    with pytest.raises(ValueError, match=r"k: expected .* got \(3, 2, 5, 8\)$"):
        C.KVCache(3, 2, 16).append(k, v)


def _omit_input(cache: Cache) -> None:
    if isinstance(cache, C.LatentCache):
        cache.attend(torch.zeros(2, H, 1, D), scale=1.0, lengths=[1, 1])
    cache.attend(torch.zeros(2, H, 1, D), torch.zeros(2, Hkv, 1, D))


def _bad_state(cache: Cache) -> dict[str, Tensor]:
    state = content(cache)
    name = next(iter(state))
    return state | {name: state[name][..., 1:]}


@every_cache
@pytest.mark.parametrize("call", failing_calls("fixed"))
def test_a_failed_call_changes_nothing(kind: str, call: str) -> None:
    if kind == "latent" and call == "heads":
        pytest.skip("one key head serves any number of query heads")
    error, message, fail = failing_calls(kind)[call]
    cache = new(kind)
    append(cache, *tokens(kind, 2, 20)[1:], lengths=[20, 9])
    before, nbytes, text = content(cache), cache.nbytes, repr(cache)
    with pytest.raises(error, match=message):
        fail(cache)
    assert_same(before, content(cache))
    assert (cache.nbytes, repr(cache)) == (nbytes, text)


@every_cache
def test_an_error_in_attention_changes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If attention raises in `attend`, the cache keeps its state.

    The lengths cover the points where storage grows, shifts or takes a new page.
    """
    import regard.cache._attend as attend_module

    def fail(*args: Any, **options: Any) -> Tensor:
        raise MemoryError("no room")

    cache = new(kind)
    q, k, v = tokens(kind, 2, 70)
    for start in range(0, 70, 7):
        chunk = [x[:, :, start : start + 7] for x in (q, k, v)]
        before, nbytes, text = content(cache), cache.nbytes, repr(cache)
        with monkeypatch.context() as patch:
            patch.setattr(attend_module, "attend_stored", fail)
            with pytest.raises(MemoryError):
                attend(cache, *chunk)
        assert_same(before, content(cache))
        assert (cache.nbytes, repr(cache)) == (nbytes, text)
        out = attend(cache, *chunk)
        assert rel_l2(out, expected(kind, *(x[:, :, : start + 7] for x in (q, k, v)))[:, :, start:]) < 2e-6


@pytest.mark.parametrize("kind", ["fixed", "int8", "latent", "paged"])
def test_full_caches_raise(kind: str) -> None:
    q, k, v = tokens(kind, 2, 33)
    cache = new(kind, capacity=32)
    append(cache, k[:, :, :30], v[:, :, :30])
    before = content(cache)
    messages = {
        "paged": "PagedCache is full: 2 pages of 16 tokens needed, 0 of 4 are free",
        "latent": "LatentCache is full: 33 tokens needed, capacity 32, of which 2 are free",
    }
    message = messages.get(kind, "Cache is full: 33 tokens needed, capacity 32, of which 2 are free")
    with pytest.raises(ValueError, match=message):
        attend(cache, *(x[:, :, 30:] for x in (q, k, v)))
    assert_same(before, content(cache))
    attend(cache, *(x[:, :, 30:32] for x in (q, k, v)))
    assert len(cache) == 32


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: C.KVCache(0, 1, 4), ValueError, "B: expected an integer from 1"),
        (lambda: C.KVCache(1, 1, 4, capacity=0), ValueError, "capacity: expected"),
        (lambda: C.KVCache(1, 1, 4, dtype=torch.int8), TypeError, "dtype: expected float64"),
        (lambda: C.SlidingCache(1, 1, 4, window=0), ValueError, "window: expected"),
        (lambda: C.SlidingCache(1, 1, 4, window=4, sinks=-1), ValueError, "sinks: expected"),
        (lambda: C.QuantizedCache(1, 1, 4, bits=5), ValueError, "bits: expected 8 or 4, got int 5"),
        (lambda: C.PagedCache(4, 1, 4, page=24), ValueError, "page: expected a power of two"),
        (lambda: C.PagedCache(4, 1, 4, page=8), ValueError, "page: expected"),
        (lambda: C.LatentCache(1, 0, 4), ValueError, "rank: expected"),
        (
            lambda: C.quantization_error(torch.ones(2, 3), torch.ones(2, 3), bits=2),
            ValueError,
            "bits: expected",
        ),
    ],
)
def test_wrong_arguments(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    "options", [{"mask": M.Prefix(2)}, {"mask": M.Dense(torch.ones(1, 1, dtype=torch.bool))}]
)
def test_sliding_rejects_masks_of_absolute_positions(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="mask: expected a mask of distances in a SlidingCache"):
        attend(new("sliding"), *tokens("sliding", 2, 1), **options)
    with pytest.raises(TypeError, match=r"bias: expected scores\.Alibi"):
        attend(new("sliding"), *tokens("sliding", 2, 1), bias=torch.zeros(1, 1))


@every_cache
def test_keys_that_require_grad_raise(kind: str) -> None:
    q, k, v = tokens(kind, 2, 3)
    cache = new(kind)
    with pytest.raises(RuntimeError, match="expected requires_grad=False, because a cache keeps no gradient"):
        attend(cache, q, k.clone().requires_grad_(), v)
    assert len(cache) == 0
    with torch.no_grad():
        attend(cache, q, k.clone().requires_grad_(), v)
    with torch.inference_mode():
        attend(cache, *tokens(kind, 2, 1))
    attend(cache, *tokens(kind, 2, 1))
    assert len(cache) == 5


@every_cache
def test_later_writes_do_not_change_gradients_of_queries(kind: str) -> None:
    q, k, v = tokens(kind, 2, 6)
    slopes = torch.rand(H)
    grads = []
    for later in (False, True):
        cache, leaves = new(kind), [x.clone().requires_grad_() for x in (q, slopes)]
        out = attend(cache, leaves[0], k, v, bias=scores.Alibi(leaves[1]))
        if later:
            cache.crop(4)
            attend(cache, q[:, :, :3], 10 * k[:, :, :3], 10 * v[:, :, :3])
        grads.append(torch.autograd.grad(out.square().sum(), leaves))
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


@every_cache
def test_caches_created_in_inference_mode(kind: str) -> None:
    with torch.inference_mode():
        cache = new(kind)
        attend(cache, *tokens(kind, 2, 70))
    attend(cache, *tokens(kind, 2, 1))
    cache.reorder([1, 0])
    attend(cache, *tokens(kind, 2, 1))
    assert len(cache) == 72


# Reordering, copies and state dicts


@pytest.mark.parametrize("kind", ["growing", "sliding", "int4", "latent"])
def test_reorder_may_change_the_batch_size(kind: str) -> None:
    q, k, v = tokens(kind, 3, 40)
    cache = new(kind, 1)
    append(cache, k[:1, :, :30], v[:1, :, :30])
    cache.reorder([0, 0, 0])
    assert cache.B == 3
    for x in (q, k, v):
        x[:, :, :30] = x[:1, :, :30].clone()
    v = k[..., :Dv] if kind == "latent" else v
    out = attend_in_chunks(cache, *(x[:, :, 30:] for x in (q, k, v)), sizes=[1])
    assert rel_l2(out, expected(kind, q, k, v)[:, :, 30:]) < LIMITS[torch.float32]


@every_cache
@pytest.mark.parametrize("make_copy", COPIES)
def test_copies_are_independent(kind: str, make_copy: Callable[[Cache], Cache]) -> None:
    q, k, v = tokens(kind, 2, 12)
    cache = new(kind)
    attend_in_chunks(cache, *(x[:, :, :8] for x in (q, k, v)), sizes=[3])
    copied = make_copy(cache)
    before = content(cache)
    out = attend_in_chunks(copied, *(x[:, :, 8:] for x in (q, k, v)), sizes=[1])
    assert rel_l2(out, expected(kind, q, k, v)[:, :, 8:]) < LIMITS[torch.float32]
    assert_same(before, content(cache))


@every_cache
def test_state_dicts_survive_safetensors(kind: str, tmp_path: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    cache, restored = new(kind), new(kind)
    append(cache, *tokens(kind, 2, 30)[1:], lengths=[30, 11])
    safetensors.save_file(cache.state_dict(), tmp_path / "cache")
    restored.load_state_dict(safetensors.load_file(tmp_path / "cache"))
    assert_same(content(cache), content(restored))
    chunk = tokens(kind, 2, 2)
    assert torch.equal(attend(cache, *chunk), attend(restored, *chunk))


@every_cache
def test_state_dict_is_a_snapshot(kind: str) -> None:
    cache = new(kind)
    append(cache, *tokens(kind, 2, 9)[1:])
    state = cache.state_dict()
    before = {name: x.clone() for name, x in state.items()}
    cache.crop(3)
    append(cache, *tokens(kind, 2, 9)[1:])
    assert_same(before, state)


def test_rollback_at_every_length() -> None:
    q, k, v = tokens("streaming", 2, 100)
    cache = new("streaming")
    for n in range(0, 100, 2):
        append(cache, k[:, :, n : n + 2], v[:, :, n : n + 2])
        cache.crop(-2)
        out = attend(cache, *(x[:, :, n : n + 2] for x in (q, k, v)))
        reference = expected("streaming", *(x[:, :, : n + 2] for x in (q, k, v)))[:, :, n:]
        assert rel_l2(out, reference) < LIMITS[torch.float32]
    with pytest.raises(ValueError, match="n: expected to drop at most 2 of 100 tokens"):
        cache.crop(40)
    cache.crop(SINKS)
    out = attend_in_chunks(cache, *(x[:, :, SINKS:] for x in (q, k, v)), sizes=[5])
    assert rel_l2(out, expected("streaming", q, k, v)[:, :, SINKS:]) < LIMITS[torch.float32]


def test_repr() -> None:
    cache = new("fixed")
    append(cache, *tokens("fixed", 2, 5)[1:], lengths=[5, 2])
    assert repr(cache) == (
        "KVCache(B=2, Hkv=3, D=37, Dv=11, torch.float32: length [5, 2], 96 rows, 110,592 bytes)"
    )
    assert "grows" in repr(new("growing"))
    assert "window=7, sinks=3" in repr(new("streaming"))
    assert "bits=4" in repr(new("int4"))
    assert "rank=11, rope=26" in repr(new("latent"))
    assert "2 sequences of length 0, 12 of 12 pages free" in repr(new("paged"))


# Pages


def test_shared_prefixes_are_stored_once() -> None:
    q, k, v = tokens("paged", 1, 60)
    cache = new("paged", 1, capacity=160)
    append(cache, k[:, :, :40], v[:, :, :40])
    assert cache.free_pages == 10 - 3
    fork = cache.add(like=0)
    short = cache.add(like=0, tokens=35)
    assert cache.free_pages == 10 - 3
    assert cache.lengths.tolist() == [40, 40, 35]
    out = cache.attend(q[:, :, 40:41], k[:, :, 40:41], v[:, :, 40:41], ids=[fork], scale=0.3)
    assert cache.free_pages == 10 - 4, "the page that was not full is copied, the others stay shared"
    assert rel_l2(out, expected("paged", *(x[:, :, :41] for x in (q, k, v)))[:, :, 40:]) < 2e-6
    continuation = [torch.randn_like(x[:, :, :25]) for x in (q, k, v)]
    out = attend(cache, *continuation, ids=[short])
    full_sequence = [torch.cat([x[:, :, :35], y], 2) for x, y in zip((q, k, v), continuation, strict=True)]
    assert rel_l2(out, expected("paged", *full_sequence)[:, :, 35:]) < 2e-6
    out = attend(cache, *(x[:, :, 40:] for x in (q, k, v)), ids=[0])
    assert rel_l2(out, expected("paged", q, k, v)[:, :, 40:]) < 2e-6
    for sequence_id in (0, fork, short):
        cache.free(sequence_id)
    assert cache.free_pages == 10
    assert cache.ids == ()


def test_many_sequences_in_one_call_in_any_order() -> None:
    cache = C.PagedCache(40, Hkv, D, Dv)
    lengths = [33, 1, 16, 15, 17]
    q, k, v = tokens("paged", 5, 40)
    for b, n in enumerate(lengths):
        cache.append(k[b : b + 1, :, :n], v[b : b + 1, :, :n], ids=[cache.add()])
    order = [3, 0, 4, 2]
    chunk = [torch.stack([x[b, :, lengths[b] : lengths[b] + 2] for b in order]) for x in (q, k, v)]
    out = attend(cache, *chunk, ids=order)
    for row, b in enumerate(order):
        n = lengths[b] + 2
        alone = expected("paged", *(x[b : b + 1, :, :n] for x in (q, k, v)))
        assert rel_l2(out[row : row + 1], alone[:, :, -2:]) < 2e-6
    assert cache.lengths.tolist() == [35, 1, 18, 17, 19]


def test_beams_share_pages() -> None:
    cache = new("paged", 3, capacity=64)
    append(cache, *tokens("paged", 3, 32)[1:])
    before = cache.free_pages
    cache.reorder([1, 1, 1])
    assert cache.free_pages == before + 4


def test_a_deleted_fork_frees_its_pages() -> None:
    cache = new("paged", 1, capacity=160)
    append(cache, *tokens("paged", 1, 20)[1:])
    fork = cache.fork()
    fork.append(*tokens("paged", 1, 20)[1:])
    assert cache.free_pages == 10 - 4
    del fork
    gc.collect()
    assert cache.free_pages == 10 - 2


@pytest.mark.parametrize("make_copy", COPIES)
def test_a_deleted_copy_frees_its_pages(make_copy: Callable[[Any], Any]) -> None:
    """The fork of the copy is the only user of the copied pool that is left."""
    cache = new("paged", 1, capacity=160)
    append(cache, *tokens("paged", 1, 40)[1:])
    copied = make_copy(cache)
    fork = copied.fork()
    fork.reset()
    assert (cache.free_pages, fork.free_pages) == (10 - 3, 10 - 3)
    del copied
    gc.collect()
    assert (cache.free_pages, fork.free_pages) == (10 - 3, 10)


@pytest.mark.parametrize("make_copy", COPIES)
def test_a_copied_pool_has_no_users_that_were_not_copied(make_copy: Callable[[Any], Any]) -> None:
    cache = new("paged", 1, capacity=160)
    append(cache, *tokens("paged", 1, 40)[1:])
    fork = cache.fork()
    append(fork, *tokens("paged", 1, 40)[1:])
    alone = make_copy(cache)
    assert alone.free_pages == 10 - 3
    alone.reset()
    assert alone.free_pages == 10
    first, second = make_copy((cache, fork))
    assert first.free_pages == second.free_pages == cache.free_pages == 10 - 6
    second.reset()
    assert first.free_pages == 10 - 3
    assert_same(content(cache), content(first))


def test_a_shallow_copy_is_a_fork() -> None:
    cache = new("paged", 1, capacity=160)
    append(cache, *tokens("paged", 1, 20)[1:])
    before, copied = content(cache), copy.copy(cache)
    append(copied, *tokens("paged", 1, 20)[1:])
    copied.free(0)
    del copied
    gc.collect()
    assert cache.free_pages == 10 - 2
    assert_same(before, content(cache))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.free(9), r"ids: expected at least one of \[0, 1\], without repeats, got \[9\]"),
        (lambda c: c.crop(0, ids=[0, 0]), r"got \[0, 0\]"),
        (lambda c: c.crop(0, ids=[]), r"got \[\]"),
        (lambda c: c.add(like=0, tokens=99), "tokens: expected at most the 20"),
        (lambda c: c.add(tokens=3), "tokens: expected None without like"),
        (lambda c: c.reorder([0]), "index: expected integers"),
        (
            lambda c: c.load_state_dict(c.state_dict() | {"table": torch.zeros(2, 1, dtype=torch.int32)}),
            "table",
        ),
        (lambda c: c.load_state_dict(c.state_dict() | {"ids": torch.tensor([1, 1])}), "ids without repeats"),
    ],
)
def test_wrong_sequence_ids(call: Callable[[Cache], Any], message: str) -> None:
    cache = new("paged")
    append(cache, *tokens("paged", 2, 20)[1:])
    before = content(cache)
    with pytest.raises(ValueError, match=message):
        call(cache)
    assert_same(before, content(cache))


def test_loading_a_state_that_needs_more_pages() -> None:
    large, small = new("paged", 2, capacity=64), new("paged", 2, capacity=32)
    append(large, *tokens("paged", 2, 40)[1:])
    append(small, *tokens("paged", 2, 30)[1:])
    before = content(small)
    with pytest.raises(ValueError, match="PagedCache is too small: 6 pages needed, 4 of 4 free"):
        small.load_state_dict(large.state_dict())
    assert_same(before, content(small))
    assert PAGE == 16


@every_cache
def test_the_signature_of_attend_names_every_option(kind: str) -> None:
    parameters = inspect.signature(type(new(kind)).attend).parameters
    keyword_only = {name for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY} - {
        "ids"
    }
    assert keyword_only == {"return_lse", *ScaledKeywords.__annotations__}
    assert {p.kind for p in parameters.values()}.isdisjoint({inspect.Parameter.VAR_KEYWORD})
    assert parameters["impl"].default == "auto"


def test_every_kind_is_tested() -> None:
    assert {type(new(kind)).__name__ for kind in KINDS} == {
        "KVCache", "SlidingCache", "PagedCache", "QuantizedCache", "LatentCache"
    }  # fmt: skip
    assert set(EXACT) | {"int8", "int4"} == set(KINDS)
    elsewhere = {"LinearCache"}  # stores no keys; tested in tests/nn/test_linear.py
    assert {name for name in dir(regard.cache) if name.endswith("Cache")} - elsewhere == {
        type(new(kind)).__name__ for kind in KINDS
    }


def test_start_is_the_common_length() -> None:
    cache, k = C.KVCache(2, 1, 4), torch.randn(2, 1, 3, 4)
    assert cache.start == 0
    cache.append(k, k)
    assert cache.start == 3
    cache.append(k, k, lengths=[1, 3])
    assert cache.start is None
    cache.crop([3, 3])
    assert cache.start == 3


@pytest.mark.parametrize("kind", ["fixed", "int8", "latent"])
def test_the_first_token_is_checked_like_any_other(kind: str) -> None:
    cache = new(kind)
    name = "latent" if kind == "latent" else "k"
    wrong = ("x",) if kind == "latent" else ("x", "y")
    with pytest.raises(TypeError, match=f"{name}: expected a tensor"):
        cache.attend(torch.randn(cache.B, 2, 1, cache.D), *wrong, scale=1.0)
    assert len(cache) == 0
