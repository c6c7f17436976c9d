#!/usr/bin/env bash
# triton 3.7.1: a test under TRITON_INTERPRET=1 sees a NaN pass through tl.maximum, the compiled kernel (sm_90, sm_100)
# drops it: its instruction is max.f32, not max.NaN.f32, because propagate_nan is off by default. One would expect the
# interpreter to follow that default, as it does in tl.max.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0
"$python" -m pip install --quiet --no-compile --disable-pip-version-check numpy==2.4.6
"$python" -m pip install --quiet --no-compile --disable-pip-version-check --no-deps triton==3.7.1
cat > "$folder/seen.py" <<'END'
import os
import re
import subprocess
import sys

import torch
import triton
import triton.language as tl

@triton.jit
def larger(x, y, z, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(z + i, tl.maximum(tl.load(x + i), tl.load(y + i)))

@triton.jit
def largest(x, z, n: tl.constexpr):
    tl.store(z, tl.max(tl.load(x + tl.arange(0, n)), 0))

if sys.argv[1:] == ["compile"]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for arch in (90, 100):
        for kernel, names in ((larger, "xyz"), (largest, "xz")):
            signature = {**dict.fromkeys(names, "*fp32"), "n": "constexpr"}
            asm = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs={"n": 64}), target=GPUTarget("cuda", arch, 32)).asm
            seen = set(re.findall(r"max\.\S*f32", asm["ptx"]))
            print(arch, kernel.__name__, seen)
            assert seen == {"max.f32"}
else:
    x, z = torch.tensor([1.0, float("nan"), 3.0, 2.0]), torch.zeros(4)
    larger[(1,)](x, torch.zeros(4), z, 4)
    elementwise = z.tolist()
    largest[(1,)](x, z, 4)
    print(triton.__version__, elementwise, z[0].item())
    assert elementwise[0] == 1.0 and elementwise[1] != elementwise[1] and elementwise[2:] == [3.0, 2.0]
    assert z[0].item() == 3.0
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, __file__, "compile"], env=environment, check=True)
END
cd "$folder"
OMP_NUM_THREADS=1 TRITON_INTERPRET=1 TRITON_CACHE_DIR="$folder/cache" "$python" -W ignore seen.py
