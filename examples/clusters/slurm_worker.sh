#!/bin/bash
#SBATCH --job-name=digits-worker
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue            # a preempted job returns to the queue
#SBATCH --open-mode=append   # the log keeps the output of earlier starts
#SBATCH --signal=TERM@120    # drain the nodes 120 s before the time limit
set -euo pipefail

export PYTHONPATH=$PWD/examples:${PYTHONPATH-} RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_ADDRESS
head=runs/digits/ray.env # of slurm.sh; an older one can be of an earlier head job
until [[ -f $head ]] && source "$head" && ray health-check --address="$RAY_ADDRESS"; do
    sleep 5
done 2>/dev/null
exec srun --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    ray start --address="$RAY_ADDRESS" --num-cpus="$SLURM_CPUS_PER_TASK" --block
