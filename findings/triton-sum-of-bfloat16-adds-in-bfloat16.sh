#!/usr/bin/env bash
# triton 3.7.1, compiled for sm_90 and sm_100: tl.sum of 1024 bfloat16 numbers adds in bfloat16, and each addition
# rounds. tl.cumsum of the same numbers adds in float32. One would expect both to widen, or neither.
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
import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def total(x, y, n: tl.constexpr):
    tl.store(y, tl.sum(tl.load(x + tl.arange(0, n)), 0))

@triton.jit
def running(x, y, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(y + i, tl.cumsum(tl.load(x + i), 0))

def additions(kernel, arch):
    signature = {"x": "*bf16", "y": "*fp32", "n": "constexpr"}
    compiled = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs={"n": 1024}), target=GPUTarget("cuda", arch, 32))
    return set(re.findall(r"add\.(?:rn\.)?(?:bf16|f32)\S*", compiled.asm["ptx"]))

for arch in (90, 100):
    seen = additions(total, arch), additions(running, arch)
    print(triton.__version__, arch, seen)
    assert all("bf16" in name for name in seen[0]) and seen[0]
    assert all("f32" in name for name in seen[1]) and seen[1]
END
cd "$folder"
OMP_NUM_THREADS=1 TRITON_CACHE_DIR="$folder/cache" "$python" -W ignore seen.py
