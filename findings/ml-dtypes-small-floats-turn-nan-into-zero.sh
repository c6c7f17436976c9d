#!/usr/bin/env bash
# ml_dtypes 0.6.0: formats that have no NaN must do something with one. One would expect the largest number, as infinity
# and every overflow give it, so that a broken block shows. NaN becomes -0.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0
"$python" -m pip install --quiet --no-compile --disable-pip-version-check numpy==2.4.6 ml-dtypes==0.6.0
cat > "$folder/seen.py" <<'END'
import ml_dtypes
import numpy as np

numbers = np.array([np.nan, np.inf, -np.inf, 1e9], np.float32)
for dtype, largest in ((ml_dtypes.float4_e2m1fn, 6.0), (ml_dtypes.float6_e2m3fn, 7.5), (ml_dtypes.float6_e3m2fn, 28.0)):
    seen = numbers.astype(dtype).astype(np.float32)
    print(ml_dtypes.__version__, dtype.__name__, seen)
    assert seen[0] == 0 and np.signbit(seen[0])
    assert seen[1:].tolist() == [largest, -largest, largest]
assert np.isnan(numbers.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)[:3]).all()
END
cd "$folder"
OMP_NUM_THREADS=1 "$python" -W ignore seen.py
