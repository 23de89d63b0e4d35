# Speed as ratios measured side by side.
# About 5 minutes on one core, whatever else the machine does. Page: results/speed/README.md.
# Run from the root of the repository.
set -e
OMP_NUM_THREADS=1 python -m tools.bench
