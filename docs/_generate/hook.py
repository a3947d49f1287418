"""The mkdocs hook: fills generated parts into pages, and shows files of the repository that live outside docs/.

A page asks for a generated part with the line `<!-- generated: NAME -->`. `parts.py` says which function writes it.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from _generate.parts import filled  # noqa: E402

# Files outside docs/ that the site shows, and where. Links to them from any page keep working on both sides.
OUTSIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "README.md": "index.md",
    "benchmarks/README.md": "explanation/run-benchmarks.md",
}
LINK = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and the examples that live outside docs/."""
    for source, target in OUTSIDE.items():
        if source != "README.md":  # docs/index.md is the site's own first page
            files.append(File.generated(config, target, content=(ROOT / source).read_text(encoding="utf-8")))
    for path in sorted((ROOT / "examples").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and "runs" not in path.parts:
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Fill generated parts in and turn links between files of the repository into links between pages."""
    markdown = filled(markdown)
    here = page.file.src_uri
    sources = {target: source for source, target in OUTSIDE.items()}
    folder = posixpath.dirname(sources[here] if here in sources and here != "index.md" else f"docs/{here}")

    def relink(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, found[2]))
        target = OUTSIDE.get(path) or (path.removeprefix("docs/") if path.startswith(("docs/", "examples/")) else None)
        return found[0] if target is None else found[1] + posixpath.relpath(target, posixpath.dirname(here) or ".")

    return LINK.sub(relink, markdown)
