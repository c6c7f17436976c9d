#!/usr/bin/env bash
# axolotl 0.21.0, one CPU process: a config with gradient checkpointing is refused, whatever the model is, if the letters "mpt" stand
# anywhere in base_model: a folder "qwen3-prompt-tuned", "empty-start" or a temporary one of Python ("tmp" before a random "t") is
# taken for an MPT model. One would expect the model's own config.json to say what it is.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
python=$folder/venv/bin/python
install() { "$python" -m pip install --quiet --no-compile --no-warn-conflicts --disable-pip-version-check "$@"; }
install torch==2.13.0
install accelerate==1.15.0 addict==2.4.0 art==6.5 colorama==0.4.6 datasets==5.0.1 einops==0.8.2 evaluate==0.4.1 \
  fastcore==2.2.41 fire==0.7.1 numba==0.68.1 numpy==2.4.6 optimum==1.16.2 peft==0.21.2 pillow==13.0.0 posthog==6.7.11 \
  pydantic==2.14.3 python-dotenv==1.2.4 schedulefree==1.4.1 scipy==1.17.1 tensorboard==2.21.0 torchao==0.18.0 \
  transformers==5.20.1 trl==1.14.1 wandb==0.31.0 zstandard==0.25.0
install --no-deps --ignore-requires-python axolotl==0.21.0 axolotl-contribs-lgpl==0.0.7 axolotl-contribs-mit==0.0.6
cat > "$folder/seen.py" <<'END'
from axolotl.utils.schemas.config import AxolotlInputConfig
from pydantic import ValidationError


def said(folder: str) -> str:
    """Validate a config of a Qwen3 model that lies in this folder."""
    try:
        AxolotlInputConfig(
            base_model=folder,
            base_model_config="Qwen/Qwen3-0.6B",
            gradient_checkpointing=True,
            datasets=[{"path": "data", "type": "alpaca"}],
            micro_batch_size=1,
            gradient_accumulation_steps=1,
            num_epochs=1,
            learning_rate=1e-4,
            optimizer="adamw_torch",
            lr_scheduler="cosine",
        )
    except ValidationError as error:
        return str(error.errors()[0]["msg"])
    return "accepted"


folders = ("./qwen3-tuned", "./qwen3-prompt-tuned", "./empty-start-qwen3")
seen = {folder: said(folder) for folder in folders}
print(seen)
refusal = "Value error, gradient_checkpointing is not supported for MPT models"
assert list(seen.values()) == ["accepted", refusal, refusal]
END
cd "$folder"
OMP_NUM_THREADS=1 "$python" -W ignore seen.py
