"""Read by every interpreter that has this folder on its PYTHONPATH: SGLang's own processes, too."""

import sglang_on_cpu
import sglang_steps

sglang_on_cpu.install()
sglang_steps.install()
