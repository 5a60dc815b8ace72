"""The functions that the core asks of Python are handed down whole, or not at all."""

import pytest

from fsdp_c._fully_shard import _callbacks
from fsdp_c._native import _C


def test_what_is_missing_or_unknown_is_named():
    with pytest.raises(TypeError) as caught:
        _callbacks.set_whole(rebuild_unit=len, explain_error=len)
    missing, unknown = str(caught.value).split("; ")
    assert missing.startswith("set_callbacks: missing: ")
    assert "rebuild_units" in missing and "explain_error" not in missing
    assert unknown == "no such function: rebuild_unit"
    with pytest.raises(TypeError, match="1 arguments without a name"):
        _C.set_callbacks(len)
    with pytest.raises(TypeError, match="has no "):
        _C.set_callbacks(explain_error=len)
    every = dict.fromkeys(_C.callbacks(), len)
    with pytest.raises(TypeError, match="are known"):
        _C.set_callbacks(**every, rebuild_unit=len)


def test_only_functions_are_taken(monkeypatch):
    monkeypatch.setattr(_callbacks._errors, "explain", None)
    with pytest.raises(TypeError, match="set_callbacks: no such function: explain_error"):
        _callbacks.hand_down()


def test_all_may_be_handed_down_again():
    _callbacks.hand_down()
