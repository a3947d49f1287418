"""Prints a page with its generated parts: python docs/_generate/show.py docs/reference/store.md"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from _generate.parts import filled

if __name__ == "__main__":
    for page in sys.argv[1:]:
        print(filled(Path(page).read_text(encoding="utf-8")))
