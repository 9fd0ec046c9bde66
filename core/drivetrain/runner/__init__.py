"""The runner: device-resident rows, and the one path by which every plan is run and sampled.

Door: ``Runner``, ``RunnerConfig`` (runner.py), ``allocate_caches`` (caches.py), ``plan_memory`` (memory.py).
"""
