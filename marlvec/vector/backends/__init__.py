"""Where envs run: in this process, in threads, in worker processes, in kernels, in pools."""
