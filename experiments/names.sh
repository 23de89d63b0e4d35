# The base of names, the paper's adapter and alpha's on it, and what each decoder writes for 512 held-out beginnings.
# About an hour and a half on one thread. Page: results/names/README.md, results/paper_tables/README.md.
# Run from the root of the repository. For seed 1 the first three commands make what lies in assets/names.
set -e
seed=${SEED:-1}
out=${OUT:-out/names-$seed}
records=${RECORDS:-$out/records.jsonl}
python train.py --init_from scratch --stage_a_only --seed $seed --out_dir $out/base
python train.py --n_last 3 --seed $seed --init_from $out/base --out_dir $out/paper
python train.py --n_last 3 --alpha 0.5 --seed $seed --init_from $out/paper --out_dir $out/alpha
bash experiments/names_measure.sh $out/base $out/paper $out/alpha $records
python evaluate.py --ckpt $out/paper $out/alpha --prompts 512
python -m llada.ablation --ckpt $out/paper --prompts 512
