"""Side streams and their events, with a driver that only notes what it is asked."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from openrnn.native.nvrtc import DriverError
from openrnn.native.side_stream import Streams

driver = pytest.importorskip("cuda.bindings.driver")


@pytest.fixture
def asked(monkeypatch):
    """What the driver was asked for; its events and streams are numbered from 100."""
    calls = []

    def made(kind):
        def create(flags):
            calls.append((kind.__name__, flags))
            return 0, kind(99 + len(calls))

        return create

    def noted(name):
        def ask(*arguments):
            calls.append((name, *map(int, arguments)))
            return (0,)

        return ask

    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda *of: of)
    monkeypatch.setattr(driver, "cuEventCreate", made(driver.CUevent))
    monkeypatch.setattr(driver, "cuStreamCreate", made(driver.CUstream))
    for name in ("cuEventRecord", "cuStreamWaitEvent"):
        monkeypatch.setattr(driver, name, noted(name))
    return calls


def test_a_stream_waits_for_an_event_of_the_other_one(asked):
    streams = Streams(0, 7)
    assert streams.launch_event == 100
    assert streams.handle(0) == 7
    asked.clear()
    streams.wait(2, 0)  # makes both side streams
    assert [name for name, *_ in asked[:4]] == ["CUstream", "CUevent", "CUstream", "CUevent"]
    waited = "cuStreamWaitEvent", streams.handle(2), 101, 0
    assert asked[4:] == [("cuEventRecord", 101, 7), waited]
    asked.clear()
    streams.wait(0, 2)
    (_, event, at), waited = asked
    assert at == streams.handle(2) != streams.handle(1)
    assert waited == ("cuStreamWaitEvent", 7, event, 0)
    asked.clear()
    streams.wait_for_launch(1)
    assert asked == [("cuStreamWaitEvent", streams.handle(1), 100, 0)]
    assert streams.side(1) == (streams.handle(1), 0)


def test_what_the_driver_refuses_is_one_sentence(asked, monkeypatch):
    refused = SimpleNamespace(name="CUDA_ERROR_INVALID_HANDLE")
    monkeypatch.setattr(driver, "cuEventRecord", lambda *_: (refused,))
    with pytest.raises(DriverError, match="cuEventRecord: CUDA_ERROR_INVALID_HANDLE"):
        Streams(0, 7).wait(0, 1)
