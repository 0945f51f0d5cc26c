#!/usr/bin/env bash
# Training on NVIDIA GPUs of a Slurm cluster, from a checkout in a folder that all nodes see:
#
#   sbatch --nodes=2 launch/slurm.sh --gin_file=configs/... --workdir=/shared/runs/mine --gin.train.rows=32
#
# JAX finds the processes from Slurm's environment, one a GPU. SIGTERM, from preemption or two minutes before the time
# limit, makes the run save and exit with code 42: the job is put back in the queue and goes on from there. Any other
# failure is tried at most three times without progress. Not run on a cluster: the tests have stand-ins for srun and
# scontrol.
#SBATCH --job-name=block-recurrent
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
set -euo pipefail

cd "${SLURM_SUBMIT_DIR:?submit it with sbatch, from the checkout}"
export BR_REQUIREMENTS=requirements-gpu.txt
python=$(bash launch/worker.sh setup)
echo "commit $(git rev-parse HEAD), $(git status --porcelain | wc -l) files changed, on ${SLURM_JOB_NODELIST:-?}"

workdir=""
last=""
for argument in "$@"; do
  if [[ $argument == --workdir=* ]]; then workdir=${argument#--workdir=}; fi
  if [[ $last == --workdir ]]; then workdir=$argument; fi
  last=$argument
done
tries_file=slurm-$SLURM_JOB_ID.tries
before=$(bash launch/worker.sh step "$workdir")

result=0
# The first process that leaves does not take the others with it: they are saving too.
srun --kill-on-bad-exit=0 --wait=180 "$python" -m block_recurrent.train "$@" || result=$?

if ((result == 0)); then
  rm -f "$tries_file"
elif ((result == 42)); then
  scontrol requeue "$SLURM_JOB_ID"
else
  tries=$(($(cat "$tries_file" 2>/dev/null || echo 0) + 1))
  if (($(bash launch/worker.sh step "$workdir") > before)); then tries=1; fi
  echo "$tries" >"$tries_file"
  echo "exit code $result, try $tries of 3 without progress"
  if ((tries < 3)); then scontrol requeue "$SLURM_JOB_ID"; fi
fi
exit "$result"
