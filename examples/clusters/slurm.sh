#!/bin/bash
#SBATCH --job-name=digits
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --no-kill            # a failed node does not end the job
#SBATCH --requeue            # a preempted job returns to the queue
#SBATCH --open-mode=append   # the log keeps the output of earlier starts
#SBATCH --signal=B:USR1@120  # warn this script 120 s before the time limit
set -euo pipefail

export PYTHONPATH=$PWD/examples:${PYTHONPATH-}  # where the workers find your modules
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_ADDRESS
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
port=${RAY_PORT:-6379}
RAY_ADDRESS=$(python -c 'import ray; print(ray.util.get_node_ip_address())'):$port
mkdir -p runs/digits
# Only you can read the token, which slurm_worker.sh needs.
(umask 077 && printf '%s=%s\n' RAY_ADDRESS "$RAY_ADDRESS" RAY_AUTH_TOKEN "$RAY_AUTH_TOKEN" > runs/digits/ray.env)

nodes=()
start_ray() { # the number of the node, and the arguments of ray start
    srun --nodes=1 --ntasks=1 --relative="$1" --cpus-per-task="$SLURM_CPUS_PER_TASK" \
        ray start "${@:2}" --num-cpus="$SLURM_CPUS_PER_TASK" --block &
    nodes+=($!)
}
start_ray 0 --head --port="$port"
timeout 120 bash -c "until ray health-check --address=$RAY_ADDRESS; do sleep 1; done" 2>/dev/null
for ((node = 1; node < SLURM_JOB_NUM_NODES; node++)); do
    start_ray "$node" --address="$RAY_ADDRESS"
done

requeue() { # drain all nodes, so that raysgd saves, and return to the queue
    scancel --signal=TERM "$SLURM_JOB_ID"
    wait "${nodes[@]}" || true
    scontrol requeue "$SLURM_JOB_ID"
}
trap requeue USR1

raysgd fit digits:DigitClassifier --config examples/digits.yaml \
    --num-workers "$SLURM_JOB_NUM_NODES" --logdir "$PWD/runs/digits" \
    trainer.min_workers=2 trainer.num_cpus_per_worker="$SLURM_CPUS_PER_TASK" \
    checkpoint.every=500 "$@" &
wait $! # the trap runs while the script waits
