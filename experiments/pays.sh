# Does a Stage B pay? Own blocks against the base, a distilled Stage A and the paper's Stage B, on names, three seeds.
# About two hours on 2 cores. Page: results/pays/README.md. Run from the root of the repository.
set -e
bases=(assets/names out/names-base1 out/names-base2)
small="--data names --corruption mask --batch_size 64 --s_min 2 --s_max 8"
for seed in 1 2; do  # the page's were of 1ecf150, with 4 experts of 128; the preset has 8 of 64 now
  python train.py --stage_a_only --n_last 2 --max_iters 1100 --seed $seed --out_dir ${bases[$seed]}
done
for seed in 0 1 2; do
  python -m beyond.own_blocks --data names --init_from ${bases[$seed]} --n_last 1 --max_iters 1200 --seed $seed \
    --out_dir out/own-$seed
  python -m beyond.distill --data names --init_from ${bases[$seed]} --n_last 2 --max_iters 700 --seed $seed \
    --out_dir out/distilled-$seed
  python -m beyond.distill --data names --init_from ${bases[$seed]} --n_last 2 --max_iters 700 --seed $seed --own_loss 0 \
    --out_dir out/distilled-alone-$seed
done
# one seed each: two blocks, the clean target, the paper's Stage B with both targets
python -m beyond.own_blocks --data names --init_from assets/names --n_last 2 --max_iters 1200 --out_dir out/own-two
python -m beyond.own_blocks --data names --init_from assets/names --n_last 1 --max_iters 1200 --target clean \
  --out_dir out/own-clean
python train.py $small --init_from assets/names --n_last 2 --context clean --learning_rate 3e-3 --max_iters 700 \
  --out_dir out/paper-clean
python -m beyond.chain $small --init_from assets/names --n_last 2 --lora all --confident_share 0.75 \
  --learning_rate 3e-3 --max_iters 700 --out_dir out/paper-chain
systems=()
for seed in 0 1 2; do
  systems+=(--system base ${bases[$seed]} --system ours ${bases[$seed]} out/own-$seed)
  systems+=(--system "Stage A distilled" ${bases[$seed]} out/distilled-$seed)
  systems+=(--system "distilled, chain alone" ${bases[$seed]} out/distilled-alone-$seed)
done
python -m beyond.pays "${systems[@]}" --system "ours, two blocks" assets/names out/own-two \
  --system "ours, clean target" assets/names out/own-clean \
  --system "paper, clean target" assets/names out/paper-clean --system "paper, chain target" assets/names out/paper-chain \
  --ours ours --out out/pays.jsonl
