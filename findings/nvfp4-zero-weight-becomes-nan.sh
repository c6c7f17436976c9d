#!/usr/bin/env bash
# torchao 0.18.0: an expert whose matrix is all zero (pruned, or an output projection as initialised) has the per-tensor
# scale 0, and every element is NaN after a round trip through NVFP4. Without a per-tensor scale, and for a block of
# zeros beside other numbers, the zeros come back. One would expect zeros in all three.
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
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

def back(x, scale):
    return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize()

zero = torch.zeros(16, 16)
scale = per_tensor_amax_to_scale(zero.abs().max())
print(torchao.__version__, scale.item(), back(zero, scale)[0, :3].tolist(), back(zero, None)[0, :3].tolist())
assert scale.item() == 0
assert back(zero, scale).isnan().all()
assert back(zero, None).eq(0).all()
# A block of zeros beside other numbers is right.
half = torch.cat([zero, torch.ones(16, 16)])
assert torch.equal(back(half, per_tensor_amax_to_scale(half.abs().max())), half)
END
cd "$folder"
OMP_NUM_THREADS=1 "$python" -W ignore seen.py
