#!/usr/bin/env bash
# triton 3.7.1: above 448 the interpreter's cast to float8e4nv wraps into the exponent, and infinity and NaN become
# ordinary numbers. It also rounds 17, a tie, to 18 and not to even. The compiled kernel saturates to 448 and keeps NaN.
# One would expect the same from both, or an error.
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
def cast(x, y, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(y + i, tl.load(x + i).to(tl.float8e4nv))

if sys.argv[1:] == ["compile"]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for arch in (90, 100):
        source = ASTSource(fn=cast, signature={"x": "*fp32", "y": "*fp8e4nv", "n": "constexpr"}, constexprs={"n": 128})
        ptx = triton.compile(source, target=GPUTarget("cuda", arch, 32)).asm["ptx"]
        seen = set(re.findall(r"cvt\.\S*e4m3\S*", ptx))
        print(arch, seen)
        assert seen == {"cvt.rn.satfinite.e4m3x2.f32"}
else:
    x = torch.tensor([17.0, 448.0, 1000.0, float("inf"), float("nan"), 0.0, 0.0, 0.0])
    y = torch.zeros(8, dtype=torch.float8_e4m3fn)
    cast[(1,)](x, y, 8)
    print(triton.__version__, y.float().tolist(), "torch:", x.to(torch.float8_e4m3fn).float().tolist())
    assert y.float()[:5].tolist() == [18.0, 448.0, 256.0, 256.0, 384.0]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, __file__, "compile"], env=environment, check=True)
END
cd "$folder"
OMP_NUM_THREADS=1 TRITON_INTERPRET=1 TRITON_CACHE_DIR="$folder/cache" "$python" -W ignore seen.py
