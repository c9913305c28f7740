#!/bin/sh
#SBATCH --job-name=diloco
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
# Four tasks, which jax.distributed finds by the variables of SLURM. --kill-on-bad-exit ends all when one has failed, and
# scontrol puts the job into the queue again, three times at most. diloco.py keeps no checkpoint and begins anew: add one
# of worker.state(), which worker.restore takes.
srun --kill-on-bad-exit=1 python diloco.py ||
  { [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ] && scontrol requeue "$SLURM_JOB_ID"; }
