# Speed: the cache against none as ratios, then the time that a name takes beside its forwards.
# About 5 minutes on one core, whatever else the machine does. Page: results/speed/README.md.
# Run from the root of the repository.
set -e
export OMP_NUM_THREADS=1
python -m tools.bench
python -m tools.bench --names assets/names/paper assets/names/causal
