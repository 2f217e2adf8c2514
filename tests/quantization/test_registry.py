"""Options and classes of formats agree."""

import pytest

from jaxllm.options.quantization import FORMATS, ONLINE, STORED
from jaxllm.quantization.formats import kinds, read_formats
from jaxllm.vllm_compat.values import VALUES
from jaxllm.weight_format import Options


@pytest.mark.parametrize(("registered", "kind"), list(zip(FORMATS, kinds(), strict=True)))
def test_a_registered_format_takes_its_values_of_options(registered, kind):
    assert kind.may_widen == bool(registered.widened)
    for name in registered.online:
        faults: list[str] = []
        found = read_formats(None, Options(name, None, on_gpu=False, dtype="float32", unquantized=()), faults)
        assert [type(format) for format in found] == [kind] and not faults


def test_vllms_names_of_formats_that_can_be_read_are_not_refused():
    assert not any(VALUES["quantization"][name].refused for name in STORED)
    assert not VALUES["quantization"].keys() & ONLINE.keys()
    assert VALUES["quantization"]["quark"].refused
