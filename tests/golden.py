"""Compare Antiphon with golden folders: `python tests/golden.py DIR...`; exit status 0 only if every case passes.

A folder's kind is known from its files and the names of its weights; dimensions come from its own configuration.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from golden_kinds import audio, causal, code2wav, endtoend, talker, thinker, vision
from golden_kinds.report import Outcome

KINDS = {"llm": thinker, "apm": audio, "vpm": vision, "tts": talker, "flow": code2wav, "causal": causal}
"""By the first part of the names in weights.safetensors."""


def run_folder(folder: Path) -> Iterator[Outcome]:
    """Outcomes of all cases of one folder. Raises: ValueError if it is no golden folder."""
    with torch.inference_mode():
        if (folder / "checkpoint").is_dir():
            yield from endtoend.run(folder)
            return
        weights = folder / "weights.safetensors"
        if not weights.is_file():
            raise ValueError(f"{folder} is no golden folder: neither checkpoint/ nor weights.safetensors is in it")
        with safe_open(weights, framework="pt") as names:
            parts = {name.partition(".")[0] for name in names.keys()}  # noqa: SIM118 - not a mapping
        kinds = [kind for part, kind in KINDS.items() if part in parts]
        if len(kinds) != 1:
            raise ValueError(f"{folder}: weights of {', '.join(sorted(parts))} tell no single kind")
        yield from kinds[0].run(folder)


def main(folders: list[str]) -> int:
    if not folders:
        print(__doc__)
        return 2
    torch.set_num_threads(1)  # the networks are tiny
    num_failed = 0
    for folder in folders:
        try:
            for outcome in run_folder(Path(folder)):
                print(outcome.line(), flush=True)
                num_failed += not outcome.is_pass
        except ValueError as error:
            print(f"FAIL {error}")
            num_failed += 1
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
