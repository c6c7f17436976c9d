#!/usr/bin/env bash
# deepspeed 0.19.8 on one CPU process, plain SGD without momentum: expert 0 runs in the first step only. Under ZeRO 0, 1
# and 2 it stays where it is in the next three steps. Under ZeRO 3 it moves in each of them, as if its old gradient had
# come again. One would expect it to rest in all four.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0
"$python" -m pip install --quiet --no-compile --disable-pip-version-check numpy setuptools wheel
DS_ACCELERATOR=cpu DS_BUILD_OPS=0 "$python" -m pip install --quiet --no-compile --disable-pip-version-check --no-build-isolation deepspeed==0.19.8
cat > "$folder/seen.py" <<'END'
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
folder = tempfile.TemporaryDirectory()
dist.init_process_group("gloo", init_method=f"file://{folder.name}/store", rank=0, world_size=1)
import deepspeed

# Its operator for shared memory would be compiled here.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda *args, **options: None
deepspeed.utils.logger.setLevel("ERROR")
deepspeed.init_distributed("gloo", verbose=False)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(4, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x, chosen):
        hidden = self.dense(x)
        return (hidden + self.experts[chosen](hidden)).sum()

def moved(stage):
    """How far expert 0 moves in each of 3 steps in which only expert 1 runs, by plain SGD."""
    torch.manual_seed(0)
    model = Model()
    settings = {"train_batch_size": 1, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=settings)
    held = []
    for chosen in (0, 1, 1, 1):
        engine.backward(engine(torch.ones(1, 4), chosen))
        engine.step()
        held.append(engine.module.experts[0].weight.detach().clone())
    return [(after - before).norm().item() for before, after in zip(held, held[1:])]

for stage in (0, 1, 2, 3):
    seen = moved(stage)
    print(deepspeed.__version__, "ZeRO", stage, seen)
    assert all(step > 0.01 for step in seen) if stage == 3 else seen == [0.0, 0.0, 0.0]
END
cd "$folder"
OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu DS_BUILD_OPS=0 "$python" -W ignore seen.py
