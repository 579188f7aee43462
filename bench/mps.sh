# Switches MPS on where there is one; sourced by the scripts that measure on a GPU.
# Small steps of many processes run at the same time under MPS, and by turns without it.
if command -v nvidia-cuda-mps-control > /dev/null; then
    export CUDA_MPS_PIPE_DIRECTORY=${TMPDIR:-/tmp}/bench-mps CUDA_MPS_LOG_DIRECTORY=${TMPDIR:-/tmp}/bench-mps
    mkdir -p "$CUDA_MPS_PIPE_DIRECTORY"
    if timeout 20 nvidia-cuda-mps-control -d && timeout 60 python3 -c "import torch; torch.zeros(1).cuda().item()"; then
        echo "MPS is on"
    else
        (echo quit | timeout 20 nvidia-cuda-mps-control) || true
        unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
        echo "MPS is off"
    fi
fi
