#!/usr/bin/env bash
# Makes the bank of bench/diagnose_runs.py on a machine with one GPU that has no ../shared:
#   [GROUP=fresh] [FOLLOW=1] [CAUSES=auto:12,few_rows:8] bash bench/diagnose_device.sh FOLDER OUT SECONDS PROCESSES
# FOLDER is what `python bench/diagnose_pack.py --pack FOLDER` wrote; OUT gets at most six files.
set -euo pipefail
folder=$1 out=$2 seconds=${3:-300} processes=${4:-14} shared=${TMPDIR:-/tmp}/bank_shared
export SHARED_DIR=$shared OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1

source bench/mps.sh
python3 bench/diagnose_pack.py --unpack "$folder" "$shared"
python3 bench/diagnose_runs.py --output "$out" --make --seconds "$seconds" --processes "$processes" --follow "${FOLLOW:-0.5}" ${GROUP:+--group "$GROUP"} ${CAUSES:+--causes "$CAUSES"} --merge 6
ls -l "$out"
