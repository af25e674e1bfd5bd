"""Runs what a page tells people to type, in a folder with the files that pages speak of."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from support.pages import ROOT, Block

KEY = "gr-operator"  # that the server below knows
PRELUDE = """\
set -euo pipefail
stays() { local code=0; timeout --signal=INT 5 "$@" || code=$?; test $code -eq 124; }
"""
"""`stays`: for what runs until it is stopped, and must not end by itself."""
INSTEAD = {
    r"\.venv/bin/": "",
    r"\bmake (?=\w)": f"make -n --no-print-directory -C '{ROOT}' ",
    r"\.ci/run": f"test -x '{ROOT}/.ci/run'",
    r"\bgammaray serve\b": "gammaray serve --print-config",
    r"\bgammaray top\b(?![^#\n]*--once)": "stays gammaray top",
    r"\bgammaray generate\b": "gammaray generate --repeats 1 --max-tokens 16",
    r"\bgammaray bench engine\b": "gammaray bench engine --limit 1 --max-tokens 3 --drafters ngram",
    r"gr-\.\.\.": KEY,
}
LINKED = [["X" if i == k else "NV18" for k in range(8)] for i in range(8)]
BRIDGED = [row.split() for row in ("X NV12 SYS SYS", "NV12 X SYS SYS", "SYS SYS X NODE", "SYS SYS NODE X")]
H100 = json.dumps({"gpu_name": "NVIDIA H100 80GB HBM3", "matrix": LINKED})
A100 = json.dumps({"gpu_name": "NVIDIA A100 80GB PCIe", "numa": [0, 0, 1, 1], "matrix": BRIDGED})
FILES = {  # that pages speak of, in the folder where commands run
    "config.yaml": "target: {model: smollm2-135m-instruct}\n",
    "questions.jsonl": '{"question_id": 1, "category": "qa", "turns": ["Name three rivers."]}\n',
    "box.json": A100,
    **dict.fromkeys(("a.json", "b.json", "node2.json", "pod.json"), H100),
    **dict.fromkeys(
        ("my-values.yaml", "production.yaml"), "image: {repository: registry.example.com/gammaray}\n"
    ),
}
CONFIG = f"""\
target: {{model: smollm2-135m-instruct}}
drafters:
  lookup: {{method: ngram}}
tenants:
  default: {{drafter: lookup, limits: {{max_tokens: 32}}}}
  shop: {{drafter: lookup}}
server: {{operator_keys: [{{name: ops, sha256: {hashlib.sha256(KEY.encode()).hexdigest()}}}]}}
"""


def typed(block: Block, folder: Path, url: str) -> str:
    """Runs it in `folder` and gives back what it printed. Fails the test unless its exit code is 0."""
    text = block.commands().replace("http://127.0.0.1:8000", url)
    if block.language == "python":
        client = f"from openai import OpenAI\nclient = OpenAI(base_url='{url}/v1', api_key='none')\n"
        command = [sys.executable, "-c", client * ("client" in text) + text]
    else:
        text = re.sub(r"gammaray (chat|top|tenants (?!replay)\w[\w-]*)\b", rf"\g<0> --url {url}", text)
        for pattern, instead in INSTEAD.items():
            text = re.sub(pattern, instead, text)
        command = ["timeout", "120", "bash", "-c", PRELUDE + text]
    own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "URL": url, "COLUMNS": "400"}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "GAMMARAY_OPERATOR_KEY": KEY, **own},
        input="Hi\n/exit\n",
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def masked(text: str) -> list[str]:
    """Its lines without what differs from run to run: keys, hashes, numbers, spaces."""
    bare = re.sub(r"gr-\S+|\b[0-9a-f]{64}\b|\d+(\.\d+)?", "#", text)
    return [re.sub(r"\s+", " ", line).strip() for line in bare.strip().splitlines()]
