"""Requests for language models as users write them, each with an expert's estimate and the expected answer.

The arithmetic is written out: parameters in billions as published, bytes that each takes, bytes of key-value cache a
token (2 x layers x key-value heads x head x bytes), tokens in the cache (sequences x length), GiB of everything else,
and the share of a slice that the engine or trainer may fill. Nothing here calls the product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SIZES: Final = {
    "1g.10gb": 9.75,
    "1g.20gb": 19.625,
    "2g.20gb": 19.625,
    "3g.40gb": 39.5,
    "4g.40gb": 39.5,
    "7g.80gb": 79.25,
}
"""GiB of the slices of an H100 80GB, the smallest first."""
LADDER: Final = (9.75, 19.625, 39.5, 79.25)


@dataclass(frozen=True)
class Asked:
    """One request.

    `refused`: words of the message if no slice suffices; `named`: the request states length and concurrency, so that
    the answer may be at most one size above the smallest.
    """

    hints: str
    params: float = 0.0
    each: float = 2.0
    cache: int = 0
    tokens: int = 0
    other: float = 0.8
    share: float = 0.9
    named: bool = True
    refused: str = ""

    @property
    def need_gib(self) -> float:
        """GiB that a slice must have."""
        held = (self.params * 1e9 * self.each + self.cache * self.tokens) / 2**30
        return (held + self.other) / self.share

    @property
    def smallest(self) -> float | None:
        """GiB of the smallest slice that holds it; None where none does."""
        return next((size for size in LADDER if size >= self.need_gib), None)


SERVED: Final = (
    Asked("model=meta-llama/Llama-3.1-8B-Instruct engine=vllm max_model_len=8192 max_num_seqs=16",
          8.03, 2, 131072, 16 * 8192),
    Asked("model=Qwen/Qwen2.5-7B-Instruct engine=vllm dtype=bf16 max_model_len=4096 max_num_seqs=8",
          7.616, 2, 57344, 8 * 4096),
    # 6.53 of 7.62 billion at 4.16 bits, embedding and output at 16
    Asked("model=Qwen/Qwen2.5-7B-Instruct-AWQ engine=vllm max_model_len=8192 max_num_seqs=4",
          7.616, 0.732, 57344, 4 * 8192),
    # the encoder of images has 0.68 billion parameters at 16 bits, and vLLM reports a peak of 4.92 GiB beside weights
    Asked("model=Qwen/Qwen2.5-VL-7B-Instruct-AWQ engine=vllm max_model_len=4096 max_num_seqs=1",
          7.616, 0.732, 57344, 4096, other=0.4 + 1.3 + 4.92),
    Asked("model=Qwen/Qwen2.5-VL-7B-Instruct engine=vllm max_model_len=4096 max_num_seqs=2",
          8.292, 2, 57344, 2 * 4096, other=0.4 + 4.92),
    Asked("model=qwen2.5vl:7b max_model_len=4096", 7.616, 0.6125, 57344, 4096, other=0.6 + 1.3 + 1.3, share=0.95),
    Asked("model=mistralai/Mistral-7B-Instruct-v0.3 max_model_len=4096 max_num_seqs=16", 7.248, 2, 131072, 16 * 4096),
    Asked("model=mixtral-8x7b max_model_len=4096 max_num_seqs=8",
          46.7, 2, 131072, 8 * 4096, refused="quantization=awq"),
    Asked("model=TheBloke/Mixtral-8x7B-Instruct-v0.1-AWQ max_model_len=4096 max_num_seqs=8",
          46.7, 0.528, 131072, 8 * 4096),
    Asked("model=llama-3-70b", 70.55, 2, named=False, refused="whole GPUs"),
    Asked("model=RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic engine=vllm max_model_len=8192 max_num_seqs=8",
          70.55, 1.03,
          327680, 8 * 8192, refused="quantization=awq"),
    Asked("model=meta-llama/Llama-3.1-70B-Instruct quantization=awq max_model_len=4096 max_num_seqs=4", 70.55, 0.563,
          327680, 4 * 4096, 1.5),
    Asked("model=google/gemma-2-9b-it max_model_len=4096 max_num_seqs=8", 9.242, 2, 344064, 8 * 4096),
    # ten of 62 layers see everything, the others 1024 tokens
    Asked("model=google/gemma-3-27b-it max_model_len=8192 max_num_seqs=4", 27.43, 2, 135168, 4 * 8192, 1.5),
    Asked("model=google/gemma-3-4b-it max_model_len=8192 max_num_seqs=8", 4.3, 2, 35328, 8 * 8192),
    Asked("model=microsoft/phi-4 max_model_len=4096 max_num_seqs=8", 14.66, 2, 204800, 8 * 4096),
    Asked("model=microsoft/Phi-3-mini-4k-instruct max_model_len=4096 max_num_seqs=8", 3.82, 2, 393216, 8 * 4096),
    Asked("model=casperhansen/deepseek-r1-distill-qwen-32b-awq max_model_len=8192 max_num_seqs=4", 32.76, 0.59, 262144,
          4 * 8192, 1.0),
    Asked("model=deepseek-ai/DeepSeek-R1-Distill-Llama-8B max_model_len=16k max_num_seqs=4",
          8.03, 2, 131072, 4 * 16384),
    Asked("model=deepseek-ai/DeepSeek-R1 engine=sglang", 671.0, 1, named=False, refused="whole GPUs"),
    Asked("model=Qwen/Qwen3-8B engine=vllm max_model_len=8k max_num_seqs=8", 8.19, 2, 147456, 8 * 8192),
    Asked("model=Qwen/Qwen3-32B-FP8 max_model_len=8192 max_num_seqs=8", 32.76, 1.06, 262144, 8 * 8192, 1.5),
    Asked("model=Qwen/Qwen3-32B max_model_len=4096 max_num_seqs=4", 32.76, 2, 262144, 4 * 4096, 1.5),
    Asked("model=Qwen/Qwen3-30B-A3B-Instruct-2507 max_model_len=8192 max_num_seqs=8", 30.53, 2, 98304, 8 * 8192, 1.0),
    Asked("model=Qwen/Qwen3-235B-A22B-Instruct-2507-FP8 max_model_len=8192 max_num_seqs=8", 235.1, 1, 192512, 8 * 8192,
          refused="whole GPUs"),
    # 19.1 of 20.9 billion parameters at 4.25 bits; half of the layers see 128 tokens
    Asked("model=openai/gpt-oss-20b engine=vllm max_model_len=8192 max_num_seqs=8", 20.91, 0.657, 24960, 8 * 8192),
    Asked("model=openai/gpt-oss-120b engine=vllm max_model_len=8192 max_num_seqs=8",
          116.8, 0.559, 37440, 8 * 8192, 1.5),
    Asked("model=meta-llama/Llama-3.2-1B-Instruct max_model_len=4096 max_num_seqs=8", 1.236, 2, 32768, 8 * 4096),
    Asked("model=meta-llama/Llama-3.2-3B-Instruct max_model_len=4096 max_num_seqs=8", 3.213, 2, 114688, 8 * 4096),
    Asked("model=meta-llama/Llama-2-7b-chat-hf max_model_len=4096 max_num_seqs=4", 6.738, 2, 524288, 4 * 4096),
    Asked("model=TheBloke/CodeLlama-34B-Instruct-GPTQ max_model_len=4096 max_num_seqs=4",
          33.74, 0.543, 196608, 4 * 4096),
    Asked("model=tiiuae/falcon-7b-instruct max_model_len=2048 max_num_seqs=8", 6.92, 2, 8192, 8 * 2048),
    Asked("model=bigscience/bloom-7b1 max_model_len=2048 max_num_seqs=2", 7.07, 2, 491520, 2 * 2048),
    Asked("model=facebook/opt-30b max_model_len=2048 max_num_seqs=4", 29.97, 2, 1376256, 4 * 2048, 1.0),
    Asked("model=gpt2 max_model_len=1024 max_num_seqs=8", 0.124, 4, 73728, 8 * 1024),
    Asked("model=EleutherAI/gpt-j-6b dtype=fp16 max_model_len=2048 max_num_seqs=4", 6.05, 2, 458752, 4 * 2048),
    # cache of the decoder's own tokens and of the encoder's
    Asked("model=google/flan-t5-xxl dtype=bf16 max_model_len=512 max_num_seqs=8", 11.14, 2, 786432, 8 * 512),
    Asked("model=openai/whisper-large-v3 max_num_seqs=4", 1.54, 2, 327680, 4 * 1500, named=False),
    Asked("model=BAAI/bge-m3 batch=32 input=512", 0.568, 4, other=1.5),
    Asked("model=sentence-transformers/all-MiniLM-L6-v2 batch=64 input=256", 0.0227, 4, other=1.0),
    Asked("model=stabilityai/stable-diffusion-xl-base-1.0 dtype=fp16", 3.47, 2, other=4.0, named=False),
    Asked("model=black-forest-labs/FLUX.1-dev", 16.9, 2, other=3.0, named=False),
    # 4.9 bits a parameter
    Asked("model=bartowski/Meta-Llama-3.1-8B-Instruct-GGUF quantization=q4_k_m engine=llamacpp max_model_len=8k "
          "max_num_seqs=1", 8.03, 0.6125, 131072, 8192, share=0.95),
    Asked("model=Meta-Llama-3.1-70B-Instruct-Q4_K_M.gguf engine=llamacpp max_model_len=8192 max_num_seqs=1", 70.55,
          0.6125, 327680, 8192, share=0.95),
    Asked("model=llama3:8b engine=ollama", 8.03, 0.6125, 131072, 4096, share=0.95, named=False),
    # vLLM makes sure of one sequence of the whole context of 131072 tokens
    Asked("model=meta-llama/Llama-3.1-8B-Instruct engine=vllm", 8.03, 2, 131072, 131072, named=False),
    Asked("model=llama-3.1-8b", 8.03, 2, 131072, 8192, named=False),
    Asked("model=meta-llama/Llama-4-Scout-17B-16E-Instruct max_model_len=8192 max_num_seqs=4",
          108.6, 2, 196608, 4 * 8192,
          refused="quantization=awq"),
    Asked("model=meta-llama/Llama-3.1-8B-Instruct quantization=fp8 kv_cache_dtype=fp8 engine=vllm max_model_len=8192 "
          "max_num_seqs=8", 8.03, 1.14, 65536, 8 * 8192),
    Asked("model=meta-llama/Llama-3.1-8B-Instruct engine=vllm gpu_memory_utilization=0.95 input=1k output=256 "
          "max_num_seqs=32", 8.03, 2, 131072, 32 * 1280, share=0.95),
)  # fmt: skip
STRANGE: Final = (
    Asked("model=lama-3.1-8b-instruct max_model_len=8192 max_num_seqs=4", 8.03, 2, 131072, 4 * 8192),
    Asked("model=mixtrl-8x7b max_model_len=4096 max_num_seqs=4", 46.7, 2, 131072, 4 * 4096, refused="quantization="),
    Asked("model=mixtrall engine=vllm", named=False, refused="write model=mixtral"),
    Asked("model=our-own-model engine=vllm max_model_len=4096", named=False, refused="or params= if it is"),
    Asked("model=ai21labs/Jamba-v0.1", named=False, refused="whole GPUs"),
    Asked("model=acme-moe-a2.7b", named=False, refused="or params= if it is"),
    Asked("model=allenai/OLMoE-1B-7B-0924 max_model_len=4096 max_num_seqs=2", 6.92, 2, 131072, 2 * 4096),
    Asked("model=acme/acme-7b-chat max_model_len=4096 max_num_seqs=4", 7.0, 2, 131072, 4 * 4096),
    Asked("model=acme/legal-mistral-7b-awq max_model_len=4096 max_num_seqs=4", 7.248, 0.55, 131072, 4 * 4096),
    Asked("model=ours params=13b max_model_len=4096 max_num_seqs=2", 13.0, 2, 819200, 2 * 4096),
    Asked("model=ours arch=layers:40+hidden:5120+heads:40+kv:8+ffn:13824+vocab:32000 max_model_len=4096 max_num_seqs=8",
          11.4, 2, 163840, 8 * 4096),
    Asked("model=secret-400b-a20b max_model_len=4096 max_num_seqs=1", 400.0, 2, refused="whole GPUs"),
)  # fmt: skip
TUNED: Final = (
    # weights, gradients, master copy and two moments: 16 bytes; logits of 128256 x 2048 x 12 bytes
    Asked("model=llama-3.2-1b method=full seq=2048 micro_batch=1 checkpointing=on", 1.236, 16, other=4.4, share=0.95),
    Asked("model=llama-3.1-8b method=full seq=2048 micro_batch=1 checkpointing=on", 8.03, 16, other=4.4, share=0.95,
          refused="method=lora"),
    Asked("model=Qwen/Qwen2.5-0.5B-Instruct method=full seq=1024 micro_batch=2 checkpointing=on", 0.494, 16, other=5.2,
          share=0.95),
    Asked("model=llama-3.1-8b method=lora seq=2048 micro_batch=1 checkpointing=on", 8.03, 2, other=5.4, share=0.95),
    # 32 layers x 219 kB x 8192 tokens, logits of 32768 x 8192 x 12 bytes
    Asked("model=mistralai/Mistral-7B-v0.3 method=lora seq=4096 micro_batch=2", 7.248, 2, other=58.0, share=0.95),
    Asked("model=llama-3.1-8b method=qlora seq=1024 micro_batch=1", 8.03, 0.71, other=3.5, share=0.95),
    Asked("model=meta-llama/Llama-3.1-70B method=qlora seq=2048 micro_batch=1", 70.55, 0.562, other=9.5, share=0.95),
    Asked("model=Qwen/Qwen2.5-32B method=qlora seq=2048 micro_batch=1", 32.76, 0.59, other=8.0, share=0.95),
    Asked("model=meta-llama/Llama-3.3-70B-Instruct method=lora seq=2048 micro_batch=1 checkpointing=on", 70.55, 2,
          other=9.0, share=0.95, refused="method=qlora"),
    Asked("model=gpt2 method=full seq=1024 micro_batch=8", 0.124, 16, other=12.0, share=0.95),
    Asked("model=google/flan-t5-xl role=train seq=512 micro_batch=1 checkpointing=on", 2.85, 16, other=1.5, share=0.95),
    # attention that keeps no scores: 12 layers x 74 kB x 16384 tokens
    Asked("model=bert-base role=train batch=32 input=512", 0.11, 16, other=14.5, share=1.0),
    Asked("model=llama-3.1-8b method=full optimizer=adamw_8bit seq=2048 micro_batch=1 checkpointing=on", 8.03, 10,
          other=4.4, share=0.95, refused="method=lora"),
    Asked("model=Qwen/Qwen2.5-1.5B role=train optimizer=adafactor seq=1024 micro_batch=1 checkpointing=on", 1.544, 8,
          other=3.4, share=0.95),
)  # fmt: skip
TABLE: Final = (*SERVED, *STRANGE, *TUNED)
