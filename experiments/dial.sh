# Seven noisy copies from independent to certain: each decoder's error against total correlation.
# About 10 minutes on 2 cores; the figure needs matplotlib. Page: results/dial/README.md.
# Run from the root of the repository.
set -e
for eps in 0.02 0.05 0.1 0.2 0.4 0.7 1.0; do
  python train.py --data copy --toy eps=$eps n_ctx=8 --n_last 2 --corruption mask --max_iters 800 --batch_size 64 \
    --eval_interval 50 --out_dir out/dial-$eps
done
python -m tools.plots dial --data copy --ckpt out/dial-0.02 out/dial-0.05 out/dial-0.1 out/dial-0.2 out/dial-0.4 \
  out/dial-0.7 out/dial-1.0 --out out/dial.svg
