#!/bin/bash
#SBATCH --nodes=1 --gpus=4 --cpus-per-gpu=8 --mem-per-gpu=40G --time=2:00:00
#SBATCH --job-name="llm tune"
export HF_HOME=$SCRATCH/hf
accelerate launch --multi_gpu --num_processes 4 --num_machines=1 --mixed_precision bf16 \
  --config_file cfg.yaml --main_process_port 29501 finetune.py --model gpt2 \
  --output_dir ${OUT:-out}
