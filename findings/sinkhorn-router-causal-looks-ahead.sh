#!/usr/bin/env bash
# sinkhorn-router-pytorch 0.0.14: tokens 8 to 15 of 16 are replaced, and outputs of tokens 0 to 7 change by 0.04 to
# 0.06. causal=True chooses how gates are applied; the balancing assigns the best tokens of the whole sequence to each
# expert, in evaluation too. One would expect that the word causal rules that out. With route=False nothing leaks.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0
"$python" -m pip install --quiet --no-compile --disable-pip-version-check sinkhorn-router-pytorch==0.0.14
cat > "$folder/seen.py" <<'END'
from importlib.metadata import version

import torch
from sinkhorn_router_pytorch import SinkhornRouter

torch.manual_seed(0)
layer = SinkhornRouter(8, experts=(4, 8, 8), causal=True).eval()
x = torch.randn(1, 16, 8)
later = x.clone()
later[0, 8:] = torch.randn(8, 8)
with torch.no_grad():
    moved = (layer(x)[0, :8] - layer(later)[0, :8]).abs().amax(-1) > 1e-3
    alone = (layer(x, route=False)[0, :8] - layer(later, route=False)[0, :8]).abs().amax(-1) > 1e-3
print(version("sinkhorn-router-pytorch"), "tokens before the change that moved:", moved.nonzero().flatten().tolist())
assert moved.any()
assert not alone.any()
END
cd "$folder"
OMP_NUM_THREADS=1 "$python" -W ignore seen.py
