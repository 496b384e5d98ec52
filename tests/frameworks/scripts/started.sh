#!/bin/sh
# A job as people start it: variables, a folder, and the interpreter at the end.
export TOKENIZERS_PARALLELISM=false
cd "$(dirname "$0")" && "${PYTHON:-python}" plain.py "$@"
