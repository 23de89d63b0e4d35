# Does a Stage B pay? Own blocks against the base, a deeper base, distilled Stage As and the paper's Stage B, on names.
# Five hours on 2 cores. Page: results/pays/README.md. Run from the root of the repository.
set -e
bases=(assets/names out/names-base1 out/names-base2)
small="--data names --corruption mask --batch_size 64 --s_min 2 --s_max 8"
geometry() {  # the page's bases are of 1ecf150, with 4 experts of 128 (the preset has 8 of 64 now); $1: layers
  python -c "
import os
from dataclasses import replace
import checkpoint, train
from model import Model

class Twice(Model):
    def __init__(self, cfg):
        super().__init__(cfg)
        last, again = self.layers[-2:]  # the last layer is the one before it once more, the same weights
        again.norm_1, again.norm_2, again.mlp = last.norm_1, last.norm_2, last.mlp
        for part in ('qkv', 'q_norm', 'k_norm', 'proj'):
            setattr(again.attn, part, getattr(last.attn, part))
    def state_dict(self, *args, **kwargs):  # a file holds every layer's own copy
        return {name: t.clone() for name, t in super().state_dict(*args, **kwargs).items()}

checkpoint.Model = Twice if 'TWICE' in os.environ else Model
checkpoint.PRESETS['names'] = replace(checkpoint.PRESETS['names'], n_layer=$1, n_expert=4, d_expert=128)
train.main()" --stage_a_only --n_last 2 --batch_size 256 "${@:2}"
}
as_base() {  # a distilled Stage A as a checkpoint of its own: base, adapter, folder
  python -c "
import pathlib, shutil, sys, torch
from checkpoint import load_model, save_model
base, adapter, out = map(pathlib.Path, sys.argv[1:])
out.mkdir()
save_model(load_model(base, 'cpu', torch.float32, adapter), out)
for name in ('tokenizer.json', 'names.json'): shutil.copy(base / name, out)" "$@"
}
for seed in 0 1 2; do
  [ $seed = 0 ] || geometry 4 --max_iters 1100 --seed $seed --out_dir ${bases[$seed]}
  run="--data names --init_from ${bases[$seed]} --max_iters 1200 --seed $seed"
  python -m beyond.own_blocks $run --n_last 1 --out_dir out/own-$seed
  python -m beyond.distill $run --n_last 2 --own_loss 0 --out_dir out/distilled-alone-$seed
  python -m beyond.distill $run --n_last 2 --out_dir out/distilled-$seed
  python -m beyond.distill $run --n_last 2 --own_loss 0 --weights lora --lora_r 64 --learning_rate 3e-3 \
    --out_dir out/distilled-lora-$seed
  python -m beyond.distill $run --n_last 2 --weights lora --lora_r 64 --learning_rate 3e-3 --out_dir out/distilled-lora-own-$seed
  as_base ${bases[$seed]} out/distilled-$seed out/distilled-base-$seed
  python -m beyond.own_blocks --data names --init_from out/distilled-base-$seed --n_last 1 --max_iters 1200 --seed $seed \
    --out_dir out/own-on-distilled-$seed

  # more depth, two blocks, the clean target, the paper's Stage B, one ingredient changed, drafts, joint noise
  geometry 5 --max_iters 1400 --seed $seed --out_dir out/deep-$seed
  TWICE=1 geometry 5 --max_iters 1400 --seed $seed --out_dir out/twice-$seed
  python -m beyond.own_blocks $run --n_last 2 --out_dir out/own-two-$seed
  python -m beyond.own_blocks $run --n_last 1 --target clean --out_dir out/own-clean-$seed
  paper="$small --init_from ${bases[$seed]} --n_last 2 --learning_rate 3e-3 --max_iters 700 --seed $seed"
  python train.py $paper --context clean --out_dir out/paper-clean-$seed
  python -m beyond.chain $paper --lora all --confident_share 0.75 --out_dir out/paper-chain-$seed
  for change in own suffixes singles marker rounds2 rounds4; do
    python -m beyond.ablation $run --n_last 1 --change $change --out_dir out/changed-$change-$seed
  done
  python -m beyond.drafts --data names --init_from ${bases[$seed]} --n_last 1 --max_iters 3000 --seed $seed --out_dir out/drafts-$seed
  python -m beyond.noise $paper --confident_share 0.75 --eval_rows 64 --out_dir out/noise-$seed

  # a base that was trained to edit, and own blocks on it
  geometry 4 --corruption random --max_iters 1400 --seed $seed --out_dir out/edit-base-$seed
  python -m beyond.own_blocks --data names --init_from out/edit-base-$seed --n_last 1 --max_iters 1200 --seed $seed \
    --out_dir out/edit-own-$seed
done

# where a marker tells something: toys whose bundles are a part of the masks
for toy in modes pairs; do
  iters=1500; [ $toy = pairs ] || iters=3000
  python train.py --data $toy --toy n_ctx=8 --stage_a_only --corruption mask --batch_size 64 --max_iters $iters \
    --learning_rate 3e-3 --out_dir out/base-$toy
  for seed in 0 1 2; do
    run="--data $toy --init_from out/base-$toy --n_last 1 --max_iters 1500 --confident_share 0 --s_max 3 --seed $seed"
    python -m beyond.own_blocks $run --out_dir out/unmarked-$toy-$seed
    python -m beyond.ablation $run --change marker --out_dir out/marked-$toy-$seed
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
records records $all --ours ours -- base base "" ours base out/own-% "Stage A distilled" base out/distilled-% \
  "ours on the distilled" out/distilled-base-% out/own-on-distilled-% "distilled, chain alone" base out/distilled-alone-% \
  "by LoRA, chain alone" base out/distilled-lora-% "by LoRA, own loss" base out/distilled-lora-own-%
records others $all -- "paper, clean target" base out/paper-clean-% "paper, chain target" base out/paper-chain-% \
  "deeper base" out/deep-% "" "last layer twice" out/twice-% "" "ours, two blocks" base out/own-two-% \
  "ours, clean target" base out/own-clean-% own base out/changed-own-% suffixes base out/changed-suffixes-% \
  singles base out/changed-singles-% marker base out/changed-marker-% rounds2 base out/changed-rounds2-% \
  rounds4 base out/changed-rounds4-%
records no-edits $all --keep 0 0.5 0.7 -- base out/edit-base-% "" ours out/edit-base-% out/edit-own-%
records edits $all --keep 0 0.5 0.7 --edits --records out/no-edits.jsonl --ours ours -- \
  "base, edits" out/edit-base-% "" "ours, edits" out/edit-base-% out/edit-own-%

# sampling
draw="--prompts 128 --draws 8 --temperature"
records sampled-base $draw 1 --taus 1 0.3 -1 -- base base ""
records sampled-top-p $draw 1 --taus 1 --top_p 0.8 0.7 -- base base ""
records sampled-colder $draw 0.8 0.65 0.5 --taus 1 -- base base ""
records sampled-drafts $draw 1 --taus -1 --top_p 1 0.8 0.77 0.7 -- drafts base out/drafts-%
records sampled-ours $draw 1 --taus -1 --keep 0.5 0.8 -- ours base out/own-%
records sampled-distilled $draw 1 --taus 1 -1 -- "Stage A distilled" base out/distilled-% \
  "distilled, chain alone" base out/distilled-alone-%
records sampled-noise $draw 1 --taus -1 0.1 0.3 -- "joint noise" base out/noise-%
