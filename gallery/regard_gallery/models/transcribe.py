"""Transcribes speech with Whisper, and aligns words with times."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ._tokenizers import by_word
from .whisper import Whisper

RATE = 16000
WINDOW = 30 * RATE  # audio samples per encoder input
FRAME = 320  # audio samples per frame (a position of the encoder's output)
SMOOTHED = 7  # width of the median filter, in frames
# The defaults of OpenAI's Whisper program: length penalty 1 and patience 1. Patience 1 means that the
# search stops as soon as it has as many finished texts as beams (`early_stopping`).
BEAM_SEARCH = {"length_penalty": 1.0, "early_stopping": True}


class Segment(NamedTuple):
    """A part of a transcript: its text, and its start and end in seconds."""

    start: float
    end: float
    tokens: tuple[int, ...]
    text: str


class Word(NamedTuple):
    text: str
    start: float
    end: float


class Alignment(NamedTuple):
    """The words of a segment with their times, and their cross-attention to the audio frames."""

    words: tuple[Word, ...]
    weights: Tensor  # (words, frames): attention weights, averaged over a word's tokens and the heads
    start: float  # time of the first frame, in seconds


def transcribe(whisper: Whisper, samples: Tensor, *, beams: int = 5) -> list[Segment]:
    """Transcribes audio samples (L,) at 16 kHz.

    Up to 30 seconds give one segment. Longer audio is processed in windows of 30 seconds.
    """
    if not len(samples):
        raise ValueError("samples: expected some sound, got none")
    is_long = len(samples) > WINDOW
    with torch.inference_mode():
        generated = whisper.model.generate(
            **_features(samples, whole=is_long), num_beams=beams, do_sample=False,
            **(BEAM_SEARCH if beams > 1 else {}), return_timestamps=is_long, return_segments=is_long,
        )  # fmt: skip
    if not is_long:
        return [_segment(whisper, 0.0, len(samples) / RATE, generated[0].tolist())]
    return [
        _segment(whisper, float(part["start"]), float(part["end"]), part["tokens"].tolist())
        for part in generated["segments"][0]
    ]


def _features(samples: Tensor, *, whole: bool) -> dict[str, Tensor]:
    """Returns the log-mel spectrogram of the samples.

    Unless `whole`, the samples are cropped or padded with silence to 30 seconds.
    """
    from transformers import WhisperFeatureExtractor

    options: dict[str, Any] = {"return_tensors": "pt", "return_attention_mask": True}
    if whole:
        options |= {"truncation": False, "padding": "longest"}
    extract = WhisperFeatureExtractor()  # type: ignore[no-untyped-call]
    return dict(extract(samples.numpy(), sampling_rate=RATE, **options))


def _segment(whisper: Whisper, start: float, end: float, tokens: list[int]) -> Segment:
    first_special = whisper.model.generation_config.eos_token_id
    spoken = tuple(token for token in tokens if token < first_special)
    return Segment(start, end, spoken, whisper.tokenizer.decode(list(spoken)))


def align(whisper: Whisper, samples: Tensor, segment: Segment) -> Alignment:
    """Returns the words of a segment with their times.

    The times come from the cross-attention of Whisper's alignment heads: dynamic time warping
    assigns audio frames to tokens.
    """
    heard = samples[round(segment.start * RATE) : round(segment.end * RATE)]
    groups = by_word(whisper.tokenizer, segment.tokens)
    if not groups:
        return Alignment((), torch.zeros(0, 0), segment.start)
    weights = _cross_attention(whisper, heard, segment.tokens)
    first = _first_frames(_sharpened(weights).mean(0))
    times = segment.start + np.array(first) * (FRAME / RATE)
    ends = np.cumsum([len(group) for group in groups])
    starts = ends - [len(group) for group in groups]
    words = tuple(
        Word(whisper.tokenizer.decode(group).strip(), float(times[a]), float(times[b]))
        for group, a, b in zip(groups, starts, ends, strict=True)
    )
    shares = torch.stack([weights[:, a:b].mean((0, 1)) for a, b in zip(starts, ends, strict=True)])
    return Alignment(words, shares, segment.start)


def _cross_attention(whisper: Whisper, heard: Tensor, tokens: tuple[int, ...]) -> Tensor:
    """Returns the cross-attention weights of the alignment heads, (heads, tokens + 1, frames).

    Row i has the weights of the query that predicts token i. The query of the last row predicts
    the end of the text.
    """
    special = whisper.model.generation_config
    before = [special.decoder_start_token_id, special.no_timestamps_token_id]
    ids = torch.tensor([[*before, *tokens]])
    features = _features(heard, whole=False)["input_features"]
    with torch.inference_mode():
        encoded = whisper.model.model.encoder(features)
        out = whisper.model(encoder_outputs=encoded, decoder_input_ids=ids, output_attentions=True)
    layers = out.cross_attentions  # one tensor (1, H, decoder tokens, frames) per layer
    if not layers or layers[0] is None:
        name = whisper.model.config._attn_implementation
        raise ValueError(f"whisper: expected attention regard or eager, which give weights, got {name}")
    rows = torch.stack([layers[layer][0, head] for layer, head in whisper.alignment_heads])
    # The first row that is kept belongs to the query that predicts the first token.
    return rows[:, len(before) - 1 :, : max(1, -(-len(heard) // FRAME))]


def _sharpened(weights: Tensor) -> Tensor:
    """Standardises weights (..., tokens, frames) over the tokens, then median-filters over frames.

    OpenAI's Whisper code does the same.
    """
    spread, mean = torch.std_mean(weights, -2, keepdim=True, correction=0)
    scores = (weights - mean) / spread.clamp_min(1e-12)
    half = SMOOTHED // 2
    if scores.shape[-1] <= half:
        return scores
    padded = torch.nn.functional.pad(scores, (half, half), mode="reflect")
    return padded.unfold(-1, SMOOTHED, 1).median(-1).values


def _first_frames(scores: Tensor) -> list[int]:
    """Returns the first frame of each row on the best path of dynamic time warping.

    The path is monotonic in scores (rows, frames), from the first row and frame to the last row and
    frame. The best path has the largest sum of scores.
    """
    # No library is used: Transformers' function for this is private, and librosa depends on numba.
    rows, frames = scores.shape
    gain = scores.double().numpy()
    total = np.full((rows + 1, frames + 1), -np.inf)
    total[0, 0] = 0
    for i in range(rows):
        for j in range(frames):
            total[i + 1, j + 1] = gain[i, j] + max(total[i, j], total[i, j + 1], total[i + 1, j])
    first = [0] * rows
    i, j = rows, frames
    while i > 0 and j > 0:
        first[i - 1] = j - 1
        i, j = max(((i - 1, j - 1), (i - 1, j), (i, j - 1)), key=lambda place: total[place])
    return first
