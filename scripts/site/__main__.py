"""`make docs`: builds the site of the repository's pages in site/.

Exit code 1, with a line for each, for a link that leads nowhere, a page outside the navigation, and a page that would
fetch something from the network.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import yaml
from built import faults_of_site
from pages import ROOT, faults_of_navigation, titles, tracked, write_pages
from searched import add_flags

CONFIG = ROOT / "mkdocs.yml"


def main() -> int:
    config = yaml.safe_load(CONFIG.read_text())
    if faults := faults_of_navigation(config["nav"], tracked()):
        print(*faults, sep="\n", file=sys.stderr)
        return 1
    subprocess.run(
        [ROOT / ".venv" / "bin" / "python", ROOT / "scripts" / "reference", "--site"], check=True
    )
    write_pages(ROOT / config["docs_dir"], titles(config["nav"]))
    zensical = Path(sys.executable).with_name("zensical")
    words = [zensical, "build", "--clean", "--strict", "-f", CONFIG]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        return 1
    site = ROOT / config["site_dir"]
    flags = add_flags(site)
    faults = faults_of_site(site)
    print(*faults, sep="\n", file=sys.stderr)
    if not faults:
        pages = len(list(site.rglob("*.html")))
        print(f"{pages} pages, {flags} flags, no link that leads nowhere: {site / 'index.html'}")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
