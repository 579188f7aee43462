#!/usr/bin/env bash
# Plain ssh: NODES="node0 node1" deploy/train_ssh.sh --train_file /shared/pairs.csv --output_dir /shared/run
# Starts torchrun on every node and ends all of them when one fails. Run the same command again to resume.
# RANKS: ranks per node (default: its GPUs). PYTHON: the interpreter on the nodes. PORT: of the rendezvous on the first node.
set -euo pipefail
read -r -a nodes <<< "${NODES:?NODES=\"node0 node1\" names the machines; the first one hosts the rendezvous}"
python=${PYTHON:-python3}
port=${PORT:-29500}
ranks=${RANKS:-gpu}
id=$$-$(date +%s)
words=$(printf ' %q' "$@")
started=()
# -tt: the remote torchrun gets SIGHUP when its ssh ends
trap 'kill "${started[@]}" 2>/dev/null || true' EXIT
for node in "${nodes[@]}"; do
  ssh -tt -o BatchMode=yes "$node" "cd $(printf %q "$PWD") && OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} $python -m torch.distributed.run \
    --nnodes ${#nodes[@]} --nproc_per_node $ranks --rdzv_id $id --rdzv_backend c10d --rdzv_endpoint ${nodes[0]}:$port \
    -m tunesmith train$words" < /dev/null > >(sed -u "s/^/$node: /") 2>&1 &
  started+=($!)
done
for _ in "${nodes[@]}"; do
  wait -n  # the first that fails ends this script, and the trap ends the others
done
