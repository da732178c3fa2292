"""The simulated driver compared with recorded answers of a real one, MIG off."""

import json

import pytest

from tests.support.driver_recording import RECORDED, NotRecordable, record, recorded, written

MODELS = sorted(path.stem for path in RECORDED.glob("*.json"))


@pytest.mark.parametrize("model", MODELS)
def test_answers_with_mig_off_are_those_of_a_real_driver(make, model):
    machine = make([model], mig=False)
    real, simulated = recorded(model), record(str(machine.library))
    assert simulated["gpu"] == real["gpu"]
    assert simulated["answers"].keys() == real["answers"].keys()
    different = {
        question: f"real: {answer!r}, simulated: {simulated['answers'][question]!r}"
        for question, answer in real["answers"].items()
        if simulated["answers"][question] != answer
    }
    assert different == {}


@pytest.mark.parametrize("model", MODELS)
def test_recording_is_written_as_its_file_has_it(model):
    text = written(recorded(model))
    assert text == (RECORDED / f"{model}.json").read_text()
    assert json.loads(text) == recorded(model)


def test_recording_changes_nothing_and_needs_mig_off(make):
    machine = make(["h100-80gb"], mig=False)
    before = machine.dump()
    record(str(machine.library))
    assert machine.dump() == before
    with pytest.raises(NotRecordable, match="MIG is on"):
        record(str(make(["h100-80gb"]).library))
