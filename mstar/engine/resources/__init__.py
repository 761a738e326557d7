"""State with a lifecycle that outlives one forward: KV cache, positions, attention, sampler.

Every resource is a folder of one shape: ``config`` declares and loads no kernels, ``manager`` owns
the only mutable state, the other files compute. The life of a resource within one step is
``admit`` (may be refused), ``plan``, the forward that calls the plan, ``commit``.
"""
