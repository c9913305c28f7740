#!/bin/sh
#SBATCH --job-name=diloco
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
# Four tasks, which jax.distributed finds by the variables of SLURM. --kill-on-bad-exit ends all when one has failed, and
# scontrol puts the job into the queue again; each process then begins with its checkpoint.
srun --kill-on-bad-exit=1 python diloco.py || scontrol requeue "$SLURM_JOB_ID"
