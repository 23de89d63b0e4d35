# Speed as ratios measured side by side, and what the released geometry could do at best, on paper.
# About 5 minutes on one core, whatever else the machine does. Pages: results/speed/README.md, results/limits/README.md.
# Run from the root of the repository.
set -e
OMP_NUM_THREADS=1 python -m tools.bench
python -m tools.limits --bandwidth 4800
python -m tools.limits --bandwidth 3350
