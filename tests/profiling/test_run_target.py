"""How a target is specified, and what counts as running out of memory."""

import pytest

from slurm_migbatch.profiling.oom import is_oom, reports_oom
from slurm_migbatch.profiling.target import Python, TargetError, fill, parse_command, parse_line, parse_python, prepare


def test_a_target_is_a_module_or_a_file(tmp_path):
    file = tmp_path / "bench.py"
    file.touch()
    assert parse_python("pkg.mod:make") == Python("pkg.mod", "make")
    assert parse_python(f"{file}:Bench.make") == Python(str(file), "Bench.make")
    assert parse_python(f"{file}:make").is_file and not parse_python("pkg.mod:make").is_file


@pytest.mark.parametrize("text", ["", "bench", ":make", "bench:", "bench:1x", "bench:a b", "nowhere.py:make"])
def test_invalid_targets_are_refused(text):
    with pytest.raises(TargetError, match=r"write|no such file"):
        parse_python(text)


def test_a_command_is_split_as_a_shell_would_but_runs_without_one():
    words = parse_command("prog '--name=a b;c' --batch={batch} {input}", inputs=True)
    assert fill(words, {"batch": 8, "input": 128}) == ["prog", "--name=a b;c", "--batch=8", "128"]
    assert fill(("awk", "{print}", "{}"), {"batch": 8}) == ["awk", "{print}", "{}"]


@pytest.mark.parametrize(
    ("text", "inputs", "advice"),
    [
        ("prog", False, "{batch}"),
        ("prog {batch}", True, "{input}"),
        ("prog {batch} {input}", False, "--inputs"),
        ("prog {batch} {size}", False, "{size}"),
        ("prog 'x", False, "quotation"),
        (" ", False, "empty"),
    ],
)
def test_command_must_have_placeholders_for_the_sizes(text, inputs, advice):
    with pytest.raises(TargetError) as refused:
        parse_command(text, inputs)
    assert advice in str(refused.value)


def test_result_lines_of_a_command_are_parsed():
    assert parse_line("migbatch: items=32 seconds=0.5\n") == {"items": 32.0, "seconds": 0.5}
    assert parse_line("  migbatch: seconds=1e-3 memory_mib=900") == {"seconds": 0.001, "memory_mib": 900.0}
    assert parse_line("step 3: loss 0.5") is None


@pytest.mark.parametrize("line", ["migbatch: seconds=0", "migbatch: seconds=x", "migbatch: second=1", "migbatch: nan"])
def test_malformed_result_lines_are_refused(line):
    with pytest.raises(TargetError, match="migbatch: items"):
        parse_line(line)


def test_factory_signature_and_return_value_are_checked():
    assert prepare(lambda batch: lambda: batch, 8, None)() == 8
    assert prepare(lambda batch, size=3: lambda: (batch, size), 8, None)() == (8, 3)
    with pytest.raises(TargetError, match="give --inputs"):
        prepare(lambda batch, size: None, 8, None)
    with pytest.raises(TargetError, match="omit --inputs"):
        prepare(lambda batch: None, 8, 128)
    with pytest.raises(TargetError, match="must return a callable"):
        prepare(lambda batch: 17, 8, None)


class OutOfMemoryError(RuntimeError):
    """Like torch's, which is recognized by its name."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemoryError("Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY"),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes."),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_all_kinds_of_out_of_memory_errors_are_recognized(error):
    assert is_oom(error)
    try:
        raise ValueError("the model failed") from error
    except ValueError as wrapped:
        assert is_oom(wrapped)


def test_other_errors_are_not_taken_for_out_of_memory():
    assert not is_oom(ValueError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_oom(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert reports_oom("terminate called after throwing an instance of 'std::bad_alloc'")
    assert not reports_oom("killed by the operator")
