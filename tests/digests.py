"""Print a digest of the results of each case of the conformance kit, to compare two trees bit for bit with ``diff``.

    python -m tests.digests > new.txt                                 # in each of the two trees
    TRITON_INTERPRET=1 python -m tests.digests --share 0.1 > new.txt  # with the kernels of Triton, in its interpreter

A line has the case and a digest of outputs and gradients of all ranks. Padding and slack are in no output. The kit of
this tree must exist in the other one under the same names; cases that only one tree has show in the diff.
"""

from __future__ import annotations

import argparse
import hashlib
import threading
from collections.abc import Iterator
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from moe_dispatch_testing import case as kit_case
from moe_dispatch_testing import run_case
from moe_dispatch_testing.kit import backend_cases, describe
from moe_dispatch_testing.ranks import Ranks

BACKENDS: tuple[Any, ...] = (
    "local",
    "allgather",
    "alltoall",
    {"name": "alltoall", "reduction": "exact"},
    {"name": "hybridep", "emulate": True},
    {"name": "deepep", "emulate": "v2.5.0", "expand": True},
)


def digests(share: float) -> Iterator[str]:
    """Run the cases, or a share of them that does not depend on the other cases. Yield the lines."""
    torch.set_num_threads(1)
    ranks = Ranks()
    for backend in BACKENDS:
        for case in backend_cases(backend, (1, 2)):
            name = f"{describe(backend)} {case.id}"
            if Random(name).random() < share:
                yield f"{name} {digest(backend, case, ranks)}"


def digest(backend: Any, case: Any, ranks: Ranks) -> str:
    """Return a digest of all outputs and gradients of a case, and the name of the error if it raises one."""
    found: list[str] = []
    here = threading.local()  # a rank is a thread
    run_rank, check_output, check_gradients = kit_case.run_rank, kit_case._check_output, kit_case._check_gradients

    def on_rank(config: Any, group: Any, *rest: Any) -> Any:
        here.rank, here.call = 0 if group is None else group.rank(), -1
        return run_rank(config, group, *rest)

    def keep(kind: str, *tensors: Tensor | None) -> None:
        for number, tensor in enumerate(tensors):
            flat = b"" if tensor is None else tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            name = f"{kind} {number} of call {here.call} on rank {here.rank}:"
            found.append(hashlib.sha256(name.encode() + flat).hexdigest())

    def output(y: Tensor, *rest: Any) -> None:
        here.call += 1
        keep("y", y)
        check_output(y, *rest)

    def gradients(call: Any, *rest: Any) -> None:
        keep("gradients", call.x.grad, call.weights_TK.grad, call.experts.matrix_EWW.grad, call.experts.bias_ED.grad)
        check_gradients(call, *rest)

    patched: Any = {"run_rank": on_rank, "_check_output": output, "_check_gradients": gradients}
    with patch.multiple(kit_case, **patched):
        try:
            run_case(backend, case, ranks)
        except Exception as error:
            found.append(type(error).__name__)
    assert found, "the kit checked no results"
    # Ranks end in any order.
    return hashlib.sha256("".join(sorted(found)).encode()).hexdigest()[:16]


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(prog="python -m tests.digests", description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="share of the cases")
    for line in digests(parser.parse_args().share):
        print(line, flush=True)


if __name__ == "__main__":
    main()
