"""Write tests/goldens/images.json: digests of what transformers' image processors make of the images of tests/helpers/images.py.

    python scripts/make_image_goldens.py

Needs Pillow and NumPy alone: its classes for Pillow are imported one by one. Run it after a change of the images.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.helpers.image_oracle import GOLDENS, digest, oracle  # noqa: E402
from tests.helpers.images import SIZES, VISIONS, picture  # noqa: E402


def main() -> None:
    argparse.ArgumentParser(description="Write tests/goldens/images.json.").parse_args()
    found = {
        family: {f"{width}x{height}": digest(oracle(family, picture(width, height))) for width, height in SIZES}
        for family in VISIONS
    }
    GOLDENS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
