#!/usr/bin/env bash
# Makes the bank of bench/diagnose_runs.py on a machine with one GPU that has no ../shared:
#   [BANK_MODELS=L6] bash bench/diagnose_device.sh FOLDER OUT SECONDS PROCESSES [options of diagnose_runs.py, such as --drawn]
# FOLDER is what `python bench/diagnose_pack.py --pack FOLDER` wrote; OUT gets at most six files.
set -euo pipefail
folder=$1 out=$2 seconds=$3 processes=$4 shared=${TMPDIR:-/tmp}/bank_shared
shift 4
export SHARED_DIR=$shared OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1

source bench/mps.sh
python3 bench/diagnose_pack.py --unpack "$folder" "$shared"
python3 bench/diagnose_runs.py --output "$out" --make --seconds "$seconds" --processes "$processes" --merge 6 "$@"
ls -l "$out"
