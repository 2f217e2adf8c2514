"""Attacks a separate server in every way that it must withstand, and reports what it saw: who must be kept out, and who must not wait.

    python scripts/rehearse_attacks.py                          all, each against a fresh enough `jaxllm serve demo` on the CPU
    python scripts/rehearse_attacks.py --quick                  those that need a few seconds
    python scripts/rehearse_attacks.py --only rebinding         some
    python scripts/rehearse_attacks.py --tree ../older          the code of another checkout, for a comparison
    python scripts/rehearse_attacks.py --cost ../older .        what all checks cost a small request, two checkouts in turn

Exits with 1 if anything did not hold. docs/SECURITY.md says what is trusted. Reads /proc: Linux only.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.attacking.attack import Attack, Patience, Seen
from scripts.attacking.cost import compare_cost
from scripts.attacking.groups import ATTACKS
from scripts.attacking.target import Target
from scripts.rehearsing.server import ROOT

SEVERITIES = ("high", "medium", "low to medium", "low", "information")
COLUMNS = ("group", "severity", "attack", "seen", "bar", "held")


def in_order() -> list[Attack]:
    """All attacks, those that would mean most first."""
    return sorted(ATTACKS.values(), key=lambda each: (SEVERITIES.index(each.severity), each.group))


def carry_out(attacks: Sequence[Attack], target: Target, tell: Callable[[Attack, Seen], None]) -> bool:
    """Make these attacks. Whether the server held against all."""
    held = True
    for attack in attacks:
        seen = Seen()
        try:
            attack.run(target, seen)
        except (OSError, ValueError, KeyError, AssertionError, SystemExit) as error:  # a server that ended, or did not start
            seen.equal("the attack was carried out", f"{type(error).__name__}: {str(error)[:200]}", "to its end")
        held = held and seen.held
        tell(attack, seen)
    return held


def table_row(attack: Attack, seen: Seen) -> str:
    """A row of a Markdown table."""
    cells = (
        attack.group,
        attack.severity,
        f"{attack.name}: {attack.title}",
        seen.told(),
        seen.bars(),
        "yes" if seen.held else "NO",
    )
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def main(arguments: Sequence[str] | None = None, *, target: Target | None = None) -> int:
    """Attack, and print a table. Returns 1 if anything did not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name all attacks, make none")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these attacks, or all of a group")
    parser.add_argument("--quick", action="store_true", help="those that need nothing but HTTP, and a few seconds")
    parser.add_argument("--json", metavar="FILE", help="write what was seen")
    parser.add_argument(
        "--tree", type=Path, default=ROOT, metavar="DIR", help="the checkout that is attacked (default: this one)"
    )
    parser.add_argument(
        "--patience", type=float, default=1.0, metavar="FACTOR", help="on all limits of time, for a busy machine (default: 1)"
    )
    parser.add_argument("--cost", nargs=2, type=Path, metavar="TREE", help="compare the API server's CPU time of two checkouts")
    parser.add_argument("--rounds", type=int, default=100, metavar="N", help="of --cost, each on both (default: 100)")
    found = parser.parse_args(arguments)
    if found.cost:
        return compare_cost(found.cost[0].resolve(), found.cost[1].resolve(), found.rounds)
    chosen = in_order()
    if found.only:
        known = {*ATTACKS, *(attack.group for attack in chosen)}
        if unknown := [name for name in found.only if name not in known]:
            parser.error(f"unknown: {', '.join(unknown)}; --list names all")
        chosen = [attack for attack in chosen if attack.name in found.only or attack.group in found.only]
    if found.quick:
        chosen = [attack for attack in chosen if attack.is_quick]
    if found.list:
        for attack in chosen:
            print(f"{attack.group:<12}{attack.name:<26}{attack.title}{' (quick)' if attack.is_quick else ''}")
        return 0
    Patience.factor = found.patience
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    results: list[dict[str, Any]] = []
    began = time.monotonic()

    def tell(attack: Attack, seen: Seen) -> None:
        nonlocal began
        seconds, began = time.monotonic() - began, time.monotonic()
        print(table_row(attack, seen), flush=True)
        about = {"group": attack.group, "name": attack.name, "title": attack.title, "severity": attack.severity}
        results.append(
            {**about, "held": seen.held, "checks": [asdict(check) for check in seen.checks], "seconds": round(seconds, 1)}
        )
        if found.json:
            Path(found.json).write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)
    attacked = target or Target(found.tree.resolve())
    try:
        held = carry_out(chosen, attacked, tell)
    finally:
        attacked.close()
    wrong = [result["name"] for result in results if not result["held"]]
    print(f"\n{len(results) - len(wrong)} of {len(results)} held" + (f"; not: {', '.join(wrong)}" if wrong else ""), flush=True)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
