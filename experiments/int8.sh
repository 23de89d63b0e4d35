# What int8 changes of trained models: names with and without the joint head, an unfinished text base, the recorded runs.
# Some 20 minutes on one core. Page: results/int8/README.md, whose names were written by the base shipped until 4d83d3c.
# Run from the root of the repository.
set -e
python -m released.int8 --src assets/names --out weights/names-int8
python -m released.int8_quality --ckpt assets/names --int8 weights/names-int8 --prompts 48
python -m released.int8_quality --ckpt assets/names --int8 weights/names-int8 --prompts 48 --adapter assets/names/joint

python train.py --data stdlib --stage_a_only --corruption mask --block_length 16 --n_last 2 --max_iters 400 \
  --stop_at 163 --log_interval 100 --out_dir out/text-int8
python -m released.int8 --src out/text-int8 --out weights/text-int8
python -m released.int8_quality --ckpt out/text-int8 --int8 weights/text-int8 --data stdlib --prompts 8

python -m released.int8 --src tests/data/golden_a --out weights/golden-int8
python -m released.int8_quality --golden tests/data/golden_a --int8 weights/golden-int8
