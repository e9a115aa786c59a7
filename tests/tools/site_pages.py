"""Stages the pages of the documentation site under build/pages: `python -m tests.tools.site_pages`.

They lie there as in the repository, so that links between them need no change; README.md is the start page. Each is a
symbolic link to its source.
"""

import shutil

from tests.paths import DOCS, MODELS, ROOT
from tests.tools.generated_docs import pages

TARGET = ROOT / "build" / "pages"


def main() -> None:
    shutil.rmtree(TARGET, ignore_errors=True)
    cards = (*MODELS.glob("*/README.md"), *MODELS.glob("*/NOTICE"), *(ROOT / "training").glob("*/README.md"))
    for source in (*pages(), *DOCS.rglob("*.svg"), *DOCS.rglob("*.png"), *DOCS.glob("*.css"), *cards):
        target = TARGET / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(source)


if __name__ == "__main__":
    main()
