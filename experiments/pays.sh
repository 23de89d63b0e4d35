# Does a joint head pay? Against every free rule, a left-to-right model, distilled Stage As and the paper's Stage B, on
# names, three seeds of everything. Page: results/pays/README.md. Run from the root of the repository.
set -e
for seed in 0 1 2; do
  base=out/base-$seed
  seeded="--seed $seed"

  # the base, and a left-to-right model of the same geometry, text and time
  python -m beyond.names_base $seeded --out_dir $base
  python -m beyond.names_base $seeded --one_by_one 1 --out_dir out/left-to-right-$seed

  # the joint head, and a Stage A that is taught the same chain
  chain="--data names --max_iters 1500 --s_min 8 $seeded"
  python -m beyond.head $chain --init_from $base --out_dir out/joint-$seed
  python -m beyond.distill $chain --init_from $base --out_dir out/distilled-$seed

  # the control: the same masks and steps, all weights, and the clean tokens in place of the chain
  python -m beyond.distill $chain --init_from $base --target clean --own_loss 0 --out_dir out/control-$seed

  # both: a joint head on the distilled Stage A
  python -m beyond.head $chain --init_from out/distilled-$seed --out_dir out/joint-on-distilled-$seed

  # the paper's Stage B, its target the clean tokens
  python train.py --data names --init_from $base --n_last 2 --corruption mask --context clean --batch_size 64 \
    --s_max 8 --learning_rate 1e-3 --max_iters 700 $seeded --out_dir out/paper-$seed
done

# the seeds of each system in the same order
python -m beyond.sweep --prompts 512 --out out/records.jsonl \
  --system base out/base-{0,1,2} \
  --system "joint head" out/joint-{0,1,2} \
  --system distilled out/distilled-{0,1,2} \
  --system "trained on without the chain" out/control-{0,1,2} \
  --system "joint head on the distilled" out/joint-on-distilled-{0,1,2} \
  --system "paper's Stage B" out/paper-{0,1,2} \
  --system "left to right" out/left-to-right-{0,1,2}
python -m beyond.report out/records.jsonl --against "joint head"

# the paper's Stage B with as many steps as the joint head, seed 0
python train.py --data names --init_from out/base-0 --n_last 2 --corruption mask --context clean --batch_size 64 --s_max 8 \
  --learning_rate 1e-3 --max_iters 1500 --seed 0 --out_dir out/paper-long-0
python -m beyond.sweep --prompts 512 --system "paper's Stage B, 1,500 steps" out/paper-long-0 --out out/paper-long.jsonl

# sampling: the base that is shipped, and the left-to-right model of seed 0
sampled() {  # TOP_P..
  python -m beyond.sweep --prompts 48 --temperature 1 --draws 32 --out out/sampling.jsonl --top_p "$@"
}
sampled 1 0.8 0.6 --system base assets/names
sampled 1 0.95 0.9 0.8 0.7 0.6 --system "left to right" out/left-to-right-0
python -m beyond.report out/sampling.jsonl
