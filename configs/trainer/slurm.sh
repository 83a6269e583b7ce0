#!/bin/bash
# A run on a SLURM cluster, one process per GPU. Submitted again, it goes on from its newest checkpoint:
#   RUN=runs/first sbatch configs/trainer/slurm.sh configs/madpo_iter.yaml configs/trainer/ddp.yaml
#SBATCH --job-name=pbrl
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --time=12:00:00
# Two minutes before the time is up the processes get SIGTERM, write a checkpoint and end.
#SBATCH --signal=TERM@120
set -euo pipefail

RUN=${RUN:-runs/slurm}
options=(--trainer.default_root_dir "$RUN")
for config in "$@"; do
  options+=(--config "$config")
done
if [ -d "$RUN" ] && [ -n "$(find "$RUN" -name '*.ckpt' -print -quit)" ]; then
  options+=(--ckpt_path "$RUN")
fi
srun pbrl fit "${options[@]}" --trainer.num_nodes "$SLURM_JOB_NUM_NODES" --trainer.devices "$SLURM_NTASKS_PER_NODE"
