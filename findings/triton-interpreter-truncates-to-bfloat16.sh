#!/usr/bin/env bash
# triton 3.7.1: whoever tests a kernel with TRITON_INTERPRET=1 against a reference in torch sees an error of up to one
# unit in the last place of bfloat16, always towards zero, that no GPU has. One would expect the rounding of the
# compiled kernel.
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
    tl.store(y + i, tl.load(x + i).to(tl.bfloat16))

if sys.argv[1:] == ["compile"]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for arch in (90, 100):
        source = ASTSource(fn=cast, signature={"x": "*fp32", "y": "*bf16", "n": "constexpr"}, constexprs={"n": 64})
        ptx = triton.compile(source, target=GPUTarget("cuda", arch, 32)).asm["ptx"]
        print(arch, sorted(set(re.findall(r"cvt\.\S*bf16\S*", ptx))))
        assert set(re.findall(r"cvt\.\S*bf16\S*", ptx)) == {"cvt.rn.bf16.f32"}
else:
    x = torch.tensor([1 + 2.0**-8 + 2.0**-12, 1 + 3 * 2.0**-8, 1.999, -1.999])
    y = torch.zeros(4, dtype=torch.bfloat16)
    cast[(1,)](x, y, 4)
    print(triton.__version__, y.tolist(), "torch:", x.bfloat16().tolist())
    assert y.tolist() == [1.0, 1.0078125, 1.9921875, -1.9921875]
    assert x.bfloat16().tolist() == [1.0078125, 1.015625, 2.0, -2.0]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, __file__, "compile"], env=environment, check=True)
END
cd "$folder"
OMP_NUM_THREADS=1 TRITON_INTERPRET=1 TRITON_CACHE_DIR="$folder/cache" "$python" -W ignore seen.py
