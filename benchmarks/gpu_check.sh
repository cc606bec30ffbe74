#!/usr/bin/env bash
# Everything that takes a GPU, in one command and under 9 minutes: see gpu_check.py.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" benchmarks/gpu_check.py "$@"
