"""Memory and speed of language models on slices: computed, monotone, and with the uncertainty of slices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.predict.learned import LearnedPredictor
from slurm_migbatch.predict.llm.choice import figures_by_profile, whole_gpus
from slurm_migbatch.predict.llm.families import ALL
from slurm_migbatch.predict.llm.memory import lora_parameters, need_of, sglang_reserve_mib
from slurm_migbatch.predict.llm.sizedmodels import of_size
from slurm_migbatch.predict.llm.sizes import Sized
from slurm_migbatch.predict.llm.speed import Machine, TokenFigures, machine_of, pace_of, weights_read_mib
from slurm_migbatch.predict.llm.workload import SHARES, Workload, workload_of
from slurm_migbatch.workload.catalog import GpuKind
from slurm_migbatch.workload.hints import parse
from slurm_migbatch.workload.refusal import Refusal
from tests.support.gpu_kinds import A100_40, H100, SITE, P


def workload(text: str) -> Workload:
    found = workload_of(parse("migbatch: " + text))
    assert found is not None
    return found


def figures(text: str, rate: int | None = None) -> dict[str, TokenFigures]:
    return dict(figures_by_profile(workload(text), SITE.partitions["gpu"], rate, LearnedPredictor()))


@pytest.mark.parametrize(
    ("hints", "request_tokens", "assumed"),
    [
        ("max_model_len=8k", (1024, 256), ()),
        ("max_model_len=1k", (820, 204), ("input=820", "output=204")),
        ("max_model_len=512 output=256", (256, 256), ("input=256",)),
        ("max_model_len=512 input=100", (100, 256), ()),
        ("max_model_len=512 input=400", (400, 112), ("output=112",)),
        ("max_model_len=512 input=512", (512, 1), ("output=1",)),
        ("max_model_len=512 output=512", (1, 511), ("input=1",)),
        ("input=2k output=300", (2048, 300), ()),
    ],
)
def test_usual_request_is_shortened_to_the_longest_sequence(
    hints: str, request_tokens: tuple[int, int], assumed: tuple[str, ...]
) -> None:
    found = workload(f"model=mistral-7b max_num_seqs=8 {hints}")
    assert found.serving is not None
    assert (found.serving.input, found.serving.output) == request_tokens
    assert found.assumed == assumed


@pytest.mark.parametrize("model", ["model=evo2_7b", "params=7b", "model=ours arch=layers:32+hidden:4096+heads:32+kv:8"])
def test_stated_input_is_not_shortened_to_a_context_that_is_only_assumed(model: str) -> None:
    served = workload(f"{model} input=100000 output=500").serving
    assert served is not None and (served.length, served.input) == (100_500, 100_000)


@pytest.mark.parametrize(
    ("hints", "length", "assumed"),
    [
        ("model=llama-3-8b input=100000", 8192, ("max_model_len=8192",)),
        ("model=llama-3-8b input=8000 output=100", 8100, ()),
        ("model=ours arch=layers:32+hidden:4096+heads:32+context:4096 input=5000", 4096, ("max_model_len=4096",)),
    ],
)
def test_input_beyond_the_context_of_the_model_is_shortened_and_told(
    hints: str, length: int, assumed: tuple[str, ...]
) -> None:
    found = workload(f"{hints} max_num_seqs=8")
    assert found.serving is not None and found.serving.length == length
    assert found.assumed == assumed


@pytest.mark.parametrize("hints", ["", "max_model_len=512", "engine=vllm"])
def test_model_that_generates_nothing_takes_its_longest_input(hints: str) -> None:
    found = workload(f"model=bge-large-en-v1.5 max_num_seqs=8 {hints}").serving
    assert found is not None and (found.length, found.input) == (512, 512)


def test_shorter_sequences_do_not_make_tokens_slower() -> None:
    short, long = (figures(f"model=mistral-7b max_model_len={length}")["1g.20gb"] for length in ("1k", "8k"))
    assert short.tpot_s.mid <= 1.1 * long.tpot_s.mid


def test_memory_of_llama_3_1_8b_agrees_with_the_vllm_report() -> None:
    """Llama-3.1-8B in bf16: 14.96 GiB of weights, 131072 bytes per token of cache, 0.8 GiB in addition."""
    need = need_of(workload("model=llama-3.1-8b engine=vllm max_model_len=8192 max_num_seqs=8"), 20096)
    assert need.weights / 1024 == pytest.approx(14.96, abs=0.01)
    assert need.cache / 1024 == 8.0
    assert (need.activations + need.runtime) / 1024 == pytest.approx(0.8, rel=0.08)


def test_memory_of_qwen_2_5_vl_agrees_with_the_vllm_report() -> None:
    """Its AWQ has 6.47 GiB of weights, and takes 4.92 GiB for its largest image, with the shortest sequences too."""
    need = need_of(workload("model=Qwen2.5-VL-7B-Instruct-AWQ engine=vllm max_model_len=4096 max_num_seqs=1"), 20096)
    assert need.weights / 1024 == pytest.approx(6.47, rel=0.03)
    assert need.activations / 1024 == pytest.approx(4.92, abs=0.01)


@pytest.mark.parametrize(("name", "mib"), [("llama-3-8b", 258.5), ("qwen2.5-3b", 304.75), ("gemma-3-1b", 514.25)])
@pytest.mark.parametrize("engine", ["llamacpp", "ollama"])
def test_compute_buffer_of_llama_cpp_holds_the_logits_of_a_pass(engine: str, name: str, mib: float) -> None:
    """By its own report (`CUDA0 compute buffer size`), whatever the number of sequences."""
    for count in (1, 4):
        need = need_of(workload(f"model={name} engine={engine} max_num_seqs={count}"), 9984)
        assert mib <= need.activations <= 1.3 * mib


def test_llama_cpp_gets_a_slice_on_which_it_keeps_all_layers() -> None:
    """It leaves 1024 MiB of the device free, or moves layers to the host."""
    need = need_of(workload("model=llama-3.1-8b quantization=q8_0 engine=llamacpp max_model_len=2048"), 9984)
    assert need.used < 0.95 * 9984 and need.slice_mib == pytest.approx(need.used + 1024, abs=1)


@pytest.mark.parametrize("engine", ["", "engine=vllm", "engine=sglang", "engine=transformers", "engine=llamacpp"])
@pytest.mark.parametrize(
    ("seeing", "reading"),
    [
        ("qwen3-vl-8b", "qwen3-8b"),
        ("gemma-3-4b", "gemma-2-2b"),
        ("acme-vl-7b", "acme-7b"),
        ("x-llava-mistral-7b", "mistral-7b"),
    ],
)
def test_model_that_sees_has_room_for_an_image(engine: str, seeing: str, reading: str) -> None:
    asked = f"{engine} max_model_len=2k max_num_seqs=1"
    needs = [need_of(workload(f"model={name} {asked}"), 20096) for name in (seeing, reading)]
    beside = [need.activations + need.runtime for need in needs]
    assert beside[0] > beside[1] + (0 if engine == "engine=llamacpp" else 1024)


@pytest.mark.parametrize(
    ("tag", "gb"),
    [
        ("qwen2.5vl:7b", 5.97),
        ("llama3.2-vision:11b", 7.8),
        ("gemma3:12b", 8.1),
        ("qwen3.5:9b", 6.6),
        ("gemma3:27b", 17.0),
    ],
)
def test_gguf_model_that_sees_has_its_encoder_in_16_bits(tag: str, gb: float) -> None:
    """`gb`: the size of its files in Ollama's library."""
    held = need_of(workload(f"model={tag}"), 40_000).weights * 2**20 / 1e9
    assert 0.99 * gb <= held <= 1.06 * gb


def test_model_that_hears_has_no_room_for_an_image() -> None:
    hearing, reading = (workload(f"model={name} max_num_seqs=1") for name in ("acme-audio-7b", "acme-7b"))
    assert need_of(hearing, 20096).activations == pytest.approx(need_of(reading, 20096).activations, rel=0.2)


@pytest.mark.parametrize(
    ("engine", "values_a_head"),
    [("transformers", 128 + 64 + 128), ("llamacpp", 320), ("ollama", 320), ("tgi", 2 * (128 + 64))],
)
def test_engine_that_expands_latent_attention_caches_keys_and_values_of_every_head(
    engine: str, values_a_head: int
) -> None:
    asked = f"model=deepseek-v2-lite engine={engine} max_model_len=32k max_num_seqs=8"
    need = need_of(workload(asked), 144000)
    assert need.cache == 27 * 16 * values_a_head * 2 * 8 * 32768 / 2**20
    served = {name: figure.throughput_per_s.high for name, figure in figures(asked + " input=8k output=1k").items()}
    vllm = figures(asked.replace(engine, "vllm") + " input=8k output=1k")
    assert served["7g.80gb"] < vllm["7g.80gb"].throughput_per_s.high, "a token reads a larger cache"


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_serving_engine_caches_the_latent_vector(engine: str) -> None:
    need = need_of(workload(f"model=deepseek-v2-lite engine={engine} max_model_len=32k max_num_seqs=8"), 144000)
    assert need.cache == 27 * (512 + 64) * 2 * 8 * 32768 / 2**20


@pytest.mark.parametrize(
    ("asked", "usual", "larger"),
    [
        ("model=dinov2-large role=train batch=64", 224, 518),
        ("model=dinov2-large batch=64", 224, 518),
        ("model=sdxl", 1024, 2048),
        ("model=Wan-AI/Wan2.2-TI2V-5B", 832, 1280),
    ],
)
def test_working_memory_of_an_image_grows_with_its_pixels(asked: str, usual: int, larger: int) -> None:
    plain, reference = need_of(workload(asked), 81152), workload(f"{asked} input={usual}px")
    assert need_of(reference, 81152) == plain
    large = workload(f"{asked} input={larger}px")
    assert need_of(large, 81152).activations == pytest.approx(plain.activations * (larger / usual) ** 2)
    assert f"x{larger}px" in large.label and f"x{usual}px" in workload(asked).label


@pytest.mark.parametrize(
    ("name", "stated"),
    [("apple/DFN5B-CLIP-ViT-H-14-378", 378), ("facebook/dinov2-large-518", 518), ("clip-vit-large-patch14-336", 336),
     ("openai/clip-vit-large-patch14", 224), ("google/siglip2-base-patch16-256", 512), ("acme/sdxl-tuned-2511", 1024),
     ("acme/clip-vit-h-14-run-701", 224), ("nvidia/segformer-b4-finetuned-ade-512-512", 512),
     ("nvidia/segformer-b1-finetuned-cityscapes-1024-1024", 1024), ("acme/sdxl-tuned-2025-1105", 1024)],
)  # fmt: skip
def test_images_are_as_large_as_the_model_s_name_states(name: str, stated: int) -> None:
    assert workload(f"model={name} batch=64").px == stated
    assert workload(f"model={name} batch=64 input=160px").px == 160


@pytest.mark.parametrize(
    ("asked", "kept", "checkpointed"),
    [
        ("model=dinov2-large", 271, 15),
        ("model=stable-diffusion-v1-5", 1110, 133),
        ("model=sdxl method=lora", 7420, 688),
        ("model=wav2vec2-base", 454, 0),
        ("model=clip-vit-large-patch14", 324, 0),
        ("model=sam-vit-huge", 9789, 0),
        ("model=stable-diffusion-3.5-large method=lora", 17294, 0),
    ],
)
def test_training_keeps_at_least_what_was_measured_for_an_item(asked: str, kept: int, checkpointed: int) -> None:
    """MiB by which the peak of PyTorch's allocator grew with each item of a batch, bf16 autocast on an H100."""
    eight, nine = (need_of(workload(f"{asked} role=train batch={batch}"), 81152) for batch in (8, 9))
    assert kept <= nine.activations - eight.activations <= 1.2 * kept
    saved = need_of(workload(f"{asked} role=train batch=8 checkpointing=on"), 81152)
    assert checkpointed * 8 < saved.activations <= eight.activations


@pytest.mark.parametrize("work", ["batch=32 input=512tok", "role=train batch=32 input=512tok"])
def test_tf32_has_the_weights_of_32_bits_and_is_faster(work: str) -> None:
    need = {kept: need_of(workload(f"model=bert-large {work} dtype={kept}"), 81152) for kept in ("fp32", "tf32")}
    assert need["tf32"] == need["fp32"]
    seconds = {}
    for kept in ("fp32", "tf32", "fp16"):
        found = figures(f"model=bert-large {work} dtype={kept}")["7g.80gb"].latency_s
        assert found is not None
        seconds[kept] = found.mid
    assert seconds["fp16"] < seconds["tf32"] < seconds["fp32"]


def test_item_that_is_no_image_has_its_usual_size() -> None:
    whole = need_of(workload("model=bark"), 81152)
    assert need_of(workload("model=bark input=512"), 81152) == whole
    assert workload("model=bark batch=2 role=train").label.endswith("/2 at once")
    assert need_of(workload("model=sdxl input=77tok"), 81152) == need_of(workload("model=sdxl"), 81152)


def _least_cache_mib(made: Workload) -> float:
    """Return the MiB that the cache of a served workload has at least, from the published sizes alone."""
    serving, sizes = made.serving, made.architecture
    assert serving is not None
    if sizes.kind in ("encoder", "plain"):
        return 0.0
    layers = sizes.wide_layers if sizes.window else sizes.layers - (sizes.recurrent.layers if sizes.recurrent else 0)
    values = 2 * sizes.kv_heads * sizes.head
    if sizes.latent is not None and serving.engine in ("transformers", "llamacpp", "ollama", "tgi"):
        values = sizes.heads * (sizes.latent.head + sizes.latent.rope + sizes.latent.value)
    elif sizes.latent is not None:
        values = sizes.latent.kv_rank + sizes.latent.rope
    return layers * values * serving.concurrency * serving.length * serving.cache_bits / 8 / 2**20


@pytest.mark.parametrize("engine", [*SHARES])
def test_need_of_every_model_on_every_engine_holds_its_weights_and_cache(engine: str) -> None:
    chosen = f"engine={engine}" if engine else ""
    for model in ALL:
        made = workload(f"model={model.name} {chosen} max_model_len=4k max_num_seqs=4")
        need = need_of(made, 81152)
        bits = min(made.precision.bits, made.precision.embedding_bits)
        weights = made.architecture.parameters * bits / 8 / 2**20
        assert need.used >= weights * 0.999 + _least_cache_mib(made), model.name
        assert need.slice_mib * need.share >= need.used, model.name


@given(
    st.sampled_from([model.name for model in ALL]),
    st.sampled_from([*SHARES]),
    st.sampled_from(["", "role=train method=full", "method=lora checkpointing=on", "method=qlora"]),
    st.integers(1, 1 << 14),
    st.integers(1, 1 << 14),
)
def test_need_does_not_fall_with_the_size_of_the_input(name: str, engine: str, work: str, one: int, other: int) -> None:
    chosen = f"engine={engine}" if engine else ""

    def need(size: int) -> int:
        return need_of(workload(f"model={name} {chosen} {work} batch=2 input={size}"), 81152).slice_mib

    short, long = sorted((one, other))
    assert need(short) <= need(long)


def test_full_training_takes_16_bytes_per_parameter() -> None:
    need = need_of(workload("model=llama-3.1-8b method=full checkpointing=on"), 81152)
    assert need.weights + need.states == pytest.approx(16 * 8030261248 / 2**20)
    slim = need_of(workload("model=llama-3.1-8b method=full checkpointing=on optimizer=adafactor"), 81152)
    assert slim.weights + slim.states < need.weights + need.states
    plain = need_of(workload("model=gpt2 method=full dtype=fp32"), 81152)
    assert plain.weights + plain.states == pytest.approx(16 * 124439808 / 2**20)


@pytest.mark.parametrize("words", ["method=full checkpointing=on seq=4k micro_batch=8", "method=qlora seq=4k"])
def test_training_memory_of_a_small_model_of_unknown_vocabulary_includes_logits(words: str) -> None:
    """Each public decoder as if only its size were known: most of the memory need of a small one is logits."""
    for model in ALL:
        size = float(model.architecture.parameters)
        if model.architecture.kind == "decoder" and model.architecture.experts is None and size < 1.1e9:
            exact = workload(f"model={model.name} {words}")
            unknown = replace(exact, model=replace(exact.model, architecture=of_size(Sized(size, size))))
            assert need_of(unknown, 81152).used >= 0.6 * need_of(exact, 81152).used, model.name
    tiny = need_of(workload(f"params=10m {words}"), 81152)
    assert tiny.activations > 12 * 4096 * 15_000 / 2**20, "at most as many logits as it has parameters for"


def test_arch_hint_without_vocabulary_is_sized_for_a_large_one() -> None:
    shape = "arch=layers:32+hidden:4096+heads:32+kv:8+ffn:14336"
    bare, known = workload(f"model=ours {shape}"), workload(f"model=ours {shape}+vocab:128256")
    assert need_of(bare, 81152).weights >= need_of(known, 81152).weights > 14.9 * 1024
    counted = workload(f"model=ours {shape}+params:8030261248")
    assert need_of(counted, 81152).weights == pytest.approx(need_of(known, 81152).weights, rel=1e-6)
    trained = [need_of(workload(f"model=ours {shape}{more} method=lora"), 81152) for more in ("+params:8030261248", "")]
    assert trained[0].activations == trained[1].activations
    encoder = workload(f"model=ours {shape}+encoder:1")
    assert need_of(encoder, 81152).weights < need_of(bare, 81152).weights


def test_lora_and_qlora_need_little_optimizer_state() -> None:
    lora, qlora = (need_of(workload(f"model=llama-3.1-8b method={way}"), 40448) for way in ("lora", "qlora"))
    assert lora.weights / 1024 == pytest.approx(14.96, abs=0.01) and lora.states < 0.06 * lora.weights
    assert qlora.weights < 0.4 * lora.weights and qlora.activations < lora.activations


@pytest.mark.parametrize(
    ("model", "tokens", "least", "most"),
    [
        ("llama-3.1-8b", 28_000, 60, 80),
        ("llama-3.1-8b", 256, 8, 12),
        ("llama-3.3-70b", 6_916, 60, 80),
        ("llama-3.3-70b", 256, 48, 55),
    ],
)
def test_qlora_needs_what_peft_takes(model: str, tokens: int, least: float, most: float) -> None:
    """In GB, with rank 32: the longest sequences of Hugging Face's trainer on 80 GB, and that 8 GB and, of the 70B, 48
    GB are too few even for short ones (unsloth.ai/blog/llama3-3).
    """
    asked = workload(f"model={model} method=qlora lora_rank=32 micro_batch=1 seq={tokens}")
    assert least < need_of(asked, 81152).used * 2**20 / 1e9 < most


@pytest.mark.parametrize("name", ["fp8_e4m3", "ptpc_fp8", "modelopt_fp8", "w8a8_int8", "int8_sq"])
def test_prompts_are_read_as_fast_with_any_name_of_products_in_8_bits(name: str) -> None:
    asked = "model=llama-3.1-8b engine=vllm input=4k output=16 max_num_seqs=1 quantization="
    machine = Machine(990e12, 3.35e12, 81152.0, sliced=False)
    loads = [workload(asked + quantization) for quantization in ("fp8", name, "int8")]
    usual, other, by_weight = (pace_of(load, need_of(load, 81152), machine).ttft for load in loads)
    assert other == usual < by_weight


def test_generating_does_not_pass_an_encoder() -> None:
    """Distilled decoders make Whisper fast: turbo has 4 layers of 32, and the encoder of the large model."""
    machine = Machine(990e12, 3.35e12, 81152.0, sliced=False)
    large, turbo = (
        pace_of(load, need_of(load, 81152), machine)
        for load in (workload(f"model=whisper-large-v3{kind} output=200 max_num_seqs=1") for kind in ("", "-turbo"))
    )
    assert 7 < large.tpot / turbo.tpot < 9
    # PyTorch's launches in 32 layers
    assert 0.02 < large.tpot < 0.035
    assert turbo.ttft > 32 * 0.0005


def test_generating_does_not_read_a_vision_tower() -> None:
    """Qwen2-VL 2B has the decoder of Qwen2 1.5B."""
    seeing, reading = (workload(f"model={name} max_num_seqs=1") for name in ("qwen2-vl-2b", "qwen2-1.5b"))
    assert seeing.architecture.aside == seeing.architecture.extra > 600e6
    read = [weights_read_mib(one.architecture, one.precision, 1.0) for one in (seeing, reading)]
    assert read[0] == pytest.approx(read[1], rel=0.01)
    assert need_of(seeing, 81152).weights > 1.3 * need_of(reading, 81152).weights


def test_only_bitsandbytes_casts_what_it_does_not_quantize() -> None:
    runtime = {
        name: need_of(workload(f"model=llama-3.1-8b method=lora {name}"), 81152).runtime
        for name in ("", "quantization=bnb-4bit", "quantization=gptq")
    }
    assert runtime["quantization=bnb-4bit"] - runtime[""] == pytest.approx(2 * 128256 * 4096 * 2 / 2**20)
    assert runtime["quantization=gptq"] == runtime[""]


serving = st.builds(
    "model={} max_model_len={} max_num_seqs={} engine={}".format,
    st.sampled_from([model.name for model in ALL if model.architecture.kind == "decoder"]),
    st.sampled_from([128, 2048, 8192]),
    st.sampled_from([1, 8, 64]),
    st.sampled_from(["vllm", "sglang", "trtllm", "transformers", "llamacpp"]),
)


@given(serving, st.sampled_from([H100, A100_40]))
def test_need_is_at_least_the_weights_and_a_larger_slice_is_not_slower(text: str, kind: GpuKind) -> None:
    asked = workload(text)
    for info in kind.geometry.profiles:
        need = need_of(asked, info.memory_mib)
        assert need.slice_mib >= need.used >= asked.architecture.parameters * 4 / 8 / 2**20 * 0.5
        assert need.used >= need.weights + need.cache
    found = figures_by_profile(asked, SITE.partitions["gpu" if kind is H100 else "old"], None, LearnedPredictor())
    small, large = (found[name] for name in (("1g.10gb", "7g.80gb") if kind is H100 else ("1g.5gb", "7g.40gb")))
    assert large.tpot_s.mid <= small.tpot_s.mid * 1.000001 or large.latency_s.mid <= small.latency_s.mid
    for figure in found.values():
        for interval in (figure.ttft_s, figure.tpot_s, figure.tokens_s, figure.latency_s, figure.throughput_per_s):
            assert 0 < interval.low < interval.mid < interval.high


def test_decode_speed_follows_memory_slices_and_prefill_speed_the_sms() -> None:
    found = figures("model=llama-3.1-8b max_model_len=8192 max_num_seqs=1 input=8000 output=64")
    three, four, seven = (found[name] for name in ("3g.40gb", "4g.40gb", "7g.80gb"))
    assert three.tpot_s.mid == pytest.approx(four.tpot_s.mid, rel=0.01)  # both have half of the bandwidth
    assert 1.5 < three.tpot_s.mid / seven.tpot_s.mid < 2.0
    assert three.ttft_s.mid > four.ttft_s.mid
    assert three.tpot_s.high / three.tpot_s.mid > seven.tpot_s.high / seven.tpot_s.mid, (
        "a slice has the uncertainty of its share"
    )


def test_more_concurrent_sequences_raise_throughput_and_latency() -> None:
    one, many = (figures(f"model=llama-3.1-8b max_model_len=2048 max_num_seqs={n}")["7g.80gb"] for n in (1, 32))
    assert many.tokens_s.mid > 4 * one.tokens_s.mid
    assert many.ttft_s.mid > one.ttft_s.mid and many.tpot_s.mid > one.tpot_s.mid


def test_rate_near_capacity_raises_latency() -> None:
    text = "model=llama-3.1-8b max_model_len=2048 max_num_seqs=16"
    most = figures(text)["7g.80gb"].throughput_per_s.mid
    idle, busy = (figures(text, round(1000 * share * most))["7g.80gb"] for share in (0.05, 0.9))
    assert busy.ttft_s.mid > idle.ttft_s.mid and busy.latency_s.mid > idle.latency_s.mid
    assert idle.throughput_per_s.mid == pytest.approx(busy.throughput_per_s.mid), "what the slice can do"


def test_partition_with_two_gpu_kinds_gets_the_worse_figures() -> None:
    asked = workload("model=qwen2.5-0.5b max_model_len=2048 max_num_seqs=4")
    both = figures_by_profile(asked, SITE.partitions["mixed"], None, LearnedPredictor())["1g.10gb"]
    alone = [
        figures_by_profile(asked, SITE.partitions[name], None, LearnedPredictor())["1g.10gb"] for name in ("gpu", "old")
    ]
    assert both.tpot_s.high == max(figure.tpot_s.high for figure in alone)
    assert both.tokens_s.low == min(figure.tokens_s.low for figure in alone)


def test_flops_follow_the_sms_and_bandwidth_the_memory_slices() -> None:
    machine = machine_of(H100, H100.geometry.info(P("1g.20gb")))
    assert machine.flops == pytest.approx(989e12 * 26 / 132) and machine.bytes_s == pytest.approx(3350e9 / 4)


def test_memory_reservation_and_precision_depend_on_the_engine() -> None:
    base = "model=llama-3.2-1b max_model_len=4096 max_num_seqs=4 engine="
    assert need_of(workload(base + "vllm"), 9984).share == 0.9
    assert sglang_reserve_mib(81559) == 13440 and sglang_reserve_mib(9984) == 3728
    assert need_of(workload(base + "sglang"), 9984).runtime == 3728
    explicit = need_of(workload(base + "sglang gpu_memory_utilization=0.8"), 9984)
    assert explicit.share == 0.8 and explicit.runtime == 0
    assert workload("model=gpt2 engine=vllm").precision.name == "fp16"
    assert workload("model=gpt2 engine=transformers").precision.name == "fp32"


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("gpt-oss-20b", "bf16"),
        ("qwen3-8b-fp8", "bf16"),
        ("llama-3.1-8b.q4_k_m.gguf", "bf16"),
        ("qwen2.5-7b-instruct-gptq-int4", "gptq-int4"),
        ("unsloth/llama-3.1-8b-bnb-4bit", "bnb-4bit"),
        ("gpt2", "fp32"),
    ],
)
def test_lora_is_trained_on_weights_that_a_trainer_can_keep_quantized(name: str, kept: str) -> None:
    assert workload(f"model={name} method=lora").precision.name == kept
    assert workload(f"model={name} method=lora quantization=fp8").precision.name == "fp8", "the user knows better"
    assert workload(f"model={name} method=qlora").precision.name == "qlora"


def test_t5_reads_longer_texts_than_it_was_made_for_and_keeps_their_scores() -> None:
    short, long = (workload(f"model=flan-t5-xl batch=8 output=100 input={tokens}") for tokens in (400, 4000))
    assert (short.served.input, long.served.input) == (400, 4000)
    scores = 8 * 32 * 4000**2 * 3 * 4 / 2**20
    assert need_of(long, 81152).activations > scores > 40 * need_of(short, 81152).activations
    assert need_of(long, 81152).cache > 5 * need_of(short, 81152).cache
    assert workload("model=bart-large input=4000").served.length == 1024, "its positions are learned"


def test_scores_of_relative_positions_take_memory_as_measured() -> None:
    """32 sequences of 128 tokens took 454 MiB more than one, in 32 bits on an H100 (measurements)."""
    one, many = (
        need_of(workload(f"model=deberta-v3-base dtype=fp32 batch={batch} input=128"), 81152) for batch in (1, 32)
    )
    assert many.activations - one.activations == pytest.approx(454, rel=0.1)
    long = need_of(workload("model=mxbai-rerank-large-v1 batch=64 input=512"), 81152)
    assert long.activations > 64 * 16 * 512 * 3072 * 4 / 2**20


def test_adapters_of_lora_grow_with_their_stated_rank() -> None:
    usual, large = (workload(f"model=llama-3.1-8b method=lora{words} seq=1024") for words in ("", " lora_rank=256"))
    assert lora_parameters(usual.architecture, 16) == 41_943_040, "as peft counts them, on all matrices of the layers"
    beside = 16 * 41_943_040 / 2**20
    assert need_of(usual, 81152).states == pytest.approx(beside)
    assert need_of(large, 81152).states == pytest.approx(16 * beside)
    assert "lora_rank=16" in usual.assumed and usual.label != large.label
    assert workload("model=llama-3.1-8b lora_rank=64").tuned.method == "lora"
    for served in ("engine=vllm", "role=serve", "role=infer"):
        assert workload(f"model=llama-3.1-8b lora_rank=64 {served}").serving is not None
    with pytest.raises(Refusal, match="lora_rank"):
        workload("model=llama-3.1-8b method=lora lora_rank=0")


def test_number_of_whole_gpus_is_a_power_of_two() -> None:
    need = need_of(workload("model=llama-3.1-70b max_model_len=4096 max_num_seqs=4"), 81152)
    assert whole_gpus(need, 81152) == 4
    assert whole_gpus(replace(need, weights=100.0, cache=0.0), 81152) == 1


def test_model_that_is_no_language_model_gives_no_llm_workload() -> None:
    assert workload_of(parse("migbatch: model=our-vision-net batch=8")) is None
    assert workload_of(parse("migbatch: batch=8")) is None
    with pytest.raises(Refusal):
        workload_of(parse("migbatch: max_num_seqs=8"))


def test_training_step_of_a_small_model_is_limited_by_launches_on_every_slice() -> None:
    """SmolLM2 takes the host longer than it takes even the smallest slice; Llama-3.2-1B with 8 sequences does not."""
    small = {name: of.latency_s.mid for name, of in figures("model=smollm2-135m method=full seq=512").items()}
    assert small["1g.10gb"] / small["7g.80gb"] < 1.4
    large = {
        name: of.latency_s.mid for name, of in figures("model=llama-3.2-1b method=full seq=2048 micro_batch=8").items()
    }
    assert large["1g.10gb"] / large["7g.80gb"] > 5
    adapters, full = (
        figures(f"model=smollm2-135m method={method} seq=128")["7g.80gb"].latency_s.mid for method in ("lora", "full")
    )
    assert adapters > full  # a third less passes, but twice the launches


def test_interval_of_a_training_step_is_wider_where_the_host_decides() -> None:
    def width(text: str) -> float:
        interval = figures(text)["7g.80gb"].latency_s
        return interval.high / interval.mid

    assert width("model=smollm2-135m method=full seq=512") > 1.15 * width("model=llama-3.1-8b method=lora seq=8192")


@pytest.mark.parametrize(
    "work", ["engine=transformers input=8192tok max_num_seqs=1", "method=full seq=2048 micro_batch=8"]
)
def test_weights_in_32_bits_are_computed_in_32_bits(work: str) -> None:
    times = {
        dtype: figures(f"model=llama-3.2-1b dtype={dtype} {work}")["7g.80gb"].ttft_s.mid for dtype in ("bf16", "fp32")
    }
    assert 5 < times["fp32"] / times["bf16"] < 16


def test_encoder_passes_its_batch_at_once() -> None:
    one, many = (figures(f"model=bge-large batch={batch} input=128tok")["7g.80gb"] for batch in (1, 8))
    assert many.latency_s.mid < 3 * one.latency_s.mid
    assert many.tokens_s.mid > 3 * one.tokens_s.mid


def test_engine_launches_less_than_pytorch_alone() -> None:
    alone, engine = (
        figures(f"model=llama-3.1-8b engine={engine} max_num_seqs=1 input=512tok output=128")["7g.80gb"].tpot_s.mid
        for engine in ("transformers", "vllm")
    )
    assert 3 < alone / engine < 8


def test_only_attention_without_a_fused_kernel_keeps_its_scores_in_training() -> None:
    """BERT's memory grows with the tokens; that of DeBERTa, whose attention is always eager, with their square."""

    def activations(text: str) -> float:
        return need_of(workload(text), 81152).activations

    for name, low, high in (("bert-base", 1.9, 2.1), ("deberta-v3-base", 2.5, 4.0)):
        short, long = (activations(f"model={name} method=full seq={seq} micro_batch=8") for seq in (256, 512))
        assert low < long / short < high, name
