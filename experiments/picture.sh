# The smallest picture of the effect: one base, Stage B with the clean target and with a chain target, one step of each.
# About 2 minutes on 2 cores. Page: results/theorem/README.md. Run from the root of the repository.
set -e
python train.py --data modes --toy n_ctx=8 --stage_a_only --corruption mask --max_iters 1200 \
  --out_dir out/picture
python -m beyond.chain --data modes --init_from out/picture --target clean --n_last 2 --corruption mask \
  --learning_rate 3e-3 --batch_size 16 --max_iters 300 --out_dir out/picture_clean
python -m beyond.chain --data modes --init_from out/picture --n_last 2 --beam 4 --corruption mask \
  --learning_rate 3e-3 --batch_size 16 --max_iters 300 --out_dir out/picture_chain
python -m beyond.toys --ckpt out/picture_clean out/picture_chain
python -m tools.toys modes n_ctx=8 --context 1
python sample.py --ckpt out/picture --adapter out/picture_chain --prompt_ids 25,25,25,25 --gen_length 4 --tau_m2t -1 \
  --tau_t2t none --watch
# the same two decodes as records, which the page of `python -m tools.playground` shows side by side
python sample.py --ckpt out/picture --prompt_ids 25,25,25,25 --gen_length 4 --tau_m2t -1 --tau_t2t none --json \
  > out/factorised.json
python sample.py --ckpt out/picture_chain --prompt_ids 25,25,25,25 --gen_length 4 --tau_m2t -1 --tau_t2t none --json \
  > out/joint.json
