"""Describe a model's architecture and compute from it parameters, key-value cache and operations.

Every count is exact for the architectures that the fields describe; other parts (a vision tower, a convolution at the
input) are `extra`, taken from the published number of parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

VOCAB: Final = 152_000
"""Vocabulary of a decoder of which none is known: the largest that is common (Qwen's)."""
SEEN_MIB: Final = 5040
"""Working memory of an encoder of images for the largest one: Qwen2.5-VL's, nearly the most of the public ones."""
TOWER: Final = 700_000_000
"""Most parameters of such an encoder beside a language model: Qwen2.5-VL's has 0.67 billion, Whisper's 0.64."""
Bias = Literal["", "qkv", "mlp", "all"]
Kind = Literal["decoder", "encoder", "both", "plain"]
"""A generative model, one without a cache, one of encoder and decoder with cross attention, or parameters alone."""
Stored = Literal["latent", "expanded", "padded"]
"""What an engine caches of latent attention: the latent vector; the keys and values of every head; those, with values
padded to the size of keys.
"""


STATE_WIDTHS: Final = 2 * 264
"""Values of the state that a layer of Mamba-2 keeps instead of keys and values, in widths of the model: 264 numbers of
32 bits, twice the usual.
"""


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): ranks of queries (0: full) and of keys
    and values, sizes of a head without and with position, and of a value. `index`: what the index of sparse attention
    caches of a token (DeepSeek-V3.2).
    """

    kv_rank: int
    query_rank: int = 0
    head: int = 128
    rope: int = 64
    value: int = 128
    index: int = 0

    def cached(self, heads: int, stored: Stored) -> int:
        """Return the number of values that one layer caches for a token."""
        if stored == "latent":
            return self.kv_rank + self.rope + self.index
        keys = self.head + self.rope
        return heads * (keys + self.value if stored == "expanded" else 2 * max(keys, self.value)) + self.index


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: number of experts, experts per token, width of each, width of the shared experts, and
    the number of dense layers.
    """

    count: int
    active: int
    ffn: int
    shared: int = 0
    dense_layers: int = 0


@dataclass(frozen=True)
class Recurrent:
    """Layers that keep a state instead of keys and values (Mamba, arXiv 2312.00752; RWKV, arXiv 2305.13048): their
    number, and the values that the state of each has for a sequence.
    """

    layers: int
    state: int


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    `layers` of the decoder (of the encoder if there is no decoder), `width` of the residual stream, query `heads` of
    `head` dimensions, `kv_heads`, `ffn` of a dense feed-forward, of three matrices if `gated`, else of two. `tied`: the
    output shares the embedding; `headless`: no output over the vocabulary. `norms`: vectors of normalisation in a
    layer, `norm_bias`: each with a bias; `head_norms`: queries and keys are normalised by head. `positions`: learned
    ones. `context`: tokens that the model was made for; only `wide_layers` see all of them, the other layers `window`.
    `outputs`: logits of a token where the vocabulary is unknown; 0: one for each of its entries.
    `encoder_layers`: of an encoder with the same sizes, whose output each decoder layer attends to. `source`: its
    tokens if it does not read the text. `extra`: other parameters. `item_mib`: working memory of one item of a plain
    model (an image, a clip), whose longer side has `item_px` pixels (0: it is no image); `kept_mib`: what training
    keeps for it (0: unknown). `scores`: transformers has only its eager attention, which keeps the scores in training.
    `span`: relative positions on either side of a token for which that computes further scores (DeBERTa).
    `recurrent`: those of the layers without attention. `groups`: layers with weights of their own, which all others
    share (ALBERT); 0: all. `state`: values that a sequence keeps beside keys and values, in all layers (Falcon-H1).
    `aside`: those of `extra` that no generated token passes (a vision tower, embeddings that are only looked up).
    `looked_up`: those of `aside` that are embeddings of each layer (Gemma 3n and 4), and no encoder.
    `seen_mib`: working memory of an encoder of images or sound beside the layers for the largest input that it takes.
    """

    layers: int
    width: int
    heads: int = 1
    kv_heads: int = 1
    head: int = 64
    ffn: int = 0
    vocab: int = 0
    context: int = 2048
    gated: bool = True
    tied: bool = False
    headless: bool = False
    bias: Bias = ""
    norms: int = 2
    norm_bias: bool = False
    head_norms: bool = False
    positions: int = 0
    window: int = 0
    wide_layers: int = 0
    experts: Experts | None = None
    latent: Latent | None = None
    recurrent: Recurrent | None = None
    encoder_layers: int = 0
    source: int = 0
    extra: int = 0
    kind: Kind = "decoder"
    item_mib: int = 0
    item_px: int = 0
    kept_mib: int = 0
    outputs: int = 0
    scores: bool = False
    span: int = 0
    groups: int = 0
    state: int = 0
    aside: int = 0
    looked_up: int = 0
    seen_mib: int = 0

    @property
    def tower(self) -> int:
        """Parameters of its encoder of images or sound."""
        return (self.aside - self.looked_up or min(self.extra, TOWER)) if self.seen_mib else 0

    @property
    def generates(self) -> bool:
        """Whether it generates tokens."""
        return self.kind in ("decoder", "both")

    @cached_property
    def attention(self) -> int:
        """Parameters of the attention of one layer."""
        latent, width, inner = self.latent, self.width, self.heads * self.head
        if latent is not None:
            per_head = latent.head + latent.rope
            if latent.query_rank:
                query = latent.query_rank * (width + 1 + self.heads * per_head)
            else:
                query = width * self.heads * per_head
            down = width * (latent.kv_rank + latent.rope) + latent.kv_rank
            up = latent.kv_rank * self.heads * (latent.head + latent.value)
            return query + down + up + self.heads * latent.value * width
        keys = 2 * self.kv_heads * self.head
        biases = (inner + keys if self.bias in ("qkv", "all") else 0) + (width if self.bias == "all" else 0)
        return width * (inner + keys) + inner * width + biases + (2 * self.head if self.head_norms else 0)

    def feed_forward(self, ffn: int) -> int:
        """Return the parameters of a feed-forward of this width."""
        matrices = 3 if self.gated else 2
        biases = (ffn * (matrices - 1) + self.width) if self.bias in ("mlp", "all") else 0
        return matrices * self.width * ffn + biases

    @cached_property
    def routed(self) -> int:
        """Parameters of all routed experts."""
        if self.experts is None:
            return 0
        return (self.layers - self.experts.dense_layers) * self.experts.count * self.feed_forward(self.experts.ffn)

    @cached_property
    def embedding(self) -> int:
        """Parameters of the embedding and of the output, which quantization does not change."""
        return self.vocab * self.width * (1 if self.tied or self.headless else 2) + self.positions * self.width

    @property
    def attending(self) -> int:
        """Layers of the decoder with attention."""
        return self.layers - (0 if self.recurrent is None else self.recurrent.layers)

    @property
    def query_width(self) -> int:
        """Width of a token's queries, of all heads."""
        return self.heads * (self.head if self.latent is None else self.latent.head + self.latent.rope)

    @property
    def key_width(self) -> int:
        """Width of a token's keys, of all heads; values are no wider."""
        return self.kv_heads * self.head if self.latent is None else self.query_width

    @property
    def unbounded(self) -> bool:
        """Whether it reads texts longer than it was made for: T5, which adds relative positions to the scores."""
        return self.scores and self.kind == "both"

    def scored(self, tokens: int) -> int:
        """Return the scores that one layer has at once for a token among `tokens` in a pass, if it scores relative
        positions: those of both directions, and four times those of the tokens.
        """
        return self.heads * (4 * tokens + 4 * self.span) if self.span else 0

    @property
    def logits(self) -> int:
        """Logits of a token."""
        return 0 if self.headless else self.outputs or self.vocab

    @cached_property
    def parameters(self) -> int:
        """All parameters."""
        return self.embedding + self.body

    @property
    def shared(self) -> int:
        """Parameters that layers would have beside the body, if none used those of another."""
        return self.shared_of(self.layers - self.groups) if self.groups else 0

    def shared_of(self, layers: int) -> int:
        """Return the parameters that this many layers would have beside the body."""
        norms = self.norms * self.width * (2 if self.norm_bias else 1)
        return layers * (self.attention + norms + self.feed_forward(self.ffn))

    @cached_property
    def body(self) -> int:
        """Parameters without the embedding and the output."""
        if self.kind == "plain":
            return self.extra
        norm = self.width * (2 if self.norm_bias else 1)
        layer = self.attention + self.norms * norm
        total = self.attending * self.attention + self.layers * self.norms * norm - self.shared
        total += self.encoder_layers * (layer + self.feed_forward(self.ffn)) + self.extra
        if self.encoder_layers:  # cross attention and its norm; the encoder's own last norm
            total += self.layers * (self.attention + norm) + norm
        experts = self.experts
        if experts is None:
            return total + self.layers * self.feed_forward(self.ffn) + norm
        sparse = self.layers - experts.dense_layers
        shared = self.feed_forward(experts.shared) if experts.shared else 0
        router = self.width * experts.count
        return (
            total + norm + self.routed + sparse * (shared + router) + experts.dense_layers * self.feed_forward(self.ffn)
        )

    @cached_property
    def active(self) -> int:
        """Parameters of the body and of the output that one token is multiplied with."""
        parameters = self.body + self.shared
        if self.experts is not None:
            parameters -= self.routed * (self.experts.count - self.experts.active) // self.experts.count
        return parameters + (0 if self.headless else self.vocab * self.width)

    def adapters(self, rank: int) -> int:
        """Return the parameters of adapters of a rank on all matrices that every token passes (arXiv 2106.09685)."""
        width, inner, keys = self.width, self.heads * self.head, self.kv_heads * self.head
        attention = (width + inner) + 2 * (width + keys) + (inner + width)
        matrices = 3 if self.gated else 2
        dense = matrices * (width + self.ffn) if self.experts is None else 0
        return rank * ((self.groups or self.layers) + self.encoder_layers) * (attention + dense)

    def cache_values(self, tokens: int, stored: Stored = "latent") -> int:
        """Return the number of values that one sequence of this many tokens keeps in the key-value cache.

        `stored`: what the engine caches of latent attention.
        """
        if self.kind in ("encoder", "plain"):
            return 0
        states = self.state + (0 if self.recurrent is None else self.recurrent.layers * self.recurrent.state)
        wide = self.wide_layers if self.window else self.attending
        narrow = (self.attending - wide) * min(tokens, self.window) if self.window else 0
        if self.latent is not None:
            kept = self.latent.cached(self.heads, stored)
            # the state of a layer without attention has the same size in all engines
            return wide * kept * tokens + narrow * self.latent.cached(self.heads, "latent") + states
        per_token = 2 * self.kv_heads * self.head
        read = self.source or (tokens if self.unbounded else min(self.context, tokens))
        cross = self.layers * per_token * read if self.encoder_layers else 0
        return per_token * (wide * tokens + narrow) + cross + states

    @cached_property
    def encoder(self) -> int:
        """Parameters of the encoder before a decoder."""
        norm = self.width * (2 if self.norm_bias else 1)
        layer = self.attention + self.norms * norm + self.feed_forward(self.ffn)
        return self.encoder_layers * layer

    def operations_of_prompt(self, tokens: float) -> float:
        """Return the operations before the first token of an answer: with an encoder those of reading the prompt, or
        its own source, and of the keys and values that the decoder attends to.
        """
        if not self.encoder_layers:
            return self.operations(tokens)
        read = float(self.source or tokens)
        crossed = self.layers * 2 * self.width * self.kv_heads * self.head
        return 2.0 * (self.encoder + crossed) * read + 2.0 * self.encoder_layers * self.heads * self.head * read**2

    def operations_of_token(self, before: float) -> float:
        """Return the operations of one generated token after `before` earlier ones."""
        crossed = float(self.source or before) if self.encoder_layers else 0.0
        parameters = self.active - self.encoder - self.aside
        return 2.0 * parameters + 4.0 * self.attending * self.heads * self.head * (before + crossed)

    def operations(self, tokens: float) -> float:
        """Return the operations of a pass over a sequence of `tokens`."""
        pairs = tokens * tokens / 2
        return (
            2.0 * self.active * tokens + 4.0 * (self.attending + self.encoder_layers) * self.heads * self.head * pairs
        )
