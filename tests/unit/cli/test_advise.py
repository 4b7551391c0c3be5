"""`hpml advise --model`: what formulas can say about a model whose activations are not known."""

from __future__ import annotations

import pytest

from tests.unit.cli.support import Hpml, Shell

GPUS = "gpus: 'a100:4'"
SHAPE = "layers=2,hidden=256,sequence=64,batch=4"


@pytest.mark.parametrize(
    ("resources", "words", "code", "verdict"),
    [
        (GPUS, "1B", 0, "not known: weights, gradients and optimizer states alone need 16.8 GiB"),
        (GPUS, "7B", 1, "does not fit: weights, gradients and optimizer states alone need 117.3"),
        (GPUS, "90B", 1, "does not fit: weights, gradients and optimizer states alone need 1.5 T"),
        ("gpus: 'a100:1'", "1B", 0, "not known: weights, gradients and optimizer states alone"),
        ("memory: 8G", "10M", 0, "not known: weights, gradients and optimizer states alone need"),
        ("memory: 8G", "7B", 1, "does not fit: weights, gradients and optimizer states alone need"),
        (GPUS, f"1B,{SHAPE}", 0, "fits one GPU, with a batch up to about "),
        ("memory: 8G", f"10M,{SHAPE}", 0, "the node's memory suffices: "),
    ],
)
def test_without_activations_nothing_is_said_to_fit(
    resources: str, words: str, code: int, verdict: str, hpml: Hpml, shell: Shell
) -> None:
    """States alone show that a model does not fit, never that it fits; a note names the words."""
    text = f"name: a\ncommand: [python, train.py]\nresources: {{{resources}}}\n"
    (shell.root / "model.yaml").write_text(text)
    done = hpml("advise", "model.yaml", "--model", words)
    assert done.code == code, done
    (line,) = [line for line in done.out.splitlines() if line.startswith("verdict")]
    assert line.split(None, 1)[1].startswith(verdict)
    known = "layers" in words
    assert ("activations are not counted: give the model's shape" in done.out) is not known
    assert not known or "side by side" not in line
    told = hpml("advise", "model.yaml", "--model", words, "--json").json()
    assert told["fits"] is (False if code else True if known else None)
    assert told["counts_activations"] is known
