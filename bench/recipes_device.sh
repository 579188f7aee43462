#!/usr/bin/env bash
# bench/recipes.py on a machine with one GPU, many processes at a time:
#   bash bench/recipes_device.sh --data FOLDER --jobs 14 --warm --seconds 200 --output OUT.json ...
set -euo pipefail
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
source bench/mps.sh
python3 bench/recipes.py "$@"
