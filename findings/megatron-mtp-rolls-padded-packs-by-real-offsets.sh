#!/usr/bin/env bash
# megatron-core 0.19.2: for a pack with padded sequences, roll_tensor of multi-token prediction rolls by cu_seqlens_q,
# although the rows lie as cu_seqlens_q_padded says. In the second sequence the label of its second token is lost (0 for
# 23), and its last token keeps itself as label (23 for 0). One would expect the padded offsets, as attention and rotary
# embeddings use them.
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
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import roll_tensor

def offsets(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)

# Two sequences of 3 tokens, each padded to 4 rows: 11 12 13 . 21 22 23 .
rows = torch.tensor([[11, 12, 13, 0, 21, 22, 23, 0]])
packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=offsets(0, 3, 6), cu_seqlens_q_padded=offsets(0, 4, 8))
rolled = roll_tensor(rows, packed_seq_params=packed)[0].tolist()
print(version("megatron-core"), rolled)
assert rolled == [[12, 13, 0, 21, 22, 0, 23, 0]]
# By the offsets of the rows, each sequence moves by one, and its last token gets none.
plain = PackedSeqParams(qkv_format="thd", cu_seqlens_q=offsets(0, 4, 8))
assert roll_tensor(rows, packed_seq_params=plain)[0].tolist() == [[12, 13, 0, 0, 22, 23, 0, 0]]
END
cd "$folder"
OMP_NUM_THREADS=1 "$python" -W ignore seen.py
