"""Mesa and Triton each bring an LLVM; a process that draws and then trains must not crash on the second one."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("env", ["metaworld/reach-v3", "ogbench/cube-single-v0"])
def test_a_process_that_has_drawn_can_train(env):
    code = (
        f"from genrl.envs import make_env; e = make_env({env!r}); e.reset(seed=0); e.render(); e.close()\n"
        "import torch\n"
        "w = torch.zeros(2, requires_grad=True); o = torch.optim.AdamW([w]); w.sum().backward(); o.step()\n"
        "import torch._dynamo\n"
        "print(float(w[0].detach()) < 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "True"
