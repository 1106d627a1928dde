"""Settings for all tests."""

import os

# Waiting OpenMP threads must not spin while another process needs the core; read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
