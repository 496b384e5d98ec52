"""Reading runs and logs needs no torch."""

import subprocess
import sys

CODE = """
import sys
import flatout.insight.diagnose.runs, flatout.insight.doctor, flatout.insight.logs
print('torch' in sys.modules)
"""


def test_the_doctor_imports_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
