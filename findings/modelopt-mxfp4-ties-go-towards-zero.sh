#!/usr/bin/env bash
# nvidia-modelopt 0.47.0: 0.75, 1.75, 3.5 lie half way between two numbers of e2m1. Its MXFP4 stores 0.5, 1.5, 3
# (towards zero), its NVFP4 1, 2, 4 (to even). A NaN or an infinity makes the whole MXFP4 block zero, and every 0 is
# stored as -0. One would expect one rule for one element format, and a block that shows its NaN.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0
"$python" -m pip install --quiet --no-compile --disable-pip-version-check nvidia-modelopt==0.47.0
cat > "$folder/seen.py" <<'END'
import torch
from importlib.metadata import version
from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

def row(numbers, block):
    return torch.tensor([[*numbers, *[0.0] * (block - len(numbers))]])

def mxfp4(*numbers):
    stored, scale = MXFP4QTensor.quantize(row(numbers, 32), 32)
    back = stored.dequantize(torch.float32, scale=scale, block_sizes={-1: 32})[0]
    return back[: len(numbers)].tolist(), back

def nvfp4(*numbers):
    stored, scale, double = NVFP4QTensor.quantize(row(numbers, 16), 16)
    return stored.dequantize(torch.float32, scale=scale, double_scale=double, block_sizes={-1: 16})[0, : len(numbers)].tolist()

ties = (6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
print(version("nvidia-modelopt"), mxfp4(*ties)[0], nvfp4(*ties), mxfp4(float("nan"), 1.0)[0], mxfp4(float("inf"), 1.0)[0])
assert mxfp4(*ties)[0] == [6.0, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0]
assert nvfp4(*ties) == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
assert mxfp4(float("nan"), 1.0)[0] == mxfp4(float("inf"), 1.0)[0] == [0.0, 0.0]
assert mxfp4(1.0)[1][1:].signbit().all()
END
cd "$folder"
OMP_NUM_THREADS=1 "$python" -W ignore seen.py
