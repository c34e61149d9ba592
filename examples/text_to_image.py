"""Text to image with a fast decoder, and the check that it changed nothing.

    python examples/text_to_image.py "a red circle left of a blue square" -n 4 --out out
    python examples/text_to_image.py "a red bicycle" --model deepseek-community/Janus-Pro-1B --decoder mc-sjd
    python examples/text_to_image.py "three green triangles" --decoder sjd --window 16 --compare

--compare draws the same prompts and seeds with `ar` as well and prints how much was saved, and for how many of the
pictures the codes are the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import visacc


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--model", default="shapes-t2i", help="name, folder, file or hub id")
    parser.add_argument("--decoder", default="mc-sjd", help="see 'visacc list decoders'")
    parser.add_argument("--window", type=int, help="of window decoders; default: the decoder's own")
    parser.add_argument("-n", "--images", type=int, default=1, help="pictures per prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--compare", action="store_true", help="also decode with ar")
    args = parser.parse_args()

    options = {} if args.window is None else {"window": args.window}
    pipe = visacc.load(args.model, decoder=args.decoder, **options)
    out = pipe(args.prompts, num_images_per_prompt=args.images, seed=args.seed)

    args.out.mkdir(parents=True, exist_ok=True)
    for i, image in enumerate(out.images):
        image.save(args.out / f"{i:03d}.png")
    stats = out.stats
    print(
        f"{len(out.images)} pictures in {args.out}: {stats.nfe:.1f} steps for {stats.tokens} tokens, {stats.seconds:.2f} s"
    )

    if args.compare:
        plain = pipe(
            args.prompts,
            num_images_per_prompt=args.images,
            seed=args.seed,
            decoder="ar",
            output_type="codes",
        )
        same = int((plain.codes == out.codes).flatten(1).all(1).sum())
        print(f"ar: {plain.stats.nfe:.1f} steps, {plain.stats.seconds:.2f} s")
        print(f"{same} of {len(out.images)} pictures are the same")


if __name__ == "__main__":
    main()
