# Quality against forwards on text, and the dependence inside the bundles that the base really commits.
# Under three hours on 2 cores; the figures need matplotlib. Pages: results/text/README.md, results/tc/README.md.
# Run from the root of the repository.
set -e
python train.py --data stdlib --stage_a_only --corruption mask --block_length 16 --max_iters 2400 --n_last 2 \
  --log_interval 100 --out_dir out/text-base
run="--data stdlib --init_from out/text-base --batch_size 4 --s_max 16 --max_iters 1000 --eval_rows 16 --eval_interval 500"
python -m beyond.own_blocks $run --n_last 1 --width 384 --log_interval 50 --out_dir out/text-own
python -m beyond.distill $run --n_last 2 --log_interval 50 --out_dir out/text-distilled
python -m beyond.distill $run --n_last 2 --own_loss 0 --log_interval 50 --out_dir out/text-distilled-alone
python -m beyond.text --data stdlib --ckpt out/text-base --adapter out/text-own out/text-distilled \
  out/text-distilled-alone --ours out/text-own --plot out/text-curve.svg
python -m beyond.tc --data stdlib --ckpt out/text-base --draws 16 --plot out/text-tc.svg
