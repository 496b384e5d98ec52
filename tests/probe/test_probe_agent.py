"""Parts of the agent that ask torch questions, in processes of their own: what is set there stays set."""

from pathlib import Path

import pytest
from tests.warm import Started

ASKED = "import torch; {}; from flatout.probe.agent import flags_of; print(flags_of(torch)['matmul_precision'])"


@pytest.mark.parametrize(
    ("set_by", "answer"),
    [
        ("torch.set_float32_matmul_precision('high')", "high"),
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", "high"),
        ("torch.backends.cuda.matmul.fp32_precision = 'ieee'", "highest"),
    ],
)
def test_the_precision_of_products_is_known_however_it_was_set(set_by: str, answer: str, tmp_path: Path) -> None:
    out, err = Started(cwd=tmp_path, script=ASKED.format(set_by)).communicate()
    assert (out.strip(), err) == (answer, "")
