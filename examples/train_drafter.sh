#!/usr/bin/env bash
# Train a drafter for an image model on the model's own samples, then decode with it. No data set is needed.
#   examples/train_drafter.sh                                     # the embedded model
#   MODEL=my-llamagen PROMPTS=prompts.txt STEPS=20000 examples/train_drafter.sh
# Run it again after an interruption: training goes on where it stopped. Several GPUs:
#   LAUNCH="accelerate launch --num_processes 4" examples/train_drafter.sh
set -euo pipefail
model=${MODEL:-shapes-t2i} out=${OUT:-runs/drafter} steps=${STEPS:-2000} batch=${BATCH:-4}
pool=${POOL:-512} held_out=${HELD_OUT:-8} every=${EVERY:-250}
read -ra launch <<< "${LAUNCH:-python}"

"${launch[@]}" -m visacc train drafter --model "$model" ${PROMPTS:+--prompts-file "$PROMPTS"} --out "$out" \
    --steps "$steps" --batch-size "$batch" --pool "$pool" --held-out "$held_out" \
    --eval-every "$every" --save-every "$every" --guided-weight 0.1 --unroll 2

# exact: the same law as plain decoding, in fewer steps the better the drafter is
python -m visacc generate "${PROMPT:-a red circle left of a blue square}" --model "$model" \
    --decoder eagle -O drafter="$out/drafter" --seed 1 --out "$out/picture"
