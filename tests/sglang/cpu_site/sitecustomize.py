"""Read by every interpreter that has this folder on its PYTHONPATH: SGLang's own processes, too."""

import ranks_on_one_gpu
import sglang_on_cpu
import sglang_steps
import untuned_kernels

sglang_on_cpu.install()
sglang_steps.install()
ranks_on_one_gpu.install()
untuned_kernels.install()
