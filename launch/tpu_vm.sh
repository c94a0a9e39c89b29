#!/usr/bin/env bash
# Train on Cloud TPU VMs, with one host or many:
#
#   launch/tpu_vm.sh create NAME v5litepod-16 [--spot]   queue for the TPU (zone and project: gcloud's, or ZONE=...)
#   launch/tpu_vm.sh status NAME                         WAITING_FOR_RESOURCES, ..., ACTIVE; SUSPENDED: preempted
#   launch/tpu_vm.sh setup NAME                          copy this checkout with its uncommitted edits, and install it
#   launch/tpu_vm.sh start NAME BUCKET -- --config FILE  train on all hosts, in gs://BUCKET/NAME
#   launch/tpu_vm.sh follow NAME                         follow the log of host 0
#   launch/tpu_vm.sh stop NAME                           send SIGTERM: all hosts save the same step and exit
#   launch/tpu_vm.sh delete NAME                         delete the TPU and its place in the queue
#
# Rerun `start` to resume after a stop; after a preemption `delete`, `create` and `setup` first. The hosts need gcsfuse,
# which mounts the bucket as a directory. With --dry-run as the first argument the commands are printed, not run.
set -euo pipefail

dry=; if [ "${1:-}" = --dry-run ]; then dry=1; shift; fi
# Print a command as a person would type it: only words that need quotes have them.
show() { for word; do case $word in *[!A-Za-z0-9_./:=@%+,-]*|'') word=${word@Q} ;; esac; printf '%s ' "$word"; done; echo; }
run() { if [ -n "$dry" ]; then show "$@"; else "$@"; fi; }
zone() { run "$@" ${ZONE:+--zone="$ZONE"}; }
tpu() { zone gcloud compute tpus tpu-vm "$@"; }
queue() { zone gcloud compute tpus queued-resources "$@"; }
on_all() { tpu ssh "$1" --worker=all --command="$2"; }
# Quote an argument for the shell of the hosts.
quoted() { printf '%q' "$1"; }
usage() { sed -n '2,13s/^# \{0,1\}//p' "$0" >&2; exit 2; }

[ $# -ge 2 ] || usage
action=$1 name=$2
shift 2
case $action in
  create)
    [ $# -ge 1 ] || usage
    kind=$1; shift
    version=tpu-ubuntu2204-base
    case $kind in v5litepod-*) version=v2-alpha-tpuv5-lite ;; v5p-*) version=v2-alpha-tpuv5 ;; v6e-*) version=v2-alpha-tpuv6e ;; esac
    queue create "$name" --node-id="$name" --accelerator-type="$kind" --runtime-version="$version" "$@"
    ;;
  setup)
    cd "$(dirname "$0")/.."
    scratch=$(mktemp -d)
    archive=$scratch/lm.tgz
    # Archive a copy of git's index with all files that git does not ignore: HEAD would lack uncommitted edits.
    cp "$(git rev-parse --git-path index)" "$scratch/index"
    tree=$(GIT_INDEX_FILE=$scratch/index bash -c 'git add --all && git write-tree')
    if [ -n "$(git status --short)" ]; then
      echo "copying commit $(git rev-parse --short HEAD) with these uncommitted edits:" >&2
      git status --short >&2
    fi
    run git archive --format=tgz --prefix=lm/ -o "$archive" "$tree"
    tpu scp "$archive" "$name:lm.tgz" --worker=all
    venv='python3 -m pip install -q --user uv && python3 -m uv venv -q --seed --python 3.13 .venv'
    pip='.venv/bin/pip install -q'
    install="$pip --require-hashes -r launch/requirements-tpu.lock && $pip --no-deps -e ."
    on_all "$name" "tar xzf lm.tgz && cd lm && $venv && $install"
    ;;
  start)
    [ $# -ge 3 ] && [ "$2" = -- ] || usage
    case $1 in
      */*) echo "BUCKET is the name alone, without gs:// and without a directory: $1" >&2; exit 2 ;;
    esac
    bucket=$(quoted "$1"); shift 2
    arguments=$(printf '%q ' "$@")
    mount='mkdir -p ~/runs && (mountpoint -q ~/runs || gcsfuse --implicit-dirs --rename-dir-limit=100000 --stat-cache-ttl=0 --type-cache-ttl=0 '"$bucket"' ~/runs)'
    train="nohup .venv/bin/python -m lm.train $arguments --workdir ~/runs/$(quoted "$name") --resume --platform tpu --multihost"
    on_all "$name" "$mount && cd lm && { $train > ~/train.log 2>&1 < /dev/null & }"
    ;;
  follow) tpu ssh "$name" --worker=0 --command='tail -n 50 -f ~/train.log' ;;
  stop) on_all "$name" "pkill -TERM -f '[l]m\\.train' || true" ;;
  status) queue describe "$name" --format='value(state.state)' ;;
  delete) queue delete "$name" --force --quiet ;;
  *) usage ;;
esac
