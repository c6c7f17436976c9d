#!/usr/bin/env bash
# torchao 0.18.0: whoever copies a model in training (a moving average, an evaluation copy, a hook) can do so before the
# first step, and gets a RuntimeError about graph leaves after it, also after the backward. After a forward under
# no_grad it works again. One would expect that a forward does not change whether parameters can be copied.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0
"$python" -m pip install --quiet --no-compile --disable-pip-version-check numpy torchao==0.18.0
cat > "$folder/seen.py" <<'END'
import copy

import torch
import torchao
from torch import nn
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
from torchao.quantization import quantize_

model = nn.Sequential(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16))
quantize_(model, MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL))
x = torch.ones(32, 64, dtype=torch.bfloat16)

def copies():
    try:
        copy.deepcopy(model)
    except RuntimeError as error:
        assert "graph leaves" in str(error), error
        return False
    return True

seen = [copies()]
model(x).square().mean().backward()
seen.append(copies())
with torch.no_grad():
    model(x)
seen.append(copies())
print(torchao.__version__, "copies before, after a step, after a forward without gradients:", seen)
assert seen == [True, False, True]
END
cd "$folder"
OMP_NUM_THREADS=1 "$python" -W ignore seen.py
