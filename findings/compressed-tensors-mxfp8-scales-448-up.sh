#!/usr/bin/env bash
# compressed-tensors 0.20.0: the scale byte of an MXFP8 block whose largest number is 448 is 128, so 448 is stored as
# 224. FLOOR, EVEN and RCEIL of torchao all give 127. MXFP8 rounds the scale up from 1.75 times a power of 2 on, which
# is the threshold of a 4-bit element; MXFP6 has a threshold of its own. One would expect 127 for a number that e4m3
# holds exactly.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0
"$python" -m pip install --quiet --no-compile --disable-pip-version-check compressed-tensors==0.20.0 numpy
cat > "$folder/seen.py" <<'END'
from importlib.metadata import version

import torch
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales

def scale_byte(largest, bits):
    return int(generate_mx_scales(torch.tensor([largest]), bits).item())

seen = {largest: scale_byte(largest, 8) for largest in (447.0, 448.0, 479.0, 512.0)}
print(version("compressed-tensors"), seen)
assert seen == {447.0: 127, 448.0: 128, 479.0: 128, 512.0: 128}
# The threshold is 1.75 times a power of 2: right for 4 bits, where 7 rounds to 8.
assert {largest: scale_byte(largest, 4) for largest in (6.0, 6.9, 7.0, 8.0)} == {6.0: 127, 6.9: 127, 7.0: 128, 8.0: 128}
# Six bits have their own threshold, 7.5 and not 7.
assert scale_byte(7.0, 6) == 127
END
cd "$folder"
OMP_NUM_THREADS=1 "$python" -W ignore seen.py
