#!/usr/bin/env bash
# torchao 0.18.0: the configs of torchao.prototype.moe_training are made for grouped matrix products of experts. Without
# a filter_fn, quantize_ applies one to nn.Linear only: the router, which everybody keeps in high precision, is computed
# in MXFP8, and the experts, one 3-D parameter of their own module, are not. One would expect the opposite.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0
"$python" -m pip install --quiet --no-compile --disable-pip-version-check numpy torchao==0.18.0
cat > "$folder/seen.py" <<'END'
import torch
import torchao
from torch import nn
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
from torchao.quantization import quantize_

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
        self.experts = nn.Parameter(torch.zeros(32, 64, 64, dtype=torch.bfloat16))

model = Layer()
quantize_(model, MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL))
seen = {name: "Wrapper" in type(parameter.data).__name__ for name, parameter in model.named_parameters()}
print(torchao.__version__, seen)
assert seen == {"router.weight": True, "experts": False}
END
cd "$folder"
OMP_NUM_THREADS=1 "$python" -W ignore seen.py
