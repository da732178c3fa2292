"""Architectures, names and descriptions of language models: exact for public models, conservative for others."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.predict.llm import names, precision, sizedmodels, sizes
from slurm_migbatch.predict.llm.describe import ArchError, DescribeError, of_config, read_arch
from slurm_migbatch.predict.llm.families import ALL
from slurm_migbatch.predict.llm.memory import activations_mib, need_of, weights_mib
from slurm_migbatch.predict.llm.modeldir import describe
from slurm_migbatch.predict.llm.workload import Training, Workload, workload_of
from slurm_migbatch.workload.hints import parse
from slurm_migbatch.workload.refusal import Refusal
from tests.support import weight_files

BY_NAME = {model.name: model for model in ALL}

PUBLISHED = {
    "llama-2-7b": 6738415616, "llama-2-13b": 13015864320, "llama-2-70b": 68976648192, "llama-3.1-8b": 8030261248,
    "llama-3.1-70b": 70553706496, "llama-3.1-405b": 405853388800, "llama-3.2-1b": 1235814400,
    "llama-3.2-3b": 3212749824, "mistral-7b": 7248023552, "mistral-nemo": 12247782400,
    "mistral-small-24b": 23572403200, "mistral-large": 122610069504, "mixtral-8x7b": 46702792704,
    "mixtral-8x22b": 140630071296, "qwen1.5-7b": 7721324544, "qwen1.5-72b": 72287920128, "qwen2.5-0.5b": 494032768,
    "qwen2.5-1.5b": 1543714304, "qwen2.5-3b": 3085938688, "qwen2.5-7b": 7615616512, "qwen2.5-14b": 14770033664,
    "qwen2.5-32b": 32763876352, "qwen2.5-72b": 72706203648, "qwen3-0.6b": 596049920, "qwen3-1.7b": 1720574976,
    "qwen3-4b": 4022468096, "qwen3-8b": 8190735360, "qwen3-14b": 14768307200, "qwen3-32b": 32762123264,
    "qwen3-30b-a3b": 30532122624, "qwen3-235b-a22b": 235093634560, "qwen3-coder-480b-a35b": 480154875392,
    "gemma-2b": 2506172416, "gemma-7b": 8537680896, "gemma-2-2b": 2614341888, "gemma-2-9b": 9241705984,
    "gemma-2-27b": 27227128320, "gemma-3-1b": 999885952, "gemma-3-270m": 268098176, "phi-1.5": 1418270720,
    "phi-2": 2779683840, "phi-3-mini": 3821079552, "phi-3-medium": 13960238080, "phi-4": 14659507200,
    "phi-4-mini": 3836021760, "deepseek-v3": 671026419200, "deepseek-v2-lite": 15706484224,
    "deepseek-v2": 235741434880, "deepseek-llm-7b": 6910365696, "deepseek-coder-6.7b": 6740512768,
    "deepseek-coder-33b": 33342991360, "deepseek-r1-distill-qwen-1.5b": 1777088000, "gpt2": 124439808,
    "gpt2-medium": 354823168, "gpt2-large": 774030080, "gpt2-xl": 1557611200, "gpt-j-6b": 6050882784,
    "gpt-neox-20b": 20554567680, "pythia-1b": 1011781632, "pythia-12b": 11846072320, "opt-125m": 125239296,
    "opt-1.3b": 1315758080, "opt-6.7b": 6658473984, "opt-30b": 29974540288, "bloom-560m": 559214592,
    "bloom-7b1": 7069016064, "bloom": 176247271424, "falcon-7b": 6921720704, "falcon-40b": 41303293952,
    "mpt-7b": 6649286656, "starcoder": 15517456384, "starcoder2-3b": 3030371328, "starcoder2-7b": 7173923840,
    "starcoder2-15b": 15957889024, "gpt-oss-20b": 20914757184, "gpt-oss-120b": 116829156672, "yi-6b": 6061035520,
    "yi-34b": 34388917248, "smollm2-1.7b": 1711376384, "tinyllama-1.1b": 1100048384, "solar-10.7b": 10731524096,
    "command-r": 34980831232, "internlm2-7b": 7737708544, "olmo-2-7b": 7298617344, "smollm3-3b": 3075098624,
    "t5-small": 60506624, "t5-base": 222903552, "t5-3b": 2851598336, "t5-11b": 11307321344,
    "flan-t5-base": 247577856, "flan-t5-xl": 2849757184, "flan-t5-xxl": 11135332352, "whisper-tiny": 37760640,
    "whisper-small": 241734912, "whisper-large-v2": 1543304960, "whisper-large-v3": 1543490560,
    "whisper-large-v3-turbo": 808878080, "bert-base": 109482240, "bert-large": 335141888, "roberta-base": 124645632,
    "xlm-roberta-large": 559890432, "distilbert": 66362880, "all-minilm-l6-v2": 22713216, "bge-m3": 567754752,
    "bart-base": 139420416, "bart-large": 406291456, "nllb-200-distilled-600m": 615073792, "nllb-200-1.3b": 1370638336,
    "nllb-200-3.3b": 3344863232, "m2m100-418m": 483905536, "m2m100-1.2b": 1239470080, "mt5-small": 300176768,
    "mt5-base": 582401280, "mt5-large": 1229581312, "mt5-xl": 3742619648, "mt5-xxl": 12921057280,
    "distilroberta-base": 82118400, "camembert-base": 110621952,
    "internlm3-8b": 8804241408, "distilbert-base-multilingual": 134734080, "multilingual-minilm-l12": 117653760,
    "byt5-small": 299637760, "byt5-base": 581653248, "biogpt": 346763264, "biogpt-large": 1571188800,
}  # fmt: skip
"""Numbers of parameters as the published checkpoints have them."""
NAMED = {
    "meta-llama/Llama-3.1-8B-Instruct": ("llama-3.1-8b", "bf16"),
    "meta-llama/Meta-Llama-3.1-8B-Instruct": ("llama-3.1-8b", "bf16"),
    "nvidia/Llama-3_1-Nemotron-70B-Instruct": ("llama-3.1-70b", "bf16"),
    "NousResearch/Hermes-3-Llama-3.1-8B": ("llama-3.1-8b", "bf16"),
    "neuralmagic/Meta-Llama-3.1-70B-Instruct-quantized.w4a16": ("llama-3.1-70b", "w4a16"),
    "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF": ("llama-3.1-8b", "gguf"),
    "Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf": ("llama-3.1-8b", "q4-k-m"),
    "unsloth/llama-3-8b-bnb-4bit": ("llama-3-8b", "bnb-4bit"),
    "llama3:8b": ("llama-3-8b", "bf16"),
    "Qwen/Qwen2.5-Coder-32B-Instruct-GPTQ-Int4": ("qwen2.5-32b", "gptq-int4"),
    "Qwen/Qwen2.5-VL-7B-Instruct": ("qwen2.5-vl-7b", "bf16"),
    "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8": ("qwen3-235b-a22b-2507", "fp8"),
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8": ("llama-4-maverick", "fp8"),
    "deepseek-ai/DeepSeek-R1": ("deepseek-r1", "fp8"),
    "deepseek-r1:14b": ("deepseek-r1-distill-qwen-14b", "bf16"),
    "google/gemma-3-27b-it-qat-q4_0-gguf": ("gemma-3-27b", "q4-0"),
    "mistralai/Mistral-7B-Instruct-v0.2": ("mistral-7b", "bf16"),
    "google/bert_large": ("bert-large", "fp32"),
    "bert": ("bert-base", "fp32"),
    "gpt2-xl": ("gpt2-xl", "fp32"),
    "openai/gpt-oss-20b": ("gpt-oss-20b", "mxfp4"),
    "Qwen/Qwen3-Coder-Next": ("qwen3-next-80b-a3b", "bf16"),
    "qwen3-coder:30b": ("qwen3-coder-30b-a3b", "bf16"),
    "mistral-large-3": ("mistral-large-3-675b", "fp8"),
    "mistral-small3.2": ("mistral-small-3.2-24b", "bf16"),
    "microsoft/Phi-4-reasoning-plus": ("phi-4", "bf16"),
    "BAAI/bge-en-icl": ("mistral-7b", "bf16"),
    "THUDM/CogVideoX-2b": ("cogvideox-2b", "fp16"),
    "llama4": ("llama-4-scout", "bf16"),
    "mistralai/Ministral-3-8B-Instruct-2512": ("ministral-3-8b", "bf16"),
    "mistralai/Ministral-8B-Instruct-2410": ("ministral-8b", "bf16"),
    "mistralai/Voxtral-Mini-3B-2507": ("voxtral-mini-3b", "bf16"),
    "BAAI/bge-reranker-v2-gemma": ("gemma-2b", "bf16"),
    "Snowflake/snowflake-arctic-embed-l-v2.0": ("bge-m3", "fp32"),
    "llama3.2-vision:11b": ("llama-3.2-11b", "bf16"),
    "phi3.5": ("phi-3.5-mini", "bf16"),
    "mxbai-embed-large": ("bge-large", "fp32"),
    "BAAI/bge-reranker-large": ("xlm-roberta-large", "fp32"),
    "mixedbread-ai/mxbai-rerank-large-v2": ("qwen2.5-1.5b", "bf16"),
    "jinaai/jina-embeddings-v3": ("bge-m3", "fp32"),
    "distilbert-base-multilingual-cased": ("distilbert-base-multilingual", "fp32"),
    "sentence-transformers/paraphrase-multilingual-mpnet-base-v2": ("xlm-roberta-base", "fp32"),
    "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2": ("multilingual-minilm-l12", "fp32"),
    "Alibaba-NLP/gte-multilingual-base": ("gte-multilingual-base", "fp32"),
    "unsloth/GLM-4.5-Air-MXFP4_MOE.gguf": ("glm-4.5-air", "mxfp4-moe"),
    "state-spaces/mamba-2.8b": ("mamba-2.8b", "bf16"),
    "state-spaces/mamba-2.8b-hf": ("mamba-2.8b-hf", "fp32"),
    "tiiuae/falcon-mamba-7b-instruct": ("falcon-mamba-7b", "bf16"),
    "ai21labs/Jamba-v0.1": ("jamba-mini", "bf16"),
    "ai21labs/AI21-Jamba-1.5-Large": ("jamba-large", "bf16"),
    "jamba-1.5-mini": ("jamba-mini", "bf16"),
    "Zyphra/Zamba2-7B-Instruct": ("zamba2-7b", "bf16"),
    "nvidia/Nemotron-H-8B-Base-8K": ("nemotron-h-8b", "bf16"),
    "xai-org/grok-1": ("grok-1", "bf16"),
    "arctic": ("snowflake-arctic", "bf16"),
    "Snowflake/snowflake-arctic-instruct": ("snowflake-arctic", "bf16"),
    "Snowflake/snowflake-arctic-embed-m": ("bge-base", "fp32"),
    "Snowflake/snowflake-arctic-embed-m-v2.0": ("gte-multilingual-base", "fp32"),
    "MiniMaxAI/MiniMax-Text-01": ("minimax-text-01", "bf16"),
    "stepfun-ai/step3": ("step3", "bf16"),
    "stepfun-ai/Step-3.5-Flash-FP8": ("step-3.5-flash", "fp8"),
    "XiaomiMiMo/MiMo-V2-Flash": ("mimo-v2-flash", "fp8"),
    "Nanbeige/Nanbeige4-3B-Thinking-2511": ("nanbeige4-3b", "bf16"),
    "Nanbeige/Nanbeige4.1-3B": ("nanbeige4-3b", "bf16"),
    "internlm/internlm-xcomposer2d5-7b-4bit": ("internlm-xcomposer2-7b", "4bit"),
    "FunAudioLLM/CosyVoice2-0.5B": ("cosyvoice2-0.5b", "fp32"),
    "google/mobilebert-uncased": ("mobilebert", "fp32"),
    "sshleifer/distilbart-cnn-12-6": ("bart-large", "fp32"),
    "tencent/Tencent-Hunyuan-Large": ("hunyuan-large", "bf16"),
    "tencent/HunyuanVideo": ("hunyuanvideo", "bf16"),
    "laion/CLIP-ViT-L-14-laion2B-s32B-b82K": ("clip-vit-large-patch14", "fp32"),
    "laion/CLIP-ViT-B-16-laion2B-s34B-b88K": ("clip-vit-base-patch16", "fp32"),
    "openai/clip-vit-large-patch14-336": ("clip-vit-large-patch14-336", "fp32"),
    "facebook/dinov2-base": ("dinov2-base", "fp32"),
    "dinov2_vitg14": ("dinov2-giant", "fp32"),
    "facebook/dinov2-with-registers-small": ("dinov2-small", "fp32"),
    "facebook/dinov3-vitl16-pretrain-lvd1689m": ("dinov3-vitl16", "fp32"),
    "facebook/dinov3-vit7b16-pretrain-lvd1689m": ("dinov3-vit7b16", "fp32"),
    "facebook/dinov3-convnext-large-pretrain-lvd1689m": ("dinov3-convnext-large", "fp32"),
    "google/siglip-base-patch16-224": ("siglip-base", "fp32"),
    "google/siglip2-so400m-patch14-384": ("siglip2-so400m", "fp32"),
    "google/siglip2-giant-opt-patch16-384": ("siglip2-giant-opt", "fp32"),
    "convnextv2_base.fcmae_ft_in22k_in1k": ("convnextv2-base", "fp32"),
    "facebook/convnextv2-huge-22k-512": ("convnextv2-huge", "fp32"),
    "nvidia/segformer-b2-finetuned-ade-512-512": ("segformer-b2", "fp32"),
    "depth-anything/Depth-Anything-V2-Large-hf": ("depth-anything-v2-large", "fp32"),
    "facebook/sam2.1-hiera-base-plus": ("sam2-hiera-base-plus", "fp32"),
    "facebook/sam2-hiera-large": ("sam2-hiera-large", "fp32"),
    "facebook/hubert-large-ls960-ft": ("wav2vec2-large", "fp32"),
    "amazon/chronos-bolt-base": ("t5-base", "fp32"),
    "Qwen/Qwen3-Reranker-4B": ("qwen3-4b", "bf16"),
    "distil-whisper/distil-large-v3.5": ("distil-large-v3", "fp16"),
    "distil-whisper/distil-small.en": ("distil-small.en", "fp16"),
    "mixedbread-ai/mxbai-rerank-large-v1": ("deberta-v3-large", "fp32"),
    "Alibaba-NLP/gte-base-en-v1.5": ("nomic-embed-text-v1.5", "fp32"),
    "intfloat/e5-large": ("bge-large", "fp32"),
    "google/embeddinggemma-300m": ("embeddinggemma-300m", "fp32"),
    "IDEA-Research/grounding-dino-tiny": ("grounding-dino-tiny", "fp32"),
    "facebook/mask2former-swin-large-coco-panoptic": ("mask2former-swin-large", "fp32"),
    "microsoft/Florence-2-large-ft": ("florence-2-large", "fp32"),
    "facebook/sam3": ("sam3", "fp32"),
    "Systran/faster-whisper-large-v2": ("whisper-large-v2", "fp16"),
    "faster-whisper-medium.en": ("whisper-medium", "fp16"),
    "faster-bert-base": ("bert-base", "fp32"),
    "facebook/esmfold_v1": ("esmfold", "fp32"),
    "jinaai/jina-clip-v2": ("jina-clip-v2", "fp32"),
    "jinaai/jina-embeddings-v2-base-en": ("jina-embeddings-v2-base", "fp32"),
    "jinaai/jina-embeddings-v2-base-code": ("jina-embeddings-v2-base-de", "fp32"),
    "jinaai/jina-embeddings-v4": ("jina-embeddings-v4", "bf16"),
    "snowflake-arctic-embed2:568m": ("bge-m3", "fp32"),
    "Snowflake/arctic-embed-l": ("bge-large", "fp32"),
    "meta-llama/Llama-Prompt-Guard-2-86M": ("mdeberta-v3-base", "fp32"),
    "facebook/nllb-200-distilled-600M": ("nllb-200-distilled-600m", "fp32"),
    "facebook/bart-large-cnn": ("bart-large", "fp32"),
    "google/mt5-xl": ("mt5-xl", "fp32"),
    "internlm/internlm2_5-1_8b": ("internlm2-1.8b", "bf16"),
    "ibm-granite/granite-embedding-278m-multilingual": ("xlm-roberta-base", "fp32"),
    "dmis-lab/biobert-v1.1": ("bert-base", "fp32"),
    "Tongyi-MAI/Z-Image-Turbo": ("z-image", "bf16"),
    "segmind/SSD-1B": ("ssd-1b", "fp16"),
    "zai-org/CogView4-6B": ("cogview4-6b", "bf16"),
    "google/t5gemma-9b-9b-ul2-it": ("t5gemma-9b-9b", "bf16"),
    "deepseek-ai/DeepSeek-Math-V2": ("deepseek-v3.2", "fp8"),
    "perplexity-ai/r1-1776": ("deepseek-r1", "fp8"),
    "vidore/colqwen2-v1.0": ("qwen2-vl-2b", "bf16"),
    "nomic-ai/nomic-embed-text-v2-moe": ("nomic-embed-text-v2-moe", "fp32"),
    "nomic-ai/nomic-embed-multimodal-7b": ("qwen2.5-vl-7b", "bf16"),
    "inclusionAI/LLaDA2.0-mini": ("ling-mini-2.0", "bf16"),
    "THUDM/GLM-Z1-9B-0414": ("glm-4-9b", "bf16"),
}


BITS = {
    "llama-3.3-70b-instruct-gptq-8bit": 8.1,
    "llama-3.3-70b-instruct-gptq": 4.16,
    "google/gemma-3-27b-it-qat-q4_0-unquantized": 16.0,
    "qwen3-8b-awq-dequantized-bf16": 16.0,
    "mlx-community/llama-3.3-70b-instruct-6bit": 6.5,
    "kaitchup/llama-3.3-70b-gptq-3bit": 3.5,
    "llama-3.3-70b-4.65bpw-h6-exl2": 4.75,
    "unsloth/llama-3.3-70b-instruct-ud-iq2_xxs.gguf": 2.39,
    "unsloth/llama-3.3-70b-instruct-ud-q4_k_xl.gguf": 5.7,
    "llama-3.3-70b-instruct-4-bit": 4.5,
    "mlc-ai/llama-3.3-70b-instruct-q4f16_1-mlc": 4.5,
    "llama-3.3-70b-instruct-mxfp8": 8.25,
    "llama-3.3-70b-instruct-w4afp8": 4.16,
    "llama-3.3-70b-instruct-int8wo": 8.16,
    "llama-3.3-70b-instruct-eetq": 8.1,
    "llama-3.3-70b-f32.gguf": 32.0,
    "llama-3.3-70b-float32": 32.0,
    "llama3.3:70b-instruct-q4": 5.13,
    "llama-3.3-70b-q8": 8.5,
    "llama-3.3-70b-mxfp4_moe.gguf": 4.9,
    "llama-3.3-70b-ud-tq1_0.gguf": 2.01,
}
"""Bits of a parameter by what a name says."""


@pytest.mark.parametrize("name", BITS)
def test_bits_per_parameter_are_read_from_the_name(name: str) -> None:
    found = names.resolve(name)
    assert found is not None and (found.precision.bits, found.how) == (BITS[name], "public")


def workload(hints: str) -> Workload:
    found = workload_of(parse(f"migbatch: {hints}"))
    assert found is not None
    return found


def test_tag_of_the_ollama_library_is_served_by_ollama_unless_the_engine_is_stated() -> None:
    """`name:tag` without an organisation is a name of that library alone; in 16 bits for eight sequences it took a
    slice of three times the memory.
    """
    tagged, stated = workload("model=llama3.1:8b"), workload("model=llama3.1:8b engine=ollama")
    assert (tagged.precision, tagged.serving) == (stated.precision, stated.serving)
    assert tagged.assumed[0] == "engine=ollama"
    assert workload("model=llama3.1:8b engine=vllm").precision.bits == 16
    assert workload("model=org/llama3.1:8b").precision.bits == 16
    assert workload("model=llama3.1:8b max_num_seqs=4").served.concurrency == 4
    assert workload("model=llama3.1:8b method=lora").precision.bits == 16


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [("nvfp4a16", 4.5), ("mxfp4a16", 4.5), ("fp8_e4m3", 8.1), ("fp8_block", 8.1), ("ptpc_fp8", 8.1), ("int4_awq", 4.16),
     ("w8a8_int8", 8.1), ("blockwise_int8", 8.1), ("modelopt_fp8", 8.1), ("petit_nvfp4", 4.5), ("w4a8_awq", 4.16),
     ("gptq_marlin_24", 4.16), ("int8_sq", 8.1), ("q4km", 4.9)],
)  # fmt: skip
def test_names_of_the_engines_for_quantizations_are_known(quantization: str, bits: float) -> None:
    """Of vLLM, SGLang and TensorRT-LLM; weights in `-NVFP4A16` counted as 16 bits."""
    assert workload(f"model=qwen3-32b quantization={quantization}").precision.bits == bits
    named = workload(f"model=org/Qwen3-32B-{quantization.upper()}")
    assert named.model.name == "qwen3-32b" and named.precision.bits == bits


def test_file_of_the_hub_as_ollama_names_it_is_served_by_ollama() -> None:
    asked = workload("model=hf.co/bartowski/Llama-3.2-3B-Instruct-GGUF:IQ4_XS")
    assert (asked.model.name, asked.precision.name) == ("llama-3.2-3b", "iq4-xs")
    assert asked.served.engine == "ollama" and asked.served.concurrency == 1


def test_copy_in_gguf_of_weights_that_are_published_in_fewer_bits_has_no_more() -> None:
    copied = workload("model=ggml-org/gpt-oss-120b-GGUF engine=llamacpp")
    assert copied.precision == workload("model=gpt-oss-120b").precision
    assert workload("model=unsloth/gpt-oss-120b-GGUF:Q8_0 engine=llamacpp").precision.bits == 8.5
    assert workload("model=org/Qwen3-8B-GGUF").precision.bits == 8.5


def test_precision_in_an_ollama_tag_overrides_the_ollama_default() -> None:
    assert workload("model=llama3.3:70b engine=ollama").precision.bits == 4.9
    assert workload("model=llama3.3:70b-instruct-fp16 engine=ollama").precision.bits == 16


@pytest.mark.parametrize(
    ("hints", "bits"),
    [
        ("model=t5-11b engine=transformers", 32),
        ("model=llama-3.1-8b dtype=fp32", 32),
        ("model=llama-3.1-8b engine=ollama", 16),
        ("model=llama-3.1-8b-awq", 16),
        ("model=gpt-oss-20b", 16),
        ("model=t5-11b engine=vllm", 16),
    ],
)
def test_weights_that_are_not_quantized_have_the_bits_of_their_data_type(hints: str, bits: int) -> None:
    assert workload(f"{hints} quantization=none").precision.bits == bits


@pytest.mark.parametrize("engine", ["", "engine=vllm", "engine=sglang", "engine=transformers"])
def test_key_value_cache_of_a_model_run_in_32_bits_has_32_bits(engine: str) -> None:
    serving = workload(f"model=llama-3.1-8b dtype=fp32 {engine}").serving
    assert serving is not None and serving.cache_bits == 32
    serving = workload(f"model=llama-3.1-8b dtype=fp32 kv_cache_dtype=fp8 {engine}").serving
    assert serving is not None and serving.cache_bits == 8


def test_params_hint_overrides_a_contradicting_name() -> None:
    for name in ("mistral", "llama-3-8b"):
        assert workload(f"model={name} params=70b").architecture.parameters == pytest.approx(70e9, rel=1e-3)
    assert workload("model=llama-3-8b params=8b").model.how == "public"
    assert workload("model=llama-3-70b params=8b").architecture.parameters > 70e9


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_computed_from_the_architecture_is_the_published_one(name: str) -> None:
    assert BY_NAME[name].architecture.parameters == PUBLISHED[name]


def test_every_public_name_and_alias_resolves_to_its_model() -> None:
    seen: dict[str, str] = {}
    for model in ALL:
        for name in (model.name, *model.aliases):
            assert seen.setdefault(names.squeeze(name), model.name) == model.name, name
            found = names.resolve(name)
            assert found is not None and found.name == model.name, name


@pytest.mark.parametrize("name", NAMED)
def test_repository_and_tag_names_resolve_to_the_public_model(name: str) -> None:
    found = names.resolve(name.lower())
    assert found is not None and (found.name, found.precision.name) == NAMED[name] and found.how == "public"


def test_name_with_a_second_size_does_not_resolve_to_a_public_model() -> None:
    for name in ("gpt2-xl-large", "deepseek-r1-99b", "t5-large-xxl"):
        found = names.resolve(name)
        assert found is None or found.how != "public", name


def test_name_with_a_larger_size_resolves_to_at_least_that_size() -> None:
    for name in ("nvidia/mistral-nemo-minitron-8b-base", "ibm-granite/granite-3.1-3b-a800m-instruct"):
        found, size = names.resolve(name), sizes.size_of(name.split("-"))
        assert found is not None and size is not None and found.architecture.parameters >= size.total, name


def test_unknown_size_word_does_not_resolve_to_the_family_default() -> None:
    for name in ("qwen3-max", "qwen3-next", "mistral-small9.9", "laion/clip-vit-h-14-laion2b-s32b-b79k"):
        found = names.resolve(name)
        assert found is None or found.name not in ("qwen3-8b", "mistral-7b", "clip-vit-base-patch32"), name
    with pytest.raises(Refusal, match="size of model qwen3-ultra is not known"):
        workload("model=qwen3-ultra")


@pytest.mark.parametrize(
    "name", ["royokong/e5-v", "BAAI/bge-code-v1", "BAAI/bge-reranker-v2.5-gemma2-lightweight", "gte-modern"]
)
def test_name_that_only_begins_as_a_base_model_does_is_another_model(name: str) -> None:
    found = names.resolve(name.lower())
    assert found is None or found.architecture.parameters > 9e9, "they have up to 9.2 billion parameters"
    for same in ("bge", "bge-gguf", "e5", "nomic-ai/modernbert-embed-base", "gte-base-zh"):
        base = names.resolve(same)
        assert base is not None and base.how == "public", same


def test_name_of_two_models_resolves_to_the_larger() -> None:
    for name in ("baai/bge-multilingual-gemma2", "gemma2-bge-multilingual"):
        found = names.resolve(name)
        assert found is not None and found.name == "gemma-2-9b", name


def test_size_is_read_in_every_spelling() -> None:
    for name in ("qwen2.5-1.5b", "Qwen2_5_1_5B-Instruct", "qwen2-5-1-5b", "qwen25-1.5b"):
        found = names.resolve(name.lower())
        assert found is not None and found.name == "qwen2.5-1.5b", name
    for name in ("bloom-7b1.Q4_K_M.gguf", "bloomz-7b1-mt.q4_0.gguf"):  # a file's name has dots between its words
        found = names.resolve(name)
        assert found is not None and found.name == "bloom-7b1", name
    found = names.resolve("qwen2-5-15b")
    assert found is not None and found.architecture.parameters > 14e9


def test_training_token_count_is_not_read_as_the_model_size() -> None:
    found = names.resolve("tinyllama-1.1b-intermediate-step-1431k-3t")
    assert found is not None and found.name == "tinyllama-1.1b"
    large = names.resolve("some-1t")
    assert large is not None and large.architecture.parameters > 1e12


@pytest.mark.parametrize(
    ("name", "billions", "context"),
    [
        ("TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T", 1.1, 2048),
        ("TinyLlama/TinyLlama-1.1B-step-50K-105b", 1.1, 2048),
        ("HF1BitLLM/Llama3-8B-1.58-100B-tokens", 8.03, 8192),
        ("mlabonne/llama-2-7b-guanaco-1k", 6.74, 4096),
        ("acme/Llama-2-7b-50k-samples", 6.74, 4096),
        ("lmsys/vicuna-7b-v1.5-16k", 6.74, 16384),
    ],
)
def test_steps_tokens_and_samples_of_a_training_are_no_size_and_no_context(
    name: str, billions: float, context: int
) -> None:
    found = names.resolve(name.lower())
    assert found is not None and found.how == "public"
    assert found.architecture.parameters == pytest.approx(billions * 1e9, rel=0.01)
    assert found.architecture.context == context


def test_length_of_a_sequence_is_no_size() -> None:
    assert names.resolve("longsafari/hyenadna-large-1m-seqlen-hf") is None


def test_weights_of_a_model_tuned_by_qlora_have_16_bits() -> None:
    for name in ("acme/llama-2-7b-qlora-merged", "acme/qlora-llama-2-7b"):
        found = names.resolve(name)
        assert found is not None and (found.name, found.precision.name) == ("llama-2-7b", "bf16")
    found = names.resolve("acme/llama-2-7b-qlora.q4_k_m.gguf")
    assert found is not None and found.precision.name == "q4-k-m"


@pytest.mark.parametrize(
    ("name", "model", "kept"),
    [
        ("https://huggingface.co/Qwen/Qwen2.5-7B-Instruct/tree/main", "qwen2.5-7b", "bf16"),
        ("https://huggingface.co/Qwen/Qwen2.5-7B-Instruct/blob/main/config.json", "qwen2.5-7b", "bf16"),
        ("hf.co/acme/Qwen2.5-7B-GGUF/resolve/main/qwen2.5-7b-Q4_K_M.gguf", "qwen2.5-7b", "q4-k-m"),
        ("s3://bucket/models/Llama-3.1-8B/", "llama-3.1-8b", "bf16"),
        ("models--meta-llama--Llama-3.1-8B-Instruct/snapshots/0e9e39f249a16976918f", "llama-3.1-8b", "bf16"),
    ],
)
def test_addresses_of_a_hub_and_directories_name_the_model_in_them(name: str, model: str, kept: str) -> None:
    found = workload(f"model={name}").model
    assert (found.name, found.how, found.precision.name) == (model, "public", kept)
    sized = workload("model=https://huggingface.co/acme/chat-7b/tree/main").model
    assert (sized.name, sized.how) == ("chat-7b", "size")


def test_misspelt_size_word_gets_a_suggestion_and_no_other_model() -> None:
    for name, meant in {"bert-lrge": "bert-large", "t5-smal": "t5-small", "whisper-mediun": "whisper-medium"}.items():
        found = names.resolve(name)
        assert found is None or found.how != "public", name
        assert names.suggestion(name) == meant
    found = names.resolve("bert-emotion")
    assert found is not None and found.name == "bert-base", "any other word beside a name changes nothing"


def test_size_of_an_unknown_model_is_read_from_its_name() -> None:
    for name, billions in {
        "acme-7b": 7,
        "acme-8x7b": 56,
        "x-235b-a22b": 235,
        "some-1.5b-chat": 1.5,
        "y-1b-7b": 7,
        "acme-6b7": 6.7,
        "rwkv-4-world-1b5": 1.5,
    }.items():
        found = names.resolve(name)
        assert found is not None and found.how == "size"
        rounded = 1.0 if "x" in name.rpartition("-")[2] else 1.1  # the experts of 8x7b share their attention
        assert found.architecture.parameters == pytest.approx(rounded * billions * 1e9, rel=1e-3), name
    for name, billions in {"cloudyu/Mixtral_7Bx2_MoE": 14, "fusionnet-34bx2-moe": 68, "mistral-7bx2": 14}.items():
        found = names.resolve(name.lower())
        assert found is not None and found.how == "size", name
        assert found.architecture.parameters == pytest.approx(billions * 1e9, rel=1e-3), name
    small = names.resolve("bloom-1b3")
    assert small is not None and small.architecture.parameters < 2e9, "not the bloom of 176 billion"
    sparse = names.resolve("x-235b-a22b")
    assert sparse is not None and sparse.architecture.active < 60e9
    assert names.resolve("resnet50") is None and names.resolve("our-model") is None


@given(st.floats(1e6, 5e12), st.floats(0.02, 1.0))
def test_architecture_generated_for_a_size_has_that_many_parameters(total: float, share: float) -> None:
    made = sizedmodels.of_size(sizes.Sized(total, total * share))
    assert made.parameters >= total * 0.999 - 1
    assert made.parameters <= total * 1.01 + 1e6 and made.cache_values(1) > 0


def test_cache_of_a_model_of_unknown_architecture_is_that_of_most_public_ones() -> None:
    """Those whose heads share keys and values: nine tenths cache no more, and half of them at least two fifths."""
    shares = []
    for model in ALL:
        exact = model.architecture
        if exact.kind == "decoder" and exact.recurrent is None and (exact.latent or exact.kv_heads < exact.heads):
            made = sizedmodels.of_size(sizes.Sized(float(exact.parameters), float(min(exact.active, exact.parameters))))
            shares.append(exact.cache_values(8192) / made.cache_values(8192))
    shares.sort()
    assert len(shares) > 100
    assert shares[len(shares) * 9 // 10] <= 1.0 and shares[len(shares) // 2] >= 0.4 and shares[-1] <= 1.5


@pytest.mark.parametrize("size", ["7b", "8b"])
def test_unknown_model_of_seven_billion_parameters_gets_half_an_h100(size: str) -> None:
    need = need_of(workload(f"model=acme/acme-{size}-chat"), 40448)
    assert need.weights >= 2 * float(size[0]) * 1e9 / 2**20 and need.slice_mib <= 40448


@pytest.mark.parametrize("words", ["", "engine=ollama", "quantization=awq", "method=lora", "method=full"])
def test_memory_need_of_unknown_models_grows_with_their_size(words: str) -> None:
    sizes = ("350m", "1b", "3b", "4b", "7b", "8b", "13b", "14b", "15b", "16b", "20b", "32b", "70b", "120b", "400b")
    needs = [need_of(workload(f"params={size} {words}"), 81152).slice_mib for size in sizes]
    assert needs == sorted(needs)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("google/t5gemma-9b-2b-ul2-it", 12.3),
        ("google/t5gemma-2-4b-4b", 7.5),
        ("acme/tiny-1b", 1.24),
        ("acme/tiny-2b", 2.5),
        ("acme/small-3b", 3.2),
        ("XiaomiMiMo/MiMo-VL-7B-RL", 8.31),
        ("ibm-granite/granite-vision-3.2-2b", 2.98),
        ("Wan-AI/Wan2.2-TI2V-5B", 11.4),
        ("zai-org/CogVideoX1.5-5B", 10.5),
        ("Lightricks/LTX-Video-0.9.7-13B-distilled", 18.0),
        ("Skywork/SkyReels-V2-DF-14B-720P", 20.2),
        ("Wan-AI/Wan2.2-Animate-14B", 23.0),
        ("zai-org/CogView3-Plus-3B", 7.9),
    ],
)
def test_size_in_the_name_that_leaves_out_parts_is_raised_to_the_whole_model(name: str, billions: float) -> None:
    """Published parameters of the checkpoints, all parts together."""
    found = names.resolve(name)
    assert found is not None and found.how == "size"
    assert 0.97 * billions * 1e9 <= found.architecture.parameters <= 1.35 * billions * 1e9


@pytest.mark.parametrize(
    "name", ["wan-ai/wan2.2-ti2v-5b", "facebook/wav2vec2-xls-r-2b", "acme/dnabert-117m", "acme/mamba-7b", "acme-7b-awq"]
)
def test_stated_number_of_parameters_changes_nothing_but_the_size(name: str) -> None:
    """`migbatch model describe` prints it, for the name alone."""
    found = names.resolve(name)
    assert found is not None and found.how == "size"
    stated = workload(f"model={name} params={found.architecture.parameters}")
    alone = workload(f"model={name}")
    assert stated.precision == alone.precision
    assert need_of(stated, 81152).slice_mib == pytest.approx(need_of(alone, 81152).slice_mib, rel=0.01)


def test_number_of_experts_is_not_read_as_a_size() -> None:
    assert names.resolve("acme/model-17b-128e") is None
    with pytest.raises(Refusal, match=r"the size of model .* is not known"):
        workload("model=acme/model-17b-128e")


@pytest.mark.parametrize(
    "name",
    ["Wan-AI/Wan2.2-TI2V-5B", "nvidia/Cosmos-Predict2.5-2B", "nvidia/Cosmos-Transfer1-7B", "ByteDance-Seed/SeedVR2-3B"],
)
def test_video_generator_needs_working_memory_and_no_kv_cache(name: str) -> None:
    made = workload(f"model={name}")
    assert made.architecture.kind == "plain"
    assert need_of(made, 81152).activations >= 8 * 1024


def test_other_version_of_a_model_is_resolved_by_size_only() -> None:
    for name in ("deepseek-ai/deepseek-moe-16b-base", "zai-org/GLM-4.3V-9B-Thinking", "llava:34b", "acme-8b-v7"):
        found = names.resolve(name)
        assert found is not None and found.how == "size", name


def test_misspelt_name_resolves_to_the_nearest_public_name() -> None:
    assert names.suggestion("mixtrall") == "mixtral"
    assert names.suggestion("brt-large") == "bert-large"
    assert names.suggestion("raft-large") is None
    assert names.suggestion("chai-1") is None
    assert (names.suggestion("deepsek-v3"), names.suggestion("moch-1")) == ("deepseek-v3", "mochi-1")
    assert names.suggestion("unet-small") is None
    assert names.suggestion("something-else-entirely") is None
    found = names.resolve("lama-3.1-8b")
    assert found is not None and (found.name, found.how) == ("llama-3.1-8b", "near")


@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyz0123456789._-/:", min_size=1, max_size=96))
def test_any_string_resolves_or_returns_none(name: str) -> None:
    found = names.resolve(name)
    assert found is None or found.architecture.parameters > 0


def test_cache_of_an_encoder_decoder_counts_the_encoder_output() -> None:
    whisper = BY_NAME["whisper-large-v3"].architecture
    assert whisper.cache_values(1) == 32 * 2 * 20 * 64 * (1500 + 1), "an encoder's output for 30 s of sound"
    assert BY_NAME["t5-base"].architecture.cache_values(128) == 2 * 12 * 2 * 12 * 64 * 128


@pytest.mark.parametrize("name", ["llama-3.3-nemotron-super-49b", "glm-4.5-air", "glm-4.5", "minimax-m2"])
def test_longer_context_needs_a_larger_cache(name: str) -> None:
    short, long = (workload(f"model={name} max_model_len={length} max_num_seqs=1") for length in ("4k", "128k"))
    grown = need_of(long, 81152).cache - need_of(short, 81152).cache
    assert grown > 10 * 1024, "MiB for 124 thousand tokens of at least 46 layers with eight heads"


CACHED = {
    "llama-2-7b": 512, "llama-2-13b": 800, "llama-2-70b": 320, "llama-3.1-8b": 128, "llama-3.1-70b": 320,
    "llama-3.1-405b": 504, "llama-3.2-1b": 32, "llama-3.2-3b": 112, "mistral-7b": 128, "mistral-nemo": 160,
    "mistral-small-24b": 160, "mistral-large": 352, "mixtral-8x7b": 128, "mixtral-8x22b": 224,
    "qwen1.5-7b": 512, "qwen1.5-14b": 800, "qwen2-audio-7b": 512, "qwen2.5-0.5b": 12, "qwen2.5-3b": 36,
    "qwen2.5-7b": 56, "qwen2.5-14b": 192, "qwen2.5-32b": 256, "qwen2.5-72b": 320, "qwen3-0.6b": 112,
    "qwen3-4b": 144, "qwen3-8b": 144, "qwen3-14b": 160, "qwen3-32b": 256, "qwen3-30b-a3b": 96,
    "qwen3-235b-a22b": 188, "gemma-7b": 448, "gemma-2b": 18, "phi-2": 320, "phi-3-mini": 384, "phi-4": 200,
    "phi-4-mini": 128, "yi-6b": 64, "yi-34b": 240, "deepseek-llm-7b": 480, "deepseek-coder-33b": 248,
    "falcon-7b": 8, "falcon-40b": 120, "gpt-j-6b": 448, "gpt-neox-20b": 1056, "opt-13b": 800, "bloom-7b1": 480,
    "mpt-7b": 512, "starcoder": 20, "starcoder2-15b": 80, "command-r": 1280, "command-r-08-2024": 160,
    "solar-10.7b": 192, "chatglm3-6b": 28, "glm-4-9b": 40, "internlm2-7b": 128, "baichuan2-13b": 800,
    "olmo-2-7b": 512, "smollm2-1.7b": 192, "smollm3-3b": 72, "granite-3.3-8b": 160, "dbrx": 160,
    "llava-1.5-7b": 512, "llava-v1.6-mistral-7b": 128, "hunyuan-a13b": 128, "dots.llm1": 992,
}  # fmt: skip
"""KiB that a token takes in a cache of 16 bits: 4 bytes for each layer, head of keys and value of it, by the models'
config.json. The number of parameters does not show a wrong one.
"""


@pytest.mark.parametrize("name", CACHED)
def test_cache_of_a_token_is_that_of_the_published_layers_and_heads(name: str) -> None:
    assert BY_NAME[name].architecture.cache_values(1) * 2 == CACHED[name] * 1024


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("tencent/Hunyuan-A13B-Instruct-FP8", 80.4),
        ("nvidia/NV-Embed-v2", 7.85),
        ("rednote-hilab/dots.llm1.inst", 142.8),
        ("sarvamai/sarvam-m", 23.6),
        ("PixArt-alpha/PixArt-Sigma-XL-2-1024-MS", 5.45),
        ("facebook/musicgen-stereo-large", 3.3),
        ("google/recurrentgemma-9b-it", 8.58),
        ("google/t5gemma-2b-2b-ul2-it", 5.6),
        ("google/t5gemma-9b-9b-prefixlm", 20.3),
        ("google/t5gemma-9b-9b-ul2-it", 20.3),
        ("nomic-ai/nomic-embed-text-v2-moe", 0.475),
        ("openbmb/MiniCPM-V-2_6", 8.1),
        ("ltxv-2b-0.9.6-dev", 7.1),
        ("genmo/mochi-1-preview", 15.2),
        ("lodestones/Chroma1-HD", 13.8),
        ("Alpha-VLLM/Lumina-Image-2.0", 5.31),
        ("Kwai-Kolors/Kolors-diffusers", 8.92),
        ("HiDream-ai/HiDream-I1-Full", 30.8),
        ("OmniGen2/OmniGen2", 7.82),
        ("tencent/HunyuanImage-2.1", 25.9),
    ],
)
def test_public_model_under_its_full_name_has_the_parameters_of_its_card(name: str, billions: float) -> None:
    found = names.resolve(name)
    assert found is not None and found.how == "public"
    assert found.architecture.parameters == pytest.approx(1e9 * billions, rel=0.01)


def test_encoder_of_images_beside_a_molmo_is_counted() -> None:
    """Molmo 7B-D: 8.02 billion parameters (its checkpoint)."""
    assert workload("model=allenai/Molmo-7B-D-0924").architecture.parameters >= 8.02e9


def test_sliding_window_and_latent_attention_reduce_the_cache() -> None:
    gemma, deepseek = BY_NAME["gemma-3-27b"].architecture, BY_NAME["deepseek-v3"].architecture
    assert gemma.cache_values(8192) == 2 * 16 * 128 * (10 * 8192 + 52 * 1024)
    assert deepseek.cache_values(1) == 61 * (512 + 64)
    assert BY_NAME["llama-3.1-8b"].architecture.cache_values(1) == 65536


@pytest.mark.parametrize(
    ("name", "millions"),
    [("gte-large-en-v1.5", 434), ("labse", 471), ("xlm-roberta-xl", 3480), ("deberta-v3-small", 141),
     ("deberta-v3-xsmall", 70.7), ("jina-embeddings-v2-base", 137), ("jina-embeddings-v2-small", 33),
     ("jina-embeddings-v2-base-de", 161), ("mdeberta-v3-base", 279), ("prot-bert", 420), ("longformer-base-4096", 149),
     ("granite-embedding-30m-english", 30.3),
     ("internlm2-1.8b", 1890), ("distil-small.en", 166), ("distil-medium.en", 394), ("distil-large-v2", 756)],
)  # fmt: skip
def test_parameters_are_those_of_the_model_card(name: str, millions: float) -> None:
    assert BY_NAME[name].architecture.parameters == pytest.approx(1e6 * millions, rel=0.01)


@pytest.mark.parametrize(
    ("hints", "gib"),
    [("model=mynet params=25m input=224px batch=64", (2, 5)), ("model=my-resnet-60m batch=32", (1, 3)),
     ("params=25m input=224px batch=64 role=train", (7, 24)), ("model=my-vit params=86m batch=64 role=train", (13, 42)),
     ("model=unet-31m role=train batch=8 input=512px", (13, 20)),
     ("model=cyclegan params=28m role=train batch=1 input=256px", (3, 4.6)),
     ("model=cyclegan params=28m role=train batch=2 input=256px", (4.9, 9.3))],
)  # fmt: skip
def test_network_of_images_of_known_size_is_sized_by_its_pixels(hints: str, gib: tuple[float, float]) -> None:
    """Most are ResNets and the like, which need a third of the upper bound; a step of CycleGAN passes generators six
    times.
    """
    job = workload(hints)
    assert (job.architecture.kind, job.model.how) == ("plain", "size")
    low, high = gib
    assert low < need_of(job, 81152).slice_mib / 1024 < high
    larger = workload(f"{hints} input=448px" if "input" not in hints else hints.replace("px", "0px"))
    assert need_of(larger, 81152).activations > 3.9 * need_of(job, 81152).activations


@pytest.mark.parametrize("name", ["my-vl-700m", "acme-llava-700m", "mynet-7b", "acme-vit-7b"])
def test_language_model_that_sees_is_not_sized_by_pixels(name: str) -> None:
    with pytest.raises(Refusal, match="takes its input in tok"):
        workload(f"model={name} params={name.rpartition('-')[2]} input=448px")


@pytest.mark.parametrize("name", ["acme-pegasus-cnn-500m", "acme-coder-60m", "vitamin-700m"])
def test_language_model_with_a_similar_name_keeps_its_cache(name: str) -> None:
    assert need_of(workload(f"model={name}"), 81152).cache > 0


@pytest.mark.parametrize(
    ("name", "attending"),
    [("mamba-2.8b", 0), ("falcon-mamba-7b", 0), ("rwkv-6-world-7b", 0), ("acme/mamba2-370m", 0),
     ("rwkv-4-world-1b5", 0), ("jamba-mini", 4), ("zamba2-7b", 13), ("nemotron-h-8b", 4), ("minimax-text-01", 10)],
)  # fmt: skip
def test_only_layers_with_attention_have_a_cache_that_grows(name: str, attending: int) -> None:
    architecture = workload(f"model={name}").architecture
    per_token = 2 * architecture.kv_heads * architecture.head
    grown = architecture.cache_values(300_000) - architecture.cache_values(200_000)
    assert grown == attending * per_token * 100_000
    assert architecture.cache_values(200_000) > attending * per_token * 200_000, "the state is kept, too"


@pytest.mark.parametrize(
    ("name", "millions"),
    [("facebook/wav2vec2-xls-r-2b", 2500), ("facebook/mms-1b-all", 1500), ("hexgrad/Kokoro-82M", 90.2),
     ("EuroBERT/EuroBERT-610m", 671), ("EvolutionaryScale/esmc-600m-2024-12", 660), ("esm-c-300m", 330),
     ("google/timesfm-2.0-500m-pytorch", 550), ("OpenGVLab/InternViT-300M-448px", 330),
     ("jhu-clsp/ettin-encoder-400m", 440),
     ("esm1b_t33_650M_UR50S", 715), ("InstaDeepAI/nucleotide-transformer-v2-500m-multi-species", 550)],
)  # fmt: skip
def test_encoder_of_known_size_has_no_cache_and_weights_of_32_bits(name: str, millions: float) -> None:
    assert workload(f"model={name}").model.how == "size"
    need = need_of(workload(f"model={name}"), 20096)
    assert need.cache == 0 and need.weights == pytest.approx(4e6 * millions / 2**20)
    assert need_of(workload(f"model={name} dtype=fp16"), 20096).weights == pytest.approx(need.weights / 2)
    for hints in ("", " role=train"):
        assert need_of(workload(f"model={name}{hints}"), 81152).activations > 1024, "of one recording, or a long text"


def test_speech_model_that_is_a_language_model_keeps_its_cache() -> None:
    assert need_of(workload("model=nvidia/canary-qwen-2.5b"), 20096).cache > 0


def test_model_without_a_cache_needs_little_beside_its_weights() -> None:
    need = need_of(workload("model=state-spaces/mamba-2.8b"), 20096)
    assert 5.1 < need.weights / 1024 < 5.2 and need.used / 1024 < 7.0
    hybrid = need_of(workload("model=nvidia/mamba2-hybrid-8b-3t-128k"), 81152)
    assert hybrid.cache > 8 * 1024, "a hybrid of unknown parts is taken for a model with a full cache"


@pytest.mark.parametrize(
    ("name", "billions"),
    [("jamba-1.5-large", 398.6), ("jamba-1.5-mini", 51.6), ("grok-1", 314), ("arctic", 480), ("minimax-text-01", 456),
     ("step3", 321), ("step-3.5-flash", 196.9), ("mimo-v2-flash", 309), ("nanbeige4-3b", 3.93), ("mobilebert", 0.0251),
     ("hunyuan-large", 389), ("zamba2-7b", 7.4), ("nemotron-h-56b", 56)],
)  # fmt: skip
def test_size_of_a_model_whose_layers_are_not_all_described_is_the_published_one(name: str, billions: float) -> None:
    assert BY_NAME[workload(f"model={name}").model.name].architecture.parameters == pytest.approx(
        billions * 1e9, rel=0.01
    )


def test_precision_of_experts_alone_is_the_same_in_a_name_and_in_a_hint() -> None:
    published = workload("model=openai/gpt-oss-20b")
    for asked in ("model=openai/gpt-oss-20b quantization=mxfp4", "model=acme/gpt-oss-20b-mxfp4"):
        same = workload(asked)
        assert weights_mib(same.architecture, same.precision) == weights_mib(
            published.architecture, published.precision
        )


def test_weight_memory_follows_the_precision() -> None:
    llama = BY_NAME["llama-3.1-8b"].architecture
    assert weights_mib(llama, precision.plain("bf16")) / 1024 == pytest.approx(14.958, abs=0.001)
    awq, gguf, oss = precision.quantized("awq"), precision.quantized("q4-k-m"), names.resolve("gpt-oss-20b")
    assert awq is not None and weights_mib(llama, awq) / 1024 == pytest.approx(5.34, abs=0.01)
    assert gguf is not None and weights_mib(llama, gguf) / 1024 == pytest.approx(4.58, abs=0.01)
    assert oss is not None and weights_mib(oss.architecture, oss.precision) / 1024 == pytest.approx(12.8, abs=0.1)


LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 128256,
}  # fmt: skip
CONFIGS = {
    "llama-3.1-8b": LLAMA,
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_hidden_layers": 48, "vocab_size": 151936, "tie_word_embeddings": False,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 61, "vocab_size": 129280,
        "quantization_config": {"quant_method": "fp8"},
    },
    "gpt2": {
        "model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257,
    },
    "gemma-2-9b": {
        "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "num_hidden_layers": 42, "vocab_size": 256000,
    },
    "flan-t5-xl": {
        "model_type": "t5", "is_encoder_decoder": True, "d_model": 2048, "d_ff": 5120, "d_kv": 64, "num_heads": 32,
        "num_layers": 24, "num_decoder_layers": 24, "vocab_size": 32128, "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
    "t5-3b": {
        "model_type": "t5", "is_encoder_decoder": True, "d_model": 1024, "d_ff": 16384, "d_kv": 128, "num_heads": 32,
        "num_layers": 24, "vocab_size": 32128, "feed_forward_proj": "relu", "tie_word_embeddings": True,
    },
    "whisper-large-v3": {
        "model_type": "whisper", "is_encoder_decoder": True, "d_model": 1280, "encoder_layers": 32,
        "decoder_layers": 32, "num_hidden_layers": 32, "decoder_attention_heads": 20, "decoder_ffn_dim": 5120,
        "vocab_size": 51866, "max_target_positions": 448, "max_source_positions": 1500,
    },
    "dbrx": {
        "model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "vocab_size": 100352,
        "attn_config": {"kv_n_heads": 8},
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_config_json_gives_the_architecture_of_the_model_table(name: str) -> None:
    found = of_config(CONFIGS[name], name)
    assert found.architecture.parameters == pytest.approx(BY_NAME[name].architecture.parameters, rel=0.01)
    assert found.architecture.cache_values(448) == BY_NAME[name].architecture.cache_values(448)
    parsed = parse("migbatch: " + found.hints)
    assert parsed.llm.arch is not None and read_arch(parsed.llm.arch) == found.architecture


ATTENDING = {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("config", "billions", "active"),
    [
        # ERNIE 4.5 21B A3B, Hunyuan A13B, Ling mini 2.0, LFM2 8B A1B, Apertus 8B, Command R7B, SmolLM3
        ({"model_type": "ernie4_5_moe", "hidden_size": 2560, "intermediate_size": 12288, "moe_intermediate_size": 1536,
          "moe_k": 6, "moe_layer_start_index": 1, "moe_num_experts": 64, "moe_num_shared_experts": 2, "head_dim": 128,
          "num_attention_heads": 20, "num_hidden_layers": 28, "num_key_value_heads": 4, "vocab_size": 103424},
         21.83, 3.3),
        ({"model_type": "hunyuan_v1_moe", "hidden_size": 4096, "intermediate_size": 3072, "moe_topk": [8] * 32,
          "moe_intermediate_size": [3072] * 32, "num_experts": 64, "num_shared_expert": [1] * 32,
          "num_hidden_layers": 32, "vocab_size": 128167, "tie_word_embeddings": True}, 80.4, 12.7),
        ({"model_type": "bailing_moe", "hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512,
          "num_experts": 256, "num_experts_per_tok": 8, "num_shared_experts": 1, "first_k_dense_replace": 1,
          "num_attention_heads": 16, "num_key_value_heads": 4, "num_hidden_layers": 20, "vocab_size": 157184},
         16.26, 1.1),
        ({"model_type": "lfm2_moe", "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792,
          "num_experts": 32, "num_experts_per_tok": 4, "num_dense_layers": 2, "num_hidden_layers": 24,
          "vocab_size": 65536}, 8.3, 1.45),
        ({"model_type": "apertus", "hidden_size": 4096, "intermediate_size": 21504, "num_hidden_layers": 32,
          "vocab_size": 131072, "tie_word_embeddings": False}, 8.05, 7.5),
        ({"model_type": "cohere2", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
          "vocab_size": 256000}, 8.03, 8.03),
        ({"model_type": "smollm3", "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16,
          "num_key_value_heads": 4, "num_hidden_layers": 36, "vocab_size": 128256}, 3.08, 3.08),
    ],
)  # fmt: skip
def test_config_of_a_new_family_gives_its_published_parameters(
    config: dict[str, object], billions: float, active: float
) -> None:
    architecture = of_config(ATTENDING | config, "new").architecture
    assert architecture.parameters == pytest.approx(1e9 * billions, rel=0.015)
    assert architecture.active == pytest.approx(1e9 * active, rel=0.03)


@pytest.mark.parametrize(
    "parts", [("language_config",), ("llm_config",), ("decoder_config",), ("thinker_config", "text_config")]
)
def test_language_model_is_found_among_the_parts_of_a_larger_one(parts: tuple[str, ...]) -> None:
    config: dict[str, object] = LLAMA
    for part in reversed(parts):
        config = {"model_type": "larger", part: config, "vision_config": {"depth": 32, "hidden_size": 1280}}
    found = of_config(config, "larger")
    assert found.dtype == "bf16"
    assert found.architecture.cache_values(448) == BY_NAME["llama-3.1-8b"].architecture.cache_values(448)
    tower = 32 * (4 + 8) * 1280**2
    assert found.architecture.parameters == pytest.approx(8.03e9 + tower, rel=0.001)


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"type": "linear", "factor": 8}, 8 * 40960),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 40960),
        ({"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 4096}, 40960),
        ({"rope_type": "yarn", "factor": "4"}, 40960),
        ({"rope_type": "yarn", "factor": math.nan}, 40960),
        ({"rope_type": "yarn", "factor": 1e300}, 40960),
        (None, 40960),
    ],
)
def test_context_is_the_one_to_which_positions_are_stretched(scaling: object, context: int) -> None:
    """By `rope_scaling`, which Qwen's model cards tell to add: vLLM keeps room for a sequence of this length."""
    config = {**LLAMA, "max_position_embeddings": 40960, "rope_scaling": scaling}
    assert of_config(config, "stretched").architecture.context == context


def test_context_of_ten_million_tokens_is_described() -> None:
    found = of_config({"text_config": {**LLAMA, "max_position_embeddings": 10_485_760}}, "llama-4-scout")
    assert found.architecture.context == 10_485_760
    parsed = parse("migbatch: " + found.hints)
    assert parsed.llm.arch is not None and read_arch(parsed.llm.arch) == found.architecture


def test_heads_of_keys_are_read_from_the_form_of_the_authors() -> None:
    params = {"dim": 4096, "n_layers": 32, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32, "n_kv_heads": 8}
    assert of_config({**params, "vocab_size": 32768}, "mistral-7b").architecture.kv_heads == 8


ENCODER = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "max_position_embeddings": 512,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "millions"),
    [
        ({"model_type": "camembert", "vocab_size": 32005}, 110),
        ({"model_type": "deberta", "vocab_size": 50265}, 124),
        ({"model_type": "longformer", "vocab_size": 50265}, 149),
        ({"model_type": "nomic_bert", "vocab_size": 30528}, 137),
        ({"model_type": "modernbert", "vocab_size": 50368, "num_hidden_layers": 22, "intermediate_size": 1152}, 149),
    ],
)
def test_config_of_an_encoder_is_described_as_one(config: dict[str, object], millions: int) -> None:
    found = of_config({**ENCODER, **config}, "ours").architecture
    assert found.kind == "encoder" and found.cache_values(512) == 0
    assert found.parameters == pytest.approx(1e6 * millions, rel=0.02)


ALBERT = {**ENCODER, "model_type": "albert", "embedding_size": 128, "num_hidden_groups": 1, "vocab_size": 30000}


@pytest.mark.parametrize(
    ("name", "config", "millions"),
    [
        ("albert-base-v2", {}, 11.7),
        ("albert-xlarge-v2", {"hidden_size": 2048, "num_hidden_layers": 24, "intermediate_size": 8192}, 58.7),
        ("albert-xxlarge-v2", {"hidden_size": 4096, "num_attention_heads": 64, "intermediate_size": 16384}, 222.6),
    ],
)
def test_weights_that_all_layers_share_are_counted_once(name: str, config: dict[str, object], millions: float) -> None:
    """Parameters of transformers' checkpoints (ALBERT, arXiv 1909.11942, table 1: 12 to 235 million)."""
    described = of_config(ALBERT | config, name)
    public, own = workload(f"model={name}").architecture, described.architecture
    assert public.parameters == pytest.approx(1e6 * millions, rel=0.02)
    assert 1e6 * millions < own.parameters < 1.02 * 1e6 * millions, "its embedding is narrower than its layers"
    # each layer computes and keeps as much as one with its own weights
    distinct = of_config({**ALBERT, **config, "model_type": "bert"}, name).architecture
    assert own.operations(512.0) == pytest.approx(distinct.operations(512.0), rel=0.01)
    assert own.operations(512.0) == pytest.approx(public.operations(512.0), rel=0.01)
    training = Training("full", "adamw", checkpointing=False, seq=512, micro_batch=8, share=0.95)
    assert activations_mib(own, training, 4.0) == activations_mib(distinct, training, 4.0)


RECURRENT = {
    "model_type": "recurrent_gemma", "block_types": ["recurrent", "recurrent", "attention"],
    "attention_window_size": 2048, "num_key_value_heads": 1, "vocab_size": 256000,
}  # fmt: skip


@pytest.mark.parametrize(
    ("size", "config", "billions"),
    [
        ("2b", {"hidden_size": 2560, "intermediate_size": 15360, "num_attention_heads": 10, "num_hidden_layers": 26,
                "lru_width": 2560}, 2.68),
        ("9b", {"hidden_size": 4096, "intermediate_size": 24576, "num_attention_heads": 16, "num_hidden_layers": 38,
                "lru_width": 4096}, 8.58),
    ],
)  # fmt: skip
def test_recurrent_gemma_is_described_with_a_cache_that_does_not_grow(
    size: str, config: dict[str, object], billions: float
) -> None:
    """Parameters of its paper (arXiv 2404.07839, table 1); each half of `intermediate_size` is one matrix."""
    found = of_config(RECURRENT | config, "recurrentgemma").architecture
    assert found.parameters == pytest.approx(1e9 * billions, rel=0.02)
    assert found.cache_values(200_000) == found.cache_values(4_000) > 0
    public = workload(f"model=google/recurrentgemma-{size}-it").architecture
    assert public.parameters == pytest.approx(found.parameters, rel=0.02)
    assert public.cache_values(200_000) == found.cache_values(4_000)


def _half(layers: int, width: int, heads: int, ffn: int) -> dict[str, object]:
    return {
        "model_type": "t5_gemma_module", "hidden_size": width, "intermediate_size": ffn, "num_attention_heads": heads,
        "num_key_value_heads": heads // 2, "head_dim": 256, "num_hidden_layers": layers, "vocab_size": 256000,
        "max_position_embeddings": 8192,
    }  # fmt: skip


@pytest.mark.parametrize(("encoder", "billions"), [(_half(26, 2304, 8, 9216), 5.6), (_half(42, 3584, 16, 14336), 12.3)])
def test_encoder_and_decoder_that_are_described_apart_are_both_counted(
    encoder: dict[str, object], billions: float
) -> None:
    """T5Gemma 2B-2B and 9B-2B (arXiv 2504.06225), whose halves have an embedding each."""
    config = {
        "model_type": "t5gemma",
        "is_encoder_decoder": True,
        "encoder": encoder,
        "decoder": _half(26, 2304, 8, 9216),
    }
    found = of_config(config, "t5gemma")
    assert found.architecture.parameters == pytest.approx(1e9 * billions, rel=0.03)
    assert found.architecture.kind == "both"
    parsed = parse("migbatch: " + found.hints)
    assert parsed.llm.arch is not None and read_arch(parsed.llm.arch) == found.architecture


@pytest.mark.parametrize("part", ["encoder", "text_encoder", "audio_encoder"])
def test_encoders_within_encoders_are_read_once(part: str) -> None:
    """A file of less than 1 MiB may nest hundreds."""
    config: dict[str, object] = dict(LLAMA)
    for _ in range(300):
        config = {**LLAMA, part: config}
    assert of_config(config, "nested").architecture.parameters == pytest.approx(2 * 8.03e9, rel=0.01)


def test_decoder_that_reads_images_is_described_with_their_encoder() -> None:
    """TrOCR base: 334 million parameters (its checkpoint), a vision transformer and a decoder of twelve layers."""
    vit = {"model_type": "vit", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
           "intermediate_size": 3072, "image_size": 384, "patch_size": 16}  # fmt: skip
    trocr = {"model_type": "trocr", "d_model": 1024, "decoder_layers": 12, "decoder_attention_heads": 16,
             "decoder_ffn_dim": 4096, "vocab_size": 50265, "max_position_embeddings": 512}  # fmt: skip
    config = {"model_type": "vision-encoder-decoder", "is_encoder_decoder": True, "encoder": vit, "decoder": trocr}
    found = of_config(config, "trocr").architecture
    assert 334e6 < found.parameters < 1.6 * 334e6


def test_embeddings_that_layers_have_of_their_own_are_counted() -> None:
    config = {
        "model_type": "gemma3n_text", "hidden_size": 2048, "num_hidden_layers": 35, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": [16384] * 35, "vocab_size": 262400,
        "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256, "tie_word_embeddings": True,
    }  # fmt: skip
    assert of_config(config, "g").architecture.parameters == pytest.approx(6.87e9, rel=0.02)


@pytest.mark.parametrize(
    "wider", [{"global_head_dim": 512}, {"per_layer_config": {"05": {"head_dim": 512}, "11": {"head_dim": 512}}}]
)
def test_heads_that_are_wider_where_all_tokens_are_seen_are_cached_so(wider: dict[str, object]) -> None:
    kinds = [*["sliding_attention"] * 5, "full_attention"] * 5
    config = {
        **LLAMA, "num_hidden_layers": 30, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 512,
        "layer_types": kinds,
    }  # fmt: skip
    found = of_config({**config, **wider}, "g").architecture
    assert found.cache_values(20_000) - found.cache_values(10_000) == 5 * 2 * 4 * 512 * 10_000


@pytest.mark.parametrize("kind", ["indexed_attention", "compressed_sparse_attention"])
def test_layer_with_some_attention_has_a_cache(kind: str) -> None:
    config = {**HYBRID, "layer_types": [*["linear_attention"] * 36, *[kind] * 4]}
    assert of_config(config, "h").numbers == of_config(HYBRID, "h").numbers


@pytest.mark.parametrize("experts", [64, [64, 64]])
def test_experts_for_text_and_for_images_are_counted(experts: object) -> None:
    config = {
        "hidden_size": 2560, "num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4,
        "intermediate_size": 12288, "moe_num_experts": experts, "moe_intermediate_size": [1536, 512], "moe_k": 6,
        "vocab_size": 103424, "tie_word_embeddings": True,
    }  # fmt: skip
    assert of_config(config, "ernie").architecture.parameters == pytest.approx(29e9, rel=0.04)


def test_falcon_with_one_head_of_keys_is_described_so() -> None:
    config = {
        "model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
        "num_kv_heads": 71, "multi_query": True, "new_decoder_architecture": False, "vocab_size": 65024,
    }  # fmt: skip
    assert of_config(config, "f").architecture.cache_values(1) == BY_NAME["falcon-7b"].architecture.cache_values(1)
    larger = of_config({**config, "num_kv_heads": 8, "new_decoder_architecture": True}, "f").architecture
    assert larger.kv_heads == 8


@pytest.mark.parametrize(
    ("method", "bits", "expected"),
    [
        ("auto-round", 4, 4.16),
        ("auto-round", 2, 2.5),
        ("awq", 4, 4.16),
        ("awq", 8, 8.1),
        ("gptq", 8, 8.16),
        ("exl2", 4.65, 5.15),
        ("fp8", None, 8.1),
        ("of-tomorrow", None, 16.0),
    ],
)
def test_bits_of_a_quantized_model_are_read_from_its_config(method: str, bits: float | None, expected: float) -> None:
    config = {**LLAMA, "quantization_config": {"quant_method": method, "bits": bits}}
    hints = of_config(config, "ours").hints.partition(" ")[2]
    assert workload(f"model=ours {hints}").precision.bits == expected


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8.1),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
          "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, 4.5),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, 4.16),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}, 4.16),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8WeightOnlyConfig"}}}, 8.1),
    ],
)  # fmt: skip
def test_kind_of_a_quantization_is_read_where_its_method_has_several(
    quantization: dict[str, object], bits: float
) -> None:
    """Weights in NVFP4 counted as 8 bits, those of torchao as 16."""
    hints = of_config({**LLAMA, "quantization_config": quantization}, "ours").hints.partition(" ")[2]
    assert workload(f"model=ours {hints}").precision.bits == bits


@pytest.mark.parametrize("unset", [None, ""])
def test_unset_kind_of_feed_forward_counts_as_gated(unset: str | None) -> None:
    config = CONFIGS["gemma-2-9b"]
    assert of_config({**config, "feed_forward_proj": unset}, "g") == of_config(config, "g")


HYBRID = {
    "model_type": "granitemoehybrid", "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_local_experts": 72, "num_experts_per_tok": 10, "intermediate_size": 768,
    "shared_intermediate_size": 1536, "layer_types": [*["mamba"] * 36, *["attention"] * 4], "vocab_size": 100352,
    "max_position_embeddings": 131072, "tie_word_embeddings": True,
}  # fmt: skip


def test_layers_without_attention_keep_a_state_instead_of_a_cache() -> None:
    found = of_config(HYBRID, "hybrid").architecture
    dense = of_config({**HYBRID, "layer_types": ["attention"] * 40}, "dense").architecture
    few = of_config({**HYBRID, "layer_types": None, "num_hidden_layers": 4}, "few").architecture
    assert found.parameters == pytest.approx(32.2e9, rel=0.01), "Granite 4.0 H Small: those of its checkpoint"
    grown = found.cache_values(100_000) - found.cache_values(50_000)
    assert grown == few.cache_values(100_000) - few.cache_values(50_000) < dense.cache_values(50_000)
    state = found.cache_values(50_000) - few.cache_values(50_000)
    assert state == pytest.approx(36 * 2 * 264 * 4096, rel=0.01)


@pytest.mark.parametrize("kind", [["attention"], {}, None, 1, "rwkv"])
def test_layer_of_an_unknown_kind_counts_as_one_without_attention(kind: object) -> None:
    found = of_config({**HYBRID, "layer_types": [*[kind] * 36, *["attention"] * 4]}, "h")
    assert found.numbers == of_config(HYBRID, "h").numbers


def test_experts_that_all_tokens_use_are_counted() -> None:
    without = of_config({**HYBRID, "shared_intermediate_size": 0}, "w").architecture
    shared = of_config(HYBRID, "hybrid").architecture
    assert shared.parameters - without.parameters == 40 * 3 * 4096 * 1536


SHAPES: dict[str, tuple[dict[str, object], float, int]] = {
    "jamba-mini": (
        {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "num_experts": 16, "num_experts_per_tok": 2, "attn_layer_period": 8,
            "attn_layer_offset": 4, "expert_layer_period": 2, "expert_layer_offset": 1, "vocab_size": 65536,
        }, 51.6, 4,
    ),
    "bamba-9b": (
        {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "attn_layer_indices": [9, 18, 27], "vocab_size": 128256,
        }, 9.8, 3,
    ),
    "nemotron-h-8b": (
        {
            "model_type": "nemotron_h", "hidden_size": 4096, "intermediate_size": 21504, "num_hidden_layers": 52,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
            "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        }, 8.1, 4,
    ),
    "nemotron-3-nano-30b-a3b": (
        {
            "model_type": "nemotron_h", "hidden_size": 2688, "intermediate_size": 1856, "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712, "n_routed_experts": 128, "n_shared_experts": 1,
            "num_experts_per_tok": 6, "num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 2,
            "head_dim": 128, "vocab_size": 131072,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        }, 31.6, 6,
    ),
    "llama-4-maverick": (
        {
            "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_hidden_layers": 48,
            "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 128,
            "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "vocab_size": 202048,
        }, 400.7, 48,
    ),
    "hunyuan-a13b": (
        {
            "hidden_size": 4096, "intermediate_size": 3072, "moe_intermediate_size": [3072] * 32,
            "moe_topk": [8] * 32, "num_experts": 64, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128167, "tie_word_embeddings": True,
        }, 80.4, 32,
    ),
}  # fmt: skip
"""Configurations whose layers are of several kinds, the billions of parameters, and the layers with attention."""


@pytest.mark.parametrize("name", SHAPES)
def test_layers_of_several_kinds_are_counted_as_what_they_are(name: str) -> None:
    """Each layer counted as one with attention and all experts, which made 2.5 trillion parameters of Hunyuan's."""
    config, billions, attending = SHAPES[name]
    found = of_config(config, "h").architecture
    assert found.parameters == pytest.approx(billions * 1e9, rel=0.2)
    grown = found.cache_values(200_000) - found.cache_values(100_000)
    assert grown == attending * 2 * found.kv_heads * found.head * 100_000
    parsed = parse("migbatch: " + of_config(config, "h").hints)
    assert parsed.llm.arch is not None and read_arch(parsed.llm.arch) == found


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        # gemma-3-4b-it, llava-1.5-7b-hf, llava-v1.6-mistral-7b-hf, Qwen2-Audio-7B: parameters of their checkpoints; the
        # defaults of transformers' classes are what their text_config leaves out
        ({"text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
                          "num_hidden_layers": 34, "sliding_window": 1024},
          "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27}}, 4.30),
        ({"text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
          "vision_config": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}}, 7.06),
        ({"text_config": {"model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8,
                          "vocab_size": 32064},
          "vision_config": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}}, 7.57),
        ({"text_config": {"model_type": "qwen2", "intermediate_size": 11008, "vocab_size": 156032},
          "audio_config": {"d_model": 1280, "encoder_layers": 32, "encoder_ffn_dim": 5120}}, 8.40),
    ],
)  # fmt: skip
def test_part_that_leaves_out_its_class_s_defaults_is_described(config: dict[str, object], billions: float) -> None:
    assert of_config(config, "seer").architecture.parameters == pytest.approx(1e9 * billions, rel=0.015)


@pytest.mark.parametrize(
    ("config", "billions", "widths"),
    [
        # mamba-2.8b-hf, Falcon Mamba 7B, Mamba Codestral 7B (their checkpoints), RWKV-7 2.9B (arXiv 2503.14456)
        ({"model_type": "mamba", "hidden_size": 2560, "intermediate_size": 5120, "num_hidden_layers": 64,
          "state_size": 16, "vocab_size": 50280}, 2.77, 2 * 2 * (16 + 4)),
        ({"model_type": "falcon_mamba", "hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 64,
          "state_size": 16, "vocab_size": 65024, "tie_word_embeddings": False}, 7.27, 2 * 2 * (16 + 4)),
        ({"model_type": "mamba2", "hidden_size": 4096, "num_heads": 128, "head_dim": 64, "num_hidden_layers": 64,
          "state_size": 128, "n_groups": 8, "expand": 2, "vocab_size": 32768, "tie_word_embeddings": False},
         7.29, 2 * 2 * (128 + 4)),
        ({"model_type": "rwkv7", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32,
          "head_dim": 64, "vocab_size": 65536, "tie_word_embeddings": False}, 2.95, 2 * (64 + 2)),
    ],
)  # fmt: skip
def test_config_of_a_model_without_attention_is_described_with_its_state(
    config: dict[str, object], billions: float, widths: int
) -> None:
    """A layer keeps the state of each inner value and the last tokens of a convolution, both in 32 bits."""
    found = of_config(config, "stateful")
    assert found.architecture.parameters == pytest.approx(1e9 * billions, rel=0.04)
    cached = found.architecture.cache_values(4096)
    assert cached == found.architecture.cache_values(200_000)
    assert cached == pytest.approx(found.architecture.layers * widths * found.architecture.width, rel=0.01)
    parsed = parse("migbatch: " + found.hints)
    assert parsed.llm.arch is not None and read_arch(parsed.llm.arch) == found.architecture


MAMBA2: dict[str, tuple[dict[str, object], float]] = {
    # the parameters that the model cards or checkpoints state
    "qwen3.5-27b, without its images": (
        {
            "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 24,
            "num_key_value_heads": 4, "head_dim": 256, "num_hidden_layers": 64, "vocab_size": 248320,
            "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
            "linear_num_value_heads": 48, "linear_value_head_dim": 128, "tie_word_embeddings": False,
        }, 26.9,
    ),
    "qwen3-next-80b": (
        {
            "model_type": "qwen3_next", "hidden_size": 2048, "moe_intermediate_size": 512, "intermediate_size": 5120,
            "shared_expert_intermediate_size": 512, "num_experts": 512, "num_experts_per_tok": 10,
            "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_hidden_layers": 48,
            "vocab_size": 151936, "full_attention_interval": 4, "linear_num_key_heads": 16,
            "linear_key_head_dim": 128, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        }, 79.7,
    ),
    "falcon-h1-7b": (
        {
            "model_type": "falcon_h1", "hidden_size": 3072, "intermediate_size": 12288, "num_attention_heads": 12,
            "num_key_value_heads": 2, "head_dim": 128, "num_hidden_layers": 44, "vocab_size": 130048,
            "mamba_d_ssm": 3072, "mamba_d_state": 256, "mamba_n_groups": 1, "tie_word_embeddings": False,
        }, 7.59,
    ),
    "granite-4.0-h-small": (
        {
            "model_type": "granitemoehybrid", "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32,
            "num_key_value_heads": 8, "num_local_experts": 72, "num_experts_per_tok": 10, "intermediate_size": 768,
            "shared_intermediate_size": 1536, "layer_types": [*["mamba"] * 36, *["attention"] * 4],
            "vocab_size": 100352, "mamba_expand": 2, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128,
            "mamba_n_groups": 1, "tie_word_embeddings": True,
        }, 32.2,
    ),
    "nemotron-nano-9b-v2": (
        {
            "model_type": "nemotron_h", "hidden_size": 4480, "intermediate_size": 15680, "num_hidden_layers": 56,
            "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
            "mamba_num_heads": 128, "mamba_head_dim": 80, "ssm_state_size": 128, "n_groups": 8,
            "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        }, 8.89,
    ),
    "lfm2-1.2b": (
        {
            "model_type": "lfm2", "hidden_size": 2048, "intermediate_size": 12288, "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "num_attention_heads": 32,
            "num_key_value_heads": 8, "num_hidden_layers": 16, "vocab_size": 65536,
            "layer_types": [*["conv", "conv", "full_attention"] * 3, "conv", *["full_attention", "conv"] * 3],
        }, 1.17,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MAMBA2)
def test_layers_without_attention_are_counted_with_their_own_matrices(name: str) -> None:
    """They were counted as attention, which made up to a sixth of the model too little."""
    config, billions = MAMBA2[name]
    assert of_config(config, "hybrid").architecture.parameters == pytest.approx(1e9 * billions, rel=0.02)


def test_interval_of_layers_with_attention_limits_the_cache() -> None:
    config = MAMBA2["qwen3-next-80b"][0]
    found = of_config(config, "q").architecture
    assert found.cache_values(200_000) - found.cache_values(100_000) == 12 * 2 * 2 * 256 * 100_000
    listed = [*["linear_attention"] * 3, "full_attention"] * 12
    assert of_config({**config, "layer_types": listed}, "q").numbers == of_config(config, "q").numbers


def test_flags_of_layers_with_attention_limit_the_cache() -> None:
    """MiniMax-Text-01: seven layers of linear attention before each one of softmax attention."""
    config = {**LLAMA, "num_hidden_layers": 80, "attn_type_list": [*[0] * 7, 1] * 10}
    found = of_config(config, "minimax").architecture
    assert found.cache_values(200_000) - found.cache_values(100_000) == 10 * 2 * 8 * 128 * 100_000


def test_pattern_of_windows_in_letters_is_read() -> None:
    config = {**LLAMA, "sliding_window": 4096, "sliding_window_pattern": "LLLG"}
    listed = [*["sliding_attention"] * 3, "full_attention"] * 8
    assert of_config(config, "e").numbers == of_config({**config, "layer_types": listed}, "e").numbers
    assert of_config(config, "e").numbers["wide_layers"] == 8


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        # CodeGen 16B, BioGPT Large, XGLM 7.5B: their papers and checkpoints
        ({"model_type": "codegen", "n_embd": 6144, "n_head": 24, "n_layer": 34, "n_positions": 2048,
          "vocab_size": 51200, "tie_word_embeddings": False}, 16.0),
        ({"model_type": "biogpt", "hidden_size": 1600, "intermediate_size": 6400, "num_attention_heads": 25,
          "num_hidden_layers": 48, "vocab_size": 57717, "tie_word_embeddings": True}, 1.57),
        ({"model_type": "xglm", "d_model": 4096, "ffn_dim": 16384, "num_layers": 32, "attention_heads": 32,
          "vocab_size": 256008, "tie_word_embeddings": True}, 7.5),
    ],
)  # fmt: skip
def test_feed_forward_of_two_matrices_is_counted_so(config: dict[str, object], billions: float) -> None:
    assert of_config(config, "ours").architecture.parameters == pytest.approx(1e9 * billions, rel=0.02)


def test_encoder_of_a_t5_alone_has_no_cache() -> None:
    """ProtT5's encoder, 1.2 billion parameters (its checkpoint of half precision)."""
    config = {"model_type": "t5", "architectures": ["T5EncoderModel"], "d_model": 1024, "d_ff": 16384, "d_kv": 128,
              "num_heads": 32, "num_layers": 24, "vocab_size": 128, "feed_forward_proj": "relu"}  # fmt: skip
    found = of_config(config, "prot-t5").architecture
    assert found.kind == "encoder" and found.parameters == pytest.approx(1.21e9, rel=0.01)


def test_pattern_of_windows_is_read_where_no_list_of_layers_is() -> None:
    config = {**CONFIGS["gemma-2-9b"], "num_hidden_layers": 62, "sliding_window": 1024, "sliding_window_pattern": 6}
    listed = [*["sliding_attention"] * 52, *["full_attention"] * 10]
    assert of_config(config, "g").numbers == of_config({**config, "layer_types": listed}, "g").numbers
    assert of_config(config, "g").numbers["wide_layers"] == 10


@pytest.mark.parametrize(
    ("encoder", "mib"),
    [
        ({"depth": 32, "hidden_size": 1280, "patch_size": 14}, 5040),
        ({"num_hidden_layers": 27, "hidden_size": 1152, "image_size": 896, "patch_size": 14}, 3686),
        ({"num_hidden_layers": 24, "hidden_size": 1024, "image_size": 336, "patch_size": 14}, 461),
    ],
)
def test_encoder_of_images_is_described_with_its_largest_image(encoder: dict[str, int], mib: int) -> None:
    found = of_config({"text_config": LLAMA, "vision_config": encoder}, "seer")
    assert found.architecture.seen_mib == found.numbers["seen"] == mib
    own = of_config({**LLAMA, "vision_encoder": encoder}, "seer")
    assert own.numbers["seen"] == mib, "Mistral's own form"
    assert "seen" not in of_config(LLAMA, "reader").numbers


@pytest.mark.parametrize(
    ("tower", "millions"),
    [
        ({"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27}, 411),
        ({"depth": 32, "embed_dim": 1280, "hidden_size": 3584}, 629),
        ({"hidden_size": 10**9, "num_hidden_layers": 27}, 0),
        ({}, 0),
        (None, 0),
    ],
)
def test_vision_tower_beside_a_language_model_is_counted(tower: object, millions: int) -> None:
    seen = of_config({"text_config": LLAMA, "vision_config": tower}, "seer")
    assert (seen.architecture.parameters - PUBLISHED["llama-3.1-8b"]) // 10**6 == millions
    parsed = parse("migbatch: " + seen.hints)
    assert parsed.llm.arch is not None and read_arch(parsed.llm.arch) == seen.architecture


def test_encoder_of_sound_beside_a_language_model_is_counted() -> None:
    whisper = {"model_type": "voxtral_encoder", "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32}
    heard = of_config({"text_config": LLAMA, "audio_config": whisper}, "ears").architecture
    assert (heard.parameters - PUBLISHED["llama-3.1-8b"]) // 10**6 == 629


@pytest.mark.parametrize(
    ("part", "millions"),
    [
        # Cohere's transcription: a conformer
        ({"encoder_config": {"hidden_size": 1280, "num_hidden_layers": 48, "intermediate_size": 5120,
                             "conv_kernel_size": 9}}, 1808),
        # BLIP-2's network between images and text
        ({"qformer_config": {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072}}, 84),
        # Qwen-VL's encoder of images
        ({"visual": {"width": 1664, "layers": 48, "heads": 16}}, 1594),
        # Qwen2.5-Omni's voice, within the configuration of all parts
        ({"token2wav_config": {"dit_config": {"dim": 1024, "depth": 22, "intermediate_size": 2048}}}, 184),
        ({"rope_scaling": {"factor": 8}, "quantization_config": {"layers": 4}, "others": [{"depth": 9}]}, 0),
    ],
)  # fmt: skip
def test_parts_beside_a_language_model_are_counted_whatever_their_name(part: dict[str, object], millions: int) -> None:
    found = of_config({**part, "text_config": LLAMA, "model_type": "new"}, "new").architecture
    assert (found.parameters - PUBLISHED["llama-3.1-8b"]) // 10**6 == millions


def test_gated_feed_forwards_of_a_vision_tower_are_counted() -> None:
    """Qwen2.5-VL's, of 0.67 billion parameters with its projection."""
    tower = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "hidden_act": "silu"}
    seen = of_config({"text_config": LLAMA, "vision_config": tower}, "seer").architecture
    assert 0.6e9 < seen.parameters - PUBLISHED["llama-3.1-8b"] < 0.67e9


def test_state_space_layers_of_unknown_places_are_not_counted_as_less_than_they_are() -> None:
    """Bamba with mamba in all layers: 9.99 billion parameters."""
    states = {"mamba_expand": 2, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 256, "mamba_n_groups": 1}
    bamba = {**LLAMA, "model_type": "bamba", "vocab_size": 128000, **states}
    assert of_config(bamba, "b").architecture.parameters == pytest.approx(9.99e9, rel=0.03)


def test_layers_are_counted_where_only_their_kinds_are_listed() -> None:
    listed = {key: value for key, value in LLAMA.items() if key != "num_hidden_layers"}
    found = of_config({**listed, "layers_block_type": ["full_attention"] * 32}, "l").architecture
    assert found.parameters == PUBLISHED["llama-3.1-8b"]


def test_model_of_images_is_not_described_as_a_language_model() -> None:
    vit = {"model_type": "vit", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    with pytest.raises(DescribeError, match="model of images"):
        of_config({**vit, "image_size": 224, "patch_size": 16}, "vit")


def test_model_directory_is_described_from_its_config_and_weight_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": LLAMA, "torch_dtype": "bfloat16"}))
    assert describe(tmp_path).architecture.parameters == PUBLISHED["llama-3.1-8b"]
    with (tmp_path / "model-00001.safetensors").open("wb") as weights:
        weights.truncate(20 * 10**9)  # 2 billion more parameters: a vision tower
    seen = describe(tmp_path)
    assert seen.architecture.parameters == 10**10 and "params:10000000000" in seen.hints


def test_weights_that_a_directory_has_in_two_forms_are_counted_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "torch_dtype": "bfloat16"}))
    for name, size in (("consolidated.safetensors", 16 * 10**9 + 10**8), ("model-00001.safetensors", 16 * 10**9)):
        with (tmp_path / name).open("wb") as weights:
            weights.truncate(size)
    assert describe(tmp_path).architecture.parameters == PUBLISHED["llama-3.1-8b"]
    (tmp_path / "model-00001.safetensors").unlink()
    assert describe(tmp_path).architecture.parameters == (16 * 10**9 + 10**8) // 2
    with (tmp_path / "pytorch_model-00001-of-00002.bin").open("wb") as weights:
        weights.truncate(17 * 10**9)
    assert describe(tmp_path).architecture.parameters == (16 * 10**9 + 10**8) // 2
    (tmp_path / "consolidated.safetensors").unlink()
    assert describe(tmp_path).architecture.parameters == 17 * 10**9 // 2


@pytest.mark.parametrize("published", [4_300_000_000, 8_030_261_248, 9_000_000_000, 20_000_000_000])
def test_headers_of_weight_files_say_how_many_parameters_a_model_has(tmp_path: Path, published: int) -> None:
    """Also fewer than computed: layers without a feed-forward (Zamba2), experts in every fourth layer (NLLB-MoE)."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "torch_dtype": "bfloat16"}))
    weight_files.write(tmp_path / "model-00001-of-00002.safetensors", {"a": ("BF16", published - 1000)})
    weight_files.write(tmp_path / "model-00002-of-00002.safetensors", {"b": ("F32", 1000), "places": ("I64", 512)})
    found = describe(tmp_path)
    assert found.architecture.parameters == published and found.counted == "weight files"
    assert found.architecture.cache_values(1000) == BY_NAME["llama-3.1-8b"].architecture.cache_values(1000)
    parsed = parse("migbatch: " + found.hints)
    assert parsed.llm.arch is not None and read_arch(parsed.llm.arch) == found.architecture


def test_headers_say_the_data_type_that_a_configuration_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "torch_dtype": None}))
    assert "dtype=" not in describe(tmp_path).hints
    weight_files.write(tmp_path / "model.safetensors", {"a": ("BF16", 8 * 10**9), "norm": ("F32", 1000)})
    assert "dtype=bf16" in describe(tmp_path).hints


def test_experts_narrower_than_computed_are_counted_by_the_headers(tmp_path: Path) -> None:
    config = {**LLAMA, "num_local_experts": 8, "num_experts_per_tok": 2, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weight_files.write(tmp_path / "model.safetensors", {"a": ("BF16", 26 * 10**9)})
    found = describe(tmp_path).architecture
    assert found.parameters == 26 * 10**9 and found.active < found.parameters


@pytest.mark.parametrize("files", ["one of two", "cut", "pointer"])
def test_incomplete_weight_files_do_not_make_a_model_smaller(tmp_path: Path, files: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "torch_dtype": "bfloat16"}))
    if files == "one of two":
        weight_files.write(tmp_path / "model-00001-of-00002.safetensors", {"a": ("BF16", 5 * 10**9)})
    elif files == "cut":
        weight_files.write(tmp_path / "model.safetensors", {"a": ("BF16", 5 * 10**9)}, missing=1)
    else:  # of Git LFS
        (tmp_path / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
        )
    assert describe(tmp_path).architecture.parameters == PUBLISHED["llama-3.1-8b"]


def test_header_with_a_shape_of_any_size_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "torch_dtype": "bfloat16"}))
    for shape in ([1 << 62], [2] * 99, [-1], ["1"], [True]):
        header = json.dumps({"a": {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]}}).encode()
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        assert describe(tmp_path).architecture.parameters == PUBLISHED["llama-3.1-8b"]


def test_layers_that_a_quantization_leaves_out_are_counted_by_the_size_of_the_files(tmp_path: Path) -> None:
    quantized = {"quant_method": "awq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": quantized}))
    plain = describe(tmp_path)
    weight_files.write(tmp_path / "model.safetensors", {"packed": ("I32", 10**9), "others": ("F16", 2 * 10**9)})
    found = describe(tmp_path)
    kept = precision.known("awq")
    assert weights_mib(plain.architecture, kept) < 8e9 / 2**20 * 0.75
    assert weights_mib(found.architecture, kept) == pytest.approx(8e9 / 2**20, rel=1e-3)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "null", '{"hidden_size": 1e400}', '{"num_hidden_layers": -1}', "{}", "[" * 100_000,
     '{"hidden_size": 99999999999, "num_attention_heads": 8, "num_hidden_layers": 8}', " " * (2 << 20)],
)  # fmt: skip
def test_invalid_config_json_is_refused_with_a_message(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(DescribeError, match=r"config\.json|add mem="):
        describe(tmp_path)


@pytest.mark.parametrize(
    "text", ["layers:2", "layers:2+layers:2", "wings:1", "layers:0+hidden:1+heads:1", "x:" + "9" * 99]
)
def test_invalid_arch_hint_is_refused(text: str) -> None:
    with pytest.raises(ArchError):
        read_arch(text)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("laion/clip-vit-bigg-14-laion2b-39b-b160k", 2540),
        ("laion/clip-vit-h-14-laion2b-s32b-b79k", 986),
        ("apple/dfn5b-clip-vit-h-14-378", 986),
        ("openai/clip-vit-large-patch14-336", 428),
    ],
)
def test_number_of_images_in_a_name_is_no_size(name: str, millions: float) -> None:
    found = names.resolve(name)
    assert found is not None and found.architecture.parameters == millions * 1e6


@pytest.mark.parametrize(
    "name",
    ["mistral-small-4", "google/gemma-5-e4b-it", "stable-diffusion-4", "gpt-oss-2", "whisper-4", "flux-3", "sdxl-2.1"],
)
def test_later_version_of_a_public_model_is_not_taken_for_it(name: str) -> None:
    """Its size may be any: Mistral Small 4 has 119 billion parameters, version 3 has 24."""
    assert names.resolve(name) is None
    with pytest.raises(Refusal):
        workload_of(parse(f"migbatch: model={name} engine=vllm"))


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("mistral-small-3.2", "mistral-small-3.2-24b"),
        ("sdxl-1.0", "stable-diffusion-xl"),
        ("stable-diffusion-2-1", "stable-diffusion-2.1"),
        ("gemma-1.1-7b-it", "gemma-7b"),
        ("codestral-2508", "mistral-small-22b"),
        ("mistral-7b-instruct-v0.3", "mistral-7b"),
    ],
)
def test_version_that_is_known_or_dates_a_model_of_the_same_size_names_it(name: str, public: str) -> None:
    found = names.resolve(name)
    assert found is not None and found.name == public


@pytest.mark.parametrize(
    ("name", "active", "whole"),
    [
        ("allenai/MolmoE-1B-0924", 1.5, 7.2),
        ("allenai/OLMoE-1B-7B-0924-Instruct", 1.3, 6.9),
        ("ByteDance-Seed/BAGEL-7B-MoT", 14.7, 14.7),
    ],
)
def test_model_whose_name_states_only_its_active_parameters_has_all_of_them(
    name: str, active: float, whole: float
) -> None:
    found = names.resolve(name.lower())
    assert found is not None and found.how == "public"
    assert found.architecture.parameters == pytest.approx(whole * 1e9, rel=0.02)
    assert found.architecture.active == pytest.approx(active * 1e9, rel=0.1)


@pytest.mark.parametrize(
    ("name", "model", "billions"),
    [
        ("HuggingFaceM4/Idefics3-8B-Llama3", "llama-3-8b", 8.46),
        ("BAAI/Bunny-v1_1-Llama-3-8B-V", "llama-3-8b", 8.48),
        ("liuhaotian/llava-v1.6-vicuna-13b", "llama-2-13b", 13.35),
        ("llava-hf/llava-onevision-qwen2-7b-ov-hf", "qwen2-7b", 8.03),
        ("fixie-ai/ultravox-v0_5-llama-3_1-8b", "llama-3.1-8b", 8.7),
        ("Salesforce/xgen-mm-phi3-mini-instruct-r-v1", "phi-3-mini", 4.36),
        ("OpenGVLab/VideoChat-Flash-Qwen2-7B_res448", "qwen2-7b", 8.0),
    ],
)
def test_encoder_beside_a_public_language_model_is_counted(name: str, model: str, billions: float) -> None:
    found, alone = names.resolve(name.lower()), BY_NAME[model].architecture
    assert found is not None and found.name == model
    assert found.architecture.parameters >= billions * 1e9 * 0.995
    assert found.architecture.cache_values(2048) == alone.cache_values(2048)


@pytest.mark.parametrize(
    ("name", "billions", "cached", "kept"),
    [
        ("Qwen/Qwen3.5-27B", 27.8, 16 * 2 * 4 * 256, 48 * 48 * 128 * 128 * 2),
        ("cyankiwi/Qwen3.6-35B-A3B-AWQ-4bit", 36.0, 10 * 2 * 2 * 256, 30 * 32 * 128 * 128 * 2),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 81.3, 12 * 2 * 2 * 256, 36 * 32 * 128 * 128 * 2),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 31.6, 6 * 2 * 2 * 128, 23 * 64 * 64 * 128 * 2),
        ("ibm-granite/granite-4.0-h-small", 32.2, 4 * 2 * 8 * 128, 36 * 128 * 64 * 128 * 2),
        ("zai-org/GLM-4.7", 358, 92 * 2 * 8 * 128, 0),
        ("zai-org/GLM-4.7-Flash", 31.2, 47 * (512 + 64), 0),
        ("zai-org/GLM-4.6V-Flash", 10.3, 40 * 2 * 2 * 128, 0),
        ("allenai/Olmo-3-7B-Instruct", 7.3, 8 * 2 * 32 * 128, 24 * 4096 * 2 * 32 * 128),
        ("google/gemma-4-31B-it", 31.3, 10 * 2 * 4 * 512, 50 * 1024 * 2 * 16 * 256),
        ("deepseek-ai/Janus-Pro-7B", 7.4, 30 * 2 * 32 * 128, 0),
        ("tiiuae/falcon-rw-7b", 7.5, 36 * 2 * 64 * 64, 0),
        ("THUDM/glm-4-9b-chat-1m", 9.48, 40 * 2 * 4 * 128, 0),
        ("internlm/internlm-20b", 20.1, 60 * 2 * 40 * 128, 0),
        ("facebook/xglm-7.5B", 7.5, 32 * 2 * 32 * 128, 0),
        ("aisingapore/Gemma-SEA-LION-v3-9B-IT", 9.24, 21 * 2 * 8 * 256, 21 * 4096 * 2 * 8 * 256),
        ("ByteDance-Seed/Seed-OSS-36B-Instruct", 36.2, 64 * 2 * 8 * 128, 0),
        ("swiss-ai/Apertus-8B-Instruct-2509", 8.05, 32 * 2 * 8 * 128, 0),
        ("swiss-ai/Apertus-70B-Instruct-2509", 70.6, 80 * 2 * 8 * 128, 0),
        ("LGAI-EXAONE/EXAONE-4.0-32B", 32.0, 16 * 2 * 8 * 128, 48 * 4096 * 2 * 8 * 128),
        ("LGAI-EXAONE/EXAONE-4.0-1.2B", 1.28, 30 * 2 * 8 * 64, 0),
        ("baidu/ERNIE-4.5-21B-A3B-PT", 21.8, 28 * 2 * 4 * 128, 0),
        ("baidu/ERNIE-4.5-0.3B-PT", 0.36, 18 * 2 * 2 * 128, 0),
        ("inclusionAI/Ling-mini-2.0", 16.26, 20 * 2 * 4 * 128, 0),
        ("arcee-ai/Trinity-Mini", 26.1, 8 * 2 * 4 * 128, 24 * 2048 * 2 * 4 * 128),
        ("openbmb/MiniCPM4.1-8B", 8.2, 32 * 2 * 2 * 128, 0),
        ("CohereLabs/command-a-reasoning-08-2025", 111, 16 * 2 * 8 * 128, 48 * 4096 * 2 * 8 * 128),
        ("LiquidAI/LFM2-1.2B", 1.17, 6 * 2 * 8 * 64, 10 * 3 * 2048),
        ("LiquidAI/LFM2-2.6B", 2.57, 8 * 2 * 8 * 64, 22 * 3 * 2048),
        ("LiquidAI/LFM2-8B-A1B", 8.34, 6 * 2 * 8 * 64, 18 * 3 * 2048),
        ("deepseek-ai/DeepSeek-OCR", 3.36, 12 * 2 * 10 * 128, 0),
        ("rednote-hilab/dots.ocr", 3.04, 28 * 2 * 2 * 128, 0),
        ("mistralai/Devstral-2-123B-Instruct-2512", 125, 88 * 2 * 8 * 128, 0),
        ("openbmb/MiniCPM-V-4_5", 8.7, 36 * 2 * 8 * 128, 0),
        ("allenai/olmOCR-2-7B-1025", 8.29, 28 * 2 * 4 * 128, 0),
        ("microsoft/Fara-7B", 8.29, 28 * 2 * 4 * 128, 0),
        ("ByteDance-Seed/UI-TARS-1.5-7B", 8.29, 28 * 2 * 4 * 128, 0),
        ("zai-org/GLM-4.1V-9B-Thinking", 10.29, 40 * 2 * 2 * 128, 0),
        ("meta-llama/Llama-3.2-11B-Vision-Instruct", 10.67, 32 * 2 * 8 * 128, 8 * 6404 * 2 * 8 * 128),
        ("meta-llama/Llama-3.2-90B-Vision-Instruct", 88.6, 80 * 2 * 8 * 128, 20 * 6404 * 2 * 8 * 128),
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", 49.1, 7 * 576, 20 * 32 * 128 * 128 * 2),
        ("tiiuae/Falcon-H1-0.5B-Base", 0.521, 36 * 2 * 2 * 64, 36 * 1536 * 128 * 2),
        ("tiiuae/Falcon-H1-1.5B-Deep-Instruct", 1.555, 66 * 2 * 2 * 128, 66 * 1536 * 256 * 2),
        ("tiiuae/Falcon-H1R-7B", 7.59, 44 * 2 * 2 * 128, 44 * 3072 * 256 * 2),
        ("tiiuae/Falcon-H1-34B-Instruct", 33.6, 72 * 2 * 4 * 128, 72 * 4096 * 256 * 2),
        ("tiiuae/falcon-11B", 11.1, 60 * 2 * 8 * 128, 0),
        ("Unbabel/TowerInstruct-7B-v0.2", 6.74, 32 * 2 * 32 * 128, 0),
        ("allenai/Molmo-7B-O-0924", 7.67, 32 * 2 * 32 * 128, 0),
        ("allenai/Molmo-7B-D-0924", 8.02, 28 * 2 * 4 * 128, 0),
        ("google/txgemma-9b-chat", 9.24, 21 * 2 * 8 * 256, 21 * 4096 * 2 * 8 * 256),
        ("ibm-granite/granite-4.0-1b", 1.63, 40 * 2 * 4 * 128, 0),
        ("deepseek-ai/deepseek-vl2-small", 16.15, 27 * 576, 0),
        ("deepseek-ai/Janus-Pro-1B", 2.09, 24 * 2 * 16 * 128, 0),
        ("xai-org/grok-2", 269.5, 64 * 2 * 8 * 128, 0),
        ("inclusionAI/Ling-flash-2.0", 102.9, 32 * 2 * 4 * 128, 0),
        ("internlm/Intern-S1-mini", 8.54, 36 * 2 * 8 * 128, 0),
        ("OpenGVLab/InternVL3-2B", 2.09, 28 * 2 * 2 * 128, 0),
        ("OpenGVLab/InternVL3_5-30B-A3B", 30.85, 48 * 2 * 4 * 128, 0),
        ("tencent/Hunyuan-MT-7B", 7.5, 32 * 2 * 8 * 128, 0),
        ("ByteDance-Seed/Seed-Coder-8B-Instruct", 8.25, 32 * 2 * 8 * 128, 0),
        ("LGAI-EXAONE/EXAONE-3.5-2.4B-Instruct", 2.41, 30 * 2 * 8 * 80, 0),
        ("HuggingFaceTB/SmolVLM-256M-Instruct", 0.256, 30 * 2 * 3 * 64, 0),
        ("microsoft/Phi-mini-MoE-instruct", 7.65, 32 * 2 * 8 * 128, 0),
        ("arcee-ai/AFM-4.5B", 4.62, 36 * 2 * 4 * 128, 0),
        ("openbmb/MiniCPM-o-2_6", 8.67, 28 * 2 * 4 * 128, 0),
        ("BAAI/Emu3-Gen", 8.49, 32 * 2 * 8 * 128, 0),
        ("WeiboAI/VibeThinker-1.5B", 1.78, 28 * 2 * 2 * 128, 0),
        ("openbmb/MiniCPM-2B-sft-bf16", 2.72, 40 * 2 * 36 * 64, 0),
        ("THUDM/chatglm-6b", 6.17, 28 * 2 * 32 * 128, 0),
        ("OrionStarAI/Orion-14B-Chat", 14.5, 40 * 2 * 40 * 128, 0),
        ("facebook/chameleon-7b", 7.04, 32 * 2 * 32 * 128, 0),
        ("Salesforce/xgen-7b-8k-inst", 6.9, 32 * 2 * 32 * 128, 0),
        ("openlm-research/open_llama_3b_v2", 3.43, 26 * 2 * 32 * 100, 0),
        ("TencentARC/LLaMA-Pro-8B-Instruct", 8.36, 40 * 2 * 32 * 128, 0),
        ("EleutherAI/polyglot-ko-12.8b", 12.9, 40 * 2 * 40 * 128, 0),
        ("Salesforce/codegen-16B-mono", 16.0, 34 * 2 * 24 * 256, 0),
        ("stabilityai/stablelm-tuned-alpha-7b", 7.87, 16 * 2 * 48 * 128, 0),
        ("xverse/XVERSE-13B-Chat", 13.7, 40 * 2 * 40 * 128, 0),
        ("OpenGVLab/InternVL3_5-4B", 4.73, 36 * 2 * 8 * 128, 0),
    ],
)
def test_models_cache_what_their_layers_with_attention_do(name: str, billions: float, cached: int, kept: int) -> None:
    """`cached`: values of a further token in long sequences; `kept`: those that do not grow with the sequence."""
    found = names.resolve(name.lower())
    assert found is not None and found.how == "public"
    architecture = found.architecture
    assert architecture.parameters == pytest.approx(billions * 1e9, rel=0.02)
    grown = architecture.cache_values(40_000) - architecture.cache_values(30_000)
    assert grown == 10_000 * cached
    assert kept <= architecture.cache_values(40_000) - 40_000 * cached <= 1.11 * kept


@pytest.mark.parametrize(
    ("name", "context"),
    [
        ("Qwen/Qwen3-4B-Instruct-2507", 262144),
        ("unsloth/Qwen3-4B-Thinking-2507-bnb-4bit", 262144),
        ("Qwen/Qwen3-4B", 40960),
        ("Qwen/Qwen3-235B-A22B-Thinking-2507-FP8", 262144),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", 131072),
        ("deepseek-ai/DeepSeek-V2-Lite-Chat", 163840),
        ("deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct", 163840),
        ("mistralai/Devstral-Small-2-24B-Instruct-2512", 393216),
        ("mistralai/Devstral-Small-2507", 131072),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", 10485760),
        ("meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8", 1048576),
        ("zai-org/GLM-4.6-FP8", 202752),
        ("CohereLabs/aya-expanse-8b", 8192),
        ("CohereForAI/aya-23-35B", 8192),
        ("CohereForAI/c4ai-command-r-08-2024", 131072),
        ("ByteDance-Seed/Seed-OSS-36B-Instruct", 524288),
    ],
)
def test_vllm_keeps_room_for_the_longest_sequence_of_the_release(name: str, context: int) -> None:
    """`max_position_embeddings` of its config.json: vLLM fails at startup without room for one such sequence."""
    serving = workload(f"model={name} engine=vllm").serving
    assert serving is not None and serving.reserve == context


def test_second_experts_for_images_of_cogvlm2_are_counted() -> None:
    for name, billions in {"thudm/cogvlm2-llama3-chat-19b": 19.5, "zai-org/cogvlm2-video-llama3-chat": 12.5}.items():
        found = names.resolve(name)
        assert found is not None and found.architecture.parameters == pytest.approx(billions * 1e9, rel=0.01)


@pytest.mark.parametrize("name", ["nvidia/Cosmos-Reason1-7B", "google/txgemma-27b-predict"])
def test_language_model_is_no_generator_of_videos(name: str) -> None:
    assert workload(f"model={name}").architecture.kind == "decoder"


@pytest.mark.parametrize("name", ["tencent/hunyuanvideo", "wan-ai/wan2.2-t2v-a14b-diffusers"])
def test_generator_of_videos_of_74_gib_gets_a_gpu_of_80(name: str) -> None:
    need = need_of(workload(f"model={name}"), 81152)
    assert need.slice_mib <= 79.25 * 1024 < need.used / 0.9, "no engine takes only nine tenths of the slice"


def test_next_version_of_hunyuanvideo_is_the_smaller_model_that_it_is() -> None:
    first, second = (names.resolve(f"tencent/hunyuanvideo{version}") for version in ("", "-1.5"))
    assert first is not None and second is not None
    assert second.architecture.parameters == pytest.approx(18.4e9, rel=0.05)
    assert first.architecture.parameters == pytest.approx(21.3e9, rel=0.05)


@pytest.mark.parametrize("name", ["flux.2-klein-4b", "sana1.5-4b-1024px"])
def test_generator_of_images_of_unknown_architecture_needs_no_room_for_a_clip(name: str) -> None:
    image, clip = workload(f"model={name}"), workload("model=acme-t2v-4b")
    assert need_of(image, 81152).weights == need_of(clip, 81152).weights > 2 * 4e9 / 2**20
    assert 2 * need_of(image, 81152).activations <= need_of(clip, 81152).activations
    both = workload("model=wan-ai/wan2.2-i2v-a14b-diffusers")
    assert need_of(both, 81152).weights > 2 * 2 * 14e9 / 2**20, "two networks of 14 billion parameters"


@pytest.mark.parametrize(
    ("name", "model", "billions"),
    [
        ("InstantX/FLUX.1-dev-Controlnet-Union", "flux.1-dev", 20.2),
        ("flux.1-dev-controlnet-union-pro", "flux.1-dev", 20.2),
        ("InstantX/SD3-Controlnet-Canny", "stable-diffusion-3-medium", 8.9),
        ("stabilityai/stable-diffusion-3.5-large-controlnet-canny", "stable-diffusion-3.5-large", 18.1),
        ("diffusers/controlnet-canny-sdxl-1.0", "stable-diffusion-xl", 4.72),
        ("lllyasviel/control_v11p_sd15_canny", "stable-diffusion-v1-5", 1.43),
    ],
)
def test_control_net_is_counted_beside_the_pipeline_that_it_controls(name: str, model: str, billions: float) -> None:
    """Without it the slice was too small by gigabytes, or nothing was known and the site's default granted."""
    found = workload(f"model={name}").model
    assert (found.name, found.how) == (model, "near")
    assert billions <= found.architecture.parameters / 1e9 <= 1.2 * billions


@pytest.mark.parametrize("name", ["flux-pro", "flux-ultra-4k", "wan2.1-pro"])
def test_generator_of_unknown_size_is_no_small_model(name: str) -> None:
    with pytest.raises(Refusal, match=r"the size of model .* is not known"):
        workload(f"model={name}")


@pytest.mark.parametrize("name", ["esm3", "EvolutionaryScale/esm3-sm-open-v1", "esm3_sm_open_v1", "esm3-open"])
def test_open_model_of_esm3_is_sized_as_published(name: str) -> None:
    found = workload(f"model={name}")
    assert found.architecture.parameters == pytest.approx(1.4e9, rel=0.02) and found.architecture.kind == "encoder"
    assert need_of(found, 20096).slice_mib > 5 * 1024


@pytest.mark.parametrize(("level", "file_gb"), [("q2-k", 2.99), ("q4-k-m", 3.43), ("q5-k-m", 3.63), ("q8-0", 4.97)])
def test_embeddings_of_each_layer_are_no_encoder_in_gguf(level: str, file_gb: float) -> None:
    """The public files of Gemma 4 E2B, beside 0.47 billion parameters of its encoders in 16 bits."""
    found, kept = names.resolve("gemma-4-e2b"), precision.quantized(level)
    assert found is not None and kept is not None
    assert file_gb + 0.94 <= weights_mib(found.architecture, kept) * 2**20 / 1e9 <= 1.3 * (file_gb + 0.94)


def test_only_some_layers_of_gemma_3n_cache_all_tokens() -> None:
    """Four of each model's layers have a cache of all tokens of their own (`num_kv_shared_layers`, `layer_types`)."""
    for name in ("gemma-3n-e2b", "gemma-3n-e4b"):
        found = names.resolve(name)
        assert found is not None
        jobs = (workload(f"model={name} max_num_seqs=8 max_model_len={length}") for length in ("4k", "8k"))
        short, long = (need_of(job, 81152).cache for job in jobs)
        assert long - short == pytest.approx(8 * 4096 * 4 * 2 * 2 * 256 * 2 / 2**20, rel=0.01)
