#!/bin/bash
# Train the demo on two machines: sbatch examples/clusters/slurm.sh --steps 32
# Submit it in the checkout, on a file system that all nodes share. torchrun starts the ranks of a node, so Slurm starts
# one task per node.
#SBATCH --job-name=train-moe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=00:30:00
set -euo pipefail

mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR="${NODES[0]}" MASTER_PORT="${MASTER_PORT:-29500}"
# Name the rank that the others wait for, after 10 minutes: longer than a checkpoint takes.
export MOE_DISPATCH_BACKEND="${MOE_DISPATCH_BACKEND:-alltoall}" MOE_DISPATCH_WATCHDOG="${MOE_DISPATCH_WATCHDOG:-600}"

# The quoted line is expanded on each node, where SLURM_NODEID is the number of the node.
srun --kill-on-bad-exit=1 bash -c '
    exec torchrun --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --nproc-per-node "$SLURM_GPUS_ON_NODE" \
        --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" examples/train_packed_text.py "$@"
' torchrun "$@"
