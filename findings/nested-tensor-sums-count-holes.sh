#!/usr/bin/env bash
# torch 2.13.0: a jagged nested tensor made with offsets [0, 4, 8] and lengths [3, 2] has 5 rows, and numel says 5. Its
# full sum, mean and maximum are those of all 8 rows, padding included, without an error. The same reduction along the
# ragged dimension raises. One would expect both to raise, or neither.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0
cat > "$folder/seen.py" <<'END'
import torch

rows, offsets, lengths = torch.arange(1.0, 9.0, dtype=torch.float64)[:, None], torch.tensor([0, 4, 8]), torch.tensor([3, 2])
pack = torch.nested.nested_tensor_from_jagged(rows, offsets, lengths=lengths)
real = torch.cat(pack.unbind())
seen = {"sum": pack.sum().item(), "mean": pack.mean().item(), "max": pack.max().item(), "numel": pack.numel()}
print(torch.__version__, seen, "of the real rows", real.sum().item(), real.mean().item(), real.max().item())
assert seen == {"sum": 36.0, "mean": 4.5, "max": 8.0, "numel": 5}
assert (real.sum().item(), real.mean().item(), real.max().item()) == (17.0, 3.4, 6.0)
try:
    pack.sum(dim=1)
except RuntimeError as error:
    assert "with holes" in str(error)
else:
    raise AssertionError("sum(dim=1) did not raise")
assert pack.contiguous().sum().item() == 17.0
END
cd "$folder"
OMP_NUM_THREADS=1 "$python" -W ignore seen.py
