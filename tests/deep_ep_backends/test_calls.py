"""The page that lists the calls of the backends to deep_ep."""

from __future__ import annotations

import pytest

from moe_dispatch import build_dispatcher
from moe_dispatch_testing.emulation import RELEASES
from moe_dispatch_testing.emulation.signatures import recorded
from tests.deep_ep_backends import calls
from tests.deep_ep_backends.vendors import V25, config, identity_and_close


@pytest.mark.slow
def test_page_of_calls_is_up_to_date() -> None:
    """Each call is also bound to the recorded signature, which refuses what the release does not take."""
    assert calls.page() == calls.PAGE.read_text(), "run: python -m tests.deep_ep_backends.calls"


def test_a_call_that_the_release_does_not_take_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(recorded("v2.5.0")["classes"]["EPBuffer"], "combine", ["self", "x"])
    with pytest.raises(TypeError, match="too many positional arguments"), calls.spied("v2.5.0", {}):
        identity_and_close(build_dispatcher(config(V25)))


@pytest.mark.parametrize("release", RELEASES)
def test_lines_are_of_recorded_methods_and_files(release: str) -> None:
    record = recorded(release)
    files = record["source"].get("files") or [record["source"]["file"]]
    for name, lines in record["lines"].items():
        assert lines.keys() <= record["classes"][name].keys()
        assert {line.partition(":")[0] for line in lines.values()} <= set(files)
