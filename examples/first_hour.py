"""The first hour with Regard: fourteen tasks, each in at most ten lines.

`python examples/first_hour.py` prints the title and the result of each task. A result that can be wrong
is compared with an independent formula, and the script raises if they differ. `--only 4` runs one task.
Pictures and pages are written to build/first_hour. Task 6 draws MiniLM from the gallery, or a BERT with
random weights if the gallery is not installed.
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
import pydoc
import re
import subprocess
import sys
import wave
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor

import regard
from regard import convert, cost, masks, nn, packing, see
from regard.cache import KVCache
from regard.positions import Rotary

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "first_hour"


class Task(NamedTuple):
    title: str
    run: Callable[[], str]  # returns a short result, and raises if the result is wrong


TASKS: list[Task] = []


def task(title: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Adds a function to the list of tasks."""

    def add(run: Callable[[], str]) -> Callable[[], str]:
        TASKS.append(Task(title, run))
        return run

    return add


# What the results are compared with


def formula(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """Computes softmax attention as in a textbook, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT / math.sqrt(q.shape[-1]) + bias).masked_fill(~keep, -math.inf)
    return (scores.softmax(-1).nan_to_num() @ v).float()  # zeros if a query may attend to no key


def distance(result: Tensor, expected: Tensor) -> str:
    """Returns the largest difference as text. Raises if it is above 1e-5 or a value is NaN."""
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)
    return f"within {(result - expected).abs().max():.0e}"


# 1 to 3: attention


@task("A padded batch: causal, a window of 4 keys, grouped heads")
def padded_batch() -> str:
    q = torch.randn(2, 8, 12, 16)  # (B, heads, tokens, channels)
    k, v = torch.randn(2, 2, 2, 12, 16)  # two key heads for eight query heads
    lengths = torch.tensor([12, 7])
    out = regard.attention(q, k, v, mask=masks.sliding(4) & masks.Lengths(lengths))
    i, j = torch.arange(12)[:, None], torch.arange(12)
    keep = (j <= i) & (j > i - 4) & (j < lengths[:, None, None, None])
    return f"output {tuple(out.shape)}, equal to the formula {distance(out, formula(q, k, v, keep))}"


@task("The same with an own mask (B, Lq, Lk), first bool, then float")
def own_masks() -> str:
    q, (k, v) = torch.randn(2, 8, 12, 16), torch.randn(2, 2, 2, 12, 16)
    own, added = torch.rand(2, 12, 12) < 0.7, torch.randn(2, 12, 12)  # own: True = may attend
    mask = masks.sliding(4) & masks.Lengths([12, 7])
    by_bool = regard.attention(q, k, v, mask=mask & masks.Dense(own[:, None]))
    by_float = regard.attention(q, k, v, mask=mask, bias=added[:, None])
    keep = torch.ones(12, 12).tril().triu(-3).bool() & (torch.arange(12) < torch.tensor([[[12]], [[7]]]))
    first = distance(by_bool, formula(q, k, v, (keep & own)[:, None]))
    return f"bool {first}, float {distance(by_float, formula(q, k, v, keep[:, None], added[:, None]))}"


@task("Swap torch.nn.MultiheadAttention")
def swap_multihead_attention() -> str:
    theirs = torch.nn.MultiheadAttention(64, 8, batch_first=True)
    ours = nn.MultiheadAttention(64, 8, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    x, padding = torch.randn(2, 12, 64), torch.arange(12) >= torch.tensor([[12], [7]])
    out, weights = ours(x, x, x, key_padding_mask=padding)
    expected, expected_weights = theirs(x, x, x, key_padding_mask=padding)
    return f"outputs {distance(out, expected)}, weights {distance(weights, expected_weights)}"


# 4 and 5: generation and memory


@task("A decoder of 4 layers with RoPE and GQA generates 20 tokens with a cache")
@torch.no_grad()
def generate_with_a_cache() -> str:
    blocks = [nn.DecoderBlock(64, 4, kv_heads=2, position=Rotary(16)) for _ in range(4)]
    decoder = nn.Stack(blocks, torch.nn.LayerNorm(64)).eval()
    embed, head = torch.nn.Embedding(100, 64), torch.nn.Linear(64, 100)
    caches, tokens = decoder.new_caches(1), [5]
    for _ in range(20):
        x = decoder(embed(torch.tensor([tokens[-1:]])), caches=caches)
        tokens.append(int(head(x).argmax()))
    assert head(decoder(embed(torch.tensor([tokens]))))[0, :-1].argmax(-1).tolist() == tokens[1:]
    return f"{tokens[1:]}, the same as without a cache"


@task("The bytes that multi-head latent attention (MLA) saves")
@torch.no_grad()
def bytes_saved_by_mla() -> str:
    heads = nn.Attention(256, 8).eval()
    latent = nn.LatentAttention(256, 8, rank=64, nope_dim=32, rope_dim=16).eval()
    caches = [layer.new_cache(2, capacity=100) for layer in (heads, latent)]
    for layer, cache in zip((heads, latent), caches, strict=True):
        layer(torch.randn(2, 100, 256), cache=cache)
    many, few = (cache.nbytes for cache in caches)
    assert (many, few) == (2 * 100 * 4 * (256 + 256), 2 * 100 * 4 * (64 + 16))
    return f"{few:,} bytes instead of {many:,} for 2 x 100 tokens: {1 - few / many:.0%} less"


# 6 and 7: models of Transformers


def bert() -> tuple[Any, Any]:
    """Returns MiniLM and its tokenizer, or a BERT with random weights and a tokenizer of characters."""
    try:
        from regard_gallery.models import minilm

        return minilm.load(attention="eager")[:2]
    except ModuleNotFoundError:
        return random_bert()


def random_bert() -> tuple[Any, Any]:
    from transformers import BertConfig, BertModel, BertTokenizer

    sizes = {"hidden_size": 96, "num_hidden_layers": 3, "intermediate_size": 96}
    characters = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz天上有明月"]
    characters += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    config = BertConfig(vocab_size=len(characters), attn_implementation="eager", **sizes)
    tokenizer = BertTokenizer(vocab={token: i for i, token in enumerate(characters)})
    return BertModel(config).eval(), tokenizer


@task("Heat maps of a layer of BERT: recorded, from outputs.attentions, with Chinese tokens")
@torch.no_grad()
def heat_maps() -> str:
    model, tokenizer = bert()
    seen = see.read(model, tokenizer, "The cat sat on the mat")
    see.heatmap(seen, layer=1, head=4, path=FOLDER / "recorded.png")
    ids = tokenizer("天上有明月", return_tensors="pt")  # a bright moon is in the sky
    tokens = tokenizer.convert_ids_to_tokens(ids.input_ids[0].tolist())
    outputs = model(**ids, output_attentions=True)
    see.heatmap(outputs.attentions, tokens, layer=1, head=4, path=FOLDER / "chinese.svg")
    again = see.read(model, tokenizer, "天上有明月")[1, 4].weights()
    return f"recorded.png, chinese.svg; recorded weights {distance(again, outputs.attentions[1][0, 4])}"


def llama() -> Any:
    """Returns a Llama with random weights, in place of `from_pretrained(path)`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 100, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()


@task("A Transformers model with prompts that are padded on the left")
def left_padding() -> str:
    import regard.hf  # noqa: F401, adds the name "regard" to Transformers

    model, longer, shorter = llama(), torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[11, 12, 13]])
    alone = [model.generate(x, max_new_tokens=8, do_sample=False)[0, -8:] for x in (longer, shorter)]
    model.set_attn_implementation("regard")
    ids = torch.cat([longer, F.pad(shorter, (2, 0))])
    batch = model.generate(ids, attention_mask=(ids != 0).long(), max_new_tokens=8, do_sample=False)
    assert torch.equal(batch[:, -8:], torch.stack(alone))
    return f"{batch[1, -8:].tolist()} after the padded prompt, the same as SDPA without padding"


# 8: cost


@task("MHA, GQA or MLA: the cost at 8,192 tokens, and the caches at 131,072")
def choose_a_mechanism() -> str:
    mha = cost.AttentionSpec(2048, 16, mask=masks.Causal())
    gqa = cost.AttentionSpec(2048, 16, kv_heads=4, mask=masks.Causal())
    sizes = {"rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}
    mla = cost.LatentSpec(2048, 16, **sizes, mask=masks.Causal())
    layers = {"MHA": mha, "GQA": gqa, "MLA": mla}
    caches = {name: cost.cache_bytes(layer, 131_072, format="bfloat16") for name, layer in layers.items()}
    assert list(caches.values()) == [131_072 * 2 * n for n in (2 * 16 * 128, 2 * 4 * 128, 512 + 64)]
    bytes_of = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in caches.items())
    return f"{cost.table(layers, 8192)}\n16-bit cache of a layer at 131,072 tokens: {bytes_of}"


# 9 and 10: packed documents, linear attention


@task("Packed documents with dropout")
def packed_documents() -> str:
    lengths = torch.tensor([5, 9, 4])
    q, k = torch.randn(2, 18, 4, 16)  # (all tokens, heads, channels)
    v = torch.eye(18)[:, None].expand(18, 4, 18)  # so that the output is the matrix of weights
    cu_seqlens = packing.cu_seqlens(lengths)
    out = packing.varlen_attention(q, k, v, cu_seqlens, causal=True, dropout=0.25, seed=1).transpose(0, 1)
    ids = torch.arange(3).repeat_interleave(lengths)
    keep = (ids[:, None] == ids).tril()
    full = formula(*(x.transpose(0, 1)[None] for x in (q, k, v)), keep)[0] / 0.75
    return f"{(out == 0)[:, keep].float().mean():.0%} dropped, others {distance(out, full * (out != 0))}"


@task("Linear attention over three chunks")
def linear_attention_in_chunks() -> str:
    q, k, v = torch.randn(3, 1, 4, 30, 16)
    options, state, parts = {"feature_map": "elu+1", "normalize": True, "return_state": True}, None, []
    for chunk in zip(*(x.split([13, 7, 10], 2) for x in (q, k, v)), strict=True):
        part, state = regard.linear_attention(*chunk, state=state, **options)
        parts.append(part)
    weights = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT).tril()
    expected = weights / weights.sum(-1, keepdim=True) @ v
    return f"three chunks with a state, the formula: {distance(torch.cat(parts, 2), expected)}"


# 11: a model that calls PyTorch's function


class PatchAttention(torch.nn.Module):
    """Self-attention as in most vision transformers. Nothing in it is Regard's."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv = heads, torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class VisionTransformer(torch.nn.Module):
    """A ViT for images (B, 3, 32, 32) with patches of 8 x 8 pixels."""

    def __init__(self, width: int = 48, layers: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.patches = torch.nn.Conv2d(3, width, 8, 8)
        self.places = torch.nn.Parameter(torch.randn(16, width))
        self.attention = torch.nn.ModuleList(PatchAttention(width, 4) for _ in range(layers))
        self.mlp = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))
        self.head = torch.nn.Linear(width, classes)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).mT + self.places
        for attend, mlp in zip(self.attention, self.mlp, strict=True):
            x = x + attend(F.layer_norm(x, x.shape[-1:]))
            x = x + mlp(F.gelu(x))
        return self.head(x.mean(1))


@task("A ViT that calls F.scaled_dot_product_attention")
def vision_transformer() -> str:
    model, image = VisionTransformer(), torch.randn(2, 3, 32, 32)
    parameters = [*model.parameters()]
    expected = model(image)
    gradients = torch.autograd.grad(expected.square().sum(), parameters)
    with convert.sdpa(), see.capture(model) as seen:
        out = model(image)
    for ours, theirs in zip(torch.autograd.grad(out.square().sum(), parameters), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    return f"outputs {distance(out, expected)}, gradients too; {len(seen)} layers recorded"


# 12: the command

QUICK = {  # arguments for a quick run of each command
    "explore": ["The cat sat on the mat", "--save", "page.html"],
    "cost": ["--width", "512", "--heads", "8", "--tokens", "8192"],
    "crossover": ["--quick", "--seconds", "0"],
    "shapes": ["--d-model", "512", "--heads", "8"],
    "info": [],
    "chat": ["Hello", "--max-tokens", "2"],
    "generate": ["The capital of France is", "--max-tokens", "2"],
    "embed": ["a cat"],
    "search": [str(ROOT / "README.md"), "-q", "a mask for padding", "--top", "1"],
    "transcribe": ["tone.wav", "--beams", "1"],
    "run": [],
    "compare": ["--quick", "--width", "32", "--steps", "1", "--seeds", "2", "--tokens", "1"],
    "claims": ["sharing"],
}


def run_command(arguments: list[str]) -> str:
    """Runs `regard` with arguments in FOLDER and returns what it prints. Raises if it fails."""
    command = [sys.executable, "-m", "regard", *arguments]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    result = subprocess.run(command, cwd=FOLDER, env=one_thread, capture_output=True, encoding="utf-8")
    if result.returncode or not (result.stdout + result.stderr).strip():
        raise RuntimeError(f"regard {' '.join(arguments)}: exit {result.returncode}, {result.stderr}")
    return result.stdout or result.stderr


def write_tone(path: Path) -> None:
    """Writes a second of a tone, because no package has speech."""
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(array("h", (int(8000 * math.sin(i / 8)) for i in range(16_000))).tobytes())


@task("Every command: --help, and a quick run")
def every_command() -> str:
    write_tone(FOLDER / "tone.wav")
    names = re.findall(r"^  (\w+)  ", run_command(["--help"]).partition("Commands:")[2], re.M)
    calls = [[name, *arguments] for name in names for arguments in (["--help"], QUICK[name])]
    with ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(run_command, calls))
    first = [re.sub(r"\s+", " ", re.search(r".*\w.*", text)[0])[:76] for text in outputs[1::2]]
    return "\n".join(f"{name:11}{line}" for name, line in zip(names, first, strict=True))


# 13: help


def explanations(function: Any) -> dict[str, str]:
    """Returns the line of `help(function)` that explains each argument."""
    text, found = pydoc.render_doc(function, renderer=pydoc.plaintext), {}
    for name in inspect.signature(function).parameters:
        line = re.search(rf"^[ |]+(?:\w+, )*{name}(?:, \w+)*: (.+)", text, re.M)
        assert line, f"help({function.__name__}) does not explain {name}"
        found[name] = line[1]
    return found


@task("The meaning of every argument, by help()")
def meaning_of_arguments() -> str:
    lines = []
    for function in (regard.attention, KVCache, nn.Attention, see.heatmap):
        meaning = explanations(function)
        last = [*meaning][-1]
        lines.append(f"{function.__name__}: {len(meaning)} arguments; {last}: {meaning[last]}")
    return "\n".join(lines)


# 14: mistakes


class Mistake(NamedTuple):
    typed: str
    write: str  # what the message says to write
    works: str  # the call that does it


MISTAKES = (
    Mistake("attention(a, b, b)", "transpose(1, 2)", "attention(*(x.transpose(1, 2) for x in (a, b, b)))"),
    Mistake(
        "attention(q, k, v, is_causal=True)", "mask=masks.Causal(), offset=0",
        "attention(q, k, v, mask=masks.Causal(), offset=0)",
    ),
    Mistake("attention(q, k, v, real)", "write mask=", "attention(q, k, v, mask=masks.padding(real))"),
    Mistake(
        "attention(q, k, v, mask=masks.Causal)", "call it: Causal()",
        "attention(q, k, v, mask=masks.Causal())",
    ),
    Mistake("masks.Window(4)", "sliding(4)", "masks.sliding(4)"),
    Mistake(
        "attention(q, k, v, mask=torch.ones(12, 12).tril())", "mask.bool()",
        "attention(q, k, v, mask=torch.ones(12, 12).tril().bool())",
    ),
    Mistake(
        "attention(q, k, v, key_padding_mask=~real)", "masks.padding(~key_padding_mask)",
        "attention(q, k, v, mask=masks.padding(~(~real)))",
    ),
    Mistake(
        "attention(q, k, v, mask=real)", "masks.padding(mask)",
        "attention(q, k, v, mask=masks.padding(real))",
    ),
    Mistake("attention(q, k, v, mask=own)", "mask[:, None]", "attention(q, k, v, mask=own[:, None])"),
    Mistake(
        "attention(q, k, v, mask=masks.Lengths([20, 7]))", "lengths up to Lk = 12",
        "attention(q, k, v, mask=masks.Lengths([12, 7]))",
    ),
    Mistake("attention(q, k.half(), v)", "k.to(q.dtype)", "attention(q, k.half().to(q.dtype), v)"),
    Mistake("nn.Attention(64, num_heads=8)", "heads=", "nn.Attention(64, heads=8)"),
    Mistake("nn.Attention(64, 8, kv_heads=3)", "a divisor of heads = 8", "nn.Attention(64, 8, kv_heads=4)"),
    Mistake("KVCache(1, 2, 16).attend(q, k, v)", "B = 2", "KVCache(2, 2, 16).attend(q, k, v)"),
    Mistake("stack(x, cache=KVCache(2, 8, 8))", "new_caches(B)", "stack(x, caches=stack.new_caches(2))"),
    Mistake(
        "see.heatmap(torch.randn(12, 12))", "apply softmax",
        "see.heatmap(torch.randn(12, 12).softmax(-1))",
    ),
)  # fmt: skip


def names_in_mistakes() -> dict[str, Any]:
    """Returns the values of the names in MISTAKES."""
    q, (k, v) = torch.randn(2, 8, 12, 16), torch.randn(2, 2, 2, 12, 16)
    a, b = torch.randn(2, 12, 8, 16), torch.randn(2, 10, 2, 16)  # (B, L, H, D)
    real = torch.arange(12) < torch.tensor([[12], [7]])  # (B, L), True = a token, not padding
    own = torch.ones(2, 12, 12).tril().bool()  # (B, Lq, Lk)
    x, stack = torch.randn(2, 12, 64), nn.Stack([nn.DecoderBlock(64, 8) for _ in range(2)]).eval()
    return {**globals(), **locals(), "attention": regard.attention}


def answer(mistake: Mistake, names: dict[str, Any]) -> str:
    """Returns the message of a mistake. Raises if the message does not say what to write."""
    eval(mistake.works, names)
    message = ""
    try:
        eval(mistake.typed, names)
    except (TypeError, ValueError) as error:
        message = str(error)
    assert mistake.write in message, f"{mistake.typed}: expected {mistake.write!r}, got {message!r}"
    return f"> {mistake.typed}\n{message}"


@task("Typical mistakes, each answered by what to write")
@torch.no_grad()
def typical_mistakes() -> str:
    names = names_in_mistakes()
    return "\n".join(answer(mistake, names) for mistake in MISTAKES)


def wanted() -> list[int]:
    """Returns the numbers of the tasks to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    numbers = [*range(1, len(TASKS) + 1)]
    parser.add_argument("--only", type=int, choices=numbers, help="run one task")
    only = parser.parse_args().only
    return [only] if only else numbers


def main() -> None:
    numbers, console = wanted(), Console()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for number in track(numbers, "", console=console, transient=True):
        title, run = TASKS[number - 1]
        torch.manual_seed(number)
        console.print(f"{number}. {title}", style="bold", markup=False, highlight=False, soft_wrap=True)
        console.print(run(), "", sep="\n", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
