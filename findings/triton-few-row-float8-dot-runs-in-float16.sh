#!/usr/bin/env bash
# triton 3.7.1: an expert with few tokens gets a tile of 16 or 32 rows. There tl.dot of two float8e4nv tiles becomes a
# product in float16 on sm_90 and on sm_100, at half the rate. One would expect the float8 instruction that sm_89 and
# later have for 16 rows.
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
def product(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x, y = tl.load(a + m[:, None] * K + k[None]), tl.load(b + k[:, None] * N + n[None])
    tl.store(c + m[:, None] * N + n[None], tl.dot(x, y))

def instructions(arch, rows):
    constants = {"M": rows, "N": 64, "K": 64}
    signature = {"a": "*fp8e4nv", "b": "*fp8e4nv", "c": "*fp32", **dict.fromkeys(constants, "constexpr")}
    compiled = triton.compile(ASTSource(fn=product, signature=signature, constexprs=constants), target=GPUTarget("cuda", arch, 32))
    return set(re.findall(r"(?:wgmma\.mma|mma\.sync|tcgen05\.mma)\S+", compiled.asm["ptx"]))

half = {"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"}
native = {90: {"wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3"}, 100: {"tcgen05.mma.cta_group::1.kind::f8f6f4"}}
for arch in (90, 100):
    for rows in (16, 32, 64, 128):
        seen = instructions(arch, rows)
        print(triton.__version__, arch, rows, seen)
        assert seen == (half if rows < 64 else native[arch])
END
cd "$folder"
OMP_NUM_THREADS=1 TRITON_CACHE_DIR="$folder/cache" "$python" -W ignore seen.py
