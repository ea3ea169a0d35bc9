"""``python -m samir_vllm bench``: a module for each thing that is measured; they may share this folder."""
