#!/usr/bin/env bash
# transformers 5.24.0: the scale byte 255 is NaN in the formats with e8m0 scales, and in torch's float8_e8m0fnu. The
# function that unpacks the experts of gpt-oss treats it as the exponent 128: a block of NaN comes back as 1.7e38 where
# the code is 0.5, and as infinity from 1.0 on.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0
"$python" -m pip install --quiet --no-compile --disable-pip-version-check numpy transformers==5.24.0
cat > "$folder/seen.py" <<'END'
import torch
import transformers
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

def block(scale):
    codes = torch.full((1, 1, 1, 16), 0x21, dtype=torch.uint8)  # 0.5 and 1.0 in turn
    return convert_moe_packed_tensors(codes, torch.full((1, 1, 1), scale, dtype=torch.uint8)).flatten()[:2].tolist()

seen = {scale: block(scale) for scale in (127, 254, 255)}
print(transformers.__version__, seen, torch.full((1,), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu).float().item())
assert seen == {127: [0.5, 1.0], 254: [2.0**126, 2.0**127], 255: [2.0**127, float("inf")]}
assert torch.full((1,), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu).isnan().all()
END
cd "$folder"
OMP_NUM_THREADS=1 "$python" -W ignore seen.py
