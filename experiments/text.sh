# Quality against forwards on text, and the dependence inside the bundles that a base really commits: three seeds.
# Hours on 2 cores. Pages: results/text/README.md, results/tc/README.md.
# Run from the root of the repository. The head in the order of sureness is beyond.heads of 13a34dc.
set -e
for seed in 0 1 2; do
  base=out/text-base-$seed
  python train.py --data stdlib --stage_a_only --corruption mask --block_length 16 --max_iters 2400 --n_last 2 \
    --seed $seed --out_dir $base
  run="--data stdlib --read_in blocks --beam 1 --batch_size 4 --max_iters 1000 --eval_interval 500"
  run="$run --init_from $base --seed $seed"
  python -m beyond.head $run --out_dir out/text-head-$seed
  python -m beyond.distill $run --out_dir out/text-distilled-$seed
  python -m beyond.chain --data stdlib --batch_size 4 --max_iters 1000 --eval_interval 500 --init_from $base --seed $seed \
    --n_last 2 --corruption mask --lora_r 128 --s_min 16 --s_max 16 --learning_rate 2e-3 --out_dir out/text-chain-$seed
done
python -m beyond.sweep --data stdlib --prompts 512 --out out/text.jsonl --system base out/text-base-{0,1,2} \
  --system head out/text-head-{0,1,2} --system distilled out/text-distilled-{0,1,2} \
  --system "paper's Stage B, chain" out/text-chain-{0,1,2}
python -m beyond.report out/text.jsonl --against head
for seed in 0 1 2; do
  python -m beyond.tc --data stdlib --ckpt out/text-base-$seed --draws 16
done
