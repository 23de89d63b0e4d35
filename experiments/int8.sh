# What int8 changes of trained models, and what int4 would: names with and without the joint head, a text base, the
# recorded runs. Half an hour on one core, most of it the training of the text base. Page: results/int8/README.md.
# Run from the root of the repository.
set -e
python -m released.int8 --src assets/names --out weights/names-int8
python -m released.int8_quality --ckpt assets/names --int8 weights/names-int8 --int4
python -m released.int8_quality --ckpt assets/names --int8 weights/names-int8 --int4 --adapter assets/names/joint

python train.py --data stdlib --stage_a_only --corruption mask --block_length 16 --n_last 2 --max_iters 2400 \
  --out_dir out/text-int8
python -m released.int8 --src out/text-int8 --out weights/text-int8
python -m released.int8_quality --ckpt out/text-int8 --int8 weights/text-int8 --data stdlib --prompts 64 --int4

python -m released.int8 --src tests/data/golden_a --out weights/golden-int8
python -m released.int8_quality --golden tests/data/golden_a --int8 weights/golden-int8
