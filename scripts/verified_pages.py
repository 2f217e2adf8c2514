"""Writes docs/verified/DEVICE.md and the README's sentence from pallas_kernels/verified.json and the sources as they stand.

python scripts/verified_pages.py                                  after an op's source changed: it then stands there as unverified
python scripts/verified_pages.py --merge DIR/verified.json        after `check_gpu.py --record-to DIR` ran on another machine
python scripts/verified_pages.py --carry BEFORE NOW               after an op's source changed but none of its kernels: files that
                                                                  `gpu_checks/lowered.py` wrote for the verified and the present source
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pallas_kernels import verified
from scripts.gpu_checks.carrying import carry
from scripts.gpu_checks.pages import write_pages
from scripts.gpu_checks.record import merge, save


def main() -> None:
    """Merge records if asked, and write all pages."""
    lines = __doc__.splitlines()
    parser = argparse.ArgumentParser(
        description=lines[0], epilog="\n".join(lines[1:]), formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--merge", metavar="FILE", type=Path, help="a verified.json with newer records")
    parser.add_argument(
        "--carry", metavar="FILE", type=Path, nargs=2, help="programs of the verified and of the present source"
    )
    args = parser.parse_args()
    records = verified.records()
    if args.merge is not None:
        for device_kind, record in json.loads(args.merge.read_text(encoding="utf-8")).items():
            records = merge(records, device_kind, record)
        save(records, verified.RECORDS)
    if args.carry is not None:
        records = carry(records, *args.carry)
        save(records, verified.RECORDS)
    for path in write_pages(records):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
