"""Environment of all tests: no network, one thread, a cache of their own."""

import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Trained bases and reward models are made once a session; set GENRL_CACHE to keep them between sessions.
os.environ.setdefault("GENRL_CACHE", tempfile.mkdtemp(prefix="genrl-test-cache-"))

import torch

torch.set_num_threads(1)
