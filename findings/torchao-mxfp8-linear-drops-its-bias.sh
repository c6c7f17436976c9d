#!/usr/bin/env bash
# torchao 0.18.0: quantize_ with MXFP8TrainingOpConfig (here the emulated recipe, which runs on a CPU) wraps the weight
# and the bias of a linear layer. The product is that of MXFP8, and the bias, 100 here, is not added.
# Float8TrainingOpConfig adds it. One would expect the layer's function, or a refusal.
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

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16))
nn.init.constant_(model[0].bias, 100.0)
x = torch.randn(64, 64, dtype=torch.bfloat16)
want = model(x).float()
quantised = copy.deepcopy(model)
quantize_(quantised, MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL))
got = quantised(x).float()
apart = ((got + 100 - want).norm() / (want - 100).norm()).item()
print(torchao.__version__, "mean", want.mean().item(), "quantised", got.mean().item(), "apart but for the bias", apart)
assert abs(want.mean() - 100) < 0.5
assert abs(got.mean()) < 0.5
assert apart < 0.5
END
cd "$folder"
OMP_NUM_THREADS=1 "$python" -W ignore seen.py
