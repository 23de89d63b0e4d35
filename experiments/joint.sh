# Clean against chain targets on six toys: a base for each toy and seed, then adapters in Stage B alone; three seeds.
# The paper's scope (adapters in both stages) on two toys, seed 0. 61 small models, 60 to 90 minutes on 2 cores.
# Page: results/theorem/README.md. Run from the root of the repository.
set -e
for seed in 0 1 2; do
  # bases: Stage A alone; `modes` takes longer to learn than the others
  python train.py --data modes --toy n_ctx=8 --stage_a_only --corruption mask --batch_size 64 --max_iters 4000 \
    --learning_rate 3e-3 --seed $seed --eval_interval 1000 --out_dir out/base-modes-$seed
  for task in copy pairs mixed gaussian permutation; do
    python train.py --data $task --toy n_ctx=8 --stage_a_only --corruption mask --batch_size 64 --max_iters 2000 \
      --learning_rate 3e-3 --seed $seed --eval_interval 1000 --out_dir out/base-$task-$seed
  done
  # the paper's target
  for task in modes copy pairs mixed gaussian permutation; do
    python -m beyond.chain --target clean --data $task --init_from out/base-$task-$seed --n_last 2 --corruption mask \
      --learning_rate 3e-3 --batch_size 16 --max_iters 600 --seed $seed --out_dir out/$task-$seed-clean
  done
  # the chain; `gaussian` needs a wider beam to find its mode, `pairs` a third layer
  for task in modes copy pairs mixed permutation; do
    python -m beyond.chain --data $task --init_from out/base-$task-$seed --n_last 2 --beam 4 --corruption mask \
      --learning_rate 3e-3 --batch_size 16 --max_iters 600 --seed $seed --out_dir out/$task-$seed-chain
  done
  python -m beyond.chain --data gaussian --init_from out/base-gaussian-$seed --n_last 2 --beam 8 --corruption mask \
    --learning_rate 3e-3 --batch_size 16 --max_iters 600 --seed $seed --out_dir out/gaussian-$seed-chain
  python -m beyond.chain --data pairs --init_from out/base-pairs-$seed --n_last 3 --beam 4 --corruption mask \
    --learning_rate 3e-3 --batch_size 16 --max_iters 600 --seed $seed --out_dir out/pairs-$seed-chain3
done

# the paper's scope: adapters in every layer, in both stages
for task in modes pairs; do
  python -m beyond.chain --target clean --lora all --context clean --data $task --init_from out/base-$task-0 \
    --n_last 2 --corruption mask --learning_rate 1e-3 --batch_size 16 --max_iters 600 --out_dir out/$task-0-clean-all
  python -m beyond.chain --beam 4 --lora all --context clean --data $task --init_from out/base-$task-0 --n_last 2 \
    --corruption mask --learning_rate 1e-3 --batch_size 16 --max_iters 600 --out_dir out/$task-0-chain-all
done

# Stage A, Stage B and the chain of each adapter, in one step
for adapter in out/*-[012]-clean out/*-[012]-chain out/pairs-[012]-chain3 out/*-0-clean-all out/*-0-chain-all; do
  echo "$adapter"
  python evaluate.py --ckpt "$adapter"
done
