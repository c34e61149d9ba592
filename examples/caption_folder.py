"""Caption every picture of a folder with a vision-language model, several tokens a step.

    python examples/caption_folder.py photos --model HuggingFaceTB/SmolVLM-256M-Instruct --out captions.jsonl
    python examples/caption_folder.py photos --model llava-hf/llava-1.5-7b-hf --speculator runs/msd/drafter

One JSON object a line; run again after an interruption and only the missing pictures are captioned. A picture that
cannot be read becomes a line with "error", the others go on. The default speculator, `ngram`, needs no training.
The text is what `model.generate` writes (see docs/speculators/overview.md for what is exact).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from visacc.speculate.pipeline import CaptionPipeline

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", required=True, help="hub id or folder of a vision-language model")
    parser.add_argument("--speculator", default="ngram", help="ngram, a drafter's folder, or none")
    parser.add_argument("--prompt", default="Describe the image.")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("captions.jsonl"))
    args = parser.parse_args()

    pictures = sorted(p for p in args.folder.rglob("*") if p.suffix.lower() in SUFFIXES)
    if not pictures:
        parser.error(f"no pictures in {args.folder} (looked for {', '.join(sorted(SUFFIXES))})")
    done = set()
    if args.out.exists():
        rows = map(json.loads, args.out.read_text(encoding="utf-8").splitlines())
        done = {row["image"] for row in rows if "text" in row}
    left = [p for p in pictures if str(p) not in done]
    print(f"{len(pictures)} pictures, {len(left)} to do")

    pipeline = CaptionPipeline(args.model, speculator=None if args.speculator == "none" else args.speculator)
    tokens = steps = 0
    with args.out.open("a", encoding="utf-8") as sink:
        for row in pipeline.iterate(
            left, args.prompt, batch_size=args.batch_size, max_new_tokens=args.max_new_tokens
        ):
            sink.write(json.dumps(row.to_dict(), ensure_ascii=False) + "\n")
            sink.flush()
            tokens, steps = tokens + max(row.tokens - 1, 0), steps + row.steps
    if steps:
        print(f"{tokens / steps:.2f} tokens per step of the model")


if __name__ == "__main__":
    main()
