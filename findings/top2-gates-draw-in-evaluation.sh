#!/usr/bin/env bash
# fairscale 0.4.13 and deepspeed 0.19.8, one CPU process: in evaluation, a top-2 gate gives the same input other experts in each
# call: both add noise to the choice of the second expert, in evaluation too. DeepSpeed's gate does so without any capacity
# (drop_tokens=False), and not with k = 1 or k = 3. One would expect an evaluated gate to be a function of its input.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
install() { "$python" -m pip install --quiet --no-compile --disable-pip-version-check "$@"; }
install torch==2.13.0
install numpy setuptools wheel
DS_ACCELERATOR=cpu DS_BUILD_OPS=0 install --no-build-isolation deepspeed==0.19.8 fairscale==0.4.13
cat > "$folder/seen.py" <<'END'
import tempfile

import torch
import torch.distributed as dist

folder = tempfile.TemporaryDirectory()
dist.init_process_group("gloo", init_method=f"file://{folder.name}/store", rank=0, world_size=1)
from deepspeed.moe.sharded_moe import TopKGate
from fairscale.nn.moe.top2gate import Top2Gate

torch.manual_seed(0)
x = torch.randn(64, 16)


@torch.no_grad()
def changed(gate: torch.nn.Module) -> int:
    """Count the tokens of which 4 evaluations of the same x do not choose the same experts."""
    chosen = [gate.eval()(x)[2].any(-1) for _ in range(4)]
    return int(torch.stack([(other != chosen[0]).any(-1) for other in chosen]).any(0).sum())


seen = {f"deepspeed k={k}": changed(TopKGate(16, 8, k=k, drop_tokens=False)) for k in (1, 2, 3)}
seen["fairscale top 2"] = changed(Top2Gate(16, 8))
print("tokens of 64 whose experts change between evaluations:", seen)
assert seen["deepspeed k=1"] == seen["deepspeed k=3"] == 0
assert seen["deepspeed k=2"] > 32 and seen["fairscale top 2"] > 32
dist.destroy_process_group()
END
cd "$folder"
OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu "$python" -W ignore seen.py
