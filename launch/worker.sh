#!/usr/bin/env bash
# Runs on every worker of a slice: makes the environment, and keeps one training run that outlives ssh.
#
#   worker.sh start NAME WORKDIR ARGUMENTS...  starts block_recurrent.train and comes back at once
#   worker.sh restart NAME WORKDIR ARGUMENTS...  the same, after killing what is left of this run
#   worker.sh status NAME WORKDIR              one line: running, exited with a code, died, or none; the last checkpoint;
#                                              what the run was doing last, at which step of how many, how long ago
#   worker.sh stop NAME                        SIGTERM: the run saves and exits with code 42
#   worker.sh kill NAME                        SIGKILL, to the run and all it has started
#   worker.sh tail NAME LINES                  the end of the log, each line with the worker's name
#   worker.sh follow NAME LINES                the same, going on
#   worker.sh setup                            makes the environment, once; prints its Python
#   worker.sh foreground ARGUMENTS...          makes the environment and becomes block_recurrent.train (containers)
#   worker.sh step WORKDIR                     the highest step in a folder's checkpoints
#
# BR_PYTHON names a Python that has everything: nothing is installed then. BR_REQUIREMENTS is the file to install from.
set -euo pipefail

patience=--patience=600 # workers install their environment at different speeds; what is given later wins
UV_VERSION=0.13.7
code=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
script=$code/launch/worker.sh
home=${BR_HOME:-$HOME/block_recurrent}
requirements=${BR_REQUIREMENTS:-requirements-tpu.txt}
host=$(hostname)

verb=${1:?which command? see the top of this file}
shift

# Where the environment of this commit's pins is, whether it is there yet or not. Commits with equal pins share one.
environment() {
  local key
  key=$(cat "$code/requirements.txt" "$code/$requirements" | sha256sum | cut -c1-12)
  echo "$home/venv-$key"
}

python() {
  echo "${BR_PYTHON:-$(environment)/bin/python}"
}

# TPU images ship Python 3.10: uv brings 3.11 without asking for root. The marker is written last.
setup() {
  local venv
  if [[ -n ${BR_PYTHON:-} ]]; then return; fi
  venv=$(environment)
  if [[ -e $venv/.installed ]]; then return; fi
  mkdir -p "$home"
  export PATH=$home/uv:$PATH
  if ! command -v uv >/dev/null; then
    curl -LsSf "https://astral.sh/uv/$UV_VERSION/install.sh" | UV_UNMANAGED_INSTALL=$home/uv sh
  fi
  echo "installing $requirements into $venv"
  uv venv --quiet --clear --python 3.11 "$venv"
  uv pip install --quiet --python "$venv/bin/python" --requirements "$code/$requirements"
  touch "$venv/.installed"
}

# One run a worker, whatever its name: the chips serve one process. Everything that a run has started holds the lock,
# so a lock that is held says that something is there, and one that is free that nothing is.
lock=$home/lock
held() {
  [[ -e $lock ]] && ! flock --nonblock "$lock" true
}

current() {
  cat "$home/current" 2>/dev/null || true
}

live() {
  [[ $(current) == "$1" && ! -e $home/runs/$1/exit ]] && held
}

# Ends all that is left of a run; while it holds the lock, its session's number is no one else's.
end_all() {
  if [[ $(current) == "$1" ]] && held; then kill -KILL -- "-$(cat "$home/runs/$1/session")" || true; fi
}

# Runs a command as a child that can be told to stop, and waits for its exit code through signals.
attended() {
  local child result again
  "$@" &
  child=$!
  echo "$child" >"$run/pid"
  # A stop that came before this child was known has told the one before it, or nobody.
  if [[ -e $run/stop ]]; then kill -TERM "$child" 2>/dev/null || true; fi
  while :; do
    signalled=""
    again=0
    wait "$child" || again=$?
    result=${result:-$again}
    if ((again != 127)); then result=$again; fi
    if [[ -z $signalled ]]; then return "$result"; fi
  done
}

highest_step() {
  local last=0 each
  for each in "$1"/checkpoints/*; do
    each=${each##*/}
    if [[ $each =~ ^[0-9]+$ ]] && ((10#$each > last)); then last=$((10#$each)); fi
  done
  echo "$last"
}

run=$home/runs/${1:-}
progress=$run/progress.json # rewritten by the run's process 0

# What the run does before its own first word.
note() {
  printf '{"time": %s, "state": "%s", "step": 0, "steps": 0}\n' "$(date +%s)" "$1" >"$progress.partial"
  mv "$progress.partial" "$progress"
}

doing() {
  local text key age
  local -A found=([time]=0 [state]="" [step]=0 [steps]=0)
  text=$(cat "$progress" 2>/dev/null) || return 0
  for key in "${!found[@]}"; do
    if [[ $text =~ \"$key\":\ *\"?([0-9]+|[a-z]+) ]]; then found[$key]=${BASH_REMATCH[1]}; fi
    if [[ $key != state && ! ${found[$key]} =~ ^[0-9]+$ ]]; then found[$key]=0; fi
  done
  if [[ -z ${found[state]} ]]; then return; fi
  age=$(($(date +%s) - found[time]))
  echo " doing=${found[state]} at=${found[step]} of=${found[steps]} age=$((age > 0 ? age : 0))"
}

case $verb in
start | restart)
  name=$1
  mkdir -p "$run"
  before=$(current)
  if [[ $verb == restart ]]; then end_all "$name"; fi
  if [[ -n $before ]] && ! live "$before"; then end_all "$before"; fi # what a run has left behind
  exec 9>>"$lock"
  if ! flock --wait 1 9; then
    echo "worker=$host refused: $before is running here; stop it first"
    exit 3
  fi
  for variable in "${!MEGASCALE_@}"; do unset "$variable"; done # stale ones would win over the slice's own
  rm -f "$run/exit" "$run/pid" "$run/stop" "$progress"
  echo "$name" >"$home/current"
  echo "=== $(date -u +%FT%TZ) $host ${code##*/}: $*" >>"$run/log"
  setsid nohup bash "$script" supervise "$@" >>"$run/log" 2>&1 </dev/null &
  echo "worker=$host started"
  ;;
supervise) # by start alone, which hands its lock over
  export BLOCK_RECURRENT_PROGRESS=$progress
  export BLOCK_RECURRENT_OWNER=$1 # the same run, started again, takes its workdir over at once
  workdir=$2
  shift 2
  echo $$ >"$run/session"
  trap 'signalled=yes' TERM # a machine that goes down tells everyone; this shell must live to write the exit code
  cd "$code"
  result=0
  note installing
  attended bash "$script" setup >/dev/null || result=$?
  if ((result == 0)); then
    note starting
    attended "$(python)" -m block_recurrent.train "--workdir=$workdir" "$patience" "$@" || result=$?
  fi
  echo "=== $(date -u +%FT%TZ) exit code $result"
  echo "$result" >"$run/exit.partial"
  mv "$run/exit.partial" "$run/exit"
  ;;
status)
  state=none
  if live "$1"; then
    state=running
  elif [[ -e $run/exit ]]; then
    state="exited code=$(cat "$run/exit")"
  elif [[ -d $run ]]; then
    state=died
  fi
  echo "worker=$host state=$state step=$(highest_step "$2")$(doing)"
  ;;
stop)
  if live "$1"; then
    touch "$run/stop"
    if [[ -s $run/pid ]]; then kill -TERM "$(cat "$run/pid")" 2>/dev/null || true; fi
    echo "worker=$host told to stop"
  else
    echo "worker=$host has no run of $1"
  fi
  ;;
kill) end_all "$1" ;;
tail) tail -n "$2" "$run/log" | sed "s/^/$host: /" ;;
follow) exec tail -n "$2" -F "$run/log" ;;
setup)
  setup >&2
  python
  ;;
foreground)
  setup >&2
  cd "$code"
  exec "$(python)" -m block_recurrent.train "$patience" "$@"
  ;;
step) highest_step "$1" ;;
*)
  echo "unknown command $verb: see the top of $script" >&2
  exit 2
  ;;
esac
