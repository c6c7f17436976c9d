#!/usr/bin/env bash
# trl 1.16.0: DataCollatorForLanguageModeling with padding_free=True and pad_to_multiple_of=8 fills position_ids with 0,
# and takes every 0 for the start of a sequence. Two samples of 3 and 2 tokens become 5 sequences, 3 of them of one
# padding token. One would expect one more sequence at most.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0
"$python" -m pip install --quiet --no-compile --disable-pip-version-check trl==1.16.0 transformers==5.24.0
cat > "$folder/seen.py" <<'END'
import torch
import trl
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, pad_to_multiple_of=8)
batch = collate([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
print(trl.__version__, {name: batch[name].tolist() for name in ("position_ids", "cu_seq_lens_q", "seq_idx")})
assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 6, 7, 8]
assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 1, 2, 3, 4]]
collate.pad_to_multiple_of = None
batch = collate([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5]
END
cd "$folder"
OMP_NUM_THREADS=1 "$python" -W ignore seen.py
