# Clean against chain targets on six toys: a base for each toy and seed, then adapters in Stage B alone; three seeds.
# The paper's scope (adapters in both stages) on five toys, seed 0. 67 small models, 60 to 90 minutes on 2 cores.
# Page: results/theorem/README.md. Run from the root of the repository.
set -e
for seed in 0 1 2; do
  # bases: Stage A alone; `modes` takes longer to learn than the others
  base="--toy n_ctx=8 --stage_a_only --corruption mask --batch_size 64 --learning_rate 3e-3 --eval_interval 1000"
  python train.py --data modes $base --max_iters 4000 --seed $seed --out_dir out/base-modes-$seed
  for task in copy pairs mixed gaussian permutation; do
    python train.py --data $task $base --max_iters 2000 --seed $seed --out_dir out/base-$task-$seed
  done

  # the paper's target
  run="--lora_in stage_b --corruption mask --bundle drawn --learning_rate 3e-3 --batch_size 16 --max_iters 600"
  run="$run --seed $seed"
  for task in modes copy pairs mixed gaussian permutation; do
    python train.py --data $task --init_from out/base-$task-$seed --n_last 2 $run --out_dir out/$task-$seed-clean
  done

  # the chain; `gaussian` needs a wider beam to find its mode, `pairs` a third layer
  for task in modes copy pairs mixed permutation; do
    python -m beyond.chain --data $task --init_from out/base-$task-$seed --n_last 2 --beam 4 --tie 0.1 $run \
      --out_dir out/$task-$seed-chain
  done
  python -m beyond.chain --data gaussian --init_from out/base-gaussian-$seed --n_last 2 --beam 8 --tie 0.1 $run \
    --out_dir out/gaussian-$seed-chain
  python -m beyond.chain --data pairs --init_from out/base-pairs-$seed --n_last 3 --beam 4 --tie 0.1 $run \
    --out_dir out/pairs-$seed-chain3
done

# the paper's scope: adapters in every layer, in both stages
run="--n_last 2 --lora_in both --context clean --corruption mask --bundle drawn --learning_rate 1e-3 --batch_size 16"
run="$run --max_iters 600"
for task in modes copy pairs mixed permutation; do
  python train.py --data $task --init_from out/base-$task-0 $run --out_dir out/$task-0-clean-all
  python -m beyond.chain --data $task --init_from out/base-$task-0 --beam 4 --tie 0.1 $run --out_dir out/$task-0-chain-all
done

# Stage A, Stage B and the chain of each adapter, in one step
for adapter in out/*-[012]-clean out/*-[012]-chain out/pairs-[012]-chain3 out/*-0-clean-all out/*-0-chain-all; do
  echo "$adapter"
  python evaluate.py --ckpt "$adapter"
done
