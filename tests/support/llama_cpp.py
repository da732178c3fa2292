"""Run llama.cpp's server with a small llama of random weights: print its address, and end when stdin is closed.

Its tokens are bytes and some words; it generates only words, so that no token waits for the rest of a character.
"""

from __future__ import annotations

import sys

import gguf
import numpy as np
import xllamacpp

LAYERS, WIDTH, FFN, HEADS, KV_HEADS, CONTEXT = 4, 256, 512, 4, 2, 2048
WORDS = 253


def write_model(path: str) -> None:
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("random")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    special = [b"<unk>", b"<s>", b"</s>", *(f"<0x{byte:02X}>".encode() for byte in range(256))]
    token_type = gguf.TokenType
    kinds = [
        token_type.UNKNOWN,
        token_type.CONTROL,
        token_type.CONTROL,
        *[token_type.BYTE] * 256,
        *[token_type.NORMAL] * WORDS,
    ]
    tokens = [*special, *(f"\u2581w{word}".encode() for word in range(WORDS))]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)

    def weights(name: str, *shape: int) -> None:
        values = (rng.standard_normal(shape) * 0.02).astype(np.float32)
        if name == "output.weight":
            values[: len(special)] = 0.0
        writer.add_tensor(name, values)

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(WIDTH, dtype=np.float32))

    weights("token_embd.weight", len(tokens), WIDTH)
    weights("output.weight", len(tokens), WIDTH)
    norm("output_norm.weight")
    keys = WIDTH // HEADS * KV_HEADS
    for layer in range(LAYERS):
        norm(f"blk.{layer}.attn_norm.weight")
        norm(f"blk.{layer}.ffn_norm.weight")
        for name, rows, columns in (
            ("attn_q", WIDTH, WIDTH), ("attn_k", keys, WIDTH), ("attn_v", keys, WIDTH), ("attn_output", WIDTH, WIDTH),
            ("ffn_gate", FFN, WIDTH), ("ffn_up", FFN, WIDTH), ("ffn_down", WIDTH, FFN),
        ):  # fmt: skip
            weights(f"blk.{layer}.{name}.weight", rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def serve(path: str, slots: int) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = 1024 * slots
    params.n_parallel = slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.port = 0
    params.warmup = False
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    write_model(sys.argv[1])
    serve(sys.argv[1], int(sys.argv[2]))
