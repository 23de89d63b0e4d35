# Quality against forwards on text, and the dependence inside the bundles that the base really commits.
# Under two hours on 2 cores; the figures need matplotlib. Pages: results/text/README.md, results/tc/README.md.
# The tables on those pages had batches of 2, 1,000 steps, and half of the bundles the most confident positions; this is
# the paper's random bundle, 4 rows (its 8 take twice as long) and 600 steps, and three adapters, not four.
# Run from the root of the repository.
set -e
python train.py --data stdlib --stage_a_only --corruption mask --block_length 16 --max_iters 2400 --log_interval 100 \
  --out_dir out/text-base
python -m beyond.chain --target clean --data stdlib --init_from out/text-base --n_last 2 --corruption mask \
  --learning_rate 3e-3 --batch_size 4 --max_iters 600 --eval_rows 16 --log_interval 100 --eval_interval 600 \
  --out_dir out/text-clean
python -m beyond.chain --data stdlib --init_from out/text-base --n_last 2 --corruption mask --learning_rate 3e-3 \
  --batch_size 4 --max_iters 600 --eval_rows 16 --log_interval 100 --eval_interval 600 --out_dir out/text-chain
# the paper's scope: adapters in both stages
python -m beyond.chain --lora all --context clean --data stdlib --init_from out/text-base --n_last 2 \
  --corruption mask --learning_rate 1e-3 --batch_size 4 --max_iters 600 --eval_rows 16 --log_interval 100 \
  --eval_interval 600 --out_dir out/text-chain-all
python -m beyond.text --data stdlib --ckpt out/text-base \
  --adapter out/text-clean out/text-chain out/text-chain-all --plot out/text-curve.svg
python -m beyond.tc --data stdlib --ckpt out/text-base --plot out/text-tc.svg
