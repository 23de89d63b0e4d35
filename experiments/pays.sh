# Does a joint head pay? Against the base, a deeper base, distilled Stage As and the paper's Stage B, on names.
# Five hours on 2 cores. Page: results/pays/README.md. Run from the root of the repository.
set -e
bases=(assets/names out/names-base1 out/names-base2)
small="--data names --corruption mask --batch_size 64 --s_min 2 --s_max 8"
for seed in 0 1 2; do
  base=${bases[$seed]}
  # the base of seed 0 is in assets/
  [ $seed = 0 ] || python -m tools.deeper_base --max_iters 1100 --seed $seed --out_dir $base

  # the joint head, and Stage As that are taught the same chain
  run="--data names --init_from $base --max_iters 1200 --seed $seed"
  lora="--weights lora --lora_r 64 --learning_rate 3e-3"
  python -m beyond.joint_head $run --out_dir out/head-$seed
  python -m beyond.distill $run --own_loss 0 --out_dir out/distilled-alone-$seed
  python -m beyond.distill $run --out_dir out/distilled-$seed
  python -m beyond.distill $run --own_loss 0 $lora --out_dir out/distilled-lora-$seed
  python -m beyond.distill $run $lora --out_dir out/distilled-lora-own-$seed

  # a joint head on the distilled Stage A
  python -m tools.as_checkpoint --ckpt $base --adapter out/distilled-$seed --out out/distilled-base-$seed
  python -m beyond.joint_head --data names --init_from out/distilled-base-$seed --max_iters 1200 --seed $seed \
    --out_dir out/head-on-distilled-$seed

  # more depth without a head
  python -m tools.deeper_base --layers 5 --max_iters 1400 --seed $seed --out_dir out/deep-$seed
  python -m tools.deeper_base --layers 5 --twice --max_iters 1400 --seed $seed --out_dir out/twice-$seed

  # a head of two blocks, the clean target, one ingredient changed
  python -m beyond.joint_head $run --head_layers 2 --out_dir out/head-two-$seed
  python -m beyond.joint_head $run --target clean --out_dir out/head-clean-$seed
  python -m beyond.ingredients $run --change own --n_last 1 --out_dir out/changed-own-$seed
  for change in suffixes singles marker rounds2 rounds4; do
    python -m beyond.ingredients $run --change $change --out_dir out/changed-$change-$seed
  done

  # the paper's Stage B, with its target and with the chain; joint noise; the sampling head
  paper="$small --init_from $base --n_last 2 --learning_rate 3e-3 --max_iters 700 --seed $seed"
  python train.py $paper --context clean --out_dir out/paper-clean-$seed
  python -m beyond.chain $paper --lora all --confident_share 0.75 --out_dir out/paper-chain-$seed
  python -m beyond.noise $paper --confident_share 0.75 --eval_rows 64 --out_dir out/noise-$seed
  python -m beyond.sampling_head --data names --init_from $base --max_iters 3000 --seed $seed \
    --out_dir out/sampling-$seed

  # a base that was trained to edit, and a joint head on it
  python -m tools.deeper_base --corruption random --max_iters 1400 --seed $seed --out_dir out/edit-base-$seed
  python -m beyond.joint_head --data names --init_from out/edit-base-$seed --max_iters 1200 --seed $seed \
    --out_dir out/edit-head-$seed
done

# where a marker tells something: toys whose bundles are a part of the masks
for toy in modes pairs; do
  iters=1500; [ $toy = pairs ] || iters=3000
  python train.py --data $toy --toy n_ctx=8 --stage_a_only --corruption mask --batch_size 64 --max_iters $iters \
    --learning_rate 3e-3 --out_dir out/base-$toy
  for seed in 0 1 2; do
    run="--data $toy --init_from out/base-$toy --max_iters 1500 --confident_share 0 --s_max 3 --seed $seed"
    python -m beyond.joint_head $run --out_dir out/unmarked-$toy-$seed
    python -m beyond.ingredients $run --change marker --out_dir out/marked-$toy-$seed
  done
done

records() {  # file, options of pays.py, then after --: NAME BASE [ADAPTER], once for each seed, where % is the seed
  local file=$1 options=() systems=() seed; shift
  while [ "$1" != -- ]; do options+=("$1"); shift; done; shift
  while [ $# -gt 0 ]; do
    for seed in 0 1 2; do
      base=${2//%/$seed}; [ "$2" != base ] || base=${bases[$seed]}
      systems+=(--system "$1" $base ${3//%/$seed})
    done
    shift 3
  done
  python -m beyond.pays "${options[@]}" "${systems[@]}" --out out/$file.jsonl
}
all="--prompts 1024"
records records $all --against "joint head" -- base base "" "joint head" base out/head-% \
  "Stage A distilled" base out/distilled-% \
  "joint head on the distilled" out/distilled-base-% out/head-on-distilled-% \
  "distilled, chain alone" base out/distilled-alone-% "by LoRA, chain alone" base out/distilled-lora-% \
  "by LoRA, own loss" base out/distilled-lora-own-%
records others $all -- "paper, clean target" base out/paper-clean-% "paper, chain target" base out/paper-chain-% \
  "deeper base" out/deep-% "" "last layer twice" out/twice-% "" "joint head, two blocks" base out/head-two-% \
  "joint head, clean target" base out/head-clean-% own base out/changed-own-% suffixes base out/changed-suffixes-% \
  singles base out/changed-singles-% marker base out/changed-marker-% rounds2 base out/changed-rounds2-% \
  rounds4 base out/changed-rounds4-%
records no-edits $all --keep 0 0.5 0.7 -- base out/edit-base-% "" "joint head" out/edit-base-% out/edit-head-%
records edits $all --keep 0 0.5 0.7 --edits --records out/no-edits.jsonl --against "joint head" -- \
  "base, edits" out/edit-base-% "" "joint head, edits" out/edit-base-% out/edit-head-%

# sampling
draw="--prompts 128 --draws 8 --temperature"
records sampled-base $draw 1 --taus 1 0.3 -1 -- base base ""
records sampled-top-p $draw 1 --taus 1 --top_p 0.8 0.7 -- base base ""
records sampled-colder $draw 0.8 0.65 0.5 --taus 1 -- base base ""
records sampled-by-the-sampling-head $draw 1 --taus -1 --top_p 1 0.8 0.77 0.7 -- "sampling head" base out/sampling-%
records sampled-by-the-joint-head $draw 1 --taus -1 --keep 0.5 0.8 -- "joint head" base out/head-%
records sampled-distilled $draw 1 --taus 1 -1 -- "Stage A distilled" base out/distilled-% \
  "distilled, chain alone" base out/distilled-alone-%
records sampled-noise $draw 1 --taus -1 0.1 0.3 -- "joint noise" base out/noise-%
