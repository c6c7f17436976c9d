#!/usr/bin/env bash
# megatron-core 0.19.2: rotary embeddings of a pack (qkv_format thd) of two sequences of 4 tokens. With a table of 4, 7,
# 9 or 64 positions the second sequence begins at position 0. With one of 8, the length of the pack, it begins at
# position 4. One would expect that the length of the table does not matter.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0
"$python" -m pip install --quiet --no-compile --disable-pip-version-check numpy packaging
"$python" -m pip install --quiet --no-compile --disable-pip-version-check --no-deps triton==3.7.1
"$python" -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --ignore-requires-python megatron-core==0.19.2
cat > "$folder/seen.py" <<'END'
from importlib.metadata import version

import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd

class OneRank:
    def size(self):
        return 1

    def rank(self):
        return 0

def restarts(length):
    angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, 4, 2) / 4)
    table = torch.cat([angles, angles], -1)[:, None, None]
    rows, offsets = torch.ones(8, 1, 4), torch.tensor([0, 4, 8], dtype=torch.int32)
    rotated = _apply_rotary_pos_emb_thd(rows, offsets, table, cp_group=OneRank())
    return torch.equal(rotated[:4], rotated[4:])

seen = {length: restarts(length) for length in (4, 7, 8, 9, 64)}
print(version("megatron-core"), seen)
assert seen == {4: True, 7: True, 8: False, 9: True, 64: True}
END
cd "$folder"
OMP_NUM_THREADS=1 "$python" -W ignore seen.py
