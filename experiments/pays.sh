# Does a Stage B pay? Own blocks against the base, a deeper base, distilled Stage As and the paper's Stage B, on names.
# Three to four hours on 2 cores. Page: results/pays/README.md. Run from the root of the repository.
set -e
bases=(assets/names out/names-base1 out/names-base2)
small="--data names --corruption mask --batch_size 64 --s_min 2 --s_max 8"
geometry() {  # the page's bases are of 1ecf150, with 4 experts of 128 (the preset has 8 of 64 now); $1: layers
  python -c "
from dataclasses import replace
import checkpoint, train
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
  as_base ${bases[$seed]} out/distilled-$seed out/distilled-base-$seed
  python -m beyond.own_blocks --data names --init_from out/distilled-base-$seed --n_last 1 --max_iters 1200 --seed $seed \
    --out_dir out/own-on-distilled-$seed
done

# one seed each: a deeper base, two blocks, the clean target, the paper's Stage B, one ingredient changed, drafts
geometry 5 --max_iters 1400 --out_dir out/deep-0
run="--data names --init_from assets/names --max_iters 1200"
python -m beyond.own_blocks $run --n_last 2 --out_dir out/own-two
python -m beyond.own_blocks $run --n_last 1 --target clean --out_dir out/own-clean
python train.py $small --init_from assets/names --n_last 2 --context clean --learning_rate 3e-3 --max_iters 700 \
  --out_dir out/paper-clean
python -m beyond.chain $small --init_from assets/names --n_last 2 --lora all --confident_share 0.75 \
  --learning_rate 3e-3 --max_iters 700 --out_dir out/paper-chain
for change in own marked suffixes singles marker rounds2 rounds4; do
  python -m beyond.ablation $run --n_last 1 --change $change --out_dir out/changed-$change
done
python -m beyond.drafts --data names --init_from assets/names --n_last 1 --max_iters 3000 --out_dir out/drafts

# a base that was trained to edit, and own blocks on it
geometry 4 --corruption random --max_iters 1400 --out_dir out/edit-base
python -m beyond.own_blocks --data names --init_from out/edit-base --n_last 1 --max_iters 1200 --out_dir out/edit-own

systems=()
for seed in 0 1 2; do
  systems+=(--system base ${bases[$seed]} --system ours ${bases[$seed]} out/own-$seed)
  systems+=(--system "Stage A distilled" ${bases[$seed]} out/distilled-$seed)
  systems+=(--system "distilled, chain alone" ${bases[$seed]} out/distilled-alone-$seed)
  systems+=(--system "distilled by LoRA" ${bases[$seed]} out/distilled-lora-$seed)
  systems+=(--system "ours on the distilled" out/distilled-base-$seed out/own-on-distilled-$seed)
done
python -m beyond.pays --prompts 1024 "${systems[@]}" --ours ours --out out/pays.jsonl
systems=(--system base assets/names --system ours assets/names out/own-0 --system "two blocks" assets/names out/own-two)
systems+=(--system "clean target" assets/names out/own-clean --system "paper, clean target" assets/names out/paper-clean)
systems+=(--system "paper, chain target" assets/names out/paper-chain --system "deeper base" out/deep-0)
for change in own marked suffixes singles marker rounds2 rounds4; do
  systems+=(--system $change assets/names out/changed-$change)
done
python -m beyond.pays --prompts 1024 "${systems[@]}" --ours ours --out out/pays-one-seed.jsonl
python -m beyond.pays --prompts 1024 --keep 0 0.5 0.7 --system base out/edit-base --system ours out/edit-base out/edit-own \
  --out out/pays-no-edits.jsonl
python -m beyond.pays --prompts 1024 --keep 0 0.5 0.7 --edits --system "base, edits" out/edit-base \
  --system "ours, edits" out/edit-base out/edit-own --records out/pays-no-edits.jsonl --ours ours --out out/pays-edits.jsonl

# sampling
draw="--prompts 128 --draws 8 --temperature"
python -m beyond.pays $draw 1 --taus 1 0.3 -1 --system base assets/names --out out/sampled-base.jsonl
python -m beyond.pays $draw 1 --taus 1 --top_p 0.8 0.7 --system base assets/names --out out/sampled-top-p.jsonl
python -m beyond.pays $draw 0.8 0.65 0.5 --taus 1 --system base assets/names --out out/sampled-colder.jsonl
python -m beyond.pays $draw 1 --taus -1 --top_p 1 0.8 0.7 --system drafts assets/names out/drafts --out out/sampled-drafts.jsonl
python -m beyond.pays $draw 1 --taus -1 --keep 0.5 0.8 --system ours assets/names out/own-0 --out out/sampled-ours.jsonl
python -m beyond.pays $draw 1 --taus 1 -1 --system "Stage A distilled" assets/names out/distilled-0 \
  --system "distilled, chain alone" assets/names out/distilled-alone-0 --out out/sampled-distilled.jsonl
