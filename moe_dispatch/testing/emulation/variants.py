"""``deep_ep.Buffer`` of the releases whose point is another class: there to be imported, and not emulated."""

from __future__ import annotations

from typing import Any, NoReturn


def unemulated_buffer(release: str) -> type:
    """A class ``Buffer`` that refuses to be made, and to say how large it should be.

    Its rules differ from v1.2.1's from group sizes and queue lengths on, so v1.2.1's would be believed where they are
    wrong (deep_ep/buffers/legacy.py of v2; deep_ep/buffer.py of branch hybrid-ep).
    """

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"Buffer: the one of {release} is not emulated, only its newer classes are. Use release v1.2.1 for Buffer."
        )

    methods = {name: staticmethod(refuse) for name in ("set_num_sms", "get_dispatch_config", "get_combine_config")}
    return type("Buffer", (), {"__init__": refuse, **methods, "__doc__": refuse.__doc__})
