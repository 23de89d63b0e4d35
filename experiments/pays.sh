# Does a head pay? Against every free rule, a left-to-right model, Stage As taught the same, and the paper's Stage B with
# its own target and with the chain, on names. Page: results/pays/README.md. Run from the root of the repository.
set -e
for seed in 0 1 2; do
  base=out/base-$seed
  run="--data names --init_from $base --seed $seed"

  # the base, and a left-to-right model of the same geometry, text and time
  python -m beyond.names_base --seed $seed --out_dir $base
  python -m beyond.names_base --seed $seed --one_by_one 1 --out_dir out/left-to-right-$seed

  # the head, and a Stage A that is taught the same chain at the same masks
  python -m beyond.head $run --out_dir out/head-$seed
  python -m beyond.distill $run --out_dir out/distilled-$seed

  # the paper's Stage B: its own target, and the same chain as the head, with LoRA of a rank that can learn it
  python train.py $run --n_last 3 --corruption mask --context clean --s_max 8 --learning_rate 1e-3 --max_iters 700 \
    --out_dir out/paper-$seed
  python -m beyond.chain $run --n_last 3 --corruption mask --lora_r 128 --beam 4 --read_in ones --s_min 8 --s_max 8 \
    --learning_rate 2e-3 --max_iters 1500 --out_dir out/chain-$seed
  python -m beyond.chain $run --n_last 2 --corruption mask --lora_r 128 --beam 4 --read_in ones --s_min 8 --s_max 8 \
    --learning_rate 2e-3 --max_iters 1500 --out_dir out/chain-2-$seed
done

# is it the chain or the weights? the same with the paper's target
run="--data names --init_from out/base-1 --seed 1"
stage_b="$run --corruption mask --lora_r 128 --s_min 8 --s_max 8 --learning_rate 2e-3 --max_iters 1500"
python -m beyond.chain $stage_b --n_last 3 --target clean --out_dir out/clean-1
python evaluate.py --ckpt out/clean-1

# learning rates of head and taught Stage A, on a base of the tables and on one that no table uses
python -m beyond.names_base --seed 3 --out_dir out/base-3
for seed in 1 3; do
  run="--data names --init_from out/base-$seed --seed $seed"
  for rate in 2.5e-3 5e-3 1e-2; do python -m beyond.head $run --learning_rate $rate --out_dir out/head-$rate-$seed; done
  for rate in 5e-4 1e-3 2e-3 4e-3; do python -m beyond.distill $run --learning_rate $rate --out_dir out/distilled-$rate-$seed; done
done

# on the fourth base twice as many steps
run="--data names --init_from out/base-3 --seed 3 --max_iters 3000"
python -m beyond.head $run --out_dir out/head-3000-3
python -m beyond.distill $run --out_dir out/distilled-3000-3

# learning rates of the paper's Stage B
run="--data names --init_from out/base-1 --seed 1"
for rate in 1e-3 4e-3; do
  python -m beyond.chain $stage_b --n_last 3 --beam 4 --read_in ones --learning_rate $rate --out_dir out/chain-$rate-1
done
for rate in 3e-4 3e-3; do
  python train.py $run --n_last 3 --corruption mask --context clean --s_max 8 --learning_rate $rate --max_iters 700 \
    --out_dir out/paper-$rate-1
done
for ckpt in out/base-{0,2} out/{head,distilled}-*-{1,3} out/chain{,-1e-3,-4e-3}-1 out/paper-3e-{3,4}-1; do
  python evaluate.py --ckpt $ckpt --prompts 512 --json
done

# the seeds of each system in the same order
python -m beyond.sweep --prompts 256 --out out/records.jsonl \
  --system base out/base-{0,1,2} \
  --system head out/head-{0,1,2} \
  --system distilled out/distilled-{0,1,2} \
  --system "paper's Stage B" out/paper-{0,1,2} \
  --system "paper's Stage B, chain" out/chain-{0,1,2} \
  --system "paper's Stage B, chain, n = 2" out/chain-2-{0,1,2} \
  --system "left to right" out/left-to-right-{0,1,2}
python -m beyond.report out/records.jsonl --against head --prices beyond/prices.json

# draws: the base that is shipped, and a head with the clean target
python -m beyond.head --init_from assets/names --target clean --out_dir out/draws
python -m beyond.sweep --prompts 48 --temperature 1 --top_p 0.8 --draws 16 --out out/sampling.jsonl \
  --system base assets/names --system head out/draws --system "left to right" out/left-to-right-1
python -m beyond.report out/sampling.jsonl
