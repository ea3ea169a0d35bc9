"""``python -m samir_vllm bench``: one module for each thing that is measured; they share this folder alone."""
